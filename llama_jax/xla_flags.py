"""Flags of XLA beyond its own defaults, for each platform.

Each is here because a compiler's own output shows the improvement (`experiments/compile_report.py --flags` compiles with and
without), or because it acts at run time alone. docs/flags.md has the numbers, and what was tried and left at its default.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import util
from pathlib import Path

from llama_jax.errors import UserError, shown

SWITCH = "LLAMA_JAX_FLAGS"
# M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX and M_TOP_PAD of glibc: no block is mapped apart, nothing is returned to
# the system, and all threads share one arena, which grows by 64 MB: other arenas map larger blocks apart.
MALLOC_OPTIONS = (-4, 0), (-1, -1), (-8, 1), (-2, 64 << 20)


@dataclass(frozen=True)
class Flag:
    """One setting of XLA.

    Attributes:
      variable: the environment variable that holds it; the setting itself where it has the same name.
      name, value: as XLA knows them.
      training: used only where a model is trained.
    """

    variable: str
    name: str
    value: str
    training: bool = True


FLAGS: Mapping[str, tuple[Flag, ...]] = {
    "cpu": (),
    "gpu": (
        # All three: of the bytes of Llama 3.1 8B over fsdp=8 on H100 94 % are exchanged beside matrix products, else 76 %.
        # The weights of the next layer are gathered while this one computes; two layers in a turn of the loop, so that they
        # need not be copied; and a collective may start before the one before it ends.
        Flag("XLA_FLAGS", "xla_gpu_enable_pipelined_all_gather", "true"),
        Flag("XLA_FLAGS", "xla_gpu_enable_while_loop_double_buffering", "true"),
        Flag("XLA_FLAGS", "xla_gpu_experimental_parallel_collective_overlap_limit", "8"),
        # JAX otherwise takes three quarters of the memory. It is the share that `Hardware.holds` plans with.
        Flag("XLA_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "0.95", training=False),
    ),
    "tpu": (
        # All four: of the bytes of Llama 3.1 8B over fsdp=8 on v5p 90 % are exchanged beside matrix products, else 74 %.
        # A matrix product and an exchange beside it become one kernel, gathers of weights too, beside several products.
        Flag("LIBTPU_INIT_ARGS", "xla_tpu_enable_async_collective_fusion", "true"),
        Flag("LIBTPU_INIT_ARGS", "xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true"),
        Flag("LIBTPU_INIT_ARGS", "xla_tpu_enable_async_collective_fusion_multiple_steps", "true"),
        Flag("LIBTPU_INIT_ARGS", "xla_enable_async_all_gather", "true"),
    ),
}
# A TPU reads a layer's cache into the memory on its chip, ahead of time. Where it also writes the new token there, the whole
# cache goes back: 1.07 GB for 4 tokens of 8 rows of an 8B model at 2,048 slots, over eight v5e. With this flag the token is
# written to the main memory alone, and the bytes read are the same to 0.01 %.
_KEEP_CACHE = Flag("LIBTPU_INIT_ARGS", "xla_msa_max_outstanding_evictions", "0", training=False)
# Other names of a setting, by which the user may have set it.
_ALIASES = {"XLA_CLIENT_MEM_FRACTION": ("XLA_PYTHON_CLIENT_MEM_FRACTION",)}
_LIBRARIES = {
    "XLA_FLAGS": (("jaxlib", "libjax_common.so"), ("jax_plugins.xla_cuda1?", "xla_cuda_plugin.so")),
    "LIBTPU_INIT_ARGS": (("libtpu", "libtpu.so"),),
}


@dataclass(frozen=True)
class FlagChanges:
    """The result of `set_flags`, by names of flags.

    Attributes:
      written: into the environment.
      kept: set by the user before, and left as they were.
      unknown: left out, since the installed version of XLA would end the process.
    """

    written: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def compiler_options(platform: str, *, training: bool) -> dict[str, bool | str]:
    """The flags of a platform that the installed compiler has, for `jax.stages.Lowered.compile`; none where they are off.

    They serve where nothing runs, or where the environment cannot be changed.
    """
    if os.environ.get(SWITCH) == "off":
        return {}
    options = [flag for flag in flags_for(platform, training=training) if flag.name != flag.variable and _is_known(flag)]
    return {flag.name: flag.value == "true" if flag.value in ("true", "false") else flag.value for flag in options}


def decode_options_on_tpu() -> dict[str, int] | None:
    """The compiler option of programs that decode on a TPU; None if it is unknown, set by the user, or flags are off."""
    if os.environ.get(SWITCH) == "off" or _is_set(_KEEP_CACHE, os.environ) or not _is_known(_KEEP_CACHE):
        return None
    return {_KEEP_CACHE.name: int(_KEEP_CACHE.value)}


def set_flags(
    platforms: Iterable[str] | None = None,
    *,
    training: bool = False,
    environment: MutableMapping[str, str] | None = None,
) -> FlagChanges:
    """Write the flags of the platforms into the environment, where XLA reads them when JAX starts its devices.

    Flags that the user has set are kept: those in ``XLA_FLAGS`` or ``LIBTPU_INIT_ARGS``, and variables that exist.
    ``LLAMA_JAX_FLAGS=off`` changes nothing.

    Args:
      platforms: by default all that JAX could start here, see `startable`.
      training: include those for training.
      environment: by default this process's.

    Raises:
      UserError: JAX has started its devices already, so that nothing would be read; an invalid value of LLAMA_JAX_FLAGS.
    """
    environment = os.environ if environment is None else environment
    switch = environment.get(SWITCH, "on")
    if switch not in ("on", "off"):
        raise UserError(f"{SWITCH}={shown(switch, 40)} must be on or off")
    if switch == "off":
        return FlagChanges()
    platforms = startable(environment) if platforms is None else platforms
    found = [flag for platform in platforms for flag in flags_for(platform, training=training)]
    kept = [flag for flag in found if _is_set(flag, environment)]
    unknown = [flag for flag in found if flag not in kept and not _is_known(flag)]
    written = [flag for flag in found if flag not in kept and flag not in unknown]
    if written and _has_started():
        raise UserError(
            f"JAX has started its devices, and reads {written[0].variable} no more; set flags before, or {SWITCH}=off"
        )
    for flag in written:
        if flag.name == flag.variable:
            environment[flag.name] = flag.value
        else:
            before = environment.get(flag.variable, "")
            environment[flag.variable] = f"{before} --{flag.name}={flag.value}".strip()
    return FlagChanges(*(tuple(flag.name for flag in flags) for flags in (written, kept, unknown)))


def keep_freed_memory(platforms: Iterable[str] | None = None, environment: Mapping[str, str] = os.environ) -> bool:
    """Have glibc keep freed memory, for training on a CPU: XLA allocates the buffers of every step anew, and clearing their
    pages takes 0.3 of 1.5 s of processor time in a step of 15M. Call it before threads start.

    Args:
      platforms, environment: as for `set_flags`. With MALLOC_... variables of the user, and with LLAMA_JAX_FLAGS=off,
        nothing is changed.

    Returns:
      Whether it was done: only by glibc, and only where JAX could start no other devices.
    """
    platforms = startable(environment) if platforms is None else platforms
    users = environment.get(SWITCH) == "off" or any(name.startswith("MALLOC_") for name in environment)
    if users or tuple(platforms) != ("cpu",) or sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    return hasattr(library, "gnu_get_libc_version") and all(library.mallopt(*option) for option in MALLOC_OPTIONS)


def startable(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The platforms with flags whose devices JAX would look for: those of ``JAX_PLATFORMS``, else those with a plugin."""
    named = environment.get("JAX_PLATFORMS", "")
    if named:
        found = dict.fromkeys({"cuda": "gpu"}.get(name, name) for name in named.lower().split(","))
        return tuple(platform for platform in found if platform in FLAGS)
    plugins = {"gpu": _plugin("jax_plugins.xla_cuda1?") is not None, "tpu": _plugin("libtpu") is not None}
    return (*(platform for platform, is_there in plugins.items() if is_there), "cpu")


