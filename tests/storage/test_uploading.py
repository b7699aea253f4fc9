"""Models written into a store: whole or not at all, never over what is not a model."""

import make_goldens
import numpy as np
import object_server
import pytest
import vocabularies
from commands import run_here
from conftest import write_hf_folder

import llama_jax
from llama_jax.errors import CheckpointError
from llama_jax.storage import locate, object_store

CONFIG = make_goldens.KINDS["gqa"]


@pytest.fixture
def store(monkeypatch):
    with object_server.emulated(monkeypatch) as server:
        yield server


@pytest.fixture
def model(models):
    return models["gqa"]


def same(url, params):
    found = llama_jax.load(url).params
    np.testing.assert_array_equal(found.embedding, params.embedding)
    np.testing.assert_array_equal(found.blocks.feed_forward.down, params.blocks.feed_forward.down)


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
    same(url, params)
    with pytest.raises(
        CheckpointError, match=r"s3://bucket/models/one exists; remove it, or replace it with overwrite=True"
    ):
        llama_jax.save(url, config, params)
    store.objects["models/one/model-00001-of-00002.safetensors"] = b"of a larger one"
    store.changes.clear()
    llama_jax.save(url, config, params, overwrite=True)
    assert store.changes[0] == ("DELETE", "models/one/config.json")
    assert ("DELETE", "models/one/model-00001-of-00002.safetensors") in store.changes
    same(url, params)
    store.objects["models/one/notes.txt"] = b"mine"
    with pytest.raises(CheckpointError, match=r"holds more than a model \(notes.txt\)"):
        llama_jax.save(url, config, params, overwrite=True)


def test_a_file_is_one_object(store, model):
    config, params = model
    llama_jax.save("s3://bucket/one.gguf", config, params)
    assert store.changes == [("PUT", "one.gguf")]
    same("s3://bucket/one.gguf", params)
    with pytest.raises(CheckpointError, match=r"s3://bucket/one.gguf exists"):
        llama_jax.save("s3://bucket/one.gguf", config, params)
    llama_jax.save("s3://bucket/one.gguf", config, params, overwrite=True)


def test_a_large_file_goes_in_parts(store, model, monkeypatch):
    config, params = model
    monkeypatch.setattr(object_store, "MIN_PART_BYTES", 5 << 10)
    llama_jax.save("s3://bucket/one.gguf", config, params)
    assert store.changes == [("PARTS", "one.gguf")]
    same("s3://bucket/one.gguf", params)


@pytest.mark.parametrize("fault", [500, 403])
@pytest.mark.parametrize("written", [0, 1])
def test_what_cannot_be_written_leaves_nothing(fault, written, store, model):
    config, params = model
    store.write_fault = lambda key, changes: fault if changes >= written else None
    with pytest.raises(
        CheckpointError, match=r"s3://bucket/one cannot be written \((no whole answer|the store does not)"
    ) as named:
        llama_jax.save("s3://bucket/one", config, params)
    assert "\n" not in str(named.value)
    assert store.objects == {}


def test_where_nothing_may_be_looked_at(store, model):
    config, params = model
    with pytest.raises(CheckpointError, match=r"s3://other/one cannot be read: there is no bucket s3://other"):
        llama_jax.save("s3://other/one", config, params)


def test_answers_that_are_lost_are_asked_for_again(store, model):
    """Of what is created only where nothing is, the second try sees what the first has written."""
    config, params = model
    lost = set()

    def fault(key, changes):
        first = key not in lost
        lost.add(key)
        return "lost" if first else None

    store.write_fault = fault
    llama_jax.save("s3://bucket/one", config, params)
    same("s3://bucket/one", params)


def test_another_that_writes_there_is_noticed(store, model):
    config, params = model

    def fault(key, changes):
        if key.endswith(".safetensors"):
            store.objects["one/config.json"] = b"{}"

    store.write_fault = fault
    with pytest.raises(CheckpointError, match="another has written there meanwhile"):
        llama_jax.save("s3://bucket/one", config, params)
    assert store.objects["one/config.json"] == b"{}"


def test_what_is_created_is_new(store):
    view = locate("s3://bucket").view
    view.create("lease", b"mine")
    with pytest.raises(FileExistsError, match="such an object already"):
        view.create("lease", b"yours")
    assert store.objects == {"lease": b"mine"}
    view.delete("lease")
    assert store.objects == {}


def test_formats_and_places_that_are_not_written(model):
    config, params = model
    for format in ("orbax", "llama2c"):
        with pytest.raises(CheckpointError, match=f"{format} is written to a path of this machine"):
            llama_jax.save("s3://bucket/one", config, params, format=format)
    with pytest.raises(CheckpointError, match=r"hf://org/name is on the hub: .* upload that with `hf upload`"):
        llama_jax.save("hf://org/name", config, params)


def test_convert(store, tmp_path, model):
    folder = write_hf_folder(tmp_path / "model", CONFIG)
    source = store.upload(folder, "source")
    done = run_here("convert", source, "s3://bucket/copy.gguf")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("s3://bucket/copy.gguf: 0.1 MB in")
    same("s3://bucket/copy.gguf", model[1])
    inside = run_here("convert", source, "s3://bucket/source/copy")
    assert inside.returncode == 2
    assert "is inside the model that is read" in inside.stderr
