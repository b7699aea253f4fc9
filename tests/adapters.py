"""Adapters whose change is not small, for tests."""

import jax
import numpy as np

from llama_jax.model.lora import Lora, adapter_shapes
from llama_jax.ops.weights.lora import LowRank

LORA = Lora(rank=3, alpha=5.0)


def random_adapters(config, lora=LORA, *, seed=0, dtype=np.float32):
    """Both matrices of every pair far from zero; zeros where queries, keys or values are no targets."""
    rng = np.random.default_rng(seed)
    shapes = adapter_shapes(config, lora)
    drawn = jax.tree.map(lambda leaf: 0.2 * rng.standard_normal(leaf.shape), shapes)
    if lora.dora:
        long = lambda pair: pair.replace(magnitude=0.5 + abs(pair.magnitude))
        drawn = jax.tree.map(long, drawn, is_leaf=lambda leaf: isinstance(leaf, LowRank))
    qkv = drawn.blocks.attention.qkv
    if qkv is not None:
        groups = config.queries_per_kv_head
        rows = {"q_proj": slice(0, groups), "k_proj": slice(groups, groups + 1), "v_proj": slice(groups + 1, None)}
        for part, (name, some) in enumerate(rows.items()):
            if name not in lora.targets:
                qkv.a[:, part] = 0
                qkv.b[:, :, some] = 0
                if lora.dora:
                    qkv.magnitude[:, :, some] = 0
    return jax.tree.map(lambda array: jax.device_put(np.asarray(array, dtype)), drawn)
