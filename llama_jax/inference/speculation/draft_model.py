"""Drafts from a smaller model with the same vocabulary."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, Int32

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError, MeshError
from llama_jax.inference.compiled_decode import CompiledDecode, decoding_compute
from llama_jax.inference.decode import DecodeSettings, DecodeState, PromptLengths, PromptTokens, shard_cache
from llama_jax.inference.drafter import MAX_DRAFT_TOKENS, Drafter
from llama_jax.inference.sampling import sample
from llama_jax.inference.sharding import check_row_shards, sharding_of
from llama_jax.model.cache import CacheOptions, KVCache
from llama_jax.model.checks import check_params
from llama_jax.model.forward import forward, unembed
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
from llama_jax.model.params import LlamaParams

CATCH_UP_TOKENS = 64  # tokens per program call when the draft model catches up with tokens generated without it


class DraftModel(Drafter, struct.PyTreeNode):
    """A smaller model with the same vocabulary (Leviathan et al. 2022), which samples with the main model's random numbers.

    Both use the random stream of the row's seed, so that they agree if their probabilities do, sampled or greedy. The draft
    model's cache has the same options as the main model's (int8, window).

    Attributes:
      config, params: the draft model, from `load`; for a model on a mesh, loaded over the same mesh.
      tokens: see `Drafter`.
      sharding, compute: how the parameters are sharded, and the draft model is computed; set by `begin`.
    """

    config: LlamaConfig = struct.field(pytree_node=False)
    params: LlamaParams
    tokens: int = struct.field(pytree_node=False, default=3)
    sharding: Sharding = struct.field(pytree_node=False, default=Sharding())
    compute: ComputeOptions = struct.field(pytree_node=False, default=ComputeOptions())

    def check(
        self,
        config: LlamaConfig,
        params: LlamaParams,
        lengths: PromptLengths,
        settings: DecodeSettings,
        options: CacheOptions,
    ) -> None:
        """See `Drafter.check`; raises ConfigError if the parameters do not match the draft model's configuration."""
        self.check_model(config, params, len(lengths))
        longest = int((lengths + settings.limit).max()) if options.window is None else options.window + options.sinks
        if longest > self.config.max_seq_len:
            raise GenerationError(
                f"the draft's context is {self.config.max_seq_len} tokens, and {longest} are needed; generate less, or use a"
                " sliding window for both models (--window, CacheOptions(window=...))"
            )

    def check_model(self, config: LlamaConfig, params: LlamaParams, rows: int) -> None:
        """`check`, except for the length of the rows."""
        if self.config.vocab_size != config.vocab_size:
            raise GenerationError(
                f"the draft has a vocabulary of {self.config.vocab_size}, the model one of {config.vocab_size}; pass a draft"
                " with the model's tokenizer"
            )
        check_params(self.config, self.params)
        if _devices(self.params) != _devices(params):
            raise MeshError("the draft model is on other devices than the model; load both with the same mesh")
        check_row_shards(sharding_of(self.params), rows)

    def begin(
        self, tokens: PromptTokens, lengths: PromptLengths, capacity: int, options: CacheOptions
    ) -> tuple[DraftModel, KVCache]:
        """See `Drafter.begin`; the state is the draft model's cache."""
        sharding = sharding_of(self.params)
        compute = decoding_compute(self.params, ComputeOptions(), sharding.mesh)
        placed = self.replace(sharding=sharding, compute=compute)
        return placed, placed._programs().prefill_prompts(tokens, lengths, 0, capacity, options).cache

    def catch_up(self, drafter_state: KVCache, history: Int32[np.ndarray, "B S"], lengths: Int[np.ndarray, " B"]) -> KVCache:
        """See `Drafter.catch_up`: process the missing tokens, if there are more than `propose` processes."""
        width = CATCH_UP_TOKENS if drafter_state.window is None else 1 + MAX_DRAFT_TOKENS
        read = np.asarray(drafter_state.length)
        ends = np.maximum(lengths - 1, read)
        if (ends - read).max() == 1:
            return drafter_state
        while (ends > read).any():
            new = np.minimum(ends - read, width)
            columns = np.minimum(read[:, None] + np.arange(width), history.shape[1] - 1)
            part = np.take_along_axis(history, columns, axis=1)
            drafter_state = _read_more(self, drafter_state, part, *(x.astype(np.int32) for x in (read, new, lengths)))
            read = read + new
        return drafter_state

    def propose(
        self, drafter_state: KVCache, state: DecodeState, history: Int32[Array, "B S"], count: int
    ) -> tuple[Int32[Array, "B {count}"], KVCache]:
        """See `Drafter.propose`."""
        last = state.cache.length
        last_tokens = jax.vmap(lambda row, last: lax.dynamic_slice_in_dim(row, last - 1, 2))(history, last)
        return self.propose_after(drafter_state, state, last_tokens, count)

    def propose_after(
        self, drafter_state: KVCache, state: DecodeState, last_tokens: Int32[Array, "B 2"], count: int
    ) -> tuple[Int32[Array, "B {count}"], KVCache]:
        """`propose`, given the last two tokens of each row; the main model has processed the first of them.

        After a pass in which all drafts were accepted, the draft model has not processed the last draft. So all rows process
        their last two tokens; if the first is already in the cache, its slot is rewritten with the same content.
        """
        settings, vocab = state.settings, min(state.seen.shape[-1], self._rows())
        last = state.cache.length

        def draw(cache: KVCache, tokens: jax.Array, seen: jax.Array, step: jax.Array) -> Any:
            ends = cache.length[:, None] + 1 + jnp.arange(tokens.shape[1])
            positions = Positions(rope_lengths=ends)
            hidden, cache = forward(
                self.config, self.params, tokens, cache, positions=positions, compute=self.compute, sharding=self.sharding
            )
            with self.sharding.context():
                logits = unembed(self.config, self.params, hidden[:, -1], self.compute).astype(jnp.float32)[:, :vocab]
                token = sample(logits, settings.sampling, seen, step)
            seen = jax.vmap(lambda seen, token: seen.at[token].set(True))(seen, token)
            return shard_cache(cache, self.sharding), seen, token

        cache, seen, first = draw(drafter_state.replace(length=last - 1), last_tokens, state.seen[:, :vocab], state.count)

        def next_one(carry: Any, i: jax.Array) -> tuple[Any, jax.Array]:
            cache, seen, token = carry
            cache, seen, token = draw(cache, token[:, None], seen, state.count + i)
            return (cache, seen, token), token

        steps = jnp.arange(1, count, dtype=jnp.int32)
        (cache, _, _), rest = lax.scan(next_one, (cache, seen, first), steps)
        return jnp.concatenate([first[:, None], rest.T], axis=1), cache

    def roll_back(self, drafter_state: KVCache, lengths: Int32[Array, " B"]) -> KVCache:
        """See `Drafter.roll_back`."""
        return drafter_state.replace(length=jnp.minimum(drafter_state.length, lengths))

    def _programs(self) -> CompiledDecode:
        return CompiledDecode(self.config, self.params, self.compute, self.sharding)

    def _rows(self) -> int:
        head = self.params.embedding if self.params.lm_head is None else self.params.lm_head
        return head.shape[0]


def read_more(
    draft: DraftModel,
    cache: KVCache,
    tokens: Int32[Array, "B T"],
    starts: Int32[Array, " B"],
    lengths: Int32[Array, " B"],
    final_lengths: Int32[Array, " B"],
) -> KVCache:
    """Add `lengths` tokens of each row, starting at position `starts`, to the cache.

    Args:
      final_lengths: final number of tokens of each row.
    """
    positions = Positions(lengths, rope_lengths=final_lengths)
    cache = cache.replace(length=starts)
    options: dict[str, Any] = {"positions": positions, "compute": draft.compute, "sharding": draft.sharding}
    _, cache = forward(draft.config, draft.params, tokens, cache, **options)
    return shard_cache(cache, draft.sharding)


_read_more = jax.jit(read_more, donate_argnums=1)


def _devices(params: LlamaParams) -> Any:
    """The mesh of the parameters, or None on a single device."""
    sharding = getattr(params.embedding, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None
