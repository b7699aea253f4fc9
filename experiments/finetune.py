"""Fine-tuning of the bundled model with measured success: SFT, preferences, rewards.

    python experiments/finetune.py                      three seeds, one after another
    python experiments/finetune.py --seeds 0            one of them
    python experiments/finetune.py --size small         a minute: the same stages, too short to learn anything

The task is to write the beginning of a story that contains two or three given words. The bundled model generates the
stories, and words of each story become its request, so that nothing is downloaded:

    Words: garden, thirsty
    Story: Once upon a time, there was a little bird in the garden. ...

sft    All parameters learn to write the story after the request. Measured: the share of requested words in answers to
       held-out requests, before and after.
dpo    The fine-tuned model answers requests, and learns to prefer an answer with the requested words to an answer to
       another request that has none of them. Measured: how often it does so in pairs of held-out requests.
grpo   The fine-tuned model answers requests. The reward (`told`) is the share of requested words, and 0 if the last
       sentence is incomplete. Measured: the mean reward of held-out requests before and after, and in training at the
       beginning and at the end. As a control, the same run with rewards shuffled among the answers (`shuffled`), from which
       nothing can be learned.

Every stage is a run of `llama_jax.train`, as on the command line, and starts from the weights of the previous stage's
folder. A finished stage is not repeated; a stage stopped by SIGTERM resumes when the same command is started again, as long
as this file is unchanged.
Writes ``experiments/results/finetune_cpu.json``, a table in ``.md`` and a picture in ``.png``.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tyro
from measuring import RESULTS, ROOT, describe_run, markdown_table, once, write_report, write_text
from plotting import COLORS, finish, new_figure, smooth

import llama_jax
from llama_jax import Lora, OptimizerSettings, Recipe
from llama_jax.formats.loading import bundled
from llama_jax.runs import recipes
from llama_jax.runs.log import Log
from llama_jax.runs.recipe import RewardSettings
from llama_jax.training.preference_loss import PreferenceOptions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 256  # generated at a time
ROOM = 24  # maximum tokens of a request
ANSWER = 32  # maximum tokens of an answer, including the token that ends it
RARE = 4  # minimum number of stories that contain a word
MODELS = ("base", "sft", "dpo", "grpo", "shuffled")
REWARDED = ("grpo", "shuffled")
FLAT = 0.1  # allowed change of a mean reward if nothing can be learned
GROUP = 8  # answers to a request
SENTENCES = re.compile(r".*[.!?][\"”]?(?=\s|$)", re.DOTALL)
LETTERS = re.compile(r"[a-z]{3,}")


@dataclass(frozen=True)
class Size:
    """Amounts of data and training.

    Attributes:
      stories, held: number of stories for training, and for held-out requests.
      draws: requests per story.
      asked: requests answered to make pairs, `GROUP` times each.
      least: minimum share of its words in an answer of a pair.
    """

    stories: int = 4096
    held_out: int = 128
    draws: int = 2
    asked: int = 512
    least: float = 1.0
    sft_steps: int = 400
    dpo_steps: int = 60
    grpo_steps: int = 300


SIZES = {"full": Size(), "small": Size(240, held_out=16, asked=16, least=0.1, sft_steps=10, dpo_steps=3, grpo_steps=3)}


@dataclass(frozen=True)
class Arguments:
    """What to run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds, run one after another, each with its own stories, requests and runs."""
    size: Literal["full", "small"] = "full"
    workdir: Path = ROOT / "build" / "finetune"
    """Folder of the data and the runs; existing ones are reused."""
    output: Path = RESULTS / "finetune_cpu.json"
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
    """Beginnings of stories by the bundled model: whole sentences of at most `ANSWER` tokens, including the end token."""
    config, params, tokenizer = llama_jax.load(dtype="float32")
    texts: list[str] = []
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
        whole = (SENTENCES.match(tokenizer.decode(story.tokens)) for story in written)
        texts += [match[0].strip() for match in whole if match]
    return texts


def requests(written: Sequence[str], draws: int, seed: int) -> list[dict[str, Any]]:
    """Make `draws` requests of two or three words of each story; the words occur in several stories, but not in many."""
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
    """Sample `group` answers to each request from a model in a folder, without truncating its distribution."""
    config, params, tokenizer = llama_jax.load(model, "float32", adapter=adapter)
    prompts = [tokenizer.encode(line["prompt"]) for line in lines for _ in range(group)]
    sampled: list[Answer] = []
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
        sampled += [Answer(tokenizer.decode(answer.tokens), answer.finish_reason == "stop") for answer in written]
    return [sampled[i : i + group] for i in range(0, len(sampled), group)]


def rates(lines: Sequence[dict[str, Any]], given: Sequence[Sequence[Answer]]) -> dict[str, float]:
    """Shares of requested words, of answers with all words, of answers that ended, and of answers with both."""
    judged = [(answer, line["words"]) for line, some in zip(lines, given, strict=True) for answer in some]
    shares = included([answer.text for answer, _ in judged], [words for _, words in judged])
    complete = [share == 1 for share in shares]
    ended = [answer.ended for answer, _ in judged]
    return {
        "words": sum(shares) / len(judged),
        "all": sum(complete) / len(judged),
        "ended": sum(ended) / len(judged),
        "success": sum(map(all, zip(complete, ended, strict=True))) / len(judged),
        "reward": mean(told([answer.text for answer, _ in judged], [words for _, words in judged])),
        "answers": len(judged),
    }


def pairs(lines: Sequence[dict[str, Any]], given: Sequence[Sequence[Answer]], least: float = 1.0) -> list[dict[str, str]]:
    """Pair answers to different requests that have at least `least` of their words (all by default). Each answer is chosen
    after its own request and rejected after the other request, none of whose words it contains. Every answer is thus on both
    sides equally often, so that only its relation to the request can be learned.
    """
    having = [
        (line, answer.text)
        for line, some in zip(lines, given, strict=True)
        for answer in some
        if answer.ended and included([answer.text], [line["words"]])[0] >= least
    ]
    preferences, half = list[dict[str, str]](), len(having) // 2
    for (line, text), (other, its) in zip(having[:half], having[half:], strict=False):
        if included([text, its], [other["words"], line["words"]]) == [0, 0]:
            preferences.append({"prompt": line["prompt"], "chosen": f" {text}", "rejected": f" {its}"})
            preferences.append({"prompt": other["prompt"], "chosen": f" {its}", "rejected": f" {text}"})
    return preferences


def told(completions: Sequence[str], words: Sequence[Sequence[str]], **columns: Any) -> list[float]:
    """The reward: the share of the words that are in the story; 0 if its last sentence is incomplete."""
    shares = included(completions, words)
    return [share if whole(text) else 0.0 for share, text in zip(shares, completions, strict=True)]


def shuffled(completions: Sequence[str], words: Sequence[Sequence[str]], **columns: Any) -> list[float]:
    """The same rewards assigned to other answers, as a control; the order depends only on the answers."""
    rewards = told(completions, words)
    random.Random("\n".join(completions)).shuffle(rewards)
    return rewards


def whole(text: str) -> bool:
    """Whether a text ends like a sentence."""
    return text.rstrip().endswith((".", "!", "?", '"'))


def decaying(name: Literal["adamw", "muon"], rate: float, steps: int) -> OptimizerSettings:
    """An optimizer whose learning rate warms up over a twentieth of the steps and decays to 0."""
    return OptimizerSettings(name, rate, warmup_steps=steps // 20, final_share=0.0, weight_decay=0.0)


def short(recipe: Recipe, steps: int, evaluations: int, seed: int) -> Recipe:
    """A recipe that takes minutes: two rows per step, and one checkpoint at the end."""
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
    """Train all parameters: the model has to learn something new, and is small."""
    recipe = replace(recipes.sft(), optimizer=decaying("muon", 4e-3, size.sft_steps))
    return short(recipe, size.sft_steps, 4, seed)


def dpo(size: Size, seed: int) -> Recipe:
    """Train all parameters. With a beta of 0.1 a pair counts as learned at a margin of tens of nats, mostly noise."""
    recipe = replace(recipes.dpo(), optimizer=decaying("muon", 5e-4, size.dpo_steps))
    return short(replace(recipe, preference=PreferenceOptions(beta=0.5)), size.dpo_steps, 6, seed)


def grpo(size: Size, seed: int, reward: str) -> Recipe:
    """Train adapters with one of the two rewards above. Most of a gradient is noise. Its effect grows with the squares of
    the learning rates, learning with their sum. At 2e-3 the control lost a third of its reward in 150 steps; with all
    parameters trained it lost a fifth in 50 steps at 2e-4.
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
            functions=(f"{__file__}:{reward}",), group=GROUP, answer=ANSWER, held=size.held_out // 2, samples=1
        ),
        evaluate_every=max(size.grpo_steps // 3, 1),
        save_every=0,
        log_every=1,
        seed=seed,
    )


