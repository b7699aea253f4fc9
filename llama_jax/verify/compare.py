"""Whether two models are the same: by how much their outputs differ, where, and whether rounding explains it.

A reference is the trace of another model. The parts of a model (embedding, each layer, output) are compared one by one, each
with the reference's input to that part: an error then shows in the part that causes it and does not propagate, and the
difference that rounding explains does not depend on depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.config import LlamaConfig, RopeScaling
from llama_jax.config.presets import SHAPE_FIELDS
from llama_jax.model.params import LlamaParams
from llama_jax.model.trees import layers_of
from llama_jax.verify.activations import Trace, layer_config, log_softmax, nats_per_token, run_layer, run_output
from llama_jax.verify.rounding_error import EXACT, Rounding, rounding_between

# Largest difference of a part in multiples of the rounding error. Measured on the 260K stories model and small random
# ones: 1.7 to 3 for every kind of quantization (a layer is two or three rounded matmuls in a row), up to 2.4 for 16-bit
# arithmetic, up to 3.2 in float32. The margin is for outliers of larger models. With a wrong rotary layout, or exchanged or
# transposed weights, a layer differs by at least 0.7 of what it adds: 8 times the rounding error of Q4_0, 60 of bfloat16.
MAX_ROUNDINGS = 6.0
COARSE = 0.7 / MAX_ROUNDINGS  # with a rounding error above this, such a mistake would pass
# Tolerance of float32 logits: absolute, and relative to the largest logit if logits are large. Measured: 1.4e-5 of 21 for
# the stories model, 2e-3 of 29 for a random model with extreme activations.
LOGITS_ABSOLUTE, LOGITS_RELATIVE = 1e-3, 1e-4

# Fields that may differ without any effect on the results.
NO_EFFECT = ("max_seq_len", "unscaled_max_seq_len", "tie_embeddings")

Differences = tuple[tuple[str, Any, Any], ...]  # of two configurations: name, value here, value there


class ComparedPart(NamedTuple):
    """How a part of a model differs from the reference's.

    Attributes:
      name: "embedding", "layer 0", ..., "output".
      max_abs: largest difference of the part's output, including the differences of all earlier parts.
      relative: norm of that difference divided by the reference's norm, root mean square over positions.
      alone: the same for this part only, with the reference's input, relative to what the reference's part adds.
      roundings: `alone` in multiples of the rounding error, at most `MAX_ROUNDINGS` if the parts are the same.
    """

    name: str
    max_abs: float
    relative: float
    alone: float
    roundings: float


@dataclass(frozen=True)
class Comparison:
    """How a model differs from a reference.

    Attributes:
      same: the verdict.
      why: the verdict in words.
      rounding: name of the rounding that `roundings` of the parts refers to: "float32" if numbers are, or should be, equal.
      settings: fields of the configuration that differ.
      positions: T.
      max_abs, largest: the largest difference of logits, and the reference's largest logit without its sign.
      kl, kl_max, kl_max_at: divergence of the model's next-token distribution from the reference's: mean over positions,
        maximum and its position; nats.
      loss, reference_loss: nats per token of the input tokens except the first: their difference is the logarithm of the
        ratio of the perplexities.
      agreeing: number of positions with the same most probable token; `ties` of the others are ties within rounding.
      parts: embedding, layers and output.
    """

    same: bool
    why: str
    rounding: str
    settings: Differences
    positions: int
    max_abs: float
    largest: float
    kl: float
    kl_max: float
    kl_max_at: int
    loss: float
    reference_loss: float
    agreeing: int
    ties: int
    parts: tuple[ComparedPart, ...]


def differing_settings(config: LlamaConfig, reference: LlamaConfig) -> Differences:
    """Name, value here and value there of the fields that differ, except those without effect on the results."""
    config, reference = (replace(model_config, parts=model_config.parts.names) for model_config in (config, reference))
    pairs = (
        (f.name, getattr(config, f.name), getattr(reference, f.name)) for f in fields(LlamaConfig) if f.name not in NO_EFFECT
    )
    return tuple((name, a, b) for name, a, b in pairs if not _settings_equal(a, b))


def _settings_equal(a: object, b: object) -> bool:
    """Whether two settings are equal in float32, in which some formats store them."""
    if isinstance(a, RopeScaling) and isinstance(b, RopeScaling):
        return all(map(_settings_equal, astuple(a), astuple(b)))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_settings_equal, a, b))
    return a == b or (isinstance(a, float) and isinstance(b, float) and np.float32(a) == np.float32(b))


def comparable(settings: Differences) -> bool:
    """Whether models that differ in these settings have tensors of the same sizes."""
    return not any(name in SHAPE_FIELDS for name, *_ in settings)


def in_words(settings: Differences) -> str:
    """The differences as text: "norm_eps 1e-05 here, 1e-06 there; ..."."""
    return ", ".join(f"{name} {a} here, {b} there" for name, a, b in settings)


def compare(params: LlamaParams, ours: Trace, reference: Trace) -> Comparison:
    """Compare a model's parameters and trace with a reference trace of the same sizes and tokens."""
    with np.errstate(over="ignore", invalid="ignore"):  # numbers that are not finite are detected and reported
        settings = differing_settings(ours.origin.config, reference.origin.config)
        max_abs, largest = float(np.abs(ours.logits - reference.logits).max()), float(np.abs(reference.logits).max())
        tolerance = max(LOGITS_ABSOLUTE, LOGITS_RELATIVE * largest)
        kl = _kl_divergence(reference.logits, ours.logits)
        agreeing, ties = _top1(ours.logits, reference.logits, 2 * tolerance)
        measured = list(_measure(params, ours, reference))
        # First check for equal numbers, whatever rounding is possible: many conversions lose nothing.
        rounding = EXACT
        parts = tuple(part.scored(EXACT) for part in measured)
        wrong = _differing(settings, parts, EXACT)
        if max_abs > tolerance:
            wrong.append(f"the logits differ by more than {tolerance:.1g}")
        why = f"the same model: logits within {tolerance:.1g}, every part within the rounding of float32"
        if wrong and (between := rounding_between(ours.origin, reference.origin)) != EXACT:
            rounding = between
            parts = tuple(part.scored(rounding) for part in measured)
            wrong = _differing(settings, parts, rounding)
            mean = float(kl.mean())
            if mean > rounding.kl:
                wrong.append(f"mean KL divergence {mean:.2g} nats, of which {rounding.name} explains {rounding.kl:.2g}")
            why = f"the same model within the rounding of {rounding.name}: mean KL divergence {mean:.2g} nats, {_loss(mean)}"
            if rounding.weights > COARSE:
                why += "; rounding this coarse could hide a wrong layer"
        if not np.isfinite(ours.logits).all():
            wrong.append("its logits are not finite")
    return Comparison(
        same=not wrong,
        why=f"NOT the same model: {'; '.join(wrong)}" if wrong else why,
        rounding=rounding.name,
        settings=settings,
        positions=len(kl),
        max_abs=max_abs,
        largest=largest,
        kl=float(kl.mean()),
        kl_max=float(kl.max()),
        kl_max_at=int(kl.argmax()),
        loss=nats_per_token(ours.tokens, ours.logits),
        reference_loss=nats_per_token(ours.tokens, reference.logits),
        agreeing=agreeing,
        ties=ties,
        parts=parts,
    )


