"""Arrays filled from rows: what is read, what is checked, how it is cast."""

import itertools
from dataclasses import dataclass, field

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.errors import CheckpointError
from llama_jax.formats import device_fill as fill_module
from llama_jax.formats.device_fill import (
    ArrayMemory,
    ArraySource,
    FillJob,
    FillTarget,
    TensorSlice,
    cast,
    check_finite,
    fill,
    fill_by_rows,
    floats_of,
)
from llama_jax.formats.lazy_tensors import ArrayTensor, permute_rope

FLOATS = [np.float32, np.float16, np.float64, ml_dtypes.bfloat16]
F32 = np.dtype(np.float32)


@dataclass
class Watched:
    """A tensor that remembers which rows were read."""

    array: np.ndarray
    seen: list = field(default_factory=list)
    storage_type = "F32"

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    nbytes = property(lambda self: self.array.nbytes)

    def read(self, start, stop):
        self.seen += range(start, stop)
        return self.array[start:stop].copy()


class InPlaces(FillTarget):
    """An array of which devices hold some parts."""

    def __init__(self, shape, places):
        super().__init__(shape, F32)
        object.__setattr__(self, "parts", dict(enumerate(places)))

    def device_slices(self):
        return self.parts


@st.composite
def layouts(draw):
    """Layers of an array of three parts along its second axis, and places in them, as a mesh would cut them."""
    lead, widths, inner, columns = draw(st.integers(1, 6)), draw(st.tuples(*[st.integers(1, 3)] * 3)), 2, 4
    shape = (draw(st.integers(1, 3)), lead, sum(widths), inner, columns)
    places = draw(
        st.lists(
            st.tuples(
                *[st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(lambda ab: (min(ab), max(ab))) for n in shape]
            ),
            min_size=1,
            max_size=4,
        )
    )
    return widths, shape, [tuple(slice(a, max(a + 1, b)) for a, b in place) for place in places]


@given(layouts(), st.integers(1, 300))
def test_each_place_gets_its_part_and_no_other_row_is_read(layout, run):
    widths, shape, places = layout
    whole = np.random.default_rng(0).standard_normal(shape, np.float32)
    ends = np.cumsum((0, *widths))
    layers = []
    for layer in whole:
        blocks = np.split(layer, ends[1:-1], axis=1)
        columns = [slice(first, end) for first, end in itertools.pairwise(ends)]
        parts = [
            TensorSlice("x", Watched(block.reshape(-1, shape[-1])), its) for block, its in zip(blocks, columns, strict=True)
        ]
        layers.append(ArraySource(shape[1:], tuple(parts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill_module, "FILL_READ_BYTES", run)
        filling = FillJob(layers, [InPlaces(shape, places)], floats_of(F32), ArrayMemory(), stacked=True)
        for layer in reversed(range(len(layers))):
            filling.fill(layer)
    distinct = {str(place): place for place in places}  # several devices may hold the same
    for place, got in zip(distinct.values(), filling.done(), strict=True):
        np.testing.assert_array_equal(got, whole[place])
        assert got.ctypes.data % fill_module.ALIGNMENT == 0
    for layer, array in enumerate(layers):
        there = [place for place in places if place[0].start <= layer < place[0].stop]
        needed = {i for place in there for i in range(place[1].start, place[1].stop)}
        for part, width in zip(array.parts, widths, strict=True):
            per_entry = width * shape[3]
            assert {row // per_entry for row in part.tensor.seen} == needed
            assert len(part.tensor.seen) == len(needed) * per_entry  # once each


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
@given(seed=st.integers(0, 1000))
def test_cast_rounds_as_numpy_does(source, target, seed):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(64) * 10.0 ** rng.integers(-9, 4, 64)).astype(source).reshape(8, 8)
    out = np.zeros((8, 3, 8), target)
    cast(values, out[:, 1])
    # Through float32 where both are 16 bits wide, as there is no other way; float64 rounds twice on its way to bfloat16.
    want = values.astype(np.float32).astype(target) if target == ml_dtypes.bfloat16 else values.astype(target)
    np.testing.assert_array_equal(out[:, 1], want)
    assert not out[:, 0].any()
    assert not out[:, 2].any()


def test_cast_to_bfloat16_rounds_ties_to_even():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x80000000, 0x00000001, 0x7F7F0000], np.uint32)
    values = bits.view(np.float32)
    out = np.zeros(7, ml_dtypes.bfloat16)
    cast(values, out)
    np.testing.assert_array_equal(out.view(np.uint16), values.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_wherever_it_is(dtype, value):
    for at in (0, 517, 1023):
        values = np.full((32, 32), -3.5, dtype)
        values.reshape(-1)[at] = value
        with pytest.raises(CheckpointError, match="x holds NaN or infinity"):
            check_finite(values, F32, "x")
    check_finite(np.full((4, 4), np.finfo(np.float32).tiny / 4, dtype), F32, "x")


def sharding(spec, shape=(2, 4)):
    return NamedSharding(jax.make_mesh(shape, ("tensor", "fsdp"), axis_types=(AxisType.Auto,) * 2), spec)


@pytest.mark.parametrize("spec", [P("tensor", None, None, "fsdp"), P(None, None, None, ("fsdp", "tensor"))])
def test_joined_and_turned_rows_come_to_their_places(spec):
    """Of three tensors in one array, two of them interleaved, none of whose rows divide by eight."""
    rng = np.random.default_rng(0)
    lead, widths, head, columns = 2, (3, 1, 1), 6, 16
    parts, first = [], 0
    for width in widths:
        tensor = ArrayTensor(rng.standard_normal((lead * width * head, columns), np.float32))
        moved = permute_rope(tensor, head, interleave=False) if first < 4 else tensor
        parts.append(TensorSlice("x", moved, slice(first, first + width)))
        first += width
    array = ArraySource((lead, sum(widths), head, columns), tuple(parts), is_quantizable=True, stored=True)
    place = sharding(spec)
    wanted, got = fill(array, F32, place), fill_by_rows(array, F32, place)
    np.testing.assert_array_equal(wanted, got)
    assert got.sharding == place
