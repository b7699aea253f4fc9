"""Context extension of a real model: loss by position at twice its context, before and after a short training.

    python experiments/real_context_extension.py --model SmolLM2-135M-Instruct.Q4_1.gguf     resumes where it was stopped

A held-out window of 2 L tokens of a book is evaluated with each RoPE scaling: without training ("zero-shot"), and after a
short training of all parameters on other pages of the book. Rows of 2 L tokens are too expensive for a CPU. Training
therefore simulates long distances by PoSE (Zhu et al. 2023): a short row is split in two, and the positions of its second
part are shifted by a random number of tokens, up to 2 L. `none` has the same training, to distinguish learning the book from
learning positions. The scalings are those of `context_extension.py`; `dynamic` is not trained, because it depends on the
length of a sequence, and training rows are short.

"within L" evaluates the same tokens in two windows of L, for which the model needs no extension.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tyro
from context_extension import ROOT, STAGES, TEXT, Size, extended, read_book, train
from loss_by_length import cut_spans, window_losses
from measuring import cpu_name, devices, settings, versions, write_report

from llama_jax import Compute
from llama_jax.training.optimizer import OptimizerSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from llama_jax.config import LlamaConfig
    from llama_jax.data import Corpus
    from llama_jax.model.params import Llama
    from llama_jax.training.batch import Batch

FACTOR = 2
WAYS = ("yarn", "none", "linear", "dynamic")
WITHIN = "within L"
PARTS = 16  # parts of the window, over which the loss is averaged
SHOWN = ((0, 4), (4, 8), (8, 12), (12, 16))  # parts in each column of the table


@dataclass(frozen=True)
class Arguments:
    """What to run."""

    model: Path
    """A model of any supported format."""
    text: Path = TEXT
    """A book as a text file; its last tenth is held out."""
    steps: int = 16
    """Training steps."""
    rows: int = 1
    """Rows per step."""
    length: int = 512
    """Tokens per row."""
    learning_rate: float = 1e-4
    """Peak learning rate, reached after a quarter of the steps."""
    most: float = math.inf
    """Seconds after which no measurement is started; run the same command to resume."""
    seed: int = 0
    """Seed of the rows."""
    workdir: Path = ROOT / "build" / "real_context_extension"
    """Folder of finished measurements, which are reused."""
    output: Path = ROOT / "experiments" / "results" / "real_context_extension_cpu.json"
    """JSON file of the numbers, with a table (.md) and a picture (.png) next to it."""


@dataclass(frozen=True)
class Found:
    """Loss in nats per token with a scaling, at a stage: means over every sixteenth of the window."""

    way: str
    stage: str
    by_part: list[float]
    seconds: float


def skipping_rows(corpus: Corpus, rows: int, length: int, reach: int, steps: int, seed: int) -> Iterator[Batch]:
    """Rows of consecutive tokens whose positions skip a random number once and end below `reach`."""
    from llama_jax.training.batch import Batch

    for step in range(steps):
        random = np.random.default_rng([seed, step])
        tokens, positions = (np.empty((rows, length + 1), np.int32) for _ in range(2))
        for row in range(rows):
            first = int(random.integers(corpus.token_count - length))
            tokens[row] = corpus.tokens[first : first + length + 1]
            skipped = int(random.integers(reach - length))
            positions[row] = np.arange(length + 1) + skipped * (np.arange(length + 1) >= random.integers(1, length))
        yield Batch(tokens, position_ids=positions)


def measure(config: LlamaConfig, params: Llama, held: Corpus, reach: int, windows: int) -> list[float]:
    """Mean losses over the parts of the first `reach` held-out tokens, evaluated in windows of equal length."""
    spans = cut_spans(held.tokens, reach, reach)
    losses = window_losses(config, params, spans, reach // windows, compute=Compute("bfloat16"))
    return losses.reshape(PARTS, -1).mean(axis=1).tolist()


def run_all(arguments: Arguments) -> tuple[int, list[Found]]:
    """Return L and all measurements made within the time, reusing those in the folder."""
    import jax

    import llama_jax

    began = time.perf_counter()
    about = json.loads(json.dumps(settings(replace(arguments, most=0.0, workdir=Path(), output=Path()))))
    path = arguments.workdir / "found.json"
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {"settings": about, "found": []}
    if known["settings"] != about:
        raise SystemExit(f"{arguments.workdir} belongs to a run with other settings; delete it or choose another --workdir")
    done = {(one["way"], one["stage"]): Found(**one) for one in known["found"]}

    config, params, tokenizer = llama_jax.load(arguments.model, "float32")
    assert tokenizer is not None
    limit = config.max_seq_len
    reach = FACTOR * limit
    size = Size(config.dim, config.n_layers, limit, (FACTOR,), measured_tokens=reach, dtype="bfloat16")
    pages, held = read_book(arguments.text, size, tokenizer)
    plan = [(WITHIN, "zero-shot"), *((way, "zero-shot") for way in WAYS)]
    plan += [(way, "continued") for way in WAYS if way != "dynamic"]
    for way, stage in plan:
        if (way, stage) not in done and time.perf_counter() - began < arguments.most:
            start = time.perf_counter()
            longer, measured = extended(config, "none" if way == WITHIN else way, FACTOR), params
            if stage == "continued":
                steps = arguments.steps
                source = skipping_rows(pages, arguments.rows, arguments.length, reach, steps, arguments.seed)
                optimizer = OptimizerSettings(
                    learning_rate=arguments.learning_rate, warmup_steps=steps // 4, weight_decay=0.0
                )
                measured = train(longer, params, size, optimizer, steps, source)
            measured = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), measured)
            losses = measure(longer, measured, held, reach, FACTOR if way == WITHIN else 1)
            seconds = time.perf_counter() - start
            done[way, stage] = Found(way, stage, losses, seconds)
            print(f"{way}, {stage}: {seconds:.0f} s", flush=True)
            write_report(path, {"settings": about, "found": [asdict(one) for one in done.values()]})
    found = [done[key] for key in plan if key in done]
    for one in found:
        said = "  ".join(f"{math.exp(np.mean(one.by_part[a:b])):8.2f}" for a, b in SHOWN)
        print(f"{one.way:<10}{STAGES[one.stage]:<25}{said}{one.seconds:9.0f} s", flush=True)
    return limit, found


def as_markdown(arguments: Arguments, limit: int, found: list[Found]) -> str:
    """The table as Markdown."""
    width = FACTOR * limit // PARTS
    heads = [f"{a * width:,} to {b * width:,}" for a, b in SHOWN]
    training = f"{arguments.steps} steps of {arguments.rows} x {arguments.length} tokens at {arguments.learning_rate:g}"
    continued = f"; continued: {training}" if any(one.stage == "continued" for one in found) else ""
    lines = [
        f"# {arguments.model.stem}, from {limit:,} to {FACTOR * limit:,} tokens",
        "",
        f"Perplexity by position, {FACTOR * limit:,} tokens of {arguments.text.name}{continued}.",
        "",
        f"| | | {' | '.join(heads)} |",
        f"|---|---|{'---:|' * len(SHOWN)}",
    ]
    for one in found:
        cells = [f"{math.exp(np.mean(one.by_part[a:b])):,.2f}" for a, b in SHOWN]
        lines.append(f"| {one.way} | {STAGES[one.stage]} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def draw(limit: int, found: list[Found]) -> Figure:
    """Draw perplexity by position, before and after the training; the dotted line is L."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from plotting import COLORS, GRAY

    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    places = FACTOR * limit / PARTS * (np.arange(PARTS) + 0.5)
    stages = [stage for stage in STAGES if stage == "zero-shot" or any(one.stage == stage for one in found)]
    grid = figure.subplots(1, len(stages), sharey=True, squeeze=False)[0]
    for axes, stage in zip(grid, stages, strict=True):
        for way, color in zip((*WAYS, WITHIN), (*COLORS[: len(WAYS)], GRAY), strict=True):
            for one in found:
                if (one.way, one.stage) == (way, stage):
                    axes.plot(places, np.exp(one.by_part), ".-", color=color, lw=1.4, ms=5, label=way)
        axes.axvline(limit, color=GRAY, lw=1, ls=(0, (1, 2)))
        axes.set(title=STAGES[stage], xlabel="position", yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD", lw=0.6, which="both")
        axes.title.set(ha="left", x=0, fontsize=11)
    grid[0].set_ylabel("perplexity", color=GRAY)
    if found:
        grid[0].legend(frameon=False, fontsize=9)
    return figure


def main(arguments: Arguments) -> None:
    began = time.perf_counter()
    limit, found = run_all(arguments)
    report = {
        "device": f"{devices()}, {cpu_name()}",
        "versions": versions("jax", "numpy"),
        "settings": settings(replace(arguments, workdir=Path(), output=Path(), most=0.0)),
        "length": limit,
        "found": [asdict(one) for one in found],
    }
    write_report(arguments.output, report)
    arguments.output.with_suffix(".md").write_text(as_markdown(arguments, limit, found))
    draw(limit, found).savefig(arguments.output.with_suffix(".png"))
    print(f"\nwrote {arguments.output}, and .md and .png next to it; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
