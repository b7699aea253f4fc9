"""CPU kernels, compiled when needed: matmuls, and attention of a few queries.

They are compiled with the machine's compiler and the headers in JAX's wheels (`jax.ffi`), not at installation. The results
are kept in the user's cache folder, under a hash of everything they depend on. Each kernel is a separate library for each
type of numbers, see `LIBRARIES`: a model needs few of them, and they are compiled in parallel.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from llama_jax.errors import UserError, reason_of
from llama_jax.storage.atomic_write import write_atomically
from llama_jax.storage.paths import cache_folder

NATIVE_FORMATS = (  # quantization formats with a native matmul
    *("int8", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4"),
    *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"),
)
KERNEL_PREFIX = "llama_jax_"  # of the kernels' names in XLA
SOURCE_FOLDER = Path(__file__).parent
COMPILER_FLAGS = ("-std=c++17", "-O2", "-march=native", "-shared", "-fPIC")  # -O3 takes a fifth longer
COMPILER_SECONDS = 120  # timeout of the compiler, which takes two or three


def _libraries() -> dict[str, tuple[str, ...]]:
    types = {"float32": "float", "bfloat16": "brain", "int8": "int8_t"}
    libraries: dict[str, tuple[str, ...]] = {
        f"quantized_{quant_format}": ("quantized.cc", f"-DTYPE={quant_format}") for quant_format in NATIVE_FORMATS
    }
    for dtype, name in types.items():
        if dtype != "int8":
            libraries[f"floats_{dtype}"] = "floats.cc", f"-DTYPE={name}", "-O3"  # 4% faster
        libraries[f"paged_{dtype}"] = "paged.cc", f"-DTYPE={name}", "-DWHOLE=true"
        libraries[f"paged_any_{dtype}"] = "paged.cc", f"-DTYPE={name}", "-DWHOLE=false"
    # The order of their sums does not depend on other tokens, see `ops.exact`.
    exact = {f"exact_{name}": (*source, "-DEXACT=true") for name, source in libraries.items()}
    return libraries | exact | {"rows": ("rows.cc",)}


LIBRARIES = _libraries()
"""The source file and definitions of each library, by name; after `KERNEL_PREFIX`, no name contains another. Attention
libraries are for head widths that are multiples of 16; those with `any` are for all widths."""

_log = logging.getLogger("llama_jax.native")


def multiply_quantized(
    x: jax.Array, planes: tuple[jax.Array, ...], quant_format: str, group: jax.Array | None = None, *, exact: bool = False
) -> jax.Array:
    """[T, D] times the planes of [N, D]: float32[T, N].

    Every 32 values of `x` become 8-bit integers times a scale; for `int8`, each row becomes 16-bit integers times a scale.

    Args:
      group: int32[], the index of the matrix to multiply by, if the planes are those of [E, N, D].
      exact: use the library of exact programs.
    """
    call, index = _kernel_call(library_name(f"quantized_{quant_format}", exact), len(x), planes[0].shape, group)
    return call(*index, x.astype(jnp.float32), *planes)


def multiply_floats(x: jax.Array, weight: jax.Array, group: jax.Array | None = None, *, exact: bool = False) -> jax.Array:
    """[T, D], rounded to the dtype of the weight, times float32 or bfloat16 [N, D]: float32[T, N].

    A row's result does not depend on the other rows, except that up to six rows are summed, and so rounded, in another order
    than more rows. In exact programs (`ops.exact`) the order is always the same.
    Without AVX2 only few rows are fast, see `has_tiles`.

    Args:
      group: int32[], the index of the matrix to multiply by, if the weight is [E, N, D].
      exact: use the library of exact programs.
    """
    call, index = _kernel_call(library_name(f"floats_{weight.dtype}", exact), len(x), weight.shape, group)
    return call(*index, x.astype(weight.dtype).astype(jnp.float32), weight)


def _kernel_call(
    library: str, rows: int, shape: tuple[int, ...], group: jax.Array | None
) -> tuple[Any, tuple[jax.Array, ...]]:
    """The kernel, and its arguments before `x`: none, or the index of a group's matrix."""
    out = jax.ShapeDtypeStruct((rows, shape[0 if group is None else 1]), jnp.float32)
    return _kernel(library, out), () if group is None else (group.astype(jnp.int32),)


