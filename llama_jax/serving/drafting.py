"""Several tokens a turn: how many to draft follows what turns took and drafts gained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from llama_jax.inference.speculation import Drafter, DraftModel, PromptLookup
from llama_jax.inference.speculation.lookup import Followed
from llama_jax.inference.speculation.pace import Pace
from llama_jax.serving.requests import GenerationRequest

GUESS = 2.0  # times a plain turn: one with drafts that has not been measured
MARGIN = 1.05  # by which drafts must be faster
MEMORY = 256  # tokens after which an older draft counts half
SOFTENING = 0.25  # of a longer time than before that is believed: another process may have had the processor
FORGETTING = 1.001  # by which a turn with drafts is believed to be faster after each without, so that it is tried again
CATCHING_UP = -1  # in the place of a number of drafts: a turn without any, in which a draft model read what it had not

Shape = tuple[int, int]  # rows and slots
Kind = tuple[Any, int]  # of a turn, what decides how long it takes: the shape, and how many tokens each row drafts


class KnownRow(Protocol):
    """A row that may have drafts: its tokens, as far as the host knows them."""

    row: list[int]

    def learn(self, token: int) -> None:
        """Take the next token, whether or not it was drafted."""


class Drafting(ABC):
    """What an engine knows of drafts. Whether a turn has any depends on the clock; which tokens come does not.

    Attributes:
      numbers: tokens that a row may draft in a turn, rising.
      offered, accepted: tokens in all.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = numbers
        self.offered = self.accepted = 0

    @abstractmethod
    def follow(self, request: GenerationRequest) -> KnownRow | None:
        """A row that begins with a prompt; None where nothing may be drafted, for a constraint says what comes next."""

    @abstractmethod
    def choose(self, shape: Shape, rows: Sequence[Any]) -> int:
        """Which of `numbers` the next turn of rows is expected to be fastest with, or 0.

        Args:
          rows: what `follow` gave of each that is running.
        """

    @abstractmethod
    def propose(self, rows: Sequence[Any], number: int) -> np.ndarray:
        """What the device is told of so many drafts, int32[B, any], -1 for a row without any."""

    def settle(self, rows: Sequence[Any], number: int, counts: Sequence[int]) -> None:
        """A turn with `number` drafts has given running rows so many tokens."""
        self.accepted += sum(max(count - 1, 0) for count in counts)

    @abstractmethod
    def observe(self, kinds: Sequence[Kind], seconds: float | None) -> None:
        """Turns of these kinds were collected, one of each pool, which took so long; None where something else did, too."""


def drafting_by(draft: Drafter | None) -> Drafting | None:
    """By what an engine's options say."""
    if isinstance(draft, DraftModel):
        return ModelDrafting(draft)
    return LookupDrafting(draft) if isinstance(draft, PromptLookup) else None


class Following(Followed):
    """A row that says of each of its tokens whether it would have drafted it."""

    def __init__(self, drafting: LookupDrafting, shortest: int, prompt: Sequence[int]) -> None:
        super().__init__(shortest)
        self._drafting = drafting
        self.right(list(prompt))

    def learn(self, token: int) -> None:
        """See `KnownRow.learn`."""
        offered = self.draft is not None
        self._drafting.learn(offered, bool(self.right([token])))


