"""Plots of the curves of training runs, from their metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from llama_jax.errors import UserError
from llama_jax.runs.metrics import OPTIONAL_METRICS, SOURCE_PREFIX, TRAIN_METRICS, RunHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

By = Literal["step", "tokens"]

# Okabe and Ito's colors, distinguishable with color blindness, without yellow, which is too pale for a line.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("solid", (0, (4, 1.5)), (0, (1, 1)))  # the first for one run per color, then the next
GRAY = "#555555"
DOTS: dict[str, Any] = {
    "linestyle": (0, (1, 1)),
    "linewidth": 1,
    "marker": "o",
    "markersize": 5,
    "markerfacecolor": "white",
    "markeredgewidth": 1.4,
}
MAX_MARKERS = 16  # per run; more would hide the line


def smooth(values: np.ndarray, reach: int) -> np.ndarray:
    """A mean over neighbors, applied twice: float64[n]; non-finite values are ignored and stay nan.

    It is centered and therefore has no lag, unlike a running average. At the beginning of a run, where curves are steep,
    fewer neighbors count.

    Args:
      reach: number of neighbors on each side; 0 changes nothing.
    """
    place = np.arange(len(values))
    near = np.minimum(reach, place // 4)
    first, last = place - near, np.minimum(place + near + 1, len(values))
    finite = np.isfinite(values)
    counted = np.concatenate([[0], np.cumsum(finite)])
    for _ in range(2):
        total = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0))])
        means = (total[last] - total[first]) / np.maximum(counted[last] - counted[first], 1)
        values = np.where(finite, means, np.nan)
    return values


def draw(runs: Sequence[RunHistory], *, by: By = "step", log: bool = False, smoothing: float = 0.01) -> Figure:
    """Plot panels of loss, learning rate, gradient norm and throughput, and of each of `OPTIONAL_METRICS` that a run has.

    Args:
      runs: the result of `metrics.read_runs`.
      by: the horizontal axis, steps or tokens.
      log: whether that, the loss and the gradient norm have logarithmic axes.
      smoothing: reach of the mean drawn over the faint curve, as a fraction of a run; 0 draws none.

    Returns:
      A figure without a window: use `figure.savefig(path)`, or evaluate it last in a notebook's cell.

    Raises:
      UserError: matplotlib is missing, nothing to draw, or an invalid argument.
    """
    if by not in get_args(By):
        raise UserError(f"by={by!r} must be one of {', '.join(get_args(By))}")
    if not 0 <= smoothing < 1:
        raise UserError(f"smoothing={smoothing} must be a fraction of a run, at least 0 and below 1")
    if not runs:
        raise UserError("no run given; pass at least one")
    for run in runs:
        if by == "tokens" and not np.isfinite(run.train["tokens"]).any():
            raise UserError(f"the run {run.name} has no token counts; plot it with by='step'")
    usual = "Loss, nats per token", "Learning rate", "Gradient norm", "Throughput, tokens per second"
    titles = dict(zip(TRAIN_METRICS[2:], usual, strict=True))
    titles |= {name: title for name, title in OPTIONAL_METRICS.items() if any(name in run.train for run in runs)}
    of_sources = dict.fromkeys(name for run in runs for name in run.validation if name.startswith(SOURCE_PREFIX))
    titles |= {name: f"Validation loss of {name.removeprefix(SOURCE_PREFIX)}, nats per token" for name in of_sources}
    height = -(-len(titles) // 2)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from matplotlib.lines import Line2D
    except ImportError:
        raise UserError('plots need matplotlib: pip install -e ".[plot]", or pip install matplotlib') from None
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(11, 3.5 * height), dpi=150, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(height, 2, sharex=True).flat
    panels: dict[str, Axes] = dict(zip(titles, grid, strict=False))
    for name, title in titles.items():
        _style(panels[name], title)
    for name in list(titles)[-2:]:
        panels[name].set_xlabel(by, color=GRAY)
    for axes in grid[len(titles) :]:
        axes.set_visible(False)

    handles = []
    looks: Iterator[tuple[str, Any]] = cycle((color, dashes) for dashes in DASHES for color in COLORS)
    for run, (color, dashes) in zip(runs, looks, strict=False):
        x = run.train[by]
        for name, axes in panels.items():
            if name not in run.train:  # only in validation
                continue
            y = run.train[name]
            reach = 0 if name == "learning_rate" else round(smoothing * len(y))
            if reach:
                axes.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
            alone = "." if len(y) == 1 else ""  # a line needs two points
            axes.plot(x, smooth(y, reach), color=color, linestyle=dashes, linewidth=1.6, marker=alone)
        of_rewards = "reward" in run.validation  # the loss is just its negative
        for name in set(run.validation) & set(titles) - ({"loss"} if of_rewards else set()):
            every = -(-len(run.validation[name]) // MAX_MARKERS)
            if not every:
                continue
            panels[name].plot(run.validation[by], run.validation[name], **DOTS, color=color, zorder=3, markevery=every)
        handles.append(Line2D([], [], color=color, linestyle=dashes, linewidth=2, label=_plain(run.name)))
    _scale(panels, log)
    if any(len(run.validation["loss"]) for run in runs):
        training = Line2D([], [], color=GRAY, linewidth=1.6, label="training")
        validation = Line2D([], [], **DOTS, color=GRAY, label="validation")
        panels["loss"].legend(handles=[training, validation], frameon=False, loc="upper right")
    if len(runs) > 1:
        figure.legend(handles=handles, loc="outside upper left", ncols=min(len(runs), 4), frameon=False)
    else:
        figure.suptitle(_plain(runs[0].name), x=0.01, ha="left", fontsize=12)
    return figure


def _style(axes: Axes, title: str) -> None:
    """Style a panel: no box, a faint grid under the curves."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=GRAY, labelbottom=True)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def _scale(panels: dict[str, Axes], log: bool) -> None:
    """Set axes from zero or logarithmic, with readable tick labels."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    for name, axes in panels.items():
        drawn = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.lines])
        if name in ("learning_rate", "tokens_per_second"):
            axes.set_ylim(0, 1.08 * np.nanmax(drawn, initial=0) or 1)  # keeps a constant off the edge
        elif log and name not in OPTIONAL_METRICS and (drawn > 0).any():
            positive = drawn[drawn > 0]
            wide = positive.max() > 4 * positive.min()
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(5))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if log:
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    panels["tokens_per_second"].yaxis.set_major_formatter(EngFormatter(sep=""))
    panels["learning_rate"].yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))


def _power(value: float) -> str:
    """A learning rate in common notation: 3e-4, 2.5e-3."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _plain(name: str) -> str:
    """A name escaped for matplotlib, which parses $ as math and hides labels that begin with an underscore."""
    plain = name.replace("$", r"\$")
    return f" {plain}" if plain.startswith("_") else plain
