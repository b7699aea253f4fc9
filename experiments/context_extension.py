"""Context extension: how a small Llama trained at length L handles 2 L, 4 L and 8 L with each RoPE scaling.

    python experiments/context_extension.py                about 25 minutes on two cores; resumes where it was stopped
    python experiments/context_extension.py --size test    meaningless figures, to check that it works

One model is trained at length L on the bytes of a book. Then each RoPE scaling is tried at each longer length: without
training ("zero-shot"), and after a short continued training at that length, which starts from the same model, uses the same
batches and differs only in the scaling. The scalings are

    none       the unchanged model
    linear     position interpolation (Chen et al. 2023), factor = length / L
    ntk        NTK-aware, a larger theta (Peng et al. 2023, section 3.1), factor = length / L
    dynamic    ntk with a factor that depends on the length of each sequence (transformers' formula, factor 2 at all
               lengths): it needs no setting for the length and changes nothing up to L
    by_parts   NTK-by-parts (section 3.2), factor = length / L
    yarn       YaRN (section 3.4): by_parts with sharper attention

Measured are the loss of held-out pages of the book by position, the cost of a scaling for texts no longer than L, and
whether a pass key of four digits is found (Mohtashami and Jaggi 2023, section 4.2).

A model of this size does not learn to look up a number from books only. It is therefore trained on passkey-like text, too:
first on rows of repeated random letters, from which it learns to continue repeated text (Olsson et al. 2022, induction
heads); then on pages of the book, some of which contain a number such as #4821# twice, mixed with such rows. The continued
training uses the same mixture at its length. The model can thus retrieve within L before retrieval beyond L is tested, but
this is not what a model learns from books.

theta is chosen so that seven tenths of the pairs of features rotate at least once within L, as in Llama 2. With the usual
10,000, most pairs would not in such a short context, and scaling would change little. The 32 rotations of YaRN and by_parts
are the authors' value for contexts of thousands of tokens; within a short context only the first pairs rotate that often.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tyro
from measuring import DATA, RESULTS, ROOT, describe_run, markdown_table, once, write_report, write_text
from plotting import COLORS, GRAY, finish, new_figure

from llama_jax.config import LlamaConfig, RopeScaling
from llama_jax.training.optimizer import OptimizerSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from llama_jax.data import Corpus
    from llama_jax.model.params import LlamaParams
    from llama_jax.tokenizers import Tokenizer
    from llama_jax.training.batch import Batch

TEXT = DATA / "text" / "war-and-peace.txt"
HEAD_DIM = 32
TURNING = 0.7  # share of the pairs of features that rotate at least once within L, as in Llama 2
DIGITS = 4
STATEMENT, QUESTION = "#{key}#", "#{key}"
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
SYMBOLS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789#."  # in rows that repeat themselves
SHARES = {"book": 0.5, "passkey": 0.3, "repetition": 0.2}  # of the rows, except in the first steps
WARM_UP = 20  # steps of the continued training

WAYS = ("none", "linear", "ntk", "dynamic", "by_parts", "yarn")
STAGES = {"zero-shot": "zero-shot", "continued": "after continued training"}


@dataclass(frozen=True)
class Size:
    """Sizes of training and measurements.

    Attributes:
      dim, layers: size of the model.
      length: L.
      factors: the longer lengths, as multiples of L.
      tokens: tokens per batch.
      repetition_steps, steps: training steps at L with only repeated rows, and then with all kinds of rows.
      continued_steps: training steps at each longer length.
      learning_rate: learning rate of the training; continued training uses a third of it.
      measured_tokens: tokens of the book for each loss.
      trials: pass-key trials at each depth; with a multiple of ten, each key is hidden equally often.
      rows: batch size of the measurements.
    """

    dim: int
    layers: int
    length: int
    factors: tuple[int, ...] = (2, 4, 8)
    tokens: int = 4096
    repetition_steps: int = 600
    steps: int = 1800
    continued_steps: int = 60
    learning_rate: float = 1e-3
    measured_tokens: int = 65_536
    trials: int = 20
    rows: int = 8


SIZES = {
    "cpu": Size(128, 4, 128),
    "test": Size(32, 1, 64, (2,), 256, 3, 5, continued_steps=2, measured_tokens=1024, trials=2, rows=4),
}


@dataclass(frozen=True)
class Arguments:
    """What to run."""

    size: Literal["cpu", "test"] = "cpu"
    """Size of everything: for two cores, or only to check that it works."""
    text: Path = TEXT
    """A book as a text file; its last tenth is held out."""
    seed: int = 0
    """Seed of the parameters and of all random choices."""
    workdir: Path = ROOT / "build" / "context_extension"
    """Folder of the trained model and of finished measurements, which are reused."""
    output: Path = RESULTS / "context_extension_cpu.json"
    """JSON file of the numbers, with a table (.md) and a picture (.png) next to it."""


@dataclass(frozen=True)
class Measurement:
    """Measurements of one scaling, at one length and stage.

    Attributes:
      way, factor, stage: the scaling, the length as a multiple of L, and the stage.
      loss: nats per byte in windows of factor * L.
      last_quarter: loss of the last quarter of each window.
      loss_within: loss of the same text in windows of L, with the same scaling.
      by_position: loss in windows of factor * L, averaged over every L / 8 positions.
      passkey: share of keys that greedy decoding finds at this length.
      margin: mean log ratio of a key's probability to that of other keys.
      by_depth: `passkey` for each of `DEPTHS`.
      seconds: time of training and measurement, set by `once`.
    """

    way: str
    factor: int
    stage: str
    loss: float
    last_quarter: float
    loss_within: float
    by_position: list[float]
    passkey: float
    margin: float
    by_depth: list[float]
    seconds: float = 0.0


def config_of(size: Size) -> LlamaConfig:
    """The configuration of the model that is trained at L."""
    from llama_jax.tokenizers.sentencepiece import BYTE_VOCABULARY

    return LlamaConfig(
        vocab_size=-(-BYTE_VOCABULARY // 64) * 64,
        dim=size.dim,
        n_layers=size.layers,
        n_heads=size.dim // HEAD_DIM,
        n_kv_heads=size.dim // HEAD_DIM,
        hidden_dim=size.dim * 8 // 3 // 8 * 8,
        max_seq_len=size.length,
        norm_eps=1e-5,
        # The pair at share x of all pairs rotates L / (2 pi theta ** x) times: once at x = TURNING.
        rope_theta=round((size.length / (2 * math.pi)) ** (1 / TURNING), 1),
        tie_embeddings=True,
    )


def extended(config: LlamaConfig, way: str, factor: int) -> LlamaConfig:
    """The configuration with this scaling, for contexts that are `factor` times as long."""
    trained, theta = config.max_seq_len, config.rope_theta
    yarn = RopeScaling("yarn", float(factor), original_max_seq_len=trained)
    if way == "ntk":  # the lowest frequency is divided by the factor, and the highest stays
        theta *= factor ** (config.head_dim / (config.head_dim - 2))
    scalings = {
        "linear": RopeScaling("linear", float(factor)),
        "dynamic": RopeScaling("dynamic", 2.0, original_max_seq_len=trained),
        "by_parts": replace(yarn, attention_factor=1.0),
        "yarn": yarn,
    }
    return replace(config, max_seq_len=factor * trained, rope_theta=theta, rope_scaling=scalings.get(way))


def batches(
    corpus: Corpus, tokenizer: Tokenizer, rows: int, length: int, steps: range, only_repetition: int, seed: int
) -> Iterator[Batch]:
    """Yield training batches; each depends only on the seed, the length and the number of the step.

    Args:
      steps: numbers of the steps; those below `only_repetition` have only rows that repeat themselves.
    """
    from llama_jax.training.batch import Batch

    row_types, shares = list(SHARES), list(SHARES.values())
    for step in steps:
        random = np.random.default_rng([seed, length, step])
        made = []
        for _ in range(rows):
            row_type = "repetition" if step < only_repetition else str(random.choice(row_types, p=shares))
            repeats = row_type == "repetition"
            made.append(repetition(random, length) if repeats else page(random, corpus, tokenizer, length, row_type))
        yield Batch(np.stack([tokens for tokens, _ in made]), loss_mask=np.stack([mask for _, mask in made]))


def repetition(random: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Repeated random letters int32[T + 1], and a mask of those to predict: all except the first occurrence."""
    period = int(random.integers(8, length // 2))
    symbols = np.frombuffer(SYMBOLS, np.uint8).astype(np.int32) + 3
    return np.resize(random.choice(symbols, period), length + 1), np.arange(length + 1) >= period


def page(
    random: np.random.Generator, corpus: Corpus, tokenizer: Tokenizer, length: int, row_type: str
) -> tuple[np.ndarray, np.ndarray]:
    """An excerpt of the book int32[T + 1], with a number that occurs twice for "passkey", and a mask: all are predicted."""
    first = int(random.integers(corpus.token_count - length))
    tokens = corpus.tokens[first : first + length + 1].astype(np.int32)
    if row_type == "passkey":
        key = str(random.integers(10 ** (DIGITS - 1), 10**DIGITS))
        said = np.array(tokenizer.encode(" " + STATEMENT.replace("{key}", key), bos=False), np.int32)
        places = np.sort(random.integers(0, length + 2 - 2 * len(said), 2))
        before, between, after = np.split(tokens[: length + 1 - 2 * len(said)], places)
        tokens = np.concatenate([before, said, between, said, after])
    return tokens, np.ones(length + 1, bool)


def train(
    config: LlamaConfig,
    params: LlamaParams,
    settings: OptimizerSettings,
    steps: int,
    source: Iterator[Batch],
    say: Callable[[int, float], None] = lambda step, loss: None,
) -> LlamaParams:
    """Return the parameters after these steps; exit if gradients were not finite."""
    import jax

    from llama_jax import init_state, make_optimizer, train_step

    optimizer = make_optimizer(settings, steps)
    compiled = jax.jit(partial(train_step, config, optimizer), donate_argnums=0)
    state = init_state(optimizer, jax.tree.map(jax.numpy.copy, params))
    for number, batch in enumerate(source, 1):
        state, metrics = compiled(state, batch)
        if number % max(steps // 12, 1) == 0:
            say(number, float(metrics["loss"]))
    if int(state.skipped):
        raise SystemExit(f"{int(state.skipped)} steps had no finite gradients; lower the learning rate")
    return state.params


def measure(
    config: LlamaConfig,
    params: LlamaParams,
    size: Size,
    held_out: Corpus,
    tokenizer: Tokenizer,
    seed: int,
    way: str,
    factor: int,
    stage: str,
) -> Measurement:
    """Measure loss and retrieval at factor * L."""
    from loss_by_length import cut_spans, window_losses
    from needle import needle

    length = factor * size.length
    spans = cut_spans(held_out.tokens, length, size.measured_tokens)
    losses = window_losses(config, params, spans, length, batch=size.rows)
    within = losses if factor == 1 else window_losses(config, params, spans, size.length, batch=size.rows)
    keys = needle(
        config,
        params,
        tokenizer,
        held_out.tokens,
        lengths=[length],
        depths=DEPTHS,
        trials=size.trials,
        seed=seed,
        statement=STATEMENT,
        question=QUESTION,
        digits=DIGITS,
        batch=size.rows,
    )
    return Measurement(
        way,
        factor,
        stage,
        float(losses.mean()),
        float(losses[:, length * 3 // 4 :].mean()),
        float(within.mean()),
        losses.mean(axis=0).reshape(-1, size.length // 8).mean(axis=1).tolist(),
        float(keys.grid("exact").mean()),
        float(keys.grid("margin").mean()),
        keys.grid("exact")[:, 0].tolist(),
    )


def read_book(path: Path, size: Size, tokenizer: Tokenizer) -> tuple[Corpus, Corpus]:
    """The training text and the held-out last tenth, each as one document."""
    from llama_jax.data import Corpus

    if not path.is_file():
        raise SystemExit(f"--text {path} does not exist; pass a book as a text file")
    content = path.read_bytes()
    tokens = np.array(tokenizer.encode(content.decode("utf-8", "replace"), bos=False), np.uint16)
    cut = len(tokens) - len(tokens) // 10
    longest = size.length * max(size.factors)
    if len(tokens) - cut <= size.measured_tokens + longest:
        raise SystemExit(
            f"--text {path} is too short: its last tenth has {len(tokens) - cut:,} bytes, but more than"
            f" {size.measured_tokens + longest:,} are needed; pass a longer book"
        )
    digest = hashlib.sha256(content).hexdigest()

    def whole(part: np.ndarray) -> Corpus:
        return Corpus(part, np.array([0]), np.array([len(part)]), np.array([len(part)]), tokenizer.vocab_size, digest)

    return whole(tokens[:cut]), whole(tokens[cut:])


def prepare(arguments: Arguments) -> Path:
    """Return the folder of this run; exit if it holds another run."""
    folder = arguments.workdir / arguments.size
    folder.mkdir(parents=True, exist_ok=True)
    run = {"size": asdict(SIZES[arguments.size]), "seed": arguments.seed, "text": str(arguments.text.resolve())}
    stored = once(folder / "settings.json", lambda: run)
    if {name: stored[name] for name in run} != json.loads(json.dumps(run)):
        raise SystemExit(f"{folder} belongs to a run with other settings; delete it or choose another --workdir")
    return folder


def run_all(arguments: Arguments, folder: Path) -> list[Measurement]:
    """The model and all measurements, reusing those in the folder; prints a line for each."""
    import jax

    import llama_jax
    from llama_jax.tokenizers.sentencepiece import byte_tokenizer

    size, tokenizer = SIZES[arguments.size], byte_tokenizer()
    config = config_of(size)
    corpus, held_out = read_book(arguments.text, size, tokenizer)
    make = partial(batches, corpus, tokenizer, seed=arguments.seed)

    base = folder / "model"
    if base.exists():
        params = llama_jax.load(base, "float32").params
    else:
        print(f"training {llama_jax.parameter_count(config):,} parameters at length {size.length}", flush=True)
        began, steps = time.perf_counter(), size.repetition_steps + size.steps

        def say(step: int, loss: float) -> None:
            rows = "repetition only" if step <= size.repetition_steps else "all kinds of rows"
            print(f"step {step:>5} of {steps}  loss {loss:.3f}  {rows}  {time.perf_counter() - began:.0f} s", flush=True)

        settings = OptimizerSettings(learning_rate=size.learning_rate, warmup_steps=min(50, steps // 4), b2=0.99)
        source = make(size.tokens // size.length, size.length, range(steps), size.repetition_steps)
        trained = train(config, llama_jax.init(config, jax.random.key(arguments.seed)), settings, steps, source, say)
        llama_jax.save(base, config, trained, None)
        params = llama_jax.load(base, "float32").params

    print(
        f"{'way':<10}{'length':>7} {'stage':<11}{'loss':>8}{'end':>8}{'within L':>10}{'keys':>7}{'margin':>8}{'seconds':>9}"
    )
    results = []
    plan = [("none", 1, "zero-shot")] + [(way, f, stage) for f in size.factors for way in WAYS for stage in STAGES]
    for way, factor, stage in plan:

        def run(way: str = way, factor: int = factor, stage: str = stage) -> dict[str, Any]:
            longer, extended_params = extended(config, way, factor), params
            if stage == "continued":
                first, length = size.repetition_steps + size.steps, factor * size.length
                steps = range(first, first + size.continued_steps)  # continue after the batches of the training
                source = make(max(size.tokens // length, 1), length, steps, 0)
                warmup = min(WARM_UP, size.continued_steps // 2)
                settings = OptimizerSettings(learning_rate=size.learning_rate / 3, warmup_steps=warmup, b2=0.99)
                extended_params = train(longer, params, settings, size.continued_steps, source)
            return asdict(measure(longer, extended_params, size, held_out, tokenizer, arguments.seed, way, factor, stage))

        result = Measurement(**once(folder / f"{way}-{factor}-{stage}.json", run))
        results.append(result)
        print(
            f"{way:<10}{factor * size.length:>7} {stage:<11}{result.loss:8.3f}{result.last_quarter:8.3f}"
            f"{result.loss_within:10.3f}{result.passkey:7.0%}{result.margin:8.2f}{result.seconds:9.1f}",
            flush=True,
        )
    return results


def as_markdown(size: Size, results: list[Measurement]) -> str:
    """The tables as text."""
    table = {(row.way, row.factor, row.stage): row for row in results}
    base = table["none", 1, "zero-shot"]
    lines = [f"# Context extension from L = {size.length}", ""]
    lines += [f"Trained at L: {base.loss:.3f} nats per byte within L, {base.passkey:.0%} of the pass keys found.", ""]
    columns: list[tuple[str, Callable[[Measurement], str]]] = [
        ("Loss, nats per byte", lambda row: f"{row.loss:.3f}"),
        ("Loss of the last quarter", lambda row: f"{row.last_quarter:.3f}"),
        ("Loss within L under the same scaling", lambda row: f"{row.loss_within:.3f}"),
        ("Pass keys found", lambda row: f"{row.passkey:.0%}"),
    ]
    heads = [f"{factor}L {stage}" for stage in STAGES.values() for factor in size.factors]
    for title, cell in columns:
        rows = [[way, *(cell(table[way, factor, stage]) for stage in STAGES for factor in size.factors)] for way in WAYS]
        lines += [f"## {title}", "", markdown_table(["", *heads], rows), ""]
    return "\n".join(lines)


def draw(size: Size, results: list[Measurement]) -> Figure:
    """Draw loss by position at each length, zero-shot above and after continued training below; on the right, keys found.

    The dotted line is L; the gray line is the loss of the model within L over the same text.
    """
    table = {(row.way, row.factor, row.stage): row for row in results}
    base, panels = table["none", 1, "zero-shot"], len(size.factors) + 1
    figure = new_figure(3.4 * panels, 6.6)
    grid = figure.subplots(2, panels, squeeze=False)
    lowest = min(value for row in results for value in row.by_position)
    for axes_of_stage, (stage, title) in zip(grid, STAGES.items(), strict=True):
        for axes, factor in zip(axes_of_stage, size.factors, strict=False):
            for way, color in zip(WAYS, COLORS, strict=False):
                losses = np.array(table[way, factor, stage].by_position).reshape(8, -1).mean(axis=1)
                positions = factor * size.length / 8 * (np.arange(8) + 0.5)
                axes.plot(positions, losses, ".-", color=color, lw=1.4, ms=5, label=way)
            axes.axvline(size.length, color=GRAY, lw=1, ls=(0, (1, 2)))
            axes.axhline(table["none", factor, "zero-shot"].loss_within, color=GRAY, lw=0.8)
            # Larger losses are cut off: they would hide the differences between the others.
            axes.set(title=f"{factor}L, {title}", xlabel="position", ylim=(lowest - 0.1, base.loss + 1.0))
        keys = axes_of_stage[-1]
        for way, color in zip(WAYS, COLORS, strict=False):
            shares = [base.passkey, *(table[way, factor, stage].passkey for factor in size.factors)]
            keys.plot([1, *size.factors], shares, "o-", color=color, lw=1.4, ms=4, label=way)
        keys.set_xscale("log", base=2)
        keys.set_xticks([1, *size.factors], ["L", *(f"{factor}L" for factor in size.factors)])
        keys.set(title=f"Pass keys found, {title}", ylim=(-0.03, 1.03))
        axes_of_stage[0].set_ylabel("nats per byte", color=GRAY)
    finish(*grid.flat, legend=False)
    grid[0, -1].legend(frameon=False, fontsize=8)
    return figure


def main(arguments: Arguments) -> None:
    size, output = SIZES[arguments.size], arguments.output
    results = run_all(arguments, prepare(arguments))
    report = describe_run(arguments, "numpy") | {"size": asdict(size), "rope_theta": config_of(size).rope_theta}
    write_report(output, report | {"found": [asdict(row) for row in results]})
    write_text(output.with_suffix(".md"), as_markdown(size, results))
    draw(size, results).savefig(output.with_suffix(".png"))
    print(f"\nwrote {output}, and .md and .png next to it")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
