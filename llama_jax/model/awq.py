"""Activation-aware scaling of channels before quantization (AWQ: Lin et al. 2023, section 3.2).

Errors of a matrix's weights count more for channels with large inputs. The weights of such channels are multiplied by a
factor, and the preceding operation is divided by it. The model computes the same, but the rounding errors of these channels
become smaller by about that factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Int

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.model.forward import forward
from llama_jax.model.mixtures import MIXTURES, formats_of_parameter
from llama_jax.model.params import Attention, Block, LlamaParams
from llama_jax.model.trees import layers_of, stack_layers
from llama_jax.ops.layers import Weight, is_quantized, project
from llama_jax.ops.platform import KernelOptions
from llama_jax.ops.weights.formats import with_fallback

EXPONENTS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75)  # candidate factors: powers of a channel's mean absolute input
NUMBERS_AT_ONCE = 1 << 16  # weights quantized at a time, which fit a processor's cache
MEASURED_ROWS = 512  # inputs of each matrix on which errors are measured
Progress = Callable[[Sequence[int]], Iterable[int]]


class _Recorded(Weight):
    """A matrix that records some rows of its inputs."""

    matrix: Any
    inputs: list[np.ndarray] = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    @property
    def dtype(self) -> Any:
        return self.matrix.dtype

    def project(self, x: jax.Array, out_dtype: Any, kernels: KernelOptions) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        jax.debug.callback(self._note, rows[:: -(-len(rows) // MEASURED_ROWS)].astype(jnp.float32), ordered=True)
        return project(x, self.matrix, out_dtype=out_dtype, kernels=kernels)

    def _note(self, rows: Any) -> None:
        self.inputs.append(np.asarray(rows))


def scale_channels(
    config: LlamaConfig,
    params: LlamaParams,
    tokens: Int[np.ndarray, "B T"],
    quant_format: str,
    *,
    progress: Progress | None = None,
) -> LlamaParams:
    """The same model with channels scaled for quantization to a format; quantize its matrices afterwards as usual.

    Args:
      params: dense parameters.
      tokens: text of the kind that the model is used for; a thousand tokens are enough.
      quant_format: see `trees.quantize`.
      progress: wraps the sequence of layers.

    Raises:
      ConfigError: a model with experts or custom parts, quantized parameters, or a format that is only read from files.
    """
    are_quantized = any(map(is_quantized, _leaves(params)))
    if quant_format not in MIXTURES:
        raise ConfigError(f"quantize={quant_format!r} is not one of {', '.join(MIXTURES)}")
    if config.experts:
        raise ConfigError(f"channel scaling does not support mixtures of experts; this model has experts={config.experts}")
    if config.parts:
        raise ConfigError(f"channel scaling needs the library's parts, and this model has {config.parts}")
    if are_quantized:
        raise ConfigError("channel scaling needs dense parameters; load the model with a dtype")
    layers_before, recorded, blocks = layers_of(params), _recorded(params.blocks), []
    forward(config, params.replace(blocks=recorded), jnp.asarray(tokens))
    jax.effects_barrier()
    layers = range(config.n_layers)
    for i in progress(layers) if progress else layers:
        quantized = lambda path, matrix, i=i: _quantize_and_restore(
            matrix, formats_of_parameter(path, quant_format, i, config.n_layers)
        )
        blocks.append(_scale_layer(config, layers_before[i], i, recorded, quantized))
    return params.replace(blocks=stack_layers(blocks))


def _leaves(params: LlamaParams) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Weight))


def _recorded(block: Block) -> Block:
    attention, ffn = block.attention, block.feed_forward
    note = lambda matrix: _Recorded(matrix, [])
    return block.replace(
        attention=attention.replace(qkv=note(attention.qkv), out=note(attention.out)),
        feed_forward=ffn.replace(gate=note(ffn.gate), down=note(ffn.down)),
    )


def _scale_layer(
    config: LlamaConfig, block: Block, layer: int, recorded: Block, quantized: Callable[[str, np.ndarray], np.ndarray]
) -> Block:
    """A scaled layer. Matrices are scaled from last to first, because scaling `out` and `down` changes those before them."""
    attention, ffn = block.attention, block.feed_forward
    heads = (config.n_kv_heads, config.queries_per_kv_head, config.head_dim)
    inputs = recorded.attention.out.inputs[layer]
    # The queries of a group share their values, and so their factors.
    shared = lambda sizes: np.broadcast_to(sizes.reshape(heads).mean(1, keepdims=True), heads).reshape(-1)
    factors = _best(inputs, {"blocks.attention.out": attention.out}, quantized, shared)
    attention = _attention_with(attention, factors.reshape(heads)[:, 0])
    factors = _best(recorded.feed_forward.down.inputs[layer], {"blocks.feed_forward.down": ffn.down}, quantized)
    up_bias = None if ffn.up_bias is None else ffn.up_bias / factors
    ffn = ffn.replace(up=ffn.up / factors[:, None], up_bias=up_bias, down=ffn.down * factors)
    offset, norms = config.norm_offset, {}
    if block.attention_norm is not None:
        factors = _best(recorded.attention.qkv.inputs[layer], {"blocks.attention.qkv": attention.qkv}, quantized)
        attention = attention.replace(qkv=attention.qkv * factors)
        norms["attention_norm"] = (block.attention_norm + offset) / factors - offset
    if block.ffn_norm is not None:
        both = {"blocks.feed_forward.gate": ffn.gate, "blocks.feed_forward.up": ffn.up}
        factors = _best(recorded.feed_forward.gate.inputs[layer], both, quantized)
        ffn = ffn.replace(gate=ffn.gate * factors, up=ffn.up * factors)
        norms["ffn_norm"] = (block.ffn_norm + offset) / factors - offset
    return block.replace(attention=attention, feed_forward=ffn, **norms)


def _attention_with(attention: Attention, factors: np.ndarray) -> Attention:
    """Divide the values by factors [K, H], and multiply `out` by them."""
    groups = attention.qkv.shape[1] - 2
    row_factors = np.ones(attention.qkv.shape[:-1], np.float32)
    row_factors[:, -1] = factors
    column_factors = np.repeat(factors[:, None], groups, 1).reshape(-1)
    bias = None if attention.qkv_bias is None else attention.qkv_bias / row_factors
    return attention.replace(qkv=attention.qkv / row_factors[..., None], qkv_bias=bias, out=attention.out * column_factors)


def _best(
    inputs: np.ndarray,
    matrices: dict[str, Any],
    quantized: Callable[[str, np.ndarray], np.ndarray],
    shared: Callable[[np.ndarray], np.ndarray] = lambda sizes: sizes,
) -> np.ndarray:
    """The column factors with the smallest output error of the quantized matrices (by path) on these inputs: float32[D]."""
    sizes = np.maximum(shared(np.abs(inputs).mean(0)), 1e-6)
    arrays = {path: np.asarray(matrix, np.float32) for path, matrix in matrices.items()}
    best, least = np.ones_like(sizes), np.inf
    for exponent in EXPONENTS:
        factors = sizes**exponent
        factors = (factors / np.sqrt(factors.max() * factors.min())).astype(np.float32)
        error = 0.0
        for path, matrix in arrays.items():
            wrong = quantized(path, matrix * factors) / factors - matrix
            error += float(np.square(inputs @ wrong.reshape(-1, len(factors)).T).sum())
        if error < least:
            best, least = factors, error
    return best


def _quantize_and_restore(matrix: np.ndarray, quant_formats: tuple[str, ...]) -> np.ndarray:
    """The values of a matrix after quantization; its parts [K, width, H, D] may have different formats."""
    ends = [matrix.shape[1] - i for i in range(len(quant_formats) - 1, 0, -1)] if len(quant_formats) > 1 else []
    parts = np.split(matrix, ends, axis=1) if ends else [matrix]
    decoded = []
    for part, quant_format in zip(parts, quant_formats, strict=True):
        form = with_fallback(quant_format, part.shape[-1])
        if form.encode is None or part.shape[-1] % form.block:
            raise ConfigError(f"{quant_format} needs rows in multiples of {form.block}, not of {part.shape[-1]} numbers")
        rows = part.reshape(-1, part.shape[-1])
        step = max(1, NUMBERS_AT_ONCE // rows.shape[-1])
        runs = [form.decode(*form.encode(rows[i : i + step])) for i in range(0, len(rows), step)]
        decoded.append(np.concatenate(runs, dtype=np.float32).reshape(part.shape))
    return np.concatenate(decoded, axis=1) if ends else decoded[0]
