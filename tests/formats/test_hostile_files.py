"""Files, folders and settings that no random change would make: one line each, in bounded time and memory."""

import json
import math
import os
import pickle
import shutil
import struct
import zipfile
from array import array

import pytest
from conftest import write_hf_folder
from family_models import PLAIN, SIBLINGS
from make_format_goldens import FORMATS, SMALL
from test_corruption import TENSORS, bounded, gguf_header, outcome, tensor_pickle, text, write_pickle

import llama_jax
from llama_jax.config.families import FAMILIES
from llama_jax.errors import CheckpointError, ConfigError, TokenizerError
from llama_jax.formats.gguf import read_file
from llama_jax.formats.huggingface import config_from_dict, config_to_dict
from llama_jax.formats.llama2c import is_llama2c
from llama_jax.formats.torch_pickle import MAX_TABLE_BYTES, read_pickled, read_tensors
from llama_jax.tokenizers import load_tokenizer
from llama_jax.tokenizers.gguf_header import MAX_ENTRIES, MAX_TEXTS, TEXT_WINDOW


@pytest.mark.parametrize("letter", "BbHhIifQqd")
def test_numbers_of_a_gguf_stay_packed(letter, tmp_path):
    """As a list, 8 MB of 16 bits would take 170 MB."""
    number = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "Q": 10, "q": 11, "d": 12}[letter]
    values = array(letter, range(100)) * (10_000 if letter == "H" else 100)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_header(text(b"k"), struct.pack("<IIQ", 9, number, len(values)), values.tobytes(), fields=1))
    with bounded(0):  # 4 MB
        assert read_file(path)[0]["k"] == values


@pytest.mark.parametrize(("count", "window"), [(300, 1 << 14), pytest.param(3000, TEXT_WINDOW, marks=pytest.mark.slow)])
def test_texts_of_a_gguf_are_read_in_order_or_passed_over(count, window, tmp_path, monkeypatch):
    """Those of usual lengths are taken together: beside them long and empty ones, zeros, and bytes that are no UTF-8."""
    monkeypatch.setattr("llama_jax.tokenizers.gguf_header.TEXT_WINDOW", window)
    some = [b"a", b"llama " * 40, b"", b"\0\0x", b"\xe2\x96", b"x" * 300, "ü▁".encode(), b"\0" * 9, b"y" * 255, b"z"]
    texts = [each for i in range(count) for each in (*some[i % len(some) :], b"%d" % i)]
    values = struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(map(text, texts))
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_header(text(b"k"), values, text(b"after"), struct.pack("<II", 4, 7), fields=2))
    expected = [each.decode("utf-8", "surrogateescape") for each in texts]
    assert read_file(path)[0] == {"GGUF.version": 3, "k": expected, "after": 7}
    assert read_file(path, texts=False)[0] == {"GGUF.version": 3, "after": 7}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gguf_header(text(b"k"), struct.pack("<IIQ", 9, 8, MAX_TEXTS + 1), bytes(8 * MAX_TEXTS + 8), fields=1), "strings"),
        (gguf_header(bytes(14 * MAX_ENTRIES + 14), fields=MAX_ENTRIES + 1), "settings"),
        (gguf_header(bytes(50 * MAX_ENTRIES + 50), tensors=MAX_ENTRIES + 1), "tensors are announced"),
    ],
    ids=["texts", "settings", "tensors"],
)
def test_a_gguf_of_many_small_things(content, reason, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with bounded(0), pytest.raises(CheckpointError, match=reason):
        read_file(path)


def test_tensors_of_a_gguf_that_share_their_bytes(tmp_path):
    entries = [text(b"t%d" % i) + struct.pack("<IQIQ", 1, 1 << 20, 0, 0) for i in range(20)]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_header(*entries, tensors=20) + bytes(4 << 20) + bytes(64))
    with bounded(0), pytest.raises(CheckpointError, match="its tensors have 83886080 bytes"):
        read_file(path)


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "params.json", "consolidated.00.pth"],
)
@pytest.mark.parametrize("kind", ["folder", "pipe", "link to itself"])
def test_what_is_no_file_of_a_folder(name, kind, tmp_path):
    path = tmp_path / "model"
    if name in ("params.json", "consolidated.00.pth"):
        shutil.copytree(FORMATS / "meta-1", path)
    else:
        write_hf_folder(path, SMALL, TENSORS)
    spoil(path / name, kind)
    assert (outcome(path) == "valid") == name.startswith("tokenizer")


def spoil(path, kind):
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path)


