"""Operations of a training step: by hand, and beside what XLA counts in the compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_options import step_options

import llama_jax
from llama_jax import LlamaConfig
from llama_jax.config import LayerConfig
from llama_jax.model.forward_options import Sharding
from llama_jax.model.lora import Lora, freeze_base, init_adapters
from llama_jax.training.batch import Batch
from llama_jax.training.flops import (
    attention_scores,
    last_token_scores,
    matrix_parameters,
    step_flops,
)
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
    scores = 3 * 2 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8) * 2 * 2  # rows, heads, keys of each query, features, multiply and add
    attention = 2 * (scores + scores)  # layers, the product with the values as well
    assert step_flops(config, batch=3, length=8) == 3 * (products + attention)


def test_packed_rows_count_the_documents_only():
    config = tiny()
    whole = step_flops(config, 1, 8)
    halves = step_flops(config, 1, 8, documents=[4, 4])
    alone = 2 * step_flops(config, 1, 4)
    assert halves == alone < whole
    # Documents of 2 and 6 tokens, alone and in one row.
    uneven = step_flops(config, 1, 8, documents=[2, 6])
    assert uneven == pytest.approx(step_flops(config, 1, 2) + step_flops(config, 1, 6))
    local = tiny(window=3)
    uneven = step_flops(local, 1, 8, documents=[2, 6])
    assert uneven == pytest.approx(step_flops(local, 1, 2) + step_flops(local, 1, 6))


@pytest.mark.parametrize(
    "layers",
    [
        (LayerConfig(window=4),),
        (*[LayerConfig(window=3, rope="unscaled", rope_theta=1e4)] * 2, LayerConfig()),  # as in Gemma 3
        (LayerConfig(chunk=5), LayerConfig(rope="none")),  # as in Llama 4
        (LayerConfig(window=3, chunk=5),),
    ],
    ids=["window", "alternating", "chunks", "both"],
)
def test_scores_outside_windows_and_chunks_are_not_counted(layers):
    config = tiny(n_layers=4, layers=layers)
    for length in range(1, 18):
        query, key = np.arange(length)[:, None], np.arange(length)
        kept = np.zeros(length, int)  # scores of each query
        for layer in map(config.layer, range(4)):
            mask = (key <= query) & (query - key < (layer.window or length))
            kept += (mask & (query // (layer.chunk or length) == key // (layer.chunk or length))).sum(axis=1)
        assert attention_scores(config, length) == config.n_heads * kept.sum()
        assert last_token_scores(config, length) == config.n_heads * kept[-1]
    products = 6 * matrix_parameters(config) * 2 * length
    assert step_flops(config, 2, length) == products + 2 * 12 * config.head_dim * config.n_heads * kept.sum()


@pytest.mark.parametrize(
    ("tie_embeddings", "lora"),
    [
        pytest.param(False, None, marks=pytest.mark.slow),
        (True, None),
        pytest.param(False, Lora(rank=16), marks=pytest.mark.slow),
    ],
    ids=["untied", "tied", "adapters"],
)
def test_the_compiled_step_does_what_is_counted(tie_embeddings, lora):
    """XLA counts a loop's body once, so the model has one layer; and this step computes the masked scores too.

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
    base = jax.eval_shape(lambda: llama_jax.init(config, jax.random.key(0)))

    def make() -> object:
        key = jax.random.key(0)
        return init_state(optimizer, llama_jax.init(config, key) if lora is None else init_adapters(config, lora, key))

    def step(base, state, batch):
        sharding = Sharding() if lora is None else freeze_base(Sharding(), base, lora)
        return train_step(config, optimizer, state, batch, step_options(chunk=length), sharding)

    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    compiled = jax.jit(step, donate_argnums=1).lower(base, jax.eval_shape(make), Batch(tokens)).compile()
    masked = config.n_heads * length**2 - attention_scores(config, length)
    counted = step_flops(config, batch, length, lora=lora) + batch * 12 * config.head_dim * masked
    if lora is not None:  # below the first adapters nothing is trained: no gradient by the input of the first layer's qkv
        counted -= 2 * batch * length * (256 * (4 + 2 * 2) * 64 + 3 * lora.rank * 256)
    assert counted <= compiled.cost_analysis()["flops"] <= 1.05 * counted
