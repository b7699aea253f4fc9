import base64

import pytest
import tiktoken
import vocabularies
from conftest import shared_data
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe

from llama_jax.errors import TokenizerError
from llama_jax.tokenizers import TiktokenTokenizer
from llama_jax.tokenizers.tiktoken import LLAMA3_SPLIT, MAX_RUN, MAX_TEXT, split_long_text

NO_SURROGATES = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def llama3():
    return vocabularies.published("llama3")[0]


@pytest.fixture(scope="module")
def library():
    """tiktoken by itself, from its own reader of the file."""
    ranks = load_tiktoken_bpe(str(shared_data("tokenizers/llama3/tokenizer.model")))
    return tiktoken.Encoding("llama3", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={})


def test_the_ids_that_meta_published(llama3):
    """Of all releases: llama3's tokenizer.py, llama-models' and the tokenizer.json of 3.0 to 3.3 agree on these."""
    expected = {
        "<|begin_of_text|>": 128000,
        "<|end_of_text|>": 128001,
        "<|finetune_right_pad_id|>": 128004,
        "<|start_header_id|>": 128006,
        "<|end_header_id|>": 128007,
        "<|eom_id|>": 128008,
        "<|eot_id|>": 128009,
        "<|python_tag|>": 128010,
    }
    assert {name: llama3.special_tokens[name] for name in expected} == expected
    assert sorted(llama3.special_tokens.values()) == list(range(128000, 128256))


@settings(max_examples=50)
@given(text=NO_SURROGATES)
def test_ids_are_those_of_tiktoken_and_the_text_comes_back(llama3, library, text):
    ids = llama3.encode(text, bos=False)
    assert ids == library.encode_ordinary(text)
    assert llama3.decode(ids) == text
    assert b"".join(map(llama3.token_bytes, ids)) == text.encode()


def test_special_tokens(llama3):
    text = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    assert llama3.encode(text, special=True) == [128000, 128006, 882, 128007, 271, 13347, 128009]
    assert llama3.decode(llama3.encode(text, bos=False)) == text
    assert llama3.decode(llama3.encode(text, special=True)) == "user\n\nHi"


@given(st.lists(st.tuples(st.sampled_from("a \n"), st.integers(1, 3 * MAX_RUN)), max_size=20))
def test_long_texts_are_cut_as_meta_cuts_them(runs):
    """Oracle: the rule in words, character by character."""
    text = "".join(character * count for character, count in runs)
    expected = []
    for start in range(0, len(text), MAX_TEXT):
        piece, run, was_space = "", 0, None
        for character in text[start : start + MAX_TEXT]:
            run = run + 1 if character.isspace() == was_space else 1
            was_space = character.isspace()
            if run > MAX_RUN:
                expected.append(piece)
                piece, run = "", 1
            piece += character
        expected.append(piece)
    assert list(split_long_text(text)) == expected


def damaged(change):
    lines = vocabularies.rank_file().splitlines()
    change(lines)
    return b"\n".join(lines)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines.pop(3), "rank 3 is missing"),
        (lambda lines: lines.append(lines[5]), "repeats rank 5"),
        (lambda lines: lines.append(lines[5].split()[0] + b" %d" % len(lines)), "it has duplicate tokens"),
        (lambda lines: lines.__setitem__(7, b"I*== 7"), r"line 8 is b'I\*== 7', not a token in base64 and its rank"),
        (lambda lines: lines.__setitem__(0, base64.b64encode(b"xyz") + b" 0"), "the byte 0 has no rank"),
    ],
)
def test_damage_is_named(change, message):
    with pytest.raises(TokenizerError, match=rf"here is not a whole rank file of Llama 3: .*{message}.*copy it again"):
        TiktokenTokenizer(damaged(change), "here")
