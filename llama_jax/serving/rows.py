"""Requests that are being served, the pages of the cache that they use, and the arrays of a step."""

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
from llama_jax.serving.drafting import StepProfile
from llama_jax.serving.programs import StepBatch
from llama_jax.serving.requests import GenerationRequest, ScoredToken, Ticket
from llama_jax.serving.row_sampling import ChosenTokens, RowSettings, unpack_choices
from llama_jax.serving.served_model import STOPS


@dataclass(eq=False)
class ServedRow:
    """A request with a seat in the device's state. Its missing tokens are prefilled, and then it gets a token per step.

    Attributes:
      seat: index of the seat.
      tokens: prompt and continuation, as far as the host knows them.
      allowed: uint32[ceil(V / 32)], tokens that its constraint allows next; None without a constraint.
      followed: its drafting state, see `Drafting.begin`; None without drafts.
      pages: pages for its tokens in order, and some reserved ones.
      read: number of tokens in these pages after all launched steps.
      read_by_draft: the same for the draft model.
      chosen: number of generated tokens after all launched steps.
      cached: number of prompt tokens found in the prefix cache.
      scoring: whether its prompt must still be scored.
      scores: packed `ChosenTokens` of the chunks of a scored prompt.
      accepting: result of the update of its constraint; None unless it is running. Meanwhile the row gets no token.
      ended: whether its tokens are no longer needed.
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
        """The number of generated tokens that the host knows."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def unread(self) -> int:
        """The number of tokens to prefill before it gets the next one: 1 during decoding."""
        return len(self.request.prompt) + self.chosen - self.read

    @property
    def reads(self) -> bool:
        """Whether it must prefill more than one token, or score a prompt."""
        return self.unread > 1 or self.scoring

    @property
    def left(self) -> int:
        """The maximum number of further tokens."""
        return max(self.request.max_new_tokens, 1) - self.chosen

    def lacks(self, count: int) -> int:
        """The number of additional pages for `count` more tokens."""
        return max(pages_of(self.read + count) - len(self.pages), 0)


