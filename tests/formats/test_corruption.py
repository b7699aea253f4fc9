"""Damaged and hostile files: a clear error or a valid checkpoint, in bounded time and memory, and nothing in them runs."""

import gc
import pickle
import random
import shutil
import signal
import struct
import sys
import tracemalloc
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import replace

import jax
import make_format_goldens as formats
import make_goldens
import numpy as np
import pytest
import quantized_folders
from conftest import params_of, write_hf_folder
from make_format_goldens import FORMATS, SMALL

import llama_jax
from llama_jax.errors import CheckpointError, UserError
from llama_jax.formats import save
from llama_jax.formats.torch_pickle import read_pickled

TENSORS = make_goldens.random_tensors(SMALL)
# Memory that a load may ask for: the parameters (float32 from as little as 4 bits), for each byte of a header what Python
# needs for an object, and a little that does not depend on the file.
BYTES_PER_BYTE, BYTES = 100, 4 << 20
SECONDS = 20
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
    "ctypes.dlopen",
)
_events: list[str] = []
_watching = False


def _audit(event: str, _: tuple) -> None:
    if _watching and event in FORBIDDEN:
        _events.append(event)


sys.addaudithook(_audit)


@contextmanager
def bounded(size: int | None):
    """Fails where the block asks for more memory than a file of `size` bytes may cost, takes too long, or runs something.

    None does not watch memory: orbax works in threads of its own, and tracemalloc crashes when it is stopped under them
    (python/cpython#128679).
    """
    global _watching

    def late(*_):
        raise TimeoutError(f"over {SECONDS} s")

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor: the machine may be busy with something else
    if size is not None:
        tracemalloc.start()
    _events.clear()
    _watching = True
    try:
        yield
        if size is not None:
            peak = tracemalloc.get_traced_memory()[1]
            assert peak <= BYTES_PER_BYTE * size + BYTES, f"{peak} bytes for a file of {size}"
        assert not _events
    finally:
        _watching = False
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_PROF, 0)


def outcome(path) -> str:
    """ "valid", or the message of the error."""
    files = [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else [path]
    watched = not (path / "params").is_dir()
    with bounded(sum(f.stat().st_size for f in files) if watched else None):
        try:
            config, params, _ = llama_jax.load(path)
        except UserError as error:
            return str(error)
    assert llama_jax.parameter_count(config) == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in jax.tree.leaves(params))
    return "valid"


def corrupt(content: bytes, rng: random.Random) -> bytes:
    """One to three random changes, mostly near the ends, where formats keep what describes the rest."""
    found = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if not found:
            break
        near = rng.choice([len(found), len(found), min(len(found), 400), min(len(found), 3000)])
        at = rng.randrange(near)
        if rng.random() < 0.3:
            at = len(found) - 1 - at
        match rng.randrange(7):
            case 0 | 1:
                found[at] ^= 1 << rng.randrange(8)
            case 2:
                found[at] = rng.randrange(256)
            case 3:
                del found[at:]
            case 4:
                del found[at : at + rng.choice([1, 4, 8, 100])]
            case 5:
                found[at:at] = rng.randbytes(rng.choice([1, 4, 8, 100]))
            case 6:  # a size that is declared
                word = rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
                found[at : at + 8] = struct.pack("<Q", word)[: rng.choice([4, 8])]
    return bytes(found)


def make(name: str, folder):
    """A model in a format, and the files of it that are to be spoiled."""
    match name:
        case "safetensors":
            path = write_hf_folder(folder / "model", SMALL, TENSORS)
            return path, ["model.safetensors", "config.json"]
        case "sharded":
            shutil.copytree(FORMATS / "pytorch-sharded", folder / "model")
            return folder / "model", [f.name for f in (folder / "model").iterdir()]
        case "meta":
            shutil.copytree(FORMATS / "meta-2", folder / "model")
            return folder / "model", ["consolidated.00.pth", "consolidated.01.pth", "params.json"]
        case "training":
            (folder / "model").mkdir()
            shutil.copy(FORMATS / "ckpt.pt", folder / "model")
            return folder / "model" / "ckpt.pt", ["ckpt.pt"]
        case "gguf" | "q8_0":
            (folder / "model").mkdir()
            config = replace(make_goldens.KINDS["gqa"], hidden_dim=64)
            kind = "Q8_0" if name == "q8_0" else "F32"
            formats.write_gguf(folder / "model" / "m.gguf", config, make_goldens.random_tensors(config), kind)
            return folder / "model" / "m.gguf", ["m.gguf"]
        case "llama2c-0" | "llama2c-1" | "llama2c-2":
            (folder / "model").mkdir()
            config = make_goldens.KINDS["gqa"]
            formats.write_llama2c(folder / "model" / "m.bin", config, make_goldens.random_tensors(config), int(name[-1]))
            return folder / "model" / "m.bin", ["m.bin"]
        case _ if name in quantized_folders.FOLDERS:
            quantized_folders.write_folder(folder / "model", name)
            return folder / "model", ["model.safetensors", "config.json"]
        case "orbax":
            config = make_goldens.KINDS["tied"]
            save(folder / "model", config, params_of(config, make_goldens.random_tensors(config)), format="orbax")
            inside = [f.relative_to(folder / "model") for f in (folder / "model").rglob("*") if f.is_file()]
            return folder / "model", sorted(map(str, inside))
    raise AssertionError(name)


