"""The communication between the devices of a mesh, read from the text of a compiled program: nothing runs.

XLA writes the collectives into the program that every device runs (Xu et al. 2021, GSPMD); so the text has their kinds,
their axes of the mesh, their sizes and, as loops state their trip counts, their numbers.

XLA for CPU differs from that for GPU and TPU in two ways that the figures show:

- It never forms a reduce-scatter: it sums all of an array on all devices, and each then takes its part. `Collective.sliced`
  counts such bytes.
- It sums 16-bit numbers in float32, which doubles the bytes; `Collective.dtypes` shows that.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, cast, get_args

from jax.sharding import AbstractMesh, Mesh

from llama_jax.analysis.groups import axes_of, groups_of
from llama_jax.analysis.hlo import ARRAY, Instruction, ProgramText, array_bytes, tuple_elements
from llama_jax.analysis.programs import is_overlapped, multiplies

CollectiveKind = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast"
]
Phase = Literal["forward", "again", "backward", "rest"]


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a program.

    Attributes:
      kind: as XLA calls it.
      axes: of the mesh, along which the devices of a group differ.
      group: how many devices exchange with each other.
      bytes: of the whole result on one device, all arrays together, for one execution.
      sliced: of the bytes of an all-reduce, those of arrays that the device then uses only in part: a backend that forms
        reduce-scatter sends half as much for them.
      dtypes: the kinds of elements, as XLA names them: "f32", "bf16".
      shapes: of the arrays of the result, "f32[128,64]".
      loops: trip counts of the loops around it, the outermost first; None if the program does not tell.
      conditional: it is in a branch that may not be taken; it is counted as if it were.
      asynchronous: its start and its end are separate instructions.
      overlapped: between these the device multiplies matrices, or runs a kernel or a loop.
      op_name: by JAX, of the operation that it belongs to: a path with the transformations applied.
      stack: "file:line function" of that operation, the innermost last; empty where the program does not tell.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    group: int
    bytes: int
    sliced: int
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    loops: tuple[int | None, ...] = ()
    conditional: bool = False
    asynchronous: bool = False
    overlapped: bool = False
    op_name: str = ""
    stack: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Executions while the program runs once; of one turn of every loop whose trips are not known."""
        return math.prod(trips for trips in self.loops if trips is not None)

    @property
    def is_counted(self) -> bool:
        """Whether the trips of all loops around it are known, so that `count` is that of the whole program."""
        return None not in self.loops

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one execution by a ring, the least there is: see `ring_bytes`."""
        return ring_bytes(self.kind, self.bytes, self.group)

    @property
    def sent_if_scattered(self) -> float:
        """The same with a reduce-scatter for what is sliced."""
        return self.sent - ring_bytes(self.kind, self.sliced, self.group) / 2

    @property
    def phase(self) -> Phase:
        """Of a training step: the forward pass, what the backward pass computes again, that itself, and the update.

        All of a program that computes no gradients is "rest".
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
      instructions: how many there are in the program's text.
      count: executions.
      bytes: of their results on one device.
      sent, sent_if_scattered: bytes that one device sends, see `Collective`.
      is_counted: whether the trips of all loops are known; otherwise the figures are those of one turn.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    instructions: int
    count: int
    bytes: int
    sent: float
    sent_if_scattered: float
    is_counted: bool


def ring_bytes(kind: CollectiveKind, size: float, group: int) -> float:
    """Bytes that each of `group` devices sends in rings, for a result of `size` bytes on each.

    Parts go around and each device adds to them or copies them: no algorithm sends less (Patarasuk & Yuan 2009, theorem 1).
    """
    others = group - 1
    match kind:
        case "all-reduce":
            return 2 * others / group * size
        case "all-gather" | "all-to-all":
            return others / group * size
        case "reduce-scatter":
            return others * size  # the result is a part of what comes in
        case _:
            return size if others else 0.0


def find_collectives(program: str, mesh: Mesh | AbstractMesh) -> list[Collective]:
    """Every collective of a compiled program, those that a computation calls before its own.

    One in a computation that is called from several places is listed for each of them.

    Args:
      program: the text of a compiled program, `compiled.as_text()`.
      mesh: over which it was compiled: devices count in its order.
    """
    text = _CollectivesOfText(program)
    shape = dict(mesh.shape)
    return [
        _read(text, computation, one, shape, loops, conditional)
        for computation, loops, conditional in _walk(text, text.text.entry, (), False)
        for one in text.collectives[computation]
        if computation not in text.continued
    ]


