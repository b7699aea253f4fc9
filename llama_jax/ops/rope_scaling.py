"""Scalings of the rotary frequencies for longer contexts.

Position interpolation (Chen et al. 2023), dynamic NTK and YaRN (Peng et al. 2023), Llama 3.1's, LongRoPE (Ding et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float64, Int

from llama_jax.ops.rotary import Frequencies, Length

InvFreq: TypeAlias = Float64[np.ndarray, " half"]  # unscaled frequencies, radians per position
Scaling: TypeAlias = Any  # a `config.RopeScaling`; each kind reads `factor` and its own `config.ROPE_FIELDS`


def scale_linear(inv_freq: InvFreq, theta: float, length: Length, scaling: Scaling) -> tuple[InvFreq, float]:
    """Divide every frequency by `factor`: position interpolation (Chen et al. 2023, section 3.2)."""
    return inv_freq / scaling.factor, 1.0


def scale_dynamic(inv_freq: InvFreq, theta: float, length: Length, scaling: Scaling) -> tuple[Frequencies, float]:
    """Divide the lowest frequency by a number that grows with the sequence length, and keep the highest ("dynamic NTK").

    It is equivalent to replacing theta with theta * number ** (H / (H - 2)). Peng et al. 2023, section 3.3, use the number
    length / original. This is transformers' factor * length / original - (factor - 1), which is the same if `factor` is 1,
    written so that a large `factor` does not cancel digits. There is no scaling within the original context, or without a
    length.
    """
    if isinstance(length, jax.Array):
        ratio = jnp.maximum(length.astype(jnp.float32) / scaling.original_max_seq_len, 1.0)[..., None]
        exponents = _ntk_exponents(len(inv_freq)).astype(np.float32)
        return inv_freq.astype(np.float32) * (1 + scaling.factor * (ratio - 1)) ** -exponents, 1.0
    ratio = np.maximum(np.asarray(0 if length is None else length) / scaling.original_max_seq_len, 1.0)[..., None]
    return inv_freq * (1 + scaling.factor * (ratio - 1)) ** -_ntk_exponents(len(inv_freq)), 1.0


def scale_yarn(inv_freq: InvFreq, theta: float, length: Length, scaling: Scaling) -> tuple[InvFreq, float]:
    """Keep high frequencies, divide low ones by `factor`, and lower the softmax temperature (Peng et al. 2023, section 3.4).

    Pairs with at least `beta_fast` rotations within the original context are kept, and those with at most `beta_slow` are
    divided. The ramp between them is linear in the index of the pair, as in the authors' code and in transformers. In the
    paper's text it is linear in the rotations, as in `scale_llama3`.
    """
    pairs = len(inv_freq)

    def pair_of(rotations: float) -> float:
        return pairs * math.log(scaling.original_max_seq_len / (2 * math.pi * rotations)) / math.log(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)  # the authors' code uses the number of features as bound, not of pairs
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(pairs) - low) / (high - low), 0.0, 1.0)
    frequencies = inv_freq * (1 - ramp) + inv_freq / scaling.factor * ramp
    factor, mscale, mscale_all_dim = scaling.factor, scaling.mscale, scaling.mscale_all_dim
    if scaling.attention_factor is not None:
        return frequencies, scaling.attention_factor
    if mscale is None or mscale_all_dim is None:
        return frequencies, yarn_attention_factor(factor)
    return frequencies, yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """0.1 weight ln(factor) + 1, the square root of the inverse softmax temperature (Peng et al. 2023, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0


def scale_llama3(inv_freq: InvFreq, theta: float, length: Length, scaling: Scaling) -> tuple[InvFreq, float]:
    """Scale the frequencies as Llama 3.1 does (reference code, ``apply_scaling``).

    Pairs with more than `high_freq_factor` rotations within the original context are kept, those with fewer than
    `low_freq_factor` are divided by `factor`, and those between (none if the two are equal) are interpolated linearly in the
    number of rotations.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    rotations = scaling.original_max_seq_len * inv_freq / (2 * np.pi)
    keep = np.clip((rotations - low) / max(high - low, 1e-100), 0.0, 1.0)
    return inv_freq * (keep + (1 - keep) / scaling.factor), 1.0


def scale_longrope(inv_freq: InvFreq, theta: float, length: Length, scaling: Scaling) -> tuple[Frequencies, float]:
    """Divide each frequency by its own factor, found by search: one list within the original context, one beyond it.

    Ding et al. 2024, section 3, as in transformers. Without a length, the list for the original context is used.
    """
    original, attention_factor = scaling.original_max_seq_len, scaling.attention_factor
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(scaling.factor) / math.log(original))
    short, long = inv_freq / np.array(scaling.short_factor), inv_freq / np.array(scaling.long_factor)
    if isinstance(length, jax.Array):
        is_long = (length > original)[..., None]
        return jnp.where(is_long, long.astype(np.float32), short.astype(np.float32)), attention_factor
    is_long = np.asarray(0 if length is None else length)[..., None] > original
    return np.where(is_long, long, short), attention_factor


def _ntk_exponents(pairs: int) -> Float64[np.ndarray, " half"]:
    """The exponent of the NTK factor for each pair: from 0 for the highest frequency to 1 for the lowest."""
    return np.arange(pairs) / (pairs - 1)


# The function for each kind of `config.RopeScaling`. From the unscaled frequencies, theta, the length and the scaling, it
# computes the scaled frequencies and the attention factor, which multiplies cosines and sines. If the length is a JAX array,
# functions that depend on it return float32 frequencies [*axes of the length, H/2].
SCALINGS: dict[str, Callable[[InvFreq, float, Length, Scaling], tuple[Frequencies, float]]] = {
    "linear": scale_linear,
    "dynamic": scale_dynamic,
    "yarn": scale_yarn,
    "llama3": scale_llama3,
    "longrope": scale_longrope,
}
LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})  # the kinds whose frequencies depend on the length


def lengths_of(
    cache_positions: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Int[Array, " B"] | Int[Array, "B T"]:
    """Current length of each row; for packed rows, the length of each token's document.

    Args:
      cache_positions: the index of each token in its row, counting the tokens in the cache.
      lengths: how many of the T tokens are not padding; None: all.
      positions, segment_ids: those of packed rows.
    """
    batch, new = cache_positions.shape
    if positions is None and segment_ids is None:
        return cache_positions[:, 0] + (jnp.full(batch, new, jnp.int32) if lengths is None else lengths)
    positions = cache_positions if positions is None else positions
    if segment_ids is None:
        return jnp.max(positions, axis=1) + 1

    def of_row(positions: jax.Array, segments: jax.Array) -> jax.Array:
        segment_index = jnp.searchsorted(jnp.sort(segments), segments)  # int[T], below T
        return jax.ops.segment_max(positions, segment_index, num_segments=new)[segment_index] + 1

    return jax.vmap(of_row)(positions, segment_ids)
