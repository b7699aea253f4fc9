"""Derivatives of a model in float64 beside finite differences: by example, by embedding, through generation and scales."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import as_float64, jit_init
from jax.tree_util import Partial

import llama_jax
from llama_jax import Batch, ComputeOptions, Lora, LossOptions, ops
from llama_jax.model.trees import dequantize, quantize
from llama_jax.ops.platform import KernelOptions
from llama_jax.ops.weights.formats import QUANT_FORMATS
from llama_jax.ops.weights.quantized_matmul import QuantizedWeight, quantize_matrix

FORWARD_MODE = KernelOptions(forward_mode=True)


@pytest.fixture
def model(models):
    """(config, params in float64, tokens int32[4, 10])."""
    config, params = models["tied"]
    with jax.enable_x64(True):
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, (4, 10), np.int32)
        yield config, as_float64(params), tokens


def difference(function, at, along, step=1e-5):
    """The derivative of a function of one array along a direction, by a central difference."""
    run = jax.jit(function)
    high, low = (np.asarray(run(np.asarray(at) + sign * step * np.asarray(along))) for sign in (1, -1))
    return (high - low) / (2 * step)


def direction_like(x, seed=0):
    return np.random.default_rng(seed).standard_normal(x.shape)


def test_gradients_of_examples_by_vmap_are_those_of_each_alone(model):
    config, params, tokens = model
    gradient = lambda params, row: jax.grad(lambda p: llama_jax.next_token_loss(config, p, Batch(row[None])))(params)
    by_vmap = jax.jit(jax.vmap(gradient, (None, 0)))(params, tokens)
    one = jax.jit(gradient)
    for i, row in enumerate(tokens):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-8, atol=1e-12), by_vmap, one(params, row))


@pytest.mark.slow
def test_influence_is_what_retraining_with_more_of_an_example_changes(model):
    """The weights of the final norm, trained to the optimum with and without a little more of each example."""
    config, params, tokens = model
    start = jnp.asarray(params.final_norm)

    def loss(norm, row):
        return llama_jax.next_token_loss(config, params.replace(final_norm=norm), Batch(row[None]))

    def objective(norm, shares):
        losses = jax.vmap(loss, (None, 0))(norm, tokens[:3])
        return losses @ shares + 0.5 * jnp.sum((norm - start) ** 2)

    @jax.jit
    def trained(shares):
        def newton(norm, _):
            hessian, gradient = jax.hessian(objective)(norm, shares), jax.grad(objective)(norm, shares)
            return norm - jnp.linalg.solve(hessian, gradient), jnp.linalg.norm(gradient)

        norm, lengths = jax.lax.scan(newton, start, None, length=8)
        return norm, lengths[-1], loss(norm, tokens[3])

    @jax.jit
    def influences(norm, shares):
        """d (loss of the last row) / d (share of each of the others), by products with the Hessian."""
        hvp = lambda v: jax.jvp(lambda norm: jax.grad(objective)(norm, shares), (norm,), (v,))[1]
        solved, _ = jax.scipy.sparse.linalg.cg(hvp, jax.grad(loss)(norm, tokens[3]), tol=1e-12)
        return -jax.vmap(lambda row: jax.grad(loss)(norm, row) @ solved)(tokens[:3])

    shares = np.full(3, 1 / 3)
    norm, length, _ = trained(shares)
    assert length < 1e-10
    step = 1e-4 * np.eye(3)
    wanted = [(trained(shares + h)[2] - trained(shares - h)[2]) / 2e-4 for h in step]
    np.testing.assert_allclose(influences(norm, shares), wanted, rtol=1e-5)


def _added(delta, x, at):
    return x + delta.astype(x.dtype), None


@pytest.mark.slow
def test_the_gradient_of_embeddings(model):
    config, params, tokens = model

    def best_logit(delta):
        hooked = llama_jax.with_hooks(params, {"embedded": Partial(_added, delta)})
        return llama_jax.logits(config, hooked, tokens)[:, -1, 7].sum()

    zeros = np.zeros((*tokens.shape, config.dim))
    along = direction_like(zeros)
    gradient = jax.jit(jax.grad(best_logit))(zeros)
    np.testing.assert_allclose(np.vdot(gradient, along), difference(best_logit, zeros, along), rtol=1e-7)


def _prompted(prompt, x, at):
    return x.at[:, : len(prompt)].set(prompt.astype(x.dtype)), None


def test_a_soft_prompt_is_learnt(model):
    """Vectors in place of the first embeddings; the parameters stay as they are."""
    config, params, tokens = model
    counted = np.arange(tokens.shape[1])[None] > 3

    def loss(prompt):
        hooked = llama_jax.with_hooks(params, {"embedded": Partial(_prompted, prompt)})
        return llama_jax.next_token_loss(config, hooked, Batch(tokens, loss_mask=np.broadcast_to(counted, tokens.shape)))

    prompt = params.embedding[jnp.arange(3)]
    along = direction_like(prompt)
    descend = jax.jit(lambda prompt: jax.value_and_grad(loss)(prompt))
    before, gradient = descend(prompt)
    np.testing.assert_allclose(np.vdot(gradient, along), difference(loss, prompt, along), rtol=1e-6)
    for _ in range(20):
        value, gradient = descend(prompt)
        prompt = prompt - 0.02 * gradient / jnp.linalg.norm(gradient)
    assert value < before


def relaxed(config, params, prompts, key, steps):
    """Gumbel-softmax generation: probabilities [B, steps, V], each fed back as a mixture of embeddings."""
    length = prompts.shape[1]
    tokens = jnp.pad(prompts, ((0, 0), (0, steps)))

    def mixed_in(mixed, x, at):
        return jnp.where(at.positions[..., None] < length, x, mixed.astype(x.dtype)), None

    def step(mixed, i):
        hooked = llama_jax.with_hooks(params, {"embedded": Partial(mixed_in, mixed)})
        hidden, _ = llama_jax.forward(config, hooked, tokens)
        logits = llama_jax.unembed(config, params, hidden[:, length + i - 1])
        chosen = jax.nn.softmax(logits + jax.random.gumbel(jax.random.fold_in(key, i), logits.shape, logits.dtype))
        return mixed.at[:, length + i].set(chosen @ params.embedding), chosen

    mixed = jnp.zeros((*tokens.shape, config.dim), params.embedding.dtype)
    return jax.lax.scan(step, mixed, jnp.arange(steps))[1].swapaxes(0, 1)


@pytest.mark.slow
@pytest.mark.rotating
def test_the_gradient_through_several_steps_of_relaxed_generation(model):
    config, params, tokens = model
    wanted = jax.nn.one_hot(tokens[:2, -3:], config.vocab_size, dtype=jnp.float64)

    def loss(scale):
        changed = params.replace(final_norm=params.final_norm * scale)
        found = relaxed(config, changed, jnp.asarray(tokens[:2, :4]), jax.random.key(0), 3)
        return jnp.sum((found - wanted)[:, -1] ** 2)  # of the last step, which the earlier ones reach through their mixtures

    scale = np.ones(config.dim)
    along = direction_like(scale)
    gradient = jax.jit(jax.grad(loss))(scale)
    assert np.linalg.norm(gradient) > 1e-3
    np.testing.assert_allclose(np.vdot(gradient, along), difference(loss, scale, along), rtol=1e-6)
    forward = jax.jit(lambda scale, along: jax.jvp(loss, (scale,), (along,))[1])(scale, along)
    np.testing.assert_allclose(forward, np.vdot(gradient, along), rtol=1e-9)


SCALED = [name for name, form in QUANT_FORMATS.items() if form.encode and any(p.dtype == np.float32 for p in form.planes)]


@pytest.mark.parametrize("kind", [x if x in ("int8", "int4") else pytest.param(x, marks=pytest.mark.slow) for x in SCALED])
def test_the_gradient_of_scales(kind):
    """The derivative along float32 planes is that of a float64 matmul with the dequantized weight, by differences."""
    rng = np.random.default_rng(0)
    weight = quantize_matrix(rng.normal(0, 0.05, (24, 256)).astype(np.float32), kind)
    x, out = (jnp.asarray(rng.standard_normal((5, n)), jnp.float32) for n in (256, 24))
    floats = [i for i, plane in enumerate(weight.planes) if plane.dtype == np.float32]

    def value(x, scales, kernels=KernelOptions()):
        planes = list(weight.planes)
        for i, plane in zip(floats, scales, strict=True):
            planes[i] = plane
        return jnp.vdot(ops.project(x, weight.replace(planes=tuple(planes)), kernels=kernels), out)

    scales = [jnp.asarray(weight.planes[i]) for i in floats]
    along = [jnp.asarray(direction_like(scale), jnp.float32) * jnp.abs(scale).mean() for scale in scales]
    decode = lambda step: weight.form.decode(
        *(
            np.asarray(p, np.float64) + step * np.asarray(along[floats.index(i)]) if i in floats else np.asarray(p)
            for i, p in enumerate(weight.planes)
        )
    )
    wanted = np.vdot(np.float64(x) @ (decode(1e-4) - decode(-1e-4)).T / 2e-4, out)
    of_scales = partial(value, x)
    gradient = jax.jit(jax.grad(of_scales))(scales)
    np.testing.assert_allclose(sum(np.vdot(*pair) for pair in zip(gradient, along, strict=True)), wanted, rtol=2e-3)
    in_forward_mode = partial(of_scales, kernels=FORWARD_MODE)
    forward = jax.jit(lambda scales, along: jax.jvp(in_forward_mode, (scales,), (along,))[1])
    np.testing.assert_allclose(forward(scales, along), wanted, rtol=2e-3)


def test_derivatives_through_a_quantized_matmul_are_those_of_the_dense_one():
    """Forward mode, gradients by vmap, and a product with the Hessian."""
    rng = np.random.default_rng(0)
    weight = quantize_matrix(rng.normal(0, 0.05, (24, 256)).astype(np.float32), "int8")
    x, along = (jnp.asarray(rng.standard_normal((5, 256)), jnp.float32) for _ in range(2))

    def derivatives(weight):
        loss = lambda x: jnp.sum(jnp.sin(ops.project(x, weight, kernels=FORWARD_MODE)))
        by_scale = jax.vmap(lambda scale: jax.grad(loss)(scale * along))(jnp.arange(3.0))
        return jax.jvp(loss, (x,), (along,)), by_scale, jax.jvp(jax.grad(loss), (x,), (along,))[1]

    found, wanted = map(jax.jit(derivatives), (weight, jnp.asarray(weight.form.decode(*map(np.asarray, weight.planes)))))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3 * np.abs(b).max())


@pytest.fixture(scope="module", params=["dense", pytest.param("experts", marks=pytest.mark.slow)])
def quantized(models, request):
    """(config, a model in int8, the same dense, a batch)."""
    config, params = models["tied"]
    if request.param == "experts":
        config = replace(config, experts=4, experts_per_token=2)
        params = jit_init(config, jax.random.key(0))
    coded = quantize(params, "int8")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 10), np.int32)
    return config, coded, dequantize(coded), Batch(tokens)


@pytest.mark.slow
def test_derivatives_through_a_quantized_model_are_those_of_the_dense_one(quantized):
    """In a direction of the embeddings: forward mode, gradients by vmap, and a product with the Hessian."""
    config, coded, dense, batch = quantized
    zeros = jnp.zeros((2, 9, config.dim))
    along = jnp.asarray(direction_like(zeros), jnp.float32) * 0.01

    def derivatives(params):
        def loss(delta):
            hooked = llama_jax.with_hooks(params, {"embedded": Partial(_added, delta)})
            return llama_jax.next_token_loss(config, hooked, batch, LossOptions(ComputeOptions(forward_mode=True)))

        by_scale = jax.vmap(lambda scale: jax.grad(loss)(scale * along))(jnp.arange(3.0))
        return jax.jvp(loss, (zeros,), (along,)), by_scale, jax.jvp(jax.grad(loss), (zeros,), (along,))[1]

    found, wanted = map(jax.jit(derivatives), (coded, dense))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3 * np.abs(b).max())


@pytest.mark.slow
def test_scales_in_the_layers_of_a_model_have_gradients(quantized):
    """Those of the rows of a matrix: the sums of the dense gradient times the integers."""
    config, coded, dense, batch = quantized
    weight = coded.blocks.feed_forward.gate
    assert isinstance(weight, QuantizedWeight)

    def with_gate(params, gate):
        feed_forward = params.blocks.feed_forward.replace(gate=gate)
        return params.replace(blocks=params.blocks.replace(feed_forward=feed_forward))

    def loss(scales):
        return llama_jax.next_token_loss(config, with_gate(coded, weight.replace(planes=(weight.planes[0], scales))), batch)

    gradient = jax.jit(jax.grad(loss))(weight.planes[1])
    of_dense = jax.jit(jax.grad(lambda gate: llama_jax.next_token_loss(config, with_gate(dense, gate), batch)))
    wanted = np.sum(of_dense(dense.blocks.feed_forward.gate) * np.float32(weight.planes[0]), axis=-1)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-2, atol=1e-3 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.rotating
def test_a_hessian_of_adapters_on_a_quantized_model(quantized):
    config, coded, dense, batch = quantized
    lora = Lora(rank=2, targets=("q_proj", "v_proj"))
    adapters = jax.tree.map(
        lambda a: jnp.asarray(direction_like(a), jnp.float32) * 0.1,
        llama_jax.init_adapters(config, lora, jax.random.key(0)),
    )

    def hvp(params):
        options = LossOptions(ComputeOptions(forward_mode=True))
        loss = lambda adapters: llama_jax.next_token_loss(
            config, llama_jax.apply_adapters(params, adapters, lora), batch, options
        )
        return jax.jvp(jax.grad(loss), (adapters,), (adapters,))[1]

    found, wanted = (jax.tree.leaves(x) for x in map(jax.jit(hvp), (coded, dense)))
    largest = max(np.abs(b).max() for b in wanted)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-2 * largest)


@pytest.mark.slow
@pytest.mark.rotating
def test_gradients_through_experts_whose_scales_are_in_16_bits(models):
    """The scales have no tangent, and so their bits need none."""
    config = replace(models["tied"][0], experts=4, experts_per_token=2, dim=64, hidden_dim=64)
    coded = quantize(jit_init(config, jax.random.key(0)), "q8_0")
    batch = Batch(np.random.default_rng(0).integers(0, config.vocab_size, (2, 10), np.int32))

    def loss(params, delta):
        hooked = llama_jax.with_hooks(params, {"embedded": Partial(_added, delta)})
        return llama_jax.next_token_loss(config, hooked, batch)

    zeros = jnp.zeros((2, 9, config.dim))
    found, wanted = (jax.jit(jax.grad(partial(loss, params)))(zeros) for params in (coded, dequantize(coded)))
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)  # native kernels round activations to 8 bits
