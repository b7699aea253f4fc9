"""Fine-tuning that demonstrably works, with only the bundled model: chats, preferences, rewards.

    python experiments/finetune.py                      three seeds, one after another
    python experiments/finetune.py --seeds 0            one of them
    python experiments/finetune.py --size small         a minute: the same path, too short to learn anything

The task is to write the beginning of a story in which two or three given words occur. The bundled model generates the
stories, and words of each become its request, so that nothing is downloaded:

    Words: garden, thirsty
    Story: Once upon a time, there was a little bird in the garden. ...

sft    All parameters learn to write the story after the request. Measured: the share of requested words in answers to
       held-out requests, before and after.
dpo    The fine-tuned model answers requests, and learns to prefer an answer that has the words to an answer to another
       request that has none of them. Measured: how often it does so in pairs of held-out requests.
grpo   The fine-tuned model answers, and `told` judges: the share of the words, and 0 if the last sentence is incomplete.
       Measured: the mean reward of held-out requests before and after, and in training at the beginning and at the end; and
       the same, with the same settings, when the rewards are shuffled among the answers (`shuffled`), from which nothing
       can be learned.

Every stage is a run of `llama_jax.train`, as on the command line; the folder of one is the weights of the next. A finished
stage is not repeated, and one that SIGTERM ended resumes when the same command is started again, as long as this file is
unchanged.
Writes ``experiments/results/finetune_cpu.json``, a table in ``.md`` and a picture in ``.png``.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
import tyro
from measuring import cpu_name, settings, versions, write_report

import llama_jax
from llama_jax import Lora, OptimizerSettings, Recipe
from llama_jax.formats.loading import bundled
from llama_jax.runs import recipes
from llama_jax.runs.log import Log
from llama_jax.runs.recipe import RewardSettings
from llama_jax.training.preference_loss import PreferenceOptions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
ROWS = 256  # that are written at a time
ROOM = 24  # tokens of a request at most
ANSWER = 32  # tokens at most, the one that ends it included
RARE = 4  # stories that a word is in at least
MODELS = ("base", "sft", "dpo", "grpo", "shuffled")
REWARDED = ("grpo", "shuffled")
FLAT = 0.1  # that a mean reward may change by where nothing can be learnt
GROUP = 8  # answers to a request
SENTENCES = re.compile(r".*[.!?][\"”]?(?=\s|$)", re.DOTALL)
LETTERS = re.compile(r"[a-z]{3,}")


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Attributes:
      stories, held: to train on, and to make held-out requests of.
      draws: requests that are made of a story.
      asked: requests that are answered for pairs, `GROUP` times each.
      least: share of its words that an answer of a pair has at least.
    """

    stories: int = 4096
    held: int = 128
    draws: int = 2
    asked: int = 512
    least: float = 1.0
    sft_steps: int = 400
    dpo_steps: int = 60
    grpo_steps: int = 300


SIZES = {"full": Size(), "small": Size(stories=240, held=16, asked=16, least=0.1, sft_steps=10, dpo_steps=3, grpo_steps=3)}


