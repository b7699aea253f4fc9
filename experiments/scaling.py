"""A small scaling study: how a Llama's loss falls with compute, parameters and text, measured on a CPU.

    python experiments/scaling.py                  about ten minutes on two cores; resumes where it was stopped
    python experiments/scaling.py --small          only the smallest runs, to check that it works

Models of five sizes are trained on the bytes of four amounts of text, if a run costs at most `largest_run` FLOPs. Each is a
separate run whose learning rate falls to zero (Hoffmann et al. 2022, section 3.1: intermediate losses of a longer run are
too high), and no text is used twice. Two laws are fitted by least squares of relative errors:

    L = E + A / C**a               over the best runs for their compute, the frontier (Kaplan et al. 2020, section 6)
    L = E + A / N**a + B / D**b    over all runs (Hoffmann et al. 2022, section 3.3)

C is the training FLOPs by `llama_jax.training.flops`, including attention's causal half; N its matrix parameters; D the
tokens, here bytes. The intervals are the 5th and 95th percentiles over resampled runs. They ignore that each run has one
seed, that the learning rate follows a rule instead of a search for each size, and that all runs use the same validation
text.

The runs span one and a half decades of compute. They show that with so little text and compute the smallest models are best,
because larger ones have not seen enough text. They do not determine E or the exponents: the intervals are wide, and a law
fitted only to the cheap runs misses the others (`foretold` in the results). To determine them, runs would have to span
several decades and need more text: repeated text counts less each time (Muennighoff et al. 2023).
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tyro
from measuring import devices, versions, write_report

from llama_jax.config import LlamaConfig
from llama_jax.runs.recipe import Recipe
from llama_jax.tokenizers.sentencepiece import BYTE_VOCABULARY
from llama_jax.training.flops import matrix_parameters, step_flops
from llama_jax.training.optimizer import OptimizerSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
TEXT = ROOT.parent / "shared" / "data" / "text"
BATCH, LENGTH = 4, 128
WIDTH_TIMES_RATE = 0.12  # the learning rate is this over the width
EXPONENTS = np.linspace(0.02, 2.0, 25)  # first grid of the search
FINER = 4  # number of finer grids, each around the best exponents so far


class Size(NamedTuple):
    """Features and layers of a model."""

    dim: int
    layers: int


SIZES = (Size(32, 2), Size(48, 2), Size(64, 3), Size(96, 3), Size(128, 4))
BUDGETS = (160_000, 400_000, 1_000_000, 2_300_000)  # bytes of training text


@dataclass(frozen=True)
class Point:
    """A finished run.

    Attributes:
      parameters: N, the matrix parameters.
      tokens: D.
      flops: C.
      loss, error: validation loss in nats per byte, and its standard error, most of which is common to all runs.
      seconds: time of the whole run.
    """

    dim: int
    layers: int
    parameters: int
    tokens: int
    flops: float
    loss: float
    error: float
    seconds: float


@dataclass(frozen=True)
class Law:
    """L = floor + the sum over k of factors[k] / x[k] ** exponents[k]."""

    floor: float
    factors: tuple[float, ...]
    exponents: tuple[float, ...]

    def __call__(self, scales: np.ndarray) -> np.ndarray:
        """The loss at scales [..., k]: float64[...]."""
        return self.floor + np.sum(np.array(self.factors) * scales ** -np.array(self.exponents), axis=-1)


@dataclass(frozen=True)
class Arguments:
    """What to run."""

    data: tuple[Path, ...] = (TEXT / "tinystories-train.txt", TEXT / "tinystories-v2-train.txt")
    """Text to train on, used at most once."""
    validation_data: tuple[Path, ...] = (TEXT / "tinystories-valid.txt",)
    """Text to validate on."""
    largest_run: float = 1.2e12
    """Maximum FLOPs of a run; larger ones are omitted."""
    small: bool = False
    """Use only two sizes and two short amounts of text; the figures are meaningless."""
    draws: int = 500
    """Bootstrap samples."""
    workdir: Path = ROOT / "build" / "scaling"
    """Folder of finished runs, which are reused."""
    output: Path = ROOT / "experiments" / "results" / "scaling_cpu.json"
    """JSON file of runs and laws, with a picture (.png) next to it."""


def recipe(size: Size, tokens: int) -> Recipe:
    """A recipe for a model of this size and number of bytes."""
    steps = max(tokens // (BATCH * LENGTH), 2)
    return Recipe(
        model=LlamaConfig(
            vocab_size=-(-BYTE_VOCABULARY // 64) * 64,
            dim=size.dim,
            n_layers=size.layers,
            n_heads=size.dim // 16,
            n_kv_heads=size.dim // 16,
            hidden_dim=size.dim * 8 // 3 // 8 * 8,
            max_seq_len=LENGTH,
            norm_eps=1e-5,
            rope_theta=10_000.0,
            tie_embeddings=True,
        ),
        steps=steps,
        batch=BATCH,
        length=LENGTH,
        optimizer=OptimizerSettings(
            learning_rate=WIDTH_TIMES_RATE / size.dim, warmup_steps=steps // 10, final_share=0.0, b2=0.99
        ),
        vocabulary="byte",
        evaluate_every=0,
        evaluate_tokens=100_000,
        save_every=0,
        log_every=steps,
    )


def flops_of(recipe: Recipe) -> float:
    """C of the whole run."""
    return recipe.steps * step_flops(recipe.model, recipe.batch, recipe.length)


def measure(size: Size, tokens: int, arguments: Arguments) -> Point:
    """Train one run and keep only its result."""
    from llama_jax.runs.log import Log
    from llama_jax.runs.loop import train

    chosen, workdir = recipe(size, tokens), arguments.workdir / "run"
    shutil.rmtree(workdir, ignore_errors=True)
    began = time.perf_counter()
    found = train(chosen, workdir, arguments.data, validation_data=arguments.validation_data, log=Log(quiet=True)).validation
    assert found is not None
    return Point(
        *size,
        parameters=matrix_parameters(chosen.model),
        tokens=chosen.steps * BATCH * LENGTH,
        flops=flops_of(chosen),
        loss=found.loss,
        error=found.numbers["standard_error"],
        seconds=time.perf_counter() - began,
    )


def frontier(points: list[Point]) -> list[Point]:
    """The runs with a lower loss than every cheaper run and than every other size at the same compute, sorted by compute.

    The loss of a size between its runs is interpolated linearly over the logarithm of compute.
    """
    by_compute = sorted(points, key=lambda p: (p.flops, p.loss))
    curves = defaultdict(list)
    for point in by_compute:
        curves[point.parameters].append((math.log(point.flops), point.loss))
    best: list[Point] = []
    for point in by_compute:
        at = math.log(point.flops)
        others = [np.interp(at, *zip(*curve, strict=True), right=np.inf, left=np.inf) for curve in curves.values()]
        if point.loss <= min(others) and not (best and point.loss >= best[-1].loss):
            best.append(point)
    return best


def fit(scales: np.ndarray, losses: np.ndarray) -> Law:
    """The law with the least sum of squared relative errors; floor and factors are not negative.

    For given exponents the problem is linear (variable projection: Golub & Pereyra 1973). Only the exponents are searched,
    on a grid and then on finer grids around the best.

    Args:
      scales: float64[n, k], positive.
      losses: float64[n].
    """
    middle = np.exp(np.log(scales).mean(axis=0))
    grids = [EXPONENTS] * scales.shape[1]
    best = (np.inf, np.zeros(0), np.zeros(0))
    for _ in range(1 + FINER):
        exponents = np.stack(np.meshgrid(*grids), axis=-1).reshape(-1, len(grids))  # [g, k]
        powers = (scales / middle) ** -exponents[:, None]  # [g, n, k]
        best = min(_solve(exponents, powers, losses), best, key=lambda found: found[0])
        grids = [
            np.linspace(max(at - width, EXPONENTS[0]), min(at + width, EXPONENTS[-1]), len(EXPONENTS))
            for at, width in zip(best[1], (grid[1] - grid[0] for grid in grids), strict=True)
        ]
    _, exponents, (floor, *factors) = best
    return Law(float(floor), tuple((factors * middle**exponents).tolist()), tuple(exponents.tolist()))


def _solve(exponents: np.ndarray, powers: np.ndarray, losses: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The best of a grid of exponents: the sum of squared errors, exponents[k], and floor and factors [k + 1].

    Floor and factors may not be negative: each is either zero or free, and all combinations are tried.
    """
    relative = np.concatenate([np.ones_like(powers[..., :1]), powers], axis=-1) / losses[:, None]
    best = (np.inf, exponents[0], np.zeros(0))
    for free in product((False, True), repeat=relative.shape[-1]):
        columns = relative[..., np.array(free)]
        # A small diagonal term, because a bootstrap sample may have too few different runs.
        normal = np.einsum("gni,gnj->gij", columns, columns) + 1e-12 * np.eye(columns.shape[-1])
        found = np.linalg.solve(normal, columns.sum(axis=1)[..., None])[..., 0]
        errors = np.sum((np.einsum("gni,gi->gn", columns, found) - 1) ** 2, axis=-1)
        errors = np.where((found >= 0).all(axis=-1), errors, np.inf)
        at = int(errors.argmin())
        if errors[at] < best[0]:
            best = errors[at], exponents[at], np.zeros(relative.shape[-1])
            best[2][np.array(free)] = found[at]
    return best


