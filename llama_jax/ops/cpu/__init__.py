"""CPU variants of functions, and the reasons for them; not used on other platforms.

The other files of `ops` are written for accelerators, as plain mathematics. If XLA for CPU (jaxlib 0.10.2) needs another
form to be fast, the plain function is decorated with `platform.has_cpu_variant`, and its variant is registered in this
module, which is imported when a program for a CPU is first traced. Variants are tested against the plain functions. The
reasons:

- A 16-bit matmul without a float32 result converts both operands, including whole weights, to float32: 10 to 18 times
  slower than with a float32 result (K = 2,048, N = 4,096, 1 to 256 rows).
- Kernels for 16-bit and 8-bit matmuls need at least two rows: for a single row the whole weight is converted, 15 ms
  instead of 0.7 ms. So a row of zeros is added.
- A float32 matmul of one row with fewer than 1.6 million weights runs on one core, but a batch of them uses all cores: a
  110M model reads its feed-forward weights at 28 instead of 20 GB/s while decoding.
- A float32 matmul of 2 to 16 rows takes two to three times as long as one of a single row. One row times a small weight,
  or times a bfloat16 weight, takes twice as long as reading the weight. Native code reads every weight once.
- A matmul with one matrix of a stack first copies it, 10 to 90% of a prefill's time; native code reads it in place.
- No kernel contracts the first axis of both operands, as weight gradients need: copying the smaller operand transposed is
  two to three times faster.
- Slicing a bfloat16 array, as a scan does with stacked residuals, first converts the whole stack to float32; slicing the
  same bits as integers does not.
- Looking up rows of a bfloat16 table converts them to float32. XLA moves the conversion out of the loop over tokens, so it
  converts the whole table: 98 MB for 32,000 rows of 768, once per chunk of generated tokens.
- Elementwise arithmetic on 16-bit numbers is done in float32, and rounded after each operation.
- To compare a row with its maximum, XLA writes the maximum once per entry. JAX's random numbers are a loop over arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from llama_jax.ops import grouped, layers, platform, rotary, sampling
from llama_jax.ops.attention import blockwise, dense, paged
from llama_jax.ops.cpu import native
from llama_jax.ops.cpu.threefry import unrolled_threefry
from llama_jax.ops.gradients import gradient_of_needed, with_gradient
from llama_jax.ops.layers import Weight, is_quantized
from llama_jax.ops.platform import (
    KernelOptions,
    cpu_variant_of,
    current_mesh_sizes,
    is_partitioned,
    log_backend,
    lowering_platform,
    pack_bits,
    unpack_bits,
)
from llama_jax.ops.weights import layers as stacks
from llama_jax.ops.weights import quantized_matmul
from llama_jax.ops.weights.layers import LayerWeight


def has_16_bit_floats(*arrays: Any) -> bool:
    """Whether any of the arrays has 16-bit floating-point numbers."""
    return any(jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2 for x in arrays)


# --- matmuls -------------------------------------------------------------------------------------------------------------


# A matmul of one row is split over this many parts of a weight whose size is in this range.
SPLIT_PARTS, MIN_SPLIT_SIZE, MAX_SPLIT_SIZE = 8, 2**19, 2**21
MAX_NATIVE_ROWS = {"float32": 32, "bfloat16": 4}  # for native matmuls without tiles
MIN_NATIVE_SIZE, UNLIMITED_ROWS = 2**16, 2**62  # minimum size of a weight; maximum number of rows with tiles


@cpu_variant_of(layers.matmul, for_accelerator_targets=True)
def matmul_on_cpu(
    plain: Callable[..., jax.Array], x: jax.Array, weight: jax.Array, out_dtype: Any, kernels: KernelOptions
) -> jax.Array:
    """`layers.matmul` of matrices; in 16 bits with a float32 result and at least two rows.

    XLA for CPU has no matmul with a 16-bit result. It converts one to a float32 result, except when it plans for an
    accelerator. With more axes it copies a transpose: of the weight in every matmul, of `x` for the weight's gradient.
    """
    if kernels.forward_mode:
        return plain(x, weight, out_dtype, kernels)
    if weight.ndim > 2 or x.ndim > 2:
        product = matmul_on_cpu(plain, _to_rows(x), _to_rows(weight), out_dtype, kernels)
        return product.reshape(*x.shape[:-1], *weight.shape[:-1])
    if _has_native_matmul(x, weight, kernels):
        return _native_matmul(kernels.exact, x, weight).astype(out_dtype)
    if not has_16_bit_floats(x):
        run = functools.partial(plain, out_dtype=out_dtype, kernels=kernels)
        return _matmul_one_row(run, x, weight) if x.shape[:-1] == (1,) else run(x, weight)
    if math.prod(x.shape[:-1]) > 1 or lowering_platform() != "cpu":
        return _matmul_16_bit(x, weight, kernels).astype(out_dtype)
    rows = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
    return _matmul_16_bit(rows, weight, kernels)[:1].reshape(*x.shape[:-1], *weight.shape[:-1]).astype(out_dtype)


def _matmul_one_row(run: Callable[..., jax.Array], x: jax.Array, weight: jax.Array) -> jax.Array:
    """[1, D] times [N, D], as a batch of matmuls with parts of the weight."""
    divisible = weight.ndim == 2 and weight.shape[0] % SPLIT_PARTS == 0 and MIN_SPLIT_SIZE <= weight.size < MAX_SPLIT_SIZE
    if not divisible or is_partitioned() or lowering_platform() != "cpu":
        return run(x, weight)
    parts = weight.reshape(SPLIT_PARTS, -1, weight.shape[1])
    rows = jnp.broadcast_to(x, (SPLIT_PARTS, *x.shape))  # the batch axis
    return jax.vmap(run)(rows, parts).reshape(1, -1)


def _has_native_matmul(
    x: jax.Array | jax.ShapeDtypeStruct, weight: jax.Array | jax.ShapeDtypeStruct, kernels: KernelOptions
) -> bool:
    """Whether `native` multiplies these rows: the program may use native code and the shapes suit it."""
    max_rows = _max_native_rows(x.dtype, kernels) if x.dtype == weight.dtype and x.ndim == weight.ndim == 2 else 0
    suits = kernels.native_code and 0 < len(x) <= max_rows and weight.size >= MIN_NATIVE_SIZE
    return suits and native.usable(native.library_name(f"floats_{weight.dtype}", kernels.exact))


@cpu_variant_of(layers.is_batch_invariant)
def is_batch_invariant_on_cpu(plain: Callable[..., bool], x: jax.Array, weight: Any, kernels: KernelOptions) -> bool:
    """`layers.is_batch_invariant`: true if all parts of the weight are multiplied natively."""
    stack = getattr(weight, "stack", weight)
    if parts := getattr(stack, "parts", getattr(stack, "stacks", ())):
        of = lambda part: part if stack is weight else weight.replace(stack=part)
        return all(is_batch_invariant_on_cpu(plain, x, of(part), kernels) for part in parts)
    if is_quantized(stack):
        return is_native(stack.quant_format, kernels.exact)
    if isinstance(stack, Weight):
        return plain(x, weight, kernels)
    rows, matrix = (jax.ShapeDtypeStruct((math.prod(y.shape[:-1]), y.shape[-1]), y.dtype) for y in (x, weight))
    return _has_native_matmul(rows, matrix, kernels)


def _max_native_rows(dtype: Any, kernels: KernelOptions) -> int:
    rows = MAX_NATIVE_ROWS.get(str(dtype), 0)
    if rows and native.has_tiles():
        return UNLIMITED_ROWS
    return 0 if kernels.exact else rows  # in an exact program no matmul depends on the number of rows


def _native_matmul_forward(exact: bool, needed: Any, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    return native.multiply_floats(x, weight, exact=exact), (x, weight)


def _native_matmul_backward(exact: bool, needed: Any, residuals: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = residuals
    return (gradient @ weight).astype(x.dtype), (gradient.T @ x).astype(weight.dtype)


@with_gradient(_native_matmul_forward, _native_matmul_backward)
def _native_matmul(exact: bool, x: jax.Array, weight: jax.Array) -> jax.Array:
    return native.multiply_floats(x, weight, exact=exact)


def _matmul_16_bit(x: jax.Array, weight: jax.Array, kernels: KernelOptions) -> jax.Array:
    """[..., D] times [*out, D]: float32[..., *out]."""
    return _matmul_cast_to_16_bits((kernels.save_cast_weights, weight.dtype), x, weight)


def _matmul_16_bit_forward(settings: tuple[bool, Any], needed: Any, x: jax.Array, weight: jax.Array) -> tuple[Any, Any]:
    matrix = weight.astype(x.dtype)
    return _matmul_to_float32(x, matrix), pack_bits((x, matrix if settings[0] else weight))


def _matmul_16_bit_backward(
    settings: tuple[bool, Any], needed: Any, residuals: Any, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, matrix = unpack_bits(residuals)
    rows = gradient.astype(x.dtype)
    dx = lax.dot_general(rows, matrix.astype(x.dtype), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), _weight_gradient_16_bit(rows, x, jnp.float32).astype(settings[1])


@with_gradient(_matmul_16_bit_forward, _matmul_16_bit_backward)
def _matmul_cast_to_16_bits(settings: tuple[bool, Any], x: jax.Array, weight: jax.Array) -> jax.Array:
    """`layers.matmul_cast_weight` of matrices, with 16-bit matmuls in its gradient, where JAX would use float32."""
    return _matmul_to_float32(x, weight.astype(x.dtype))


@cpu_variant_of(layers.weight_gradient)
def weight_gradient_on_cpu(plain: Callable[..., jax.Array], a: jax.Array, b: jax.Array, out_dtype: Any = None) -> jax.Array:
    """`layers.weight_gradient`, for 16-bit numbers."""
    if not has_16_bit_floats(a, b):
        return plain(a, b, out_dtype)
    return _weight_gradient_16_bit(a, b, out_dtype or jnp.promote_types(a.dtype, jnp.float32))


def _weight_gradient_16_bit(a: jax.Array, b: jax.Array, out_dtype: Any) -> jax.Array:
    """Transposes the smaller operand. The added row of zeros keeps XLA from merging the transpose into the matmul."""
    batch = tuple(range(a.ndim - 2))
    if lowering_platform() != "cpu":  # planning
        return lax.dot_general(a, b, (((a.ndim - 2,), (b.ndim - 2,)), (batch, batch)), preferred_element_type=out_dtype)
    if a.shape[-1] > b.shape[-1]:
        return _weight_gradient_16_bit(b, a, out_dtype).swapaxes(-1, -2)
    transposed = jnp.pad(a.swapaxes(-1, -2), [*[(0, 0)] * len(batch), (0, 1), (0, 0)])
    dimensions = (((a.ndim - 1,), (a.ndim - 2,)), (batch, batch))
    return lax.dot_general(transposed, b, dimensions, preferred_element_type=out_dtype)[..., :-1, :]


def _matmul_to_float32(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    return lax.dot_general(rows, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _to_rows(x: jax.Array) -> jax.Array:
    """[..., D] as a matrix [rows, D]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


