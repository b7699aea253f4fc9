"""The configuration of a Llama: its sizes, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from llama_jax.config.parts import LayerConfig, Parts, QueryScaling, RopeTheta, period
from llama_jax.config.rope import RopeScaling, check_fits, unscaled_length
from llama_jax.errors import ConfigError
from llama_jax.settings import Bounds, NonNegativeInt, PositiveFloat, PositiveInt, check_fields

MAX_SUGGESTED_FACTOR = 64  # of a RoPE scaling in messages; models were trained with up to 40


class _DefaultHeadDim(int):
    """A head_dim that is dim / n_heads: `dataclasses.replace` with another dim or n_heads computes it anew."""


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes and constants of one Llama: frozen, hashable (a static argument of ``jax.jit``) and validated.

    Attributes:
      vocab_size: V, rows of the embedding.
      dim: D, width of the residual stream.
      n_layers: L.
      n_heads: N, query heads.
      n_kv_heads: K, key/value heads; N = K * G. K = N is multi-head, K = 1 multi-query attention.
      head_dim: H; dim / n_heads by default, which `dataclasses.replace` with another `dim` or `n_heads` computes anew. A
        value that differs from dim / n_heads is kept.
      hidden_dim: F, width of the gated feed-forward. It is not derived from `dim` (`ffn_hidden_dim` is Meta's rule): pass
        both to `dataclasses.replace`.
      norm_eps: added to the mean square in RMSNorm.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how the frequencies are scaled for a longer context, or None.
      max_seq_len: context length of the model, with its `rope_scaling`; generation raises beyond it.
      tie_embeddings: the embedding is also the output projection.
      window: as in `LayerConfig`, for all layers (Mistral: Jiang et al. 2023, section 2).
      qkv_bias: a bias after the projections of queries, keys and values (Qwen2).
      out_bias: a bias after the output projection of attention; with `qkv_bias`, the `attention_bias` of transformers.
      mlp_bias: biases after the projections of the feed-forward; for models without experts.
      layers: if layers differ in their attention, the period that is repeated over the depth: layer i is
        ``layers[i % len(layers)]``, and `window` is None. Empty if all layers are the same.
      qk_norm: RMSNorm of queries and keys: "head", of each head before RoPE (Qwen3); "all", of all heads together before
        RoPE (OLMo 2); "l2", of each head after RoPE, without weights, in layers with RoPE (Llama 4); None: no norm.
      norm: position of a layer's RMSNorms: "pre", before attention and feed-forward; "post", after them and before the
        residual sum (OLMo 2: 2025, section 3.2); "both" (Gemma 3).
      norm_offset: added to the weights of all RMSNorms (1 in Gemma, whose files store weight - 1).
      activation: applied to the gate: "silu", or "gelu" by the tanh approximation (Gemma).
      rotary_dim: the first `rotary_dim` features of each head are rotated (Phi-4-mini); head_dim by default.
      query_scaling: queries are multiplied by a factor that grows with the position (Ministral 3, Llama 4), or None.
      embedding_multiplier, residual_multiplier, attention_multiplier: factors of the embeddings (sqrt(dim) in Gemma), of the
        outputs of attention and feed-forward, and of the attention scores (1 / sqrt(head_dim) by default) (Granite 3).
      logits_scaling: divisor of the logits (Granite 3).
      parts: custom functions that replace parts of every layer, see `Parts`. Files hold only their names.
      experts: E, the number of experts, feed-forwards among which a router chooses `experts_per_token` for each token
        (Mixtral: Jiang et al. 2024, section 2); 0 for a dense feed-forward.
      normalize_expert_weights: the weights of the chosen experts sum to one; else they are softmax probabilities over all E
        experts, not renormalized (Qwen3-MoE, `norm_topk_prob`). Used with "softmax" scores only.
      expert_scores: "softmax": outputs of experts are weighted by their softmax scores; "sigmoid": inputs of experts are
        multiplied by the sigmoid of their scores (Llama 4).
      shared_expert: one more expert of the same width, whose output is added for every token (Llama 4).
      unscaled_max_seq_len: context length without the extension by `rope_scaling`, if the model's file states it (Qwen's
        YaRN settings, Vicuna 16k): servers and evaluations plan for it by default, see `default_context`. None for a model
        without an extension, or trained with it; it becomes None if it is not below `max_seq_len`.

    Raises:
      ConfigError: an invalid size; the message names it.
    """

    vocab_size: PositiveInt
    dim: PositiveInt
    n_layers: PositiveInt
    n_heads: PositiveInt
    n_kv_heads: PositiveInt
    hidden_dim: PositiveInt
    max_seq_len: PositiveInt
    norm_eps: PositiveFloat
    rope_theta: RopeTheta
    tie_embeddings: bool
    head_dim: NonNegativeInt = 0  # replaced by dim // n_heads in __post_init__
    rope_scaling: RopeScaling | None = None
    window: PositiveInt | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "all", "l2"] | None = None
    experts: NonNegativeInt = 0
    experts_per_token: NonNegativeInt = 0
    normalize_expert_weights: bool = True
    expert_scores: Literal["softmax", "sigmoid"] = "softmax"
    shared_expert: bool = False
    layers: tuple[LayerConfig, ...] = ()
    norm: Literal["pre", "post", "both"] = "pre"
    norm_offset: Annotated[float, Bounds()] = 0.0
    activation: Literal["silu", "gelu"] = "silu"
    rotary_dim: PositiveInt | None = None
    query_scaling: QueryScaling | None = None
    embedding_multiplier: PositiveFloat = 1.0
    residual_multiplier: PositiveFloat = 1.0
    attention_multiplier: PositiveFloat | None = None
    logits_scaling: PositiveFloat = 1.0
    parts: Parts = Parts()
    unscaled_max_seq_len: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        self._check_features()
        if self.head_dim == 0 or isinstance(self.head_dim, _DefaultHeadDim):
            if self.dim % self.n_heads:
                raise ConfigError(f"dim={self.dim} must be a multiple of n_heads={self.n_heads}, or set head_dim")
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        self._check_heads()
        if self.rope_scaling is not None:
            check_fits(self.rope_scaling, self.rope_dim)
        if self.head_dim * self.n_heads == self.dim:
            object.__setattr__(self, "head_dim", _DefaultHeadDim(self.head_dim))
        if self.layers:
            layers = period(self.layers)
            uniform = layers == (LayerConfig(layers[0].window),)
            object.__setattr__(self, "layers", () if uniform else layers)
            object.__setattr__(self, "window", layers[0].window if uniform else None)
        if self.rope_scaling is None or (self.unscaled_max_seq_len or 0) >= self.max_seq_len:
            object.__setattr__(self, "unscaled_max_seq_len", None)

    def _check_features(self) -> None:
        """Raise ConfigError for sizes and features that exclude each other."""
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}")
        if self.layers and self.window is not None:
            raise ConfigError(f"window={self.window} is for models without `layers`; set it in each LayerConfig instead")
        if self.expert_scores != "softmax" and not self.normalize_expert_weights:
            raise ConfigError("normalize_expert_weights=False is for expert_scores='softmax'; leave it out")
        if not self.experts:
            for name in ("experts_per_token", "normalize_expert_weights", "expert_scores", "shared_expert"):
                if getattr(self, name) != getattr(LlamaConfig, name):
                    raise ConfigError(f"{name}={getattr(self, name)!r} is for models with experts; leave it out")
            return
        if not 1 <= self.experts_per_token <= self.experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} must be at least 1 and at most experts={self.experts}"
            )
        if self.activation != "silu" or self.mlp_bias:
            raise ConfigError("models with experts have activation='silu' and mlp_bias=False; leave both out")

    def _check_heads(self) -> None:
        """Raise ConfigError for an invalid head_dim or rotary_dim."""
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: rotary embedding rotates pairs of features")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or self.rotary_dim >= self.head_dim):
            raise ConfigError(f"rotary_dim={self.rotary_dim} must be even and below head_dim={self.head_dim}")

    @property
    def model_type(self) -> str:
        """The `model_type` in transformers of the first family whose features include those of this configuration.

        Raises:
          ConfigError: no family has these features; such a model can be trained, but not saved for other libraries.
        """
        from llama_jax.config.families import model_type_of  # what only computes needs no file formats

        return model_type_of(self)

    @property
    def default_context(self) -> int:
        """The context length to plan for by default: `max_seq_len` without an extension that the model was not trained
        with."""
        return self.unscaled_max_seq_len or self.max_seq_len

    @property
    def base_context(self) -> int:
        """The context length that another `rope_scaling` extends: the original one of the model's own."""
        scaling = self.rope_scaling
        if scaling is None:
            return self.max_seq_len
        original = scaling.original_max_seq_len or self.unscaled_max_seq_len
        return original or unscaled_length(self.max_seq_len, scaling.factor)

    def layer(self, index: int) -> LayerConfig:
        """The attention settings of layer `index`."""
        return self.layers[index % len(self.layers)] if self.layers else LayerConfig(self.window)

    @property
    def layer_kinds(self) -> tuple[LayerConfig, ...]:
        """The distinct configurations of layers, in order of first appearance."""
        return tuple(dict.fromkeys(map(self.layer, range(min(self.n_layers, max(len(self.layers), 1))))))

    @property
    def rope_dim(self) -> int:
        """The number of features of each head that the rotary embedding rotates."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def score_scale(self) -> float:
        """The scale of attention scores, 1 / sqrt(H) by default."""
        return self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier

    @property
    def queries_per_kv_head(self) -> int:
        """G, the query heads that share one key/value head."""
        return self.n_heads // self.n_kv_heads


def suggest_context(config: LlamaConfig, tokens: int) -> str:
    """The end of a message about more tokens than the context: how to set a longer one, within the model's context or with
    another RoPE scaling, if one might help."""
    if tokens <= config.max_seq_len:
        return f"; or set a longer context, at most {config.max_seq_len} (--context, EngineOptions(context=...))"
    base = config.base_context
    factor = math.ceil(tokens / base)
    if factor > MAX_SUGGESTED_FACTOR:
        return ""
    return (
        f"; or extend the context by RoPE scaling: --rope yarn:{factor}, or in the configuration max_seq_len={factor * base}"
        f" and rope_scaling=RopeScaling('yarn', {factor}, original_max_seq_len={base})"
    )
