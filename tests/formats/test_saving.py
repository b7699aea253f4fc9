"""Files out: round trips are exact, and a file is there whole or not at all."""

import contextlib
import errno
import json
import os

import jax.numpy as jnp
import make_goldens
import numpy as np
import pytest
from conftest import params_of, same, write_hf_folder
from make_format_goldens import FORMATS, SMALL, WIDE
from safetensors.numpy import load_file

import llama_jax
from llama_jax.errors import CheckpointError, TokenizerError
from llama_jax.formats import convert, huggingface, open_checkpoint, save
from llama_jax.formats.build_params import WrittenTensor
from llama_jax.tokenizers.sentencepiece import train_bpe

KINDS = make_goldens.KINDS
FLOATS = ("float32", "bfloat16", "float16")
FOR_LLAMA2C = ["gqa", "mha", "mqa", "one_head", "tied"]  # the others have settings that the format cannot hold
ROUND_TRIPS = [
    *((format, kind, dtype) for format in ("safetensors", "gguf") for kind in KINDS for dtype in FLOATS),
    *(("llama2c", kind, "float32") for kind in FOR_LLAMA2C),
    *(("orbax", kind, dtype) for kind in ("gqa", "tied") for dtype in ("float32", "bfloat16")),
]


@pytest.mark.parametrize(
    ("format", "kind", "dtype"),
    [pytest.param(*x, marks=[pytest.mark.slow] * (x[2] == "float16" and x[1] not in ("gqa", "tied"))) for x in ROUND_TRIPS],
)
def test_round_trip(format, kind, dtype, tmp_path):
    config = KINDS[kind]
    params = params_of(config, make_goldens.random_tensors(config), jnp.dtype(dtype))
    save(tmp_path / "model", config, params, format=format)
    # By default float16 is computed in float32 on a CPU.
    found, read, _ = llama_jax.load(tmp_path / "model", "float16" if dtype == "float16" else None)
    assert found == config
    same(read, params)
    assert os.listdir(tmp_path) == ["model"]
    if format == "gguf":  # which stores vectors in float32
        kinds = {name: tensor.storage_type for name, tensor in open_checkpoint(tmp_path / "model").tensors.items()}
        stored = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
        assert (kinds["output_norm.weight"], kinds["token_embd.weight"]) == ("F32", stored)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - set(FOR_LLAMA2C)))
def test_what_llama2c_cannot_hold(kind, tmp_path, models):
    with pytest.raises(CheckpointError, match=r"cannot be stored in llama2.c's format"):
        save(tmp_path / "model.bin", *models[kind], format="llama2c")
    assert not os.listdir(tmp_path)


def test_convert_dequantizes(tmp_path):
    convert(FORMATS / "q4_k_m.gguf", tmp_path / "plain")
    same(llama_jax.load(tmp_path / "plain").params, llama_jax.load(FORMATS / "q4_k_m.gguf", "float32").params)
    convert(FORMATS / "q4_k_m.gguf", tmp_path / "half", dtype="bfloat16")
    same(llama_jax.load(tmp_path / "half").params, llama_jax.load(FORMATS / "q4_k_m.gguf", "bfloat16").params)


def test_q8_0_is_what_the_gguf_package_makes_of_each_tensor(tmp_path):
    from gguf import GGMLQuantizationType, GGUFReader, quants
    from make_format_goldens import GGUF, renamed

    tensors = make_goldens.random_tensors(WIDE)
    save(tmp_path / "model.gguf", WIDE, params_of(WIDE, tensors), format="gguf", dtype="q8_0")
    want = renamed(WIDE, tensors, GGUF)
    found = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    assert found.keys() == want.keys()
    for name, array in want.items():
        stored = array if array.ndim == 1 else quants.quantize(array, GGMLQuantizationType.Q8_0)
        np.testing.assert_array_equal(found[name].data, stored)


def test_several_files_and_an_index(tmp_path):
    opened = open_checkpoint(FORMATS / "pytorch")
    (tmp_path / "model").mkdir()
    huggingface.write_huggingface(tmp_path / "model", opened, None, largest_file=9000)
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) > 2
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    tensors = {name: array for file in files for name, array in load_file(tmp_path / "model" / file).items()}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    for file in files:
        assert sum(array.nbytes for array in load_file(tmp_path / "model" / file).values()) <= 9000
    same(llama_jax.load(tmp_path / "model").params, params_of(SMALL, make_goldens.random_tensors(SMALL)))


