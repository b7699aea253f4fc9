"""Models, vocabularies and adapters in a store: read as from a disk, no more than is needed, and written whole or not."""

import shutil
import time

import make_format_goldens as formats
import make_goldens
import object_server
import pytest
import quantized_folders
import vocabularies
from commands import run_here
from conftest import same, write_hf_folder
from obstore.exceptions import GenericError

import llama_jax
from llama_jax.errors import CheckpointError, TokenizerError
from llama_jax.formats.device_fill import STORED_READ_BYTES
from llama_jax.storage import object_store
from llama_jax.storage.object_store import ObjectBucket, open_bucket

CONFIG = make_goldens.KINDS["gqa"]


@pytest.fixture
def store(monkeypatch):
    with object_server.emulated(monkeypatch) as server:
        yield server


@pytest.fixture
def uploaded(store, tmp_path):
    """A model on the disk and the same in the store."""
    folder = write_hf_folder(tmp_path / "model", CONFIG)
    return folder, store.upload(folder, "model")


def write_gguf(path):
    formats.write_gguf(path, formats.SMALL, make_goldens.random_tensors(formats.SMALL))


def quantized(kind):
    return lambda path: quantized_folders.write_folder(path, kind)


def copied(name):
    def copy(path):
        source = formats.FORMATS / name
        shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)

    return copy


WRITERS = {
    "folder": lambda path: write_hf_folder(path, CONFIG),
    "model.gguf": write_gguf,
    "model.bin": lambda path: formats.write_llama2c(path, CONFIG, make_goldens.random_tensors(CONFIG), 1),
    "pytorch-sharded": copied("pytorch-sharded"),
    "meta-2": copied("meta-2"),
    "ckpt.pt": copied("ckpt.pt"),
    "gptq": quantized("gptq"),
    "awq": quantized("awq"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_model_is_the_same_as_from_a_disk(name, tmp_path, store):
    path = tmp_path / name
    if "." not in name and name not in ("folder", "pytorch-sharded", "meta-2"):
        path.mkdir()
    WRITERS[name](path)
    url = store.upload(path, f"models/{name}")
    local, stored = llama_jax.load(path), llama_jax.load(url)
    assert stored.config == local.config
    same(stored.params, local.params)


def test_each_byte_is_fetched_once(store, uploaded):
    folder, url = uploaded
    llama_jax.load(url)
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size * 0.99 < store.sent() < size * 1.05 + 4096  # headers are read twice
    assert [answer.key for answer in store.answers if answer.method == "LIST"] == ["model/"]
    assert max(answer.sent for answer in store.answers) <= STORED_READ_BYTES


def test_google_storage(tmp_path, store, monkeypatch):
    key = tmp_path / "key.json"
    key.write_text(object_server.google_key(store))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(key))
    folder = write_hf_folder(tmp_path / "model", CONFIG)
    url = store.upload(folder, "a/model").replace("s3://", "gs://")
    same(llama_jax.load(url).params, llama_jax.load(folder).params)


def test_vocabularies(tmp_path, store):
    (tmp_path / "tokenizer.model").write_bytes(vocabularies.sentencepiece_model())
    url = store.upload(tmp_path, "words")
    for place in (url, f"{url}/tokenizer.model"):
        found = llama_jax.load_tokenizer(place)
        assert found.encode("once upon a time") == llama_jax.load_tokenizer(tmp_path).encode("once upon a time")
    with pytest.raises(TokenizerError, match=r"s3://bucket/none does not exist"):
        llama_jax.load_tokenizer(f"s3://{object_server.BUCKET}/none")


@pytest.mark.parametrize("fault", [429, 500, 503, "reset", "cut"])
def test_answers_that_go_wrong_are_asked_for_again(fault, store, uploaded):
    folder, url = uploaded
    store.fault = lambda key, before: fault if before % 3 == 0 else None
    same(llama_jax.load(url).params, llama_jax.load(folder).params)


def failing(store, fault):
    store.fault = lambda key, before: fault if key.endswith(".safetensors") else None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (500, r"s3://bucket/model/model.safetensors cannot be read: the request failed after retries \(500"),
        ("reset", r"model.safetensors cannot be read: the request failed after retries"),
        ("short", r"model.safetensors cannot be read: the request failed after retries"),
        (403, r"s3://bucket/model/model.safetensors cannot be read: the store denies access \(403 AccessDenied"),
        (400, r"model.safetensors cannot be read: the store refused the request \(400"),
    ],
)
def test_answers_that_stay_wrong_are_named(fault, message, store, uploaded):
    _, url = uploaded
    failing(store, fault)
    with pytest.raises(CheckpointError, match=message) as named:
        llama_jax.load(url)
    assert "\n" not in str(named.value)
    assert len(str(named.value)) < 400


