"""What quantising did to each matrix, beside the two matrices themselves."""

import numpy as np
import pytest
from adapters import LORA, random_adapters

import llama_jax
from llama_jax.formats.build_params import plan
from llama_jax.formats.loading import bundled, open_checkpoint
from llama_jax.model.adapters import adapted
from llama_jax.model.trees import layers_of, quantize, stack
from llama_jax.ops.weights import KINDS, JoinedWeight
from llama_jax.verify import matrices
from llama_jax.verify.matrices import matrix_errors
from llama_jax.verify.rounding import ROUNDING, rounding_of


@pytest.fixture(scope="module")
def stories_model():
    return llama_jax.load(dtype="float32")


@pytest.mark.parametrize("kind", ["int8", pytest.param("q4_0", marks=pytest.mark.slow)])
def test_errors_are_those_of_the_numbers(kind, stories_model, monkeypatch):
    monkeypatch.setattr(matrices, "RUN", 1 << 14)  # several runs
    config, params, _ = stories_model
    found = quantize(params, f"{kind}-pure" if kind == "q4_0" else kind)
    errors = matrix_errors(found, params)
    assert [error.name for error in errors if error.layer is None] == ["embedding"]
    assert [error.layer for error in errors if error.name == "feed_forward.down"] == list(range(config.n_layers))
    assert {error.kind for error in errors} == {kind}
    exact, kept = (np.asarray(one, np.float64) for one in (params.embedding, found.embedding.decoded()))
    (of_embedding,) = (error for error in errors if error.name == "embedding")
    np.testing.assert_allclose(of_embedding.relative, np.linalg.norm(kept - exact) / np.linalg.norm(exact), rtol=1e-5)
    assert of_embedding.bits == pytest.approx({"int8": 8 + 32 / config.dim, "q4_0": 4.5}[kind])
    # The numbers of a trained model are not normally distributed; most of their rounding is foretold all the same.
    for error in errors:
        assert 0.5 < error.relative / rounding_of(kind, config.hidden_dim) < 1.7


def test_read_from_the_file_as_from_memory(stories_model):
    _, params, _ = stories_model
    found = quantize(params, "q8_0")
    from_file = matrix_errors(found, plan(open_checkpoint(bundled())))
    for one, other in zip(from_file, matrix_errors(found, params), strict=True):
        assert one[:4] == other[:4]
        assert one.relative == pytest.approx(other.relative)


def test_adapters_are_left_out(stories_model):
    config, params, _ = stories_model
    found = quantize(params, "q8_0")
    beside = adapted(found, random_adapters(config), LORA)
    assert matrix_errors(beside, params) == matrix_errors(found, params)


def test_floats_and_parts_of_several_kinds(stories_model):
    config, params, _ = stories_model
    assert matrix_errors(params, params) == ()
    attention = params.blocks.attention
    parts = (quantize(params, "q8_0").blocks.attention.qkv, attention.qkv)
    with_qkv = lambda qkv: params.replace(blocks=params.blocks.replace(attention=attention.replace(qkv=qkv)))
    errors = matrix_errors(with_qkv(JoinedWeight(parts)), with_qkv(np.concatenate([attention.qkv] * 2, axis=-3)))
    assert [error.layer for error in errors] == list(range(config.n_layers))
    assert {(error.name, error.kind) for error in errors} == {("attention.qkv", "q8_0 and float32")}
    assert errors[0].bits == pytest.approx((8.5 + 32) / 2)


def test_layers_of_several_kinds(stories_model):
    """Of which one is floats, and has no error."""
    _, params, _ = stories_model
    first, *rest = layers_of(quantize(params, "q8_0"))
    wide = first.feed_forward.replace(up=layers_of(params)[0].feed_forward.up)
    errors = matrix_errors(params.replace(blocks=stack([first.replace(feed_forward=wide), *rest])), params)
    of_up = [error for error in errors if error.name == "feed_forward.up"]
    assert [error.layer for error in of_up] == list(range(1, 1 + len(rest)))
    (expected,) = (one for one in matrix_errors(quantize(params, "q8_0"), params) if one[:2] == of_up[0][:2])
    assert of_up[0] == expected


@pytest.mark.parametrize("kind", [name for name, form in KINDS.items() if form.encode is not None])
def test_what_quantising_explains_falls_with_the_bits(kind):
    found = rounding_of(kind, 1024)
    assert ROUNDING["Q8_0"] <= found < 0.2
    if kind.upper() in ROUNDING:
        # Files that are not GGUF round otherwise: int4 to integers of -7 to 7, int8 in rows of several thousand numbers.
        assert found == pytest.approx(ROUNDING[kind.upper()], rel=0.1 if KINDS[kind].of_gguf else 0.2)
