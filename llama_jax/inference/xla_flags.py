"""XLA flags that differ from XLA's defaults, for each platform.

Each is included because the compiler's output shows the improvement (`experiments/compile_report.py --flags` compares), or
because it acts only at run time. docs/flags.md has the numbers, and the flags that were tried and rejected.
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
from typing import TYPE_CHECKING, Any

from llama_jax.errors import UserError, short_repr

if TYPE_CHECKING:
    import jax

SWITCH = "LLAMA_JAX_FLAGS"
# M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX and M_TOP_PAD of glibc: no block gets its own mapping, nothing is returned to
# the system, and all threads share one arena, which grows by 64 MB: other arenas map larger blocks separately.
MALLOC_OPTIONS = (-4, 0), (-1, -1), (-8, 1), (-2, 64 << 20)
LARGE_BLOCK_OPTIONS = (-3, 32 << 20), (-4, 1 << 16)  # M_MMAP_THRESHOLD and M_MMAP_MAX: blocks of 32 MB get mappings again
MAX_KEPT_BYTES = 1 << 29
_keeping: list[bool] = []  # not empty after `keep_freed_memory`


@dataclass(frozen=True)
class Flag:
    """One setting of XLA.

    Attributes:
      variable: the environment variable that holds the flag; equal to `name` if the variable itself is the setting.
      name, value: XLA's name of the flag, and its value.
      training: used only for training.
    """

    variable: str
    name: str
    value: str
    training: bool = True


PLATFORM_FLAGS: Mapping[str, tuple[Flag, ...]] = {
    "cpu": (),
    "gpu": (
        # With these three, 94% of the bytes exchanged for Llama 3.1 8B over fsdp=8 on H100 overlap with matmuls, instead of
        # 76%. The weights of the next layer are gathered while this one computes; the loop is unrolled to two layers, so
        # that they need not be copied; and a collective may start before the previous one ends.
        Flag("XLA_FLAGS", "xla_gpu_enable_pipelined_all_gather", "true"),
        Flag("XLA_FLAGS", "xla_gpu_enable_while_loop_double_buffering", "true"),
        Flag("XLA_FLAGS", "xla_gpu_experimental_parallel_collective_overlap_limit", "8"),
        # JAX's default is three quarters of the memory. `Hardware.holds` plans with the same share.
        Flag("XLA_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "0.95", training=False),
    ),
    "tpu": (
        # With these four, 90% of the bytes exchanged for Llama 3.1 8B over fsdp=8 on v5p overlap with matmuls, instead of
        # 74%. A matmul and the collective that overlaps it are fused, including all-gathers of weights over several matmuls.
        Flag("LIBTPU_INIT_ARGS", "xla_tpu_enable_async_collective_fusion", "true"),
        Flag("LIBTPU_INIT_ARGS", "xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true"),
        Flag("LIBTPU_INIT_ARGS", "xla_tpu_enable_async_collective_fusion_multiple_steps", "true"),
        Flag("LIBTPU_INIT_ARGS", "xla_enable_async_all_gather", "true"),
    ),
}
# A TPU prefetches a layer's cache into on-chip memory (VMEM). If it also writes the new token there, the whole cache is
# written back: 1.07 GB for 4 tokens of 8 rows of an 8B model with 2,048 slots, over eight v5e. With this flag, the token is
# written only to HBM, and the bytes read are the same within 0.01%.
_KEEP_CACHE = Flag("LIBTPU_INIT_ARGS", "xla_msa_max_outstanding_evictions", "0", training=False)
# Other names of a variable that the user may have set.
_ALIASES = {"XLA_CLIENT_MEM_FRACTION": ("XLA_PYTHON_CLIENT_MEM_FRACTION",)}
_LIBRARIES = {
    "XLA_FLAGS": (("jaxlib", "libjax_common.so"), ("jax_plugins.xla_cuda1?", "xla_cuda_plugin.so")),
    "LIBTPU_INIT_ARGS": (("libtpu", "libtpu.so"),),
}


@dataclass(frozen=True)
class FlagChanges:
    """The result of `set_flags`: names of flags.

    Attributes:
      written: flags that were written into the environment.
      kept: flags that the user had set, which are unchanged.
      unknown: flags that were omitted, since they would abort the process with the installed version of XLA.
    """

    written: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def compiler_options(platform: str, *, training: bool, device: jax.Device | None = None) -> dict[str, bool | str]:
    """The flags of a platform that the installed compiler accepts, for `jax.stages.Lowered.compile`; empty if flags are off.

    For compilation without devices, or if the environment cannot be changed. A compiler may have a flag for the environment
    that is no option of a compilation, so the options are tried.

    Args:
      device: the device to compile for, real or described; by default the first of this process. Options of a TPU are tried
        only with a TPU's compiler: others have none of them.
    """
    if os.environ.get(SWITCH) == "off":
        return {}
    flags = [flag for flag in flags_for(platform, training=training) if flag.name != flag.variable and _is_known(flag)]
    options = {flag.name: flag.value == "true" if flag.value in ("true", "false") else flag.value for flag in flags}
    return _accepted_options(options, platform, device)


def decode_options_on_tpu() -> dict[str, int] | None:
    """The compiler option for programs that decode on a TPU; None if it is unknown, set by the user, or flags are off."""
    if os.environ.get(SWITCH) == "off" or _is_set(_KEEP_CACHE, os.environ) or not _is_known(_KEEP_CACHE):
        return None
    return _accepted_options({_KEEP_CACHE.name: int(_KEEP_CACHE.value)}, "tpu") or None


def _accepted_options(options: dict[str, Any], platform: str, device: jax.Device | None = None) -> dict[str, Any]:
    """The options without those that the compiler of a device refuses, by default of the first device of this process."""
    import jax

    device = jax.devices()[0] if device is None else device
    if platform == "tpu" != device.platform:
        return options
    refused = _refused_option(tuple(options.items()), device)
    if refused is None:
        return options
    return _accepted_options({name: value for name, value in options.items() if name != refused}, platform, device)


@lru_cache(maxsize=64)
def _refused_option(options: tuple[tuple[str, Any], ...], device: jax.Device) -> str | None:
    """The first option that the compiler of a device does not have, found by compiling an empty program."""
    import jax

    program = jax.jit(lambda: 0, out_shardings=jax.sharding.SingleDeviceSharding(device)).lower()
    try:
        program.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        unknown = re.search(r"No such compile option: '(\w+)'", str(error))
        if unknown is None:
            raise
        return unknown[1]
    return None


def set_flags(
    platforms: Iterable[str] | None = None,
    *,
    training: bool = False,
    environment: MutableMapping[str, str] | None = None,
) -> FlagChanges:
    """Write the flags of the platforms into the environment, where XLA reads them when JAX initializes its backends.

    Flags that the user has set are kept: those in ``XLA_FLAGS`` or ``LIBTPU_INIT_ARGS``, and variables that exist.
    With ``LLAMA_JAX_FLAGS=off``, nothing is changed.

    Args:
      platforms: by default, all that JAX could start, see `startable`.
      training: include flags for training.
      environment: by default the environment of this process.

    Raises:
      UserError: JAX has already initialized its backends, so that flags have no effect; an invalid LLAMA_JAX_FLAGS.
    """
    environment = os.environ if environment is None else environment
    switch = environment.get(SWITCH, "on")
    if switch not in ("on", "off"):
        raise UserError(f"{SWITCH}={short_repr(switch, 40)} must be on or off")
    if switch == "off":
        return FlagChanges()
    platforms = startable(environment) if platforms is None else platforms
    flags = [flag for platform in platforms for flag in flags_for(platform, training=training)]
    existing = [flag for flag in flags if _is_set(flag, environment)]
    unknown = [flag for flag in flags if flag not in existing and not _is_known(flag)]
    written = [flag for flag in flags if flag not in existing and flag not in unknown]
    if written and _has_started():
        raise UserError(
            f"JAX has started its devices and no longer reads {written[0].variable}; set flags earlier, or {SWITCH}=off"
        )
    for flag in written:
        if flag.name == flag.variable:
            environment[flag.name] = flag.value
        else:
            before = environment.get(flag.variable, "")
            environment[flag.variable] = f"{before} --{flag.name}={flag.value}".strip()
    return FlagChanges(*(tuple(flag.name for flag in flags) for flags in (written, existing, unknown)))


def keep_freed_memory(platforms: Iterable[str] | None = None, environment: Mapping[str, str] = os.environ) -> bool:
    """Make glibc keep freed memory, for training on a CPU: XLA reallocates the buffers in every step, and clearing their
    pages takes 0.3 of 1.5 s of CPU time in a step of a 15M model. Call this before threads start.

    Args:
      platforms, environment: as for `set_flags`. Nothing is changed if the user has set MALLOC_... variables or
        LLAMA_JAX_FLAGS=off.

    Returns:
      Whether it was done: only with glibc, and only if JAX can start no other platform than the CPU.
    """
    platforms = startable(environment) if platforms is None else platforms
    users = environment.get(SWITCH) == "off" or any(name.startswith("MALLOC_") for name in environment)
    if users or tuple(platforms) != ("cpu",) or sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    is_glibc = getattr(library, "gnu_get_libc_version", None) is not None
    if not (is_glibc and all(library.mallopt(*option) for option in MALLOC_OPTIONS)):
        return False
    _keeping.append(True)
    return True


def return_large_blocks(temporaries: int) -> None:
    """Undo `keep_freed_memory` for large blocks, for a program with more than MAX_KEPT_BYTES of temporaries.

    Small blocks that outlive a step split the memory that its temporaries leave, so that the next step takes new memory: up
    to 2.6 times as much as a step needs. Clearing the pages of such a step takes 4 % of its CPU time.
    """
    if _keeping and temporaries > MAX_KEPT_BYTES:
        _keeping.clear()
        library = ctypes.CDLL(None)
        for option in LARGE_BLOCK_OPTIONS:
            library.mallopt(*option)
        library.malloc_trim(0)


def startable(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The platforms in `PLATFORM_FLAGS` that JAX would try to start: those of ``JAX_PLATFORMS``, else those with
    a plugin."""
    setting = environment.get("JAX_PLATFORMS", "")
    if setting:
        platforms = dict.fromkeys({"cuda": "gpu"}.get(name, name) for name in setting.lower().split(","))
        return tuple(platform for platform in platforms if platform in PLATFORM_FLAGS)
    plugins = {"gpu": _plugin("jax_plugins.xla_cuda1?") is not None, "tpu": _plugin("libtpu") is not None}
    return (*(platform for platform, is_there in plugins.items() if is_there), "cpu")


