"""Reads files of `torch.save` without torch: a zip archive of a pickle and the bytes of each tensor.

A pickle is a program. This module interprets its instructions with only dictionaries, lists, tuples, numbers, strings and
tensors; a file that requests anything else is rejected, and nothing runs. A restricted version of Python's own unpickler is
not enough: hostile files make it hash tuples forever and allocate gigabytes.

Source: torch/serialization.py and torch/_utils.py, the format since torch 1.6; pickletools, for the instructions.
"""

from __future__ import annotations

import errno
import io
import math
import os
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from llama_jax.errors import CheckpointError, reason_of, short_repr
from llama_jax.formats.lazy_tensors import Dense, Derived, Tensor, read_bytes
from llama_jax.formats.weight_format import ignored_tensors
from llama_jax.storage import Location, StoredPath

# The dtype of each of torch's storage classes; parameters are floats.
STORAGES = {"DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16"}
STORAGES |= {"LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8"}
STORAGES |= {"ByteStorage": "U8", "BoolStorage": "BOOL"}
# Bytes of a pickle and of an archive's table, twice those of a 405B model. Each may use a hundred bytes of memory.
MAX_PICKLE_BYTES = 1 << 20
MAX_TABLE_BYTES = 1 << 20
MAX_TORCH_AXES = 8
MAX_PICKLE_KEY = 1 << 31
STACK_MARK = object()


class _Global(NamedTuple):
    module: str
    name: str


class _Storage(NamedTuple):
    numbers: Dense


REBUILD_TENSOR = _Global("torch._utils", "_rebuild_tensor_v2")
REBUILD_PARAMETER = _Global("torch._utils", "_rebuild_parameter")
ORDERED = _Global("collections", "OrderedDict")
ALLOWED = {REBUILD_TENSOR, REBUILD_PARAMETER, ORDERED} | {_Global("torch", name) for name in STORAGES}


@dataclass(frozen=True)
class Strided(Derived):
    """A tensor whose rows are not contiguous, such as a saved transpose; `tensor` is the span of its values."""

    tensor: Dense
    axes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.axes

    @property
    def rows_at_once(self) -> int:
        """All rows of an object in a store, since any row needs the whole span."""
        return self.axes[0] if isinstance(self.tensor.path, StoredPath) else 1

    def read(self, start: int, stop: int) -> np.ndarray:
        path, first, size = self.tensor.path, self.tensor.offset, self.tensor.nbytes
        # Memory-mapped if possible: a run of rows has a few values in every part of the span.
        stored = isinstance(path, StoredPath)
        span = read_bytes(path, first, size) if stored else np.memmap(path, np.uint8, "r", first, size)
        strides = [self.dtype.itemsize * stride for stride in self.strides]
        return np.array(np.ndarray(self.shape, self.dtype, span, strides=strides)[start:stop], order="C", subok=False)


def is_torch(path: Location) -> bool:
    """Whether a file begins like a zip archive."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def read_tensors(path: Location) -> dict[str, Tensor]:
    """The tensors by name in a file that holds nothing else, as for weights."""
    return tensors_of(read_pickled(path), path)


def tensors_of(content: Mapping[Any, Any], path: Location) -> dict[str, Tensor]:
    """The dictionary that a pickle holds, checked to map names to tensors."""
    not_tensors = [
        name for name, tensor in content.items() if not isinstance(name, str) or not isinstance(tensor, Dense | Strided)
    ]
    ignored = ignored_tensors(filter(lambda name: isinstance(name, str), not_tensors))
    for name in not_tensors:
        if name not in ignored:
            raise CheckpointError(f"{path}: {short_repr(name, 80)} is a {type(content[name]).__name__}; expected a tensor")
    content = {name: tensor for name, tensor in content.items() if name not in ignored}
    # Twice, since a tied model may store its embedding under both names.
    total, size = sum(tensor.nbytes for tensor in content.values()), path.stat().st_size
    if total > 2 * size:
        raise CheckpointError(f"{path} has {size} bytes, but its tensors need {total}; copy it again")
    return content


def read_pickled(path: Location) -> Mapping[str, Any]:
    """The dictionary in a file that torch saved; its tensors are not read yet."""
    if not is_torch(path):
        with path.open("rb") as file:
            old = file.read(2) == b"\x80\x02"
        what = "was saved by a torch before 1.6; save it again with a newer one" if old else "is not what torch.save writes"
        raise CheckpointError(f"{path} {what}")
    try:
        with path.open("rb", buffering=0) as file, zipfile.ZipFile(_ShortReads(file)) as archive:
            entries = {info.filename: info for info in archive.infolist()}
            pickles = [name for name in entries if name.rpartition("/")[2] == "data.pkl" and name.count("/") < 2]
            if len(pickles) != 1:
                raise CheckpointError(f"{path} is a zip archive without a data.pkl; torch.save did not write it")
            folder = pickles[0].removesuffix("data.pkl")
            if entries[pickles[0]].file_size > MAX_PICKLE_BYTES:
                raise CheckpointError(f"{path}: its pickle is over {MAX_PICKLE_BYTES} bytes, too large for a model")
            order = entries.get(f"{folder}byteorder")
            little = b"little"
            if order is not None and _stored(order) and (order.file_size != len(little) or archive.read(order) != little):
                raise CheckpointError(f"{path} was written on a big-endian machine; save it again on another")
            program = archive.read(pickles[0]) if _stored(entries[pickles[0]]) else b""
        content = _interpret(program, path, {name.removeprefix(folder + "data/"): info for name, info in entries.items()})
    except CheckpointError:
        raise
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # EINVAL: a position before the file
            raise
        raise CheckpointError(f"{path} is not a whole torch file ({reason_of(error)}); copy it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; expected a dictionary of tensors by name")
    return content


# Raised by zipfile, pickletools and the interpreter below for malformed bytes.
_DAMAGED = (
    zipfile.BadZipFile,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    struct.error,
    EOFError,
    RuntimeError,
    OSError,
)


class _ShortReads(io.RawIOBase):
    """A file for zipfile, which reads an archive's whole table at once, however long it claims to be."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def read(self, size: int | None = -1, /) -> Any:
        if size is not None and size > MAX_TABLE_BYTES:
            raise ValueError(f"its table of contents is over {MAX_TABLE_BYTES} bytes, too large for a model")
        return self._file.read(-1 if size is None else size)


