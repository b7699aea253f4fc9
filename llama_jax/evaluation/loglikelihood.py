"""Log-probabilities of given continuations, packed into rows of a few lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.data.batches import pack_documents
from llama_jax.data.load_corpus import MegabyteProgress
from llama_jax.errors import ConfigError, GenerationError
from llama_jax.evaluation.measure import LOGIT_BLOCK, check_batch, default_batch, run_ahead, target_logprobs
from llama_jax.inference.prepare_inputs import to_token_ids
from llama_jax.inference.sharding import sharding_of
from llama_jax.model.checks import check_tokens
from llama_jax.model.forward import forward, unembed
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
from llama_jax.model.params import LlamaParams

MIN_ROW_LENGTH = 512  # tokens of the shortest row; each next length is four times as long, so that few programs are compiled


class Continuation(NamedTuple):
    """Token ids of a context and of the continuation to be scored, at least one of each."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """The score of a continuation.

    Attributes:
      logprob: natural logarithm of its probability given the context: the sum over its tokens, in nats.
      greedy: whether each of its tokens is the most probable one; among equally probable ones, the one with the lowest id.
    """

    logprob: float
    greedy: bool


class PackedRows(NamedTuple):
    """A batch of packed texts.

    Attributes:
      tokens, segment_ids, positions: int32[B, T]: packed texts, with segments numbered from 1 in each row; 0 is padding.
      target_positions: int32[N], where N is B * T rounded up to a multiple of `LOGIT_BLOCK`: position of each prediction,
        row * T + column.
      targets: int32[N], the predicted tokens. One position may have several.
      count: int32[], the number of valid entries of the N.
    """

    tokens: Any
    segment_ids: Any
    positions: Any
    target_positions: Any
    targets: Any
    count: Any


ContinuationMeasure = Callable[[LlamaParams, PackedRows], tuple[jax.Array, jax.Array]]


class _Run(NamedTuple):
    """Input tokens, and the continuations (index of the pair, its tokens) that end one token after them."""

    read: np.ndarray
    continuations: list[tuple[int, np.ndarray]]

    @property
    def targets(self) -> int:
        return sum(len(continuation) for _, continuation in self.continuations)

    @property
    def size(self) -> int:
        """The tokens of a row that it takes: a row of T tokens has at most T targets."""
        return max(len(self.read), self.targets)


def score_pairs(
    config: LlamaConfig,
    params: LlamaParams,
    pairs: Sequence[Continuation],
    *,
    context: int | None = None,
    batch: int | None = None,
    compute: ComputeOptions = ComputeOptions(),
    measure: ContinuationMeasure | None = None,
    progress: MegabyteProgress | None = None,
) -> list[Score]:
    """The log-probability of each continuation after its context, in the order of `pairs`.

    Texts are packed into rows, without attention between them, the longest first. Pairs with the same input tokens, such as
    a question with several one-token answers, share one computation. A pair longer than the context loses its first tokens,
    as in the lm-evaluation-harness.

    Args:
      params: on one device, or on a mesh that does not shard rows, or shards them by a divisor of `batch`.
      context: maximum number of input tokens; None for the model's context length.
      batch: B, rows per forward pass; by default 1 on a CPU and 8 elsewhere, as in `perplexity.evaluate`.
      compute: dtype and attention.
      measure: `compiled_measure(...)`; if passed to several calls, it is compiled once per row length.
      progress: wraps the range of batches, as `tqdm.tqdm` does.

    Raises:
      GenerationError: an empty context or continuation, a token outside the vocabulary, a continuation longer than the
        context, or NaN logits.
    """
    context = config.max_seq_len if context is None else context
    batch = default_batch() if batch is None else batch
    check_batch(batch, context)
    runs = _group_pairs(config, pairs, context)
    measure = compiled_measure(config, params, compute) if measure is None else measure
    logprobs, greedy = np.zeros(len(pairs)), np.ones(len(pairs), bool)

    def launch(rows: tuple[int, list[list[int]]]) -> tuple[Any, np.ndarray]:
        packed, owner = _pack_batch([[runs[member] for member in row] for row in rows[1]], batch, rows[0])
        return measure(params, packed), owner

    for _, (results, owner) in run_ahead(_plan_batches(runs, context, batch), launch, progress):
        of_tokens, best = (np.asarray(array)[: len(owner)] for array in results)
        np.add.at(logprobs, owner, of_tokens.astype(np.float64))
        np.logical_and.at(greedy, owner, best)
    if np.isnan(logprobs).any():
        raise GenerationError(
            f"the model's logits after text {int(np.isnan(logprobs).argmax())} are NaN: its numbers overflow; try float32"
        )
    return [Score(float(logprob), bool(best)) for logprob, best in zip(logprobs, greedy, strict=True)]


def compiled_measure(
    config: LlamaConfig, params: LlamaParams, compute: ComputeOptions = ComputeOptions()
) -> ContinuationMeasure:
    """`score_rows` under `jax.jit`, sharded as the parameters are.

    Raises:
      ConfigError: an exact `compute`.
    """
    if compute.exact:
        raise ConfigError("exact=True is not supported for log-likelihoods, whose rows hold several texts; omit it")
    return jax.jit(partial(score_rows, config, compute=compute, sharding=sharding_of(params)))


def score_rows(
    config: LlamaConfig,
    params: LlamaParams,
    rows: PackedRows,
    *,
    compute: ComputeOptions = ComputeOptions(),
    sharding: Sharding = Sharding(),
) -> tuple[jax.Array, jax.Array]:
    """The log-probability of each target, float32[N], and whether it is the most probable token, bool[N].

    Logits are computed only at `rows.places`, `LOGIT_BLOCK` positions at a time.
    """
    tokens, segment_ids, positions, target_positions, targets, count = map(jnp.asarray, rows)
    where = Positions(position_ids=positions, segment_ids=segment_ids)
    hidden, _ = forward(config, params, tokens, positions=where, compute=compute, sharding=sharding)
    hidden = hidden.reshape(-1, hidden.shape[-1])

    def measure(number: Any, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = number * LOGIT_BLOCK
        positions, tokens = (lax.dynamic_slice_in_dim(array, start, LOGIT_BLOCK) for array in (target_positions, targets))
        logits = unembed(config, params, hidden[positions])  # [LOGIT_CHUNK, V]
        made = target_logprobs(logits, tokens).astype(jnp.float32), logits.argmax(axis=-1) == tokens
        both = zip(results, made, strict=True)
        first, second = (lax.dynamic_update_slice_in_dim(all_, new, start, 0) for all_, new in both)
        return first, second

    with sharding.context():
        empty = jnp.zeros(targets.shape, jnp.float32), jnp.zeros(targets.shape, jnp.bool_)
        logprobs, best = lax.fori_loop(0, (count + LOGIT_BLOCK - 1) // LOGIT_BLOCK, measure, empty)
    return logprobs, best


def _group_pairs(config: LlamaConfig, pairs: Sequence[Continuation], most: int) -> list[_Run]:
    """The input texts, each once if a row has room for all of its continuations."""
    shortest = min(MIN_ROW_LENGTH, most)
    runs: list[_Run] = []
    last: dict[bytes, _Run] = {}
    for number, pair in enumerate(pairs):
        context, continuation = (to_token_ids(f"{name} {number}", ids) for name, ids in zip(pair._fields, pair, strict=True))
        for name, ids in (("context", context), ("continuation", continuation)):
            if not len(ids):
                raise GenerationError(f"{name} {number} is empty; pass at least one token")
            check_tokens(config, ids)
        if len(continuation) > most:
            raise GenerationError(
                f"continuation {number} has {len(continuation)} tokens, but the context only {most}; split it"
            )
        read = np.concatenate([context, continuation])[-most - 1 :][:-1].astype(np.int32)
        key = read.tobytes()
        run = last.get(key)
        if run is None or run.targets + len(continuation) > max(len(read), shortest):
            run = last[key] = _Run(read, [])
            runs.append(run)
        run.continuations.append((number, continuation.astype(np.int32)))
    return runs


def _plan_batches(runs: Sequence[_Run], context: int, batch: int) -> list[tuple[int, list[list[int]]]]:
    """For each batch, the longest first: the length of its rows, and the indices of the runs in each row."""
    lengths = [min(MIN_ROW_LENGTH, context)]
    while lengths[-1] < context:
        lengths.append(min(4 * lengths[-1], context))
    sizes = np.array([run.size for run in runs], np.int64)
    of_length = np.searchsorted(lengths, sizes)
    batches = []
    for number in reversed(range(len(lengths))):
        members = np.flatnonzero(of_length == number)
        members = members[np.argsort(-sizes[members], kind="stable")]
        rows = [members[row].tolist() for row in pack_documents(sizes[members].tolist(), lengths[number])]
        batches += [(lengths[number], rows[start : start + batch]) for start in range(0, len(rows), batch)]
    return batches


def _pack_batch(rows: Sequence[Sequence[_Run]], batch: int, length: int) -> tuple[PackedRows, np.ndarray]:
    """The packed rows, with padding, and int64[count], the index of each target's pair."""
    tokens, segment_ids, positions = np.zeros((3, batch, length), np.int32)
    target_positions, targets = np.zeros((2, -(-batch * length // LOGIT_BLOCK) * LOGIT_BLOCK), np.int32)
    owner: list[int] = []
    for row, members in enumerate(rows):
        begin = 0
        for segment, run in enumerate(members, 1):
            end = begin + len(run.read)
            tokens[row, begin:end] = run.read
            segment_ids[row, begin:end] = segment
            positions[row, begin:end] = np.arange(end - begin)
            for number, continuation in run.continuations:
                span = slice(len(owner), len(owner) + len(continuation))
                target_positions[span] = row * length + np.arange(end - len(continuation), end)
                targets[span] = continuation
                owner += [number] * len(continuation)
            begin += run.size
    return PackedRows(tokens, segment_ids, positions, target_positions, targets, np.int32(len(owner))), np.array(
        owner, np.int64
    )
