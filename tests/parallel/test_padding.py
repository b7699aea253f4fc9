from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit_init, jit_logits, tiny_config
from hypothesis import given
from hypothesis import strategies as st

from llama_jax import preset
from llama_jax.config.presets import PRESETS
from llama_jax.errors import MeshError
from llama_jax.model.trees import count
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.padding import pad_params, padded_config, padded_shapes_config, padded_vocab, unpad_params
from llama_jax.parallel.sharding import param_shapes, param_specs, shardings

CONFIG = tiny_config(vocab_size=250, n_heads=16, n_kv_heads=4)
TOKENS = np.random.default_rng(0).integers(0, 250, (2, 9), np.int32)


@pytest.mark.parametrize(
    ("vocab", "tensor", "rows"),
    [(250, 1, 250), (250, 2, 256), (250, 3, 384), (256, 8, 256), (257, 8, 384), (32_000, 8, 32_000), (32_016, 8, 32_128)],
)
def test_the_padded_vocabulary_is_the_next_multiple_of_the_mesh_and_of_128(vocab, tensor, rows):
    assert padded_vocab(replace(CONFIG, vocab_size=vocab), MeshSizes(fsdp=2, tensor=tensor)) == rows


def test_heads_are_copied_only_where_there_are_too_few():
    for tensor, heads in ((1, 4), (2, 4), (4, 4), (8, 8), (16, 16)):
        found = padded_config(CONFIG, MeshSizes(2, 2, tensor))
        assert found == replace(CONFIG, n_kv_heads=heads)
        assert found.queries_per_kv_head == 16 // heads
    assert padded_shapes_config(CONFIG, MeshSizes(tensor=8)) == replace(CONFIG, n_kv_heads=8, vocab_size=256)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        (
            "llama-3.1-8b",
            MeshSizes(tensor=64),
            r"n_kv_heads=8 \(of 4 queries each\) cannot be split over tensor=64; 1, 2, 4, 8, 16, 32 would do",
        ),
        (
            "tinyllama-1.1b",
            MeshSizes(tensor=12),
            r"hidden_dim=5632 cannot be split over tensor=12; 1, 2, 4, 8, 16, 32 would do",
        ),
        ("stories-110m", MeshSizes(fsdp=5), "dim=768 cannot be split over fsdp=5; 1, 2, 3, 4, 6, 8, 12, "),
    ],
)
def test_what_does_not_fit_is_named_with_what_would(name, sizes, message):
    with pytest.raises(MeshError, match=message):
        padded_config(preset(name), sizes)


@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 130))
def test_what_is_said_to_do_does(name, tensor):
    config = preset(name)
    try:
        found = padded_config(config, MeshSizes(tensor=tensor))
    except MeshError as error:
        sizes = [int(size) for size in str(error).split("; ")[1].removesuffix(" would do").split(", ")]
        assert tensor not in sizes
        for size in sizes:
            padded_config(config, MeshSizes(tensor=size))
    else:
        for divided in (found.n_kv_heads, found.hidden_dim, padded_vocab(config, MeshSizes(tensor=tensor))):
            assert divided % tensor == 0


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_the_fitted_model_is_the_same_function(tied):
    config = replace(CONFIG, tie_embeddings=tied)
    params = jit_init(config, jax.random.key(0))
    want = jit_logits(config, params, TOKENS)
    for tensor in (2, 8, 16):
        sizes = MeshSizes(tensor=tensor)
        changed = pad_params(config, sizes, params)
        assert jax.tree.map(jnp.shape, changed) == jax.tree.map(jnp.shape, param_shapes(padded_shapes_config(config, sizes)))
        found = jit_logits(padded_config(config, sizes), changed, TOKENS)
        np.testing.assert_allclose(found[..., :250], want, atol=1e-6)
        assert found.shape[-1] == 256
        assert (found[..., 250:] == -jnp.inf).all()
        jax.tree.map(np.testing.assert_array_equal, unpad_params(config, changed), params)


def test_under_jit_it_fits_into_shares_from_shares():
    """As training keeps the model: no device ever has more of it than a part."""
    config, sizes = replace(CONFIG, dim=128, hidden_dim=512), MeshSizes(tensor=8)
    mesh = make_mesh(sizes)
    before, after = (shardings(mesh, param_specs(config, sizes, padded=fitted)) for fitted in (False, True))
    shapes = param_shapes(config), param_shapes(padded_shapes_config(config, sizes))
    run = jax.jit(partial(pad_params, config, sizes), in_shardings=(before,), out_shardings=after)
    memory = run.lower(shapes[0]).compile().memory_analysis()
    whole = 4 * count(shapes[1])
    assert memory.output_size_in_bytes < 1.05 * whole / 8
    assert memory.temp_size_in_bytes < whole / 8