def add_up(collectives: Iterable[Collective]) -> list[Traffic]:
    """The traffic by kind and axes, the most bytes first."""
    groups: dict[tuple[CollectiveKind, tuple[str, ...]], list[Collective]] = {}
    for found in collectives:
        groups.setdefault((found.kind, found.axes), []).append(found)
    traffic = [
        Traffic(
            kind,
            axes,
            instructions=len(members),
            count=sum(c.count for c in members),
            bytes=sum(c.count * c.bytes for c in members),
            sent=sum(c.count * c.sent for c in members),
            sent_if_scattered=sum(c.count * c.sent_if_scattered for c in members),
            is_counted=all(c.is_counted for c in members),
        )
        for (kind, axes), members in groups.items()
    ]
    return sorted(traffic, key=lambda t: -t.sent)


_COLLECTIVE = re.compile(rf" (?P<kind>{'|'.join(get_args(CollectiveKind))})(?P<start>-start)?\(")
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)", re.MULTILINE)


class _CollectivesOfText:
    """Where the collectives of a program are."""

    def __init__(self, text: str) -> None:
        self.text = ProgramText(text)
        computations = self.text.computations
        self.collectives = {name: [x for x in lines if _collective(x)] for name, lines in computations.items()}
        self.calls = {name: list(_calls(self.text, name)) for name in computations}
        # A TPU writes an asynchronous collective three times: where it starts, where it goes on inside of a fusion that
        # computes something else, and where it is waited for.
        beside = [name for name in computations if name.startswith("async_collective_fusion")]
        waiting = [name for name, lines in computations.items() if any(x.target == "AsyncCollectiveDone" for x in lines)]
        starting = [name for name, lines in computations.items() if any(x.target == "AsyncCollectiveStart" for x in lines)]
        self.continued = {*beside, *waiting}
        computing = [name for name in beside if any(multiplies(self.text, x) for x in computations[name])]
        self.channels_started = self._channels((*starting, *beside))
        self.channels_overlapped = self._channels(computing)
        self._tables = {name: dict(row.split(" ", 1) for row in rows.splitlines()) for name, rows in _TABLE.findall(text)}
        self._holding: dict[str, bool] = {}

    def _channels(self, computations: Iterable[str]) -> set[str]:
        return {_channel(one) for name in computations for one in self.collectives[name]}

    def holds_collectives(self, name: str) -> bool:
        """Whether there are any in a computation or in what it calls."""
        if name not in self._holding:
            inside = any(self.holds_collectives(called) for called, _, _ in self.calls[name])
            self._holding[name] = inside or bool(self.collectives[name])
        return self._holding[name]

    def sliced(self, one: Instruction, lines: list[Instruction], sizes: list[int]) -> int:
        """Bytes of those arrays of a collective's result that are only read in parts; `lines` are its computation's."""
        if len(sizes) == 1:
            return sizes[0] * self._is_sliced(one.name, lines)
        parts = {
            int(found[1]): other.name
            for other in _users(one.name, lines)
            if (found := re.search(r" get-tuple-element\(.*index=(\d+)", other.line))
        }
        return sum(size * (i in parts and self._is_sliced(parts[i], lines)) for i, size in enumerate(sizes))

    def _is_sliced(self, name: str, lines: list[Instruction]) -> bool:
        """Whether nothing but slices at places that differ by device are taken of an array, also inside of fusions."""
        users = _users(name, lines)
        return bool(users) and all(self._slices(user, name, lines) for user in users)

    def _slices(self, user: Instruction, name: str, lines: list[Instruction]) -> bool:
        match user.opcode:
            case "dynamic-slice":
                return user.operands[0] == name
            case "bitcast" | "reshape" | "transpose" | "copy" | "convert" | "add":
                return self._is_sliced(user.name, lines)
            case "fusion":
                inside = self.text.computations.get(user.calls("calls"), [])
                places = [i for i, operand in enumerate(user.operands) if operand == name]
                entering = [x.name for x in inside for i in places if f" parameter({i})" in x.line]
                return all(self._is_sliced(parameter, inside) for parameter in entering)
            case _:
                return False

    def stack(self, line: str) -> tuple[str, ...]:
        """Where in the source an instruction comes from, the innermost last."""
        direct = re.search(r'source_file="([^"]*)" source_line=(\d+)', line)
        if direct:
            return (f"{direct[1]}:{direct[2]}",)
        frame = re.search(r"stack_frame_id=(\d+)", line)
        names, functions = self._tables.get("FileNames", {}), self._tables.get("FunctionNames", {})
        locations, frames = self._tables.get("FileLocations", {}), self._tables.get("StackFrames", {})
        found: list[str] = []
        current = frame[1] if frame else "0"
        while current in frames:
            ids = dict(re.findall(r"(\w+)=(\d+)", frames[current]))
            place = dict(re.findall(r"(\w+)=(\d+)", locations[ids["file_location_id"]]))
            file, function = names[place["file_name_id"]].strip('"'), functions[place["function_name_id"]].strip('"')
            found.append(f"{file}:{place['line']} {function}")
            current = str(int(ids["parent_frame_id"]) - 1)  # frames count from 1, their parents from 2; 1 is none
        return tuple(reversed(found))


