"""What is read from the text of programs, some compiled here and some in forms that this XLA does not write on CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from llama_jax import preset
from llama_jax.analysis.collectives import find_collectives, ring_bytes, sum_traffic
from llama_jax.parallel.mesh import make_mesh, parse_mesh

CONFIG = preset("stories-260k")


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(parse_mesh("data=2,fsdp=2,tensor=2"))


def find(function, mesh, spec, *shapes):
    """The collectives of a function that is written per device, of arrays that are split by `spec`."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(mapped).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()
    return find_collectives(compiled.as_text(), mesh)


@pytest.mark.parametrize(
    ("function", "kind", "axes", "size"),
    [
        (lambda x: lax.psum(x, "data"), "all-reduce", ("data",), 4 * 8),
        (lambda x: lax.psum(x, ("data", "tensor")), "all-reduce", ("data", "tensor"), 4 * 8),
        (lambda x: lax.all_gather(x, "tensor"), "all-gather", ("tensor",), 2 * 4 * 8),
        (lambda x: lax.all_gather(x, ("fsdp", "tensor"), tiled=True), "all-gather", ("fsdp", "tensor"), 4 * 4 * 8),
        (lambda x: lax.all_to_all(x, "fsdp", 0, 0, tiled=True), "all-to-all", ("fsdp",), 4 * 8),
        (lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]), "collective-permute", ("tensor",), 4 * 8),
    ],
)
def test_every_kind_along_its_axes(mesh, function, kind, axes, size):
    (found,) = find(function, mesh, P(("data", "fsdp", "tensor")), (64,))
    assert (found.opcode, found.axes, found.bytes) == (kind, axes, size)
    assert found.group == 2 ** len(axes)
    assert (found.count, found.loops, found.dtypes, found.phase) == (1, (), ("f32",), "rest")
    assert sum(int(np.prod([int(n) for n in s[4:-1].split(",")])) for s in found.shapes) * 4 == size


def test_a_sum_of_which_each_device_takes_its_part_is_a_scatter(mesh):
    """XLA for CPU writes lax.psum_scatter as an all-reduce and a slice."""
    (found,) = find(lambda x: lax.psum_scatter(x, "fsdp", tiled=True), mesh, P(), (64,))
    if found.opcode == "all-reduce":
        assert (found.bytes, found.sliced) == (256, 256)
    assert found.sent_if_scattered == ring_bytes("reduce-scatter", 128, 2) == 128
    (whole,) = find(lambda x: lax.psum(x, "fsdp"), mesh, P(), (64,))
    assert whole.sliced == 0


def test_loops_multiply(mesh):
    def step(x, _):
        inner = lax.scan(lambda y, _: (lax.psum(jnp.sin(y), "tensor"), None), x, length=5)[0]
        return lax.psum(jnp.cos(inner), "data"), None

    found = find(lambda x: lax.scan(step, x, length=3)[0], mesh, P(), (16,))
    assert {c.axes: (c.loops, c.count) for c in found} == {("tensor",): ((3, 5), 15), ("data",): ((3,), 3)}
    traffic = {t.axes: t for t in sum_traffic(found)}
    assert (traffic["tensor",].count, traffic["tensor",].bytes, traffic["tensor",].sent) == (15, 15 * 64, 15 * 64)
    assert traffic["tensor",].instructions == 1
    assert traffic["tensor",].is_counted


def test_a_loop_of_unknown_length_is_said_and_not_guessed(mesh):
    def run(x):
        return lax.while_loop(lambda y: y[0] < 1e3, lambda y: lax.psum(jnp.exp(y), "tensor"), x)

    (found,) = find(run, mesh, P(), (16,))
    assert (found.loops, found.count, found.is_counted) == ((None,), 1, False)
    assert not sum_traffic([found])[0].is_counted


