"""The engine: continuous batching of requests on one model; each gets the same tokens as without other requests.

One thread runs it in iterations. An iteration launches one step of the device, which prefills a chunk of a prompt, or
several short prompts, and decodes a token of every other row. Its results are collected one iteration later, so that the
device never waits for the host. With a fast model a single row gets several tokens per iteration (a burst), because
launching a program per token would take a significant part of the time.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.model.params import LlamaParams
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.programs import BURST
from llama_jax.serving.requests import BusyError, ClosedError, FinishReason, GenerationRequest, Ticket, Update
from llama_jax.serving.row_sampling import ChosenTokens, unpack_choices
from llama_jax.serving.rows import LaunchedStep, ServedRow, digests_of, prompt_scores, scored_token
from llama_jax.serving.scheduler import Queue, Scheduler, validate_request
from llama_jax.serving.served_model import ServedModel
from llama_jax.serving.thread_pool import DaemonThreadPool
from llama_jax.serving.warmup import warm

CONSTRAINT_THREADS = 2
CONSTRAINT_SECONDS = 0.005  # an iteration waits at most this long for the constraints of its rows, then omits these rows
BURST_SECONDS = 0.025  # maximum time of a burst, because a request that arrives meanwhile waits for its end


class Engine:
    """Continuous batching. `submit` may be called from any thread; call `run` in one, or `step` repeatedly.

    Args:
      config, params: the model; on a mesh that does not shard rows.
      model: used instead of `ServedModel.of(config, params, ...)`, such as the result of `multihost_engine.leading`.

    Raises:
      GenerationError: the context is longer than the model's or the draft model's; a draft model with another vocabulary.
      MeshError: parameters on a mesh that shards rows; a draft model on other devices.
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: LlamaParams,
        options: EngineOptions = EngineOptions(),
        model: ServedModel | None = None,
    ) -> None:
        self.context, self.vocab_size = options.context_of(config), config.vocab_size
        self.model = model or ServedModel.of(config, params, options.cache, options.compute, options.draft)
        self.options = options = options.for_platform(self.model.platform)
        self.scheduler = Scheduler(self.model, options, self.context, self._collect)
        self.after_iteration: Callable[[], None] = lambda: None
        self.failure: str | None = None
        self._queue = Queue(options.most_waiting, options.most_waiting_tokens)
        self._pending: LaunchedStep | None = None
        self._cancelled: deque[Ticket] = deque()
        self._constraints = DaemonThreadPool("constraints", CONSTRAINT_THREADS)
        self._accepting: list[ServedRow] = []  # rows whose constraint received a token since the last iteration
        self._changed = threading.Condition()
        self._closing: str | None = None
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._compiled = CompileCount()
        self._iterations = 0
        self._iteration_seconds = 0.0
        self._token_seconds = math.inf  # in the last iteration with a single row and without prefill
        self._last_iteration = time.monotonic()

    def warm(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Compile all programs that requests can need, by running each once; return the seconds that it took.

        Args:
          progress: called with the number of programs done and the total.
        """
        begun = time.monotonic()
        scheduler, drafting = self.scheduler, self.scheduler.drafting
        numbers = () if drafting is None else (drafting.tokens,)
        report = progress or (lambda done, of: None)
        scheduler.state = warm(self.model, scheduler.state, self.options, scheduler.width, numbers, report)
        self._compiled.begin()
        return time.monotonic() - begun

    def submit(self, request: GenerationRequest, deliver: Callable[[Update], None]) -> Ticket:
        """Queue a request. From any thread; `deliver` is called on the engine's thread.

        Raises:
          GenerationError: the request is invalid.
          BusyError: the queue is full.
          ClosedError: the engine is shutting down.
        """
        arrays = validate_request(request, self.model, self.context)
        digests: list[bytes] = []
        if not request.score_prompt:  # the program that scores prompts does not use the prefix cache
            lengths = len(request.prompt), request.max_new_tokens
            roots = *(model.rope_root(*lengths) for model in self.model.models), request.adapter
            digests = digests_of(np.asarray(request.prompt, np.int32), self.options.chunk_tokens, roots)
        with self._changed:
            self._check_room(len(request.prompt))
            ticket = Ticket(request, arrays, deliver, self._cancel, digests)
            self._queue.add(ticket)
            self._changed.notify()
        return ticket

    def room(self, length: int) -> int:
        """The largest `max_new_tokens` for a prompt of this length. From any thread."""
        return self.context - length

    def check_room(self, requests: int = 1) -> None:
        """Raise an error, as `submit` does, if this many prompts would not be admitted, however short. From any thread."""
        with self._changed:
            self._check_room(requests, requests)

    def run(self) -> None:
        """Run iterations until `close`. An exception ends every request as "failed", and is raised."""
        try:
            while True:
                with self._changed:
                    while not self.busy and self._closing is None:
                        self._changed.wait()
                    if self._closing == "now" or (self._closing == "drain" and not self.busy):
                        break
                self.step()
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            reason: FinishReason = "cancelled" if self.failure is None else "failed"
            with self._changed:
                self._closing = "now"
                waiting = self._queue.clear()
            for ticket in [*waiting, *(row.ticket for row in self.scheduler.rows)]:
                with suppress(Exception):  # an error in one callback must not prevent the others
                    self._finish(ticket, reason, self.failure)
            self.after_iteration()

    def close(self, drain: bool = False) -> None:
        """End `run`: immediately, or with `drain` after all admitted requests have ended. From any thread."""
        with self._changed:
            self._closing = "drain" if drain and self._closing is None else "now"
            self._changed.notify()
        self._compiled.end()

    @property
    def busy(self) -> bool:
        """Whether an iteration would do anything."""
        return bool(self._queue or self.scheduler.rows or self._pending or self._cancelled)

    def step(self) -> bool:
        """Launch a step of prefill and decoding, and collect the previous step; False if there was nothing to do."""
        begun, scheduler = time.monotonic(), self.scheduler
        if not self.busy:
            return False
        profile = None if self._pending is None else self._pending.profile
        if (
            self._pending is not None and self._pending.settle is not None
        ):  # the next step depends on the number of accepted drafts
            self._collect()
        while self._cancelled:
            self._finish(self._cancelled.popleft(), "cancelled")
        readers = self._next_readers()
        alone = not readers and not any(row.reads for row in scheduler.rows)
        number = scheduler.drafted() if alone else 0
        if number or any(row.allowed is not None for row in scheduler.rows):  # both need all tokens so far
            self._collect()
        self._take_constraints()
        one_row = alone and len(scheduler.rows) == 1
        launched = scheduler.launch(readers, number, min(int(BURST_SECONDS / self._token_seconds), BURST) if one_row else 1)
        before = self._pending
        self._collect()
        self._pending = launched
        self.after_iteration()
        self._last_iteration = time.monotonic()
        self._iterations += 1
        self._iteration_seconds += self._last_iteration - begun
        if one_row and before is not None and before.profile[0] == self.options.steps[0]:
            self._token_seconds = (self._last_iteration - begun) / before.steps
        if scheduler.drafting is not None and profile is not None:
            steady = alone and launched is not None and profile[0] == launched.profile[0]
            scheduler.drafting.observe(profile, self._last_iteration - begun if steady else None)
        return True

    def stats(self) -> EngineStats:
        """A snapshot of the engine. From any thread."""
        rows, queue, pages = list(self.scheduler.rows), self._queue, self.scheduler.pages
        drafting, counts = self.scheduler.drafting, self.scheduler.counts
        running = sum(row.chosen > 0 for row in rows)
        return EngineStats(
            rows=self.options.rows,
            running=running,
            reading=len(rows) - running,
            waiting=len(queue),
            waiting_tokens=queue.tokens,
            cache_fill=1 - pages.available / pages.count,
            prompt_tokens=counts["prompt_tokens"],
            generated_tokens=self._counts["generated_tokens"],
            cached_tokens=counts["cached_tokens"],
            drafted=drafting.offered if drafting else 0,
            accepted=drafting.accepted if drafting else 0,
            finished=dict(self._finished),
            refused=self._counts["refused"],
            compilations_after_ready=self._compiled.count,
            iterations=self._iterations,
            iteration_seconds=self._iteration_seconds,
            last_iteration=self._last_iteration,
            busy=self.busy,
            prefix_entries=len(pages),
            prefix_bytes=pages.held_bytes,
            evicted=pages.evicted,
            preempted=counts["preempted"],
        )

    def _next_readers(self) -> list[ServedRow]:
        """The rows that prefill in this iteration; new requests among them get a seat."""
        with self._changed:  # callers that submit wait for this lock
            tickets = self.scheduler.readers(self._queue, self._iterations % 2 == 0)
            begin = [ticket for ticket in tickets if ticket.row is None]
            for ticket in begin:
                self._queue.remove(ticket)
        for ticket in begin:
            self.scheduler.seat(ticket)
        return [ticket.row for ticket in tickets]

    def _collect(self) -> bool:
        """Deliver the tokens of the pending step; False if there is none."""
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        choice = unpack_choices(pending.packed)
        if pending.settle is not None:
            pending.settle(choice.valid.sum(axis=1).tolist())
        for at in zip(*(axis.tolist() for axis in choice.valid.nonzero()), strict=True):
            row = pending.rows[at[0]]
            if not row.ended:
                self._take_token(row, choice, at)
        return True

    def _take_token(self, row: ServedRow, choice: ChosenTokens, at: tuple[int, ...]) -> None:
        request, ticket = row.request, row.ticket
        update = Update()
        if row.count == 0:
            update.cached = row.cached
            update.prompt = prompt_scores(row) if request.score_prompt else None
            row.scores = []
        token = scored_token(choice, at, request.alternatives)
        if token.logprob != token.logprob:  # NaN
            update.finish, update.error = "failed", "the model's logits are NaN: its numbers overflow; try float32"
        elif request.max_new_tokens == 0:
            update.finish = "length"
        elif token.id in request.stop_tokens:
            update.finish, update.ended_by = "stop", token
        else:
            update.tokens.append(token)
            row.tokens.append(token.id)
            if row.followed is not None:
                self.scheduler.drafting.learn(row.followed, token.id)  # type: ignore[union-attr]
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
        """Update the allowed tokens of constrained rows. Waits only for constraints that got a token in this iteration."""
        new, self._accepting = [row.accepting for row in self._accepting if row.accepting is not None], []
        if new:
            wait(new, CONSTRAINT_SECONDS)
        accepting = {row.accepting: row for row in self.scheduler.rows if row.accepting is not None}
        if accepting and len(accepting) == len(self.scheduler.rows):  # no row can continue without them
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
            if row.accepting is not None:
                row.accepting.cancel()
            self.scheduler.leave(row)
        ticket.deliver(update)

    def _finish(self, ticket: Ticket, reason: FinishReason, error: str | None = None) -> None:
        with self._changed:
            self._queue.remove(ticket)
        self._end(ticket, Update(finish=reason, error=error))

    def _check_room(self, tokens: int, requests: int = 1) -> None:
        if self._closing is not None or self.failure is not None:
            raise ClosedError(f"the engine is shutting down ({self.failure or 'closed'}) and accepts no requests")
        done = self.scheduler.counts["prompt_tokens"] + self._counts["generated_tokens"]
        try:
            self._queue.check_room(tokens, done / self._iteration_seconds if self._iteration_seconds > 0 else 0.0, requests)
        except BusyError:
            self._counts["refused"] += 1
            raise

    def _cancel(self, ticket: Ticket) -> None:
        with self._changed:
            self._cancelled.append(ticket)
            self._changed.notify()


class EngineStats(NamedTuple):
    """A snapshot of an engine. Counts are since its start.

    Attributes:
      rows: maximum number of requests decoded concurrently.
      running, reading, waiting: numbers of requests that are being decoded, being prefilled, and waiting.
      waiting_tokens: tokens of the waiting prompts.
      cache_fill: fraction of the cache's pages that requests use, 0 to 1.
      prompt_tokens: tokens of prompts that have been prefilled, including those found in the prefix cache.
      generated_tokens: delivered tokens.
      cached_tokens: tokens of prompts found in the prefix cache.
      drafted, accepted: draft tokens, and accepted ones.
      finished: number of requests by finish reason.
      refused: requests rejected because the queue was full.
      compilations_after_ready: programs compiled since `warm`, anywhere in the process; the engine itself compiles none.
      iterations: number of iterations.
      iteration_seconds: total seconds of these iterations.
      last_iteration: end of the last iteration, by `time.monotonic`.
      busy: whether there is work to do.
      prefix_entries, prefix_bytes, evicted: entries, bytes and evicted entries of the prefix cache.
      preempted: number of times that a request lost its pages to an older one.
    """

    rows: int
    running: int
    reading: int
    waiting: int
    waiting_tokens: int
    cache_fill: float
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    drafted: int
    accepted: int
    finished: Mapping[str, int]
    refused: int
    compilations_after_ready: int
    iterations: int
    iteration_seconds: float
    last_iteration: float
    busy: bool
    prefix_entries: int
    prefix_bytes: int
    evicted: int
    preempted: int = 0


class CompileCount:
    """The number of programs compiled, or loaded from a cache, between `begin` and `end`."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = False

    def begin(self) -> None:
        if not self._counting:
            jax.monitoring.register_event_duration_secs_listener(self._on_event)
        self._counting = True

    def end(self) -> None:
        if self._counting:
            jax.monitoring.unregister_event_duration_listener(self._on_event)
        self._counting = False

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"
