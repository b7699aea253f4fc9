"""The parameters of a Llama as an immutable tree of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.model.table import BLOCKS, TABLE, Row, rows

# A jax.Array, or what stands for one in a tree of the same form: a shape, a partition spec, a sharding, a place in a file.
Leaf: TypeAlias = Any


class Attention(struct.PyTreeNode):
    """Projections of one attention layer.

    Attributes:
      qkv: [K, G + 2, H, D]: for each key/value head its G query heads, then the key, then the value.
      out: [D, N * H].
      qkv_bias: [K, G + 2, H], or None.
      query_norm, key_norm: [H], or None.
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
      router: [E, D], or None. Where there is one, the others have a leading axis E, the experts.
    """

    gate: Leaf
    up: Leaf
    down: Leaf
    router: Leaf | None = None


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


def init(config: LlamaConfig, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Llama:
    """Random parameters with stacked blocks, as modern Llamas start training.

    Every matrix is normal with standard deviation 0.02; the two projections that end in the residual stream are scaled by
    1 / sqrt(2 L), so that its variance does not grow with depth (GPT-2: Radford et al. 2019, section 2.3).
    """
    keys = jax.random.split(key, 6)  # of Llama's; what came later has keys of its own, so that these stay the same

    @cache
    def drawn(number: int, shape: tuple[int, ...], std: float) -> jax.Array:
        its_key = keys[number] if number < len(keys) else jax.random.fold_in(key, number)
        return (std * jax.random.normal(its_key, shape, jnp.float32)).astype(dtype)

    def start(row: Row, layer: int) -> jax.Array:
        shape = _stacked(row, config)
        if not row.decays:
            return jnp.full(shape, 1 if row.start == "ones" else 0, dtype)
        std = 0.02 if row.start == "normal" else 0.02 / math.sqrt(2 * config.n_layers)
        number, half = row.draw
        if half is None:
            return drawn(number, shape, std)
        return drawn(number, (*shape[:-1], 2, shape[-1]), std)[..., half, :]

    return build(config, start)


def build(config: LlamaConfig, leaf_of: Callable[[Row, int], Leaf], *, stacked: bool = True) -> Llama:
    """A `Llama` with what a function gives for each row of the table, and None for what the configuration has not.

    Args:
      leaf_of: given a row and a layer: 0 for what stands outside the blocks, and for stacked ones.
      stacked: whether the blocks are one, or a tuple.
    """
    table = {row.path: row for row in rows(config)}

    def node(kind: Any, start: str, layer: int) -> Any:
        paths = {field.name: start + field.name for field in fields(kind)}
        return kind(**{name: leaf_of(table[path], layer) if path in table else None for name, path in paths.items()})

    def block(layer: int) -> Block:
        return Block(
            attention_norm=leaf_of(table["blocks.attention_norm"], layer),
            attention=node(Attention, "blocks.attention.", layer),
            ffn_norm=leaf_of(table["blocks.ffn_norm"], layer),
            feed_forward=node(FeedForward, "blocks.feed_forward.", layer),
        )

    return Llama(
        embedding=leaf_of(table["embedding"], 0),
        blocks=block(0) if stacked else tuple(block(i) for i in range(config.n_layers)),
        final_norm=leaf_of(table["final_norm"], 0),
        lm_head=leaf_of(table["lm_head"], 0) if "lm_head" in table else None,
    )


def param_shapes(config: LlamaConfig, dtype: jax.typing.DTypeLike = jnp.float32, *, stacked: bool = True) -> Llama:
    """A `Llama` of `jax.ShapeDtypeStruct`: what `init` would give, without allocating it."""

    def shape(row: Row, layer: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(_stacked(row, config) if stacked else row.shape(config), jnp.dtype(dtype))

    return build(config, shape, stacked=stacked)


def _stacked(row: Row, config: LlamaConfig) -> tuple[int, ...]:
    """The shape of a parameter, with that of all layers as one."""
    return (config.n_layers, *row.shape(config)) if row.in_blocks else row.shape(config)


def check_params(config: LlamaConfig, params: Llama) -> None:
    """Raise unless parameters have the shapes of a configuration.

    A table may have more rows than the vocabulary: padding, to divide it over devices (`parallel.fit`). With fewer, a lookup
    would silently take another token's row.

    Raises:
      ConfigError: what is missing, left over or misshapen; the message names it.
    """
    check_head(config, params)
    blocks = params.blocks
    stacked = isinstance(blocks, Block)
    layers = (blocks,) if isinstance(blocks, Block) else blocks
    for place in _places(config, stacked):
        for i, node in enumerate(layers if place.in_blocks else (params,)):
            shape = getattr(place.find(node), "shape", None)
            if shape == place.shape or (place.padded and _is_padded(shape, place.shape)):
                continue
            where = place.path if stacked or not place.in_blocks else f"{BLOCKS}{i}.{place.path.removeprefix(BLOCKS)}"
            raise ConfigError(
                f"parameters whose {where} is {_in_words(shape)} are not those of the configuration, which needs"
                f" {_in_words(place.shape)}"
            )
    if not stacked and len(layers) != config.n_layers:
        raise ConfigError(
            f"parameters of {len(layers)} layers are not those of the configuration: n_layers={config.n_layers}"
        )


def check_head(config: LlamaConfig, params: Llama) -> None:
    """Raise ConfigError where there is an output projection though it is the embedding, or none though it is not."""
    if (params.lm_head is None) != config.tie_embeddings:
        found = "no" if params.lm_head is None else "an"
        raise ConfigError(f"tie_embeddings={config.tie_embeddings} but the parameters have {found} lm_head")


class _Place(NamedTuple):
    """Where a parameter is, and which shape it should have there; None where there should be none."""

    path: str
    in_blocks: bool
    find: Callable[[Any], Any]
    shape: tuple[int, ...] | None
    padded: bool


@cache
def _places(config: LlamaConfig, stacked: bool) -> tuple[_Place, ...]:
    present = {row.path: row for row in rows(config)}
    places = []
    for path, row in {row.path: row for row in TABLE}.items():
        row = present.get(path, row)
        shape = _stacked(row, config) if stacked else row.shape(config)
        find = attrgetter(path.removeprefix(BLOCKS))
        places.append(_Place(path, row.in_blocks, find, shape if path in present else None, row.has_vocabulary))
    return tuple(places)


def _is_padded(shape: tuple[int, ...] | None, wanted: tuple[int, ...] | None) -> bool:
    return shape is not None and wanted is not None and shape[0] > wanted[0] and shape[1:] == wanted[1:]


def _in_words(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


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
    return sum(math.prod(_stacked(row, config)) for row in rows(config))
