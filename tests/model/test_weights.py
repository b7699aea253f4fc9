"""A leaf that is no array takes a weight's place: here one with a low-rank adapter."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit_dequantize, jit_init, jit_logits

import llama_jax
from llama_jax import ops
from llama_jax.errors import CheckpointError
from llama_jax.model.params import Llama, is_matrix_in_block
from llama_jax.model.trees import quantize
from llama_jax.ops.layers import Weight
from llama_jax.ops.platform import KernelOptions
from llama_jax.training.loss import next_token_loss


class Adapted(Weight):
    """A weight [*out, D] and the product of two thin ones, [*out, R] and [R, D] (Hu et al. 2021, section 4.1)."""

    weight: Any
    up: Any
    down: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.weight.dtype

    def project(self, x: jax.Array, out_dtype: Any, kernels: KernelOptions) -> jax.Array:
        project = partial(ops.project, kernels=kernels)
        thin = project(x, self.down)
        return project(x, self.weight, out_dtype=out_dtype) + project(thin, self.up, out_dtype=out_dtype)

    def merged(self) -> jax.Array:
        layers = "l" * (self.down.ndim - 2)
        return self.weight + jnp.einsum(f"{layers}...r,{layers}rd->{layers}...d", self.up, self.down)


def adapt(params: Llama) -> Llama:
    """An adapter of rank 2 for every matrix of every layer."""

    def of(path, weight):
        if not is_matrix_in_block(path):
            return weight
        rng = np.random.default_rng(len(jax.tree_util.keystr(path)))
        up, down = (
            rng.normal(0, 0.2, shape).astype(np.float32)
            for shape in ((*weight.shape[:-1], 2), (len(weight), 2, weight.shape[-1]))
        )
        return Adapted(weight, jnp.asarray(up), jnp.asarray(down))

    return params.replace(blocks=jax.tree_util.tree_map_with_path(of, params.blocks))


def merge(params: Llama) -> Llama:
    is_adapted = lambda leaf: isinstance(leaf, Adapted)
    return jax.tree.map(lambda leaf: leaf.merged() if is_adapted(leaf) else leaf, params, is_leaf=is_adapted)


@pytest.fixture(scope="module")
def adapted(models):
    config, params = models["gqa"]
    return config, adapt(params)


@pytest.mark.slow
def test_logits_and_tokens_are_those_of_the_merged_weights(adapted):
    config, params = adapted
    tokens = jnp.asarray([[1, 5, 9, 2, 7], [3, 3, 8, 1, 4]])
    found, wanted = (jit_logits(config, one, tokens) for one in (params, merge(params)))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    ours, theirs = (llama_jax.generate(config, one, [[1, 5], [2]], max_new_tokens=8) for one in (params, merge(params)))
    assert [row.tokens for row in ours] == [row.tokens for row in theirs]


def test_it_is_no_weight_for_a_file(adapted, tmp_path):
    config, params = adapted
    for name in ("a.gguf", "folder"):
        with pytest.raises(CheckpointError, match=r"blocks.attention.qkv is a Adapted; files store only weights: merge it"):
            llama_jax.save(tmp_path / name, config, params)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_gradients_of_the_parts_are_the_chain_rule_of_the_whole(adapted):
    config, params = adapted
    batch = llama_jax.Batch(jnp.asarray([[1, 5, 9, 2, 7, 3]]))
    loss = lambda params: next_token_loss(config, params, batch)
    parts, whole = jax.jit(jax.grad(loss))(params), jax.jit(jax.grad(loss))(merge(params))
    for ours, total, leaf in (
        (llama_jax.layers_of(tree)[0].attention.qkv for tree in (parts, whole, params)),
        (llama_jax.layers_of(tree)[1].feed_forward.down for tree in (parts, whole, params)),
    ):
        np.testing.assert_allclose(ours.weight, total, rtol=1e-4, atol=1e-6)
        total, up, down = map(np.asarray, (total, leaf.up, leaf.down))
        np.testing.assert_allclose(ours.up, np.tensordot(total, down.T, axes=1), rtol=1e-3, atol=1e-6)
        rows = total.reshape(-1, total.shape[-1])
        np.testing.assert_allclose(ours.down, up.reshape(-1, 2).T @ rows, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_the_head_of_a_loss_may_have_an_adapter(models):
    config, params = models["gqa"]
    rng = np.random.default_rng(0)
    head = params.lm_head if params.lm_head is not None else params.embedding
    config = dataclasses.replace(config, tie_embeddings=False)
    parts = (rng.normal(0, 0.2, shape).astype(np.float32) for shape in ((head.shape[0], 2), (2, head.shape[1])))
    params = params.replace(lm_head=Adapted(head, *map(jnp.asarray, parts)))
    batch = llama_jax.Batch(jnp.asarray([[1, 5, 9, 2, 7, 3], [3, 3, 8, 1, 4, 0]]))

    @jax.jit
    def loss(params):
        return next_token_loss(config, params, batch, llama_jax.LossOptions(chunk=2, z_loss=1e-3))

    whole = params.replace(lm_head=params.lm_head.merged())
    np.testing.assert_allclose(loss(params), loss(whole), rtol=1e-5)
    ours, wanted = jax.jit(jax.grad(loss))(params), jax.jit(jax.grad(loss))(whole)
    np.testing.assert_allclose(ours.embedding, wanted.embedding, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(ours.lm_head.weight, wanted.lm_head, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(ours.lm_head.up, wanted.lm_head @ params.lm_head.down.T, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_the_gradient_goes_through_a_frozen_quantized_model(kind):
    config = llama_jax.LlamaConfig(
        vocab_size=40, dim=128, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=128, max_seq_len=32, norm_eps=1e-5,
        rope_theta=10_000.0, tie_embeddings=True,
    )  # fmt: skip
    params = jit_init(config, jax.random.key(1))
    frozen = quantize(params, kind)
    batch = llama_jax.Batch(jnp.asarray([[1, 5, 9, 2, 7, 3, 30, 11]]))

    @jax.jit
    def of_norm(norm, model):
        return next_token_loss(config, model.replace(final_norm=norm), batch)

    gradient = jax.jit(jax.grad(of_norm))
    ours, wanted = (gradient(params.final_norm, model) for model in (frozen, jit_dequantize(frozen)))
    np.testing.assert_allclose(ours, wanted, atol=2e-3 * float(jnp.abs(wanted).max()))  # activations in 16 bits on a CPU
