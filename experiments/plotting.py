"""What the experiments draw with: colors, figures without frames, a mean over neighbors, and the curves of training runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from llama_jax.runs.metrics import METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Columns: TypeAlias = dict[str, np.ndarray]  # the values of each name, in the order of steps

# Okabe and Ito's colors, distinguishable with color blindness, without yellow, which is too pale for a line.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("solid", (0, (4, 1.5)), (0, (1, 1)))
GRAY = "#555555"
PANELS = {
    "loss": "Loss, nats per token",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Throughput, tokens per second",
}


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches, which needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=100, layout="constrained", facecolor="white")


def finish(*panels: Any, legend: bool = True) -> None:
    """Remove the frames of panels, and add a grid and the legends of labelled curves."""
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD", lw=0.6)
        axes.set_axisbelow(True)
        axes.title.set(ha="left", x=0, fontsize=11)
        if legend and axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)


def smooth(values: np.ndarray, reach: int) -> np.ndarray:
    """A mean over `reach` neighbors on each side, applied twice: float64[n]; non-finite values are ignored and stay nan.

    It is centered and therefore has no lag. At the beginning, where curves are steep, fewer neighbors count.
    """
    index = np.arange(len(values))
    near = np.minimum(reach, index // 4)
    first, last = index - near, np.minimum(index + near + 1, len(values))
    finite = np.isfinite(values)
    counts = np.concatenate([[0], np.cumsum(finite)])
    for _ in range(2):
        sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0))])
        means = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
        values = np.where(finite, means, np.nan)
    return values


def read_metrics(workdir: Path, line_type: str) -> Columns:
    """The numbers of a run's "train" or "validation" lines; nan where a value is missing.

    The last of several lines for a step counts, since a resumed run repeats steps. A line that a killed run left incomplete
    is skipped.
    """
    lines = {}
    for text in (workdir / METRICS).read_text("utf-8").splitlines():
        with suppress(ValueError):
            line = json.loads(text)
            if line["kind"] == line_type:
                lines[line["step"]] = line
    rows = [lines[step] for step in sorted(lines)]
    names = {name for row in rows for name, value in row.items() if isinstance(value, int | float)}
    return {name: np.array([row.get(name) for row in rows], np.float64) for name in names}


def draw_runs(runs: Mapping[str, Path]) -> Figure:
    """Draw loss, learning rate, gradient norm and throughput of runs by tokens; dots are validation.

    Args:
      runs: the folders of the runs by name.
    """
    figure = new_figure(11, 7)
    grid = list(figure.subplots(2, 2, sharex=True).flat)
    for axes, (name, title) in zip(grid, PANELS.items(), strict=True):
        for (label, workdir), color in zip(runs.items(), COLORS, strict=False):
            columns, validation = read_metrics(workdir, "train"), read_metrics(workdir, "validation")
            reach = 0 if name == "learning_rate" else len(columns[name]) // 100
            axes.plot(columns["tokens"], smooth(columns[name], reach), color=color, lw=1.6, label=label)
            if name in validation:
                tokens = np.interp(validation["step"], columns["step"], columns["tokens"])
                axes.plot(tokens, validation[name], "o", color=color, mfc="white", ms=5)
        axes.set_title(title)
    finish(*grid, legend=False)
    for axes in grid[2:]:
        axes.set_xlabel("tokens", color=GRAY)
    grid[0].legend(frameon=False)
    return figure
