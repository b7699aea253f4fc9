"""The kinds of quantized weights by name, see `planes` for what a kind is."""

from __future__ import annotations

from typing import Literal, get_args

from llama_jax.ops.weights.format_spec import QuantFormat
from llama_jax.ops.weights.gguf_blocks import GGUF_FORMATS
from llama_jax.ops.weights.nf4 import NF4_FORMATS
from llama_jax.ops.weights.scaled_formats import SCALED_FORMATS

# What a user may ask for, and what files are kept in; `fitting` chooses among those of different groups.
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
# A kind alone for all matrices, without the wider ones that `model.mixtures` else gives some.
PureFormatName = Literal[
    "int4-pure", "nf4-pure", "q4_0-pure", "q4_1-pure", "q5_0-pure", "q5_1-pure", "q4_k-pure", "q5_k-pure"
]
# Of a model that training reads and does not change.
FrozenFormatName = Literal["none", "int8", "int4", "int4-pure", "fp8", "nf4", "nf4-pure", "q8_0", "q4_0", "q4_0-pure"]

QUANT_FORMATS: dict[str, QuantFormat] = {kind.name: kind for kind in (*SCALED_FORMATS, *NF4_FORMATS, *GGUF_FORMATS)}
ENCODABLE: tuple[str, ...] = tuple(
    name for name in get_args(FormatName) if QUANT_FORMATS[name].encode is not None
)  # of floats
# Kinds that are alike but for their groups, by the largest first.
FAMILIES = (("int4", "int4_64", "int4_32"), ("int4_asym", "int4_asym_64", "int4_asym_32"), ("fp8_128", "fp8_64", "fp8_32"))

# What llama.cpp makes of rows that are no whole blocks of 256 (`llama-quant.cpp`, `tensor_type_fallback`).
FALLBACKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def with_fallback(name: str, columns: int) -> QuantFormat:
    """The kind that floats are quantized into: `fitting`, or where its blocks are too long for the rows one of 32."""
    form = format_for(name, columns)
    return form if columns % form.block == 0 else format_for(FALLBACKS.get(name, name), columns)


def format_for(name: str, columns: int) -> QuantFormat:
    """The kind of a name for rows of so many numbers on each device: with its groups, or the largest smaller ones that fit.

    Where none fits, the one whose block is smallest, for a message.
    """
    names = next((family[family.index(name) :] for family in FAMILIES if name in family), (name,))
    kinds = [QUANT_FORMATS[each] for each in names]
    return next((kind for kind in kinds if columns % kind.block == 0), kinds[-1])
