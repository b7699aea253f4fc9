"""The engine: many requests on one model; each gets the tokens that it would get alone.

One thread runs it, turn by turn. A turn is one step of the device: it reads a piece of one prompt and gives every other row
a token; the results are collected one turn later, so that the device never waits for the host. A row that is alone gets
several tokens in a turn of a fast model, because starting a program for each token would take a good part of the time.

A row takes pages of the cache as it grows. Where there are none left, the youngest rows give up theirs: what they have is
read again when there is room, and they go on as if nothing had been.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from functools import partial

import jax
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.model.cache import PAGE
from llama_jax.model.params import Llama
from llama_jax.serving.admission import Queue, checked, room_of
from llama_jax.serving.choosing import ChosenTokens, unpack
from llama_jax.serving.drafting import CATCHING_UP, drafting_by
from llama_jax.serving.model import BURST, ServedModel
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.pages import PagePool, digests_of
from llama_jax.serving.programs import RowSettings
from llama_jax.serving.requests import (
    BusyError,
    ClosedError,
    FinishReason,
    GenerationRequest,
    ScoredToken,
    Ticket,
    Update,
)
from llama_jax.serving.rows import Pending, RowPart, ServedRow, batch_of, pages_of, settings_of
from llama_jax.serving.stats import CompileCount, EngineStats
from llama_jax.serving.thread_pool import DaemonThreadPool
from llama_jax.serving.warming import warm

CONSTRAINT_THREADS = 2
CONSTRAINT_SECONDS = (
    0.005  # that a turn waits for what the constraints of its rows allow; then it goes on without these rows
)
BURST_SECONDS = 0.025  # that several tokens of a turn may take, because a request that arrives meanwhile waits


class Engine:
    """Continuous batching. `submit` may be called from any thread; call `run` in one, or `turn` repeatedly.

    Args:
      config, params: the model; on a mesh that does not divide rows.
      model: the same as a `ServedModel`, where it is not `ServedModel.of` them: as `group.leading` gives it.

    Raises:
      GenerationError: a context beyond the model's or draft model's; a draft model with another vocabulary.
      MeshError: parameters on a mesh that divides rows; a draft model on other devices.
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: Llama,
        options: EngineOptions = EngineOptions(),
        model: ServedModel | None = None,
    ) -> None:
        self.options = options
        self.context = options.context_of(config)
        self.model = model or ServedModel.of(config, params, options.cache, options.compute, options.draft)
        self.drafting = drafting_by(options.draft)
        self.pages = PagePool(options.pages(config), self.model.page_bytes, options.prefix_bytes)
        self.rows: list[ServedRow] = []
        self.state = self.model.empty(options.rows, self.pages.count)
        self.after_turn: Callable[[], None] | None = None
        self.failure: str | None = None
        self._width = pages_of(self.context)
        self._seats = list(reversed(range(options.rows)))  # that are free
        self._queue = Queue(options.most_waiting, options.most_waiting_tokens)
        self._pending: Pending | None = None
        self._settings: tuple[list[object], RowSettings] | None = None  # on the device, and what they were made of
        self._cancelled: deque[Ticket] = deque()
        self._timed: list[Ticket] = []
        self._constraints = DaemonThreadPool("constraints", CONSTRAINT_THREADS)
        self._accepting: list[ServedRow] = []  # rows whose constraint took a token in since the last turn
        self._changed = threading.Condition()
        self._closing: str | None = None
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._compiled = CompileCount()
        self._turns = 0
        self._turn_seconds = 0.0
        self._token_seconds = math.inf  # of the last turn in which a single row got tokens and nothing was read
        self._last_turn = time.monotonic()

    def warm(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Compile every program that any request can need, by running each once. Returns the seconds that it took.

        Args:
          progress: called with the number of programs done and the total.
        """
        begun = time.monotonic()
        numbers = () if self.drafting is None else self.drafting.numbers
        told = progress or (lambda done, of: None)
        self.state = warm(self.model, self.state, self.options, self._width, numbers, told)
        self._compiled.begin()
        return time.monotonic() - begun

    def submit(self, request: GenerationRequest, deliver: Callable[[Update], None]) -> Ticket:
        """Queue a request. From any thread; `deliver` is called on the engine's thread.

        Raises:
          GenerationError: the request is impossible.
          BusyError: the queue is full.
          ClosedError: the engine is shutting down.
        """
        arrays = checked(request, self.model, self.context)
        with self._changed:
            self._check_room(len(request.prompt))
            ticket = Ticket(request, arrays, deliver, self._cancel)
            self._queue.add(ticket)
            if request.deadline is not None:
                self._timed.append(ticket)
            self._changed.notify()
        return ticket

    def room(self, length: int) -> int:
        """How many tokens a prompt of this length may get. From any thread."""
        return room_of(self.model.config, self.context, length)

    def check_room(self, requests: int = 1) -> None:
        """Raise as `submit` does where this many prompts, however short, would not be admitted. From any thread."""
        with self._changed:
            self._check_room(requests, requests)

    def run(self) -> None:
        """Take turns until `close`. An exception ends every request as "failed", and is raised."""
        try:
            while True:
                with self._changed:
                    while not self.busy and self._closing is None:
                        self._changed.wait(self._until_deadline())
                        if self._timed:
                            break
                    if self._closing == "now" or (self._closing == "drain" and not self.busy):
                        break
                self.turn()
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            reason: FinishReason = "cancelled" if self.failure is None else "failed"
            with self._changed:
                self._closing = "now"
                waiting = self._queue.clear()
            for ticket in [*waiting, *(row.ticket for row in self.rows)]:
                with suppress(Exception):  # an error in one callback must not keep the others from being told
                    self._finish(ticket, reason, self.failure)
            self._after_turn()

    def close(self, drain: bool = False) -> None:
        """End `run`: after all admitted requests have ended, or at once. From any thread."""
        with self._changed:
            self._closing = "drain" if drain and self._closing is None else "now"
            self._changed.notify()
        self._compiled.end()

    @property
    def busy(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self._queue or self.rows or self._pending or self._cancelled)

    def turn(self) -> bool:
        """Read a piece of a prompt, and give every other row a token or more; False when there was nothing to do."""
        begun = time.monotonic()
        if not self.busy and not self._timed:
            return False
        kinds = [] if self._pending is None else [self._pending.kind]
        if self._pending is not None and self._pending.settle is not None:  # nothing can follow before that is known
            self._collect()
        self._sweep(begun)
        reader = self._next_prompt()
        alone = reader is None and not any(row.reads for row in self.rows)
        number = self._drafted() if alone else 0
        if number or any(row.allowed is not None for row in self.rows):  # which must know the tokens so far
            self._collect()
        self._take_constraints()
        one_row = alone and len(self.rows) == 1
        launched = self._launch(reader, number, min(int(BURST_SECONDS / self._token_seconds), BURST) if one_row else 1)
        before = self._pending
        self._collect()
        self._pending = launched
        self._after_turn()
        self._last_turn = time.monotonic()
        self._turns += 1
        self._turn_seconds += self._last_turn - begun
        if one_row and before is not None and before.kind[0] == self.options.steps[0]:
            self._token_seconds = (self._last_turn - begun) / before.steps
        if self.drafting is not None:
            steady = alone and launched is not None and kinds == [launched.kind]
            self.drafting.observe(kinds, self._last_turn - begun if steady else None)
        return True

    def stats(self) -> EngineStats:
        """The engine's current numbers. From any thread."""
        rows, queue, pages = list(self.rows), self._queue, self.pages
        running = sum(row.chosen > 0 for row in rows)
        return EngineStats(
            rows=self.options.rows,
            running=running,
            reading=len(rows) - running,
            waiting=len(queue),
            waiting_tokens=queue.tokens,
            cache_fill=1 - pages.available / pages.count,
            prompt_tokens=self._counts["prompt_tokens"],
            generated_tokens=self._counts["generated_tokens"],
            cached_tokens=self._counts["cached_tokens"],
            drafted=self.drafting.offered if self.drafting else 0,
            accepted=self.drafting.accepted if self.drafting else 0,
            finished=dict(self._finished),
            refused=self._counts["refused"],
            compilations_after_ready=self._compiled.count,
            turns=self._turns,
            turn_seconds=self._turn_seconds,
            last_turn=self._last_turn,
            busy=self.busy,
            prefix_entries=len(pages),
            prefix_bytes=pages.held_bytes,
            evicted=pages.evicted,
            preempted=self._counts["preempted"],
        )

    def _next_prompt(self) -> ServedRow | None:
        """Of the rows that have more to read, and requests that wait, alternately the oldest and the one with the least.

        So a short prompt does not wait for a long one, and a long one still advances at half the speed whatever arrives. No
        request begins for which there are no pages, nor one that came after it.
        """
        oldest = min((row.ticket for row in self.rows), key=_age, default=None)
        reading = [row.ticket for row in self.rows if row.reads and row.accepting is None]
        there = [one for one in reading if one.row.pages or one is oldest or self._fits(one)]
        with self._changed:  # callers that submit wait for this lock: nothing is searched where there is no seat
            waiting = list(self._queue) if self._seats and len(there) == len(reading) else []
            waiting = [one for one in waiting if self._fits(one)] if waiting and self._fits(waiting[0]) else []
            if not there and not waiting:
                return None
            oldest_first = self._turns % 2 == 0
            ticket = min([*there, *waiting], key=lambda one: (0 if oldest_first else one.left, _age(one)))
            if ticket.row is None:
                self._queue.remove(ticket)
        if ticket.row is None:
            self._seat(ticket)
        return ticket.row

    def _fits(self, ticket: Ticket) -> bool:
        """Whether there are pages for all that a request and the older ones have to read, and for one more token of each."""
        older = sum(row.lacks(row.unread + 1) for row in self.rows if _age(row.ticket) < _age(ticket))
        return pages_of(ticket.left + 1) + older <= self.pages.available

    def _seat(self, ticket: Ticket) -> None:
        """Give a request a seat; it has read nothing yet."""
        request, model = ticket.request, self.model
        prompt = np.asarray(request.prompt, np.int32)
        # Scoring uses another program, so its pieces are neither kept nor taken from what was.
        roots = *(each.rope_root(len(prompt)) for each in model.models), request.adapter
        ticket.row = ServedRow(
            ticket,
            self._seats.pop(),
            prompt.tolist(),
            [] if request.score_prompt else digests_of(prompt, self.options.piece, roots),
            None if request.constraint is None else request.constraint.allowed(),
            None if self.drafting is None else self.drafting.follow(request),
            scoring=request.score_prompt,
        )
        self.rows.append(ticket.row)
        if ticket.arrays.sampling.repetition_penalty[0] != 1:
            seen = np.zeros(model.vocab, bool)
            seen[prompt] = True
            self.state = model.enter(self.state, ticket.row.seat, seen)

    def _find_prefix(self, row: ServedRow) -> None:
        """Take the pieces that come next from those that are kept."""
        size = self.options.piece
        while not row.read % size and row.read // size < len(row.digests):
            pages = self.pages.find(row.digests[row.read // size])
            if pages is None:
                break
            own = slice(row.read // PAGE, (row.read + size) // PAGE)
            self.pages.give(row.pages[own])
            row.pages[own] = pages
            row.read += size
            row.read_by_draft = row.read
            row.cached += size
            self._counts["cached_tokens"] += size

    def _reserve(self, row: ServedRow, count: int) -> None:
        """Give a row pages for so many more tokens, if there are any that are not of older rows."""
        while (lacks := row.lacks(count)) and not row.ended:
            pages = self.pages.take(lacks)
            if pages is not None:
                row.pages += pages
            elif self._pending is not None:  # what has ended meanwhile gives up its pages; and no row lacks tokens
                self._collect()
            else:
                youngest = max((one for one in self.rows if one.pages), key=lambda one: _age(one.ticket), default=row)
                if _age(youngest.ticket) <= _age(row.ticket):
                    return
                self._preempt(youngest)

    def _preempt(self, row: ServedRow) -> None:
        """Take a row's pages, so that it must read its tokens again."""
        self.pages.give(row.pages)
        row.pages, row.scores, row.read, row.read_by_draft = [], [], 0, 0
        row.scoring = row.request.score_prompt and not row.chosen
        row.cached = row.cached if row.chosen else 0
        self._counts["preempted"] += 1

    def _launch(self, reader: ServedRow | None, number: int, most: int) -> Pending | None:
        """Start a step: a piece of the reader's, `number` drafts of each other row, or `most` tokens of a single one."""
        able = [row for row in self.rows if row is not reader and not row.reads and row.left and row.accepting is None]
        many = number + 1
        if not number and len(able) == 1 and reader is None and self.drafting is None and able[0].allowed is None:
            many = max(min(most, able[0].left), 1)
        wanted = [(row, many) for row in able]
        if reader is not None:
            self._find_prefix(reader)
            wanted.insert(0, (reader, min(reader.unread, self.options.piece)))
        begins = {id(row): row.read for row, _ in wanted}
        # A row that an older one takes the pages of meanwhile must read again, and has no part in this step.
        stays = lambda row: row.read == begins[id(row)] and (row is reader or not row.reads) and not row.ended
        for row, count in sorted(wanted, key=lambda one: _age(one[0].ticket)):
            if stays(row):
                self._reserve(row, count)
        parts = [RowPart(row, row.read, count) for row, count in wanted if stays(row) and not row.lacks(count)]
        if reader is not None and parts and parts[0].row is reader:
            self._read_draft(parts[:1])
            if reader.scoring:
                self._score(parts.pop(0))
        if not parts:
            return None
        if number:
            if self._caught_up([part.row for part in parts]):
                return self._verify([part._replace(size=1) for part in parts], number)
            parts = [part._replace(size=1) for part in parts]
        return self._step(parts, CATCHING_UP if number else 0)

    def _step(self, parts: list[RowPart], number: int) -> Pending:
        rows, tokens = len(parts), sum(part.size for part in parts)
        whole = any(row.reads and count == self.options.piece for row, _, count in parts)
        shapes = self.options.steps
        if rows == 1 and parts[0].row.unread == 1:  # in a burst each token is read after it is chosen
            shape, count = shapes[0], tokens
            parts = [parts[0]._replace(size=1)]
        else:
            shape, count = next(one for one in shapes if one[0] >= rows and one[1] >= tokens), 0
            shape = shapes[-1] if whole else shape
        batch, settings = batch_of(parts, shape, self._width, self.options.rows), self._settings_of(parts, shape[0])
        if count:
            self.state, packed = self.model.burst(self.state, batch, settings, count)
        else:
            self.state, packed = self.model.step(self.state, batch, settings)
        for row, begin, own in parts:
            live = own == row.unread
            if live and not row.chosen:
                self._counts["prompt_tokens"] += len(row.request.prompt)
                self.pages.used(row.digests)
            row.read, row.chosen = begin + (count or own), row.chosen + (count or live)
            if own == self.options.piece and not begin % own and begin // own < len(row.digests):
                self.pages.keep(row.digests[begin // own], row.pages[begin // PAGE : (begin + own) // PAGE])
        return Pending(packed, [part.row for part in parts], (shape, number), max(count, 1))

    def _score(self, part: RowPart) -> None:
        """Read a piece of a prompt, and score its tokens."""
        row, begin, count = part
        size = self.options.piece
        targets = np.zeros(size, np.int32)
        following = row.tokens[begin + 1 : begin + 1 + count]
        targets[: len(following)] = following
        batch = batch_of([part], (1, size), self._width, self.options.rows)
        self.state, packed = self.model.score(self.state, batch, self._settings_of([part], 1), targets)
        row.scores.append(packed)
        row.read += count
        if not row.unread:  # the last token is read once more, to choose what follows it
            row.read, row.scoring = row.read - 1, False

    def _settings_of(self, parts: list[RowPart], rows: int) -> RowSettings:
        made_of: list[object] = [rows, *(x for part in parts for x in (part.row, part.row.allowed))]
        if self._settings is not None:
            old, settings = self._settings
            if len(old) == len(made_of) and all(x is y for x, y in zip(old, made_of, strict=True)):
                return settings
        vocab = self.model.config.vocab_size
        settings = jax.device_put(settings_of([part.row for part in parts], rows, vocab))
        self._settings = made_of, settings
        return settings

    def _drafted(self) -> int:
        """How many tokens each row should draft in the next turn: 0 where some row has no room for them."""
        if self.drafting is None or not self.rows:
            return 0
        number = self.drafting.choose(self._shape(len(self.rows)), [row.followed for row in self.rows])
        capacity = self._width * PAGE
        return 0 if any(not row.chosen or row.read + number >= capacity for row in self.rows) else number

    def _shape(self, rows: int) -> tuple[int, int]:
        """The step of one token of each row."""
        return next(shape for shape in self.options.steps if shape[0] >= rows)

    def _read_draft(self, parts: list[RowPart]) -> None:
        """Let the draft model read the same tokens."""
        if self.model.draft is None or not parts:
            return
        batch = batch_of(parts, self.options.steps[-1], self._width, self.options.rows)
        self.state = self.model.read_draft(self.state, batch)
        for row, begin, count in parts:
            row.read_by_draft = begin + count

    def _caught_up(self, rows: list[ServedRow]) -> bool:
        """Let a draft model read tokens that came without it; whether it now has all but the last two of each row."""
        if self.model.draft is None:
            return True
        left, parts = self.options.steps[-1][1], []
        behind = [row for row in rows if row.followed is not None and row.read - row.read_by_draft > 1]
        for row in behind:
            count = min(row.read - row.read_by_draft, left)
            left -= count
            if count:
                parts.append(RowPart(row, row.read_by_draft, count))
        self._read_draft(parts)
        return all(row.read - row.read_by_draft <= 1 for row in behind)

    def _verify(self, parts: list[RowPart], number: int) -> Pending:
        assert self.drafting is not None
        shape, rows = self._shape(len(parts)), [part.row for part in parts]
        batch = batch_of(parts, shape, self._width, self.options.rows)
        told = self.drafting.propose([*(row.followed for row in rows), *[None] * (shape[0] - len(rows))], number)
        settings = self._settings_of(parts, shape[0])
        self.state, packed = self.model.verify(self.state, batch, settings, told, number)
        return Pending(packed, rows, (shape, number), settle=partial(self._settle, rows, number))

    def _settle(self, rows: list[ServedRow], number: int, counts: list[int]) -> None:
        """Record how many tokens a step with drafts has given each row."""
        assert self.drafting is not None
        counts = counts[: len(rows)]
        self.drafting.settle([row.followed for row in rows], number, counts)
        for row, count in zip(rows, counts, strict=True):
            row.read_by_draft = row.read + min(count, number)
            row.read += count
            row.chosen += count

    def _collect(self) -> None:
        """Deliver the tokens that the device has generated."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        choice = unpack(pending.packed)
        if pending.settle is not None:
            pending.settle(choice.valid.sum(axis=1).tolist())
        for at in zip(*(axis.tolist() for axis in choice.valid.nonzero()), strict=True):
            row = pending.rows[at[0]]
            if not row.ended:
                self._take_token(row, choice, at)

    def _take_token(self, row: ServedRow, choice: ChosenTokens, at: tuple[int, ...]) -> None:
        request, ticket = row.request, row.ticket
        update = Update()
        if row.count == 0:
            update.cached = row.cached
            update.prompt = _scores(row) if request.score_prompt else None
            row.scores = []
        token = scored(choice, at, request.alternatives)
        if token.logprob != token.logprob:  # NaN
            update.finish, update.error = "failed", "the model's logits are not numbers: its weights overflow; try float32"
        elif request.max_new_tokens == 0:
            update.finish = "length"
        elif token.id in request.stop_tokens:
            update.finish, update.ended_by = "stop", token
        else:
            update.tokens.append(token)
            row.tokens.append(token.id)
            if row.followed is not None:
                row.followed.learn(token.id)
            self._counts["generated_tokens"] += 1
            if row.count == request.max_new_tokens:
                update.finish = "length"
            elif request.constraint is not None:
                row.accepting = self._constraints.submit(partial(request.constraint.accept, token.id))
                self._accepting.append(row)
        if update.finish is None:
            ticket.deliver(update)
        else:
            self._end(ticket, update)

    def _take_constraints(self) -> None:
        """Take what constraints allow after the last token: each turn waits for those that it began, not for older ones."""
        new, self._accepting = [row.accepting for row in self._accepting if row.accepting is not None], []
        if new:
            wait(new, CONSTRAINT_SECONDS)
        accepting = {row.accepting: row for row in self.rows if row.accepting is not None}
        if accepting and len(accepting) == len(self.rows):  # nothing else can go on
            wait(accepting, CONSTRAINT_SECONDS, FIRST_COMPLETED)
        for future, row in accepting.items():
            if future.done():
                future.result()
                row.accepting, row.allowed = None, row.request.constraint.allowed()  # type: ignore[union-attr]

    def _end(self, ticket: Ticket, update: Update) -> None:
        """Deliver the last update of a request, and free its row."""
        if ticket.ended:
            return
        ticket.ended = True
        assert update.finish is not None
        self._finished[update.finish] += 1
        row = ticket.row
        if row is not None:
            row.ended = True
            if row.accepting is not None:
                row.accepting.cancel()
            self.rows.remove(row)
            self._seats.append(row.seat)
            self.pages.give(row.pages)
            row.pages = []
        ticket.deliver(update)

    def _finish(self, ticket: Ticket, reason: FinishReason, error: str | None = None) -> None:
        with self._changed:
            self._queue.discard(ticket)
        self._end(ticket, Update(finish=reason, error=error))

    def _check_room(self, tokens: int, requests: int = 1) -> None:
        if self._closing is not None or self.failure is not None:
            raise ClosedError(f"the engine is ending ({self.failure or 'closed'}); no request is taken")
        try:
            self._queue.check_room(tokens, self._tokens_per_second(), requests)
        except BusyError:
            self._counts["refused"] += 1
            raise

    def _cancel(self, ticket: Ticket) -> None:
        with self._changed:
            self._cancelled.append(ticket)
            self._changed.notify()

    def _sweep(self, now: float) -> None:
        """End requests that were cancelled or are past their deadline."""
        while self._cancelled:
            self._finish(self._cancelled.popleft(), "cancelled")
        if self._timed:
            late = [ticket for ticket in self._timed if (ticket.request.deadline or now) <= now]
            for ticket in late:
                self._finish(ticket, "timeout")
            with self._changed:
                self._timed = [ticket for ticket in self._timed if not ticket.ended]

    def _until_deadline(self) -> float | None:
        ends = [ticket.request.deadline for ticket in self._timed if ticket.request.deadline is not None]
        return max(min(ends) - time.monotonic(), 0) if ends else None

    def _tokens_per_second(self) -> float:
        made = self._counts["prompt_tokens"] + self._counts["generated_tokens"]
        return made / self._turn_seconds if self._turn_seconds > 0 else 0.0

    def _after_turn(self) -> None:
        if self.after_turn is not None:
            self.after_turn()


def _age(ticket: Ticket) -> int:
    """By which rows are ordered: the older one has the smaller."""
    return ticket.number


def scored(choice: ChosenTokens, at: tuple[int, ...], alternatives: int) -> ScoredToken:
    """One token of a choice."""
    beside: Iterator[tuple[int, float]] = zip(
        choice.ids[at][:alternatives].tolist(), choice.logprobs[at][:alternatives].tolist(), strict=True
    )
    return ScoredToken(int(choice.token[at]), float(choice.logprob[at]), tuple(beside) if alternatives else ())


def _scores(row: ServedRow) -> list[ScoredToken]:
    """The tokens of a prompt, each with its log-probability given those before it."""
    found = [ScoredToken(row.tokens[0], None)]
    for packed in row.scores:  # by whole columns: rows of all requests wait for this
        choice = unpack(packed)
        ids, logprobs = (x[:, : row.request.alternatives].tolist() for x in (choice.ids, choice.logprobs))
        beside = [tuple(zip(*both, strict=True)) for both in zip(ids, logprobs, strict=True)]
        rows = zip(choice.token.tolist(), choice.logprob.tolist(), beside, strict=True)
        found += [ScoredToken(*row) for row in rows][: int(choice.valid.sum())]
    return found[: len(row.request.prompt)]  # what follows the last token is not part of the prompt
