"""The parameters of a Llama: an immutable pytree of arrays, and a table with one spec per parameter.

Everything that depends on the list of parameters reads the table: `init`, the partition specs, the optimizers' masks, the
checks, the sizes of `estimate`, and loading and saving in every format (`formats.weight_format` has the names of tensors).
A parameter that only some models have is a spec with a condition; in other models the tree has None instead. `axis_sizes`
explains the letters of the axes.
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
from llama_jax.errors import ConfigError

# A jax.Array; in other trees of the same structure, its shape, partition spec, sharding or location in a file.
Leaf: TypeAlias = Any


class Attention(struct.PyTreeNode):
    """Projections of one attention layer.

    Attributes:
      qkv: [K, G + 2, H, D]: for each key/value head, the projections of its G query heads, its key and its value.
      out: [D, N * H].
      qkv_bias, out_bias: [K, G + 2, H] and [D], or None.
      query_norm, key_norm: [H] (`qk_norm` "head"), or [K, G, H] and [K, 1, H] ("all"), or None.
    """

    qkv: Leaf
    out: Leaf
    qkv_bias: Leaf | None = None
    out_bias: Leaf | None = None
    query_norm: Leaf | None = None
    key_norm: Leaf | None = None


class FeedForward(struct.PyTreeNode):
    """Projections of one feed-forward layer.

    Attributes:
      gate, up: [F, D]. Not fused: a TPU would copy an array [F, 2, D] to another layout at every call.
      down: [D, F].
      router: [E, D], or None. With a router, gate, up and down have a leading axis E (experts).
      shared_gate, shared_up, shared_down: the shared expert, which every token uses, or None.
      gate_bias, up_bias, down_bias: [F], [F] and [D], or None.
    """

    gate: Leaf
    up: Leaf
    down: Leaf
    router: Leaf | None = None
    shared_gate: Leaf | None = None
    shared_up: Leaf | None = None
    shared_down: Leaf | None = None
    gate_bias: Leaf | None = None
    up_bias: Leaf | None = None
    down_bias: Leaf | None = None


class Block(struct.PyTreeNode):
    """One layer: attention and feed-forward, with a norm [D] before each, after each, or both."""

    attention_norm: Leaf | None
    attention: Attention
    ffn_norm: Leaf | None
    feed_forward: FeedForward
    attention_post_norm: Leaf | None = None
    ffn_post_norm: Leaf | None = None


class LlamaParams(struct.PyTreeNode):
    """All parameters.

    Attributes:
      embedding: [V, D].
      blocks: one `Block` whose arrays have a leading axis L (layers); `trees.layers_of` splits it into L `Block`s. For
        decoding on a GPU, a matrix may be a `MixedStack` of one array per layer (`trees.unstack_layers`).
      final_norm: [D].
      lm_head: [V, D], or None if the output projection is the embedding.
      hooks: see `hooks.with_hooks`; must be None to save, shard or train the model.
    """

    embedding: Leaf
    blocks: Block
    final_norm: Leaf
    lm_head: Leaf | None
    hooks: Any = None


BLOCKS_PREFIX = "blocks."  # path prefix of per-layer parameters


@dataclass(frozen=True)
class ParamSpec:
    """A parameter.

    Attributes:
      path: its path in the tree, such as "blocks.attention.qkv".
      axes: its axes in one layer, such as "K G+2 H D".
      partition: the mesh axes that shard each axis.
      init: the initialization: "normal", with standard deviation 0.02; "residual", with 0.02 / sqrt(2 L), for projections
        into the residual stream; "ones"; "zeros".
      rng: (number of the random key, index if several parameters are drawn together with it); fixed, so that a seed always
        gives the same model.
      output_axes: the output axes of a matrix that Muon updates (negative indices; the last axis is the input). None:
        AdamW updates the parameter.
      exists: whether a model with this configuration has the parameter.
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
        """Whether this is a parameter of the layers."""
        return self.path.startswith(BLOCKS_PREFIX)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to randomly initialized matrices, not to norms or biases."""
        return self.init in ("normal", "residual")

    @property
    def is_quantizable(self) -> bool:
        """Whether it may be quantized: true of every matrix except the (small) router."""
        return self.decays and not self.path.endswith(".router")

    @property
    def has_vocabulary(self) -> bool:
        """Whether it has one row per token id, and possibly padding rows."""
        return self.axes.startswith("V")

    def shape(self, config: LlamaConfig) -> tuple[int, ...]:
        """The shape in one layer."""
        return shape_of(self.axes, config)

    def stacked_shape(self, config: LlamaConfig) -> tuple[int, ...]:
        """The shape in the pytree: with a leading axis L for a parameter of the layers."""
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
    ParamSpec("blocks.attention.out_bias", "D", P(), "zeros", exists=lambda config: config.out_bias),
    ParamSpec("blocks.attention_post_norm", "D", P(), "ones", exists=lambda config: config.norm != "pre"),
    ParamSpec("blocks.ffn_norm", "D", P(), "ones", exists=lambda config: config.norm != "post"),
    ParamSpec(
        "blocks.feed_forward.gate", "F D", P("tensor", "fsdp"), "normal", rng=(3, 0), output_axes=(-2,), exists=_dense
    ),
    ParamSpec("blocks.feed_forward.up", "F D", P("tensor", "fsdp"), "normal", rng=(3, 1), output_axes=(-2,), exists=_dense),
    ParamSpec(
        "blocks.feed_forward.down", "D F", P("fsdp", "tensor"), "residual", rng=(4,), output_axes=(-2,), exists=_dense
    ),
    ParamSpec("blocks.feed_forward.gate_bias", "F", P("tensor"), "zeros", exists=lambda config: config.mlp_bias),
    ParamSpec("blocks.feed_forward.up_bias", "F", P("tensor"), "zeros", exists=lambda config: config.mlp_bias),
    ParamSpec("blocks.feed_forward.down_bias", "D", P(), "zeros", exists=lambda config: config.mlp_bias),
    ParamSpec("blocks.feed_forward.router", "E D", P(None, "fsdp"), "normal", rng=(6,), exists=_sparse),
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
def axis_sizes(config: LlamaConfig) -> dict[str, int]:
    """The sizes of the axes in `ParamSpec.axes`, by name."""
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
    """The shape with these axes: (512, 64) for "V D" and the preset "stories-260k"."""
    return tuple(axis_sizes(config)[axis] for axis in axes.split())


@cache
def specs_for(config: LlamaConfig) -> tuple[ParamSpec, ...]:
    """The parameters that a model of this configuration has."""
    return tuple(spec for spec in PARAM_SPECS if spec.exists(config))


def is_matrix_in_block(path: tuple[Any, ...]) -> bool:
    """Whether the leaf at a path in `LlamaParams.blocks` is a matrix, not a component of a quantized or LoRA weight."""
    spec = spec_at((jax.tree_util.GetAttrKey("blocks"), *path))
    names_in_weight = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)][spec.path.count(".") :]
    return spec.is_quantizable and all(name in ("base", "parts") for name in names_in_weight)


def spec_at(path: tuple[Any, ...]) -> ParamSpec:
    """The spec of the leaf at a path in a `LlamaParams`, as `jax.tree_util.tree_map_with_path` passes it.

    If several specs have the path, the first is returned: they differ only in shape and condition. All arrays inside a
    quantized or LoRA weight have the spec of the weight.

    Raises:
      ConfigError: the leaf belongs to hooks.
    """
    names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    prefixes = (".".join(names[:end]) for end in range(1, len(names) + 1))
    spec = next((_BY_PATH[prefix] for prefix in prefixes if prefix in _BY_PATH), None)
    if spec is None:
        raise ConfigError(
            f"{'.'.join(names)} is not a parameter; add hooks after parameters are created, sharded or trained"
        )
    return spec
