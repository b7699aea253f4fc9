import pytest
import sentencepiece
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax.errors import TokenizerError
from llama_jax.tokenizers import SentencePieceTokenizer
from llama_jax.tokenizers.sentencepiece import BYTE_VOCABULARY, EntryType, byte_tokenizer, train_bpe, write_model
from llama_jax.tokenizers.tokenizer_config import AddedToken, Settings

NO_SURROGATES = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def model():
    return vocabularies.sentencepiece_model()


@pytest.fixture(scope="module")
def small(model):
    return SentencePieceTokenizer(model, "small")


@settings(max_examples=50)
@given(NO_SURROGATES)
def test_ids_and_text_are_those_of_sentencepiece(model, small, text):
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = library.EncodeAsIds(text)
    assert small.encode(text, bos=False) == ids
    assert small.encode(text, eos=True) == library.EncodeAsIds(text, add_bos=True, add_eos=True)
    assert small.decode(ids) == library.DecodeIds(ids)


def test_control_and_unknown_tokens(small):
    assert small.token_bytes(small.bos_id) == b""
    assert small.token_bytes(0).decode().strip() == "⁇"


def test_each_text_between_special_tokens_has_its_leading_space(small):
    """As in Meta's code, where each exchange of a chat is encoded by itself."""
    hello = small.encode("Hello", bos=False)
    assert small.encode("Hello</s>Hello", bos=False, special=True) == [*hello, small.eos_id, *hello]


def test_added_tokens_are_appended(model, small):
    size = small.vocab_size
    added = [AddedToken("<|im_start|>", size, True), AddedToken("<think>", size + 1, False), AddedToken("<s>", 1, True)]
    tokenizer = SentencePieceTokenizer(model, "small", Settings(eos_token="<|im_start|>", added_tokens=tuple(added)))
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.eos_id == size
    assert tokenizer.stop_ids == (1, 2, size)  # </s> is an end under any name
    assert size not in tokenizer.encode("<|im_start|>", bos=False)
    assert tokenizer.encode("<|im_start|>", bos=False, special=True) == [size]
    assert size + 1 in tokenizer.encode("Hello<think>", bos=False)
    assert tokenizer.decode([size, size + 1]) == "<think>"
    with pytest.raises(TokenizerError, match=f"added token '<x>' has id {size + 1} instead of {size}"):
        SentencePieceTokenizer(model, "small", Settings(added_tokens=(AddedToken("<x>", size + 1, True),)))


def test_a_model_written_from_its_pieces_is_the_same(model, small):
    written = SentencePieceTokenizer(write_model(small.pieces(), bos="<s>", eos="</s>", space_prefix=True), "written")
    assert written.pieces() == small.pieces()
    assert (written.bos_id, written.eos_id) == (1, 2)
    for text in ("once upon a time", "  léger\n🦙", ""):
        assert written.encode(text) == small.encode(text)
    plain = SentencePieceTokenizer(write_model(small.pieces(), bos="<s>", eos="</s>", space_prefix=False), "written")
    assert not plain.space_prefix
    assert plain.decode(plain.encode(" once")) == " once"


def test_a_vocabulary_without_bos_says_so(small):
    pieces = [piece for piece in small.pieces() if piece.type != EntryType.CONTROL]
    tokenizer = SentencePieceTokenizer(write_model(pieces, bos="", eos="", space_prefix=True), "none")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (-1, -1, ())
    with pytest.raises(TokenizerError, match="has no bos token; encode with bos=False"):
        tokenizer.encode("Hello", bos=True)
    assert not tokenizer.add_bos
    assert tokenizer.encode("Hello") == tokenizer.encode("Hello", bos=False)
    assert tokenizer.decode(tokenizer.encode("Hello", bos=False)) == "Hello"


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


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [
        ([STORY], 200, "vocab_size=200 must be at least 300"),
        ([], 400, "no vocabulary can be trained on the text"),
    ],
)
def test_what_no_vocabulary_is_learned_from(texts, size, message):
    with pytest.raises(TokenizerError, match=message):
        train_bpe(texts, size)
