"""Needle in a haystack: what the prompts are, and the scores against whole sequences one by one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import make_goldens
import numpy as np
import pytest
from conftest import as_float64, params_of, shared_data
from hypothesis import given
from hypothesis import strategies as st

import llama_jax
from llama_jax.config import RopeScaling
from llama_jax.errors import GenerationError, TokenizerError, UserError
from llama_jax.model.whole import logits
from llama_jax.runs import lengths
from llama_jax.runs import needle as room
from llama_jax.runs.haystack import FARTHEST, QUESTION, STATEMENT, Trial, draw_keys, encode_keys, lay_prompt
from llama_jax.runs.needle import needle
from llama_jax.tokenizers.sentencepiece import BYTE_VOCABULARY, byte_tokenizer

CONFIG = replace(make_goldens.KINDS["gqa"], vocab_size=BYTE_VOCABULARY)
DYNAMIC = replace(CONFIG, max_seq_len=16, rope_scaling=RopeScaling("dynamic", 4.0, original_max_seq_len=16))
BYTES = byte_tokenizer()
TEXT = b"the park was big and she loved to play outside with her friends all day, "
HAYSTACK = np.array(BYTES.encode(TEXT.decode(), bos=False), np.uint16)
SHORT = {"statement": "No {key}!", "question": "No {key}", "digits": 2, "wrong_keys": 2}  # 5 + 1, 4 and 2 tokens, and BOS


@pytest.fixture(scope="module")
def params():
    return params_of(CONFIG, make_goldens.random_tensors(CONFIG))


@pytest.fixture
def in_pieces(monkeypatch):
    """A prompt ends inside a piece."""
    monkeypatch.setattr(lengths, "LARGEST_PREFILL", 10)


# -- the prompts ---------------------------------------------------------------------------------------------------------


WORDS = np.array([bytes([byte]).isspace() for byte in TEXT])


def text_of(tokens):
    return b"".join(BYTES.token_bytes(int(token)) for token in tokens)


@given(st.integers(0, 4), st.floats(0, 0.999), st.integers(0, 40), st.floats(0, 1), st.booleans())
def test_a_prompt_is_exactly_as_long_as_asked(key, start, more, depth, begins):
    keys = encode_keys(BYTES, ["12", "34", "123", "9", "7777777"], " no {key}.", " no {key}")
    begin = [BYTES.bos_id] if begins else []
    said, answer = keys.statements[key], keys.answers[key]
    room_left = 1 + more
    length = len(begin) + len(said) + len(keys.question) + len(answer) + room_left
    prompt = lay_prompt(begin, HAYSTACK, WORDS, keys, Trial(key, start), length, depth).tolist()
    assert len(prompt) + len(answer) == length
    assert prompt[: len(begin)] == begin
    assert prompt[-len(keys.question) :] == keys.question
    body = prompt[len(begin) : -len(keys.question)]
    at = text_of(body).index(text_of(said))
    hay = text_of(body[:at] + body[at + len(said) :])
    assert hay in TEXT
    assert round(depth * room_left) - FARTHEST <= at <= round(depth * room_left)
    # Between words, where there is a space within reach; at the ends, where asked.
    if 0 < round(depth * room_left) < room_left and b" " in hay[: round(depth * room_left) + 1]:
        assert hay[at : at + 1] == b" "
    if depth in (0, 1):
        assert at == depth * room_left


def test_lengths_and_depths_have_the_same_haystack():
    keys = encode_keys(BYTES, ["12", "34"], "{key}", "{key}")
    trial = Trial(0, 0.2)
    prompts = [
        text_of(lay_prompt([], HAYSTACK, WORDS, keys, trial, length, depth)).replace(b" 12", b"", 1)
        for length, depth in ((25, 0), (25, 1), (35, 0), (35, 0.4))
    ]
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3]
    assert prompts[2].startswith(prompts[0].rstrip())


@given(st.integers(1, 8), st.integers(0, 100))
def test_keys_are_different_numbers(digits, seed):
    keys = draw_keys(9, digits, seed)
    assert len(set(keys)) == 9
    assert all(len(key) == digits and key.isdecimal() and key[0] != "0" for key in keys)
    assert keys == draw_keys(9, digits, seed)
    assert keys[:5] == draw_keys(5, digits, seed)


@pytest.mark.parametrize("name", ["bytes", "stories260K", "llama2", "llama3"])
def test_question_and_answer_are_the_tokens_of_the_whole(request, name):
    """Whatever the vocabulary does with a space before a number, and however it cuts one."""
    tokenizer = BYTES
    if name == "stories260K":
        tokenizer = request.getfixturevalue("stories").tokenizer
    elif name != "bytes":
        tokenizer = llama_jax.load_tokenizer(shared_data(f"tokenizers/{name}"))
    keys = draw_keys(10, 5, 0)
    found = encode_keys(tokenizer, keys, STATEMENT, QUESTION)
    space = "" if tokenizer.space_prefix else " "
    for key, statement, answer in zip(keys, found.statements, found.answers, strict=True):
        assert found.question + answer == tokenizer.encode(space + QUESTION.format(key=key), bos=False)
        assert statement == tokenizer.encode(space + STATEMENT.format(key=key), bos=False)
        assert answer
    assert len({answer[0] for answer in found.answers}) > 1


# -- the scores ----------------------------------------------------------------------------------------------------------


def by_definition(of_row, trial, keys, length, depth):
    """Log-probabilities of all keys in float64, each after the prompt as one whole sequence; and if each is greedy's."""
    prompt = lay_prompt([BYTES.bos_id], HAYSTACK, WORDS, keys, trial, length, depth)
    scores, greedy = [], []
    for answer in keys.answers:
        with jax.enable_x64(True):
            found = np.asarray(of_row(np.concatenate([prompt, answer])[None]))[len(prompt) - 1 : -1]
        scores.append(found[np.arange(len(answer)), answer].sum())
        greedy.append(bool((found.argmax(-1) == answer).all()))
    return np.array(scores), greedy