@pytest.mark.parametrize("kind", ["pipe", "link to itself"])
@pytest.mark.parametrize(("load", "error"), [(llama_jax.load, CheckpointError), (load_tokenizer, TokenizerError)])
def test_a_path_that_is_neither_file_nor_folder(kind, load, error, tmp_path):
    spoil(tmp_path / "x", kind)
    with bounded(0), pytest.raises(error, match=r"neither a file nor a folder|symbolic link|does not exist"):
        load(tmp_path / "x")


@pytest.mark.parametrize(("load", "error"), [(llama_jax.load, CheckpointError), (load_tokenizer, TokenizerError)])
def test_a_name_that_no_file_can_have(load, error, tmp_path):
    for name in ("x" * 300, "x" * 10_000, "x/" * 10_000):
        with pytest.raises(error, match=r"cannot be read: File name too long") as caught:
            load(tmp_path / name)
        assert len(str(caught.value)) < 600
    with pytest.raises(error, match="does not exist"):
        load(f"{tmp_path}/a\0b")


def test_an_index_of_a_name_that_no_file_can_have(tmp_path):
    shutil.copytree(FORMATS / "pytorch-sharded", tmp_path / "model")
    index = tmp_path / "model" / "pytorch_model.bin.index.json"
    found = json.loads(index.read_text())
    for name in ("x" * 300, "a\0b", "x" * 100_000):
        index.write_text(json.dumps(found | {"weight_map": dict.fromkeys(found["weight_map"], name)}))
        found_out = outcome(tmp_path / "model")
        assert "which is missing from" in found_out
        assert len(found_out) < 600


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    """What the system says is said on, and not that the file is damaged."""
    path = write_hf_folder(tmp_path / "model", SMALL, TENSORS)

    def fails(self, *_, **__):
        raise OSError(5, "Input/output error", str(self))

    monkeypatch.setattr("pathlib.Path.open", fails)
    monkeypatch.setattr("pathlib.Path.read_text", fails)
    with pytest.raises(CheckpointError, match=r"config.json cannot be read: Input/output error"):
        llama_jax.load(path)


def test_a_header_of_safetensors_that_is_large(tmp_path):
    path = write_hf_folder(tmp_path / "model", SMALL, TENSORS)
    entries = {f"{i:06}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(70_000)}
    header = json.dumps(entries).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with bounded(0), pytest.raises(CheckpointError, match="too large for a model"):
        llama_jax.load(path)


def test_a_llama2c_of_a_million_layers(tmp_path):
    """A layer of dim 2 takes less room in the file than its description would in memory."""
    layers, per_layer = 20_000, 2 * 2 + 4 * 4 + 3 * 2
    sizes = (2, 1, layers, 1, 1, 1, 1)
    numbers = 2 + layers * per_layer + 2 + 2 * 1
    (tmp_path / "m.bin").write_bytes(struct.pack("<7i", *sizes) + bytes(4 * numbers))
    assert "not a whole llama2.c file" in outcome(tmp_path / "m.bin")
    (tmp_path / "n.bin").write_bytes(struct.pack("<Ii7iB", 0x616B3432, 1, *sizes, 1) + bytes(1 << 20))
    assert "20000 layers" in outcome(tmp_path / "n.bin")


# -- pickles -----------------------------------------------------------------------------------------------------------


def pickled(value: bytes) -> bytes:
    """A text as a pickle has it."""
    return b"X" + struct.pack("<I", len(value)) + value


def refused(path, match):
    with bounded(path.stat().st_size), pytest.raises(CheckpointError, match=match) as caught:
        read_pickled(path)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_a_hundred_thousand_axes(tmp_path):
    """Their product alone would take hours."""
    program = tensor_pickle(size=(2**63 - 1,) * 30_000, stride=(0,) * 30_000)
    refused(write_pickle(tmp_path / "x.pt", program, {"data/0": bytes(40)}), "30000 axes")
    program = tensor_pickle(size=(8, 2**63), stride=(1, 1))
    refused(write_pickle(tmp_path / "x.pt", program, {"data/0": bytes(40)}), "too large|beyond its storage")


@pytest.mark.parametrize("depth", [60, pytest.param(50_000, marks=pytest.mark.slow)])
def test_settings_that_nest(depth, tmp_path):
    """`depth` pairs, each of which holds the one before twice: 2**depth if it is written out, and too deep for `repr`."""
    nested = b"]" + (b"q\x00h\x00\x86" if depth == 60 else b"\x85") * depth
    names = list(map(pickled, (b"model_args", b"model", b"dim")))
    program = b"\x80\x02}(" + names[0] + b"}" + names[2] + nested + b"s" + names[1] + b"}u."
    path = write_pickle(tmp_path / "ckpt.pt", program)
    assert is_llama2c(path)
    assert "its contents do not describe a Llama" in outcome(path)
    # Where a tensor should be.
    path = write_pickle(tmp_path / "x.pt", b"\x80\x02}" + names[0] + nested + b"s.")
    with bounded(path.stat().st_size), pytest.raises(CheckpointError, match="a tuple; expected a tensor"):
        read_tensors(path)


def test_a_byte_order_of_gigabytes(tmp_path):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, 2))
        archive.writestr("archive/byteorder", bytes(64 << 20), zipfile.ZIP_DEFLATED)
    refused(path, "compressed or encrypted")


