"""How much memory loading takes, measured on a checkpoint of over two gigabytes in several files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_config

import llama_jax
from llama_jax.formats import huggingface
from llama_jax.formats.lazy_tensors import FLOAT_DTYPES, ArrayTensor
from llama_jax.formats.weight_format import OpenedCheckpoint, parts_of
from llama_jax.model.params import shape_of, specs_for

CONFIG = tiny_config(vocab_size=32_000, dim=2048, n_layers=22, n_heads=16, n_kv_heads=8, hidden_dim=5632, max_seq_len=2048)

# Prints what the process held before, what it held at most, and what it was given.
LOADER = """
import json, math, sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import llama_jax
from llama_jax.formats import open_checkpoint
from llama_jax.model.trees import init
from llama_jax.ops.weights.format_spec import bits_of

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

path, dtype = sys.argv[1:3]
quantize = sys.argv[3] if len(sys.argv) > 3 else None
devices = len(jax.devices())
shardings = None
if devices > 1:
    mesh = jax.make_mesh((devices,), ("all",), axis_types=(AxisType.Auto,))
    config = open_checkpoint(path).config
    shape = jax.eval_shape(lambda key: init(config, key), jax.random.key(0))
    place = lambda a, layers: NamedSharding(mesh, P(*[None] * layers, "all") if len(a.shape) > 1 + layers else P())
    shardings = jax.tree.map(lambda a: place(a, 0), shape.replace(blocks=None)).replace(
        blocks=jax.tree.map(lambda a: place(a, 1), shape.blocks)
    )
llama_jax.load(quantize=quantize)  # of the small bundled model: what is imported on the way is there
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
_, params, _ = llama_jax.load(path, dtype, quantize=quantize, shardings=shardings)
jax.block_until_ready(params)
peak = status("VmHWM")
leaves = jax.tree.leaves(params)
held = [0] * devices
for leaf in leaves:
    for shard in leaf.addressable_shards:
        held[shard.device.id] += math.prod(shard.data.shape) * bits_of(leaf.dtype) // 8
print(json.dumps(dict(before=before, peak=peak, held=held)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """bfloat16, 2.3 GB, five files. One row of random numbers stands for all rows of a tensor: making it takes none."""
    path = tmp_path_factory.mktemp("large") / "model"
    path.mkdir()
    row = np.random.default_rng(0).standard_normal(5632).astype(FLOAT_DTYPES["BF16"])
    c = CONFIG
    shapes = {share.name: shape_of(share.axes, c) for row in specs_for(c) for share in parts_of(row)}
    tensors = {
        name.format(i): ArrayTensor(np.broadcast_to(row[: shapes[part][-1]], shapes[part]))
        for part, name in huggingface.HF_NAMES.items()
        for i in range(c.n_layers if "{}" in name else 1)
        if part in shapes
    }
    opened = OpenedCheckpoint("made here", Path("made-here"), c, tensors, huggingface.HF_NAMES, False, lambda: None)
    huggingface.write_huggingface(path, opened, None, largest_file=500_000_000)
    yield path
    for file in path.iterdir():
        file.unlink()


def load_alone(folder: Path, devices: int, *arguments: str) -> dict:
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", LOADER, folder, *arguments], env=env, capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures through Linux's /proc")
@pytest.mark.parametrize(
    ("devices", "dtype"),
    [
        (1, "float32"),
        (8, "bfloat16"),
        pytest.param(1, "bfloat16", marks=pytest.mark.nightly),
        pytest.param(8, "float32", marks=pytest.mark.nightly),
    ],
)
def test_peak_memory_is_the_weights_and_less_than_two_tensors(folder, devices, dtype):
    assert sum(file.stat().st_size for file in folder.iterdir()) > 2e9
    assert len(list(folder.glob("*.safetensors"))) > 4
    found = load_alone(folder, devices, dtype)
    size = np.dtype(FLOAT_DTYPES["F32" if dtype == "float32" else "BF16"]).itemsize
    weights = llama_jax.parameter_count(CONFIG) * size
    largest = CONFIG.vocab_size * CONFIG.dim * size
    above = found["peak"] - found["before"] - weights
    print(
        f"{devices} devices, {dtype}: {above / 1e6:.0f} MB above {weights / 1e6:.0f}; the largest tensor {largest / 1e6:.0f}"
    )
    assert above < 2 * largest
    # Each device holds its part and the norms; nothing is anywhere twice.
    norms = (2 * CONFIG.n_layers + 1) * CONFIG.dim * size
    assert found["held"] == [(weights - norms) // devices + norms] * devices


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures through Linux's /proc")
@pytest.mark.parametrize(
    ("kind", "bits", "more"),
    [("int8", 8, 0.05), pytest.param("q8_0", 8.5, 0.05, marks=pytest.mark.nightly), ("int4-pure", 4.25, 0.05)],
)
def test_quantizing_while_reading_peaks_little_above_the_result(folder, kind, bits, more):
    """Resident memory, by its high-water mark; files are read and not mapped, so that nothing of it is theirs."""
    found = load_alone(folder, 1, "bfloat16", kind)
    (held,) = found["held"]
    above = found["peak"] - found["before"] - held
    print(f"{kind}: {above / 1e6:.0f} MB above {held / 1e6:.0f}, {above / held:.1%}")
    assert held < 1.01 * llama_jax.parameter_count(CONFIG) * bits / 8
    assert above < more * held