FINE_PER_COARSE = 254  # units of the second integer of `split_into_int8` per unit of the first
# Rows of an int8 matmul: 4,096 x 4,096 weights take 1.16, 1.00, 0.81, 0.76 ms with 2, 4, 8, 16 rows (Xeon, AMX).
MIN_INT8_ROWS = 8


@cpu_variant_of(quantized_matmul.multiply)
def multiply_quantized(
    plain: Callable[..., jax.Array],
    x: jax.Array,
    planes: tuple[jax.Array, ...],
    form: Any,
    kernels: KernelOptions = KernelOptions(),
) -> jax.Array:
    """`quantized_matmul.multiply`: by `native` if there is a compiler and no mesh.

    Otherwise, weights with one scale per row are multiplied as integers. XLA would write weights that are converted to
    floats to memory, and move the conversion out of the loop over tokens, so that the whole model would be dense in memory.
    Each row of `x` becomes two rows of integers, see `split_into_int8`. The second one costs nothing, because fewer than
    eight rows are padded with zeros anyway.
    """
    if is_native(form.name, kernels.exact):
        return native.multiply_quantized(x, planes, form.name, exact=kernels.exact)
    if form.name != "int8":
        return plain(x.astype(jnp.float32), planes, form, kernels)
    values, scales = planes
    coarse, fine, factors = split_into_int8(x)
    rows = jnp.concatenate([coarse, fine])
    padding = max(0, MIN_INT8_ROWS - len(rows))
    dimensions = (((1,), (1,)), ((), ()))
    padded = jnp.pad(rows, ((0, padding), (0, 0)))
    products = lax.dot_general(padded, values, dimensions, preferred_element_type=jnp.int32)[: len(rows)].astype(jnp.float32)
    coarse, fine = jnp.split(products, 2)
    return (coarse + fine / FINE_PER_COARSE) * factors * scales


