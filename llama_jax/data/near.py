"""Documents that are nearly the same, by MinHash (Broder 1997) and bands of it (Leskovec et al., Mining of Massive Datasets,
chapter 3).

The similarity of two texts is the Jaccard similarity of their shingles: of all runs of 24 bytes in either, the share of
those in both. Case and the amount of white space do not count. A signature of 128 minima estimates it, with a standard error
of at most 0.044.
"""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llama_jax.data.errors import DataError

SHINGLE = 24  # bytes: about five words of English, eight characters of Chinese
MINIMA = 128  # in a signature
SEED = 1
CERTAIN = 0.99  # the probability that a pair of exactly the least similarity is compared at all
BLOCK = 1 << 16  # bytes of text that are hashed at once: their numbers stay in a processor's cache
FACTOR = 0x9E3779B97F4A7C15


class Near(NamedTuple):
    """A document and the earlier one that it is near, by their numbers, and their estimated similarity."""

    document: int
    other: int
    similarity: float


def library() -> str:
    """The library that makes signatures, and its version: signatures of different versions are not comparable.

    Raises:
      DataError: the library is missing.
    """
    try:
        return f"rensa {importlib.metadata.version('rensa')}"
    except importlib.metadata.PackageNotFoundError:
        raise DataError('near duplicates need rensa; get it with pip install -e ".[near-duplicates]"') from None


def signatures(texts: Sequence[str]) -> np.ndarray:
    """uint32[N, MINIMA] of texts."""
    import rensa

    hashes, counts, some, size = [], [], list[bytes](), 0
    for number, text in enumerate(texts, 1):
        some.append(" ".join(text.lower().split()).encode(errors="surrogatepass").ljust(SHINGLE, b"\0"))
        size += len(some[-1])
        if size >= BLOCK or number == len(texts):
            hashes.append(_shingles(some))
            counts += [len(content) - SHINGLE + 1 for content in some]
            some, size = [], 0
    if not counts:
        return np.zeros((0, MINIMA), np.uint32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    found = rensa.RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(hashes), starts, MINIMA, SEED)
    return np.array(found.to_rows(), np.uint32)


def _shingles(contents: Sequence[bytes]) -> np.ndarray:
    """uint64: a hash of every run of SHINGLE bytes in each content, none of which is shorter."""
    hashes = np.frombuffer(b"".join(contents), np.uint8) + np.uint64(1)
    for width in (1, 2, 4):  # of runs of 2, 4 and 8 bytes: polynomials, modulo 2**64
        hashes = hashes[:-width] * _power(width) + hashes[width:]
    hashes = (hashes[:-16] * _power(8) + hashes[8:-8]) * _power(8) + hashes[16:]
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(0xD6E8FEB86659FD93)
    hashes ^= hashes >> np.uint64(32)
    ends = np.cumsum([len(content) for content in contents])[:-1]
    keep = np.ones(len(hashes), bool)
    keep[(ends[:, None] - np.arange(1, SHINGLE)).ravel()] = False  # runs that begin in one content and end in the next
    return hashes[keep]


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(FACTOR, exponent, 1 << 64))


def bands(similarity: float) -> tuple[int, int]:
    """The number of bands of a signature and the minima in each: pairs that agree in a band are compared.

    The longest bands, and so the fewest pairs, with which a pair of this similarity is compared with probability CERTAIN.
    """
    for rows in range(MINIMA, 1, -1):
        count = MINIMA // rows
        if 1 - (1 - similarity**rows) ** count >= CERTAIN:
            return count, rows
    return MINIMA, 1


def find_near(units: Sequence[np.ndarray], left_out: np.ndarray, similarity: float) -> list[Near]:
    """The documents that are near an earlier one that is kept, in order; each with the first such one.

    Args:
      units: uint32[n, MINIMA] each, signatures of all documents in order.
      left_out: bool[N], documents that are neither kept nor compared.
      similarity: the least estimated similarity of near documents.
    """
    count, rows = bands(similarity)
    groups: dict[int, list[int]] = defaultdict(list)
    for band in range(count):
        for group, document in _alike(units, left_out, slice(band * rows, (band + 1) * rows)):
            groups[document].append(group * count + band)
    starts = np.cumsum([0, *map(len, units)])

    def signature(document: int) -> np.ndarray:
        unit = int(np.searchsorted(starts, document, "right")) - 1
        return units[unit][document - starts[unit]]

    staying: dict[int, list[int]] = defaultdict(list)
    found = []
    for document in sorted(groups):
        own = signature(document)
        for other in sorted({other for group in groups[document] for other in staying[group]}):
            estimate = np.count_nonzero(signature(other) == own) / MINIMA
            if estimate >= similarity:
                found.append(Near(document, other, estimate))
                break
        else:
            for group in groups[document]:
                staying[group].append(document)
    return found


def _alike(units: Sequence[np.ndarray], left_out: np.ndarray, part: slice) -> list[tuple[int, int]]:
    """Documents that agree with another one in a band of their signatures: the number of their group, and their own."""
    keys = np.zeros(len(left_out), np.uint64)
    start = 0
    for unit in units:
        own = keys[start : start + len(unit)]
        for column in unit[:, part].T:
            own[:] = own * _power(1) + column + np.uint64(1)
        start += len(unit)
    documents = np.flatnonzero(~left_out)
    _, group, sizes = np.unique(keys[documents], return_inverse=True, return_counts=True)
    several = sizes[group] > 1
    return list(zip(group[several].tolist(), documents[several].tolist(), strict=True))
