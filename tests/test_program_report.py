"""The texts in `program_texts/` are real: two layers of a small decoder, and a training step of twelve over eight devices
(fsdp), compiled by libtpu 0.0.42 for v5e and by JAX's CUDA plugin 0.10.2 for H100, without metadata and most of the
configuration.
"""

from pathlib import Path

import pytest
from jax.sharding import AbstractMesh
from program_report import (
    DeviceProgram,
    find_copies,
    overlap,
    token_of,
)

from llama_jax.analysis.collectives import find_collectives, sum_traffic

TEXTS = Path(__file__).parent / "program_texts"
LAYERS, WIDTH, HIDDEN, SLOTS, ROWS = 2, 2048, 16384, 16384, 2
WEIGHTS = LAYERS * 2 * WIDTH * HIDDEN * 2  # bytes
CACHE = LAYERS * ROWS * SLOTS * WIDTH * 2


def read(name):
    return (TEXTS / f"{name}.txt").read_text()


def test_a_gpu_reads_weights_once_and_the_cache_for_scores_and_for_values():
    text = DeviceProgram(read("decode_h100"))
    assert not text.is_tpu
    token = token_of(text, LAYERS, 4)
    assert token.read == pytest.approx(WEIGHTS + 2 * CACHE, rel=0.01)
    assert token.written < 0.01 * CACHE  # a slot, and not the cache
    assert (token.kernels, token.kernels_of_layers) == (21, 21)
    assert find_copies(text) == []


def test_a_tpu_copies_the_cache_into_another_layout_before_the_loop():
    text = DeviceProgram(read("decode_tpu-v5e"))
    assert text.is_tpu
    copies = find_copies(text)
    assert [(copy.shape, copy.in_loop) for copy in copies] == [("bf16[2,16384,2048]", False)] * 4
    assert sum(copy.bytes for copy in copies) == 2 * CACHE  # there and back
    token = token_of(text, LAYERS, 4)
    assert token.read == pytest.approx(WEIGHTS + 2 * CACHE, rel=0.01)
    assert token.kernels_of_layers == 18


@pytest.mark.parametrize("name", ["train_h100", "train_tpu-v5e"])
def test_collectives_of_both_compilers(name):
    mesh = AbstractMesh((1, 8, 1, 1), ("data", "fsdp", "context", "tensor"))
    found = find_collectives(read(name), mesh)
    traffic = {row.opcode: row for row in sum_traffic(found)}
    matrices = 12 * 2 * WIDTH * HIDDEN * 2
    assert traffic["all-gather"].bytes == 2 * matrices  # forward and backward
    assert traffic["reduce-scatter"].bytes == matrices / 8  # what a TPU writes as an all-reduce in a fusion of that name
    assert set(traffic) == {"all-gather", "reduce-scatter"}
    gathers = [how for one, how in zip(found, overlap(DeviceProgram(read(name))), strict=True) if one.opcode == "all-gather"]
    assert sum(overlapped for _, overlapped in gathers) == (2 if name == "train_h100" else 3)
    assert all(asynchronous for asynchronous, overlapped in gathers if overlapped)
    assert all(one.loops == (12,) for one in found)
