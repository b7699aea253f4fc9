"""The parameters of a Llama: an immutable tree of arrays, and a table with one spec for each of them.

Everything that depends on the list of parameters reads the table: `init`, the partition specs, the optimizers' masks, the
checks, the sizes of `estimate`, and every format's loading and saving (`formats.tensor_names` has their names there). A
parameter that only some models have is a row with a condition; the tree of a model without it holds None there. Axes are
spelled in the alphabet of the configuration, see `sizes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import jax
from flax import struct
from jax.sharding import PartitionSpec as P

from llama_jax.config import LlamaConfig

# A jax.Array, or its stand-in in a tree of the same form: a shape, a partition spec, a sharding, a place in a file.
Leaf: TypeAlias = Any


class Attention(struct.PyTreeNode):
    """Projections of one attention layer.

    Attributes:
      qkv: [K, G + 2, H, D]: for each key/value head its G query heads, then the key, then the value.
      out: [D, N * H].
      qkv_bias: [K, G + 2, H], or None.
      query_norm, key_norm: [H] for each head, or [K, G, H] and [K, 1, H] for all heads together, or None.
    """

    qkv: Leaf
    out: Leaf
    qkv_bias: Leaf | None = None
    query_norm: Leaf | None = None
    key_norm: Leaf | None = None


class FeedForward(struct.PyTreeNode):
    """Projections of one feed-forward layer.

    Attributes:
      gate, up: [F, D]. Not one array: a TPU copies the weights of [F, 2, D] into another order at every call.
      down: [D, F].
      router: [E, D], or None. Where there is one, those above have a leading axis E, the experts.
      shared_gate, shared_up, shared_down: of an expert that every token is given, or None.
    """

    gate: Leaf
    up: Leaf
    down: Leaf
    router: Leaf | None = None
    shared_gate: Leaf | None = None
    shared_up: Leaf | None = None
    shared_down: Leaf | None = None


class Block(struct.PyTreeNode):
    """One layer: attention and feed-forward, with a norm [D] before each, after each, or both."""

    attention_norm: Leaf | None
    attention: Attention
    ffn_norm: Leaf | None
    feed_forward: FeedForward
    attention_post_norm: Leaf | None = None
    ffn_post_norm: Leaf | None = None


class Llama(struct.PyTreeNode):
    """All parameters.

    Attributes:
      embedding: [V, D].
      blocks: one `Block` whose arrays have a leading axis L, the layers; see `trees.layers_of` for each of them. To decode
        on a GPU a matrix may be a `MixedStack` of one array a layer (`trees.layers_apart`).
      final_norm: [D].
      lm_head: [V, D], or None if the output projection is the embedding.
    """

    embedding: Leaf
    blocks: Block
    final_norm: Leaf
    lm_head: Leaf | None


BLOCKS = "blocks."  # begins the path of what every layer has


@dataclass(frozen=True)
class ParamSpec:
    """A parameter.

    Attributes:
      path: in the tree: "blocks.attention.qkv".
      axes: of one layer: "K G+2 H D".
      mesh: the mesh axes that cut each of them.
      start: how it is initialized: drawn with standard deviation 0.02 ("normal"); that over sqrt(2 L), for what ends in the
        residual stream ("residual"); "ones", or "zeros".
      draw: which of a seed's random keys it is drawn with, and its index among parameters drawn together. While these stay,
        a seed gives the same model.
      outputs: the axes, from the last, that are the outputs of a matrix whose inputs are the last axis: what Muon
        orthogonalizes. None for what it leaves to AdamW.
      when: whether a model of a configuration has it.
    """

    path: str
    axes: str
    mesh: P
    start: Literal["normal", "residual", "ones", "zeros"]
    draw: tuple[int, ...] = (0,)
    outputs: tuple[int, ...] | None = None
    when: Callable[[LlamaConfig], bool] = lambda config: True

    @property
    def in_blocks(self) -> bool:
        """Whether every layer has one."""
        return self.path.startswith(BLOCKS)

    @property
    def decays(self) -> bool:
        """Whether weight decay is for it: for what is drawn. A norm's weight that shrinks would be made up for elsewhere."""
        return self.start in ("normal", "residual")

    @property
    def is_matrix(self) -> bool:
        """Whether it may be quantized: what is multiplied or looked up, but for the router of experts, which is small."""
        return self.decays and not self.path.endswith(".router")

    @property
    def has_vocabulary(self) -> bool:
        """Whether it has a row for each token, and so may have rows of padding."""
        return self.axes.startswith("V")

    def shape(self, config: LlamaConfig) -> tuple[int, ...]:
        """The shape for one layer."""
        return shape_of(self.axes, config)

    def shape_of_all(self, config: LlamaConfig) -> tuple[int, ...]:
        """The shape for all layers as one array."""
        return (config.n_layers, *self.shape(config)) if self.in_blocks else self.shape(config)


def _dense(config: LlamaConfig) -> bool:
    return not config.experts


def _sparse(config: LlamaConfig) -> bool:
    return bool(config.experts)


def _shared(config: LlamaConfig) -> bool:
    return config.shared_expert


