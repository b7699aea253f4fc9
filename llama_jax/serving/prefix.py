"""The prefix cache: keys and values of whole pieces of prompts, found again by the tokens up to their end.

Cold, warm and after eviction a prompt gives the same bits, because only whole pieces are kept: piece i of every prompt is
read from the same tokens by the same program, because its shapes follow from i alone. Keys and values from decoding are
never kept, because they come from other programs, which sum in another order.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import jax
import numpy as np


class PrefixCache:
    """Pieces by the digest of all tokens up to their end; the least recently used are evicted first.

    Attributes:
      most_bytes: limit for all pieces together.
      held_bytes: bytes that the pieces take.
      evicted: number of pieces that were evicted.
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
        """Mark pieces as used by a prompt; the first must outlive the last, which cannot be found without it."""
        for digest in reversed(digests):
            if digest in self._pieces:
                self._pieces.move_to_end(digest)

    def keep(self, digest: bytes, piece: Any) -> None:
        """Keep a piece, if it fits at all."""
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
    """The digest of all tokens up to the end of each whole piece, except a piece with the last token.

    That piece is always read, because the continuation needs the hidden state of the last token.

    Args:
      tokens: int32[n].
      roots: what else keys and values depend on: the length of the prompt, for a RoPE scaling that depends on it, and the
        adapter.
    """
    found, digest = [], hashlib.sha256(f"{piece} {roots}".encode())
    for end in range(piece, len(tokens), piece):
        digest.update(tokens[end - piece : end].tobytes())
        found.append(digest.copy().digest())
    return found
