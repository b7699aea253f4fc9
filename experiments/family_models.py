"""A small model of every family of `config.families`, with all features that the family has in addition to Llama's."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from llama_jax.config import LayerConfig, LlamaConfig, QueryScaling, RopeScaling
from llama_jax.formats.orbax_format import array_name
from llama_jax.model.params import LlamaParams
from llama_jax.model.trees import param_shapes

PLAIN = LlamaConfig(
    vocab_size=96,
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=64,
    max_seq_len=64,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_embeddings=False,
)
SIBLINGS: dict[str, LlamaConfig] = {
    "mistral": replace(PLAIN, window=6),
    "qwen2": replace(PLAIN, qkv_bias=True),
    "qwen3": replace(PLAIN, qk_norm="head", head_dim=16, tie_embeddings=True),
    "mixtral": replace(PLAIN, experts=4, experts_per_token=2),
    "qwen3_moe": replace(PLAIN, qk_norm="head", head_dim=16, hidden_dim=32, experts=6, experts_per_token=3),
    "smollm3": replace(PLAIN, n_layers=5, layers=(*[LayerConfig()] * 3, LayerConfig(rope="none")), tie_embeddings=True),
    "cwm": replace(
        PLAIN,
        n_layers=5,
        layers=(LayerConfig(), *[LayerConfig(6)] * 3),
        rope_scaling=RopeScaling("llama3", 4.0, original_max_seq_len=32),
    ),
    "ministral3": replace(
        PLAIN,
        rope_scaling=RopeScaling("yarn", 4.0, original_max_seq_len=8, mscale=1.0, mscale_all_dim=1.0),
        query_scaling=QueryScaling(0.1, 8),
        head_dim=16,
    ),
    "olmo2": replace(PLAIN, norm="post", qk_norm="all"),
    "olmo3": replace(
        PLAIN,
        n_layers=5,
        norm="post",
        qk_norm="all",
        layers=(*[LayerConfig(6, "unscaled")] * 3, LayerConfig()),
        rope_scaling=RopeScaling("yarn", 4.0, original_max_seq_len=16),
    ),
    "gemma3_text": replace(
        PLAIN,
        n_layers=8,  # a period and two more
        head_dim=16,
        layers=(*[LayerConfig(6, "unscaled", 100.0)] * 5, LayerConfig()),
        rope_scaling=RopeScaling("linear", 8.0),
        norm="both",
        norm_offset=1.0,
        qk_norm="head",
        activation="gelu",
        embedding_multiplier=32**0.5,
        tie_embeddings=True,
    ),
    "granite": replace(
        PLAIN,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.25,
        logits_scaling=8.0,
    ),
    "phi3": replace(PLAIN, head_dim=16, rotary_dim=12, n_heads=2, n_kv_heads=1),
    "llama4_text": replace(
        PLAIN,
        n_layers=5,
        layers=(*[LayerConfig(chunk=6)] * 3, LayerConfig(rope="none")),
        rope_scaling=RopeScaling("llama3", 4.0, original_max_seq_len=32),
        qk_norm="l2",
        query_scaling=QueryScaling(0.1, 8, offset=1, rotated=False),
        hidden_dim=32,
        experts=4,
        experts_per_token=2,
        expert_scores="sigmoid",
        shared_expert=True,
    ),
}
FAMILY_MODELS: dict[str, LlamaConfig] = {"llama": PLAIN} | SIBLINGS


def random_params(config: LlamaConfig, seed: int = 0) -> LlamaParams:
    """Random parameters, large enough that nothing is near uniform; biases and norms differ from their initial values."""
    random = np.random.default_rng(seed)

    def drawn(path, leaf):
        norm = "norm" in array_name(path) and not config.norm_offset
        return (norm + 0.2 * random.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree.map(jax.device_put, jax.tree_util.tree_map_with_path(drawn, param_shapes(config)))


def with_wide_heads(config: LlamaConfig) -> LlamaConfig:
    """The family's small model with heads, windows and chunks of 128, the sizes that accelerators have kernels for."""
    layers = tuple(replace(x, window=x.window and 128, chunk=x.chunk and 128) for x in config.layers)
    sizes = dict(dim=256, hidden_dim=512, head_dim=128, n_heads=4, n_kv_heads=2, vocab_size=512, max_seq_len=1024)
    more = dict(embedding_multiplier=256**0.5) if config.model_type == "gemma3_text" else {}
    return replace(
        config,
        **sizes,
        **more,
        layers=layers,
        window=config.window and 128,
        rotary_dim=config.rotary_dim and 96,
    )
