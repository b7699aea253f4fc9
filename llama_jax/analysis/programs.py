"""What the text of a compiled program says of the work that each device does: kernels, copies, and bytes that are read.

`compiled.as_text()` lists the instructions of each computation in the order of their schedule; those of the entry, of loops
and of branches are what a device starts one after the other, those inside of fusions are parts of one kernel. All functions
here are pure: from text to facts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>[^%\"]+?) (?P<opcode>[\w\-]+)\((?P<rest>.*)$")
ARRAY = re.compile(r"([a-z]+)(\d*)(\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_TRIPS = re.compile(r"\"known_trip_count\":\{\"n\":\"(\d+)\"\}")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computations?)=(?:%?([\w.\-]+)|\{([^{}]*)\})")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OPERAND = re.compile(r"%([\w.\-]+)")

# They name a buffer, or wait for what was started before.
_FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "bitcast-convert", "after-all", "add-dependency"),
    *("opt-barrier", "optimization-barrier", "partition-id", "replica-id", "domain", "async-update", "async-done"),
    *("copy-done", "slice-done", "send-done", "recv-done"),
}
_FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked"}
_FREE_CALLS |= {"AsyncCollectiveStart", "AsyncCollectiveDone"}
_CONTROL = {"while", "conditional", "call"}
_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all")
_MOVES = {
    "parameter",
    "constant",
    "bitcast",
    "copy",
    "transpose",
    "reshape",
    "slice",
    "concatenate",
    "tuple",
    "get-tuple-element",
}
_PARTS = {"dynamic-slice", "slice", "gather"}  # of their first operand they read what they give
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is written over the first


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


@dataclass(frozen=True)
class Copy:
    """An instruction that only moves an array to another place or layout in the device's memory.

    Attributes:
      bytes: of its result.
      times: executions in a run of the program; of loops whose trips are not known one turn is counted.
      in_loop: it is in such a loop or another.
    """

    name: str
    shape: str
    bytes: int
    times: int
    in_loop: bool
    op_name: str


@dataclass(frozen=True)
class Token:
    """What one turn of a decoding loop does, in which every row gets one token.

    Attributes:
      read, written: bytes of the device's memory, at most once for each kernel; what stays on the chip is not counted.
      kernels: how many are started.
      kernels_of_layers: those among them that are there for each layer, all together.
      collectives: how many are started.
    """

    read: int
    written: int
    kernels: int
    kernels_of_layers: int
    collectives: int


class Text:
    """A compiled program, computation by computation."""

    def __init__(self, text: str) -> None:
        self.entry = ""
        self.computations: dict[str, list[Instruction]] = {}
        self.is_tpu = ":T(" in text  # only TPUs tile
        name = None
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                name = found[2]
                self.computations[name] = []
                self.entry = name if found[1] else self.entry
            elif not line.startswith(" "):
                inside = self.computations.get(name or "")
                if line.startswith("}") and not line.startswith("}}"):
                    name = None
                elif inside:  # what a kernel says of itself goes over several lines
                    last = inside[-1]
                    inside[-1] = replace(last, rest=f"{last.rest} {line}", line=f"{last.line} {line}")
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
            if one.opcode not in _CONTROL:
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

    def is_kernel(self, one: Instruction) -> bool:
        """Whether the device starts something for it. On a TPU copies between memories are none: they run beside."""
        if (
            one.opcode in _FREE
            or one.opcode in _CONTROL
            or one.opcode.startswith(_COLLECTIVES)
            or one.opcode.endswith("-done")
        ):
            return False
        if one.opcode == "custom-call":
            return one.target not in _FREE_CALLS
        if not self.is_tpu:
            return True
        if one.opcode.endswith("-start") or not any(shape for *_, shape, _ in ARRAY.findall(one.type)):
            return False
        started = ("fusion", "convolution", "dot", "reduce", "sort", "scatter", "gather", "copy", "transpose")
        return one.opcode in started or one.opcode in _IN_PLACE

    def multiplies(self, one: Instruction) -> bool:
        """Whether an instruction is a product of matrices or a kernel of its own, also inside of a fusion."""
        if one.opcode in ("dot", "convolution") or (one.opcode == "custom-call" and one.target not in _FREE_CALLS):
            return True
        inside = self.computations.get(one.calls("calls"), []) if one.opcode == "fusion" else []
        return any(self.multiplies(inner) for inner in inside)

    def memory_bytes(self, type: str) -> int:
        """Bytes of arrays that lie in the device's memory, by their type; 0 for those on the chip, or in the host's."""
        return sum(array_bytes(*array) for *array, layout in ARRAY.findall(type) if not self._elsewhere(layout))

    def _elsewhere(self, layout: str) -> bool:
        found = re.search(r"S\((\d+)\)", layout)
        return bool(found) and (self.is_tpu or found[1] == "5")  # type: ignore[index]

    def read(self, computation: str, one: Instruction) -> int:
        """Bytes of the device's memory that an instruction reads."""
        if one.opcode in _FREE or one.opcode in _CONTROL or one.opcode.endswith("-done") or one.target in _FREE_CALLS:
            return 0
        if one.opcode in ("iota", "broadcast"):
            return 0
        types = [self.named(computation)[name].type for name in one.operands if name in self.named(computation)]
        if one.opcode in _PARTS and types:
            return min(self.memory_bytes(types[0]), sum(array_bytes(*array) for *array, _ in ARRAY.findall(one.type)))
        if one.opcode == "slice-start" and types:
            part = tuple_elements(one.type)[1]
            return min(self.memory_bytes(types[0]), sum(array_bytes(*array) for *array, _ in ARRAY.findall(part)))
        if one.opcode in _IN_PLACE:
            return sum(map(self.memory_bytes, types[1:]))
        if one.opcode == "fusion" and one.called and one.called[0] in self.computations:
            return sum(math.ceil(self.memory_bytes(type) * self._share(one.called[0], i)) for i, type in enumerate(types))
        return sum(map(self.memory_bytes, types))

    def _share(self, computation: str, index: int) -> float:
        """Which part of its operand a fusion reads."""
        for one in self.computations[computation]:
            if one.opcode == "parameter" and one.rest.startswith(f"{index})"):
                whole = elements(one.type)
                return min(1.0, self._used(computation, one.name) / whole) if whole else 0.0
        return 1.0

    def _used(self, computation: str, name: str, in_place: bool = False) -> int:
        """Elements of an array that the instructions of a fusion read, at most all.

        Args:
          in_place: it is the array after an update, so that being the result is not being read.
        """
        lines = self.computations[computation]
        whole, used = elements(self.named(computation)[name].type), 0
        if lines[-1].name == name:
            return 0 if in_place else whole
        for one in lines:
            if name not in one.operands:
                continue
            place = one.operands.index(name)
            if one.opcode in _PARTS and place == 0:
                used += elements(one.type)
            elif one.opcode in _IN_PLACE and place == 0:
                used += self._used(computation, one.name, True)
            elif one.opcode in ("bitcast", "reshape", "copy", "convert", "transpose", "bitcast-convert"):
                same = elements(one.type) == whole
                used += self._used(computation, one.name, in_place) if same else whole
            elif one.opcode == "fusion" and one.called:
                used += math.ceil(self._share(one.called[0], place) * whole)
            elif one.opcode == "tuple" and in_place:
                continue
            else:
                return whole
        return min(used, whole)

    def written(self, one: Instruction) -> int:
        """Bytes of the device's memory that an instruction writes; what it updates in place counts by the update."""
        if one.opcode in _FREE or one.opcode in _CONTROL or one.opcode.endswith("-done") or one.target in _FREE_CALLS:
            return 0
        if one.opcode.endswith("-start"):
            parts = tuple_elements(one.type)
            return self.memory_bytes(parts[0] if one.opcode == "copy-start" else parts[min(1, len(parts) - 1)])
        if one.opcode == "fusion" and one.called and one.called[0] in self.computations:
            return self._written_by(one.called[0], one.type)
        return self.memory_bytes(one.type)

    def _written_by(self, computation: str, type: str) -> int:
        named = self.named(computation)
        root = self.computations[computation][-1]
        results = [named[name] for name in root.operands] if root.opcode == "tuple" else [root]
        types = tuple_elements(type) if type.startswith("(") else [type]
        total = 0
        for result, kind in zip(results, types, strict=False):
            size = self.memory_bytes(kind)
            while (
                result.opcode in ("bitcast", "bitcast-convert", "reshape")
                and result.operands
                and result.operands[0] in named
            ):
                result = named[result.operands[0]]
            if result.opcode in _IN_PLACE and size:
                update = named.get(result.operands[_IN_PLACE[result.opcode]])
                size = min(size, sum(array_bytes(*array) for *array, _ in ARRAY.findall(update.type))) if update else size
            total += size
        return total


