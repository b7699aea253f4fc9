"""What holds for every kind of vocabulary."""

import random
import subprocess
import sys

import pytest
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax.errors import TokenizerError
from llama_jax.tokenizers import TextStream, load_tokenizer
from llama_jax.tokenizers.interface import Text

# U+2581 is how most vocabularies spell a space, so that it cannot come back.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"))
# Text that is likely to meet words, special tokens and what stands for them inside.
PIECES = st.sampled_from(
    ["once upon", " the", "<s>", "</s>", "<|eot_id|>", "<|", "eot_id|>", "<", "\ufdd0\ufdd1", "\ufdd0", "\n"]
)
MIXED = st.lists(PIECES | TEXTS, max_size=8).map("".join)


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabularies")
    return {kind: load_tokenizer(vocabularies.write(folder / kind, kind)) for kind in vocabularies.KINDS}


@pytest.fixture(params=vocabularies.KINDS)
def tokenizer(request, all_kinds):
    return all_kinds[request.param]


def test_importing_the_room_loads_no_library():
    code = (
        "import sys, llama_jax.tokenizers\n"
        "heavy = {'sentencepiece', 'tiktoken', 'tokenizers', 'jinja2', 'numpy', 'jax'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(max_examples=50)
@given(text=MIXED)
def test_decoding_gives_the_text_back(all_kinds, text):
    for kind, tokenizer in all_kinds.items():
        if kind == "first" and text.startswith(" "):
            continue  # this way to put a space first takes one that is there for it
        assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text, kind
        assert tokenizer.decode(tokenizer.encode(text, eos=True)) == text, kind


@settings(max_examples=50)
@given(text=MIXED)
def test_special_tokens_in_a_text_are_text(all_kinds, text):
    for kind, tokenizer in all_kinds.items():
        text = f"{text}<s>{text}<|eot_id|>"
        assert not set(tokenizer.encode(text, bos=False)) & set(tokenizer.special_tokens.values()), kind


@settings(max_examples=50)
@given(texts=st.lists(MIXED, max_size=4))
def test_many_texts_are_encoded_as_each_alone(all_kinds, texts):
    for kind, tokenizer in all_kinds.items():
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text, bos=False) for text in texts], kind


@settings(max_examples=50)
@given(text=MIXED)
def test_streaming_gives_what_decoding_gives(all_kinds, text):
    for kind, tokenizer in all_kinds.items():
        ids = tokenizer.encode(text)
        stream = TextStream(tokenizer, at_start=True)
        pieces = [stream.push(token) for token in ids] + [stream.finish()]
        assert "".join(pieces) == tokenizer.decode(ids), kind
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces), kind


@given(text=TEXTS, start=st.integers(0, 50))
def test_what_is_no_utf8_shows_alike_in_a_stream_and_decoded(all_kinds, text, start):
    for kind in ("ranks", "bytes", "spaces"):
        tokenizer = all_kinds[kind]
        ids = tokenizer.encode(text, bos=False)[start:]
        stream = TextStream(tokenizer, at_start=True)
        assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


def test_special_tokens_where_they_are_asked_for(tokenizer):
    name = "<|eot_id|>" if "<|eot_id|>" in tokenizer.special_tokens else "</s>"
    token = tokenizer.special_tokens[name]
    ids = tokenizer.encode(f"once{name}{name}", bos=False, special=True)
    assert ids == [*tokenizer.encode("once", bos=False), token, token]
    assert tokenizer.decode(ids) == "once"
    assert tokenizer.token_bytes(token) == b""
    assert tokenizer.encode_parts(["once", token, token]) == ids


def test_parts_make_no_special_token_together(tokenizer):
    token = tokenizer.bos_id
    name = next(name for name, i in tokenizer.special_tokens.items() if i == token)
    ids = tokenizer.encode_parts([name[:2], token, name[2:] + name[:1], token, name])
    assert ids.count(token) == 2
    assert tokenizer.decode(ids).replace(" ", "") == name + name[:1] + name


def test_bos_and_eos_are_asked_for(tokenizer):
    plain = tokenizer.encode("Hello", bos=False)
    assert tokenizer.encode("Hello") == [tokenizer.bos_id, *plain]
    assert tokenizer.encode("Hello", eos=True) == [tokenizer.bos_id, *plain, tokenizer.eos_id]
    assert tokenizer.bos_id in tokenizer.special_tokens.values()
    assert {tokenizer.bos_id, tokenizer.eos_id} <= set(tokenizer.stop_ids)


