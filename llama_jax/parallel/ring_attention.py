"""Context parallelism by ring attention: the tokens of a row are divided over devices (Liu et al. 2023, section 3).

Each device keeps its queries. Keys and values are sent from device to device around a ring; the outputs for each part are
combined by the log-sum-exps of their scores, like blocks in flash attention (Dao et al. 2022, section 3.1). In the backward
pass, keys and values go around once more together with their gradients, until they return to their device.

In causal attention, the device with the first tokens would have little to compute and the one with the last tokens almost
everything. A row is therefore split into twice as many chunks as there are devices, and device i of n has the i-th chunk and
the i-th from the end, in "zigzag" order (Grattafiori et al. 2024, section 3.3.2): at every hop, all devices compute the same
number of scores.

To the rest of the model, the parts are rows: a batch of B rows of T tokens over n devices becomes n * B rows of T / n
tokens. Only attention knows which parts belong to the same row. Everything else is the same as on a mesh without `context`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from llama_jax.errors import MeshError
from llama_jax.model.forward_options import Attend
from llama_jax.ops.attention import AttentionMask, KVView, log_backend
from llama_jax.ops.attention.blockwise import QueryGradientInputs, backward_part, combine, forward_part
from llama_jax.ops.attention.dense import ATTENTION_OUTPUT
from llama_jax.ops.platform import pack_bits, unpack_bits
from llama_jax.ops.rope_scaling import lengths_of
from llama_jax.parallel.mesh import MeshSizes, check_divisible
from llama_jax.training.batch import NextTokenBatch

CONTEXT_AXIS = "context"
BATCH_AXES = ("data", "fsdp")  # mesh axes that shard the B rows of a batch
BATCH_AND_CONTEXT_AXES = (*BATCH_AXES, CONTEXT_AXIS)  # mesh axes that shard the n * B rows of `split_sequence`
Segments = tuple[jax.Array, jax.Array]  # of the queries and of the keys of a device
KVBlock = tuple[Any, Any, jax.Array | None]  # sent around the ring: keys, values (from `pack_bits`), segments of the keys


class _Ring(NamedTuple):
    """Settings shared by all devices and hops."""

    mesh: Mesh
    scale: float
    window: int | None

    @property
    def devices(self) -> int:
        """Number of devices in the ring."""
        return self.mesh.shape[CONTEXT_AXIS]


def check_length(sizes: MeshSizes, length: int) -> None:
    """Raise MeshError if rows of T tokens cannot be split into two equal chunks per device along `context`."""
    chunks = 2 * sizes.context
    if sizes.context > 1 and length % chunks:
        near = length - length % chunks
        would_do = f"{near} or {near + chunks}" if near else f"{chunks}"
        raise MeshError(f"length={length} cannot be split over 2*context={chunks}; {would_do} would do")


def zigzag_positions(part: jax.Array | int, parts: int, length: int) -> jax.Array:
    """int32[T / n]: the positions in a row of T tokens of those on device `part` of n = `parts`."""
    size = length // (2 * parts)
    chunks = jnp.stack([jnp.asarray(part, jnp.int32), 2 * parts - 1 - part])
    return (size * chunks[:, None] + jnp.arange(size, dtype=jnp.int32)).reshape(-1)


def split_sequence(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Split rows [B, T, ...], which are sharded only over `data` and `fsdp`, into parts [n * B, T / n, ...].

    Without communication: the rows are replicated along `context`, and each device keeps its part of them.
    """
    parts = mesh.shape[CONTEXT_AXIS]

    def local_part(x: jax.Array) -> jax.Array:
        chunks = x.reshape(x.shape[0], 2 * parts, -1, *x.shape[2:])
        part = lax.axis_index(CONTEXT_AXIS)
        both = [lax.dynamic_index_in_dim(chunks, i, axis=1, keepdims=False) for i in (part, 2 * parts - 1 - part)]
        return jnp.concatenate(both, axis=1)

    return jax.shard_map(
        local_part, mesh=mesh, in_specs=P(BATCH_AXES), out_specs=P(BATCH_AND_CONTEXT_AXES), check_vma=False
    )(x)


