"""The outputs of a model for some tokens, layer by layer; and what they say without a reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.model.forward import apply_final_norm, unembed
from llama_jax.model.logits import observe
from llama_jax.model.params import Block, Llama
from llama_jax.model.trees import stack
from llama_jax.tokenizers import Tokenizer


@dataclass(frozen=True)
class Origin:
    """Where numbers come from.

    Attributes:
      name: in words.
      config: of the model.
      kinds: how its weights are stored: F32, BF16, Q4_K ...
      dtype: in which it was computed.
      versions: of the programs, by name.
      quantized: what its matrices were rounded by when they were read, if they were: the name, and the root mean square of
        the error relative to the weights'.
    """

    name: str
    config: LlamaConfig
    kinds: tuple[str, ...]
    dtype: str
    versions: dict[str, str]
    quantized: tuple[str, float] | None = None


@dataclass(frozen=True)
class Trace:
    """The outputs of a model for some tokens.

    Attributes:
      origin: which model.
      tokens: int32[T].
      logits: float32[T, V].
      streams: float32[L + 1, T, D], the residual stream: the embedding, then what each layer left; not normalized.
    """

    origin: Origin
    tokens: np.ndarray
    logits: np.ndarray
    streams: np.ndarray


def trace(params: Llama, tokens: np.ndarray, origin: Origin) -> Trace:
    """Run a model over int32[T] tokens as one sequence from position 0."""
    with jax.default_matmul_precision("highest"):  # by default GPU and TPU multiply float32 with fewer bits
        logits, streams = _run(origin.config, params, jnp.asarray(tokens)[None])
    return Trace(origin, tokens, np.asarray(logits, np.float32), np.asarray(streams, np.float32))


def nats_per_token(tokens: np.ndarray, logits: np.ndarray) -> float:
    """Mean negative log-likelihood of the tokens of a text, int[T], but for the first, under logits [T, V]; T at least 2."""
    each = [-log_softmax(row)[token] for row, token in zip(logits[:-1], tokens[1:], strict=True)]
    return float(np.mean(each))


def log_softmax(row: np.ndarray) -> np.ndarray:
    """Logarithms of the probabilities that logits [V] stand for, in float64."""
    row = row.astype(np.float64)
    row = row - row.max()
    return row - math.log(np.exp(row).sum())


@partial(jax.jit, static_argnums=0)
def _run(config: LlamaConfig, params: Llama, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits [T, V] and streams [L + 1, T, D] of int32[1, T] tokens."""
    hidden, (before, after) = observe(config, params, tokens, lambda layer: (layer.before[0], layer.after[0]))
    return unembed(config, params, hidden)[0], jnp.concatenate([before[:1], after])


def of_layer(config: LlamaConfig, index: int) -> LlamaConfig:
    """The configuration of a model whose layers are all like one of this model's."""
    return replace(config, window=None, layers=(config.layer(index),))


@partial(jax.jit, static_argnums=0)
def run_layer(config: LlamaConfig, block: Block, stream: jax.Array) -> jax.Array:
    """What a layer leaves of a stream [T, D]: a model of that layer alone, whose vocabulary is the stream.

    Args:
      config: of the layer, see `of_layer`.
    """
    alone = replace(config, n_layers=1, vocab_size=len(stream), tie_embeddings=True, embedding_multiplier=1.0)
    params = Llama(
        embedding=stream, blocks=stack((block,)), final_norm=jnp.ones(stream.shape[-1], stream.dtype), lm_head=None
    )
    return observe(alone, params, jnp.arange(len(stream))[None], lambda layer: layer.after[0])[1][0]


@partial(jax.jit, static_argnums=0)
def run_output(config: LlamaConfig, params: Llama, stream: jax.Array) -> jax.Array:
    """Logits [T, V] of the stream [T, D] that the last layer leaves."""
    return unembed(config, params, apply_final_norm(config, params, stream))


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
