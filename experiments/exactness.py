"""Do other rows change a row's tokens or log-probabilities, with and without `exact`, and what does `exact` cost?

Prompts of 1 token or more from a text are continued, greedily and by sampling: first alone, then together with others. For
every way of sharing a program the table counts the rows in which a token, or a bit of a log-probability, differs. The cost
is a ratio of times for the same work, measured in turns.

    pip install -e ".[serve]"
    python experiments/exactness.py --text shakespeare.txt
    python experiments/exactness.py --text shakespeare.txt --model SmolLM2-135M-Instruct --prompts 100 --longest 500

  batches   in batches of 2 to 64 rows, shuffled.
  chunks    in the same batches, with prompts prefilled in chunks of 40 tokens.
  drafts    in the same batches, with tokens drafted by prompt lookup and verified together.
  served    by an engine with 16 rows, in which requests come and go.
  full      by an engine whose cache is as small as possible: requests release their pages and are prefilled again.
  cached    by the first engine again, every request twice: the second time most of the prompt is in its cache.
  trainer   tokens of sampled answers whose log-probability in a training step differs in bits from the sampler's.

With --training: do devices change the bits of losses, parameters and the optimizer's state, with and without `exact=true`?
The same small recipe is trained on each mesh of simulated devices, with pmap, and in two processes. It is also stopped on
each and resumed on the next.

    python experiments/exactness.py --text shakespeare.txt --training
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from measuring import describe_run, read_text, write_report

import llama_jax
from llama_jax import Batch, ComputeOptions, OptimizerSettings, Sampling, StepOptions, init_state, make_optimizer, train_step
from llama_jax.formats.loading import bundled
from llama_jax.formats.step_dirs import CHECKPOINTS
from llama_jax.inference import compiled_decode
from llama_jax.inference.rollouts import Completions, RolloutOptions, RolloutPrompts, roll_out
from llama_jax.inference.speculation import PromptLookup
from llama_jax.parallel.mesh import parse_mesh
from llama_jax.runs.checkpoint_manager import CheckpointManager
from llama_jax.runs.overrides import override
from llama_jax.runs.recipes import find as find_recipe
from llama_jax.runs.tasks.grpo import answer_rows
from llama_jax.serving.engine import Engine
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.requests import GenerationRequest
from llama_jax.training.exact_gradients import VIRTUAL_SHARDS
from llama_jax.training.logprobs import token_logprobs
from llama_jax.training.loss import LossOptions

FEW = 16  # requests, after which the same requests are repeated
Row = tuple[list[int], list[int]]  # tokens, and the bits of their log-probabilities


@dataclass(frozen=True)
class Arguments:
    """Measure the effect of other rows, with and without exact."""

    text: Path
    """Text from which prompts are taken."""
    model: Path | None = None
    """Model; the bundled one by default."""
    formats: tuple[str, ...] = ("float32", "bfloat16", "int8", "q4_0")
    prompts: int = 1000
    longest: int = 2000
    """Maximum tokens of a prompt."""
    new_tokens: int = 16
    price: bool = True
    """Also measure times."""
    training: bool = False
    """Measure training instead of generation; write exactness_training_cpu.json next to `output`."""
    steps: int = 50
    stop: int = 20
    """The step at which training moves to other devices."""
    repetitions: int = 7
    output: Path = Path("experiments/results/exactness_cpu.json")


@dataclass(frozen=True)
class Work:
    """A model, the prompts it continues, and the settings."""

    model: tuple[Any, Any]
    prompts: list[list[int]]
    samplings: list[Sampling]
    new_tokens: int
    compute: ComputeOptions

    def continued(self, rows: list[int], **options: Any) -> list[Row]:
        sampling = jax.tree.map(lambda *values: list(values), *(self.samplings[i] for i in rows))
        answers = llama_jax.generate(
            *self.model,
            [self.prompts[i] for i in rows],
            max_new_tokens=self.new_tokens,
            sampling=sampling,
            compute=self.compute,
            **options,
        )
        return [(answer.tokens, in_bits(answer.logprobs)) for answer in answers]

    def alone(self) -> list[Row]:
        return [self.continued([i])[0] for i in range(len(self.prompts))]

    def batches(self, **options: Any) -> list[Row]:
        rng, rows_by_prompt = random.Random(0), dict[int, Row]()
        left = rng.sample(range(len(self.prompts)), len(self.prompts))
        while left:
            size = rng.choice([2, 3, 8, 16, 64])
            rows, left = left[:size], left[size:]
            rows_by_prompt |= dict(zip(rows, self.continued(rows, **options), strict=True))
        return [rows_by_prompt[i] for i in range(len(self.prompts))]

    def chunks(self) -> list[Row]:
        with other_chunks(40):
            return self.batches()

    def drafts(self) -> list[Row]:
        return self.batches(draft=PromptLookup())

    def engine(self, **options: Any) -> Engine:
        context = max(map(len, self.prompts)) + self.new_tokens
        return Engine(*self.model, EngineOptions(context=context, compute=self.compute, most_waiting=10**6, **options))

    def served(self, engine: Engine, again: bool = False) -> list[Row]:
        """The rows of all prompts; with `again` each request is repeated a few requests later, and the second rows count."""
        rng, received = random.Random(1), [list[Any]() for _ in self.prompts]
        left = rng.sample(range(len(self.prompts)), len(self.prompts))
        if again:
            left = [i for first in range(0, len(left), FEW) for i in 2 * left[first : first + FEW]]
        while left or engine.busy:
            for i in [left.pop() for _ in range(min(rng.randrange(4), len(left)))]:
                received[i] = []
                options = {"prompt": self.prompts[i], "sampling": self.samplings[i]}
                request = GenerationRequest(max_new_tokens=self.new_tokens, **options)  # type: ignore[arg-type]
                engine.submit(request, lambda update, to=received[i]: to.extend(update.tokens))  # type: ignore[misc]
            engine.step()
        return [([x.id for x in tokens], in_bits([x.logprob for x in tokens])) for tokens in received]


def in_bits(logprobs: list[float]) -> list[int]:
    return np.asarray(logprobs, np.float32).view(np.int32).tolist()


@contextmanager
def other_chunks(size: int) -> Iterator[None]:
    before = compiled_decode.MAX_PREFILL_CHUNK
    compiled_decode.MAX_PREFILL_CHUNK = size
    try:
        yield
    finally:
        compiled_decode.MAX_PREFILL_CHUNK = before


def compare(work: Work) -> dict[str, Any]:
    """For each way of sharing a program: rows whose tokens differ, and rows whose bits differ."""
    alone = work.alone()
    engine = work.engine()
    full = work.engine(cache_tokens=max(map(len, work.prompts)) + work.new_tokens)
    ways: dict[str, Callable[[], list[Row]]] = {
        "batches": work.batches,
        "chunks": work.chunks,
        "drafts": work.drafts,
        "served": partial(work.served, engine),
        "full": partial(work.served, full),
        "cached": partial(work.served, engine, again=True),
    }
    results = {}
    for name, run in ways.items():
        rows = run()
        tokens = sum(row[0] != other[0] for row, other in zip(rows, alone, strict=True))
        bits = sum(row != other for row, other in zip(rows, alone, strict=True))
        results[name] = {"rows": len(rows), "other tokens": tokens, "other bits": bits}
        print(f"  {name:8} {tokens} rows with other tokens, {bits} with other bits", flush=True)
    results["preempted"], results["cached tokens"] = full.stats().preempted, engine.stats().cached_tokens
    engine.close()
    full.close()
    return results


def price(work: Work, repetitions: int) -> dict[str, float]:
    """Time ratios of exact to normal work, medians of pairs."""
    prompt = (work.prompts[-1] * 512)[:480]
    ratios = {}
    for name, rows, length, new in (("decode 1", 1, 16, 64), ("decode 8", 8, 16, 64), ("prefill", 1, 480, 1)):
        pairs = []
        for repetition in range(repetitions + 1):
            seconds = []
            for exact in (True, False) if repetition % 2 else (False, True):
                begun = time.perf_counter()
                llama_jax.generate(
                    *work.model, [prompt[:length]] * rows, max_new_tokens=new, compute=ComputeOptions(exact=exact)
                )
                seconds.append((exact, time.perf_counter() - begun))
            if repetition:  # the first compiles
                by = dict(seconds)
                pairs.append(by[True] / by[False])
        ratios[name] = statistics.median(pairs)
        print(f"  {name}: {ratios[name]:.2f} times as long", flush=True)
    return ratios


def trainer(work: Work) -> dict[str, int]:
    """Sample answers in groups of 4, and count tokens whose log-probability in a training step has other bits.

    Also count tokens whose ratio in the first update is not 1.
    """
    prompts = [prompt for prompt in work.prompts if len(prompt) <= 200][-8:]
    padded = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths, seeds = np.asarray([len(prompt) for prompt in prompts], np.int32), np.arange(4 * len(prompts), dtype=np.uint32)
    options, (config, params) = RolloutOptions(4, 2 * work.new_tokens, 0.8), work.model
    sample = jax.jit(partial(roll_out, config, options=options, compute=work.compute))
    answers = Completions(*map(np.asarray, sample(params, RolloutPrompts(padded, lengths, seeds))))
    length = padded.shape[1] + options.max_new_tokens - 1
    rows = answer_rows(prompts, answers, np.ones(len(seeds), bool), length)
    measure = jax.jit(partial(token_logprobs, config, options=LossOptions(work.compute), temperature=options.temperature))
    trained, learned = np.asarray(measure(params, rows.batch)), np.asarray(rows.batch.loss_mask)[:, 1:]
    other = (trained.view(np.int32) != rows.sampler_logprobs.view(np.int32)) & learned
    ratios = np.exp(trained - rows.sampler_logprobs)[learned]
    counts = {"tokens": int(learned.sum()), "other bits": int(other.sum()), "other ratios": int((ratios != 1).sum())}
    print(f"  trainer  {counts}", flush=True)
    return counts


def some_prompts(arguments: Arguments, tokenizer: Any, context: int) -> list[list[int]]:
    """Excerpts of the text, with log-uniform lengths."""
    ids = tokenizer.encode(read_text(arguments.text)[: 40 * arguments.longest * 8])
    rng, longest = random.Random(2), min(arguments.longest, context - arguments.new_tokens)
    lengths = np.exp(np.linspace(0, np.log(longest), arguments.prompts)).astype(int)
    starts = [rng.randrange(max(1, len(ids) - longest)) for _ in lengths]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def main(arguments: Arguments) -> None:
    report = describe_run(arguments, "llama_jax")
    for quant_format in arguments.formats:
        dtype = jnp.bfloat16 if quant_format == "bfloat16" else jnp.float32
        quantized = None if quant_format in ("float32", "bfloat16") else quant_format
        config, params, tokenizer = llama_jax.load(arguments.model or bundled(), dtype, quantize=quantized)
        prompts = some_prompts(arguments, tokenizer, config.max_seq_len)
        samplings = [Sampling(temperature=float(i % 2), top_p=0.95, seed=i) for i in range(len(prompts))]
        work = Work((config, params), prompts, samplings, arguments.new_tokens, ComputeOptions(exact=True))
        results = report[quant_format] = {}
        for name, variant in (("exact", work), ("as usual", replace(work, compute=ComputeOptions()))):
            print(f"{quant_format}, {name}", flush=True)
            results[name] = compare(variant) | {"trainer": trainer(variant)}
        if arguments.price:
            results["price"] = price(work, arguments.repetitions)
        write_report(arguments.output, report)
    print(table(report, arguments.formats))


def table(report: dict[str, Any], formats: tuple[str, ...]) -> str:
    ways = ["batches", "chunks", "drafts", "served", "full", "cached"]
    lines = [f"| | {' | '.join(ways)} | trainer | decode 1 | decode 8 | prefill |", "|---" * (len(ways) + 5) + "|"]
    for quant_format in formats:
        for name in ("exact", "as usual"):
            counts = report[quant_format][name]
            cells = [f"{counts[way]['other tokens']} / {counts[way]['other bits']}" for way in ways]
            cells.append(f"{counts['trainer']['other bits']} of {counts['trainer']['tokens']}")
            times = report[quant_format].get("price", {}) if name == "exact" else {}
            cells += [f"{times[work]:.2f}" if work in times else "" for work in ("decode 1", "decode 8", "prefill")]
            lines.append(f"| {quant_format}, {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


# --- training ------------------------------------------------------------------------------------------------------------

ON_DEVICES = {  # options of `llama-jax train`, by the name of a row; the last row uses two processes
    **{mesh: ["--mesh", mesh] for mesh in ("data=1", "data=2", "data=4", "data=8", "fsdp=2", "fsdp=8", "data=2,fsdp=4")},
    "pmap over 8": ["--mesh", "data=8", "--backend", "pmap"],
    "two processes, data=2,fsdp=4": ["--mesh", "data=2,fsdp=4"],
}
# Constant learning rates, so that a run can stop at a step and be extended.
SMALL_RUN = [
    "vocabulary=byte",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=3",
    "evaluate_every=0",
    "save_every=0",
    "log_every=1",
    "prompts=[]",
    "reading.longest=4000",  # a book is one document, which could not be split for validation
]
STEPS_TIMED = (("stories-260k", 16, 256), ("stories-15m", 8, 256), ("stories-15m", 16, 256))  # model, rows, tokens per row


def train_in_processes(where: str, changes: list[str], folder: Path, text: Path) -> None:
    """Train or resume, in one process with the devices of the mesh, or in two processes."""
    options = ON_DEVICES[where]
    processes = 2 if where.startswith("two") else 1
    devices = parse_mesh(options[1]).devices // processes
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [sys.executable, "-m", "llama_jax", "train", "tiny", "--workdir", str(folder), "--data", str(text), "--resume"]
    command += [*options, *SMALL_RUN, *changes]
    joining = [[]] if processes == 1 else [["--coordinator", address, "--processes", "2", "--process-id", i] for i in "01"]
    running = [subprocess.Popen([*command, *join], env=environment, stdout=subprocess.DEVNULL) for join in joining]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit(f"training on {where} failed")


def bits_of_run(folder: Path, changes: list[str]) -> tuple[list[Any], list[bytes]]:
    """The loss and the gradient norm of each step, and the arrays of the last state."""
    recipe = override(find_recipe("tiny"), [*SMALL_RUN, *changes])
    optimizer = make_optimizer(recipe.optimizer, recipe.steps)
    shapes = jax.eval_shape(lambda key: init_state(optimizer, llama_jax.init(recipe.model, key)), jax.random.key(0))
    with CheckpointManager(folder / CHECKPOINTS) as checkpoints:
        state, _ = checkpoints.restore(shapes)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    losses = [(line["step"], line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "train"]
    return losses, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def compare_training(steps: int, stop: int, text: Path, folder: Path) -> dict[str, Any]:
    """For every mesh: whether a run has the same bits as on one device, and whether an exact run that is stopped on this
    mesh and resumed on the next one has them."""
    results: dict[str, Any] = {}
    for exact in (True, False):
        names, changes, expected = list(ON_DEVICES), [f"exact={exact}"], None
        for where, other in zip(names, [*names[1:], names[0]], strict=True):
            lives = {"whole": [(where, steps)]} | ({"moved": [(where, stop), (other, steps)]} if exact else {})
            for name, parts in lives.items():
                run_folder = folder / f"{name}-{exact}-{names.index(where)}"
                for devices, last in parts:
                    train_in_processes(devices, [*changes, f"steps={last}"], run_folder, text)
                bits = bits_of_run(run_folder, [*changes, f"steps={steps}"])
                expected = expected or bits
                same = {
                    "steps": sum(a == b for a, b in zip(bits[0], expected[0], strict=True)),
                    "state": bits[1] == expected[1],
                }
                results.setdefault("exact" if exact else "as usual", {}).setdefault(where, {})[name] = same
                print(f"{'exact' if exact else 'as usual'}, {where}, {name}: {same}", flush=True)
    return results


def training_price(repetitions: int) -> dict[str, float]:
    """Time ratios of an exact to a normal step on one device, medians of pairs."""
    ratios = {}
    for name, rows, length in STEPS_TIMED:
        config, optimizer = llama_jax.preset(name), make_optimizer(OptimizerSettings(), 1000)
        batch = Batch(np.random.default_rng(0).integers(0, config.vocab_size, (rows, length + 1), np.int32))
        state = init_state(optimizer, llama_jax.init(config, jax.random.key(0)))
        steps = {}
        for shards in (VIRTUAL_SHARDS, 0):
            options = StepOptions(virtual_shards=shards)
            steps[shards] = jax.jit(partial(train_step, config, optimizer, options=options)).lower(state, batch).compile()
        pairs = []
        for repetition in range(repetitions + 1):
            seconds = {}
            for shards in (VIRTUAL_SHARDS, 0) if repetition % 2 else (0, VIRTUAL_SHARDS):
                begun = time.perf_counter()
                jax.block_until_ready(steps[shards](state, batch))
                seconds[shards] = time.perf_counter() - begun
            pairs += [seconds[VIRTUAL_SHARDS] / seconds[0]] if repetition else []  # the first is a warm-up
        ratios[f"{name}, {rows} x {length}"] = statistics.median(pairs)
        print(f"a step of {name}, {rows} x {length}: {ratios[f'{name}, {rows} x {length}']:.2f} times as long", flush=True)
    return ratios


def main_of_training(arguments: Arguments) -> None:
    report = describe_run(arguments, "llama_jax")
    output = arguments.output.with_name("exactness_training_cpu.json")
    if arguments.price:
        report["price"] = training_price(arguments.repetitions)
    with tempfile.TemporaryDirectory() as folder:
        report |= compare_training(arguments.steps, arguments.stop, arguments.text, Path(folder))
    write_report(output, report)
    print("| | exact | exact, resumed on the next | not exact |\n|---|---|---|---|")
    for where in ON_DEVICES:
        lives = (("exact", "whole"), ("exact", "moved"), ("as usual", "whole"))
        cells = [report[variant][where][life] for variant, life in lives]
        shown = [f"{cell['steps']} steps, {'same' if cell['state'] else 'different'} state" for cell in cells]
        print(f"| {where} | {' | '.join(shown)} |")


if __name__ == "__main__":
    chosen = tyro.cli(Arguments)
    (main_of_training if chosen.training else main)(chosen)
