"""The speedrun: the lowest validation loss after 30 minutes of training on two cores, or on one H100. docs/speedrun.md has
the rules, the leaderboard, and how far each idea takes our entry.

    python experiments/speedrun.py run                                  our entry
    python experiments/speedrun.py run mine.py:recipe --by "Your name"  yours: a function that returns a Recipe
    python experiments/speedrun.py run --minutes 2 optimizer.name=adamw   practice: printed, not recorded
    python experiments/speedrun.py ideas --minutes 30                   our ideas one after the other, and what did not help
    python experiments/speedrun.py page                                 writes the tables of docs/speedrun.md

The library trains; this file keeps the time. A recipe without `steps` gets as many as fit: a rehearsal of a few steps, which
counts, measures what one takes. Whatever happens, the run is stopped at the end of the time, after the step in progress.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import bundled
import tyro
from measuring import RESULTS, ROOT, cpu_name, versions, write_rows

from llama_jax.config import LlamaConfig
from llama_jax.config.presets import preset
from llama_jax.data import DocumentFormat
from llama_jax.data.documents import read_documents
from llama_jax.model.trees import parameter_count
from llama_jax.runs.log import Log
from llama_jax.runs.overrides import override
from llama_jax.runs.recipe import Recipe, to_dict
from llama_jax.runs.recipes import find
from llama_jax.training.optimizer import OptimizerSettings

PAGE = ROOT / "docs" / "speedrun.md"
ENTRIES = RESULTS / "speedrun.json"
MINUTES = 30.0
CORES = 2
REHEARSED = 16  # steps that measure what one takes
VOCABULARY = 50_000  # stories of which one is learned at most
MARGIN = 0.97  # of the time that is left after the rehearsal
# The slices of TinyStories, by SHA-256 of the stories as `bundled` finds them, a JSON object a line.
TEXTS = {
    bundled.TRAINING: "cea828641c5fe8835aa574da7934f1f1a7d91eaf759c2a22d8cb9ad914b2ee81",
    bundled.VALIDATION: "71d105880b243bb368c13df26bc61096fdc0eb2d9d01927464f1df474eb7a5e4",
}
Track = Literal["cores", "h100"]
TRACKS: dict[Track, str] = {"cores": "two cores of a CPU", "h100": "one H100"}
ClockName = Literal["wall", "processor"]


def baseline() -> Recipe:
    """A plain Llama by the book: AdamW, a cosine to a tenth, an output projection of its own."""
    return Recipe(
        model=LlamaConfig(
            vocab_size=2048,
            dim=192,
            n_layers=6,
            n_heads=6,
            n_kv_heads=6,
            hidden_dim=512,
            max_seq_len=512,
            norm_eps=1e-5,
            rope_theta=10_000.0,
            tie_embeddings=False,
        ),
        batch=16,
        length=256,
        optimizer=OptimizerSettings(learning_rate=1e-3, warmup_steps=40),
        vocabulary="bpe",
        evaluate_every=0,
        save_every=0,
    )


# Each on top of those before it.
IDEAS: dict[str, tuple[str, ...]] = {
    "Muon": ("optimizer.name=muon", "optimizer.learning_rate=8e-3"),
    "a quarter of the batch, rows twice as long": ("batch=4", "length=512"),
    "learning rate down to 2 %": ("optimizer.final_share=0.02",),
    "tied embeddings": ("model.tie_embeddings=true",),
    "vocabulary of 4096": ("model.vocab_size=4096",),
    "a token for the end of a paragraph": ("vocabulary=given",),
    "4 layers, 2 heads that share keys and values": ("model.n_layers=4", "model.n_heads=2", "model.n_kv_heads=1"),
    "moving average of the weights": ("ema_decay=0.99",),
    "weight decay 0.6": ("optimizer.weight_decay=0.6",),
    "z-loss": ("z_loss=1e-4",),
}
# Changes of our entry that were tried and not kept.
TRIED: dict[str, tuple[str, ...]] = {
    "norm of queries and keys": ("model.qk_norm=head",),
    "decay in the last half (WSD)": ("optimizer.schedule=wsd", "optimizer.decay_share=0.5"),
    "noise on the embeddings": ("neftune=5",),
    "vocabulary of 8192": ("model.vocab_size=8192",),
    "6 layers": ("model.n_layers=6",),
    "width 256": ("model.dim=256", "model.hidden_dim=688"),
    "bfloat16": ("dtype=bfloat16",),
}


def ours() -> Recipe:
    """Our entry on two cores: the baseline with all ideas."""
    return override(baseline(), [change for changes in IDEAS.values() for change in changes])


def h100() -> Recipe:
    """For one H100, planned with `llama-jax estimate` and never run: 110 million parameters, 131,072 tokens a step."""
    return replace(
        ours(),
        model=replace(preset("stories-110m"), vocab_size=8192, max_seq_len=512),
        batch=256,
        length=512,
        accumulate=2,
        optimizer=OptimizerSettings(name="muon", learning_rate=2e-3, warmup_steps=100, final_share=0.02),
        ema_decay=0.0,
        dtype="bfloat16",
    )


RECIPES: dict[str, Callable[[], Recipe]] = {"baseline": baseline, "ours": ours, "h100": h100}


class Clock:
    """The time that a run may take: of the wall, or, for practice on a busy machine, half of what two cores compute."""

    def __init__(self, minutes: float, name: ClockName) -> None:
        self.minutes, self.name = minutes, name
        self._cores = CORES if name == "processor" else 1
        self._time = time.process_time if name == "processor" else time.perf_counter
        self._start = self._time()

    @property
    def left(self) -> float:
        """Seconds."""
        return self.minutes * 60 - (self._time() - self._start) / self._cores

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Ask a run inside for its end when the time is over, as SIGTERM does; SystemExit before its first step."""
        timer, number = {
            "wall": (signal.ITIMER_REAL, signal.SIGALRM),
            "processor": (signal.ITIMER_PROF, signal.SIGPROF),
        }[self.name]

        def stop(number: int, frame: Any) -> None:
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                raise SystemExit("the time ended outside of training; it needs more --minutes")
            os.kill(os.getpid(), signal.SIGTERM)

        before = signal.signal(number, stop)
        signal.setitimer(timer, max(self.left * self._cores, 1e-3))
        try:
            yield
        finally:
            signal.setitimer(timer, 0)
            signal.signal(number, before)


