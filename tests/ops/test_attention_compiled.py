"""Attention through the TPU's and the GPU's own compilers: kernels are reached where the work is. Needs no device."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llama_jax import ops
from llama_jax.ops.attention import AttentionMask, HeadSharding, KVView, record_backends
from llama_jax.ops.attention.paged import PagedView, attend_paged, write_paged

pytestmark = pytest.mark.accelerators

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
KERNEL = {"tpu": 'custom_call_target="tpu_custom_call"', "gpu": r'custom_call_target="__cudnn\$fmha\w*"'}


@pytest.fixture(autouse=True, scope="module")
def no_compilation_cache():
    """JAX reads no program for devices that are not there out of its cache, and warns."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def mesh_of(topology, shape, names):
    """Of devices that are not there; skips where their compiler is not installed."""
    if topology == "h100":
        pytest.importorskip("jax_plugins.xla_cuda12", exc_type=ImportError)
        told = {"platform": "cuda", "target_config": H100, "topology": f"1x{np.prod(shape)}x1"}
    else:
        pytest.importorskip("libtpu")
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        told = {"platform": "tpu", "topology_name": topology}
    devices = topologies.get_topology_desc(**told).devices[: np.prod(shape)]
    return Mesh(np.array(devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def compiled(mesh, head_sharding, function, *shapes):
    """A function of bfloat16 arrays by shape, int32 where the shape has two axes, and what attention it took."""

    def struct(shape):
        spec = P(head_sharding.mesh_axes_of_rows or None, *[head_sharding.mesh_axes_of_heads or None] * (len(shape) > 2))
        spec = P() if shape[0] == 1 else spec
        return jax.ShapeDtypeStruct(
            shape, jnp.int32 if len(shape) == 2 else jnp.bfloat16, sharding=NamedSharding(mesh, spec)
        )

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), record_backends() as taken:
        return jax.jit(function).lower(*map(struct, shapes)).compile(), set(taken)


def kernels_in(program, mesh):
    return re.findall(KERNEL[mesh.devices.flat[0].platform], program.as_text())


@pytest.mark.parametrize(("length", "width"), [(2048, 64), (4096, 128)])
@pytest.mark.parametrize(
    ("topology", "shape", "names"),
    [
        ("v5e:2x4", (1,), ("fsdp",)),
        ("v5e:2x4", (2, 4), ("fsdp", "tensor")),
        ("v5p:2x2x2", (2, 2, 2), ("data", "fsdp", "tensor")),
        ("h100", (1,), ("fsdp",)),
        ("h100", (2, 4), ("fsdp", "tensor")),
    ],
    ids=str,
)
def test_packed_training_is_by_kernels_forward_and_backward(topology, shape, names, length, width):
    mesh = mesh_of(topology, shape, names)
    head_sharding = HeadSharding(*(tuple(n for n in names if (n == "tensor") == heads) for heads in (False, True)))

    def step(queries, keys, values, segments, gradient):
        seen = AttentionMask.causal(length, segments)
        mixed, back = jax.vjp(
            lambda q, k, v: ops.attend(q, KVView(k, v), seen, scale=0.1, head_sharding=head_sharding), queries, keys, values
        )
        return mixed, back(gradient)

    of_queries, of_keys = (8, 8, length, 4, width), (8, 8, length, width)
    program, taken = compiled(mesh, head_sharding, step, of_queries, of_keys, of_keys, (8, length), of_queries)
    assert taken == {"splash" if "v5" in topology else "cudnn"}
    # splash: the mixture, the gradients of queries, those of keys and values; cuDNN: both ways for each block of queries.
    assert len(kernels_in(program, mesh)) == (3 if "v5" in topology else 8)
    scores = 8 * 32 * length * length * 4 / mesh.size
    assert program.memory_analysis().temp_size_in_bytes < scores / 4


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100"])
def test_a_prompt_reaches_the_kernels(topology):
    mesh, head_sharding = mesh_of(topology, (1,), ("tensor",)), HeadSharding()
    of_queries, of_keys, of_cache = (1, 8, 512, 4, 128), (1, 8, 512, 128), (1, 8, 8192, 128)

    def first(queries, keys, values):
        return ops.attend(queries, KVView(keys, values), AttentionMask.causal(512), scale=0.1)

    def later(queries, keys, values, positions):
        seen = AttentionMask(positions, jnp.arange(8192, dtype=jnp.int32)[None])
        return ops.attend(queries, KVView(keys, values), seen, scale=0.1)

    program, _ = compiled(mesh, head_sharding, first, of_queries, of_keys, of_keys)
    assert len(kernels_in(program, mesh)) == 1
    program, taken = compiled(mesh, head_sharding, later, of_queries, of_cache, of_cache, (1, 512))
    assert taken == ({"cudnn"} if topology == "h100" else {"blockwise"})
    assert program.memory_analysis().temp_size_in_bytes < 64 * 2**20  # all scores are 512


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100"])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_decoded_token_makes_no_copy_of_the_cache(topology, batch):
    """XLA reads keys and values once, by two matmuls with the softmax between them: no kernel does less."""
    mesh, head_sharding = mesh_of(topology, (1,), ("tensor",)), HeadSharding()

    def decode(queries, keys, values, positions):
        seen = AttentionMask(positions, jnp.arange(2048, dtype=jnp.int32)[None])
        return ops.attend(queries, KVView(keys, values), seen, scale=0.1)

    of_cache = (batch, 8, 2048, 128)
    program, taken = compiled(mesh, head_sharding, decode, (batch, 8, 1, 4, 128), of_cache, of_cache, (batch, 1))
    assert taken == {"dense"}
    cache = 2 * np.prod(of_cache) * 2
    # One row: partial sums of a matmul that is split over the slots.
    assert program.memory_analysis().temp_size_in_bytes < cache / 8
    entry = program.as_text().split("ENTRY")[1]
    made = re.findall(r"= bf16\[(?:\d+,)*2048,128\][^ ]* (\w[\w-]*)\(", entry)
    assert set(made) <= {"parameter", "bitcast", "copy-done"}  # the last: a TPU fetches ahead of a matmul
    parameters = re.findall(r"%([\w.-]+) = bf16\[(?:\d+,)*2048,128\]\S* parameter\(", entry)
    assert [len(re.findall(rf"%{re.escape(name)}[,)]", entry)) for name in parameters] == [1, 1]  # keys, values
    if topology == "h100":
        assert len(re.findall(r" (?:fusion|custom-call|copy|transpose|dot|reduce)\(", entry)) <= 4


@pytest.mark.parametrize(
    ("new", "each", "sizes"), [(64, None, (1, 1)), (256, None, (1, 1)), (64, 1, (2, 2)), (1024, 16, (4, 1)), (64, 1, (1, 4))]
)
@pytest.mark.parametrize("topology", ["v5e:2x2", "h100"])
def test_a_step_over_pages_is_by_a_kernel_and_copies_none(topology, new, each, sizes):
    """Of a loop over the layers, which carries the pages; over devices each has its own rows and heads."""
    mesh, rows = mesh_of(topology, sizes, ("data", "tensor")), 16 if each is None else new // each
    head_sharding = None if each is None else HeadSharding(("data",), ("tensor",))

    def step(pages, queries, keys, values, table, lengths, starts):
        def layer(carry, index):
            pages, queries = carry
            view = PagedView(pages, index, table, lengths[:, 0], starts[0], each)
            pages = write_paged(pages, keys, values, view, head_sharding)
            return (pages, attend_paged(queries, view.replace(pages=pages), scale=0.1, head_sharding=head_sharding)), None

        return jax.lax.scan(layer, (pages, queries), jnp.arange(8, dtype=jnp.int32))[0]

    def struct(shape, *axes):
        dtype = jnp.int32 if len(shape) == 2 else jnp.bfloat16
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    heads = 32
    of_pages, tokens = (8, 1024, 64, 2 * heads, 128), ("data", "tensor")
    of_tokens = struct((new, heads, 128), *tokens)
    arguments = (
        *(struct(of_pages, None, "data", None, "tensor"), struct((new, heads, 4, 128), *tokens), of_tokens, of_tokens),
        *(struct((rows, 64), "data"), struct((rows, 1), "data"), struct((1, rows + 1))),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), record_backends() as taken:
        program = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    assert set(taken) == {"ragged" if "v5e" in topology else "triton"}
    pages = 2 * np.prod(of_pages) // mesh.size
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= pages
    assert memory.temp_size_in_bytes < pages / 64  # all pages are 8 GiB
    kernel = "tpu_custom_call" if "v5e" in topology else r"__gpu\$xla.gpu.triton"
    assert len(re.findall(f'custom_call_target="{kernel}"', program.as_text())) == 1
    assert not re.search("all-(?:gather|reduce|to-all)|collective-permute", program.as_text())
