"""What a Llama is: its sizes, checked once, and the sizes that were published."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from llama_jax.errors import ConfigError

RopeScalingKind = Literal["linear", "ntk", "dynamic", "by_parts", "yarn", "llama3", "longrope"]

NEEDED: Any = object()  # stands for the value of a field that must be given
_BY_PARTS = {"original_max_seq_len": NEEDED, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
# What each kind of rope scaling reads besides its factor, and what it takes for a field that is not given. What is computed
# from them is in `ops.rope_scaling.SCALINGS`.
ROPE_FIELDS: dict[str, dict[str, Any]] = {
    "linear": {},
    "ntk": {},
    "dynamic": {"original_max_seq_len": NEEDED},
    "by_parts": _BY_PARTS,
    "yarn": _BY_PARTS | {"attention_factor": None, "mscale": None, "mscale_all_dim": None},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192},
    "longrope": {"original_max_seq_len": NEEDED, "short_factor": NEEDED, "long_factor": NEEDED, "attention_factor": None},
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context that the model was first trained at.

    A field that the kind does not read is None, and giving it is an error. To use a model at four times its context:
    ``replace(config, max_seq_len=4 * n, rope_scaling=RopeScaling("yarn", 4.0, original_max_seq_len=n))``.

    Attributes:
      kind: ``linear`` slows every pair of features by `factor` (position interpolation: Chen et al. 2023, section 3.2).
        ``ntk`` raises theta so that the slowest pair is slowed by `factor` and the fastest not at all ("NTK-aware": Peng et
        al. 2023, section 3.1). ``dynamic`` does that by as much as the length of the sequence asks for (section 3.3, with
        transformers' factor). ``by_parts`` slows the pairs that do not turn often within the original context and leaves
        the others ("NTK-by-parts", section 3.2); ``yarn`` also sharpens the attention (section 3.4). ``llama3`` is a ramp
        over turns and not over pairs (Llama 3.1 reference code, ``apply_scaling``). ``longrope`` divides each pair's
        frequency by a number of its own, of two lists by the length (Ding et al. 2024, section 3).
      factor: how many times the context is longer, at least 1; ``longrope`` reads it for the attention factor alone.
      low_freq_factor, high_freq_factor: turns within the original context: up to the first a pair is slowed, from the second
        on it is left; 1 and 4 where not given. For ``llama3``.
      original_max_seq_len: the context that the model was first trained at; 8,192 for ``llama3`` where not given. All but
        ``linear`` and ``ntk`` need it.
      beta_fast, beta_slow: turns likewise, from the first on and up to the second; 32 and 1 where not given. For
        ``by_parts`` and ``yarn``.
      truncate: whether the ramp between them begins and ends at whole pairs, as it does where not given.
      attention_factor: what cosine and sine are multiplied by, and so the scores by its square; where not given,
        0.1 ln(factor) + 1 for ``yarn``, and sqrt(1 + ln(factor) / ln(original_max_seq_len)) for ``longrope``.
      mscale, mscale_all_dim: weights of the logarithm in a ratio of two such factors, in the place of `attention_factor`
        (DeepSeek-V2's YaRN); both or neither. For ``yarn``.
      short_factor, long_factor: one number for each of the H/2 pairs, for sequences up to the original context and for
        longer ones. For ``longrope``.

    Raises:
      ConfigError: a kind that is not there, a field that it needs, does not read or cannot have.
    """

    kind: RopeScalingKind
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_seq_len: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in ROPE_FIELDS:
            raise ConfigError(f"rope scaling kind={self.kind!r:.40} is not supported; use {', '.join(ROPE_FIELDS)}")
        _require_number("factor", self.factor, minimum=1.0)
        read = ROPE_FIELDS[self.kind]
        for field in fields(self)[2:]:
            name, value = field.name, getattr(self, field.name)
            if name not in read:
                if value is not None:
                    raise ConfigError(f"rope scaling kind={self.kind!r} does not read {name}={value!r:.40}; leave it out")
            elif value is not None:
                object.__setattr__(self, name, _checked(name, value))
            elif read[name] is NEEDED:
                raise ConfigError(f"rope scaling kind={self.kind!r} needs {name}")
            else:
                object.__setattr__(self, name, read[name])
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if low in read and not getattr(self, high) > getattr(self, low):
                raise ConfigError(f"{high}={getattr(self, high)} must be larger than {low}={getattr(self, low)}")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ConfigError(f"mscale={self.mscale} and mscale_all_dim={self.mscale_all_dim} go together; give both")
        if self.mscale is not None and self.attention_factor is not None:
            raise ConfigError(f"attention_factor={self.attention_factor} and mscale={self.mscale} exclude each other")
        if self.kind == "longrope" and self.original_max_seq_len == 1:
            raise ConfigError("original_max_seq_len=1 must be at least 2: longrope divides by its logarithm")

    @property
    def settings(self) -> dict[str, Any]:
        """What the kind reads, by name: the arguments of its function in `ops.rope_scaling.SCALINGS`."""
        return {"factor": self.factor} | {name: getattr(self, name) for name in ROPE_FIELDS[self.kind]}


