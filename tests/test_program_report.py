"""The texts in `program_texts/` are real: two layers of a small decoder, and a training step of twelve over eight devices
(fsdp), compiled by libtpu 0.0.42 for v5e and by JAX's CUDA plugin 0.10.2 for H100, without metadata and most of the
configuration.
"""

from pathlib import Path

import pytest
from jax.sharding import AbstractMesh
from program_report import (
    DeviceProgram,
    bytes_read,
    bytes_written,
    custom_calls,
    find_copies,
    multiplies,
    overlap,
    token_of,
)

from llama_jax.analysis.collectives import ARRAY, array_bytes, find_collectives, sum_traffic, tuple_elements

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


def test_trips_that_a_tpu_leaves_to_the_condition():
    text = DeviceProgram(read("train_tpu-v5e"))
    loops = [one for one in text.computations[text.entry] if one.opcode == "while"]
    assert [text.trips(text.entry, loop) for loop in loops] == [12, 12]
    text = DeviceProgram(read("decode_tpu-v5e"))
    (outer,) = (one for one in text.computations[text.entry] if one.opcode == "while")
    assert text.trips(text.entry, outer) is None  # as many turns as are asked for
    (inner,) = (one for one in text.computations[outer.calls("body")] if one.opcode == "while")
    assert text.trips(outer.calls("body"), inner) == 4


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


HAND = """HloModule hand, is_scheduled=true

%reduced (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%update (p0: bf16[8,1024], p1: bf16[1,1024], p2: s32[]) -> bf16[8,1024] {
  %p0 = bf16[8,1024]{1,0} parameter(0)
  %p1 = bf16[1,1024]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %slot = bf16[8,1024]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)
}

%looked_up (t0: bf16[5000,1024], t1: s32[1]) -> bf16[1,1024] {
  %t0 = bf16[5000,1024]{1,0} parameter(0)
  %t1 = s32[1]{0} parameter(1)
  ROOT %row = bf16[1,1024]{1,0} gather(%t0, %t1), offset_dims={1}, slice_sizes={1,1024}
}

%greedy (g: bf16[8,1024]) -> s32[] {
  %g = bf16[8,1024]{1,0} parameter(0)
  ROOT %best = s32[] custom-call(%g), custom_call_target="argmax"
}

%filtered (f: bf16[8,1024]) -> s32[] {
  %f = bf16[8,1024]{1,0} parameter(0)
  %sorted = bf16[8,1024]{1,0} sort(%f), dimensions={1}, to_apply=%reduced
  %again = bf16[8,1024]{1,0} sort(%sorted), dimensions={1}, to_apply=%reduced
  ROOT %chosen = s32[] custom-call(%again), custom_call_target="argmax"
}

ENTRY %main (x: bf16[8,1024], y: bf16[1,1024], at: s32[], table: bf16[5000,1024], id: s32[1], greedily: pred[]) -> s32[] {
  %x = bf16[8,1024]{1,0} parameter(0)
  %y = bf16[1,1024]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %table = bf16[5000,1024]{1,0} parameter(3)
  %id = s32[1]{0} parameter(4)
  %greedily = pred[] parameter(5)
  %found = bf16[1,1024]{1,0} fusion(%table, %id), kind=kLoop, calls=%looked_up
  %next = bf16[8,1024]{1,0} fusion(%x, %found, %at), kind=kLoop, calls=%update
  ROOT %token = s32[] conditional(%greedily, %next, %next), true_computation=%greedy, false_computation=%filtered
}
"""


def test_what_is_updated_in_place_looked_up_or_left_out():
    text = DeviceProgram(HAND)
    row, whole = 2 * 1024, 2 * 8 * 1024
    named = text.by_name(text.entry)
    assert bytes_read(text, text.entry, named["found"]) == row + 4  # and its index
    assert bytes_written(text, text.entry, named["found"]) == row
    assert bytes_read(text, text.entry, named["next"]) == row + 4  # not what it is written into
    assert bytes_written(text, text.entry, named["next"]) == row
    token = token_of(text, 1, 4)
    assert token.kernels == 3  # of the branches the one without sorting
    assert token.read == 2 * row + 8 + whole
    assert custom_calls(text) == {"argmax": 2}


