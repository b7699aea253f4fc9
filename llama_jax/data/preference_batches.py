"""Batches of pairs of answers, with several pairs per row."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from llama_jax.data.batches import HostBatches, fill_whole, pack_shuffled
from llama_jax.data.corpus import Corpus, check_corpus_rows, fingerprints, hold_out, row_order, unseen
from llama_jax.errors import DataError
from llama_jax.tokenizers import Tokenizer
from llama_jax.training.preference_batch import PairBatch


@dataclass(frozen=True, eq=False)
class Pairs:
    """N pairs of texts with targets: two corpora of N documents.

    Attributes:
      first, second: the chosen and the rejected answers; or, with `desirable`, answers and the same prompts with answers of
        other prompts, see `mismatched_answers`.
      desirable: bool[N], whether each first is good; None if the first of each pair is preferred.
    """

    first: Corpus
    second: Corpus
    desirable: np.ndarray | None = None

    @property
    def count(self) -> int:
        return self.first.document_count

    @property
    def sizes(self) -> np.ndarray:
        """int64[N]: tokens of the longer text of each pair."""
        return np.maximum(self.first.stops - self.first.starts, self.second.stops - self.second.starts)

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens and targets of both, and of `desirable`."""
        good = b"" if self.desirable is None else np.packbits(self.desirable).tobytes()
        return hashlib.sha256(f"{self.first.digest} {self.second.digest} ".encode() + good).hexdigest()

    def check_rows(self, rows: int, tokenizer: Tokenizer) -> None:
        """See `check_corpus_rows`."""
        for corpus in (self.first, self.second):
            check_corpus_rows(corpus, rows, tokenizer)

    def select(self, numbers: np.ndarray) -> Pairs:
        """The pairs with these indices, in this order."""
        good = None if self.desirable is None else self.desirable[numbers]
        return Pairs(self.first.select(numbers), self.second.select(numbers), good)


def prompt_ends(corpus: Corpus) -> np.ndarray:
    """int64[N]: the position in `tokens` of each document's first target, where its prompt ends."""
    assert corpus.targets is not None
    target_positions = np.flatnonzero(corpus.targets)
    at = np.searchsorted(target_positions, corpus.starts)
    first_targets = target_positions[np.minimum(at, len(target_positions) - 1)]
    return np.minimum(np.where(at < len(target_positions), first_targets, corpus.stops), corpus.stops)


def prompts_of(corpus: Corpus) -> Corpus:
    """The documents up to their first targets."""
    return replace(corpus, stops=prompt_ends(corpus))


def split_pairs(pairs: Pairs, validation: float, *, seed: int) -> tuple[Pairs, Pairs]:
    """Split pairs at random, the same way for the same seed, into training pairs and a share of validation pairs, as closely
    as prompts allow: pairs with the same prompt are in the same part, unless all have the same prompt.

    Raises:
      DataError: there are fewer than two pairs, or all are the same.
    """
    marks = fingerprints(prompts_of(pairs.first))
    if len(np.unique(marks)) < 2:
        marks = fingerprints(pairs.first)
    train, validation_pairs = map(pairs.select, hold_out(marks, max(1, round(validation * pairs.count)), seed, "example"))
    return train, validation_pairs


def without_pairs(pairs: Pairs, validation: Pairs) -> Pairs:
    """The pairs that are not among others; DataError if all are."""

    def marks(examples: Pairs) -> np.ndarray:
        with np.errstate(over="ignore"):
            return fingerprints(examples.first) * np.uint64(31) + fingerprints(examples.second)

    left = unseen(marks(pairs), marks(validation), "pair")
    return pairs if len(left) == pairs.count else pairs.select(left)


def next_that_differs(marks: np.ndarray) -> np.ndarray | None:
    """int64[N]: for each of N marks, the index of the next one with another value, wrapping around; None if all are the
    same."""
    lasts = np.flatnonzero(marks != np.roll(marks, -1))  # of runs with the same value
    if not len(lasts):
        return None
    run = np.searchsorted(lasts, np.arange(len(marks))) % len(lasts)
    return (lasts[run] + 1) % len(marks)