def test_a_table_of_contents_that_is_long(tmp_path):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, 2))
        for i in range(MAX_TABLE_BYTES // 1000 + 1):
            archive.writestr(f"archive/{i:01000}", b"")
    refused(path, "table of contents")


def test_numbers_of_one_hash(tmp_path):
    """As keys of a dictionary they would take the square of their count."""
    keys = b"".join(b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(1, 60_000))
    refused(write_pickle(tmp_path / "x.pt", b"\x80\x02}(" + keys + b"u."), "not a name or an index")


def test_one_run_of_bytes_as_many_tensors(tmp_path):
    """A file of a megabyte is no model of gigabytes, though each of its tensors lies inside it."""
    whole = tensor_pickle((1 << 18,), (1,), 0, 1 << 18)
    tensor = whole[whole.index(b"ctorch._utils") : -2]
    entries = b"".join(b"X\x04\x00\x00\x00%04d" % i + tensor for i in range(100))
    path = write_pickle(tmp_path / "x.pt", b"\x80\x02}(" + entries + b"u.", {"data/0": bytes(1 << 20)})
    with bounded(path.stat().st_size), pytest.raises(CheckpointError, match="its tensors need 104857600"):
        read_tensors(path)


def test_tensors_without_axes(tmp_path):
    whole = tensor_pickle((), (), 0)
    tensor = whole[whole.index(b"ctorch._utils") : -2]

    model = b"".join(pickled(n) + tensor for n in (b"tok_embeddings.weight", b"layers.0.feed_forward.w1.weight"))
    folder = tmp_path / "meta"
    folder.mkdir()
    write_pickle(folder / "consolidated.00.pth", b"\x80\x02}(" + model + b"u.", {"data/0": bytes(40)})
    sizes = {"dim": 8, "n_layers": 1, "n_heads": 1, "vocab_size": -1, "norm_eps": 1e-5}
    (folder / "params.json").write_text(json.dumps(sizes))
    assert "is missing or not a matrix" in outcome(folder)
    program = b"\x80\x02}(" + pickled(b"model_args") + b"}" + pickled(b"model") + b"}(" + model + b"uu."
    assert "do not describe a Llama" in outcome(write_pickle(tmp_path / "ckpt.pt", program, {"data/0": bytes(40)}))


# -- settings of a config.json of the wrong type, in every family --------------------------------------------------------


WRITTEN = {kind: config_to_dict(PLAIN if kind == "llama" else SIBLINGS[kind]) for kind in FAMILIES}
LEAST = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
WRONG = [
    *(-1, 0, 10**8, 2**63, 10**400, 1.5, 1e-320, 1e308, math.nan, math.inf, "x", "", True, None, [], [1, 2], ["x"], [None]),
    *({}, {"a": 1}, [[1]], "full_attention", {"full_attention": 3}, {"full_attention": [], "sliding_attention": 1}),
    *(
        {"rope_type": ["x"]},
        {"rope_type": "yarn", "factor": "8"},
        {"rope_type": "linear", "factor": 10**400},
        {"rope_type": "yarn", "llama_4_scaling_beta": []},
    ),
    *([[[]]], {"rope_type": "yarn", "original_max_position_embeddings": 10**400}),
    *({"partial_rotary_factor": math.nan}, {"rope_type": "longrope", "short_factor": "x", "long_factor": [1]}),
]
UNWRITTEN = ("no_rope_layer_interval", "sliding_window_pattern", "rope_scaling", "rope_local_base_freq", "text_config")


def _error_of(settings):
    try:
        config_from_dict(settings)
    except ConfigError as error:
        return str(error)
    return ""  # any other exception fails the test


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_setting_of_the_wrong_type_is_an_error_of_one_line_or_means_nothing(kind):
    """Each setting, where all are said and where only those that must be are."""
    for base in (WRITTEN[kind], {name: WRITTEN[kind][name] for name in LEAST}):
        for name in (*WRITTEN[kind], *UNWRITTEN):
            for value in WRONG:
                said = _error_of(base | {name: value})
                assert "\n" not in said
                assert len(said) < 700
