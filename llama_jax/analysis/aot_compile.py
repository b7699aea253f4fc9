"""Compilation for accelerators on a machine without them.

`libtpu` and JAX's CUDA plugin compile for described devices that need not exist: `jax.experimental.topologies`. The result
is the program that would run, with its fusions, kernels, copies and collectives in scheduled order, and the memory that
this compiler plans. It has no times, and a GPU's matrix products have default tile sizes, since nothing can be measured.

The wheels are large or specific to a machine, so they are not requirements of this package. For the TPU:

    pip install -e ".[compile-tpu]"

For GPUs, in a separate environment. The first line installs JAX's plugin without the CUDA libraries that only running
needs (4.4 GB); cuDNN requires cuBLAS, which its compiler does not use, and is therefore installed without dependencies:

    pip install -e ".[compile-gpu]"
    pip install --no-deps nvidia-cudnn-cu12
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata, util
from typing import TYPE_CHECKING, Any

from llama_jax.errors import MeshError

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from llama_jax.parallel.mesh import MeshSizes


class CompilerError(MeshError):
    """A compiler is not installed, or does not start."""


@dataclass(frozen=True)
class _Tpu:
    """A generation of TPUs.

    Attributes:
      name: as in `topologies`.
      axes: number of axes of its network, a torus.
      largest: chips of its largest slice along each axis, in powers of two.
    """

    name: str
    axes: int
    largest: int


@dataclass(frozen=True)
class _Gpu:
    """The properties of a device that XLA's GPU compiler needs: fields of `GpuTargetConfigProto` that differ between cards.

    Attributes:
      name: as reported by the driver.
      capability: the compute capability.
      cores: streaming multiprocessors.
      lanes: float32 units in each.
      shared: bytes of shared memory in each; a block can use 1,024 fewer.
      bandwidth: of its memory, bytes/s.
      cache: bytes of its L2 cache.
      clock: GHz.
      memory: bytes that the driver reports.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    lanes: int
    shared: int
    bandwidth: int
    cache: int
    clock: float
    memory: int


TPUS = {"tpu-v5e": _Tpu("v5e", 2, 16), "tpu-v5p": _Tpu("v5p", 3, 16), "tpu-v6e": _Tpu("v6e", 2, 16)}

# Driver values of these cards, as recorded in openxla/xla, xla/backends/gpu/target_config/specs.
GPUS = {
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 167936, 2039040000000, 41943040, 1.41, 85100068864),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 233472, 3352320000000, 52428800, 1.98, 84942979072),
    "h200": _Gpu("NVIDIA H200", (9, 0), 132, 128, 233472, 4800000000000, 52428800, 1.98, 151397597184),
    "b200": _Gpu("NVIDIA B200", (10, 0), 148, 128, 233472, 7672320000000, 132644864, 1.965, 191514411008),
    # Not recorded there: NVIDIA's whitepapers on the GA102 (2021) and Ada (2023) architectures, datasheets of A10 and L4.
    "rtx-3090": _Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 128, 102400, 936000000000, 6291456, 1.695, 24 << 30),
    "rtx-4090": _Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 102400, 1008000000000, 75497472, 2.52, 24 << 30),
    "a10": _Gpu("NVIDIA A10", (8, 6), 72, 128, 102400, 600000000000, 6291456, 1.695, 24 << 30),
    "l4": _Gpu("NVIDIA L4", (8, 9), 58, 128, 102400, 300000000000, 50331648, 2.04, 24 << 30),
}
COMPILABLE_HARDWARE = (*TPUS, *GPUS)
GPUS_PER_HOST = 8
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # otherwise libtpu queries the cloud for its location
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU is used, so processes need no exclusive access
}


def missing_compiler(hardware: str) -> str | None:
    """The reason why no compiler for this hardware can be used here, in one line; None if one can.

    Args:
      hardware: a name such as "tpu-v5e" or "h100", see `hardware.named_hardware`.
    """
    if hardware in TPUS:
        return None if util.find_spec("libtpu") else 'libtpu is not installed; pip install -e ".[compile-tpu]" installs it'
    if hardware in GPUS:
        if _cuda_plugin():
            return None
        return 'the CUDA plugin is not installed; pip install -e ".[compile-gpu]" installs it (docs/devices.md)'
    return f"no compiler is described for {hardware}; use one of {', '.join(COMPILABLE_HARDWARE)}"


