"""Needle in a haystack: does a model find one sentence in a long text, and does that depend on its position?

    python experiments/needle.py PATH --data book.txt --lengths 512 2048 --depths 0 0.5 1 --plot needle.png

A pass key is hidden in a text at every depth of every length, and the model is asked for it (Mohtashami and Jaggi 2023,
section 4.2). Small models rarely repeat all digits of the key. The test therefore compares the key's probability with those
of other numbers with as many digits, which are not hidden: a model that has found the needle, even in part, prefers the key.
The trials hide the same numbers in turn. If the number of trials is a multiple of the number of keys, each key is hidden
equally often, so that the model's preferences among the numbers cancel out.

A prompt is assembled from tokens, so that it has exactly the requested length including its answer: BOS if the vocabulary
has one, haystack, needle, haystack, question. The needle is moved back by up to 64 tokens to stand between two words. A
trial has the same key and the same haystack at every depth, and at every length as far as the haystack is shared, so that
cells can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tyro
from plotting import new_figure

from llama_jax.config import LlamaConfig
from llama_jax.data.load_corpus import MegabyteProgress
from llama_jax.errors import TokenizerError, UserError
from llama_jax.evaluation.loglikelihood import Continuation, score_pairs
from llama_jax.model.checks import check_tokens
from llama_jax.model.params import LlamaParams
from llama_jax.tokenizers import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATEMENT = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is {key}"
FARTHEST = 64  # maximum tokens by which the needle is moved back to stand between words


class Keys(NamedTuple):
    """The N keys in tokens.

    Attributes:
      statements: the needle with each key.
      question: the prompt after the haystack, up to the first token in which the keys differ.
      answers: the rest with each key.
    """

    statements: list[list[int]]
    question: list[int]
    answers: list[list[int]]


class Trial(NamedTuple):
    """The hidden key, and where in the haystack the text begins, as a fraction."""

    key: int
    start: float


@dataclass(frozen=True)
class NeedleCell:
    """All trials of one length and depth.

    Attributes:
      length: tokens of the prompt with its answer.
      depth: position of the needle: 0 at the beginning, 1 just before the question.
      trials: number of trials.
      exact: share of trials in which every token of the key was the most probable one, so that greedy decoding writes it.
      chosen: share in which the key was more probable than each of the wrong keys; 1 / (wrong keys + 1) by chance.
      rank: mean rank of the key among all keys, from 1.
      log_probability: mean natural logarithm of the whole key's probability.
      margin: `log_probability` minus its mean over the wrong keys; 0 for a model that does not find the needle, whatever its
        preferences among numbers. The most sensitive of these measures.
    """

    length: int
    depth: float
    trials: int
    exact: float
    chosen: float
    rank: float
    log_probability: float
    margin: float


@dataclass(frozen=True)
class NeedleTest:
    """Results of `needle`: `cells` by length, then by depth, both ascending.

    Attributes:
      lengths, depths: lengths and depths of the cells.
      wrong_keys: number of wrong keys with which each key was compared.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    wrong_keys: int
    cells: tuple[NeedleCell, ...]

    def grid(self, name: str) -> np.ndarray:
        """The field `name` of every cell, float64[depths, lengths]."""
        values = [getattr(cell, name) for cell in self.cells]
        return np.array(values, np.float64).reshape(len(self.lengths), len(self.depths)).T


