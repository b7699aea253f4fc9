"""The groups of devices of a collective, from the notations of XLA."""

from __future__ import annotations

import math
import re

import numpy as np


def groups_of(attributes: str, devices: int) -> np.ndarray:
    """Which devices exchange with each other: int[groups, group]."""
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if pairs:
        return np.array(re.findall(r"(\d+),(\d+)", pairs[1]), int).reshape(-1, 2)
    listed = re.search(r"replica_groups=\{((?:\{[\d, ]*\},?)*)\}", attributes)
    if listed:
        rows = [[int(n) for n in row.split(",")] for row in re.findall(r"\{([\d, ]+)\}", listed[1])]
        return np.array(rows or [list(range(devices))])
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes)
    if iota:
        return _iota(iota[2]).reshape(_numbers(iota[1]))
    named = re.search(
        r"replica_groups=@?mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<ids>[^ ]+)\))?,? *\{(?P<axes>[^}]*)\}", attributes
    )
    if named:
        return _named_groups(named["mesh"], named["ids"], named["axes"])
    return np.arange(devices)[None]


def _named_groups(mesh: str, ids: str | None, axes: str) -> np.ndarray:
    """Groups along axes of a mesh that XLA names for itself, or along parts of such axes, as 'axis_1':(2)4.

    Of an axis, `(before)size` means that it is cut into `before`, `size` and what is left, and the group is the second.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", mesh)}
    whole = math.prod(sizes.values())
    order = np.arange(whole) if ids is None else _iota(ids) if "[" in ids else np.array(_numbers(ids))
    cuts: dict[str, list[tuple[int, int]]] = {}
    for name, before, size in re.findall(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?", axes):
        cuts.setdefault(name, []).append((int(before), int(size)) if before else (1, sizes[name]))
    shape: list[int] = []
    inside: list[int] = []
    for name, size in sizes.items():
        done = 1
        for before, part in sorted(cuts.get(name, [])):
            shape += [before // done, part]
            inside.append(len(shape) - 1)
            done = before * part
        shape.append(size // done)
    outside = [i for i in range(len(shape)) if i not in inside]
    group = math.prod(shape[i] for i in inside)
    return order.reshape(shape).transpose(outside + inside).reshape(-1, group)


def _iota(text: str) -> np.ndarray:
    """The numbers from 0 on, in the order that "[8,4]T(1,0)" means: shaped, transposed, and flat again."""
    shape, _, turn = text.partition("T")
    sizes = _numbers(shape)
    order = np.arange(math.prod(sizes)).reshape(sizes)
    return (order.transpose(_numbers(turn)) if turn else order).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def axes_of(groups: np.ndarray, mesh: dict[str, int]) -> tuple[str, ...]:
    """The axes in whose coordinates members of a group differ."""
    coordinates = np.stack(np.unravel_index(groups, tuple(mesh.values())), axis=-1)  # [groups, group, axes]
    differ = (coordinates != coordinates[:, :1]).any(axis=(0, 1))
    return tuple(axis for axis, differs in zip(mesh, differ, strict=True) if differs)