def _checked(name: str, value: Any) -> Any:
    """The value of a field of a rope scaling, as it is kept; ConfigError where it cannot be."""
    if name == "original_max_seq_len":
        _require_positive_int(name, value)
    elif name == "truncate":
        if not isinstance(value, bool):
            raise ConfigError(f"truncate={value!r:.40} must be True or False")
    elif name in ("short_factor", "long_factor"):
        if not isinstance(value, list | tuple) or not value:
            raise ConfigError(f"{name}={value!r:.40} must be a list of numbers, one for each pair of features")
        for i, number in enumerate(value):
            _require_number(f"{name}[{i}]", number, above=0.0)
        return tuple(value)
    else:
        _require_number(name, value, above=0.0)
    return value


Kind = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral"]
# What the families of models have that Llama has not.
KINDS: dict[Kind, set[str]] = {
    "llama": set(),
    "mistral": {"window"},
    "qwen2": {"qkv_bias"},
    "qwen3": {"qk_norm"},
    "mixtral": {"window", "experts"},
}


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
      head_dim: H; dim / n_heads unless a checkpoint says otherwise. Where it is that, it stays so: with another `dim` or
        `n_heads`, `dataclasses.replace` computes it anew; any other is kept.
      hidden_dim: F, width of the gated feed-forward, which no rule ties to `dim` (`ffn_hidden_dim` is Meta's): give both to
        `dataclasses.replace`.
      norm_eps: added to the mean square in RMSNorm.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how the frequencies are stretched, or None.
      max_seq_len: positions that the model was made for; generation refuses to go beyond. See `RopeScaling` for more.
      tie_embeddings: the output projection is the embedding.
      window: a token sees itself and the window - 1 tokens before it (Mistral: Jiang et al. 2023, section 2); None for all.
      qkv_bias: a bias after the projections of queries, keys and values (Qwen2).
      qk_norm: RMSNorm of every query and key before the rotary embedding (Qwen3).
      experts: E feed-forwards in the place of one, of which a router chooses `experts_per_token` for each token (Mixtral:
        Jiang et al. 2024, section 2); 0 for a single one.

    Raises:
      ConfigError: a size that cannot be; the message names it.
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
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "max_seq_len"):
            _require_positive_int(name, getattr(self, name))
        _require_number("norm_eps", self.norm_eps, above=0.0)
        _require_number("rope_theta", self.rope_theta, above=1.0)
        if self.head_dim == 0 or isinstance(self.head_dim, _Following):
            if self.dim % self.n_heads:
                raise ConfigError(f"dim={self.dim} must be a multiple of n_heads={self.n_heads}, or give head_dim")
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
        _require_positive_int("head_dim", self.head_dim)
        if self.head_dim * self.n_heads == self.dim:
            object.__setattr__(self, "head_dim", _Following(self.head_dim))
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} must be even: rotary embedding turns pairs of features")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}")
        for name in ("tie_embeddings", "qkv_bias", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.window is not None:
            _require_positive_int("window", self.window)
        if (self.experts, self.experts_per_token) != (0, 0):
            for name in ("experts", "experts_per_token"):
                _require_positive_int(name, getattr(self, name))
            if self.experts_per_token > self.experts:
                raise ConfigError(f"experts_per_token={self.experts_per_token} must be at most experts={self.experts}")
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ConfigError(f"rope_scaling={self.rope_scaling!r} must be a RopeScaling or None")
        if self.rope_scaling is not None:
            _check_fits(self.rope_scaling, self.head_dim)

    @property
    def kind(self) -> Kind:
        """The first of the families that has all that this model has; what no Llama has tells them apart.

        Raises:
          ConfigError: none has; such a model can be trained, and no other program could read it.
        """
        here = {name for name in ("window", "qkv_bias", "qk_norm", "experts") if getattr(self, name)}
        for kind, features in KINDS.items():
            if here <= features:
                return kind
        raise ConfigError(f"no family of models has {' and '.join(sorted(here))} together")

    @property
    def queries_per_kv_head(self) -> int:
        """G, the query heads that share one key/value head."""
        return self.n_heads // self.n_kv_heads


def _check_fits(scaling: RopeScaling, head_dim: int) -> None:
    if scaling.kind in ("ntk", "dynamic") and head_dim < 4:
        raise ConfigError(f"head_dim={head_dim} is too small for rope scaling kind={scaling.kind!r}, which needs two pairs")
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        if factors is not None and len(factors) != head_dim // 2:
            raise ConfigError(
                f"{name} has {len(factors)} numbers, head_dim={head_dim} needs {head_dim // 2}, one for each pair"
            )


def _require_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ConfigError(f"{name}={value!r:.40} must be a positive whole number below 2**31")


def _require_number(name: str, value: object, *, minimum: float = -math.inf, above: float = -math.inf) -> None:
    bound = f"at least {minimum:g}" if minimum > -math.inf else f"above {above:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value < 1e30 or value <= above:
        raise ConfigError(f"{name}={value!r:.40} must be a finite number {bound}")


def ffn_hidden_dim(dim: int, *, multiple_of: int = 256, ffn_dim_multiplier: float | None = None) -> int:
    """Meta's rule for F: two thirds of 4 * dim, times a multiplier, rounded up to a multiple (Llama 2 reference code).

    The truncation to whole numbers after each step is part of the rule: published sizes depend on it.
    """
    hidden = int(2 * (4 * dim) / 3)
    if ffn_dim_multiplier is not None:
        hidden = int(ffn_dim_multiplier * hidden)
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


def _llama1(dim: int, n_layers: int, n_heads: int, norm_eps: float = 1e-6) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32_000,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        hidden_dim=ffn_hidden_dim(dim),
        max_seq_len=2048,
        norm_eps=norm_eps,
        rope_theta=10_000.0,
        tie_embeddings=False,
    )


