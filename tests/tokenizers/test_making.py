from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llama_jax
from llama_jax.tokenizers.sentencepiece import BYTE_VOCABULARY, byte_tokenizer, train_bpe


@pytest.fixture(scope="module")
def bytes_():
    return byte_tokenizer()


@given(st.text())
def test_a_token_is_a_byte(bytes_, text):
    text = text.replace("\0", "")
    ids = bytes_.encode(text)
    assert ids == [bytes_.bos_id] + [3 + byte for byte in text.encode()]
    assert bytes_.decode(ids) == text
    assert bytes_.vocab_size == BYTE_VOCABULARY


STORY = "Once upon a time there was a llama. It ate 12 apples!\n\nThe llama said: thank you.\n"


@pytest.fixture(scope="module")
def learned():
    return train_bpe([STORY * 20, "A tree."], 330)


def test_what_was_learned_is_short_and_comes_back(learned):
    ids = learned.encode(STORY)
    assert learned.decode(ids) == STORY
    assert len(ids) < len(STORY) / 2
    assert learned.decode(learned.encode("äöü 🦙")) == "äöü 🦙"
    assert learned.vocab_size <= 330


def test_digits_stand_alone(learned):
    assert [learned.token_bytes(t) for t in learned.encode("12")[-2:]] == [b"1", b"2"]


def test_the_same_text_gives_the_same_vocabulary(learned, tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder, tokenizer in zip(folders, (learned, train_bpe([STORY * 20, "A tree."], 330)), strict=True):
        folder.mkdir()
        tokenizer.save(folder)
    one, two = ((folder / "tokenizer.model").read_bytes() for folder in folders)
    assert one == two


def test_a_vocabulary_that_cannot_be():
    with pytest.raises(llama_jax.TokenizerError, match="vocab_size=200 must be at least 300"):
        train_bpe([STORY], 200)
    with pytest.raises(llama_jax.TokenizerError, match="the text gives no vocabulary"):
        train_bpe([], 400)


def test_a_vocabulary_has_a_largest_size():
    with pytest.raises(llama_jax.TokenizerError, match=r"vocab_size=2147483648 must be at most 1048576"):
        train_bpe([STORY], 2**31)