def _stored(info: zipfile.ZipInfo) -> bool:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise ValueError(f"{info.filename} is compressed or encrypted, which torch.save never does")
    return True


def _interpret(program: bytes, path: Location, entries: Mapping[str, zipfile.ZipInfo]) -> Any:
    """Interpret a pickle. Instructions: pickletools; those that torch does not write are rejected."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    storages: dict[tuple, _Storage] = {}

    def since_mark() -> list[Any]:
        at = len(stack) - 1
        while stack[at] is not STACK_MARK:
            at -= 1  # an IndexError if there is no mark
        items = stack[at + 1 :]
        del stack[at:]
        return items

    opcode: Any
    argument: Any
    for opcode, argument, _ in pickletools.genops(program):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                stack.append(STACK_MARK)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode.name])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                size = int(opcode.name[-1])
                stack[-size:] = [tuple(stack[-size:])]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "APPEND":
                last = stack.pop()
                _as(list, stack[-1]).append(last)
            case "APPENDS":
                items = since_mark()
                _as(list, stack[-1]).extend(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _set(stack[-1], [key, value])
            case "SETITEMS":
                items = since_mark()
                _set(stack[-1], items)
            case "GLOBAL":
                stack.append(_global(argument, path))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_global(f"{_as(str, module)} {_as(str, name)}", path))
            case "BINPERSID":
                described = _description(stack.pop())
                if described not in storages:  # each lookup opens the file
                    storages[described] = _storage(*described, path, entries)
                stack.append(storages[described])
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_rebuild(function, _as(tuple, arguments)))
            case "BUILD":  # an OrderedDict's attributes, where torch stores module versions
                _as(dict, stack.pop())
                _as(dict, stack[-1])
            case "STOP":
                return stack.pop()
            case name:
                raise ValueError(f"the instruction {name} is not allowed in a model")


def _as(cls: type, value: Any) -> Any:
    if type(value) is not cls:
        raise ValueError(f"expected a {cls.__name__}, found a {type(value).__name__}")
    return value


def _set(target: Any, items: list[Any]) -> None:
    target = _as(dict, target)
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Hashing a tuple of tuples of tuples can take forever; large numbers can be chosen to collide.
        if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < MAX_PICKLE_KEY):
            raise ValueError(f"a key is a {type(key).__name__}, not a name or an index")
        target[key] = value


def _global(words: str, path: Location) -> _Global:
    module, _, name = words.partition(" ")
    reference = _Global(module, name)
    if reference not in ALLOWED:
        requested = short_repr(f"{module}.{name}", 100)
        raise CheckpointError(f"{path} requests {requested}, but a model needs only tensors; nothing was run")
    return reference


def _description(description: Any) -> tuple[str, str, int]:
    """Class, entry and number of values of the storage that a persistent id describes."""
    _, cls, key, _, count = _as(tuple, description)
    return _as(_Global, cls).name, _as(str, key), _as(int, count)


def _storage(name: str, key: str, count: int, path: Location, entries: Mapping[str, zipfile.ZipInfo]) -> _Storage:
    info = entries[key]
    _stored(info)
    # The archive's table gives the position of the entry's own header; two lengths at its end give its size.
    header = read_bytes(path, info.header_offset, 30).tobytes()
    offset = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
    numbers = Dense(path, offset, (count,), STORAGES[name])
    is_whole = header[:4] == b"PK\x03\x04" and offset + info.file_size <= path.stat().st_size
    if not is_whole or count < 0 or numbers.nbytes > info.file_size:
        raise ValueError(f"{info.filename} is shorter than its tensors, or not where the table says")
    return _Storage(numbers)


def _rebuild(function: Any, arguments: tuple) -> Any:
    if function == ORDERED and arguments == ():
        return {}
    if function == REBUILD_PARAMETER and arguments and isinstance(arguments[0], Dense | Strided):
        return arguments[0]
    if function != REBUILD_TENSOR:
        raise ValueError("a call does not make a tensor")
    storage, first, shape, strides = _as(_Storage, arguments[0]), *arguments[1:4]
    numbers = (first, *_as(tuple, shape), *_as(tuple, strides))
    are_sizes = all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
    if not are_sizes or len(shape) != len(strides) or len(shape) > MAX_TORCH_AXES:  # before they are multiplied
        raise ValueError(f"a tensor of {len(shape)} axes: at most {MAX_TORCH_AXES} non-negative integers, none too large")
    span = replace(storage.numbers, offset=storage.numbers.offset + first * storage.numbers.dtype.itemsize)
    if math.prod(shape) == 0:
        return replace(span, shape=shape)
    reach = first + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if max(reach, math.prod(shape)) > storage.numbers.shape[0]:
        raise ValueError("a tensor reaches beyond its storage")
    expected = 1
    in_order = True
    for size, stride in zip(shape[::-1], strides[::-1], strict=True):
        in_order &= size == 1 or stride == expected
        expected *= size
    if in_order:
        return replace(span, shape=shape)
    return Strided(replace(span, shape=(reach - first,)), shape, strides)
