"""Grouping the tensors of a Hugging Face folder into quantised weights, with checks; see `quantized_tensors`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from llama_jax.checkpoints.quantized_config import Scheme
from llama_jax.checkpoints.quantized_tensors import (
    NESTED,
    PER_WORD,
    Awq,
    Gptq,
    Nf4,
    Packed,
    QuantizedTensor,
    Reordered,
    Scaled,
    bytes_of,
    read_rows,
)
from llama_jax.checkpoints.tensors import Dense, Tensor, read_bytes
from llama_jax.errors import CheckpointError, shown
from llama_jax.ops.weights import KINDS, Kind, nf4
from llama_jax.ops.weights.scaled import GROUPS

QUANT_STATE = ".weight.quant_state.bitsandbytes__nf4"
MOST_STATE = 1 << 12  # bytes of a state
SCALES = ("F32", "F16", "BF16")
# By layout: the end of the name that tells a quantised weight, those that it must have, and those that it may have.
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
# What quantises activations, which are computed in full here.
OF_ACTIVATIONS = (".input_scale", ".input_zero_point", ".activation_scale")


def with_weights(where: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> dict[str, Tensor]:
    """The tensors of a folder, with those that make up a quantised weight as one under the weight's name.

    Raises:
      CheckpointError: a missing tensor, one with another shape or type than its layout has; or no quantised weight.
    """
    signs, needed, optional = ENDS[scheme.layout]
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(OF_ACTIVATIONS)}
    stems = [name.removesuffix(sign) for sign in signs for name in tensors if name.endswith(sign)]
    for stem in stems:
        parts: dict[str, Any] = {}
        for end in (*signs, *needed, *optional):
            if stem + end in found:
                parts[end] = found.pop(stem + end)
            elif end in needed:
                raise CheckpointError(f"{where}: tensor {shown(stem + end, 80)} is missing; its weight is quantised")
        found[f"{stem}.weight"] = _weight(f"{where}: tensor {shown(f'{stem}.weight', 80)}", parts, scheme)
    if not stems:
        raise CheckpointError(
            f"{where}: its config.json has a quantization_config, but no weight is quantised so ({' or '.join(signs)})"
        )
    return found


def _weight(name: str, parts: Mapping[str, Dense], scheme: Scheme) -> QuantizedTensor:
    """A weight, after all shapes and types have been checked against each other."""

    def need(end: str, kinds: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        part = parts[end]
        if part.kind not in kinds:
            raise CheckpointError(f"{name} has {end[1:]} as {part.kind}; {' or '.join(kinds)} is needed")
        if part.shape not in shapes:
            raise CheckpointError(
                f"{name} has {end[1:]} of {list(part.shape)}; {' or '.join(map(str, map(list, shapes)))} is needed"
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
            return Scaled(name, parts, shape, KINDS[layout], scheme)
        high, width = scheme.block
        need(end, SCALES, (-(-shape[0] // high), -(-shape[1] // width)))
        return Scaled(name, parts, shape, _in_groups(name, "fp8", width, shape[1]), scheme)
    if layout == "packed":
        rows, columns = sizes(".weight_packed")
    elif layout == "gptq":
        columns, rows = sizes(".qweight")
    else:
        columns, rows = sizes(".qweight")
        rows *= PER_WORD
    if layout in ("packed", "gptq"):
        columns *= PER_WORD
    width = scheme.group or columns
    groups = -(-columns // width)
    form = _in_groups(name, "int4" if scheme.symmetric else "int4_asym", width, columns)
    shape = (rows, columns)
    if layout == "packed":
        need(".weight_packed", ("I32",), (rows, columns // PER_WORD))
        need(".weight_scale", SCALES, (rows, groups))
        need(".weight_shape", ("I64", "I32"), (2,))
        if tuple(read_rows(parts[".weight_shape"], 0, 2).tolist()) != shape:
            raise CheckpointError(f"{name} has another weight_shape than its weight_packed, {list(shape)}; copy it again")
        if not scheme.symmetric:
            if ".weight_zero_point" not in parts:
                raise CheckpointError(f"{name} has no weight_zero_point, and its quantization_config says symmetric=false")
            need(".weight_zero_point", ("I32",), (-(-rows // PER_WORD), groups))
        return Packed(name, parts, shape, form, scheme)
    if rows % PER_WORD:
        raise CheckpointError(f"{name} has {rows} rows; a multiple of {PER_WORD} is needed")
    need(".qweight", ("I32",), parts[".qweight"].shape)
    need(".qzeros", ("I32",), (groups, rows // PER_WORD))
    need(".scales", SCALES, (groups, rows))
    if layout == "awq":
        return Awq(name, parts, shape, form, scheme)
    if ".g_idx" in parts:
        need(".g_idx", ("I32",), (columns,))
    if not scheme.reordered:
        return Gptq(name, parts, shape, form, scheme)
    if ".g_idx" not in parts:
        raise CheckpointError(f"{name} has no g_idx, and its quantization_config says desc_act=true")
    return Reordered(name, parts, shape, form, scheme)


def _in_groups(name: str, family: str, width: int, columns: int) -> Kind:
    """The kind with the largest groups that the file's groups of `width`, and its rows, are made of."""
    group = next((group for group in GROUPS if width % group == 0 and columns % group == 0), None)
    if group is None:
        raise CheckpointError(
            f"{name} has rows of {columns} numbers in groups of {width}; multiples of {GROUPS[-1]} are read"
        )
    return KINDS[f"{family}_{group}" if f"{family}_{group}" in KINDS else family]


