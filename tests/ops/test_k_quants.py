"""Blocks of K-quants that are made of floats, beside llama.cpp's own quantizer."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from llama_jax.ops.weights.format_spec import blocks_from_planes
from llama_jax.ops.weights.formats import QUANT_FORMATS
from llama_jax.ops.weights.k_quants import encode_q4_k, encode_q5_k, encode_q6_k

ENCODE = {"q4_k": encode_q4_k, "q5_k": encode_q5_k, "q6_k": encode_q6_k}
# The blocks that llama.cpp (llama-cpp-python 0.3.36, `ggml_quantize_chunk`) makes of `row()`.
GOLDENS = {
    "q4_k": (
        7919,
        "2120df2b908fdee0908fe0dfafcdfd5f20fdca9764310eebb885532ffcca9764310eebb885522ffcc99764310eebb8857542"
        "1fedb98653300ecba875421fecb9865320fecb9875421fecb9865320fecbc99663300deab774411efcc99663300ddaa77441"
        "1efbc99663300ddaa774411e0fdca9764310edba8765320fdca9764310edba8754310fdca9764310edba8754",
    ),
    "q5_k": (
        7919,
        "a41bec2b91d0e0e2908fdfe0bfe0ff6f70e3c78e1c38f1e3c71e3c71e3c70e1c38f1e38f1e3871e3c70e1c38f1c38f1c40fa"
        "943ed8731cc7610ba54ff9943ed8721cc6610ba53ff9933ec8620cc660fbfa943fd9731dc7600ca640e9933fd9731cb660fc"
        "a54fe9833ec8721cb650fb95933dd7711dc6600aa44ff9933dd7701cc6600aa33ff9933dc6600cc650f9933f0fc9630da730"
        "fc9630ca630fc963fc9630fc962fc9630fc952fc9630fc852fc9",
    ),
    "q6_k": (
        7907,
        "d094572beeb276490cd093572beeb275c6e300adcae4012ecbe8022f4ce90621bf7b4703d19d5925e1be7b4704d09c59d402"
        "609ec4f2208ebce2104eacda003e4b2411fe4c2902ffdc2a07e0ddbb08e5d09c6926e2bf8b4704d09d6925f2bf7bc6e3009e"
        "bbe4012ebcd9022f4ddaf720be8b4704d09d6926e2bf8b4704d09d6990e73a4d4090e73a0d4d90e73a3d4d901409cebe6314"
        "19c9be636414c9beb360532439f98e536424f98e935024f98e8390e4394e4393e4390e4f93e4393e4e9320e1dfe3bf39bf3e"
        "a5a0a5a08f807580f013",
    ),
}


def row(step: int) -> np.ndarray:
    numbers = np.arange(256)
    return ((numbers * step) % 1013 - 506).astype(np.float32) / np.float32(506) * (1 + numbers // 64).astype(np.float32)


def blocks(kind: str, x: np.ndarray) -> np.ndarray:
    return blocks_from_planes(ENCODE[kind](x), QUANT_FORMATS[kind])


def decoded(kind: str, x: np.ndarray) -> np.ndarray:
    return QUANT_FORMATS[kind].decode(*ENCODE[kind](x))


@pytest.mark.parametrize("kind", ENCODE)
def test_a_block_is_llama_cpps(kind):
    step, golden = GOLDENS[kind]
    assert blocks(kind, row(step)[None]).tobytes().hex() == golden


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ENCODE)
def test_groups_without_a_range(kind):
    """Zeros stay zeros, and numbers that are all alike, or too small for a factor, become nothing else."""
    x = np.zeros((6, 256), np.float32)
    x[1], x[2], x[3], x[4, 7], x[5] = 3, -2, 1e-20, 5, 1e-9 * np.arange(256)
    found = decoded(kind, x)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[0], 0)
    np.testing.assert_allclose(found[[1, 2, 4]], x[[1, 2, 4]], rtol=0.02, atol=0.02)
    assert np.abs(found[[3, 5]]).max() <= 2e-6  # float16 has no smaller factors


@pytest.mark.llama_cpp
@pytest.mark.parametrize("kind", ENCODE)
@pytest.mark.parametrize("tailed", [False, True])
def test_many_blocks_are_llama_cpps(kind, tailed):
    """The same bytes for 96 of 100 blocks at least: a compiler that fuses products and sums decides near ties otherwise. The
    others are as near to the numbers."""
    llama_cpp = pytest.importorskip("llama_cpp")
    library = ctypes.CDLL(str(next(Path(llama_cpp.__file__).parent.glob("lib/libggml-base.*"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    random, number = np.random.default_rng(0), {"q4_k": 12, "q5_k": 13, "q6_k": 14}[kind]
    x = (random.standard_t(3, (256, 1024)) if tailed else random.standard_normal((256, 1024))).astype(np.float32)
    ours = blocks(kind, x)
    theirs = np.zeros_like(ours)
    pointer = lambda array: ctypes.c_void_p(array.ctypes.data)
    sizes = [ctypes.c_int64(n) for n in (0, *x.shape)]
    library.ggml_quantize_chunk(ctypes.c_int(number), pointer(x), pointer(theirs), *sizes, None)
    assert (ours == theirs).all(-1).mean() > 0.96
    numbers = [
        QUANT_FORMATS[kind].decode(*QUANT_FORMATS[kind].from_rows(each.reshape(256, -1), 1024)) for each in (ours, theirs)
    ]
    error, reference = (np.square(each - x).mean() for each in numbers)
    assert abs(error / reference - 1) < 1e-3
