"""The parameters of a Llama as an immutable tree of arrays."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from llama_jax.config import LlamaConfig

# A jax.Array, or what stands for one in a tree of the same form: a shape, a partition spec, a sharding, a place in a file.
Leaf: TypeAlias = Any


class Attention(struct.PyTreeNode):
    """Projections of one attention layer.

    Attributes:
      qkv: [K, G + 2, H, D]: for each key/value head its G query heads, then the key, then the value.
      out: [D, N * H].
    """

    qkv: Leaf
    out: Leaf


class FeedForward(struct.PyTreeNode):
    """Projections of one feed-forward layer.

    Attributes:
      gate, up: [F, D]. Not one array: a TPU copies the weights of [F, 2, D] into another order at every call.
      down: [D, F].
    """

    gate: Leaf
    up: Leaf
    down: Leaf


class Block(struct.PyTreeNode):
    """One layer: two normalisations [D], attention and feed-forward."""

    attention_norm: Leaf
    attention: Attention
    ffn_norm: Leaf
    feed_forward: FeedForward


class Llama(struct.PyTreeNode):
    """All parameters.

    Attributes:
      embedding: [V, D].
      blocks: a tuple of L blocks (read from a file, fastest to decode with), or one `Block` whose arrays have a leading
        axis L (fast to compile, for training); `stack` and `unstack` convert.
      final_norm: [D].
      lm_head: [V, D], or None where the output projection is the embedding.
    """

    embedding: Leaf
    blocks: Block | tuple[Block, ...]
    final_norm: Leaf
    lm_head: Leaf | None


def init(config: LlamaConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> Llama:
    """Random parameters with stacked blocks, as modern Llamas start training.

    Every matrix is normal with standard deviation 0.02; the two projections that end in the residual stream are scaled by
    1 / sqrt(2 L), so that its variance does not grow with depth (GPT-2: Radford et al. 2019, section 2.3).
    """
    c, layers = config, config.n_layers
    residual = 0.02 / math.sqrt(2 * layers)
    keys = iter(jax.random.split(key, 6))

    def normal(std: float, *shape: int) -> jax.Array:
        return (std * jax.random.normal(next(keys), shape, jnp.float32)).astype(dtype)

    embedding = normal(0.02, c.vocab_size, c.dim)
    attention = Attention(
        qkv=normal(0.02, layers, c.n_kv_heads, c.queries_per_kv_head + 2, c.head_dim, c.dim),
        out=normal(residual, layers, c.dim, c.n_heads * c.head_dim),
    )
    both = normal(0.02, layers, c.hidden_dim, 2, c.dim)  # as one array, so that a seed still gives the same model
    feed_forward = FeedForward(both[:, :, 0], both[:, :, 1], normal(residual, layers, c.dim, c.hidden_dim))
    return Llama(
        embedding=embedding,
        blocks=Block(
            attention_norm=jnp.ones((layers, c.dim), dtype),
            attention=attention,
            ffn_norm=jnp.ones((layers, c.dim), dtype),
            feed_forward=feed_forward,
        ),
        final_norm=jnp.ones((c.dim,), dtype),
        lm_head=None if c.tie_embeddings else normal(0.02, c.vocab_size, c.dim),
    )


def unstack(params: Llama) -> Llama:
    """The same parameters with a tuple of blocks, one per layer; each array is copied out of its stack."""
    if isinstance(params.blocks, tuple):
        return params
    stacked = params.blocks
    layers = stacked.attention_norm.shape[0]
    return params.replace(blocks=tuple(jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(layers)))


def stack(params: Llama) -> Llama:
    """The same parameters with one block whose arrays have a leading axis L."""
    if isinstance(params.blocks, Block):
        return params
    return params.replace(blocks=jax.tree.map(lambda *arrays: jnp.stack(arrays), *params.blocks))


def count(params: Llama) -> int:
    """How many numbers the parameters hold; works on the shapes that `jax.eval_shape` gives as well."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def parameter_count(config: LlamaConfig) -> int:
    """How many parameters a Llama of this configuration has, without allocating any."""
    return count(jax.eval_shape(lambda key: init(config, key), jax.random.key(0)))


def check_params(config: LlamaConfig, params: Llama) -> None:
    """TEMPORARY, from the table room."""
