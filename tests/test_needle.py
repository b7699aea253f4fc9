"""Needle in a haystack: what the prompts are, and the scores against whole sequences one by one."""

from dataclasses import replace

import jax
import make_goldens
import numpy as np
import pytest
from conftest import as_float64, params_of
from hypothesis import given
from hypothesis import strategies as st
from needle import FARTHEST, Trial, as_page, draw_keys, encode_keys, lay_prompt, needle

from llama_jax.model.logits import logits
from llama_jax.tokenizers.sentencepiece import BYTE_VOCABULARY, byte_tokenizer

CONFIG = replace(make_goldens.KINDS["gqa"], vocab_size=BYTE_VOCABULARY)
BYTES = byte_tokenizer()
TEXT = b"the park was big and she loved to play outside with her friends all day, "
HAYSTACK = np.array(BYTES.encode(TEXT.decode(), bos=False), np.uint16)
SHORT = {"statement": "No {key}!", "question": "No {key}", "digits": 2, "wrong_keys": 2}  # 5 + 1, 4 and 2 tokens, and BOS


@pytest.fixture(scope="module")
def params():
    return params_of(CONFIG, make_goldens.random_tensors(CONFIG))


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


def test_it_is_the_definition(params):
    """With batches of which the last is not full."""
    given = SHORT | {"lengths": [37], "depths": (0.5, 0.0), "trials": 2, "seed": 3}
    found = needle(CONFIG, params, BYTES, HAYSTACK, batch=3, **given)
    assert [(cell.length, cell.depth, cell.trials) for cell in found.cells] == [(37, 0.0, 2), (37, 0.5, 2)]
    keys = encode_keys(BYTES, draw_keys(3, 2, 3), SHORT["statement"], SHORT["question"])
    starts = np.random.default_rng([3, 1]).random(2)
    with jax.enable_x64(True):
        wide = as_float64(params)
        of_row = jax.jit(lambda tokens: jax.nn.log_softmax(logits(CONFIG, wide, tokens)[0]))
    for cell in found.cells:
        parts = [by_definition(of_row, Trial(i, starts[i]), keys, 37, cell.depth) for i in range(2)]
        right = np.array([scores[i] for i, (scores, _) in enumerate(parts)])
        wrong = np.array([np.delete(scores, i) for i, (scores, _) in enumerate(parts)])
        assert cell.log_probability == pytest.approx(right.mean(), rel=1e-5)
        assert cell.margin == pytest.approx((right - wrong.mean(axis=1)).mean(), rel=1e-3, abs=1e-5)
        assert cell.rank == (1 + (wrong > right[:, None]).sum(axis=1)).mean()
        assert cell.chosen == (wrong < right[:, None]).all(axis=1).mean()
        assert cell.exact == np.mean([greedy[i] for i, (_, greedy) in enumerate(parts)])
    assert [line.split()[0] for line in as_page(found).splitlines()[:5]] == ["key", "depth", "0%", "50%", "all"]
