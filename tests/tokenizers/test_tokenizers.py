import random

import pytest
import sentencepiece
from conftest import shared_data
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.errors import TokenizerError
from llama_jax.tokenizers import TextStream, find_tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def llama2():
    return load_tokenizer(shared_data("tokenizers/llama2"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A vocabulary of our own with byte pieces, so that these tests run in any clone."""
    folder = tmp_path_factory.mktemp("vocabulary")
    words = random.Random(0)
    lines = [
        " ".join(words.choice(["once", "upon", "a", "time", "léger", "día", "tree"]) for _ in range(8)) for _ in range(300)
    ]
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "small"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder


def test_ids_equal_llama_cpps_vectors(llama2):
    folder = shared_data("tokenizers/llama2/vectors")
    texts = (folder / "texts.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    ids = [[int(i) for i in line.split()] for line in (folder / "ids.out").read_text().splitlines()]
    assert len(ids) > 40
    for text, want in zip(texts, ids, strict=False):
        assert llama2.encode(text, bos=False) == want, repr(text)


def test_bos_and_eos_are_asked_for(llama2):
    assert (llama2.bos_id, llama2.eos_id, llama2.vocab_size) == (1, 2, 32_000)
    plain = llama2.encode("Hello", bos=False)
    assert llama2.encode("Hello") == [1, *plain]
    assert llama2.encode("Hello", eos=True) == [1, *plain, 2]
    assert llama2.decode([1, *plain, 2]) == "Hello"
    assert llama2.stop_ids == (1, 2)


def test_special_tokens_in_user_text_are_text(llama2):
    ids = llama2.encode("<s>Hi</s>", bos=False)
    assert not {1, 2} & set(ids)
    assert llama2.decode(ids) == "<s>Hi</s>"


@given(st.text())
def test_streaming_gives_what_decoding_gives(small, text):
    tokenizer = load_tokenizer(small)
    ids = tokenizer.encode(text, bos=False)
    stream = TextStream(tokenizer, at_start=True)
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces if "\ufffd" not in text)


def test_a_character_is_shown_when_its_last_byte_has_come(llama2):
    ids = llama2.encode("🦙", bos=False)
    stream = TextStream(llama2, at_start=True)
    shown = [stream.push(token) for token in ids]
    assert len(ids) > 3
    assert shown[-1] == "🦙"
    assert set(shown[:-1]) == {""}
    assert stream.finish() == ""


def test_a_character_cut_short_shows_at_the_end(llama2):
    stream = TextStream(llama2)
    for token in llama2.encode("🦙", bos=False)[1:-1]:
        assert stream.push(token) == ""
    assert stream.finish() == "\ufffd"


def test_control_and_unknown_tokens(small):
    tokenizer = load_tokenizer(small)
    assert tokenizer.token_bytes(tokenizer.bos_id) == b""
    assert tokenizer.token_bytes(0).decode().strip() == "⁇"


@pytest.mark.parametrize("token", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_named(small, token):
    tokenizer = load_tokenizer(small)
    for use in (tokenizer.token_bytes, lambda t: tokenizer.decode([t])):
        with pytest.raises(TokenizerError, match=f"token id {token} is outside the vocabulary"):
            use(token)


def test_found_by_content_and_size(small, tmp_path):
    model = small / "small.model"
    size = load_tokenizer(model).vocab_size
    other = tmp_path / "vocabulary.anything"
    other.write_bytes(model.read_bytes())
    (tmp_path / "noise.model").write_bytes(b"\x0a\x0e\x0anoise that is no vocabulary")
    (tmp_path / "empty.model").write_bytes(b"")
    assert find_tokenizer(tmp_path, size).vocab_size == size
    assert find_tokenizer(tmp_path, size + 1).vocab_size == size  # a model may pad its vocabulary
    assert find_tokenizer(tmp_path, size - 1) is None
    assert TextStream(load_tokenizer(tmp_path)).push(size) == ""
    (tmp_path / "again.model").write_bytes(model.read_bytes())
    with pytest.raises(TokenizerError, match="several vocabularies"):
        find_tokenizer(tmp_path, size)
    with pytest.raises(TokenizerError, match="several vocabularies"):
        load_tokenizer(tmp_path)


def test_what_is_no_vocabulary_is_named(tmp_path):
    with pytest.raises(TokenizerError, match="does not exist"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(TokenizerError, match="holds no SentencePiece model"):
        load_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.model"
    for content in (b"", b"IQ== 0\nIg== 1\n", b"\x0a\x0e\x0anoise that is no vocabulary"):
        file.write_bytes(content)
        with pytest.raises(TokenizerError, match=r"tokenizer.model is not a (whole )?SentencePiece model"):
            load_tokenizer(file)
