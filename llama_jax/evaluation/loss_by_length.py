"""Loss by window length and by position in the window: how much longer context helps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.data import Corpus, DataError
from llama_jax.data.corpus import check_corpus_rows
from llama_jax.data.load_corpus import Progress
from llama_jax.evaluation.measure import check_batch, measuring, run_ahead, target_nats
from llama_jax.inference.compiled_decode import MAX_PREFILL_CHUNK
from llama_jax.model.cache import CacheOptions, KVCache, init_cache
from llama_jax.model.checks import check_exact_length
from llama_jax.model.forward import forward
from llama_jax.model.forward_options import Compute, Positions
from llama_jax.model.params import Llama
from llama_jax.ops import exact

TOKENS_AT_ONCE = 1 << 15  # tokens of the windows in a batch, on devices where batches are faster
ROWS_OF_LOGITS = 512  # rows of logits in memory at a time


class Bucket(NamedTuple):
    """Loss in nats per token, over the predictions with `first` to `last` tokens of context."""

    first: int
    last: int
    loss: float


@dataclass(frozen=True, eq=False)
class LengthLoss:
    """The result of `evaluate_lengths` at one length; nan or infinite if the model's outputs are not finite.

    Attributes:
      length: T, tokens of a window.
      windows: number of windows, consecutive and without overlap.
      tokens: number of predicted tokens, `length` times `windows`.
      loss: mean over all tokens, in nats.
      standard_error: of `loss` in nats, from the spread between windows of the longest length; nan for a single one.
      perplexity: exp(loss).
      last_quarter: mean loss of the last quarter of each window, in nats: the tokens with the most context.
      by_position: float64[T], mean loss of predictions from t + 1 tokens of context, in nats.
    """

    length: int
    windows: int
    tokens: int
    loss: float
    standard_error: float
    perplexity: float
    last_quarter: float
    by_position: np.ndarray = field(repr=False)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Loss by tokens of context: 1, 2, 3 to 4, 5 to 8, and so on by powers of two; the last may be cut short."""
        ends = [1 << power for power in range(math.ceil(math.log2(self.length)))] + [self.length]
        begins = [0, *ends[:-1]]
        return tuple(Bucket(a + 1, b, float(self.by_position[a:b].mean())) for a, b in zip(begins, ends, strict=True))


