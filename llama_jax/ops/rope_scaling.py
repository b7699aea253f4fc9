"""Scalings of the rotary frequencies for longer contexts.

Position interpolation (Chen et al. 2023), NTK-aware, NTK-by-parts and YaRN (Peng et al. 2023), Llama 3.1's, LongRoPE
(Ding et al. 2024).
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

Plain: TypeAlias = Float64[np.ndarray, " half"]  # unscaled frequencies, radians per position
Scaling: TypeAlias = Any  # a `config.RopeScaling`; each kind reads `factor` and its own `config.ROPE_FIELDS`


def scale_linear(plain: Plain, theta: float, length: Length, scaling: Scaling) -> tuple[Plain, float]:
    """Divide every frequency by `factor`: position interpolation (Chen et al. 2023, section 3.2)."""
    return plain / scaling.factor, 1.0


def scale_ntk(plain: Plain, theta: float, length: Length, scaling: Scaling) -> tuple[Plain, float]:
    """Divide the lowest frequency by `factor` and keep the highest (Peng et al. 2023, section 3.1).

    Equivalent to replacing theta with theta * factor ** (H / (H - 2)).
    """
    return plain * scaling.factor ** -_ntk_exponents(len(plain)), 1.0


def scale_dynamic(plain: Plain, theta: float, length: Length, scaling: Scaling) -> tuple[Frequencies, float]:
    """`scale_ntk` by a factor that depends on the sequence length; no scaling within the original context.

    Peng et al. 2023, section 3.3, use length / original. This is transformers' factor * length / original - (factor - 1),
    which is the same if `factor` is 1, written so that a large `factor` does not cancel digits. Without a length there is no
    scaling.
    """
    if isinstance(length, jax.Array):
        longer_by = jnp.maximum(length.astype(jnp.float32) / scaling.original_max_seq_len, 1.0)[..., None]
        share = _ntk_exponents(len(plain)).astype(np.float32)
        return plain.astype(np.float32) * (1 + scaling.factor * (longer_by - 1)) ** -share, 1.0
    longer = np.maximum(np.asarray(0 if length is None else length) / scaling.original_max_seq_len, 1.0)[..., None]
    return plain * (1 + scaling.factor * (longer - 1)) ** -_ntk_exponents(len(plain)), 1.0


def scale_by_parts(plain: Plain, theta: float, length: Length, scaling: Scaling) -> tuple[Plain, float]:
    """Keep high frequencies and divide low ones by `factor` (NTK-by-parts: Peng et al. 2023, section 3.2).

    Pairs with at least `beta_fast` rotations within the original context are kept, and those with at most `beta_slow` are
    divided. The ramp between them is linear in the index of the pair, as in the authors' code and in transformers. In the
    paper's text it is linear in the rotations, as in `scale_llama3`.
    """
    pairs = len(plain)

    def pair_of(turns: float) -> float:
        return pairs * math.log(scaling.original_max_seq_len / (2 * math.pi * turns)) / math.log(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)  # the authors' code uses the number of features as bound, not of pairs
    if low == high:
        high += 0.001
    slowed = np.clip((np.arange(pairs) - low) / (high - low), 0.0, 1.0)
    return plain * (1 - slowed) + plain / scaling.factor * slowed, 1.0


def scale_yarn(plain: Plain, theta: float, length: Length, scaling: Scaling) -> tuple[Plain, float]:
    """`scale_by_parts`, with a lower softmax temperature for longer contexts (Peng et al. 2023, section 3.4)."""
    frequencies, _ = scale_by_parts(plain, theta, length, scaling)
    factor, mscale, mscale_all_dim = scaling.factor, scaling.mscale, scaling.mscale_all_dim
    if scaling.attention_factor is not None:
        return frequencies, scaling.attention_factor
    if mscale is None or mscale_all_dim is None:
        return frequencies, yarn_attention_factor(factor)
    return frequencies, yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """0.1 weight ln(factor) + 1, the square root of the inverse softmax temperature (Peng et al. 2023, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0


def scale_llama3(plain: Plain, theta: float, length: Length, scaling: Scaling) -> tuple[Plain, float]:
    """Scale the frequencies as Llama 3.1 does (reference code, ``apply_scaling``).

    Pairs with more than `high_freq_factor` rotations within the original context are kept, those with fewer than
    `low_freq_factor` are divided by `factor`, and those between (none if the two are equal) are interpolated linearly in the
    number of rotations.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_seq_len * plain / (2 * np.pi)
    keep = np.clip((turns - low) / max(high - low, 1e-100), 0.0, 1.0)
    return plain * (keep + (1 - keep) / scaling.factor), 1.0


def scale_longrope(plain: Plain, theta: float, length: Length, scaling: Scaling) -> tuple[Frequencies, float]:
    """Divide each frequency by its own factor, found by search: one list within the original context, one beyond it.

    Ding et al. 2024, section 3, as in transformers. Without a length, the list for the original context is used.
    """
    original, attention_factor = scaling.original_max_seq_len, scaling.attention_factor
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(scaling.factor) / math.log(original))
    short, long = plain / np.array(scaling.short_factor), plain / np.array(scaling.long_factor)
    if isinstance(length, jax.Array):
        at = (length > original)[..., None]
        return jnp.where(at, long.astype(np.float32), short.astype(np.float32)), attention_factor
    beyond = np.asarray(0 if length is None else length)[..., None] > original
    return np.where(beyond, long, short), attention_factor


def _ntk_exponents(pairs: int) -> Plain:
    """The exponent of the NTK factor for each pair: from 0 for the highest frequency to 1 for the lowest."""
    return np.arange(pairs) / (pairs - 1)


# The function for each kind of `config.RopeScaling`. From the unscaled frequencies, theta, the length and the scaling, it
# computes the scaled frequencies and a factor for cosine and sine. If the length is a JAX array, functions that depend on it
# return float32 frequencies with the axes of the lengths in front.
SCALINGS: dict[str, Callable[[Plain, float, Length, Scaling], tuple[Frequencies, float]]] = {
    "linear": scale_linear,
    "ntk": scale_ntk,
    "dynamic": scale_dynamic,
    "by_parts": scale_by_parts,
    "yarn": scale_yarn,
    "llama3": scale_llama3,
    "longrope": scale_longrope,
}
BY_LENGTH = frozenset({"dynamic", "longrope"})  # the kinds whose frequencies depend on the length


def lengths_of(
    slots: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Int[Array, " B"] | Int[Array, "B T"]:
    """Current length of each row; for packed rows, the length of each token's document.

    Args:
      slots: slots of the tokens, counted from the first token of the row.
      lengths: number of real tokens among the T, if not all are.
      positions, segment_ids: those of packed rows.
    """
    batch, new = slots.shape
    if positions is None and segment_ids is None:
        return slots[:, 0] + (jnp.full(batch, new, jnp.int32) if lengths is None else lengths)
    positions = slots if positions is None else positions
    if segment_ids is None:
        return jnp.max(positions, axis=1) + 1

    def of_row(positions: jax.Array, segments: jax.Array) -> jax.Array:
        numbers = jnp.searchsorted(jnp.sort(segments), segments)  # an index below T for each segment
        return jax.ops.segment_max(positions, numbers, num_segments=new)[numbers] + 1

    return jax.vmap(of_row)(positions, segment_ids)
