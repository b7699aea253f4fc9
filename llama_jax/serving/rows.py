"""Requests that are being served, the pages of the cache that they use, and the arrays of a step of some of them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from llama_jax.inference.decode import DecodeSettings
from llama_jax.inference.sampling import Sampling
from llama_jax.model.cache import PAGE_SIZE
from llama_jax.serving.drafting import StepKind
from llama_jax.serving.programs import StepBatch
from llama_jax.serving.requests import GenerationRequest, ScoredToken, Ticket
from llama_jax.serving.row_sampling import ChosenTokens, RowSettings, unpack
from llama_jax.serving.served_model import STOPS


@dataclass(eq=False)
class ServedRow:
    """A request with a seat in the device's state. It reads what it lacks of its tokens, and gets one when it has read all.

    Attributes:
      seat: its number.
      tokens: of prompt and continuation, as far as the host knows them.
      allowed: uint32[ceil(V / 32)], what its constraint allows next; None without one.
      followed: what the drafting knows of it, see `Drafting.begin`; None where nothing is drafted.
      pages: of its tokens in order, and of some more.
      read: tokens in these pages once all steps so far have run.
      read_by_draft: the same of the draft model.
      chosen: tokens that it has got after those steps.
      cached: tokens of the prompt that were found in kept prefixes.
      scoring: its prompt is to be scored, and is not yet.
      scores: packed `ChosenTokens` of the chunks of a prompt that is scored.
      accepting: while its constraint takes in the last token, during which it gets no other; None otherwise.
      ended: nobody wants its tokens any more.
    """

    ticket: Ticket
    seat: int
    tokens: list[int]
    allowed: np.ndarray | None
    followed: Any
    pages: list[int] = field(default_factory=list)
    read: int = 0
    read_by_draft: int = 0
    chosen: int = 0
    cached: int = 0
    scoring: bool = False
    scores: list[jax.Array] = field(default_factory=list)
    accepting: Future[None] | None = None
    ended: bool = False

    @property
    def request(self) -> GenerationRequest:
        return self.ticket.request

    @property
    def count(self) -> int:
        """Generated tokens that the host knows."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def unread(self) -> int:
        """Tokens that it must read before it gets the next: one while it is decoded."""
        return len(self.request.prompt) + self.chosen - self.read

    @property
    def reads(self) -> bool:
        """Whether it has more than one token to read, or a prompt to score."""
        return self.unread > 1 or self.scoring

    @property
    def left(self) -> int:
        """Most tokens that it can still get."""
        return max(self.request.max_new_tokens, 1) - self.chosen

    def lacks(self, count: int) -> int:
        """Pages that it needs in addition for `count` more tokens."""
        return max(pages_of(self.read + count) - len(self.pages), 0)


