import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from family_models import FAMILY_MODELS

from llama_jax.analysis import aot_compile
from llama_jax.analysis.aot_compile import CompilerError, devices_of, gpu_target, missing_compiler, tpu_topology
from llama_jax.analysis.hardware import BY_NAME, hardware_by_name
from llama_jax.errors import MeshError
from llama_jax.ops.weights.formats import QUANT_FORMATS


@pytest.mark.parametrize("name", aot_compile.COMPILABLE_HARDWARE)
def test_every_compiler_has_its_hardware(name):
    assert name in BY_NAME
    if name in aot_compile.GPUS:
        gpu, published = aot_compile.GPUS[name], hardware_by_name(name)
        assert gpu.bandwidth == pytest.approx(published.memory_bandwidth, rel=0.05)
        assert gpu.memory == pytest.approx(published.memory, rel=0.03)
        assert f"core_count: {gpu.cores} " in gpu_target(name)


@pytest.mark.parametrize(
    ("hardware", "count", "topology"),
    [
        ("tpu-v5e", 8, "v5e:2x4"),
        ("tpu-v5e", 4, "v5e:2x2"),
        ("tpu-v5e", 256, "v5e:16x16"),
        ("tpu-v6e", 2, "v6e:2x1"),
        ("tpu-v5p", 4, "v5p:2x2x1"),
        ("tpu-v5p", 8, "v5p:2x2x2"),
        ("tpu-v5p", 512, "v5p:8x8x8"),
    ],
)
def test_slices_of_pods(hardware, count, topology):
    assert tpu_topology(hardware, count)["topology_name"] == topology


def test_what_cannot_be_had():
    with pytest.raises(MeshError, match="no slice of 12 chips; a slice has a power of two"):
        tpu_topology("tpu-v5e", 12)
    with pytest.raises(MeshError, match="no slice of 512 chips"):
        tpu_topology("tpu-v5e", 512)
    with pytest.raises(MeshError, match="12 GPUs are not whole hosts of 8"):
        devices_of("h100", 12)
    assert missing_compiler("tpu-v4") is not None
    with pytest.raises(CompilerError, match="no compiler is described for tpu-v4; use one of tpu-v5e"):
        devices_of("tpu-v4", 1)


def test_a_missing_compiler_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(aot_compile.util, "find_spec", lambda name: None)
    for name in aot_compile.COMPILABLE_HARDWARE:
        assert "pip install" in (missing_compiler(name) or "")


IMPORTS = """
import json, sys
from dataclasses import replace
import jax
jax.config.update("jax_platforms", "cpu")
import compile_report
import llama_jax
from llama_jax.analysis.aot_compile import mesh_for
from llama_jax.analysis.collectives import find_collectives
from llama_jax.analysis.memory import DoesNotFitError, decode_programs, train_programs
from llama_jax.model.lora import Lora
from llama_jax.ops.platform import lowering_platform
from llama_jax.parallel.mesh import MeshSizes, parse_mesh
from program_report import examine
"""
LOOK = """
hardware = sys.argv[1]
small = replace(llama_jax.preset("tinyllama-1.1b"), n_layers=4)
out = {}
one, eight = mesh_for(hardware, MeshSizes()), mesh_for(hardware, MeshSizes(fsdp=8))
programs = train_programs(small, eight, 8, 512, dtype="bfloat16", packed=True)
host = 4 if hardware == "tpu-v5p" else 8  # chips: pmap is of one process
programs.append(compile_report.pmap_program(small, mesh_for(hardware, MeshSizes(data=host)), 8, 256))
programs += decode_programs(small, one, 2, 1024, dtype="bfloat16")[1:]
if hardware == "h100":
    out["attention"] = []
    for remat, unroll in (("dots", False), ("dots", True), ("full", True)):
        (step,) = train_programs(small, one, 2, 512, dtype="bfloat16", remat=remat, unroll=unroll)
        text = step.compile().as_text()
        out["attention"].append([text.count(f'__cudnn$fmhaSoftmax{name}"') for name in ("", "Backward")])
out["programs"] = [examine(program).as_dict() for program in programs]
one_row = decode_programs(small, mesh_for(hardware, MeshSizes(tensor=2)), 1, 1024, dtype="bfloat16")[1]
out["exchanged"] = sum(each["sent"] for each in examine(one_row).as_dict()["collectives"].values())
out["by XLA's defaults"] = examine(programs[0], flags=False).as_dict()["overlapped_share"]
large = replace(llama_jax.preset("llama-3.1-8b"), n_layers=2, vocab_size=1024)
try:
    examine(train_programs(large, one, 4096, 8192, dtype="bfloat16", remat="none")[0])
except DoesNotFitError as error:
    out["refused"] = str(error)
print(json.dumps(out))
"""


