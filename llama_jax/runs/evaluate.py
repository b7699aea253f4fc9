"""How well a model predicts a text: nats per token, perplexity, and bits per byte, comparable across tokenizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.data import Corpus, DataError
from llama_jax.data.batches import pack
from llama_jax.data.load_corpus import Progress
from llama_jax.model.forward import forward, unembed
from llama_jax.model.options import Compute, Constrain, Layout, Places, unconstrained
from llama_jax.model.params import Llama
from llama_jax.ops.platform import tracing_for
from llama_jax.runs.windows import WindowRows, Windows, cut_windows, lay_rows

CHUNK = 64
MOST_PADDED = 1024  # rows, to which shorter texts are filled up so that all have one program
MOST_TOKENS = 2**31 - 1  # of a batch: indices are int32
LONGEST = 4096  # default tokens of a window: a layer's scores grow with their square

Measure = Callable[[Llama, WindowRows], jax.Array]


class Sizes(NamedTuple):
    """Tokens of a window, tokens from one window's start to the next's, and rows that are read at once."""

    length: int
    stride: int
    batch: int


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found; nan where a model's outputs are not finite, or a text has no bytes.

    Attributes:
      loss: mean negative log-likelihood of a predicted token, in nats.
      standard_error: of `loss`, in nats, from the spread between windows (see `evaluate`); nan for a single window.
      perplexity: exp(loss).
      bits_per_byte: the nats of all predicted tokens / ln 2 / `bytes`.
      tokens: predicted tokens.
      bytes: UTF-8 bytes of the text of all documents.
      documents, windows: their numbers.
    """

    loss: float
    standard_error: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int
    documents: int
    windows: int


