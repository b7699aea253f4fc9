"""The configuration of a Llama: its sizes, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from llama_jax.config.checks import check_heads, check_sizes
from llama_jax.config.kinds import Kind, kind_of
from llama_jax.config.rope import RopeScaling
from llama_jax.errors import ConfigError


class _Following(int):
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
        give both to `dataclasses.replace`.
      norm_eps: added to the mean square in RMSNorm.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how the frequencies are stretched, or None.
      max_seq_len: positions that the model was made for; generation refuses to go beyond. See `RopeScaling` for more.
      tie_embeddings: the output projection is the embedding.
      window: a token sees itself and the window - 1 tokens before it (Mistral: Jiang et al. 2023, section 2); None for all.
      qkv_bias: a bias after the projections of queries, keys and values (Qwen2).
      qk_norm: RMSNorm of every query and key before the rotary embedding (Qwen3).
      experts: E feed-forwards in place of one; a router chooses `experts_per_token` of them for each token (Mixtral: Jiang
        et al. 2024, section 2); 0 for a single one.

    Raises:
      ConfigError: an impossible size; the message names it.
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
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.head_dim == 0 or isinstance(self.head_dim, _Following):
            if self.dim % self.n_heads:
                raise ConfigError(f"dim={self.dim} must be a multiple of n_heads={self.n_heads}, or give head_dim")
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        check_heads(self)
        if self.head_dim * self.n_heads == self.dim:
            object.__setattr__(self, "head_dim", _Following(self.head_dim))

    @property
    def kind(self) -> Kind:
        """The first of the families that has everything that this model has beyond Llama.

        Raises:
          ConfigError: none has; such a model can be trained, and no other program could read it.
        """
        return kind_of(self)

    @property
    def queries_per_kv_head(self) -> int:
        """G, the query heads that share one key/value head."""
        return self.n_heads // self.n_kv_heads