def look(hardware, program=LOOK, *arguments, timeout=600):
    missing = missing_compiler(hardware)
    if missing:
        pytest.skip(missing)
    paths = str(Path(__file__).parents[2] / "experiments"), os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", IMPORTS + program, hardware, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.accelerators
@pytest.mark.parametrize(
    "hardware", ["tpu-v5e", "h100", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("tpu-v5p", "tpu-v6e", "b200"))]
)
def test_programs_by_the_compilers(hardware):
    found = look(hardware)
    platform = "tpu" if hardware.startswith("tpu") else "gpu"
    step, mapped, decode = found["programs"]
    assert step["bytes_per_device"]["parameters"] == pytest.approx(mapped["bytes_per_device"]["parameters"] / 8, rel=0.01)
    assert step["collectives"]["all-gather over fsdp"]["count"] >= 4 or "collective-permute over fsdp" in step["collectives"]
    assert mapped["collectives"]["all-reduce over data"]["count"] >= 1
    assert step["overlapped_share"] >= found["by XLA's defaults"] + (0.5 if platform == "gpu" else 0)  # what flags are for
    assert found["exchanged"] < 2**21  # a table of 131 MB is not gathered to look up one row
    token = decode["token"]
    assert 0.5 < token["read_ratio"] < 1.2  # a TPU keeps a part of so small a model on the chip
    assert token["kernels_per_layer"] > 4
    if hardware == "h100":
        (forward, backward), *unrolled = found["attention"]
        assert forward == backward > 0  # "dots" saves what the kernel returns
        assert unrolled == [[4, 4], [8, 4]]  # "full" recomputes it, also where the compiler could merge both
    if platform == "tpu":
        assert "exceeds available HBM" in found["refused"] or "memory" in found["refused"]


FAMILIES = """
from family_models import FAMILY_MODELS, with_wide_heads
out, mesh = {}, mesh_for(sys.argv[1], MeshSizes())
for kind, config in FAMILY_MODELS.items():
    config = with_wide_heads(config)
    prefill, decode = decode_programs(config, mesh, 2, 512, dtype="bfloat16")
    (step,) = train_programs(config, mesh, 2, 512, dtype="bfloat16", packed=True)
    programs = {"prefill": prefill, "decode": decode, "step": step}
    out[kind] = {name: examine(program).as_dict()["attention"] for name, program in programs.items()}
print(json.dumps(out))
"""


@pytest.mark.accelerators
@pytest.mark.rotating
@pytest.mark.supports("prefill", "decode", "step", family=FAMILY_MODELS)
@pytest.mark.parametrize("hardware", ["tpu-v5e", "h100"])
def test_programs_of_every_family(hardware):
    """A small model of each, with heads as large as kernels want: one process compiles all."""
    found = look(hardware, FAMILIES, timeout=3000)  # minutes of two cores on a TPU, for 45 programs
    assert set(found) == set(FAMILY_MODELS)
    for kind, programs in found.items():
        assert all(programs[name] for name in ("prefill", "decode", "step")), kind


