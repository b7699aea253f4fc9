"""Conversations packed whole into rows."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from byte_tokenizer import corpus_of
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.data import DataError, training_batches, validation_batches
from llama_jax.data.batches import whole_rows
from llama_jax.training.batch import target_mask


def with_targets(lengths):
    corpus = corpus_of(lengths)
    return replace(corpus, targets=corpus.tokens % 3 == 0)


SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=30)


@given(lengths=SIZES, seed=st.none() | st.integers(0, 5), more=st.integers(0, 9))
def test_conversations_are_in_one_row_each(lengths, seed, more):
    corpus, length = with_targets(lengths), max(max(lengths) - 1 + more, 1)
    rows = whole_rows(corpus, length, seed)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= length + 1 for row in rows)
    (batch,) = list(validation_batches(corpus, len(rows), length)) if seed is None else [None]
    if batch is None:
        batches = training_batches(corpus, len(rows), length, seed=seed)
        batch = next(batches)
        batches.close()
    seen = []
    for row in range(len(rows)):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            at = np.flatnonzero(batch.segment_ids[row] == segment)
            tokens = batch.tokens[row, at]
            (number,) = np.flatnonzero(corpus.starts + 1000 == tokens[0])
            np.testing.assert_array_equal(tokens, corpus.document(number))
            np.testing.assert_array_equal(batch.position_ids[row, at], np.arange(len(at)))
            np.testing.assert_array_equal(batch.loss_mask[row, at], tokens % 3 == 0)
            seen.append(number)
    assert sorted(seen) == list(range(len(lengths)))
    assert not batch.loss_mask[batch.segment_ids == 0].any()
    firsts = corpus.targets[corpus.starts].sum()
    assert np.asarray(target_mask(batch)).sum() == corpus.targets.sum() - firsts


def test_the_order_of_packed_rows_is_one_order():
    corpus = with_targets([5, 1, 9, 3, 2, 2, 7, 12, 4])

    def taken(count, **places):
        batches = training_batches(corpus, 4, 12, seed=7, **places)
        found = np.array([np.stack(batch[:4], axis=-1) for batch in islice(batches, count)])
        batches.close()
        return found

    whole = taken(12)
    assert len({batch.tobytes() for batch in whole}) > 3  # epochs have orders of their own
    np.testing.assert_array_equal(taken(7, start=5), whole[5:])
    np.testing.assert_array_equal(np.concatenate([taken(12, host=h, hosts=2) for h in (0, 1)], axis=1), whole)
    rows = len(whole_rows(corpus, 12, 7))
    sums = whole.reshape(-1, 13, 4)[: 4 * 12 // rows * rows].reshape(-1, rows, 13, 4)[..., 0].sum(axis=(1, 2))
    assert len(set(sums.tolist())) == 1  # every epoch has every row once


def test_a_conversation_longer_than_a_row_is_refused():
    with pytest.raises(DataError, match="a conversation has 12 tokens, but rows of length=10 hold 11"):
        training_batches(with_targets([5, 12]), 2, 10, seed=0)
