"""Kernels for models on CPUs, compiled when needed: matmuls, and attention of a few queries.

JAX's wheels contain the headers (`jax.ffi`), and the machine's compiler is used, so installing compiles nothing: the result
is kept in the user's cache folder, under a hash of everything it depends on. There are two libraries, `floats`
for float32 and bfloat16, and `blocks` for quantised weights.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import platformdirs

from llama_jax.errors import UserError, reason_of
from llama_jax.storage.atomic_write import write_atomically

TARGET, FLOATS, ATTENTION = "llama_jax_multiply", "llama_jax_floats", "llama_jax_attend"
PAGED_ATTENTION, PUT = "llama_jax_attend_paged", "llama_jax_put_rows"
OF_GROUP = "_of_group"  # ends the names of the kernels that multiply with one of several matrices
# Of quantised weights; blocks.cc uses the indices.
KINDS = (
    *("int8", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4"),
    *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"),
)
# The functions of each library, which are registered by the names above.
SYMBOLS = {
    "floats": (
        *("llama_jax_floats", "llama_jax_floats_of_group", "llama_jax_attend", "llama_jax_attend_of_group"),
        *("llama_jax_attend_paged", "llama_jax_put_rows"),
    ),
    "blocks": ("llama_jax_multiply", "llama_jax_multiply_of_group"),
}
FOLDER = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")
SECONDS = 120  # limit for the compiler, which takes five for `floats` and ten for `blocks`

_log = logging.getLogger("llama_jax.native")


def multiply(x: jax.Array, planes: tuple[jax.Array, ...], kind: str, group: jax.Array | None = None) -> jax.Array:
    """[T, D] by the planes of [N, D]: float32[T, N].

    Every 32 numbers of `x` become integers of 8 bits times a factor; for `int8` a row does, in 16 bits.

    Args:
      group: int32[]; the planes are those of [E, N, D], of which this one is multiplied.
    """
    call, more = _call(TARGET, len(x), planes[0].shape, group)
    return call(*more, x.astype(jnp.float32), *planes, kind=np.int64(KINDS.index(kind)))


def multiply_floats(x: jax.Array, weight: jax.Array, group: jax.Array | None = None) -> jax.Array:
    """[T, D] by float32 or bfloat16 [N, D], in whose dtype `x` is taken: float32[T, N].

    Every row is multiplied as if it were alone, but up to six rows are summed, and so rounded, in another order than more.
    Without AVX2 only few rows are fast, see `has_tiles`.

    Args:
      group: int32[]; the weight is [E, N, D], of which this matrix is multiplied.
    """
    call, more = _call(FLOATS, len(x), weight.shape, group)
    return call(*more, x.astype(weight.dtype).astype(jnp.float32), weight)


def _call(target: str, rows: int, shape: tuple[int, ...], group: jax.Array | None) -> tuple[Any, tuple[jax.Array, ...]]:
    """The kernel, and the arguments before `x`: of one matrix, or of a group's, where the first axis is that of groups."""
    out = jax.ShapeDtypeStruct((rows, shape[0 if group is None else 1]), jnp.float32)
    name = target if group is None else target + OF_GROUP
    return jax.ffi.ffi_call(name, out, vmap_method="sequential"), () if group is None else (group.astype(jnp.int32),)


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: jax.Array,
    scale: float,
    layer: jax.Array | None = None,
) -> jax.Array:
    """Attention of [B, K, T, G, H] to keys and values [B, K, S, H], both float32 or bfloat16: float32[B, K, T, G, H].

    Args:
      seen: int32[B | 1, T], how many slots, from the first on, the queries see; no other slot is read.
      layer: int32[]; keys and values are [L, B, K, S, H], of which those of this layer are read.
    """
    name, more = (ATTENTION, ()) if layer is None else (ATTENTION + OF_GROUP, (layer.astype(jnp.int32),))
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(queries.shape, jnp.float32), vmap_method="sequential")
    return call(*more, queries.astype(jnp.float32), keys, values, seen, scale=np.float32(scale))