KINDS = ("safetensors", "sharded", "meta", "training", "gguf", "q8_0", "llama2c-0", "llama2c-1", "llama2c-2", "orbax")


# Of a failed read orbax leaves futures behind whose exceptions nobody asks for.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "name", [x if x in ("gguf", "meta", "orbax") else pytest.param(x, marks=pytest.mark.nightly) for x in KINDS]
)
def test_corruptions(name, tmp_path):
    """A few; thousands are loaded in processes with limits by every run of the slow tests, see tests/test_nightly.py."""
    path, files = make(name, tmp_path)
    assert outcome(path) == "valid"
    base = path if path.is_dir() else path.parent
    rng = random.Random(1)
    for i in range(2 if name == "orbax" else 20):
        # A fresh copy: orbax may still read in the background when its error has come, and maps files into memory.
        spoiled = tmp_path / f"{name}-{i}"
        shutil.copytree(base, spoiled)
        file = rng.choice(files)
        (spoiled / file).write_bytes(corrupt((base / file).read_bytes(), rng))
        try:
            outcome(spoiled if path.is_dir() else spoiled / path.name)
        except BaseException as error:
            raise AssertionError(f"{name} case {i}: {spoiled / file}") from error
    gc.collect()  # now, and not in the middle of another test: what orbax leaves in cycles speaks up when it is collected


# What no random change would make.


def write_pickle(path, program: bytes, extra: dict[str, bytes] | None = None, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", program)
        for name, content in (extra or {}).items():
            archive.writestr(f"archive/{name}", content)
    return path


class Evil:
    def __reduce__(self):
        import os

        return os.system, ("touch /tmp/llama_jax_was_here",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_calls(protocol, tmp_path):
    path = write_pickle(tmp_path / "ckpt.pt", pickle.dumps({"model_args": Evil()}, protocol))
    with (
        bounded(path.stat().st_size),
        pytest.raises(CheckpointError, match=r"system', but a model needs only tensors|not allowed"),
    ):
        read_pickled(path)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(b"\x80\x02}q\x00h\x00h\x00s.", id="dictionary as its own key"),
        pytest.param(b"\x80\x02]q\x00h\x00a.", id="list in itself"),
        pytest.param(b"\x80\x02" + b"(" * 100_000 + b".", id="marks"),
        pytest.param(b"\x80\x02)" + b"\x85" * 300_000 + b".", id="deep tuple", marks=pytest.mark.slow),
        pytest.param(b"\x80\x02}N\x85" + b"2\x86" * 200 + b"Ns.", id="tuple of tuples as a key"),
        pytest.param(b"\x80\x02r\xff\xff\xff\xff.", id="memo without a value"),
        pytest.param(b"\x80\x02Nr\xff\xff\xff\xff.", id="memo far away"),
        pytest.param(b"\x80\x04\x8e" + b"\xff" * 8 + b".", id="bytes of 2**64"),
        pytest.param(b"\x80\x02\x8a\xff" + b"\xff" * 20 + b".", id="long number cut short"),
        pytest.param(b"\x80\x02" + b"N" * 2_000_000 + b".", id="two million objects"),
        pytest.param(b"", id="nothing"),
        pytest.param(b".", id="stop at once"),
        pytest.param(b"\x80\x02ccollections\nOrderedDict\n)R(K\x01K\x02u.", id="integers"),
        pytest.param(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", id="call without arguments"),
        pytest.param(b"\x80\x02ctorch\nFloatStorage\n)R.", id="call of a storage"),
        pytest.param(
            b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x009X\x03\x00\x00\x00cpuK\x01tQ.",
            id="no such entry",
        ),
    ],
)
def test_odd_pickles(program, tmp_path):
    path = write_pickle(tmp_path / "ckpt.pt", program)
    with bounded(path.stat().st_size), suppress(CheckpointError):
        assert isinstance(read_pickled(path), dict)


def test_torch_files_that_are_no_archive(tmp_path):
    path = tmp_path / "old.bin"
    path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    with pytest.raises(CheckpointError, match=r"saved by a torch before 1.6"):
        read_pickled(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match=r"not what torch.save writes"):
        read_pickled(path)


def test_settings_of_gigabytes_are_not_read(tmp_path):
    """A hole in the file costs nobody anything."""
    path = write_hf_folder(tmp_path / "model", SMALL, TENSORS)
    with (path / "config.json").open("r+b") as file:
        file.truncate(20 << 30)
    with pytest.raises(CheckpointError, match="too large"):
        llama_jax.load(path)
    shutil.copytree(FORMATS / "meta-1", tmp_path / "meta")
    with (tmp_path / "meta" / "params.json").open("r+b") as file:
        file.truncate(20 << 30)
    with pytest.raises(CheckpointError, match="too large"):
        llama_jax.load(tmp_path / "meta")


def test_a_compressed_archive_is_not_unpacked(tmp_path):
    path = write_pickle(tmp_path / "ckpt.pt", b"N" * (1 << 19), compression=zipfile.ZIP_DEFLATED)
    with bounded(path.stat().st_size), pytest.raises(CheckpointError, match="compressed or encrypted"):
        read_pickled(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(size=(4, 4), stride=(4, 1)), "beyond its storage"),
        (dict(size=(2**40,), stride=(0,)), "beyond its storage"),
        (dict(offset=15), "beyond its storage"),
        (dict(offset=-1), "non-negative integers"),
        (dict(stride=(-1,)), "non-negative integers"),
        (dict(size=(2, 2)), "non-negative integers"),
        (dict(count=2**40), "shorter than its tensors"),
        (dict(count=-5), "shorter than its tensors"),
    ],
)
def test_tensors_that_lie(changes, message, tmp_path):
    path = write_pickle(tmp_path / "x.pt", tensor_pickle(**changes), {"data/0": bytes(40)})
    with bounded(path.stat().st_size), pytest.raises(CheckpointError, match=message):
        read_pickled(path)
    assert read_pickled(write_pickle(tmp_path / "y.pt", tensor_pickle(), {"data/0": bytes(40)}))["w"].shape == (8,)