def evaluate_lengths(
    config: LlamaConfig,
    params: Llama,
    corpus: Corpus,
    lengths: Sequence[int],
    *,
    max_tokens: int | None = None,
    batch: int | None = None,
    cache: CacheOptions = CacheOptions(),
    compute: Compute = Compute(),
    progress: Progress | None = None,
) -> tuple[LengthLoss, ...]:
    """Loss of the same text in windows of each length, and by position in them.

    The text is cut into spans of the longest length, and each span into consecutive windows of every other length. If a
    length divides the longest, all lengths predict the same tokens, with different amounts of context; if it does not, the
    rest of each span is skipped. So a model that uses its context has a lower loss at a greater length, and one that fails
    beyond its training length has a higher loss from that position on. A window lies within one document: documents shorter
    than the longest length are skipped.

    Unlike the sliding window of `evaluate`, the first tokens of a window, with little context, count too.

    A window is prefilled in chunks with a cache of its length, so that memory holds the weights, that cache and the
    attention scores of one chunk.

    Args:
      lengths: window lengths in tokens, in any order. They may exceed `config.max_seq_len`, to measure the loss there; with
        another `rope_scaling` in the configuration, this measures a context extension without training.
      max_tokens: maximum number of tokens to predict at each length, in whole spans spread evenly over the text. By default
        all.
      batch: windows per forward pass at every length; by default 1 on a CPU, elsewhere as many as have 32,768 tokens.
      cache: the cache, as in generation, to measure the cost of int8 or a window. With an int8 cache even the tokens of the
        current chunk are quantized.
      compute: dtype and attention.
      progress: wraps the range of all chunks, as `tqdm.tqdm` does.

    Returns:
      The result at each length, the shortest first.

    Raises:
      DataError: an invalid length, a text too short for it, a limit that leaves no tokens, or a corpus of another
        vocabulary.
    """
    lengths = choose_lengths(config, corpus, lengths, max_tokens=max_tokens, batch=batch)
    spans = cut_spans(corpus, lengths[-1], max_tokens)
    plans = [_plan(length, spans, lengths[-1], batch) for length in lengths]
    jobs = [
        (number, first, begin)
        for number, plan in enumerate(plans)
        for first in range(0, len(plan.starts), plan.batch)
        for begin in range(0, plan.capacity, plan.piece)
    ]
    by_position = [np.zeros(plan.capacity) for plan in plans]
    by_window = [np.zeros(len(plan.starts)) for plan in plans]
    kv: KVCache
    tokens: np.ndarray
    targets: np.ndarray

    def launch(job: tuple[int, int, int]) -> jax.Array:
        nonlocal kv, tokens, targets
        number, first, begin = job
        plan = plans[number]
        if begin == 0:
            tokens, targets = _pack_batch(corpus, plan, first)
            if first == 0:
                options = without_needless_window(cache, plan.length)
                kv = empty_cache(config, params, plan.batch, plan.capacity, options, plan.piece)
            # Tokens of an earlier window are beyond the new length, where nothing reads them.
            kv = kv.replace(length=jnp.zeros(plan.batch, jnp.int32))
        piece = slice(begin, begin + plan.piece)
        kv, nats = _piece_nats(config, params, plan.length, kv, tokens[:, piece], targets[:, piece], compute)
        return nats

    with measuring(params, compute):
        for (number, first, begin), nats in run_ahead(jobs, launch, progress):
            found = np.asarray(nats, np.float64)[: len(plans[number].starts) - first]
            by_position[number][begin : begin + plans[number].piece] += found.sum(axis=0)
            by_window[number][first : first + plans[number].batch] += found.sum(axis=1)
    return tuple(
        _summary(plan, len(spans), of_positions[: plan.length], of_windows)
        for plan, of_positions, of_windows in zip(plans, by_position, by_window, strict=True)
    )


def choose_lengths(
    config: LlamaConfig, corpus: Corpus, lengths: Sequence[int], *, max_tokens: int | None = None, batch: int | None = None
) -> tuple[int, ...]:
    """The sorted lengths, after all checks of `evaluate_lengths`; see there for arguments and errors."""
    if not len(lengths):
        raise DataError("lengths is empty; pass at least one window length")
    for length in lengths:
        if length < 1:
            raise DataError(f"length={length} must be at least 1 token")
        if list(lengths).count(length) > 1:
            raise DataError(f"length={length} is given twice")
    check_corpus_rows(corpus, config.vocab_size)
    longest = int((corpus.stops - corpus.starts).max(initial=0))
    if max(lengths) >= longest:
        raise DataError(
            f"length={max(lengths)} needs a document with one token more, but the longest has {longest};"
            " use a longer text, or a larger `longest` to cut it less"
        )
    if max_tokens is not None and max_tokens < max(lengths):
        raise DataError(f"max_tokens={max_tokens} is less than one window of length={max(lengths)}; set at least that")
    if batch is not None:
        check_batch(batch, max(lengths))
    return tuple(sorted(map(int, lengths)))


