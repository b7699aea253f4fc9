from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import LORA, random_adapters
from conftest import jit_dequantize, jit_init, jit_logits, tiny_config

import llama_jax
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.model.lora import (
    TARGETS,
    Lora,
    adapter_count,
    adapter_shapes,
    apply_adapters,
    init_adapters,
    merge,
    precompute_dora_scale,
)
from llama_jax.model.multi_lora import adapter_table, choose_adapters
from llama_jax.model.trees import bytes_in_memory, count, quantize
from llama_jax.training.loss import next_token_loss

TOKENS = jnp.asarray([[1, 5, 9, 2, 7, 30], [3, 3, 8, 1, 4, 11]])


@pytest.fixture(scope="module")
def gqa(models):
    """(configuration, base, adapters, the base with them)."""
    config, params = models["gqa"]
    adapters = random_adapters(config)
    return config, params, adapters, apply_adapters(params, adapters, LORA)


def test_what_was_just_made_changes_nothing(models):
    config, params = models["gqa"]
    lora = Lora()
    adapters = init_adapters(config, lora, jax.random.key(0))
    found = jit_logits(config, apply_adapters(params, adapters, lora), TOKENS)
    np.testing.assert_array_equal(found, jit_logits(config, params, TOKENS))


def test_it_begins_as_peft_says(models):
    config, _ = models["gqa"]
    adapters = init_adapters(config, Lora(rank=50), jax.random.key(0))
    shapes = adapter_shapes(config, Lora(rank=50))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), adapters) == jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
    for pair, columns in (
        (adapters.blocks.attention.qkv, config.dim),
        (adapters.blocks.feed_forward.down, config.hidden_dim),
    ):
        bound = columns**-0.5
        assert 0.98 * bound < float(jnp.abs(pair.a).max()) <= bound
        assert float(jnp.std(pair.a)) == pytest.approx(bound / 3**0.5, rel=0.05)
        assert not pair.b.any()
    a = np.asarray(adapters.blocks.attention.qkv.a)  # of each part and layer its own
    assert len({a[layer, part].tobytes() for layer in range(2) for part in range(3)}) == 6


def test_merged_is_unmerged(gqa):
    config, params, adapters, joined = gqa
    merged = merge(params, adapters, LORA)
    wanted = jit_logits(config, merged, TOKENS)
    assert float(jnp.abs(wanted - jit_logits(config, params, TOKENS)).max()) > 0.1  # or nothing would be tested
    np.testing.assert_allclose(jit_logits(config, joined, TOKENS), wanted, rtol=1e-5, atol=1e-5)


def test_a_change_too_small_for_16_bits_counts_all_the_same(models):
    """Merged into bfloat16 most of it is lost; beside the weights it is not."""
    config, params = models["gqa"]
    short = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), short)  # the same numbers
    small = jax.tree.map(lambda a: a / 40, random_adapters(config))
    base, wanted = jit_logits(config, wide, TOKENS), jit_logits(config, merge(wide, small, LORA), TOKENS)
    largest = float(jnp.abs(wanted - base).max())
    beside = jit_logits(config, apply_adapters(wide, small, LORA), TOKENS)
    assert float(jnp.abs(beside - wanted).max()) < 0.01 * largest
    rounded = merge(short, small, LORA)
    assert rounded.blocks.attention.out.dtype == jnp.bfloat16
    lost = jit_logits(config, jax.tree.map(lambda a: a.astype(jnp.float32), rounded), TOKENS)
    assert float(jnp.abs(lost - wanted).max()) > 0.1 * largest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "nf4", "q4_0"])
def test_the_base_may_be_quantized(kind):
    config = tiny_config(vocab_size=40, dim=128, hidden_dim=256, max_seq_len=32, tie_embeddings=True)
    base = quantize(jit_init(config, jax.random.key(1)), kind)
    adapters = random_adapters(config)
    joined = apply_adapters(base, adapters, LORA)
    assert count(joined) == count(base)
    assert bytes_in_memory(joined) == bytes_in_memory(base) + bytes_in_memory(adapters)
    later = quantize(apply_adapters(jit_init(config, jax.random.key(1)), adapters, LORA), kind)
    jax.tree.map(np.testing.assert_array_equal, later, joined)
    merged = merge(base, adapters, LORA)
    wanted = jit_logits(config, merged, TOKENS)
    assert llama_jax.layers_of(merged)[0].attention.qkv.dtype == jnp.float32
    # A CPU rounds activations for quantized weights, without adapters too, and not for what is merged.
    rounding = jnp.abs(jit_logits(config, base, TOKENS) - jit_logits(config, jit_dequantize(base), TOKENS)).max()
    largest = float(jnp.abs(wanted).max())
    assert float(rounding) < 0.02 * largest
    np.testing.assert_allclose(jit_logits(config, joined, TOKENS), wanted, atol=3 * float(rounding) + 1e-5 * largest)


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_the_gradient_goes_through_a_frozen_quantized_model(kind):
    config = tiny_config(vocab_size=40, dim=128, n_layers=1, hidden_dim=128, max_seq_len=32, tie_embeddings=True)
    params = jit_init(config, jax.random.key(1))
    frozen = quantize(params, kind)
    batch = llama_jax.Batch(jnp.asarray([[1, 5, 9, 2, 7, 3, 30, 11]]))

    @jax.jit
    def of_norm(norm, model):
        return next_token_loss(config, model.replace(final_norm=norm), batch)

    gradient = jax.jit(jax.grad(of_norm))
    ours, wanted = (gradient(params.final_norm, model) for model in (frozen, jit_dequantize(frozen)))
    np.testing.assert_allclose(ours, wanted, atol=2e-3 * float(jnp.abs(wanted).max()))  # activations in 16 bits on a CPU


