"""The engine of evaluation: documents are cut into windows, packed into rows, and evaluated batch by batch.

Every token is predicted once. The device computes a batch while the host processes the previous one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llama_jax.config import LlamaConfig, suggest_context
from llama_jax.data import Corpus, DataError
from llama_jax.data.batches import pack_documents
from llama_jax.data.corpus import check_corpus_rows
from llama_jax.data.load_corpus import MegabyteProgress
from llama_jax.inference.compiled_decode import decoding_compute
from llama_jax.inference.sharding import sharding_of
from llama_jax.model.checks import check_exact_devices, check_exact_length
from llama_jax.model.forward import forward, unembed
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding, unconstrained
from llama_jax.model.logits import exact_logprobs
from llama_jax.model.params import LlamaParams
from llama_jax.ops.cross_entropy import Constrain
from llama_jax.settings import Bounds

LOGIT_BLOCK = 64  # positions per row with logits in memory at a time
MAX_PADDED_ROWS = 1024  # rows to which shorter texts are padded, so that all use one program
MAX_BATCH_TOKENS = 2**31 - 1  # tokens of a batch: indices are int32
MAX_DEFAULT_WINDOW = 4096  # tokens: a layer's attention scores grow with its square

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_ahead(
    jobs: Sequence[Job], launch: Callable[[Job], Result], progress: MegabyteProgress | None = None
) -> Iterator[tuple[Job, Result]]:
    """Launch jobs in order and yield each with its result after the next one is launched, so that the caller's processing
    of a result overlaps with the device's computation of the next.

    Args:
      launch: starts the computation of a job; it need not wait for it.
      progress: wraps the range of jobs, as `tqdm.tqdm` does.
    """
    numbers = range(len(jobs))
    running: list[tuple[Job, Result]] = []
    for number in progress(numbers) if progress else numbers:
        running.append((jobs[number], launch(jobs[number])))
        if number:
            yield running.pop(0)
    yield from running


class WindowSizes(NamedTuple):
    """Tokens of a window, tokens from the start of a window to the next, and rows per forward pass."""

    length: int
    stride: int
    batch: int


class Windows(NamedTuple):
    """Spans of tokens of a corpus, each inside one document.

    Attributes:
      start: int64[n], the index in `corpus.tokens` at which a window begins.
      read: int64[n], the number of input tokens.
      context: int64[n], the number of input tokens whose next token was already predicted in an earlier window.
      predicted: int64[n], the number of predicted tokens: of the other inputs, in a corpus with targets only those.
    """

    start: np.ndarray
    read: np.ndarray
    context: np.ndarray
    predicted: np.ndarray


class WindowRows(NamedTuple):
    """Windows side by side, int32[B, T] each.

    Attributes:
      tokens: input tokens.
      targets: the next token, or -1 where nothing is predicted.
      segment_ids: 1 for the tokens of a row's first window, 2 for those of its second, and so on; 0 for padding.
      positions: position in the window, from 0.
    """

    tokens: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


def cut_windows(corpus: Corpus, length: int, stride: int) -> Windows:
    """Cut documents so that every token except a document's first is predicted in exactly one window, from the preceding
    tokens of the window; in a corpus with targets, only these are predicted.

    A document's first window predicts `length` tokens; each next one begins `stride` tokens later and predicts the `stride`
    tokens that are new to it, each with at least `length - stride` tokens of context.
    """
    predicted = corpus.stops - corpus.starts - 1
    counts = np.where(predicted > 0, 1 + np.maximum(-(-(predicted - length) // stride), 0), 0)
    document = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = corpus.starts[document] + number * stride
    read = np.minimum(length, predicted[document] - number * stride)
    context = np.where(number > 0, length - stride, 0)
    if corpus.targets is None:
        return Windows(start, read, context, read - context)
    before = np.concatenate([[0], np.cumsum(corpus.targets)])
    return Windows(start, read, context, before[start + read + 1] - before[start + context + 1])


def pack_rows(
    corpus: Corpus, windows: Windows, rows: Sequence[Sequence[int]], batch: int, length: int
) -> tuple[WindowRows, np.ndarray]:
    """The packed rows, padded to `batch` rows of `length` tokens.

    Returns:
      The rows, and int64[B, T], the window of each target, or -1.
    """
    packed = WindowRows(*(np.full((batch, length), value, np.int32) for value in (0, -1, 0, 0)))
    owner = np.full((batch, length), -1)
    for row, members in enumerate(rows):
        begin = 0
        for segment, window in enumerate(members, 1):
            start, read, context, _ = (int(column[window]) for column in windows)
            end, scored = begin + read, begin + context
            packed.tokens[row, begin:end] = corpus.tokens[start : start + read]
            packed.targets[row, scored:end] = corpus.tokens[start + context + 1 : start + read + 1]
            packed.segment_ids[row, begin:end] = segment
            packed.positions[row, begin:end] = np.arange(read)
            owner[row, scored:end] = window
            if corpus.targets is not None:
                left_out = scored + np.flatnonzero(~corpus.targets[start + context + 1 : start + read + 1])
                packed.targets[row, left_out] = owner[row, left_out] = -1
            begin = end
    return packed, owner


def measure_windows(
    corpus: Corpus,
    windows: Windows,
    batch: int,
    measure: Callable[[WindowRows], Any],
    progress: MegabyteProgress | None,
    packed: bool = True,
) -> Iterator[tuple[Any, np.ndarray]]:
    """The results of `measure` for all predicted tokens of the windows, one batch of B rows at a time.

    Args:
      measure: a function from rows to a tree of arrays [B, T].
      packed: whether several windows may share a row.

    Yields:
      The tree of float64[n] for n predicted tokens, and int64[n], the window of each.
    """
    length = int(windows.read.max())  # if no document fills a window, rows are shorter
    rows = pack_documents(windows.read.tolist(), length) if packed else [[window] for window in range(len(windows.read))]
    batch = min(batch, max(len(rows), MAX_PADDED_ROWS))

    def launch(first: int) -> tuple[Any, np.ndarray]:
        batched, owner = pack_rows(corpus, windows, rows[first : first + batch], batch, length)
        return measure(batched), owner

    for _, (results, owner) in run_ahead(range(0, len(rows), batch), launch, progress):
        predicted = owner >= 0
        yield jax.tree.map(lambda array, at=predicted: np.asarray(array, np.float64)[at], results), owner[predicted]


def sum_windows(
    corpus: Corpus,
    windows: Windows,
    batch: int,
    measure: Callable[[WindowRows], Any],
    progress: MegabyteProgress | None = None,
    packed: bool = True,
) -> Any:
    """The sums of the results of `measure_windows` over the tokens of each window: a tree of float64[windows]."""
    sums: Any = None
    for results, owner in measure_windows(corpus, windows, batch, measure, progress, packed):
        sums = jax.tree.map(lambda _: np.zeros(len(windows.read)), results) if sums is None else sums
        jax.tree.map(lambda total, values, at=owner: np.add.at(total, at, values), sums, results)
    return sums


def choose_sizes(
    config: LlamaConfig, corpus: Corpus, *, length: int | None, stride: int | None, batch: int | None
) -> WindowSizes:
    """The sizes of `perplexity.evaluate`, with its defaults; see there for arguments and errors."""
    length = min(config.default_context, MAX_DEFAULT_WINDOW) if length is None else length
    if not 1 <= length <= config.max_seq_len:
        suggestion = suggest_context(config, length) if length > config.max_seq_len else ""
        raise DataError(
            f"length={length} must be at least 1 and within the model's context of {config.max_seq_len}{suggestion}"
        )
    stride = max(length // 2, 1) if stride is None else stride
    Bounds(1, length).check("stride", stride, DataError)  # otherwise tokens would be skipped
    check_corpus_rows(corpus, config.vocab_size)
    if not (corpus.stops - corpus.starts > 1).any() or (corpus.targets is not None and not corpus.targets.any()):
        raise DataError(
            f"{corpus.document_count} documents have no token to predict: each needs at least 2 tokens, or a target;"
            " add more data"
        )
    batch = default_batch() if batch is None else batch
    check_batch(batch, length)
    return WindowSizes(length, stride, batch)


def check_batch(batch: int, length: int) -> None:
    """Raise DataError for less than one row, or for more rows of this length than int32 can index."""
    Bounds(1, MAX_BATCH_TOKENS // length).check("batch", batch, DataError)


def default_batch() -> int:
    """The default number of rows per forward pass, see `perplexity.evaluate`."""
    return 1 if jax.default_backend() == "cpu" else 8


def token_nats(
    config: LlamaConfig,
    params: LlamaParams,
    rows: WindowRows,
    *,
    compute: ComputeOptions = ComputeOptions(),
    logit_block: int = LOGIT_BLOCK,
    sharding: Sharding = Sharding(),
) -> jax.Array:
    """Negative log-likelihood of each target in nats: float32[B, T], 0 where there is none.

    Args:
      compute: options of the forward pass. Logits and their sum are at least float32.
      logit_block: positions of each row with logits [B, logit_block, V] in memory at a time; no logits are
        computed for blocks without targets, which are only context.
      sharding: see `forward`; `constrain` is called with "hidden", the result of `forward`, and "logits"
        [B, logit_block, V].

    Raises:
      ConfigError: an exact `compute`, and RoPE frequencies that depend on the length within T tokens.
    """
    tokens, targets, segment_ids, position_ids = map(jnp.asarray, rows)
    positions = Positions(position_ids=position_ids, segment_ids=segment_ids)
    if compute.exact:  # each row is one window
        check_exact_length(config, tokens.shape[1])
        positions = Positions(rope_lengths=jnp.sum(segment_ids > 0, axis=1, dtype=jnp.int32))
    hidden, _ = forward(config, params, tokens, positions=positions, compute=compute, sharding=sharding)
    hidden = sharding.constrain(hidden, "hidden")
    return target_nats(
        config, params, hidden, targets, compute=compute, logit_block=logit_block, constrain=sharding.constrain
    )


def evaluation_compute(params: LlamaParams, compute: ComputeOptions) -> ComputeOptions:
    """How to compute an evaluation: as `compute`, and if it is exact, with the numerics of generation.

    Raises:
      MeshError: exact evaluation over several devices.
    """
    if not compute.exact:
        return compute
    check_exact_devices(sharding_of(params))
    return decoding_compute(params, compute, None)


def target_nats(
    config: LlamaConfig,
    params: LlamaParams,
    hidden: jax.Array,
    targets: jax.Array,
    *,
    compute: ComputeOptions = ComputeOptions(),
    logit_block: int = LOGIT_BLOCK,
    constrain: Constrain = unconstrained,
) -> jax.Array:
    """Negative log-likelihood in nats of the targets int32[B, T] that follow hidden states [B, T, D]: float32[B, T].

    Args:
      targets: -1 where nothing is predicted; the result is 0 there.
      compute: that of the pass.
      logit_block, constrain: see `token_nats`.
    """
    if compute.exact:
        return -exact_logprobs(config, params, hidden, targets, compute=compute)

    def predict(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        logits = constrain(unembed(config, params, hidden, compute), "logits")  # of V tokens, or more on a mesh: see there
        return jnp.where(targets >= 0, -target_logprobs(logits, targets), 0)

    return map_in_blocks(predict, hidden, targets, logit_block)


def target_logprobs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Log-probability of each target int32[...] under logits [..., V]."""
    # A comparison instead of a gather, since the vocabulary may be sharded over devices.
    chosen = jnp.sum(jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0), axis=-1)
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def map_in_blocks(predict: Callable[[Any, jax.Array], Any], hidden: Any, targets: jax.Array, logit_block: int) -> Any:
    """Apply a function of hidden states and targets that computes logits, to `logit_block` positions of each row at a time.

    Args:
      predict: from a tree of [B, logit_block, D] and targets [B, logit_block] to a tree of [B, logit_block].
      hidden: a tree of [B, T, D].
      targets: int32[B, T]. Chunks with only negative targets are skipped; their result is 0.

    Returns:
      The tree of [B, T].
    """
    batch, length = targets.shape
    logit_block = min(logit_block, length)
    missing = -length % logit_block

    def parts(x: jax.Array, padding: int) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)], constant_values=padding)
        return x.reshape(batch, -1, logit_block, *x.shape[2:]).swapaxes(0, 1)

    def nothing(*part: Any) -> Any:
        return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), jax.eval_shape(predict, *part))

    def measure(part: tuple[Any, jax.Array]) -> Any:
        return lax.cond(jnp.any(part[1] >= 0), predict, nothing, *part)

    mapped = lax.map(measure, (jax.tree.map(lambda x: parts(x, 0), hidden), parts(targets, -1)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(batch, -1)[:, :length], mapped)


def token_mean(windows: Windows, sums: np.ndarray) -> tuple[float, float]:
    """The mean over predicted tokens and its standard error (see `perplexity.evaluate`), from the sums of each window,
    float64[n]."""
    tokens, count = int(windows.predicted.sum()), len(sums)
    mean = float(sums.sum()) / tokens
    if count < 2:
        return mean, math.nan
    with np.errstate(over="ignore", invalid="ignore"):
        variance = float(np.square(sums - mean * windows.predicted).sum()) * count / (count - 1)
    return mean, math.sqrt(variance) / tokens
