"""Channels that are scaled for quantization: the model stays the same, and what its blocks make of it becomes better."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import sharp

import llama_jax
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.model.awq import scale_channels
from llama_jax.model.trees import quantize
from llama_jax.tokenizers.sentencepiece import byte_tokenizer

CONFIG = llama_jax.LlamaConfig(260, 64, 2, 4, 2, 128, 128, 1e-5, 1e4, True, qkv_bias=True)
logits = jax.jit(llama_jax.logits, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    """With a few channels of the residual stream that are far larger than the others, as trained models have."""
    found = sharp(CONFIG, jax.random.key(0))
    norms = jax.random.uniform(jax.random.key(1), (CONFIG.n_layers, 2, CONFIG.dim), minval=0.1, maxval=1)
    norms = norms.at[:, :, :3].multiply(30)
    attention = found.blocks.attention.replace(qkv_bias=0.1 + found.blocks.attention.qkv_bias)
    return found.replace(blocks=found.blocks.replace(attention_norm=norms[:, 0], ffn_norm=norms[:, 1], attention=attention))


@pytest.fixture(scope="module")
def texts():
    """What is read to calibrate, and what to measure."""
    return np.random.default_rng(0).integers(0, 260, (2, 4, 64)).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "q4_0"])
def test_the_same_model_is_quantized_better(params, texts, kind):
    read, measured = texts
    scaled = scale_channels(CONFIG, params, read, kind)
    exact = logits(CONFIG, params, measured)
    np.testing.assert_allclose(logits(CONFIG, scaled, measured), exact, rtol=1e-3, atol=1e-3)
    error = lambda params: float(np.square(logits(CONFIG, quantize(params, kind), measured) - exact).mean())
    assert error(scaled) < 0.8 * error(params)


def test_what_cannot_be_scaled(params, texts):
    read, _ = texts
    with pytest.raises(ConfigError, match=r"quantize='iq4_xs' is not one of"):
        scale_channels(CONFIG, params, read, "iq4_xs")
    with pytest.raises(ConfigError, match="needs dense parameters"):
        scale_channels(CONFIG, quantize(params, "int8"), read, "int4")
    with pytest.raises(ConfigError, match="experts=4"):
        scale_channels(replace(CONFIG, experts=4, experts_per_token=2), params, read, "int4")


def test_convert_reads_a_text(params, texts, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("What is read to calibrate need not be long, but like what the model is for. " * 10)
    source, out = tmp_path / "model", tmp_path / "model.gguf"
    llama_jax.save(source, CONFIG, params, byte_tokenizer())
    llama_jax.convert(source, out, dtype="q4_0", calibrate=text)
    llama_jax.convert(source, tmp_path / "plain.gguf", dtype="q4_0")
    exact = llama_jax.load(source)
    found, plain = (llama_jax.load(path, "float32") for path in (out, tmp_path / "plain.gguf"))
    assert found.config == exact.config
    wanted = logits(exact.config, exact.params, texts[1])
    errors = [float(np.square(logits(exact.config, each.params, texts[1]) - wanted).mean()) for each in (found, plain)]
    assert 0 < errors[0] < errors[1]
    with pytest.raises(CheckpointError, match="needs quantization: dtype='q4_k' for a GGUF"):
        llama_jax.convert(source, tmp_path / "floats.gguf", dtype="float16", calibrate=text)
    text.write_text("Too short")
    with pytest.raises(CheckpointError, match="tokens; at least a few hundred are needed"):
        llama_jax.convert(source, tmp_path / "short.gguf", dtype="q4_0", calibrate=text)
    with pytest.raises(CheckpointError, match=r"nothing\.txt cannot be read"):
        llama_jax.convert(source, tmp_path / "short.gguf", dtype="q4_0", calibrate=tmp_path / "nothing.txt")
