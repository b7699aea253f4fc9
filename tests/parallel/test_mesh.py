import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from llama_jax.parallel.mesh import AXES, MeshError, MeshSizes, make_mesh, parse_mesh

sizes = st.builds(MeshSizes, *[st.integers(1, 10**6)] * 4)


@given(sizes, st.randoms())
def test_a_mesh_reads_back_in_any_order(sizes, random):
    parts = str(sizes).split(",")
    random.shuffle(parts)
    assert parse_mesh(",".join(parts)) == sizes


def test_context_is_named_where_it_splits():
    assert str(MeshSizes(2, 3, 4)) == "data=2,fsdp=3,tensor=4"
    assert str(MeshSizes(2, 3, 4, 5)) == "data=2,fsdp=3,context=5,tensor=4"


def test_an_absent_axis_is_one():
    assert parse_mesh("tensor=4") == MeshSizes(data=1, fsdp=1, tensor=4)
    assert parse_mesh(" fsdp = 2 , data=3") == MeshSizes(data=3, fsdp=2)
    assert MeshSizes(2, 3, 4).devices == 24
    assert MeshSizes(2, 3, 4, 5).devices == 120


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not axis=size"),
        ("8", "'8' is not axis=size"),
        ("data=²", "'data=²' is not axis=size"),
        ("data=0", "mesh axis data=0 must be at least 1"),
        ("model=8", "has no axis 'model'; the axes are data, fsdp, context, tensor"),
        ("data=2,fsdp=2,data=4", "has data twice"),
    ],
)
def test_what_is_no_mesh_is_named(text, message):
    with pytest.raises(MeshError, match=message):
        parse_mesh(text)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
def test_sizes_are_positive_whole_numbers(size):
    with pytest.raises(MeshError, match=r"fsdp=.* must be (an integer|at least 1)"):
        MeshSizes(fsdp=size)


def test_a_mesh_has_all_axes_in_order_and_leaves_propagation_to_xla():
    mesh = make_mesh(MeshSizes())
    assert mesh.axis_names == AXES
    assert mesh.axis_types == (AxisType.Auto,) * 4


def test_more_devices_than_there_are():
    there = len(jax.devices())
    with pytest.raises(MeshError, match=f"needs {there + 1} devices, but there are {there}"):
        make_mesh(MeshSizes(data=there + 1))
