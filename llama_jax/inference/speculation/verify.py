"""One pass over the last token and the drafts after it, and the token that the model itself chooses after each.

The token at every position is sampled from the model's own logits with that position's own random numbers, and is accepted
as long as all drafts before it equal what the model chose. So for the same seed the tokens equal those of decoding one by
one, whatever was drafted (arXiv 2408.07978); Leviathan et al. 2022 (arXiv 2211.17192) keep only the distribution. Sums over
several rows are rounded in another order than over one, so a near tie may be decided differently, as in another batch,
unless passes are exact.
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
from llama_jax.inference.decode import DecodeState, TokenChunk, sample_next, shard_cache
from llama_jax.inference.drafter import Drafter
from llama_jax.model.forward import forward, unembed
from llama_jax.model.forward_options import Compute, Positions, Sharding
from llama_jax.model.params import Llama
from llama_jax.ops import exact


class Model(struct.PyTreeNode):
    """The model that verifies, and how and where it computes."""

    params: Llama
    config: LlamaConfig = struct.field(pytree_node=False)
    compute: Compute = struct.field(pytree_node=False, default=Compute())
    sharding: Sharding = struct.field(pytree_node=False, default=Sharding())


class PassState(NamedTuple):
    """What changes from pass to pass: the state, the drafter's memory, and the rows' tokens (see `Drafter.propose`)."""

    state: DecodeState
    memory: Any
    history: jax.Array


class Passes(NamedTuple):
    """The results of some passes.

    Attributes:
      chunk: [B, passes * (drafted + 1)]: for each pass the tokens that it gave, and then invalid ones.
      offered: int32[B, passes], tokens that were drafted.
      accepted: int32[B, passes], how many of them the model chose too.
    """

    chunk: TokenChunk
    offered: jax.Array
    accepted: jax.Array


def verify(
    model: Model, state: DecodeState, drafts: Int32[Array, "B drafts"], choose: Any = sample_next
) -> tuple[DecodeState, TokenChunk]:
    """Read the token of every row and its drafts, and choose after each of them.

    Args:
      drafts: T - 1 for each row; -1 for none, which is never accepted.
      choose: used instead of `decode.sample_next`; the array that it returns with the state replaces the log-probabilities.

    Returns:
      The state after the chosen tokens, whose cache holds nothing else except in slots beyond its length; and these tokens,
      [B, T], at least one for a row that is not done.
    """
    sharding = model.sharding
    tokens = jnp.concatenate([state.token[:, None], jnp.maximum(drafts, 0)], axis=1)
    before = state.cache.length
    # Each has the length that its row has when it is decoded alone.
    positions = Positions(rope_lengths=before[:, None] + 1 + jnp.arange(tokens.shape[1], dtype=jnp.int32))
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
    """Sample position by position until no row has a correct draft; the rest is not sampled."""
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
    """What a program of passes is compiled for: `drafted` tokens per row and pass, and room for `most` passes."""

    drafted: int
    most: int


def run_passes(
    model: Model, drafter: Drafter, work: PassState, passes: Int32[Array, ""] | np.int32, size: Size
) -> tuple[PassState, Int32[Array, ""], Passes]:
    """Run up to `passes` passes, until all rows are done.

    Cache, memory and history must have room for `passes` * (drafted + 1) more tokens in each row.

    Args:
      passes: at most `size.most`.

    Returns:
      What has changed; the number of passes; and their results, of which only that many passes are filled.
    """
    batch, width = work.state.token.shape[0], size.drafted + 1
    sharding = model.sharding

    def one(carry: Any) -> Any:
        (state, memory, history), taken, tokens, counts = carry
        drafts, memory = drafter.propose(memory, state, history, size.drafted)
        live, last = ~state.done, state.cache.length
        state, chunk = verify(model, state, drafts)
        memory = drafter.roll_back(memory, state.cache.length)
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
        return PassState(state, memory, history), taken + 1, tokens, counts

    def unfinished(carry: Any) -> jax.Array:
        return (carry[1] < passes) & ~jnp.all(carry[0].state.done)

    tokens = tuple(jnp.zeros((batch, size.most * width), dtype) for dtype in (jnp.int32, jnp.float32, bool))
    counts = tuple(jnp.zeros((batch, size.most), jnp.int32) for _ in range(2))
    work, taken, tokens, counts = lax.while_loop(unfinished, one, (work, jnp.int32(0), tokens, counts))
    state = work.state.replace(done=sharding.constrain(work.state.done, "replicated"))
    return work._replace(state=state), taken, Passes(TokenChunk(*tokens), *counts)
