"""The device mesh: sizes of its axes for data, fully sharded data, context and tensor parallelism."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh

from llama_jax.errors import MeshError, short_repr
from llama_jax.settings import PositiveInt, check_fields

AXES = ("data", "fsdp", "context", "tensor")


@dataclass(frozen=True)
class MeshSizes:
    """The sizes of the four axes of a mesh; an axis of size 1 shards nothing.

    Attributes:
      data: data parallelism: replicas of the model, each with its rows of the batch.
      fsdp: fully sharded data parallelism: each device has its rows of the batch, and a shard of the parameters and the
        optimizer state; the parameters of a layer are gathered when it runs (Rajbhandari et al. 2020, stage 3).
      tensor: tensor parallelism: every matmul is sharded by heads or by features (Shoeybi et al. 2019, section 3).
      context: context parallelism: the tokens of every row are sharded, with ring attention (Liu et al. 2023; see
        `parallel.ring_attention`). Parameters are sharded over these devices as over those of `fsdp`.

    Raises:
      MeshError: a size that is not a positive integer.
    """

    data: PositiveInt = 1
    fsdp: PositiveInt = 1
    tensor: PositiveInt = 1
    context: PositiveInt = 1

    def __post_init__(self) -> None:
        check_fields(self, MeshError, "mesh axis ")

    def items(self) -> tuple[tuple[str, int], ...]:
        """Axes and sizes in the order of the mesh. `tensor` is last: devices that communicate most are adjacent."""
        return tuple((axis, getattr(self, axis)) for axis in AXES)

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return self.data * self.fsdp * self.context * self.tensor

    @property
    def rows(self) -> int:
        """The number of devices over which the rows of a batch are sharded."""
        return self.data * self.fsdp

    @property
    def columns(self) -> int:
        """The number of devices over which the parameters' columns, the axis D, are sharded."""
        return self.fsdp * self.context

    def __str__(self) -> str:
        """The text that `parse_mesh` reads; `context` is omitted if it is 1, since few runs use it."""
        return ",".join(f"{axis}={size}" for axis, size in self.items() if axis != "context" or size > 1)


def parse_mesh(text: str) -> MeshSizes:
    """The sizes in a text such as ``data=2,fsdp=4,tensor=1``, in any order; a missing axis is 1.

    Raises:
      MeshError: invalid text, an unknown axis, or a repeated axis.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,9})\s*", part, re.ASCII)
        if not match:
            raise MeshError(
                f"mesh {short_repr(text, 80)}: {short_repr(part, 40)} is not axis=size; write it as data=2,fsdp=4,tensor=1"
            )
        axis, size = match[1], int(match[2])
        if axis not in AXES:
            raise MeshError(
                f"mesh {short_repr(text, 80)} has no axis {short_repr(axis, 40)}; the axes are {', '.join(AXES)}"
            )
        if axis in sizes:
            raise MeshError(f"mesh {short_repr(text, 80)} has {axis} twice; set it once")
        sizes[axis] = size
    return MeshSizes(**sizes)


def check_divisible(name: str, value: int, axis: str, size: int) -> None:
    """Raise MeshError, with sizes that work, if `size` does not divide `value`."""
    if value % size:
        small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
        nearest = sorted({*small, *(value // n for n in small)}, key=lambda n: abs(n - size))[:12]
        would_do = ", ".join(map(str, sorted(nearest)))
        raise MeshError(f"{name}={value} cannot be split over {axis}={size}; {would_do} would do")


def make_mesh(sizes: MeshSizes, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of these sizes over the first available devices; XLA propagates shardings over its axes.

    Args:
      devices: used instead of `jax.devices()`, for example those of `analysis.aot_compile`, which need not exist.

    Raises:
      MeshError: there are too few devices.
    """
    devices = jax.devices() if devices is None else devices
    if sizes.devices > len(devices):
        simulated = f"; JAX_NUM_CPU_DEVICES={sizes.devices} simulates them" if devices[0].platform == "cpu" else ""
        raise MeshError(f"mesh {sizes} needs {sizes.devices} devices, but there are {len(devices)}{simulated}")
    shape = tuple(size for _, size in sizes.items())
    return jax.make_mesh(shape, AXES, (AxisType.Auto,) * len(AXES), devices=devices[: sizes.devices])
