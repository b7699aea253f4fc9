"""The speed-up from speculative decoding: interleaved generation with and without drafts; checks that tokens are equal.

    python experiments/speculation.py
    python experiments/speculation.py --cases stories copied --repetitions 5
    python experiments/speculation.py --cases chats --model SmolLM2-135M-Instruct.Q4_1.gguf

Cases:
  stories  the bundled model continues stories, greedy and sampled, with prompt lookup: does it cost anything?
  copied   repetitive text with prompt lookup: random weights of the 15M and 110M shapes, which end in a loop.
  chats    a real instruct model (--model) answers greedily, with prompt lookup or a smaller model of the same vocabulary
           (--draft): questions, and requests whose answers copy parts of them.

Speed-up is the ratio of the medians of the time after the first token, including failed drafts. For tokens that differ, the
report has the gap of the two log-probabilities under the model, which shows whether it was a near tie.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from measuring import describe_run, write_report

import llama_jax
from llama_jax import DraftModel, PromptLookup, Sampling
from llama_jax.inference.drafter import DraftedChunk
from llama_jax.inference.speculation import Drafter
from llama_jax.tokenizers import encode_chat, reply_ends

Case = Literal["stories", "copied", "chats"]
Row = dict[str, Any]
OPENINGS = (
    "Once upon a time",
    "Lily and Tom went to the park.",
    "The little dog was sad because",
    "One day, a big bear",
    "There was a small house in the woods.",
    "Sara likes to play with her red ball.",
    "The sun was hot and the sky was blue.",
    "Ben found a shiny stone near the river.",
)

QUESTIONS = ("Why is the sky blue?", "Write a short poem about a llama.", "How do I make bread at home?")
STORY = (
    "Anna lived with her two llamas in a small stone house above the lake. Every morning she carried a basket of hay up the"
    " hill, and every evening she counted the animals of her neighbors before they went to sleep. One day in autumn the"
    " younger llama was gone. Anna looked in the barn, behind the old mill and along the shore, but nobody had seen it. When"
    " it grew dark she heard a bell from the other side of the water. The llama had crossed the bridge alone, and it stood"
    " in the garden of the school, where the children were feeding it apples."
)
COPIES = (
    f"Repeat this text word for word:\n\n{STORY}",
    f"Rewrite this text with 'Mary' in place of 'Anna', and change nothing else:\n\n{STORY}",
    f"Correct the spelling, and change nothing else:\n\n{STORY.replace('every', 'evry').replace('their', 'there')}",
)


@dataclass(frozen=True)
class Arguments:
    """Measure the benefit of drafts."""

    cases: tuple[Case, ...] = ("stories", "copied")
    model: Path | None = None
    """Model for the case chats, with a chat template, of any supported format."""
    quantize: Literal["none", "keep", "int8", "q8_0", "q4_0"] = "none"
    """Format of its matrices: float32 ("none"), the file's format ("keep"), or another one."""
    draft: Path | None = None
    """A smaller model that drafts in the case chats; by default, drafts are looked up in the text."""
    new_tokens: int = 192
    repetitions: int = 5
    """Interleaved repetitions, after each program has run once."""
    output: Path = Path("experiments/results/speculation_cpu.json")


@dataclass(frozen=True)
class Timed:
    """One timed generation: seconds after the first token, the tokens of each row, passes, drafted and accepted tokens."""

    seconds: float
    tokens: list[list[int]]
    logprobs: list[list[float]]
    counts: tuple[int, int, int]

    @classmethod
    def of(cls, model: Any, prompts: Sequence[Sequence[int]], draft: Drafter | None, **options: Any) -> Timed:
        pieces = llama_jax.stream(*model, prompts, draft=draft, max_chunks=64, **options)
        chunks = [next(pieces)]
        started = time.perf_counter()
        chunks += pieces
        seconds = time.perf_counter() - started
        rows = range(len(prompts))
        tokens = [[t for piece in chunks for t in piece.tokens[row][piece.valid[row]].tolist()] for row in rows]
        logprobs = [[x for piece in chunks for x in piece.logprobs[row][piece.valid[row]].tolist()] for row in rows]
        drafted = [piece.counts for piece in chunks if isinstance(piece, DraftedChunk)]
        counts = tuple(sum(int(each.sum()) for each in part) for part in zip(*drafted, strict=True)) or (0, 0, 0)
        return cls(seconds, tokens, logprobs, counts)


