"""Attention over rows whose tokens are divided over devices: keys and values go around a ring (Liu et al. 2023, section 3).

Each device keeps its queries. Keys and values pass from device to device; the outputs for each part are merged by the
log-sum-exps of their scores, like blocks on one device (Dao et al. 2022, section 3.1). In the backward pass, keys and values
go around once more with their gradients, until they return to their device.

In causal attention, the device with the first tokens would have little to compute and the one with the last tokens almost
everything. A row is therefore split into twice as many chunks as there are devices, and device i of n has the i-th chunk and
the i-th from the end, in "zigzag" order (Grattafiori et al. 2024, section 3.3.2): at every hop, all devices compute the same
number of scores.

To the rest of the model, the parts are rows. A batch of B rows of T tokens over n devices becomes n * B rows of T / n
tokens, and only attention knows which belong together. So they are sharded like any other rows, and everything else is the
same as on a mesh without this axis.
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
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.training.batch import NextTokenBatch

AXIS = "context"
BATCH = ("data", "fsdp")  # axes that split the rows of a batch
PARTS = (*BATCH, AXIS)  # axes that split the n * B rows of `split_sequence`
Segments = tuple[jax.Array, jax.Array]  # of the queries and of the keys of a device
Travelling = tuple[Any, Any, jax.Array | None]  # keys and values, as `pack_bits` returns them, and their segments


class _Ring(NamedTuple):
    """Settings shared by all devices and hops."""

    mesh: Mesh
    scale: float
    window: int | None

    @property
    def devices(self) -> int:
        """Number of devices in the ring."""
        return self.mesh.shape[AXIS]


def check_length(sizes: MeshSizes, length: int) -> None:
    """Raise MeshError for rows of T tokens that cannot be split into two chunks per device along `context`."""
    chunks = 2 * sizes.context
    if sizes.context > 1 and length % chunks:
        near = length - length % chunks
        would_do = f"{near} or {near + chunks}" if near else f"{chunks}"
        raise MeshError(f"length={length} cannot be split over 2*context={chunks}; {would_do} would do")


def positions_of(part: jax.Array | int, parts: int, length: int) -> jax.Array:
    """The positions of the tokens that one of n devices holds in a row of T: int32[T / n]."""
    size = length // (2 * parts)
    chunks = jnp.stack([jnp.asarray(part, jnp.int32), 2 * parts - 1 - part])
    return (size * chunks[:, None] + jnp.arange(size, dtype=jnp.int32)).reshape(-1)


def split_sequence(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Split rows [B, T, ...], which are sharded only over `data` and `fsdp`, into parts [n * B, T / n, ...].

    Every device keeps its part and nothing is sent. The rows of a device are adjacent: sharded over `PARTS`, they stay in
    place.
    """
    parts = mesh.shape[AXIS]

    def own(x: jax.Array) -> jax.Array:
        chunks = x.reshape(x.shape[0], 2 * parts, -1, *x.shape[2:])
        here = lax.axis_index(AXIS)
        both = [lax.dynamic_index_in_dim(chunks, i, axis=1, keepdims=False) for i in (here, 2 * parts - 1 - here)]
        return jnp.concatenate(both, axis=1)

    return jax.shard_map(own, mesh=mesh, in_specs=P(BATCH), out_specs=P(PARTS), check_vma=False)(x)


def join_sequence(mesh: Mesh, x: jax.Array, *, axis: int = 1, spec: P = P()) -> jax.Array:
    """Undo `split_sequence` by gathering the parts on every device along `context`.

    Args:
      x: [n * B, ..., T / n, ...].
      axis: the axis of T.
      spec: partition spec of the axes after the first, except T.
    """
    parts = mesh.shape[AXIS]

    def whole(x: jax.Array) -> jax.Array:
        first, last = jnp.split(lax.all_gather(x, AXIS), 2, axis=axis + 1)  # [n, B, ..., T / 2n, ...] each
        chunks = jnp.concatenate([first, last[::-1]])
        return jnp.moveaxis(chunks, 0, axis).reshape(*x.shape[:axis], parts * x.shape[axis], *x.shape[axis + 1 :])

    return jax.shard_map(whole, mesh=mesh, in_specs=P(PARTS, *spec), out_specs=P(BATCH, *spec), check_vma=False)(x)


