"""The quantization format of each matrix of a model, given one format for the model."""

from __future__ import annotations

from typing import get_args

from llama_jax.ops.weights.formats import ENCODABLE, PureFormatName

# Errors of the embedding and the output projection affect every token and logit: with both in 8 bits, the divergence of
# SmolLM2 in int4 or q4_0 is 25% smaller.
VOCABULARY = {"embedding", "lm_head"}
VOCABULARY_FORMATS = {
    **{"int4": "int8", "nf4": "int8", "q2_k": "q6_k", "q4_k": "q6_k", "q5_k": "q6_k"},
    **dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1"), "q8_0"),
}
MIXED = ("q4_k", "q5_k")  # values and `down` have 6 bits in some layers, as in llama.cpp's Q4_K_M and Q5_K_M
MIXTURES: tuple[str, ...] = (*ENCODABLE, *get_args(PureFormatName))  # the user's choices


def format_of_part(part: str, quantize: str, layer: int, layers: int) -> str:
    """The format of a matrix, in the units of files.

    Args:
      part: "embedding", "lm_head", "q", "k", "v", "out", "gate", "up" or "down", or another.
      quantize: one of `MIXTURES`.
      layer: index of the layer, below `layers`.
    """
    base = base_format(quantize)
    if base != quantize:
        return base
    if part in VOCABULARY:
        return VOCABULARY_FORMATS.get(base, base)
    return "q6_k" if base in MIXED and part in ("v", "down") and _uses_more_bits(layer, layers) else base


def formats_of_parameter(path: str, quantize: str, layer: int, layers: int) -> tuple[str, ...]:
    """The formats of the parts of a parameter; a single one if all are equal."""
    part = path.rpartition(".")[2]
    formats = [format_of_part(part, quantize, layer, layers) for part in (("q", "k", "v") if part == "qkv" else (part,))]
    return tuple(formats) if len(set(formats)) > 1 else (formats[0],)


def base_format(quantize: str) -> str:
    """The format of most matrices."""
    return quantize.removesuffix("-pure")


def _uses_more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth, and every third between (ggml-org/llama.cpp, `llama-quant.cpp`, `use_more_bits`)."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