@dataclass(frozen=True)
class Arguments:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Run one after another, each with its own stories, requests and runs."""
    size: Literal["full", "small"] = "full"
    workdir: Path = ROOT / "build" / "finetune"
    """Folder of the data and the runs; existing ones are not made again."""
    output: Path = ROOT / "experiments" / "results" / "finetune_cpu.json"
    """The figures; the table and the picture are next to it."""


def words_in(text: str) -> set[str]:
    """The words of at least three letters."""
    return set(LETTERS.findall(text.lower()))


def request(words: Sequence[str]) -> str:
    """The prompt of a request."""
    return f"Words: {', '.join(words)}\nStory:"


def included(completions: Sequence[str], words: Sequence[Sequence[str]]) -> list[float]:
    """The share of the requested words in each answer."""
    return [len(words_in(text).intersection(asked)) / len(asked) for text, asked in zip(completions, words, strict=True)]


def stories(count: int, seed: int) -> list[str]:
    """Beginnings of stories by the bundled model: whole sentences, with the token that ends them `ANSWER` at most."""
    config, params, tokenizer = llama_jax.load(dtype="float32")
    found: list[str] = []
    for begin in range(0, count, ROWS):
        seeds = [(seed << 20) + begin + i for i in range(ROWS)]
        written = llama_jax.generate(
            config,
            params,
            [[tokenizer.bos_id]] * ROWS,
            max_new_tokens=ANSWER - 1,
            sampling=llama_jax.Sampling(temperature=0.8, seed=seeds),
            stop_tokens=tokenizer.stop_ids,
        )
        whole = (SENTENCES.match(tokenizer.decode(each.tokens)) for each in written)
        found += [match[0].strip() for match in whole if match]
    return found


def requests(written: Sequence[str], draws: int, seed: int) -> list[dict[str, Any]]:
    """Two or three words of each story as its request, `draws` times: words that are in several stories, and in few."""
    in_stories = Counter(word for story in written for word in words_in(story))
    usable = {word for word, count in in_stories.items() if RARE <= count <= len(written) // 32}
    chance, lines = random.Random(seed), list[dict[str, Any]]()
    for story in written:
        among = sorted(words_in(story) & usable)
        for _ in range(draws if len(among) > 1 else 0):
            words = chance.sample(among, min(len(among), chance.randint(2, 3)))
            lines.append({"prompt": request(words), "completion": f" {story}", "words": words})
    return lines


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """Write JSONL and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of `write_lines`."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@dataclass(frozen=True)
class Answer:
    """An answer to a request."""

    text: str
    ended: bool


def answers(
    model: Path, lines: Sequence[dict[str, Any]], group: int, seed: int, adapter: Path | None = None
) -> list[list[Answer]]:
    """`group` answers to each request by a model in a folder, sampled from its whole distribution."""
    config, params, tokenizer = llama_jax.load(model, "float32", adapter=adapter)
    prompts = [tokenizer.encode(line["prompt"]) for line in lines for _ in range(group)]
    found: list[Answer] = []
    for begin in range(0, len(prompts), ROWS):
        some = prompts[begin : begin + ROWS]
        seeds = [(seed << 20) + begin + i for i in range(len(some))]
        written = llama_jax.generate(
            config,
            params,
            some,
            max_new_tokens=ANSWER,
            sampling=llama_jax.Sampling(temperature=1.0, seed=seeds),
            stop_tokens=tokenizer.stop_ids,
        )
        found += [Answer(tokenizer.decode(each.tokens), each.finish_reason == "stop") for each in written]
    return [found[i : i + group] for i in range(0, len(found), group)]


def rates(lines: Sequence[dict[str, Any]], given: Sequence[Sequence[Answer]]) -> dict[str, float]:
    """How well requests were answered: the shares of the words, of answers with all of them, that ended, and of both."""
    each = [(answer, line["words"]) for line, some in zip(lines, given, strict=True) for answer in some]
    shares = included([answer.text for answer, _ in each], [words for _, words in each])
    complete = [share == 1 for share in shares]
    ended = [answer.ended for answer, _ in each]
    return {
        "words": sum(shares) / len(each),
        "all": sum(complete) / len(each),
        "ended": sum(ended) / len(each),
        "success": sum(map(all, zip(complete, ended, strict=True))) / len(each),
        "reward": mean(told([answer.text for answer, _ in each], [words for _, words in each])),
        "answers": len(each),
    }


def pairs(lines: Sequence[dict[str, Any]], given: Sequence[Sequence[Answer]], least: float = 1.0) -> list[dict[str, str]]:
    """Answers that have `least` of the words of their request, by default all, two and two of different requests: each is
    preferred after its own request and rejected after the other's, of which it has no word. So every answer is on both sides
    equally often, and only what it has to do with the request can be learnt.
    """
    having = [
        (line, answer.text)
        for line, some in zip(lines, given, strict=True)
        for answer in some
        if answer.ended and included([answer.text], [line["words"]])[0] >= least
    ]
    found, half = list[dict[str, str]](), len(having) // 2
    for (line, text), (other, its) in zip(having[:half], having[half:], strict=False):
        if included([text, its], [other["words"], line["words"]]) == [0, 0]:
            found.append({"prompt": line["prompt"], "chosen": f" {text}", "rejected": f" {its}"})
            found.append({"prompt": other["prompt"], "chosen": f" {its}", "rejected": f" {text}"})
    return found


def told(completions: Sequence[str], words: Sequence[Sequence[str]], **columns: Any) -> list[float]:
    """The reward: the share of the words that are in the story, and 0 for one whose last sentence is not whole."""
    shares = included(completions, words)
    return [share if whole(text) else 0.0 for share, text in zip(shares, completions, strict=True)]


