"""Requests and updates of the engine: token ids in, token ids out. The interfaces above it handle text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from llama_jax.errors import UserError
from llama_jax.inference.decode import DecodeSettings
from llama_jax.inference.sampling import Sampling

MOST_ALTERNATIVES = 20  # log-probabilities reported in addition to that of the chosen token

FinishReason = Literal["stop", "length", "cancelled", "timeout", "failed"]  # "timeout" only above the engine


class BusyError(UserError):
    """The queue is full: nothing was admitted, and the same request may be tried again later.

    Attributes:
      retry_after: seconds until there should be room.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClosedError(UserError):
    """The engine is shutting down or has ended, and admits nothing."""


class Constraint(Protocol):
    """Which tokens may come next, according to a grammar. It has a state and belongs to one request."""

    def allowed(self) -> np.ndarray:
        """uint32[ceil(V / 32)]: bit i % 32 of word i // 32 is set where token i may come next."""
        ...

    def accept(self, token: int) -> None:
        """Advance to the state after a token. This may take long, so it is called on another thread."""
        ...


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt to be continued.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: maximum number of tokens to generate; 0 only with `score_prompt`.
      sampling: numbers, not arrays; what a seed gives does not depend on other requests.
      stop_tokens: ids that end the continuation.
      min_new_tokens: number of tokens before which none of `stop_tokens` is chosen.
      alternatives: how many of the most probable tokens are reported for each position, up to 20.
      score_prompt: report the log-probability of each token of the prompt as well.
      constraint: what may be generated; the row waits after every token until it is known.
      adapter: number in the table of the model's adapters; -1 for the model alone.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: Sequence[int] = ()
    min_new_tokens: int = 0
    alternatives: int = 0
    score_prompt: bool = False
    constraint: Constraint | None = None
    adapter: int = -1


class ScoredToken(NamedTuple):
    """A token with its log-probability under the model itself, before penalty, temperature, filters and constraints.

    Attributes:
      logprob: None for the first token of a prompt, which nothing precedes.
      alternatives: the most probable tokens of the position, the first the most probable, each with its log-probability.
    """

    id: int
    logprob: float | None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass
class Update:
    """What is new in a request since its last update.

    Attributes:
      tokens: generated tokens, without a stop token that ended the request.
      prompt: the scored prompt, once, with or before the first token; None without `score_prompt`.
      ended_by: the stop token that ended the request, with its log-probabilities; None where something else did.
      cached: tokens of the prompt whose keys and values were found in the prefix cache; known with the first update.
      finish: why the request ended; None while it continues. No updates follow it.
      error: with "failed", the reason.
    """

    tokens: list[ScoredToken] = field(default_factory=list)
    prompt: list[ScoredToken] | None = None
    cached: int = 0
    finish: FinishReason | None = None
    error: str | None = None
    ended_by: ScoredToken | None = None


@dataclass(eq=False)
class Ticket:
    """A request that was admitted.

    Attributes:
      arrays: the request of a state of one row.
      deliver: called on the engine's thread with what is new.
      digests: of the prompt's chunks, see `pages.digests_of`.
      number: in the order of arrival.
      row: while it is served; used by the engine alone, as is `ended`.
      ended: it has had its last update.
    """

    request: GenerationRequest
    arrays: DecodeSettings
    deliver: Callable[[Update], None]
    _cancel: Callable[[Ticket], None]
    digests: Sequence[bytes] = ()
    number: int = field(default_factory=itertools.count().__next__)
    row: Any = None
    ended: bool = False

    def cancel(self) -> None:
        """End the request as "cancelled", in any stage; its row is free within two turns. From any thread."""
        if not self.ended:
            self._cancel(self)

    @property
    def left(self) -> int:
        """Tokens of the prompt left to read."""
        return len(self.request.prompt) if self.row is None else self.row.unread