@cpu_variant_of(stacks.multiply_group)
def multiply_group_on_cpu(
    plain: Callable[..., jax.Array], x: jax.Array, weight: Any, group: jax.Array, out_dtype: Any, kernels: KernelOptions
) -> jax.Array:
    """`weights.layers.multiply_group`: by `native`, which reads the group's matrix in place. XLA would copy it."""
    if is_quantized(weight) and is_native(weight.quant_format, kernels.exact):
        return native.multiply_quantized(x, weight.planes, weight.quant_format, group, exact=kernels.exact).astype(out_dtype)
    matrix = jax.ShapeDtypeStruct(weight.shape[1:], weight.dtype)
    if not isinstance(weight, Weight) and _has_native_matmul(x, matrix, kernels):
        return native.multiply_floats(x, weight, group, exact=kernels.exact).astype(out_dtype)
    return plain(x, weight, group, out_dtype, kernels)


@cpu_variant_of(grouped.choose_row_blocks)
def choose_row_blocks_on_cpu(plain: Callable[..., Any], weight: Any, rows: int, groups: int, kernels: KernelOptions) -> Any:
    """`grouped`'s blocks. Small groups have blocks that suit `native`, which reads a matrix once for each block."""
    blocks = plain(weight, rows, groups, kernels)
    is_float = not isinstance(weight.stack if isinstance(weight, LayerWeight) else weight, Weight)
    max_rows = 0
    if kernels.native_code and is_float:
        max_rows = min(_max_native_rows(weight.dtype, kernels), max(MAX_NATIVE_ROWS.values()))
    if rows > max_rows * groups:
        return blocks
    lengths = tuple(1 << i for i in range(max_rows.bit_length() - 1, -1, -1))
    return blocks._replace(lengths=lengths, at_once=True).within(rows)