def _llama2(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, hidden_dim: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32_000,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        hidden_dim=hidden_dim,
        max_seq_len=4096,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_embeddings=False,
    )


def _codellama(base: LlamaConfig, vocab_size: int) -> LlamaConfig:
    return replace(base, vocab_size=vocab_size, max_seq_len=16_384, rope_theta=1_000_000.0)


def _llama3(
    dim: int,
    n_layers: int,
    n_heads: int,
    hidden_dim: int,
    *,
    rope_factor: float | None = None,
    tie_embeddings: bool = False,
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        hidden_dim=hidden_dim,
        max_seq_len=8192 if rope_factor is None else 131_072,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        tie_embeddings=tie_embeddings,
        rope_scaling=None if rope_factor is None else RopeScaling("llama3", rope_factor),
    )


def _qwen2(
    dim: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    hidden_dim: int,
    *,
    max_seq_len: int = 131_072,
    norm_eps: float = 1e-5,
    small: bool = False,
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=151_936 if small else 152_064,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        hidden_dim=hidden_dim,
        max_seq_len=max_seq_len,
        norm_eps=1e-6 if small else norm_eps,
        rope_theta=1_000_000.0,
        tie_embeddings=small,
        qkv_bias=True,
    )


def _qwen3(dim: int, n_layers: int, n_heads: int, hidden_dim: int, *, tie_embeddings: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=151_936,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=128,
        hidden_dim=hidden_dim,
        max_seq_len=40_960,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_embeddings=tie_embeddings,
        qk_norm=True,
    )


_MISTRAL = LlamaConfig(
    vocab_size=32_000,
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    hidden_dim=14_336,
    max_seq_len=32_768,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_embeddings=False,
    window=4096,
)
_MIXTRAL = replace(_MISTRAL, window=None, rope_theta=1_000_000.0, experts=8, experts_per_token=2)


def _stories(dim: int, n_layers: int, n_heads: int, max_seq_len: int, n_kv_heads: int, vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        # llama2.c rounds to 32 in its training script; the 260K model was made with 4.
        hidden_dim=ffn_hidden_dim(dim, multiple_of=32 if dim > 64 else 4),
        max_seq_len=max_seq_len,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_embeddings=True,
    )


