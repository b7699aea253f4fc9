"""The pages of the cache: which rows use them, and which hold prefixes of prompts that are kept for later requests.

Cold, warm and after eviction a prompt gives the same bits, because only whole chunks are kept: chunk i of every prompt is
read by the same program, at the same place among its tokens, from the same tokens. Keys and values of the other tokens come
from other programs, which may sum in another order, and are never kept.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


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
