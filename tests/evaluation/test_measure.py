"""Every token predicted once, with as much before it as there is room for."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.data import Corpus
from llama_jax.data.batches import pack_documents
from llama_jax.evaluation.measure import cut_windows, pack_rows


def corpus_of(lengths):
    """Documents of these lengths, whose tokens are all different, with others between them."""
    stops = np.cumsum(np.array(lengths, np.int64) + 3)
    return Corpus(
        tokens=np.arange(1000, 1000 + int(stops[-1]), dtype=np.uint32),
        starts=stops - lengths,
        stops=stops,
        byte_counts=np.ones(len(lengths), np.int64),
        vocab_size=1 << 20,
        digest="",
    )


sizes = st.integers(1, 12).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))


@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8), size=sizes, batch=st.integers(1, 5))
def test_every_token_is_predicted_once_with_its_context(lengths, size, batch):
    length, stride = size
    corpus = corpus_of(lengths)
    windows = cut_windows(corpus, length, stride)
    packed = pack_documents(windows.read.tolist(), length)
    seen = []
    for at in range(0, len(packed), batch):
        rows, owner = pack_rows(corpus, windows, packed[at : at + batch], batch, length)
        np.testing.assert_array_equal(owner >= 0, rows.targets >= 0)
        assert not rows.positions[rows.segment_ids == 0].any()
        for b, t in zip(*np.nonzero(rows.targets >= 0), strict=True):
            context = rows.positions[b, t] + 1
            run = slice(t - context + 1, t + 1)
            assert len(set(rows.segment_ids[b, run])) == 1
            target = rows.targets[b, t]
            # The tokens before it in the row are those before it in the corpus, ...
            np.testing.assert_array_equal(rows.tokens[b, run], np.arange(target - context, target))
            (document,) = np.flatnonzero((corpus.starts + 1000 < target) & (target < corpus.stops + 1000))
            before = target - 1000 - corpus.starts[document]
            # ... all of its document where it is that short, and no other's.
            assert min(before, length - stride) <= context <= min(before, length)
            seen.append(target)
    expected = [corpus.tokens[a + 1 : b] for a, b in zip(corpus.starts, corpus.stops, strict=True)]
    np.testing.assert_array_equal(np.sort(seen), np.concatenate(expected))
    assert windows.predicted.sum() == len(seen)


@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=8), size=sizes, seed=st.integers(0, 9))
def test_of_a_corpus_with_targets_these_alone_are_predicted(lengths, size, seed):
    corpus = corpus_of(lengths)
    corpus = replace(corpus, targets=np.random.default_rng(seed).random(len(corpus.tokens)) < 0.4)
    windows = cut_windows(corpus, *size)
    whole = cut_windows(replace(corpus, targets=None), *size)
    for name in ("start", "read", "context"):
        np.testing.assert_array_equal(getattr(windows, name), getattr(whole, name))
    packed = pack_documents(windows.read.tolist(), size[0])
    rows, owner = pack_rows(corpus, windows, packed, len(packed), size[0])
    np.testing.assert_array_equal(owner >= 0, rows.targets >= 0)
    parts = [np.arange(a + 1, b) for a, b in zip(corpus.starts, corpus.stops, strict=True)]
    expected = np.concatenate(parts)[corpus.targets[np.concatenate(parts)]] + 1000
    np.testing.assert_array_equal(np.sort(rows.targets[rows.targets >= 0]), expected)
    np.testing.assert_array_equal(np.bincount(owner[owner >= 0], minlength=len(windows.read)), windows.predicted)