def is_native(quant_format: str, exact: bool) -> bool:
    """Whether the program traced now multiplies weights of this format with native code."""
    return (
        quant_format in native.NATIVE_FORMATS
        and lowering_platform() == "cpu"
        and not is_partitioned()
        and native.usable(native.library_name(f"quantized_{quant_format}", exact))
    )


@cpu_variant_of(platform.kernel_options)
def kernel_options_on_cpu(plain: Callable[..., KernelOptions], params: Any, options: KernelOptions) -> KernelOptions:
    """`platform.kernel_options`: with native code if any quantized weight has a native format."""
    if options.forward_mode:
        return options
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    formats = {leaf.quant_format for leaf in leaves if is_quantized(leaf)} & {*native.NATIVE_FORMATS}
    if not is_partitioned():  # compiled in parallel
        native.prepare(native.library_name(f"quantized_{name}", options.exact) for name in formats)
    has_native = any(is_native(name, options.exact) for name in formats)
    return options._replace(native_code=options.native_code or has_native)


def compile_native(quant_formats: Iterable[str], keys: jax.ShapeDtypeStruct, exact: bool) -> None:
    """Start to compile the missing native kernels for decoding a model on one CPU, without waiting.

    Args:
      quant_formats: of its quantized weights; empty for a model of floats.
      keys: [H], in the dtype of the floats.
      exact: for exact programs.
    """
    if lowering_platform() == "cpu" and str(keys.dtype) in MAX_NATIVE_ROWS:
        matmuls = [f"quantized_{name}" for name in quant_formats if name in native.NATIVE_FORMATS]
        libraries = native.attending(keys), *(matmuls or [f"floats_{keys.dtype}"]), "rows"  # attention takes longest
        native.prepare(native.library_name(library, exact) for library in libraries)


