"""The quantization formats by name; see `format_spec`."""

from __future__ import annotations

from typing import Literal, get_args

from llama_jax.ops.weights.format_spec import QuantFormat
from llama_jax.ops.weights.gguf_blocks import GGUF_FORMATS
from llama_jax.ops.weights.nf4 import NF4_FORMATS
from llama_jax.ops.weights.scaled_formats import SCALED_FORMATS

# The formats to quantize to, and those kept from files. `format_for` selects the group size.
FormatName = Literal[
    "int8",
    "int4",
    "fp8",
    "nf4",
    "q8_0",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q2_k",
    "q3_k",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_nl",
    "iq4_xs",
    "mxfp4",
]
# One format for all matrices, without the wider formats of `model.mixtures` for some.
PureFormatName = Literal[
    "int4-pure", "nf4-pure", "q4_0-pure", "q4_1-pure", "q5_0-pure", "q5_1-pure", "q4_k-pure", "q5_k-pure"
]
# Formats of a frozen base model.
FrozenFormatName = Literal["none", "int8", "int4", "int4-pure", "fp8", "nf4", "nf4-pure", "q8_0", "q4_0", "q4_0-pure"]

QUANT_FORMATS: dict[str, QuantFormat] = {
    quant_format.name: quant_format for quant_format in (*SCALED_FORMATS, *NF4_FORMATS, *GGUF_FORMATS)
}
ENCODABLE: tuple[str, ...] = tuple(
    name for name in get_args(FormatName) if QUANT_FORMATS[name].encode is not None
)  # formats that floats can be quantized to
# Formats that differ only in their group size, the largest first.
GROUP_SIZE_VARIANTS = (
    ("int4", "int4_64", "int4_32"),
    ("int4_asym", "int4_asym_64", "int4_asym_32"),
    ("fp8_128", "fp8_64", "fp8_32"),
)

# llama.cpp's fallback for rows that are not a multiple of 256 (`llama-quant.cpp`, `tensor_type_fallback`).
FALLBACKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def with_fallback(name: str, columns: int) -> QuantFormat:
    """`format_for`, or the fallback with blocks of 32 if rows are not whole blocks."""
    form = format_for(name, columns)
    return form if columns % form.block == 0 else format_for(FALLBACKS.get(name, name), columns)


def format_for(name: str, columns: int) -> QuantFormat:
    """The format `name` for rows of `columns` values per device, with the largest group size that divides them.

    Groups are at most as large as those of `name`. If none fits, returns the format with the smallest block, for an error
    message.
    """
    names = next((family[family.index(name) :] for family in GROUP_SIZE_VARIANTS if name in family), (name,))
    candidates = [QUANT_FORMATS[candidate] for candidate in names]
    return next((quant_format for quant_format in candidates if columns % quant_format.block == 0), candidates[-1])