def evaluate(
    config: LlamaConfig,
    params: Llama,
    corpus: Corpus,
    *,
    length: int | None = None,
    stride: int | None = None,
    batch: int | None = None,
    compute: Compute = Compute(),
    measure: Measure | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Loss, perplexity and bits per byte of a model on documents, read through a sliding window.

    Every token but a document's first is predicted once, its end-of-sequence token included. In a corpus with targets, as
    `data.open_chats` makes, only the targets are predicted, and bits per byte count their bytes alone. A document begins
    with BOS where the vocabulary has one, so that its first token of text is predicted too; where it has none, the first
    token costs nothing although its bytes count. Bits per byte divide by the bytes of the text itself, so they compare two
    models that read the same files whatever their tokenizers; nats per token and perplexity do not.

    The standard error treats windows as independent draws and the loss as a ratio of two sums over them (Cochran 1977,
    chapter 6). A document that fits into a window is one window. Windows of a long document resemble each other, so with
    few long documents the true error is larger.

    Args:
      length: T, tokens of a window; by default the model's context, 4096 at most. Windows are packed into rows of T tokens
        and do not see each other, so short documents cost no more than their tokens.
      stride: tokens from the start of a window to that of the next one in the document, and the tokens that each window but
        the first predicts; by default half of `length`. With stride = length windows do not overlap, which is quicker, but
        tokens at their beginnings lack context.
      batch: B, rows that are read at once, the last ones padded; by default 1 on a CPU, where the scores of more do not fit
        into its caches (measured: 8 rows of 512 tokens take 6 times as long as one by one), and 8 elsewhere.
      compute: dtype and attention.
      measure: `token_nats` with all but its last two arguments bound, under `jax.jit`. Pass the same one to several calls
        and it is compiled once for each shape [B, T]; it also determines the computation and the layout over devices.
      progress: wraps the range of batches, as `tqdm.tqdm` does.

    Raises:
      DataError: impossible sizes, a corpus of another vocabulary, or one with nothing to predict.
    """
    length, stride, batch = choose_sizes(config, corpus, length=length, stride=stride, batch=batch)
    windows = cut_windows(corpus, length, stride)
    measure = jax.jit(partial(token_nats, config, compute=compute)) if measure is None else measure
    sums = np.zeros(len(windows.read))
    with tracing_for(params):
        for nats, owner in measured(corpus, windows, batch, partial(measure, params), progress):
            np.add.at(sums, owner, nats)
    return summary(corpus, windows, sums)


def measured(
    corpus: Corpus, windows: Windows, batch: int, measure: Callable[[WindowRows], Any], progress: Progress | None
) -> Iterator[tuple[Any, np.ndarray]]:
    """What `measure` gives for all predicted tokens of the windows, one batch of B rows at a time.

    Args:
      measure: from rows to a tree of arrays [B, T].

    Yields:
      The tree of float64[n] for n predicted tokens, and int64[n], the window of each.
    """
    length = int(windows.read.max())  # if no document fills a window, rows are shorter
    rows = pack(windows.read.tolist(), length)
    batch = min(batch, max(len(rows), MOST_PADDED))

    def collect(found: Any, owner: np.ndarray) -> tuple[Any, np.ndarray]:
        predicted = owner >= 0
        return jax.tree.map(lambda array: np.asarray(array, np.float64)[predicted], found), owner[predicted]

    numbers = range(-(-len(rows) // batch))
    running: tuple[Any, np.ndarray] | None = None
    for number in progress(numbers) if progress else numbers:
        laid, owner = lay_rows(corpus, windows, rows[number * batch : (number + 1) * batch], batch, length)
        started = measure(laid)
        if running:  # collected while the device computes the next
            yield collect(*running)
        running = started, owner
    if running:
        yield collect(*running)


def choose_sizes(config: LlamaConfig, corpus: Corpus, *, length: int | None, stride: int | None, batch: int | None) -> Sizes:
    """The sizes of `evaluate`, with its defaults; see there for arguments and errors."""
    length = min(config.max_seq_len, LONGEST) if length is None else length
    if not 1 <= length <= config.max_seq_len:
        raise DataError(f"length={length} must be at least 1 and within the model's context of {config.max_seq_len}")
    stride = max(length // 2, 1) if stride is None else stride
    if not 1 <= stride <= length:
        raise DataError(f"stride={stride} must be at least 1 and at most length={length}, or tokens would be left out")
    check_vocabulary(config, corpus)
    if not (corpus.stops - corpus.starts > 1).any() or (corpus.targets is not None and not corpus.targets.any()):
        raise DataError(
            f"in {corpus.document_count} documents there is nothing to predict: a token is predicted from the one before;"
            " give more data"
        )
    batch = usual_batch() if batch is None else batch
    check_batch(batch, length)
    return Sizes(length, stride, batch)


def check_batch(batch: int, length: int) -> None:
    """Raise DataError for less than one row, or for more than an array of these lengths can have."""
    if batch < 1:
        raise DataError(f"batch={batch} must be at least 1 row")
    if batch > MOST_TOKENS // length:
        raise DataError(f"batch={batch} must be at most {MOST_TOKENS // length} rows of length={length}")


def usual_batch() -> int:
    """The default number of rows that a device reads at once, see `evaluate`."""
    return 1 if jax.default_backend() == "cpu" else 8


def check_vocabulary(config: LlamaConfig, corpus: Corpus) -> None:
    """Raise DataError for a corpus with tokens that the model does not have."""
    if corpus.vocab_size > config.vocab_size:
        raise DataError(
            f"the corpus has a vocabulary of {corpus.vocab_size}, the model one of {config.vocab_size};"
            " read the files with the model's own tokenizer"
        )


def token_nats(
    config: LlamaConfig,
    params: Llama,
    rows: WindowRows,
    *,
    compute: Compute = Compute(),
    chunk: int = CHUNK,
    layout: Layout = Layout(),
) -> jax.Array:
    """Negative log-likelihood of each target in nats: float32[B, T], 0 where there is none.

    Args:
      compute: of the forward pass. Logits and their sum are float32 at least.
      chunk: positions of each row whose logits [B, chunk, V] are held at a time; chunks without a target, which are only
        context, are not computed.
      layout: see `forward`; here `constrain` is told of "hidden", what `forward` gave, and of "logits", [B, chunk, V].
    """
    tokens, targets, segment_ids, positions = map(jnp.asarray, rows)
    places = Places(positions=positions, segment_ids=segment_ids)
    hidden, _ = forward(config, params, tokens, places=places, compute=compute, layout=layout)
    hidden = layout.constrain(hidden, "hidden")
    return nats_of(config, params, hidden, targets, chunk=chunk, constrain=layout.constrain)


def nats_of(
    config: LlamaConfig,
    params: Llama,
    hidden: jax.Array,
    targets: jax.Array,
    *,
    chunk: int = CHUNK,
    constrain: Constrain = unconstrained,
) -> jax.Array:
    """Negative log-likelihood in nats of the targets int32[B, T] that follow hidden states [B, T, D]: float32[B, T].

    Args:
      targets: -1 where nothing is predicted, which gives 0.
      chunk, constrain: see `token_nats`.
    """

    def predict(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        logits = constrain(unembed(config, params, hidden), "logits")  # of V tokens, or more on a mesh: see there
        # Compared and not gathered, for the vocabulary may lie on several devices.
        chosen = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0), axis=-1)
        return jnp.where(targets >= 0, jax.nn.logsumexp(logits, axis=-1) - chosen, 0)

    return in_chunks(predict, hidden, targets, chunk)


def in_chunks(predict: Callable[[Any, jax.Array], Any], hidden: Any, targets: jax.Array, chunk: int) -> Any:
    """Apply a function of hidden states and targets that makes logits, to `chunk` positions of each row at a time.

    Args:
      predict: from a tree of [B, chunk, D] and targets [B, chunk] to a tree of [B, chunk].
      hidden: a tree of [B, T, D].
      targets: int32[B, T]. For chunks in which all are negative nothing is computed and the result is 0.

    Returns:
      The tree of [B, T].
    """
    batch, length = targets.shape
    chunk = min(chunk, length)
    missing = -length % chunk

    def parts(x: jax.Array, padding: int) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)], constant_values=padding)
        return x.reshape(batch, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    def nothing(*part: Any) -> Any:
        return jax.tree.map(lambda found: jnp.zeros(found.shape, found.dtype), jax.eval_shape(predict, *part))

    def measure(part: tuple[Any, jax.Array]) -> Any:
        return lax.cond(jnp.any(part[1] >= 0), predict, nothing, *part)

    found = lax.map(measure, (jax.tree.map(lambda x: parts(x, 0), hidden), parts(targets, -1)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(batch, -1)[:, :length], found)


def summary(corpus: Corpus, windows: Windows, sums: np.ndarray) -> Evaluation:
    """The numbers from the nats of each window: float64[n]."""
    loss, error = mean_of_tokens(windows, sums)
    with np.errstate(over="ignore", invalid="ignore"):
        perplexity = float(np.exp(loss))
    return Evaluation(
        loss=loss,
        standard_error=error,
        perplexity=perplexity,
        bits_per_byte=float(sums.sum()) / math.log(2) / corpus.byte_count if corpus.byte_count else math.nan,
        tokens=int(windows.predicted.sum()),
        bytes=corpus.byte_count,
        documents=corpus.document_count,
        windows=len(sums),
    )


def mean_of_tokens(windows: Windows, sums: np.ndarray) -> tuple[float, float]:
    """The mean over predicted tokens, from the sums of each window, float64[n]; and its standard error, see `evaluate`."""
    tokens, count = int(windows.predicted.sum()), len(sums)
    mean = float(sums.sum()) / tokens
    if count < 2:
        return mean, math.nan
    with np.errstate(over="ignore", invalid="ignore"):
        variance = float(np.square(sums - mean * windows.predicted).sum()) * count / (count - 1)
    return mean, math.sqrt(variance) / tokens