def join_sequence(mesh: Mesh, x: jax.Array, *, axis: int = 1, spec: P = P()) -> jax.Array:
    """Undo `split_sequence` by gathering the parts on every device along `context`.

    Args:
      x: [n * B, ..., T / n, ...].
      axis: the axis of T.
      spec: partition spec of the axes after the first, except T.
    """
    parts = mesh.shape[CONTEXT_AXIS]

    def gather_row(x: jax.Array) -> jax.Array:
        first, last = jnp.split(lax.all_gather(x, CONTEXT_AXIS), 2, axis=axis + 1)  # [n, B, ..., T / 2n, ...] each
        chunks = jnp.concatenate([first, last[::-1]])
        return jnp.moveaxis(chunks, 0, axis).reshape(*x.shape[:axis], parts * x.shape[axis], *x.shape[axis + 1 :])

    return jax.shard_map(
        gather_row, mesh=mesh, in_specs=P(BATCH_AND_CONTEXT_AXES, *spec), out_specs=P(BATCH_AXES, *spec), check_vma=False
    )(x)


def sequence_splitter(mesh: Mesh) -> Callable[[NextTokenBatch], NextTokenBatch]:
    """The `Sharding.reorder_batch` for a mesh with `context`: applies `split_sequence` to all fields of a batch.

    It runs inside the compiled step, so data and checkpoints do not depend on the mesh.

    Raises:
      MeshError: rows or tokens cannot be divided (from the returned function).
    """
    sizes = MeshSizes(**mesh.shape)

    def reorder(batch: NextTokenBatch) -> NextTokenBatch:
        rows, length = batch.tokens.shape
        check_length(sizes, length)
        check_divisible("batch", rows, "data*fsdp", sizes.rows)
        slots = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
        lengths = batch.rope_lengths
        if lengths is None:  # computed before the split, because a part does not contain its row's length
            lengths = lengths_of(slots, positions=batch.position_ids, segment_ids=batch.segment_ids)
            lengths = jnp.broadcast_to(lengths if lengths.ndim == 2 else lengths[:, None], (rows, length))
        position_ids = slots if batch.position_ids is None else batch.position_ids
        return jax.tree.map(partial(split_sequence, mesh), batch._replace(position_ids=position_ids, rope_lengths=lengths))

    return reorder


def ring_attention(mesh: Mesh) -> Attend:
    """The `attend` of `forward` for rows from `split_sequence`: causal attention to the keys of all devices in the ring.

    With n devices, keys and values are sent n - 1 times in each of the two passes, in their dtype; their gradients are sent
    n times, in float32.
    """

    def attend(
        queries: jax.Array, view: KVView, mask: AttentionMask, *, scale: float, window: int | None = None
    ) -> jax.Array:
        """Like `ops.attend`: queries [n * B, K, T / n, G, H], keys and values [n * B, K, T / n, H]."""
        if not mask.ordered:
            raise MeshError("a sequence can be divided over context only without a cache; omit the cache")
        segments = None if mask.query_segments is None else (mask.query_segments, mask.key_segments)
        keys, values = view
        log_backend("ring", f"over context={mesh.shape[CONTEXT_AXIS]}, each part by blocks")
        return _ring_attend(_Ring(mesh, scale, window), queries, keys, values, segments)

    return attend


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attend(
    ring: _Ring, queries: jax.Array, keys: jax.Array, values: jax.Array, segments: Segments | None
) -> jax.Array:
    return _ring_forward(ring, queries, keys, values, segments)[0]


def _ring_attend_fwd(ring, queries, keys, values, segments):
    out, lse = (checkpoint_name(x, ATTENTION_OUTPUT) for x in _ring_forward(ring, queries, keys, values, segments))
    return out, (pack_bits((queries, keys, values, out)), lse, segments)


def _ring_attend_bwd(ring: _Ring, residuals: Any, d_out: jax.Array) -> tuple[Any, ...]:
    arrays, lse, segments = residuals
    queries, keys, values, out = unpack_bits(arrays)
    run = _per_device(_device_backward, ring, results=3)
    gradients = run(QueryGradientInputs.of(queries, lse, out, d_out), keys, values, segments)
    return *(x.astype(like.dtype) for x, like in zip(gradients, (queries, keys, values), strict=True)), None


_ring_attend.defvjp(_ring_attend_fwd, _ring_attend_bwd)


