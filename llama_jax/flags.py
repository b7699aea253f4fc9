"""What XLA is told for each platform beyond its own defaults, and why.

A flag is here only where a compiler's own output shows what it does for the better (`experiments/compile_report.py --flags`
compiles with and without), or where it acts at run time alone, which is then said. What was tried and is left at XLA's
default, with JAX 0.10.2:

- Latency hiding (`xla_gpu_enable_latency_hiding_scheduler`, `xla_tpu_enable_latency_hiding_scheduler`): on by default. On
  an H100 neither value changes the program, since XLA's model of latencies turns the scheduler on; a TPU without it
  computes beside fewer exchanges.
- Asynchronous collectives on a GPU: on by default. `xla_gpu_enable_pipelined_reduce_scatter` changes nothing.
  `xla_gpu_enable_pipelined_all_reduce` overlaps more (98 % with the three below), but copies every gradient once more, 46 GB
  in a step of 8B. Larger `*_combine_threshold_bytes` make one collective of a layer's, which then stands beside nothing.
- Collective matmul: a TPU does it by default (its "windowed" products, which send a part of the weights while they
  multiply the part before); without it nothing of that step is overlapped. `xla_tpu_overlap_compute_collective_tc` changes
  nothing.
- Triton's matrix products: on by default. Without them a decoded token of 8B reads 14 % more, and weights are copied.
- CUDA graphs: on by default. They act at run time; `experiments/gpu_report.py` compares their settings on a device.
- Preallocation: on by default, of three quarters of a GPU's memory; only the share is another one here.
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
# Of glibc's malloc.h, M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX, M_TOP_PAD: nothing is mapped apart, nothing is given back,
# one arena for all threads, of which others than the first map apart what is over 64 MB, and it grows by as much.
KEPT = (-4, 0), (-1, -1), (-8, 1), (-2, 64 << 20)


@dataclass(frozen=True)
class Flag:
    """One setting of XLA.

    Attributes:
      variable: of the environment that holds it; it is the setting itself where it has the same name.
      name, value: as XLA knows them.
      training: only where a model is trained; other programs gain nothing by it, as far as the compilers show.
      reason: what it changes, by the compilers' own output unless said otherwise.
    """

    variable: str
    name: str
    value: str
    reason: str
    training: bool = True


FLAGS: Mapping[str, tuple[Flag, ...]] = {
    "cpu": (),
    "gpu": (
        Flag(
            "XLA_FLAGS",
            "xla_gpu_enable_pipelined_all_gather",
            "true",
            "Weights of the next layer are gathered while this one computes: the gathers of a scanned layer move into the"
            " turn before.",
        ),
        Flag(
            "XLA_FLAGS",
            "xla_gpu_enable_while_loop_double_buffering",
            "true",
            "Two layers in a turn of the loop, so that what is gathered for the next one need not be copied; without"
            " pipelined gathers it changes nothing. Loops that decode would only become longer.",
        ),
        Flag(
            "XLA_FLAGS",
            "xla_gpu_experimental_parallel_collective_overlap_limit",
            "8",
            "By default each collective must end before the next may start, so that few have a matrix product beside them."
            " All three: of the bytes of Llama 3.1 8B over fsdp=8 on H100 94 % are exchanged beside matrix products, 76 %"
            " without, for 0.4 GB more and with fewer copies.",
        ),
        Flag(
            "XLA_CLIENT_MEM_FRACTION",
            "XLA_CLIENT_MEM_FRACTION",
            "0.95",
            "At run time alone: JAX otherwise takes three quarters of the memory and refuses the rest. It is the share that"
            " `Hardware.holds` plans with.",
            training=False,
        ),
    ),
    "tpu": (
        Flag(
            "LIBTPU_INIT_ARGS",
            "xla_tpu_enable_async_collective_fusion",
            "true",
            "A product of matrices and an exchange beside it become one kernel, which also hides the exchanges that a TPU's"
            " windowed products leave over.",
        ),
        Flag(
            "LIBTPU_INIT_ARGS",
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
            "true",
            "Gathers of weights take part in it.",
        ),
        Flag(
            "LIBTPU_INIT_ARGS",
            "xla_tpu_enable_async_collective_fusion_multiple_steps",
            "true",
            "An exchange may go on beside several products, one after the other.",
        ),
        Flag(
            "LIBTPU_INIT_ARGS",
            "xla_enable_async_all_gather",
            "true",
            "Without it gathers are not started apart, and so take no part in the fusion; alone it changes nothing. All"
            " four: of the bytes of Llama 3.1 8B over fsdp=8 on v5p 90 % are exchanged beside matrix products, 74 % without,"
            " for 0.4 GB more.",
        ),
    ),
}
# A TPU reads a layer's cache into the memory on its chip, ahead of time. Where it also writes the new token there, all of it
# goes back: 1.07 GB for 4 tokens of 8 rows of an 8B model at 2,048 slots, over eight v5e. With this nothing that was brought
# is sent back: the token is written where the cache lies, and what is read is the same to 0.01 %.
_KEEP_CACHE = Flag(
    "LIBTPU_INIT_ARGS", "xla_msa_max_outstanding_evictions", "0", "Decoding sends no cache back.", training=False
)
# Of one setting, other names: what the user set by one of them stands.
_ALIASES = {"XLA_CLIENT_MEM_FRACTION": ("XLA_PYTHON_CLIENT_MEM_FRACTION",)}
_LIBRARIES = {
    "XLA_FLAGS": (("jaxlib", "libjax_common.so"), ("jax_plugins.xla_cuda1?", "xla_cuda_plugin.so")),
    "LIBTPU_INIT_ARGS": (("libtpu", "libtpu.so"),),
}


@dataclass(frozen=True)
class Settled:
    """What `set_flags` did, by names of flags.

    Attributes:
      written: into the environment.
      kept: the user has set them already, and that stands.
      unknown: the installed version of XLA does not have them, and would end the process: they are left out.
    """

    written: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def flags_for(platform: str, *, training: bool) -> dict[str, str]:
    """The settings of a platform, "cpu", "gpu" or "tpu", by name."""
    return {flag.name: flag.value for flag in _flags(platform, training)}


def compiler_options(platform: str, *, training: bool) -> dict[str, bool | str]:
    """Those that concern a compiler and that the installed one has, as `jax.stages.Lowered.compile` takes them.

    For compiling where nothing runs, or without a say over the environment. ``LLAMA_JAX_FLAGS=off`` gives none.
    """
    if os.environ.get(SWITCH) == "off":
        return {}
    options = [flag for flag in _flags(platform, training) if flag.name != flag.variable and _is_known(flag)]
    return {flag.name: flag.value == "true" if flag.value in ("true", "false") else flag.value for flag in options}


def decoding_on_tpu() -> dict[str, int] | None:
    """What a TPU's compiler is told of a program that decodes, and of no other.

    None where the installed one lacks the flag, where the user has set it, and with ``LLAMA_JAX_FLAGS=off``.
    """
    if os.environ.get(SWITCH) == "off" or _is_set(_KEEP_CACHE, os.environ) or not _is_known(_KEEP_CACHE):
        return None
    return {_KEEP_CACHE.name: int(_KEEP_CACHE.value)}


def set_flags(
    platforms: Iterable[str] | None = None,
    *,
    training: bool = False,
    environment: MutableMapping[str, str] | None = None,
) -> Settled:
    """Write the settings of the platforms into the environment, where XLA reads them when JAX starts its devices.

    What the user has set stands: a flag that ``XLA_FLAGS`` or ``LIBTPU_INIT_ARGS`` names, and variables that are there.
    ``LLAMA_JAX_FLAGS=off`` leaves all as it is.

    Args:
      platforms: by default all that JAX could start here, see `startable`.
      training: with those for training.
      environment: by default this process's.

    Raises:
      UserError: JAX has started its devices already, so that nothing would be read; a value of LLAMA_JAX_FLAGS that means
        nothing.
    """
    environment = os.environ if environment is None else environment
    switch = environment.get(SWITCH, "on")
    if switch not in ("on", "off"):
        raise UserError(f"{SWITCH}={shown(switch, 40)} must be on or off")
    if switch == "off":
        return Settled()
    platforms = startable(environment) if platforms is None else platforms
    found = [flag for platform in platforms for flag in _flags(platform, training)]
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
    return Settled(*(tuple(flag.name for flag in flags) for flags in (written, kept, unknown)))


def keep_freed_memory(platforms: Iterable[str] | None = None, environment: Mapping[str, str] = os.environ) -> bool:
    """Have glibc keep memory that is freed, for training on a CPU: XLA makes the buffers of a step anew in each, and the
    system clears every page of them, which is 0.3 of 1.5 s of the processors' time for a step of 15M.

    Call it before threads start. The process gives nothing back until it ends.

    Args:
      platforms, environment: as for `set_flags`. A variable MALLOC_... of the user's stands, as with LLAMA_JAX_FLAGS=off all
        does.

    Returns:
      Whether that was done: not where JAX could start other devices, and not by other C libraries.
    """
    platforms = startable(environment) if platforms is None else platforms
    users = environment.get(SWITCH) == "off" or any(name.startswith("MALLOC_") for name in environment)
    if users or tuple(platforms) != ("cpu",) or sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    return hasattr(library, "gnu_get_libc_version") and all(library.mallopt(option, value) for option, value in KEPT)


def startable(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The platforms with flags whose devices JAX would look for: those of ``JAX_PLATFORMS``, else those with a plugin."""
    named = environment.get("JAX_PLATFORMS", "")
    if named:
        found = dict.fromkeys({"cuda": "gpu"}.get(name, name) for name in named.lower().split(","))
        return tuple(platform for platform in found if platform in FLAGS)
    plugins = {"gpu": _plugin("jax_plugins.xla_cuda1?") is not None, "tpu": _plugin("libtpu") is not None}
    return (*(platform for platform, is_there in plugins.items() if is_there), "cpu")


def _flags(platform: str, training: bool) -> tuple[Flag, ...]:
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
    """Whether a name stands whole in a library, which has those of all its flags."""
    if not library.is_file():
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return re.search(rb"(?<![a-z_])" + name.encode() + rb"(?![a-z_])", content) is not None


def _plugin(pattern: str) -> Path | None:
    """The folder of a module without importing it; "?" stands for the version of CUDA."""
    for name in (pattern.replace("?", version) for version in ("3", "2")):
        try:
            spec = util.find_spec(name)
        except ModuleNotFoundError:  # of what it lies in
            continue
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


def _has_started() -> bool:
    """Whether JAX has made clients of its devices; without starting it."""
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge  # there is no public question

    return xla_bridge.backends_are_initialized()
