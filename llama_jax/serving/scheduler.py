"""The scheduler of an engine: validates requests, queues them, and decides which rows each step prefills and decodes.

The number of waiting requests and of their tokens is limited. A row takes pages of the cache as it grows. If none are free,
the youngest rows are preempted: their tokens are prefilled again when there are pages, and they continue with the same
tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import jax
import numpy as np

from llama_jax.config import suggest_context
from llama_jax.errors import GenerationError, short_repr
from llama_jax.inference.decode import DecodeSettings
from llama_jax.inference.prepare_inputs import (
    checked_prompts,
    checked_stop_tokens,
)
from llama_jax.model.cache import PAGE_SIZE
from llama_jax.serving.drafting import CATCHING_UP, drafting_by
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.requests import MAX_ALTERNATIVES, BusyError, GenerationRequest, Ticket
from llama_jax.serving.row_sampling import RowSettings
from llama_jax.serving.rows import LaunchedStep, PagePool, RowPart, ServedRow, batch_of, pages_of, settings_of_rows
from llama_jax.serving.served_model import STOPS, ServedModel


class Queue:
    """The waiting requests in order of arrival; their number and the tokens of their prompts are limited.

    Attributes:
      tokens: number of tokens of all waiting prompts.
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
        """Raise BusyError if prompts with `tokens` tokens in all exceed the limits. An empty queue admits any single prompt.

        Args:
          tokens_per_second: rate of prefill and decoding so far, to estimate when there will be room again.
          requests: number of prompts.
        """
        full = len(self) + requests > self._most or self.tokens + tokens > self._most_tokens
        if full and (self._waiting or requests > 1):
            seconds = self.tokens / tokens_per_second if tokens_per_second > 0 else 1.0
            raise BusyError(
                f"{len(self)} requests with {self.tokens} tokens are waiting, which is the limit; try again later",
                min(max(seconds, 1.0), 60.0),
            )

    def add(self, ticket: Ticket) -> None:
        """Queue a request, after `check_room`."""
        self._waiting[ticket] = None
        self.tokens += len(ticket.request.prompt)

    def remove(self, ticket: Ticket) -> None:
        """Remove a request if it waits."""
        if ticket in self._waiting:
            del self._waiting[ticket]
            self.tokens -= len(ticket.request.prompt)

    def clear(self) -> list[Ticket]:
        """Remove and return all requests."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self.tokens = 0
        return waiting


def validate_request(request: GenerationRequest, model: ServedModel, context: int) -> DecodeSettings:
    """Validate a request, and return its settings for a single row.

    Raises:
      GenerationError: the request is invalid.
    """
    (prompt,) = checked_prompts(model.config, [request.prompt])
    least = 0 if request.score_prompt else 1
    for name, lowest, most in (
        ("max_new_tokens", least, 2**31 - 1),
        ("min_new_tokens", 0, request.max_new_tokens),
        ("alternatives", 0, MAX_ALTERNATIVES),
        ("adapter", -1, model.adapters - 1),
    ):
        value = getattr(request, name)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= most:
            raise GenerationError(f"{name}={short_repr(value, 40)} must be an integer from {lowest} to {most}")
    if len(prompt) + request.max_new_tokens > context:
        room, total = max(context - len(prompt), 0), len(prompt) + request.max_new_tokens
        raise GenerationError(
            f"a prompt of {len(prompt)} tokens and max_new_tokens={request.max_new_tokens} exceed the context of {context};"
            f" shorten the prompt or generate at most {room}{suggest_context(model.config, total)}"
        )
    ends = checked_stop_tokens(model.config, request.stop_tokens)
    if len(ends) > STOPS:
        raise GenerationError(f"{len(ends)} stop tokens are too many; a request may have at most {STOPS}")
    stop = np.full((1, STOPS), -1, np.int32)
    stop[0, : len(ends)] = ends
    return DecodeSettings(request.sampling.per_row(1), np.array([max(request.max_new_tokens, 1)], np.int32), stop)


class Scheduler:
    """The rows that are served, the state on the device, and the steps that advance it. The engine delivers the results.

    Attributes:
      pages: the pages of the cache, and which rows use them.
      rows: the requests that are being served.
      state: the `ServingState` after all launched steps.
      drafting: proposes draft tokens; None without drafts.
      width: maximum number of pages per row.
      counts: prompt_tokens, cached_tokens and preempted, see `EngineStats`.

    Args:
      context: maximum number of tokens per row.
      collect: collects the results of the pending step, which may end rows; returns False if there is none.
    """

    def __init__(self, model: ServedModel, options: EngineOptions, context: int, collect: Callable[[], bool]) -> None:
        self.pages = PagePool(options.pages(model.config), model.page_bytes, options.prefix_bytes)
        self.rows: list[ServedRow] = []
        self.state = model.empty(options.rows, self.pages.count)
        self.drafting = drafting_by(options.draft)
        self.width = pages_of(context)
        self.counts: Counter[str] = Counter()
        self._model = model
        self._options = options
        self._collect = collect
        self._seats = list(reversed(range(options.rows)))  # free seats
        self._settings: tuple[list[object], RowSettings] | None = None  # (what they were made of, settings on the device)

    def readers(self, queue: Iterable[Ticket], oldest_first: bool) -> list[Ticket]:
        """The requests that prefill in the next step: a chunk of the first, and all tokens of others that fit in the chunk.

        They are chosen among rows that are not fully prefilled and waiting requests, alternately by age and by the number of
        tokens left: a short prompt does not wait for a long one, and a long one advances at half the speed or more. If there
        are no pages for a waiting request, neither it nor a later one begins.
        """
        oldest = min((row.ticket for row in self.rows), key=_age, default=None)
        reading = [row.ticket for row in self.rows if row.reads and row.accepting is None]
        runnable = [ticket for ticket in reading if ticket.row.pages or ticket is oldest or self._fits(ticket)]
        waiting = list(queue) if self._seats and len(runnable) == len(reading) else []
        waiting = [ticket for ticket in waiting if self._fits(ticket)] if waiting and self._fits(waiting[0]) else []
        chosen: list[Ticket] = []
        left = self._options.chunk_tokens
        for ticket in sorted([*runnable, *waiting], key=lambda ticket: (0 if oldest_first else ticket.left, _age(ticket))):
            if chosen and (ticket.left > left or ticket.request.score_prompt):
                continue
            begin = [ticket for ticket in chosen if ticket.row is None]
            if ticket.row is None and (len(begin) == len(self._seats) or (begin and not self._fits(ticket, begin))):
                continue
            chosen.append(ticket)
            left -= min(ticket.left, left)
            if not left or ticket.request.score_prompt:  # scoring uses another program
                break
        return chosen

    def _fits(self, ticket: Ticket, others: Sequence[Ticket] = ()) -> bool:
        """Whether there are pages for all tokens of a request, of older rows and of others, and one more token of each."""
        older = [row.ticket for row in self.rows if _age(row.ticket) < _age(ticket)]
        return sum(map(self._lacks, [ticket, *older, *others])) <= self.pages.available

    def _lacks(self, ticket: Ticket) -> int:
        """Pages needed for all tokens of a request and one more, except pages that it will share with running rows."""
        row = ticket.row
        if row is not None and row.pages:
            return row.lacks(row.unread + 1)
        return pages_of(ticket.left + 1) - self.pages.in_use(ticket.digests)

    def seat(self, ticket: Ticket) -> None:
        """Give a request a seat, before its prefill."""
        request, model = ticket.request, self._model
        allowed = None if request.constraint is None else request.constraint.allowed()
        followed = None
        if self.drafting is not None and request.constraint is None:  # constrained rows have no drafts
            followed = self.drafting.begin(request.prompt)
        prompt = np.asarray(request.prompt, np.int32)
        row = ServedRow(ticket, self._seats.pop(), prompt.tolist(), allowed, followed, scoring=request.score_prompt)
        ticket.row = row
        self.rows.append(row)
        if request.sampling.repetition_penalty != 1:
            seen = np.zeros(model.vocab, bool)
            seen[prompt] = True
            self.state = model.enter(self.state, row.seat, seen)

    def leave(self, row: ServedRow) -> None:
        """Free the seat and the pages of a row."""
        row.ended = True
        self.rows.remove(row)
        self._seats.append(row.seat)
        self.pages.release(row.pages)
        row.pages = []

    def _find_prefix(self, row: ServedRow) -> None:
        """Use the pages of the row's next chunks that are in the prefix cache."""
        size, digests = self._options.chunk_tokens, row.ticket.digests
        while not row.read % size and row.read // size < len(digests):
            pages = self.pages.find(digests[row.read // size])
            if pages is None:
                break
            page_range = slice(row.read // PAGE_SIZE, (row.read + size) // PAGE_SIZE)
            self.pages.release(row.pages[page_range])
            row.pages[page_range] = pages
            row.read += size
            row.read_by_draft = row.read
            row.cached += size
            self.counts["cached_tokens"] += size

    def _reserve(self, row: ServedRow, count: int) -> None:
        """Reserve pages for `count` more tokens of a row, if necessary by preempting younger rows."""
        while (lacks := row.lacks(count)) and not row.ended:
            pages = self.pages.take(lacks)
            if pages is not None:
                row.pages += pages
            elif not self._collect():  # collecting may end rows, and so free pages
                youngest = max(
                    (candidate for candidate in self.rows if candidate.pages),
                    key=lambda candidate: _age(candidate.ticket),
                    default=row,
                )
                if _age(youngest.ticket) <= _age(row.ticket):
                    return
                self._preempt(youngest)

    def _preempt(self, row: ServedRow) -> None:
        """Free the pages of a row, whose tokens must then be prefilled again."""
        self.pages.release(row.pages)
        row.pages, row.scores, row.read, row.read_by_draft = [], [], 0, 0
        row.scoring = row.request.score_prompt and not row.chosen
        row.cached = row.cached if row.chosen else 0
        self.counts["preempted"] += 1

    def launch(self, readers: Sequence[ServedRow], number: int, most: int) -> LaunchedStep | None:
        """Launch a step: prefill of `readers`, and `number` drafts of each other row, or `most` tokens of a single row."""
        able = [row for row in self.rows if row not in readers and not row.reads and row.left and row.accepting is None]
        many = number + 1
        if not number and len(able) == 1 and not readers and self.drafting is None and able[0].allowed is None:
            many = max(min(most, able[0].left), 1)
        for row in readers:
            self._find_prefix(row)
        planned = [(row, min(row.unread, self._options.chunk_tokens)) for row in readers] + [(row, many) for row in able]
        begins = {id(row): row.read for row, _ in planned}
        # A row that is preempted while others reserve pages must be prefilled again, and is not part of this step.
        stays = lambda row: row.read == begins[id(row)] and (row in readers or not row.reads) and not row.ended
        for row, count in sorted(planned, key=lambda plan: _age(plan[0].ticket)):
            if stays(row):
                self._reserve(row, count)
        parts = [RowPart(row, row.read, count) for row, count in planned if stays(row) and not row.lacks(count)]
        self._read_draft([part for part in parts if part.row in readers])
        if parts and parts[0].row.scoring:
            self._score(parts.pop(0))
        if not parts:
            return None
        if number:
            if self._caught_up([part.row for part in parts]):
                return self._verify([part._replace(size=1) for part in parts], number)
            parts = [part._replace(size=1) for part in parts]
        return self._step(parts, CATCHING_UP if number else 0)

    def _step(self, parts: list[RowPart], number: int) -> LaunchedStep:
        rows, tokens, chunk = len(parts), sum(part.size for part in parts), self._options.chunk_tokens
        has_full_chunk = any(row.reads and count == chunk for row, _, count in parts)
        shapes = self._options.steps
        if rows == 1 and parts[0].row.unread == 1:  # a burst
            shape, count = shapes[0], tokens
            parts = [parts[0]._replace(size=1)]
        else:
            shape, count = next(shape for shape in shapes if shape[0] >= rows and shape[1] >= tokens), 0
            shape = shapes[-1] if has_full_chunk else shape
        batch, settings = batch_of(parts, shape, self.width, self._options.rows), self._settings_of(parts, shape[0])
        if count:
            self.state, packed = self._model.burst(self.state, batch, settings, count)
        else:
            self.state, packed = self._model.step(self.state, batch, settings)
        for row, begin, size in parts:
            live, digests = size == row.unread, row.ticket.digests
            if live and not row.chosen:
                self.counts["prompt_tokens"] += len(row.request.prompt)
                self.pages.used(digests)
            row.read, row.chosen = begin + (count or size), row.chosen + (count or live)
            if size == chunk and not begin % size and begin // size < len(digests):
                self.pages.keep(digests[begin // size], row.pages[begin // PAGE_SIZE : (begin + size) // PAGE_SIZE])
        return LaunchedStep(packed, [part.row for part in parts], (shape, number), max(count, 1))

    def _score(self, part: RowPart) -> None:
        """Prefill a chunk of a prompt, and score its tokens."""
        row, begin, count = part
        size = self._options.chunk_tokens
        targets = np.zeros(size, np.int32)
        following = row.tokens[begin + 1 : begin + 1 + count]
        targets[: len(following)] = following
        batch = batch_of([part], (1, size), self.width, self._options.rows)
        self.state, packed = self._model.score(self.state, batch, self._settings_of([part], 1), targets)
        row.scores.append(packed)
        row.read += count
        if not row.unread:  # the last token is processed again, to sample the next one
            row.read, row.scoring = row.read - 1, False

    def _settings_of(self, parts: Sequence[RowPart], rows: int) -> RowSettings:
        made_of: list[object] = [rows, *(x for part in parts for x in (part.row, part.row.allowed))]
        if self._settings is not None:
            old, settings = self._settings
            if len(old) == len(made_of) and all(x is y for x, y in zip(old, made_of, strict=True)):
                return settings
        settings = jax.device_put(settings_of_rows([part.row for part in parts], rows, self._model.config.vocab_size))
        self._settings = made_of, settings
        return settings

    def drafted(self) -> int:
        """The number of draft tokens per row in the next step; 0 if some row has no room for them."""
        if self.drafting is None or not self.rows:
            return 0
        number = self.drafting.choose(self._shape(len(self.rows)), [row.followed for row in self.rows])
        capacity = self.width * PAGE_SIZE
        return 0 if any(not row.chosen or row.read + number >= capacity for row in self.rows) else number

    def _shape(self, rows: int) -> tuple[int, int]:
        """The shape (rows, tokens) of a step with one token per row."""
        return next(shape for shape in self._options.steps if shape[0] >= rows)

    def _read_draft(self, parts: Sequence[RowPart]) -> None:
        """Prefill the draft model with the same tokens."""
        if self._model.draft is None or not parts:
            return
        batch = batch_of(parts, self._options.steps[-1], self.width, self._options.rows)
        self.state = self._model.read_draft(self.state, batch)
        for row, begin, count in parts:
            row.read_by_draft = begin + count

    def _caught_up(self, rows: Sequence[ServedRow]) -> bool:
        """Prefill the draft model with tokens sampled without it; whether it now has all but the last two of each row."""
        if self._model.draft is None:
            return True
        left, parts = self._options.steps[-1][1], []
        behind = [row for row in rows if row.followed is not None and row.read - row.read_by_draft > 1]
        for row in behind:
            count = min(row.read - row.read_by_draft, left)
            left -= count
            if count:
                parts.append(RowPart(row, row.read_by_draft, count))
        self._read_draft(parts)
        return all(row.read - row.read_by_draft <= 1 for row in behind)

    def _verify(self, parts: list[RowPart], number: int) -> LaunchedStep:
        assert self.drafting is not None
        shape, rows = self._shape(len(parts)), [part.row for part in parts]
        batch = batch_of(parts, shape, self.width, self._options.rows)
        drafts = self.drafting.propose([*(row.followed for row in rows), *[None] * (shape[0] - len(rows))], number)
        settings = self._settings_of(parts, shape[0])
        self.state, packed = self._model.verify(self.state, batch, settings, drafts, number)
        return LaunchedStep(packed, rows, (shape, number), settle=partial(self._settle, rows, number))

    def _settle(self, rows: Sequence[ServedRow], number: int, counts: list[int]) -> None:
        """Record the number of tokens of each row after a step with drafts."""
        assert self.drafting is not None
        counts = counts[: len(rows)]
        self.drafting.settle(number, counts)
        for row, count in zip(rows, counts, strict=True):
            row.read_by_draft = row.read + min(count, number)
            row.read += count
            row.chosen += count


def _age(ticket: Ticket) -> int:
    """The key that sorts requests from the oldest to the youngest."""
    return ticket.number