def tensor_pickle(size=(8,), stride=(1,), offset=1, count=10) -> bytes:
    """{"w": a float32 tensor}, as torch writes it."""

    def text(value):
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def number(value):
        raw = value.to_bytes(9, "little", signed=True)
        return b"\x8a\x09" + raw

    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + number(count) + b"tQ"
    shape = b"(" + b"".join(map(number, size)) + b"t"
    strides = b"(" + b"".join(map(number, stride)) + b"t"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + shape + strides + b"\x89Nt" + b"R"
    return b"\x80\x02}" + text("w") + call + b"s."


def test_a_transposed_tensor(tmp_path):
    numbers = np.arange(10, dtype="<f4")
    path = write_pickle(tmp_path / "x.pt", tensor_pickle((3, 2), (1, 4), 1), {"data/0": numbers.tobytes()})
    tensor = read_pickled(path)["w"]
    np.testing.assert_array_equal(tensor.read(0, 3), [[1, 5], [2, 6], [3, 7]])
    np.testing.assert_array_equal(tensor.read(1, 2), [[2, 6]])


def gguf_header(*parts: bytes, tensors=0, fields=0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + b"".join(parts)


def text(value: bytes, length=None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(gguf_header(fields=2**62), id="fields"),
        pytest.param(gguf_header(tensors=2**62), id="tensors"),
        pytest.param(gguf_header(text(b"k", 2**62), fields=1), id="key"),
        pytest.param(gguf_header(text(b"k"), struct.pack("<I", 8), text(b"v", 2**62), fields=1), id="string"),
        pytest.param(gguf_header(text(b"k"), struct.pack("<IIQ", 9, 8, 2**62), fields=1), id="array of strings"),
        pytest.param(gguf_header(text(b"k"), struct.pack("<IIQ", 9, 12, 2**61), fields=1), id="array of numbers"),
        pytest.param(gguf_header(text(b"k"), struct.pack("<IIQ", 9, 9, 2), fields=1), id="array of arrays"),
        pytest.param(gguf_header(text(b"k"), struct.pack("<I", 99), fields=1), id="type"),
        pytest.param(gguf_header(text(b"t"), struct.pack("<I", 2**31), tensors=1), id="axes"),
        pytest.param(gguf_header(text(b"t"), struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), tensors=1), id="shape"),
        pytest.param(gguf_header(text(b"t"), struct.pack("<IQIQ", 1, 8, 0, 2**63), tensors=1), id="offset"),
        pytest.param(gguf_header(*[text(b"") + struct.pack("<IIQ", 9, 8, 0)] * 2, fields=2), id="key twice"),
        pytest.param(b"GGUF\0\0\0\3" + bytes(100), id="big-endian"),
        pytest.param(b"GGUF", id="end"),
    ],
)
def test_gguf_headers_that_lie(content, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert outcome(path) != "valid"


@pytest.mark.parametrize("layers", [10**9, 2**31 - 1])
@pytest.mark.parametrize("size", [{}, {"hidden_size": 2**30, "num_attention_heads": 2**20}, {"vocab_size": 2**31 - 1}])
def test_a_configuration_that_claims_a_giant(layers, size, tmp_path):
    path = write_hf_folder(tmp_path / "model", SMALL, TENSORS, num_hidden_layers=layers, **size)
    assert "configuration" in outcome(path)


@pytest.mark.parametrize("text", ['{"a":' * 50_000, "[" * 200_000, '{"__metadata__":' + "{}" * 5])
def test_safetensors_header_bombs(text, tmp_path):
    path = write_hf_folder(tmp_path / "model", SMALL, TENSORS)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text.encode())
    assert "not a whole safetensors file" in outcome(path)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + text.encode())
    assert "not a whole safetensors file" in outcome(path)