def needle(
    config: LlamaConfig,
    params: LlamaParams,
    tokenizer: Tokenizer,
    haystack: Sequence[int] | np.ndarray,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 10,
    wrong_keys: int = 9,
    seed: int = 0,
    statement: str = STATEMENT,
    question: str = QUESTION,
    digits: int = 5,
    batch: int | None = None,
    progress: MegabyteProgress | None = None,
) -> NeedleTest:
    """Run the test described in the module docstring.

    Args:
      haystack: tokens of a text without special tokens, int[n], at least as many as in the longest prompt.
      lengths: tokens of a prompt with its answer; may exceed `config.max_seq_len`, to measure what happens there.
      trials: trials for each length and depth, each with another part of the haystack.
      statement, question: texts that contain {key}; the question ends with it.
      batch: rows processed at once, see `score_pairs`.

    Raises:
      UserError: the haystack is too short, or a length is too small for needle and question.
      TokenizerError: the vocabulary cannot distinguish the keys.
    """
    haystack, lengths, depths = np.asarray(haystack), sorted(lengths), sorted(depths)
    check_tokens(config, haystack)
    if haystack.size < lengths[-1]:
        raise UserError(f"length={lengths[-1]} needs a haystack of at least that many tokens; this one has {haystack.size}")
    keys = encode_keys(tokenizer, draw_keys(wrong_keys + 1, digits, seed), statement, question)
    start = [tokenizer.bos_id] if tokenizer.add_bos else []
    overhead = len(start) + len(keys.question) + max(map(len, keys.statements)) + max(map(len, keys.answers))
    if lengths[0] <= overhead:
        raise UserError(f"length={lengths[0]} is too small: needle and question already take {overhead} tokens")
    starts = np.random.default_rng([seed, 1]).random(trials)
    drawn = [Trial(number % len(keys.answers), float(start_of_haystack)) for number, start_of_haystack in enumerate(starts)]
    words = word_starts(tokenizer, haystack)
    cells: list[NeedleCell] = []
    for length in lengths:
        prompts = [lay_prompt(start, haystack, words, keys, trial, length, depth) for depth in depths for trial in drawn]
        pairs = [Continuation(prompt, answer) for prompt in prompts for answer in keys.answers]
        pair_scores = score_pairs(
            config, params, pairs, context=length + max(map(len, keys.answers)), batch=batch, progress=progress
        )
        scores = np.array([score.logprob for score in pair_scores]).reshape(len(prompts), -1)
        best = np.array([score.greedy for score in pair_scores]).reshape(scores.shape)
        cells += _cells(length, depths, scores, best, np.array([trial.key for trial in drawn]))
    return NeedleTest(tuple(lengths), tuple(depths), wrong_keys, tuple(cells))


def _cells(
    length: int, depths: Sequence[float], scores: np.ndarray, best: np.ndarray, hidden: np.ndarray
) -> list[NeedleCell]:
    """A cell for every depth, from the results of `_measure` [depths, trials] and the hidden keys int[trials]."""
    trials, count = len(hidden), scores.shape[1]
    chosen = np.arange(count) == np.tile(hidden, len(depths))[:, None]
    right = scores[chosen][:, None]
    wrong = scores[~chosen].reshape(-1, count - 1)
    # Ties and NaN rank above the key: otherwise a model without any knowledge could rank it first by chance.
    ranks = 1 + (~(wrong < right)).sum(axis=1)
    columns = best[chosen], ranks == 1, ranks, right[:, 0], right[:, 0] - wrong.mean(axis=1)
    of_depth = [np.asarray(column, np.float64).reshape(len(depths), trials).mean(axis=1) for column in columns]
    return [NeedleCell(length, depth, trials, *(float(column[i]) for column in of_depth)) for i, depth in enumerate(depths)]


def draw_keys(count: int, digits: int, seed: int) -> list[str]:
    """Distinct random numbers without a leading zero."""
    random = np.random.default_rng([seed, 0])
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys[str(random.integers(10 ** (digits - 1), 10**digits))] = None
    return list(keys)


def encode_keys(tokenizer: Tokenizer, keys: Sequence[str], statement: str, question: str) -> Keys:
    """Needle, question and answers in tokens; each sentence is encoded as a whole, as in a text."""
    # If the vocabulary does not put a space before a text, a sentence starts with one.
    space = "" if tokenizer.space_prefix else " "
    said, asked = (
        [tokenizer.encode(space + sentence.replace("{key}", key), bos=False, eos=False) for key in keys]
        for sentence in (statement, question)
    )
    # A key may begin inside a token, or all keys may share their first token: tokens shared by all belong to the question.
    shared = next((i for i, tokens in enumerate(zip(*asked, strict=False)) if len(set(tokens)) > 1), len(asked[0]))
    answers = [tokens[shared:] for tokens in asked]
    if len(set(map(tuple, answers))) < len(keys) or not all(answers):
        raise TokenizerError(
            f"the vocabulary cannot distinguish {' and '.join(keys[:2])}: it has no digits; pass another with --tokenizer"
        )
    return Keys(said, asked[0][:shared], answers)


def word_starts(tokenizer: Tokenizer, haystack: np.ndarray) -> np.ndarray:
    """Mask bool[n] of the haystack's tokens that begin with white space, so that a sentence can be put before them."""
    used, places = np.unique(haystack, return_inverse=True)
    spaces = [tokenizer.token_bytes(int(token))[:1].isspace() for token in used]
    return np.array(spaces, bool)[places]


