"""How far a model's predictions on a text are from a reference's: a quantised model's from its dense original's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.data import Corpus, DataError
from llama_jax.data.load_corpus import Progress
from llama_jax.model.forward import forward, unembed
from llama_jax.model.options import Compute, Places
from llama_jax.model.params import Llama
from llama_jax.ops.platform import tracing_for
from llama_jax.runs.evaluate import CHUNK, Evaluation, choose_sizes, in_chunks, mean_of_tokens, measured, summary
from llama_jax.runs.windows import WindowRows, cut_windows

QUANTILES = (0.5, 0.99)


@dataclass(frozen=True)
class Divergence:
    """What `divergence` found; nan where a model's outputs are not finite.

    Standard errors are from the spread between windows, see `evaluate`; nan for a single window.

    Attributes:
      model, reference: loss, perplexity and bits per byte of each, on the same tokens.
      loss_difference: the model's loss minus the reference's, in nats per token, with its standard error, which is far
        smaller than those of the two losses because both read the same text.
      perplexity_ratio: model's / reference's.
      kl: Kullback-Leibler divergence of the model's next-token distribution from the reference's, sum of p ln(p / q) with p
        the reference's: mean over predicted tokens in nats, with its standard error.
      kl_median, kl_99, kl_max: median, 99th percentile and maximum of the divergence over tokens.
      same_top: share of the predicted tokens at which both models have the same most probable token.
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


def divergence(
    config: LlamaConfig,
    params: Llama,
    reference: Llama,
    corpus: Corpus,
    *,
    reference_config: LlamaConfig | None = None,
    length: int | None = None,
    stride: int | None = None,
    batch: int | None = None,
    compute: Compute = Compute(),
    progress: Progress | None = None,
) -> Divergence:
    """Compare two models' predictions of every token of documents, read through the same sliding window.

    Both are in memory at once, with logits of 64 positions of each row.

    Args:
      params: of the model, for example `model.trees.quantize(reference, "int8")`.
      reference: parameters of the reference.
      reference_config: its configuration, if it differs; any model of the same vocabulary.
      length, stride, batch, progress: see `evaluate`.
      compute: of both.

    Raises:
      DataError: what `evaluate` raises for either model, or vocabularies of two sizes.
    """
    reference_config = config if reference_config is None else reference_config
    if reference_config.vocab_size != config.vocab_size:
        raise DataError(
            f"the reference has a vocabulary of {reference_config.vocab_size}, the model one of {config.vocab_size}:"
            " their predictions cannot be compared"
        )
    shorter = min(config, reference_config, key=lambda one: one.max_seq_len)
    length, stride, batch = choose_sizes(shorter, corpus, length=length, stride=stride, batch=batch)
    windows = cut_windows(corpus, length, stride)
    compared = jax.jit(partial(compare_tokens, config, reference_config, compute=compute))
    losses, others, kls, same = (np.zeros(len(windows.read)) for _ in range(4))
    of_tokens = []
    measure = partial(compared, params, reference)
    with tracing_for(params):
        for (nats, theirs, kl, top), owner in measured(corpus, windows, batch, measure, progress):
            for sums, found in ((losses, nats), (others, theirs), (kls, kl), (same, top)):
                np.add.at(sums, owner, found)
            of_tokens.append(kl)
    kl = np.concatenate(of_tokens)
    model, dense = (summary(corpus, windows, sums) for sums in (losses, others))
    difference, difference_error = mean_of_tokens(windows, losses - others)
    mean, error = mean_of_tokens(windows, kls)
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
    params: Llama,
    reference: Llama,
    rows: WindowRows,
    *,
    compute: Compute,
) -> tuple[jax.Array, ...]:
    """Of each target, float32[B, T]: nats of model and reference, divergence, and 1 where the top token is the same."""
    tokens, targets, segment_ids, positions = map(jnp.asarray, rows)
    places = Places(positions=positions, segment_ids=segment_ids)
    models = (config, params), (reference_config, reference)
    hidden = tuple(forward(*model, tokens, places=places, compute=compute)[0] for model in models)

    def predict(hidden: tuple[jax.Array, ...], targets: jax.Array) -> tuple[jax.Array, ...]:
        logits = [unembed(*model, one) for model, one in zip(models, hidden, strict=True)]
        q, p = (jax.nn.log_softmax(one) for one in logits)
        target = jnp.maximum(targets, 0)[..., None]
        nats = [-jnp.take_along_axis(one, target, axis=-1)[..., 0] for one in (q, p)]
        # Negative only by rounding; a token with p = 0 contributes nothing.
        kl = jnp.maximum(jnp.sum(jnp.where(p == -jnp.inf, 0, jnp.exp(p) * (p - q)), axis=-1), 0)
        top = (q.argmax(-1) == p.argmax(-1)).astype(q.dtype)
        return tuple(jnp.where(targets >= 0, one, 0) for one in (*nats, kl, top))

    return in_chunks(predict, hidden, targets, CHUNK)