def _kernel(library: str, out: jax.ShapeDtypeStruct, **options: Any) -> Any:
    usable(library)  # XLA must know it when it compiles the call
    return jax.ffi.ffi_call(f"{KERNEL_PREFIX}{library}", out, vmap_method="sequential", **options)


def library_name(library: str, exact: bool) -> str:
    """A library of `LIBRARIES`, or the one that exact programs use in its place."""
    return f"exact_{library}" if exact and f"exact_{library}" in LIBRARIES else library


def attend_pages(
    queries: jax.Array,
    view: Any,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    *,
    exact: bool = False,
) -> jax.Array:
    """`attention.attend_paged` for pages in float32, bfloat16 or int8: float32[T, K, G, H]."""
    pages, factors = getattr(view.pages, "values", view.pages), getattr(view.pages, "scales", jnp.zeros(0, jnp.float32))
    call = _kernel(library_name(attending(pages), exact), jax.ShapeDtypeStruct(queries.shape, jnp.float32))
    limits = {"window": np.int64(window or 0), "chunk": np.int64(chunk or 0)}
    where = (view.layer, view.table, view.lengths, view.starts)
    return call(queries.astype(jnp.float32), pages, factors, *where, scale=np.float32(scale), **limits)


def put_rows(pages: jax.Array, rows: jax.Array, places: jax.Array) -> jax.Array:
    """Write rows [T, ...] at flat indices int32[T] of pages; indices beyond the end are dropped."""
    call = _kernel("rows", jax.ShapeDtypeStruct(pages.shape, pages.dtype), input_output_aliases={0: 0})
    return call(pages, rows, places)


def attending(keys: jax.Array | jax.ShapeDtypeStruct) -> str:
    """The name of the library for attention to keys [..., H] in pages."""
    return f"paged{'_any' if keys.shape[-1] % 16 else ''}_{keys.dtype}"


def has_tiles() -> bool:
    """Whether `multiply_floats` is as fast as XLA for many rows: whether this processor has AVX2."""
    return "avx2" in processor().split()


def usable(library: str) -> bool:
    """Whether a library of `LIBRARIES` is available on this CPU; compiles it first if necessary.

    ``LLAMA_JAX_NATIVE=off`` disables all libraries. ``CXX`` names the compiler.
    """
    return os.environ.get("LLAMA_JAX_NATIVE", "on") != "off" and _registered(library).result()


def prepare(libraries: Iterable[str]) -> None:
    """Start to compile those of the libraries that are missing, without waiting."""
    if os.environ.get("LLAMA_JAX_NATIVE", "on") != "off":
        for library in libraries:
            _registered(library)


def compiler() -> str | None:
    """The path of the C++ compiler; None if there is none, or if native code is disabled."""
    if os.environ.get("LLAMA_JAX_NATIVE", "on") == "off":
        return None
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)


_lock = threading.Lock()  # guards the following variables
_slots = threading.Semaphore(os.cpu_count() or 1)  # limits concurrent compilers
_futures: dict[str, Future[bool]] = {}
_results: dict[str, bool] = {}  # of the finished futures
_running: set[subprocess.Popen[str]] = set()
_ended = False  # whether this process is exiting


def _registered(library: str) -> Future[bool]:
    """A future of whether XLA can call a library. Its thread is a daemon, so that the exit does not wait for it."""
    with _lock:
        if library not in _futures:
            future: Future[bool] = Future()
            threading.Thread(target=_fulfill, args=(future, library), name=library, daemon=True).start()
            _futures[library] = future
        return _futures[library]