def _collective(one: Instruction) -> re.Match[str] | None:
    return _COLLECTIVE.match(f" {one.opcode}(")


def _channel(one: Instruction) -> str:
    found = re.search(r"channel_id=(\d+)", one.rest)
    return found[1] if found else one.name


def _users(name: str, lines: list[Instruction]) -> list[Instruction]:
    return [one for one in lines if name in one.operands]


def _calls(text: ProgramText, computation: str) -> Iterator[tuple[str, tuple[int | None, ...], bool]]:
    """What a computation calls: its name, the trips of the loop if it is one's body, and whether it is a branch."""
    for one in text.computations[computation]:
        if "=%" not in one.line and "={%" not in one.line:
            continue
        if _collective(one):
            continue  # the text of an asynchronous collective may hold the plain one as well
        loop = (text.trips(computation, one),) if one.opcode == "while" else ()
        for name in one.called:
            if name in text.computations:
                yield name, loop, one.opcode == "conditional"


def _walk(
    text: _CollectivesOfText, name: str, loops: tuple[int | None, ...], conditional: bool
) -> Iterator[tuple[str, tuple[int | None, ...], bool]]:
    """The computations with collectives that a program runs, each with the loops around it."""
    for called, loop, branch in text.calls.get(name, ()):
        if text.holds_collectives(called):
            yield from _walk(text, called, loops + loop, conditional or branch)
    if text.collectives.get(name):
        yield name, loops, conditional


def _read(
    text: _CollectivesOfText,
    computation: str,
    one: Instruction,
    mesh: dict[str, int],
    loops: tuple[int | None, ...],
    conditional: bool,
) -> Collective:
    found, lines = _collective(one), text.text.computations[computation]
    assert found is not None
    result = one.type
    if found["start"] and found["kind"] != "all-reduce":
        result = tuple_elements(result)[1]  # what goes in, what comes out, and sometimes more
    kind = cast(CollectiveKind, found["kind"])
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):  # a TPU's name for it
        kind, result = "reduce-scatter", lines[-1].type
    arrays = [array[:4] for array in ARRAY.findall(result)]
    sizes = [array_bytes(*array) for array in arrays]
    groups = groups_of(one.rest, math.prod(mesh.values()))
    axes = axes_of(groups, mesh)
    # All that a device's partners differ in, also where each is sent to one of them only.
    group = math.prod(mesh[axis] for axis in axes) if found["kind"] == "collective-permute" else groups.shape[1]
    op_name = re.search(r'op_name="([^"]*)"', one.line)
    return Collective(
        kind=kind,
        axes=axes,
        group=group,
        bytes=sum(sizes),
        sliced=text.sliced(one, lines, sizes) if kind == "all-reduce" else 0,
        dtypes=tuple(Counter("".join(array[:3]) for array in arrays)),
        shapes=tuple(f"{''.join(array[:3])}[{array[3]}]" for array in arrays),
        loops=loops,
        conditional=conditional,
        asynchronous=_channel(one) in text.channels_started or bool(found["start"]),
        overlapped=_channel(one) in text.channels_overlapped
        or (bool(found["start"]) and is_overlapped(one, lines, text.text)),
        op_name=op_name[1] if op_name else "",
        stack=text.stack(one.line),
    )
