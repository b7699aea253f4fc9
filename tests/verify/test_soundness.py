"""What a model shows of itself: whether it is whole, and whether it speaks."""

import numpy as np
import pytest
from conftest import params_of

from llama_jax import ops
from llama_jax.formats.huggingface import NAMES, from_params
from llama_jax.verify.soundness import TEXT, check_logits, check_speech, check_vocabulary
from llama_jax.verify.trace import Origin, Trace, trace


@pytest.fixture(scope="module")
def read(stories):
    """Trace the stories model, its tensors changed by a function, over the built-in text."""
    config, params, tokenizer = stories
    tokens = np.array(tokenizer.encode(TEXT)[:64], np.int32)

    def read(change=lambda tensors: {}):
        whole = from_params(config, params, None).tensors
        tensors = {name: tensor.read(0, tensor.shape[0]) for name, tensor in whole.items()}
        spoiled = params_of(config, tensors | change(tensors))
        return trace(spoiled, tokens, Origin("stories", config, ("F32",), "float32", {}))

    return read


def other_layout(turn):
    def change(tensors):
        parts = [(NAMES[part].format(i), heads) for i in range(5) for part, heads in (("q", 8), ("k", 4))]
        return {name: turn(tensors[name].reshape(heads, 8, 64)).reshape(-1, 64) for name, heads in parts}

    return change


def test_the_stories_model_speaks(read):
    found = check_speech(read())
    assert found.passed
    assert "1.37 nats per token, where guessing costs 6.24" in found.found


@pytest.mark.parametrize(
    "change",
    [
        other_layout(ops.rotary_order.half_from_interleaved),
        other_layout(ops.rotary_order.interleaved_from_half),
        lambda t: {name: t[name].T.copy() for name in (NAMES["out"].format(i) for i in range(5))},
        lambda t: {NAMES["gate"].format(i): t[NAMES["up"].format(i)] for i in range(5)},
        lambda t: {NAMES["embedding"]: t[NAMES["embedding"]][::-1].copy()},
    ],
    ids=["Meta's layout", "turned twice", "out transposed", "up for gate", "vocabulary reversed"],
)
def test_a_model_that_is_put_together_wrongly_does_not(read, change):
    assert not check_speech(read(change)).passed


def test_logits(stories):
    origin = Origin("x", stories[0], ("F32",), "float32", {})
    logits = np.zeros((4, 512), np.float32)
    logits[1, 3] = -7
    good = Trace(origin, np.zeros(4, np.int32), logits, np.zeros((6, 4, 64), np.float32))
    assert check_logits(good)[1:] == (True, "finite, the largest 7")
    logits[2, 5] = np.nan
    assert check_logits(good)[1:] == (False, "NOT finite from position 2 on")


class Vocabulary:
    def __init__(self, size=512, back=lambda text: text):
        self.vocab_size = size
        self.back = back

    def encode(self, text, bos, eos):
        assert not bos
        assert not eos
        return [ord(c) for c in text]

    def decode(self, ids):
        return self.back("".join(map(chr, ids)))


def test_vocabulary(stories):
    assert check_vocabulary(stories.tokenizer, 512, TEXT).passed
    assert check_vocabulary(Vocabulary(500), 512, TEXT).passed
    large = check_vocabulary(Vocabulary(513), 512, TEXT)
    assert (large.passed, large.found.split(";")[0]) == (False, "513 pieces for 512 rows of the embedding")
    lossy = check_vocabulary(Vocabulary(back=str.lower), 512, TEXT)
    assert (lossy.passed, "does NOT come back" in lossy.found) == (False, True)