def compute_law(points: list[Point]) -> Law:
    """L(C), fitted to the frontier."""
    best = frontier(points)
    return fit(np.array([[p.flops] for p in best]), np.array([p.loss for p in best]))


def size_law(points: list[Point]) -> Law:
    """L(N, D), fitted to all runs."""
    return fit(np.array([[p.parameters, p.tokens] for p in points]), np.array([p.loss for p in points]))


def resampled(points: list[Point], draws: int, least: int) -> list[tuple[Law, Law]]:
    """Both laws for bootstrap samples of the runs (Efron 1979) that have at least `least` runs on the frontier."""
    rng, laws = np.random.default_rng(0), []
    for _ in range(draws):
        drawn = [points[i] for i in rng.integers(len(points), size=len(points))]
        if len(frontier(drawn)) >= least:
            laws.append((compute_law(drawn), size_law(drawn)))
    return laws


def interval(values: list[float]) -> list[float]:
    """5th and 95th percentile."""
    return np.percentile(values, [5, 95]).tolist() if values else []


def described(law: Law, draws: list[Law]) -> dict[str, Any]:
    """A law and its intervals as JSON."""
    return asdict(law) | {
        "floor_interval": interval([draw.floor for draw in draws]),
        "exponent_intervals": [interval([draw.exponents[k] for draw in draws]) for k in range(len(law.exponents))],
    }


