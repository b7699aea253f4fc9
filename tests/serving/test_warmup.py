"""Warming: every program is compiled before the first request."""

from dataclasses import replace

import jax
import pytest
from conftest import jit_init

import llama_jax
from llama_jax.model.cache import CacheOptions
from llama_jax.model.forward_options import ComputeOptions
from llama_jax.ops.cpu import native
from llama_jax.serving.engine import CompileCount, Engine
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.rows import batch_of, settings_of_rows

SMALL = EngineOptions(rows=1, context=16, prefill_chunk=16)


@pytest.fixture(scope="module")
def model():
    # Of sizes that no other test has: what JAX has compiled before it does not compile again.
    config = replace(llama_jax.preset("stories-260k"), n_layers=1, vocab_size=503)
    return config, jit_init(config, jax.random.key(0))


@pytest.mark.slow
def test_every_program_is_compiled_once(model):
    compiled, reports = CompileCount(), []
    engine = Engine(*model, SMALL)
    compiled.begin()
    engine.warm(lambda done, of: reports.append((done, of)))
    compiled.end()
    assert reports == [(i, len(reports)) for i in range(1, len(reports) + 1)]
    assert len(reports) == 5  # one token or several (twice), a piece, a piece that is scored, tokens that are seen
    assert compiled.count == 4
    assert not engine.scheduler.rows
    engine.close()


@pytest.mark.skipif(native.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("change", "cache", "compute", "by_kernel"),
    [
        ({}, None, {}, True),
        ({}, "int8", {}, True),
        ({"window": 8}, None, {}, True),
        ({}, None, {"attention": "reference"}, False),
    ],
)
def test_a_step_attends_by_the_native_kernel(model, change, cache, compute, by_kernel):
    config, params = replace(model[0], **change), model[1]
    engine = Engine(config, params, replace(SMALL, cache=CacheOptions(dtype=cache), compute=ComputeOptions(**compute)))
    model = engine.model
    batch, settings = batch_of([], (1, 1), 1, 1), settings_of_rows([], 1, config.vocab_size)
    assert model.static.compute.native_code
    text = model.programs.step.lower(model.static, model.params, engine.scheduler.state, batch, settings).as_text()
    assert ("llama_jax_paged_" in text) == by_kernel


@pytest.mark.skipif(native.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_copies_no_pages(model, dtype):
    """Whatever the size of the cache is."""
    config, params = model[0], jax.tree.map(lambda x: x.astype(dtype), model[1])
    options = replace(SMALL, cache_tokens=2**16)
    engine = Engine(config, params, options)
    model, batch, settings = engine.model, batch_of([], (1, 17), 1, 1), settings_of_rows([], 1, config.vocab_size)
    program = model.programs.step.lower(model.static, model.params, engine.scheduler.state, batch, settings).compile()
    found = program.memory_analysis()
    assert found.alias_size_in_bytes >= engine.scheduler.state.pages.nbytes > 4 * found.temp_size_in_bytes
