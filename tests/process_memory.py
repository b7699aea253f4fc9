"""The memory that a process takes for a program, next to the estimate of `llama_jax.analysis.memory`; needs Linux.

The program is compiled, its arguments are allocated, and it runs twice. The first run loads what is loaded only once; during
the second, the kernel records the peak memory of the process, minus the memory used without any array. glibc retains freed
memory: MALLOC_MMAP_THRESHOLD_ makes every buffer a separate mapping, so that the process holds only live memory.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProgramCase:
    """One program; `length` is the cache's capacity except for the train step."""

    program: str
    preset: str
    mesh: str
    batch: int
    length: int
    dtype: str = "float32"
    remat: str = "full"


def estimate_ratio(case: ProgramCase) -> float:
    """The estimate relative to the measured memory, from a separate process."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # glibc reads it when a process starts
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure_ratio, case).result()


def _measure_ratio(case: ProgramCase) -> float:
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
    (program,) = (program for program in programs if program.name == case.program)

    def make(shape: jax.ShapeDtypeStruct) -> jax.Array:
        """Values with which the program runs: one prefilled token, one step to decode, no finished row."""
        value = 0.01 if jnp.issubdtype(shape.dtype, jnp.floating) else shape.dtype != bool
        return jnp.full(shape.shape, value, shape.dtype)

    shardings = jax.tree.map(lambda a: a.sharding, program.arguments)
    allocate = jax.jit(lambda: jax.tree.map(make, program.arguments), out_shardings=shardings)
    run = program.function.lower(*program.arguments).compile()
    jax.block_until_ready(run(*allocate()))
    empty = _settled_bytes()
    arguments = jax.block_until_ready(allocate())
    _settled_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    jax.block_until_ready(run(*arguments))
    return program.memory().total * sizes.devices / (_status_bytes("VmHWM") - empty)


def _settled_bytes() -> int:
    """Resident bytes after freed buffers, which XLA releases in its own threads, are returned to the system."""
    gc.collect()
    before, now = -1, 0
    while before != now:
        time.sleep(0.3)
        ctypes.CDLL(None).malloc_trim(0)
        before, now = now, _status_bytes("VmRSS")
    return now


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
