"""Speculative decoding in the engine: which iterations have drafts, by the rule of `generate` for each shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from llama_jax.inference.speculation import Drafter, DraftModel, PromptLookup
from llama_jax.inference.speculation.draft_length import DraftLength, next_draft_length, record_passes
from llama_jax.inference.speculation.prompt_lookup import HostLookup

CATCHING_UP = -1  # in place of a number of drafts: an iteration in which the draft model only prefilled missing tokens

Shape = tuple[int, int]  # rows and tokens
StepProfile = tuple[Any, int]  # what determines the time of an iteration: its shape and the number of drafts per row


class Drafting(ABC):
    """The drafts of an engine and their statistics.

    Attributes:
      tokens: number of drafts per row in an iteration with drafts.
      offered, accepted: total number of draft tokens that were proposed, and accepted.

    Args:
      prior: see `DraftLength`.
    """

    def __init__(self, tokens: int, prior: float) -> None:
        self.tokens = tokens
        self.offered = self.accepted = 0
        self._start = DraftLength.start((tokens,), prior)
        self._draft_lengths: dict[Shape, DraftLength] = {}
        self._tokens_per_row, self._right, self._examined = 1.0, 0, 0  # since the last `logits_and_activations`

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> Any:
        """The drafting state of a new row with this prompt."""

    @abstractmethod
    def learn(self, row: Any, token: int) -> None:
        """Add the next token of a row to its state, whether or not it was drafted."""

    @abstractmethod
    def can_draft(self, row: Any) -> bool:
        """Whether there are drafts for a row with this state."""

    @abstractmethod
    def propose(self, rows: Sequence[Any], number: int) -> np.ndarray:
        """The device input for this number of drafts, int32[B, any]; -1 for a row without drafts."""

    def choose(self, shape: Shape, rows: Sequence[Any]) -> int:
        """The number of drafts of the next iteration, `tokens` or 0.

        Args:
          rows: state of each running row, from `begin`; None for a row without drafts.
        """
        if not any(row is not None and self.can_draft(row) for row in rows):
            return 0
        return next_draft_length(self._draft_lengths.get(shape, self._start))

    def settle(self, number: int, counts: Sequence[int]) -> None:
        """Record the number of tokens of each running row in an iteration with `number` drafts."""
        self.accepted += sum(max(count - 1, 0) for count in counts)
        self._tokens_per_row = sum(counts) / len(counts)

    def observe(self, profile: StepProfile, seconds: float | None) -> None:
        """Record an iteration and its time; None if it includes other work."""
        shape, number = profile
        if number == CATCHING_UP:  # costs as much as drafts that are all wrong
            number, seconds = self.tokens, None
        state = self._draft_lengths.get(shape, self._start)
        self._draft_lengths[shape] = record_passes(
            state, number, 1, self._tokens_per_row, self._right, self._examined, seconds
        )
        self._tokens_per_row, self._right, self._examined = 1.0, 0, 0


def drafting_by(draft: Drafter | None) -> Drafting | None:
    """The `Drafting` for the drafter in an engine's options, or None."""
    if isinstance(draft, DraftModel):
        return ModelDrafting(draft)
    return LookupDrafting(draft) if isinstance(draft, PromptLookup) else None


class LookupDrafting(Drafting):
    """Prompt lookup, which also counts how many drafts would have been right in iterations without drafts."""

    def __init__(self, lookup: PromptLookup) -> None:
        super().__init__(lookup.tokens, prior=0.0)
        self._shortest = lookup.shortest

    def begin(self, prompt: Sequence[int]) -> HostLookup:
        return HostLookup(prompt, self._shortest)

    def learn(self, row: HostLookup, token: int) -> None:
        self._right += row.append(token)
        self._examined += 1

    def can_draft(self, row: HostLookup) -> bool:
        return row.draft is not None

    def propose(self, rows: Sequence[HostLookup | None], number: int) -> np.ndarray:
        """The drafts, int32[B, number]."""
        drafts = np.full((len(rows), number), -1, np.int32)
        for i, row in enumerate(rows):
            if row is not None:
                following = row.following(number)
                drafts[i, : len(following)] = following
                self.offered += len(following)
        return drafts


class ModelDrafting(Drafting):
    """Drafts from a smaller model."""

    def __init__(self, draft: DraftModel) -> None:
        super().__init__(draft.tokens, prior=1.0)

    def begin(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of the row, as a list."""
        return list(prompt)

    def learn(self, row: list[int], token: int) -> None:
        row.append(token)

    def can_draft(self, row: list[int]) -> bool:
        return True

    def propose(self, rows: Sequence[list[int] | None], number: int) -> np.ndarray:
        """The last two tokens of each row, from which the draft model continues: int32[B, 2]."""
        self.offered += number * sum(row is not None for row in rows)
        return np.array([(-1, -1) if row is None else row[-2:] for row in rows], np.int32)

    def settle(self, number: int, counts: Sequence[int]) -> None:
        """Record the numbers of tokens; a row without drafts counts as one with wrong drafts."""
        super().settle(number, counts)
        accepted = [max(count - 1, 0) for count in counts]
        self._right = sum(accepted)
        self._examined = sum(min(n + 1, number) for n in accepted)