class Marks(Log):
    """Notes the time that is left at every line of progress, and prints nothing."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(quiet=True)
        self._clock = clock
        self.left: list[float] = []

    def progress(self, text: str) -> None:
        self.left.append(self._clock.left)


@dataclass(frozen=True)
class Text:
    """What every entry reads and is measured on, one story a line, in JSON."""

    training: tuple[Path, ...]
    validation: Path
    changed: tuple[str, ...]
    """The files that are not those of the rules."""


def prepare(data: Path, folder: Path, training: Sequence[Path] = ()) -> Text:
    """The stories of the slices in a folder; or other training text, with the slices' validation stories.

    Raises:
      SystemExit: a validation story is in the training text.
    """
    validation_texts = bundled.validation_stories(data)
    validation = bundled.write_stories(folder / bundled.VALIDATION, validation_texts)
    if training:
        known, files = {" ".join(story.split()) for story in validation_texts}, tuple(training)
        shared = [story for story in stories_of(files) if " ".join(story.split()) in known]
    else:
        stories = bundled.training_stories(data)
        files = (bundled.write_stories(folder / bundled.TRAINING, stories),)
        shared = bundled.shared_stories(stories, validation_texts)
    if shared:
        raise SystemExit(f"{len(shared)} validation stories are in the training text, the first: {shared[0][:80]!r}")
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (*files, validation)}
    return Text(files, validation, tuple(name for name, shared in sums.items() if TEXTS.get(name) != shared))


def fit(recipe: Recipe, rehearse: Callable[[Recipe, Log], Any], clock: Clock) -> Recipe:
    """The recipe with as many steps as fit into the time that is left; one with steps is returned as it is.

    Raises:
      SystemExit: not even one does.
    """
    if recipe.steps:
        return recipe
    begin, marks = clock.left, Marks(clock)
    rehearse(with_steps(replace(recipe, log_every=REHEARSED // 2), REHEARSED), marks)
    step = (marks.left[-2] - marks.left[-1]) / (REHEARSED // 2)
    around = begin - clock.left - REHEARSED * step  # vocabulary, tokens, compilation, checkpoint
    steps = int((MARGIN * clock.left - around) / step)
    if steps < 1:
        raise SystemExit("no step fits into the time; it needs more --minutes, or a smaller recipe")
    return with_steps(recipe, steps)


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with so many steps, at most a tenth of them for the warm-up."""
    warmup = min(recipe.optimizer.warmup_steps, steps // 10)
    return replace(recipe, steps=steps, optimizer=replace(recipe.optimizer, warmup_steps=warmup))


def attempt(recipe: Recipe, text: Text, clock: Clock, folder: Path, tokenizer: Path | None = None) -> dict[str, Any]:
    """Train a recipe from random weights as long as the clock allows, and measure it: its row, without a name."""
    from llama_jax.runs.loop import train

    recipe = replace(recipe, evaluate_every=0, evaluate_tokens=1, save_every=0, keep_best=0, prompts=())
    if recipe.vocabulary == "given" and tokenizer is None:
        tokenizer = folder / "vocabulary.model"
        bundled.train_vocabulary(islice(stories_of(text.training), VOCABULARY), recipe.model.vocab_size, tokenizer)

    def run(variant: Recipe, workdir: str, log: Log) -> Any:
        validation = text.validation
        return train(variant, folder / workdir, text.training, validation_data=validation, tokenizer=tokenizer, log=log)

    with clock.stopping():
        recipe = fit(recipe, lambda variant, log: run(variant, "rehearsal", log), clock)
        done = run(recipe, "run", Log())
    used = clock.minutes - clock.left / 60
    return {
        **measured(recipe, folder / "run", text.validation),
        "steps": done.step,
        "planned": recipe.steps,
        "tokens": done.step * recipe.batch * recipe.length,
        "minutes": clock.minutes,
        "used": round(used, 2),
        "recipe": to_dict(recipe),
    }


def stories_of(files: Sequence[Path]) -> Iterator[str]:
    """The documents of files that the library reads."""
    return (document.text for file in files for document in read_documents(file, DocumentFormat()))


def measured(recipe: Recipe, run: Path, validation: Path) -> dict[str, Any]:
    """What the newest checkpoint of a run predicts: bits per byte of all validation stories.

    Raises:
      SystemExit: a vocabulary that does not give a story back, or a model that sees what it is to predict.
    """
    import jax.numpy as jnp
    import numpy as np

    import llama_jax
    from llama_jax.data import open_corpus
    from llama_jax.evaluation.perplexity import evaluate

    config, params, tokenizer = llama_jax.load(run, "float32")
    config = replace(config, parts=recipe.parts)
    for story in stories_of([validation]):
        if tokenizer.decode(tokenizer.encode(story, bos=False)) != story:
            raise SystemExit(f"the vocabulary does not give this story back: {story[:80]!r}")
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, recipe.length), dtype=np.int32)
    half = recipe.length // 2
    ids[1, :half] = ids[0, :half]
    first, second = llama_jax.forward(config, params, jnp.asarray(ids))[0][:, :half]
    if not np.allclose(first, second, rtol=1e-3, atol=1e-3):
        raise SystemExit("predictions of the first half of a row depend on the second half")
    evaluation = evaluate(config, params, open_corpus(validation, tokenizer), length=recipe.length)
    return {
        "bits_per_byte": round(evaluation.bits_per_byte, 4),
        "loss": round(evaluation.loss, 4),
        "parameters": parameter_count(config),
        "vocabulary": config.vocab_size,
    }


