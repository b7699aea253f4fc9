"""Quantized weights of Hugging Face folders: their ``quantization_config``, and the tensors that make up each weight.

`read` returns a weight's values, and `planes` the same values losslessly in a format of `ops.weights`; both unpack only the
requested rows. Layouts: vllm-project/compressed-tensors, `pack_quantized` and `naive_quantized`; transformers'
fine-grained fp8; ModelCloud/GPTQModel, `nn_modules/qlinear`; casper-hansen/AutoAWQ, `modules/linear/gemm.py`; bitsandbytes,
`functional.py`.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import numpy as np

from llama_jax.errors import CheckpointError, ConfigError, short_repr
from llama_jax.formats.lazy_tensors import Dense, RowBytes, Tensor, read_bytes, read_strips
from llama_jax.ops.weights import nf4
from llama_jax.ops.weights.format_spec import QuantFormat
from llama_jax.ops.weights.formats import QUANT_FORMATS
from llama_jax.ops.weights.scaled_formats import GROUPS
from llama_jax.storage import StoredPath

MIN_GROUP = 32
COMPRESSED_TENSORS = "compressed-tensors"


@dataclass(frozen=True)
class Scheme:
    """How the weights of a folder are quantized.

    Attributes:
      method: its name in the file.
      layout: how weights are stored: "packed" (4 bits, compressed-tensors), "int8", "fp8", "gptq", "awq" or "nf4".
      group: values of a row that share a scale; None for a whole row.
      block: rows and columns that share a scale, for fp8; None if a whole tensor or row does.
      symmetric: whether the zero point is always the middle of the integers.
      reordered: whether `g_idx` assigns columns to groups; otherwise groups are consecutive columns.
      zeros_less_one: whether zero points are stored less one.
    """

    method: str
    layout: Literal["packed", "int8", "fp8", "gptq", "awq", "nf4"]
    group: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    reordered: bool = False
    zeros_less_one: bool = False


def scheme_from_dict(settings: Any) -> Scheme | None:
    """The scheme that a parsed ``quantization_config`` describes; None if it quantizes only the cache."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"quantization_config={short_repr(settings, 40)} must be an object")
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        _refuse("quant_method", method, f"{', '.join(METHODS)} are supported; use such a release, or the unquantized one")
    return METHODS[method](settings)


def _refuse(name: str, value: Any, remedy: str) -> NoReturn:
    raise ConfigError(f"quantization_config: {name}={short_repr(value, 60)} is not supported; {remedy}")


def _need(settings: Mapping[str, Any], subject: str, **allowed: Sequence[Any]) -> None:
    """Raise for a setting without an accepted value; the first value is the default."""
    for name, values in allowed.items():
        value = settings.get(name, values[0])
        if not any(value == accepted and isinstance(value, bool) == isinstance(accepted, bool) for accepted in values):
            words = " or ".join(repr(accepted) for accepted in values)
            _refuse(name, value, f"{subject} must have {words}")


def _group(value: Any) -> int | None:
    """A group's size; None for -1, which stands for a whole row."""
    if value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < MIN_GROUP or value % MIN_GROUP:
        _refuse("group_size", value, f"it must be a multiple of {MIN_GROUP}, or -1")
    return value


def _gptq_scheme(settings: Mapping[str, Any]) -> Scheme:
    subject = "GPTQ weights"
    _need(settings, subject, bits=(4,), is_marlin_format=(False, None), pack_dtype=("int32", None), dynamic=(None, {}))
    _need(settings, subject, desc_act=(False, True), sym=(True, False))
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    _need({"checkpoint_format": version}, subject, checkpoint_format=("gptq", "gptq_v2"))
    return Scheme(
        "gptq",
        "gptq",
        _group(settings.get("group_size", 128)),
        symmetric=settings.get("sym", True),
        reordered=settings.get("desc_act", False),
        zeros_less_one=version == "gptq",
    )