def attend_paged(
    queries: jax.Array, view: Any, scale: float, window: int | None = None, sinks: int = 0, chunk: int | None = None
) -> jax.Array:
    """`attention.attend_paged` of pages in float32, bfloat16 or int8: float32[T, K, G, H]."""
    pages, factors = getattr(view.pages, "values", view.pages), getattr(view.pages, "scales", jnp.zeros(0, jnp.float32))
    call = jax.ffi.ffi_call(PAGED_ATTENTION, jax.ShapeDtypeStruct(queries.shape, jnp.float32), vmap_method="sequential")
    limits = {"window": np.int64(window or 0), "sinks": np.int64(sinks), "chunk": np.int64(chunk or 0)}
    where = (view.layer, view.table, view.lengths, view.starts)
    return call(queries.astype(jnp.float32), pages, factors, *where, scale=np.float32(scale), **limits)


def put_rows(pages: jax.Array, rows: jax.Array, places: jax.Array) -> jax.Array:
    """Pages with rows [T, ...] at int32[T] places, counted in such rows; those beyond the end are dropped."""
    call = jax.ffi.ffi_call(
        PUT, jax.ShapeDtypeStruct(pages.shape, pages.dtype), input_output_aliases={0: 0}, vmap_method="sequential"
    )
    return call(pages, rows, places)


def has_tiles() -> bool:
    """Whether `multiply_floats` is as fast as XLA for many rows: this processor has AVX2 and its vectors."""
    return "avx2" in processor().split()


def usable(library: str) -> bool:
    """Whether there is a `library` for this process's CPU, "floats" or "blocks"; if it must be compiled first, this waits.

    ``LLAMA_JAX_NATIVE=off`` says that there is none. ``CXX`` names the compiler.
    """
    return os.environ.get("LLAMA_JAX_NATIVE", "on") != "off" and _register(library)


def compiler() -> str | None:
    """The path of the C++ compiler; None if there is none, or no kernel is wanted."""
    if os.environ.get("LLAMA_JAX_NATIVE", "on") == "off":
        return None
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)


@cache
def _register(library: str) -> bool:
    floats = FLOATS, FLOATS + OF_GROUP, ATTENTION, ATTENTION + OF_GROUP, PAGED_ATTENTION, PUT
    names = {"floats": floats, "blocks": (TARGET, TARGET + OF_GROUP)}
    try:
        loaded = ctypes.CDLL(str(_compiled(FOLDER / f"{library}.cc")))
        for name, symbol in zip(names[library], SYMBOLS[library], strict=True):
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, symbol)), platform="cpu")
    except (OSError, subprocess.SubprocessError, UserError, AttributeError) as error:
        what = {"floats": "models are decoded", "blocks": "quantised weights are multiplied"}[library]
        level = logging.WARNING if library == "blocks" else logging.INFO  # XLA's own floats are no surprise
        _log.log(level, "%s by XLA, slower: no native kernel (%s)", what, reason_of(error, 300))
        return False
    return True


def _compiled(source: Path) -> Path:
    """The library of a source file.

    Raises:
      OSError, UserError, SubprocessError: there is no compiler, or it fails, or the cache folder cannot be written.
    """
    found = compiler()
    if found is None:
        raise OSError("no C++ compiler was found; install g++ or clang++")
    run = partial(subprocess.run, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    version = run([found, "--version"], check=True).stdout
    files = [file.read_text() for file in sorted((source, *FOLDER.glob("*.h")))]
    about = (*files, version, " ".join(FLAGS), processor(), jaxlib.__version__)
    name = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    folder = Path(platformdirs.user_cache_dir("llama_jax")) / "native"
    library = folder / f"{source.stem}-{name}.so"
    if not library.exists():
        _log.warning("compiling kernels for this processor, once; it takes some seconds (%s)", library)
        with write_atomically(library) as made:
            command = [found, *FLAGS, f"-isystem{jax.ffi.include_dir()}", str(source), "-o", str(made)]
            done = run(command, check=False)
            if done.returncode:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
                raise UserError(f"{found} fails: {first}")
    return library


@cache
def processor() -> str:
    """The processor's features, so that a cache folder shared by machines has a kernel for each kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.machine() + platform.processor()
