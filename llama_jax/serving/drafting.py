"""Several tokens a turn where text repeats itself; whether a turn has drafts follows what turns took and drafts gained."""

from __future__ import annotations

from collections.abc import Sequence

from llama_jax.inference.speculation import PromptLookup
from llama_jax.inference.speculation.lookup import Followed

GUESS = 2.0  # times a plain turn: one with drafts that has not been measured
MARGIN = 1.05  # by which drafts must be faster
MEMORY = 256  # tokens after which an older draft counts half
SOFTENING = 0.25  # of a longer time than before that is believed: another process may have had the processor
FORGETTING = 1.001  # by which a turn with drafts is believed to be faster after each without, so that it is tried again

Shape = tuple[int, int]  # rows and slots


class Following(Followed):
    """A row that says of each of its tokens whether it would have drafted it."""

    def __init__(self, drafting: Drafting, shortest: int, prompt: Sequence[int]) -> None:
        super().__init__(shortest)
        self._drafting = drafting
        self.right(list(prompt))

    def learn(self, token: int) -> None:
        """Take the next token, whether or not it was drafted."""
        offered = self.draft is not None
        self._drafting.learn(offered, bool(self.right([token])))


class Drafting:
    """What an engine knows of drafts. Whether a turn has any depends on the clock; which tokens come does not.

    Attributes:
      count: tokens that a row drafts at most.
      offered, accepted: in all.
    """

    def __init__(self, lookup: PromptLookup) -> None:
        self.count = lookup.tokens
        self.offered = self.accepted = 0
        self._shortest = lookup.shortest
        self._hits = self._trials = 0.0
        self._seconds: dict[tuple[Shape, bool], float] = {}

    def follow(self, prompt: Sequence[int]) -> Following:
        """A row that begins with a prompt."""
        return Following(self, self._shortest, prompt)

    def learn(self, offered: bool, right: bool) -> None:
        """Whether a token would have been drafted, and whether that was it."""
        kept = 0.5 ** (1 / MEMORY)
        self._trials = self._trials * kept + offered
        self._hits = self._hits * kept + right

    def observe(self, kinds: Sequence[tuple[Shape, bool]], seconds: float) -> None:
        """How long a turn took, of these kinds, in which nothing was read; of several at once that says nothing of each."""
        for shape, drafted in kinds if len(kinds) == 1 else ():
            old = self._seconds.get((shape, drafted))
            believed = seconds if old is None or seconds < old else old + SOFTENING * (seconds - old)
            self._seconds[shape, drafted] = believed
            if not drafted and (shape, True) in self._seconds:
                self._seconds[shape, True] = max(self._seconds[shape, True] / FORGETTING, believed)

    def is_worth_it(self, shape: Shape, rows: Sequence[Following | None]) -> bool:
        """Whether a turn with drafts is expected to make more tokens a second than one without."""
        plain = self._seconds.get((shape, False))
        offering = sum(row is not None and row.draft is not None for row in rows)
        if plain is None or not offering:
            return False
        acceptance = self._hits / (self._trials + 1)
        more = offering * sum(acceptance**i for i in range(1, self.count + 1)) / len(rows)
        return 1 + more > MARGIN * self._seconds.get((shape, True), GUESS * plain) / plain
