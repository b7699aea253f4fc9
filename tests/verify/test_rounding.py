"""What rounding explains is what quantisers do, and no more."""

from pathlib import Path

import make_goldens
import numpy as np
import pytest
import quantized_folders

from llama_jax.errors import CheckpointError
from llama_jax.formats.gguf import TYPES
from llama_jax.formats.lazy_tensors import Dense
from llama_jax.formats.loading import open_checkpoint
from llama_jax.ops.weights import KINDS
from llama_jax.verify import rounding
from llama_jax.verify.rounding import EXACT, ROUNDING, Rounding, origin_of, rounding_between, rounding_of
from llama_jax.verify.trace import Origin

CONFIG = make_goldens.KINDS["gqa"]


def origin(kinds=("F32",), dtype="float32"):
    return Origin("test", CONFIG, kinds, dtype, {})


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_the_rounding_of_a_kind_is_what_its_quantiser_does(kind):
    from gguf import GGMLQuantizationType, quants

    weights = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    stored = GGMLQuantizationType[kind]
    error = quants.dequantize(quants.quantize(weights, stored), stored) - weights
    assert np.sqrt((error**2).mean()) == pytest.approx(ROUNDING[kind], rel=0.1)


def test_the_rounding_of_every_kind_that_is_read_is_known():
    assert {kind for kind, *_ in TYPES.values()} <= ROUNDING.keys()
    assert {"F64", "int8"} <= ROUNDING.keys()
    assert {name.upper() for name in KINDS} <= ROUNDING.keys()
    with pytest.raises(CheckpointError, match="x holds I8 tensors, whose rounding is not known"):
        origin_of("x", CONFIG, [Dense(Path("x"), 0, (2, 2), "I8")], "float32", {})


@pytest.mark.parametrize("kind", ["gptq, reordered", "fp8", "nf4 twice"])
def test_the_kinds_of_a_quantised_folder_are_named(kind, tmp_path):
    quantized_folders.write_folder(tmp_path, kind)
    opened = open_checkpoint(tmp_path)
    found = origin_of("x", opened.config, list(opened.tensors.values()), "float32", {})
    assert set(found.kinds) - {"F32"} <= {"INT4_ASYM", "FP8_128", "NF4", "NF4_256"}
    assert len(found.kinds) > 1


def test_int4_of_rows_that_128_do_not_divide():
    assert 0.08 < rounding_of("int4", 192) < 0.11


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


def test_explained_divergence_grows_with_the_rounding_and_ends_at_a_nat():
    explained = [Rounding(kind, rounding, 0).kl for kind, rounding in ROUNDING.items()]
    assert explained == sorted(explained)
    assert (EXACT.kl, explained[-1]) == (0, rounding.KL_LIMIT)


def test_float32_explains_a_rounding_per_position_of_what_is_added_and_left():
    norms = np.array([1.0, 2.0, 4.0])
    explained = EXACT.explains(norms, np.zeros(3)) / norms
    assert (np.diff(explained) > 0).all()
    np.testing.assert_allclose(EXACT.explains(norms, norms), 1.5 * EXACT.explains(norms, 0 * norms))
    coarse = Rounding("x", 0.1, 0.0)
    np.testing.assert_allclose(coarse.explains(norms, 0 * norms), 0.1 * norms, rtol=1e-4)
