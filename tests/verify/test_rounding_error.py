"""What rounding explains is what quantizers do, and no more; and what quantizing did to each matrix."""

from pathlib import Path

import make_goldens
import numpy as np
import pytest
import quantized_folders

import llama_jax
from llama_jax.errors import CheckpointError
from llama_jax.formats.build_params import plan
from llama_jax.formats.gguf import GGUF_TYPES
from llama_jax.formats.lazy_tensors import Dense
from llama_jax.formats.loading import bundled, open_checkpoint
from llama_jax.model.trees import quantize
from llama_jax.ops.weights.formats import QUANT_FORMATS
from llama_jax.verify import rounding_error
from llama_jax.verify.rounding_error import (
    ROUNDING,
    Origin,
    Rounding,
    matrix_errors,
    origin_of,
    rounding_between,
    rounding_of,
)

CONFIG = make_goldens.KINDS["gqa"]


def origin(kinds=("F32",), dtype="float32"):
    return Origin("test", CONFIG, kinds, dtype, {})


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_the_rounding_of_a_kind_is_what_its_quantizer_does(kind):
    from gguf import GGMLQuantizationType, quants

    weights = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    stored = GGMLQuantizationType[kind]
    error = quants.dequantize(quants.quantize(weights, stored), stored) - weights
    assert np.sqrt((error**2).mean()) == pytest.approx(ROUNDING[kind], rel=0.1)


def test_the_rounding_of_every_kind_that_is_read_is_known():
    assert {kind for kind, *_ in GGUF_TYPES.values()} <= ROUNDING.keys()
    assert {"F64", "int8"} <= ROUNDING.keys()
    assert {name.upper() for name in QUANT_FORMATS} <= ROUNDING.keys()
    with pytest.raises(CheckpointError, match="x has tensors of kind I8, with unknown rounding error"):
        origin_of("x", CONFIG, [Dense(Path("x"), 0, (2, 2), "I8")], "float32", {})


@pytest.mark.parametrize("kind", ["gptq, reordered", "fp8", "nf4 twice"])
def test_the_kinds_of_a_quantized_folder_are_named(kind, tmp_path):
    quantized_folders.write_folder(tmp_path, kind)
    opened = open_checkpoint(tmp_path)
    found = origin_of("x", opened.config, list(opened.tensors.values()), "float32", {})
    assert set(found.tensor_types) - {"F32"} <= {"INT4_ASYM", "FP8_128", "NF4", "NF4_256"}
    assert len(found.tensor_types) > 1


@pytest.mark.parametrize(
    ("here", "there", "name", "weights", "activations"),
    [
        ({}, {}, "float32", 0, 0),
        (dict(kinds=("F64",)), {}, "float32", 0, 0),
        (dict(kinds=("BF16",)), dict(kinds=("BF16", "F32")), "float32", 0, 0),
        (dict(kinds=("BF16",)), {}, "BF16", ROUNDING["BF16"], 0),
        (dict(kinds=("F32", "Q4_K", "Q6_K")), dict(kinds=("BF16",)), "Q4_K", ROUNDING["Q4_K"], 0),
        (dict(kinds=("Q4_K",)), dict(kinds=("Q4_K",)), "float32", 0, 0),
        (dict(dtype="bfloat16"), dict(dtype="bfloat16"), "BF16", 0, ROUNDING["BF16"]),
        (dict(dtype="float16"), {}, "F16", ROUNDING["F16"], ROUNDING["F16"]),
        (dict(kinds=("Q4_0",), dtype="bfloat16"), dict(kinds=("Q4_0",)), "BF16", ROUNDING["BF16"], ROUNDING["BF16"]),
    ],
)
def test_what_may_lie_between_two_models(here, there, name, weights, activations):
    for a, b in ((here, there), (there, here)):
        assert rounding_between(origin(**a), origin(**b)) == Rounding(name, weights, activations)


@pytest.fixture(scope="module")
def stories_model():
    return llama_jax.load(dtype="float32")


@pytest.mark.parametrize("kind", ["int8", pytest.param("q4_0", marks=pytest.mark.slow)])
def test_errors_are_those_of_the_numbers(kind, stories_model, monkeypatch):
    monkeypatch.setattr(rounding_error, "BLOCK_NUMBERS", 1 << 14)  # several runs
    config, params, _ = stories_model
    found = quantize(params, f"{kind}-pure" if kind == "q4_0" else kind)
    errors = matrix_errors(found, params)
    assert [error.name for error in errors if error.layer is None] == ["embedding"]
    assert [error.layer for error in errors if error.name == "feed_forward.down"] == list(range(config.n_layers))
    assert {error.quant_format for error in errors} == {kind}
    exact, kept = (np.asarray(one, np.float64) for one in (params.embedding, found.embedding.to_dense()))
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


@pytest.mark.parametrize("kind", [name for name, form in QUANT_FORMATS.items() if form.encode is not None])
def test_what_quantizing_explains_falls_with_the_bits(kind):
    found = rounding_of(kind, 1024)
    assert ROUNDING["Q8_0"] <= found < 0.2
    if kind.upper() in ROUNDING:
        # Files that are not GGUF round otherwise: int4 to integers of -7 to 7, int8 in rows of several thousand numbers.
        assert found == pytest.approx(ROUNDING[kind.upper()], rel=0.1 if QUANT_FORMATS[kind].is_gguf else 0.2)
