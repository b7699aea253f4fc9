"""Kernels, copies and bytes read of a program compiled for an accelerator, parsed from its text.

Used by compile_report and gpu_report, and by tests that check that compiled programs do not change.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax

from llama_jax.analysis.collectives import (
    ARRAY,
    Collective,
    Instruction,
    ProgramText,
    array_bytes,
    collective_instructions,
    find_collectives,
    tuple_elements,
)
from llama_jax.analysis.memory import Memory, Program
from llama_jax.inference.decode import STEPS_PER_CHUNK
from llama_jax.ops.attention import record_backends

CONTROL = {"while", "conditional", "call"}
# Instructions that only name a buffer, or wait for something started before.
_FREE = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "bitcast-convert", "after-all", "add-dependency"),
    *("opt-barrier", "optimization-barrier", "partition-id", "replica-id", "domain", "async-update", "async-done"),
    *("copy-done", "slice-done", "send-done", "recv-done"),
}
_FREE_CALLS = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked"}
_FREE_CALLS |= {"AsyncCollectiveStart", "AsyncCollectiveDone"}
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
_PARTS = {"dynamic-slice", "slice", "gather"}  # they read only as much of their first operand as they return
_ALIASED = "output_to_operand_aliasing="  # attribute of a nested fusion whose result is its operand
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand that is written over the first one
_OVER_PAGES = re.compile(r'op_name="[^"]*/(attend_paged|ragged_paged_attention\w*)/')  # kernels of `ops.attend_paged`


@dataclass(frozen=True)
class Copy:
    """An instruction that only moves an array to another place or layout in the device's memory.

    Attributes:
      bytes: size of its result.
      times: executions in a run of the program; loops with unknown trip count are counted once.
      in_loop: whether it is in any loop.
    """

    name: str
    shape: str
    bytes: int
    times: int
    in_loop: bool
    op_name: str


@dataclass(frozen=True)
class Token:
    """The work of one iteration of a decoding loop, in which every row gets one token.

    Attributes:
      read, written: bytes of the device's memory, counted once per kernel; on-chip memory is not counted.
      kernels: number of kernels started.
      kernels_of_layers: number of these kernels that occur once per layer, over all layers.
      collectives: number of collectives started.
    """

    read: int
    written: int
    kernels: int
    kernels_of_layers: int
    collectives: int


class DeviceProgram(ProgramText):
    """A compiled program with the kernels that its device starts; a fusion is one kernel."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.is_tpu = ":T(" in text  # only TPUs tile

    def run(self, computation: str, *, cheapest: bool = False) -> Iterator[tuple[str, Instruction, int, bool]]:
        """Yield the kernels that a device starts: computation, instruction, number of times, and whether in a loop.

        Args:
          cheapest: follow only the branch with the fewest instructions (e.g. sampling without filters), not all branches.
        """
        for instruction in self.computations[computation]:
            if instruction.opcode not in CONTROL:
                yield computation, instruction, 1, False
                continue
            called = [name for name in instruction.called if name in self.computations]
            if instruction.opcode == "while":
                called = [instruction.calls("body")]  # the condition is a comparison
            if instruction.opcode == "conditional" and cheapest and called:
                called = [min(called, key=self._size)]
            trips = (self.trips(computation, instruction) or 1) if instruction.opcode == "while" else 1
            for name in called:
                for where, inner, times, in_loop in self.run(name, cheapest=cheapest):
                    yield where, inner, times * trips, in_loop or instruction.opcode == "while"

    def _size(self, computation: str) -> int:
        """Number of instructions in a computation and the computations that it calls."""
        instructions = self.computations[computation]
        return len(instructions) + sum(
            self._size(name) for instruction in instructions for name in instruction.called if name in self.computations
        )

    def memory_bytes(self, type: str) -> int:
        """Bytes of a type's arrays in the device's memory; arrays on the chip or in host memory count 0."""
        return sum(array_bytes(*array) for *array, layout in ARRAY.findall(type) if not self._elsewhere(layout))

    def _elsewhere(self, layout: str) -> bool:
        space = re.search(r"S\((\d+)\)", layout)
        return space is not None and (self.is_tpu or space[1] == "5")


def is_free(instruction: Instruction) -> bool:
    """Whether an instruction itself moves no bytes: it names a buffer, waits, or runs other computations."""
    free = instruction.opcode in _FREE or instruction.opcode in CONTROL or instruction.opcode.endswith("-done")
    return free or instruction.target in _FREE_CALLS


def is_kernel(text: DeviceProgram, instruction: Instruction) -> bool:
    """Whether the device starts a kernel for it. A TPU's copies between memories do not count: they run concurrently."""
    if is_free(instruction) or instruction.opcode.startswith(_COLLECTIVES):
        return False
    if instruction.opcode == "custom-call" or not text.is_tpu:
        return True
    if instruction.opcode.endswith("-start") or not any(shape for *_, shape, _ in ARRAY.findall(instruction.type)):
        return False
    started = ("fusion", "convolution", "dot", "reduce", "sort", "scatter", "gather", "copy", "transpose")
    return instruction.opcode in started or instruction.opcode in _IN_PLACE


def multiplies(text: DeviceProgram, instruction: Instruction) -> bool:
    """Whether an instruction is or contains a matmul or a custom kernel."""
    if instruction.opcode in ("dot", "convolution") or (
        instruction.opcode == "custom-call" and instruction.target not in _FREE_CALLS
    ):
        return True
    inside = text.computations.get(instruction.calls("calls"), []) if instruction.opcode == "fusion" else []
    return any(multiplies(text, inner) for inner in inside)


def bytes_read(text: DeviceProgram, computation: str, instruction: Instruction, layers: int = 1) -> int:
    """Bytes of the device's memory that an instruction reads.

    Args:
      layers: layers of the model. Paged attention has the pages of all layers as operands, after the queries, but reads
        those of one layer.
    """
    if is_free(instruction):
        return 0
    if instruction.opcode in ("iota", "broadcast"):
        return 0
    types = [text.by_name(computation)[name].type for name in instruction.operands if name in text.by_name(computation)]
    if instruction.opcode in _PARTS and types:
        return min(text.memory_bytes(types[0]), sum(array_bytes(*array) for *array, _ in ARRAY.findall(instruction.type)))
    if instruction.opcode == "slice-start" and types:
        part = tuple_elements(instruction.type)[1]
        return min(text.memory_bytes(types[0]), sum(array_bytes(*array) for *array, _ in ARRAY.findall(part)))
    if instruction.opcode in _IN_PLACE:
        return sum(map(text.memory_bytes, types[1:]))
    if instruction.opcode == "fusion" and instruction.called and instruction.called[0] in text.computations:
        return sum(
            math.ceil(text.memory_bytes(type) * _share(text, instruction.called[0], i)) for i, type in enumerate(types)
        )
    if instruction.opcode == "custom-call" and _OVER_PAGES.search(instruction.rest):
        numbers = [type for type in types if not type.startswith("s32[")]
        return sum(map(text.memory_bytes, types)) - sum(map(text.memory_bytes, numbers[1:])) * (layers - 1) // layers
    return sum(map(text.memory_bytes, types))


def _share(text: DeviceProgram, computation: str, index: int) -> float:
    """The share of its operand that a fusion reads."""
    for instruction in text.computations[computation]:
        if instruction.opcode == "parameter" and instruction.rest.startswith(f"{index})"):
            whole = _elements(instruction.type)
            return min(1.0, _used(text, computation, instruction.name) / whole) if whole else 0.0
    return 1.0


def _used(text: DeviceProgram, computation: str, name: str, in_place: bool = False) -> int:
    """Number of elements of an array that the instructions of a fusion read, at most all.

    Args:
      in_place: the array is the result of an update in place, so that returning it does not count as a read.
    """
    lines = text.computations[computation]
    whole, used = _elements(text.by_name(computation)[name].type), 0
    if lines[-1].name == name:
        return 0 if in_place else whole
    for instruction in lines:
        if name not in instruction.operands:
            continue
        index = instruction.operands.index(name)
        if instruction.opcode in _PARTS and index == 0:
            used += _elements(instruction.type)
        elif instruction.opcode in _IN_PLACE and index == 0:
            used += _used(text, computation, instruction.name, True)
        elif instruction.opcode in ("bitcast", "reshape", "copy", "convert", "transpose", "bitcast-convert"):
            same = _elements(instruction.type) == whole
            used += _used(text, computation, instruction.name, in_place) if same else whole
        elif instruction.opcode == "fusion" and _ALIASED in instruction.rest and _elements(instruction.type) == whole:
            used += _used(text, computation, instruction.name, in_place)  # the same memory with another tiling
        elif instruction.opcode == "fusion" and instruction.called:
            used += math.ceil(_share(text, instruction.called[0], index) * whole)
        elif instruction.opcode == "tuple" and in_place:
            continue
        else:
            return whole
    return min(used, whole)


def bytes_written(text: DeviceProgram, computation: str, instruction: Instruction) -> int:
    """Bytes of the device's memory that an instruction writes; for updates in place, the bytes of the update."""
    if is_free(instruction):
        return 0
    if instruction.opcode.endswith("-start"):
        parts = tuple_elements(instruction.type)
        return text.memory_bytes(parts[0] if instruction.opcode == "copy-start" else parts[min(1, len(parts) - 1)])
    if instruction.opcode == "fusion" and instruction.called and instruction.called[0] in text.computations:
        return _written_by(text, instruction.called[0], instruction.type)
    if instruction.opcode in _IN_PLACE:
        return _written_over(text.memory_bytes(instruction.type), text.by_name(computation), instruction)
    return text.memory_bytes(instruction.type)


def _written_by(text: DeviceProgram, computation: str, type: str) -> int:
    named = text.by_name(computation)
    root = text.computations[computation][-1]
    results = [named[name] for name in root.operands] if root.opcode == "tuple" else [root]
    types = tuple_elements(type) if type.startswith("(") else [type]
    total = 0
    for result, result_type in zip(results, types, strict=False):
        size = text.memory_bytes(result_type)
        while result.opcode in ("bitcast", "bitcast-convert", "reshape") and result.operands and result.operands[0] in named:
            result = named[result.operands[0]]
        if result.opcode in _IN_PLACE and size:
            size = _written_over(size, named, result)
        total += size
    return total


def _written_over(size: int, named: Mapping[str, Instruction], instruction: Instruction) -> int:
    """Bytes of the update, at most `size`, or `size` if the update is not found."""
    update = named.get(instruction.operands[_IN_PLACE[instruction.opcode]])
    return min(size, sum(array_bytes(*array) for *array, _ in ARRAY.findall(update.type))) if update else size


def is_overlapped(start: Instruction, computation: Iterable[Instruction], text: DeviceProgram) -> bool:
    """Whether a device runs a matmul, a custom kernel or a loop between an instruction's start and its end."""
    lines = list(computation)
    for instruction in lines[lines.index(start) + 1 :]:
        if instruction.opcode.endswith("-done") and start.name in instruction.operands:
            return False
        if instruction.opcode in CONTROL or multiplies(text, instruction):
            return True
    return True  # it ends in the next iteration of the loop


def custom_calls(text: DeviceProgram) -> Counter[str]:
    """Names of custom kernels, with the number of places in the program that start them."""
    calls: Counter[str] = Counter()
    for computation in text.computations.values():
        for instruction in computation:
            if instruction.opcode == "custom-call" and instruction.target not in _FREE_CALLS:
                kernel = re.search(r'kernel_name = \\?"(\w+)|"?kernel_name"?[:=] ?\\?"?(\w+)', instruction.rest)
                name = re.search(r'op_name="[^"]*/(\w+)"', instruction.rest)
                inner = kernel and (kernel[1] or kernel[2])
                if instruction.target in ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2"):
                    inner = inner or (name and name[1])
                calls[f"{instruction.target}:{inner}" if inner else instruction.target] += 1
    return calls


def find_copies(text: DeviceProgram, at_least: int = 1 << 20) -> list[Copy]:
    """Instructions that write at least this many bytes and only move data: the same array or slices in another layout."""
    copies = []
    for where, instruction, times, in_loop in text.run(text.entry):
        size = bytes_written(text, where, instruction)
        if size < at_least or not _only_moves(text, instruction):
            continue
        op_name = re.search(r'op_name="([^"]*)"', instruction.rest)
        array = ARRAY.search(instruction.type)
        shape = "".join(array.group(1, 2, 3)) + f"[{array[4]}]" if array else instruction.type
        copies.append(Copy(instruction.name, shape, size, times, in_loop, op_name[1] if op_name else ""))
    return copies


def _only_moves(text: DeviceProgram, instruction: Instruction) -> bool:
    if instruction.opcode in ("copy", "transpose", "copy-start"):
        return True
    if instruction.opcode != "fusion" or not instruction.called or instruction.called[0] not in text.computations:
        return False
    inside = text.computations[instruction.called[0]]
    return all(x.opcode in _MOVES for x in inside) and any(x.opcode in ("copy", "transpose") for x in inside)


def token_of(text: DeviceProgram, n_layers: int, chunk: int, least: int = 0) -> Token:
    """One iteration of the decoding loop of a program; the cheapest branch counts, which greedy sampling takes.

    Args:
      n_layers: layers of the model; kernels that occur at least half as often are counted as kernels of layers.
      chunk: iterations of the inner loop, if there is one with a known trip count.
      least: minimum bytes that an iteration reads; a loop that reads less than half of this is only part of an iteration.
    """
    turn = text.entry
    while True:
        loops = [instruction for instruction in text.computations[turn] if instruction.opcode == "while"]
        loops = [instruction for instruction in loops if text.trips(turn, instruction) in (None, chunk)]
        most = max(loops, key=lambda instruction: _reads(text, instruction.calls("body"), n_layers), default=None)
        if most is None:
            break
        once = _reads(text, most.calls("body"), n_layers)
        inside = once * (text.trips(turn, most) or 1)
        if 2 * once < least or (turn != text.entry and 2 * inside < _reads(text, turn, n_layers)):
            break  # the weights are not read here
        turn = most.calls("body")
    kernels: Counter[str] = Counter()
    read = written = collectives = 0
    for where, instruction, times, _ in text.run(turn, cheapest=True):
        read += times * bytes_read(text, where, instruction, n_layers)
        written += times * bytes_written(text, where, instruction)
        if is_kernel(text, instruction):
            kernels[f"{instruction.opcode} {re.sub(r'{[^}]*}', '', instruction.type)}"] += times
        collectives += times * (instruction.opcode.startswith(_COLLECTIVES) and not instruction.opcode.endswith("-done"))
    layered = sum(times for times in kernels.values() if 2 * times >= n_layers) if n_layers > 1 else sum(kernels.values())
    return Token(read, written, sum(kernels.values()), layered, collectives)


def _reads(text: DeviceProgram, computation: str, layers: int) -> int:
    run = text.run(computation, cheapest=True)
    return sum(bytes_read(text, where, instruction, layers) * times for where, instruction, times, _ in run)


def _elements(type: str) -> int:
    """Number of elements of all arrays of a type."""
    return sum(math.prod(int(n.lstrip("<=")) for n in shape.split(",") if n) for *_, shape, _ in ARRAY.findall(type))


def overlap(text: DeviceProgram) -> list[tuple[bool, bool]]:
    """For each of `find_collectives`: whether its start and its end are separate instructions, and whether the device runs a
    matmul, a custom kernel or a loop between them."""
    computations = text.computations
    beside = [name for name in computations if name.startswith("async_collective_fusion")]
    starting = [name for name, lines in computations.items() if any(x.target == "AsyncCollectiveStart" for x in lines)]
    computing = [name for name in beside if any(multiplies(text, x) for x in computations[name])]
    started, overlapped = (
        {_channel(x) for name in names for x in computations[name]} for names in ((*starting, *beside), computing)
    )
    overlaps = []
    for where, instruction, _ in collective_instructions(text):
        apart = instruction.opcode.endswith("-start")
        meanwhile = _channel(instruction) in overlapped or (apart and is_overlapped(instruction, computations[where], text))
        overlaps.append((apart or _channel(instruction) in started, meanwhile))
    return overlaps


def _channel(instruction: Instruction) -> str:
    channel = re.search(r"channel_id=(\d+)", instruction.rest)
    return channel[1] if channel else instruction.name


@dataclass(frozen=True)
class Findings:
    """Facts about a compiled program, per device.

    Attributes:
      memory: the compiler's memory plan.
      seconds: time of tracing and compiling.
      attention: the backends that were used, and why, for example "cudnn (on NVIDIA H200)".
      calls: custom kernels, and the number of places that start them.
      collectives: collectives in the order of the program.
      overlap: the result of `overlap` for each collective.
      copies: instructions that only move data, of at least a mebibyte.
      token: for a program that decodes, the costs of one token per row; None if no loop over tokens was found.
      per_token: minimum bytes read for a token.
      layers: layers of the model.
    """

    name: str
    memory: Memory
    seconds: float
    attention: tuple[str, ...]
    calls: dict[str, int]
    collectives: tuple[Collective, ...]
    overlap: tuple[tuple[bool, bool], ...]
    copies: tuple[Copy, ...]
    token: Token | None
    per_token: int
    layers: int

    @property
    def copied(self) -> int:
        """Bytes that all copies write in a run of the program; loops with unknown trip count are counted once."""
        return sum(copy.bytes * copy.times for copy in self.copies)

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a run of the program, with ring algorithms."""
        return sum(collective.sent * collective.count for collective in self.collectives)

    @property
    def asynchronous(self) -> float | None:
        """Share of sent bytes in collectives with separate start and end; None without any."""
        return self._share(0)

    @property
    def overlapped(self) -> float | None:
        """Share of sent bytes overlapped with matmuls; None without any."""
        return self._share(1)

    def _share(self, which: int) -> float | None:
        sent = sum(
            collective.sent * collective.count
            for collective, how in zip(self.collectives, self.overlap, strict=True)
            if how[which]
        )
        return sent / self.sent if self.sent else None

    @property
    def read_ratio(self) -> float | None:
        """Bytes read for a token, relative to the minimum."""
        return self.token.read / self.per_token if self.token and self.per_token else None

    @property
    def kernels_per_layer(self) -> float | None:
        """Kernels that decoding starts for each layer and token."""
        return self.token.kernels_of_layers / self.layers if self.token and self.layers else None

    def as_dict(self) -> dict[str, Any]:
        """The findings as JSON, with sizes in bytes."""
        rows: dict[str, dict[str, int]] = {}
        for collective, (asynchronous, overlapped) in zip(self.collectives, self.overlap, strict=True):
            row = rows.setdefault(
                f"{collective.opcode} over {','.join(collective.axes)}",
                {"count": 0, "asynchronous": 0, "overlapped": 0, "sent": 0},
            )
            row["count"] += collective.count
            row["asynchronous"] += collective.count * asynchronous
            row["overlapped"] += collective.count * overlapped
            row["sent"] += int(collective.sent * collective.count)
        token = None
        if self.token is not None:
            token = asdict(self.token) | {
                "least_read": self.per_token,
                "read_ratio": self.read_ratio,
                "kernels_per_layer": self.kernels_per_layer,
            }
        return {
            "bytes_per_device": asdict(self.memory) | {"total": self.memory.total},
            "compile_seconds": round(self.seconds, 1),
            "attention": list(self.attention),
            "calls": self.calls,
            "collectives": rows,
            "asynchronous_share": None if self.asynchronous is None else round(self.asynchronous, 3),
            "overlapped_share": None if self.overlapped is None else round(self.overlapped, 3),
            "copies": {
                "count": len(self.copies),
                "bytes": self.copied,
                "largest": [asdict(c) for c in _largest(self.copies)],
            },
            "token": token,
        }


def examine(program: Program, *, accelerator: bool = False, flags: bool = True) -> Findings:
    """Compile a program for its mesh and analyze it.

    Args:
      accelerator, flags: see `Program.compile`.
    """
    started = time.perf_counter()
    with record_backends() as taken:
        compiled = program.compile(accelerator=accelerator, flags=flags)
    return look_at(program, compiled, time.perf_counter() - started, taken, accelerator=accelerator)


def look_at(
    program: Program,
    compiled: jax.stages.Compiled,
    seconds: float,
    attention: Mapping[str, str],
    *,
    accelerator: bool = False,
) -> Findings:
    """Analyze a program that was compiled in this many seconds.

    Args:
      attention: backends and reasons that `ops.attention.observed` recorded while the program was traced.
    """
    source = compiled.as_text() or ""
    text = DeviceProgram(source)
    return Findings(
        name=program.name,
        memory=program.memory(compiled, accelerator=accelerator),
        seconds=seconds,
        attention=tuple(f"{name} ({why})" for name, why in attention.items()),
        calls=dict(custom_calls(text)),
        collectives=tuple(find_collectives(source, program.mesh)),
        overlap=tuple(overlap(text)),
        copies=tuple(find_copies(text)),
        token=believed(token_of(text, program.layers, STEPS_PER_CHUNK, program.per_token), program.per_token)
        if program.per_token
        else None,
        per_token=program.per_token,
        layers=program.layers,
    )


def believed(token: Token, least: int) -> Token | None:
    """The token, or None if it reads less than half of the minimum: an inner loop was mistaken for the loop over tokens.

    This happens if a TPU's compiler makes a loop over rows of matmuls that differ for each row.
    """
    return token if 2 * token.read >= least else None


def _largest(copies: tuple[Copy, ...], count: int = 4) -> list[Copy]:
    return sorted(copies, key=lambda copy: -copy.bytes * copy.times)[:count]