def compiler_version(hardware: str) -> str:
    """The name and version of the compiler for this hardware."""
    package = "libtpu" if hardware in TPUS else _cuda_plugin() or "jax-cuda12-plugin"
    return f"{package} {metadata.version(package)}"


def _cuda_plugin() -> str | None:
    """The installed package with XLA's compiler for NVIDIA GPUs, for CUDA 12 or 13."""
    names = ("jax-cuda12-plugin", "jax-cuda13-plugin")
    return next((name for name in names if util.find_spec(name.replace("-", "_"))), None)


def mesh_for(hardware: str, sizes: MeshSizes) -> Mesh:
    """A mesh of devices that need not exist: programs over it are compiled by the hardware's own compiler.

    Programs choose kernels for the platform that they are traced for, so they must be traced under the mesh, as
    `memory.Program` does: `with jax.sharding.use_abstract_mesh(mesh.abstract_mesh)`.

    Raises:
      CompilerError: its compiler is missing or does not start.
      MeshError: the hardware cannot be connected in this number of devices.
    """
    from llama_jax.parallel.mesh import make_mesh

    return make_mesh(sizes, devices_of(hardware, sizes.devices))


@lru_cache(maxsize=64)
def devices_of(hardware: str, count: int) -> tuple[jax.Device, ...]:
    """`count` devices of this hardware, in the smallest slice of a TPU pod or the smallest number of hosts.

    Raises:
      CompilerError, MeshError: as for `mesh_for`.
    """
    if hardware in TPUS:
        described: dict[str, Any] = {"platform": "tpu", **tpu_topology(hardware, count)}
    elif hardware in GPUS:
        hosts, beyond = divmod(count, GPUS_PER_HOST)
        if hosts and beyond:
            raise MeshError(
                f"{count} GPUs are not whole hosts of {GPUS_PER_HOST}; use a multiple, or fewer than {GPUS_PER_HOST}"
            )
        shape = f"{hosts}x{GPUS_PER_HOST}x1" if hosts else f"1x{count}x1"
        described = {"platform": "cuda", "target_config": gpu_target(hardware), "topology": shape}
    missing = missing_compiler(hardware)
    if missing:
        raise CompilerError(missing)
    from jax.experimental import topologies

    if hardware in TPUS:
        os.environ.update(_ENVIRONMENT)  # read once, when libtpu is loaded
    try:
        devices = topologies.get_topology_desc(**described).devices
    except Exception as error:  # the plugin may raise any type
        raise CompilerError(f"the compiler for {hardware} does not start: {str(error).splitlines()[0]:.300}") from error
    return tuple(devices)


def tpu_topology(hardware: str, count: int) -> dict[str, Any]:
    """Arguments of `topologies.get_topology_desc` for a slice of a pod with `count` chips: powers of two, nearly square.

    Raises:
      MeshError: no such slice.
    """
    tpu = TPUS[hardware]
    sides = [1] * tpu.axes
    power = count.bit_length() - 1
    for i in range(power):
        sides[i % tpu.axes] *= 2
    if count != 1 << power or max(sides) > tpu.largest:
        raise MeshError(f"a pod of {hardware} has no slice of {count} chips; a slice has a power of two, nearly square")
    if count > 4:
        sides.sort()  # 2x4, not 4x2; a host has 2x2x1
    topology: dict[str, Any] = {"topology_name": f"{tpu.name}:{'x'.join(map(str, sides))}"}
    return topology if count >= 4 else topology | {"chips_per_host_bounds": [*sides, 1][:3]}


def gpu_target(hardware: str) -> str:
    """The `GpuTargetConfigProto` of a card, as text."""
    gpu = GPUS[hardware]
    major, minor = gpu.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared} shared_memory_per_block_optin: {gpu.shared - 1024}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: {gpu.cores} fpus_per_core: {gpu.lanes} clock_rate_ghz: {gpu.clock}
  memory_bandwidth: {gpu.bandwidth} l2_cache_size: {gpu.cache} device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{gpu.name}"
"""
