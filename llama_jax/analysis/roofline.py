"""Bounds on the speed of a program on given hardware, from its arithmetic, memory traffic and communication.

Each of the three has a minimum time from the published figures (Williams et al. 2009). Their maximum bounds a program that
overlaps them perfectly; their sum is the time without any overlap.

The communication of a compiled program is compared with the minimum that its strategy needs, `least_traffic`; both are
counted in bytes that a device sends with a ring algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from llama_jax.analysis.collectives import Collective, CollectiveOpcode, ring_bytes
from llama_jax.analysis.hardware import Hardware
from llama_jax.config import LlamaConfig
from llama_jax.errors import MeshError
from llama_jax.inference.decode import STEPS_PER_CHUNK
from llama_jax.model.forward_options import Remat
from llama_jax.parallel.mesh import AXES, MeshSizes
from llama_jax.training.flops import last_token_scores, matrix_parameters, step_flops

FLOAT32_BYTES = 4  # bytes
# For each parameter, AdamW reads value, gradient and two averages, and writes all but the gradient, written before.
OPTIMIZER_TRAFFIC = (4 + 3 + 1) * FLOAT32_BYTES


@dataclass(frozen=True)
class DeviceExchange:
    """Communication that a strategy cannot avoid.

    Attributes:
      what: what is communicated, and when.
      kind, axes: as for `Collective`.
      group: number of devices that communicate with each other.
      bytes: size of the result on one device, for one execution.
      count: executions in a step.
    """

    what: str
    opcode: CollectiveOpcode
    axes: tuple[str, ...]
    group: int
    bytes: float
    count: int

    @property
    def sent(self) -> float:
        """Bytes that a device sends in one execution with a ring."""
        return ring_bytes(self.opcode, self.bytes, self.group)


@dataclass(frozen=True)
class Roofline:
    """Minimum seconds for one step of a program.

    Attributes:
      compute: for all arithmetic at the peak rate, divided evenly over the devices.
      memory: for reading and writing each device's memory.
      exchange: for sending to other devices.
      useful: for the model's arithmetic without recomputation, at the peak rate: what MFU counts.
    """

    compute: float
    memory: float
    exchange: float
    useful: float

    @property
    def overlapped(self) -> float:
        """Minimum time if the three overlap perfectly."""
        return max(self.compute, self.memory, self.exchange)

    @property
    def apart(self) -> float:
        """Minimum time without overlap."""
        return self.compute + self.memory + self.exchange

    @property
    def limit(self) -> str:
        """The one of the three that takes longest."""
        return max(("compute", "memory", "exchange"), key=lambda name: getattr(self, name))

    def utilization(self, seconds: float) -> float:
        """MFU of a step that takes `seconds`."""
        return self.useful / seconds


def least_traffic(
    config: LlamaConfig, sizes: MeshSizes, batch: int, length: int, dtype: DTypeLike, remat: Remat = "full"
) -> list[DeviceExchange]:
    """The minimum communication of a training step, by strategy.

    - `data`: every gradient is summed once (Rajbhandari et al. 2020, section 7.1).
    - `fsdp`: a layer's weights are gathered for the forward and for the backward pass, and gradients are reduce-scattered
      (section 7.2.2): 1.5 times as much as `data` sends.
    - `context`: keys and values go around the ring in each layer, without the last hop, and in the backward pass once more,
      with their gradients and the last hop (Liu et al. 2023, section 3). It shards weights and gradients as `fsdp` does, and
      the two communicate them together.
    - `tensor`: a layer's attention and feed-forward each need the sum of [B, T, D] over the devices, forward and backward
      (Shoeybi et al. 2019, section 3); if the residual stream is split along T, each sum is a reduce-scatter and an
      all-gather instead, which send as much (Korthikanti et al. 2022, section 4.2.2). So do the embedding lookup and the
      loss, whose vocabulary is split. Rematerialization gathers and sums again.

    Weights and activations are sent in `dtype`, gradients in float32, since their sum would otherwise be rounded
    (Grattafiori et al. 2024, section 3.3.2). Arrays that are small compared to D * D or B * T * D are omitted: norms,
    statistics of the loss, the norm of the gradients.

    Args:
      batch, length: B rows over the whole mesh, of T tokens.
    """
    c, wide = config, jnp.dtype(dtype).itemsize
    columns, tensor = sizes.columns, sizes.tensor
    sharded_axes = tuple(axis for axis in ("fsdp", "context") if getattr(sizes, axis) > 1)  # shard the parameters together
    vocabulary = c.vocab_size * c.dim / tensor
    layer = (matrix_parameters(c, all_experts=True) - c.vocab_size * c.dim) / c.n_layers / tensor
    tables = 1 if c.tie_embeddings else 2
    shared = c.n_layers * layer + tables * vocabulary  # parameters of one `tensor` part
    tokens = batch / sizes.rows * length / sizes.context
    stream = tokens * c.dim * wide  # [B, T, D] of a device's rows
    parts = tensor if length // sizes.context % tensor == 0 else 1  # splits of the residual stream along T
    exchanges = []

    def add(what: str, opcode: CollectiveOpcode, axes: str | tuple[str, ...], size: float, count: int) -> None:
        axes = (axes,) if isinstance(axes, str) else axes
        group = math.prod(getattr(sizes, axis) for axis in axes)
        if group > 1 and count:
            exchanges.append(DeviceExchange(what, opcode, axes, group, size, count))

    add("weights of each layer, forward", "all-gather", sharded_axes, layer * wide, c.n_layers)
    add("weights of each layer, backward", "all-gather", sharded_axes, layer * wide, c.n_layers)
    add("output projection", "all-gather", sharded_axes, vocabulary * wide, 1)
    # An untied embedding's table and its gradient; or, if less, the looked-up parts of D, forward and backward.
    scattered = shared
    if not c.tie_embeddings and vocabulary * (wide + FLOAT32_BYTES) < 2 * stream / parts:
        add("embedding", "all-gather", sharded_axes, vocabulary * wide, 1)
    elif not c.tie_embeddings:
        add("what was looked up in parts of D, and back", "all-to-all", sharded_axes, stream / parts, 2)
        scattered -= vocabulary
    add("gradients", "reduce-scatter", sharded_axes, scattered / columns * FLOAT32_BYTES, 1)
    add("gradients", "all-reduce", "data", shared / columns * FLOAT32_BYTES, 1)

    # Keys and values of all layers, of at least one head, sent from each device to the next.
    pairs, steps = tokens * max(c.n_kv_heads / tensor, 1) * c.head_dim, c.n_layers * (sizes.context - 1)
    for name, times in (("forward", 1), ("again", remat != "none"), ("backward", 1)):
        add(f"keys and values in each layer, {name}", "collective-permute", "context", pairs * wide, 2 * steps * times)
    add("their gradients in each layer", "collective-permute", "context", pairs * FLOAT32_BYTES, 2 * (steps + c.n_layers))

    # With rematerialization a layer gathers its inputs again; its second sum is the next layer's input, which was saved.
    gathered, summed = {"none": (0, 0), "dots": (2, 0)}.get(remat, (2, 1))
    if parts > 1:
        for name, gathers, sums in (("forward", 2, 2), ("again", gathered, summed), ("backward", 2, 2)):
            add(f"residual stream in each layer, {name}", "all-gather", "tensor", stream, gathers * c.n_layers)
            add(f"residual stream in each layer, {name}", "reduce-scatter", "tensor", stream / tensor, sums * c.n_layers)
        add("residual stream at lookup and loss", "all-gather", "tensor", stream, 2)
        add("residual stream at lookup and loss", "reduce-scatter", "tensor", stream / tensor, 2)
    else:
        for name, sums in (("forward", 2), ("again", summed), ("backward", 2)):
            add(f"residual stream in each layer, {name}", "all-reduce", "tensor", stream, sums * c.n_layers)
        add("residual stream at lookup and loss", "all-reduce", "tensor", stream, 2)
    return exchanges


def training_roofline(
    config: LlamaConfig,
    sizes: MeshSizes,
    batch: int,
    length: int,
    dtype: DTypeLike,
    remat: Remat,
    hardware: Hardware,
    exchanges: Iterable[Collective | DeviceExchange],
) -> Roofline:
    """The minimum time of a training step with AdamW.

    Arithmetic is that of `step_flops`, plus a third if whole layers are rematerialized, at the bfloat16 rate. Memory traffic
    is the minimum: matrix products read their operands and write their result once, attention is one product whose scores
    never leave the chip (Dao et al. 2022), and the optimizer passes over its share once.

    Args:
      exchanges: those of the compiled program, or the minimum.
    """
    c, wide = config, jnp.dtype(dtype).itemsize
    needed = step_flops(c, batch, length)
    passes = 4 if remat in ("full", "offload") else 3  # forward; rematerialized; and backward, with two products for each
    matrix_numbers = matrix_parameters(c, all_experts=True) / sizes.tensor
    tokens = batch / sizes.rows * length / sizes.context
    queries, keys = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    # Written by the qkv projection and read by attention, written by attention and read by the output projection.
    heads = 2 * (queries + 2 * keys) + 2 * queries
    activations = c.n_layers * tokens * wide * (4 * c.dim + (heads + 3 * c.hidden_dim) / sizes.tensor)
    share = (matrix_numbers + (0 if c.tie_embeddings else c.vocab_size * c.dim / sizes.tensor)) / sizes.columns
    memory = passes * (matrix_numbers * wide + activations) + share * OPTIMIZER_TRAFFIC
    useful = needed / (sizes.devices * hardware.flops)
    return Roofline(
        compute=useful * passes / 3,
        memory=memory / hardware.memory_bandwidth,
        exchange=exchange_seconds(exchanges, sizes, hardware),
        useful=useful,
    )


def decoding_roofline(
    config: LlamaConfig,
    sizes: MeshSizes,
    batch: int,
    slots: int,
    hardware: Hardware,
    resident: float,
    exchanges: Iterable[Collective],
) -> Roofline:
    """The minimum time in which every row gets one more token.

    Args:
      slots: filled slots S of the cache, of which attention reads those in a layer's window and chunk.
      resident: bytes of weights and cache that each device reads, including those it gathers from others first.
      exchanges: those of the compiled program, if it runs one chunk of tokens at a time, as for streaming.
    """
    flops = batch * (2 * matrix_parameters(config) + 4 * config.head_dim * last_token_scores(config, slots))
    useful = flops / (sizes.devices * hardware.flops)
    exchange = exchange_seconds(exchanges, sizes, hardware) / STEPS_PER_CHUNK
    return Roofline(useful, resident / hardware.memory_bandwidth, exchange, useful)


def exchange_seconds(exchanges: Iterable[Collective | DeviceExchange], sizes: MeshSizes, hardware: Hardware) -> float:
    """Minimum seconds of sequential exchanges, by the bandwidth of the links they use.

    Devices are assumed to be numbered in the mesh's order, one domain after another. Within a domain, a group's bytes go
    over its links. A group that spans several domains first combines within each, so that every byte leaves a domain once,
    spread over the adapters of the group's devices there; the slower of the two counts.

    Raises:
      MeshError: devices communicate beyond their domain, and no network is published for this hardware.
    """
    return math.fsum(x.count * _seconds(x, sizes, hardware) for x in exchanges)


def _seconds(exchange: Collective | DeviceExchange, sizes: MeshSizes, hardware: Hardware) -> float:
    opcode, size, group = exchange.opcode, exchange.bytes, exchange.group
    together = min(_members_together(sizes, exchange.axes, hardware.domain), group)
    domains = math.ceil(group / together)
    match opcode:
        case "reduce-scatter":
            within, beyond = ring_bytes(opcode, size * group / together, together), ring_bytes(opcode, size, domains)
        case "all-gather" | "all-reduce":
            within, beyond = ring_bytes(opcode, size, together), ring_bytes(opcode, size, domains) / together
        case "all-to-all":
            within, beyond = size * (together - 1) / group, size * (group - together) / group
        case _:
            within, beyond = (size, 0.0) if domains == 1 else (0.0, size)
    seconds = within / hardware.link_bandwidth
    if domains > 1:
        if hardware.network_bandwidth is None:
            raise MeshError(
                f"mesh {sizes}: {', '.join(exchange.axes)} leaves the {hardware.domain} devices that the links of "
                f"{hardware.name} connect, but no network beyond them is published; use fewer devices or other hardware"
            )
        seconds = max(seconds, beyond / hardware.network_bandwidth)
    # This hardware's backend turns an all-reduce of which devices use only their parts into a reduce-scatter, half as much.
    sliced = exchange.sliced / exchange.bytes if isinstance(exchange, Collective) and exchange.bytes else 0
    return seconds * (1 - sliced / 2)


def _members_together(sizes: MeshSizes, axes: tuple[str, ...], domain: int) -> int:
    """The number of devices of a group along these axes in one domain, for the most widely spread group."""
    shape = tuple(size for _, size in sizes.items())
    inside = [AXES.index(axis) for axis in axes]
    outside = [i for i in range(len(shape)) if i not in inside]
    group = math.prod(shape[i] for i in inside)
    groups = np.arange(math.prod(shape)).reshape(shape).transpose(outside + inside).reshape(-1, group) // domain
    return min(int(np.unique(row, return_counts=True)[1].max()) for row in groups)