def lay_prompt(
    start: Sequence[int], haystack: np.ndarray, words: np.ndarray, keys: Keys, trial: Trial, length: int, depth: float
) -> np.ndarray:
    """The prompt of a trial without its answer, int32[n]; with the answer it has exactly `length` tokens."""
    said, answer = keys.statements[trial.key], keys.answers[trial.key]
    room = length - len(start) - len(said) - len(keys.question) - len(answer)
    # If the text is long enough, all lengths begin at the same place, so that shorter haystacks are prefixes of longer ones.
    begin = min(int(trial.start * haystack.size), haystack.size - room)
    hay = haystack[begin : begin + room]
    index = round(depth * room)
    near = np.flatnonzero(words[begin : begin + room][max(index - FARTHEST, 0) : index + 1])
    if 0 < index < room and len(near):
        index = max(index - FARTHEST, 0) + int(near[-1])
    return np.concatenate([start, hay[:index], said, hay[index:], keys.question]).astype(np.int32)


def draw(results: NeedleTest, title: str) -> Figure:
    """Draw a heat map of depth over length: by how many nats the key is preferred to the wrong ones."""
    figure = new_figure(6, 4.5)
    axes, margins = figure.subplots(), results.grid("margin")
    low, high = min(margins.min(), 0.0), max(margins.max(), 1.0)
    figure.colorbar(axes.imshow(margins, aspect="auto", cmap="cividis", vmin=low, vmax=high), ax=axes)
    axes.set_xticks(range(len(results.lengths)), [f"{length:,}" for length in results.lengths])
    axes.set_yticks(range(len(results.depths)), [f"{depth:.0%}" for depth in results.depths])
    axes.set(xlabel="tokens of the prompt", ylabel="depth of the needle", title=f"{title}: key above wrong keys, nats")
    for (row, column), margin in np.ndenumerate(margins):
        color = "white" if margin < (low + high) / 2 else "black"
        axes.text(column, row, f"{margin:.2g}", ha="center", va="center", fontsize=8, color=color)
    return figure


def as_page(results: NeedleTest) -> str:
    """A table of depth over length for each measure."""
    parts = []
    for title, name, form in (
        (f"key preferred to {results.wrong_keys} wrong ones", "chosen", "{:.0%}"),
        ("log-probability above that of the wrong ones, nats (0 by chance)", "margin", "{:+.2f}"),
        ("key written exactly by greedy decoding", "exact", "{:.0%}"),
    ):
        grid = results.grid(name)
        rows = [("depth", [f"{length:,}" for length in results.lengths])]
        for depth, row in zip(results.depths, grid, strict=True):
            rows.append((f"{depth:.0%}", [form.format(share) for share in row]))
        rows.append(("all", [form.format(share) for share in grid.mean(axis=0)]))
        parts.append("\n".join([title, *(f"{head:>6}" + "".join(f"{cell:>9}" for cell in cells) for head, cells in rows)]))
    return "\n\n".join(parts)


@dataclass(frozen=True)
class Arguments:
    """Hide a pass key in a text at every depth of every length, and measure whether the model finds it."""

    path: tyro.conf.Positional[Path]
    """A model's folder or file, of any format."""
    data: Path
    """A text file, used as the haystack."""
    lengths: tuple[int, ...] = ()
    """Tokens of the prompts with their answers; by default the model's context, half of it and a quarter of it."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Positions of the needle: 0 at the beginning, 1 just before the question."""
    trials: int = 10
    """Trials for each length and depth."""
    plot: Path | None = None
    """Output picture."""
    dtype: str | None = None
    quantize: str | None = None


def main(arguments: Arguments) -> None:
    from tqdm import tqdm

    import llama_jax

    a = arguments
    config, params, tokenizer = llama_jax.load(a.path, a.dtype, quantize=a.quantize)
    haystack = tokenizer.encode(a.data.read_text("utf-8", errors="replace"), bos=False, eos=False)
    results = needle(
        config,
        params,
        tokenizer,
        haystack,
        lengths=a.lengths or [config.max_seq_len // part for part in (4, 2, 1)],
        depths=a.depths,
        trials=a.trials,
        progress=tqdm,
    )
    print(as_page(results))
    if a.plot is not None:
        draw(results, str(a.path)).savefig(a.plot)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
