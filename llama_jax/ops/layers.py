"""Per-token operations of a layer: projections, normalization, gated feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from llama_jax.ops import exact
from llama_jax.ops.gradients import with_gradient
from llama_jax.ops.platform import AnyArray, KernelOptions, has_cpu_variant, is_partitioned, lowering_platform

F = TypeVar("F", bound=Callable[..., Any])
Activation = Literal["silu", "gelu"]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=True),
}
MATMUL_OUTPUT = "product"  # checkpoint name of the results of matmuls with weights


class Weight(struct.PyTreeNode):
    """Base class of weights that are not arrays: quantized, with adapters, in a stack of layers.

    A field of a subclass that holds the matrix itself is named `base`, or `parts` if there are several, see
    `model.params.is_matrix_in_block`.

    Attributes:
      is_quantized: whether the arrays of the weight are the planes of a quantization format.
    """

    is_quantized: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, [*out, D]."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """The number of axes of the matrix."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the computation."""
        raise NotImplementedError

    def project(self, x: jax.Array, out_dtype: Any, kernels: KernelOptions) -> jax.Array:
        """Project [..., D] onto the rows of this weight: [..., *out]. See `ops.layers.project`."""
        raise NotImplementedError

    def embed(self, rows: jax.Array) -> jax.Array:
        """Look up rows of a table [V, D]."""
        raise NotImplementedError

    def to_dense(self) -> Any:
        """The matrix as an array, for tests and files, and for gradients; fast matmuls do not use it."""
        raise NotImplementedError


def is_quantized(weight: Any) -> bool:
    """Whether this is a weight in a quantization format."""
    return isinstance(weight, Weight) and weight.is_quantized


def dense(weight: Any) -> Any:
    """A weight as an array: an array itself, or its `to_dense()`."""
    return weight if isinstance(weight, jax.Array | np.ndarray) else weight.to_dense()