def flags_for(platform: str, *, training: bool) -> tuple[Flag, ...]:
    """The flags of a platform: "cpu", "gpu" or "tpu"."""
    return tuple(flag for flag in PLATFORM_FLAGS[platform] if training or not flag.training)


def _is_set(flag: Flag, environment: Mapping[str, str]) -> bool:
    if flag.name == flag.variable:
        return any(name in environment for name in (flag.name, *_ALIASES.get(flag.name, ())))
    return bool(re.search(rf"(^|\s)--{flag.name}(=|\s|$)", environment.get(flag.variable, "")))


def _is_known(flag: Flag) -> bool:
    """Whether all libraries that read the variable know the flag: XLA aborts on an unknown flag."""
    if flag.name == flag.variable:
        return True
    for module, file in _LIBRARIES[flag.variable]:
        folder = _plugin(module)
        if folder is None or not _holds(folder / file, flag.name):
            return False
    return True


@lru_cache(maxsize=64)
def _holds(library: Path, name: str) -> bool:
    """Whether the binary of a library contains this name; it contains the names of all its flags."""
    if not library.is_file():
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return re.search(rb"(?<![a-z_])" + name.encode() + rb"(?![a-z_])", content) is not None


def _plugin(pattern: str) -> Path | None:
    """The folder of a module, without importing it; "?" stands for the version of CUDA."""
    for name in (pattern.replace("?", version) for version in ("3", "2")):
        try:
            spec = util.find_spec(name)
        except ModuleNotFoundError:  # its parent package is missing
            continue
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


def _has_started() -> bool:
    """Whether JAX has initialized its backends; does not import JAX."""
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge  # JAX has no public function for it

    return xla_bridge.backends_are_initialized()