@cpu_variant_of(quantized_matmul.scale_after_matmul)
def scale_after_matmul_on_cpu(plain: Callable[..., bool], form: Any) -> bool:
    """`quantized_matmul.scale_after_matmul`: not for 8-bit floats, which XLA would write as wider ones."""
    return form.name == "int8"


@cpu_variant_of(quantized_matmul.scale_per_group_sum)
def scale_per_group_sum_on_cpu(plain: Callable[..., bool], form: Any, tokens: int) -> bool:
    """`quantized_matmul.scale_per_group_sum`: never, because XLA would write the integers as floats."""
    return False


@cpu_variant_of(stacks.layer_weight)
def layer_weight_on_cpu(plain: Callable[..., Any], stack: Any, layer: int | jax.Array) -> Any:
    """`weights.layers.layer_weight`: XLA would copy a slice; native matmuls take the stack and the layer."""
    return plain(stack, layer) if isinstance(layer, int) or is_partitioned() else LayerWeight(stack, layer)


@cpu_variant_of(stacks.scan_reads_in_place)
def scan_reads_in_place_on_cpu(plain: Callable[..., bool], leaf: Any, *, is_constant: bool) -> bool:
    """`weights.layers.scan_reads_in_place`: also all constants and quantized weights."""
    return plain(leaf, is_constant=is_constant) or (not is_partitioned() and (is_constant or is_quantized(leaf)))


@cpu_variant_of(quantized_matmul.decoded_at_once)
def decoded_at_once_on_cpu(plain: Callable[[], int]) -> int:
    """`quantized_matmul.decoded_at_once`: 1 MB in float32, which fits a core's L2 cache."""
    return min(plain(), 1 << 18)