def custom_calls(text: Text) -> Counter[str]:
    """Kernels that are not the compiler's own, by what they are called, and how many places of the program start them."""
    found: Counter[str] = Counter()
    for computation in text.computations.values():
        for one in computation:
            if one.opcode == "custom-call" and one.target not in _FREE_CALLS:
                kernel = re.search(r'kernel_name = \\?"(\w+)|"?kernel_name"?[:=] ?\\?"?(\w+)', one.rest)
                name = re.search(r'op_name="[^"]*/(\w+)"', one.rest)
                inner = kernel and (kernel[1] or kernel[2])
                if one.target in ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2"):
                    inner = inner or (name and name[1])
                found[f"{one.target}:{inner}" if inner else one.target] += 1
    return found


def find_copies(text: Text, at_least: int = 1 << 20) -> list[Copy]:
    """Instructions that write so many bytes and do nothing but move them: the same array, or slices, in another layout."""
    found = []
    for _, one, times, in_loop in text.run(text.entry):
        size = text.written(one)
        if size < at_least or not _only_moves(text, one):
            continue
        op_name = re.search(r'op_name="([^"]*)"', one.rest)
        array = ARRAY.search(one.type)
        shape = "".join(array.group(1, 2, 3)) + f"[{array[4]}]" if array else one.type
        found.append(Copy(one.name, shape, size, times, in_loop, op_name[1] if op_name else ""))
    return found


