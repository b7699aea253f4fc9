"""The configurations of published models."""

from __future__ import annotations

from typing import Any

from llama_jax.config.llama import LlamaConfig
from llama_jax.config.parts import LayerConfig, QueryScaling
from llama_jax.config.rope import RopeScaling
from llama_jax.errors import ConfigError

# The fields on which the shapes of the parameters depend.
SHAPE_FIELDS = (
    "vocab_size",
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "hidden_dim",
    "qkv_bias",
    "out_bias",
    "mlp_bias",
    "qk_norm",
    "norm",
    "experts",
    "shared_expert",
)


def ffn_hidden_dim(dim: int, *, multiple_of: int = 256, ffn_dim_multiplier: float | None = None) -> int:
    """Meta's rule for F: two thirds of 4 * dim, times a multiplier, rounded up to a multiple (Llama 2 reference code).

    The truncation to integers after each step is part of the rule: published sizes depend on it.
    """
    hidden = int(2 * (4 * dim) / 3)
    if ffn_dim_multiplier is not None:
        hidden = int(ffn_dim_multiplier * hidden)
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


def _sized(
    family: dict[str, Any], dim: int, n_layers: int, n_heads: int, n_kv_heads: int, hidden_dim: int, **more: Any
) -> LlamaConfig:
    """The configuration of one model: its sizes, the settings of its family, and further ones of this model."""
    sizes = {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "hidden_dim": hidden_dim}
    return LlamaConfig(**_LLAMA2 | family | sizes | more)


def _llama1(dim: int, n_layers: int, n_heads: int, **more: Any) -> LlamaConfig:
    return _sized({"max_seq_len": 2048, "norm_eps": 1e-6}, dim, n_layers, n_heads, n_heads, ffn_hidden_dim(dim), **more)


def _llama3(dim: int, n_layers: int, n_heads: int, hidden_dim: int, factor: float | None = None, **more: Any) -> LlamaConfig:
    family: dict[str, Any] = {"vocab_size": 128_256, "rope_theta": 500_000.0, "max_seq_len": 8192}
    if factor is not None:
        family |= {"max_seq_len": 131_072, "rope_scaling": RopeScaling("llama3", factor)}
    return _sized(family, dim, n_layers, n_heads, 8, hidden_dim, **more)


def _gemma3(*sizes: int, window: int, scaled: bool = True, **more: Any) -> LlamaConfig:
    layers = (*[LayerConfig(window, "unscaled", 10_000.0)] * 5, LayerConfig())
    long = {"max_seq_len": 131_072, "vocab_size": 262_208, "rope_scaling": RopeScaling("linear", 8.0)} if scaled else {}
    return _sized(_GEMMA3 | long, *sizes, layers=layers, embedding_multiplier=float(sizes[0]) ** 0.5, **more)


def _stories(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, max_seq_len: int, **more: Any) -> LlamaConfig:
    # llama2.c rounds to 32 in its training script; the 260K model was made with 4.
    hidden_dim = ffn_hidden_dim(dim, multiple_of=32 if dim > 64 else 4)
    family = {"max_seq_len": max_seq_len, "tie_embeddings": True}
    return _sized(family, dim, n_layers, n_heads, n_kv_heads, hidden_dim, **more)


_LLAMA2 = dict(vocab_size=32_000, max_seq_len=4096, norm_eps=1e-5, rope_theta=10_000.0, tie_embeddings=False)
_CODELLAMA = dict(vocab_size=32_016, max_seq_len=16_384, rope_theta=1_000_000.0)
_MISTRAL = dict(max_seq_len=32_768)
_MIXTRAL = dict(max_seq_len=32_768, rope_theta=1_000_000.0, experts=8, experts_per_token=2)
_QWEN2 = dict(max_seq_len=131_072, vocab_size=152_064, rope_theta=1_000_000.0, qkv_bias=True)
_SMALL_QWEN2 = _QWEN2 | dict(norm_eps=1e-6, vocab_size=151_936, tie_embeddings=True)
_QWEN3 = dict(vocab_size=151_936, head_dim=128, max_seq_len=40_960, norm_eps=1e-6, rope_theta=1_000_000.0, qk_norm="head")
_QWEN3_MOE = _QWEN3 | dict(experts=128, experts_per_token=8)
_SMOLLM2 = dict(max_seq_len=8192, vocab_size=49_152, rope_theta=100_000.0, tie_embeddings=True)
_MINISTRAL3 = dict(
    max_seq_len=262_144,
    vocab_size=131_072,
    head_dim=128,
    rope_theta=1_000_000.0,
    rope_scaling=RopeScaling("yarn", 16.0, original_max_seq_len=16_384, mscale=1.0, mscale_all_dim=1.0),
    query_scaling=QueryScaling(0.1, 16_384),
)
_OLMO2 = dict(norm_eps=1e-6, vocab_size=100_352, rope_theta=500_000.0, norm="post", qk_norm="all")
_OLMO3 = _OLMO2 | dict(
    vocab_size=100_278,
    max_seq_len=65_536,
    layers=(*[LayerConfig(4096, "unscaled")] * 3, LayerConfig()),
    rope_scaling=RopeScaling("yarn", 8.0, original_max_seq_len=8192, attention_factor=1.2079441541679836),
)
_GEMMA3 = dict(
    max_seq_len=32_768,
    norm_eps=1e-6,
    vocab_size=262_144,
    head_dim=256,
    rope_theta=1_000_000.0,
    norm="both",
    norm_offset=1.0,
    qk_norm="head",
    activation="gelu",
    tie_embeddings=True,
)
_GRANITE = dict(
    max_seq_len=131_072,
    vocab_size=49_159,
    rope_theta=10_000_000.0,
    tie_embeddings=True,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
)

