"""Rows that are decoded together: the request of each row, and the current number of rows and slots of the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from llama_jax.inference.state import State
from llama_jax.serving.choosing import Wishes
from llama_jax.serving.drafting import CATCHING_UP, Drafting, Kind, KnownRow
from llama_jax.serving.model import ServedModel, Slots
from llama_jax.serving.options import SMALLEST_PIECE, PoolOptions
from llama_jax.serving.requests import GenerationRequest

PATIENCE = 8  # turns for which a smaller state must suffice before the rows are moved into it
BURST = 8  # most tokens of a row in a turn without drafts


@dataclass(eq=False)
class DecodingRow:
    """A request that is being decoded.

    Attributes:
      ticket: the engine's ticket of the request.
      slots: tokens in its cache once all turns so far have run.
      left: most tokens that it can get after those turns.
      count: tokens that the host knows.
      allowed: uint32[ceil(V / 32)], what its constraint allows next; None without one.
      accepting: while its constraint takes in the last token, during which it gets no other; None otherwise.
      followed: the tokens that the host knows; None where nothing is drafted.
      read: how many of them a draft model has read.
      ended: nobody wants its tokens any more.
    """

    ticket: Any
    request: GenerationRequest
    slots: int
    left: int
    count: int = 0
    allowed: np.ndarray | None = None
    accepting: Future[None] | None = None
    followed: KnownRow | None = None
    ended: bool = False
    read: int = field(init=False)

    def __post_init__(self) -> None:
        self.read = self.slots


class Pending(NamedTuple):
    """Tokens that the device is computing, and the requests of their rows.

    Attributes:
      packed: `ChosenTokens` [B, K, any], packed; those after the end of a row or after a wrong draft are not valid.
      kind: of the turn; (None, 0) for a first token.
      settle: called with how many tokens each row has got, after a turn with drafts.
      steps: passes of the model.
    """

    packed: jax.Array
    rows: list[DecodingRow | None]
    kind: Kind = (None, 0)
    settle: Callable[[list[int]], None] | None = None
    steps: int = 1


@dataclass(eq=False)
class Pool:
    """A state of `inference.state` and its rows, with the draft model's cache of them.

    Attributes:
      unsettled: the last turn had drafts, and it is not yet known how many tokens the rows have.
    """

    model: ServedModel
    options: PoolOptions
    drafting: Drafting | None = None
    rows: list[DecodingRow | None] = field(init=False)
    slots: Slots = field(init=False)
    unsettled: bool = field(init=False, default=False)
    _wishes: Wishes | None = field(init=False, default=None)  # on the device; None where they must be rebuilt
    _patience: int = field(init=False, default=PATIENCE)

    def __post_init__(self) -> None:
        self.rows = [None] * self.options.rows[0]
        self.slots = self.model.empty_slots(self.options.rows[0], self.options.capacities[0])

    @property
    def state(self) -> State:
        return self.slots.state

    @property
    def longest(self) -> int:
        """Tokens that a row can have."""
        return self.options.capacities[-1]

    @property
    def running(self) -> list[DecodingRow]:
        return [row for row in self.rows if row is not None]

    @property
    def free(self) -> int:
        return self.options.rows[-1] - len(self.running)

    def join(self, row: DecodingRow, one: Slots) -> None:
        """Add a request, whose state of one row has just begun or comes from another pool."""
        self._fit([*self.running, row], one.state.cache.capacity)
        at = self.rows.index(None)
        self.slots = self.model.insert(self.slots, at, one)
        self.rows[at] = row
        self._wishes = None

    def leave(self, row: DecodingRow) -> None:
        """Remove a request that has ended, or goes to another pool."""
        if row in self.rows:
            self.rows[self.rows.index(row)] = None
            self._wishes = None

    def constraints_changed(self) -> None:
        """Record that the tokens that some row's constraint allows have changed."""
        self._wishes = None

    def take_row(self, row: DecodingRow) -> Slots:
        """The state of a single row, which continues."""
        return self.model.take_row(self.slots, self.rows.index(row))

    def outgrown(self) -> Iterator[DecodingRow]:
        """Rows that have no slot left for their next token."""
        return (row for row in self.running if row.slots >= self.longest)

    @property
    def waits(self) -> bool:
        """Whether the tokens so far must be known before the next turn, for a constraint or for drafts."""
        return self._number > 0 or any(row.allowed is not None for row in self.running)

    def take_turn(self, most: int = 1) -> Pending | None:
        """Start one more token of each row, or several; None where there is no row.

        Args:
          most: tokens that each of few rows gets, if it has room for as many and nothing has to be known before.
        """
        able = [row for row in self.running if self._able(row)]
        if not able:
            return None
        number = self._number
        if number and all(row.followed is None or row.slots < len(row.followed.row) for row in able):
            if self._caught_up():
                return self._take_drafts(number)
            number = CATCHING_UP
        else:
            number = 0
        count = self._burst(able, most)
        self._fit(self.running, max(row.slots for row in able) + count)
        if self._wishes is None:
            self._wishes = self._wishes_of()
        rows = [row if row is not None and self._able(row) else None for row in self.rows]
        if count > 1:
            self.slots, packed = self.model.take_burst(self.slots, self._wishes, count, BURST)
        else:
            self.slots, packed = self.model.take_turn(self.slots, self._wishes)
        for row in able:
            row.slots += count
            row.left -= count
            if not row.left:  # ends by itself
                self.rows[self.rows.index(row)] = None
            elif row.slots == self.longest:  # waits until it is moved
                self._wishes = None
        return Pending(packed, rows, (self.shape, number), steps=count)

    def _able(self, row: DecodingRow) -> bool:
        """Whether a row can get a token: it has room for it, and what its constraint allows is known."""
        return row.slots < self.longest and row.accepting is None

    def _burst(self, able: list[DecodingRow], most: int) -> int:
        """How many tokens a turn without drafts gives."""
        if self.drafting is not None or self.waits or len(self.rows) > self.options.rows[0]:
            return 1
        return max(min(most, BURST, *(min(row.left, self.longest - row.slots) for row in able)), 1)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and slots of the state."""
        return len(self.rows), self.state.cache.capacity

    @property
    def _number(self) -> int:
        """How many tokens each row should draft in the next turn: 0 where some row has no room for them."""
        if self.drafting is None:
            return 0
        number = self.drafting.choose(self.shape, [row.followed for row in self.running])
        return 0 if any(row.slots + number >= self.longest for row in self.running) else number

    def _caught_up(self) -> bool:
        """Let a draft model read a few tokens per row that came without it; whether it now has all but the last two."""
        followed = [row if row is not None and row.followed is not None else None for row in self.rows]
        behind = [row for row in followed if row is not None and row.slots - row.read > 1]
        if self.slots.memory is None or not behind:
            return True
        tokens = np.zeros((len(self.rows), SMALLEST_PIECE), np.int32)
        starts, lengths = np.zeros((2, len(self.rows)), np.int32)
        for i, row in enumerate(followed):
            if row is not None and row.followed is not None:  # tokens read a second time are written unchanged
                starts[i] = min(row.read, self.shape[1] - SMALLEST_PIECE)
                part = row.followed.row[starts[i] : min(starts[i] + SMALLEST_PIECE, row.slots)]
                tokens[i, : len(part)], lengths[i] = part, len(part)
                row.read = int(starts[i]) + len(part)
        self.slots = self.model.catch_up(self.slots, tokens, starts, lengths)
        return all(row.slots - row.read <= 1 for row in behind)

    def _take_drafts(self, number: int) -> Pending:
        assert self.drafting is not None
        self._fit(self.running, max(row.slots for row in self.running) + number + 1)
        if self._wishes is None:
            self._wishes = self._wishes_of()
        told = self.drafting.propose([None if row is None else row.followed for row in self.rows], number)
        self.slots, packed = self.model.take_drafts(self.slots, self._wishes, told, number)
        self.unsettled = True
        rows = list(self.rows)
        return Pending(packed, rows, (self.shape, number), partial(self._settle, rows, number))

    def _settle(self, rows: list[DecodingRow | None], number: int, counts: list[int]) -> None:
        """Record how many tokens a turn with drafts has given each row."""
        assert self.drafting is not None
        self.unsettled = False
        some = [(row, count) for row, count in zip(rows, counts, strict=True) if row is not None]
        self.drafting.settle([row.followed for row, _ in some], number, [count for _, count in some])
        for row, count in some:
            row.read = row.slots + min(count, number)  # as its memory is rolled back
            row.slots += count
            row.left -= count

    def _wishes_of(self) -> Wishes:
        wishes = Wishes.none(len(self.rows), self.model.config.vocab_size)
        for i, row in enumerate(self.rows):
            if row is not None and self._able(row):
                write_wishes(wishes, i, row.request, row.allowed)
        return jax.device_put(wishes)

    def _fit(self, rows: list[DecodingRow], slots: int = 1) -> None:
        """Grow the state at once for these rows and slots, or shrink it if it has been too large for a while."""
        shape = self.shape
        slots = max(slots, *(min(row.slots + 1, self.longest) for row in rows))
        wanted = _least(self.options.rows, len(rows)), _least(self.options.capacities, slots)
        self._patience = PATIENCE if wanted == shape else self._patience - 1
        if self._patience > 0:  # nothing shrinks yet
            wanted = max(wanted[0], shape[0]), max(wanted[1], shape[1])
        for step in steps_between(self.options, shape, wanted):
            self._arrange(*step)
            self._patience = PATIENCE

    def _arrange(self, rows: int, capacity: int) -> None:
        order = [i for i, row in enumerate(self.rows) if row is not None]
        if rows >= len(self.rows):
            order = list(range(len(self.rows)))
        self.rows = [self.rows[i] for i in order] + [None] * (rows - len(order))
        self.slots = self.model.arrange(self.slots, order + [-1] * (rows - len(order)), capacity)
        self._wishes = None


def write_wishes(wishes: Wishes, at: int, request: GenerationRequest, allowed: np.ndarray | None) -> None:
    """Set the wishes of a request in the row `at`."""
    wishes.live[at] = True
    wishes.least[at] = request.min_new_tokens
    wishes.alternatives[at] = request.alternatives
    wishes.adapter[at] = request.adapter
    if allowed is not None:
        wishes.constrained[at] = True
        wishes.allowed[at] = allowed


def steps_between(options: PoolOptions, shape: tuple[int, int], wanted: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The shapes in between, each a neighbour of the one before, because programs exist only for neighbours."""
    rows, slots = shape
    while (rows, slots) != wanted:
        rows_next = _towards(options.rows, rows, wanted[0])
        slots = slots if rows_next != rows else _towards(options.capacities, slots, wanted[1])
        rows = rows_next
        yield rows, slots


def neighbours(options: PoolOptions, rows: int, capacity: int) -> Iterator[tuple[int, int]]:
    """The shapes that a state of these rows and slots may change to in one step."""
    for sizes, size, make in (
        (options.rows, rows, lambda size: (size, capacity)),
        (options.capacities, capacity, lambda size: (rows, size)),
    ):
        at = sizes.index(size)
        yield from (make(other) for other in (*sizes[max(at - 1, 0) : at], *sizes[at + 1 : at + 2]))


def _towards(sizes: tuple[int, ...], size: int, wanted: int) -> int:
    step = (wanted > size) - (wanted < size)
    return sizes[sizes.index(size) + step]


def _least(sizes: tuple[int, ...], need: int) -> int:
    """The smallest size that holds `need`."""
    return next(size for size in sizes if size >= need)
