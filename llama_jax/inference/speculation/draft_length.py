"""How many tokens to draft next: the number with the most tokens per second, as measured in this generation.

The host measures the time of a pass with each number of drafts (0 is plain decoding) and how many drafts are accepted, and
chooses the number with the highest rate. A drafter that costs nothing also tells how many drafts would have been right in
text generated without drafts; for any other drafter a few passes measure this. Other numbers are tried again from time to
time, for at most 1% of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llama_jax.inference.decode import STEPS_PER_CHUNK

TRYING = 0.01  # maximum share of the time for trying numbers that seem slower
PROMISING = 1.25  # tokens per pass; with fewer, drafts rarely pay, and a twentieth of that share is used
MEMORY = 24  # half-life of an observation in tokens of a row; a reply may copy a hundred tokens
PATIENCE = 4  # chunks between two tries
GUESS = 1.1, 0.1  # cost in steps of an unmeasured pass, and of each draft; the first try measures it
FIRST = 6  # passes that measure the acceptance of a drafter without `count_accepted`
MARGIN, UNTRIED = 1.05, 1.2  # factors by which drafts must be faster: few tokens are measured; the time is a guess
SHORT, LONG = 0.04, 0.1  # seconds per chunk; the host works for half a millisecond after each
SURE = STEPS_PER_CHUNK  # tokens without a correct draft after which drafts are hopeless: short texts have few chunks
SOFTENING = 0.25  # share of an increase in time that counts, because another process may have used the processor


@dataclass(frozen=True)
class Pace:
    """The measurements so far, an immutable value.

    Attributes:
      numbers: possible numbers of drafted tokens, ascending from 0.
      seconds: seconds per pass with each number, or None if unknown.
      blind: whether the drafter cannot tell which drafts would have been accepted (no `count_accepted`).
      passes: number of passes with drafts.
      hits, trials: numbers of accepted and of examined drafts; older ones have less weight.
      elapsed, wasted: total seconds, and those that the fastest number would have saved.
      since: chunks since a number other than the best was tried.
      lengths: passes (or steps) of the next chunk with each number. While the number is the best, they double with each
        chunk, from SHORT to LONG seconds, or start at LONG if drafts are hopeless. A number that is only tried starts with
        one pass, or STEPS_PER_CHUNK steps.
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
        """With 0 and `tokens`, tokens / 2, ... down to 2 as possible numbers."""
        numbers = [tokens]
        while numbers[-1] >= 4:
            numbers.append(numbers[-1] // 2)
        shortest = (STEPS_PER_CHUNK, *[1] * len(numbers))
        return cls((0, *reversed(numbers)), (None,) * len(shortest), blind, lengths=shortest)

    def length(self, number: int) -> int:
        """Maximum number of passes (or steps) of the next chunk with this number of drafts."""
        return self.lengths[self.numbers.index(number)]

    @property
    def acceptance(self) -> float:
        """The probability that a draft is accepted if all previous ones were; a low estimate after few trials."""
        return self.hits / (self.trials + 1)

    def expected(self, number: int) -> float:
        """Expected tokens per row and pass: 1 + a + ... + a^number (Leviathan et al. 2022, equation 1)."""
        return sum(self.acceptance**i for i in range(number + 1))

    def rate(self, number: int) -> float:
        """Tokens per row and second."""
        step = self.seconds[0]
        return 0.0 if step is None else self.expected(number) / (self._known(number) or self._guessed(number, step))

    def _known(self, number: int) -> float | None:
        """Seconds per pass; for an untried number, those of the next smaller one."""
        known = [s for n, s in zip(self.numbers, self.seconds, strict=True) if s is not None and 0 < n <= number]
        return self.seconds[0] if not number else known[-1] if known else None

    def _guessed(self, number: int, step: float) -> float:
        """Guessed seconds of a pass with fewer drafts than all tried: half of the extra time is attributed to drafts."""
        tried = [(n, s) for n, s in zip(self.numbers, self.seconds, strict=True) if s is not None and n > number]
        guess = (GUESS[0] + GUESS[1] * number) * step
        return max([guess, *(step + (seconds - step) * (1 + number / n) / 2 for n, seconds in tried[:1])])

    @property
    def hopeless(self) -> bool:
        """Whether almost no drafts would have been right."""
        return not self.blind and self.trials >= SURE and self.expected(self.numbers[-1]) < MARGIN

    @property
    def best(self) -> int:
        """The number with the highest rate; 0 if drafts are hardly faster."""
        if self.expected(self.numbers[-1]) <= MARGIN:
            return 0
        number = max(self.numbers[1:], key=self.rate)
        margin = UNTRIED if self._known(number) is None else MARGIN
        return number if self.rate(number) > margin * self.rate(0) else 0

    def goes_on(self, number: int) -> bool:
        """Whether to start plain steps after a chunk with `number` drafts before its results are known.

        The device then does not wait for the host, and the results affect the choice one chunk later.
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
        """Seconds that a pass with this number of drafts may waste, because it may generate only one token."""
        return max(self.expected(number) / self.rate(number) - 1 / self.rate(self.best), 0.0) if self.seconds[0] else 0.0

    def observe(self, number: int, passes: int, rows: float, accepted: int, looked_at: int, seconds: float | None) -> Pace:
        """The measurements updated with a chunk.

        Args:
          passes: passes (or steps) of the chunk.
          rows: average number of unfinished rows.
          accepted, looked_at: numbers of accepted and of examined drafts (up to the first wrong one); for plain steps, of
            hypothetical ones.
          seconds: None if the time may include the compilation of a program.
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
