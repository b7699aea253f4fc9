"""The work of each device, read from the text of a compiled program: kernels, copies, and bytes that are read.

All functions here are pure: from text to facts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from llama_jax.analysis.hlo import ARRAY, CONTROL, Instruction, ProgramText, array_bytes, elements, tuple_elements

# They name a buffer, or wait for what was started before.
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
_PARTS = {"dynamic-slice", "slice", "gather"}  # of their first operand they read what they give
_ALIASED = "output_to_operand_aliasing="  # of a fusion inside of another whose result is its operand
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is written over the first
_OVER_PAGES = re.compile(r'op_name="[^"]*/(attend_paged|ragged_paged_attention\w*)/')  # kernels of `ops.attend_paged`


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
    """The work of one turn of a decoding loop, in which every row gets one token.

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


def is_kernel(text: ProgramText, one: Instruction) -> bool:
    """Whether the device starts something for it. On a TPU copies between memories are none: they run beside."""
    if one.opcode in _FREE or one.opcode in CONTROL or one.opcode.startswith(_COLLECTIVES) or one.opcode.endswith("-done"):
        return False
    if one.opcode == "custom-call":
        return one.target not in _FREE_CALLS
    if not text.is_tpu:
        return True
    if one.opcode.endswith("-start") or not any(shape for *_, shape, _ in ARRAY.findall(one.type)):
        return False
    started = ("fusion", "convolution", "dot", "reduce", "sort", "scatter", "gather", "copy", "transpose")
    return one.opcode in started or one.opcode in _IN_PLACE


def multiplies(text: ProgramText, one: Instruction) -> bool:
    """Whether an instruction is a product of matrices or a kernel of its own, also inside of a fusion."""
    if one.opcode in ("dot", "convolution") or (one.opcode == "custom-call" and one.target not in _FREE_CALLS):
        return True
    inside = text.computations.get(one.calls("calls"), []) if one.opcode == "fusion" else []
    return any(multiplies(text, inner) for inner in inside)


def bytes_read(text: ProgramText, computation: str, one: Instruction, layers: int = 1) -> int:
    """Bytes of the device's memory that an instruction reads.

    Args:
      layers: of the model. Attention over pages has those of all layers as operands, after the queries, and reads one's.
    """
    if one.opcode in _FREE or one.opcode in CONTROL or one.opcode.endswith("-done") or one.target in _FREE_CALLS:
        return 0
    if one.opcode in ("iota", "broadcast"):
        return 0
    types = [text.named(computation)[name].type for name in one.operands if name in text.named(computation)]
    if one.opcode in _PARTS and types:
        return min(text.memory_bytes(types[0]), sum(array_bytes(*array) for *array, _ in ARRAY.findall(one.type)))
    if one.opcode == "slice-start" and types:
        part = tuple_elements(one.type)[1]
        return min(text.memory_bytes(types[0]), sum(array_bytes(*array) for *array, _ in ARRAY.findall(part)))
    if one.opcode in _IN_PLACE:
        return sum(map(text.memory_bytes, types[1:]))
    if one.opcode == "fusion" and one.called and one.called[0] in text.computations:
        return sum(math.ceil(text.memory_bytes(type) * _share(text, one.called[0], i)) for i, type in enumerate(types))
    if one.opcode == "custom-call" and _OVER_PAGES.search(one.rest):
        numbers = [type for type in types if not type.startswith("s32[")]
        return sum(map(text.memory_bytes, types)) - sum(map(text.memory_bytes, numbers[1:])) * (layers - 1) // layers
    return sum(map(text.memory_bytes, types))


def _share(text: ProgramText, computation: str, index: int) -> float:
    """Which part of its operand a fusion reads."""
    for one in text.computations[computation]:
        if one.opcode == "parameter" and one.rest.startswith(f"{index})"):
            whole = elements(one.type)
            return min(1.0, _used(text, computation, one.name) / whole) if whole else 0.0
    return 1.0


def _used(text: ProgramText, computation: str, name: str, in_place: bool = False) -> int:
    """Elements of an array that the instructions of a fusion read, at most all.

    Args:
      in_place: it is the array after an update, so that being the result is not being read.
    """
    lines = text.computations[computation]
    whole, used = elements(text.named(computation)[name].type), 0
    if lines[-1].name == name:
        return 0 if in_place else whole
    for one in lines:
        if name not in one.operands:
            continue
        place = one.operands.index(name)
        if one.opcode in _PARTS and place == 0:
            used += elements(one.type)
        elif one.opcode in _IN_PLACE and place == 0:
            used += _used(text, computation, one.name, True)
        elif one.opcode in ("bitcast", "reshape", "copy", "convert", "transpose", "bitcast-convert"):
            same = elements(one.type) == whole
            used += _used(text, computation, one.name, in_place) if same else whole
        elif one.opcode == "fusion" and _ALIASED in one.rest and elements(one.type) == whole:
            used += _used(text, computation, one.name, in_place)  # the same memory in the order of another tiling
        elif one.opcode == "fusion" and one.called:
            used += math.ceil(_share(text, one.called[0], place) * whole)
        elif one.opcode == "tuple" and in_place:
            continue
        else:
            return whole
    return min(used, whole)


