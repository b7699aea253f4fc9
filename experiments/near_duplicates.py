"""Remove documents that are nearly the same as an earlier one, by MinHash (Broder 1997) with banding (Leskovec et al.,
Mining of Massive Datasets, chapter 3). Run it before ``llama-jax data build``.

    pip install -e ".[data]" "rensa>=0.5"
    python experiments/near_duplicates.py TEXTS --out kept.jsonl --similarity 0.8
    llama-jax data build kept.jsonl --out corpus --tokenizer tokenizer.json

The similarity of two texts is the Jaccard similarity of their shingles: of all runs of 24 bytes in either text, the share
that is in both. Case and the amount of white space are ignored. A signature of 128 minima estimates the similarity with a
standard error of at most 0.044. Every removed document is listed in ``kept.tsv``, with the similar document and the
estimate. Documents with the same text are also removed. Other versions of rensa may compute other signatures.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import rensa
import tyro

from llama_jax.data.build_corpus import cpu_count, process_pool
from llama_jax.data.data_files import find_files
from llama_jax.data.documents import DocumentFormat, Span, read_documents, spans_of
from llama_jax.errors import UserError

SHINGLE = 24  # bytes: about five words of English, eight characters of Chinese
MINIMA = 128  # in a signature
SEED = 1
CERTAIN = 0.99  # probability that a pair with exactly the minimum similarity is compared
BLOCK = 1 << 16  # bytes of text hashed at once, so that the hashes stay in the CPU's cache
UNIT = 32 << 20  # bytes of a file per task of a process
FACTOR = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Arguments:
    """Remove documents that are similar to an earlier one."""

    files: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...")]]
    """Text, JSONL, Parquet or Arrow, or folders of them."""
    out: Path
    """Output .jsonl of the documents that are kept; the list of the removed ones is next to it."""
    similarity: float = 0.8
    """Minimum estimated similarity at which a document is removed."""
    processes: int = cpu_count()
    """Processes that compute signatures."""
    reading: DocumentFormat = DocumentFormat()
    """How documents are read."""


class Near(NamedTuple):
    """Indices of a document and of a similar, earlier one, and their estimated similarity."""

    document: int
    other: int
    similarity: float


def signatures(texts: Sequence[str]) -> np.ndarray:
    """The signatures of texts, uint32[N, MINIMA]."""
    hashes, counts, some, size = [], [], list[bytes](), 0
    for number, text in enumerate(texts, 1):
        some.append(" ".join(text.lower().split()).encode(errors="surrogatepass").ljust(SHINGLE, b"\0"))
        size += len(some[-1])
        if size >= BLOCK or number == len(texts):
            hashes.append(shingles(some))
            counts += [len(content) - SHINGLE + 1 for content in some]
            some, size = [], 0
    if not counts:
        return np.zeros((0, MINIMA), np.uint32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    rows_of_minima = rensa.RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(hashes), starts, MINIMA, SEED)
    return np.array(rows_of_minima.to_rows(), np.uint32)


def shingles(contents: Sequence[bytes]) -> np.ndarray:
    """Hashes uint64 of every run of SHINGLE bytes in each content; no content may be shorter."""
    hashes = np.frombuffer(b"".join(contents), np.uint8) + np.uint64(1)
    for width in (1, 2, 4):  # polynomials of runs of 2, 4 and 8 bytes, modulo 2**64
        hashes = hashes[:-width] * power(width) + hashes[width:]
    hashes = (hashes[:-16] * power(8) + hashes[8:-8]) * power(8) + hashes[16:]
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(0xD6E8FEB86659FD93)
    hashes ^= hashes >> np.uint64(32)
    ends = np.cumsum([len(content) for content in contents])[:-1]
    keep = np.ones(len(hashes), bool)
    keep[(ends[:, None] - np.arange(1, SHINGLE)).ravel()] = False  # runs that begin in one content and end in the next
    return hashes[keep]


def power(exponent: int) -> np.uint64:
    """FACTOR to a power, modulo 2**64."""
    return np.uint64(pow(FACTOR, exponent, 1 << 64))


def bands(similarity: float) -> tuple[int, int]:
    """The number of bands of a signature and of minima in each; pairs that agree in a band are compared.

    Bands are as long as possible, for few pairs, if a pair of this similarity is compared with probability CERTAIN.
    """
    for rows in range(MINIMA, 1, -1):
        count = MINIMA // rows
        if 1 - (1 - similarity**rows) ** count >= CERTAIN:
            return count, rows
    return MINIMA, 1


def find_near(signed: np.ndarray, similarity: float) -> list[Near]:
    """The documents that are near an earlier, kept document, in order, each with the first such document.

    Args:
      signed: signatures, uint32[N, MINIMA].
      similarity: minimum estimated similarity of near documents.
    """
    count, rows = bands(similarity)
    groups: dict[int, list[int]] = defaultdict(list)
    for band in range(count):
        _, group, sizes = np.unique(
            signed[:, band * rows : (band + 1) * rows], axis=0, return_inverse=True, return_counts=True
        )
        several = np.flatnonzero(sizes[group] > 1)
        for document, its_group in zip(several.tolist(), group[several].tolist(), strict=True):
            groups[document].append(its_group * count + band)
    kept: dict[int, list[int]] = defaultdict(list)
    duplicates = []
    for document in sorted(groups):
        for other in sorted({other for group in groups[document] for other in kept[group]}):
            estimate = np.count_nonzero(signed[other] == signed[document]) / MINIMA
            if estimate >= similarity:
                duplicates.append(Near(document, other, estimate))
                break
        else:
            for group in groups[document]:
                kept[group].append(document)
    return duplicates


def sign(path: Path, reading: DocumentFormat, span: Span | None) -> np.ndarray:
    """The signatures of the documents in a span of a file."""
    return signatures([document.text for document in read_documents(path, reading, span)])


def main(arguments: Arguments) -> list[Near]:
    """Write the documents that are kept, and write and return the list of the others."""
    files, reading = find_files(arguments.files), arguments.reading
    if arguments.out.suffix != ".jsonl" or not 0 < arguments.similarity <= 1:
        raise UserError(f"{arguments.out} must be a .jsonl, and similarity={arguments.similarity} above 0 and at most 1")
    with process_pool(arguments.processes) as pool:
        spans = pool([(spans_of, file, reading, UNIT) for file in files], None)
        calls = [(sign, file, reading, span) for file, some in zip(files, spans, strict=True) for span in some]
        duplicates = find_near(np.concatenate([np.zeros((0, MINIMA), np.uint32), *pool(calls, None)]), arguments.similarity)
    left_out = {near.document for near in duplicates}
    places: list[str] = []  # file of each document, and its number in the file from 1
    texts = chain.from_iterable(((file, document.text) for document in read_documents(file, reading)) for file in files)
    numbers: dict[Path, int] = defaultdict(int)
    with arguments.out.open("w", encoding="utf-8") as kept:
        for number, (file, text) in enumerate(texts):
            numbers[file] += 1
            places.append(f"{str(file)!r}\t{numbers[file]}")
            if number not in left_out:
                kept.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    with arguments.out.with_suffix(".tsv").open("w", encoding="utf-8") as listing:
        listing.write("file\tdocument\tnear_file\tnear_document\tsimilarity\n")
        for near in duplicates:
            listing.write(f"{places[near.document]}\t{places[near.other]}\t{near.similarity:.3f}\n")
    print(f"{len(places) - len(duplicates):,} of {len(places):,} documents kept in {arguments.out}")
    return duplicates


if __name__ == "__main__":
    main(tyro.cli(Arguments))
