"""Speed of the matmuls of a training step with XLA and with PyTorch: why compiled torch may be faster otherwise equal.

    python experiments/bench_matmul.py        needs the parity extra; writes JSON and prints a table, 2 minutes on two cores

The shapes are those of the 15M model with 8 x 256 tokens. The libraries run in separate processes and take turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measuring import cpu_name, settings, versions, write_report

# M, K and N of an [M, K] by [K, N] product.
SHAPES = {
    "queries, keys, values": (2048, 288, 864),
    "gate or up": (2048, 288, 768),
    "down": (2048, 768, 288),
    "gradient of gate or up": (288, 2048, 768),
    "logits of a chunk": (512, 288, 32_000),
    "gradient of the head": (288, 512, 32_000),
}
WARM, TIMED = 3, 7


def by_xla(left: np.ndarray, right: np.ndarray, dtype: str) -> Callable[[], Any]:
    """Return a function that multiplies [M, K] by the transpose of [N, K]."""
    import jax

    a, b = (jax.numpy.asarray(x, dtype) for x in (left, right))
    multiply = jax.jit(lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ()))))
    return lambda: multiply(a, b).block_until_ready()


def by_torch(left: np.ndarray, right: np.ndarray, dtype: str) -> Callable[[], Any]:
    """Return a function that multiplies [M, K] by the transpose of [N, K]."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    a, b = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in (left, right))
    return lambda: torch.matmul(a, b.T)


def serve(multiply: Callable[..., Callable[[], Any]], asked: Any, answers: Any) -> None:
    """Answer each requested matmul with its median seconds, until the request is None."""
    rng = np.random.default_rng(0)
    while (one := asked.get()) is not None:
        (rows, summed, columns), dtype = one
        left, right = (rng.standard_normal((n, summed), np.float32) for n in (rows, columns))
        run, seconds = multiply(left, right, dtype), []
        for i in range(WARM + TIMED):
            started = time.perf_counter()
            run()
            seconds += [time.perf_counter() - started] if i >= WARM else []
        answers.put(statistics.median(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=4, help="turns of each library, for each matmul")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "bench_matmul_cpu.json")
    arguments = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    peers: dict[str, Any] = {"xla": by_xla, "torch": by_torch}
    doors = {name: (context.Queue(), context.Queue()) for name in peers}
    for name, multiply in peers.items():
        context.Process(target=serve, args=(multiply, *doors[name]), daemon=True).start()

    rows = []
    print(f"{'GFLOP/s':10}{'':26}{'XLA':>8}{'torch':>8}{'XLA / torch':>13}")
    for dtype in ("float32", "bfloat16"):
        for name, shape in SHAPES.items():
            seconds: dict[str, list[float]] = {peer: [] for peer in peers}
            for _ in range(arguments.repetitions):
                for peer, (asked, answers) in doors.items():
                    asked.put((shape, dtype))
                    seconds[peer].append(answers.get())
            rate = {peer: 2 * np.prod(shape) / statistics.median(each) / 1e9 for peer, each in seconds.items()}
            rows.append({"dtype": dtype, "matmul": name, "shape": shape, "seconds": seconds, "gflops": rate})
            ratio = rate["xla"] / rate["torch"]
            print(f"{dtype:10}{name:26}{rate['xla']:8.0f}{rate['torch']:8.0f}{ratio:13.2f}", flush=True)
    for asked, _ in doors.values():
        asked.put(None)
    about = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "versions": versions("jax", "torch"),
        "settings": settings(arguments),
    }
    write_report(arguments.output, {**about, "matmuls": rows})


if __name__ == "__main__":
    main()