def test_a_lone_surrogate_is_named(tokenizer):
    with pytest.raises(TokenizerError, match=r"character 2 is the lone surrogate '\\ud800'"):
        tokenizer.encode("ab\ud800")


@pytest.mark.parametrize("token", [-1, 2**31])
def test_ids_that_no_model_has_are_refused(tokenizer, token):
    for use in (tokenizer.token_bytes, lambda t: tokenizer.decode([t]), TextStream(tokenizer).push):
        with pytest.raises(TokenizerError, match=f"token id {token} is outside the vocabulary of {tokenizer.vocab_size}"):
            use(token)


@given(text=TEXTS, places=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 2**31 - 1001)), max_size=5))
def test_ids_from_a_models_padding_have_no_text(all_kinds, text, places):
    for tokenizer in all_kinds.values():
        ids = tokenizer.encode(text)
        padded = list(ids)
        for place, beyond in places:
            padded.insert(place, tokenizer.vocab_size + beyond)
        stream = TextStream(tokenizer, at_start=True)
        assert "".join(map(stream.push, padded)) + stream.finish() == tokenizer.decode(padded) == tokenizer.decode(ids)


def test_a_character_is_shown_when_its_last_byte_has_come(tokenizer):
    ids = tokenizer.encode("🐘", bos=False)
    stream = TextStream(tokenizer, at_start=True)
    shown = [stream.push(token) for token in ids]
    assert len(ids) > 3
    assert shown[-1] == "🐘"
    assert set(shown[:-1]) == {""}
    assert stream.finish() == ""


def test_a_character_cut_short_shows_at_the_end(tokenizer):
    stream = TextStream(tokenizer)
    for token in tokenizer.encode("🐘", bos=False)[-4:-1]:
        assert stream.push(token) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.slow
@pytest.mark.parametrize("character", "a \n")
def test_a_million_times_one_character(all_kinds, character):
    """tiktoken's own encode overflows the stack here."""
    text = character * 1_000_000
    for kind in ("ranks", "bytes", "sentencepiece"):
        assert all_kinds[kind].decode(all_kinds[kind].encode(text, bos=False)) == text, kind


def test_saved_and_loaded_again_it_is_the_same(tokenizer, tmp_path):
    text = "once<s> upon \n\n<|eot_id|>léger 🦙"
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    for name in ("vocab_size", "bos_id", "eos_id", "stop_ids", "special_tokens", "chat_template", "space_prefix"):
        assert getattr(again, name) == getattr(tokenizer, name), name
    for special in (False, True):
        assert again.encode(text, special=special) == tokenizer.encode(text, special=special)


def test_a_damaged_file_is_an_error_or_a_vocabulary(tmp_path):
    """Whatever the libraries make of it: no crash, no hang, no other exception."""
    refused = 0
    for name, make in vocabularies.FILES.values():
        whole = make()
        for seed in range(30):
            dice = random.Random(seed)
            content = bytearray(whole)
            for _ in range(dice.choice([1, 1, 5])):
                content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
            if dice.random() < 0.3:
                del content[dice.randrange(len(content)) :]
            (tmp_path / name).write_bytes(content)
            try:
                tokenizer = load_tokenizer(tmp_path / name)
                tokenizer.decode(tokenizer.encode("once upon\n\n a <s> 🦙", bos=False))
            except TokenizerError as error:
                refused += name in str(error)
    assert 50 < refused < 170


class Letters:
    """Each token is the letter of its number."""

    vocab_size = 256

    def token_bytes(self, token):
        return bytes([token])


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("hello world", ("wor",), "hello "),
        ("aab", ("ab",), "a"),
        ("aaab aab", ("aab",), "a"),
        ("abcabd", ("abd",), "abc"),
        ("no end", ("x", "yz"), "no end"),
        ("one two", ("two", "on"), ""),
        ("almos", ("almost",), "almos"),
        (b"cut \xf0\x9f".decode("latin-1"), ("\ufffd",), "cut "),
    ],
)
def test_stop_strings_across_tokens(text, stop, shown):
    written = []
    out = Text(Letters(), stop, written.append)
    for letter in text.encode("latin-1"):
        if out.push(letter):
            break
    out.finish()
    assert out.shown == "".join(written) == shown