def _only_moves(text: Text, one: Instruction) -> bool:
    if one.opcode in ("copy", "transpose", "copy-start"):
        return True
    if one.opcode != "fusion" or not one.called or one.called[0] not in text.computations:
        return False
    inside = text.computations[one.called[0]]
    return all(x.opcode in _MOVES for x in inside) and any(x.opcode in ("copy", "transpose") for x in inside)


def token_of(text: Text, n_layers: int, chunk: int) -> Token:
    """One turn of the decoding loop of a program: of branches the cheapest is counted, as greedy sampling takes it.

    Args:
      n_layers: by which kernels of layers are told from others: they are there at least half as often as there are layers.
      chunk: turns of the loop inside of the loop, if there is one of a known number.
    """
    turn = text.entry
    while True:
        loops = [one for one in text.computations[turn] if one.opcode == "while"]
        loops = [one for one in loops if text.trips(turn, one) in (None, chunk)]
        most = max(loops, key=lambda one: _reads(text, one.calls("body")), default=None)
        if most is None:
            break
        inside = _reads(text, most.calls("body")) * (text.trips(turn, most) or 1)
        if turn != text.entry and 2 * inside < _reads(text, turn):
            break  # not where the weights are read
        turn = most.calls("body")
    kernels: Counter[str] = Counter()
    read = written = collectives = 0
    for where, one, times, _ in text.run(turn, cheapest=True):
        read += times * text.read(where, one)
        written += times * text.written(one)
        if text.is_kernel(one):
            kernels[f"{one.opcode} {re.sub(r'{[^}]*}', '', one.type)}"] += times
        collectives += times * (one.opcode.startswith(_COLLECTIVES) and not one.opcode.endswith("-done"))
    layered = sum(times for times in kernels.values() if 2 * times >= n_layers) if n_layers > 1 else sum(kernels.values())
    return Token(read, written, sum(kernels.values()), layered, collectives)


def _reads(text: Text, computation: str) -> int:
    return sum(text.read(where, one) * times for where, one, times, _ in text.run(computation, cheapest=True))


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


def is_overlapped(start: Instruction, computation: Iterable[Instruction], text: Text) -> bool:
    """Whether a device multiplies matrices, or calls a kernel or a loop, between an instruction's start and its end."""
    lines = list(computation)
    for one in lines[lines.index(start) + 1 :]:
        if one.opcode.endswith("-done") and start.name in one.operands:
            return False
        if one.opcode in _CONTROL or text.multiplies(one):
            return True
    return True  # it ends in the next turn of the loop