def cut_spans(corpus: Corpus, length: int, max_tokens: int | None) -> np.ndarray:
    """Start indices in `corpus.tokens` of spans of `length` input tokens and the token after them: int64[n]."""
    counts = (corpus.stops - corpus.starts - 1).clip(0) // length
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    spans = np.repeat(corpus.starts, counts) + number * length
    if max_tokens is None or max_tokens // length >= len(spans):
        return spans
    kept = max_tokens // length
    return spans[np.arange(kept) * len(spans) // kept]


class _WindowPlan(NamedTuple):
    """The windows of one length, and their batches and chunks.

    Attributes:
      length: T, tokens of a window.
      starts: int64[windows], index of their first tokens in `corpus.tokens`.
      batch: windows per forward pass.
      piece, capacity: tokens of a prefill chunk, and of all chunks of a window; the last chunk may be padded.
    """

    length: int
    starts: np.ndarray
    batch: int
    piece: int
    capacity: int


def _plan(length: int, spans: np.ndarray, longest: int, batch: int | None) -> _WindowPlan:
    starts = (spans[:, None] + np.arange(longest // length) * length).reshape(-1)
    if batch is None:  # one on a CPU, because the attention scores of more exceed its caches
        batch = 1 if jax.default_backend() == "cpu" else max(TOKENS_AT_ONCE // length, 1)
    piece, pieces = cut_pieces(length)
    return _WindowPlan(length, starts, min(batch, len(starts)), piece, piece * pieces)


def cut_pieces(length: int) -> tuple[int, int]:
    """Tokens per chunk and chunks per row: of one size, so that one program is compiled and no chunk is nearly empty."""
    pieces = -(-length // MAX_PREFILL_CHUNK)
    return -(-length // pieces), pieces


def piece_nats(
    config: LlamaConfig,
    params: Llama,
    length: int,
    cache: KVCache,
    tokens: jax.Array,
    targets: jax.Array,
    compute: Compute = Compute(),
) -> tuple[KVCache, jax.Array]:
    """Prefill T more tokens of each row and compute the loss of the targets.

    Args:
      length: final length of the whole row, on which some kinds of `rope_scaling` depend.
      tokens, targets: int32[B, T]; -1 where nothing is predicted.

    Returns:
      The cache, and float32[B, T] as in `target_nats`.
    """
    batch, new = tokens.shape
    if compute.exact:
        check_exact_length(config, length)
    positions = Positions(rope_lengths=jnp.full(batch, length, jnp.int32))
    hidden, cache = forward(config, params, tokens, cache, positions=positions, compute=compute)
    with exact.exact_mode(compute.exact):
        return cache, target_nats(config, params, hidden, targets, chunk=max(min(ROWS_OF_LOGITS // batch, new), 1))


_piece_nats = jax.jit(piece_nats, static_argnums=(0, 2, 6), donate_argnums=3)
_init_cache = jax.jit(init_cache, static_argnums=(0, 1, 2, 3), static_argnames=("window", "sinks", "max_tokens_per_pass"))


def empty_cache(
    config: LlamaConfig, params: Llama, batch: int, capacity: int, options: CacheOptions = CacheOptions(), piece: int = 1
) -> KVCache:
    """An empty cache with the parameters' sharding and dtype; with a window, for prefill chunks of `piece` tokens."""
    dtype = jnp.dtype(options.dtype or params.embedding.dtype)
    ring = {"window": options.window, "sinks": options.sinks, "max_tokens_per_pass": piece}
    return _init_cache(config, batch, capacity, dtype, **ring)


def without_needless_window(options: CacheOptions, length: int) -> CacheOptions:
    """The options without a window if it is as long as the text, since it would only take memory."""
    return options if options.window is None or options.window < length else CacheOptions(dtype=options.dtype)


def _pack_batch(corpus: Corpus, plan: _WindowPlan, first: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a batch of windows, and the next token of each: int32[B, capacity], padded with 0 and -1."""
    tokens, targets = (np.full((plan.batch, plan.capacity), filling, np.int32) for filling in (0, -1))
    for row, start in enumerate(plan.starts[first : first + plan.batch]):
        tokens[row, : plan.length] = corpus.tokens[start : start + plan.length]
        targets[row, : plan.length] = corpus.tokens[start + 1 : start + plan.length + 1]
    return tokens, targets


def _summary(plan: _WindowPlan, spans: int, by_position: np.ndarray, by_window: np.ndarray) -> LengthLoss:
    """The result from the sums of nats over windows, float64[T], and over positions, float64[n]."""
    means = by_position / len(plan.starts)
    of_spans = by_window.reshape(spans, -1).mean(axis=1) / plan.length
    loss = float(means.mean())
    with np.errstate(over="ignore", invalid="ignore"):
        perplexity = float(np.exp(loss))
        error = float(of_spans.std(ddof=1)) / math.sqrt(spans) if spans > 1 else math.nan
    return LengthLoss(
        length=plan.length,
        windows=len(plan.starts),
        tokens=len(plan.starts) * plan.length,
        loss=loss,
        standard_error=error,
        perplexity=perplexity,
        last_quarter=float(means[plan.length * 3 // 4 :].mean()),
        by_position=means,
    )
