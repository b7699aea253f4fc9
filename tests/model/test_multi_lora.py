"""Several adapters beside one model: each row of a batch is what it is with its own alone."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapters import LORA, random_adapters
from conftest import jit_logits

import llama_jax
from llama_jax import ops
from llama_jax.errors import ConfigError
from llama_jax.model.lora import Lora, apply_adapters
from llama_jax.model.multi_lora import adapter_table, adapters_in, choose_adapters
from llama_jax.model.trees import bytes_in_memory, count
from llama_jax.ops.weights.lora import LowRank
from llama_jax.ops.weights.multi_lora import MultiLoraWeight

LORAS = (LORA, Lora(rank=5, alpha=3.0, targets=("q_proj", "v_proj", "down_proj"), rslora=True), Lora(rank=2, alpha=2.0))
TOKENS = np.random.default_rng(0).integers(0, 90, (4, 7), np.int32)


@pytest.fixture(scope="module")
def table(models):
    """(configuration, base, [(adapters, settings)], the base with the table)."""
    config, params = models["gqa"]
    adapters = [(random_adapters(config, lora, seed=i), lora) for i, lora in enumerate(LORAS)]
    return config, params, adapters, adapter_table(config, params, adapters)


@pytest.fixture(scope="module")
def alone(table):
    """Logits of all rows by the base and each adapter: the last by number -1."""
    config, params, adapters, _ = table
    return [jit_logits(config, one, TOKENS) for one in (*(apply_adapters(params, *each) for each in adapters), params)]


def test_each_row_is_what_it_is_alone(table, alone):
    config, _, _, params = table
    run = jax.jit(lambda params, rows, tokens: llama_jax.logits(config, choose_adapters(params, rows), tokens))
    for rows in ([0, 1, 2, -1], [-1, -1, -1, -1], [2, 2, 0, 1]):
        found = run(params, np.array(rows, np.int32), TOKENS)
        wanted = np.stack([alone[adapter][i] for i, adapter in enumerate(rows)])
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert run._cache_size() == 1
    assert float(jnp.abs(alone[0] - alone[1]).max()) > 0.1  # or nothing would be tested


@pytest.mark.parametrize("rows", [[1], [-1]])
def test_of_a_single_row(table, alone, rows):
    """The table has more adapters than twice the rows: slices of it are read, and not all of it."""
    config, _, _, params = table
    found = jit_logits(config, choose_adapters(params, rows), TOKENS[:1])
    np.testing.assert_allclose(found[0], alone[rows[0]][0], atol=2e-5)


def test_nothing_of_the_base_is_copied(table):
    _, base, _, params = table
    assert adapters_in(params) == 3
    assert adapters_in(base) == 0
    assert count(params) == count(base)
    ranks = 3 * 5  # the largest, for each
    numbers = 2 * ranks * (3 * 32 + 2 * 4 * 8 + 32 + 32 + 3 * (32 + 56))
    assert bytes_in_memory(params) == bytes_in_memory(base) + 4 * numbers
    for path in ("embedding", "final_norm"):
        assert getattr(params, path) is getattr(base, path)
    assert params.blocks.attention.out.base is base.blocks.attention.out


def test_what_overflows_for_another_does_not_reach_a_row():
    pair = LowRank(jnp.full((2, 4), 3e38), jnp.ones((3, 2)))
    weight = MultiLoraWeight(jnp.ones((3, 4)), pair, scales=(1.0, 1.0), rows=jnp.array([0, -1], jnp.int32))
    found = jax.jit(lambda x: ops.project(x, weight, out_dtype=jnp.float32))(jnp.ones((2, 1, 4)))
    assert not np.isfinite(found[0]).any()
    np.testing.assert_array_equal(found[1], 4)


def test_what_cannot_be(table):
    config, base, adapters, params = table
    with pytest.raises(
        ConfigError, match="no adapters are set, but each of 4 rows of the batch needs one; set them with choose_adapters"
    ):
        jit_logits(config, params, TOKENS)
    with pytest.raises(ConfigError, match=r"adapters set have shape \[2\], but each of 4 rows of the batch needs one"):
        jit_logits(config, choose_adapters(params, [0, 1]), TOKENS)
    with pytest.raises(ConfigError, match="adapter=3: the model has 0 to 2; pass one of those, or -1"):
        choose_adapters(params, [0, 3])
    with pytest.raises(ConfigError, match="adapter=-2"):
        choose_adapters(params, jnp.array([-2]))
    with pytest.raises(ConfigError, match="adapter=0: the model has none"):
        choose_adapters(base, [0])
    assert choose_adapters(base, [-1]).embedding is base.embedding
    with pytest.raises(ConfigError, match="a table of adapters needs at least one"):
        adapter_table(config, base, [])
    wider = replace(config, hidden_dim=64)
    other = random_adapters(wider), LORA
    with pytest.raises(ConfigError, match=r"adapter 1 of blocks.feed_forward.gate: A is \[2, 3, 32\] and B is \[2, 64, 3\]"):
        adapter_table(config, base, [adapters[0], other])


@pytest.mark.slow
def test_gradients_go_through_it(table):
    """To activations, as of any weight: who differentiates a model with a table gets those of each row's own."""
    config, base, _, params = table
    rows = jnp.array([0, -1], jnp.int32)

    def energy(params, embedding):
        return jnp.sum(llama_jax.logits(config, params.replace(embedding=embedding), TOKENS[:2])[1] ** 2)

    found = jax.jit(jax.grad(partial(energy, choose_adapters(params, rows))))(base.embedding)
    wanted = jax.jit(jax.grad(partial(energy, base)))(base.embedding)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(jnp.abs(wanted).max()))
