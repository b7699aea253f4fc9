"""Validation of a configuration; a ConfigError names the field."""

from __future__ import annotations

import math
from typing import Any

from llama_jax.config.parts import Parts
from llama_jax.errors import ConfigError, shown

CHOICES: dict[str, tuple[str | None, ...]] = {
    "qk_norm": (None, "head", "all", "l2"),
    "norm": ("pre", "post", "both"),
    "activation": ("silu", "gelu"),
    "expert_scores": ("softmax", "sigmoid"),
}


def require_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ConfigError(f"{name}={shown(value, 40)} must be a positive integer below 2**31")


def is_floating(dtype: Any) -> bool:
    """Whether this is the name or the class of a floating-point type that JAX knows."""
    import jax.numpy as jnp  # not needed for a configuration only

    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def require_number(name: str, value: object, *, minimum: float = -math.inf, above: float = -math.inf) -> None:
    bound = f"at least {minimum:g}" if minimum > -math.inf else f"above {above:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value < 1e30 or value <= above:
        raise ConfigError(f"{name}={shown(value, 40)} must be a finite number {bound}")


def check_sizes(config: Any) -> None:
    """Raise ConfigError for an invalid `LlamaConfig`, naming the field."""
    for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "max_seq_len"):
        require_positive_int(name, getattr(config, name))
    require_number("norm_eps", config.norm_eps, above=0.0)
    require_number("rope_theta", config.rope_theta, above=1.0)
    for name in ("tie_embeddings", "qkv_bias", "out_bias", "mlp_bias", "normalize_expert_weights", "shared_expert"):
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name}={shown(getattr(config, name), 40)} must be True or False")
    if config.n_heads % config.n_kv_heads:
        raise ConfigError(f"n_heads={config.n_heads} must be a multiple of n_kv_heads={config.n_kv_heads}")
    if config.window is not None:
        require_positive_int("window", config.window)
    if (config.experts, config.experts_per_token) != (0, 0):
        for name in ("experts", "experts_per_token"):
            require_positive_int(name, getattr(config, name))
        if config.experts_per_token > config.experts:
            raise ConfigError(f"experts_per_token={config.experts_per_token} must be at most experts={config.experts}")
        if config.activation != "silu":
            raise ConfigError(f"activation={config.activation!r} is not supported with experts; 'silu' is")
        if config.mlp_bias:
            raise ConfigError("mlp_bias=True is not supported with experts; leave it out")
    else:
        for name, usual in (("normalize_expert_weights", True), ("expert_scores", "softmax"), ("shared_expert", False)):
            if getattr(config, name) != usual:
                raise ConfigError(f"{name}={shown(getattr(config, name), 40)} is for models with experts; leave it out")
    if config.expert_scores != "softmax" and not config.normalize_expert_weights:
        raise ConfigError("normalize_expert_weights=False is for expert_scores='softmax'; leave it out")
    for name, known in CHOICES.items():
        if getattr(config, name) not in known:
            raise ConfigError(f"{name}={shown(getattr(config, name), 40)} must be one of {', '.join(map(repr, known))}")
    for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"):
        if getattr(config, name) is not None:
            require_number(name, getattr(config, name), above=0.0)
    require_number("norm_offset", config.norm_offset)
    if not isinstance(config.parts, Parts):
        raise ConfigError(f"parts={shown(config.parts)} must be Parts, for example parts=Parts(norm=my_norm)")
    if config.layers and config.window is not None:
        raise ConfigError(f"window={config.window} is for models without `layers`; set it in each LayerConfig instead")


def check_heads(config: Any) -> None:
    """Raise ConfigError for an invalid head_dim or rotary_dim."""
    require_positive_int("head_dim", config.head_dim)
    if config.head_dim % 2:
        raise ConfigError(f"head_dim={config.head_dim} must be even: rotary embedding rotates pairs of features")
    if config.rotary_dim is not None:
        require_positive_int("rotary_dim", config.rotary_dim)
        if config.rotary_dim % 2 or config.rotary_dim >= config.head_dim:
            raise ConfigError(f"rotary_dim={config.rotary_dim} must be even and below head_dim={config.head_dim}")
