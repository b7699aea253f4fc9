"""The parameters of a Llama: an immutable tree of arrays, and a table with one spec for each of them.

Everything that depends on the list of parameters reads the table: `init`, the partition specs, the optimizers' masks, the
checks, the sizes of `estimate`, and every format's loading and saving (`formats.weight_format` has their names there). A
parameter that only some models have is a row with a condition; the tree of a model without it holds None there. Axes are
named with the letters of `sizes`.
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
      hooks: see `hooks.with_hooks`; None where a model is saved, sharded or trained.
    """

    embedding: Leaf
    blocks: Block
    final_norm: Leaf
    lm_head: Leaf | None
    hooks: Any = None


BLOCKS = "blocks."  # path prefix of per-layer parameters


@dataclass(frozen=True)
class ParamSpec:
    """A parameter.

    Attributes:
      path: in the tree: "blocks.attention.qkv".
      axes: of one layer: "K G+2 H D".
      partition: the mesh axes that shard each of them.
      init: how it is initialized: normal with standard deviation 0.02 ("normal"); that over sqrt(2 L), for projections into
        the residual stream ("residual"); "ones", or "zeros".
      rng: (key number, index within one draw): fixed, so that a seed always gives the same model.
      output_axes: axes (from the last) that are matrix outputs, for Muon; the last axis is the input. None: AdamW.
      exists: whether a model of a configuration has it.
    """

    path: str
    axes: str
    partition: P
    init: Literal["normal", "residual", "ones", "zeros"]
    rng: tuple[int, ...] = (0,)
    output_axes: tuple[int, ...] | None = None
    exists: Callable[[LlamaConfig], bool] = lambda config: True

    @property
    def in_blocks(self) -> bool:
        """Whether every layer has one."""
        return self.path.startswith(BLOCKS)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to randomly initialized matrices, not to norms or biases."""
        return self.init in ("normal", "residual")

    @property
    def is_matrix(self) -> bool:
        """Whether it may be quantized: every matrix but the (small) router."""
        return self.decays and not self.path.endswith(".router")

    @property
    def has_vocabulary(self) -> bool:
        """Whether it has a row for each token, and so possibly rows of padding."""
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
    ParamSpec("blocks.attention_norm", "D", P(), "ones", exists=lambda config: config.norm != "post"),
    ParamSpec(
        "blocks.attention.qkv", "K G+2 H D", P("tensor", None, None, "fsdp"), "normal", rng=(1,), output_axes=(-4, -3, -2)
    ),
    ParamSpec("blocks.attention.qkv_bias", "K G+2 H", P("tensor"), "zeros", exists=lambda config: config.qkv_bias),
    ParamSpec("blocks.attention.query_norm", "H", P(), "ones", exists=lambda config: config.qk_norm == "head"),
    ParamSpec("blocks.attention.key_norm", "H", P(), "ones", exists=lambda config: config.qk_norm == "head"),
    ParamSpec("blocks.attention.query_norm", "K G H", P("tensor"), "ones", exists=lambda config: config.qk_norm == "all"),
    ParamSpec("blocks.attention.key_norm", "K 1 H", P("tensor"), "ones", exists=lambda config: config.qk_norm == "all"),
    ParamSpec("blocks.attention.out", "D N*H", P("fsdp", "tensor"), "residual", rng=(2,), output_axes=(-2,)),
    ParamSpec("blocks.attention_post_norm", "D", P(), "ones", exists=lambda config: config.norm != "pre"),
    ParamSpec("blocks.ffn_norm", "D", P(), "ones", exists=lambda config: config.norm != "post"),
    ParamSpec(
        "blocks.feed_forward.gate", "F D", P("tensor", "fsdp"), "normal", rng=(3, 0), output_axes=(-2,), exists=_dense
    ),
    ParamSpec("blocks.feed_forward.up", "F D", P("tensor", "fsdp"), "normal", rng=(3, 1), output_axes=(-2,), exists=_dense),
    ParamSpec(
        "blocks.feed_forward.down", "D F", P("fsdp", "tensor"), "residual", rng=(4,), output_axes=(-2,), exists=_dense
    ),
    ParamSpec("blocks.feed_forward.router", "E D", P(None, "fsdp"), "normal", rng=(6,), output_axes=(-2,), exists=_sparse),
    ParamSpec(
        "blocks.feed_forward.gate",
        "E F D",
        P(None, "tensor", "fsdp"),
        "normal",
        rng=(3, 0),
        output_axes=(-2,),
        exists=_sparse,
    ),
    ParamSpec(
        "blocks.feed_forward.up", "E F D", P(None, "tensor", "fsdp"), "normal", rng=(3, 1), output_axes=(-2,), exists=_sparse
    ),
    ParamSpec(
        "blocks.feed_forward.down",
        "E D F",
        P(None, "fsdp", "tensor"),
        "residual",
        rng=(4,),
        output_axes=(-2,),
        exists=_sparse,
    ),
    ParamSpec(
        "blocks.feed_forward.shared_gate",
        "F D",
        P("tensor", "fsdp"),
        "normal",
        rng=(7, 0),
        output_axes=(-2,),
        exists=_shared,
    ),
    ParamSpec(
        "blocks.feed_forward.shared_up", "F D", P("tensor", "fsdp"), "normal", rng=(7, 1), output_axes=(-2,), exists=_shared
    ),
    ParamSpec(
        "blocks.feed_forward.shared_down",
        "D F",
        P("fsdp", "tensor"),
        "residual",
        rng=(8,),
        output_axes=(-2,),
        exists=_shared,
    ),
    ParamSpec("blocks.ffn_post_norm", "D", P(), "ones", exists=lambda config: config.norm != "pre"),
    ParamSpec("final_norm", "D", P(), "ones"),
    ParamSpec("lm_head", "V D", P("tensor", "fsdp"), "normal", rng=(5,), exists=lambda config: not config.tie_embeddings),
)
_BY_PATH = {spec.path: spec for spec in reversed(PARAM_SPECS)}


@cache
def sizes(config: LlamaConfig) -> dict[str, int]:
    """The sizes of the axes, by letter, and the products of them that occur."""
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
    """The lengths of axes: "V D" of the preset "stories-260k" is (512, 64)."""
    return tuple(sizes(config)[axis] for axis in axes.split())


@cache
def specs_for(config: LlamaConfig) -> tuple[ParamSpec, ...]:
    """The parameters that a model of this configuration has."""
    return tuple(spec for spec in PARAM_SPECS if spec.exists(config))


def is_matrix_in_block(path: tuple[Any, ...]) -> bool:
    """Whether a leaf inside the blocks is a whole matrix, not a component of a quantized or adapted one."""
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