def sequence_splitter(mesh: Mesh) -> Callable[[NextTokenBatch], NextTokenBatch]:
    """The `Sharding.reorder_batch` for a mesh that divides the sequence.

    It runs inside the compiled step, so data and checkpoints are not affected.

    Raises:
      MeshError: rows or tokens cannot be divided (from the returned function).
    """
    sizes = MeshSizes(**mesh.shape)

    def reorder(rows: NextTokenBatch) -> NextTokenBatch:
        batch, length = rows.tokens.shape
        check_length(sizes, length)
        if batch % sizes.rows:
            raise MeshError(f"batch={batch} cannot be split over data*fsdp={sizes.rows}; a multiple of it would do")
        places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        lengths = rows.rope_lengths
        if lengths is None:  # a part does not know its row's length
            lengths = lengths_of(places, positions=rows.position_ids, segment_ids=rows.segment_ids)
            lengths = jnp.broadcast_to(lengths if lengths.ndim == 2 else lengths[:, None], (batch, length))
        position_ids = places if rows.position_ids is None else rows.position_ids
        return jax.tree.map(partial(split_sequence, mesh), rows._replace(position_ids=position_ids, rope_lengths=lengths))

    return reorder


def ring_attention(mesh: Mesh) -> Attend:
    """The `attend` of `forward` for rows from `split_sequence`: causal attention over whole rows, to all devices' keys.

    Keys and values are sent in their dtype, n - 1 times forward and backward; their gradients are sent in float32, n times.
    """

    def attend(
        queries: jax.Array, view: KVView, mask: AttentionMask, *, scale: float, window: int | None = None
    ) -> jax.Array:
        """Like `ops.attend`: queries [n * B, K, T / n, G, H], keys and values [n * B, K, T / n, H]."""
        if not mask.ordered:
            raise MeshError("a sequence can be divided over context only without a cache; omit the cache")
        segments = None if mask.query_segments is None else (mask.query_segments, mask.key_segments)
        keys, values = view
        log_backend("ring", f"over context={mesh.shape[AXIS]}, each part by blocks")
        return _attend(_Ring(mesh, scale, window), queries, keys, values, segments)

    return attend


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, queries: jax.Array, keys: jax.Array, values: jax.Array, segments: Segments | None) -> jax.Array:
    return _forward(ring, queries, keys, values, segments)[0]


def _attend_fwd(ring, queries, keys, values, segments):
    out, lse = (checkpoint_name(x, ATTENTION_OUTPUT) for x in _forward(ring, queries, keys, values, segments))
    return out, (pack_bits((queries, keys, values, out)), lse, segments)


