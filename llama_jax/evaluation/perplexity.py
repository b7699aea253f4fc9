"""How well a model predicts text, on its own or against a reference: loss, divergence and preference accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.data import Corpus, DataError
from llama_jax.data.load_corpus import MegabyteProgress
from llama_jax.data.preference_batches import Pairs, concatenate
from llama_jax.errors import ConfigError
from llama_jax.evaluation.measure import (
    LOGIT_BLOCK,
    WindowRows,
    Windows,
    check_batch,
    choose_sizes,
    cut_windows,
    evaluation_compute,
    map_in_blocks,
    measure_windows,
    sum_windows,
    token_mean,
    token_nats,
)
from llama_jax.model.forward import forward, unembed
from llama_jax.model.forward_options import ComputeOptions, Positions
from llama_jax.model.params import LlamaParams
from llama_jax.ops.platform import tracing_for

QUANTILES = (0.5, 0.99)

TokenMeasure = Callable[[LlamaParams, WindowRows], jax.Array]


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`; nan if the model's outputs are not finite, or the text has no bytes.

    Attributes:
      loss: mean negative log-likelihood of a predicted token, in nats.
      standard_error: of `loss`, in nats, from the spread between windows (see `evaluate`); nan for a single window.
      perplexity: exp(loss).
      bits_per_byte: the nats of all predicted tokens / ln 2 / `bytes`.
      tokens: predicted tokens.
      bytes: UTF-8 bytes of the text of all documents.
      documents, windows: numbers of documents and windows.
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
    params: LlamaParams,
    corpus: Corpus,
    *,
    length: int | None = None,
    stride: int | None = None,
    batch: int | None = None,
    compute: ComputeOptions = ComputeOptions(),
    measure: TokenMeasure | None = None,
    progress: MegabyteProgress | None = None,
) -> Evaluation:
    """Loss, perplexity and bits per byte of a model on documents, with a sliding window.

    Every token except a document's first is predicted once, including its end-of-sequence token. In a corpus with targets,
    such as from `data.open_chats`, only the targets are predicted, and bits per byte count only their bytes. A document
    begins with BOS if the vocabulary has one, so that its first token of text is predicted too; if not, the first token
    costs nothing although its bytes count. Bits per byte divide by the bytes of the text itself, so they are comparable
    between models on the same files whatever their tokenizers; nats per token and perplexity are not.

    The standard error treats windows as independent samples and the loss as a ratio of two sums over them (Cochran 1977,
    chapter 6). A document that fits into a window is one window. Windows of a long document resemble each other, so with
    few long documents the true error is larger.

    Args:
      length: T, tokens of a window; by default the model's context length, at most 4096. Windows are packed into rows of T
        tokens without attention between them, so short documents cost no more than their tokens.
      stride: tokens from the start of a window to the start of the next one in the document, and the number of tokens that
        each window except the first predicts; by default half of `length`. With stride = length windows do not overlap,
        which is faster, but tokens at their beginnings lack context.
      batch: B, rows per forward pass, the last ones padded; by default 1 on a CPU, where the attention scores of more rows
        do not fit into its caches (measured: 8 rows of 512 tokens take 6 times as long as one by one), and 8 elsewhere.
      compute: dtype and attention.
      measure: `token_nats` with all but its last two arguments bound, under `jax.jit`. If passed to several calls, it is
        compiled once per shape [B, T]; it also determines `compute` and the sharding.
      progress: wraps the range of batches, as `tqdm.tqdm` does.

    Raises:
      DataError: invalid sizes, a corpus of another vocabulary, or one with nothing to predict.
    """
    length, stride, batch = choose_sizes(config, corpus, length=length, stride=stride, batch=batch)
    windows = cut_windows(corpus, length, stride)
    compute = evaluation_compute(params, compute)
    measure = jax.jit(partial(token_nats, config, compute=compute)) if measure is None else measure
    with tracing_for(params):
        sums = sum_windows(corpus, windows, batch, partial(measure, params), progress, not compute.exact)
    return summary(corpus, windows, sums)


def summary(corpus: Corpus, windows: Windows, sums: np.ndarray) -> Evaluation:
    """The result from the nats of each window: float64[n]."""
    loss, error = token_mean(windows, sums)
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


@dataclass(frozen=True)
class Divergence:
    """The result of `kl_to_reference`; nan if a model's outputs are not finite.

    Standard errors are computed from the spread between windows, see `evaluate`; nan for a single window.

    Attributes:
      model, reference: loss, perplexity and bits per byte of each, on the same tokens.
      loss_difference: the model's loss minus the reference's, in nats per token, with its standard error, which is far
        smaller than those of the two losses because both read the same text.
      perplexity_ratio: model's / reference's.
      kl: KL divergence of the model's next-token distribution q from the reference's p, sum of p ln(p / q): mean over
        predicted tokens in nats, with its standard error.
      kl_median, kl_99, kl_max: median, 99th percentile and maximum of the divergence over tokens.
      same_top: share of the predicted tokens for which both models have the same most probable token.
    """

    model: Evaluation
    reference: Evaluation
    loss_difference: float
    loss_difference_error: float
    perplexity_ratio: float
    kl: float
    kl_error: float
    kl_median: float
    kl_99: float
    kl_max: float
    same_top: float


def kl_to_reference(
    config: LlamaConfig,
    params: LlamaParams,
    reference: LlamaParams,
    corpus: Corpus,
    *,
    reference_config: LlamaConfig | None = None,
    length: int | None = None,
    stride: int | None = None,
    batch: int | None = None,
    compute: ComputeOptions = ComputeOptions(),
    measure: Callable[..., tuple[jax.Array, ...]] | None = None,
    progress: MegabyteProgress | None = None,
) -> Divergence:
    """Compare two models' predictions of every token of documents, with the same sliding window.

    Both are in memory at once, with logits of 64 positions of each row.

    Args:
      params: parameters of the model, for example `model.trees.quantize(reference, "int8")`.
      reference: parameters of the reference.
      reference_config: its configuration, if it differs; any model of the same vocabulary.
      length, stride, batch, progress: see `evaluate`.
      compute: dtype and attention of both.
      measure: `compare_tokens` with all but its last three arguments bound, under `jax.jit`.

    Raises:
      DataError: what `evaluate` raises for either model, or vocabularies of two sizes.
    """
    reference_config = config if reference_config is None else reference_config
    if compute.exact:
        raise ConfigError("exact=True is not supported for a divergence of two models; omit it")
    if reference_config.vocab_size != config.vocab_size:
        raise DataError(
            f"the reference has a vocabulary of {reference_config.vocab_size}, but the model one of {config.vocab_size}:"
            " their predictions cannot be compared"
        )
    shorter = min(config, reference_config, key=lambda model_config: model_config.max_seq_len)
    length, stride, batch = choose_sizes(shorter, corpus, length=length, stride=stride, batch=batch)
    windows = cut_windows(corpus, length, stride)
    if measure is None:
        measure = jax.jit(partial(compare_tokens, config, reference_config, compute=compute))
    losses, reference_losses, kls, same = (np.zeros(len(windows.read)) for _ in range(4))
    token_kls = []
    bound = partial(measure, params, reference)
    with tracing_for(params):
        for (nats, reference_nats, kl, top), owner in measure_windows(corpus, windows, batch, bound, progress):
            for sums, values in ((losses, nats), (reference_losses, reference_nats), (kls, kl), (same, top)):
                np.add.at(sums, owner, values)
            token_kls.append(kl)
    kl = np.concatenate(token_kls)
    model, dense = (summary(corpus, windows, sums) for sums in (losses, reference_losses))
    difference, difference_error = token_mean(windows, losses - reference_losses)
    mean, error = token_mean(windows, kls)
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = float(np.exp(difference))
    median, high = np.quantile(kl, QUANTILES)
    return Divergence(
        model=model,
        reference=dense,
        loss_difference=difference,
        loss_difference_error=difference_error,
        perplexity_ratio=ratio,
        kl=mean,
        kl_error=error,
        kl_median=float(median),
        kl_99=float(high),
        kl_max=float(kl.max()),
        same_top=float(same.sum() / windows.predicted.sum()),
    )


def compare_tokens(
    config: LlamaConfig,
    reference_config: LlamaConfig,
    params: LlamaParams,
    reference: LlamaParams,
    rows: WindowRows,
    *,
    compute: ComputeOptions,
) -> tuple[jax.Array, ...]:
    """For each target, float32[B, T]: nats of model and reference, divergence, and 1 where the top token is the same."""
    tokens, targets, segment_ids, position_ids = map(jnp.asarray, rows)
    positions = Positions(position_ids=position_ids, segment_ids=segment_ids)
    models = (config, params), (reference_config, reference)
    hidden = tuple(forward(*model, tokens, positions=positions, compute=compute)[0] for model in models)

    def predict(hidden: tuple[jax.Array, ...], targets: jax.Array) -> tuple[jax.Array, ...]:
        logits = [unembed(*model, array) for model, array in zip(models, hidden, strict=True)]
        q, p = (jax.nn.log_softmax(array) for array in logits)
        target = jnp.maximum(targets, 0)[..., None]
        nats = [-jnp.take_along_axis(array, target, axis=-1)[..., 0] for array in (q, p)]
        # Negative only by rounding; a token with p = 0 contributes nothing.
        kl = jnp.maximum(jnp.sum(jnp.where(p == -jnp.inf, 0, jnp.exp(p) * (p - q)), axis=-1), 0)
        top = (q.argmax(-1) == p.argmax(-1)).astype(q.dtype)
        return tuple(jnp.where(targets >= 0, array, 0) for array in (*nats, kl, top))

    return map_in_blocks(predict, hidden, targets, LOGIT_BLOCK)


@dataclass(frozen=True)
class PreferenceAccuracy:
    """The result of `preference_accuracy` for N pairs; the means are over pairs, in nats.

    Attributes:
      accuracy: the share of pairs whose chosen answer is more probable than the rejected one; with a reference, the share
        whose chosen answer gains more log-probability over the reference than the rejected one.
      accuracy_error: its standard error, as of a binomial proportion of N.
      margin: log-probability of the chosen answer minus that of the rejected one; with a reference, minus the reference's
        difference. Times beta it is the reward margin in DPO.
      margin_error: its standard error, from the spread between pairs; nan for a single one.
      accuracy_per_token: as `accuracy`, with log-probabilities divided by the tokens of the answer, since long answers are
        less probable because of their length.
      chosen_logprob, rejected_logprob: log-probabilities of the answers under the model.
      pairs: N.
      tokens: number of tokens of all answers.
    """

    accuracy: float
    accuracy_error: float
    margin: float
    margin_error: float
    accuracy_per_token: float
    chosen_logprob: float
    rejected_logprob: float
    pairs: int
    tokens: int


@dataclass(frozen=True)
class AnswerLogprobs:
    """Log-probabilities of both answers of N pairs in nats, and their numbers of tokens: float64[N, 2], int64[N, 2]."""

    logprobs: np.ndarray
    tokens: np.ndarray


def pair_logprobs(
    config: LlamaConfig,
    params: LlamaParams,
    pairs: Pairs,
    *,
    length: int,
    batch: int,
    compute: ComputeOptions = ComputeOptions(),
    measure: TokenMeasure | None = None,
    progress: MegabyteProgress | None = None,
) -> AnswerLogprobs:
    """The log-probability of each answer after its prompt.

    Args:
      pairs: texts of at most `length` + 1 tokens.
      length: T, tokens of a row, which may hold several texts.
      batch: B, rows per forward pass.
      compute, measure, progress: see `evaluate`.

    Raises:
      DataError: an invalid batch.
    """
    check_batch(batch, length)
    texts = concatenate((pairs.first, pairs.second))
    windows = cut_windows(texts, length, length)
    compute = evaluation_compute(params, compute)
    measure = jax.jit(partial(token_nats, config, compute=compute)) if measure is None else measure
    with tracing_for(params):
        sums = sum_windows(texts, windows, batch, partial(measure, params), progress, not compute.exact)
    scores = np.zeros((2, texts.document_count))
    scores[:, texts.stops - texts.starts > 1] = -sums, windows.predicted  # such a text has one window
    logprobs, tokens = scores.reshape(2, 2, -1).swapaxes(1, 2)
    return AnswerLogprobs(logprobs, tokens.astype(np.int64))


def preference_accuracy(answers: AnswerLogprobs, reference: AnswerLogprobs | None = None) -> PreferenceAccuracy:
    """How often a model prefers the chosen answer, relative to a reference if there is one."""
    logprobs = answers.logprobs
    ratios = logprobs if reference is None else logprobs - reference.logprobs
    margins, count = ratios[:, 0] - ratios[:, 1], len(ratios)
    per_token = ratios / np.maximum(answers.tokens, 1)
    accuracy = float((margins > 0).mean())
    return PreferenceAccuracy(
        accuracy=accuracy,
        accuracy_error=math.sqrt(accuracy * (1 - accuracy) / count),
        margin=float(margins.mean()),
        margin_error=float(margins.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan,
        accuracy_per_token=float((per_token[:, 0] > per_token[:, 1]).mean()),
        chosen_logprob=float(logprobs[:, 0].mean()),
        rejected_logprob=float(logprobs[:, 1].mean()),
        pairs=count,
        tokens=int(answers.tokens.sum()),
    )
