"""One pass over the last token and its drafts, and the token that the model itself chooses after each of them.

The token at every position is sampled from the model's own logits with that position's random numbers, and is accepted if
all drafts before it equal the model's choices. So for the same seed, the tokens equal those of decoding one by one, whatever
was drafted (arXiv 2408.07978). Leviathan et al. 2022 (arXiv 2211.17192) preserve only the distribution. The order of sums
depends on the number of rows, so near ties may resolve differently, as in another batch, unless passes are exact.
"""

from __future__ import annotations

from functools import partial
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
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
from llama_jax.model.params import LlamaParams


class VerifierInputs(struct.PyTreeNode):
    """The model that verifies drafts, with its compute and sharding options."""

    params: LlamaParams
    config: LlamaConfig = struct.field(pytree_node=False)
    compute: ComputeOptions = struct.field(pytree_node=False, default=ComputeOptions())
    sharding: Sharding = struct.field(pytree_node=False, default=Sharding())


class PassState(NamedTuple):
    """The state carried from pass to pass: decode state, drafter's state, and the rows' tokens (see `Drafter.propose`)."""

    state: DecodeState
    drafter_state: Any
    history: jax.Array


class PassResults(NamedTuple):
    """The results of some passes.

    Attributes:
      chunk: [B, passes * (draft_tokens + 1)]: for each pass, the tokens that it generated, followed by invalid ones.
      offered: int32[B, passes], number of drafted tokens.
      accepted: int32[B, passes], how many of them the model also chose.
    """

    chunk: TokenChunk
    offered: jax.Array
    accepted: jax.Array


def verify(
    model: VerifierInputs, state: DecodeState, drafts: Int32[Array, "B drafts"], choose: Any = None
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
    choose = choose or partial(sample_next, is_exact=model.compute.exact)
    with sharding.context():
        logits = unembed(model.config, model.params, hidden, model.compute).astype(jnp.float32)
        state, chunk = choose_each(state.replace(cache=None), logits, drafts, sharding, choose)
    length = before + jnp.sum(chunk.valid, axis=1, dtype=jnp.int32)
    return state.replace(cache=shard_cache(cache.replace(length=length), sharding)), chunk


def choose_each(
    state: DecodeState, logits: Float32[Array, "B T V"], drafts: Int32[Array, "B drafts"], sharding: Sharding, choose: Any
) -> tuple[DecodeState, TokenChunk]:
    """Sample position by position until no row has a correct draft left."""
    batch, width = drafts.shape[0], drafts.shape[1] + 1
    next_draft = jnp.concatenate([drafts, jnp.full((batch, 1), -1, drafts.dtype)], axis=1)

    def at(x: jax.Array, position: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(x, position, axis=1, keepdims=False)

    def sample_position(carry: Any) -> Any:
        position, state, active, out = carry
        frozen = state.done | ~active
        chosen, logprob = choose(state.replace(done=frozen), sharding.constrain(at(logits, position), "logits"), sharding)
        done = jnp.where(frozen, state.done, chosen.done)
        new = chosen.token, logprob, ~frozen
        out = tuple(lax.dynamic_update_index_in_dim(buffer, x, position, 1) for buffer, x in zip(out, new, strict=True))
        active &= ~done & (chosen.token == at(next_draft, position))
        return position + 1, chosen.replace(done=done), active, out

    def unfinished(carry: Any) -> jax.Array:
        return (carry[0] < width) & jnp.any(carry[2])

    _, logprob = jax.eval_shape(lambda state: choose(state, logits[:, 0], sharding), state)
    shapes = (jnp.int32, ()), (logprob.dtype, logprob.shape[1:]), (bool, ())
    out = tuple(jnp.zeros((batch, width, *rest), dtype) for dtype, rest in shapes)
    _, state, _, out = lax.while_loop(unfinished, sample_position, (jnp.int32(0), state, ~state.done, out))
    return state, TokenChunk(*out)


class PassShape(NamedTuple):
    """Static sizes of a program of passes."""

    draft_tokens: int  # per row and pass
    max_passes: int


def run_passes(
    model: VerifierInputs, drafter: Drafter, work: PassState, passes: Int32[Array, ""] | np.int32, shape: PassShape
) -> tuple[PassState, Int32[Array, ""], PassResults]:
    """Run up to `passes` passes, until all rows are done.

    Cache, drafter state and history must have room for `passes` * (draft_tokens + 1) more tokens in each row.

    Args:
      passes: at most `shape.max_passes`.

    Returns:
      The new state; the number of passes run; and their results, filled only for these passes.
    """
    batch, width = work.state.token.shape[0], shape.draft_tokens + 1
    sharding = model.sharding

    def run_pass(carry: Any) -> Any:
        (state, drafter_state, history), taken, tokens, counts = carry
        drafts, drafter_state = drafter.propose(drafter_state, state, history, shape.draft_tokens)
        live, last = ~state.done, state.cache.length
        state, chunk = verify(model, state, drafts)
        drafter_state = drafter.roll_back(drafter_state, state.cache.length)
        put = lambda row, new, last: lax.dynamic_update_slice_in_dim(row, new, last + 1, 0)
        history = sharding.constrain(jax.vmap(put)(history, chunk.tokens, last), "row")
        tokens = tuple(
            lax.dynamic_update_slice_in_dim(buffer, new, taken * width, 1) for buffer, new in zip(tokens, chunk, strict=True)
        )
        right = chunk.valid[:, :-1] & (chunk.tokens[:, :-1] == drafts)
        new = jnp.sum(live[:, None] & (drafts >= 0), axis=1), jnp.sum(right, axis=1)
        counts = tuple(
            lax.dynamic_update_index_in_dim(buffer, x.astype(jnp.int32), taken, 1)
            for buffer, x in zip(counts, new, strict=True)
        )
        return PassState(state, drafter_state, history), taken + 1, tokens, counts

    def unfinished(carry: Any) -> jax.Array:
        return (carry[1] < passes) & ~jnp.all(carry[0].state.done)

    tokens = tuple(jnp.zeros((batch, shape.max_passes * width), dtype) for dtype in (jnp.int32, jnp.float32, bool))
    counts = tuple(jnp.zeros((batch, shape.max_passes), jnp.int32) for _ in range(2))
    work, taken, tokens, counts = lax.while_loop(unfinished, run_pass, (work, jnp.int32(0), tokens, counts))
    state = work.state.replace(done=sharding.constrain(work.state.done, "replicated"))
    return work._replace(state=state), taken, PassResults(TokenChunk(*tokens), *counts)
