"""The text of a compiled program: its computations, their instructions, and how often each runs.

`compiled.as_text()` lists the instructions of each computation in the order of their schedule; those of the entry, of loops
and of branches are what a device starts one after the other, those inside of fusions are parts of one kernel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>[^%\"]+?) (?P<opcode>[\w\-]+)\((?P<rest>.*)$")
ARRAY = re.compile(r"([a-z]+)(\d*)(\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_TRIPS = re.compile(r"\"known_trip_count\":\{\"n\":\"(\d+)\"\}")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computations?)=(?:%?([\w.\-]+)|\{([^{}]*)\})")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OPERAND = re.compile(r"%([\w.\-]+)")

CONTROL = {"while", "conditional", "call"}


@dataclass(frozen=True)
class Instruction:
    """A line of a computation.

    Attributes:
      type: of the result, with the layouts.
      rest: what follows the opcode's bracket: operands and attributes.
      line: the whole of it.
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
        """Computations that it runs."""
        return tuple(name for one, several in _CALLED.findall(self.rest) for name in re.findall(r"[\w.\-]+", one or several))

    def calls(self, attribute: str) -> str:
        """The computation that an attribute names, such as a loop's "body"."""
        found = re.search(rf"{attribute}=%?([\w.\-]+)", self.rest)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """Of a custom call."""
        found = _TARGET.search(self.rest)
        return found[1] if found else ""


class ProgramText:
    """A compiled program, computation by computation."""

    def __init__(self, text: str) -> None:
        self.entry = ""
        self.computations: dict[str, list[Instruction]] = {}
        self.is_tpu = ":T(" in text  # only TPUs tile
        name = None
        for line in _whole_lines(text):
            if not line.startswith(" "):
                found = _COMPUTATION.match(line)
                name = found[2] if found else None
                if found:
                    self.computations[found[2]] = []
                    self.entry = found[2] if found[1] else self.entry
            elif name is not None and (match := _INSTRUCTION.match(line)):
                self.computations[name].append(Instruction(**match.groupdict(), line=line))
        self._named: dict[str, dict[str, Instruction]] = {}

    def named(self, computation: str) -> dict[str, Instruction]:
        """The instructions of a computation by name."""
        if computation not in self._named:
            self._named[computation] = {one.name: one for one in self.computations[computation]}
        return self._named[computation]

    def run(self, computation: str, *, cheapest: bool = False) -> Iterator[tuple[str, Instruction, int, bool]]:
        """What a device starts: the computation, the instruction, how often, and whether in a loop.

        Args:
          cheapest: of branches only that with the fewest instructions, as where sampling need not filter; else all.
        """
        for one in self.computations[computation]:
            if one.opcode not in CONTROL:
                yield computation, one, 1, False
                continue
            called = [name for name in one.called if name in self.computations]
            if one.opcode == "while":
                called = [one.calls("body")]  # the condition is a comparison
            if one.opcode == "conditional" and cheapest and called:
                called = [min(called, key=self._size)]
            trips = (self.trips(computation, one) or 1) if one.opcode == "while" else 1
            for name in called:
                for where, inner, times, in_loop in self.run(name, cheapest=cheapest):
                    yield where, inner, times * trips, in_loop or one.opcode == "while"

    def trips(self, computation: str, loop: Instruction) -> int | None:
        """Turns of a loop, which some compilers note and others leave to its condition; None where it does not tell."""
        noted = _TRIPS.search(loop.rest)
        if noted:
            return int(noted[1])
        condition, body = loop.calls("condition"), loop.calls("body")
        inside = self.named(condition)
        root = self.computations[condition][-1]
        if root.opcode != "compare" or "direction=LT" not in root.rest or len(root.operands) != 2:
            return None
        counter, limit = (inside.get(name) for name in root.operands)
        index = _element(counter)
        bound = _whole(limit)
        if index is None or bound is None:
            return None
        before, following = self.named(computation), self.named(body)
        start = before.get(loop.operands[0])
        first = before.get(start.operands[index]) if start and start.opcode == "tuple" else None
        if first and first.opcode == "copy":
            first = before.get(first.operands[0])
        step = following.get(self.computations[body][-1].operands[index])
        steps = [_whole(following.get(name)) for name in step.operands] if step and step.opcode == "add" else []
        by = next((n for n in steps if n), 1)
        return -(-(bound - (_whole(first) or 0)) // by)

    def _size(self, computation: str) -> int:
        """Instructions in a computation and in what it calls."""
        own = self.computations[computation]
        return len(own) + sum(self._size(name) for one in own for name in one.called if name in self.computations)

    def memory_bytes(self, type: str) -> int:
        """Bytes of arrays that lie in the device's memory, by their type; 0 for those on the chip, or in the host's."""
        return sum(array_bytes(*array) for *array, layout in ARRAY.findall(type) if not self._elsewhere(layout))

    def _elsewhere(self, layout: str) -> bool:
        found = re.search(r"S\((\d+)\)", layout)
        return found is not None and (self.is_tpu or found[1] == "5")


def _whole_lines(text: str) -> Iterator[str]:
    """The lines of a program's text, an instruction in each: what a kernel says of itself may go over several."""
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


def _element(one: Instruction | None) -> int | None:
    """Which element of a tuple an instruction takes."""
    found = re.search(r"index=(\d+)", one.rest) if one and one.opcode == "get-tuple-element" else None
    return int(found[1]) if found else None


def _whole(one: Instruction | None) -> int | None:
    """The value of a constant that is an integer."""
    found = re.match(r"(-?\d+)\)", one.rest) if one and one.opcode == "constant" else None
    return int(found[1]) if found else None


def tuple_elements(type: str) -> list[str]:
    """The types in a tuple's: of "(f32[2], (f32[4], f32[4]))" the two; of another type that one."""
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
    """Bytes of an array, by the parts of its type as `ARRAY` finds them, without padding."""
    if letters in ("token", "opaque"):
        return 0
    return -(-_count(shape) * int(bits or 8) // 8)


def elements(type: str) -> int:
    """Elements of all arrays of a type."""
    return sum(_count(shape) for *_, shape, _ in ARRAY.findall(type))


def _count(shape: str) -> int:
    return math.prod(int(n.lstrip("<=")) for n in shape.split(",") if n)