# A program in forms that XLA for GPU and TPU, or another version of it, writes.
PROGRAM = """HloModule forms, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: bf16[8,4]) -> bf16[2,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %scatter.1 = bf16[2,4]{1,0} reduce-scatter(%p), channel_id=3, replica_groups=GROUPS, dimensions={0}, to_apply=%add
}

%called (p: bf16[8,4]) -> bf16[2,4] {
  %p = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %start.1 = ((bf16[8,4]{1,0}), bf16[2,4]{1,0}, u32[]) async-start(%p), calls=%wrapped
  ROOT %done.1 = bf16[2,4]{1,0} async-done(%start.1)
}

%body.1 (p: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %p = (s32[], bf16[8,4]{1,0}) parameter(0)
  %x = bf16[8,4]{1,0} get-tuple-element(%p), index=1
  %start.2 = (bf16[8,4]{1,0:T(8,128)}, bf16[16,4]{1,0:T(8,128)}) all-gather-start(%x), replica_groups=GROUPS, dimensions={0}
  %done.2 = bf16[16,4]{1,0} all-gather-done(%start.2), metadata={op_name="jit(f)/transpose(jvp(f))/all-gather(%x)"}
  %call.1 = bf16[2,4]{1,0} call(%x), to_apply=%called
  ROOT %out = (s32[], bf16[8,4]{1,0}) tuple(%i, %x)
}

%condition.1 (p: (s32[], bf16[8,4])) -> pred[] {
  %p = (s32[], bf16[8,4]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: bf16[8,4], y: f32[3], z: pred[7]) -> f32[3] {
  %x = bf16[8,4]{1,0} parameter(0)
  %start.3 = (f32[3]{0}, pred[7]{0}, /*index=2*/s4[3]{0}) all-reduce-start(%y, %z, /*index=2*/%q), replica_groups=GROUPS, to_apply=%add, metadata={op_name="jit(f)/jvp(f)/add" source_file="f.py" source_line=7}
  %done.3 = (f32[3]{0}, pred[7]{0}, s4[3]{0}) all-reduce-done(%start.3)
  %while.1 = (s32[], bf16[8,4]{1,0}) while(%t), condition=%condition.1, body=%body.1, backend_config={"known_trip_count":{"n":"6"}}
  %permute.1 = (f32[3]{0}, f32[3]{0}, u32[], u32[]) collective-permute-start(%y), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  ROOT %permute.2 = f32[3]{0} collective-permute-done(%permute.1)
}
"""  # noqa: E501

ALONG_DATA = [
    "{{0,4},{1,5},{2,6},{3,7}}",
    "[4,2]<=[2,4]T(1,0)",
    "[4,2]<=[2,2,2]T(1,2,0)",
    "mesh['axis_0'=2,'axis_1'=4] {'axis_0'}",
    "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}",
    "mesh['axis_0'=8] {'axis_0':(1)2}",
]


@pytest.mark.parametrize("groups", ALONG_DATA)
def test_forms_of_groups_and_of_asynchronous_instructions(mesh, groups):
    found = {c.opcode: c for c in find_collectives(PROGRAM.replace("GROUPS", groups), mesh)}
    assert [*found] == ["reduce-scatter", "all-gather", "all-reduce", "collective-permute"]
    gather, scatter = found["all-gather"], found["reduce-scatter"]
    assert (gather.bytes, gather.dtypes, gather.loops) == (16 * 4 * 2, ("bf16",), (6,))
    assert (scatter.bytes, scatter.loops, scatter.group) == (2 * 4 * 2, (6,), 2)
    every = found["all-reduce"]
    assert (every.bytes, every.dtypes, every.shapes) == (12 + 7 + 2, ("f32", "pred", "s4"), ("f32[3]", "pred[7]", "s4[3]"))
    assert every.phase == "forward"
    permute = found["collective-permute"]
    assert (permute.axes, permute.bytes, permute.sent) == (("tensor",), 12, 12)
    assert all(c.axes == ("data",) for c in (gather, scatter, every))


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{}", ("data", "fsdp", "tensor")),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "fsdp", "tensor")),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("data", "tensor")),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_0','axis_2'}", ("data", "tensor")),
        ("mesh['axis_0'=8] {'axis_0':(2)2}", ("fsdp",)),
        ("mesh['axis_0'=8] {'axis_0':(1)2,'axis_0':(4)2}", ("data", "tensor")),
        ("[1,8]<=[8]", ("data", "fsdp", "tensor")),
    ],
)
def test_groups_as_axes_of_the_mesh(mesh, groups, axes):
    found = [c for c in find_collectives(PROGRAM.replace("GROUPS", groups), mesh) if c.opcode == "all-gather"]
    assert found[0].axes == axes
    assert found[0].group == 2 ** len(axes)


def test_what_a_ring_sends():
    assert ring_bytes("all-gather", 800, 8) == 700
    assert ring_bytes("all-reduce", 800, 8) == 1400
    assert ring_bytes("reduce-scatter", 100, 8) == 700  # the result is an eighth
    assert ring_bytes("all-to-all", 800, 8) == 700
    for kind in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
        assert ring_bytes(kind, 800, 1) == 0
