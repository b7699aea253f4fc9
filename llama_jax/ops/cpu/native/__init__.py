"""Kernels for models on CPUs, compiled when needed: matmuls, and attention of a few queries.

JAX's wheels contain the headers (`jax.ffi`), and the machine's compiler is used, so installing compiles nothing: the result
is kept in the user's cache folder, under a hash of everything it depends on. Each kernel is a library of its own for each
type of numbers, see `LIBRARIES`: a model needs few of them, and they are compiled beside one another.
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
import platformdirs

from llama_jax.errors import UserError, reason_of
from llama_jax.ops.exact import is_exact
from llama_jax.storage.atomic_write import write_atomically

NATIVE_FORMATS = (  # of quantized weights
    *("int8", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "mxfp4"),
    *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"),
)
PREFIX = "llama_jax_"  # of the names by which XLA calls them
FOLDER = Path(__file__).parent
FLAGS = ("-std=c++17", "-O2", "-march=native", "-shared", "-fPIC")  # -O3 takes a fifth longer
SECONDS = 120  # limit for the compiler, which takes two or three


def _libraries() -> dict[str, tuple[str, ...]]:
    types = {"float32": "float", "bfloat16": "brain", "int8": "int8_t"}
    libraries: dict[str, tuple[str, ...]] = {
        f"quantized_{kind}": ("quantized.cc", f"-DTYPE={kind}") for kind in NATIVE_FORMATS
    }
    for dtype, name in types.items():
        if dtype != "int8":
            libraries[f"floats_{dtype}"] = "floats.cc", f"-DTYPE={name}", "-O3"  # 4% faster
        libraries[f"paged_{dtype}"] = "paged.cc", f"-DTYPE={name}", "-DWHOLE=true"
        libraries[f"paged_any_{dtype}"] = "paged.cc", f"-DTYPE={name}", "-DWHOLE=false"
    # Sums in an order that no other token changes, see `ops.exact`.
    exact = {f"exact_{name}": (*source, "-DEXACT=true") for name, source in libraries.items()}
    return libraries | exact | {"rows": ("rows.cc",)}


LIBRARIES = _libraries()
"""The source file and definitions of each library, by its name; after `PREFIX`, no name contains another. Attention is for
heads whose width is a multiple of 16, or of `any`."""

_log = logging.getLogger("llama_jax.native")


def multiply(x: jax.Array, planes: tuple[jax.Array, ...], kind: str, group: jax.Array | None = None) -> jax.Array:
    """[T, D] by the planes of [N, D]: float32[T, N].

    Every 32 numbers of `x` become integers of 8 bits times a factor; for `int8` a row does, in 16 bits.

    Args:
      group: int32[]; the planes are those of [E, N, D], of which this one is multiplied.
    """
    call, more = _call(f"quantized_{kind}", len(x), planes[0].shape, group)
    return call(*more, x.astype(jnp.float32), *planes)


def multiply_floats(x: jax.Array, weight: jax.Array, group: jax.Array | None = None) -> jax.Array:
    """[T, D] by float32 or bfloat16 [N, D], in whose dtype `x` is taken: float32[T, N].

    Every row is multiplied as if it were alone, but up to six rows are summed, and so rounded, in another order than more;
    in exact programs (`ops.exact`) in the same.
    Without AVX2 only few rows are fast, see `has_tiles`.

    Args:
      group: int32[]; the weight is [E, N, D], of which this matrix is multiplied.
    """
    call, more = _call(f"floats_{weight.dtype}", len(x), weight.shape, group)
    return call(*more, x.astype(weight.dtype).astype(jnp.float32), weight)


def _call(library: str, rows: int, shape: tuple[int, ...], group: jax.Array | None) -> tuple[Any, tuple[jax.Array, ...]]:
    """The kernel, and the arguments before `x`: of one matrix, or of a group's, where the first axis is that of groups."""
    out = jax.ShapeDtypeStruct((rows, shape[0 if group is None else 1]), jnp.float32)
    return _kernel(library, out), () if group is None else (group.astype(jnp.int32),)


def _kernel(library: str, out: jax.ShapeDtypeStruct, **options: Any) -> Any:
    usable(library)  # XLA must know it when it compiles the call
    return jax.ffi.ffi_call(f"{PREFIX}{_variant(library)}", out, vmap_method="sequential", **options)


def _variant(library: str) -> str:
    """The library that takes its place in what is traced now."""
    return f"exact_{library}" if is_exact() and f"exact_{library}" in LIBRARIES else library


def attend_paged(
    queries: jax.Array, view: Any, scale: float, window: int | None = None, chunk: int | None = None
) -> jax.Array:
    """`attention.attend_paged` of pages in float32, bfloat16 or int8: float32[T, K, G, H]."""
    pages, factors = getattr(view.pages, "values", view.pages), getattr(view.pages, "scales", jnp.zeros(0, jnp.float32))
    call = _kernel(attending(pages), jax.ShapeDtypeStruct(queries.shape, jnp.float32))
    limits = {"window": np.int64(window or 0), "chunk": np.int64(chunk or 0)}
    where = (view.layer, view.table, view.lengths, view.starts)
    return call(queries.astype(jnp.float32), pages, factors, *where, scale=np.float32(scale), **limits)


def put_rows(pages: jax.Array, rows: jax.Array, places: jax.Array) -> jax.Array:
    """Pages with rows [T, ...] at int32[T] places, counted in such rows; those beyond the end are dropped."""
    call = _kernel("rows", jax.ShapeDtypeStruct(pages.shape, pages.dtype), input_output_aliases={0: 0})
    return call(pages, rows, places)


