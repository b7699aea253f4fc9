"""Checks of a model without a reference."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from llama_jax.tokenizers import Tokenizer
from llama_jax.verify.trace import Trace, nats_per_token

# Simple enough for a model that only knows children's stories, and not from any book.
TEXT = """\
One day, a little girl named Anna went to the lake with her father. The sun was warm and the water was blue. Anna saw a \
small brown duck near the shore. The duck could not swim because its foot was stuck under a big stone. "Can we help it?" \
she asked. Her father smiled and said, "Yes, but we must be very gentle." Together they lifted the stone, and the duck was \
free. It swam around them three times and then flew away over the trees. Anna was happy, and on the way home she told her \
father that she wanted to come back the next day to see if her new friend was still there. That evening she drew a picture \
of the duck and gave it to her mother.
"""
# Share of the nats that guessing costs, above which no model of the text's language is at work. Measured on the first 64
# tokens of the text with the trained 260K stories model: 0.22 as it is, 0.23 in Q4_0, 0.60 and 0.69 with the rotary layout
# wrong either way, 0.94 with transposed output projections. With fifty times the theta it is still 0.26: an indication.
SPEAKS = 0.5
FEWEST = 32  # tokens to judge by: the first words of any text are hard to predict


class Check(NamedTuple):
    """What was looked at, whether it is as it should be, and what was found."""

    name: str
    passed: bool
    found: str


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, text: str) -> Check:
    """Its ids have rows in the embedding, and a text comes back from its tokens."""
    pieces = tokenizer.vocab_size
    back = tokenizer.decode(tokenizer.encode(text, bos=False, eos=False)) == text
    sizes = f"{pieces:,} pieces for {vocab_size:,} rows of the embedding"
    whole = "the text comes back from its tokens" if back else "the text does NOT come back from its tokens"
    return Check("vocabulary", pieces <= vocab_size and back, f"{sizes}; {whole}")


def check_logits(trace: Trace) -> Check:
    """All are finite."""
    finite = np.isfinite(trace.logits)
    if finite.all():
        return Check("logits", True, f"finite, the largest {np.abs(trace.logits).max():.3g}")
    return Check("logits", False, f"NOT finite from position {int(np.argmin(finite.all(axis=-1)))} on")


def check_speech(trace: Trace) -> Check:
    """A text of at least `FEWEST` tokens has a far lower loss under the model than under a guess among all tokens.

    An indication: a wrong rotary layout or exchanged weights cost a trained model most of what it knows, but small damage
    does not show, and a model that was not trained on such text fails.
    """
    nats, guessing = nats_per_token(trace.tokens, trace.logits), math.log(trace.logits.shape[-1])
    found = f"{nats:.2f} nats per token, where guessing costs {guessing:.2f}"
    return Check("text", nats <= SPEAKS * guessing, found)