# Sizes as published: Llama 1 (Touvron et al. 2023a, table 2), Llama 2 (2023b, table 1), Llama 3 (Grattafiori et al. 2024,
# table 3) with the params.json of each release; TinyLlama (Zhang et al. 2024, table 1); OpenLLaMA 3B; llama2.c's stories. Of
# Mistral, Mixtral, Qwen2.5 and Qwen3 the config.json of each base model.
PRESETS: dict[str, LlamaConfig] = {
    "llama-7b": _llama1(4096, 32, 32),
    "llama-13b": _llama1(5120, 40, 40),
    "llama-30b": _llama1(6656, 60, 52),
    "llama-65b": _llama1(8192, 80, 64, norm_eps=1e-5),
    "llama-2-7b": _llama2(4096, 32, 32, 32, ffn_hidden_dim(4096)),
    "llama-2-13b": _llama2(5120, 40, 40, 40, ffn_hidden_dim(5120)),
    "llama-2-70b": _llama2(8192, 80, 64, 8, ffn_hidden_dim(8192, multiple_of=4096, ffn_dim_multiplier=1.3)),
    # Code Llama (Roziere et al. 2023, section 2): Llama 2 trained on with theta 1e6 at 16,384 tokens.
    "codellama-7b": _codellama(_llama2(4096, 32, 32, 32, ffn_hidden_dim(4096)), 32_016),
    "codellama-13b": _codellama(_llama2(5120, 40, 40, 40, ffn_hidden_dim(5120)), 32_016),
    "codellama-34b": _codellama(_llama2(8192, 48, 64, 8, ffn_hidden_dim(8192)), 32_000),
    "codellama-70b": _codellama(
        _llama2(8192, 80, 64, 8, ffn_hidden_dim(8192, multiple_of=4096, ffn_dim_multiplier=1.3)), 32_016
    ),
    "llama-3-8b": _llama3(4096, 32, 32, ffn_hidden_dim(4096, multiple_of=1024, ffn_dim_multiplier=1.3)),
    "llama-3-70b": _llama3(8192, 80, 64, ffn_hidden_dim(8192, multiple_of=4096, ffn_dim_multiplier=1.3)),
    "llama-3.1-8b": _llama3(4096, 32, 32, 14_336, rope_factor=8.0),
    "llama-3.1-70b": _llama3(8192, 80, 64, 28_672, rope_factor=8.0),
    "llama-3.1-405b": _llama3(16_384, 126, 128, 53_248, rope_factor=8.0),
    "llama-3.2-1b": _llama3(2048, 16, 32, 8192, rope_factor=32.0, tie_embeddings=True),
    "llama-3.2-3b": _llama3(3072, 28, 24, 8192, rope_factor=32.0, tie_embeddings=True),
    "llama-3.3-70b": _llama3(8192, 80, 64, 28_672, rope_factor=8.0),
    "tinyllama-1.1b": LlamaConfig(
        vocab_size=32_000,
        dim=2048,
        n_layers=22,
        n_heads=32,
        n_kv_heads=4,
        hidden_dim=5632,
        max_seq_len=2048,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_embeddings=False,
    ),
    # 32 heads of 100 features: the published size whose head_dim is not a power of two.
    "open-llama-3b": LlamaConfig(
        vocab_size=32_000,
        dim=3200,
        n_layers=26,
        n_heads=32,
        n_kv_heads=32,
        hidden_dim=8640,
        max_seq_len=2048,
        norm_eps=1e-6,
        rope_theta=10_000.0,
        tie_embeddings=False,
    ),
    "mistral-7b": _MISTRAL,
    "mistral-7b-v0.3": replace(_MISTRAL, vocab_size=32_768, window=None, rope_theta=1_000_000.0),
    "mixtral-8x7b": _MIXTRAL,
    "mixtral-8x22b": replace(_MIXTRAL, dim=6144, n_layers=56, n_heads=48, hidden_dim=16_384, max_seq_len=65_536),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, max_seq_len=32_768, small=True),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, small=True),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11_008, max_seq_len=32_768, small=True),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18_944, norm_eps=1e-6),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13_824),
    "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 27_648),
    "qwen2.5-72b": _qwen2(8192, 80, 64, 8, 29_568),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tie_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tie_embeddings=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tie_embeddings=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17_408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600),
    "stories-260k": _stories(64, 5, 8, 512, n_kv_heads=4, vocab_size=512),
    "stories-15m": _stories(288, 6, 6, 256, n_kv_heads=6, vocab_size=32_000),
    "stories-42m": _stories(512, 8, 8, 1024, n_kv_heads=8, vocab_size=32_000),
    "stories-110m": _stories(768, 12, 12, 1024, n_kv_heads=12, vocab_size=32_000),
}


def preset(name: str) -> LlamaConfig:
    """The published size of that name.

    Raises:
      ConfigError: no such name; the message lists those there are.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; the presets are {', '.join(PRESETS)}")
    return PRESETS[name]
