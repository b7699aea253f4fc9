"""Rows against plain Python."""

import numpy as np
import pytest
from byte_tokenizer import corpus_of
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.data import DataError, row_count
from llama_jax.data.batches import empty_batch, fill_row, order_epoch

CASES = given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=20),
    length=st.integers(1, 9),
    seed=st.none() | st.integers(0, 5),
    epoch=st.integers(0, 3),
)


def rows_of(corpus, length, seed, epoch):
    """All rows of an epoch in order of the stream, and the epoch."""
    order = order_epoch(corpus, length, seed, epoch)
    batch = empty_batch(row_count(corpus, length), length)
    for row in range(row_count(corpus, length)):
        fill_row(batch, row, corpus, order, row)
    return batch, order


def plain_rows(stream, length):
    """Plain: (token, segment, position) of every row; `stream` is (document, token) one by one."""
    rows = []
    for start in range(0, len(stream) - 1, length):
        row, segment, position, before = [], 0, 0, None
        for document, token in stream[start : start + length + 1]:
            segment, position = (segment, position + 1) if document == before else (segment + 1, 0)
            row.append((token, segment, position))
            before = document
        rows.append(row + [(0, 0, 0)] * (length + 1 - len(row)))
    return rows


@CASES
def test_rows_are_those_of_plain_python(lengths, length, seed, epoch):
    corpus = corpus_of(lengths)
    batch, order = rows_of(corpus, length, seed, epoch)
    stream = [(number, token) for number in order.documents for token in corpus.document(number)]
    np.testing.assert_array_equal(np.stack(batch[:3], axis=-1), plain_rows(stream, length))


@CASES
def test_every_token_is_read_once_and_predicted_once(lengths, length, seed, epoch):
    corpus = corpus_of(lengths)
    batch, order = rows_of(corpus, length, seed, epoch)
    assert sorted(order.rows) == list(range(len(batch.tokens)))
    read = batch.tokens[:, :-1][batch.segment_ids[:, :-1] > 0]
    last = corpus.document(order.documents[-1])[-1]  # nothing follows it, so it may not need to be read
    assert sorted({*read, last}) == corpus.tokens.tolist()
    assert len(read) in (len(corpus.tokens), len(corpus.tokens) - 1)
    predicted = (batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]) & (batch.segment_ids[:, 1:] > 0)
    firsts = {int(corpus.document(number)[0]) for number in range(corpus.document_count)}
    assert sorted(batch.tokens[:, 1:][predicted]) == [token for token in corpus.tokens if token not in firsts]


def test_epochs_and_seeds_have_orders_of_their_own():
    corpus = corpus_of([3] * 50)
    orders = [order_epoch(corpus, 2, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.documents) for order in orders}) == 4
    assert len({tuple(order.rows) for order in orders}) == 4


def test_nothing_to_predict_is_refused():
    with pytest.raises(DataError, match="the corpus has 1 tokens"):
        row_count(corpus_of([1]), 4)
