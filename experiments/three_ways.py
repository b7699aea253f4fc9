"""A data-parallel training step in JAX's three ways: `pmap`, `shard_map` and `jit`.

The step is always `llama_jax.training.step.train_step`; every device has the whole state and its share of the rows. The ways
differ in what inserts the communication.

  pmap        2018. A function per device; with `axis_name` the step sums over the devices (`lax.psum`). Nothing checks
              this: if a sum is forgotten, every device ends up with different parameters.
  shard_map   The same function per device, with a partition spec for every argument and result. It can be used inside `jit`
              and combined with any other sharding, on a mesh with several axes.
  jit         A function of the whole batch, as if there were one device. XLA divides the work according to the shardings of
              state and batch, and adds the sum of gradients. Model parallelism needs another sharding, not another program.

All three use the same batches and initial parameters. The script prints whether losses and parameters are bit-identical,
the largest difference if not, the data that the compiled programs send, and the times of compilation and a step. Times of
simulated devices say nothing about real ones.

    python experiments/three_ways.py [--devices 8] [--steps 10] [--model stories-260k]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measuring import devices, settings, versions, write_report

import llama_jax
from llama_jax import Batch, OptimizerSettings, Sharding, init_state, make_optimizer, train_step
from llama_jax.analysis.collectives import find_collectives, sum_traffic
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.pmap import pmap_step, replicate
from llama_jax.parallel.sharding import step_over

Step = Any  # (state, batch) -> (state, metrics), compiled ahead of time if possible


@dataclass(frozen=True)
class Arguments:
    """Compare pmap, shard_map and jit."""

    devices: int = 8
    """Number of devices, simulated if the machine has fewer."""
    model: str = "stories-260k"
    """A preset, with random parameters."""
    rows: int = 2
    """Rows of the batch per device."""
    length: int = 64
    steps: int = 10
    output: Path = Path("experiments/results/three_ways_cpu.json")


@dataclass(frozen=True)
class Found:
    """Results of one way: losses and seconds of every step, final parameters, and data sent."""

    losses: list[float]
    params: Any
    seconds: list[float]
    compile_seconds: float
    traffic: list[dict] | None


def by_pmap(step: Callable[..., Any], _: Callable[..., Any], mesh: Mesh) -> Step:
    """`in_axes=None` for the state: one value on all devices. For details see `llama_jax.parallel.pmap`."""
    return pmap_step(step, list(mesh.devices.flat))


def by_shard_map(step: Callable[..., Any], _: Callable[..., Any], mesh: Mesh) -> Step:
    """When traced, `shard_map` checks that results marked P() are equal on all devices."""
    alone = partial(step, sharding=Sharding(axis_name="data"))
    mapped = jax.shard_map(alone, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    return jax.jit(mapped, donate_argnums=0)


def by_jit(_: Callable[..., Any], step: Callable[..., Any], mesh: Mesh) -> Step:
    """`step` has shardings of activations but no axis names; XLA derives the rest from the shardings of the arguments."""
    return jax.jit(step, donate_argnums=0, out_shardings=NamedSharding(mesh, P()))


WAYS = {"pmap": by_pmap, "shard_map": by_shard_map, "jit": by_jit}


def run(way: str, arguments: Arguments) -> Found:
    """Run steps of a model in one of the ways."""
    config = llama_jax.preset(arguments.model)
    optimizer = make_optimizer(OptimizerSettings(learning_rate=1e-3, warmup_steps=2), arguments.steps)
    mesh = make_mesh(MeshSizes(data=arguments.devices))
    alone = partial(train_step, config, optimizer)
    spread = partial(step_over(config, mesh), optimizer)
    step = WAYS[way](alone, spread, mesh)
    state = replicate(init_state(optimizer, llama_jax.init(config, jax.random.key(0))), list(mesh.devices.flat))
    rows = NamedSharding(mesh, P("data"))
    batches = [jax.device_put(batch, rows) if way != "pmap" else batch for batch in make_batches(config, arguments)]

    began = time.perf_counter()
    traffic = None
    if way != "pmap":  # pmap's compiled program is not accessible; it is the same as shard_map's
        compiled = step.lower(state, batches[0]).compile()
        traffic = [asdict(t) for t in sum_traffic(find_collectives(compiled.as_text(), mesh))]
        step = compiled
    losses, seconds = [], []
    for batch in batches:
        before = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - before)
        if len(losses) == 1:
            compile_seconds = time.perf_counter() - began
    return Found(losses, jax.tree.map(np.asarray, state.params), seconds[1:], compile_seconds, traffic)


def make_batches(config: llama_jax.LlamaConfig, arguments: Arguments) -> list[Batch]:
    """Random tokens with rows of different lengths, so that a mean of the devices' means would be wrong."""
    rng = np.random.default_rng(0)
    rows = arguments.rows * arguments.devices
    mask = np.arange(arguments.length + 1) <= np.linspace(2, arguments.length, rows)[:, None]
    shape = arguments.steps, rows, arguments.length + 1
    return [Batch(tokens, loss_mask=mask) for tokens in rng.integers(0, config.vocab_size, shape, np.int32)]


def difference(a: Found, b: Found) -> dict[str, float | bool]:
    """The largest difference of the parameters and losses of two ways, and whether they are bit-identical."""
    pairs = list(zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True))
    return {
        "loss": max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)),
        "parameters": max(float(np.abs(x - y).max()) for x, y in pairs),
        "same_bits": a.losses == b.losses and all((x == y).all() for x, y in pairs),
    }


def main(arguments: Arguments) -> None:
    if arguments.devices > 1:
        jax.config.update("jax_num_cpu_devices", arguments.devices)  # only for CPUs; the number of other devices is fixed
    found = {way: run(way, arguments) for way in WAYS}
    report: dict[str, Any] = {
        "device": devices(),
        "versions": versions("jax", "jaxlib"),
        "settings": settings(arguments),
        "ways": {},
    }
    print(f"{arguments.model}, data parallel over {arguments.devices} devices, {arguments.steps} steps")
    print(
        f"{'':10} {'compile s':>9} {'step ms':>8} {'last loss':>9} {'loss off':>9} {'parameters off':>14}  sent by a device"
    )
    for way, result in found.items():
        off = difference(result, found["pmap"])
        report["ways"][way] = {
            "compile_seconds": result.compile_seconds,
            "step_seconds": statistics.median(result.seconds),
            "losses": result.losses,
            "difference_from_pmap": off,
            "collectives": result.traffic,
        }
        sent = "as shard_map" if result.traffic is None else describe(result.traffic)
        bits = "same bits" if off["same_bits"] else f"{off['parameters']:.1e}"
        print(
            f"{way:10} {result.compile_seconds:9.2f} {statistics.median(result.seconds) * 1e3:8.1f}"
            f" {result.losses[-1]:9.6f} {off['loss']:9.1e} {bits:>14}  {sent}"
        )
    write_report(arguments.output, report)
    print(f"written to {arguments.output}")


def describe(traffic: list[dict]) -> str:
    """Collectives in words."""
    return ", ".join(f"{t['count']} {t['opcode']} ({t['sent'] / 1e6:.2f} MB)" for t in traffic)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
