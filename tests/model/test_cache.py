import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config
from hypothesis import given
from hypothesis import strategies as st

import llama_jax
from llama_jax import cache_bytes, preset
from llama_jax.errors import GenerationError
from llama_jax.inference.decode import DecodeSettings, DecodeState, decode
from llama_jax.inference.sampling import Sampling
from llama_jax.model.cache import PAGE_SIZE, init_cache
from llama_jax.model.forward_options import ComputeOptions


def test_published_sizes():
    assert cache_bytes(preset("tinyllama-1.1b"), 1, 2048, jnp.float32) == 92_274_688
    seventy = preset("llama-2-70b")
    assert (seventy.n_layers, seventy.n_kv_heads, seventy.head_dim) == (80, 8, 128)
    assert cache_bytes(seventy, 1, 8192, jnp.bfloat16) == 2_684_354_560


@given(st.integers(1, 3), st.integers(1, 70), st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int8]))
def test_bytes_are_those_of_the_arrays(batch, length, dtype):
    config = preset("stories-260k")
    cache = init_cache(config, batch, length, dtype)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.pages))
    assert held == cache_bytes(config, batch, cache.capacity, dtype)
    assert length <= cache.capacity < length + PAGE_SIZE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 8), "batch=0"), ((1, 0), "capacity=0"), ((1, 8, jnp.int32), "dtype=")],
)
def test_invalid_caches_are_refused(arguments, message):
    with pytest.raises(GenerationError, match=message):
        init_cache(preset("stories-260k"), *arguments)


def decode_program(batch: int, dtype=jnp.float32, slots=8192, **ring):
    """The compiled decode loop of a model whose cache is far larger than anything else that it could copy."""
    config = tiny_config(dim=128, n_layers=3, hidden_dim=64, max_seq_len=65_536, tie_embeddings=True)
    floats = jnp.float32 if dtype == jnp.int8 else dtype
    params = jax.eval_shape(lambda key: llama_jax.init(config, key, floats), jax.random.key(0))
    state = DecodeState(
        settings=DecodeSettings(Sampling().per_row(batch), np.zeros(batch, np.int32), np.zeros((batch, 4), np.int32)),
        cache=jax.eval_shape(lambda: init_cache(config, batch, slots, dtype, **ring)),
        token=jax.ShapeDtypeStruct((batch,), jnp.int32),
        seen=jax.ShapeDtypeStruct((batch, 64), bool),
        count=jax.ShapeDtypeStruct((batch,), jnp.int32),
        done=jax.ShapeDtypeStruct((batch,), bool),
    )
    step = jax.jit(decode, static_argnums=(0, 4, 5), donate_argnums=2)
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache.pages))
    return cache_bytes, step.lower(config, params, state, np.int32(1), 1, ComputeOptions(native_code=True)).compile()


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.nightly),
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(1, {"dtype": jnp.bfloat16}, marks=pytest.mark.slow),
        (2, {"dtype": jnp.int8}),
        pytest.param(2, {"window": 4000}, marks=pytest.mark.slow),
        pytest.param(2, {"window": 4000, "sinks": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_decoding_copies_no_cache(batch, options):
    """In place: the whole cache is aliased, and nothing of a layer's size is temporary."""
    size, program = decode_program(batch, **options)
    memory = program.memory_analysis()
    layer = size // 6  # keys or values of one layer
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < layer
    text = program.as_text()
    for shape in re.findall(r"= \w+\[([\d,]+)\][^ ]* copy\(", text):
        assert 4 * np.prod([int(n) for n in shape.split(",")]) < layer, f"a copy of [{shape}]"
