"""How many tokens to draft next: the number with the most tokens per second, as measured in this generation.

The host measures how long a pass with each number of drafts takes (0 is plain decoding) and how many drafts are accepted,
and takes the number with the highest rate. A drafter that costs nothing also tells how many drafts would have been right
in text that came without drafts; with any other drafter a few passes are spent to find out. The other numbers are tried
again now and then, for at most a hundredth of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llama_jax.inference.decode import STEPS_PER_CHUNK

TRYING = 0.01  # share of the time that may be spent on trying numbers that are known as slower
PROMISING = 1.25  # tokens per pass; with fewer, drafts pay on few devices, and a twentieth of that time is used
MEMORY = 24  # tokens of a row after which the weight of an older observation is half; a reply may copy for a hundred
PATIENCE = 4  # chunks between two tries
GUESS = 1.1, 0.1  # cost in steps of an unmeasured pass, and of each draft; one pass that is tried measures it
FIRST = 6  # passes after which the acceptance is known of a drafter that tells nothing beforehand
MARGIN, UNTRIED = 1.05, 1.2  # factors by which drafts must be faster: acceptance is known from few tokens; time is a guess
SHORT, LONG = 0.04, 0.1  # seconds of a chunk; the host works for half a millisecond after each
SURE = STEPS_PER_CHUNK  # tokens without a correct draft after which drafts are hopeless: a short text has one more chunk
SOFTENING = 0.25  # share of an increase in time that is believed: another process may have used the processor


@dataclass(frozen=True)
class Pace:
    """What is known, an immutable value.

    Attributes:
      numbers: numbers of tokens that may be drafted, ascending, the first 0.
      seconds: per pass with each number, or None where not known.
      blind: nothing is known of drafts that were not made.
      passes: number of passes with drafts.
      hits, trials: drafts that were accepted, and those examined; older ones have less weight.
      elapsed, wasted: seconds in total, and those that the fastest number would have saved.
      since: chunks since a number other than the best was tried.
      lengths: passes (or steps) of the next chunk with each number: while the number is the best, twice as many as the last
        chunk had, up to LONG and at least SHORT, or LONG at once where drafts are hopeless; a number that is only tried
        starts with one, or CHUNK.
    """

    numbers: tuple[int, ...]
    seconds: tuple[float | None, ...]
    blind: bool = True
    passes: int = 0
    hits: float = 0.0
    trials: float = 0.0
    elapsed: float = 0.0
    wasted: float = 0.0
    since: int = 0
    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokens: int, blind: bool = True) -> Pace:
        """For at most `tokens` drafted: none, and `tokens` halved down to 2."""
        numbers = [tokens]
        while numbers[-1] >= 4:
            numbers.append(numbers[-1] // 2)
        shortest = (STEPS_PER_CHUNK, *[1] * len(numbers))
        return cls((0, *reversed(numbers)), (None,) * len(shortest), blind, lengths=shortest)

    def length(self, number: int) -> int:
        """Passes (or steps) of the next chunk with this number of drafts, if there is room."""
        return self.lengths[self.numbers.index(number)]

    @property
    def acceptance(self) -> float:
        """The probability that the model accepts a draft if it accepted all before it; a low estimate after few trials."""
        return self.hits / (self.trials + 1)

    def expected(self, number: int) -> float:
        """Expected tokens per row and pass: 1 + a + ... + a^number (Leviathan et al. 2022, equation 1)."""
        return sum(self.acceptance**i for i in range(number + 1))

    def rate(self, number: int) -> float:
        """Tokens of a row per second."""
        step = self.seconds[0]
        return 0.0 if step is None else self.expected(number) / (self._known(number) or self._guessed(number, step))

    def _known(self, number: int) -> float | None:
        """Seconds per pass; for a number that has not been tried, those of the next smaller one."""
        known = [s for n, s in zip(self.numbers, self.seconds, strict=True) if s is not None and 0 < n <= number]
        return self.seconds[0] if not number else known[-1] if known else None

    def _guessed(self, number: int, step: float) -> float:
        """Seconds of a pass smaller than all that were tried: half of their time beyond a step is counted for the drafts."""
        tried = [(n, s) for n, s in zip(self.numbers, self.seconds, strict=True) if s is not None and n > number]
        guess = (GUESS[0] + GUESS[1] * number) * step
        return max([guess, *(step + (seconds - step) * (1 + number / n) / 2 for n, seconds in tried[:1])])

    @property
    def hopeless(self) -> bool:
        """Whether almost none of the drafts would have been right, had they been made."""
        return not self.blind and self.trials >= SURE and self.expected(self.numbers[-1]) < MARGIN

    @property
    def best(self) -> int:
        """The number with the highest rate; 0 where drafts are hardly better."""
        if self.expected(self.numbers[-1]) <= MARGIN:
            return 0
        number = max(self.numbers[1:], key=self.rate)
        margin = UNTRIED if self._known(number) is None else MARGIN
        return number if self.rate(number) > margin * self.rate(0) else 0

    def goes_on(self, number: int) -> bool:
        """Whether steps may be started after a chunk with `number` drafts before its results are known.

        The device then does not wait for the host; the results change the choice one chunk later.
        """
        if number:
            return not self.blind and (number != self.best or self.seconds[self.numbers.index(number)] is None)
        return self.seconds[0] is not None and self.choose() == 0

    def choose(self) -> int:
        """The number to draft next."""
        if self.seconds[0] is None:
            return 0
        if self.blind and self.passes < FIRST:
            return self.numbers[-1]
        best = self.best
        if self.since < PATIENCE or (self.hopeless and not best):
            return best
        other = 0 if best else max(self.numbers[1:], key=self.rate)
        share = TRYING if best or self.blind else TRYING / (2 if self.expected(other) >= PROMISING else 20)
        return other if self.wasted + self.costs(other) <= share * self.elapsed else best

    def costs(self, number: int) -> float:
        """Seconds that a pass with this number of drafts may waste, because it may give only one token."""
        return max(self.expected(number) / self.rate(number) - 1 / self.rate(self.best), 0.0) if self.seconds[0] else 0.0

    def observe(self, number: int, passes: int, rows: float, accepted: int, looked_at: int, seconds: float | None) -> Pace:
        """The value after a chunk.

        Args:
          passes: passes (or steps) of the chunk.
          rows: average number of rows that were not done.
          accepted, looked_at: drafts; for 0, those that would have been. Drafts after a wrong one were not looked at.
          seconds: None where the time does not count, because a program may have been compiled in it.
        """
        per_row = passes + (accepted / rows if number else 0.0)
        kept = 0.5 ** (per_row / MEMORY)
        updated = replace(
            self, hits=self.hits * kept + accepted, trials=self.trials * kept + looked_at, since=self.since + 1
        )
        updated = replace(updated, passes=self.passes + (passes if number else 0))
        if seconds is None:
            return updated
        new, old = seconds / passes, self.seconds[self.numbers.index(number)]
        believed = new if old is None or new < old else old + SOFTENING * (new - old)
        times = tuple(believed if n == number else s for n, s in zip(self.numbers, self.seconds, strict=True))
        updated = replace(updated, seconds=times, elapsed=self.elapsed + seconds)
        best = updated.best
        lengths = (
            updated._grown(n, passes, seconds) if n == number else length if n == best else 1 if n else STEPS_PER_CHUNK
            for n, length in zip(self.numbers, self.lengths, strict=True)
        )
        updated = replace(updated, lengths=tuple(lengths))
        if number == best or not updated.rate(best):
            return updated
        wasted = max(seconds - per_row / updated.rate(best), 0.0)
        return replace(updated, wasted=self.wasted + wasted, since=0)

    def _grown(self, number: int, passes: int, seconds: float) -> int:
        length, least = self.length(number), 1 if number else STEPS_PER_CHUNK
        if passes < length or seconds > LONG:
            return length
        wanted = LONG if self.hopeless and not number else SHORT
        return max(2 * length, math.ceil(wanted / seconds * passes / least) * least)