def _awq_scheme(settings: Mapping[str, Any]) -> Scheme:
    subject = "AWQ weights"
    version = settings.get("version") or settings.get("format") or "gemm"
    _need({"version": str(version).lower()}, subject, version=("gemm",))
    _need({"bits": settings.get("bits", settings.get("w_bit", 4))}, subject, bits=(4,))
    _need(settings, subject, zero_point=(True,))
    return Scheme("awq", "awq", _group(settings.get("group_size", settings.get("q_group_size", 128))), symmetric=False)


def _bitsandbytes_scheme(settings: Mapping[str, Any]) -> Scheme:
    subject = "bitsandbytes weights"
    _need(settings, subject, load_in_8bit=(False, None), load_in_4bit=(True,), bnb_4bit_quant_storage=("uint8", None))
    _need({"bnb_4bit_quant_type": settings.get("bnb_4bit_quant_type", "fp4")}, subject, bnb_4bit_quant_type=("nf4",))
    return Scheme("bitsandbytes", "nf4")


def _fp8_scheme(settings: Mapping[str, Any]) -> Scheme:
    _need(settings, "fp8 weights", fmt=("e4m3", None), expert_dtype=("fp8", None))
    return Scheme("fp8", "fp8", block=_block(settings.get("weight_block_size"), "weight_block_size"))


def _block(value: Any, name: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value if isinstance(value, list) and len(value) == 2 else []
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or not 0 < n <= 1 << 20 for n in sizes):
        _refuse(name, value, "it must be two sizes, such as [128, 128]")
    if sizes[1] % MIN_GROUP:
        _refuse(name, value, f"the number of columns must be a multiple of {MIN_GROUP}")
    return sizes[0], sizes[1]


# For each format of compressed-tensors: the required type and bits of its weights, and their layout.
COMPRESSED_LAYOUTS: dict[str, tuple[str, int, Literal["packed", "int8", "fp8"]]] = {
    "pack-quantized": ("int", 4, "packed"),
    "int-quantized": ("int", 8, "int8"),
    "float-quantized": ("float", 8, "fp8"),
}


def _compressed_tensors_scheme(settings: Mapping[str, Any]) -> Scheme | None:
    groups = settings.get("config_groups")
    if groups == {} and settings.get("kv_cache_scheme") is not None:
        return None
    if not isinstance(groups, Mapping) or len(groups) != 1 or not isinstance(scheme := next(iter(groups.values())), Mapping):
        _refuse("config_groups", groups, "it must be one group for all linear layers")
    format = scheme.get("format") or settings.get("format")
    if not isinstance(format, str) or format not in COMPRESSED_LAYOUTS:
        _refuse("format", format, f"{', '.join(COMPRESSED_LAYOUTS)} are supported")
    sparsity = settings.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        _refuse("sparsity_config", sparsity, "only dense weights are supported")
    _need(settings, "weights", transform_config=(None, {}))
    _need(scheme, "weights", output_activations=(None,))
    weights = scheme.get("weights")
    if not isinstance(weights, Mapping):
        _refuse("weights", weights, "it must be an object")
    number_type, bits, layout = COMPRESSED_LAYOUTS[format]
    _need(weights, f"{format} weights", type=(number_type,), num_bits=(bits,), dynamic=(False,), symmetric=(True, False))
    _need(weights, f"{format} weights", actorder=(None, False, "weight", "static"))
    symmetric, strategy = weights.get("symmetric", True), weights.get("strategy")
    if not symmetric and layout != "packed":
        _refuse("symmetric", False, f"{format} weights must have True")
    if layout == "packed":
        _need({"strategy": strategy}, f"{format} weights", strategy=("group", "channel"))
        group = _group(weights.get("group_size")) if strategy == "group" else None
        return Scheme(COMPRESSED_TENSORS, "packed", group, symmetric=symmetric)
    known = ("channel", "tensor") if layout == "int8" else ("channel", "tensor", "block")
    _need({"strategy": strategy}, f"{format} weights", strategy=known)
    block = _block(weights.get("block_structure"), "block_structure") if strategy == "block" else None
    return Scheme(COMPRESSED_TENSORS, layout, block=block)


METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme | None]] = {
    COMPRESSED_TENSORS: _compressed_tensors_scheme,
    "fp8": _fp8_scheme,
    "gptq": _gptq_scheme,
    "awq": _awq_scheme,
    "bitsandbytes": _bitsandbytes_scheme,
}


PER_WORD = 8  # 4-bit integers in a 32-bit word
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output index of each nibble of a word, from the lowest
NESTED = 256  # blocks of the flattened tensor that share a nested scale
TRANSPOSED_ROWS = 512  # rows to read at a time if the file stores them as columns


@dataclass(frozen=True)
class QuantizedTensor(ABC):
    """A weight [rows, columns]; subclasses define its planes.

    Attributes:
      name: the file and the weight's name, for messages.
      parts: the stored tensors, by the suffixes of their names.
      shape: rows and columns.
      form: the quantization format of its planes.
      scheme: the folder's scheme.
    """

    name: str
    parts: Mapping[str, Dense]
    shape: tuple[int, int]
    form: QuantFormat
    scheme: Scheme
    dtype = np.dtype(np.float32)

    @property
    def storage_type(self) -> str:
        return self.form.name.upper()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @abstractmethod
    def planes(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        """Rows [start, stop) as the planes of `form`."""

    def read(self, start: int, stop: int) -> np.ndarray:
        with np.errstate(all="ignore"):  # damaged scales give infinity or NaN, reported later
            return self.form.decode(*self.planes(start, stop))

    @property
    def blocks(self) -> Tensor | None:
        """See `lazy_tensors.row_bytes_of`."""
        return RowBytes(self)

    def part(self, end: str, start: int, stop: int) -> np.ndarray:
        """Rows of one of the stored tensors."""
        return self.parts[end].read(start, stop)

    def grouped(self, values: np.ndarray) -> np.ndarray:
        """4-bit integers plus 8, uint8[rows, columns / 2], in the layout of `form`, see `planes.packed`."""
        return (values ^ 0x88).reshape(len(values), -1, self.form.block // 2)

    def spread(self, values: np.ndarray, dtype: Any) -> np.ndarray:
        """Values per group of the file, [rows, groups], as values per group of `form`: [rows, columns / block]."""
        columns = self.shape[1]
        width = self.scheme.block[1] if self.scheme.block else self.scheme.group or columns
        return np.repeat(values, width // self.form.block, axis=1)[:, : columns // self.form.block].astype(dtype)


# --- layouts ---------------------------------------------------------------------------------------------------------------


class PackedWords(QuantizedTensor):
    """compressed-tensors, "pack-quantized": eight 4-bit integers of a row per word, the first lowest, all plus 8."""

    def planes(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        values = self.grouped(self.part(".weight_packed", start, stop).view(np.uint8))
        scales = self.spread(self.part(".weight_scale", start, stop), np.float32)
        if self.scheme.symmetric:
            return values, scales
        first = start // PER_WORD
        words = self.part(".weight_zero_point", first, -(-stop // PER_WORD))  # packed along the rows
        zeros = _unpack_nibbles(np.ascontiguousarray(words.T)).T[start - first * PER_WORD : stop - first * PER_WORD]
        return values, scales, self.spread(zeros.view(np.int8) - 8, np.int8)


class Scaled(QuantizedTensor):
    """8-bit integers or floats, with one scale for the tensor, each row, or each block of rows and columns."""

    def planes(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        values = self.part(".weight", start, stop)
        end = next(end for end in (".weight_scale", ".weight_scale_inv") if end in self.parts)
        if self.scheme.block is not None:
            high = self.scheme.block[0]
            block_scales = self.part(end, start // high, -(-stop // high))
            scales = block_scales[np.arange(start, stop) // high - start // high]
            values = values.reshape(stop - start, -1, self.form.block)
            return values, self.spread(scales, np.float32)
        scale = self.parts[end]
        if math.prod(scale.shape) == 1:
            single = replace(scale, shape=(1,)).read(0, 1)
            return values, np.repeat(single.astype(np.float32), stop - start)
        return values, self.part(end, start, stop).astype(np.float32).reshape(-1)


class ColumnMajor(QuantizedTensor):
    """Base of layouts that store [columns, rows]."""

    @property
    def rows_at_once(self) -> int:
        """Rows to read at a time; all rows of an object in a store, since fewer take as long."""
        stored = any(isinstance(part.path, StoredPath) for part in self.parts.values())
        return self.shape[0] if stored else TRANSPOSED_ROWS

    def in_groups(self, values: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> tuple[np.ndarray, ...]:
        """The planes of uint8[rows, columns / 2] with the file's scales and zeros [groups, rows]."""
        values = self.grouped(values)
        scales = self.spread(scales.T, np.float32)
        if self.scheme.symmetric:
            if (zeros != 8).any():
                raise CheckpointError(f"{self.name} has asymmetric zero points, but quantization_config says sym=true")
            return values, scales
        return values, scales, self.spread(zeros.T.view(np.int8) - 8, np.int8)


class Gptq(ColumnMajor):
    """GPTQ: eight integers of a column per word, so that words are [columns / 8, rows], and zeros [groups, rows / 8]."""

    def planes(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        values, scales, zeros = self._integers(start, stop)
        if not self.scheme.reordered and ".g_idx" in self.parts:
            in_order = np.arange(self.shape[1]) // (self.scheme.group or self.shape[1])
            if not np.array_equal(self.part(".g_idx", 0, self.shape[1]), in_order):
                raise CheckpointError(f"{self.name} has reordered columns, but quantization_config says desc_act=false")
        return self.in_groups(values, scales, zeros)

    def _integers(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """uint8[rows, columns / 2], and scales and zeros [groups, rows]."""
        words = _columns(self.parts[".qweight"], start, stop)
        first, last = start // PER_WORD, -(-stop // PER_WORD)
        packed = _columns(self.parts[".qzeros"], first, last).view(np.uint32)
        if self.scheme.zeros_less_one:  # added to the whole word, since the subtraction borrowed from the next integer
            packed = packed + np.uint32(0x11111111)
        zeros = _unpack_nibbles(packed)[:, start - first * PER_WORD : stop - first * PER_WORD]
        scales = _columns(self.parts[".scales"], start, stop)
        return np.ascontiguousarray(words.T).view(np.uint8), scales, np.ascontiguousarray(zeros)


class Reordered(Gptq):
    """GPTQ with `desc_act`: a group's columns are not adjacent, which no format supports, so it is read as floats."""

    def read(self, start: int, stop: int) -> np.ndarray:
        values, scales, zeros = self._integers(start, stop)
        group = self.part(".g_idx", 0, self.shape[1])
        if group.min() < 0 or group.max() >= len(scales):
            raise CheckpointError(f"{self.name} assigns a column to group {int(group.max())}, but has {len(scales)} groups")
        with np.errstate(all="ignore"):
            offset = _unpack_nibbles(values).T.astype(np.float32) - zeros[group].astype(np.float32)
            return np.ascontiguousarray((scales[group].astype(np.float32) * offset).T)

    @property
    def blocks(self) -> None:
        return None


class Awq(ColumnMajor):
    """AWQ, "gemm": eight outputs of a column per word, in the order of `AWQ_ORDER`; words and zeros are [..., rows / 8]."""

    def planes(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        first, last = start // PER_WORD, -(-stop // PER_WORD)
        outputs = slice(start - first * PER_WORD, stop - first * PER_WORD)
        values, zeros = (self._outputs(end, first, last)[:, outputs] for end in (".qweight", ".qzeros"))
        scales = _columns(self.parts[".scales"], start, stop)
        values = values[::2] | (values[1::2] << 4)
        return self.in_groups(np.ascontiguousarray(values.T), scales, np.ascontiguousarray(zeros))

    def _outputs(self, end: str, first: int, last: int) -> np.ndarray:
        words = _columns(self.parts[end], first, last)
        nibbles = _unpack_nibbles(words).reshape(len(words), -1, PER_WORD)
        out = np.empty_like(nibbles)
        out[..., AWQ_ORDER] = nibbles
        return out.reshape(len(words), -1)


@dataclass(frozen=True)
class Nf4(QuantizedTensor):
    """bitsandbytes: two values per byte, the first one high, and a scale for each 64, both of the flattened tensor.

    Attributes:
      offset: added to the scales if they are quantized as well.
    """

    offset: float = 0.0

    def planes(self, start: int, stop: int) -> tuple[np.ndarray, ...]:
        columns = self.shape[1]
        row_blocks = columns // nf4.BLOCK
        weight = self.parts[".weight"]
        values = read_bytes(weight.path, weight.offset + start * columns // 2, (stop - start) * columns // 2)
        values = values.reshape(stop - start, columns // 2)
        absmax = self.part(".weight.absmax", start * row_blocks, stop * row_blocks).reshape(stop - start, row_blocks)
        if ".weight.nested_absmax" not in self.parts:
            return values, absmax
        first, last = start * row_blocks // NESTED, -(-stop * row_blocks // NESTED)
        nested = self.part(".weight.nested_absmax", first, last)
        nested_scales = nested[np.arange(start * row_blocks, stop * row_blocks) // NESTED - first].reshape(
            stop - start, row_blocks
        )
        offset = np.full(stop - start, self.offset, np.float32)
        if self.form is nf4.DOUBLE:
            return values, absmax, np.ascontiguousarray(nested_scales[:, 0]), offset
        if self.form is nf4.DOUBLE_256:
            return values, absmax, np.ascontiguousarray(nested_scales[:, :: 256 // nf4.BLOCK]), offset
        return values, nf4.DYNAMIC[absmax] * nested_scales + offset[:, None]


# --- reading ------------------------------------------------------------------------------------------------------------


def _columns(part: Dense, start: int, stop: int) -> np.ndarray:
    """Columns [start, stop) of a matrix, read as a strip of each row."""
    rows, width = part.shape
    offsets = part.offset + (np.arange(rows) * width + start) * part.dtype.itemsize
    strips = read_strips(part.path, offsets.tolist(), (stop - start) * part.dtype.itemsize)
    return strips.view(part.dtype)


def _unpack_nibbles(words: np.ndarray) -> np.ndarray:
    """The eight nibbles of each word, the lowest first: uint8[..., 8 n] for words [..., n]."""
    pairs = np.ascontiguousarray(words).view(np.uint8)
    return np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*words.shape[:-1], -1)


QUANT_STATE = ".weight.quant_state.bitsandbytes__nf4"
MAX_STATE_BYTES = 1 << 12  # bytes
SCALES = ("F32", "F16", "BF16")
# For each layout: name suffixes that identify a quantized weight, that it must have, and that it may have.
ENDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "packed": ((".weight_packed",), (".weight_scale", ".weight_shape"), (".weight_zero_point",)),
    "int8": ((".weight_scale",), (".weight",), ()),
    "fp8": ((".weight_scale", ".weight_scale_inv"), (".weight",), ()),
    "gptq": ((".qweight",), (".qzeros", ".scales"), (".g_idx",)),
    "awq": ((".qweight",), (".qzeros", ".scales"), ()),
    "nf4": (
        (QUANT_STATE,),
        (".weight", ".weight.absmax", ".weight.quant_map"),
        (".weight.nested_absmax", ".weight.nested_quant_map"),
    ),
}


def join_quantized_weights(where: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> dict[str, Tensor]:
    """The tensors of a folder; those of a quantized weight become one tensor under the weight's name."""
    signs, needed, optional = ENDS[scheme.layout]
    if scheme.layout == "packed" and not scheme.symmetric:
        needed += (".weight_zero_point",)
    if scheme.reordered:
        needed += (".g_idx",)
    joined = dict(tensors)
    stems = [name.removesuffix(sign) for sign in signs for name in tensors if name.endswith(sign)]
    for stem in stems:
        parts: dict[str, Any] = {}
        for end in dict.fromkeys((*signs, *needed, *optional)):
            if stem + end in joined:
                parts[end] = joined.pop(stem + end)
            elif end in needed:
                raise CheckpointError(
                    f"{where}: tensor {short_repr(stem + end, 80)} is missing, but its weight is quantized"
                )
        joined[f"{stem}.weight"] = _weight(f"{where}: tensor {short_repr(f'{stem}.weight', 80)}", parts, scheme)
    if not stems:
        raise CheckpointError(
            f"{where}: its config.json has a quantization_config, but no weight is quantized that way ({' or '.join(signs)})"
        )
    return joined


def _weight(name: str, parts: Mapping[str, Dense], scheme: Scheme) -> QuantizedTensor:
    """A weight, after checking all shapes and types against each other."""

    def need(end: str, storage_types: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        part = parts[end]
        if part.storage_type not in storage_types or part.shape not in shapes:
            known_shapes = " or ".join(map(str, map(list, shapes)))
            raise CheckpointError(
                f"{name} has {end[1:]} as {part.storage_type} of {list(part.shape)}; {' or '.join(storage_types)} of"
                f" {known_shapes} is needed"
            )

    def sizes(end: str) -> tuple[int, int]:
        if len(parts[end].shape) != 2 or not math.prod(parts[end].shape):
            raise CheckpointError(f"{name} has {end[1:]} of {list(parts[end].shape)}; a matrix is needed")
        rows, columns = parts[end].shape
        return rows, columns

    layout = scheme.layout
    if layout == "nf4":
        return _nf4(name, parts, scheme, need)
    if layout in ("int8", "fp8"):
        shape = sizes(".weight")
        need(".weight", ("I8",) if layout == "int8" else ("F8_E4M3",), shape)
        end = ".weight_scale" if ".weight_scale" in parts else ".weight_scale_inv"
        if scheme.block is None:
            need(end, SCALES, (), (1,), (1, 1), (shape[0],), (shape[0], 1))
            return Scaled(name, parts, shape, QUANT_FORMATS[layout], scheme)
        high, width = scheme.block
        need(end, SCALES, (-(-shape[0] // high), -(-shape[1] // width)))
        return Scaled(name, parts, shape, _group_format(name, "fp8", width, shape[1]), scheme)
    is_packed = layout == "packed"
    a, b = sizes(".weight_packed" if is_packed else ".qweight")
    shape = rows, columns = (a, b * PER_WORD) if is_packed else (b, a * PER_WORD) if layout == "gptq" else (b * PER_WORD, a)
    width = scheme.group or columns
    groups = -(-columns // width)
    form = _group_format(name, "int4" if scheme.symmetric else "int4_asym", width, columns)
    if is_packed:
        need(".weight_packed", ("I32",), (rows, columns // PER_WORD))
        need(".weight_scale", SCALES, (rows, groups))
        need(".weight_shape", ("I64", "I32"), (2,))
        if tuple(parts[".weight_shape"].read(0, 2).tolist()) != shape:
            raise CheckpointError(f"{name} has a weight_shape unlike its weight_packed, {list(shape)}; copy it again")
        if not scheme.symmetric:
            need(".weight_zero_point", ("I32",), (-(-rows // PER_WORD), groups))
        return PackedWords(name, parts, shape, form, scheme)
    need(".qweight", ("I32",), parts[".qweight"].shape)
    need(".qzeros", ("I32",), (groups, -(-rows // PER_WORD)))
    need(".scales", SCALES, (groups, rows))
    if layout == "awq":
        return Awq(name, parts, shape, form, scheme)
    if ".g_idx" in parts:
        need(".g_idx", ("I32",), (columns,))
    return (Reordered if scheme.reordered else Gptq)(name, parts, shape, form, scheme)


def _group_format(name: str, family: str, width: int, columns: int) -> QuantFormat:
    """The format with the largest groups that divide the file's groups of `width` and its rows."""
    group = next((group for group in GROUPS if width % group == 0 and columns % group == 0), None)
    if group is None:
        raise CheckpointError(
            f"{name} has rows of {columns} values in groups of {width}; both must be multiples of {GROUPS[-1]}"
        )
    return QUANT_FORMATS[f"{family}_{group}" if f"{family}_{group}" in QUANT_FORMATS else family]


def _nf4(name: str, parts: Mapping[str, Dense], scheme: Scheme, need: Any) -> QuantizedTensor:
    state = _read_quant_state(parts[QUANT_STATE], name)
    shape = state["shape"]
    count = shape[0] * shape[1]
    need(".weight", ("U8",), (count // 2, 1), (count // 2,), (1, count // 2))
    need(".weight.quant_map", ("F32",), (16,))
    double = ".weight.nested_absmax" in parts
    need(".weight.absmax", ("U8",) if double else ("F32",), (count // nf4.BLOCK,))
    tables = [(".weight.quant_map", nf4.NF4)]
    row_blocks = shape[1] // nf4.BLOCK  # blocks per row
    form = nf4.SINGLE
    if double:
        if ".weight.nested_quant_map" not in parts or "nested_offset" not in state:
            raise CheckpointError(f"{name} has quantized scales without all of their nested tensors; copy it again")
        need(".weight.nested_absmax", ("F32",), (-(-count // nf4.BLOCK // NESTED),))
        need(".weight.nested_quant_map", ("F32",), (256,))
        tables.append((".weight.nested_quant_map", nf4.DYNAMIC))
        form = nf4.DOUBLE if NESTED % row_blocks == 0 else nf4.DOUBLE_256 if shape[1] % 256 == 0 else nf4.SINGLE
    for end, table in tables:
        if not np.allclose(parts[end].read(0, len(table)), table, rtol=0, atol=1e-6):
            raise CheckpointError(f"{name} has a {end.removeprefix('.weight.')} other than that of bitsandbytes")
    return Nf4(name, parts, shape, form, scheme, state.get("nested_offset", 0.0))


def _read_quant_state(part: Dense, name: str) -> dict[str, Any]:
    """The JSON in which bitsandbytes describes a weight: its shape, its blocks, and the offset of its scales."""
    size = part.nbytes
    try:
        if part.storage_type != "U8" or size > MAX_STATE_BYTES:
            raise ValueError(f"it has {size} bytes of {part.storage_type}")
        state = json.loads(read_bytes(part.path, part.offset, size).tobytes())
        rows, columns = state["shape"]
        layout = state["quant_type"], state["blocksize"], state.get("nested_blocksize", NESTED)
        if (
            not all(type(count) is int and 0 < count < 1 << 40 for count in (rows, columns))
            or columns % nf4.BLOCK
            or layout != ("nf4", nf4.BLOCK, NESTED)
            or not math.isfinite(state.get("nested_offset", 0.0))
        ):
            raise ValueError(f"only nf4 of whole rows in blocks of 64, with 256 per nested scale, is supported: {state}")
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{name} has an unsupported quant_state ({short_repr(str(error), 80)})") from None
    return state | {"shape": (rows, columns)}