NESTED = """HloModule nested, is_scheduled=true

%view (v: bf16[64,128]) -> bf16[64,128] {
  %v = bf16[64,128]{1,0} parameter(0)
  ROOT %same = bf16[64,128]{1,0} bitcast(%v)
}

%product (w: bf16[64,128], x: bf16[1,128]) -> bf16[1,64] {
  %w = bf16[64,128]{1,0} parameter(0)
  %x = bf16[1,128]{1,0} parameter(1)
  %seen = bf16[64,128]{1,0} fusion(%w), kind=kLoop, calls=%view
  ROOT %y = bf16[1,64]{1,0} convolution(%x, %seen), dim_labels=bf_oi->bf
}

ENTRY %main (w: bf16[64,128], x: bf16[1,128]) -> bf16[1,64] {
  %w = bf16[64,128]{1,0} parameter(0)
  %x = bf16[1,128]{1,0} parameter(1)
  ROOT %y = bf16[1,64]{1,0} fusion(%w, %x), kind=kOutput, calls=%product
}
"""


def test_a_weight_that_a_fusion_passes_to_another_is_read():
    text = DeviceProgram(NESTED)
    assert bytes_read(text, text.entry, text.by_name(text.entry)["y"]) == 2 * (64 * 128 + 128)
    assert multiplies(text, text.by_name(text.entry)["y"])


KERNEL = """HloModule jit_f

%body (x: f32[8]) -> f32[8] {
  %x = f32[8]{0:T(128)} parameter(0)
  %kernel = f32[8]{0:T(128)} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block_q": 512}}, metadata={op_name="jit(f)/splash"}
  %taken = f32[8]{0:T(128)} get-tuple-element(%kernel), index=0, frontend_attributes={kernel_metadata={
"block_q": 512
}}, metadata={op_name="jit(f)/splash"}
  ROOT %start = f32[8]{0:T(128)} negate(%taken)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0:T(128)} parameter(0)
  ROOT %call = f32[8]{0:T(128)} call(%x), to_apply=%body
}
"""


def test_what_a_kernel_says_of_itself_over_several_lines_ends_no_computation():
    text = DeviceProgram(KERNEL)
    assert [one.name for one in text.computations["body"]] == ["x", "kernel", "taken", "start"]
    assert all('op_name="jit(f)/splash"' in one.rest for one in text.computations["body"][1:3])
    assert [one.name for one in text.computations[text.entry]] == ["x", "call"]


def test_types():
    assert tuple_elements("(f32[2]{0}, (f32[4], bf16[3,5]{1,0:T(8,128)(2,1)}), s32[])") == [
        "f32[2]{0}",
        " (f32[4], bf16[3,5]{1,0:T(8,128)(2,1)})",
        " s32[]",
    ]
    sizes = [
        array_bytes(*array) for *array, _ in ARRAY.findall("bf16[3,5]{1,0:T(8,128)(2,1)S(1)} s4[3] pred[7] f8e4m3fn[2]")
    ]
    assert sizes == [30, 2, 7, 2]
    text = DeviceProgram(read("decode_tpu-v5e"))
    assert text.memory_bytes("(bf16[4]{0:T(128)S(1)}, bf16[8]{0:T(128)})") == 16  # the first is on the chip


TILED = """HloModule tiled, is_scheduled=true

%tiling (t0: s8[64,32,128]) -> s8[64,32,128] {
  %t0 = s8[64,32,128]{2,1,0} parameter(0)
  ROOT %copied = s8[64,32,128]{2,1,0} copy(%t0)
}

%looked_up (t1: s8[64,32,128], at: s32[]) -> s8[1,32,128] {
  %t1 = s8[64,32,128]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %tiled = s8[64,32,128]{2,1,0} fusion(%t1), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%tiling
  ROOT %part = s8[1,32,128]{2,1,0} dynamic-slice(%tiled, %at, %at, %at), dynamic_slice_sizes={1,32,128}
}

ENTRY %main (table: s8[64,32,128], at: s32[]) -> s8[1,32,128] {
  %table = s8[64,32,128]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  ROOT %found = s8[1,32,128]{2,1,0} fusion(%table, %at), kind=kLoop, calls=%looked_up
}
"""


def test_a_part_of_a_table_that_is_seen_in_another_tiling_is_a_part():
    """As a TPU's compiler takes rows of 8-bit numbers."""
    text = DeviceProgram(TILED)
    assert bytes_read(text, text.entry, text.by_name(text.entry)["found"]) == 32 * 128 + 4
