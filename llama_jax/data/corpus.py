"""Documents as slices of one long array of tokens: their reproducible order, duplicates, and the validation split."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from llama_jax.errors import DataError
from llama_jax.tokenizers import Tokenizer
from llama_jax.tokenizers.interface import describe_missing_row

BLOCK_TOKENS = 1 << 22  # tokens to examine at a time
EXCESS = 1.25  # maximum tokens of whole validation documents, relative to their share


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents of tokens; only their positions are in memory. A part of a corpus is a corpus.

    Attributes:
      tokens: uint16 or uint32 [all], mapped from a corpus file.
      starts, stops: int64[N], the slice of `tokens` of each document.
      byte_counts: int64[N], UTF-8 bytes of each document's text, to compute bits per byte from a loss.
      vocab_size: V of the tokenizer; every token is below it.
      digest: SHA-256 of the whole file's tokens and documents: the same on every machine for the same data.
      targets: bool[all], which of `tokens` are predicted, for documents that are read whole, such as conversations; None if
        all are. If given, byte counts are those of the targets.
    """

    tokens: np.ndarray = field(repr=False)
    starts: np.ndarray = field(repr=False)
    stops: np.ndarray = field(repr=False)
    byte_counts: np.ndarray = field(repr=False)
    vocab_size: int
    digest: str
    targets: np.ndarray | None = field(default=None, repr=False)

    @property
    def document_count(self) -> int:
        return len(self.starts)

    @property
    def token_count(self) -> int:
        return int((self.stops - self.starts).sum())

    @property
    def byte_count(self) -> int:
        return int(self.byte_counts.sum())

    def document(self, number: int) -> np.ndarray:
        """The tokens of a document."""
        return self.tokens[self.starts[number] : self.stops[number]]

    def select(self, documents: np.ndarray) -> Corpus:
        """The corpus of only these documents, by index, in this order."""
        return replace(
            self, starts=self.starts[documents], stops=self.stops[documents], byte_counts=self.byte_counts[documents]
        )


def check_corpus_rows(corpus: Corpus, rows: int, tokenizer: Tokenizer | None = None) -> None:
    """Raise DataError for a document with a token that has no row in a model's embedding.

    Args:
      rows: V of the model, which may be smaller than the corpus's.
      tokenizer: the corpus's tokenizer, to name the token.
    """
    if corpus.vocab_size <= rows:
        return
    order = np.argsort(corpus.starts, kind="stable")
    starts, stops = corpus.starts[order], corpus.stops[order]
    for begin in range(0, len(corpus.tokens), BLOCK_TOKENS):
        positions = begin + np.flatnonzero(corpus.tokens[begin : begin + BLOCK_TOKENS] >= rows)
        documents = np.searchsorted(starts, positions, "right") - 1
        is_inside = (documents >= 0) & (positions < stops[documents])
        if is_inside.any():
            first = int(is_inside.argmax())
            token = describe_missing_row(int(corpus.tokens[positions[first]]), rows, tokenizer)
            raise DataError(
                f"document {order[documents[first]] + 1} contains {token}; remove it, or use the model's tokenizer"
            )


# --- order ---------------------------------------------------------------------------------------------------------------


def shuffled(count: int, seed: int, stream: int) -> np.ndarray:
    """A permutation of `count` numbers that depends only on `seed` and `stream`: int64[count].

    It sorts the raw numbers of a counter-based generator (Philox; Salmon et al. 2011), which are the same in every version
    of NumPy; its distributions and permutations may change (NEP 19).

    Raises:
      DataError: see `check_seed`.
    """
    check_seed(seed)
    numbers = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(count)
    return np.argsort(numbers, kind="stable")


def row_order(count: int, seed: int | None, epoch: int) -> np.ndarray:
    """The order of an epoch's rows, different in each: int64[count]; without a seed always in order."""
    return np.arange(count) if seed is None else shuffled(count, seed, 2 * epoch + 2)


def check_seed(seed: int) -> None:
    """Raise DataError for a seed that does not fit 64 bits."""
    if not 0 <= seed < 1 << 64:
        raise DataError(f"seed={seed} must be at least 0 and below 2**64")


# --- duplicates ----------------------------------------------------------------------------------------------------------


def fingerprints(corpus: Corpus) -> np.ndarray:
    """uint64[N]: equal numbers for documents with the same tokens, in all corpora of one vocabulary.

    The probability that two of n different documents have the same number, 8 bytes of BLAKE2b, is n² / 2^65: 3e-6 for ten
    million, 0.03 for a billion.
    """
    width = corpus.tokens.dtype.itemsize
    data = corpus.tokens.view(np.uint8).data
    spans = zip((corpus.starts * width).tolist(), (corpus.stops * width).tolist(), strict=True)
    digests = (hashlib.blake2b(data[start:stop], digest_size=8).digest() for start, stop in spans)
    return np.frombuffer(b"".join(digests), "<u8")