def foretold(points: list[Point]) -> dict[str, float] | None:
    """How well L(N, D), fitted to the runs with at most a quarter of the largest compute, predicts the other losses."""
    limit = max(p.flops for p in points) / 4
    cheap, dear = ([p for p in points if (p.flops <= limit) == side] for side in (True, False))
    if len(cheap) < 6:  # the law has five parameters
        return None
    law = size_law(cheap)
    errors = [float(law(np.array([p.parameters, p.tokens]))) / p.loss - 1 for p in dear]
    return {"runs": len(dear), "mean_error": float(np.mean(errors)), "largest_error": max(errors, key=abs)}


def draw(points: list[Point], law: Law, draws: list[Law], of_sizes: Law) -> Figure:
    """Draw the loss over compute with the frontier and its law (left), and measured losses over those of L(N, D) (right)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from plotting import COLORS, GRAY

    figure = Figure(figsize=(10, 4.2), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    sizes = sorted({(p.parameters, p.dim, p.layers) for p in points})
    for (parameters, dim, layers), color in zip(sizes, COLORS, strict=False):
        own = sorted((p for p in points if p.parameters == parameters), key=lambda p: p.flops)
        label = f"{parameters / 1000:,.0f}k: {layers} layers of {dim}"
        left.plot([p.flops for p in own], [p.loss for p in own], "o-", color=color, lw=1.2, ms=4, label=label)
        predicted = of_sizes(np.array([[p.parameters, p.tokens] for p in own]))
        right.plot(predicted, [p.loss for p in own], "o", color=color, ms=5)
    best = frontier(points)
    left.plot([p.flops for p in best], [p.loss for p in best], "o", ms=9, mfc="none", mec="black", label="frontier")
    compute = np.geomspace(best[0].flops, best[-1].flops * 4, 60)[:, None]
    if draws:
        low, high = np.percentile([one(compute) for one in draws], [5, 95], axis=0)
        left.fill_between(compute[:, 0], low, high, color=GRAY, alpha=0.2, lw=0)
    [a] = law.exponents
    left.plot(compute[:, 0], law(compute), "--", color="black", lw=1.2, label=f"{law.floor:.2f} + (C$_0$/C)$^{{{a:.2f}}}$")
    left.set(
        xscale="log",
        ylim=(0, 1.05 * max(p.loss for p in points)),
        xlabel="FLOPs of training, C",
        title="Loss, nats per byte",
    )
    left.legend(frameon=False, fontsize=8)
    ends = [min(p.loss for p in points), max(p.loss for p in points)]
    right.plot(ends, ends, color=GRAY, lw=1)
    a, b = of_sizes.exponents
    right.set(
        xlabel=f"{of_sizes.floor:.2f} + (N$_0$/N)$^{{{a:.2f}}}$ + (D$_0$/D)$^{{{b:.2f}}}$", title="Measured loss of each run"
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD", lw=0.6)
        axes.title.set(ha="left", x=0, fontsize=11)
    return figure


def run_all(arguments: Arguments) -> list[Point]:
    """All runs, reusing those in the work directory; prints a line for each."""
    sizes, budgets = (SIZES[:2], (8_192, 16_384)) if arguments.small else (SIZES, BUDGETS)
    if missing := [str(path) for path in arguments.data if not path.is_file()]:
        raise SystemExit(f"--data: {', '.join(missing)} does not exist; it is not part of the repository, pass other files")
    text = sum(path.stat().st_size for path in arguments.data)
    if max(budgets) > text:
        raise SystemExit(f"--data has {text:,} bytes, but {max(budgets):,} are needed (none is used twice); pass more")
    kept = arguments.workdir / "points.json"
    done = [Point(**point) for point in json.loads(kept.read_text())] if kept.exists() else []
    points = []
    print(f"{'N':>9} {'D':>10} {'C':>9} {'D / N':>6} {'loss':>8} {'seconds':>8}")
    for tokens, size in product(budgets, sizes):
        chosen = recipe(size, tokens)
        if flops_of(chosen) > arguments.largest_run:
            continue
        key = (matrix_parameters(chosen.model), chosen.steps * BATCH * LENGTH)
        found = next((p for p in done if (p.parameters, p.tokens) == key), None)
        if found is None:
            found = measure(size, tokens, arguments)
            done.append(found)
            write_report(kept, [asdict(point) for point in done])
        points.append(found)
        print(
            f"{found.parameters:>9,} {found.tokens:>10,} {found.flops:9.2e} {found.tokens / found.parameters:6.1f}"
            f" {found.loss:8.4f} {found.seconds:8.1f}",
            flush=True,
        )
    return points


def main(arguments: Arguments) -> None:

    arguments.workdir.mkdir(parents=True, exist_ok=True)
    points = run_all(arguments)
    law, of_sizes = compute_law(points), size_law(points)
    drawn = resampled(points, arguments.draws, least=4)
    ours, theirs = [pair[0] for pair in drawn], [pair[1] for pair in drawn]
    laws = {"compute": described(law, ours), "parameters_and_tokens": described(of_sizes, theirs)}
    check = foretold(points)
    for name, found in laws.items():
        exponents = zip(found["exponents"], found["exponent_intervals"], strict=True)
        text = ", ".join(f"{a:.3f} {_brackets(ends)}" for a, ends in exponents)
        print(f"{name}: E = {found['floor']:.3f} {_brackets(found['floor_interval'])}, exponents {text}")
    if check:
        print(
            f"fitted to the cheap runs, the law misses the other {check['runs']} by {check['mean_error']:+.1%} on average,"
            f" {check['largest_error']:+.1%} at most"
        )
    about = {
        "device": devices(),
        "versions": versions("jax", "numpy"),
        "data": [path.name for path in arguments.data],
        "validation_data": [path.name for path in arguments.validation_data],
        "draws": len(drawn),
        "laws": laws,
        "foretold": check,
        "runs": [asdict(point) for point in points],
    }
    write_report(arguments.output, about)
    draw(points, law, ours, of_sizes).savefig(arguments.output.with_suffix(".png"))


def _brackets(ends: list[float]) -> str:
    return f"[{', '.join(f'{end:.3f}' for end in ends)}]"


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