def attending(keys: jax.Array | jax.ShapeDtypeStruct) -> str:
    """The library that attends to keys [..., H] in pages."""
    return f"paged{'_any' if keys.shape[-1] % 16 else ''}_{keys.dtype}"


def has_tiles() -> bool:
    """Whether `multiply_floats` is as fast as XLA for many rows: this processor has AVX2 and its vectors."""
    return "avx2" in processor().split()


def usable(library: str) -> bool:
    """Whether there is a library, of `LIBRARIES`, for this process's CPU; if it must be compiled first, this waits.

    ``LLAMA_JAX_NATIVE=off`` says that there is none. ``CXX`` names the compiler.
    """
    return os.environ.get("LLAMA_JAX_NATIVE", "on") != "off" and _registered(_variant(library)).result()


def prepare(libraries: Iterable[str]) -> None:
    """Begin to compile what is missing of some libraries, and do not wait."""
    if os.environ.get("LLAMA_JAX_NATIVE", "on") != "off":
        for library in libraries:
            _registered(_variant(library))


def called_in(executable: bytes) -> tuple[str, ...]:
    """The libraries whose kernels an executable calls."""
    return tuple(name for name in LIBRARIES if f"{PREFIX}{name}".encode() in executable)


def compiler() -> str | None:
    """The path of the C++ compiler; None if there is none, or no kernel is wanted."""
    if os.environ.get("LLAMA_JAX_NATIVE", "on") == "off":
        return None
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)


_lock = threading.Lock()  # of what follows
_slots = threading.Semaphore(os.cpu_count() or 1)  # for as many compilers at a time
_futures: dict[str, Future[bool]] = {}
_results: dict[str, bool] = {}  # of the futures that have one
_running: set[subprocess.Popen[str]] = set()
_ended = False  # whether this process ends


def _registered(library: str) -> Future[bool]:
    """Whether XLA can call it, in the end. Its thread is a daemon, so that nothing waits for it at exit."""
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
def _end() -> None:
    """Stop the compilers, and let their threads remove the files that these have begun."""
    global _ended
    with _lock:
        _ended = True
        for process in _running:
            _stop(process, kill=False)
    wait(_futures.values(), timeout=1)


def _forget_unfinished() -> None:
    """In a forked process, which has no thread that would finish it; and another may have held any lock."""
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
        loaded = ctypes.CDLL(str(_compiled(library)))
        jax.ffi.register_ffi_target(f"{PREFIX}{library}", jax.ffi.pycapsule(loaded.llama_jax_run), platform="cpu")
    except (OSError, subprocess.SubprocessError, UserError, AttributeError, RuntimeError) as error:  # the last is XLA's
        if _ended:  # by which its compiler was stopped
            return False
        _say_missing("quantized" in library, reason_of(error, 300))
        return False
    return True


@cache
def _say_missing(quantized: bool, reason: str) -> None:
    what = "quantized weights are multiplied" if quantized else "models are decoded"
    level = logging.WARNING if quantized else logging.INFO  # XLA's own floats are no surprise
    _log.log(level, "%s by XLA, slower: no native kernel (%s)", what, reason)


@cache
def _say_compiling(folder: Path) -> None:
    _log.warning("compiling kernels for this processor, once; it takes some seconds (%s)", folder)


def _compiled(library: str) -> Path:
    """The file of a library.

    Raises:
      OSError, UserError, SubprocessError: there is no compiler, or it fails, or the cache folder cannot be written.
    """
    cxx = compiler()
    if cxx is None:
        raise OSError("no C++ compiler was found; install g++ or clang++")
    source, *definitions = LIBRARIES[library]
    flags = [*FLAGS, *definitions]
    about = (_sources(), _version(cxx), " ".join(flags), processor(), jaxlib.__version__)
    name = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    folder = Path(platformdirs.user_cache_dir("llama_jax")) / "native"
    path = folder / f"{library}-{name}.so"
    if not path.exists():
        _say_compiling(folder)
        with write_atomically(path) as temporary:
            done = _run([cxx, *flags, f"-isystem{jax.ffi.include_dir()}", str(FOLDER / source), "-o", str(temporary)])
            if done.returncode:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
                raise UserError(f"{cxx} fails: {first}")
    return path


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """What a compiler has written, in a group of processes of its own, so that those which it starts end with it."""
    with _lock:
        if _ended:
            raise OSError("this process ends")
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, errors="replace", process_group=0)
        _running.add(process)
    try:
        with process:
            try:
                out, said = process.communicate(timeout=SECONDS)
            except BaseException:
                _stop(process, kill=True)
                raise
    finally:
        with _lock:
            _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, out, said)


def _stop(process: subprocess.Popen[str], kill: bool) -> None:
    """End a compiler and what it has started; unless it is killed, it removes its temporary files."""
    if process.poll() is None:
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError):  # it has ended since
                os.killpg(process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        else:
            process.kill()


@cache
def _version(cxx: str) -> str:
    done = _run([cxx, "--version"])
    done.check_returncode()
    return done.stdout


@cache
def _sources() -> str:
    return "\0".join(file.read_text() for file in sorted((*FOLDER.glob("*.cc"), *FOLDER.glob("*.h"))))


@cache
def processor() -> str:
    """The processor's features, so that a cache folder shared by machines has a kernel for each kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.machine() + platform.processor()
