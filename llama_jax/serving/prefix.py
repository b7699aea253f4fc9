"""What has been read before: keys and values of whole pieces of prompts, found again by the tokens up to their end.

Cold, warm and after eviction a prompt gives the same bits, because whole pieces are all that is kept: piece i of every
prompt is read by the same program, for its shapes follow from i alone, from the same tokens. Keys and values that decoding
made are never kept: they come from other programs, whose sums are in another order.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import jax
import numpy as np


class PrefixCache:
    """Pieces by the digest of all tokens up to their end; the least recently used go first.

    Attributes:
      most_bytes: that all pieces may take together.
      held_bytes: that they take.
      evicted: pieces that had to go.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self.evicted = 0
        self._pieces: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pieces

    def find(self, digest: bytes) -> Any:
        """The piece, or None."""
        found = self._pieces.get(digest)
        return None if found is None else found[0]

    def used(self, digests: list[bytes]) -> None:
        """A prompt has used these pieces, the first of which must outlive the last: without it that cannot be found."""
        for digest in reversed(digests):
            if digest in self._pieces:
                self._pieces.move_to_end(digest)

    def keep(self, digest: bytes, piece: Any) -> None:
        """Remember a piece, if there is room for it at all."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(piece))
        if digest in self._pieces or size > self.most_bytes:
            return
        while self.held_bytes + size > self.most_bytes:
            _, (_, freed) = self._pieces.popitem(last=False)
            self.held_bytes -= freed
            self.evicted += 1
        self._pieces[digest] = piece, size
        self.held_bytes += size


def digests_of(tokens: np.ndarray, piece: int, roots: tuple[int, ...] = ()) -> list[bytes]:
    """The digest of all tokens up to the end of each whole piece, apart from one that the last token is in.

    That piece is always read: the state of the last token is where the continuation begins.

    Args:
      tokens: int32[n].
      roots: what else keys and values depend on: the length of the prompt, for a rope scaling that depends on it, and the
        adapter.
    """
    found, digest = [], hashlib.sha256(f"{piece} {roots}".encode())
    for end in range(piece, len(tokens), piece):
        digest.update(tokens[end - piece : end].tobytes())
        found.append(digest.copy().digest())
    return found
