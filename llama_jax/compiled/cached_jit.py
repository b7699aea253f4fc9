"""`jax.jit` with a persistent executable cache: a second process loads the executable instead of tracing."""

from __future__ import annotations

import hashlib
import logging
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.config import trace_context  # the state that JAX keeps its own programs by; there is no public form
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from llama_jax.compiled import keys, store
from llama_jax.errors import reason_of
from llama_jax.ops.platform import cpu_variants, log_backend, record_backends

LOAD_DURATION_EVENT = "/llama_jax/executable_load_duration"
"""The `jax.monitoring` event with the seconds that loading an executable took."""

_log = logging.getLogger("llama_jax.compiled")

Program = Callable[..., Any]


class StoredProgram(NamedTuple):
    """The content of a file: an executable, what loading it needs, and the attention backends that tracing would have
    logged.

    Attributes:
      executable: serialized by `jax.experimental.serialize_executable`.
      results: the shapes and dtypes of its results, a pytree.
      native: the libraries of `ops.cpu.native` that it calls.
      attention: the attention backends that it uses and the reasons, as from `record_backends`.
    """

    executable: bytes
    results: Any
    native: tuple[str, ...]
    attention: dict[str, str]


def jit(
    function: Program,
    *,
    static_argnums: int | tuple[int, ...] = (),
    donate_argnums: int | tuple[int, ...] = (),
    compiler_options: Mapping[str, Any] | None = None,
) -> CompiledFunction:
    """`jax.jit` for functions of this library, with executables stored in the folder LLAMA_JAX_EXECUTABLES.

    Without such a folder, inside a function that is being traced, or if an argument or the platform rules it out, it is
    plain `jax.jit`. All arguments are positional.
    """
    static, donated = ((n,) if isinstance(n, int) else n for n in (static_argnums, donate_argnums))
    return CompiledFunction(function, static, donated, dict(compiler_options or {}))