def test_what_is_there_is_kept_unless_asked(tmp_path, models):
    for format in ("safetensors", "gguf"):
        path = tmp_path / format
        save(path, *models["gqa"], format=format)
        with pytest.raises(CheckpointError, match=f"{format} exists; remove it"):
            save(path, *models["mha"], format=format)
        assert open_checkpoint(path).config == KINDS["gqa"]
        save(path, *models["mha"], format=format, overwrite=True)
        assert open_checkpoint(path).config == KINDS["mha"]
    assert sorted(os.listdir(tmp_path)) == ["gguf", "safetensors"]


def test_a_model_is_not_written_over_itself(hf_folder):
    inside = hf_folder / "inside" / "model"
    for path, format in (
        (hf_folder, "safetensors"),
        (hf_folder.parent, "safetensors"),
        (inside, "orbax"),
        (hf_folder / "model.bin", "gguf"),
    ):
        with pytest.raises(CheckpointError, match="is, contains or is inside the model being read"):
            convert(hf_folder, path, format=format, overwrite=True)
        assert sorted(os.listdir(hf_folder)) == ["config.json", "model.safetensors"]
    llama_jax.load(hf_folder)


def test_only_a_model_is_replaced(tmp_path, models):
    folder = tmp_path / "folder"
    folder.mkdir()
    save(folder, *models["gqa"])  # an empty folder makes room
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"contains other files \(thesis.txt\)"):
        save(folder, *models["gqa"], overwrite=True)
    with pytest.raises(CheckpointError, match="is a folder, but this format is a file"):
        save(folder, *models["gqa"], format="llama2c", overwrite=True)
    with pytest.raises(CheckpointError, match="is a file, but this format is a folder"):
        save(folder / "thesis.txt", *models["gqa"], overwrite=True)
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_links_and_pipes(tmp_path, models):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save(tmp_path / "link", *models["gqa"])
    assert (tmp_path / "link").is_symlink()
    assert open_checkpoint(tmp_path / "real").config == KINDS["gqa"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        save(tmp_path / "pipe", *models["gqa"], format="gguf", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "real"]


def test_the_vocabulary_of_another_model_is_not_taken_for_this_ones(stories, tmp_path):
    """A llama2.c file is read with the tokenizer.model beside it, and an id stands for another text there."""
    config, params, tokenizer = stories
    lines = [f"The {word} of {word}land saw {word}s and {word}ers." for word in ("llama", "goat", "raven", "tiger", "moose")]
    other = train_bpe(lines * 20, config.vocab_size)
    folder = tmp_path / "shared"
    folder.mkdir()
    other.save(folder)
    before = (folder / "tokenizer.model").read_bytes()
    there = sorted(os.listdir(folder))
    source = tmp_path / "hf"
    save(source, config, params, tokenizer)
    for write in (
        lambda: save(folder / "m.bin", config, params, tokenizer, format="llama2c"),
        lambda: convert(source, folder / "m.bin", format="llama2c"),
    ):
        with pytest.raises(CheckpointError, match=r"tokenizer.model is not this model's vocabulary"):
            write()
    assert sorted(os.listdir(folder)) == there
    assert (folder / "tokenizer.model").read_bytes() == before
    for _ in range(2):  # beside its own it may lie, also when it is written again
        convert(source, tmp_path / "alone" / "m.bin", format="llama2c", overwrite=True)
    save(tmp_path / "alone" / "second.bin", config, params, tokenizer, format="llama2c")


def test_the_vocabulary_goes_with_the_weights(stories, tmp_path):
    config, params, tokenizer = stories
    for format, name in (("safetensors", "hf"), ("gguf", "m.gguf"), ("llama2c", "c/m.bin"), ("orbax", "o")):
        save(tmp_path / name, config, params, tokenizer, format=format)
        read = llama_jax.load(tmp_path / name).tokenizer
        assert read.encode("Once upon a time") == tokenizer.encode("Once upon a time")


@pytest.mark.parametrize("name", ["hf", "m.gguf", "orbax"])
def test_convert_with_another_vocabulary(name, stories, tmp_path, caplog):
    config, params, tokenizer = stories
    format = "orbax" if name == "orbax" else None
    convert(write_hf_folder(tmp_path / "none", KINDS["gqa"]), tmp_path / "none.gguf")
    assert "none.gguf has no vocabulary, so llama.cpp cannot open it" in caplog.text
    caplog.clear()
    unknown = write_unknown_vocabulary(tmp_path / "unknown.gguf", config, params, tokenizer)
    tokenizer.save(tmp_path)
    with pytest.raises(TokenizerError, match=r"model='other' must be .*; load or convert the model with its own"):
        convert(unknown, tmp_path / name, format=format)
    convert(unknown, tmp_path / name, format=format, tokenizer=tmp_path / "tokenizer.model")
    found = llama_jax.load(tmp_path / name)
    assert found.tokenizer.encode("Once upon a time") == tokenizer.encode("Once upon a time")
    same(found.params, params)
    assert not caplog.text
    with pytest.warns(UserWarning, match="has 512 tokens, but the model's embedding 96 rows"):
        convert(tmp_path / "none", tmp_path / "larger" / name, format=format, tokenizer=tmp_path)


def write_unknown_vocabulary(path, config, params, tokenizer):
    """A GGUF with another name for the kind of its vocabulary, of the same length."""
    save(path, config, params, tokenizer)
    key = b"tokenizer.ggml.model" + (8).to_bytes(4, "little") + (5).to_bytes(8, "little")
    assert key + b"llama" in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(key + b"llama", key + b"other"))
    return path


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_llama2c_file_leaves_its_neighbours_settings(name, stories, tmp_path):
    theirs = tmp_path / name
    theirs.write_text('{"eos_token_id": 7}')
    with pytest.raises(CheckpointError, match=f"{name} belongs to another model, .*; write into another folder"):
        save(tmp_path / "model.bin", *stories, format="llama2c")
    assert os.listdir(tmp_path) == [name]
    assert theirs.read_text() == '{"eos_token_id": 7}'
    theirs.unlink()
    save(tmp_path / "model.bin", *stories, format="llama2c")
    first = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.suffix != ".bin"}
    assert len(first) == 3
    (tmp_path / "tokenizer.model").unlink()
    save(tmp_path / "other.bin", *stories, format="llama2c")
    for path in tmp_path.glob("*.json"):
        assert path.stat().st_mtime_ns == first[path.name], "the same settings are not written again"
    assert (tmp_path / "tokenizer.model").exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("format", ["safetensors", "gguf", "llama2c"])