# Sizes as published: Llama 1 (Touvron et al. 2023a, table 2), Llama 2 (2023b, table 1), Llama 3 (Grattafiori et al. 2024,
# table 3) with the params.json of each release; TinyLlama (Zhang et al. 2024, table 1); OpenLLaMA 3B; llama2.c's stories.
# All others: the config.json of each base model; for multimodal models, its text part.
PRESETS: dict[str, LlamaConfig] = {
    "llama-7b": _llama1(4096, 32, 32),
    "llama-13b": _llama1(5120, 40, 40),
    "llama-30b": _llama1(6656, 60, 52),
    "llama-65b": _llama1(8192, 80, 64, norm_eps=1e-5),
    "llama-2-7b": _sized({}, 4096, 32, 32, 32, ffn_hidden_dim(4096)),
    "llama-2-13b": _sized({}, 5120, 40, 40, 40, ffn_hidden_dim(5120)),
    "llama-2-70b": _sized({}, 8192, 80, 64, 8, ffn_hidden_dim(8192, multiple_of=4096, ffn_dim_multiplier=1.3)),
    # Code Llama (Roziere et al. 2023, section 2): Llama 2 trained on with theta 1e6 at 16,384 tokens.
    "codellama-7b": _sized(_CODELLAMA, 4096, 32, 32, 32, ffn_hidden_dim(4096)),
    "codellama-13b": _sized(_CODELLAMA, 5120, 40, 40, 40, ffn_hidden_dim(5120)),
    "codellama-34b": _sized(_CODELLAMA, 8192, 48, 64, 8, ffn_hidden_dim(8192), vocab_size=32_000),
    "codellama-70b": _sized(_CODELLAMA, 8192, 80, 64, 8, ffn_hidden_dim(8192, multiple_of=4096, ffn_dim_multiplier=1.3)),
    "llama-3-8b": _llama3(4096, 32, 32, ffn_hidden_dim(4096, multiple_of=1024, ffn_dim_multiplier=1.3)),
    "llama-3-70b": _llama3(8192, 80, 64, ffn_hidden_dim(8192, multiple_of=4096, ffn_dim_multiplier=1.3)),
    "llama-3.1-8b": _llama3(4096, 32, 32, 14_336, 8.0),
    "llama-3.1-70b": _llama3(8192, 80, 64, 28_672, 8.0),
    "llama-3.1-405b": _llama3(16_384, 126, 128, 53_248, 8.0),
    "llama-3.2-1b": _llama3(2048, 16, 32, 8192, 32.0, tie_embeddings=True),
    "llama-3.2-3b": _llama3(3072, 28, 24, 8192, 32.0, tie_embeddings=True),
    "llama-3.3-70b": _llama3(8192, 80, 64, 28_672, 8.0),
    "tinyllama-1.1b": _sized({}, 2048, 22, 32, 4, 5632, max_seq_len=2048),
    # 32 heads of 100 features: head_dim is not a power of two.
    "open-llama-3b": _sized({}, 3200, 26, 32, 32, 8640, max_seq_len=2048, norm_eps=1e-6),
    "mistral-7b": _sized(_MISTRAL, 4096, 32, 32, 8, 14_336, window=4096),
    "mistral-7b-v0.3": _sized(_MISTRAL, 4096, 32, 32, 8, 14_336, vocab_size=32_768, rope_theta=1_000_000.0),
    "mixtral-8x7b": _sized(_MIXTRAL, 4096, 32, 32, 8, 14_336),
    "mixtral-8x22b": _sized(_MIXTRAL, 6144, 56, 48, 8, 16_384, max_seq_len=65_536),
    "qwen2.5-0.5b": _sized(_SMALL_QWEN2, 896, 24, 14, 2, 4864, max_seq_len=32_768),
    "qwen2.5-1.5b": _sized(_SMALL_QWEN2, 1536, 28, 12, 2, 8960, max_seq_len=131_072),
    "qwen2.5-3b": _sized(_SMALL_QWEN2, 2048, 36, 16, 2, 11_008, max_seq_len=32_768),
    "qwen2.5-7b": _sized(_QWEN2, 3584, 28, 28, 4, 18_944, norm_eps=1e-6),
    "qwen2.5-14b": _sized(_QWEN2, 5120, 48, 40, 8, 13_824),
    "qwen2.5-32b": _sized(_QWEN2, 5120, 64, 40, 8, 27_648),
    "qwen2.5-72b": _sized(_QWEN2, 8192, 80, 64, 8, 29_568),
    "qwen3-0.6b": _sized(_QWEN3, 1024, 28, 16, 8, 3072, tie_embeddings=True),
    "qwen3-1.7b": _sized(_QWEN3, 2048, 28, 16, 8, 6144, tie_embeddings=True),
    "qwen3-4b": _sized(_QWEN3, 2560, 36, 32, 8, 9728, tie_embeddings=True),
    "qwen3-8b": _sized(_QWEN3, 4096, 36, 32, 8, 12_288),
    "qwen3-14b": _sized(_QWEN3, 5120, 40, 40, 8, 17_408),
    "qwen3-32b": _sized(_QWEN3, 5120, 64, 64, 8, 25_600),
    "smollm2-135m": _sized(_SMOLLM2, 576, 30, 9, 3, 1536),
    "smollm2-360m": _sized(_SMOLLM2, 960, 32, 15, 5, 2560),
    "smollm2-1.7b": _sized(_SMOLLM2, 2048, 24, 32, 32, 8192, rope_theta=130_000.0),
    "smollm3-3b": _sized(
        dict(max_seq_len=65_536, norm_eps=1e-6, vocab_size=128_256, rope_theta=5_000_000.0, tie_embeddings=True),
        *(2048, 36, 16, 4, 11_008),
        layers=(*[LayerConfig()] * 3, LayerConfig(rope="none")),
    ),
    "cwm-32b": _sized(
        dict(max_seq_len=131_072, vocab_size=128_256, rope_theta=1_000_000.0, rope_scaling=RopeScaling("llama3", 16.0)),
        *(6144, 64, 48, 8, 21_504),
        layers=(LayerConfig(), *[LayerConfig(8192)] * 3),
    ),
    "ministral-3-3b": _sized(_MINISTRAL3, 3072, 26, 32, 8, 9216, tie_embeddings=True),
    "ministral-3-8b": _sized(_MINISTRAL3, 4096, 34, 32, 8, 14_336),
    "olmo-2-1b": _sized(_OLMO2, 2048, 16, 16, 16, 8192),
    "olmo-2-7b": _sized(_OLMO2, 4096, 32, 32, 32, 11_008),
    "olmo-2-13b": _sized(_OLMO2, 5120, 40, 40, 40, 13_824),
    "olmo-2-32b": _sized(_OLMO2, 5120, 64, 40, 8, 27_648),
    "olmo-3-7b": _sized(_OLMO3, 4096, 32, 32, 32, 11_008),
    "olmo-3-32b": _sized(_OLMO3, 5120, 64, 40, 8, 27_648),
    "gemma-3-270m": _gemma3(640, 18, 4, 1, 2048, window=512, scaled=False),
    "gemma-3-1b": _gemma3(1152, 26, 4, 1, 6912, window=512, scaled=False),
    "gemma-3-4b": _gemma3(2560, 34, 8, 4, 10_240, window=1024),
    "gemma-3-12b": _gemma3(3840, 48, 16, 8, 15_360, window=1024),
    "gemma-3-27b": _gemma3(5376, 62, 32, 16, 21_504, window=1024, head_dim=128, attention_multiplier=168.0**-0.5),
    "granite-3.3-2b": _sized(_GRANITE, 2048, 40, 32, 8, 8192, attention_multiplier=0.015625, logits_scaling=8.0),
    "granite-3.3-8b": _sized(_GRANITE, 4096, 40, 32, 8, 12_800, attention_multiplier=0.0078125, logits_scaling=16.0),
    "phi-3-mini-4k": _sized({}, 3072, 32, 32, 32, 8192, vocab_size=32_064, window=2047),
    "phi-4": _sized({}, 5120, 40, 40, 10, 17_920, max_seq_len=16_384, vocab_size=100_352, rope_theta=250_000.0),
    "qwen3-30b-a3b": _sized(_QWEN3_MOE, 2048, 48, 32, 4, 768),
    "qwen3-235b-a22b": _sized(_QWEN3_MOE, 4096, 94, 64, 4, 1536),
    "llama-4-scout": _llama3(
        *(5120, 48, 40, 8192, 8.0),
        vocab_size=202_048,
        max_seq_len=262_144,
        layers=(*[LayerConfig(chunk=8192)] * 3, LayerConfig(rope="none")),
        qk_norm="l2",
        query_scaling=QueryScaling(0.1, 8192, offset=1, rotated=False),
        experts=16,
        experts_per_token=1,
        expert_scores="sigmoid",
        shared_expert=True,
    ),
    "stories-260k": _stories(64, 5, 8, 4, 512, vocab_size=512),
    "stories-15m": _stories(288, 6, 6, 6, 256),
    "stories-42m": _stories(512, 8, 8, 8, 1024),
    "stories-110m": _stories(768, 12, 12, 12, 1024),
}


def preset(name: str) -> LlamaConfig:
    """The published configuration of that name.

    Raises:
      ConfigError: an unknown name; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; the presets are {', '.join(PRESETS)}")
    return PRESETS[name]