def _ring_forward(ring: _Ring, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """The attention output [n * B, K, T / n, G, H], and the log-sum-exp of each query's scores [n * B, K, T / n, G, 1]."""
    return _per_device(_device_forward, ring, results=2)(*arrays)


def _per_device(function: Callable, ring: _Ring, *, results: int) -> Callable:
    """`jax.shard_map` of a function of each device's queries, keys, values and segments."""
    heads, rows = P(BATCH_AND_CONTEXT_AXES, "tensor"), P(BATCH_AND_CONTEXT_AXES)
    run, specs = partial(function, ring), (heads, heads, heads, rows)
    # Not checked: devices may take different branches that skip blocks, and there is nothing to sum.
    return jax.shard_map(run, mesh=ring.mesh, in_specs=specs, out_specs=(heads,) * results, check_vma=False)


def _device_forward(
    ring: _Ring, queries: jax.Array, keys: jax.Array, values: jax.Array, segments: Segments | None
) -> tuple[jax.Array, jax.Array]:
    """The results of `_ring_forward` on each device, from its queries, keys and values."""

    def attend_to(hop: jax.Array | int, kv_block: KVBlock, out_lse: Any) -> Any:
        keys, values, mask = _received(ring.devices, hop, kv_block, segments, queries.shape[-3])
        return combine(out_lse, forward_part(queries, keys, values, mask, scale=ring.scale, window=ring.window))

    def one_hop(carry: tuple[KVBlock, Any], hop: jax.Array) -> tuple[tuple[KVBlock, Any], None]:
        kv_block, out_lse = carry
        # Independent of each other, so that communication and computation can overlap.
        return (_send_to_next(ring.devices, kv_block), attend_to(hop, kv_block, out_lse)), None

    accum_dtype = jnp.promote_types(queries.dtype, jnp.float32)
    empty = jnp.zeros(queries.shape, accum_dtype), jnp.full((*queries.shape[:-1], 1), -jnp.inf, accum_dtype)
    start = _packed_block(keys, values, segments), empty
    (kv_block, out_lse), _ = lax.scan(one_hop, start, jnp.arange(ring.devices - 1))
    out, lse = attend_to(ring.devices - 1, kv_block, out_lse)
    return out.astype(queries.dtype), lse


def _device_backward(
    ring: _Ring, inputs: QueryGradientInputs, keys: jax.Array, values: jax.Array, segments: Segments | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients with respect to the queries, keys and values of each device."""

    def add(hop: jax.Array | int, kv_block: KVBlock, sums: Any) -> Any:
        keys, values, mask = _received(ring.devices, hop, kv_block, segments, inputs.queries.shape[-3])
        gradients = backward_part(inputs, keys, values, mask, scale=ring.scale, window=ring.window)
        dq, *d_kv_block = map(jnp.add, sums, gradients)
        return dq, *_send_to_next(ring.devices, d_kv_block)

    def one_hop(carry: tuple[KVBlock, Any], hop: jax.Array) -> tuple[tuple[KVBlock, Any], None]:
        kv_block, sums = carry
        return (_send_to_next(ring.devices, kv_block), add(hop, kv_block, sums)), None

    zeros = tuple(jnp.zeros(x.shape, inputs.lse.dtype) for x in (inputs.queries, keys, values))
    start = _packed_block(keys, values, segments), zeros
    (kv_block, sums), _ = lax.scan(one_hop, start, jnp.arange(ring.devices - 1))
    return add(ring.devices - 1, kv_block, sums)  # one more hop returns the sums to their keys and values


def _packed_block(keys: jax.Array, values: jax.Array, segments: Segments | None) -> KVBlock:
    """The block that a device sends first: its own. As bits, because XLA for CPU would send 16-bit floats as float32."""
    return pack_bits(keys), pack_bits(values), None if segments is None else segments[1]


def _received(
    devices: int,
    hop: jax.Array | int,
    kv_block: KVBlock,
    segments: Segments | None,
    length: int,
) -> tuple[jax.Array, jax.Array, AttentionMask]:
    """The keys and values that a device has after `hop` hops, from the device `hop` places before it, and their mask."""
    keys, values, key_segments = kv_block
    query_part = lax.axis_index(CONTEXT_AXIS)
    key_part = (query_part - hop) % devices
    row_length = devices * length
    query_positions, key_positions = (zigzag_positions(i, devices, row_length)[None] for i in (query_part, key_part))
    return (
        unpack_bits(keys),
        unpack_bits(values),
        AttentionMask(query_positions, key_positions, None if segments is None else segments[0], key_segments),
    )


def _send_to_next(devices: int, tree: Any) -> Any:
    """Send every device's arrays to the next device in the ring."""
    source_and_target = [(i, (i + 1) % devices) for i in range(devices)]
    return jax.tree.map(lambda x: lax.ppermute(x, CONTEXT_AXIS, source_and_target), tree)
