"""The overhead of the training loop over the bare compiled step, and of writing a checkpoint in the background.

    python experiments/bench_loop.py [--shapes tiny stories15m] [--blocks 40] [--saves 6]

Whenever `train()` has logged a block of steps, the same compiled step runs the same number of times on batches that are
already on the device. This is not counted in the loop's time, so that blocks of the loop and of the bare step take turns in
one process. The loop checks and counts every step and logs every block; evaluation is excluded. The first run has many
short blocks and saves nothing. In the second run every other block begins with a save and includes copying and writing:
its excess over the adjacent bare blocks is the cost of a save.

On a shared machine medians of ratios say little. The table therefore also gives the ratio of the fastest tenth of the
blocks, which were disturbed least, and the CPU seconds of all threads in addition to elapsed seconds.
Writes ``experiments/results/bench_loop_cpu.json`` and prints a table of medians.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
import tyro
from measuring import machine, versions, write_report

from llama_jax.data import Batch, DocumentFormat, open_corpus, training_batches
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.compiled_step import TrainingProgram, make_program
from llama_jax.runs.log import Log
from llama_jax.runs.loop import train
from llama_jax.runs.recipe import Recipe
from llama_jax.runs.recipes import stories15m, tiny
from llama_jax.runs.tasks.language_modeling import text_objective
from llama_jax.tokenizers.sentencepiece import byte_tokenizer

RESULTS = Path(__file__).parent / "results"
CLOCKS = ("clock", "processor")
SAVE_EVERY = 100  # steps between saves, over which the cost of a save is given as a share


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    shapes: tuple[str, ...] = ("small", "tiny", "stories15m")
    """Shapes: small (tiny with 2 layers, 4 rows of 32), tiny (the recipe), stories15m (8 rows of 256)."""
    blocks: int = 40
    """Short blocks of the loop."""
    saves: int = 6
    output: Path = RESULTS / "bench_loop_cpu.json"


def shapes() -> dict[str, tuple[Recipe, int, int]]:
    """Recipes by name, with the steps of a short block and of a block long enough for a save."""
    common = dict(accumulate=1, vocabulary="byte", reading=DocumentFormat(longest=1000), evaluate_tokens=1, prompts=())
    return {
        "small": (
            replace(
                tiny(),
                model=replace(tiny().model, dim=64, n_layers=2, n_heads=4, n_kv_heads=4),
                batch=4,
                length=32,
                **common,
            ),
            40,
            400,
        ),
        "tiny": (replace(tiny(), **common), 4, 40),
        "stories15m": (replace(stories15m(), batch=8, dtype="float32", **common), 1, 4),
    }


def read_clocks() -> np.ndarray:
    """Seconds by each of CLOCKS."""
    return np.array([time.perf_counter(), time.process_time()])


class Turns(Log):
    """A log that runs a block of the bare step at each line of progress and records seconds in `blocks`."""

    def __init__(self, program: TrainingProgram, batches: list[Batch], steps: int) -> None:
        super().__init__(io.StringIO())
        self.program, self.batches, self.steps = program, batches, steps
        self.state = program.init_state(None)
        self.blocks: list[np.ndarray] = []  # by CLOCKS
        self.since: np.ndarray | None = None

    def progress(self, text: str) -> None:
        now = read_clocks()
        if self.since is not None:  # the first block is not counted: it starts the run's threads
            self.blocks.append(now - self.since)
        began = read_clocks()
        for number in range(self.steps):
            self.state, _ = self.program.step(self.state, self.batches[number % len(self.batches)])
        jax.block_until_ready(self.state)
        self.since = read_clocks()
        self.blocks.append(self.since - began)


def take_turns(recipe: Recipe, steps: int, blocks: int, save_every: int, folder: Path) -> tuple[np.ndarray, int]:
    """Seconds by CLOCKS of alternating bare blocks and blocks of the loop, and the bytes of a checkpoint."""
    recipe = replace(
        recipe,
        steps=(blocks + 1) * steps,
        optimizer=replace(recipe.optimizer, warmup_steps=1),
        evaluate_every=0,
        save_every=save_every,
        log_every=steps,
    )
    text = folder / "text.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice(["the", "llama", "ate", "grass", "and", "slept"], 60_000)))
    corpus = open_corpus(text, byte_tokenizer(), reading=recipe.reading, cache=folder / "corpora")
    program = make_program(recipe, text_objective(recipe), MeshSizes(), "jit")
    batches = training_batches(corpus, recipe.batch, recipe.length, seed=1)
    turns = Turns(program, [program.shard_batch(next(batches)) for _ in range(4)], steps)
    batches.close()
    run = folder / f"run-{save_every}"
    train(recipe, run, [text], log=turns)
    files = (run / f"checkpoints/{recipe.steps}").rglob("*")
    return np.array(turns.blocks), sum(file.stat().st_size for file in files if file.is_file())


def measure(recipe: Recipe, short: int, long: int, arguments: Arguments, folder: Path) -> dict:
    """The cost of the loop and of a save for a recipe, by each clock."""
    quick, size = take_turns(recipe, short, arguments.blocks, 0, folder)
    saving, _ = take_turns(recipe, long, 2 * arguments.saves, 2 * long, folder)
    facts = {"rows": recipe.batch, "length": recipe.length, "steps_of_a_block": [short, long], "save_bytes": size}
    return facts | {clock: compare(quick[:, i], saving[:, i], short, long) for i, clock in enumerate(CLOCKS)}


def compare(quick: np.ndarray, saving: np.ndarray, short: int, long: int) -> dict:
    """Compare blocks. Even blocks are bare; every second odd block of `saving` begins with a save."""
    bare, loop = quick[0::2], quick[1::2]
    beside = (bare[:-1] + bare[1:]) / 2
    fastest = [np.sort(found)[: max(1, len(found) // 10)].mean() for found in (bare, loop)]
    around = (saving[0:-2:2] + saving[2::2]) / 2
    lost = (saving[1::2] - around)[1::2]
    step = np.median(saving[0::2]) / long
    return {
        "bare_ms_per_step": 1000 * fastest[0] / short,
        "loop_over_bare_fastest": fastest[1] / fastest[0],
        "loop_over_bare_median": np.median(loop / beside),
        "loop_ms_per_step": 1000 * (fastest[1] - fastest[0]) / short,
        "save_seconds": np.median(lost),
        f"save_share_every_{SAVE_EVERY}_steps": np.median(lost) / (SAVE_EVERY * step),
        "ratios": np.sort(loop / beside).round(4).tolist(),
        "seconds_lost_by_save": np.sort(lost).round(4).tolist(),
    }


def main(arguments: Arguments) -> None:
    known = shapes()
    results = {}
    names = ("bare ms", "fastest", "median", "loop ms", "save s", "/100")
    print(f"{'shape':12} {'measured':10}" + "".join(f"{name:>10}" for name in names))
    for name in arguments.shapes:
        with tempfile.TemporaryDirectory(prefix="bench_loop-") as folder:
            found = results[name] = measure(*known[name], arguments, Path(folder)) | {"load": os.getloadavg()}
        for clock in CLOCKS:
            numbers = list(found[clock].values())[: len(names)]
            print(f"{name:12} {clock:10}" + "".join(f"{number:10.3f}" for number in numbers), flush=True)
    write_report(arguments.output, {"machine": machine(), "versions": versions("jax", "jaxlib"), "results": results})


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
