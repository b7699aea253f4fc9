"""What is downloaded of a repository of the hub, what is read of it by ranges, and what is said where nothing can be."""

import json
import re

import pytest
from commands import run_here
from hub_server import COMMIT, serving

from llama_jax.errors import CheckpointError
from llama_jax.formats.hub_download import fetch
from llama_jax.formats.loading import bundled
from llama_jax.storage import locate

INDEX = json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}).encode()
SHARDS = {"model.safetensors.index.json": INDEX, "model-1-of-2.safetensors": b"1", "model-2-of-2.safetensors": b"2"}
VOCABULARY = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}
FOLDER = {"config.json": b"{}", **VOCABULARY}
NOT_READ = {"README.md": b"#", "flax_model.msgpack": b"f", "training_args.bin": b"t", "runs/events": b"e"}
PICKLED = {"pytorch_model.bin": b"p"}
META = {"params.json": b"{}", "consolidated.00.pth": b"0", "consolidated.01.pth": b"1", "tokenizer.model": b"t"}
SPLIT = {f"big-0000{part}-of-00002.gguf": b"g" for part in (1, 2)}
ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a"}
CONTENT = {"config.json": b"{}", "model.safetensors": bytes(range(256)), "original/tokenizer.model": b"words"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serving(monkeypatch, tmp_path / "cache") as server:
        server.content = CONTENT
        yield server


def files_in(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("read", "beside"),
    [
        (FOLDER | SHARDS, NOT_READ | PICKLED | {"consolidated.safetensors": b"twice"}),
        (FOLDER | {"model.safetensors": b"m", "original/tokenizer.model": b"o"}, {"original/consolidated.00.pth": b"twice"}),
        (FOLDER | PICKLED, NOT_READ),
        (META, NOT_READ),
        (SPLIT, NOT_READ | {"config.json": b"{}"}),
        ({"stories.bin": b"s", **VOCABULARY}, NOT_READ),
        (ADAPTER, NOT_READ | {"tokenizer.json": b"{}"}),
        (VOCABULARY, NOT_READ),
    ],
    ids=["sharded", "single", "pickled", "meta", "split gguf", "llama2.c", "adapter", "vocabulary"],
)
def test_only_what_is_read_is_downloaded(hub, tmp_path, read, beside):
    hub.content = read | beside
    found = fetch("org/name", folder=tmp_path / "out")
    there = files_in(tmp_path / "out")
    assert {name: content for name, content in there.items() if not name.startswith(".cache/")} == read
    assert (found.files, found.size) == (len(read), sum(map(len, read.values())))
    alone = next((name for name in read if re.search(r"(-00001-of-00002\.gguf|stories\.bin)$", name)), "")
    assert found.path == tmp_path / "out" / alone


def test_a_model_of_several_in_a_repository(hub, tmp_path):
    hub.content = {"small.gguf": b"s", "other/model.gguf": b"o", **SPLIT}
    with pytest.raises(
        CheckpointError, match=r"several models; pass one of them, such as hf://org/name/.*: .*small.gguf \(0.0 GB\)"
    ):
        fetch("org/name")
    assert fetch("org/name/small.gguf", folder=tmp_path / "a").path == tmp_path / "a/small.gguf"
    assert fetch("hf://org/name/other/", folder=tmp_path / "a").path == tmp_path / "a/other/model.gguf"
    found = fetch("org/name@main/big-00001-of-00002.gguf")
    assert files_in(found.path.parent) == SPLIT


def test_a_fetched_model_is_generated_from(hub, tmp_path):
    """By the path that is printed, and by its URL, which finds the files in the cache."""
    hub.content = {path.name: path.read_bytes() for path in bundled().iterdir() if path.is_file()} | NOT_READ
    done = run_here("fetch", "org/name")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "cache/models--org--name/snapshots" / COMMIT
    assert done.stdout == f"{folder}\n"
    assert "pass this path to --model" in done.stderr
    for model in (folder, "hf://org/name"):
        assert run_here("inspect", model, "--json").returncode == 0
    assert hub.ranges == []
    assert run_here("fetch", "org/name").stdout == done.stdout


def test_what_cannot_be_fetched_is_said_in_one_line(hub):
    hub.content = NOT_READ
    for arguments, message in (
        (["name"], "'name' is not a repository of the Hub; pass ORGANIZATION/NAME"),
        (["org/private"], "hf://org/private cannot be fetched: there is no such repository, or it is private: log in with"),
        (["org/gated"], "its license must be accepted first: accept it at http"),
        (["org/name", "--revision", "none"], "hf://org/name@none cannot be fetched: the repository has no such revision"),
        (["org/name@a", "--revision", "b"], "names the revision a, but --revision is b; pass one of them"),
        (["org/name/none.gguf"], "hf://org/name/none.gguf: there is no such file or folder in the repository"),
        (["org/name"], "hf://org/name holds no supported model"),
    ):
        done = run_here("fetch", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


def test_no_network(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    with pytest.raises(CheckpointError, match=r"hf://org/name cannot be fetched: the Hub did not respond \(.*refused"):
        fetch("org/name")


# -- read by ranges ----------------------------------------------------------------------------------------------------


def test_a_repository_is_read_by_ranges_of_one_commit(hub):
    folder = locate("hf://org/name")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "original"]
    assert (folder / "original").is_dir()
    assert (folder / "original/tokenizer.model").is_file()
    assert not (folder / "tokenizer.json").exists()
    weights = locate("hf://org/name@main/model.safetensors")
    assert weights.is_file()
    assert weights.stat().st_size == 256
    with weights.open("rb", buffering=0) as file:
        file.seek(100)
        assert file.read(8) == CONTENT["model.safetensors"][100:108]
    assert hub.ranges == [("model.safetensors", 100, 108)]
    assert not locate("hf://org/name/none").exists()


def test_a_hub_that_fails_is_named(hub):
    hub.fault = 500
    with pytest.raises(OSError, match="the Hub responded with 500") as named:
        (locate("hf://org/name") / "model.safetensors").open().read()
    assert named.value.filename == "hf://org/name/model.safetensors"
    hub.fault = 403
    with pytest.raises(PermissionError, match=r"the Hub denies access \(403\)"):
        (locate("hf://org/name") / "model.safetensors").open().read()
