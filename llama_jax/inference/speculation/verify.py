"""One pass over the last token and its drafts, and the token that the model itself chooses after each of them.

The token at every position is sampled from the model's own logits with that position's random numbers, and is accepted if
all drafts before it equal the model's choices. So for the same seed, the tokens equal those of decoding one by one, whatever
was drafted (arXiv 2408.07978). Leviathan et al. 2022 (arXiv 2211.17192) preserve only the distribution. The order of sums
depends on the number of rows, so near ties may resolve differently, as in another batch, unless passes are exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float32, Int32

from llama_jax.config import LlamaConfig
from llama_jax.inference.decode import DecodeState, TokenChunk, decode_rope_lengths, sample_next, shard_cache
from llama_jax.inference.drafter import Drafter
from llama_jax.model.forward import forward, unembed
from llama_jax.model.forward_options import Compute, Positions, Sharding
from llama_jax.model.params import Llama
from llama_jax.ops import exact


class Model(struct.PyTreeNode):
    """The model that verifies drafts, with its compute and sharding options."""

    params: Llama
    config: LlamaConfig = struct.field(pytree_node=False)
    compute: Compute = struct.field(pytree_node=False, default=Compute())
    sharding: Sharding = struct.field(pytree_node=False, default=Sharding())


class PassState(NamedTuple):
    """The state carried from pass to pass: decode state, drafter's state, and the rows' tokens (see `Drafter.propose`)."""

    state: DecodeState
    drafter_state: Any
    history: jax.Array


class Passes(NamedTuple):
    """The results of some passes.

    Attributes:
      chunk: [B, passes * (drafted + 1)]: for each pass, the tokens that it generated, followed by invalid ones.
      offered: int32[B, passes], number of drafted tokens.
      accepted: int32[B, passes], how many of them the model also chose.
    """

    chunk: TokenChunk
    offered: jax.Array
    accepted: jax.Array


def verify(
    model: Model, state: DecodeState, drafts: Int32[Array, "B drafts"], choose: Any = sample_next
) -> tuple[DecodeState, TokenChunk]:
    """Run the model on the last token of every row and its drafts, and choose a token after each of them.

    Args:
      drafts: T - 1 for each row; -1, which is never accepted, for no draft.
      choose: used instead of `decode.sample_next`; the array that it returns with the state replaces the log-probabilities.

    Returns:
      The state after the chosen tokens (cache slots beyond its length are undefined), and these tokens, [B, T], at least one
      for a row that is not done.
    """
    sharding = model.sharding
    tokens = jnp.concatenate([state.token[:, None], jnp.maximum(drafts, 0)], axis=1)
    before = state.cache.length
    rope_lengths = decode_rope_lengths(model.config, state)
    if rope_lengths is None:  # the length of the row when the token is decoded one by one
        rope_lengths = before[:, None] + 1 + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = Positions(rope_lengths=rope_lengths)
    options: dict[str, Any] = {"positions": positions, "compute": model.compute, "sharding": sharding}
    hidden, cache = forward(model.config, model.params, tokens, state.cache, **options)
    with sharding.context(), exact.exact_mode(model.compute.exact):
        logits = unembed(model.config, model.params, hidden).astype(jnp.float32)
        state, chunk = choose_each(state.replace(cache=None), logits, drafts, sharding, choose)
    length = before + jnp.sum(chunk.valid, axis=1, dtype=jnp.int32)
    return state.replace(cache=shard_cache(cache.replace(length=length), sharding)), chunk


def choose_each(
    state: DecodeState, logits: Float32[Array, "B T V"], drafts: Int32[Array, "B drafts"], sharding: Sharding, choose: Any
) -> tuple[DecodeState, TokenChunk]:
    """Sample position by position until no row has a correct draft left."""
    batch, width = drafts.shape[0], drafts.shape[1] + 1
    wanted = jnp.concatenate([drafts, jnp.full((batch, 1), -1, drafts.dtype)], axis=1)

    def at(x: jax.Array, position: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(x, position, axis=1, keepdims=False)

    def one(carry: Any) -> Any:
        position, state, going, out = carry
        stands = state.done | ~going
        chosen, said = choose(state.replace(done=stands), sharding.constrain(at(logits, position), "logits"), sharding)
        done = jnp.where(stands, state.done, chosen.done)
        new = chosen.token, said, ~stands
        out = tuple(lax.dynamic_update_index_in_dim(whole, x, position, 1) for whole, x in zip(out, new, strict=True))
        going &= ~done & (chosen.token == at(wanted, position))
        return position + 1, chosen.replace(done=done), going, out

    def unfinished(carry: Any) -> jax.Array:
        return (carry[0] < width) & jnp.any(carry[2])

    _, said = jax.eval_shape(lambda state: choose(state, logits[:, 0], sharding), state)
    kinds = (jnp.int32, ()), (said.dtype, said.shape[1:]), (bool, ())
    out = tuple(jnp.zeros((batch, width, *rest), dtype) for dtype, rest in kinds)
    _, state, _, out = lax.while_loop(unfinished, one, (jnp.int32(0), state, ~state.done, out))
    return state, TokenChunk(*out)


class Size(NamedTuple):
    """Static sizes of a program of passes: `drafted` tokens per row and pass, and a maximum of `most` passes."""

    drafted: int
    most: int


def run_passes(
    model: Model, drafter: Drafter, work: PassState, passes: Int32[Array, ""] | np.int32, size: Size
) -> tuple[PassState, Int32[Array, ""], Passes]:
    """Run up to `passes` passes, until all rows are done.

    Cache, drafter state and history must have room for `passes` * (drafted + 1) more tokens in each row.

    Args:
      passes: at most `size.most`.

    Returns:
      The new state; the number of passes run; and their results, filled only for these passes.
    """
    batch, width = work.state.token.shape[0], size.drafted + 1
    sharding = model.sharding

    def one(carry: Any) -> Any:
        (state, drafter_state, history), taken, tokens, counts = carry
        drafts, drafter_state = drafter.propose(drafter_state, state, history, size.drafted)
        live, last = ~state.done, state.cache.length
        state, chunk = verify(model, state, drafts)
        drafter_state = drafter.roll_back(drafter_state, state.cache.length)
        put = lambda row, new, last: lax.dynamic_update_slice_in_dim(row, new, last + 1, 0)
        history = sharding.constrain(jax.vmap(put)(history, chunk.tokens, last), "row")
        tokens = tuple(
            lax.dynamic_update_slice_in_dim(whole, new, taken * width, 1) for whole, new in zip(tokens, chunk, strict=True)
        )
        right = chunk.valid[:, :-1] & (chunk.tokens[:, :-1] == drafts)
        new = jnp.sum(live[:, None] & (drafts >= 0), axis=1), jnp.sum(right, axis=1)
        counts = tuple(
            lax.dynamic_update_index_in_dim(whole, x.astype(jnp.int32), taken, 1)
            for whole, x in zip(counts, new, strict=True)
        )
        return PassState(state, drafter_state, history), taken + 1, tokens, counts

    def unfinished(carry: Any) -> jax.Array:
        return (carry[1] < passes) & ~jnp.all(carry[0].state.done)

    tokens = tuple(jnp.zeros((batch, size.most * width), dtype) for dtype in (jnp.int32, jnp.float32, bool))
    counts = tuple(jnp.zeros((batch, size.most), jnp.int32) for _ in range(2))
    work, taken, tokens, counts = lax.while_loop(unfinished, one, (work, jnp.int32(0), tokens, counts))
    state = work.state.replace(done=sharding.constrain(work.state.done, "replicated"))
    return work._replace(state=state), taken, Passes(TokenChunk(*tokens), *counts)
