"""The Hugging Face hub, by its own library, before a server that answers as the hub does."""

import pytest
from hub_server import COMMIT, serving

from llama_jax.storage import locate

CONTENT = {"config.json": b"{}", "model.safetensors": bytes(range(256)), "original/tokenizer.model": b"words"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serving(monkeypatch, tmp_path / "cache") as server:
        server.content = CONTENT
        yield server


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


def test_what_the_hub_has_in_its_cache_is_read_there(hub, tmp_path):
    there = tmp_path / "cache/models--org--name/snapshots" / COMMIT
    there.mkdir(parents=True)
    (there / "model.safetensors").write_bytes(CONTENT["model.safetensors"])
    with (locate("hf://org/name") / "model.safetensors").open() as file:
        assert file.read() == CONTENT["model.safetensors"]
    assert hub.ranges == []


def test_a_hub_that_fails_is_named(hub):
    hub.fault = 500
    with pytest.raises(OSError, match="no whole answer in 2 tries, the last: the hub answers 500") as named:
        (locate("hf://org/name") / "model.safetensors").open().read()
    assert named.value.filename == "hf://org/name/model.safetensors"
    hub.fault = 403
    with pytest.raises(PermissionError, match=r"the hub does not allow it \(403\)"):
        (locate("hf://org/name") / "model.safetensors").open().read()


def test_a_repository_of_data(hub):
    found = locate("hf://datasets/org/texts/config.json")
    assert (found.view.root, found.key) == ("hf://datasets/org/texts", "config.json")
    with found.open() as file:
        assert file.read() == CONTENT["config.json"]
    assert found.view.look("config.json").version == COMMIT
    assert {path.name for path in found.parent.iterdir()} == {"config.json", "model.safetensors", "original"}