@pytest.mark.parametrize("config", [CONFIG, pytest.param(DYNAMIC, marks=pytest.mark.slow)], ids=["plain", "rope by length"])
def test_it_is_the_definition(params, in_pieces, config):
    """Beyond the context, in pieces, and with batches of which the last is not full."""
    given = SHORT | {"lengths": [37], "depths": (0.5, 0.0), "trials": 2, "seed": 3}
    found = needle(config, params, BYTES, HAYSTACK, batch=3, **given)
    assert [(cell.length, cell.depth, cell.trials) for cell in found.cells] == [(37, 0.0, 2), (37, 0.5, 2)]
    keys = encode_keys(BYTES, draw_keys(3, 2, 3), SHORT["statement"], SHORT["question"])
    starts = np.random.default_rng([3, 1]).random(2)
    with jax.enable_x64(True):
        wide = as_float64(params)
        of_row = jax.jit(lambda tokens: jax.nn.log_softmax(logits(config, wide, tokens)[0]))
    for cell in found.cells:
        parts = [by_definition(of_row, Trial(i, starts[i]), keys, 37, cell.depth) for i in range(2)]
        right = np.array([scores[i] for i, (scores, _) in enumerate(parts)])
        wrong = np.array([np.delete(scores, i) for i, (scores, _) in enumerate(parts)])
        assert cell.log_probability == pytest.approx(right.mean(), rel=1e-5)
        assert cell.margin == pytest.approx((right - wrong.mean(axis=1)).mean(), rel=1e-3, abs=1e-5)
        assert cell.rank == (1 + (wrong > right[:, None]).sum(axis=1)).mean()
        assert cell.chosen == (wrong < right[:, None]).all(axis=1).mean()
        assert cell.exact == np.mean([greedy[i] for i, (_, greedy) in enumerate(parts)])


def test_a_model_without_attention_is_at_chance(params, in_pieces):
    """What it thinks of the numbers cancels out where each is hidden as often; one that knows nothing prefers none."""
    attention = params.blocks.attention
    blind = params.replace(blocks=params.blocks.replace(attention=attention.replace(out=jnp.zeros_like(attention.out))))
    given = SHORT | {"lengths": [37], "depths": [0.5], "trials": 6, "batch": 3}
    (cell,) = needle(CONFIG, blind, BYTES, HAYSTACK, **given).cells
    assert cell.margin == pytest.approx(0, abs=1e-5)
    assert (cell.chosen, cell.rank) == (pytest.approx(1 / 3), 2)
    (cell,) = needle(CONFIG, jax.tree.map(jnp.zeros_like, blind), BYTES, HAYSTACK, **given).cells
    assert (cell.margin, cell.chosen, cell.rank, cell.exact) == (0, 0, 3, 0)


class Reader:
    """Stands for a model that has read the prompt: right where `finds` says so, of a key that it says exactly or nearly."""

    def __init__(self, monkeypatch, finds):
        self.finds, self.tokens = finds, []
        monkeypatch.setattr(room, "empty_cache", lambda *_: self)
        monkeypatch.setattr(room, "_read_piece", self.read)
        monkeypatch.setattr(room, "_answer_scores", self.score)

    def read(self, config, params, length, cache, tokens, new):
        self.tokens += tokens[0, : new[0]].tolist()
        return self

    def replace(self, length):
        self.tokens = []
        return self

    def score(self, config, params, length, cache, last, answers):
        text = text_of([*self.tokens, *last.tolist()])
        keys = [text_of(answer[answer >= 0]) for answer in answers]
        hidden = np.array([key + b"!" in text for key in keys])
        assert hidden.sum() == 1
        found = hidden if self.finds(text, text.index(keys[hidden.argmax()] + b"!") / len(text)) else np.roll(hidden, 1)
        return self, np.where(found, -1.0, -4.0)[None], found[None]


