"""AdamW and Muon, with gradient clipping and learning-rate schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from llama_jax.errors import ConfigError
from llama_jax.model.params import LlamaParams, spec_at
from llama_jax.settings import BelowOne, NonNegativeFloat, NonNegativeInt, PositiveFloat, Share, check_fields

OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "wsd", "constant"]
ADAMW_RMS = 0.2  # the usual root mean square of AdamW's updates (Liu et al. 2025, section 2.2)
WARMUP_DIVISOR = 10  # the default warm-up is at most 1 / 10 of all steps


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of the optimizer.

    Attributes:
      name: "adamw", or "muon" for the matrices inside the layers, except routers of experts, and AdamW for the rest.
      learning_rate: the peak of the schedule.
      schedule: the learning rate after the warm-up: "cosine" decays over all remaining steps; "wsd" (warm-up, stable, decay:
        Hu et al. 2024, section 4) is constant and then decays linearly; "constant".
      warmup_steps: steps over which the learning rate rises linearly to the peak; None for a tenth of the run's steps, but
        at most `max_warmup_steps`.
      max_warmup_steps: upper bound of the default `warmup_steps`; 0 for no warm-up by default.
      decay_share: fraction of all steps, at the end, in which "wsd" decays; limited to those after the warm-up.
      final_share: the learning rate of the last step as a fraction of the peak.
      b1, b2, eps: betas and epsilon of AdamW; 0.9 and 0.95 are Llama's (Touvron et al. 2023, section 2.3).
      lora_plus: factor of the learning rate for B and the magnitudes of LoRA adapters (Hayou et al. 2024); 16 is usual, with
        a lower `learning_rate`, which then applies to A. 1: the same rate for all.
      momentum: momentum of Muon.
      weight_decay: decoupled weight decay, multiplied by the learning rate, for matrices including the embedding, but not
        for norm weights, biases or the magnitudes of DoRA.
      clip_norm: gradients with a larger global norm are scaled down to it (1.0 for Llama: Touvron et al. 2023, section
        2.3); 0: no clipping.

    Raises:
      ConfigError: an invalid value.
    """

    name: OptimizerName = "adamw"
    learning_rate: PositiveFloat = 3e-4
    schedule: ScheduleName = "cosine"
    warmup_steps: NonNegativeInt | None = None
    max_warmup_steps: NonNegativeInt = 0
    decay_share: Share = 0.2
    final_share: Share = 0.1
    b1: BelowOne = 0.9
    b2: BelowOne = 0.95
    eps: PositiveFloat = 1e-8
    lora_plus: PositiveFloat = 1.0
    momentum: BelowOne = 0.95
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: NonNegativeFloat = 1.0

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)

    def warmup(self, steps: int) -> int:
        """The number of warm-up steps in a run of `steps` steps."""
        return min(self.max_warmup_steps, steps // WARMUP_DIVISOR) if self.warmup_steps is None else self.warmup_steps


def learning_rate_schedule(settings: OptimizerSettings, steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of updates so far, 0 to `steps` - 1.

    Raises:
      ConfigError: the warm-up does not end before the last step.
    """
    s, warmup_steps = settings, settings.warmup(steps)
    if warmup_steps >= max(steps, 1):
        raise ConfigError(f"optimizer.warmup_steps={warmup_steps} must be below steps={steps}; set it lower")
    steps_after_warmup = steps - warmup_steps
    final_learning_rate = s.final_share * s.learning_rate
    match s.schedule:
        case "cosine":
            cosine = optax.cosine_decay_schedule(s.learning_rate, max(steps_after_warmup - 1, 1), alpha=s.final_share)
            schedules, boundaries = [cosine], []
        case "wsd":
            decay_steps = min(steps_after_warmup - 1, round(s.decay_share * steps))
            stable = optax.constant_schedule(s.learning_rate)
            decay = optax.linear_schedule(s.learning_rate, final_learning_rate, max(decay_steps, 1))
            schedules, boundaries = [stable, decay], [steps - 1 - decay_steps]
        case _:
            schedules, boundaries = [optax.constant_schedule(s.learning_rate)], []
    # The warm-up starts at 1 / warmup_steps of the peak, not at 0, so that update 0 also trains.
    warmup = optax.linear_schedule(s.learning_rate / max(warmup_steps, 1), s.learning_rate, max(warmup_steps - 1, 1))
    if warmup_steps:
        schedules, boundaries = [warmup, *schedules], [warmup_steps, *boundaries]
    return optax.join_schedules(schedules, boundaries)


def make_optimizer(settings: OptimizerSettings, steps: int) -> optax.GradientTransformationExtraArgs:
    """AdamW or Muon with gradient clipping, for a run of `steps` steps."""
    s, schedule = settings, learning_rate_schedule(settings, steps)
    adam = adamw(schedule, b1=s.b1, b2=s.b2, eps=s.eps, weight_decay=s.weight_decay)
    if s.lora_plus != 1:  # scales update and weight decay, like a separate learning rate
        adam = optax.chain(adam, optax.masked(optax.scale(s.lora_plus), _is_lora_b_or_magnitude))
    if s.name == "adamw":
        return with_clipping(adam, s.clip_norm)
    return with_clipping(optax.partition({"muon": _muon(s, schedule), "adamw": adam}, _optimizer_labels), s.clip_norm)


def with_clipping(optimizer: optax.GradientTransformation, clip_norm: float) -> optax.GradientTransformationExtraArgs:
    """The optimizer with gradients clipped by their global norm; 0: no clipping.

    Like `optax.clip_by_global_norm`, but `update` accepts the norm as `grad_norm`, and the optimizer's state is unchanged.
    """
    inner = optax.with_extra_args_support(optimizer)
    if not clip_norm:
        return inner

    def update(gradients: Any, state: Any, params: Any = None, *, grad_norm: Any = None, **extra: Any) -> tuple[Any, Any]:
        norm = grad_norm
        if norm is None:
            norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), gradients))
        # Scaled here and not in `train_step`, where the scaled gradients would be a copy as large as the parameters.
        scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))
        return inner.update(jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradients), state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def adamw(
    learning_rate: float | optax.Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> optax.GradientTransformation:
    """AdamW with the betas of Llama (Touvron et al. 2023, section 2.3; Loshchilov & Hutter 2019, algorithm 2).

    Weight decay applies to matrices including the embedding, but not to norm weights (other weights would only compensate
    for smaller ones) or biases. Gradients are not clipped, see `with_clipping`.
    """
    return optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=_decay_mask)


def _muon(settings: OptimizerSettings, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) with updates as large as AdamW's (Liu et al. 2025, section 2.2)."""
    return optax.chain(
        _scale_by_muon(settings.momentum),
        optax.add_decayed_weights(settings.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )


def _scale_by_muon(momentum: float) -> optax.GradientTransformation:
    """Momentum with each matrix orthogonalized, and scaled to the RMS of AdamW's updates.

    Queries, keys and values are three matrices, although one array holds them: orthogonalized together, the update of each
    would depend on the size of the other two.
    """
    muon = optax.contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=_muon_dimension_numbers)

    def scale(update: jax.Array, axes: optax.contrib.MuonDimensionNumbers) -> jax.Array:
        outputs = math.prod(update.shape[axis] for axis in axes.output_axis)
        return update * (ADAMW_RMS * max(update.shape[axes.reduction_axis], outputs) ** 0.5)

    def update(gradients: LlamaParams, state: Any, params: LlamaParams | None = None) -> tuple[LlamaParams, Any]:
        del params
        updates, state = muon.update(_split_qkv(gradients), state._replace(mu=_split_qkv(state.mu)))
        updates = jax.tree.map(scale, updates, _muon_dimension_numbers(updates))
        return _join_qkv(updates), state._replace(mu=_join_qkv(state.mu))

    return optax.GradientTransformation(muon.init, update)


class _Projections(NamedTuple):
    """The parts of `Attention.qkv`."""

    query: jax.Array
    key: jax.Array
    value: jax.Array


def _split_qkv(params: LlamaParams) -> LlamaParams:
    """The parameters with `_Projections` in place of ``qkv`` [..., K, G + 2, H, D]."""

    def split(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        if spec_at(path).path != "blocks.attention.qkv":
            return leaf
        return _Projections(*jax.lax.split(leaf, (leaf.shape[-3] - 2, 1, 1), axis=leaf.ndim - 3))

    return jax.tree_util.tree_map_with_path(split, params)


def _join_qkv(params: LlamaParams) -> LlamaParams:
    """The inverse of `_split_qkv`."""
    is_split = lambda node: isinstance(node, _Projections)
    return jax.tree.map(lambda node: jnp.concatenate(node, axis=-3) if is_split(node) else node, params, is_leaf=is_split)


def _muon_dimension_numbers(params: LlamaParams) -> LlamaParams:
    """The input and output axes of each matrix; other axes, such as the axis of layers, are batch axes."""

    def axes(path: tuple[Any, ...], _: Any) -> optax.contrib.MuonDimensionNumbers:
        return optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=spec_at(path).output_axes)

    return jax.tree_util.tree_map_with_path(axes, params)


def _optimizer_labels(params: LlamaParams) -> LlamaParams:
    """The optimizer of each parameter: "muon" for the matrices inside the layers, "adamw" for the rest.

    Raises:
      ConfigError: the parameters are adapters.
    """

    def label(path: tuple[Any, ...], _: Any) -> OptimizerName:
        spec = spec_at(path)
        if path[-1] != jax.tree_util.GetAttrKey(spec.path.rpartition(".")[2]):  # inside a weight
            raise ConfigError("name='muon' is for whole matrices; train adapters with adamw")
        return "adamw" if spec.output_axes is None else "muon"

    return jax.tree_util.tree_map_with_path(label, params)


def _is_lora_b_or_magnitude(params: LlamaParams) -> LlamaParams:
    """True at B and the magnitudes of LoRA adapters.

    Raises:
      ConfigError: the parameters are not adapters.
    """

    def is_b_or_magnitude(path: tuple[Any, ...], _: Any) -> bool:
        return isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name in ("b", "magnitude")

    mask = jax.tree_util.tree_map_with_path(is_b_or_magnitude, params)
    if not any(jax.tree.leaves(mask)):
        raise ConfigError("lora_plus is for the learning rate of adapters, and these parameters are not; leave it at 1")
    return mask


def _decay_mask(params: LlamaParams) -> LlamaParams:
    """Whether weight decay applies to each parameter: to matrices, also those of adapters, but not to norms, biases, or the
    magnitudes of DoRA, which start as the lengths of the base's rows.
    """

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        return spec_at(path).decays and getattr(path[-1], "name", None) != "magnitude"

    return jax.tree_util.tree_map_with_path(decays, params)
