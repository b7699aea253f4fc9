"""Drafts from the text itself: the tokens that followed an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int32

from llama_jax.errors import GenerationError
from llama_jax.inference.decode import DecodeState, PromptLengths, PromptTokens, TokenChunk
from llama_jax.inference.drafter import Drafter, check_number


class PromptLookup(Drafter, struct.PyTreeNode):
    """Prompt lookup (Saxena 2023): needs no second model, and pays where text repeats the prompt or itself.

    The drafts continue the earlier occurrence that matches most of the row's last tokens; among equal ones, the latest.

    Attributes:
      tokens: see `Drafter`. Passes of 4 and 8 tokens suit kernels, which read a few tokens for little more than one.
      longest: largest number of last tokens that are compared.
      shortest: number of last tokens that must match; otherwise nothing is drafted.

    Raises:
      GenerationError: an invalid number.
    """

    tokens: int = struct.field(pytree_node=False, default=7)
    longest: int = struct.field(pytree_node=False, default=8)
    shortest: int = struct.field(pytree_node=False, default=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("longest", self.longest, 64)
        check_number("shortest", self.shortest, 64)
        if self.shortest > self.longest:
            raise GenerationError(f"shortest={self.shortest} of a draft exceeds longest={self.longest}")

    def count_hits(self, tokens: PromptTokens, lengths: PromptLengths) -> Callable[[TokenChunk], tuple[int, int]]:
        """See `Drafter.count_hits`."""
        rows = [Following(ids[:length].tolist(), self.shortest) for ids, length in zip(tokens, lengths, strict=True)]

        def look_back(chunk: TokenChunk) -> tuple[int, int]:
            right = 0
            for row, ids, valid in zip(rows, chunk.tokens, chunk.valid, strict=True):
                right += sum([row.append(token) for token in ids[valid].tolist()])
            return right, int(chunk.valid.sum())

        return look_back

    def propose(
        self, memory: Any, state: DecodeState, history: Int32[Array, "B S"], count: int
    ) -> tuple[Int32[Array, "B {count}"], Any]:
        """See `Drafter.propose`."""

        def of_row(row: jax.Array, last: jax.Array) -> jax.Array:
            return continued(row, last, count, self.longest, self.shortest)

        return jax.vmap(of_row)(history, state.cache.length), memory


class Following:
    """A row on the host with an index of where its last tokens occurred before: what `continued` would draft, nearly.

    A draft goes on from the occurrence that it is at while it is right; otherwise it begins at the latest one.

    Attributes:
      row: its tokens.
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
        """Take the next token; whether it would have been drafted."""
        right = self.draft is not None and self.row[self.draft] == token
        self.row.append(token)
        key = tuple(self.row[-self._shortest :])
        self.draft = self.draft + 1 if right and self.draft is not None else self._places.get(key)
        self._places[key] = len(self.row)
        return right

    def following(self, count: int) -> list[int]:
        """The next `count` tokens that would be drafted, or none."""
        if self.draft is None:
            return []
        period = len(self.row) - self.draft
        return [self.row[self.draft + i % period] for i in range(count)]


def continued(
    row: Int32[Array, " S"], last: Int32[Array, ""], count: int, longest: int, shortest: int
) -> Int32[Array, " {count}"]:
    """What followed the earlier occurrence of the tokens up to the one at index `last`; -1 where there is none."""
    slots = jnp.arange(row.shape[0], dtype=jnp.int32)
    same, run = slots < last, jnp.zeros_like(slots)
    for back in range(longest):  # compared backwards, as long as all are the same
        wanted = row[jnp.maximum(last - back, 0)]
        same &= (jnp.roll(row, back) == wanted) & (slots >= back)
        run += same
    score = jnp.max(jnp.where(run >= shortest, run * len(slots) + slots, -1))
    place = score % len(slots)
    # Beyond the last token, the draft repeats the text from the match on.
    following = place + 1 + jnp.arange(count, dtype=jnp.int32) % jnp.maximum(last - place, 1)
    return jnp.where(score >= 0, row[following], -1)
