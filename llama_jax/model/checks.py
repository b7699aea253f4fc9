"""Checks of a forward pass's arguments, before anything is computed."""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Integer

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError, GenerationError, MeshError
from llama_jax.model.cache import KVCache, pages_per_row
from llama_jax.model.forward_options import Compute, Positions, Sharding
from llama_jax.model.params import PARAM_SPECS, Llama, ParamSpec, specs_for
from llama_jax.ops.platform import AnyArray


def check_arguments(
    config: LlamaConfig, params: Llama, tokens: jax.Array, cache: KVCache | None, positions: Positions
) -> None:
    """Raise for arguments that `forward` does not accept; see there for the errors."""
    if tokens.ndim != 2 or not tokens.size or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise GenerationError(
            f"tokens are {tokens.dtype}{list(tokens.shape)}; int[B, T] is needed, a row per sequence, B and T at least 1"
        )
    check_params(config, params)
    batch, new = tokens.shape
    for name, value in (("position_ids", positions.position_ids), ("segment_ids", positions.segment_ids)):
        if value is None:
            continue
        if cache is not None:
            raise GenerationError(f"{name} are for packed rows, which have no cache; omit one of the two")
        if value.shape != tokens.shape or not jnp.issubdtype(value.dtype, jnp.integer):
            kind = f"{value.dtype}{list(value.shape)}"
            raise GenerationError(f"{name} are {kind}; int{list(tokens.shape)}, as the tokens, is needed")
    lengths, rope_lengths = positions.lengths, positions.rope_lengths
    if rope_lengths is not None and rope_lengths.shape not in ((batch,), tokens.shape):
        raise GenerationError(f"rope_lengths are {list(rope_lengths.shape)}; int[{batch}], one for each row, is needed")
    if lengths is not None:
        if jnp.shape(lengths) != (batch,):
            raise GenerationError(f"lengths are {list(jnp.shape(lengths))}; int[{batch}], one for each row, is needed")
        if not isinstance(lengths, jax.core.Tracer) and not ((lengths >= 0) & (lengths <= new)).all():
            raise GenerationError(f"lengths={np.asarray(lengths).tolist()} must be from 0 to the {new} tokens of a row")
    if cache is not None:
        _check_cache(config, tokens, cache, positions)
    elif positions.starts is not None:
        raise GenerationError("starts are for rows of a cache; omit them")


def _check_cache(config: LlamaConfig, tokens: jax.Array, cache: KVCache, positions: Positions) -> None:
    """Raise for a cache of another model or with other rows, and for tokens that do not fit, which would be dropped."""
    expected, shape = (config.n_layers, 2 * config.n_kv_heads, config.head_dim), cache.pages.shape
    if (shape[0], *shape[3:]) != expected:
        raise GenerationError(
            f"a cache with pages {list(shape)}, [layers, pages, page size, 2 * heads, head_dim], does not match the"
            " configuration; make it with init_cache"
        )
    (batch, new), rows = tokens.shape, cache.table.shape[0]
    if positions.starts is not None:
        if jnp.shape(positions.starts) != (rows + 1,) or new != 1:
            raise GenerationError(
                f"tokens {[batch, new]} and starts {list(jnp.shape(positions.starts))} for {rows} rows of a cache; int[T, 1]"
                f" and int[{rows + 1}] are needed"
            )
        return
    if rows != batch:
        raise GenerationError(f"tokens have batch={batch} but the cache has {rows} rows")
    pages = cache.pages.shape[1] // rows
    if cache.window is not None and pages < sum(
        pages_per_row(cache.capacity, cache.window, cache.sinks, new, cache.pages.shape[2])
    ):
        raise GenerationError(
            f"{new} tokens at once do not fit into the {pages} pages of a row with window={cache.window} and"
            f" sinks={cache.sinks}; make the cache with max_tokens_per_pass={new}"
        )
    filled = 0 if isinstance(cache.length, jax.core.Tracer) else int(cache.length.max())
    if filled + new > cache.capacity:
        raise GenerationError(f"{new} tokens after {filled} do not fit into a cache of capacity={cache.capacity}")


def check_params(config: LlamaConfig, params: Llama) -> None:
    """Raise unless parameters have the shapes of a configuration.

    A table may have more rows than the vocabulary: padding, to shard it evenly (`parallel.padding`). With fewer rows, a
    lookup would silently return another token's row.

    Raises:
      ConfigError: a parameter that is missing, unexpected or of the wrong shape; the message names it.
    """
    check_head(config, params)
    for path, (spec, expected) in _shapes_of_params(config).items():
        shape = getattr(attrgetter(path)(params), "shape", None)
        if shape != expected and not (spec.has_vocabulary and _is_padded(shape, expected)):
            raise ConfigError(
                f"parameters whose {path} is {_shape_in_words(shape)} are not those of the configuration, which needs"
                f" {_shape_in_words(expected)}"
            )


def check_head(config: LlamaConfig, params: Llama) -> None:
    """Raise ConfigError for an output projection in a tied model, or a missing one in an untied model."""
    if (params.lm_head is None) != config.tie_embeddings:
        article = "no" if params.lm_head is None else "an"
        raise ConfigError(f"tie_embeddings={config.tie_embeddings} but the parameters have {article} lm_head")


@cache
def _shapes_of_params(config: LlamaConfig) -> dict[str, tuple[ParamSpec, tuple[int, ...] | None]]:
    """The spec and expected shape at each path; None if the model has no such parameter."""
    absent: dict[str, tuple[ParamSpec, tuple[int, ...] | None]] = {spec.path: (spec, None) for spec in PARAM_SPECS}
    present = {spec.path: (spec, spec.stacked_shape(config)) for spec in specs_for(config)}
    return absent | present


