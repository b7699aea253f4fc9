"""Drafters, which propose the next tokens of every row, and their statistics; `inference.speculation` verifies drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int, Int32

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError
from llama_jax.inference.decode import DecodeSettings, DecodeState, PromptLengths, PromptTokens, TokenChunk
from llama_jax.model.cache import CacheOptions
from llama_jax.model.params import LlamaParams
from llama_jax.settings import Bounds, check_value

PreparedPrompts = tuple[PromptTokens, PromptLengths, DecodeSettings]  # the result of `prepare_inputs`
MAX_DRAFT_TOKENS = 15  # 16 with the token before them, which fit any cache with a window (`prefill_chunk_size`)
DraftTokens = Annotated[int, Bounds(1, MAX_DRAFT_TOKENS)]


class Drafter(ABC):
    """A way to propose tokens. The proposals do not change which tokens are generated, only the speed.

    To write your own, subclass this and `flax.struct.PyTreeNode` and define `propose`. The state between passes is a
    separate pytree, `drafter_state`, which is passed in and returned.

    Attributes:
      tokens: maximum number of tokens proposed per row and pass, 1 to 15. Fewer or none are drafted if that is faster.

    Raises:
      GenerationError: an invalid number.
    """

    tokens: int

    def __post_init__(self) -> None:
        check_value("tokens", self.tokens, DraftTokens, GenerationError)

    def check(  # noqa: B027  # most can draft for any model
        self,
        config: LlamaConfig,
        params: LlamaParams,
        lengths: PromptLengths,
        settings: DecodeSettings,
        options: CacheOptions,
    ) -> None:
        """Raise GenerationError or MeshError if it cannot draft for this model or these rows."""

    def begin(
        self, tokens: PromptTokens, lengths: PromptLengths, capacity: int, options: CacheOptions
    ) -> tuple[Drafter, Any]:
        """The drafter, prepared for prompts of these lengths, and its state of them.

        Args:
          capacity: maximum final number of tokens of a row.
        """
        return self, ()

    def count_accepted(self, tokens: PromptTokens, lengths: PromptLengths) -> Callable[[TokenChunk], tuple[int, int]] | None:
        """A function that counts how many drafts for a chunk were or would have been accepted, and their total.

        None if drafting is expensive.
        """
        return None

    def catch_up(self, drafter_state: Any, history: Int32[np.ndarray, "B S"], lengths: Int[np.ndarray, " B"]) -> Any:
        """Update the state with tokens that were generated without drafting. Called outside the compiled `propose`.

        Args:
          history: all tokens of the rows.
          lengths: how many tokens each row has.
        """
        return drafter_state

    @abstractmethod
    def propose(
        self, drafter_state: Any, state: DecodeState, history: Int32[Array, "B S"], count: int
    ) -> tuple[Int32[Array, "B {count}"], Any]:
        """Propose the next tokens of every row; traced by `jax.jit`.

        Args:
          history: the tokens of each row: those at [0, state.cache.length) are in the cache, and `state.token` is at index
            `state.cache.length`. Later entries are undefined.
          count: number of tokens to propose.

        Returns:
          The tokens (-1 for no proposal) and the new state of the drafter.
        """

    def roll_back(self, drafter_state: Any, lengths: Int32[Array, " B"]) -> Any:
        """Truncate the state to the `lengths` tokens of each row that the model has accepted; traced."""
        return drafter_state


class DraftCounts(NamedTuple):
    """Statistics of speculative decoding: numbers for one row, or int[B].

    Attributes:
      passes: passes of the model, with and without drafts, excluding the prefill and the first token.
      drafted: number of proposed tokens.
      accepted: how many of them the model also chose.
    """

    passes: Any
    drafted: Any
    accepted: Any


class DraftedChunk(TokenChunk):
    """A `TokenChunk` from speculative decoding; `valid` is False after each row's last token in the chunk.

    Attributes:
      counts: statistics, int[B].
    """

    counts: DraftCounts

    @classmethod
    def of(cls, chunk: TokenChunk, counts: DraftCounts) -> DraftedChunk:
        """Convert a chunk, removing gaps between the tokens of a row."""
        drafted = cls(*chunk)
        if not chunk.valid.all():
            order = np.argsort(~chunk.valid, axis=1, kind="stable")[:, : max(int(chunk.valid.sum(axis=1).max()), 1)]
            drafted = cls(*(np.take_along_axis(part, order, axis=1) for part in chunk))
        drafted.counts = counts
        return drafted


def with_counts(results: Sequence[Any], chunks: Sequence[TokenChunk]) -> list[Any]:
    """Add the statistics of each row to the results of speculative decoding."""
    totals = [np.sum(each, axis=0) for each in zip(*(counts_of(chunk) for chunk in chunks), strict=True)]
    return [
        replace(result, counts=DraftCounts(*(int(total[row]) for total in totals))) for row, result in enumerate(results)
    ]


def counts_of(chunk: TokenChunk) -> DraftCounts:
    """The counts of a chunk; zeros if nothing was drafted."""
    if isinstance(chunk, DraftedChunk):
        return chunk.counts
    return DraftCounts(*np.zeros((3, len(chunk.valid)), np.int64))
