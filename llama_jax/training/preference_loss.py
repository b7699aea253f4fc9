"""Preference losses: functions of the log-probabilities of whole answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from llama_jax.errors import ConfigError
from llama_jax.ops.platform import AnyArray
from llama_jax.settings import Bounds, NonNegativeFloat, PositiveFloat, check_fields
from llama_jax.training.batch import replace_zero

PreferenceKind = Literal["sigmoid", "hinge", "ipo", "simpo", "orpo", "kto"]
FREE = ("simpo", "orpo")  # losses without a reference
USUAL_MARGIN = 0.5  # of SimPO


class Pair(NamedTuple):
    """Two numbers for each of B pairs, one for the chosen and one for the rejected answer: float[B] each."""

    chosen: jax.Array
    rejected: jax.Array


class Preferred(NamedTuple):
    """The result of a preference loss.

    Attributes:
      losses: float[B]; the loss is their mean.
      rewards: float[B] each, without a gradient: beta times the log-ratio of an answer's probability to the reference's; for
        SimPO and ORPO, beta times the log-probability per token. The chosen answer's should be larger.
    """

    losses: jax.Array
    rewards: Pair


@dataclass(frozen=True)
class PreferenceOptions:
    """Options of the preference loss.

    Attributes:
      kind: "sigmoid" is DPO (Rafailov et al. 2023, equation 7), "hinge" its hinge loss (SLiC, Zhao et al. 2023), "ipo" a
        squared loss around 1 / (2 beta) (Azar et al. 2023, equation 17, with log-probabilities per token), "simpo" (Meng et
        al. 2024, equation 6), "orpo" (Hong et al. 2024, equation 6), "kto" (Ethayarajh et al. 2024, equation 8).
      beta: how strongly the model is kept near the reference; for SimPO, the scale of the rewards (2.0 to 2.5 in the paper);
        for ORPO, the weight of the odds ratio relative to the likelihood (lambda in the paper).
      label_smoothing: the assumed share of pairs with swapped labels, for "sigmoid" and "simpo" (cDPO: Mitchell 2023).
      margin: for "simpo", the target difference of the rewards (gamma); None is 0.5.
      desirable, undesirable: weights of the two terms of "kto".

    Raises:
      ConfigError: an invalid value, or one that the kind does not use.
    """

    kind: PreferenceKind = "sigmoid"
    beta: PositiveFloat = 0.1
    label_smoothing: Annotated[float, Bounds(0, 0.5, open_maximum=True)] = 0.0
    margin: NonNegativeFloat | None = None
    desirable: NonNegativeFloat = 1.0
    undesirable: NonNegativeFloat = 1.0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        read = {"label_smoothing": ("sigmoid", "simpo"), "margin": ("simpo",)}
        read |= {"desirable": ("kto",), "undesirable": ("kto",)}
        for name, kinds in read.items():
            value = getattr(self, name)
            if value != getattr(PreferenceOptions, name) and self.kind not in kinds:
                raise ConfigError(f"{name}={value} applies only to {' and '.join(kinds)}, not to {self.kind}; leave it out")


def preference_loss(
    policy: Pair,
    reference: Pair | None = None,
    lengths: Pair | None = None,
    options: PreferenceOptions = PreferenceOptions(),
    mismatched: Float[AnyArray, " mismatched"] | None = None,
) -> Preferred:
    """The loss of each pair of answers, in the dtype of its log-probabilities.

    The first loss of "sigmoid", with identical model and reference, is ln 2.

    Args:
      policy: the log-probability of each answer, the sum over its tokens (`token_logprobs(...).sum(axis=1)`).
      reference: the same for the reference; None for "simpo" and "orpo", which have none. Not differentiated.
      lengths: number of tokens of each answer, for "ipo", "simpo" and "orpo"; others ignore it.
      mismatched: for "kto", log-probabilities of answers to other prompts, minus the reference's; their mean estimates the
        divergence. Not differentiated.

    Raises:
      ConfigError: an argument that the kind needs is missing, or a reference or `mismatched` that it does not use.
    """
    _check(options.kind, reference, lengths, mismatched)
    beta, smoothing = options.beta, options.label_smoothing
    if reference is not None:
        policy = Pair(*(logprob - jax.lax.stop_gradient(other) for logprob, other in zip(policy, reference, strict=True)))
    if options.kind in ("ipo", *FREE):
        assert lengths is not None
        policy = Pair(*(sums / replace_zero(count) for sums, count in zip(policy, lengths, strict=True)))
    difference = policy.chosen - policy.rejected
    if options.kind in ("sigmoid", "simpo"):
        margin = 0.0 if options.kind == "sigmoid" else USUAL_MARGIN if options.margin is None else options.margin
        scaled = beta * difference - margin
        losses = -(1 - smoothing) * jax.nn.log_sigmoid(scaled) - smoothing * jax.nn.log_sigmoid(-scaled)
    elif options.kind == "hinge":
        losses = jax.nn.relu(1 - beta * difference)
    elif options.kind == "ipo":
        losses = (difference - 1 / (2 * beta)) ** 2
    elif options.kind == "orpo":
        odds = difference - (_log_of_not(policy.chosen) - _log_of_not(policy.rejected))
        losses = -policy.chosen - beta * jax.nn.log_sigmoid(odds)
    else:
        assert mismatched is not None
        chosen = kto_loss(policy.chosen, True, mismatched, options)
        rejected = kto_loss(policy.rejected, False, mismatched, options)
        losses = (chosen + rejected) / 2
    return Preferred(losses, Pair(*(jax.lax.stop_gradient(beta * ratio) for ratio in policy)))


def kto_loss(
    ratios: Float[AnyArray, "*answers"],
    desirable: Bool[AnyArray, "*answers"] | bool,
    mismatched: Float[AnyArray, "*mismatched"],
    options: PreferenceOptions,
) -> Float[Array, "*answers"]:
    """KTO's loss for single answers, which need not form pairs (Ethayarajh et al. 2024, equation 8).

    Args:
      ratios: log-probabilities of answers, minus the reference's.
      desirable: which answers are good.
      mismatched: see `preference_loss`.
    """
    divergence = jax.lax.stop_gradient(jnp.maximum(jnp.mean(mismatched), 0))
    good = options.desirable * (1 - jax.nn.sigmoid(options.beta * (ratios - divergence)))
    bad = options.undesirable * (1 - jax.nn.sigmoid(options.beta * (divergence - ratios)))
    return jnp.where(desirable, good, bad)


def _log_of_not(logprob: jax.Array) -> jax.Array:
    """log(1 - exp(x)) for x below 0 (Maechler 2012), also near both ends."""
    near = logprob > -0.6931471805599453
    # Each branch has an argument for which it is finite, so that neither causes NaN in the other's gradient.
    small, large = jnp.where(near, logprob, -1.0), jnp.where(near, -1.0, logprob)
    return jnp.where(near, jnp.log(-jnp.expm1(small)), jnp.log1p(-jnp.exp(large)))


def _check(kind: PreferenceKind, reference: Pair | None, lengths: Pair | None, mismatched: AnyArray | None) -> None:
    if (reference is None) != (kind in FREE):
        need = "has no reference; pass None" if kind in FREE else "needs the reference's log-probabilities"
        raise ConfigError(f"the preference loss {kind} {need}")
    if lengths is None and kind in ("ipo", *FREE):
        raise ConfigError(f"the preference loss {kind} uses log-probabilities per token; pass the lengths of the answers")
    if (mismatched is None) == (kind == "kto"):
        need = "needs" if kind == "kto" else "does not use"
        raise ConfigError(f"the preference loss {kind} {need} log-probabilities of mismatched answers")