def pages_of(tokens: int) -> int:
    """The number of pages for this many tokens."""
    return -(-tokens // PAGE_SIZE)


class LaunchedStep(NamedTuple):
    """A step that the device is computing.

    Attributes:
      packed: packed `ChosenTokens` [R, any, any]; those after the end of a row or after a wrong draft are invalid.
      profile: kind of the step.
      steps: number of forward passes.
      settle: called with the number of tokens of each row after a step with drafts.
    """

    packed: jax.Array
    rows: Sequence[ServedRow]
    profile: StepProfile
    steps: int = 1
    settle: Callable[[list[int]], None] | None = None


class RowPart(NamedTuple):
    """Tokens of a row that are processed in a step: `size` tokens from position `begin`."""

    row: ServedRow
    begin: int
    size: int


def batch_of(parts: Sequence[RowPart], shape: tuple[int, int], width: int, seats: int) -> StepBatch:
    """The arrays of a step.

    Args:
      shape: rows and tokens of the step.
      width: maximum number of pages per row.
      seats: number of seats of the state.
    """
    rows, most = shape
    tokens, starts = np.zeros(most, np.int32), np.zeros(rows + 1, np.int32)
    table, at = np.zeros((rows, width), np.int32), 0
    of_row, live = np.zeros((5, rows), np.int32), np.zeros(rows, bool)
    of_row[0] = seats
    for r, (row, begin, count) in enumerate(parts):
        known = row.tokens[begin : begin + count]
        tokens[at : at + count] = known or -1
        at += count
        starts[r + 1 :] = at
        table[r, : len(row.pages)] = row.pages
        of_row[:, r] = row.seat, begin, len(row.request.prompt), row.request.max_new_tokens, row.chosen
        live[r] = count == row.unread
    seat, lengths, prompts, limits, counts = of_row
    return StepBatch(tokens, starts, seat, table, lengths, prompts, limits, counts, live)


def settings_of_rows(rows: Sequence[ServedRow], count: int, vocab: int) -> RowSettings:
    """The settings of `rows`, padded to `count` rows."""
    numbers, allowed = np.zeros((2, count), np.int32), np.zeros((count, -(-vocab // 32)), np.uint32)
    decode = DecodeSettings(Sampling().per_row(count), np.ones(count, np.int32), np.full((count, STOPS), -1, np.int32))
    constrained, adapter = np.zeros(count, bool), np.full(count, -1, np.int32)
    settings = RowSettings(decode, numbers[0], numbers[1], constrained, allowed, adapter)
    for r, row in enumerate(rows):
        jax.tree.map(lambda array, values, r=r: array.__setitem__(r, values[0]), decode, row.ticket.arrays)
        settings.min_tokens[r] = row.request.min_new_tokens
        settings.alternatives[r] = row.request.alternatives
        settings.adapter[r] = row.request.adapter
        if row.allowed is not None:
            settings.constrained[r] = True
            settings.allowed[r] = row.allowed
    return settings


def scored_token(choice: ChosenTokens, at: tuple[int, ...], alternatives: int) -> ScoredToken:
    """One token of `ChosenTokens`."""
    alternative_tokens: Iterator[tuple[int, float]] = zip(
        choice.ids[at][:alternatives].tolist(), choice.logprobs[at][:alternatives].tolist(), strict=True
    )
    return ScoredToken(int(choice.token[at]), float(choice.logprob[at]), tuple(alternative_tokens) if alternatives else ())


def prompt_scores(row: ServedRow) -> list[ScoredToken]:
    """The tokens of a prompt, each with its log-probability given the preceding ones."""
    scored = [ScoredToken(row.tokens[0], None)]
    for packed in row.scores:  # by whole columns, because all requests wait for this
        choice = unpack_choices(packed)
        ids, logprobs = (x[:, : row.request.alternatives].tolist() for x in (choice.ids, choice.logprobs))
        alternatives = [tuple(zip(*both, strict=True)) for both in zip(ids, logprobs, strict=True)]
        rows = zip(choice.token.tolist(), choice.logprob.tolist(), alternatives, strict=True)
        scored += [ScoredToken(*row) for row in rows][: int(choice.valid.sum())]
    return scored[: len(row.request.prompt)]  # the token after the last is not part of the prompt


class PagePool:
    """Reference-counted pages of the cache, by index: used by rows and by the prefix cache.

    A chunk of a prefix is cached until its pages are needed, or the prefix cache exceeds its limit; the least recently used
    chunks are evicted first.

    Attributes:
      count: number of all pages.
      page_bytes: bytes of a page.
      most_bytes: maximum bytes of the prefix cache.
      held_bytes: current bytes of the prefix cache.
      evicted: number of evicted chunks.
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
        self._idle = 0  # cached pages that no row uses

    def __len__(self) -> int:
        """The number of cached chunks."""
        return len(self._chunks)

    @property
    def available(self) -> int:
        """The number of pages that can be taken."""
        return len(self._free) + self._idle

    def take(self, count: int) -> list[int] | None:
        """Take `count` unused pages; None if there are not enough."""
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
        """Add a user to each page."""
        for page in pages:
            self._idle -= self._users[page] == 1 and page in self._kept
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a user of each page; pages without users become free."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
            elif self._users[page] == 1 and page in self._kept:
                self._idle += 1

    def find(self, digest: bytes) -> tuple[int, ...] | None:
        """The pages of a cached chunk, with the caller as a new user; None if it is not cached."""
        pages = self._chunks.get(digest)
        if pages is not None:
            self.share(pages)
        return pages

    def in_use(self, digests: Sequence[bytes]) -> int:
        """The number of pages of the leading cached chunks that rows use: sharing them takes no available pages."""
        count = 0
        for digest in digests:
            if digest not in self._chunks:
                break
            count += sum(self._users[page] > 1 for page in self._chunks[digest])
        return count

    def used(self, digests: Sequence[bytes]) -> None:
        """Mark chunks as recently used; the first must outlive the last, which cannot be found without it."""
        for digest in reversed(digests):
            if digest in self._chunks:
                self._chunks.move_to_end(digest)

    def keep(self, digest: bytes, pages: Sequence[int]) -> None:
        """Cache a chunk, whose pages a row uses, if it fits at all."""
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
    """For each whole chunk the digest of all tokens up to its end, except for a chunk with the last token.

    That chunk is always prefilled, because the continuation needs the hidden state of the last token.

    Args:
      tokens: int32[n].
      roots: other values on which keys and values depend: those of `ServedModel.rope_root`, and the adapter.
    """
    digests, digest = [], hashlib.sha256(f"{chunk} {roots}".encode())
    for end in range(chunk, len(tokens), chunk):
        digest.update(tokens[end - chunk : end].tobytes())
        digests.append(digest.copy().digest())
    return digests