def _is_padded(shape: tuple[int, ...] | None, expected: tuple[int, ...] | None) -> bool:
    return shape is not None and expected is not None and shape[0] > expected[0] and shape[1:] == expected[1:]


def _shape_in_words(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def check_tokens(config: LlamaConfig, tokens: Integer[AnyArray, "*batch"]) -> None:
    """Raise GenerationError for an id outside [0, V), which an embedding lookup would silently replace."""
    if isinstance(tokens, jax.core.Tracer):
        return
    ids = np.asarray(tokens)
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if outside.size:
        raise GenerationError(
            f"token id {outside[0]} is outside the vocabulary of {config.vocab_size}: the model's embedding has no row for"
            " it; remove it, or use the model's own tokenizer"
        )


def check_exact(params: Llama, cache: KVCache | None, positions: Positions, sharding: Sharding) -> None:
    """Check that a pass can be exact.

    Raises:
      ConfigError: hooks; packed rows; experts or adapter tables, whose matmuls depend on the other tokens.
      MeshError: as `check_exact_devices`.
    """
    from llama_jax.ops.weights.multi_lora import MultiLoraWeight

    if params.hooks is not None:
        raise ConfigError("exact=True does not support hooks; omit one of the two")
    if cache is None and not (positions.segment_ids is None and positions.position_ids is None):
        raise ConfigError("exact=True does not support packed rows; omit segment_ids and position_ids")
    is_table = lambda leaf: isinstance(leaf, MultiLoraWeight)
    if any(map(is_table, jax.tree.leaves(params, is_leaf=is_table))):
        raise ConfigError("exact=True does not support adapter tables; load only the adapter that is used")
    if params.blocks.feed_forward.router is not None:
        raise ConfigError("exact=True does not support mixtures of experts, whose matmuls depend on the other tokens")
    check_exact_devices(sharding)


def check_exact_length(config: LlamaConfig, length: int) -> None:
    """Raise ConfigError if a pass over `length` tokens has other RoPE frequencies than generation of these tokens."""
    from llama_jax.ops.rope_scaling import LENGTH_DEPENDENT

    scaling = config.rope_scaling
    if scaling is not None and scaling.kind in LENGTH_DEPENDENT and length > (scaling.original_max_seq_len or 0):
        raise ConfigError(
            f"exact=True: with rope scaling {scaling.kind!r}, generation caches other keys than a pass over {length} tokens;"
            f" use at most {scaling.original_max_seq_len}"
        )


def check_exact_devices(sharding: Sharding) -> None:
    """Raise MeshError for several devices, whose order of partial sums is not fixed."""
    if sharding.mesh is not None and sharding.mesh.size > 1:
        raise MeshError("exact=True is for one device; the order of sums on a mesh is not fixed")


def check_no_hooks(params: Any) -> None:
    """Raise ConfigError for parameters with hooks, which cannot be part of files or training states."""
    if getattr(params, "hooks", None) is not None:
        raise ConfigError(
            "parameters with hooks cannot be saved, trained or attached; use params.replace(hooks=None) and add hooks later"
        )


def check_hooks(config: LlamaConfig, params: Llama, cache: KVCache | None, compute: Compute, sharding: Sharding) -> None:
    """Raise ConfigError for hooks at points that the pass does not have."""
    points = set(params.hooks or ())
    has_custom_attention = config.parts.attend is not None or compute.attention != "auto" or sharding.attend is not None
    if has_custom_attention and points & {"scores", "pattern"}:
        raise ConfigError("hooks at scores and pattern need plain attention; leave out attention, parts.attend and context")
    if config.parts.feed_forward is not None and "neurons" in points:
        raise ConfigError("hooks at neurons need the library's feed-forward; leave out parts.feed_forward")
    if cache is not None and cache.sinks and points & {"queries", "scores", "pattern"}:
        raise ConfigError(
            "hooks at queries, scores and pattern do not support a cache with sinks, which have separate queries"
        )
    if params.blocks.feed_forward.router is not None and "neurons" in points:
        raise ConfigError("hooks at neurons do not support mixtures of experts, whose neurons differ by token")


def check_parts_found(config: LlamaConfig) -> None:
    """Raise ConfigError for a model with custom functions of which only the names are known."""
    if config.parts.missing:
        named = " and ".join(f"{part}={name}" for part, name in config.parts.missing.items())
        raise ConfigError(
            f"the model has parts of its own, {named}, which are not in its files: pass the Python file that defines them,"
            " with --parts FILE.py; from Python, config = llama_jax.with_parts(config, 'FILE.py'), or the parts of a recipe"
        )


def check_parts(config: LlamaConfig, compute: Compute) -> None:
    """Raise ConfigError for custom functions that a pass would not call."""
    parts = config.parts
    if parts and compute.exact:
        raise ConfigError(f"exact=True is for the library's parts, and the model has {parts}; leave exact out")
    if parts.attend is not None and compute.attention != "auto":
        raise ConfigError(f"attention={compute.attention!r} is for the library's attention, which {parts} replaces")
    if parts.feed_forward is not None and config.experts:
        raise ConfigError(f"feed_forward of {parts} is for models without experts, but this one has {config.experts}")
    if parts.feed_forward is not None and config.mlp_bias:
        raise ConfigError(f"feed_forward of {parts} is for models without mlp_bias, but this one has mlp_bias=True")