def bytes_written(text: ProgramText, computation: str, one: Instruction) -> int:
    """Bytes of the device's memory that an instruction writes; what it updates in place counts by the update."""
    if one.opcode in _FREE or one.opcode in CONTROL or one.opcode.endswith("-done") or one.target in _FREE_CALLS:
        return 0
    if one.opcode.endswith("-start"):
        parts = tuple_elements(one.type)
        return text.memory_bytes(parts[0] if one.opcode == "copy-start" else parts[min(1, len(parts) - 1)])
    if one.opcode == "fusion" and one.called and one.called[0] in text.computations:
        return _written_by(text, one.called[0], one.type)
    if one.opcode in _IN_PLACE:
        return _written_over(text.memory_bytes(one.type), text.named(computation), one)
    return text.memory_bytes(one.type)


def _written_by(text: ProgramText, computation: str, type: str) -> int:
    named = text.named(computation)
    root = text.computations[computation][-1]
    results = [named[name] for name in root.operands] if root.opcode == "tuple" else [root]
    types = tuple_elements(type) if type.startswith("(") else [type]
    total = 0
    for result, kind in zip(results, types, strict=False):
        size = text.memory_bytes(kind)
        while result.opcode in ("bitcast", "bitcast-convert", "reshape") and result.operands and result.operands[0] in named:
            result = named[result.operands[0]]
        if result.opcode in _IN_PLACE and size:
            size = _written_over(size, named, result)
        total += size
    return total


def _written_over(size: int, named: Mapping[str, Instruction], one: Instruction) -> int:
    """Of `size` bytes, those of the update."""
    update = named.get(one.operands[_IN_PLACE[one.opcode]])
    return min(size, sum(array_bytes(*array) for *array, _ in ARRAY.findall(update.type))) if update else size


def is_overlapped(start: Instruction, computation: Iterable[Instruction], text: ProgramText) -> bool:
    """Whether a device multiplies matrices, or calls a kernel or a loop, between an instruction's start and its end."""
    lines = list(computation)
    for one in lines[lines.index(start) + 1 :]:
        if one.opcode.endswith("-done") and start.name in one.operands:
            return False
        if one.opcode in CONTROL or multiplies(text, one):
            return True
    return True  # it ends in the next turn of the loop


def custom_calls(text: ProgramText) -> Counter[str]:
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


def find_copies(text: ProgramText, at_least: int = 1 << 20) -> list[Copy]:
    """Instructions that write so many bytes and do nothing but move them: the same array, or slices, in another layout."""
    found = []
    for where, one, times, in_loop in text.run(text.entry):
        size = bytes_written(text, where, one)
        if size < at_least or not _only_moves(text, one):
            continue
        op_name = re.search(r'op_name="([^"]*)"', one.rest)
        array = ARRAY.search(one.type)
        shape = "".join(array.group(1, 2, 3)) + f"[{array[4]}]" if array else one.type
        found.append(Copy(one.name, shape, size, times, in_loop, op_name[1] if op_name else ""))
    return found


def _only_moves(text: ProgramText, one: Instruction) -> bool:
    if one.opcode in ("copy", "transpose", "copy-start"):
        return True
    if one.opcode != "fusion" or not one.called or one.called[0] not in text.computations:
        return False
    inside = text.computations[one.called[0]]
    return all(x.opcode in _MOVES for x in inside) and any(x.opcode in ("copy", "transpose") for x in inside)


def token_of(text: ProgramText, n_layers: int, chunk: int, least: int = 0) -> Token:
    """One turn of the decoding loop of a program: of branches the cheapest is counted, as greedy sampling takes it.

    Args:
      n_layers: by which kernels of layers are told from others: they are there at least half as often as there are layers.
      chunk: turns of the loop inside of the loop, if there is one of a known number.
      least: bytes that a turn cannot but read: a loop that reads less than half of that is part of a turn.
    """
    turn = text.entry
    while True:
        loops = [one for one in text.computations[turn] if one.opcode == "while"]
        loops = [one for one in loops if text.trips(turn, one) in (None, chunk)]
        most = max(loops, key=lambda one: _reads(text, one.calls("body"), n_layers), default=None)
        if most is None:
            break
        once = _reads(text, most.calls("body"), n_layers)
        inside = once * (text.trips(turn, most) or 1)
        if 2 * once < least or (turn != text.entry and 2 * inside < _reads(text, turn, n_layers)):
            break  # not where the weights are read
        turn = most.calls("body")
    kernels: Counter[str] = Counter()
    read = written = collectives = 0
    for where, one, times, _ in text.run(turn, cheapest=True):
        read += times * bytes_read(text, where, one, n_layers)
        written += times * bytes_written(text, where, one)
        if is_kernel(text, one):
            kernels[f"{one.opcode} {re.sub(r'{[^}]*}', '', one.type)}"] += times
        collectives += times * (one.opcode.startswith(_COLLECTIVES) and not one.opcode.endswith("-done"))
    layered = sum(times for times in kernels.values() if 2 * times >= n_layers) if n_layers > 1 else sum(kernels.values())
    return Token(read, written, sum(kernels.values()), layered, collectives)


def _reads(text: ProgramText, computation: str, layers: int) -> int:
    run = text.run(computation, cheapest=True)
    return sum(bytes_read(text, where, one, layers) * times for where, one, times, _ in run)