PARAM_SPECS: tuple[ParamSpec, ...] = (
    ParamSpec("embedding", "V D", P("tensor", "fsdp"), "normal"),
    ParamSpec("blocks.attention_norm", "D", P(), "ones", when=lambda config: config.norm != "post"),
    ParamSpec(
        "blocks.attention.qkv", "K G+2 H D", P("tensor", None, None, "fsdp"), "normal", draw=(1,), outputs=(-4, -3, -2)
    ),
    ParamSpec("blocks.attention.qkv_bias", "K G+2 H", P("tensor"), "zeros", when=lambda config: config.qkv_bias),
    ParamSpec("blocks.attention.query_norm", "H", P(), "ones", when=lambda config: config.qk_norm == "head"),
    ParamSpec("blocks.attention.key_norm", "H", P(), "ones", when=lambda config: config.qk_norm == "head"),
    ParamSpec("blocks.attention.query_norm", "K G H", P("tensor"), "ones", when=lambda config: config.qk_norm == "all"),
    ParamSpec("blocks.attention.key_norm", "K 1 H", P("tensor"), "ones", when=lambda config: config.qk_norm == "all"),
    ParamSpec("blocks.attention.out", "D N*H", P("fsdp", "tensor"), "residual", draw=(2,), outputs=(-2,)),
    ParamSpec("blocks.attention_post_norm", "D", P(), "ones", when=lambda config: config.norm != "pre"),
    ParamSpec("blocks.ffn_norm", "D", P(), "ones", when=lambda config: config.norm != "post"),
    ParamSpec("blocks.feed_forward.gate", "F D", P("tensor", "fsdp"), "normal", draw=(3, 0), outputs=(-2,), when=_dense),
    ParamSpec("blocks.feed_forward.up", "F D", P("tensor", "fsdp"), "normal", draw=(3, 1), outputs=(-2,), when=_dense),
    ParamSpec("blocks.feed_forward.down", "D F", P("fsdp", "tensor"), "residual", draw=(4,), outputs=(-2,), when=_dense),
    ParamSpec("blocks.feed_forward.router", "E D", P(None, "fsdp"), "normal", draw=(6,), outputs=(-2,), when=_sparse),
    ParamSpec(
        "blocks.feed_forward.gate", "E F D", P(None, "tensor", "fsdp"), "normal", draw=(3, 0), outputs=(-2,), when=_sparse
    ),
    ParamSpec(
        "blocks.feed_forward.up", "E F D", P(None, "tensor", "fsdp"), "normal", draw=(3, 1), outputs=(-2,), when=_sparse
    ),
    ParamSpec(
        "blocks.feed_forward.down", "E D F", P(None, "fsdp", "tensor"), "residual", draw=(4,), outputs=(-2,), when=_sparse
    ),
    ParamSpec(
        "blocks.feed_forward.shared_gate", "F D", P("tensor", "fsdp"), "normal", draw=(7, 0), outputs=(-2,), when=_shared
    ),
    ParamSpec(
        "blocks.feed_forward.shared_up", "F D", P("tensor", "fsdp"), "normal", draw=(7, 1), outputs=(-2,), when=_shared
    ),
    ParamSpec(
        "blocks.feed_forward.shared_down", "D F", P("fsdp", "tensor"), "residual", draw=(8,), outputs=(-2,), when=_shared
    ),
    ParamSpec("blocks.ffn_post_norm", "D", P(), "ones", when=lambda config: config.norm != "pre"),
    ParamSpec("final_norm", "D", P(), "ones"),
    ParamSpec("lm_head", "V D", P("tensor", "fsdp"), "normal", draw=(5,), when=lambda config: not config.tie_embeddings),
)
_BY_PATH = {spec.path: spec for spec in reversed(PARAM_SPECS)}


@cache
def sizes(config: LlamaConfig) -> dict[str, int]:
    """What the letters of the axes, and the products of them that occur, stand for."""
    c = config
    return {
        "V": c.vocab_size,
        "D": c.dim,
        "F": c.hidden_dim,
        "E": c.experts,
        "K": c.n_kv_heads,
        "G": c.queries_per_kv_head,
        "H": c.head_dim,
        "G+2": c.queries_per_kv_head + 2,
        "N*H": c.n_heads * c.head_dim,
        "K*H": c.n_kv_heads * c.head_dim,
        "1": 1,
    }


def shape_of(axes: str, config: LlamaConfig) -> tuple[int, ...]:
    """The lengths of axes: "V D" of the stories of 260K are (512, 64)."""
    return tuple(sizes(config)[axis] for axis in axes.split())


@cache
def specs_for(config: LlamaConfig) -> tuple[ParamSpec, ...]:
    """The parameters that a model of this configuration has."""
    return tuple(spec for spec in PARAM_SPECS if spec.when(config))


def is_matrix_in_block(path: tuple[Any, ...]) -> bool:
    """Whether the leaf at a path within the blocks is a matrix, and not a part of what stands in its place."""
    spec = spec_at((jax.tree_util.GetAttrKey("blocks"), *path))
    inside = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)][spec.path.count(".") :]
    return spec.is_matrix and all(name in ("base", "parts") for name in inside)


def spec_at(path: tuple[Any, ...]) -> ParamSpec:
    """The spec of the leaf at a path in a `Llama`, as `jax.tree_util.tree_map_with_path` passes it.

    Where several specs have one path, the first: they differ only in shape and condition. All arrays inside a quantized or
    adapted weight have the spec of the weight.
    """
    names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    starts = (".".join(names[:end]) for end in range(1, len(names) + 1))
    return next(_BY_PATH[start] for start in starts if start in _BY_PATH)
