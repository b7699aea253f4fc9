"""The floating-point operations of a training step, and their share of a device's peak (MFU).

Only operations that the mathematics needs are counted: not recomputed activations or masked scores that are discarded
(Chowdhery et al. 2022, appendix B, with the causal half of attention instead of the square).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from llama_jax.config import LlamaConfig
from llama_jax.model.params import ParamSpec, specs_for

FORMULA = (
    "FLOPs of a step = tokens * (6 * P + 12 * L * N * H * T / 2), P the matrix parameters that every token is multiplied "
    "with: all but the embedding lookup, the output projection among them; T the tokens of a row, T / 2 being attention's "
    "causal half; nothing for what is computed twice. MFU = FLOPs / seconds / (devices * published dense bfloat16 FLOP/s)"
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


def step_flops(
    config: LlamaConfig, batch: int, length: int, *, document_length: float | None = None, frozen: bool = False
) -> float:
    """FLOPs of one training step, forward and backward, by `FORMULA`.

    Multiplying a token by a weight takes two FLOPs forward and four backward, for the gradients of both. Attention has two
    matmuls, of queries with keys and of weights with values, and a token attends to half of its document on average.

    Args:
      batch, length: B rows of T target tokens.
      document_length: for packed rows, the length of a token's document, averaged over tokens (see `mean_document_length`).
        None counts a row as one document: for packed rows this includes products between documents, which the mask
        discards, but makes runs with the same rows comparable.
      frozen: the matrices have no gradients, as with adapters: 4 P instead of 6 P. The FLOPs of the adapters, a few
        percent, are not counted.
    """
    c = config
    mean_context = (length if document_length is None else document_length) / 2
    attention = 12 * c.n_layers * c.n_heads * c.head_dim * mean_context
    return batch * length * ((4 if frozen else 6) * matrix_parameters(config) + attention)


def mean_document_length(lengths: Iterable[int]) -> float:
    """The length of a token's document, averaged over the tokens of documents with these lengths.

    It exceeds the average document length, because most tokens are in long documents.
    """
    counts = list(lengths)
    return sum(n * n for n in counts) / sum(counts)


def flops_utilization(flops: float, seconds: float, devices: int, peak: float | None) -> float | None:
    """MFU (model FLOPs utilization): the share of the devices' peak that a step with these FLOPs and seconds reaches.

    Args:
      peak: FLOP/s of one device, see `analysis.hardware`; None (no published value, as for a CPU) returns None.
    """
    return None if peak is None else flops / seconds / (devices * peak)
