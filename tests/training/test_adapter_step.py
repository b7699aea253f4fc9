"""Training adapters: the gradients are right, and of the frozen base there are none."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import LORA, random_adapters
from conftest import as_float64, jit_dequantize, jit_init, jit_logits, tiny_config
from training_options import loss_options, step_options

from llama_jax.model.forward_options import Sharding
from llama_jax.model.lora import (
    Lora,
    adapter_shapes,
    apply_adapters,
    freeze_base,
    init_adapters,
    merge,
    precompute_dora_scale,
)
from llama_jax.model.trees import layers_of, stack_layers
from llama_jax.ops.weights.layers import MixedStack
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, quantize_matrix
from llama_jax.training.batch import Batch
from llama_jax.training.loss import next_token_loss
from llama_jax.training.optimizer import OptimizerSettings, make_optimizer
from llama_jax.training.step import init_state, train_step

# No product of two numbers of tokens, ranks and sizes is a product of sizes: so what a matmul gives says what it is.
CONFIG = tiny_config(vocab_size=96, dim=64, hidden_dim=128)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (3, 24), np.int32)  # 3 x 23 are read
BATCH = Batch(TOKENS)
OPTIMIZER = make_optimizer(OptimizerSettings(learning_rate=1e-2, clip_norm=0.5), 10)


@pytest.fixture(scope="module")
def base():
    return jit_init(CONFIG, jax.random.key(0))


def adapter_step(options, lora=LORA, config=CONFIG):
    """The base is an argument of its own, so that nothing of it is in the state."""

    def step(base, state, batch):
        return train_step(config, OPTIMIZER, state, batch, options, freeze_base(Sharding(), base, lora))

    return jax.jit(step)


@pytest.mark.parametrize("kind", ["gqa", pytest.param("tied", marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(models, kind):
    config, params = models[kind]
    with jax.enable_x64(True):
        base, adapters = as_float64(params), as_float64(random_adapters(config))
        batch = Batch(np.random.default_rng(1).integers(0, config.vocab_size, (2, 12), np.int32))
        loss_of = partial(next_token_loss, config, batch=batch, options=loss_options(chunk=5, z_loss=1e-2))
        found = jax.jit(jax.value_and_grad(lambda adapters: loss_of(apply_adapters(base, adapters, LORA))))(adapters)
        wanted = jax.jit(jax.value_and_grad(lambda adapters: loss_of(merge(base, adapters, LORA))))(adapters)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, wanted)
        assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(found[1])) > 1e-4


def matmuls(text):
    """How many numbers each matmul of a compiled program gives."""
    found = re.findall(r"= \w+\[([\d,]*)\]\S* (?:dot|custom-call|convolution)\(", text)
    return [math.prod(int(n) for n in shape.split(",") if n) for shape in found]


MATRICES = [(2 * 4 * 16, 64), (64, 64), (128, 64), (96, 64)]  # qkv, out, those of the feed-forward, the head
# Of 16 bits a CPU adds a row of zeros to the smaller side, see `ops.cpu`.
GRADIENTS = [{rows * columns, rows * (columns + 1)} for rows, columns in MATRICES]


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(x, marks=pytest.mark.slow) for x in ({"remat": "full"}, {"dtype": "bfloat16", "remat": "dots"}))],
    ids=str,
)
def test_no_gradient_of_a_frozen_weight_is_computed(base, options):
    told = step_options(chunk=8, **options)
    start = partial(jax.eval_shape, partial(init_state, OPTIMIZER))
    text = adapter_step(told).lower(base, start(adapter_shapes(CONFIG, LORA)), BATCH).compile().as_text()
    assert not set(matmuls(text)) & set.union(*GRADIENTS)
    full = jax.jit(partial(train_step, CONFIG, OPTIMIZER, options=told))
    text = full.lower(start(base), BATCH).compile().as_text()
    assert all(set(matmuls(text)) & sizes for sizes in GRADIENTS)  # or they were looked for in vain


@pytest.mark.slow
def test_nothing_of_the_base_is_kept_or_changed(base):
    lora = Lora(rank=3, targets=("q_proj", "v_proj", "down_proj"))
    state = init_state(OPTIMIZER, init_adapters(CONFIG, lora, jax.random.key(1)), ema=True)
    learnt = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 4 * learnt + 5  # AdamW's two, the average, counters
    step = adapter_step(step_options(chunk=8, ema_decay=0.9, accumulate=3), lora)
    losses = []
    for _ in range(6):
        state, metrics = step(base, state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.05
    after = state.params.blocks
    for a, b in ((after.attention.qkv.a[:, 1], after.attention.qkv.b[:, :, 2]),):  # the key's, which are no target
        assert not a.any()
        assert not b.any()
    assert after.attention.qkv.b[:, :, 3].any()
    assert after.feed_forward.down.b.any()
    assert after.attention.out is None


def test_the_step_is_that_of_the_merged_model(base):
    """Loss and gradient norm before the update, and a skipped step that is not finite."""
    adapters = random_adapters(CONFIG)
    state = init_state(OPTIMIZER, adapters)
    step = adapter_step(step_options(chunk=8))
    after, metrics = step(base, state, BATCH)
    merged = merge(base, adapters, LORA)
    np.testing.assert_allclose(metrics["loss"], jax.jit(partial(next_token_loss, CONFIG))(merged, BATCH), rtol=1e-5)
    assert int(after.step) == 1
    broken = base.replace(final_norm=base.final_norm.at[0].set(np.inf))
    after, metrics = step(broken, state, BATCH)
    assert int(after.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, adapters)


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_base_whose_layers_differ_in_their_kinds(dora):
    """As a GGUF has them: the loss, the gradients and the merged model are those over its numbers."""
    lora = Lora(rank=3, alpha=6.0, targets=("v_proj", "up_proj"), dora=dora)
    config = tiny_config(dim=64, n_layers=3, hidden_dim=64, max_seq_len=32, tie_embeddings=True)
    params = jit_init(config, jax.random.key(1))

    def convert_layers(block, number):
        kind, (queries, keys, values) = ("q4_0", "q8_0", "q8_0")[number], jnp.split(block.attention.qkv, [2, 3], axis=-3)
        parts = [quantize_matrix(part, its) for part, its in ((queries, "q8_0"), (keys, "q8_0"), (values, kind))]
        attention = block.attention.replace(qkv=JoinedWeight(tuple(parts)))
        return block.replace(
            attention=attention, feed_forward=block.feed_forward.replace(up=quantize_matrix(block.feed_forward.up, kind))
        )

    base = params.replace(blocks=stack_layers([convert_layers(block, i) for i, block in enumerate(layers_of(params))]))
    assert isinstance(base.blocks.feed_forward.up, MixedStack)
    assert isinstance(base.blocks.attention.qkv.parts[2], MixedStack)
    dense = jit_dequantize(base)
    same = partial(jax.tree.map, partial(np.testing.assert_allclose, rtol=1e-6))
    if dora:
        made = [init_adapters(config, lora, jax.random.key(2), base=one) for one in (base, dense)]
        same(*made)
    adapters = random_adapters(config, lora)
    merged = merge(dense, adapters, lora)
    same(merge(base, adapters, lora).blocks.feed_forward, merged.blocks.feed_forward)
    batch = Batch(np.random.default_rng(1).integers(0, 64, (2, 12), np.int32))
    loss_of = jax.jit(
        jax.value_and_grad(
            lambda adapters, base: next_token_loss(
                config, apply_adapters(base, adapters, lora), batch=batch, options=loss_options(chunk=5)
            )
        )
    )
    found, wanted = (loss_of(adapters, one) for one in (base, dense))
    # A CPU rounds activations for quantized weights.
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-2)
    for ours, theirs in zip(*(jax.tree.leaves(one[1]) for one in (found, wanted)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0.05 * float(jnp.abs(theirs).max()))
    once = precompute_dora_scale(apply_adapters(base, adapters, lora))
    logits = jit_logits(config, once, TOKENS[:, :12] % 64)
    np.testing.assert_allclose(
        logits, jit_logits(config, merged, TOKENS[:, :12] % 64), atol=0.05 * float(jnp.abs(logits).max())
    )