def shuffled(completions: Sequence[str], words: Sequence[Sequence[str]], **columns: Any) -> list[float]:
    """The same rewards, each for another answer: a control. By chance that is the same whenever the answers are."""
    rewards = told(completions, words)
    random.Random("\n".join(completions)).shuffle(rewards)
    return rewards


def whole(text: str) -> bool:
    """Whether a text ends like a sentence."""
    return text.rstrip().endswith((".", "!", "?", '"'))


def decaying(name: Literal["adamw", "muon"], rate: float, steps: int) -> OptimizerSettings:
    """A learning rate that rises over a twentieth of the steps, and falls to 0."""
    return OptimizerSettings(name, rate, warmup_steps=steps // 20, final_share=0.0, weight_decay=0.0)


def short(recipe: Recipe, steps: int, evaluations: int, seed: int) -> Recipe:
    """A recipe that is over in minutes: two rows a step, a single checkpoint at the end."""
    return replace(
        recipe,
        steps=steps,
        batch=2,
        length=512,
        dtype="bfloat16",
        remat="none",
        evaluate_every=max(steps // evaluations, 1),
        save_every=0,
        log_every=max(steps // 20, 1),
        seed=seed,
    )


def sft(size: Size, seed: int) -> Recipe:
    """All parameters: the model has to learn something new, and is small."""
    recipe = replace(recipes.sft(), optimizer=decaying("muon", 4e-3, size.sft_steps))
    return short(recipe, size.sft_steps, 4, seed)


def dpo(size: Size, seed: int) -> Recipe:
    """All parameters. At a beta of 0.1 a pair counts as learnt at a margin of tens of nats, of which most is noise."""
    recipe = replace(recipes.dpo(), optimizer=decaying("muon", 5e-4, size.dpo_steps))
    return short(replace(recipe, preference=PreferenceOptions(beta=0.5)), size.dpo_steps, 6, seed)


def grpo(size: Size, seed: int, reward: str) -> Recipe:
    """Adapters, by one of the two functions above. Most of a gradient is noise, which moves the model too: what noise does
    grows with the squares of the learning rates, and what is learnt with their sum. At 2e-3 the control lost a third of its
    reward in 150 steps, and where all parameters learnt a fifth of it in 50 steps at 2e-4.
    """
    return replace(
        recipes.grpo(),
        lora=Lora(rank=64, alpha=32),
        steps=size.grpo_steps,
        batch=64,
        length=ANSWER + ROOM,
        optimizer=decaying("adamw", 9e-4, size.grpo_steps),
        dtype="float32",  # with adapters a step is a third shorter than in bfloat16 on a CPU
        remat="none",
        rewards=RewardSettings(
            functions=(f"{__file__}:{reward}",), group=GROUP, answer=ANSWER, held=size.held // 2, samples=1
        ),
        evaluate_every=max(size.grpo_steps // 3, 1),
        save_every=0,
        log_every=1,
        seed=seed,
    )


def curves(folder: Path, kind: str, *names: str) -> dict[str, list[float]]:
    """What a run wrote down of its training or validation: steps, and these numbers at each."""
    rows = [row for row in read_lines(folder / "metrics.jsonl") if row["kind"] == kind]
    return {name: [row[name] for row in rows] for name in ("step", *names)}


def once(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a stage, with its seconds; for a finished stage, the stored result."""
    if not path.exists():
        began = time.perf_counter()
        found = make()
        write_report(path, found | {"seconds": time.perf_counter() - began})
    return dict(json.loads(path.read_text("utf-8")))


def run_seed(size: Size, seed: int, folder: Path) -> dict[str, Any]:
    """Data and all stages, in a folder; finished stages are not repeated."""
    log, model, base = Log(), folder / "sft", bundled()
    files = {name: folder / f"{name}.jsonl" for name in ("taught", "held", "pairs", "held_pairs", "asked", "asked_held")}

    def train(name: str, recipe: Recipe, data: str, weights: Path) -> Path:
        log.line(f"seed {seed}, {name}:")
        held = files["held" if data == "taught" else f"held_{data}" if data == "pairs" else f"{data}_held"]
        done = llama_jax.train(
            recipe, folder / name, files[data], validation_data=held, weights=weights, resume=True, log=log
        )
        if done.stopped is not None:
            raise SystemExit(1)
        return folder / name

    def data() -> dict[str, Any]:
        lines = requests(stories(size.stories + size.held, seed), size.draws, seed)
        # Not a story of the held-out requests is trained on, nor one of their lists of words.
        last = set(list(dict.fromkeys(line["completion"] for line in lines))[-size.held :])
        held = list({line["completion"]: line for line in lines if line["completion"] in last}.values())
        known = {line["prompt"] for line in held}
        taught = [line for line in lines if line["completion"] not in last and line["prompt"] not in known]
        for name, some in (("taught", taught), ("held", held)):
            write_lines(files[name], some)
            asked = ({"prompt": line["prompt"], "words": line["words"]} for line in some)
            write_lines(files["asked" if name == "taught" else "asked_held"], asked)
        return {"lines": len(taught), "held": len(held)}

    def sft_stage() -> dict[str, Any]:
        train("sft", sft(size, seed), "taught", base)
        return rates(held, answers(model, held, GROUP, seed)) | {"curve": curves(model, "validation", "loss")}

    def dpo_stage() -> dict[str, Any]:
        asked = read_lines(files["taught"])
        asked = asked[:: max(len(asked) // size.asked, 1)][: size.asked]
        for name, some in (("pairs", asked), ("held_pairs", held)):
            if not files[name].exists():
                write_lines(files[name], pairs(some, answers(model, some, GROUP, seed + 1000), size.least))
        preferring = train("dpo", dpo(size, seed), "pairs", model)
        after = rates(held, answers(preferring, held, GROUP, seed))
        counts = {name: len(read_lines(files[name])) for name in ("pairs", "held_pairs")}
        return after | counts | {"curve": curves(preferring, "validation", "accuracy", "margin", "loss")}

    def grpo_stage(name: str, reward: str) -> dict[str, Any]:
        rewarded = train(name, grpo(size, seed, reward), "asked", model)
        curve = curves(rewarded, "train", "reward", "length", "stopped", "flat")
        after = rates(held, answers(model, held, GROUP, seed, adapter=rewarded))
        return after | {"curve": curve, "held_curve": curves(rewarded, "validation", "reward")}

    found: dict[str, Any] = {"seed": seed, "data": once(folder / "data.json", data)}
    held = read_lines(files["held"])
    found["base"] = once(folder / "base.json", lambda: rates(held, answers(base, held, GROUP, seed)))
    found["sft"] = once(folder / "sft.json", sft_stage)
    found["dpo"] = once(folder / "dpo.json", dpo_stage)
    for name, reward in (("grpo", "told"), ("shuffled", "shuffled")):
        found[name] = once(folder / f"{name}.json", partial(grpo_stage, name, reward))
    return found


def as_table(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    lines = ["# Fine-tuning of the bundled model", "", f"{report['device']}, {report['cores']} cores.", ""]
    lines += ["Held-out requests, answers sampled from the whole distribution. Success: all words, and ended by itself.", ""]
    lines += [
        "| seed | model | words included | over the base | ended | success | reward |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for run in report["runs"]:
        for name in MODELS:
            row = run[name]
            cells = [f"{row['words']:.1%}", f"{row['words'] / run['base']['words']:.1f}"]
            cells += [f"{row[key]:.1%}" for key in ("ended", "success")] + [f"{row['reward']:.3f}"]
            lines.append(f"| {run['seed']} | {name} | " + " | ".join(cells) + " |")
    lines += ["", "DPO on held-out pairs, of GRPO the mean reward of the first and the last ten steps, and minutes:", ""]
    lines += ["| seed | pairs | accuracy | margin | grpo | shuffled | minutes |", "|---|---:|---:|---:|---:|---:|---:|"]
    for run in report["runs"]:
        curve = run["dpo"]["curve"]
        cells = [f"{run['dpo']['held_pairs']}", f"{curve['accuracy'][-1]:.3f}", f"{curve['margin'][-1]:.2f}"]
        cells += ["{:.3f} to {:.3f}".format(*in_training(run[name])) for name in REWARDED]
        minutes = sum(run[name]["seconds"] for name in ("data", *MODELS)) / 60
        lines.append(f"| {run['seed']} | " + " | ".join([*cells, f"{minutes:.1f}"]) + " |")
    lines += ["", "Was it learnt?", "", "| seed | what | found | bar | |", "|---|---|---:|---:|---|"]
    for run in report["runs"]:
        for what, found, bar, met in verdicts(run):
            lines.append(f"| {run['seed']} | {what} | {found} | {bar} | {'yes' if met else 'no'} |")
    return "\n".join(lines) + "\n"


def in_training(found: dict[str, Any]) -> tuple[float, float]:
    """The mean reward of the first and of the last ten steps of a run by rewards."""
    reward = found["curve"]["reward"]
    return mean(reward[:10]), mean(reward[-10:])


def verdicts(run: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """The claims about a seed: name, result, threshold, and whether it is met."""
    more = run["sft"]["words"] / run["base"]["words"]
    right = run["dpo"]["curve"]["accuracy"][-1]
    found = [
        ("sft: words included, over the base", f"{more:.1f}", "at least 3", more >= 3),
        ("dpo: accuracy on held-out pairs", f"{right:.3f}", "at least 0.9", right >= 0.9),
    ]
    for name in REWARDED:
        before, after = in_training(run[name])
        for where, change in (("in training", after - before), ("held out", run[name]["reward"] - run["sft"]["reward"])):
            bar, met = ("at least +0.3", change >= 0.3) if name == "grpo" else (f"within {FLAT}", abs(change) <= FLAT)
            found.append((f"{name}: change of the reward, {where}", f"{change:+.3f}", bar, met))
    return found


def draw(report: dict[str, Any]) -> Figure:
    """Words included before and after; accuracy on held-out pairs; rewards, true and shuffled."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from llama_jax.runs.plot import COLORS, smooth

    figure = Figure(figsize=(12, 3.8), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    runs = report["runs"]
    for at, name in enumerate(MODELS):
        values = [run[name]["words"] for run in runs]
        left.bar(at, mean(values), color=COLORS[at % len(COLORS)], alpha=0.35, width=0.7)
        left.plot([at] * len(values), values, "o", color=COLORS[at % len(COLORS)], ms=5)
    left.set_xticks(range(len(MODELS)), MODELS)
    left.set(ylim=(0, None), title="Share of requested words in answers")
    for number, run in enumerate(runs):
        curve = run["dpo"]["curve"]
        middle.plot(curve["step"], curve["accuracy"], "o-", ms=4, lw=1.2, color=COLORS[number], label=f"seed {run['seed']}")
        for name, color in (("grpo", COLORS[2]), ("shuffled", "#888888")):
            step, reward = run[name]["curve"]["step"], np.array(run[name]["curve"]["reward"])
            right.plot(step, smooth(reward, 5), lw=1.2, color=color, label=None if number else f"{name}, in training")
            ends = [run["sft"]["reward"], run[name]["reward"]]  # of the same requests, all that were held out
            label = None if number else f"{name}, held out"
            right.plot([0, step[-1]], ends, "o", ms=6, mfc="white", color=color, label=label)
    middle.axhline(0.5, color="black", lw=0.6, ls="--")
    middle.set(xlabel="step of DPO", ylim=(0.45, 1), title="Share of held-out pairs preferred rightly")
    right.set(xlabel="step of GRPO", ylim=(0, 1), title="Mean reward")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD", lw=0.6)
        axes.set_axisbelow(True)
        axes.title.set(ha="left", x=0, fontsize=11)
    for axes in (middle, right):
        axes.legend(frameon=False, fontsize=9)
    return figure


def main(arguments: Arguments) -> None:
    report: dict[str, Any] = {
        "device": f"{jax.devices()[0].device_kind}, {cpu_name()}",
        "cores": os.cpu_count(),
        "versions": versions("jax", "jaxlib", "numpy"),
        "settings": settings(arguments) | {"output": arguments.output.name, "workdir": arguments.workdir.name},
        "size": asdict(SIZES[arguments.size]),
        "runs": [],
    }
    for seed in arguments.seeds:
        found = run_seed(SIZES[arguments.size], seed, arguments.workdir / arguments.size / str(seed))
        report["runs"].append(found)
        write_report(arguments.output, report)
    table = as_table(report)
    arguments.output.with_suffix(".md").write_text(table, "utf-8")
    draw(report).savefig(arguments.output.with_suffix(".png"))
    print(table)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