def _differing(settings: Differences, parts: Sequence[ComparedPart], rounding: Rounding) -> list[str]:
    """The reasons to call it a different model, regardless of its logits."""
    reasons = [in_words(settings)] if settings else []
    departing = [part for part in parts if not part.roundings <= MAX_ROUNDINGS]
    if departing:
        first = departing[0]
        where = (
            f"{first.name} differs by {first.alone:.2g} of what it adds, {first.roundings:,.1f} times the rounding error of"
            f" {rounding.name}, which explains up to {MAX_ROUNDINGS:g} times"
        )
        if not math.isfinite(first.alone):
            where = f"the outputs of {first.name} are not finite"
        reasons.append(where + (f"; {len(departing) - 1} of the later parts too" if departing[1:] else ""))
    return reasons


def _loss(kl: float) -> str:
    """The divergence in words: up to that of Q6_K, of Q4_0, and beyond, by llama.cpp's measurements of Llama 3 8B."""
    return "negligible degradation" if kl < 0.01 else "small degradation" if kl < 0.1 else "noticeable degradation"


@dataclass(frozen=True)
class _Measured:
    """A part's differences, and norms [T] by position: of its own difference, its addition to the stream, and its output."""

    name: str
    max_abs: float
    relative: float
    difference: np.ndarray
    added: np.ndarray
    left: np.ndarray

    def scored(self, rounding: Rounding) -> ComparedPart:
        """The part with its difference in multiples of the rounding error: at the worst position if numbers should be equal,
        so that nothing is missed; at the median one if they are rounded, since cancellation amplifies a few positions."""
        roundings = _ratio(self.difference, rounding.explains(self.added, self.left))
        ratio = _ratio(self.difference, self.added)
        return ComparedPart(
            self.name,
            self.max_abs,
            self.relative,
            alone=_root_mean_square(ratio),
            roundings=float(roundings.max() if rounding == EXACT else np.median(roundings)),
        )