DECODE = """
config = replace(llama_jax.preset("llama-3.1-8b"), n_layers=8)
*_, program = decode_programs(config, mesh_for(sys.argv[1], parse_mesh(sys.argv[2])), 8, 2048, dtype="bfloat16")
print(json.dumps(examine(program).as_dict()))
"""


@pytest.mark.accelerators
@pytest.mark.parametrize(
    ("hardware", "mesh", "most"), [("tpu-v5e", "tensor=8", 42), ("tpu-v5p", "data=1", 30), ("h100", "data=1", 17)]
)
def test_decoding_eight_rows_copies_no_cache(hardware, mesh, most):
    """Of 8 layers, whose few kernels of other shapes at the ends count as well: 39.5 and less on TPUs, where
    over devices each prepares the arguments of its own kernel of attention, some KB of tables and lengths.

    In a loop over layers, with which a program does not grow, XLA makes for each layer what it made once for all when they
    were written out: masks, places of the new tokens and angles, about nine kernels of at most some KB.
    """
    found = look(hardware, DECODE, mesh)
    assert found["copies"]["bytes"] == 0
    assert found["token"]["written"] < 0.1 * found["bytes_per_device"]["cache"] or hardware == "h100"  # splits its sums
    assert found["token"]["read_ratio"] < 1.05
    assert found["token"]["kernels_per_layer"] < most


STEP = """
config, mesh = replace(llama_jax.preset("llama-3.1-8b"), n_layers=8), mesh_for(sys.argv[1], parse_mesh(sys.argv[2]))
asked = [("step", 16, {}), ("step", 16, {"piece": 64}), ("drafted", 16, {"drafted": 8}), ("burst", 1, {})]
if sys.argv[1] == "h100":  # pages with heads of 64, as of a draft, a TPU copies before and after
    asked.append(("drafted", 16, {"drafted": 4, "draft": "llama-3.2-1b"}))
cases = [compile_report.Case("", kind, "", {}, rows, 2048, options) for kind, rows, options in asked]
print(json.dumps([examine(compile_report.served(config, case, mesh)).as_dict() for case in cases]))
"""


@pytest.mark.accelerators
@pytest.mark.parametrize(("hardware", "mesh"), [("tpu-v5e", "tensor=8"), ("tpu-v5e", "data=1"), ("h100", "data=1")])
def test_a_step_of_the_engine_copies_no_pages(hardware, mesh):
    """Nor weights, also where it reads a piece of a prompt, or drafts; it reads little more than weights and pages."""
    step, reading, lookup, burst, *draft = look(hardware, STEP, mesh)
    logits = 16 * 128256 * 4
    for found in (step, reading, lookup, burst, *draft):
        assert found["copies"]["bytes"] <= 2 * logits  # of rows that sampling sorts
    assert step["token"]["read_ratio"] < 1.05
    assert burst["token"]["read_ratio"] < 1.05
    assert reading["token"]["read_ratio"] < 1.1  # the vocabulary's logits and the activations are read several times
    assert lookup["token"]["read_ratio"] < 1.1
    for found in draft:
        assert found["token"]["read_ratio"] < 1.5
    assert lookup["token"]["kernels_per_layer"] < 2 * step["token"]["kernels_per_layer"]  # written by one scatter


ROLLOUT = """
config, mesh = replace(llama_jax.preset("llama-3.1-8b"), n_layers=8), mesh_for(sys.argv[1], parse_mesh(sys.argv[2]))
case = compile_report.Case("", "rollout", "", {}, 64, 512)
print(json.dumps(examine(compile_report.rollout(config, case, mesh, rank=16, group=8)).as_dict()))
"""