def map_all_tokens(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`: apply a function of tokens to all tokens at once; the alternative to `ops.exact.map_blocks`."""
    return function(*args)


def project(
    x: Float[Array, "*batch D"],
    weight: jax.Array | Weight,
    *,
    out_dtype: Any = None,
    kernels: KernelOptions = KernelOptions(),
) -> Float[Array, " ..."]:
    """Project the last axis of `x` onto the rows of `weight`.

    Used by every matmul with a parameter, except those of experts (`ops.grouped`).

    Args:
      weight: [*out, D], one row per output feature, as checkpoints store it: with one token, both operands are then read
        along their contiguous axis. An array in another dtype is cast to the dtype of `x`: training keeps weights in float32
        and computes in bfloat16. A `Weight` has its own `project`.
      out_dtype: dtype of the result, by default that of `x`. Sums are always float32 at least.
      kernels: the options of the pass, see `platform.kernel_options`.

    Returns:
      [*batch, *out].
    """
    out_dtype = out_dtype or x.dtype
    if not kernels.exact or is_batch_invariant(x, weight, kernels):
        return _project_rows(x, weight, out_dtype, kernels)
    rows = x.reshape(-1, x.shape[-1])
    count = exact.rows_in_use(jnp.all(rows == 0, axis=-1))  # the product of a row of zeros is zeros
    out = exact.map_blocks(lambda rows: _project_rows(rows, weight, out_dtype, kernels), exact.block_size(), count, rows)
    return out.reshape(*x.shape[:-1], *out.shape[1:])


def _project_rows(x: jax.Array, weight: jax.Array | Weight, out_dtype: Any, kernels: KernelOptions) -> jax.Array:
    if isinstance(weight, Weight):
        return weight.project(x, out_dtype, kernels)
    return checkpoint_name(matmul(x, jnp.asarray(weight), out_dtype, kernels), MATMUL_OUTPUT)


@has_cpu_variant
def is_batch_invariant(x: Float[Array, "*batch _"], weight: jax.Array | Weight, kernels: KernelOptions) -> bool:
    """Whether each row of `x` has the same result in this matmul as if it were computed alone, bit for bit.

    In exact programs other matmuls run in blocks of a fixed size, see `ops.exact`.
    """
    return False


@has_cpu_variant
def embed(table: Any, rows: Integer[Array, "*rows"]) -> Float[Array, "*rows D"]:
    """Look up rows of a table [V, D]: an array, or a `Weight` with an `embed`."""
    if rows.size == 1 and lowering_platform() == "gpu" and is_partitioned():  # XLA would gather the table to slice it
        return embed(table, jnp.stack([rows, rows]))[0]
    return table.embed(rows) if isinstance(table, Weight) else table[rows]


def rms_norm(
    x: Float[Array, "*batch D"],
    weight: Float[AnyArray, " D"],
    eps: float,
    offset: float = 0.0,
    *,
    nan_on_overflow: bool = False,
    round_before_weight: bool = True,
    kernels: KernelOptions = KernelOptions(),
) -> Float[Array, "*batch D"]:
    """Divide by the root mean square and multiply by the weight (Zhang & Sennrich 2019, equation 4).

    Computed in float32 at least: in bfloat16 a sum over D loses the small terms.

    Args:
      eps: added to the mean square.
      offset: added to the weight.
      nan_on_overflow: return NaN instead of zeros if the mean square overflows (costs one more kernel on a GPU).
      round_before_weight: also round to the dtype of `x` before multiplying by the weight, as transformers does, except in
        models with norms after sublayers (Gemma 3, OLMo 2).
      kernels: see `project`.

    Returns:
      In the dtype of `x`.
    """

    def normalize(x: jax.Array, weight: AnyArray) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)  # [..., 1]
        scale = lax.rsqrt(mean_square + eps)
        if nan_on_overflow:
            scale = jnp.where(mean_square < jnp.inf, scale, jnp.nan)
        normed = wide * scale
        if round_before_weight:
            normed = normed.astype(x.dtype).astype(wide.dtype)  # the weight's gradient is still summed in float32
        factor = weight.astype(wide.dtype)
        return (normed * lax.broadcast_to_rank(factor + offset if offset else factor, x.ndim)).astype(x.dtype)

    return remat(normalize, kernels)(x, weight)


def add_bias(x: Float[Array, " ..."], bias: Float[AnyArray, " ..."] | None) -> Float[Array, " ..."]:
    """Add a bias [*out] to [*batch, *out], in the dtype of `x`; None adds nothing."""
    return x if bias is None else x + bias.astype(x.dtype)


def feed_forward(
    x: Float[Array, "*batch D"],
    gate: Any,
    up: Any,
    down: Any,
    activation: Activation = "silu",
    map_tokens: Callable[..., Any] = map_all_tokens,
    biases: tuple[jax.Array | None, jax.Array | None] = (None, None),
    kernels: KernelOptions = KernelOptions(),
) -> Float[Array, "*batch D"]:
    """down(activation(gate(x)) * up(x)), called SwiGLU with silu and GeGLU with gelu (Shazeer 2020, equation 6).

    Args:
      gate, up: [F, D], arrays or `Weight`s.
      down: [D, F].
      activation: "silu", or "gelu" by the tanh approximation.
      map_tokens: applies the elementwise function between the matmuls; exact programs pass one that runs in blocks.
      biases: [F], added to the results of gate and up.
      kernels: see `project`.
    """
    project_rows = partial(project, kernels=kernels)

    def project_gated(gates: jax.Array, values: jax.Array, down: Any, biases: Any) -> jax.Array:
        """The gated activation is recomputed in the backward pass instead of saved."""

        def gated(gates: jax.Array, values: jax.Array) -> jax.Array:
            return gated_activation(add_bias(gates, biases[0]), add_bias(values, biases[1]), activation)

        return project_rows(map_tokens(gated, gates, values), down)

    run = remat(project_gated, kernels)
    return run(project_rows(x, gate), project_rows(x, up), down, biases)  # of [..., F] and [..., F]


@has_cpu_variant
def gated_activation(
    gates: Float[Array, "*batch F"], values: Float[Array, "*batch F"], activation: Activation
) -> Float[Array, "*batch F"]:
    """activation(gates) * values."""
    return ACTIVATIONS[activation](gates) * values


@has_cpu_variant
def matmul(
    x: Float[Array, "*batch D"], weight: Float[Array, "*out D"], out_dtype: Any, kernels: KernelOptions
) -> Float[Array, " ..."]:
    """Contract the last axes of `x` and `weight`: [*batch, *out]."""
    if x.dtype.itemsize < weight.dtype.itemsize and out_dtype == x.dtype and not kernels.forward_mode:
        return matmul_cast_weight((kernels.save_cast_weights, weight.dtype), x, weight)
    return _matmul(x, weight.astype(x.dtype), out_dtype)


def _matmul(x: jax.Array, weight: jax.Array, out_dtype: Any) -> jax.Array:
    one_token = x.size == x.shape[-1] and x.ndim > 1  # a vector is one of many tokens, in a vmap
    if one_token and x.dtype.itemsize == 2 and lowering_platform() == "gpu" and not is_partitioned():
        # XLA fuses sums with more around them. On an H200: 1.07 ms per step of TinyLlama, not 1.17 (docs/notes/compiled.md).
        sums = jnp.sum(x.reshape(-1).astype(jnp.float32) * weight.astype(jnp.float32), axis=-1)
        return sums.astype(out_dtype).reshape(*x.shape[:-1], *sums.shape)
    return jnp.tensordot(x, weight, axes=((-1,), (-1,)), preferred_element_type=out_dtype)


def _matmul_cast_forward(settings: tuple[bool, Any], needed: Any, x: jax.Array, weight: jax.Array) -> tuple[Any, Any]:
    matrix = weight.astype(x.dtype)
    return _matmul(x, matrix, x.dtype), (x, matrix if settings[0] else weight)


def _matmul_cast_backward(
    settings: tuple[bool, Any], needed: Any, residuals: Any, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, matrix = residuals[0], residuals[1].astype(residuals[0].dtype)
    outputs = tuple(range(matrix.ndim - 1))
    dx = jnp.tensordot(gradient, matrix, axes=(tuple(range(x.ndim - 1, gradient.ndim)), outputs))
    rows = tuple(range(x.ndim - 1))
    d_weight = jnp.tensordot(gradient, x, axes=(rows, rows), preferred_element_type=settings[1])
    return dx, d_weight


@with_gradient(_matmul_cast_forward, _matmul_cast_backward)
def matmul_cast_weight(
    settings: tuple[bool, Any], x: Float[Array, "*batch D"], weight: Float[Array, "*out D"]
) -> Float[Array, " ..."]:
    """`matmul` with a weight kept in a wider dtype than `x`, as in mixed-precision training.

    Its custom gradient computes the weight's gradient, a sum over all tokens and devices, in the weight's dtype. Autodiff
    would round it to the dtype of `x` before the sum over devices.

    Args:
      settings: (`KernelOptions.save_cast_weights`; the weight's dtype).
    """
    return _matmul(x, weight.astype(x.dtype), x.dtype)


@has_cpu_variant
def weight_gradient(
    a: Float[Array, "*batch rows M"], b: Float[Array, "*batch rows N"], out_dtype: Any = None
) -> Float[Array, "*batch M N"]:
    """a.T @ b for each batch entry: the gradient of a weight, a sum of outer products over rows.

    Args:
      out_dtype: dtype of the sum and the result; by default that of `a`, but float32 at least.
    """
    wide = out_dtype or jnp.promote_types(a.dtype, jnp.float32)
    batch, rows = tuple(range(a.ndim - 2)), (a.ndim - 2,)
    return lax.dot_general(a, b, ((rows, rows), (batch, batch)), preferred_element_type=wide)


def remat(function: F, kernels: KernelOptions) -> F:
    """`jax.checkpoint` that saves only the arguments.

    For values that are cheap to compute and large to save: elementwise functions and softmaxes (Chen et al. 2016, section
    3).
    """
    # Inside a scan over layers, no barrier against CSE is needed.
    rematerialized = jax.checkpoint(function, prevent_cse=False)
    return cast(F, partial(remat_saving_arguments, kernels, function, rematerialized))


@has_cpu_variant
def remat_saving_arguments(
    kernels: KernelOptions, function: Callable[..., Any], rematerialized: Callable[..., Any], *args: Any
) -> Any:
    """`rematerialized(*args)`, which is `function` under `jax.checkpoint`."""
    return rematerialized(*args)