def use(track: Track) -> None:
    """Keep to the track's hardware, before JAX looks for any.

    Raises:
      SystemExit: it is not here.
    """
    if track == "cores":
        if not hasattr(os, "sched_setaffinity"):
            raise SystemExit("this system cannot keep a process to two cores; Linux can")
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    import jax

    devices = jax.devices()
    if track == "h100" and ("H100" not in devices[0].device_kind or len(devices) != 1):
        raise SystemExit(f"this track is for one H100, and here is {len(devices)} x {devices[0].device_kind}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows recorded so far."""
    return json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []


def record(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A row a line, so that entries of several authors merge."""
    write_rows(path, {"experiment": "speedrun", "minutes": MINUTES}, "rows", rows)


def leaderboard(rows: Sequence[dict[str, Any]], track: Track) -> str:
    """The entries of a track, the best first."""
    entries = sorted((row for row in rows if row["kind"] == track), key=lambda row: row["bits_per_byte"])
    if not entries:
        return "No entry yet."
    lines = [
        f"| {rank} | {row['bits_per_byte']:.4f} | {row['name']} | {row['by']} | {row['date']} |"
        f" {row['parameters'] / 1e6:.1f}M | {row['steps']:,} | {row['tokens'] / 1e6:.1f}M | {row['used']:.1f} |"
        f" {row['device']} |"
        for rank, row in enumerate(entries, 1)
    ]
    head = "| | bits per byte | entry | by | date | parameters | steps | tokens | minutes | device |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|---|---|", *lines])


def ladder(rows: Sequence[dict[str, Any]]) -> str:
    """How far each idea took our entry, and what did not help, as far as they were measured."""
    ideas = {row["name"]: row for row in rows if row["kind"] == "idea"}
    if "baseline" not in ideas:
        return "Not measured yet."
    same = lambda row: [row[name] == ideas["baseline"][name] for name in ("minutes", "clock")]
    ideas = {name: row for name, row in ideas.items() if all(same(row))}
    line = lambda name, before: (
        f"| {name} | {ideas[name]['bits_per_byte']:.4f} |"
        f" {'' if before is None else format(ideas[name]['bits_per_byte'] - before, '+.4f')} | {ideas[name]['steps']:,} |"
    )
    head = "| {} | bits per byte | change | steps |\n|---|---|---|---|"
    clock = "on the clock" if ideas["baseline"]["clock"] == "wall" else "of processor time per core"
    table, before = (
        [f"Each ran for {ideas['baseline']['minutes']:g} minutes {clock}:", "", head.format("with this too")],
        None,
    )
    for name in ("baseline", *IDEAS):
        if name in ideas:
            table.append(line(name, before))
            before = ideas[name]["bits_per_byte"]
    if tried := [line(name, before) for name in TRIED if name in ideas]:
        table += ["", head.format("all of that, and"), *tried]
    return "\n".join(table)


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The tables of the page, by the names of their places in it."""
    return {**{track: leaderboard(rows, track) for track in TRACKS}, "ideas": ladder(rows)}


def with_tables(page: str, tables_by_name: dict[str, str]) -> str:
    """The page with these tables between ``<!-- NAME -->`` and ``<!-- end -->``."""
    for name, table in tables_by_name.items():
        page = re.sub(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", lambda m, t=table: m[1] + t + m[2], page, flags=re.DOTALL)
    return page


def finished(row: dict[str, Any], name: str, clock: ClockName, processor: float) -> dict[str, Any]:
    """A row with what it needs beside the figures: name, date, device and versions."""
    import jax

    device = cpu_name() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    about = {"date": time.strftime("%Y-%m-%d"), "device": device, "versions": versions("jax", "llama-jax")}
    return {"name": name, **row, "clock": clock, "processor_minutes": round(processor / 60, 2), **about}


@dataclass(frozen=True)
class Run:
    """Train an entry and measure it."""

    recipe: tyro.conf.Positional[str] = "ours"
    """ours, baseline, h100, or FILE.py:FUNCTION, which returns a Recipe."""
    changes: tyro.conf.Positional[tuple[str, ...]] = ()
    """Settings of the recipe to change, as for `llama-jax train`."""
    track: Track = "cores"
    """Two cores of a CPU, to which the process keeps, or one H100."""
    minutes: float = MINUTES
    """With others than 30 the run is practice."""
    clock: ClockName = "wall"
    """processor counts what both cores compute, for practice on a busy machine."""
    name: str = ""
    """Name of the entry. The default is the name of the recipe."""
    by: str = "llama_jax"
    """Whose entry it is."""
    tokenizer: Path | None = None
    """For a recipe with vocabulary=given; without it that learns one from the training stories, within the time."""
    data: Path = bundled.TEXT_FOLDER
    """Folder of the three slices of TinyStories."""
    training: tuple[Path, ...] = ()
    """Training text in place of the slices; entries of the track of two cores have none."""
    output: Path = ENTRIES
    """Where an entry is recorded; practice is printed only, except as an idea of `ideas`."""
    idea: bool = False
    """Record the row as an idea."""

    def run(self) -> None:
        use(self.track)
        chosen = override(RECIPES[self.recipe]() if self.recipe in RECIPES else find(self.recipe), self.changes)
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LLAMA_JAX_CACHE"] = folder  # what was tokenized before is tokenized again
            text = prepare(self.data, Path(folder), self.training)
            clock, processor = Clock(self.minutes, self.clock), time.process_time()
            row = attempt(chosen, text, clock, Path(folder), self.tokenizer)
            processor = time.process_time() - processor
        row = finished(row, self.name or self.recipe, self.clock, processor)
        print(json.dumps({key: value for key, value in row.items() if key != "recipe"}))
        changed = [name for name in text.changed if self.track == "cores" or name == bundled.VALIDATION]
        official = not changed and self.minutes == MINUTES and self.clock == "wall"
        if self.idea or official:
            kind = "idea" if self.idea else self.track
            key = (kind, row["name"])
            kept = [old for old in read_rows(self.output) if (old["kind"], old["name"]) != key]
            record(self.output, [*kept, {"kind": kind, "by": self.by, **row}])
        else:
            print("practice: not recorded; an entry has 30 minutes by the wall clock, and the text of the rules")


@dataclass(frozen=True)
class Ideas:
    """Run our ideas one after the other, each on top of those before it, and what was tried on top of all."""

    minutes: float = MINUTES
    clock: ClockName = "wall"
    only: Literal["ideas", "tried", "all"] = "all"
    data: Path = bundled.TEXT_FOLDER
    """Folder of the three slices of TinyStories."""
    output: Path = ENTRIES
    """What is recorded there with the same minutes does not run again."""

    def run(self) -> None:
        changes: list[str] = []
        cases: dict[str, list[str]] = {"baseline": []}
        for name, more in IDEAS.items():
            changes = [*changes, *more]
            cases[name] = changes
        tried = {name: [*changes, *more] for name, more in TRIED.items()}
        cases = {"ideas": cases, "tried": tried, "all": cases | tried}[self.only]
        for name, changes in cases.items():
            same = [row for row in read_rows(self.output) if row["kind"] == "idea" and row["name"] == name]
            if any((row["clock"], row["minutes"]) == (self.clock, self.minutes) for row in same):
                continue
            merged = dict(change.split("=", 1) for change in changes)  # the last one of a name
            options = {"--name": name, "--minutes": self.minutes, "--clock": self.clock, "--data": self.data}
            words = [str(word) for pair in (options | {"--output": self.output}).items() for word in pair]
            # A process of its own, so that each run compiles and reads for itself.
            command = [sys.executable, __file__, "run", "baseline", *map("=".join, merged.items()), "--idea", *words]
            subprocess.run(command, check=True)


@dataclass(frozen=True)
class Page:
    """Write the tables of docs/speedrun.md."""

    output: Path = ENTRIES

    def run(self) -> None:
        PAGE.write_text(with_tables(PAGE.read_text("utf-8"), tables(read_rows(self.output))), "utf-8")


if __name__ == "__main__":
    tyro.cli(Run | Ideas | Page).run()
