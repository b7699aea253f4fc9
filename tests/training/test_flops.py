"""Operations of a training step: by hand, and beside what XLA counts in the compiled program."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from training_options import step_options

import llama_jax
from llama_jax import LlamaConfig, preset
from llama_jax.training.batch import Batch
from llama_jax.training.flops import flops_utilization, matrix_parameters, mean_document_length, step_flops
from llama_jax.training.optimizer import adamw
from llama_jax.training.step import init_state, train_step


def tiny(**changes) -> LlamaConfig:
    sizes = dict(vocab_size=10, dim=4, n_layers=2, n_heads=2, n_kv_heads=1, hidden_dim=6, max_seq_len=8)
    return LlamaConfig(**sizes | dict(norm_eps=1e-5, rope_theta=1e4, tie_embeddings=False) | changes)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_a_tiny_step_counted_by_hand(tie_embeddings):
    config = tiny(tie_embeddings=tie_embeddings)
    layer = 4 * 4 + 4 * 2 + 4 * 2 + 4 * 4 + 3 * 4 * 6  # queries, keys, values, output, feed-forward
    assert matrix_parameters(config) == 2 * layer + 10 * 4
    tokens = 3 * 8
    products = 2 * tokens * (2 * layer + 40)  # forward: a multiply and an add
    scores = 3 * 2 * 8 * 8 * 2 * 2  # rows, heads, queries, keys, features, a multiply and an add
    attention = 2 * (scores + scores) / 2  # layers, the product with the values as well, the causal half
    assert step_flops(config, batch=3, length=8) == 3 * (products + attention)


def test_published_sizes():
    """All parameters but the lookup and the norms; six per parameter and token is most of a step."""
    for name in ("llama-2-7b", "tinyllama-1.1b", "llama-3.2-1b"):
        config = preset(name)
        norms = (2 * config.n_layers + 1) * config.dim
        lookup = 0 if config.tie_embeddings else config.vocab_size * config.dim
        assert matrix_parameters(config) == llama_jax.parameter_count(config) - norms - lookup
    assert step_flops(preset("llama-2-7b"), 1, 2048) / 2048 == pytest.approx(6 * 6.6e9, rel=0.05)


def test_packed_rows_count_the_documents_only():
    config = tiny()
    whole = step_flops(config, 1, 8)
    halves = step_flops(config, 1, 8, document_length=mean_document_length([4, 4]))
    alone = 2 * step_flops(config, 1, 4)
    assert halves == alone < whole
    # Documents of 2 and 6 tokens, alone and in one row.
    uneven = step_flops(config, 1, 8, document_length=mean_document_length([2, 6]))
    assert uneven == pytest.approx(step_flops(config, 1, 2) + step_flops(config, 1, 6))


@pytest.mark.parametrize("tie_embeddings", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_compiled_step_does_what_is_counted(tie_embeddings):
    """XLA counts a loop's body once, so the model has one layer; and all scores, for this step computes the masked ones too.

    What it does beyond is element by element: softmax, normalizations, rotary embedding, AdamW. Its share falls with the
    width of the model.
    """
    config = tiny(
        vocab_size=512,
        dim=256,
        n_layers=1,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=512,
        max_seq_len=64,
        tie_embeddings=tie_embeddings,
    )
    batch, length, optimizer = 16, 64, adamw(1e-3)

    def make() -> object:
        return init_state(optimizer, llama_jax.init(config, jax.random.key(0)))

    step = jax.jit(partial(train_step, config, optimizer, options=step_options(chunk=length)), donate_argnums=0)
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    compiled = step.lower(jax.eval_shape(make), Batch(tokens)).compile()
    counted = step_flops(config, batch, length, document_length=2 * length)
    assert counted <= compiled.cost_analysis()["flops"] <= 1.05 * counted


def test_utilization_is_a_share_of_the_published_peak():
    assert flops_utilization(6e12, seconds=2.0, devices=3, peak=4e12) == 0.25
    assert flops_utilization(6e12, seconds=2.0, devices=3, peak=None) is None
