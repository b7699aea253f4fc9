"""The mesh of devices: how many ways the batch, the parameters, the sequence and the heads are split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh

from llama_jax.errors import MeshError, shown

AXES = ("data", "fsdp", "context", "tensor")


@dataclass(frozen=True)
class MeshSizes:
    """The sizes of the four axes of a mesh; an axis of size 1 splits nothing.

    Attributes:
      data: copies of the model, each with its share of the batch.
      fsdp: shares of the batch; the parameters are sharded over their devices, which gather a layer when it runs
        (Rajbhandari et al. 2020, stage 3; fully sharded data parallelism).
      tensor: parts of every matrix product, by heads and by features (Shoeybi et al. 2019, section 3).
      context: parts of every row's tokens, whose keys and values go around a ring in attention (Liu et al. 2023; see
        `parallel.ring_attention`). The parameters are sharded over their devices as over those of `fsdp`.

    Raises:
      MeshError: a size that is not a positive integer.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for axis, size in self.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MeshError(f"mesh axis {axis}={size!r} must be a positive integer")

    def items(self) -> tuple[tuple[str, int], ...]:
        """Axes and sizes in the mesh's order: neighbours along `tensor`, which exchange most, are neighbouring devices."""
        return tuple((axis, getattr(self, axis)) for axis in AXES)

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return self.data * self.fsdp * self.context * self.tensor

    @property
    def rows(self) -> int:
        """How many ways the rows of a batch are split."""
        return self.data * self.fsdp

    @property
    def columns(self) -> int:
        """How many ways the columns of the parameters, the axis D, are split."""
        return self.fsdp * self.context

    def __str__(self) -> str:
        """As `parse_mesh` reads it; `context` is named only if it splits, for few runs use it."""
        return ",".join(f"{axis}={size}" for axis, size in self.items() if axis != "context" or size > 1)


def parse_mesh(text: str) -> MeshSizes:
    """The sizes in a text such as ``data=2,fsdp=4,tensor=1``, in any order; a missing axis is 1.

    Raises:
      MeshError: another form of text, an unknown axis, or one given twice.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,9})\s*", part, re.ASCII)
        if not match:
            raise MeshError(
                f"mesh {shown(text, 80)}: {shown(part, 40)} is not axis=size; write it as data=2,fsdp=4,tensor=1"
            )
        axis, size = match[1], int(match[2])
        if axis not in AXES:
            raise MeshError(f"mesh {shown(text, 80)} has no axis {shown(axis, 40)}; the axes are {', '.join(AXES)}")
        if axis in sizes:
            raise MeshError(f"mesh {shown(text, 80)} gives {axis} twice; name it once")
        sizes[axis] = size
    return MeshSizes(**sizes)


def make_mesh(sizes: MeshSizes, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of those sizes over the first devices there are, with axes that XLA propagates by itself.

    Args:
      devices: others than `jax.devices()`, such as those of `analysis.aot_compile`, which are not there.

    Raises:
      MeshError: there are fewer devices.
    """
    devices = jax.devices() if devices is None else devices
    if sizes.devices > len(devices):
        simulated = f"; JAX_NUM_CPU_DEVICES={sizes.devices} simulates them" if devices[0].platform == "cpu" else ""
        raise MeshError(f"mesh {sizes} needs {sizes.devices} devices; there are {len(devices)}{simulated}")
    shape = tuple(size for _, size in sizes.items())
    return jax.make_mesh(shape, AXES, (AxisType.Auto,) * len(AXES), devices=devices[: sizes.devices])
