"""Arrays of a step in a store, read by ranges of its files: the numbers that were saved."""

import shutil

import jax
import numpy as np
import object_server
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from llama_jax.checkpoints.orbax_index import MANIFEST, ArrayRows, add_index, read_index
from llama_jax.storage import locate

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
