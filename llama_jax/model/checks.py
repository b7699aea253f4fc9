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
from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
from llama_jax.model.params import PARAM_SPECS, LlamaParams, ParamSpec, specs_for
from llama_jax.ops.platform import AnyArray


def check_arguments(
    config: LlamaConfig, params: LlamaParams, tokens: jax.Array, cache: KVCache | None, positions: Positions
) -> None:
    """Raise for arguments that `forward` does not accept; see there for the errors."""
    if tokens.ndim != 2 or not tokens.size or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise GenerationError(
            f"tokens are {tokens.dtype}{list(tokens.shape)}; int[B, T] is needed, a row per sequence, B and T at least 1"
        )
    check_params(config, params)
    of_tokens, of_rows, new = tokens.shape, tokens.shape[:1], tokens.shape[1]
    needed = {"position_ids": [of_tokens], "segment_ids": [of_tokens], "lengths": [of_rows]}
    for name, shapes in (needed | {"rope_lengths": [of_rows, of_tokens]}).items():
        value = getattr(positions, name)
        if value is not None and (value.shape not in shapes or not jnp.issubdtype(value.dtype, jnp.integer)):
            raise GenerationError(f"{name} are {value.dtype}{list(value.shape)}; int{list(shapes[0])} is needed")
    lengths = positions.lengths
    are_outside = not isinstance(lengths, jax.core.Tracer | None) and not ((lengths >= 0) & (lengths <= new)).all()
    is_packed, has_starts = _is_packed(positions), positions.starts is not None
    if is_packed and cache is not None:
        raise GenerationError("position_ids and segment_ids are for packed rows, which have no cache; omit them")
    if has_starts and cache is None:
        raise GenerationError("starts are for rows of a cache; omit them")
    if are_outside:
        raise GenerationError(f"lengths={lengths} must be from 0 to the {new} tokens of a row")
    if cache is not None:
        _check_cache(config, tokens, cache, positions)


def _is_packed(positions: Positions) -> bool:
    return positions.position_ids is not None or positions.segment_ids is not None


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
    pages, capacity, window, sinks = cache.pages.shape[1] // rows, cache.capacity, cache.window, cache.sinks
    needed = 0 if window is None else sum(pages_per_row(capacity, window, sinks, new, cache.pages.shape[2]))
    filled = 0 if isinstance(cache.length, jax.core.Tracer) else int(cache.length.max())
    too_many = (
        f"{new} tokens at once do not fit into the {pages} pages of a row with {window=} and {sinks=}; make the cache with"
        f" max_tokens_per_pass={new}"
    )
    if rows != batch:
        raise GenerationError(f"tokens have batch={batch} but the cache has {rows} rows")
    if pages < needed:
        raise GenerationError(too_many)
    if filled + new > capacity:
        raise GenerationError(f"{new} tokens after {filled} do not fit into a cache of {capacity=}")


def check_params(config: LlamaConfig, params: LlamaParams) -> None:
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


def check_head(config: LlamaConfig, params: LlamaParams) -> None:
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


def check_exact(params: LlamaParams, cache: KVCache | None, positions: Positions, sharding: Sharding) -> None:
    """Check that a pass can be exact.

    Raises:
      ConfigError: hooks; packed rows; experts or adapter tables, whose matmuls depend on the other tokens.
      MeshError: as `check_exact_devices`.
    """
    from llama_jax.ops.weights.multi_lora import MultiLoraWeight

    is_table = lambda leaf: isinstance(leaf, MultiLoraWeight)
    has_tables = any(map(is_table, jax.tree.leaves(params, is_leaf=is_table)))
    has_experts, refused = params.blocks.feed_forward.router is not None, "exact=True does not support"
    if params.hooks is not None:
        raise ConfigError(f"{refused} hooks; omit one of the two")
    if cache is None and _is_packed(positions):
        raise ConfigError(f"{refused} packed rows; omit segment_ids and position_ids")
    if has_tables:
        raise ConfigError(f"{refused} adapter tables; load only the adapter that is used")
    if has_experts:
        raise ConfigError(f"{refused} mixtures of experts, whose matmuls depend on the other tokens")
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


def check_hooks(
    config: LlamaConfig, params: LlamaParams, cache: KVCache | None, compute: ComputeOptions, sharding: Sharding
) -> None:
    """Raise ConfigError for hooks at points that the pass does not have."""
    points = set(params.hooks or ())
    at_scores, at_neurons = bool(points & {"scores", "pattern"}), "neurons" in points
    has_custom_attention = config.parts.attend is not None or compute.attention != "auto" or sharding.attend is not None
    has_custom_neurons, has_experts = config.parts.feed_forward is not None, params.blocks.feed_forward.router is not None
    beside_sinks = cache is not None and cache.sinks and (at_scores or "queries" in points)
    plain = "hooks at scores and pattern need plain attention; leave out attention, parts.attend and context"
    if has_custom_attention and at_scores:
        raise ConfigError(plain)
    if has_custom_neurons and at_neurons:
        raise ConfigError("hooks at neurons need plain feed-forward; leave out parts.feed_forward")
    if beside_sinks:
        raise ConfigError("hooks at queries, scores and pattern do not support a cache with sinks, which have other queries")
    if has_experts and at_neurons:
        raise ConfigError("hooks at neurons do not support mixtures of experts, whose neurons differ by token")


def check_parts_found(config: LlamaConfig) -> None:
    """Raise ConfigError for a model with custom functions of which only the names are known."""
    if config.parts.missing:
        named = " and ".join(f"{part}={name}" for part, name in config.parts.missing.items())
        raise ConfigError(
            f"the model has parts of its own, {named}, which are not in its files: pass the Python file that defines them,"
            " with --parts FILE.py; from Python, config = llama_jax.with_parts(config, 'FILE.py'), or the parts of a recipe"
        )


def check_parts(config: LlamaConfig, compute: ComputeOptions) -> None:
    """Raise ConfigError for custom functions that a pass would not call."""
    parts, attention = config.parts, compute.attention
    has_attend, has_feed_forward = parts.attend is not None, parts.feed_forward is not None
    without = f"feed_forward of {parts} is for models without"
    if parts and compute.exact:
        raise ConfigError(f"exact=True is for the library's parts, and the model has {parts}; leave exact out")
    if has_attend and attention != "auto":
        raise ConfigError(f"{attention=} is for the library's attention, which {parts} replaces")
    if has_feed_forward and config.experts:
        raise ConfigError(f"{without} experts, but this one has {config.experts}")
    if has_feed_forward and config.mlp_bias:
        raise ConfigError(f"{without} mlp_bias, but this one has mlp_bias=True")
