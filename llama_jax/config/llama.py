"""The configuration of a Llama: its sizes, checked once, and what differs from layer to layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llama_jax.config.families import Kind, kind_of
from llama_jax.config.parts import Parts
from llama_jax.config.rope import RopeScaling, check_fits
from llama_jax.config.validation import check_heads, check_sizes, require_number, require_positive_int
from llama_jax.errors import ConfigError, shown


@dataclass(frozen=True)
class LayerConfig:
    """The attention of one layer in a model whose layers are not all alike.

    Attributes:
      window: a token attends to itself and the window - 1 tokens before it; None: no window.
      rope: "model": RoPE with the theta and scaling of the model; "unscaled": RoPE without scaling, with `rope_theta`
        (layers with a window in Gemma 3 and OLMo 3); "none": no position embedding (SmolLM3; NoPE: Yang et al. 2025,
        section 3).
      rope_theta: base of the frequencies if `rope` is "unscaled"; None for the model's.
      chunk: size of the attention chunks (Llama 4): a token attends only within its chunk; None: no chunks.

    Raises:
      ConfigError: an invalid value; the message names it.
    """

    window: int | None = None
    rope: Literal["model", "unscaled", "none"] = "model"
    rope_theta: float | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("chunk", self.chunk)):
            if value is not None:
                require_positive_int(name, value)
        if self.rope not in ("model", "unscaled", "none"):
            raise ConfigError(f"rope={shown(self.rope, 40)} of a layer must be 'model', 'unscaled' or 'none'")
        if self.rope_theta is not None:
            if self.rope != "unscaled":
                raise ConfigError(f"rope_theta={shown(self.rope_theta, 40)} of a layer needs rope='unscaled'")
            require_number("rope_theta", self.rope_theta, above=1.0)


@dataclass(frozen=True)
class QueryScaling:
    """Temperature tuning of attention by position: queries times 1 + beta ln(1 + floor((position + offset) / context)).

    Source: Llama 4, in its layers without RoPE, with an offset of 1; Ministral 3, in all layers.

    Attributes:
      beta: the weight of the logarithm.
      context: tokens before the first step, the context that the model was first trained at.
      offset: added to the position.
      rotated: whether queries that are rotated are scaled too; else only those of layers without a position embedding.

    Raises:
      ConfigError: an invalid value; the message names it.
    """

    beta: float
    context: int
    offset: int = 0
    rotated: bool = True

    def __post_init__(self) -> None:
        require_number("beta", self.beta, above=0.0)
        require_positive_int("context", self.context)
        if type(self.offset) is not int or self.offset < 0:
            raise ConfigError(f"offset={shown(self.offset, 40)} of a query scaling must be an integer of at least 0")
        if not isinstance(self.rotated, bool):
            raise ConfigError(f"rotated={shown(self.rotated, 40)} of a query scaling must be True or False")


def period(layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """The shortest prefix that generates `layers` when repeated (the last repetition may be partial) and has no shorter
    period: (a, b, a, a) is its own period."""
    n = len(layers)
    for p in range(1, n):
        if all(layers[i] == layers[i % p] for i in range(n)) and len(period(layers[:p])) == p:
            return layers[:p]
    return layers


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
      head_dim: H; dim / n_heads unless given. While it equals that, `dataclasses.replace` with another `dim` or `n_heads`
        computes it anew; any other value is kept.
      hidden_dim: F, width of the gated feed-forward, which does not follow from `dim` (`ffn_hidden_dim` is Meta's rule):
        pass both to `dataclasses.replace`.
      norm_eps: added to the mean square in RMSNorm.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how the frequencies are stretched, or None.
      max_seq_len: positions that the model was made for; generation refuses to go beyond. See `RopeScaling` for more.
      tie_embeddings: the output projection is the embedding.
      window: as in `LayerConfig`, for all layers (Mistral: Jiang et al. 2023, section 2).
      qkv_bias: a bias after the projections of queries, keys and values (Qwen2).
      layers: the period of layers that differ in their attention, repeated over the depth: layer i is
        ``layers[i % len(layers)]``. Empty if all layers are alike; otherwise `window` is None.
      qk_norm: RMSNorm of queries and keys before the rotary embedding: of each head ("head", Qwen3), or of all heads
        together ("all", OLMo 2); or of each head after it, without weights, in layers that have one ("l2", Llama 4).
      norm: where the RMSNorms of a layer are: "pre", before attention and feed-forward; "post", after them and before the
        residual sum (OLMo 2: 2025, section 3.2); "both" (Gemma 3).
      norm_offset: added to the weights of all RMSNorms (1 in Gemma, whose files hold their distance from 1).
      activation: of the gate: "silu", or "gelu" by the tanh approximation (Gemma).
      rotary_dim: features of each head that are rotated, the first ones (Phi-4-mini); head_dim unless given.
      query_scaling: queries are multiplied by a factor that grows with the position (Ministral 3, Llama 4), or None.
      embedding_multiplier, residual_multiplier, attention_multiplier, logits_scaling: factors of the embedding, of what
        attention and feed-forward add, of the scores (1 / sqrt(head_dim) unless given), and the divisor of the logits
        (Granite 3; Gemma's embedding by sqrt(dim)).
      parts: your own functions in place of parts of every layer, see `Parts`. Files hold their names alone.
      experts: E feed-forwards in place of one; a router chooses `experts_per_token` of them for each token (Mixtral: Jiang
        et al. 2024, section 2); 0 for a single one.
      normalize_expert_weights: the weights of the chosen experts sum to one; else they are softmax probabilities over all E
        experts, not renormalized (Qwen3-MoE, `norm_topk_prob`). For softmax scores.
      expert_scores: "softmax": the weights of the experts' outputs; "sigmoid": each expert's input is multiplied by the
        sigmoid of its score (Llama 4).
      shared_expert: one more feed-forward of the same width, for every token, added to those chosen (Llama 4).

    Raises:
      ConfigError: an invalid size; the message names it.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    max_seq_len: int
    norm_eps: float
    rope_theta: float
    tie_embeddings: bool
    head_dim: int = 0  # 0 stands for dim // n_heads and is replaced below, so that a reader never sees it
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    qkv_bias: bool = False
    qk_norm: Literal["head", "all", "l2"] | None = None
    experts: int = 0
    experts_per_token: int = 0
    normalize_expert_weights: bool = True
    expert_scores: Literal["softmax", "sigmoid"] = "softmax"
    shared_expert: bool = False
    layers: tuple[LayerConfig, ...] = ()
    norm: Literal["pre", "post", "both"] = "pre"
    norm_offset: float = 0.0
    activation: Literal["silu", "gelu"] = "silu"
    rotary_dim: int | None = None
    query_scaling: QueryScaling | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0
    parts: Parts = Parts()

    def __post_init__(self) -> None:
        for name, kind in (("rope_scaling", RopeScaling), ("query_scaling", QueryScaling)):
            if not isinstance(getattr(self, name), kind | None):
                raise ConfigError(f"{name}={shown(getattr(self, name))} must be a {kind.__name__} or None")
        if not isinstance(self.layers, tuple) or not all(isinstance(layer, LayerConfig) for layer in self.layers):
            raise ConfigError(f"layers={shown(self.layers)} must be a tuple of LayerConfig")
        check_sizes(self)
        if self.head_dim == 0 or isinstance(self.head_dim, _DefaultHeadDim):
            if self.dim % self.n_heads:
                raise ConfigError(f"dim={self.dim} must be a multiple of n_heads={self.n_heads}, or set head_dim")
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        check_heads(self)
        if self.rope_scaling is not None:
            check_fits(self.rope_scaling, self.rope_dim)
        if self.head_dim * self.n_heads == self.dim:
            object.__setattr__(self, "head_dim", _DefaultHeadDim(self.head_dim))
        if self.layers:
            layers = period(self.layers)
            alike = layers == (LayerConfig(layers[0].window),)
            object.__setattr__(self, "layers", () if alike else layers)
            object.__setattr__(self, "window", layers[0].window if alike else None)

    @property
    def kind(self) -> Kind:
        """The first family whose features include those of this configuration.

        Raises:
          ConfigError: there is none; such a model can be trained, but no other program could read it.
        """
        return kind_of(self)

    def layer(self, index: int) -> LayerConfig:
        """The attention settings of layer `index`."""
        return self.layers[index % len(self.layers)] if self.layers else LayerConfig(self.window)

    @property
    def layer_kinds(self) -> tuple[LayerConfig, ...]:
        """The distinct layers, by first appearance."""
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