def _measure(params: LlamaParams, ours: Trace, reference: Trace) -> Iterator[_Measured]:
    config, streams = ours.origin.config, reference.streams
    blocks = layers_of(params)
    with jax.default_matmul_precision("highest"):
        for i in range(config.n_layers + 2):
            if i == 0:
                name, before, output = "embedding", np.zeros_like(streams[0]), ours.streams[0]
            elif i <= config.n_layers:
                stream = jnp.asarray(streams[i - 1], params.embedding.dtype)
                output = run_layer(layer_config(config, i - 1), blocks[i - 1], stream)
                name, before = f"layer {i - 1}", streams[i - 1]
            else:
                stream = jnp.asarray(streams[-1], params.embedding.dtype)
                name, before, output = "output", np.zeros_like(reference.logits), run_output(config, params, stream)
            carried, left = (ours.logits, reference.logits) if i > config.n_layers else (ours.streams[i], streams[i])
            yield _Measured(
                name=name,
                max_abs=float(np.abs(carried - left).max()),
                relative=_root_mean_square(_ratio(_norms(carried - left), _norms(left))),
                difference=_norms(np.asarray(output, np.float32) - left),
                added=_norms(left - before),
                left=_norms(left),
            )


def _norms(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.einsum("tf,tf->t", x, x, dtype=np.float64))


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, with 0 / 0 = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(a == 0, 0.0, a / b)


def _root_mean_square(x: np.ndarray) -> float:
    return math.sqrt(np.mean(np.square(x)))


def _kl_divergence(reference: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """KL divergence of the distribution at each position from the reference's, in nats: [T]."""
    divergences = []
    for p, q in zip(map(log_softmax, reference), map(log_softmax, logits), strict=True):
        divergences.append(float(np.dot(np.exp(p), p - q)))
    return np.maximum(divergences, 0.0)  # negative only by rounding


def _top1(logits: np.ndarray, reference: np.ndarray, tie: float) -> tuple[int, int]:
    """The number of positions with the reference's most probable token, and of others where the reference has a tie."""
    rows = np.arange(len(logits))
    chosen, best = logits.argmax(axis=-1), reference.argmax(axis=-1)
    gap = reference[rows, best] - reference[rows, chosen]
    return int((chosen == best).sum()), int(((chosen != best) & (gap <= tie)).sum())
