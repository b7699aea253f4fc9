"""AdamW and Muon, and learning-rate schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from llama_jax.errors import ConfigError
from llama_jax.model.params import Llama, spec_at

OptimizerName = Literal["adamw", "muon"]
ScheduleName = Literal["cosine", "wsd", "constant"]


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of the optimizer.

    Attributes:
      name: "adamw", or "muon" for the matrices inside the layers and AdamW for the rest.
      learning_rate: the peak of the schedule.
      schedule: the learning rate after the warm-up: "cosine" falls over all other steps; "wsd" (warm-up, stable, decay: Hu
        et al. 2024, section 4) stays and falls linearly over the last ones; "constant" stays.
      warmup_steps: steps over which the learning rate rises linearly from 0.
      decay_share: share of all steps in which "wsd" decays, at the end; at most those after the warm-up.
      final_share: share of the learning rate that is left at the last step.
      b1, b2, eps: betas and epsilon of AdamW; 0.9 and 0.95 are Llama's (Touvron et al. 2023, section 2.3).
      lora_plus: factor of the learning rate for B and the magnitudes of adapters; 16 is usual, with a lower rate for A
        (Hayou et al. 2024), and 1 is the same rate for all.
      momentum: momentum of Muon.
      weight_decay: decoupled weight decay, times the learning rate, for matrices including the embedding, but not for norm
        weights or biases.
      clip_norm: larger gradients are scaled down to this Euclidean norm (1.0 for Llama: Touvron et al. 2023, section 2.3); 0
        clips nothing.

    Raises:
      ConfigError: an invalid value.
    """

    name: OptimizerName = "adamw"
    learning_rate: float = 3e-4
    schedule: ScheduleName = "cosine"
    warmup_steps: int = 0
    decay_share: float = 0.2
    final_share: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    lora_plus: float = 1.0
    momentum: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for field, known in (("name", OptimizerName), ("schedule", ScheduleName)):
            value = getattr(self, field)
            if value not in get_args(known):
                raise ConfigError(f"{field}={value!r} must be one of {', '.join(get_args(known))}")
        for field in ("learning_rate", "eps", "lora_plus"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ConfigError(f"{field}={getattr(self, field)} must be positive")
        for field in ("weight_decay", "clip_norm", "warmup_steps"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ConfigError(f"{field}={getattr(self, field)} must be at least 0")
        for field in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)} must be at least 0 and below 1")
        for field in ("decay_share", "final_share"):
            if not 0 <= getattr(self, field) <= 1:
                raise ConfigError(f"{field}={getattr(self, field)} must be between 0 and 1")


def learning_rates(settings: OptimizerSettings, steps: int) -> optax.Schedule:
    """The learning rate of every update, from 0 to `steps` - 1.

    Raises:
      ConfigError: the warm-up does not end before the last step.
    """
    s = settings
    if s.warmup_steps >= max(steps, 1):
        raise ConfigError(f"optimizer.warmup_steps={s.warmup_steps} must be below steps={steps}; set it lower")
    rest = steps - s.warmup_steps
    last = s.final_share * s.learning_rate
    match s.schedule:
        case "cosine":
            after = optax.cosine_decay_schedule(s.learning_rate, max(rest - 1, 1), alpha=s.final_share)
            pieces, ends = [after], []
        case "wsd":
            decay = min(rest - 1, round(s.decay_share * steps))
            stable = optax.constant_schedule(s.learning_rate)
            pieces, ends = [stable, optax.linear_schedule(s.learning_rate, last, max(decay, 1))], [steps - 1 - decay]
        case _:
            pieces, ends = [optax.constant_schedule(s.learning_rate)], []
    # Update 0 already trains: the first learning rate of the warm-up is one step's share, not 0.
    warmup = optax.linear_schedule(s.learning_rate / max(s.warmup_steps, 1), s.learning_rate, max(s.warmup_steps - 1, 1))
    if s.warmup_steps:
        pieces, ends = [warmup, *pieces], [s.warmup_steps, *ends]
    return optax.join_schedules(pieces, ends)


def make_optimizer(settings: OptimizerSettings, steps: int) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a run with this many steps: AdamW, or Muon, with clipped gradients."""
    s, schedule = settings, learning_rates(settings, steps)
    adam = adamw(schedule, b1=s.b1, b2=s.b2, eps=s.eps, weight_decay=s.weight_decay)
    if s.lora_plus != 1:  # scales AdamW's update with its weight decay, like a separate learning rate
        adam = optax.chain(adam, optax.masked(optax.scale(s.lora_plus), _is_lora_b_or_magnitude))
    optimizer = adam if s.name == "adamw" else optax.partition({"muon": _muon(s, schedule), "adamw": adam}, _optimizer_of)
    return clipped(optimizer, s.clip_norm)


def clipped(optimizer: optax.GradientTransformation, clip_norm: float) -> optax.GradientTransformationExtraArgs:
    """The optimizer on gradients that are scaled down to this Euclidean norm, with the same state; 0 clips nothing.

    Its `update` takes the norm as `grad_norm` from `train_step`, which has computed it; without it, it computes the norm.
    """
    inner = optax.with_extra_args_support(optimizer)
    if not clip_norm:
        return inner

    def update(gradients: Any, state: Any, params: Any = None, *, grad_norm: Any = None, **more: Any) -> tuple[Any, Any]:
        norm = grad_norm
        if norm is None:
            norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), gradients))
        # Scaled here and not before, because a scaled copy of all gradients would be as large as the parameters.
        scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30))
        return inner.update(jax.tree.map(lambda g: (g * scale).astype(g.dtype), gradients), state, params, **more)

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

    Decays matrices including the embedding, but not norm weights or biases: other weights would only compensate for a norm
    weight that shrinks. Gradients are not clipped, see `clipped`.
    """
    return optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=_decay_mask)


def _muon(settings: OptimizerSettings, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) with updates of the size of AdamW's (Liu et al. 2025, section 2.2)."""
    return optax.contrib.muon(
        schedule,
        beta=settings.momentum,
        weight_decay=settings.weight_decay,
        muon_weight_dimension_numbers=_matrix_axes,
        consistent_rms=0.2,
    )


def _matrix_axes(params: Llama) -> Llama:
    """Which axes of each array are a matrix's input and output; the others, such as the layers, are batch axes."""

    def axes(path: tuple[Any, ...], _: Any) -> optax.contrib.MuonDimensionNumbers:
        return optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=spec_at(path).output_axes)

    return jax.tree_util.tree_map_with_path(axes, params)


def _optimizer_of(params: Llama) -> Llama:
    def name(path: tuple[Any, ...], _: Any) -> OptimizerName:
        return "adamw" if spec_at(path).output_axes is None else "muon"

    return jax.tree_util.tree_map_with_path(name, params)


def _is_lora_b_or_magnitude(params: Llama) -> Llama:
    """Mark B and the magnitude of adapters.

    Raises:
      ConfigError: the parameters are not adapters.
    """

    def after(path: tuple[Any, ...], _: Any) -> bool:
        return isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name in ("b", "magnitude")

    marked = jax.tree_util.tree_map_with_path(after, params)
    if not any(jax.tree.leaves(marked)):
        raise ConfigError("lora_plus is a learning rate for B of adapters, and these parameters are none; leave it at 1")
    return marked


def _decay_mask(params: Llama) -> Llama:
    return jax.tree_util.tree_map_with_path(lambda path, _: spec_at(path).decays, params)
