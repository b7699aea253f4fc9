"""For all commands that compile: the cache of compiled programs and the time that compiling took."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax

from llama_jax.cli.terminal import print_status
from llama_jax.errors import UserError, reason_of
from llama_jax.inference.xla_flags import keep_freed_memory, set_flags
from llama_jax.storage.paths import cache_folder

MIN_FREE_BYTES = 2**20  # bytes on the disk of the compilation cache; a program takes some hundred thousand


def use_compilation_cache(off: bool = False) -> None:
    """Keep what JAX compiles in `cache_folder`, so that a second start does not compile again.

    ``JAX_COMPILATION_CACHE_DIR`` names another folder; ``JAX_ENABLE_COMPILATION_CACHE=false``, or `off`, turns it off.
    """
    if off or not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]  # made when JAX is imported
        jax.config.update("jax_enable_compilation_cache", False)
        return
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(cache_folder()))
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", folder)
    problem = reason_unwritable(folder)
    if problem is not None:
        print_status(
            f"compiled programs are not cached: {folder} cannot be written ({problem}); set JAX_COMPILATION_CACHE_DIR to"
            " another folder"
        )
        # JAX would warn about every program. Existing files are still read.
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    # By default only programs that took over a second are kept; a generation needs several smaller ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def reason_unwritable(cache: str) -> str | None:
    """Why JAX cannot write to a folder of its cache, which is made if it is missing; None if it can, or for a URL."""
    if not cache or "://" in cache:
        return None
    folder = Path(cache)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return os.strerror(errno.EACCES)
        return os.strerror(errno.ENOSPC) if shutil.disk_usage(folder).free < MIN_FREE_BYTES else None
    except OSError as error:
        return error.strerror or str(error)


def start_backend(*, training: bool = False) -> None:
    """Start JAX's device backend with the flags of its platform, see `llama_jax.inference.xla_flags`.

    A missing backend is an error of one line, before anything is loaded; flags that this XLA does not have are reported.
    """
    if training:
        keep_freed_memory()
    unknown = set_flags(training=training).unknown
    if unknown:
        print_status(f"flags that this version of XLA does not have are omitted: {', '.join(unknown)}")
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion where the platform's plugin is not installed
        reason = reason_of(error, 200) or f"no plugin for JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise UserError(f"JAX finds no device ({reason}); set JAX_PLATFORMS=cpu to use the CPU") from None


def loading_bar(layers: Sequence[int]) -> Iterable[int]:
    """A bar of layers being read, if that takes over a second and stderr is a terminal."""
    from llama_jax.runs.log import progress_bar

    return progress_bar("loading", "layers", delay=1.0)(layers)


class CompileClock:
    """Seconds in which programs were traced, lowered, compiled or loaded since it was made; by several threads, once."""

    EVENTS = frozenset(
        f"/jax/core/compile/{stage}_duration" for stage in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
    )

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []  # apart from each other, rising
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in self.EVENTS:
            with self._lock:
                end = time.perf_counter()
                begin = end - duration_secs
                while self._spans and self._spans[-1][1] >= begin:  # it happened meanwhile, or within
                    begin = min(begin, self._spans.pop()[0])
                self._spans.append((begin, end))

    @property
    def seconds(self) -> float:
        with self._lock:
            return sum(end - begin for begin, end in self._spans)


class Clock:
    """Seconds of prefill and the rate of decoding, without what compiling took."""

    def __init__(self, compiling: CompileClock) -> None:
        self._compiling = compiling
        self.prefill_seconds = 0.0
        self._decoded: list[tuple[int, float, bool]] = []  # tokens, seconds, whether the chunk compiled something
        self.begin()

    def begin(self) -> None:
        """Call at the beginning of a stream."""
        self._last = time.perf_counter(), self._compiling.seconds
        self._prefilled = False

    def record_chunk(self, tokens: int) -> None:
        """Call for each chunk of a stream: the first ends the prefill."""
        now = time.perf_counter(), self._compiling.seconds
        elapsed, compiled = (b - a for a, b in zip(self._last, now, strict=True))
        if self._prefilled:
            self._decoded.append((tokens, elapsed - compiled, compiled > 0))
        else:
            self.prefill_seconds += elapsed - compiled
        self._last, self._prefilled = now, True

    @property
    def decode_rate(self) -> float:
        """Tokens per second. Chunks with a new program, which takes time to load, count only if there are no others."""
        counted = [record_chunk for record_chunk in self._decoded if not record_chunk[2]] or self._decoded
        seconds = sum(record_chunk[1] for record_chunk in counted)
        return round(sum(record_chunk[0] for record_chunk in counted) / seconds, 1) if seconds > 0 else 0.0
