"""Samples of a run whose model is sharded over several devices."""

from dataclasses import replace
from functools import partial

import jax
import pytest
from mortal_run import recipe

import llama_jax
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.sharding import param_specs, shardings
from llama_jax.runs.compiled_step import make_program
from llama_jax.runs.loop import sample_prompts
from llama_jax.runs.tasks.language_modeling import text_objective
from llama_jax.tokenizers.sentencepiece import byte_tokenizer

RECIPE = replace(recipe(), ema_decay=0.0, sample_tokens=6)


@pytest.fixture(scope="module")
def params():
    return jax.jit(partial(llama_jax.init, RECIPE.model))(jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    # Rows over all axes; a vocabulary of 320 that tensor pads, and 2 heads of keys that it copies.
    [
        MeshSizes(fsdp=2, context=2, tensor=2),
        MeshSizes(tensor=4),
        pytest.param(MeshSizes(data=8), marks=pytest.mark.nightly),
        pytest.param(MeshSizes(data=2, fsdp=2, tensor=2), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_samples_are_made_where_the_model_lies(params, sizes):
    tokenizer = byte_tokenizer()
    prompts = [tokenizer.encode("the "), tokenizer.encode("llama"), tokenizer.encode("a")]
    wanted = llama_jax.generate(
        RECIPE.model,
        params,
        prompts,
        max_new_tokens=6,
        sampling=llama_jax.Sampling(temperature=0.8, top_p=0.95),
        stop_tokens=tokenizer.stop_ids,
    )
    program = make_program(RECIPE, text_objective(RECIPE), sizes, "jit")
    spread = jax.device_put(params, shardings(make_mesh(sizes), param_specs(RECIPE.model, sizes)))
    found = sample_prompts(RECIPE, program, spread, prompts, tokenizer)
    known = [[token for token in row.tokens if token < tokenizer.vocab_size] for row in wanted]
    assert found == [tokenizer.decode(prompt + tokens) for prompt, tokens in zip(prompts, known, strict=True)]
    held = {
        (len(leaf.devices()), leaf.is_fully_replicated)
        for leaf in jax.tree.leaves(program.prepare_params(spread).blocks)
        if leaf.ndim > 2
    }
    assert held == {(sizes.devices, sizes.devices == sizes.data)}