class CompiledFunction:
    """The result of `jit`: a callable that loads or compiles one executable per signature.

    Attributes:
      lower, trace: those of `jax.jit`, for inspecting the lowered program.
    """

    def __init__(
        self, function: Program, static: tuple[int, ...], donated: tuple[int, ...], options: dict[str, Any]
    ) -> None:
        self._function = function
        self._static = static
        self._about = f"static {static} donated {donated} options {sorted(options.items())}"
        self._jitted: Any = jax.jit(
            function, static_argnums=static, donate_argnums=donated, compiler_options=options or None
        )
        self._programs: dict[Hashable, Program | None] = {}  # by `_signature`; None: call `jax.jit`
        self._by_key: dict[str, tuple[Program, Any]] = {}  # with the shapes of the results
        self._trees: dict[int, tuple[weakref.ref[Any], Hashable]] = {}  # the last tree in each position, and its signature
        self.lower, self.trace = self._jitted.lower, self._jitted.trace

    def __call__(self, *args: Any) -> Any:
        """Call the program for these arguments; it is loaded or compiled if this process has not done so."""
        folder = store.folder()
        if folder is None:
            return self._jitted(*args)
        signature, dynamic = self._signature(args), self._dynamic(args)
        program = self._programs.get(signature)
        if program is not None:
            try:
                return program(*dynamic)
            except (TypeError, ValueError):  # other dtypes or shardings with these shapes, or inside a trace
                pass
        elif signature in self._programs:
            return self._jitted(*args)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(dynamic)):
            return self._jitted(*args)
        self._programs[signature] = program = self._find(folder, args)
        return self._jitted(*args) if program is None else program(*dynamic)

    def needs_compilation(self, *args: Any) -> bool:
        """Whether a call with these arguments would load or compile a program. False if executables are not stored."""
        return store.folder() is not None and self._signature(args) not in self._programs

    def lower_ahead(self, *args: Any) -> tuple[Any, Callable[[], Any]]:
        """The output shapes, and a function that compiles or loads the program (callable from another thread).

        Args:
          args: the arguments of a call, or their shapes.
        """
        folder = store.folder()
        if folder is not None:
            try:
                return self._prepare(folder, args)
            except keys.UnkeyableError:
                pass
        lowered = self._jitted.lower(*args)
        return lowered.out_info, lowered.compile

    def _cache_size(self) -> int:
        """The number of programs so far, like that of `jax.jit`."""
        return len(self._by_key) + self._jitted._cache_size()

    def _dynamic(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([arg for place, arg in enumerate(args) if place not in self._static])

    def _signature(self, args: Sequence[Any]) -> Hashable:
        """A cheap in-process key: tracing context, static arguments and shapes. The executable itself checks the rest."""
        parts: list[Hashable] = [trace_context(), jax.config.jax_debug_nans]  # type: ignore[attr-defined]
        for place, arg in enumerate(args):
            if place in self._static or arg is None:
                parts.append(arg)
            elif isinstance(arg, jax.Array | np.ndarray | np.generic):
                parts.append((arg.shape, arg.dtype, getattr(arg, "weak_type", False)))
            else:
                last = self._trees.get(place)
                if last is None or last[0]() is not arg:
                    self._trees[place] = last = _reference(arg), _shapes_of(arg)
                parts.append(last[1])
        return tuple(parts)

    def _find(self, folder: Path, args: Sequence[Any]) -> Program | None:
        """The program for these arguments; None if it has no key, so that `jax.jit` must be called."""
        try:
            # Retried once: a file that fails to load is deleted by the first attempt.
            return self._prepare(folder, args)[1]() or self._prepare(folder, args)[1]()
        except keys.UnkeyableError as reason:
            _log.info("%s is traced in every process: it depends on %s", self._function.__qualname__, reason)
            return None

    def _prepare(self, folder: Path, args: Sequence[Any]) -> tuple[Any, Callable[[], Program | None]]:
        """The output shapes, and a function that loads or compiles the program. Tracing, if needed, happens here.

        Raises:
          UnkeyableError: an argument or the context has no process-independent text.
        """
        begun = time.perf_counter()
        leaves, structure = jax.tree.flatten((self._dynamic(args), {}))
        devices, bound = keys.devices_of(leaves)
        about = (
            keys.text_of(self._function),
            self._about,
            keys.text_of([args[place] for place in self._static if place < len(args)]),
            keys.structure_text(structure),
            *map(keys.leaf_text, leaves),
            f"bound {bound}",
            keys.environment_text(devices),
        )
        key = hashlib.sha256("\n".join(about).encode()).hexdigest()
        if key in self._by_key:
            program, results = self._by_key[key]
            return results, lambda: program
        path = folder / f"{self._function.__name__}-{key[:32]}{store.SUFFIX}"
        stored = _read(path, key)
        if stored is not None:
            return stored.results, partial(self._load, path, key, stored, begun, structure, devices)
        with record_backends() as attention:
            lowered = self._jitted.lower(*args)
        _announce(attention)  # also to an enclosing `record_backends`
        results = jax.tree.map(_abstract, lowered.out_info)
        return results, partial(self._make, path, key, lowered, results, attention, devices[0].platform == "cpu")

    def _load(
        self, path: Path, key: str, stored: StoredProgram, begun: float, structure: Any, devices: Sequence[Any]
    ) -> Program | None:
        try:
            program = serialize_executable.deserialize_and_load(
                stored.executable,
                structure,
                jax.tree.structure(stored.results),
                backend=devices[0].client,
                execution_devices=devices,
            )
        except Exception as error:  # XLA rejects the executable, with an error of any type
            _log.info("%s is not used: %s", path, reason_of(error, 200))
            store.remove(path)
            return None
        _announce(stored.attention)
        jax.monitoring.record_event_duration_secs(LOAD_DURATION_EVENT, time.perf_counter() - begun)
        self._by_key[key] = program, stored.results
        return program

    def _make(self, path: Path, key: str, lowered: Any, results: Any, attention: dict[str, str], on_cpu: bool) -> Program:
        begun = time.perf_counter()
        with _without_jax_cache():
            program = lowered.compile()
        self._by_key[key] = program, results
        if time.perf_counter() - begun >= jax.config.jax_persistent_cache_min_compile_time_secs:  # type: ignore[attr-defined]
            try:
                executable = serialize_executable.serialize(program)[0]
            except Exception as error:  # the type depends on the platform
                why = reason_of(error, 200)
                _log.info("%s is traced in every process: it cannot be serialized (%s)", self._function.__qualname__, why)
                return program
            libraries = cpu_variants().native.called_in(executable) if on_cpu else ()
            stored = StoredProgram(executable, results, libraries, attention)
            store.write(path, key, pickle.dumps(stored))
        return program


def _read(path: Path, key: str) -> StoredProgram | None:
    """The content of a file; None if it cannot be used here."""
    content = store.read(path, key)
    if content is None:
        return None
    try:
        stored = pickle.loads(content)
    except Exception as error:  # a pickle of another Python or NumPy version may raise any type
        _log.info("%s is not used: %s", path, reason_of(error, 200))
        return None
    # The native libraries must be registered before the executable is loaded.
    if not isinstance(stored, StoredProgram) or (
        stored.native and not all(map(cpu_variants().native.usable, stored.native))
    ):
        return None
    return stored


def _announce(attention: Mapping[str, str]) -> None:
    for name, why in attention.items():
        log_backend(name, why)


def _abstract(result: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(result.shape, result.dtype, weak_type=getattr(result, "weak_type", False))


def _shapes_of(tree: Any) -> Hashable:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple([getattr(leaf, "shape", None) for leaf in leaves])


def _reference(tree: Any) -> Any:
    """A weak reference to a tree, or to nothing if its type does not support them, such as tuples."""
    try:
        return weakref.ref(tree)
    except TypeError:
        return lambda: None


class _WithoutJaxCache:
    """Disable JAX's compilation cache (re-entrant across threads): XLA for CPU cannot serialize an executable that it loaded
    from that cache (the copy lacks its functions), and storing twice is useless."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = True

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
                self._switch(False)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._switch(self._before)

    def _switch(self, on: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", on)
        compilation_cache.reset_cache()  # JAX reads the setting only once


_without_jax_cache = _WithoutJaxCache()