def split_into_int8(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[..., D] as (int8[..., D] + int8[..., D] / 254) * float32[..., 1].

    The error is at most 1.6e-5 of the row's largest entry, the least possible with 16 bits.
    """
    x = x.astype(jnp.float32)
    factors = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    scaled = x / jnp.where(factors == 0, 1, factors)
    coarse = jnp.round(scaled)
    return coarse.astype(jnp.int8), jnp.round((scaled - coarse) * FINE_PER_COARSE).astype(jnp.int8), factors


@cpu_variant_of(layers.embed)
def embed_on_cpu(plain: Callable[..., jax.Array], table: Any, rows: jax.Array) -> jax.Array:
    """`layers.embed`. The barrier makes a 16-bit table depend on the rows, so that XLA converts only these, in the loop."""
    return plain(*lax.optimization_barrier((table, rows))) if has_16_bit_floats(table) else plain(table, rows)


# --- sampling -------------------------------------------------------------------------------------------------------------


ARGMAX_PART = 64  # scores per part of a row


@cpu_variant_of(sampling.argmax)
def argmax_on_cpu(plain: Callable[[jax.Array], jax.Array], scores: jax.Array) -> jax.Array:
    """`sampling.argmax`: first the part that contains the largest score, then its index in the part.

    XLA would write each row's maximum once per score, compare the two arrays, and then write the indices: 1.8 ms for 64 rows
    of 32,000 scores, instead of 0.4 ms.
    """
    if scores.shape[-1] % ARGMAX_PART or is_partitioned():
        return plain(scores)
    parts = scores.reshape(len(scores), -1, ARGMAX_PART)
    best = plain(jnp.max(parts, axis=-1))
    return best * ARGMAX_PART + plain(jax.vmap(lambda row, part: row[part])(parts, best))


@cpu_variant_of(sampling.random_key)
def random_key_on_cpu(plain: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    """`sampling.random_key`: a key with the same random numbers, computed by one fused loop.

    On CPUs, JAX computes threefry's rounds in a loop that writes and reads all numbers in each of five iterations: 0.23 ms
    for a row of 32,000 and 19 ms for 64 rows. Unrolled: 0.07 and 5 ms.
    """
    settings: Any = jax.config
    is_default = settings.jax_default_prng_impl == "threefry2x32" and settings.jax_threefry_partitionable
    return plain(*args, impl=unrolled_threefry()) if is_default else plain(*args)


# --- rotary embedding --------------------------------------------------------------------------------------------------


@cpu_variant_of(rotary.rotary_table)
def rotary_table_on_cpu(plain: Callable[..., Any], *args: Any) -> tuple[jax.Array, jax.Array]:
    """`rotary.rotary_table`, computed once.

    XLA fuses cosines into the operations that read them, even through an optimization barrier, and so computes them again
    for every layer and head: 10% of a prefill of 256 tokens with int8 weights. It does not fuse a matmul; one with the
    identity matrix changes no bit.
    """
    cos_sin = jnp.concatenate(plain(*args), axis=-1)
    identity = jnp.eye(cos_sin.shape[-1], dtype=cos_sin.dtype)
    cos, sin = jnp.split(jnp.matmul(cos_sin, identity, precision=lax.Precision.HIGHEST), 2, axis=-1)
    return cos, sin


# --- residuals -----------------------------------------------------------------------------------------------------------


class Bits(struct.PyTreeNode):
    """An array of 16-bit floating-point numbers as integers of the same bits."""

    bits: jax.Array
    dtype: Any = struct.field(pytree_node=False)


@cpu_variant_of(platform.pack_bits)
def pack_bits_of_floats(plain: Callable[[Any], Any], tree: Any) -> Any:
    """`platform.pack_bits`: 16-bit floating-point arrays as `Bits`."""

    return jax.tree.map(lambda x: Bits(_as_bits_p.bind(x), x.dtype) if has_16_bit_floats(x) else x, tree)


_as_bits_p = Primitive("as_bits")
_as_bits_p.def_impl(lambda x: lax.bitcast_convert_type(x, jnp.uint16))
_as_bits_p.def_abstract_eval(lambda x: x.update(dtype=jnp.dtype(jnp.uint16), weak_type=False))
mlir.register_lowering(_as_bits_p, mlir.lower_fun(_as_bits_p.impl, multiple_results=False))
batching.defvectorized(_as_bits_p)


def _no_derivative(*_: Any, **__: Any) -> Any:
    """Without this rule, JAX would treat the derivative of the bits as zero."""
    raise TypeError(
        "second derivatives in 16 bits on CPUs need ComputeOptions(forward_mode=True); derivatives of a pass with a cache"
        " are not supported in 16 bits, compute them in float32"
    )


ad.primitive_jvps[_as_bits_p] = _no_derivative


@cpu_variant_of(platform.unpack_bits)
def unpack_bits_of_floats(plain: Callable[[Any], Any], tree: Any) -> Any:
    """`platform.unpack_bits`."""

    def unpacked(x: Any) -> jax.Array:
        return lax.bitcast_convert_type(x.bits, x.dtype) if isinstance(x, Bits) else x

    return jax.tree.map(unpacked, tree, is_leaf=lambda x: isinstance(x, Bits))


@cpu_variant_of(layers.remat_saving_arguments)
def remat_on_cpu(
    plain: Callable[..., Any],
    kernels: KernelOptions,
    function: Callable[..., jax.Array],
    rematerialized: Callable[..., jax.Array],
    *args: Any,
) -> jax.Array:
    """`layers.remat`, with the residuals (the arguments) kept as `Bits` if they have 16 bits."""
    if kernels.forward_mode or not has_16_bit_floats(*jax.tree.leaves(args)):
        return plain(kernels, function, rematerialized, *args)
    return _call_saving_bits(function, *args)


def _call_saving_bits_forward(function: Callable[..., jax.Array], needed: Any, *args: Any) -> tuple[jax.Array, Any]:
    return function(*args), pack_bits(args)


def _call_saving_bits_backward(
    function: Callable[..., jax.Array], needed: Any, residuals: Any, gradient: jax.Array
) -> tuple[Any, ...]:
    # Of what is needed only: JAX would differentiate quantized weights too.
    gradients = gradient_of_needed(lambda args: function(*args), unpack_bits(residuals), needed, gradient)
    return gradients or (None,) * len(needed)


@with_gradient(_call_saving_bits_forward, _call_saving_bits_backward)
def _call_saving_bits(function: Callable[..., jax.Array], *args: Any) -> jax.Array:
    return function(*args)


# --- elementwise ---------------------------------------------------------------------------------------------------------


@cpu_variant_of(layers.gated_activation)
def gated_activation_on_cpu(
    plain: Callable[..., jax.Array], gates: jax.Array, values: jax.Array, activation: str
) -> jax.Array:
    """`layers.gated_activation`: 16-bit values are computed in float32 and rounded once."""
    if not has_16_bit_floats(gates):
        return plain(gates, values, activation)
    return plain(gates.astype(jnp.float32), values.astype(jnp.float32), activation).astype(gates.dtype)


# --- attention -----------------------------------------------------------------------------------------------------------
#
# The scores of a block, for all rows and heads, should stay in the processor's cache.

SCORES_IN_CACHE, MIN_BLOCK_SIDE, MAX_BLOCK_SIDE = 2**21, 128, 512  # measured by experiments/bench_long_context.py


@cpu_variant_of(paged.scatter_rows)
def scatter_rows_on_cpu(
    plain: Callable[..., jax.Array], pages: jax.Array, rows: jax.Array, indices: jax.Array, kernels: KernelOptions
) -> jax.Array:
    """`paged.scatter_rows`: natively, in place. XLA would copy all pages to write 16-bit values as float32."""
    if kernels.native_code and not _partitioned_by_xla() and native.usable("rows"):
        return native.put_rows(pages, rows, indices)
    scatter = functools.partial(plain, indices=indices, kernels=kernels)
    return unpack_bits(jax.tree.map(scatter, pack_bits(pages), pack_bits(rows)))


@cpu_variant_of(paged.attend_on_device)
def attend_paged_on_cpu(
    plain: Callable[..., jax.Array],
    queries: jax.Array,
    view: Any,
    *,
    sinks: int,
    sink_queries: Any,
    kernels: KernelOptions,
    **options: Any,
) -> jax.Array:
    """`paged.attend_on_device`: natively, reading pages in place. XLA would first copy the pages of each row."""
    dtype = str(view.pages.dtype)
    suits = kernels.native_code and not _partitioned_by_xla() and not sinks and dtype in ("float32", "bfloat16", "int8")
    library = native.library_name(native.attending(getattr(view.pages, "values", view.pages)), kernels.exact)
    if not (suits and native.usable(library)):
        return plain(queries, view, sinks=sinks, sink_queries=sink_queries, kernels=kernels, **options)
    log_backend("native", "on cpu")
    return native.attend_pages(queries, view, exact=kernels.exact, **options).astype(queries.dtype)


def _partitioned_by_xla() -> bool:
    """Whether XLA partitions the program traced now over devices; false inside `shard_map`."""
    return math.prod(current_mesh_sizes().values()) > 1


@cpu_variant_of(dense.query_key_scores)
@cpu_variant_of(dense.apply_weights)
def multiply_heads(plain: Callable[..., jax.Array], a: jax.Array, b: jax.Array) -> jax.Array:
    """`dense.query_key_scores` and `dense.apply_weights`, padded to at least two queries."""
    new, groups = a.shape[-3:-1]
    if new * groups > 1 or a.dtype.itemsize > 2:
        return plain(a, b)
    return plain(jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, 1), (0, 0)]), b)[..., :1, :]


@cpu_variant_of(blockwise.block_side)
def block_side_on_cpu(plain: Callable[..., int], heads: int) -> int:
    """`attention.blockwise.block_side`: scores along one side of a block."""
    fitting = 1 << (int(math.sqrt(SCORES_IN_CACHE / heads)).bit_length() - 1)
    return min(max(fitting, MIN_BLOCK_SIDE), MAX_BLOCK_SIDE)
