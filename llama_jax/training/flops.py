"""How many floating-point operations a training step needs, and what share of a device's peak that makes.

The count is what the mathematics needs, not what a program does: it does not grow when the backward pass recomputes
activations, or when masked scores are computed and discarded (Chowdhery et al. 2022, appendix B, with the causal half of
attention instead of the square).
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
    """P, the number of weights that every token is multiplied with.

    The embedding is a lookup and counts only where it is the output projection as well; normalizations do not count.

    Args:
      all_experts: count all experts, as devices hold and send them, instead of only those that a token is routed to.
    """
    total = 0
    for spec in specs_for(config):
        if not spec.decays or (spec.path == "embedding" and not config.tie_embeddings):
            continue
        numbers = math.prod(spec.shape(config)) * (config.n_layers if spec.in_blocks else 1)
        some = _is_of_expert(spec) and not all_experts
        total += numbers // config.experts * config.experts_per_token if some else numbers
    return total


def _is_of_expert(spec: ParamSpec) -> bool:
    """Whether each expert has its own such matrix; a token is multiplied with only a few."""
    return spec.axes.startswith("E ") and len(spec.axes.split()) == 3


def step_flops(
    config: LlamaConfig, batch: int, length: int, *, document_length: float | None = None, frozen: bool = False
) -> float:
    """FLOPs of one training step, forward and backward, by `FORMULA`.

    A product of a token with a weight is two operations forward and four backward, for the gradients of both. Attention
    multiplies two times, queries with keys and weights with values, and a token sees half of its document on average.

    Args:
      batch, length: B rows of T predicted tokens.
      document_length: tokens of the document that a token is in, averaged over tokens (see `mean_document_length`), for
        packed rows. None counts a row as one document. That is an assumption where documents are packed: it counts
        products between documents, which the mask discards, but makes runs with the same rows comparable.
      frozen: the matrices have no gradients, as with adapters: 4 P instead of 6 P. The FLOPs of the adapters, a few
        hundredths of it, are not counted.
    """
    c = config
    seen = (length if document_length is None else document_length) / 2
    attention = 12 * c.n_layers * c.n_heads * c.head_dim * seen
    return batch * length * ((4 if frozen else 6) * matrix_parameters(config) + attention)


def mean_document_length(lengths: Iterable[int]) -> float:
    """The length of the document that a token is in, averaged over the tokens of documents of these lengths.

    It is longer than the average document: most tokens are in long documents.
    """
    counts = list(lengths)
    return sum(n * n for n in counts) / sum(counts)


def flops_utilization(flops: float, seconds: float, devices: int, peak: float | None) -> float | None:
    """MFU (model FLOPs utilization), the share of the devices' peak that a step with these FLOPs and seconds reaches.

    Args:
      peak: FLOP/s of one device, see `analysis.hardware`; None, which gives no MFU, where none is published, as for a
        CPU.
    """
    return None if peak is None else flops / seconds / (devices * peak)
