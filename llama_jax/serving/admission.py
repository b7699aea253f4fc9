"""Admission: checks of requests, and the bounded queue of those that wait."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError, shown
from llama_jax.inference.checks import checked_prompts, longrope_switch_length, token_ids, tokens_before_longrope_switch
from llama_jax.inference.decode import Request
from llama_jax.inference.sampling import Sampling
from llama_jax.model.checks import check_tokens
from llama_jax.serving.requests import MOST_ALTERNATIVES, BusyError, GenerationRequest, Ticket
from llama_jax.serving.served_model import STOPS, ServedModel


class Queue:
    """The waiting requests in order of arrival; their number and the tokens of their prompts are bounded.

    Attributes:
      tokens: number of tokens of all prompts that wait.
    """

    def __init__(self, most: int, most_tokens: int) -> None:
        self.tokens = 0
        self._most = most
        self._most_tokens = most_tokens
        self._waiting: dict[Ticket, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._waiting)

    def check_room(self, tokens: int, tokens_per_second: float, requests: int = 1) -> None:
        """Raise BusyError where there is no room for prompts of so many tokens in all. An empty queue takes any one prompt.

        Args:
          requests: number to be admitted together.
          tokens_per_second: rate of reading and generating so far, for the estimate of when there will be room again.
        """
        full = len(self) + requests > self._most or self.tokens + tokens > self._most_tokens
        if full and (self._waiting or requests > 1):
            seconds = self.tokens / tokens_per_second if tokens_per_second > 0 else 1.0
            raise BusyError(
                f"{len(self)} requests with {self.tokens} tokens are waiting, which is the limit; try again later",
                min(max(seconds, 1.0), 60.0),
            )

    def add(self, ticket: Ticket) -> None:
        """Queue a request; there must be room for it."""
        self._waiting[ticket] = None
        self.tokens += len(ticket.request.prompt)

    def remove(self, ticket: Ticket) -> None:
        del self._waiting[ticket]
        self.tokens -= len(ticket.request.prompt)

    def discard(self, ticket: Ticket) -> None:
        """Remove a request if it waits."""
        if ticket in self._waiting:
            self.remove(ticket)

    def clear(self) -> list[Ticket]:
        """Remove and return all."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self.tokens = 0
        return waiting


def room_of(config: LlamaConfig, context: int, length: int) -> int:
    """How many tokens a prompt of this length may get: within the context, and without being read again.

    An engine reads no row again where the frequencies of a "longrope" scaling change, see `inference.checks`.
    """
    return min(context - length, int(tokens_before_longrope_switch(config, length)))


def checked(request: GenerationRequest, model: ServedModel, context: int) -> Request:
    """The request for a state of one row, after all checks.

    Raises:
      GenerationError: the request is invalid.
    """
    (prompt,) = checked_prompts(model.config, [request.prompt])
    least = 0 if request.score_prompt else 1
    for name, lowest, most in (
        ("max_new_tokens", least, 2**31 - 1),
        ("min_new_tokens", 0, request.max_new_tokens),
        ("alternatives", 0, MOST_ALTERNATIVES),
        ("adapter", -1, model.adapters - 1),
    ):
        value = getattr(request, name)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= most:
            raise GenerationError(f"{name}={shown(value, 40)} must be an integer from {lowest} to {most}")
    if len(prompt) + request.max_new_tokens > context:
        room = max(context - len(prompt), 0)
        raise GenerationError(
            f"a prompt of {len(prompt)} tokens and max_new_tokens={request.max_new_tokens} exceed the context of {context};"
            f" shorten the prompt or generate at most {room}"
        )
    if request.max_new_tokens > (room := room_of(model.config, context, len(prompt))):
        raise GenerationError(
            f"a prompt of {len(prompt)} tokens and max_new_tokens={request.max_new_tokens} exceed"
            f" {longrope_switch_length(model.config)} tokens, after which the frequencies of the model's longrope change and"
            f" an engine would have to read the row again; generate at most {room}, then send them as a part of the prompt"
        )
    if not isinstance(request.sampling, Sampling):
        raise GenerationError(f"sampling={shown(request.sampling, 40)} must be a Sampling")
    ends = token_ids("stop_tokens", request.stop_tokens)
    check_tokens(model.config, ends, "stop token")
    if len(ends) > STOPS:
        raise GenerationError(f"{len(ends)} stop tokens are more than the {STOPS} that a request may have")
    stop = np.full((1, STOPS), -1, np.int32)
    stop[0, : len(ends)] = ends
    return Request(request.sampling.per_row(1), np.array([max(request.max_new_tokens, 1)], np.int32), stop)