def test_two_that_write_one_path(format, overwrite, tmp_path, models):
    """The second begins and ends while the first writes: without leave to overwrite its model stays, else the first's."""

    def meanwhile(pieces):
        yield from pieces
        save(tmp_path / "model", *models["mha"], format=format)

    with (
        contextlib.nullcontext()
        if overwrite
        else pytest.raises(CheckpointError, match="model exists; remove it, or replace")
    ):
        save(tmp_path / "model", *models["gqa"], format=format, overwrite=overwrite, progress=meanwhile)
    same(llama_jax.load(tmp_path / "model").params, models["gqa" if overwrite else "mha"][1])
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("format", ["safetensors", "gguf", "llama2c"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_when_writing_fails(format, error, tmp_path, monkeypatch, models):
    def fail(self, dtype):
        if self.part == "final_norm":
            raise error
        return whole(self, dtype)

    whole = WrittenTensor.rows
    save(tmp_path / "model", *models["gqa"], format=format)
    monkeypatch.setattr(WrittenTensor, "rows", fail)
    for name, overwrite in (("other", False), ("model", True)):
        expected = (CheckpointError, r"cannot be written \(No space left on device\); the disk is full")
        with (
            pytest.raises(expected[0], match=expected[1]) if isinstance(error, OSError) else pytest.raises(KeyboardInterrupt)
        ):
            save(tmp_path / name, *models["mha"], format=format, overwrite=overwrite)
        assert os.listdir(tmp_path) == ["model"]
    monkeypatch.undo()
    assert llama_jax.load(tmp_path / "model").config == KINDS["gqa"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(format="torch"), "format='torch' is not one of safetensors"),
        (dict(dtype="int8"), "dtype='int8': the safetensors format supports only float32"),
        (dict(format="llama2c", dtype="bfloat16"), "llama2c format supports only float32"),
    ],
)
def test_impossible_wishes(arguments, message, tmp_path, models):
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "model", *models["gqa"], **arguments)


@pytest.mark.parametrize(("format", "name"), [("safetensors", "model.norm.weight"), ("orbax", "final_norm")])
@pytest.mark.parametrize(("value", "message"), [(-1e5, "numbers too large for float16"), (np.nan, "NaN or infinity")])
def test_numbers_that_do_not_fit_the_wanted_type(value, message, format, name, tmp_path):
    params = params_of(SMALL, make_goldens.random_tensors(SMALL))
    params = params.replace(final_norm=params.final_norm.at[3].set(value))
    with pytest.raises(CheckpointError, match=rf"{name}' holds {message}"):
        save(tmp_path / "model", SMALL, params, format=format, dtype="float16")
    assert not os.listdir(tmp_path)
