"""Does `llama-jax estimate` predict the memory that a process uses?

Each case runs in a separate process: the program is compiled, its arguments are allocated, and it runs twice. The first run
loads whatever is loaded only once; during the second, the kernel records the peak memory of the process (VmHWM of Linux,
minus the memory used without any array). This is compared with the estimate, which is computed from shapes.

    python experiments/check_estimate.py

glibc retains freed memory; MALLOC_MMAP_THRESHOLD_ makes every buffer a separate mapping, so that the process holds only live
memory. The table gives two ratios to the measured memory: of the estimate, and of XLA's plan without the scratch memory of
YNNPACK's kernels (`analysis.memory.kernel_scratch`).
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from measuring import devices, versions, write_report


@dataclass(frozen=True)
class Case:
    """One program; `length` is the cache's capacity except for the train step."""

    program: str
    preset: str
    mesh: str
    batch: int
    length: int
    dtype: str = "float32"
    remat: str = "full"


CASES = (
    Case("train step", "stories-15m", "data=1", 8, 256),
    Case("train step", "stories-15m", "data=1", 8, 256, remat="none"),
    Case("train step", "stories-15m", "data=1", 2, 64),
    Case("train step", "stories-42m", "data=1", 8, 512),
    Case("train step", "stories-42m", "data=1", 4, 256, remat="none"),
    Case("train step", "stories-42m", "data=1", 8, 512, dtype="bfloat16"),
    Case("train step", "stories-42m", "fsdp=4", 8, 512),
    Case("train step", "stories-42m", "fsdp=2,tensor=2", 8, 512),
    Case("train step", "stories-42m", "tensor=8", 8, 512),
    Case("train step", "stories-42m", "data=2,fsdp=2,tensor=2", 8, 256),
    Case("prefill", "stories-110m", "data=1", 4, 2048),
    Case("prefill", "stories-110m", "fsdp=2,tensor=2", 4, 2048),
    Case("prefill", "stories-110m", "data=1", 1, 1024, dtype="bfloat16"),
    Case("decode", "stories-110m", "data=1", 1, 8192),
    Case("decode", "stories-110m", "data=1", 4, 2048),
    Case("decode", "stories-110m", "fsdp=2,tensor=2", 4, 2048),
    Case("decode", "stories-110m", "data=1", 1, 4096, dtype="bfloat16"),
)


@dataclass(frozen=True)
class Arguments:
    """Compare estimates with the memory that processes use."""

    output: Path = Path("experiments/results/check_estimate_cpu.json")


def check(case: Case) -> dict[str, Any]:
    """Estimate and measure one case, in a separate process."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # glibc reads it when a process starts
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_measure, case).result()


def _measure(case: Case) -> dict[str, Any]:
    from llama_jax.cli.estimate import simulate_devices
    from llama_jax.parallel.mesh import make_mesh, parse_mesh

    sizes = parse_mesh(case.mesh)
    simulate_devices(sizes.devices)
    import jax
    import jax.numpy as jnp

    import llama_jax
    from llama_jax.analysis.memory import decode_programs, train_programs

    config, mesh = llama_jax.preset(case.preset), make_mesh(sizes)
    if case.program == "train step":
        programs = train_programs(config, mesh, case.batch, case.length, dtype=case.dtype, remat=case.remat)
    else:
        programs = decode_programs(config, mesh, case.batch, case.length, dtype=case.dtype)
    (program,) = (found for found in programs if found.name == case.program)
    memory = program.memory()

    def make(shape: jax.ShapeDtypeStruct) -> jax.Array:
        """Values with which the program runs: one prefilled token, one step to decode, no finished row."""
        value = 0.01 if jnp.issubdtype(shape.dtype, jnp.floating) else shape.dtype != bool
        return jnp.full(shape.shape, value, shape.dtype)

    places = jax.tree.map(lambda a: a.sharding, program.arguments)
    allocate = jax.jit(lambda: jax.tree.map(make, program.arguments), out_shardings=places)
    run = program.function.lower(*program.arguments).compile()

    jax.block_until_ready(run(*allocate()))
    empty = _settled()
    arguments = jax.block_until_ready(allocate())
    _settled()
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    jax.block_until_ready(run(*arguments))
    held = _status("VmHWM") - empty
    alone = (memory.total - memory.scratch) * sizes.devices
    estimate = memory.total * sizes.devices
    return asdict(case) | {
        "estimate_mb": round(estimate / 1e6, 1),
        "held_mb": round(held / 1e6, 1),
        "ratio": round(estimate / held, 3),
        "ratio_of_plan_alone": round(alone / held, 3),
    }


def _settled() -> int:
    """Resident bytes after freed buffers, which XLA releases in its own threads, are returned to the system."""
    gc.collect()
    before, now = -1, 0
    while before != now:
        time.sleep(0.3)
        ctypes.CDLL(None).malloc_trim(0)
        before, now = now, _status("VmRSS")
    return now


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this measurement needs Linux")


def main(arguments: Arguments) -> None:

    print(f"{'program':<12}{'preset':<14}{'mesh':<24}{'batch x length':<16}{'dtype':<10}{'remat':<7}", end="")
    print(f"{'estimate MB':>12}{'held MB':>10}{'ratio':>8}{'plan alone':>12}")
    results = []
    for case in CASES:
        r = check(case)
        results.append(r)
        print(
            f"{r['program']:<12}{r['preset']:<14}{r['mesh']:<24}{r['batch']:>3} x {r['length']:<10}{r['dtype']:<10}", end=""
        )
        print(f"{r['remat'] if r['program'] == 'train step' else '':<7}{r['estimate_mb']:>12}{r['held_mb']:>10}", end="")
        print(f"{r['ratio']:>8}{r['ratio_of_plan_alone']:>12}", flush=True)
    libc = " ".join(platform.libc_ver())  # its malloc affects the measurement
    about = {"device": devices(), "versions": versions("jax", "jaxlib") | {"libc": libc}}
    write_report(arguments.output, about | {"cases": results})


if __name__ == "__main__":
    main(tyro.cli(Arguments))