def hold_out(marks: np.ndarray, count: int, seed: int, what: str = "document") -> tuple[np.ndarray, np.ndarray]:
    """Split documents at random, the same way for the same seed: indices of the training documents, and of `count` or
    somewhat fewer validation documents, ascending. Messages name a document `what`.

    Documents with the same mark, such as a fingerprint, are on the same side.

    Raises:
      DataError: all documents have the same mark.
    """
    count = min(count, len(marks) - 1)
    _, groups, sizes = np.unique(marks, return_inverse=True, return_counts=True)
    if len(sizes) < 2:
        several = f" {len(marks)} times" if len(marks) > 1 else ""
        raise DataError(
            f"the data is a single {what}{several}, which cannot be split; add more, pass separate validation data, or cut a"
            " long text into more documents by a smaller DocumentFormat(longest=...)"
        )
    order = shuffled(len(marks), seed, 0)
    _, first = np.unique(groups[order], return_index=True)
    in_validation, total = np.zeros(len(sizes), bool), 0
    for group in np.argsort(first, kind="stable").tolist():
        if total == count:
            break
        if total + sizes[group] <= count:
            in_validation[group] = True
            total += int(sizes[group])
    if not total:  # each occurs more than `count` times
        in_validation[int(np.argmin(sizes))] = True
    return np.flatnonzero(~in_validation[groups]), np.flatnonzero(in_validation[groups])


def unseen(marks: np.ndarray, validation_marks: np.ndarray, what: str = "document") -> np.ndarray:
    """Indices of the documents whose mark is not among those of the validation data.

    Raises:
      DataError: there are none; `what` names a document.
    """
    left = np.flatnonzero(~np.isin(marks, validation_marks))
    if not len(left):
        raise DataError(
            f"every {what} of the training data is also in the validation data; use different data for one of them"
        )
    return left


def without(corpus: Corpus, other: Corpus) -> Corpus:
    """The documents of a corpus that are not in another one of the same vocabulary; DataError if all are."""
    left = unseen(fingerprints(corpus), fingerprints(other))
    return corpus if len(left) == corpus.document_count else corpus.select(left)


# --- split ---------------------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """Two corpora without a document in common."""

    train: Corpus
    validation: Corpus


def split(corpus: Corpus, validation: float, *, seed: int = 0, tokenizer: Tokenizer | None = None) -> Split:
    """Split the documents at random, reproducibly by seed; both parts keep the corpus's order.

    Documents with the same tokens are on the same side, so validation may get somewhat fewer if there are duplicates.

    Args:
      validation: documents to validate on: an int is their number, a float their fraction (at least one).
      tokenizer: the corpus's tokenizer, needed to count the bytes of part of a document. With it, a fraction also holds for
        tokens if documents are few, as in a text without separators: if the chosen documents have more than EXCESS times as
        many, the longest is divided, and the excess goes to training.

    Raises:
      DataError: one of the sides would have no document, or all documents are the same.
    """
    count = corpus.document_count
    chosen = validation if isinstance(validation, int) else max(1, round(validation * count)) if 0 < validation < 1 else 0
    if count > 1 and not 0 < chosen < count:
        raise DataError(
            f"validation={validation} leaves no training or validation documents; of {count} documents choose 1 to"
            f" {count - 1}, or a fraction between 0 and 1"
        )
    parts = Split(*map(corpus.select, hold_out(fingerprints(corpus), chosen, seed)))
    beyond = parts.validation.token_count - round(validation * corpus.token_count)
    if tokenizer is None or isinstance(validation, int) or beyond <= (EXCESS - 1) * validation * corpus.token_count:
        return parts
    return _divide_longest(parts, beyond, tokenizer)


def _divide_longest(parts: Split, beyond: int, tokenizer: Tokenizer) -> Split:
    """`parts` with the last `beyond` tokens of the longest validation document as a training document."""
    train, validation = parts
    sizes = validation.stops - validation.starts
    longest = int(sizes.argmax())
    prefix = max(int(sizes[longest]) - beyond, 2)  # a single token predicts nothing
    if sizes[longest] < prefix + 2:
        return parts
    where = validation.starts[longest] + prefix
    tokens = validation.document(longest)[:prefix]
    spelled = sum(len(tokenizer.token_bytes(token)) for token in tokens.tolist()) - tokenizer.space_prefix
    held_bytes = min(max(spelled, 0), int(validation.byte_counts[longest]))
    at = int(np.searchsorted(train.starts, where))
    rest = replace(
        train,
        starts=np.insert(train.starts, at, where),
        stops=np.insert(train.stops, at, validation.stops[longest]),
        byte_counts=np.insert(train.byte_counts, at, validation.byte_counts[longest] - held_bytes),
    )
    is_longest = np.arange(len(sizes)) == longest
    stops, byte_counts = (
        np.where(is_longest, where, validation.stops),
        np.where(is_longest, held_bytes, validation.byte_counts),
    )
    return Split(rest, replace(validation, stops=stops, byte_counts=byte_counts))
