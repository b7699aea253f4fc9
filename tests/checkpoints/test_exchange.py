"""Rows that devices read apart and exchange: the same arrays, and only where it saves reading."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax.checkpoints.device_fill import ArrayParts, Part, fill, fill_by_rows, reads_others
from llama_jax.checkpoints.lazy_tensors import ArrayTensor

F32 = np.dtype(np.float32)


def sharding(spec, shape=(2, 4)):
    return NamedSharding(jax.make_mesh(shape, ("tensor", "fsdp"), axis_types=(AxisType.Auto,) * 2), spec)


@pytest.mark.parametrize(
    ("spec", "devices_of_each", "exchanged"),
    [
        (P("tensor", "fsdp"), 1, True),  # each of eight needs a quarter of every row of its half
        (P("tensor", "fsdp"), 4, False),  # each of two has whole rows
        (P("tensor", "fsdp"), 8, False),  # one process
        (P("fsdp", "tensor"), 4, True),
        (P(("tensor", "fsdp")), 1, False),
        (P(None, "tensor"), 1, True),
        (P(), 1, False),  # all need all
    ],
)
def test_where_rows_are_exchanged(spec, devices_of_each, exchanged):
    assert reads_others((16, 32), sharding(spec), lambda device: device.id // devices_of_each) == exchanged


def test_a_device_alone_has_nobody_to_ask():
    assert not reads_others((16, 32), None)
    assert not reads_others((16, 32), jax.sharding.SingleDeviceSharding(jax.devices()[0]))


@pytest.mark.parametrize("spec", [P("tensor", None, None, "fsdp"), P(None, None, None, ("fsdp", "tensor"))])
def test_joined_and_turned_rows_come_to_their_places(spec):
    """Of three tensors in one array, two of them interleaved, none of whose rows divide by eight."""
    rng = np.random.default_rng(0)
    lead, widths, head, columns = 2, (3, 1, 1), 6, 16
    parts, first = [], 0
    for width in widths:
        tensor = ArrayTensor(rng.standard_normal((lead * width * head, columns), np.float32))
        parts.append(Part("x", tensor, slice(first, first + width), interleaved=first < 4))
        first += width
    array = ArrayParts((lead, sum(widths), head, columns), tuple(parts), is_matrix=True, stored=True)
    place = sharding(spec)
    wanted, got = fill(array, F32, place), fill_by_rows(array, F32, place)
    np.testing.assert_array_equal(wanted, got)
    assert got.sharding == place


def test_a_plain_matrix_is_cast():
    array = ArrayParts((24, 16), (Part("x", ArrayTensor(np.arange(384, dtype=np.float32).reshape(24, 16))),), stored=True)
    place = sharding(P("fsdp", "tensor"))
    bfloat16 = np.dtype(jax.numpy.bfloat16)
    got = fill_by_rows(array, bfloat16, place)
    np.testing.assert_array_equal(fill(array, bfloat16, place), got)
    assert (got.dtype, got.sharding) == (bfloat16, place)