def curves(folder: Path, line_type: str, *names: str) -> dict[str, list[float]]:
    """Read the training or validation metrics of a run: steps, and these numbers at each step."""
    rows = [row for row in read_lines(folder / "metrics.jsonl") if row["kind"] == line_type]
    return {name: [row[name] for row in rows] for name in ("step", *names)}


def run_seed(size: Size, seed: int, folder: Path) -> dict[str, Any]:
    """Data and all stages, in a folder; finished stages are not repeated."""
    log, model, base = Log(), folder / "sft", bundled()
    files = {name: folder / f"{name}.jsonl" for name in ("taught", "held", "pairs", "held_pairs", "asked", "asked_held")}

    def train(name: str, recipe: Recipe, data: str, weights: Path) -> Path:
        log.line(f"seed {seed}, {name}:")
        held_out = files["held" if data == "taught" else f"held_{data}" if data == "pairs" else f"{data}_held"]
        done = llama_jax.train(
            recipe, folder / name, files[data], validation_data=held_out, weights=weights, resume=True, log=log
        )
        if done.stopped is not None:
            raise SystemExit(1)
        return folder / name

    def data() -> dict[str, Any]:
        lines = requests(stories(size.stories + size.held_out, seed), size.draws, seed)
        # Training uses no story of the held-out requests and none of their lists of words.
        last = set(list(dict.fromkeys(line["completion"] for line in lines))[-size.held_out :])
        held_out = list({line["completion"]: line for line in lines if line["completion"] in last}.values())
        known = {line["prompt"] for line in held_out}
        taught = [line for line in lines if line["completion"] not in last and line["prompt"] not in known]
        for name, some in (("taught", taught), ("held", held_out)):
            # Training warns of fields without an effect, and `words` is one.
            write_lines(files[name], ({key: line[key] for key in ("prompt", "completion")} for line in some))
            asked = ({"prompt": line["prompt"], "words": line["words"]} for line in some)
            write_lines(files["asked" if name == "taught" else "asked_held"], asked)
        return {"lines": len(taught), "held": len(held_out)}

    def sft_stage() -> dict[str, Any]:
        train("sft", sft(size, seed), "taught", base)
        return rates(held_out, answers(model, held_out, GROUP, seed)) | {"curve": curves(model, "validation", "loss")}

    def dpo_stage() -> dict[str, Any]:
        asked = read_lines(files["asked"])
        asked = asked[:: max(len(asked) // size.asked, 1)][: size.asked]
        for name, some in (("pairs", asked), ("held_pairs", held_out)):
            if not files[name].exists():
                write_lines(files[name], pairs(some, answers(model, some, GROUP, seed + 1000), size.least))
        preferring = train("dpo", dpo(size, seed), "pairs", model)
        after = rates(held_out, answers(preferring, held_out, GROUP, seed))
        counts = {name: len(read_lines(files[name])) for name in ("pairs", "held_pairs")}
        return after | counts | {"curve": curves(preferring, "validation", "accuracy", "margin", "loss")}

    def grpo_stage(name: str, reward: str) -> dict[str, Any]:
        rewarded = train(name, grpo(size, seed, reward), "asked", model)
        curve = curves(rewarded, "train", "reward", "length", "stopped", "flat")
        after = rates(held_out, answers(model, held_out, GROUP, seed, adapter=rewarded))
        return after | {"curve": curve, "held_curve": curves(rewarded, "validation", "reward")}

    results: dict[str, Any] = {"seed": seed, "data": once(folder / "data.json", data)}
    held_out = read_lines(files["asked_held"])
    results["base"] = once(folder / "base.json", lambda: rates(held_out, answers(base, held_out, GROUP, seed)))
    results["sft"] = once(folder / "sft.json", sft_stage)
    results["dpo"] = once(folder / "dpo.json", dpo_stage)
    for name, reward in (("grpo", "told"), ("shuffled", "shuffled")):
        results[name] = once(folder / f"{name}.json", partial(grpo_stage, name, reward))
    return results


def as_table(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    lines = [
        "# Fine-tuning of the bundled model",
        "",
        f"{report['machine']['cpu']}, {report['machine']['cores']} cores.",
        "",
    ]
    lines += ["Held-out requests, answers sampled from the whole distribution. Success: all words, and ended by itself.", ""]
    rows = []
    for run in report["runs"]:
        for name in MODELS:
            row = run[name]
            cells = [f"{row['words']:.1%}", f"{row['words'] / run['base']['words']:.1f}"]
            rows.append([run["seed"], name, *cells, f"{row['ended']:.1%}", f"{row['success']:.1%}", f"{row['reward']:.3f}"])
    heading = ("seed", "model", "words included", "over the base", "ended", "success", "reward")
    lines.append(markdown_table(heading, rows))
    lines += ["", "DPO on held-out pairs, of GRPO the mean reward of the first and the last ten steps, and minutes:", ""]
    rows = []
    for run in report["runs"]:
        curve = run["dpo"]["curve"]
        rewards = ["{:.3f} to {:.3f}".format(*in_training(run[name])) for name in REWARDED]
        minutes = sum(run[name]["seconds"] for name in ("data", *MODELS)) / 60
        cells = [run["dpo"]["held_pairs"], f"{curve['accuracy'][-1]:.3f}", f"{curve['margin'][-1]:.2f}", *rewards]
        rows.append([run["seed"], *cells, f"{minutes:.1f}"])
    lines.append(markdown_table(("seed", "pairs", "accuracy", "margin", *REWARDED, "minutes"), rows))
    rows = [[run["seed"], *row[:3], "yes" if row[3] else "no"] for run in report["runs"] for row in verdicts(run)]
    lines += ["", "Was it learned?", "", markdown_table(("seed", "claim", "measured", "threshold", "met"), rows)]
    return "\n".join(lines) + "\n"


def in_training(results: dict[str, Any]) -> tuple[float, float]:
    """The mean rewards of the first and of the last ten steps of a GRPO run."""
    reward = results["curve"]["reward"]
    return mean(reward[:10]), mean(reward[-10:])


def verdicts(run: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """The claims about a seed: name, result, threshold, and whether it is met."""
    more = run["sft"]["words"] / run["base"]["words"]
    right = run["dpo"]["curve"]["accuracy"][-1]
    rows = [
        ("sft: words included, over the base", f"{more:.1f}", "at least 3", more >= 3),
        ("dpo: accuracy on held-out pairs", f"{right:.3f}", "at least 0.9", right >= 0.9),
    ]
    for name in REWARDED:
        before, after = in_training(run[name])
        for where, change in (("in training", after - before), ("held out", run[name]["reward"] - run["sft"]["reward"])):
            bar, met = ("at least +0.3", change >= 0.3) if name == "grpo" else (f"within {FLAT}", abs(change) <= FLAT)
            rows.append((f"{name}: change of the reward, {where}", f"{change:+.3f}", bar, met))
    return rows


def draw(report: dict[str, Any]) -> Figure:
    """Words included before and after; accuracy on held-out pairs; rewards, true and shuffled."""
    figure = new_figure(12, 3.8)
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
            ends = [run["sft"]["reward"], run[name]["reward"]]  # of all held-out requests
            label = None if number else f"{name}, held out"
            right.plot([0, step[-1]], ends, "o", ms=6, mfc="white", color=color, label=label)
    middle.axhline(0.5, color="black", lw=0.6, ls="--")
    middle.set(xlabel="step of DPO", ylim=(0.45, 1), title="Share of held-out pairs preferred rightly")
    right.set(xlabel="step of GRPO", ylim=(0, 1), title="Mean reward")
    finish(left, middle, right)
    return figure


def main(arguments: Arguments) -> None:
    report = describe_run(arguments, "numpy") | {"size": asdict(SIZES[arguments.size]), "runs": []}
    for seed in arguments.seeds:
        results = run_seed(SIZES[arguments.size], seed, arguments.workdir / arguments.size / str(seed))
        report["runs"].append(results)
        write_report(arguments.output, report)
    table = as_table(report)
    write_text(arguments.output.with_suffix(".md"), table)
    draw(report).savefig(arguments.output.with_suffix(".png"))
    print(table)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
