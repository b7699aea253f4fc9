"""The orbax format: its errors are said once, by this library; where the numbers of arrays lie in its files."""

import logging
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import object_server
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from llama_jax.errors import CheckpointError
from llama_jax.formats import orbax_format
from llama_jax.formats.orbax_format import with_short_errors
from llama_jax.formats.orbax_index import MANIFEST, ArrayRows, add_index, read_index
from llama_jax.storage import locate
from llama_jax.storage.atomic_write import cannot_write


def left_over(pathname):
    """A coroutine of that file which is closed while it waits, as Python tells of it."""
    waiting = SimpleNamespace(cr_code=SimpleNamespace(co_filename=pathname))
    return SimpleNamespace(exc_value=Exception("Encountered error while reading array index"), object=waiting)


@pytest.mark.parametrize("number", orbax_format.WRITE_ERRNOS)
def test_the_systems_words_are_found_after_long_paths(number):
    path = "/a/long/way" * 40
    error = ValueError(f'RESOURCE_EXHAUSTED: Error writing "{path}": Failed to write 9 bytes: {os.strerror(number)} [os_e')
    found = orbax_format.write_error(error)
    assert (found.errno, found.strerror) == (number, os.strerror(number))
    assert cannot_write(Path("model"), found).startswith(f"model cannot be written ({os.strerror(number)}); ")
    assert str(orbax_format.write_error(ValueError(path))) == path[:300]


def test_a_load_that_fails_leaves_no_tracebacks(tmp_path, monkeypatch, caplog):
    """Orbax's coroutines that waited for the other arrays raise an error when they are collected, some time later."""
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)

    def fails():
        for package in ("orbax", "etils"):
            path = os.path.join("lib", package, "future.py")
            logging.getLogger("absl").handle(logging.LogRecord("absl", logging.ERROR, path, 1, package, None, None))
        raise ValueError("a chunk is missing")

    monkeypatch.setattr(logging.getLogger("absl"), "propagate", True)
    with pytest.raises(CheckpointError, match="a chunk is missing"):
        with_short_errors(tmp_path, fails)
    assert caplog.messages == ["etils"]
    late, other = (SimpleNamespace(exc_value=RuntimeError(text), object=None) for text in ("Event loop is closed", "else"))
    of_orbax, of_others = (left_over(os.path.join("lib", package, "reading.py")) for package in ("orbax", "etils"))
    for said in (late, other, of_orbax, of_others):
        sys.unraisablehook(said)
    assert heard == [other, of_others]


RANDOM = np.random.default_rng(0)
ARRAYS = {
    "qkv": (P(None, "a", None, None, "b"), RANDOM.normal(size=(3, 2, 4, 8, 64)).astype(np.float32)),
    "experts": (P(None, None, "a", "b"), RANDOM.normal(size=(2, 4, 6, 512)).astype(jax.numpy.bfloat16)),
    "layers": (P("a", "b"), RANDOM.normal(size=(4, 12, 300)).astype(np.float32)),
    "norm": (P(), RANDOM.normal(size=(3, 5)).astype(np.float32)),
    "last": (P("b"), RANDOM.normal(size=1024).astype(np.float32)),
}


def write(folder, names=ARRAYS, **options):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    context = ocp.Context()
    context.array_options.saving.use_compression = options.get("compressed", False)
    with context:
        arrays = {name: jax.device_put(ARRAYS[name][1], NamedSharding(mesh, ARRAYS[name][0])) for name in names}
        ocp.save_checkpointables(folder, {"params": arrays})


def test_rows_are_what_was_saved(tmp_path, monkeypatch):
    write(tmp_path / "step")
    with object_server.emulated(monkeypatch) as store:
        place = locate(store.upload(tmp_path / "step", "run/4")) / "params"
        for numbers in (tmp_path / "step/params").glob("ocdbt.process_*/d"):
            shutil.rmtree(numbers)
        found = read_index(tmp_path / "step", "params", place)
        assert found is not None
        assert found.keys() == ARRAYS.keys()
        for name, (_, array) in ARRAYS.items():
            rows = array.reshape(1, -1) if array.ndim == 1 else array.reshape(-1, array.shape[-1])
            for start, stop in [(0, len(rows)), *(sorted(RANDOM.integers(0, len(rows) + 1, 2)) for _ in range(3))]:
                assert found[name].rows(start, stop).tobytes() == rows[start:stop].tobytes(), (name, start, stop)
        layer = ArrayRows(found["qkv"], 64, (64, 64))
        store.answers.clear()
        assert layer.read(40, 56).tobytes() == ARRAYS["qkv"][1][1].reshape(64, 64)[40:56].tobytes()
        assert [answer.sent for answer in store.answers if answer.method == "GET"] == [16 * 32 * 4] * 2
        vector = ArrayRows(found["norm"], 2, (5,))
        assert vector.read(1, 4).tolist() == ARRAYS["norm"][1][2, 1:4].tolist()


def test_the_index_of_another_host_is_added(tmp_path):
    write(tmp_path / "here", ("last", "norm"))
    write(tmp_path / "there", ("layers",))
    there = tmp_path / "there/params"
    shutil.copytree(there / "d", tmp_path / "here/params/d", dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "here/params/ocdbt.process_0")  # of the numbers none is needed
    add_index(tmp_path / "here/params", (there / MANIFEST).read_bytes())
    place = locate("s3://bucket/step/params")
    found, other = read_index(tmp_path / "here", "params", place), read_index(tmp_path / "there", "params", place)
    assert found.keys() == {"last", "layers", "norm"}
    assert found["layers"].chunks == other["layers"].chunks


@pytest.mark.slow
def test_what_lies_otherwise_is_not_read(tmp_path):
    write(tmp_path / "step", compressed=True)
    assert read_index(tmp_path / "step", "params", locate("s3://bucket/run/4/params")) is None
    shutil.rmtree(tmp_path / "step/params/d")
    assert read_index(tmp_path / "step", "params", locate("s3://bucket/run/4/params")) is None
