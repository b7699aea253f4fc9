"""How many tokens to draft in the next pass: the number with the most tokens per second, while a credit lasts.

Plain steps earn a credit, counted in plain steps. A pass with drafts earns the tokens that it generates and pays its time.
So drafts lose at most the credit, whatever the text is. After a loss, they wait until plain steps have earned it back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

START_CREDIT, MAX_CREDIT = 1.0, 8.0  # in plain steps
CREDIT_PER_STEP = 0.015  # earned by a plain step
HALF_LIFE_TOKENS = 24  # of an observed draft; a reply may copy a hundred tokens
MIN_SPEEDUP = 1.05
MAX_RISE = 1.1  # of a measured time, because another process may have used the processor
ROUND_SECONDS = 0.1  # time of the device between two decisions; the host works for about half a millisecond


@dataclass(frozen=True)
class DraftLength:
    """The measurements so far.

    Attributes:
      lengths: possible numbers of draft tokens per pass, ascending from 0 (a plain step).
      seconds: measured seconds of a pass with each number; None before the first measurement.
      prior: acceptance rate assumed before anything is observed: 1 for a drafter that must run to be judged.
      accepted, examined: numbers of accepted drafts and of all up to the first wrong one; older ones have less weight.
      credit: plain steps that drafts may still waste.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float | None, ...]
    prior: float
    accepted: float = 0.0
    examined: float = 0.0
    credit: float = START_CREDIT

    @classmethod
    def start(cls, lengths: tuple[int, ...], prior: float) -> DraftLength:
        return cls((0, *lengths), (None,) * (len(lengths) + 1), prior)


def halved_lengths(tokens: int) -> tuple[int, ...]:
    """`tokens`, its half, and so on down to 2 or 3, ascending."""
    return (*halved_lengths(tokens // 2), tokens) if tokens >= 4 else (tokens,)


def next_draft_length(state: DraftLength) -> int:
    """The number of tokens to draft in the next pass; 0 for plain steps."""
    if state.credit < 0 or state.seconds[0] is None:
        return 0
    speedup, length = max((speedup_of(state, length), length) for length in state.lengths[1:])
    return length if speedup >= MIN_SPEEDUP else 0


def speedup_of(state: DraftLength, length: int) -> float:
    """Expected tokens of a pass, 1 + a + ... + a^length (Leviathan et al. 2022, equation 1), divided by its cost."""
    acceptance = (state.accepted + state.prior) / (state.examined + 1)
    return sum(acceptance**i for i in range(length + 1)) / cost_of_pass(state, length)


def cost_of_pass(state: DraftLength, length: int) -> float:
    """The time of a pass in plain steps; of an unmeasured pass, that of the next shorter one, or a guess."""
    step, *passes = state.seconds
    measured = [s for n, s in zip(state.lengths[1:], passes, strict=True) if s is not None and n <= length]
    return max(measured[-1] / step, 1.0) if step is not None and measured else 1.1 + 0.1 * length


def max_passes(state: DraftLength, length: int) -> int:
    """Passes (or plain steps) before the next decision: as fit into ROUND_SECONDS and waste no more than the credit."""
    seconds = state.seconds[state.lengths.index(length)]
    if seconds is None:
        return 1
    affordable = state.credit / (cost_of_pass(state, length) - 1 + 1e-3) if length else math.inf
    return max(int(min(math.ceil(ROUND_SECONDS / seconds), affordable)), 1)


def record_passes(
    state: DraftLength, length: int, passes: int, tokens: float, accepted: int, examined: int, seconds: float | None
) -> DraftLength:
    """The state after some passes (or plain steps) with `length` draft tokens each.

    Args:
      tokens: generated tokens per row.
      accepted, examined: see `DraftLength`; for plain steps, of drafts that were only compared.
      seconds: None if the time includes the compilation of a program.
    """
    kept = 0.5 ** (tokens / HALF_LIFE_TOKENS)
    state = replace(state, accepted=state.accepted * kept + accepted, examined=state.examined * kept + examined)
    if seconds is not None:
        index, new = state.lengths.index(length), seconds / passes
        old = state.seconds[index] or new
        new = min(new, MAX_RISE * old)
        state = replace(state, seconds=(*state.seconds[:index], new, *state.seconds[index + 1 :]))
    earned = tokens - passes * cost_of_pass(state, length) if length else CREDIT_PER_STEP * passes
    return replace(state, credit=min(state.credit + earned, MAX_CREDIT))
