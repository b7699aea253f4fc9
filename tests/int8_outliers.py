"""Models with a few outlier channels in their keys, as Qwen2.5 has, and the cost of an int8 cache for them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import llama_jax
from llama_jax.config import LlamaConfig
from llama_jax.model.params import LlamaParams

PREFILL_CHUNK = 128
OUTLIERS = {"as it is": None, **{f"{part}, {n} channels": (part, n) for part in ("bias", "weights") for n in (2, 4)}}


def with_outliers(
    config: LlamaConfig,
    params: LlamaParams,
    ids: np.ndarray,
    part: str,
    channels: int,
    *,
    largest: float = 216.0,
    mean: float = 6.0,
) -> tuple[LlamaConfig, LlamaParams]:
    """The model with outliers in a few channels of its keys, among the last eight pairs of a head, which RoPE rotates least.

    Args:
      ids: tokens of a text on which the keys are measured.
      part: "bias" adds one of 108 to 216; "weights" enlarges the weights of keys and lowers those of queries, which changes
        no logit.
    """
    random, half, groups = np.random.default_rng(0), config.head_dim // 2, config.queries_per_kv_head
    _, _, kept = llama_jax.logits_and_activations(config, params, ids[None], {"keys": lambda keys, at: (keys, keys)})
    blocks = []
    for block, layer_keys in zip(llama_jax.layers_of(params), kept["keys"], strict=True):
        qkv, keys = np.array(block.attention.qkv), np.asarray(layer_keys)[0].swapaxes(0, 1)  # [K, G + 2, H, D], [K, T, H]
        bias = np.zeros(qkv.shape[:-1], np.float32)
        factors = np.broadcast_to(mean / np.abs(keys).mean((1, 2))[:, None], keys[:, 0].shape).copy()  # [K, H]
        for head in range(len(qkv)):
            for pair in random.choice(np.arange(max(half - 8, 0), half), channels, replace=False):
                both = [pair, pair + half]
                if part == "bias":
                    bias[head, groups, random.choice(both)] = random.choice([-1, 1]) * largest * random.uniform(0.5, 1)
                else:
                    factors[head, both] = largest / np.abs(keys[head][:, both]).max()
        qkv[:, groups] *= factors[..., None]
        qkv[:, :groups] /= factors[:, None, :, None]
        attention = block.attention.replace(qkv=jnp.asarray(qkv), qkv_bias=jnp.asarray(bias) if part == "bias" else None)
        blocks.append(block.replace(attention=attention))
    return replace(config, qkv_bias=part == "bias"), params.replace(blocks=llama_jax.stack_layers(blocks))


def cache_divergences(config: LlamaConfig, params: LlamaParams, ids: np.ndarray) -> np.ndarray:
    """KL divergence of the model with an int8 cache from the model with a float32 cache, in nats, for each token."""

    @jax.jit
    def read(params, tokens, cache):
        hidden, cache = llama_jax.forward(config, params, tokens, cache)
        return jax.nn.log_softmax(llama_jax.unembed(config, params, hidden)[0]), cache

    def read_text(dtype):
        cache, logprobs = llama_jax.init_cache(config, 1, len(ids), dtype), []
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk, cache = read(params, ids[None, start : start + PREFILL_CHUNK], cache)
            logprobs.append(chunk)
        return np.concatenate(logprobs)

    exact = read_text(jnp.float32)
    return np.sum(np.exp(exact) * (exact - read_text(jnp.int8)), axis=-1)