@pytest.mark.slow
def test_slow_answers(store, uploaded, monkeypatch):
    """A byte now and then is no answer: what is slow once is asked for again, and what stays so is named in its time."""
    monkeypatch.setattr(object_store, "CLIENT_OPTIONS", object_store.CLIENT_OPTIONS | {"timeout": "500ms"})
    folder, url = uploaded
    failing(store, "slow")
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"^s3://bucket/model/model.safetensors cannot be read: the request failed"):
        llama_jax.load(url)
    assert time.monotonic() - began < 10
    store.asked.clear()
    store.fault = lambda key, before: "slow" if key.endswith(".safetensors") and before in (1, 4) else None
    same(llama_jax.load(url).params, llama_jax.load(folder).params)


def test_what_is_not_there(store):
    with pytest.raises(CheckpointError, match=r"^s3://bucket/none does not exist"):
        llama_jax.load("s3://bucket/none")
    with pytest.raises(CheckpointError, match=r"s3://other/x cannot be read: there is no bucket s3://other"):
        llama_jax.load("s3://other/x")


@pytest.mark.parametrize("given", ["nowhere", "http://", "https://:80", "ftp://host"])
def test_an_endpoint_that_is_none(given, monkeypatch):
    """At which obstore would panic."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", given)
    with pytest.raises(
        llama_jax.UserError, match=rf"AWS_ENDPOINT_URL='{given}' must be a URL with a host, such as https://"
    ):
        open_bucket("s3://bucket")


def test_without_credentials():
    def ask():
        raise GenericError(
            "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 2ms\n\nDebug source"
        )

    with pytest.raises(PermissionError, match="no credentials were found: set AWS_ACCESS_KEY_ID") as named:
        ObjectBucket("s3://bucket", None)._call("x", ask)
    assert named.value.filename == "s3://bucket/x"


def test_what_is_replaced_meanwhile_is_noticed(store, uploaded):
    _, url = uploaded
    opened = llama_jax.formats.open_checkpoint(url)
    store.objects["model/model.safetensors"] = bytes(len(store.objects["model/model.safetensors"]))
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read: the object was replaced while"):
        next(iter(opened.tensors.values())).read(0, 1)


def test_a_header_that_is_damaged(store, uploaded):
    _, url = uploaded
    content = store.objects["model/model.safetensors"]
    for damaged in (content[:-1], content[:100], b"x" * 100, b""):
        store.objects["model/model.safetensors"] = damaged
        with pytest.raises(CheckpointError, match=r"s3://bucket/model/model.safetensors"):
            llama_jax.load(url)


def test_of_orbax_the_steps_of_runs_are_read(store):
    store.objects |= {"run/checkpoints/4/about/config.json": b"{}", "saved/config.json": b"{}"}
    store.objects["saved/params/_CHECKPOINT_METADATA"] = b"{}"
    with pytest.raises(CheckpointError, match=r"^s3://bucket/saved.* is an orbax checkpoint outside of a run, which is"):
        llama_jax.load("s3://bucket/saved")
    with pytest.raises(CheckpointError, match=r"^s3://bucket/run/checkpoints holds no checkpoint"):  # but half of one
        llama_jax.load("s3://bucket/run")


def test_commands(tmp_path, store, uploaded):
    folder, url = uploaded
    shown, there = run_here("inspect", url, "--tensors"), run_here("inspect", folder, "--tensors")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.replace(url, str(folder)) == there.stdout
    assert store.sent() < 20_000  # the headers
    assert run_here("convert", url, tmp_path / "copy").returncode == 0
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() != b""
    same(llama_jax.load(tmp_path / "copy").params, llama_jax.load(folder).params)


def test_other_models_beside_are_left_alone(tmp_path, store):
    """Of a file its own name is asked for, and of the folder it lies in what it may need."""
    write_gguf(tmp_path / "model.gguf")
    url = store.upload(tmp_path / "model.gguf", "many/model.gguf")
    store.objects |= {f"many/other-{i}.txt": b"GGUF" for i in range(9)}
    asked = lambda: {answer.key for answer in store.answers if answer.method == "GET"}
    llama_jax.load(url)
    llama_jax.load("s3://bucket/many")
    assert asked() == {"many/model.gguf"}
    store.objects |= {f"many/other-{i}.gguf": b"GGUF" for i in range(2)}
    with pytest.raises(
        CheckpointError, match=r"s3://bucket/many holds several models \(model.gguf, other-0.gguf, other-1.gguf"
    ):
        llama_jax.load("s3://bucket/many")


# -- models written into a store: whole or not at all, never over what is not a model -----------------------------------


@pytest.fixture
def model(models):
    return models["gqa"]


def test_a_folder_is_whole_when_its_settings_are_there(store, model, tmp_path):
    config, params = model
    (tmp_path / "tokenizer.model").write_bytes(vocabularies.sentencepiece_model())
    tokenizer = llama_jax.load_tokenizer(tmp_path)
    url = "s3://bucket/models/one"
    if tokenizer.vocab_size > config.vocab_size:
        tokenizer = None
    llama_jax.save(url, config, params, tokenizer)
    assert store.changes[-1] == ("PUT", "models/one/config.json")
    assert {"models/one/config.json", "models/one/model.safetensors"} <= store.objects.keys()
    same(llama_jax.load(url).params, params)
    with pytest.raises(CheckpointError, match=r"s3://bucket/models/one exists; remove it, or replace it with --overwrite"):
        llama_jax.save(url, config, params)
    store.objects["models/one/model-00001-of-00002.safetensors"] = b"of a larger one"
    store.changes.clear()
    llama_jax.save(url, config, params, overwrite=True)
    assert store.changes[0] == ("DELETE", "models/one/config.json")
    assert ("DELETE", "models/one/model-00001-of-00002.safetensors") in store.changes
    same(llama_jax.load(url).params, params)
    store.objects["models/one/notes.txt"] = b"mine"
    with pytest.raises(CheckpointError, match=r"contains other files \(notes.txt\)"):
        llama_jax.save(url, config, params, overwrite=True)


def test_a_file_is_one_object(store, model):
    config, params = model
    llama_jax.save("s3://bucket/one.gguf", config, params)
    assert store.changes == [("PUT", "one.gguf")]
    same(llama_jax.load("s3://bucket/one.gguf").params, params)
    with pytest.raises(CheckpointError, match=r"s3://bucket/one.gguf exists"):
        llama_jax.save("s3://bucket/one.gguf", config, params)
    llama_jax.save("s3://bucket/one.gguf", config, params, overwrite=True)


def test_a_large_file_goes_in_parts(store, model, monkeypatch):
    config, params = model
    monkeypatch.setattr(object_store, "MIN_PART_BYTES", 5 << 10)
    llama_jax.save("s3://bucket/one.gguf", config, params)
    assert store.changes == [("PARTS", "one.gguf")]
    same(llama_jax.load("s3://bucket/one.gguf").params, params)


@pytest.mark.parametrize("fault", [500, 403])
@pytest.mark.parametrize("written", [0, 1])
def test_what_cannot_be_written_leaves_nothing(fault, written, store, model):
    config, params = model
    store.write_fault = lambda key, changes: fault if changes >= written else None
    with pytest.raises(
        CheckpointError, match=r"s3://bucket/one cannot be written \((the request failed|the store denies)"
    ) as named:
        llama_jax.save("s3://bucket/one", config, params)
    assert "\n" not in str(named.value)
    assert store.objects == {}


def test_answers_that_are_lost_are_asked_for_again(store, model):
    config, params = model
    lost = {"one/config.json"}  # which is created once: a second attempt would find what the first one wrote

    def fault(key, changes):
        first = key not in lost
        lost.add(key)
        return "lost" if first else None

    store.write_fault = fault
    llama_jax.save("s3://bucket/one", config, params)
    same(llama_jax.load("s3://bucket/one").params, params)


def test_another_that_writes_there_is_noticed(store, model):
    config, params = model

    def fault(key, changes):
        if key.endswith(".safetensors"):
            store.objects["one/config.json"] = b"{}"

    store.write_fault = fault
    with pytest.raises(CheckpointError, match="another writer wrote there meanwhile"):
        llama_jax.save("s3://bucket/one", config, params)
    assert store.objects["one/config.json"] == b"{}"


def test_formats_and_places_that_are_not_written(model):
    config, params = model
    for format in ("orbax", "llama2c"):
        with pytest.raises(CheckpointError, match=f"{format} can only be written to a local path"):
            llama_jax.save("s3://bucket/one", config, params, format=format)
    with pytest.raises(CheckpointError, match=r"hf://org/name is on the Hub: .* upload that with `hf upload`"):
        llama_jax.save("hf://org/name", config, params)


def test_convert_into_a_store(store, tmp_path, model):
    folder = write_hf_folder(tmp_path / "model", CONFIG)
    source = store.upload(folder, "source")
    done = run_here("convert", source, "s3://bucket/copy.gguf")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("s3://bucket/copy.gguf: 0.1 MB in")
    same(llama_jax.load("s3://bucket/copy.gguf").params, model[1])
    inside = run_here("convert", source, "s3://bucket/source/copy")
    assert inside.returncode == 2
    assert "is inside the model being read" in inside.stderr
