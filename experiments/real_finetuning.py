"""Fine-tuning of a real model on two cores: chats by LoRA, then GRPO on GSM8K.

    python experiments/real_finetuning.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data gsm8k
    python experiments/real_finetuning.py --model ... --data ... --size small    minutes: the same stages, too short to learn

The model is any instruct model with a chat template; DATA is a folder with GSM8K's train.jsonl and test.jsonl. Only problems
whose chats fit the rows below are used: the shorter half of GSM8K.

sft    LoRA on chats: the problem is the user's message; GSM8K's solution, without its calculator annotations, is the
       assistant's message. Measured: loss on chats of the test split.
grpo   The merged model answers problems of the training split that were not in the chats. The reward (`judged`) is 1 for the
       right number after "####" at the end, 0.2 for another number there, otherwise 0. Measured: the mean reward, the share
       of answers in the format, and the share of right answers on held-out problems of the test split, before and after; and
       the reward of each step.

A model of 135M parameters solves few of these problems in any case. Most of the attainable reward is for the format, and
there are few chats so that GRPO still has something to learn.

Every stage is a run of `llama_jax.train`, as on the command line. A finished stage is not repeated; a stage stopped by
SIGTERM resumes. Writes ``experiments/results/real_finetuning_cpu.json``, a table in ``.md`` and a picture in ``.png``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tyro
from finetune import curves, decaying, read_lines, write_lines
from measuring import DATA, RESULTS, ROOT, describe_run, markdown_table, once, write_report, write_text
from plotting import COLORS, finish, new_figure, smooth

import llama_jax
from llama_jax import Lora, Recipe
from llama_jax.runs import recipes
from llama_jax.runs.log import Log
from llama_jax.runs.recipe import RewardSettings
from llama_jax.tokenizers import encode_chat, reply_ends, resolve_format
from llama_jax.tokenizers.chat import Renderer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYSTEM = "Solve the problem in short steps. End with #### and the number."
PROMPT = 96  # maximum tokens of a problem in its chat
ANSWER = 64  # maximum tokens of a solution
GROUP = 8  # answers to a problem
FORMAT = 0.2  # reward for a number at the end
FINAL = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)\s*$")
ANNOTATION = re.compile(r"<<[^>]*>>")


@dataclass(frozen=True)
class Size:
    """Amounts: chats to train on, held-out problems for each measurement, and steps."""

    chats: int = 160
    held_out: int = 48
    sft_steps: int = 40
    grpo_steps: int = 30


SIZES = {"full": Size(), "small": Size(chats=16, held_out=4, sft_steps=2, grpo_steps=2)}


@dataclass(frozen=True)
class Arguments:
    """What to run."""

    model: Path
    """An instruct model of any supported format."""
    data: Path = DATA / "gsm8k"
    """A folder with train.jsonl and test.jsonl of GSM8K."""
    size: Literal["full", "small"] = "full"
    seed: int = 0
    workdir: Path = ROOT / "build" / "real_finetuning"
    """Folder of the data and the runs; existing ones are reused."""
    output: Path = RESULTS / "real_finetuning_cpu.json"
    """The figures; the table and the picture are next to it."""


def final_number(text: str) -> float | None:
    """The number after #### at the end of a text, or None."""
    match = FINAL.search(text)
    return None if match is None else float(match[1].replace(",", ""))