def compare(name: str, model: Any, prompts: Any, draft: Drafter, arguments: Arguments, **options: Any) -> Row:
    """Measure one row of the table."""
    run = partial(Timed.of, model, prompts, max_new_tokens=arguments.new_tokens, **options)
    pairs = [(run(None), run(draft)) for _ in range(arguments.repetitions + 1)][1:]  # the first compiles every program
    plain, drafted = zip(*pairs, strict=True)
    gaps = gaps_of(plain[0], drafted[0])
    passes, offered, accepted = drafted[-1].counts
    made = sum(map(len, drafted[-1].tokens)) - len(prompts)
    seconds = [statistics.median(run_of_case.seconds for run_of_case in runs) for runs in (plain, drafted)]
    row = {
        "case": name,
        "batch": len(prompts),
        "plain_tokens_per_second": round(made / seconds[0], 1),
        "drafted_tokens_per_second": round(made / seconds[1], 1),
        "speedup": round(seconds[0] / seconds[1], 3),
        "tokens_per_pass": round(made / passes, 2),
        "accepted": round(accepted / offered, 3) if offered else None,
        "same_rows": f"{len(prompts) - len(gaps)} of {len(prompts)}",
        "gaps_where_not": gaps,
        "seconds": {"plain": [x.seconds for x in plain], "drafted": [x.seconds for x in drafted]},
    }
    print(line(row), flush=True)
    return row


def gaps_of(plain: Timed, other: Timed) -> list[dict[str, Any]]:
    """For each differing row: the number of equal tokens, and the gap of the two log-probabilities."""
    gaps = []
    for row, tokens in enumerate(plain.tokens):
        at = next((i for i, (a, b) in enumerate(zip(tokens, other.tokens[row], strict=False)) if a != b), None)
        if at is not None:
            gaps.append({"row": row, "after": at, "gap": abs(plain.logprobs[row][at] - other.logprobs[row][at])})
    return gaps


def stories(arguments: Arguments) -> Iterator[Row]:
    config, params, tokenizer = llama_jax.load(dtype="float32")
    assert tokenizer is not None
    prompts = [tokenizer.encode(text) for text in OPENINGS]
    for batch in (1, 8):
        for name, sampling in (("greedy", Sampling()), ("sampled", Sampling(temperature=0.8, top_p=0.95, seed=7))):
            what = f"stories, bundled model, {name}"
            yield compare(what, (config, params), prompts[:batch], PromptLookup(), arguments, sampling=sampling)


def shape(name: str, seed: int) -> tuple[Any, Any]:
    config = llama_jax.preset(name)
    return config, llama_jax.init(config, jax.random.key(seed))


def random_prompts(config: Any, batch: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, config.vocab_size, (batch, 16)).tolist()


def copied(arguments: Arguments) -> Iterator[Row]:
    for name in ("stories-15m", "stories-110m"):
        model = shape(name, 0)
        for batch in (1, 8):
            prompts = random_prompts(model[0], batch)
            yield compare(f"copied, {name}", model, prompts, PromptLookup(), arguments)


def chats(arguments: Arguments) -> Iterator[Row]:
    if arguments.model is None:
        raise SystemExit("--cases chats needs an instruct model; pass its file or folder as --model")
    quantize = None if arguments.quantize == "none" else arguments.quantize
    config, params, tokenizer = llama_jax.load(arguments.model, "float32", quantize=quantize)
    draft = PromptLookup() if arguments.draft is None else DraftModel(*llama_jax.load(arguments.draft, "float32")[:2])
    for name, requests in (("questions", QUESTIONS), ("copies", COPIES)):
        for text in requests:
            prompts, ends = [encode_chat(tokenizer, [{"role": "user", "content": text}])], reply_ends(tokenizer)
            what = f"chats, {name}: {text[:20]}"
            yield compare(what, (config, params), prompts, draft, arguments, stop_tokens=ends)


def line(row: Row) -> str:
    accepted = "-" if row["accepted"] is None else f"{row['accepted']:.2f}"
    return (
        f"| {row['case']} | {row['batch']} | {row['plain_tokens_per_second']:,.1f} | {row['drafted_tokens_per_second']:,.1f}"
        f" | {row['speedup']:.2f} | {row['tokens_per_pass']:.2f} | {accepted} | {row['same_rows']} |"
    )


def main(arguments: Arguments) -> None:
    print("| case | batch | plain, tokens/s | drafted | speed-up | tokens/pass | accepted | same rows |")
    print("|---|---|---|---|---|---|---|---|")
    cases = {"stories": stories, "copied": copied, "chats": chats}
    report = describe_run(arguments) | {"rows": []}
    for case in arguments.cases:
        for row in cases[case](arguments):
            report["rows"].append(row)
            write_report(arguments.output, report)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
