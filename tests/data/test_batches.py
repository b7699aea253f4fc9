"""The order of batches: the same however many hosts there are and however often the run is broken off."""

from itertools import islice

import numpy as np
import pytest
from byte_tokenizer import corpus_of
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax.data import DataError, row_count, training_batches, validation_batches
from llama_jax.data.batches import empty_batch, fill_row, order_epoch

LENGTHS = [5, 1, 9, 30, 2, 2, 7]
CORPUS = corpus_of(LENGTHS)
LENGTH = 4


def taken(batches, count=None):
    """Batches as one array [count, B, T + 1, 3]."""
    found = np.array([np.stack(batch[:3], axis=-1) for batch in islice(batches, count)])
    batches.close()
    return found


def plain(seed, batch, count):
    """Plain: the rows of epoch 0 in its order, of epoch 1 in its order, and so on, B at a time."""
    rows, epoch = [], 0
    while len(rows) < batch * count:
        order = order_epoch(CORPUS, LENGTH, seed, epoch)
        whole = empty_batch(len(order.rows), LENGTH)
        for at, row in enumerate(order.rows):
            fill_row(whole, at, CORPUS, order, row)
        rows += list(np.stack(whole[:3], axis=-1))
        epoch += 1
    return np.array(rows[: batch * count]).reshape(count, batch, LENGTH + 1, 3)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**64 - 1), share=st.integers(1, 9), hosts=st.integers(1, 4), start=st.integers(0, 12))
def test_training_order_is_one_order(seed, share, hosts, start):
    """Over several epochs: what each host gets from wherever it starts is its part of the order, and no more."""
    batch, count = share * hosts, 6
    expected = plain(seed, batch, start + count)[start:]
    parts = [
        taken(training_batches(CORPUS, batch, LENGTH, seed=seed, host=host, hosts=hosts, start=start), count)
        for host in range(hosts)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected)


def test_the_state_continues_where_the_run_was_broken_off():
    whole = taken(training_batches(CORPUS, 4, LENGTH, seed=3), 20)
    found, state = [], {"next_batch": 0}
    for count in (1, 7, 0, 12):
        batches = training_batches(CORPUS, 4, LENGTH, seed=3, start=state["next_batch"])
        found += [np.stack(batch[:3], axis=-1) for batch in islice(batches, count)]
        state = batches.state  # what was made ahead does not count
        batches.close()
    assert state == {"next_batch": 20}
    np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize(("batch", "hosts"), [(1, 1), (4, 2), (6, 3), (100, 4)])
def test_validation_is_every_row_once_and_in_order(batch, hosts):
    count = row_count(CORPUS, LENGTH)
    parts = [taken(validation_batches(CORPUS, batch, LENGTH, host=host, hosts=hosts)) for host in range(hosts)]
    rows = np.concatenate(parts, axis=1).reshape(-1, LENGTH + 1, 3)
    assert len(rows) == -(-count // batch) * batch
    order = order_epoch(CORPUS, LENGTH, None, 0)
    whole = empty_batch(len(rows), LENGTH)
    for row in range(count):
        fill_row(whole, row, CORPUS, order, row)
    np.testing.assert_array_equal(rows, np.stack(whole[:3], axis=-1))
    stream = rows[:count, :-1, 0][rows[:count, :-1, 1] > 0]
    np.testing.assert_array_equal(stream, CORPUS.tokens[: len(stream)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch=0 must be a positive multiple of hosts=1"),
        ({"batch": 3, "hosts": 2}, "batch=3 must be a positive multiple of hosts=2"),
        ({"host": 1}, "host=1 must be at least 0 and at most 0"),
        ({"hosts": 0}, "at most -1"),
        ({"length": 0}, "length=0 must be at least 1"),
        ({"seed": -1}, "seed=-1"),
        ({"start": -1}, "start=-1 must be at least 0"),
        ({"corpus": corpus_of([1])}, "the corpus has 1 tokens"),
    ],
)
def test_sizes_that_cannot_be(changes, message):
    with pytest.raises(DataError, match=message):
        training_batches(**{"corpus": CORPUS, "batch": 4, "length": LENGTH, "seed": 0} | changes)


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


@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=20),
    length=st.integers(1, 9),
    seed=st.none() | st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_rows_are_those_of_plain_python(lengths, length, seed, epoch):
    corpus = corpus_of(lengths)
    order = order_epoch(corpus, length, seed, epoch)
    batch = empty_batch(row_count(corpus, length), length)
    for row in range(row_count(corpus, length)):
        fill_row(batch, row, corpus, order, row)
    stream = [(number, token) for number in order.documents for token in corpus.document(number)]
    np.testing.assert_array_equal(np.stack(batch[:3], axis=-1), plain_rows(stream, length))
    assert sorted(order.documents) == list(range(len(lengths)))
    assert sorted(order.rows) == list(range(len(batch.tokens)))


def test_epochs_and_seeds_have_orders_of_their_own():
    corpus = corpus_of([3] * 50)
    orders = [order_epoch(corpus, 2, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.documents) for order in orders}) == 4
    assert len({tuple(order.rows) for order in orders}) == 4
