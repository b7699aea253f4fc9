"""The communication between the devices of a mesh, from the text of a compiled program, without running it.

XLA writes the collectives into the program that every device runs (Xu et al. 2021, GSPMD), so the text contains their kinds,
mesh axes and sizes and, since loops state their trip counts, how often they run. `compiled.as_text()` lists the instructions
of each computation in scheduled order.

XLA for CPU differs from XLA for GPU and TPU in two ways that affect the figures:

- It never forms a reduce-scatter: it sums a whole array on all devices, and each then takes its part. `Collective.sliced`
  counts such bytes.
- It sums 16-bit floats in float32, which doubles the bytes; `Collective.dtypes` shows that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast, get_args

import numpy as np
from jax.sharding import AbstractMesh, Mesh

CollectiveOpcode = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast"
]
Phase = Literal["forward", "again", "backward", "rest"]
Loops = tuple[int | None, ...]


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a program.

    Attributes:
      opcode: as in XLA.
      axes: mesh axes along which the devices of a group differ.
      group: number of devices that communicate with each other.
      bytes: size of the whole result on one device, all arrays together, for one execution.
      sliced: bytes of an all-reduce in arrays of which the device then uses only a part: a backend that forms
        reduce-scatter sends half as much for them.
      shapes: of the arrays of the result, "f32[128,64]".
      loops: trip counts of the loops around it, outermost first; None if the program does not state it. Branches are counted
        as if taken.
      op_name: JAX's name of the operation that it belongs to: a path with the transformations applied.
    """

    opcode: CollectiveOpcode
    axes: tuple[str, ...]
    group: int
    bytes: int
    sliced: int
    shapes: tuple[str, ...]
    loops: Loops = ()
    op_name: str = ""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The element types, as XLA names them: "f32", "bf16"."""
        return tuple(dict.fromkeys(shape.partition("[")[0] for shape in self.shapes))

    @property
    def count(self) -> int:
        """Executions in one run of the program, with one iteration for every loop of unknown trip count."""
        return math.prod(trips for trips in self.loops if trips is not None)

    @property
    def is_counted(self) -> bool:
        """Whether the trip counts of all loops around it are known, so that `count` is exact."""
        return None not in self.loops

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one execution with a ring, the minimum: see `ring_bytes`."""
        return ring_bytes(self.opcode, self.bytes, self.group)

    @property
    def sent_if_scattered(self) -> float:
        """`sent` with a reduce-scatter for sliced arrays."""
        return self.sent - ring_bytes(self.opcode, self.sliced, self.group) / 2

    @property
    def phase(self) -> Phase:
        """The part of a training step: the forward pass, its recomputation, the backward pass, or the update.

        Everything in a program without gradients is "rest".
        """
        if "rematted_computation" in self.op_name:
            return "again"
        if "transpose(" in self.op_name:
            return "backward"
        return "forward" if "jvp(" in self.op_name else "rest"


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind along the same axes, added up over a run of the program.

    Attributes:
      instructions: number of them in the program's text.
      count: executions.
      bytes: size of their results on one device.
      sent, sent_if_scattered: bytes that one device sends, see `Collective`.
      is_counted: whether the trip counts of all loops are known; otherwise the figures are for one iteration.
    """

    opcode: CollectiveOpcode
    axes: tuple[str, ...]
    instructions: int
    count: int
    bytes: int
    sent: float
    sent_if_scattered: float
    is_counted: bool


def ring_bytes(opcode: CollectiveOpcode, size: float, group: int) -> float:
    """Bytes that each of `group` devices sends with a ring algorithm, for a result of `size` bytes on each.

    Parts go around, and each device adds to them or copies them: no algorithm sends less (Patarasuk & Yuan 2009, theorem 1).
    """
    partners = group - 1
    match opcode:
        case "all-reduce":
            return 2 * partners / group * size
        case "all-gather" | "all-to-all":
            return partners / group * size
        case "reduce-scatter":
            return partners * size  # the result is a part of the input
        case _:
            return size if partners else 0.0


def find_collectives(program: str, mesh: Mesh | AbstractMesh) -> list[Collective]:
    """Every collective of a compiled program, with those of called computations before the caller's.

    A collective in a computation with several callers is listed for each of them.

    Args:
      program: the text of a compiled program, `compiled.as_text()`.
      mesh: the mesh it was compiled for; devices are numbered in its order.
    """
    text, shape = ProgramText(program), dict(mesh.shape)
    return [
        _read_collective(text, where, instruction, shape, loops)
        for where, instruction, loops in collective_instructions(text)
    ]


def collective_instructions(text: ProgramText) -> Iterator[tuple[str, Instruction, Loops]]:
    """The instructions of `find_collectives`: the computation, the instruction, and the trip counts of enclosing loops."""
    collectives = {
        name: [instruction for instruction in lines if _COLLECTIVE.match(instruction.opcode)]
        for name, lines in text.computations.items()
    }
    # A TPU writes an asynchronous collective three times: where it starts, where it continues in a fusion that computes
    # something else, and where it ends. The first counts.
    for name in collectives:
        waits = any(instruction.target == "AsyncCollectiveDone" for instruction in text.computations[name])
        if waits or name.startswith("async_collective_fusion"):
            collectives[name] = []
    calls = {name: list(_called_computations(text, name)) for name in collectives}
    holding: dict[str, bool] = {}

    def holds(name: str) -> bool:
        if name not in holding:
            holding[name] = bool(collectives[name]) or any(holds(called) for called, _ in calls[name])
        return holding[name]

    def walk(name: str, loops: Loops) -> Iterator[tuple[str, Instruction, Loops]]:
        for called, loop in calls[name]:
            if holds(called):
                yield from walk(called, loops + loop)
        yield from ((name, instruction, loops) for instruction in collectives[name])

    return walk(text.entry, ())


def _called_computations(text: ProgramText, computation: str) -> Iterator[tuple[str, Loops]]:
    """The computations that a computation calls: name, and the trip count if it is the body of a loop."""
    for instruction in text.computations[computation]:
        if ("=%" in instruction.line or "={%" in instruction.line) and not _COLLECTIVE.match(
            instruction.opcode
        ):  # its computation may repeat it
            loop = (text.trips(computation, instruction),) if instruction.opcode == "while" else ()
            yield from ((name, loop) for name in instruction.called if name in text.computations)


def sum_traffic(collectives: Iterable[Collective]) -> list[Traffic]:
    """The traffic by kind and axes, those with the most bytes first."""
    groups: dict[tuple[CollectiveOpcode, tuple[str, ...]], list[Collective]] = {}
    for collective in collectives:
        groups.setdefault((collective.opcode, collective.axes), []).append(collective)
    traffic = [
        Traffic(
            opcode,
            axes,
            instructions=len(members),
            count=sum(c.count for c in members),
            bytes=sum(c.count * c.bytes for c in members),
            sent=sum(c.count * c.sent for c in members),
            sent_if_scattered=sum(c.count * c.sent_if_scattered for c in members),
            is_counted=all(c.is_counted for c in members),
        )
        for (opcode, axes), members in groups.items()
    ]
    return sorted(traffic, key=lambda t: -t.sent)


_COLLECTIVE = re.compile(rf"(?P<opcode>{'|'.join(get_args(CollectiveOpcode))})(?P<start>-start)?$")


def _read_collective(
    text: ProgramText, computation: str, instruction: Instruction, mesh: dict[str, int], loops: Loops
) -> Collective:
    match, lines = _COLLECTIVE.match(instruction.opcode), text.computations[computation]
    assert match is not None
    result = instruction.type
    if match["start"] and match["opcode"] != "all-reduce":
        result = tuple_elements(result)[1]  # input, output, and sometimes more
    opcode = cast(CollectiveOpcode, match["opcode"])
    if opcode == "all-reduce" and computation.startswith("all-reduce-scatter"):  # the TPU's name for a reduce-scatter
        opcode, result = "reduce-scatter", lines[-1].type
    arrays = [array[:4] for array in ARRAY.findall(result)]
    sizes = [array_bytes(*array) for array in arrays]
    groups = device_groups(instruction.rest, math.prod(mesh.values()))
    axes = axes_of(groups, mesh)
    # All axes in which a device's partners differ, even if it sends only to one of them.
    group = math.prod(mesh[axis] for axis in axes) if match["opcode"] == "collective-permute" else groups.shape[1]
    op_name = re.search(r'op_name="([^"]*)"', instruction.line)
    return Collective(
        opcode=opcode,
        axes=axes,
        group=group,
        bytes=sum(sizes),
        sliced=_sliced(text, instruction, lines, sizes) if opcode == "all-reduce" else 0,
        shapes=tuple(f"{''.join(array[:3])}[{array[3]}]" for array in arrays),
        loops=loops,
        op_name=op_name[1] if op_name else "",
    )


def _sliced(text: ProgramText, instruction: Instruction, lines: list[Instruction], sizes: list[int]) -> int:
    """Bytes of the arrays of a collective's result that are only read in parts; `lines` are its computation's."""
    if len(sizes) == 1:
        return sizes[0] * _is_sliced(text, instruction.name, lines)
    parts = {
        int(match[1]): other.name
        for other in lines
        if instruction.name in other.operands and (match := re.search(r" get-tuple-element\(.*index=(\d+)", other.line))
    }
    return sum(size * (i in parts and _is_sliced(text, parts[i], lines)) for i, size in enumerate(sizes))


def _is_sliced(text: ProgramText, name: str, lines: list[Instruction]) -> bool:
    """Whether an array is only read through slices whose position differs by device, including in fusions."""
    users = [instruction for instruction in lines if name in instruction.operands]
    return bool(users) and all(_slices(text, user, name, lines) for user in users)


def _slices(text: ProgramText, user: Instruction, name: str, lines: list[Instruction]) -> bool:
    match user.opcode:
        case "dynamic-slice":
            return user.operands[0] == name
        case "bitcast" | "reshape" | "transpose" | "copy" | "convert" | "add":
            return _is_sliced(text, user.name, lines)
        case "fusion":
            inside = text.computations.get(user.calls("calls"), [])
            places = [i for i, operand in enumerate(user.operands) if operand == name]
            entering = [x.name for x in inside for i in places if f" parameter({i})" in x.line]
            return all(_is_sliced(text, parameter, inside) for parameter in entering)
        case _:
            return False


def device_groups(attributes: str, devices: int) -> np.ndarray:
    """The groups of devices that communicate with each other: int[groups, group]."""
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if pairs:
        return np.array(re.findall(r"(\d+),(\d+)", pairs[1]), int).reshape(-1, 2)
    listed = re.search(r"replica_groups=\{((?:\{[\d, ]*\},?)*)\}", attributes)
    if listed:
        rows = [[int(n) for n in row.split(",")] for row in re.findall(r"\{([\d, ]+)\}", listed[1])]
        return np.array(rows or [list(range(devices))])
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes)
    if iota:
        return _iota(iota[2]).reshape(_parse_integers(iota[1]))
    mesh_groups = re.search(
        r"replica_groups=@?mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<ids>[^ ]+)\))?,? *\{(?P<axes>[^}]*)\}", attributes
    )
    if mesh_groups:
        return _named_groups(mesh_groups["mesh"], mesh_groups["ids"], mesh_groups["axes"])
    return np.arange(devices)[None]


def _named_groups(mesh: str, ids: str | None, axes: str) -> np.ndarray:
    """Groups along axes of a mesh that XLA names itself, or along parts of such axes, as in 'axis_1':(2)4.

    `(before)size` splits an axis into `before`, `size` and the rest, and the group is along the second.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", mesh)}
    whole = math.prod(sizes.values())
    order = np.arange(whole) if ids is None else _iota(ids) if "[" in ids else np.array(_parse_integers(ids))
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
    """The numbers of an iota such as "[8,4]T(1,0)": from 0 on, reshaped, transposed and flattened."""
    shape, _, permutation = text.partition("T")
    sizes = _parse_integers(shape)
    order = np.arange(math.prod(sizes)).reshape(sizes)
    return (order.transpose(_parse_integers(permutation)) if permutation else order).reshape(-1)


