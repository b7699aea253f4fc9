"""Requests and updates of the engine: token ids in, token ids out. Higher layers handle text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from llama_jax.errors import UserError
from llama_jax.inference.decode import DecodeSettings
from llama_jax.inference.sampling import Sampling

MAX_ALTERNATIVES = 20  # log-probabilities reported in addition to that of the chosen token

FinishReason = Literal["stop", "length", "cancelled", "timeout", "failed"]  # "timeout" only above the engine


class BusyError(UserError):
    """The queue is full: nothing was admitted, and the same request may be retried later.

    Attributes:
      retry_after: estimated seconds until there is room.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClosedError(UserError):
    """The engine is shutting down or has ended, and admits nothing."""


class Constraint(Protocol):
    """The allowed next tokens according to a grammar. It has state and belongs to one request."""

    def allowed(self) -> np.ndarray:
        """uint32[ceil(V / 32)]: bit i % 32 of word i // 32 is set if token i may come next."""
        ...

    def accept(self, token: int) -> None:
        """Advance the state by a token. This may be slow, so it is called on another thread."""
        ...


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One prompt to be continued.

    Attributes:
      prompt: token ids, at least one.
      max_new_tokens: maximum number of tokens to generate; 0 only with `score_prompt`.
      sampling: numbers, not arrays; results for a seed do not depend on other requests.
      stop_tokens: ids that end the continuation.
      min_new_tokens: minimum number of tokens before one of `stop_tokens` may be sampled.
      alternatives: number of most probable tokens reported for each position, up to 20.
      score_prompt: also report the log-probability of each token of the prompt.
      constraint: restricts the generated tokens; after every token the row waits for the next mask.
      adapter: index of an adapter of the model; -1 for none.
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
    """A token with its log-probability under the model, before penalty, temperature, filters and constraints.

    Attributes:
      logprob: None for the first token of a prompt.
      alternatives: the most probable tokens of the position in descending order, each with its log-probability.
    """

    id: int
    logprob: float | None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass
class Update:
    """The news of a request since its last update.

    Attributes:
      tokens: generated tokens, without a stop token that ended the request.
      prompt: the scored prompt, once, with or before the first token; None without `score_prompt`.
      ended_by: the stop token that ended the request, with its log-probabilities; None if it did not end this way.
      cached: number of prompt tokens found in the prefix cache; known with the first update.
      finish: why the request ended, in its last update; None while it continues.
      error: the reason, if `finish` is "failed".
    """

    tokens: list[ScoredToken] = field(default_factory=list)
    prompt: list[ScoredToken] | None = None
    cached: int = 0
    finish: FinishReason | None = None
    error: str | None = None
    ended_by: ScoredToken | None = None


@dataclass(eq=False)
class Ticket:
    """An admitted request.

    Attributes:
      arrays: the settings of the request, for a state of one row.
      deliver: called on the engine's thread with each update.
      digests: digests of the prompt's chunks, see `rows.digests_of`.
      number: increases in the order of arrival.
      row: its `ServedRow` while it is served; used only by the engine, as is `ended`.
      ended: whether its last update was delivered.
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
        """End the request as "cancelled", in any stage; its row is free within two iterations. From any thread."""
        if not self.ended:
            self._cancel(self)

    @property
    def left(self) -> int:
        """Tokens of the prompt left to prefill."""
        return len(self.request.prompt) if self.row is None else self.row.unread
