"""The floating-point operations of a training step, and their share of a device's peak (MFU).

Only operations that the mathematics needs are counted: not recomputed activations or masked scores that are discarded
(Chowdhery et al. 2022, appendix B, with the scores that the mask keeps instead of the square).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llama_jax.config import LayerConfig, LlamaConfig
from llama_jax.model.lora import Lora, adapter_count
from llama_jax.model.params import ParamSpec, specs_for

FORMULA = (
    "FLOPs of a step = 6 * P * tokens + 12 * H * S, P the matrix parameters that every token is multiplied with: all but "
    "the embedding lookup, the output projection among them; S the attention scores that masks keep, of all rows, layers "
    "and heads: T * (T + 1) / 2 for the T tokens of a row, padding among them, and fewer with windows or chunks; nothing "
    "for what is computed twice. MFU = FLOPs / seconds / (devices * published dense bfloat16 FLOP/s)"
)


def matrix_parameters(config: LlamaConfig, *, all_experts: bool = False) -> int:
    """P, the number of weights by which every token is multiplied.

    The embedding is a lookup and counts only if it is also the output projection; norms do not count.

    Args:
      all_experts: count all experts, for memory and communication, instead of only those to which a token is routed.
    """
    total = 0
    for spec in specs_for(config):
        if not spec.decays or (spec.path == "embedding" and not config.tie_embeddings):
            continue
        size = math.prod(spec.shape(config)) * (config.n_layers if spec.in_blocks else 1)
        only_routed = _is_of_expert(spec) and not all_experts
        total += size // config.experts * config.experts_per_token if only_routed else size
    return total


def _is_of_expert(spec: ParamSpec) -> bool:
    """Whether each expert has its own copy of this matrix, so that a token is multiplied by only a few of them."""
    return spec.axes.startswith("E ") and len(spec.axes.split()) == 3


def attention_scores(config: LlamaConfig, length: int) -> int:
    """The number of attention scores that the masks keep, of all layers and heads, in a document of `length` tokens."""
    return config.n_heads * sum(_scores_of_head(config.layer(i), length) for i in range(config.n_layers))


def last_token_scores(config: LlamaConfig, length: int) -> int:
    """`attention_scores` of only the last token of the document, as in decoding."""
    return attention_scores(config, length) - attention_scores(config, length - 1)


def _scores_of_head(layer: LayerConfig, length: int) -> int:
    """A token attends to itself and the tokens before it in the layer's window and in its chunk."""

    def in_chunk(tokens: int) -> int:
        window = min(layer.window or tokens, tokens)
        return window * (window + 1) // 2 + (tokens - window) * window

    chunk = min(layer.chunk or length, length)
    return length // max(chunk, 1) * in_chunk(chunk) + in_chunk(length % max(chunk, 1))


def step_flops(
    config: LlamaConfig, batch: int, length: int, *, documents: Sequence[int] = (), lora: Lora | None = None
) -> float:
    """FLOPs of one training step, forward and backward, by `FORMULA`.

    Multiplying a token by a weight takes two FLOPs forward and four backward, for the gradients of both. Attention has two
    matmuls, of queries with keys and of weights with values.

    Args:
      batch, length: B rows of T target tokens.
      documents: for packed rows, the lengths of the documents that are packed. Empty counts a row as one document: for
        packed rows this includes scores between documents, which the mask discards, but makes runs with the same rows
        comparable.
      lora: the adapters that are trained. The matrices have no gradients then: 4 P instead of 6 P, and 6 for each parameter
        of the adapters. This includes gradients of what is below the first adapters, less than a layer's.
    """
    lengths = documents or [length]
    scores = sum(attention_scores(config, tokens) for tokens in lengths) / sum(lengths)
    of_matrices = 6 * matrix_parameters(config)
    if lora is not None:
        of_matrices = 4 * matrix_parameters(config) + 6 * adapter_count(config, lora)
    return batch * length * (of_matrices + 12 * config.head_dim * scores)


def flops_utilization(flops: float, seconds: float, devices: int, peak: float | None) -> float | None:
    """MFU (model FLOPs utilization): the share of the devices' peak that a step with these FLOPs and seconds reaches.

    Args:
      peak: FLOP/s of one device, see `analysis.hardware`; None (no published value, as for a CPU) returns None.
    """
    return None if peak is None else flops / seconds / (devices * peak)