def _fulfill(future: Future[bool], library: str) -> None:
    try:
        with _slots:
            result = _results[library] = _register(library)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


@atexit.register
def _stop_compilers() -> None:
    """Stop the compilers, and let their threads remove unfinished files."""
    global _ended
    with _lock:
        _ended = True
        for process in _running:
            _stop_process(process, kill=False)
    wait(_futures.values(), timeout=1)


def _forget_unfinished() -> None:
    """Reset the state in a forked process: it lacks the threads that would finish, and locks may be held."""
    global _lock, _slots, _futures
    _lock, _slots = threading.Lock(), threading.Semaphore(os.cpu_count() or 1)
    _running.clear()
    _futures = {library: Future() for library in _results}
    for library, future in _futures.items():
        future.set_result(_results[library])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_unfinished)


def _register(library: str) -> bool:
    try:
        loaded = ctypes.CDLL(str(_compiled_library(library)))
        jax.ffi.register_ffi_target(f"{KERNEL_PREFIX}{library}", jax.ffi.pycapsule(loaded.llama_jax_run), platform="cpu")
    except (OSError, subprocess.SubprocessError, UserError, AttributeError, RuntimeError) as error:  # the last is XLA's
        if _ended:  # the exit stopped the compiler
            return False
        _say_missing("quantized" in library, reason_of(error, 300))
        return False
    return True


@cache
def _say_missing(quantized: bool, reason: str) -> None:
    what = "quantized weights are multiplied" if quantized else "models are decoded"
    level = logging.WARNING if quantized else logging.INFO  # XLA's float matmuls are expected
    _log.log(level, "%s by XLA, slower: no native kernel (%s)", what, reason)


@cache
def _say_compiling(folder: Path) -> None:
    _log.warning("compiling kernels for this processor, once; this takes a few seconds (%s)", folder)


def _compiled_library(library: str) -> Path:
    """The file of a library.

    Raises:
      OSError, UserError, SubprocessError: there is no compiler, it fails, or the cache folder is not writable.
    """
    cxx = compiler()
    if cxx is None:
        raise OSError("no C++ compiler was found; install g++ or clang++")
    source, *definitions = LIBRARIES[library]
    flags = [*COMPILER_FLAGS, *definitions]
    about = (_kernel_sources(), _version(cxx), " ".join(flags), processor(), jaxlib.__version__)
    name = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    folder = cache_folder() / "native"
    path = folder / f"{library}-{name}.so"
    if not path.exists():
        _say_compiling(folder)
        with write_atomically(path) as temporary:
            done = _run_compiler(
                [cxx, *flags, f"-isystem{jax.ffi.include_dir()}", str(SOURCE_FOLDER / source), "-o", str(temporary)]
            )
            if done.returncode:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
                raise UserError(f"{cxx} failed: {first}")
    return path


def _run_compiler(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler in a separate process group, so that its child processes end with it."""
    with _lock:
        if _ended:
            raise OSError("this process is exiting")
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace", process_group=0)
        _running.add(process)
    try:
        with process:
            try:
                out, said = process.communicate(timeout=COMPILER_SECONDS)
            except BaseException:
                _stop_process(process, kill=True)
                raise
    finally:
        with _lock:
            _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, out, said)


def _stop_process(process: subprocess.Popen[str], kill: bool) -> None:
    """End a compiler and its child processes; unless killed, it removes its temporary files."""
    if process.poll() is None:
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        else:
            process.kill()


@cache
def _version(cxx: str) -> str:
    done = _run_compiler([cxx, "--version"])
    done.check_returncode()
    return done.stdout


@cache
def _kernel_sources() -> str:
    return "\0".join(file.read_text() for file in sorted((*SOURCE_FOLDER.glob("*.cc"), *SOURCE_FOLDER.glob("*.h"))))


@cache
def processor() -> str:
    """The processor's features, so that a cache folder shared by machines has kernels for each type of processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.machine() + platform.processor()