def test_where_a_model_looks_is_seen(monkeypatch, in_pieces):
    """One that sees only the end of a prompt finds needles there."""
    Reader(monkeypatch, lambda text, place: place > 0.45)
    seen = []

    def progress(numbers):
        yield from numbers
        seen.append(len(numbers))

    given = SHORT | {"lengths": [60, 40], "depths": [0, 1, 0.5], "trials": 2}
    found = needle(CONFIG, None, BYTES, HAYSTACK, batch=1, progress=progress, **given)
    assert (found.lengths, found.depths, found.wrong_keys) == ((40, 60), (0.0, 0.5, 1.0), 2)
    np.testing.assert_array_equal(found.grid("chosen"), [[0, 0], [0, 0], [1, 1]])
    np.testing.assert_array_equal(found.grid("exact"), found.grid("chosen"))
    np.testing.assert_array_equal(found.grid("margin"), [[-1.5, -1.5], [-1.5, -1.5], [3, 3]])
    np.testing.assert_array_equal(found.grid("rank"), [[3, 3], [3, 3], [1, 1]])  # after those that are as probable
    assert seen == [3 * 2 * (4 + 6)]


def test_one_program_for_a_length(params, in_pieces):
    given = SHORT | {"lengths": [37], "trials": 4, "batch": 3}
    needle(CONFIG, params, BYTES, HAYSTACK, **given, depths=[0.5])
    before = room._read_piece._cache_size(), room._answer_scores._cache_size()
    needle(CONFIG, params, BYTES, HAYSTACK, **given | {"seed": 9}, depths=[0, 0.2])
    assert (room._read_piece._cache_size(), room._answer_scores._cache_size()) == before


# -- mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lengths": []}, r"lengths are empty"),
        ({"depths": []}, r"depths are empty"),
        ({"lengths": [40, 40]}, r"lengths=40,40 has one of them twice"),
        ({"depths": [0.5, 1.5]}, r"depth=1.5 must be from 0, the beginning, to 1"),
        ({"depths": [float("nan")]}, r"depth=nan must be"),
        ({"trials": 0}, r"trials=0 must be at least 1"),
        ({"wrong_keys": 0}, r"wrong_keys=0 must be at least 1"),
        ({"digits": 0}, r"digits=0 must be at least 1"),
        ({"digits": 19}, r"digits=19 are too many; give at most 18"),
        ({"wrong_keys": 10**8, "digits": 9}, r"wrong_keys=100000000 are too many; give at most 10,000"),
        ({"trials": 10**30}, r"trials=10{30} are too many; give at most 1,000,000"),
        ({"batch": 0}, r"batch=0 must be at least 1"),
        ({"seed": -1}, r"seed=-1 must be at least 0"),
        ({"wrong_keys": 90}, r"wrong_keys=90 are more than there are other numbers of digits=2"),
        ({"statement": "No key"}, r"statement='No key' must have \{key\} where"),
        ({"question": "{key}?"}, r"question='\{key\}\?' must end with \{key\}"),
        ({"question": "{key} or {key}"}, r"must end with \{key\}, and have it nowhere else"),
        ({"lengths": [40, 74]}, r"length=74 needs a haystack of as many tokens, and this one has 73; give a longer text"),
        ({"lengths": [14, 40]}, r"length=14 leaves no haystack beside needle and question, which take \d+ tokens"),
    ],
)
def test_mistakes(given, message):
    with pytest.raises(UserError, match=message):
        needle(CONFIG, None, BYTES, HAYSTACK, **SHORT | {"lengths": [40], "depths": [0.5]} | given)


class NoDigits:
    """What it has not becomes one token, as in a SentencePiece vocabulary without bytes."""

    space_prefix = True

    def __init__(self, known=""):
        self.known = known

    def encode(self, text, bos, eos):
        return [ord(letter) if letter.isalpha() or letter in self.known else 0 for letter in text]


@pytest.mark.parametrize("known", ["", "1234"])
def test_a_vocabulary_without_digits(known):
    with pytest.raises(TokenizerError, match=r"the vocabulary does not tell 17 and 28 apart: it has no digits"):
        encode_keys(NoDigits(known), ["17", "28", "29"], STATEMENT, QUESTION)


def test_a_haystack_of_another_vocabulary():
    with pytest.raises(GenerationError, match=r"haystack token 259 is outside the vocabulary of 259"):
        needle(CONFIG, None, BYTES, [259] * 50, **SHORT, lengths=[40])
