"""Exported programs give, from bytes, what the functions give."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import environment
from jax import export

import llama_jax
from llama_jax.export import register_for_export
from llama_jax.inference.decode import begin_decode, decode, init_prefill, prefill
from llama_jax.inference.prepare_inputs import prepare_inputs
from llama_jax.inference.sampling import Sampling
from llama_jax.model.forward_options import Positions

PAGE = Path(__file__).parents[1] / "docs" / "generation.md"


@pytest.fixture(scope="module", autouse=True)
def registered():
    register_for_export()
    register_for_export()


def from_bytes(function, *arguments):
    """The function after a journey through bytes."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), arguments)
    data = export.export(jax.jit(function))(*shapes).serialize()
    return export.deserialize(data).call


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_reading_and_decoding_from_bytes(models, dtype):
    config, params = models["gqa"]
    sampling = Sampling(temperature=[0.0, 0.7], seed=[0, 1])
    tokens, lengths, request = prepare_inputs(config, [[1, 2, 3], [4, 5]], 8, sampling, [7])
    options = llama_jax.CacheOptions(dtype=dtype)
    reading = init_prefill(config, params, 2, 32, options)
    positions = Positions(lengths, rope_lengths=lengths)

    def run(read, start, decode):
        read_so_far = read(params, reading, tokens, positions)
        state, first = start(params, read_so_far, tokens, lengths, request)
        state, _, rest = decode(params, state, jnp.int32(2))
        return first, rest, state

    functions = partial(prefill, config), partial(begin_decode, config), partial(decode, config, max_chunks=2)
    wanted = run(*map(jax.jit, functions))
    state, _ = jax.eval_shape(
        functions[1], params, jax.eval_shape(functions[0], params, reading, tokens, positions), tokens, lengths, request
    )
    found = run(
        from_bytes(functions[0], params, reading, tokens, positions),
        from_bytes(functions[1], params, reading._replace(cache=state.cache), tokens, lengths, request),
        from_bytes(functions[2], params, state, jnp.int32(2)),
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), found, wanted)


def test_one_program_for_every_number_of_rows(models):
    """The batch may stay open: prompts of any number of rows through one program."""
    config, params = models["gqa"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    tokens = jax.ShapeDtypeStruct(export.symbolic_shape("B, 8"), jnp.int32)
    exported = export.export(jax.jit(lambda params, tokens: llama_jax.forward(config, params, tokens)[0]))(shapes, tokens)
    call = export.deserialize(exported.serialize()).call
    forward = jax.jit(llama_jax.forward, static_argnums=0)
    for rows in (1, 3):
        some = np.random.default_rng(rows).integers(0, config.vocab_size, (rows, 8), np.int32)
        np.testing.assert_allclose(call(params, some), forward(config, params, some)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_program_of_the_page_runs_without_this_library(quantize, tmp_path, monkeypatch):
    """It prints the tokens of `generate`, in a process in which `import llama_jax` raises."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLAMA_JAX_NATIVE", "off")
    section = PAGE.read_text("utf-8").partition("## Without this library\n")[2].partition("\n## ")[0]
    write, run = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    config, params, tokenizer = llama_jax.load(dtype="float32", quantize=quantize)
    exec(write, {"jax": jax, "jnp": jnp, "llama_jax": llama_jax, "config": config, "params": params})
    assert "custom_call" not in export.deserialize(bytearray(Path("decode.stablehlo").read_bytes())).mlir_module()
    command = [sys.executable, "-c", f"import sys; sys.modules['llama_jax'] = None\n{run}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(PYTHONPATH=""))
    prompts = [tokenizer.encode("Once upon a time")]
    expected = llama_jax.generate(config, params, prompts, max_new_tokens=32)[0].tokens
    assert done.stdout == f"{expected}\n", done.stderr
