"""Drafts from the text itself: the tokens after an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int32

from llama_jax.errors import GenerationError
from llama_jax.inference.decode import DecodeState, PromptLengths, PromptTokens, TokenChunk
from llama_jax.inference.drafter import Drafter
from llama_jax.settings import Bounds, check_value

MatchLength = Annotated[int, Bounds(1, 64)]


class PromptLookup(Drafter, struct.PyTreeNode):
    """Prompt lookup (Saxena 2023): needs no second model, and helps if text repeats the prompt or itself.

    Drafts continue the earlier occurrence that matches the most of the row's last tokens; of equal ones, the latest.

    Attributes:
      tokens: see `Drafter`. Passes of 4 and 8 tokens suit the kernels, for which a few tokens cost little more than one.
      longest: maximum number of last tokens to compare.
      shortest: minimum number of last tokens that must match; otherwise nothing is drafted.

    Raises:
      GenerationError: an invalid number.
    """

    tokens: int = struct.field(pytree_node=False, default=7)
    longest: int = struct.field(pytree_node=False, default=8)
    shortest: int = struct.field(pytree_node=False, default=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("longest", self.longest), ("shortest", self.shortest)):
            check_value(name, value, MatchLength, GenerationError)
        if self.shortest > self.longest:
            raise GenerationError(f"shortest={self.shortest} of a draft exceeds longest={self.longest}")

    def count_accepted(self, tokens: PromptTokens, lengths: PromptLengths) -> Callable[[TokenChunk], tuple[int, int]]:
        """See `Drafter.count_accepted`."""
        rows = [HostLookup(ids[:length].tolist(), self.shortest) for ids, length in zip(tokens, lengths, strict=True)]

        def look_back(chunk: TokenChunk) -> tuple[int, int]:
            right = 0
            for row, ids, valid in zip(rows, chunk.tokens, chunk.valid, strict=True):
                right += sum([row.append(token) for token in ids[valid].tolist()])
            return right, int(chunk.valid.sum())

        return look_back

    def propose(
        self, drafter_state: Any, state: DecodeState, history: Int32[Array, "B S"], count: int
    ) -> tuple[Int32[Array, "B {count}"], Any]:
        """See `Drafter.propose`."""

        def of_row(row: jax.Array, last: jax.Array) -> jax.Array:
            return continued(row, last, count, self.longest, self.shortest)

        return jax.vmap(of_row)(history, state.cache.length), drafter_state


class HostLookup:
    """A row on the host with an index of earlier occurrences of its last tokens, which approximates `continued`.

    A draft continues its occurrence as long as it is right; otherwise it starts at the latest occurrence.

    Attributes:
      row: the tokens.
      draft: index of the token that would be drafted next, or None.
    """

    def __init__(self, prompt: Sequence[int], shortest: int) -> None:
        self.row: list[int] = []
        self.draft: int | None = None
        self._shortest = shortest
        self._places: dict[tuple[int, ...], int] = {}
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> bool:
        """Append the next token; returns whether it would have been drafted."""
        right = self.draft is not None and self.row[self.draft] == token
        self.row.append(token)
        key = tuple(self.row[-self._shortest :])
        self.draft = self.draft + 1 if right and self.draft is not None else self._places.get(key)
        self._places[key] = len(self.row)
        return right

    def following(self, count: int) -> list[int]:
        """The next `count` tokens that would be drafted; empty if there are none."""
        if self.draft is None:
            return []
        period = len(self.row) - self.draft
        return [self.row[self.draft + i % period] for i in range(count)]


def continued(
    row: Int32[Array, " S"], last: Int32[Array, ""], count: int, longest: int, shortest: int
) -> Int32[Array, " {count}"]:
    """The tokens after the best earlier match of the tokens up to index `last`; -1 without a match."""
    slots = jnp.arange(row.shape[0], dtype=jnp.int32)
    same, run = slots < last, jnp.zeros_like(slots)
    for back in range(longest):  # compare backwards, as long as all are equal
        token = row[jnp.maximum(last - back, 0)]
        same &= (jnp.roll(row, back) == token) & (slots >= back)
        run += same
    score = jnp.max(jnp.where(run >= shortest, run * len(slots) + slots, -1))
    slot = score % len(slots)
    # Beyond the last token, the draft repeats the text after the match.
    following = slot + 1 + jnp.arange(count, dtype=jnp.int32) % jnp.maximum(last - slot, 1)
    return jnp.where(score >= 0, row[following], -1)