def test_how_many_numbers_are_learnt(models):
    config, _ = models["gqa"]
    every = jax.tree.leaves(adapter_shapes(config, LORA))
    assert adapter_count(config, LORA) == sum(leaf.size for leaf in every)
    some = replace(LORA, targets=("q_proj", "v_proj", "down_proj"))
    q, v, down = (config.dim + 4 * 8), (config.dim + 2 * 8), (config.hidden_dim + config.dim)
    assert adapter_count(config, some) == 2 * 3 * (q + v + down)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"alpha": 0.0}, r"alpha=0.0 must be above 0"),
        ({"targets": ("q_proj", "q_proj")}, "each once"),
        ({"targets": ("q_proj", "lm_head")}, r"targets=\('q_proj', 'lm_head'\) must be some of q_proj"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        Lora(**settings)


def test_experts_have_none(models):
    config = replace(models["gqa"][0], experts=4, experts_per_token=2)
    with pytest.raises(ConfigError, match="gate_proj is a matrix of each expert in this model"):
        adapter_shapes(config, Lora())
    attention = tuple(TARGETS)[:4]
    assert adapter_shapes(config, Lora(targets=attention)).blocks.feed_forward.gate is None


def test_an_adapted_model_is_no_model_for_a_file(gqa, tmp_path):
    config, _, _, joined = gqa
    for name in ("a.gguf", "folder"):
        with pytest.raises(CheckpointError, match="files store only weights: merge it"):
            llama_jax.save(tmp_path / name, config, joined)
    assert not list(tmp_path.iterdir())


def test_adapters_of_another_model_are_named(gqa):
    config, params, adapters, _ = gqa
    wider = replace(config, hidden_dim=64)
    with pytest.raises(
        ConfigError, match=r"adapter of blocks.feed_forward.gate: A is \[2, 3, 32\] and B is \[2, 64, 3\], but rank=3"
    ):
        apply_adapters(params, random_adapters(wider), LORA)
    with pytest.raises(
        ConfigError, match=r"rank=4 and a matrix \[2, 2, 4, 8, 32\] need \[2, 3, 4, 32\] and \[2, 2, 4, 8, 4\]"
    ):
        apply_adapters(params, adapters, replace(LORA, rank=4))
    with pytest.raises(ConfigError, match=r"adapter of blocks.attention.qkv: A is \[3, 3, 3, 32\]"):
        apply_adapters(params, random_adapters(replace(config, n_layers=3)), LORA)


def test_one_adapter_after_another(gqa):
    """An adapted model is a model: it may be the base of other adapters."""
    config, params, adapters, joined = gqa
    second = random_adapters(config, seed=1)
    both = merge(merge(params, adapters, LORA), second, LORA)
    found = jit_logits(config, apply_adapters(joined, second, LORA), TOKENS)
    np.testing.assert_allclose(found, jit_logits(config, both, TOKENS), rtol=1e-4, atol=2e-5)


DORA = Lora(rank=3, alpha=5.0, targets=("q_proj", "v_proj", "o_proj", "up_proj"), dora=True)


@pytest.fixture(scope="module")
def dora(models):
    config, params = models["gqa"]
    adapters = random_adapters(config, DORA)
    return config, params, adapters, apply_adapters(params, adapters, DORA)


class TestMagnitudes:
    def test_merged_is_unmerged_and_settled(self, dora):
        config, params, adapters, joined = dora
        wanted = jit_logits(config, merge(params, adapters, DORA), TOKENS)
        assert float(jnp.abs(wanted - jit_logits(config, params, TOKENS)).max()) > 0.1
        np.testing.assert_allclose(jit_logits(config, joined, TOKENS), wanted, atol=2e-5)
        once = precompute_dora_scale(joined)
        assert once.blocks.attention.out.low_rank.magnitude is None
        assert once.blocks.attention.out.base is params.blocks.attention.out
        np.testing.assert_allclose(jit_logits(config, once, TOKENS), wanted, atol=2e-5)
        stacked = precompute_dora_scale(apply_adapters(params, adapters, DORA))
        np.testing.assert_allclose(jit_logits(config, stacked, TOKENS), wanted, atol=2e-5)

    def test_what_was_just_made_changes_nothing(self, models):
        config, params = models["gqa"]
        base = params
        adapters = init_adapters(config, DORA, jax.random.key(0), base=base)
        shapes = adapter_shapes(config, DORA)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), adapters) == jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
        keys = adapters.blocks.attention.qkv.magnitude[:, :, config.queries_per_kv_head]
        assert not keys.any()
        found = jit_logits(config, apply_adapters(base, adapters, DORA), TOKENS)
        np.testing.assert_allclose(found, jit_logits(config, base, TOKENS), atol=1e-5)
        with pytest.raises(ConfigError, match="dora=True starts from the lengths of the base's rows; pass the base to"):
            init_adapters(config, DORA, jax.random.key(0))

    def test_in_a_table_beside_one_without(self, dora):
        config, params, adapters, joined = dora
        plain = random_adapters(config, seed=1)
        table = adapter_table(config, params, [(plain, LORA), (adapters, DORA)])
        own = [np.asarray(jit_logits(config, one, TOKENS)) for one in (apply_adapters(params, plain, LORA), joined, params)]
        for rows in ([1, 0], [-1, 1]):
            found = jit_logits(config, choose_adapters(table, rows), TOKENS)
            np.testing.assert_allclose(found, [own[adapter][i] for i, adapter in enumerate(rows)], atol=2e-5)
