"""Shares of several sources: exact over every stretch of rows, and the same wherever one begins."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from byte_tokenizer import corpus_of
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.data import DataError, training_batches
from llama_jax.data.mixture import Mixture, interleave, shares

PARTS = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple)


@given(PARTS)
def test_among_the_first_n_each_is_less_than_one_away_from_its_share(parts):
    order = interleave(parts)
    counts = np.cumsum(order[:, None] == np.arange(len(parts)), axis=0)
    exact = np.arange(1, len(order) + 1)[:, None] * np.array(parts) / sum(parts)
    assert np.abs(counts - exact).max() < 1
    assert counts[-1].tolist() == list(parts)


@pytest.mark.parametrize("weight", [0, -1, "nan", "inf", "much", "1/0"])
def test_a_weight_is_a_positive_number(weight):
    with pytest.raises(DataError, match=r"the weight of books, .* must be a number above 0"):
        shares({"stories": 1, "books": weight})


@given(st.lists(st.tuples(st.integers(0, 30), PARTS.filter(lambda parts: len(parts) >= 3)), min_size=1, max_size=3))
def test_each_source_is_read_in_its_order_over_changes_too(changes):
    """Every row of a source comes once, after the one before it; counts say how many came."""
    first, given_ = 0, []
    for rows, parts in changes:
        given_.append((first, {name: Fraction(part, sum(parts[:3])) for name, part in zip("abc", parts, strict=False)}))
        first += rows
    mixture, seen = Mixture(given_), [0, 0, 0]
    for row in range(first + 50):
        assert mixture.counts(row).tolist() == seen
        source, before = mixture.source_row(row)
        assert before == seen[source]
        seen[source] += 1


def drawn(seed, documents):
    return corpus_of(np.random.default_rng(seed).integers(4, 40, documents).tolist())


@pytest.mark.parametrize("hosts", [1, 2, 8])
def test_batches_have_the_rows_of_each_source_in_their_order(hosts):
    corpora = [drawn(0, 30), drawn(1, 9), drawn(2, 50)]
    mixture = Mixture([(0, shares({"a": 0.5, "b": 0.3, "c": 0.2})), (24, shares({"a": 0.1, "b": 0.1, "c": 0.8}))])
    alone = [training_batches(corpus, 1, 16, seed=5) for corpus in corpora]
    begun = [
        [
            training_batches(corpora, 8, 16, seed=5, host=host, hosts=hosts, start=start, mixture=mixture)
            for host in range(hosts)
        ]
        for start in (0, 2)
    ]
    for number in range(6):
        rows = [next(alone[mixture.source_row(8 * number + at)[0]]).tokens[0] for at in range(8)]
        for start, parts in zip((0, 2), begun, strict=True):
            if number >= start:
                np.testing.assert_array_equal(np.concatenate([next(part).tokens for part in parts]), rows)


def test_text_and_chats_do_not_mix():
    chats = corpus_of([5, 7])
    with pytest.raises(DataError, match="text and chats cannot be mixed"):
        training_batches(
            [drawn(0, 9), replace(chats, targets=chats.tokens % 3 == 0)],
            2,
            8,
            seed=0,
            mixture=Mixture([(0, shares({"a": 1, "b": 1}))]),
        )