def flags_for(platform: str, *, training: bool) -> tuple[Flag, ...]:
    """The flags of a platform: "cpu", "gpu" or "tpu"."""
    if platform not in FLAGS:
        raise UserError(f"there are no flags for platform {shown(platform, 40)}; there are {', '.join(FLAGS)}")
    return tuple(flag for flag in FLAGS[platform] if training or not flag.training)


def _is_set(flag: Flag, environment: Mapping[str, str]) -> bool:
    if flag.name == flag.variable:
        return any(name in environment for name in (flag.name, *_ALIASES.get(flag.name, ())))
    return bool(re.search(rf"(^|\s)--{flag.name}(=|\s|$)", environment.get(flag.variable, "")))


def _is_known(flag: Flag) -> bool:
    """Whether all libraries that read the variable have the flag: XLA ends a process that names another one."""
    if flag.name == flag.variable:
        return True
    for module, file in _LIBRARIES[flag.variable]:
        folder = _plugin(module)
        if folder is None or not _holds(folder / file, flag.name):
            return False
    return True


@lru_cache(maxsize=64)
def _holds(library: Path, name: str) -> bool:
    """Whether a library, which holds the names of all its flags, holds this one."""
    if not library.is_file():
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return re.search(rb"(?<![a-z_])" + name.encode() + rb"(?![a-z_])", content) is not None


def _plugin(pattern: str) -> Path | None:
    """The folder of a module without importing it; "?" stands for the version of CUDA."""
    for name in (pattern.replace("?", version) for version in ("3", "2")):
        try:
            spec = util.find_spec(name)
        except ModuleNotFoundError:  # its parent package is missing
            continue
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


def _has_started() -> bool:
    """Whether JAX has made clients of its devices; without starting it."""
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge  # JAX has no public function for it

    return xla_bridge.backends_are_initialized()
