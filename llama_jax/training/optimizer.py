"""AdamW as Llamas are trained with."""

from __future__ import annotations

import jax
import optax

from llama_jax.model.params import Llama


def adamw(learning_rate: float | optax.Schedule, *, weight_decay: float = 0.1) -> optax.GradientTransformation:
    """AdamW with betas 0.9 and 0.95 (Touvron et al. 2023, section 2.3; Loshchilov & Hutter 2019, algorithm 2).

    Weight decay is for matrices, the embedding among them, and not for the weights of normalisations: a norm's weight
    that shrinks would only be made up for elsewhere.
    """
    return optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=_is_matrix)


def _is_matrix(params: Llama) -> Llama:
    """By name: the weights of stacked normalisations have two axes as well."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not path[-1].name.endswith("norm"), params)
