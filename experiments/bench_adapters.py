"""The cost of a table of LoRA adapters for a server's step: with a table, without an adapter, and without a table.

    python experiments/bench_adapters.py      writes JSON and prints a table, 3 minutes on two cores

Programs of `llama_jax.serving` with tables of several sizes take turns: each decodes a few tokens of all rows. Rank 16 on
all seven matrices, float32, rows of 128 tokens. The time does not depend on which adapter, if any, a row uses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from measuring import cpu_name, settings, versions, write_report

import llama_jax
from llama_jax.model.cache import PAGE_SIZE
from llama_jax.model.multi_lora import adapter_table
from llama_jax.serving.engine import Engine
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.programs import StepBatch
from llama_jax.serving.rows import settings_of_rows

CONTEXT, RANK = 128, 16


class Turns:
    """Rows that all decode and never end."""

    def __init__(self, config: llama_jax.LlamaConfig, params: llama_jax.Llama, rows: int) -> None:
        engine = Engine(config, params, EngineOptions(rows=rows, context=CONTEXT, cache_tokens=rows * CONTEXT))
        self._model, self._state = engine.model, engine.scheduler.state
        self._settings = jax.device_put(settings_of_rows([], rows, config.vocab_size))
        self._rows, ones = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
        starts, table = np.arange(rows + 1, dtype=np.int32), np.arange(rows * CONTEXT // PAGE_SIZE, dtype=np.int32)
        self._batch = StepBatch(-ones, starts, self._rows, table.reshape(rows, -1), 0 * ones, ones, ones, ones, ones == 1)

    def run(self, tokens: int) -> float:
        """Decode from the first position; return seconds per token of all rows."""
        started = time.perf_counter()
        for at in range(tokens):
            batch = self._batch._replace(lengths=np.full_like(self._rows, at))
            self._state, packed = self._model.step(self._state, batch, self._settings)
        jax.block_until_ready(packed)
        return (time.perf_counter() - started) / tokens


def measure(model: str, rows: int, tables: list[int], arguments: Any) -> list[dict[str, Any]]:
    """One result for each size of the table."""
    config, lora = llama_jax.preset(model), llama_jax.Lora(rank=RANK)
    base = llama_jax.init(config, jax.random.key(0))
    adapters = [(llama_jax.init_adapters(config, lora, jax.random.key(i)), lora) for i in range(max(tables))]
    programs = {n: Turns(config, adapter_table(config, base, adapters[:n]) if n else base, rows) for n in tables}
    for turns in programs.values():
        turns.run(4)
    seconds: dict[int, list[float]] = {n: [] for n in tables}
    for _ in range(arguments.rounds):
        for n, turns in programs.items():
            seconds[n].append(turns.run(arguments.tokens))
    found = []
    for n in tables:
        ratios = [with_table / without for with_table, without in zip(seconds[n], seconds[tables[0]], strict=True)]
        middle = statistics.median(seconds[n])
        found.append({"model": model, "rows": rows, "adapters": n, "seconds": middle, "times": statistics.median(ratios)})
        print(f"{model:12} {rows:3} rows, {n:3} adapters: {1e3 * middle:7.2f} ms per step, {found[-1]['times']:.3f} times")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="stories-15m,stories-110m")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--adapters", default="0,1,4,16", help="sizes of tables; the first is the baseline")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=32, help="tokens per round")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "bench_adapters_cpu.json")
    arguments = parser.parse_args()
    tables = [int(n) for n in arguments.adapters.split(",")]
    found = []
    for model in arguments.models.split(","):
        for rows in map(int, arguments.rows.split(",")):
            found += measure(model, rows, tables, arguments)
    about = {"cpu": cpu_name(), "versions": versions("jax", "jaxlib"), "settings": settings(arguments)}
    write_report(arguments.output, about | {"turns": found})


if __name__ == "__main__":
    main()