class LookupDrafting(Drafting):
    """Of text that repeats itself: whether a token would have been drafted is known of those that were not drafted, too."""

    def __init__(self, lookup: PromptLookup) -> None:
        super().__init__((lookup.tokens,))
        self._shortest = lookup.shortest
        self._hits = self._trials = 0.0
        self._seconds: dict[tuple[Shape, bool], float] = {}

    def follow(self, request: GenerationRequest) -> Following | None:
        """See `Drafting.follow`."""
        return Following(self, self._shortest, request.prompt) if request.constraint is None else None

    def learn(self, offered: bool, right: bool) -> None:
        """Whether a token would have been drafted, and whether that was it."""
        kept = 0.5 ** (1 / MEMORY)
        self._trials = self._trials * kept + offered
        self._hits = self._hits * kept + right

    def propose(self, rows: Sequence[Following | None], number: int) -> np.ndarray:
        """See `Drafting.propose`: the drafts themselves."""
        drafts = np.full((len(rows), number), -1, np.int32)
        for i, row in enumerate(rows):
            if row is not None:
                following = row.following(number)
                drafts[i, : len(following)] = following
                self.offered += len(following)
        return drafts

    def observe(self, kinds: Sequence[Kind], seconds: float | None) -> None:
        """See `Drafting.observe`; of several at once the time says nothing of each."""
        if len(kinds) != 1 or seconds is None:
            return
        shape, drafted = kinds[0][0], bool(kinds[0][1])
        old = self._seconds.get((shape, drafted))
        believed = seconds if old is None or seconds < old else old + SOFTENING * (seconds - old)
        self._seconds[shape, drafted] = believed
        if not drafted and (shape, True) in self._seconds:
            self._seconds[shape, True] = max(self._seconds[shape, True] / FORGETTING, believed)

    def choose(self, shape: Shape, rows: Sequence[Following | None]) -> int:
        """See `Drafting.choose`."""
        plain, (count,) = self._seconds.get((shape, False)), self.numbers
        offering = sum(row is not None and row.draft is not None for row in rows)
        if plain is None or not offering:
            return 0
        acceptance = self._hits / (self._trials + 1)
        more = offering * sum(acceptance**i for i in range(1, count + 1)) / len(rows)
        return count if 1 + more > MARGIN * self._seconds.get((shape, True), GUESS * plain) / plain else 0


class _Text:
    """A row that keeps its tokens."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.row = list(prompt)

    def learn(self, token: int) -> None:
        self.row.append(token)


class ModelDrafting(Drafting):
    """Of a smaller model, which must be asked to be known: as many as the `Pace` of `generate` says.

    What is accepted is known of all rows together, how long a turn takes of each shape.
    """

    def __init__(self, draft: DraftModel) -> None:
        self._pace = Pace.of(draft.tokens)
        super().__init__(self._pace.numbers[1:])
        self._unknown = self._pace.seconds
        self._seconds: dict[Shape, tuple[float | None, ...]] = {}
        self._looked_at = self._right = self._rows = 0  # since the last time
        self._read = 0.0  # seconds for what the draft had not read, since it last drafted

    def follow(self, request: GenerationRequest) -> _Text | None:
        """See `Drafting.follow`."""
        return _Text(request.prompt) if request.constraint is None else None

    def choose(self, shape: Shape, rows: Sequence[_Text | None]) -> int:
        """See `Drafting.choose`."""
        return self._at(shape).choose() if any(row is not None for row in rows) else 0

    def propose(self, rows: Sequence[_Text | None], number: int) -> np.ndarray:
        """See `Drafting.propose`: the last two tokens of each row, after which the draft proposes."""
        self.offered += number * sum(row is not None for row in rows)
        return np.array([(-1, -1) if row is None else row.row[-2:] for row in rows], np.int32)

    def settle(self, rows: Sequence[_Text | None], number: int, counts: Sequence[int]) -> None:
        """See `Drafting.settle`: a row that may have no drafts counts as one whose drafts are wrong."""
        super().settle(rows, number, counts)
        right = [max(count - 1, 0) for count in counts]
        self._rows += len(counts)
        self._right += sum(right)
        self._looked_at += sum(right) + sum(each < number for each in right)

    def observe(self, kinds: Sequence[Kind], seconds: float | None) -> None:
        """See `Drafting.observe`."""
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
            wasted = pace.costs(number) if seconds is None and number != pace.best else 0.0  # paid, though it was not seen
            pace, self._read = replace(pace, wasted=pace.wasted + wasted + self._read), 0.0
        self._pace, self._seconds[shape] = pace, pace.seconds

    def _at(self, shape: Shape) -> Pace:
        return replace(self._pace, seconds=self._seconds.get(shape, self._unknown))
