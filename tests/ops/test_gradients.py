"""Functions with a custom gradient: in forward mode the same derivative, and without the option an error that names it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax import ops
from llama_jax.ops.attention import AttentionMask, KVView
from llama_jax.ops.cross_entropy import LogitOptions, cross_entropy
from llama_jax.ops.grouped import grouped_matmul
from llama_jax.ops.platform import KernelOptions
from llama_jax.ops.weights.layers import LayerWeight
from llama_jax.ops.weights.quantized_matmul import quantize_matrix

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((6, 64)), jnp.float32)
WEIGHT = jnp.asarray(RNG.standard_normal((16, 64)) / 8, jnp.float32)
STACK = jnp.stack([WEIGHT, WEIGHT[::-1]])
SIZES = jnp.array([4, 2], jnp.int32)


def quantized(matrix):
    return quantize_matrix(np.asarray(matrix), "int8")


def attend(kernels, x):
    queries = x.reshape(1, 1, 6, 4, 16)
    view = KVView(queries[..., 0, :], queries[..., 1, :])
    options = dict(scale=1.0, backend="blockwise", forward_mode=kernels.forward_mode)
    return ops.attend(queries, view, AttentionMask.causal(6), **options)


def total_loss(kernels, x):
    targets = jnp.arange(6, dtype=jnp.int32)[None]
    return cross_entropy(x[None], WEIGHT, targets, jnp.ones((1, 6)), LogitOptions(4, kernels=kernels)).loss


def in_layer(stack, kernels, x):
    return ops.project(x, LayerWeight(stack, jnp.int32(1)), kernels=kernels)


def in_groups(weight, kernels, x):
    return grouped_matmul(x, weight, SIZES, kernels=kernels)


def normalize(kernels, x):
    return ops.rms_norm(x, jnp.ones(64, x.dtype), 1e-5, kernels=kernels)


FUNCTIONS = {
    "a cast weight": lambda kernels, x: ops.project(x.astype(jnp.bfloat16), WEIGHT, kernels=kernels),
    "a quantized weight": lambda kernels, x: ops.project(x, quantized(WEIGHT), kernels=kernels),
    "a layer of a stack": partial(in_layer, STACK),
    "a layer of a quantized stack": partial(in_layer, quantized(STACK)),
    "groups, cast": lambda kernels, x: in_groups(STACK, kernels, x.astype(jnp.bfloat16)),
    "groups, quantized": partial(in_groups, quantized(STACK)),
    "attention in blocks": attend,
    "the loss": total_loss,
    "a norm in 16 bits": lambda kernels, x: normalize(kernels, x.astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_is_the_custom_gradient_along_a_direction(name):
    function = lambda forward_mode, x: jnp.sum(
        jnp.sin(FUNCTIONS[name](KernelOptions(forward_mode=forward_mode), x).astype(jnp.float32))
    )
    along = jnp.asarray(np.random.default_rng(1).standard_normal(X.shape), jnp.float32)
    slope = jax.jit(lambda x, along: jax.jvp(partial(function, True), (x,), (along,))[1])(X, along)
    gradient = jax.jit(jax.grad(partial(function, False)))(X)
    tolerance = 0.03 if "cast" in name or "16 bits" in name else 2e-3
    np.testing.assert_allclose(slope, jnp.vdot(gradient, along), rtol=tolerance, atol=tolerance * np.linalg.norm(gradient))
    for forward in (lambda x: jax.jvp(partial(function, False), (x,), (x,)), jax.linearize(partial(function, False), X)[1]):
        with pytest.raises(TypeError, match=r"needs ComputeOptions\(forward_mode=True\)"):
            jax.jit(forward)(X)
