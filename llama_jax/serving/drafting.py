"""Several tokens per turn: the number to draft follows from measured times of turns and gains of drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llama_jax.inference.speculation import Drafter, DraftModel, PromptLookup
from llama_jax.inference.speculation.draft_length import MARGIN, SOFTENING, Pace
from llama_jax.inference.speculation.prompt_lookup import Following

GUESS = 2.0  # cost of an unmeasured turn with drafts, relative to a plain turn
MEMORY = 256  # tokens after which the weight of an older draft is half
FORGETTING = 1.001  # factor by which the estimate for drafts falls after each plain turn, so that they are tried again
CATCHING_UP = -1  # instead of a number of drafts: a turn without any, in which a draft model read missing tokens

Shape = tuple[int, int]  # rows and tokens
StepKind = tuple[Any, int]  # what determines how long a turn takes: the shape, and how many tokens each row drafts


class Drafting(ABC):
    """What an engine knows about drafts. Whether a turn has any depends on the clock; the tokens do not.

    Attributes:
      numbers: numbers of tokens that a row may draft in a turn, ascending.
      offered, accepted: total tokens.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = numbers
        self.offered = self.accepted = 0

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> Any:
        """What is known of a row that begins with a prompt."""

    @abstractmethod
    def learn(self, row: Any, token: int) -> None:
        """Take the next token of a row, whether or not it was drafted."""

    @abstractmethod
    def choose(self, shape: Shape, rows: Sequence[Any]) -> int:
        """The one of `numbers` with which the next turn is expected to be fastest, or 0.

        Args:
          rows: what `begin` returned for each running row; None for one without drafts.
        """

    @abstractmethod
    def propose(self, rows: Sequence[Any], number: int) -> np.ndarray:
        """The input of the device for this number of drafts, int32[B, any], -1 for a row without any."""

    def settle(self, number: int, counts: Sequence[int]) -> None:
        """Record how many tokens each running row got in a turn with `number` drafts."""
        self.accepted += sum(max(count - 1, 0) for count in counts)

    @abstractmethod
    def observe(self, kinds: Sequence[StepKind], seconds: float | None) -> None:
        """Record how long turns of these kinds took; None if other work was in that time."""


def drafting_by(draft: Drafter | None) -> Drafting | None:
    """The drafting that an engine's options ask for."""
    if isinstance(draft, DraftModel):
        return ModelDrafting(draft)
    return LookupDrafting(draft) if isinstance(draft, PromptLookup) else None


class LookupDrafting(Drafting):
    """Prompt lookup: whether a token would have been drafted is also known for tokens that were not drafted."""

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
        """The drafts themselves."""
        drafts = np.full((len(rows), number), -1, np.int32)
        for i, row in enumerate(rows):
            if row is not None:
                following = row.following(number)
                drafts[i, : len(following)] = following
                self.offered += len(following)
        return drafts

    def observe(self, kinds: Sequence[StepKind], seconds: float | None) -> None:
        """Record the time of a turn; that of several turns at once says nothing about each."""
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
    """Drafts from a smaller model, which are only known by running it: as many as the `Pace` of `generate` decides.

    The acceptance is estimated over all rows together, the time of a turn for each shape.
    """

    def __init__(self, draft: DraftModel) -> None:
        self._pace = Pace.of(draft.tokens)
        super().__init__(self._pace.numbers[1:])
        self._unknown = self._pace.seconds
        self._seconds: dict[Shape, tuple[float | None, ...]] = {}
        self._looked_at = self._right = self._rows = 0  # since the last update
        self._read = 0.0  # seconds for reading tokens that the draft model had missed, since it last drafted

    def begin(self, prompt: Sequence[int]) -> list[int]:
        """Its tokens."""
        return list(prompt)

    def learn(self, row: list[int], token: int) -> None:
        row.append(token)

    def choose(self, shape: Shape, rows: Sequence[list[int] | None]) -> int:
        return self._at(shape).choose() if any(row is not None for row in rows) else 0

    def propose(self, rows: Sequence[list[int] | None], number: int) -> np.ndarray:
        """The last two tokens of each row, which the draft model continues."""
        self.offered += number * sum(row is not None for row in rows)
        return np.array([(-1, -1) if row is None else row[-2:] for row in rows], np.int32)

    def settle(self, number: int, counts: Sequence[int]) -> None:
        """Record the tokens; a row that may not have drafts counts as one whose drafts are wrong."""
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
            wasted = pace.costs(number) if seconds is None and number != pace.best else 0.0  # time lost, though not measured
            pace, self._read = replace(pace, wasted=pace.wasted + wasted + self._read), 0.0
        self._pace, self._seconds[shape] = pace, pace.seconds

    def _at(self, shape: Shape) -> Pace:
        return replace(self._pace, seconds=self._seconds.get(shape, self._unknown))
