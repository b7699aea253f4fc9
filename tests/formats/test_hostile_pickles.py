"""Pickles that no random change would make: one line each, in bounded time and memory."""

import json
import lzma
import pickle
import struct
import zipfile
import zlib

import pytest
from test_corruption import bounded, outcome, tensor_pickle, write_pickle

from llama_jax.errors import CheckpointError
from llama_jax.formats.llama2c import recognizes
from llama_jax.formats.torch_pickle import MAX_TABLE_BYTES, read_pickled, read_tensors


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
    names = [b"X" + struct.pack("<I", len(name)) + name for name in (b"model_args", b"model", b"dim")]
    program = b"\x80\x02}(" + names[0] + b"}" + names[2] + nested + b"s" + names[1] + b"}u."
    path = write_pickle(tmp_path / "ckpt.pt", program)
    assert recognizes(path)
    assert "this is not llama2.c's ckpt.pt" in outcome(path)
    # Where a tensor should be.
    path = write_pickle(tmp_path / "x.pt", b"\x80\x02}" + names[0] + nested + b"s.")
    with bounded(path.stat().st_size), pytest.raises(CheckpointError, match="a tuple where a tensor should be"):
        read_tensors(path)


def test_a_setting_that_nests_is_shown(tmp_path):
    nested = b"]" + b"q\x00h\x00\x86" * 60

    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value

    whole = tensor_pickle((2, 4), (4, 1), 0)
    tensor = whole[whole.index(b"ctorch._utils") : -2]
    sizes = b"".join(text(n) + b"K\x02" for n in (b"n_layers", b"n_heads", b"max_seq_len")) + text(b"dim") + nested
    model = b"".join(text(n) + tensor for n in (b"tok_embeddings.weight", b"layers.0.feed_forward.w1.weight"))
    program = b"\x80\x02}(" + text(b"model_args") + b"}(" + sizes + b"u" + text(b"model") + b"}(" + model + b"uu."
    path = write_pickle(tmp_path / "ckpt.pt", program, {"data/0": bytes(40)})
    assert "model_args are not those of a Llama (dim=(((" in outcome(path)


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_a_byte_order_of_gigabytes(compression, tmp_path):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, 2))
        archive.writestr("archive/byteorder", bytes(64 << 20), compression)
    refused(path, "compressed or encrypted")
    # A stream that its library cannot read.
    content = bytearray(path.read_bytes())
    at = content.index(b"archive/byteorder") + len("archive/byteorder")
    content[at : at + 40] = b"\xff" * 40
    path.write_bytes(content)
    try:
        refused(path, "compressed or encrypted")
    except (zlib.error, lzma.LZMAError) as error:
        raise AssertionError("the library's own error") from error


def test_a_byte_order_that_is_long(tmp_path):
    refused(write_pickle(tmp_path / "x.pt", pickle.dumps({}, 2), {"byteorder": bytes(1 << 20)}), "has 1048576 bytes")
    refused(write_pickle(tmp_path / "y.pt", pickle.dumps({}, 2), {"byteorder": b"big"}), "big-endian")


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
    refused(write_pickle(tmp_path / "x.pt", b"\x80\x02}(" + keys + b"u."), "neither a name nor an index")


def test_one_run_of_bytes_as_many_tensors(tmp_path):
    """A file of a megabyte is no model of gigabytes, though each of its tensors lies inside it."""
    whole = tensor_pickle((1 << 18,), (1,), 0, 1 << 18)
    tensor = whole[whole.index(b"ctorch._utils") : -2]
    entries = b"".join(b"X\x04\x00\x00\x00%04d" % i + tensor for i in range(100))
    path = write_pickle(tmp_path / "x.pt", b"\x80\x02}(" + entries + b"u.", {"data/0": bytes(1 << 20)})
    with bounded(path.stat().st_size), pytest.raises(CheckpointError, match="claims tensors of 104857600"):
        read_tensors(path)


def test_tensors_without_axes(tmp_path):
    whole = tensor_pickle((), (), 0)
    tensor = whole[whole.index(b"ctorch._utils") : -2]

    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value

    model = b"".join(text(n) + tensor for n in (b"tok_embeddings.weight", b"layers.0.feed_forward.w1.weight"))
    folder = tmp_path / "meta"
    folder.mkdir()
    write_pickle(folder / "consolidated.00.pth", b"\x80\x02}(" + model + b"u.", {"data/0": bytes(40)})
    sizes = {"dim": 8, "n_layers": 1, "n_heads": 1, "vocab_size": -1, "norm_eps": 1e-5}
    (folder / "params.json").write_text(json.dumps(sizes))
    assert "has shape [], where a matrix is needed" in outcome(folder)
    program = b"\x80\x02}(" + text(b"model_args") + b"}" + text(b"model") + b"}(" + model + b"uu."
    assert "must be matrices" in outcome(write_pickle(tmp_path / "ckpt.pt", program, {"data/0": bytes(40)}))