def _parse_integers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def axes_of(groups: np.ndarray, mesh: dict[str, int]) -> tuple[str, ...]:
    """The axes along which members of a group have different coordinates."""
    coordinates = np.stack(np.unravel_index(groups, tuple(mesh.values())), axis=-1)  # [groups, group, axes]
    differ = (coordinates != coordinates[:, :1]).any(axis=(0, 1))
    return tuple(axis for axis, differs in zip(mesh, differ, strict=True) if differs)


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>[^%\"]+?) (?P<opcode>[\w\-]+)\((?P<rest>.*)$")
ARRAY = re.compile(r"([a-z]+)(\d*)(\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_TRIPS = re.compile(r"\"known_trip_count\":\{\"n\":\"(\d+)\"\}")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computations?)=(?:%?([\w.\-]+)|\{([^{}]*)\})")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Instruction:
    """A line of a computation.

    Attributes:
      type: type of the result, with layouts.
      rest: the text after the opcode's bracket: operands and attributes.
      line: the whole line.
    """

    name: str
    type: str
    opcode: str
    rest: str
    line: str

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_OPERAND.findall(self.rest.split("), ")[0]))

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs."""
        return tuple(
            name for single, several in _CALLED.findall(self.rest) for name in re.findall(r"[\w.\-]+", single or several)
        )

    def calls(self, attribute: str) -> str:
        """The computation that an attribute names, such as a loop's "body"."""
        match = re.search(rf"{attribute}=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""

    @property
    def is_root(self) -> bool:
        """Whether it is its computation's result."""
        return self.line.lstrip().startswith("ROOT ")

    @property
    def target(self) -> str:
        """The function that a custom call names."""
        match = _TARGET.search(self.rest)
        return match[1] if match else ""


class ProgramText:
    """A compiled program, computation by computation."""

    def __init__(self, text: str) -> None:
        self.entry = ""
        self.computations: dict[str, list[Instruction]] = {}
        name = None
        for line in _whole_lines(text):
            if not line.startswith(" "):
                header = _COMPUTATION.match(line)
                name = header[2] if header else None
                if header:
                    self.computations[header[2]] = []
                    self.entry = header[2] if header[1] else self.entry
            elif name is not None and (match := _INSTRUCTION.match(line)):
                self.computations[name].append(Instruction(**match.groupdict(), line=line))
        self._by_name: dict[str, dict[str, Instruction]] = {}

    def by_name(self, computation: str) -> dict[str, Instruction]:
        """The instructions of a computation by name."""
        if computation not in self._by_name:
            self._by_name[computation] = {instruction.name: instruction for instruction in self.computations[computation]}
        return self._by_name[computation]

    def trips(self, computation: str, loop: Instruction) -> int | None:
        """The trip count of a loop, which some compilers note and others leave to its condition; None if unknown."""
        match = _TRIPS.search(loop.rest)
        if match:
            return int(match[1])
        condition, body = loop.calls("condition"), loop.calls("body")
        inside = self.by_name(condition)
        root = self.computations[condition][-1]
        if root.opcode != "compare" or "direction=LT" not in root.rest or len(root.operands) != 2:
            return None
        counter, limit = (inside.get(name) for name in root.operands)
        index = _element(counter)
        bound = _integer_constant(limit)
        if index is None or bound is None:
            return None
        before, following = self.by_name(computation), self.by_name(body)
        start = before.get(loop.operands[0])
        first = before.get(start.operands[index]) if start and start.opcode == "tuple" else None
        if first and first.opcode == "copy":
            first = before.get(first.operands[0])
        step = following.get(self.computations[body][-1].operands[index])
        steps = [_integer_constant(following.get(name)) for name in step.operands] if step and step.opcode == "add" else []
        by = next((n for n in steps if n), 1)
        return -(-(bound - (_integer_constant(first) or 0)) // by)


def _whole_lines(text: str) -> Iterator[str]:
    """The lines of a program's text, one per instruction: a kernel's backend config may span several lines."""
    inside, instruction = False, ""
    for line in text.splitlines():
        if inside and line != "}" and not line.startswith("  "):
            instruction += line
            continue
        if instruction:
            yield instruction
        instruction = line if line.startswith("  ") else ""
        if not instruction:
            yield line
        inside = line != "}" if inside else bool(_COMPUTATION.match(line))
    if instruction:
        yield instruction


def _element(instruction: Instruction | None) -> int | None:
    """The index of the tuple element that an instruction takes."""
    match = (
        re.search(r"index=(\d+)", instruction.rest) if instruction and instruction.opcode == "get-tuple-element" else None
    )
    return int(match[1]) if match else None


def _integer_constant(instruction: Instruction | None) -> int | None:
    """The value of a constant that is an integer."""
    match = re.match(r"(-?\d+)\)", instruction.rest) if instruction and instruction.opcode == "constant" else None
    return int(match[1]) if match else None


def tuple_elements(type: str) -> list[str]:
    """The types in a tuple type: two for "(f32[2], (f32[4], f32[4]))"; for any other type, only that type."""
    if not type.strip().startswith("("):
        return [type]
    parts, depth = [""], 0
    for character in type.strip()[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def array_bytes(letters: str, bits: str, rest: str, shape: str) -> int:
    """Bytes of an array without padding, from the parts of its type as `ARRAY` matches them."""
    if letters in ("token", "opaque"):
        return 0
    return -(-math.prod(int(n.lstrip("<=")) for n in shape.split(",") if n) * int(bits or 8) // 8)
