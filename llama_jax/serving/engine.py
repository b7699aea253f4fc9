"""The engine: many requests on one model; each gets the tokens that it would get alone.

One thread runs it, turn by turn. A turn reads one piece of one prompt and gives every running row a token; the results are
collected one turn later, so that the device never waits for the host. A row that is alone gets several tokens in a turn of a
fast model, because starting a program for each token would take a good part of the time.
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

from llama_jax.config import LlamaConfig
from llama_jax.model.params import Llama
from llama_jax.serving.admission import Queue, checked, room_of
from llama_jax.serving.choosing import ChosenTokens, unpack
from llama_jax.serving.drafting import drafting_by
from llama_jax.serving.model import ServedModel
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.pool import BURST, DecodingRow, Pending, Pool
from llama_jax.serving.prefix import PrefixCache
from llama_jax.serving.reading import PromptProgress
from llama_jax.serving.requests import (
    BusyError,
    ClosedError,
    FinishReason,
    GenerationRequest,
    ScoredToken,
    Ticket,
    Update,
)
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
        sizes = options.pools(config, self.model.reads_filled_slots)
        self.pools = [Pool(self.model, pool, self.drafting) for pool in sizes]
        self.prefixes = PrefixCache(options.prefix_bytes)
        self.after_turn: Callable[[], None] | None = None
        self.failure: str | None = None
        self._capacities = options.capacities(config)
        self._queue = Queue(options.most_waiting, options.most_waiting_tokens)
        self._reading: list[Ticket] = []
        self._pending: list[Pending] = []
        self._cancelled: deque[Ticket] = deque()
        self._timed: list[Ticket] = []
        self._constraints = DaemonThreadPool("constraints", CONSTRAINT_THREADS)
        self._accepting: list[DecodingRow] = []  # rows whose constraint took a token in since the last turn
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
        warm(self.model, self.pools, self._capacities, self.options.piece, progress or (lambda done, of: None))
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
            running = [row.ticket for pool in self.pools for row in pool.running]
            pending = [row.ticket for pending in self._pending for row in pending.rows if row is not None]
            for ticket in dict.fromkeys([*waiting, *self._reading, *running, *pending]):
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
        return bool(self._queue or self._reading or self._pending or self._cancelled) or any(
            pool.running for pool in self.pools
        )

    def turn(self) -> bool:
        """Read a piece of a prompt, and give every running row a token or more; False when there was nothing to do."""
        begun = time.monotonic()
        if not self.busy and not self._timed:
            return False
        kinds = [one.kind for one in self._pending]
        if any(pool.unsettled for pool in self.pools):  # nothing can be moved before that is known
            self._collect(self._take_pending())
        self._sweep(begun)
        self._move()
        before = self._take_pending()
        first = self._read()
        alone = not first and not self._reading
        one_row = alone and sum(len(pool.running) for pool in self.pools) == 1
        most = min(int(BURST_SECONDS / self._token_seconds), BURST) if one_row else 1
        if any(pool.waits for pool in self.pools):
            self._collect([*before, *first])
            before, first = [], []
        self._take_constraints()
        self._pending = [one for one in (pool.take_turn(most) for pool in self.pools) if one is not None]
        self._collect([*before, *first])  # a first token does not wait a turn: the device has it before it starts this one
        self._after_turn()
        self._last_turn = time.monotonic()
        self._turns += 1
        self._turn_seconds += self._last_turn - begun
        if one_row and len(before) == 1:
            self._token_seconds = (self._last_turn - begun) / before[0].steps
        if self.drafting is not None:
            steady = alone and kinds == [one.kind for one in self._pending]
            self.drafting.observe(kinds, self._last_turn - begun if steady else None)
        return True

    def stats(self) -> EngineStats:
        """The engine's current numbers. From any thread."""
        pools, queue = self.pools, self._queue
        running = [row for pool in pools for row in list(pool.rows) if row is not None]
        return EngineStats(
            rows=sum(pool.options.rows[-1] for pool in pools),
            running=len(running),
            reading=len(self._reading),
            waiting=len(queue),
            waiting_tokens=queue.tokens,
            cache_fill=sum(row.slots for row in running)
            / sum(pool.options.rows[-1] * pool.options.capacities[-1] for pool in pools),
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
            prefix_entries=len(self.prefixes),
            prefix_bytes=self.prefixes.held_bytes,
            evicted=self.prefixes.evicted,
        )

    def _read(self) -> list[Pending]:
        """Read a piece of one prompt, and choose the first token if that completes the prompt."""
        ticket = self._next_prompt()
        if ticket is None:
            return []
        reading = ticket.reading
        assert reading is not None
        cached = reading.cached
        reading.read(self.prefixes)
        self._counts["cached_tokens"] += reading.cached - cached
        if reading.left:
            return []
        self._reading.remove(ticket)
        self._counts["prompt_tokens"] += len(reading.tokens)
        request = ticket.request
        constraint = request.constraint
        row = DecodingRow(ticket, request, slots=len(reading.tokens), left=request.max_new_tokens - 1)
        ticket.row = row
        row.allowed = None if constraint is None else constraint.allowed()
        row.followed = None if self.drafting is None else self.drafting.follow(request)
        one, packed = reading.begin(ticket.arrays, row.allowed)
        if row.left > 0:
            self._pool_for(ticket).join(row, one)
        return [Pending(packed, [row])]

    def _next_prompt(self) -> Ticket | None:
        """Among the prompts with a free row, alternately the oldest and the one with the least left to read.

        So a short prompt does not wait for a long one, and a long one still advances at half the speed whatever arrives.
        """
        free = [pool for pool in self.pools if self._free(pool) > 0]
        with self._changed:  # callers that submit wait for this lock: nothing is searched where there is no free row
            some = list(self._queue) if free else []
            able = some if len(free) == len(self.pools) else [one for one in some if self._pool_for(one) in free]
            candidates = [*self._reading, *able]
            if not candidates:
                return None
            oldest_first = self._turns % 2 == 0
            ticket = min(candidates, key=lambda one: one.arrived if oldest_first else (one.left, one.arrived))
            if ticket.reading is None:
                self._queue.remove(ticket)
        if ticket.reading is None:
            ticket.reading = PromptProgress(self.model, ticket.request, self.options.piece, self._capacities)
            self._reading.append(ticket)
        return ticket

    def _pool_for(self, ticket: Ticket) -> Pool:
        """The pool whose rows hold the prompt and one more token."""
        return next(pool for pool in self.pools if pool.longest > len(ticket.request.prompt) or pool is self.pools[-1])

    def _free(self, pool: Pool) -> int:
        """Rows of a pool that are neither taken nor reserved for a prompt that is being read."""
        return pool.free - sum(self._pool_for(ticket) is pool for ticket in self._reading)

    def _move(self) -> None:
        """Move rows that have outgrown their pool to the next as soon as it has a free row."""
        for pool, longer in zip(self.pools, self.pools[1:], strict=False):
            free = self._free(longer)
            if free and any(pool.outgrown()):
                self._collect(self._take_pending())  # rows that have ended need not move
                for row in list(pool.outgrown())[:free]:
                    one = pool.take_row(row)
                    pool.leave(row)
                    longer.join(row, one)

    def _take_pending(self) -> list[Pending]:
        pending, self._pending = self._pending, []
        return pending

    def _collect(self, pending: list[Pending]) -> None:
        """Deliver the tokens that the device has generated."""
        for one in pending:
            choice = unpack(one.packed)
            if one.settle is not None:
                one.settle(choice.valid.sum(axis=1).tolist())
            for at in zip(*(axis.tolist() for axis in choice.valid.nonzero()), strict=True):
                row = one.rows[at[0]]
                if row is not None and not row.ended:
                    self._take_token(row, choice, at)

    def _take_token(self, row: DecodingRow, choice: ChosenTokens, at: tuple[int, ...]) -> None:
        request, ticket = row.request, row.ticket
        update = Update()
        if row.count == 0:
            update.cached = ticket.reading.cached
            update.prompt = _scores(ticket.reading) if request.score_prompt else None
            ticket.reading = None
        token = scored(choice, at, request.alternatives)
        if token.logprob != token.logprob:  # NaN
            update.finish, update.error = "failed", "the model's logits are not numbers: its weights overflow; try float32"
        elif request.max_new_tokens == 0:
            update.finish = "length"
        elif token.id in request.stop_tokens:
            update.finish, update.ended_by = "stop", token
        else:
            update.tokens.append(token)
            row.count += 1
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
            for pool in self.pools:
                pool.constraints_changed()
        accepting = {row.accepting: row for pool in self.pools for row in pool.running if row.accepting is not None}
        if accepting and len(accepting) == sum(len(pool.running) for pool in self.pools):  # nothing else can go on
            wait(accepting, CONSTRAINT_SECONDS, FIRST_COMPLETED)
        for future, row in accepting.items():
            if future.done():
                future.result()
                row.accepting, row.allowed = None, row.request.constraint.allowed()  # type: ignore[union-attr]
                for pool in self.pools:
                    pool.constraints_changed()

    def _end(self, ticket: Ticket, update: Update) -> None:
        """Deliver the last update of a request, and free its row."""
        if ticket.ended:
            return
        ticket.ended = True
        assert update.finish is not None
        self._finished[update.finish] += 1
        if ticket.row is not None:
            ticket.row.ended = True
            if ticket.row.accepting is not None:
                ticket.row.accepting.cancel()
            for pool in self.pools:
                pool.leave(ticket.row)
        ticket.deliver(update)

    def _finish(self, ticket: Ticket, reason: FinishReason, error: str | None = None) -> None:
        with self._changed:
            self._queue.discard(ticket)
        if ticket in self._reading:
            self._reading.remove(ticket)
        ticket.reading = None
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


def scored(choice: ChosenTokens, at: tuple[int, ...], alternatives: int) -> ScoredToken:
    """One token of a choice."""
    beside: Iterator[tuple[int, float]] = zip(
        choice.ids[at][:alternatives].tolist(), choice.logprobs[at][:alternatives].tolist(), strict=True
    )
    return ScoredToken(int(choice.token[at]), float(choice.logprob[at]), tuple(beside) if alternatives else ())


def _scores(reading: PromptProgress) -> list[ScoredToken]:
    """The tokens of a prompt, each with its log-probability given those before it."""
    found = [ScoredToken(int(reading.tokens[0]), None)]
    for packed in reading.scores:  # by whole columns: rows of all requests wait for this
        choice = unpack(packed)
        ids, logprobs = (x[:, : reading.request.alternatives].tolist() for x in (choice.ids, choice.logprobs))
        beside = [tuple(zip(*both, strict=True)) for both in zip(ids, logprobs, strict=True)]
        rows = zip(choice.token.tolist(), choice.logprob.tolist(), beside, strict=True)
        found += [ScoredToken(*row) for row in rows][: int(choice.valid.sum())]
    return found[: len(reading.tokens)]  # what follows the last token is not part of the prompt
