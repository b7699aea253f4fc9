"""Division into training and validation, and permutations."""

from dataclasses import replace

import numpy as np
import pytest
from byte_tokenizer import ByteTokenizer, corpus_of
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.data import DataError, split
from llama_jax.data import corpus as corpus_module
from llama_jax.data.corpus import check_corpus_rows, shuffled, without

LENGTHS = st.lists(st.integers(1, 9), min_size=2, max_size=30)


@given(lengths=LENGTHS, share=st.floats(0.01, 0.6), seed=st.integers(0, 2**64 - 1))
def test_every_document_is_on_one_side_and_in_order(lengths, share, seed):
    corpus = corpus_of(lengths)
    count = max(1, round(share * len(lengths)))
    train, validation = split(corpus, share, seed=seed)
    assert validation.document_count == count
    assert sorted([*train.starts, *validation.starts]) == corpus.starts.tolist()
    for part in (train, validation):
        assert (np.diff(part.starts) > 0).all()
        assert part.token_count == sum(len(part.document(n)) for n in range(part.document_count))
        assert part.byte_count == 3 * part.token_count
    again = split(corpus, count, seed=seed)
    np.testing.assert_array_equal(again.validation.starts, validation.starts)
    np.testing.assert_array_equal(again.train.stops, train.stops)


@given(lengths=LENGTHS, rows=st.integers(990, 1300), block=st.integers(1, 40), data=st.data())
def test_only_documents_with_a_token_beyond_the_rows_are_refused(lengths, rows, block, data):
    whole = corpus_of(lengths)
    corpus = whole.select(np.array(data.draw(st.permutations(range(len(lengths))))[:-1]))
    bad = {n + 1 for n in range(corpus.document_count) if corpus.document(n).max() >= rows}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "BLOCK_TOKENS", block)
        if bad:
            with pytest.raises(DataError, match=rf"document ({'|'.join(map(str, bad))}) contains the token id") as caught:
                check_corpus_rows(corpus, rows)
            assert f"embedding of {rows} rows" in str(caught.value)
        else:
            check_corpus_rows(corpus, rows)


@given(lengths=st.lists(st.integers(40, 90), min_size=2, max_size=9), share=st.floats(0.02, 0.5), seed=st.integers(0, 99))
def test_of_few_documents_no_more_than_the_share_is_validated_on(lengths, share, seed):
    """As of a text without separators, which is cut into few long documents."""
    random = np.random.default_rng(seed)
    corpus = replace(corpus_of(lengths), tokens=random.integers(0, 258, sum(lengths)))
    tokenizer = ByteTokenizer()
    sizes = np.add.reduceat([len(tokenizer.token_bytes(token)) for token in corpus.tokens.tolist()], corpus.starts)
    corpus = replace(corpus, byte_counts=sizes)
    train, validation = split(corpus, share, seed=seed, tokenizer=tokenizer)
    assert 2 <= validation.token_count <= max(1.25 * share * corpus.token_count, 2)
    assert train.token_count + validation.token_count == corpus.token_count
    for part in (train, validation):
        assert (np.diff(part.starts) > 0).all()
        assert part.byte_count == sum((part.document(n) < 256).sum() for n in range(part.document_count))
    whole = split(corpus, share, seed=seed).validation
    assert set(validation.starts) == set(whole.starts)


@given(
    contents=st.lists(st.integers(0, 5), min_size=2, max_size=30),
    share=st.floats(0.05, 0.6),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_same_document_is_never_on_both_sides(contents, share, seed):
    corpus = corpus_of([3] * len(contents))
    corpus = replace(corpus, tokens=np.repeat(np.array(contents, np.uint32), 3))
    if len(set(contents)) == 1:
        with pytest.raises(DataError, match="a single document"):
            split(corpus, share, seed=seed)
        return
    train, validation = split(corpus, share, seed=seed)
    sides = [{part.document(number)[0] for number in range(part.document_count)} for part in (train, validation)]
    assert not sides[0] & sides[1]
    assert sorted([*train.starts, *validation.starts]) == corpus.starts.tolist(), "and none is lost"
    asked = max(1, round(share * len(contents)))
    least = min(contents.count(content) for content in contents)
    assert validation.document_count <= max(asked, least)


def test_what_is_in_the_validation_data_is_not_trained_on():
    corpus, other = corpus_of([3, 4, 5]), corpus_of([4, 3])
    other = replace(other, tokens=np.concatenate([np.arange(1003, 1007), np.arange(3)]).astype(np.uint32))
    assert without(corpus, other).starts.tolist() == [0, 7]
    assert without(corpus, corpus_of([1])) is corpus
    with pytest.raises(DataError, match="every document of the training data is also in the validation data"):
        without(corpus, corpus)


@pytest.mark.parametrize("validation", [0, 0.0, 3, 4, -1, 1.0, -0.5, float("nan"), 0.99])
def test_a_side_without_documents_is_refused(validation):
    with pytest.raises(DataError, match=f"validation={validation} leaves no training or validation documents"):
        split(corpus_of([2, 2, 2]), validation)


def test_a_shuffle_stays_what_it_was():
    """Written down, for runs are continued with other versions of NumPy."""
    assert shuffled(8, 0, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert shuffled(8, 1, 0).tolist() != shuffled(8, 0, 1).tolist()