def _nf4(name: str, parts: Mapping[str, Dense], scheme: Scheme, need: Any) -> QuantizedTensor:
    state = _state(parts[QUANT_STATE], name)
    shape = state["shape"]
    count = shape[0] * shape[1]
    need(".weight", ("U8",), (count // 2, 1), (count // 2,), (1, count // 2))
    need(".weight.quant_map", ("F32",), (16,))
    double = ".weight.nested_absmax" in parts
    need(".weight.absmax", ("U8",) if double else ("F32",), (count // nf4.BLOCK,))
    tables = [(".weight.quant_map", nf4.NF4)]
    each = shape[1] // nf4.BLOCK  # blocks of a row
    form = nf4.SINGLE
    if double:
        if ".weight.nested_quant_map" not in parts or "nested_offset" not in state:
            raise CheckpointError(
                f"{name} has factors that are quantised themselves, and not all that says how; copy it again"
            )
        need(".weight.nested_absmax", ("F32",), (-(-count // nf4.BLOCK // NESTED),))
        need(".weight.nested_quant_map", ("F32",), (256,))
        tables.append((".weight.nested_quant_map", nf4.DYNAMIC))
        form = nf4.DOUBLE if NESTED % each == 0 else nf4.DOUBLE_256 if shape[1] % 256 == 0 else nf4.SINGLE
    for end, table in tables:
        if not np.allclose(read_rows(parts[end], 0, len(table)), table, rtol=0, atol=1e-6):
            raise CheckpointError(f"{name} has a {end.removeprefix('.weight.')} that is not that of bitsandbytes")
    return Nf4(name, parts, shape, form, scheme, state.get("nested_offset", 0.0))


def _state(part: Dense, name: str) -> dict[str, Any]:
    """What bitsandbytes says of a weight, in JSON: its shape, its blocks, and the offset of its factors."""
    size = bytes_of(part)
    try:
        if part.kind != "U8" or size > MOST_STATE:
            raise ValueError(f"it has {size} bytes of {part.kind}")
        found = json.loads(read_bytes(part.path, part.offset, size).tobytes())
        rows, columns = found["shape"]
        if not all(type(each) is int and 0 < each < 1 << 40 for each in (rows, columns)) or columns % nf4.BLOCK:
            raise ValueError(f"shape {shown([rows, columns], 40)}")
        if (found["quant_type"], found["blocksize"], found.get("nested_blocksize", NESTED)) != ("nf4", nf4.BLOCK, NESTED):
            raise ValueError("nf4 in blocks of 64, their factors by 256, is read")
        if "nested_offset" in found and not math.isfinite(found["nested_offset"]):
            raise ValueError("its offset is not finite")
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{name} has a quant_state that is not read ({shown(str(error), 80)})") from None
    return found | {"shape": (rows, columns)}
