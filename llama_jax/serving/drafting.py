"""Speculative decoding in the engine: measured times and acceptance rates determine the number of drafts per iteration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llama_jax.inference.speculation import Drafter, DraftModel, PromptLookup
from llama_jax.inference.speculation.draft_length import MARGIN, SOFTENING, Pace
from llama_jax.inference.speculation.prompt_lookup import Following

GUESS = 2.0  # cost of an unmeasured iteration with drafts, relative to a plain iteration
MEMORY = 256  # tokens after which the weight of an older draft is halved
FORGETTING = 1.001  # divisor of the time estimate with drafts after each plain iteration, so that drafts are tried again
CATCHING_UP = -1  # in place of a number of drafts: an iteration in which the draft model only prefilled missing tokens

Shape = tuple[int, int]  # rows and tokens
StepKind = tuple[Any, int]  # what determines the time of an iteration: its shape and the number of drafts per row


class Drafting(ABC):
    """Strategy and statistics of an engine's drafts. Measured times decide whether an iteration has drafts, not its tokens.

    Attributes:
      numbers: possible numbers of drafts per row and iteration, ascending.
      offered, accepted: total number of draft tokens that were proposed, and accepted.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = numbers
        self.offered = self.accepted = 0

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> Any:
        """The drafting state of a new row with this prompt."""

    @abstractmethod
    def learn(self, row: Any, token: int) -> None:
        """Add the next token of a row to its state, whether or not it was drafted."""

    @abstractmethod
    def choose(self, shape: Shape, rows: Sequence[Any]) -> int:
        """The number of drafts, from `numbers` or 0, with the highest expected speed.

        Args:
          rows: state of each running row, from `begin`; None for a row without drafts.
        """

    @abstractmethod
    def propose(self, rows: Sequence[Any], number: int) -> np.ndarray:
        """The device input for this number of drafts, int32[B, any]; -1 for a row without drafts."""

    def settle(self, number: int, counts: Sequence[int]) -> None:
        """Record the number of tokens of each running row in an iteration with `number` drafts."""
        self.accepted += sum(max(count - 1, 0) for count in counts)

    @abstractmethod
    def observe(self, kinds: Sequence[StepKind], seconds: float | None) -> None:
        """Record the time of iterations of these kinds; None if it includes other work."""


def drafting_by(draft: Drafter | None) -> Drafting | None:
    """The `Drafting` for the drafter in an engine's options, or None."""
    if isinstance(draft, DraftModel):
        return ModelDrafting(draft)
    return LookupDrafting(draft) if isinstance(draft, PromptLookup) else None


class LookupDrafting(Drafting):
    """Prompt lookup, whose acceptance can be measured even without drafting."""

    def __init__(self, lookup: PromptLookup) -> None:
        super().__init__((lookup.tokens,))
        self._shortest = lookup.shortest
        self._hits = self._trials = 0.0
        self._seconds: dict[tuple[Shape, bool], float] = {}

    def begin(self, prompt: Sequence[int]) -> Following:
        return Following(prompt, self._shortest)

    def learn(self, row: Following, token: int) -> None:
        offered = row.draft is not None
        self.record(offered, row.append(token))

    def record(self, offered: bool, right: bool) -> None:
        """Record whether a token would have been drafted, and whether the draft was right."""
        decay = 0.5 ** (1 / MEMORY)
        self._trials = self._trials * decay + offered
        self._hits = self._hits * decay + right

    def propose(self, rows: Sequence[Following | None], number: int) -> np.ndarray:
        """The drafts, int32[B, number]."""
        drafts = np.full((len(rows), number), -1, np.int32)
        for i, row in enumerate(rows):
            if row is not None:
                following = row.following(number)
                drafts[i, : len(following)] = following
                self.offered += len(following)
        return drafts

    def observe(self, kinds: Sequence[StepKind], seconds: float | None) -> None:
        """Record the time of a single iteration; a total time of several iterations is ignored."""
        if len(kinds) != 1 or seconds is None:
            return
        shape, drafted = kinds[0][0], bool(kinds[0][1])
        old = self._seconds.get((shape, drafted))
        believed = seconds if old is None or seconds < old else old + SOFTENING * (seconds - old)
        self._seconds[shape, drafted] = believed
        if not drafted and (shape, True) in self._seconds:
            self._seconds[shape, True] = max(self._seconds[shape, True] / FORGETTING, believed)

    def choose(self, shape: Shape, rows: Sequence[Following | None]) -> int:
        plain, (count,) = self._seconds.get((shape, False)), self.numbers
        offering = sum(row is not None and row.draft is not None for row in rows)
        if plain is None or not offering:
            return 0
        acceptance = self._hits / (self._trials + 1)
        more = offering * sum(acceptance**i for i in range(1, count + 1)) / len(rows)
        return count if 1 + more > MARGIN * self._seconds.get((shape, True), GUESS * plain) / plain else 0


class ModelDrafting(Drafting):
    """Drafts from a smaller model; their number is chosen by `Pace`, as in `generate`.

    Acceptance is estimated over all rows together, and the time of an iteration for each shape.
    """

    def __init__(self, draft: DraftModel) -> None:
        self._pace = Pace.of(draft.tokens)
        super().__init__(self._pace.numbers[1:])
        self._unknown = self._pace.seconds
        self._seconds: dict[Shape, tuple[float | None, ...]] = {}
        self._looked_at = self._right = self._rows = 0  # since the last update
        self._read = 0.0  # seconds of prefilling tokens that the draft model had missed, since it last drafted

    def begin(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of the row, as a list."""
        return list(prompt)

    def learn(self, row: list[int], token: int) -> None:
        row.append(token)

    def choose(self, shape: Shape, rows: Sequence[list[int] | None]) -> int:
        return self._at(shape).choose() if any(row is not None for row in rows) else 0

    def propose(self, rows: Sequence[list[int] | None], number: int) -> np.ndarray:
        """The last two tokens of each row, from which the draft model continues: int32[B, 2]."""
        self.offered += number * sum(row is not None for row in rows)
        return np.array([(-1, -1) if row is None else row[-2:] for row in rows], np.int32)

    def settle(self, number: int, counts: Sequence[int]) -> None:
        """Record the numbers of tokens; a row without drafts counts as one with wrong drafts."""
        super().settle(number, counts)
        right = [max(count - 1, 0) for count in counts]
        self._rows += len(counts)
        self._right += sum(right)
        self._looked_at += sum(right) + sum(each < number for each in right)

    def observe(self, kinds: Sequence[StepKind], seconds: float | None) -> None:
        rows, right, looked_at = self._rows, self._right, self._looked_at
        self._looked_at = self._right = self._rows = 0
        if not kinds:
            return
        shape, number = max(kinds, key=lambda kind: kind[1])
        seconds = seconds if len(kinds) == 1 else None
        pace = self._at(shape)
        if number == CATCHING_UP:
            self._read += max((seconds or 0.0) - (pace.seconds[0] or 0.0), 0.0)
            return
        pace = pace.observe(number, 1, max(rows, 1), right, looked_at, seconds)
        if number:
            wasted = pace.costs(number) if seconds is None and number != pace.best else 0.0  # unmeasured lost time
            pace, self._read = replace(pace, wasted=pace.wasted + wasted + self._read), 0.0
        self._pace, self._seconds[shape] = pace, pace.seconds

    def _at(self, shape: Shape) -> Pace:
        return replace(self._pace, seconds=self._seconds.get(shape, self._unknown))
