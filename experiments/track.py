"""Speed over commits: a small fixed set of measurements of two or more commits in one interleaved run.

    python experiments/track.py v0.1.0 HEAD --model SmolLM2-135M-Instruct.Q4_1.gguf

Each commit is unpacked into a separate folder and measured by a separate process with a separate cache. The processes take
turns, so that changes of the machine's speed affect all of them. The ratio of the speed to that of the first commit is taken
within each turn; its median and range are reported, and above 1 is faster. Rows are added to
``experiments/results/performance_history.json``, and the table and the picture next to it show all rows. Run it on a quiet
machine, and do not compare rows of different processors.

What is measured:
  start     1 / seconds of `llama-jax generate` for one token of the bundled model, with warm caches.
  decode    tokens/s of `generate`, batch 1, `new_tokens` after a prompt of 8.
  prefill   tokens/s of a prompt of `prompt_tokens`, until its first token.
  train     tokens/s of a training step, AdamW, as in bench_train.py.
They use the shape with random float32 weights; decode and prefill also use the model in its file's format.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from measuring import ROOT, cpu_name, write_rows

RESULTS = ROOT / "experiments" / "results" / "performance_history.json"
BEGIN = "measured: "  # prefix of a worker's lines; libraries print other lines


@dataclass(frozen=True)
class Arguments:
    """Compare the speed of commits."""

    commits: tyro.conf.Positional[tuple[str, ...]]
    """Two or more commits; the first is the baseline."""
    model: Path | None = None
    """A GGUF whose decode and prefill are measured, too."""
    shape: str = "stories-15m"
    """A preset, with random weights."""
    only: tuple[str, ...] = ()
    """Measurements, for example start or train; all by default."""
    repetitions: int = 9
    """Interleaved repetitions; the first is a warm-up and not counted."""
    prompt_tokens: int = 192
    new_tokens: int = 64
    batch: int = 8
    length: int = 256
    steps: int = 2
    """Training steps per repetition."""
    output: Path = RESULTS
    """JSON file to which rows are added, with the table and the picture of all rows next to it."""


def work(arguments: Any) -> None:
    """Process of a commit: print one number for each name on stdin. It uses only the public interface, which old commits
    have; if something is missing, the measurement is an error."""
    measures: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        name = line.strip()
        try:
            if name not in measures:
                measures[name] = make(name, arguments)
            found: Any = measures[name]()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        print(BEGIN + json.dumps(found), flush=True)


def make(name: str, arguments: Any) -> Callable[[], float]:
    """Prepare a measurement; return a function that repeats it."""
    import jax
    import numpy as np

    import llama_jax

    kind, _, what = name.partition(" ")
    if kind == "start":
        return start
    if kind == "train":
        from bench_train import ours

        run = ours(arguments, "float32")
        return lambda: per_second(arguments.steps * arguments.batch * arguments.length, lambda: run(arguments.steps))
    if what == arguments.shape:
        config = llama_jax.preset(what)
        params = llama_jax.init(config, jax.random.key(0))
    else:
        config, params, _ = llama_jax.load(arguments.model)
    read, new = (8, arguments.new_tokens) if kind == "decode" else (arguments.prompt_tokens, 1)
    prompt = np.random.default_rng(0).integers(3, config.vocab_size, read).tolist()
    generate = lambda: llama_jax.generate(config, params, [prompt], max_new_tokens=new)
    return lambda: per_second(new if kind == "decode" else read, generate)


def start() -> float:
    command = [sys.executable, "-m", "llama_jax", "generate", "Once upon a time", "--max-new-tokens", "1"]
    return per_second(1, lambda: subprocess.run(command, check=True, capture_output=True))


def per_second(count: int, action: Callable[[], Any]) -> float:
    """`count` divided by the seconds of an action."""
    begin = time.perf_counter()
    action()
    return count / (time.perf_counter() - begin)


class Commit:
    """A commit in a separate folder, and the process that measures it."""

    def __init__(self, name: str, folder: Path, arguments: Arguments) -> None:
        shown = subprocess.run(["git", "log", "-1", "--format=%h %cs", name, "--"], cwd=ROOT, capture_output=True, text=True)
        if shown.returncode:
            raise SystemExit(f"{name} is not a commit of this repository: {shown.stderr.strip()}")
        self.hash, self.date = shown.stdout.split()
        source = folder / "source"
        source.mkdir(parents=True)
        archive = folder / "source.tar"
        subprocess.run(["git", "archive", f"--output={archive}", name, "llama_jax"], cwd=ROOT, check=True)
        subprocess.run(["tar", "-x", "-f", str(archive), "-C", str(source)], check=True)
        paths = os.pathsep.join([str(source), str(Path(__file__).parent)])
        given = {**asdict(arguments), "model": arguments.model and str(arguments.model.resolve()), "output": None}
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import argparse, track; track.work(argparse.Namespace(**{given!r}))"],
            env={**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(folder / "cache")},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, name: str) -> float | str:
        """The measured number, or the error message."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(BEGIN):
                return json.loads(line.removeprefix(BEGIN))
        raise SystemExit(f"the process of {self.hash} exited while measuring {name}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def names_of(arguments: Arguments) -> list[str]:
    """The names of the measurements: start, decode and prefill of shape and model, train of the shape."""
    models = [arguments.shape, *([arguments.model.stem] if arguments.model else [])]
    names = ["start", *(f"{kind} {model}" for model in models for kind in ("decode", "prefill")), f"train {arguments.shape}"]
    return [
        name for name in names if not arguments.only or name.partition(" ")[0] in arguments.only or name in arguments.only
    ]


def compare(arguments: Arguments) -> list[dict[str, Any]]:
    """A row for each measurement of each commit except the first.

    Raises:
      SystemExit: there are fewer than two commits, or one does not exist.
    """
    if len(arguments.commits) < 2:
        raise SystemExit("pass at least two commits to compare, for example HEAD~20 HEAD")
    commits: list[Commit] = []
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, name in enumerate(arguments.commits):
                commits.append(Commit(name, Path(folder) / str(number), arguments))
            for name in names_of(arguments):
                turns = [[commit.measure(name) for commit in commits] for _ in range(arguments.repetitions)][1:]
                first, *others = zip(*turns, strict=True)
                for commit, figures in zip(commits[1:], others, strict=True):
                    row = {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "base": commits[0].hash}
                    row |= {"commit": commit.hash, "committed": commit.date, "measurement": name}
                    rows.append(row | ratios(first, figures))
        finally:
            for commit in commits:
                commit.close()
    return rows


def ratios(first: Sequence[float | str], figures: Sequence[float | str]) -> dict[str, Any]:
    """Median and range of the ratios within turns; or the first error."""
    errors = [one for one in (*first, *figures) if isinstance(one, str)]
    if errors:
        return {"error": errors[0]}
    found = sorted(float(ours) / float(base) for base, ours in zip(first, figures, strict=True))
    shown = {"ratio": statistics.median(found), "lowest": found[0], "highest": found[-1]}
    speeds = {"base_per_second": statistics.median(map(float, first)), "per_second": statistics.median(map(float, figures))}
    return {name: float(f"{value:.4g}") for name, value in (shown | speeds).items()} | {"turns": len(found)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Speed over the base commit as Markdown, a line for each comparison; ranges in parentheses."""
    names = list(dict.fromkeys(row["measurement"] for row in rows))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        cell = "error" if "error" in row else f"{row['ratio']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f})"
        key = tuple(row[part] for part in ("date", "cpu", "base", "commit"))
        lines.setdefault(key, {})[row["measurement"]] = cell
    head = ["measured", "processor", "base", "commit", *names]
    cells = [[*key, *(found.get(name, "") for name in names)] for key, found in lines.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *cells])


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw speed over the base commit by the commit's date, with a panel for each processor and base."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    good = [row for row in rows if "ratio" in row]
    panels = list(dict.fromkeys((row["cpu"], row["base"]) for row in good)) or [("", "")]
    figure, axes = plt.subplots(len(panels), 1, figsize=(7, 3 * len(panels)), squeeze=False, layout="constrained")
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        here = sorted((row for row in good if (row["cpu"], row["base"]) == panel), key=lambda row: row["committed"])
        ticks = list(dict.fromkeys(row["commit"] for row in here))
        for name in dict.fromkeys(row["measurement"] for row in here):
            points = [row for row in here if row["measurement"] == name]
            at, middle = [ticks.index(row["commit"]) for row in points], [row["ratio"] for row in points]
            below = [row["ratio"] - row["lowest"] for row in points]
            above = [row["highest"] - row["ratio"] for row in points]
            axis.errorbar(at, middle, [below, above], label=name, marker="o", capsize=2, linewidth=1)
        axis.axhline(1, color="gray", linewidth=0.5)
        axis.set(
            title=f"{panel[0]}, base {panel[1]}", ylabel="speed over the base", xticks=range(len(ticks)), xticklabels=ticks
        )
        if here:
            axis.legend(fontsize="small")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(arguments: Arguments) -> None:
    before = json.loads(arguments.output.read_text("utf-8"))["rows"] if arguments.output.exists() else []
    rows = compare(arguments)
    print(table(rows))
    for row in rows:
        if "error" in row:
            print(f"{row['measurement']} of {row['base']} or {row['commit']}: {row['error']}", file=sys.stderr)
    rows = [*before, *rows]
    write_rows(arguments.output, {"experiment": "speed over commits"}, "rows", rows)
    arguments.output.with_suffix(".md").write_text(table(rows) + "\n", "utf-8")
    draw(rows, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