def _attend_bwd(ring: _Ring, residuals: Any, d_out: jax.Array) -> tuple[Any, ...]:
    arrays, lse, segments = residuals
    queries, keys, values, out = unpack_bits(arrays)
    run = _per_device(_device_backward, ring, results=3)
    gradients = run(QueryGradientInputs.of(queries, lse, out, d_out), keys, values, segments)
    return *(x.astype(like.dtype) for x, like in zip(gradients, (queries, keys, values), strict=True)), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(ring: _Ring, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """The attention output [n * B, K, T / n, G, H], and the log-sum-exp of each query's scores [n * B, K, T / n, G, 1]."""
    return _per_device(_device_forward, ring, results=2)(*arrays)


def _per_device(function: Callable, ring: _Ring, *, results: int) -> Callable:
    """Map a function over each device's queries, keys, values and segments: rows over `PARTS`, heads over `tensor`."""
    heads, rows = P(PARTS, "tensor"), P(PARTS)
    run, specs = partial(function, ring), (heads, heads, heads, rows)
    # Not checked: devices may take different branches that skip blocks, and there is nothing to sum.
    return jax.shard_map(run, mesh=ring.mesh, in_specs=specs, out_specs=(heads,) * results, check_vma=False)


def _device_forward(
    ring: _Ring, queries: jax.Array, keys: jax.Array, values: jax.Array, segments: Segments | None
) -> tuple[jax.Array, jax.Array]:
    def attend_to(hop: jax.Array | int, travelling: Travelling, out_lse: Any) -> Any:
        keys, values, mask = _arrived(ring.devices, hop, travelling, segments, queries.shape[-3])
        return combine(out_lse, forward_part(queries, keys, values, mask, scale=ring.scale, window=ring.window))

    def one_hop(carry: tuple[Travelling, Any], hop: jax.Array) -> tuple[tuple[Travelling, Any], None]:
        travelling, out_lse = carry
        return (_sent(ring.devices, travelling), attend_to(hop, travelling, out_lse)), None  # they can overlap

    precise = jnp.promote_types(queries.dtype, jnp.float32)
    nothing = jnp.zeros(queries.shape, precise), jnp.full((*queries.shape[:-1], 1), -jnp.inf, precise)
    start = _departing(keys, values, segments), nothing
    (travelling, out_lse), _ = lax.scan(one_hop, start, jnp.arange(ring.devices - 1))
    out, lse = attend_to(ring.devices - 1, travelling, out_lse)
    return out.astype(queries.dtype), lse


def _device_backward(
    ring: _Ring, inputs: QueryGradientInputs, keys: jax.Array, values: jax.Array, segments: Segments | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def add(hop: jax.Array | int, travelling: Travelling, sums: Any) -> Any:
        keys, values, mask = _arrived(ring.devices, hop, travelling, segments, inputs.queries.shape[-3])
        gradients = backward_part(inputs, keys, values, mask, scale=ring.scale, window=ring.window)
        dq, *d_travelling = map(jnp.add, sums, gradients)
        return dq, *_sent(ring.devices, d_travelling)

    def one_hop(carry: tuple[Travelling, Any], hop: jax.Array) -> tuple[tuple[Travelling, Any], None]:
        travelling, sums = carry
        return (_sent(ring.devices, travelling), add(hop, travelling, sums)), None

    zeros = tuple(jnp.zeros(x.shape, inputs.lse.dtype) for x in (inputs.queries, keys, values))
    start = _departing(keys, values, segments), zeros
    (travelling, sums), _ = lax.scan(one_hop, start, jnp.arange(ring.devices - 1))
    return add(ring.devices - 1, travelling, sums)  # one more hop returns the sums to their keys and values


def _departing(keys: jax.Array, values: jax.Array, segments: Segments | None) -> Travelling:
    """Keys and values as bits: XLA for CPU would send a float32 copy of 16-bit floats."""
    return pack_bits(keys), pack_bits(values), None if segments is None else segments[1]


def _arrived(
    devices: int,
    hop: jax.Array | int,
    travelling: Travelling,
    segments: Segments | None,
    length: int,
) -> tuple[jax.Array, jax.Array, AttentionMask]:
    """The keys and values on this device at a hop, which come from `hop` devices before, and their mask."""
    keys, values, key_segments = travelling
    here = lax.axis_index(AXIS)
    whole = devices * length
    query_positions, key_positions = (positions_of(part, devices, whole)[None] for part in (here, (here - hop) % devices))
    return (
        unpack_bits(keys),
        unpack_bits(values),
        AttentionMask(query_positions, key_positions, None if segments is None else segments[0], key_segments),
    )


def _sent(devices: int, tree: Any) -> Any:
    """Send every device's arrays to the next device."""
    to_the_next = [(i, (i + 1) % devices) for i in range(devices)]
    return jax.tree.map(lambda x: lax.ppermute(x, AXIS, to_the_next), tree)