def pages_of(tokens: int) -> int:
    """The number of pages that so many tokens take."""
    return -(-tokens // PAGE_SIZE)


class LaunchedStep(NamedTuple):
    """A step that the device is computing.

    Attributes:
      packed: `ChosenTokens` [R, any, any], packed; those after the end of a row or after a wrong draft are not valid.
      kind: of the step.
      steps: passes of the model.
      settle: called with how many tokens each row has got, after a step with drafts.
    """

    packed: jax.Array
    rows: Sequence[ServedRow]
    kind: StepKind
    steps: int = 1
    settle: Callable[[list[int]], None] | None = None


class RowPart(NamedTuple):
    """Tokens that a row reads in a step: `size` from position `begin` on."""

    row: ServedRow
    begin: int
    size: int


def batch_of(parts: Sequence[RowPart], shape: tuple[int, int], width: int, seats: int) -> StepBatch:
    """The arrays of a step.

    Args:
      shape: rows and tokens of the step.
      width: pages that a row can have.
      seats: of the state.
    """
    rows, most = shape
    tokens, starts = np.zeros(most, np.int32), np.zeros(rows + 1, np.int32)
    table, at = np.zeros((rows, width), np.int32), 0
    of_row, live = np.zeros((4, rows), np.int32), np.zeros(rows, bool)
    of_row[0] = seats
    for r, (row, begin, count) in enumerate(parts):
        known = row.tokens[begin : begin + count]
        tokens[at : at + count] = known or -1
        at += count
        starts[r + 1 :] = at
        table[r, : len(row.pages)] = row.pages
        of_row[:, r] = row.seat, begin, len(row.request.prompt), row.chosen
        live[r] = count == row.unread
    return StepBatch(tokens, starts, of_row[0], table, of_row[1], of_row[2], of_row[3], live)


def settings_of(rows: Sequence[ServedRow], count: int, vocab: int) -> RowSettings:
    """The settings of `count` rows, the first of which are these."""
    numbers, allowed = np.zeros((2, count), np.int32), np.zeros((count, -(-vocab // 32)), np.uint32)
    decode = DecodeSettings(Sampling().per_row(count), np.ones(count, np.int32), np.full((count, STOPS), -1, np.int32))
    constrained, adapter = np.zeros(count, bool), np.full(count, -1, np.int32)
    settings = RowSettings(decode, numbers[0], numbers[1], constrained, allowed, adapter)
    for r, row in enumerate(rows):
        jax.tree.map(lambda whole, one, r=r: whole.__setitem__(r, one[0]), decode, row.ticket.arrays)
        settings.min_tokens[r] = row.request.min_new_tokens
        settings.alternatives[r] = row.request.alternatives
        settings.adapter[r] = row.request.adapter
        if row.allowed is not None:
            settings.constrained[r] = True
            settings.allowed[r] = row.allowed
    return settings


def scored_token(choice: ChosenTokens, at: tuple[int, ...], alternatives: int) -> ScoredToken:
    """One token of a choice."""
    alternative_tokens: Iterator[tuple[int, float]] = zip(
        choice.ids[at][:alternatives].tolist(), choice.logprobs[at][:alternatives].tolist(), strict=True
    )
    return ScoredToken(int(choice.token[at]), float(choice.logprob[at]), tuple(alternative_tokens) if alternatives else ())


def scores_of(row: ServedRow) -> list[ScoredToken]:
    """The tokens of a prompt, each with its log-probability after those before it."""
    scored = [ScoredToken(row.tokens[0], None)]
    for packed in row.scores:  # by whole columns: rows of all requests wait for this
        choice = unpack(packed)
        ids, logprobs = (x[:, : row.request.alternatives].tolist() for x in (choice.ids, choice.logprobs))
        others = [tuple(zip(*both, strict=True)) for both in zip(ids, logprobs, strict=True)]
        rows = zip(choice.token.tolist(), choice.logprob.tolist(), others, strict=True)
        scored += [ScoredToken(*row) for row in rows][: int(choice.valid.sum())]
    return scored[: len(row.request.prompt)]  # what follows the last token is not part of the prompt


class PagePool:
    """Pages by number, with the count of those that use each: rows, and the prefix that it is kept for.

    A prefix is kept until its pages are needed, or until all prefixes take more than they may; those that were not used for
    the longest time go first.

    Attributes:
      count: of all pages.
      page_bytes: that one takes.
      most_bytes: that kept prefixes may take.
      held_bytes: that they take.
      evicted: number of chunks that were evicted.
    """

    def __init__(self, count: int, page_bytes: int, most_bytes: int) -> None:
        self.count = count
        self.page_bytes = page_bytes
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self.evicted = 0
        self._free = list(reversed(range(count)))
        self._users = [0] * count
        self._chunks: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._kept: set[int] = set()
        self._idle = 0  # pages that are kept and that no row uses

    def __len__(self) -> int:
        """Number of chunks that are kept."""
        return len(self._chunks)

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + self._idle

    def take(self, count: int) -> list[int] | None:
        """So many pages that nobody uses; None where there are not as many."""
        if count > self.available:
            return None
        if count > len(self._free):
            for digest in [digest for digest, pages in self._chunks.items() if any(self._users[p] == 1 for p in pages)]:
                self._evict(digest)
                if count <= len(self._free):
                    break
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Count one more user of each page."""
        for page in pages:
            self._idle -= self._users[page] == 1 and page in self._kept
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Count one user of each page less; those that nobody uses are free."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
            elif self._users[page] == 1 and page in self._kept:
                self._idle += 1

    def find(self, digest: bytes) -> tuple[int, ...] | None:
        """The pages of a chunk, of which the caller is one more user; None where it is not kept."""
        pages = self._chunks.get(digest)
        if pages is not None:
            self.share(pages)
        return pages

    def in_use(self, digests: Sequence[bytes]) -> int:
        """Pages of the first chunks, as far as these are kept, that rows use: sharing them takes none of the available."""
        count = 0
        for digest in digests:
            if digest not in self._chunks:
                break
            count += sum(self._users[page] > 1 for page in self._chunks[digest])
        return count

    def used(self, digests: Sequence[bytes]) -> None:
        """Mark chunks as used by a prompt; the first must outlive the last, which cannot be found without it."""
        for digest in reversed(digests):
            if digest in self._chunks:
                self._chunks.move_to_end(digest)

    def keep(self, digest: bytes, pages: Sequence[int]) -> None:
        """Keep a chunk, whose pages a row uses, if it fits at all."""
        size = len(pages) * self.page_bytes
        if digest in self._chunks or size > self.most_bytes:
            return
        while self.held_bytes + size > self.most_bytes:
            self._evict(next(iter(self._chunks)))
        self.share(pages)
        self._kept.update(pages)
        self._chunks[digest] = tuple(pages)
        self.held_bytes += size

    def _evict(self, digest: bytes) -> None:
        pages = self._chunks.pop(digest)
        self._idle -= sum(self._users[page] == 1 for page in pages)
        self._kept.difference_update(pages)
        self.release(pages)
        self.held_bytes -= len(pages) * self.page_bytes
        self.evicted += 1


def digests_of(tokens: np.ndarray, chunk: int, roots: tuple[int, ...] = ()) -> list[bytes]:
    """The digest of all tokens up to the end of each whole chunk, except a chunk with the last token.

    That chunk is always read, because the continuation needs the hidden state of the last token.

    Args:
      tokens: int32[n].
      roots: what else keys and values depend on: the length of the prompt, for a RoPE scaling that depends on it, and the
        adapter.
    """
    digests, digest = [], hashlib.sha256(f"{chunk} {roots}".encode())
    for end in range(chunk, len(tokens), chunk):
        digest.update(tokens[end - chunk : end].tobytes())
        digests.append(digest.copy().digest())
    return digests