def mismatched_answers(answers: Corpus, length: int) -> Corpus:
    """Every prompt with the answer of the next document that has another prompt, of at most T + 1 tokens: KTO estimates its
    divergence from these (Ethayarajh et al. 2024, section 4.1).

    Args:
      length: T.

    Raises:
      DataError: all prompts are the same.
    """
    marks = fingerprints(prompts_of(answers))
    count, partner = len(marks), next_that_differs(marks)
    if partner is None:
        raise DataError(
            f"all {count} examples have the same prompt, but KTO compares answers with those to other prompts; add more"
            " prompts, or another preference.kind"
        )
    ends = prompt_ends(answers)
    prompts = ends - answers.starts
    sizes = np.minimum(prompts + (answers.stops - ends)[partner], length + 1)
    stops = np.cumsum(sizes)
    starts = stops - sizes
    tokens, targets = np.zeros(int(sizes.sum()), answers.tokens.dtype), np.zeros(int(sizes.sum()), bool)
    for number in range(count):
        begin, prompt = int(starts[number]), int(prompts[number])
        answer_size = int(sizes[number]) - prompt
        source = int(ends[partner[number]])
        tokens[begin : begin + prompt] = answers.tokens[answers.starts[number] : ends[number]]
        tokens[begin + prompt : begin + prompt + answer_size] = answers.tokens[source : source + answer_size]
        assert answers.targets is not None
        targets[begin + prompt : begin + prompt + answer_size] = answers.targets[source : source + answer_size]
    return replace(
        answers, tokens=tokens, targets=targets, starts=starts, stops=stops, byte_counts=np.zeros(count, np.int64)
    )


def concatenate(corpora: tuple[Corpus, ...]) -> Corpus:
    """The documents of several corpora with targets as one corpus, in order."""
    offsets = np.cumsum([0, *(len(corpus.tokens) for corpus in corpora)])
    shifted = [(corpus.starts + by, corpus.stops + by) for corpus, by in zip(corpora, offsets, strict=False)]
    return replace(
        corpora[0],
        tokens=np.concatenate([corpus.tokens for corpus in corpora]),
        targets=np.concatenate([np.asarray(corpus.targets) for corpus in corpora]),
        starts=np.concatenate([starts for starts, _ in shifted]),
        stops=np.concatenate([stops for _, stops in shifted]),
        byte_counts=np.concatenate([corpus.byte_counts for corpus in corpora]),
        digest="-".join(corpus.digest for corpus in corpora),
    )


class PairRows(HostBatches[PairBatch]):
    """Packed rows of pairs; see `HostBatches`."""

    def __init__(
        self,
        pairs: Pairs,
        batch: int,
        length: int,
        *,
        seed: int | None,
        host: int = 0,
        hosts: int = 1,
        reference: np.ndarray | None = None,
    ) -> None:
        """Endless epochs with a seed; with None, one pass in order, with the last batch padded.

        Args:
          batch: B, rows of a step on all hosts, each of both sides.
          length: T, predicted tokens per side of a row.
          host, hosts: see `training_batches`.
          reference: float32[N, 2], log-probabilities of the reference model.

        Raises:
          DataError: an invalid seed or batch.
        """
        self.members = pack_shuffled(pairs.sizes, length, seed)
        super().__init__(len(self.members), batch, seed, host, hosts)
        self.most = max(map(len, self.members))
        self._pairs, self._length, self._reference = pairs, length, reference
        self._order = lru_cache(maxsize=1)(partial(row_order, len(self.members), seed))

    def __getitem__(self, number: int) -> PairBatch:
        """This host's rows of a global batch."""
        rows = self.rows(number)
        share, most, pairs = len(rows), self.most, self._pairs
        tokens, segment_ids, positions = (np.zeros((share, 2, self._length + 1), np.int32) for _ in range(3))
        is_pair = np.zeros((share, most), bool)
        batch = PairBatch(
            tokens,
            segment_ids,
            positions,
            np.zeros(tokens.shape, bool),
            is_pair,
            None if pairs.desirable is None else np.zeros_like(is_pair),
            None if self._reference is None else np.zeros((share, 2, most), np.float32),
        )
        for at in range(share):
            members = self.row(number, at)
            for index, corpus in enumerate((pairs.first, pairs.second)):
                fill_whole(batch, (at, index), corpus, members)
            is_pair[at, : len(members)] = True
            if batch.desirable is not None and pairs.desirable is not None:
                batch.desirable[at, : len(members)] = pairs.desirable[members]
            if batch.reference is not None and self._reference is not None:
                batch.reference[at, :, : len(members)] = self._reference[members].T
        return batch

    def row(self, number: int, at: int) -> list[int]:
        """Indices of the pairs in row `at` of this host's share of a batch."""
        epoch, row = divmod(self.rows(number)[at], len(self.members))
        return [] if epoch and self._seed is None else self.members[self._order(epoch)[row]]