def judged(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """The reward: 1 for the right number after "####" at the end, `FORMAT` for another number there, else 0."""
    numbers = map(final_number, completions)
    return [0.0 if n is None else 1.0 if n == float(right) else FORMAT for n, right in zip(numbers, answer, strict=True)]


def problems(path: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """The problems of a GSM8K file that fit, each as a prompt, a solution and the correct number."""
    problems_that_fit, format, renderer = [], resolve_format(tokenizer, "auto"), Renderer()
    for line in read_lines(path):
        solution = ANNOTATION.sub("", line["answer"])
        number = solution.rpartition("####")[2].strip().replace(",", "")
        prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": line["question"]}]
        fits = len(encode_chat(tokenizer, prompt, format, renderer)) <= PROMPT
        if fits and len(tokenizer.encode(solution)) < ANSWER:
            problems_that_fit.append({"prompt": prompt, "solution": solution, "answer": number})
    renderer.close()
    return problems_that_fit


def short(recipe: Recipe, steps: int, rank: int, rate: float, seed: int) -> Recipe:
    """A recipe with adapters on a frozen model and one checkpoint at the end."""
    return replace(
        recipe,
        steps=steps,
        lora=Lora(rank=rank),
        optimizer=decaying("adamw", rate, steps),
        remat="none",
        save_every=0,
        log_every=1,
        seed=seed,
    )


def sft(size: Size, seed: int) -> Recipe:
    """Two rows of 256 tokens per step, each with several chats."""
    recipe = replace(recipes.sft(), batch=2, length=256, dtype="float32", evaluate_every=max(size.sft_steps // 2, 1))
    return short(recipe, size.sft_steps, 16, 2e-4, seed)


def grpo(size: Size, seed: int) -> Recipe:
    """Two problems per step, 8 answers to each; in bfloat16, which is faster if the CPU has instructions for it."""
    rewards = RewardSettings(functions=(f"{__file__}:judged",), group=GROUP, answer=ANSWER, held=8, samples=1)
    length = PROMPT + ANSWER - 1
    recipe = replace(recipes.grpo(), batch=2 * GROUP, length=length, dtype="bfloat16", rewards=rewards, evaluate_every=0)
    return short(recipe, size.grpo_steps, 16, 3e-4, seed)


def measured(model: Path, lines: Sequence[dict[str, Any]], seed: int, adapter: Path | None = None) -> dict[str, float]:
    """Mean reward and shares of four answers to each problem, sampled without truncation as in training."""
    config, params, tokenizer = llama_jax.load(model, "float32", adapter=adapter)
    format = resolve_format(tokenizer, "auto")
    asked = [line for line in lines for _ in range(4)]
    texts: list[str] = []
    for begin in range(0, len(asked), 32):
        some = asked[begin : begin + 32]
        made = llama_jax.generate(
            config,
            params,
            [encode_chat(tokenizer, line["prompt"], format) for line in some],
            max_new_tokens=ANSWER,
            sampling=llama_jax.Sampling(temperature=1.0, seed=[(seed << 20) + begin + i for i in range(len(some))]),
            stop_tokens=reply_ends(tokenizer, format),
        )
        texts += [tokenizer.decode(answer.tokens) for answer in made]
    rewards = judged(texts, [line["answer"] for line in asked])
    return {
        "reward": mean(rewards),
        "format": mean(reward > 0 for reward in rewards),
        "right": mean(reward == 1 for reward in rewards),
        "answers": len(rewards),
    }


def run(size: Size, arguments: Arguments, folder: Path) -> dict[str, Any]:
    """All stages, in a folder; finished stages are not repeated."""
    log, seed, chats, floats, merged = Log(), arguments.seed, folder / "chats.jsonl", folder / "base", folder / "merged"

    def train(name: str, recipe: Recipe, data: Path, held_out: Path, weights: Path) -> None:
        log.line(f"{name}:")
        done = llama_jax.train(recipe, folder / name, data, validation_data=held_out, weights=weights, resume=True, log=log)
        if done.stopped is not None:
            raise SystemExit(1)

    def data() -> dict[str, Any]:
        llama_jax.convert(arguments.model, floats, dtype="float32", overwrite=True)
        tokenizer = llama_jax.load_tokenizer(floats)
        train, test = (problems(arguments.data / f"{split}.jsonl", tokenizer) for split in ("train", "test"))
        random.Random(seed).shuffle(train)
        for name, some in (("chats", train[: size.chats]), ("held_chats", test[: size.held_out])):
            solved = ([*line["prompt"], {"role": "assistant", "content": line["solution"]}] for line in some)
            write_lines(folder / f"{name}.jsonl", ({"messages": messages} for messages in solved))
        for name, some in (("asked", train[size.chats :]), ("held", test[: size.held_out])):
            write_lines(folder / f"{name}.jsonl", ({key: line[key] for key in ("prompt", "answer")} for line in some))
        return {"train": len(train), "test": len(test)}

    def sft_stage() -> dict[str, Any]:
        train("sft", sft(size, seed), chats, folder / "held_chats.jsonl", floats)
        config, params, tokenizer = llama_jax.load(floats, "float32")
        adapter = llama_jax.load_adapter(folder / "sft", config)
        llama_jax.save(merged, config, llama_jax.merge(params, adapter.params, adapter.lora), tokenizer, overwrite=True)
        curve = curves(folder / "sft", "train", "loss") | {"held": curves(folder / "sft", "validation", "loss")}
        return measured(merged, held_out, seed) | {"curve": curve}

    def grpo_stage() -> dict[str, Any]:
        train("grpo", grpo(size, seed), folder / "asked.jsonl", folder / "held.jsonl", merged)
        curve = curves(folder / "grpo", "train", "reward", "length", "stopped", "flat")
        return measured(merged, held_out, seed, adapter=folder / "grpo") | {"curve": curve}

    results: dict[str, Any] = {"data": once(folder / "data.json", data)}
    held_out = read_lines(folder / "held.jsonl")
    results["base"] = once(folder / "base.json", lambda: measured(floats, held_out, seed))
    results["sft"] = once(folder / "sft.json", sft_stage)
    results["grpo"] = once(folder / "grpo.json", grpo_stage)
    return results


def as_table(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    results = report["runs"]
    lines = [
        "# Fine-tuning of a real model",
        "",
        f"{report['settings']['model']}; {report['machine']['cpu']}, {report['machine']['cores']} cores.",
        "",
    ]
    lines += [
        f"{results['base']['answers']} answers to held-out problems of GSM8K, sampled from the whole distribution.",
        "",
    ]
    rows = []
    for name in ("base", "sft", "grpo"):
        row = results[name]
        rows.append(
            [name, f"{row['reward']:.3f}", f"{row['format']:.1%}", f"{row['right']:.1%}", f"{row['seconds'] / 60:.0f}"]
        )
    lines.append(markdown_table(("model", "reward", "in the format", "right", "minutes of the stage"), rows))
    held_out, reward = results["sft"]["curve"]["held"]["loss"], results["grpo"]["curve"]["reward"]
    lines += ["", f"Loss on held-out chats after each half of SFT: {', '.join(f'{loss:.3f}' for loss in held_out)}."]
    lines += [f"GRPO, mean reward of the first and the last ten steps: {mean(reward[:10]):.3f}, {mean(reward[-10:]):.3f}."]
    return "\n".join(lines) + "\n"


def draw(report: dict[str, Any]) -> Figure:
    """Draw the loss of each step of SFT, and the reward of each step of GRPO with the rewards of held-out problems."""
    figure = new_figure(10, 3.6)
    left, right = figure.subplots(1, 2)
    results = report["runs"]
    chats, held_out = results["sft"]["curve"], results["sft"]["curve"]["held"]
    left.plot(chats["step"], chats["loss"], lw=1.2, color=COLORS[0], label="of each step")
    left.plot(held_out["step"], held_out["loss"], "o", ms=6, color=COLORS[1], label="held out")
    left.set(xlabel="step of SFT", title="Loss of the assistant's tokens, nats")
    step, reward = results["grpo"]["curve"]["step"], np.array(results["grpo"]["curve"]["reward"])
    right.plot(step, reward, ".", ms=4, color=COLORS[0], alpha=0.5, label="of each step")
    right.plot(step, smooth(reward, 5), lw=1.4, color=COLORS[0], label="smoothed")
    ends = [results["sft"]["reward"], results["grpo"]["reward"]]
    right.plot([0, step[-1]], ends, "o", ms=6, color=COLORS[1], label="held out")
    right.set(xlabel="step of GRPO", ylim=(0, None), title="Mean reward of answers to GSM8K")
    finish(left, right)
    return figure


def main(arguments: Arguments) -> None:
    report = describe_run(arguments, "numpy") | {"size": asdict(SIZES[arguments.size])}
    report["runs"] = run(SIZES[arguments.size], arguments, arguments.workdir / arguments.size / str(arguments.seed))
    write_report(arguments.output, report)
    table = as_table(report)
    write_text(arguments.output.with_suffix(".md"), table)
    draw(report).savefig(arguments.output.with_suffix(".png"))
    print(table)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
