"""The settings of each row, the sampling of its next token, and the transfer of the result to the host."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llama_jax.inference.decode import DecodeSettings, DecodeState, sample_next
from llama_jax.inference.sampling import LogitMask
from llama_jax.model.forward_options import Sharding
from llama_jax.ops import exact
from llama_jax.serving.requests import MAX_ALTERNATIVES


class RowSettings(NamedTuple):
    """The settings of each row of a batch; they rarely change and so stay on the device.

    Attributes:
      decode: sampling, limits and stop tokens.
      min_tokens: int32[R], minimum number of tokens before a stop token may be sampled.
      alternatives: int32[R], number of alternatives reported for each token.
      constrained: bool[R], whether `allowed` applies to the row.
      allowed: uint32[R, ceil(V / 32)], bit i % 32 of word i // 32 for token i.
      adapter: int32[R], index of the row's adapter, -1 for none.
    """

    decode: DecodeSettings
    min_tokens: Any
    alternatives: Any
    constrained: Any
    allowed: Any
    adapter: Any


class ChosenTokens(NamedTuple):
    """A token of each row, as transferred to the host.

    Attributes:
      token: int32[B].
      logprob: float32[B].
      valid: bool[B]; False for a row that was already done.
      ids, logprobs: [B, A], the most probable tokens and their log-probabilities; zeros if no row reports alternatives.
    """

    token: Any
    logprob: Any
    valid: Any
    ids: Any
    logprobs: Any


def choose_packed(
    settings: RowSettings, is_exact: bool, state: DecodeState, logits: jax.Array, sharding: Sharding
) -> tuple[DecodeState, jax.Array]:
    """Sample among permitted tokens: the next state, and packed `ChosenTokens`, with log-probabilities over all tokens."""
    rest, packed = _choose_without_cache(settings, is_exact, state.replace(cache=None), logits, sharding)
    return rest.replace(cache=state.cache), packed


@partial(jax.jit, static_argnums=(1, 4))  # traced once for all programs; XLA inlines it
def _choose_without_cache(
    settings: RowSettings, is_exact: bool, state: DecodeState, logits: jax.Array, sharding: Sharding
) -> tuple[DecodeState, jax.Array]:
    valid = ~state.done
    barred = state.count < settings.min_tokens

    def permitted(logits: jax.Array) -> jax.Array:
        allowed = _permitted(state, settings, barred, logits.shape[-1])
        return sharding.constrain(jnp.where(allowed, logits, -jnp.inf), "logits")

    mask = LogitMask(jnp.any(settings.constrained | barred), permitted)
    chosen, logprob = sample_next(state, logits, sharding, mask, is_exact=is_exact)
    ids, logprobs = most_probable(is_exact, logits, jnp.any(settings.alternatives > 0), exact.rows_in_use(state.done))
    choice = ChosenTokens(chosen.token, logprob, valid, ids, logprobs)
    return chosen, sharding.constrain(pack_choices(choice), "replicated")


def _permitted(state: DecodeState, settings: RowSettings, barred: jax.Array, vocab: int) -> jax.Array:
    """bool[B, V]: the tokens that each row's constraint allows, without stop tokens that would come too early."""
    bits = (settings.allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    bits = bits.reshape(len(barred), -1)[:, :vocab].astype(bool)
    allowed = jnp.pad(bits, [(0, 0), (0, vocab - bits.shape[1])]) | ~settings.constrained[:, None]
    stop = jnp.where(state.settings.stop < 0, vocab, state.settings.stop)
    stops = jax.vmap(lambda stop: jnp.zeros(vocab, bool).at[stop].set(True, mode="drop"))(stop)
    return allowed & ~(stops & barred[:, None])


def most_probable(
    is_exact: bool, logits: jax.Array, is_requested: jax.Array, rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The `MAX_ALTERNATIVES` most probable tokens of each row [B, V] and their log-probabilities.

    Zeros if not `is_requested`.

    Args:
      rows: int32[], number of rows that are needed.
    """
    count = min(MAX_ALTERNATIVES, logits.shape[-1])

    def find(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores, ids = lax.top_k(logits, count)
        return ids.astype(jnp.int32), scores - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def skip() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((len(logits), count), jnp.int32), jnp.zeros((len(logits), count), jnp.float32)

    return lax.cond(is_requested, lambda: exact.map_row_blocks(is_exact, find, rows, logits), skip)


def packed_width(vocab: int) -> int:
    """The width of packed `ChosenTokens` with this vocabulary size."""
    return 3 + 2 * min(MAX_ALTERNATIVES, vocab)


def pack_choices(choice: ChosenTokens) -> jax.Array:
    """`ChosenTokens` as one array, int32[B, 3 + 2 A], for a single transfer."""
    as_bits = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    columns = [choice.token[:, None], as_bits(choice.logprob)[:, None], choice.valid[:, None].astype(jnp.int32)]
    return jnp.concatenate([*columns, choice.ids, as_bits(choice.logprobs)], axis=1)


def unpack_choices(packed: jax.Array) -> ChosenTokens:
    """The inverse of `pack_choices`: NumPy arrays, with any leading axes; waits for the device."""
    array = np.asarray(packed)
    floats, ends = array.view(np.float32), 3 + (array.shape[-1] - 3) // 2
    return ChosenTokens(array[..., 0], floats[..., 1], array[..., 2].astype(bool), array[..., 3:ends], floats[..., ends:])
