"""Drafts from the text itself: the tokens that followed an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from llama_jax.errors import GenerationError
from llama_jax.inference.drafting import Drafter, check_number
from llama_jax.inference.state import Piece, State

LOOKED_BACK = 4096  # tokens of a row that `hindsight` looks at
HASH = np.uint64(0x9E3779B97F4A7C15)  # an odd number whose bits look random


class PromptLookup(Drafter, struct.PyTreeNode):
    """Prompt lookup (Saxena 2023): needs no second model, and pays where text repeats the prompt or itself.

    The drafts continue the earlier occurrence that matches most of the row's last tokens; among equal ones, the latest.

    Attributes:
      tokens: see `Drafter`.
      longest: largest number of last tokens that are compared.
      shortest: number of last tokens that must match; otherwise nothing is drafted.

    Raises:
      GenerationError: numbers that cannot be.
    """

    tokens: int = struct.field(pytree_node=False, default=8)
    longest: int = struct.field(pytree_node=False, default=8)
    shortest: int = struct.field(pytree_node=False, default=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("longest", self.longest, 64)
        check_number("shortest", self.shortest, 64)
        if self.shortest > self.longest:
            raise GenerationError(f"shortest={self.shortest} of a draft exceeds longest={self.longest}")

    def hindsight(self, tokens: np.ndarray, lengths: np.ndarray) -> Callable[[Piece], tuple[int, int]]:
        """See `Drafter.hindsight`: by the latest earlier occurrence of the last `shortest` tokens."""
        rows = [ids[:length] for ids, length in zip(tokens, lengths, strict=True)]

        def look_back(piece: Piece) -> tuple[int, int]:
            right = 0
            for number, (ids, valid) in enumerate(zip(piece.tokens, piece.valid, strict=True)):
                new = ids[valid]
                rows[number] = np.concatenate([rows[number][-LOOKED_BACK:], new])
                right += int(foreseen(rows[number], self.shortest)[-len(new) or len(rows[number]) :].sum())
            return right, int(piece.valid.sum())

        return look_back

    def propose(self, memory: Any, state: State, history: jax.Array, count: int) -> tuple[jax.Array, Any]:
        """See `Drafter.propose`."""

        def of_row(row: jax.Array, last: jax.Array) -> jax.Array:
            return continued(row, last, count, self.longest, self.shortest)

        return jax.vmap(of_row)(history, state.cache.length), memory


def foreseen(row: np.ndarray, shortest: int) -> np.ndarray:
    """Whether each token also followed the latest earlier occurrence of the `shortest` tokens before it: bool[S]."""
    starts = max(len(row) - shortest, 0)
    found, key = np.zeros(len(row), bool), np.zeros(starts, np.uint64)
    for offset in range(shortest):
        key = key * HASH + row[offset : offset + starts].astype(np.uint64)  # modulo 2^64
    order = np.argsort(key, kind="stable")
    same = key[order[1:]] == key[order[:-1]]
    now, before = order[1:][same] + shortest, order[:-1][same] + shortest
    found[now] = row[now] == row[before]
    return found


def continued(row: jax.Array, last: jax.Array, count: int, longest: int, shortest: int) -> jax.Array:
    """What followed the earlier occurrence of the tokens up to `last`: int32[count], -1 where there is none.

    Args:
      row: int32[S].
      last: int32[], the index of the last token.
    """
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
