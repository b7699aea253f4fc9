"""Warming: every program is compiled once, ahead of being run; and how many there are."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import jit_init, jit_unstack

import llama_jax
from llama_jax import ops
from llama_jax.model.options import Compute
from llama_jax.model.window import CacheOptions
from llama_jax.ops import native
from llama_jax.ops.platform import native_code
from llama_jax.serving import warming
from llama_jax.serving.choosing import Wishes
from llama_jax.serving.engine import Engine
from llama_jax.serving.options import EngineOptions, PoolOptions
from llama_jax.serving.stats import CompileCount

SMALL = EngineOptions(rows=1, context=16, piece=16, smallest_capacity=16)


@pytest.fixture(scope="module")
def model():
    # Of sizes that no other test has: what JAX has compiled before it does not compile again.
    config = replace(llama_jax.preset("stories-260k"), n_layers=1, vocab_size=503)
    return config, jit_unstack(jit_init(config, jax.random.key(0)))


@pytest.mark.slow
def test_what_is_compiled_ahead_is_what_is_run(model, monkeypatch):
    ahead, running, told = CompileCount(), CompileCount(), []

    def compile_ahead(*args):
        ahead.begin()
        warming_ahead(*args)
        ahead.end()
        running.begin()

    warming_ahead = warming.compile_ahead
    monkeypatch.setattr(warming, "compile_ahead", compile_ahead)
    engine = Engine(*model, SMALL)
    engine.warm(lambda done, of: told.append((done, of)))
    running.end()
    engine.close()
    assert running.count == 0
    done, of = zip(*told, strict=True)
    assert done == tuple(sorted(done))
    assert done[-1] == of[-1]
    assert 0 < ahead.count <= of[-1]  # the two that make the first state were compiled when the engine was made
    assert not any(row for pool in engine.pools for row in pool.rows)
    assert [pool.shape for pool in engine.pools] == [(1, 16)]


def test_rows_whose_empty_slots_cost_nothing_have_one_size(model, monkeypatch):
    config, _ = model
    plain = EngineOptions(rows=4)
    assert plain.capacities(config) == (128, 256, 512)
    assert plain.pools(config) == (PoolOptions(rows=(1, 2, 4), capacities=(128, 256, 512)),)
    assert plain.pools(config, reads_filled_slots=True) == (PoolOptions(rows=(1, 2, 4), capacities=(512,)),)
    assert replace(plain, context=200).pools(config, True) == (PoolOptions(rows=(1, 2, 4), capacities=(256,)),)
    long = replace(plain, short=128).pools(config, True)
    assert [pool.capacities for pool in long] == [(128,), (256, 512)]  # of long ones empty slots would be much memory
    assert replace(plain, smallest_capacity=128).pools(config, True) == plain.pools(config)
    monkeypatch.setattr(native, "usable", lambda library: False)
    assert Engine(*model, plain).pools[0].options.capacities == (128, 256, 512)


@pytest.mark.skipif(not native.usable("floats"), reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("change", "cache", "compute"),
    [
        ({}, None, {}),
        ({}, None, {"attention": "reference"}),
        ({}, "int8", {}),
        ({}, None, {"dtype": "bfloat16"}),
        ({"window": 8}, None, {}),
    ],
)
def test_a_turn_that_reads_filled_slots_alone_is_one_with_the_kernel(model, change, cache, compute):
    config, params = replace(model[0], **change), model[1]
    engine = Engine(config, params, EngineOptions(rows=1, cache=CacheOptions(dtype=cache), compute=Compute(**compute)))
    model = engine.model
    args = engine.pools[0].state, Wishes.none(1, config.vocab_size), model.compute, model.layout
    with ops.native_anyway(model.native):
        assert native_code.value
        text = model.programs.take_turn.lower(model.config, model.params, *args).as_text()
    assert (native.ATTENTION in text) == model.reads_filled_slots == (not change and not cache and not compute)
    assert np.all(engine.pools[0].state.done)