@pytest.mark.accelerators
@pytest.mark.parametrize("mesh", ["data=1", pytest.param("tensor=8", marks=pytest.mark.nightly)])
def test_answers_are_sampled_without_a_copy_of_the_weights(mesh):
    """On a TPU, which reads stacked layers as they lie; and new tokens are written by one scatter, not row by row."""
    found = look("tpu-v5e", ROLLOUT, mesh)
    assert found["token"]["read_ratio"] < 1.15
    assert found["token"]["kernels_per_layer"] < 64
    assert found["copies"]["bytes"] < found["bytes_per_device"]["parameters"] // 20
    assert found["bytes_per_device"]["temporaries"] < found["bytes_per_device"]["parameters"] // 2


TENSOR = """
config = replace(llama_jax.preset("tinyllama-1.1b"), n_layers=6)
(program,) = train_programs(
    config, mesh_for(sys.argv[1], parse_mesh("fsdp=2,tensor=4")), 8, 2048, dtype="bfloat16", packed=True
)
found = find_collectives(program.compile(flags=False).as_text(), program.mesh)  # flags unroll the loop of a GPU
print(json.dumps([[x.opcode, x.dtypes, x.bytes] for x in found if x.loops == (6,) and x.axes == ("tensor",)]))
"""


@pytest.mark.accelerators
@pytest.mark.parametrize("hardware", ["tpu-v5e", "h100"])
def test_tensor_parallelism_sums_no_more_than_it_must(hardware):
    """Of each layer what `roofline.least_traffic` counts, in 16 bits: two sums forward, one again, two backward."""
    found = look(hardware, TENSOR)
    stream = 4 * 2048 * 2048 * 2  # bytes of [B, T, D] on a device
    assert {dtype for _, dtypes, _ in found for dtype in dtypes} == {"bf16"}
    assert sum(size for kind, _, size in found if kind == "reduce-scatter") == 5 * stream // 4
    assert sum(size for kind, _, size in found if kind == "all-gather") == 6 * stream
    assert {kind for kind, *_ in found} == {"reduce-scatter", "all-gather"}


QUANTISED = """
config = replace(llama_jax.preset("llama-3.1-8b"), n_layers=4)
mesh = mesh_for(sys.argv[1], MeshSizes())
out = {}
for kind in sys.argv[2:]:
    prefill, decode = decode_programs(config, mesh, 1, 2048, dtype="bfloat16", weights=kind)
    out[kind] = [examine(program).as_dict() for program in (prefill, decode)]
print(json.dumps(out))
"""


@pytest.mark.accelerators
@pytest.mark.parametrize(
    ("hardware", "kinds"),
    [("tpu-v5e", ["int8", "int4", "q4_1"]), ("h100", ["int8", "int4", "q4_1", "mxfp4", "q3_k", "q4_k"])],
)
def test_quantized_layers_of_8b_are_never_dense(hardware, kinds):
    """Beside weights and cache, decoding and reading plan less than a layer in int8."""
    layer = 218_112_000
    found = look(hardware, QUANTISED, *kinds)
    for kind, (prefill, decode) in found.items():
        assert decode["bytes_per_device"]["temporaries"] < layer, kind
        assert prefill["bytes_per_device"]["temporaries"] < layer, kind
        # What is read for a token is what there is: a weight that is decoded first would be read twice.
        assert decode["token"]["read_ratio"] < (1.05 if QUANT_FORMATS[kind].is_gguf else 1.2), kind


DECODED = """
config = replace(llama_jax.preset("llama-3.1-8b"), n_layers=4)
options = {"dtype": "bfloat16", "packed": True, "lora": Lora(rank=16), "weights": "nf4"}
(program,) = train_programs(config, mesh_for(sys.argv[1], MeshSizes()), 1, 2048, **options)
print(json.dumps(max((copy.bytes for copy in examine(program).copies), default=0)))
"""


@pytest.mark.accelerators
def test_a_frozen_base_in_4_bits_is_decoded_without_copies_of_results():
    """What is written chunk by chunk begins as memory of its own for each weight, and a sum with its first chunk: of either
    kind the narrowest has [2048, 4096] floats."""
    assert look("h100", DECODED) < 2048 * 4096 * 4
