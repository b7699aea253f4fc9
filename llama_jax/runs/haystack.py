"""Prompts in which a pass key is hidden in a long text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import TokenizerError, UserError, shown
from llama_jax.model.checks import check_tokens
from llama_jax.tokenizers import Tokenizer

STATEMENT = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is {key}"
MOST_KEYS = 10_000  # each is tried as the answer of every prompt
MOST_TRIALS = 1_000_000  # of each length and depth
DIGITS = 5
MOST_DIGITS = 18
FARTHEST = 64  # tokens that the needle is moved back at most, to stand between words


class Keys(NamedTuple):
    """The keys in tokens, N of them.

    Attributes:
      statements: the needle with each key.
      question: what follows the haystack, up to the first token in which the keys differ.
      answers: what follows the question with each key.
    """

    statements: list[list[int]]
    question: list[int]
    answers: list[list[int]]


class Trial(NamedTuple):
    """Which of the keys is hidden, and where in the haystack the text begins, as a fraction."""

    key: int
    start: float


class Prepared(NamedTuple):
    """What all prompts are made of: the tokens that begin a text, the keys, and the trials."""

    start: list[int]
    keys: Keys
    trials: list[Trial]


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """What is hidden, where, and how often; see `needle` for the fields and errors. Lengths and depths are sorted."""

    lengths: Sequence[int]
    depths: Sequence[float]
    trials: int
    wrong_keys: int
    seed: int
    statement: str
    question: str
    digits: int
    batch: int | None

    def __post_init__(self) -> None:
        for name, values in (("lengths", self.lengths), ("depths", self.depths)):
            if not len(values):
                raise UserError(f"{name} are empty; give at least one")
            if len(set(values)) < len(values):
                raise UserError(f"{name}={','.join(map(str, values))} has one of them twice")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise UserError(f"depth={depth} must be from 0, the beginning, to 1, just before the question")
        for name in ("trials", "wrong_keys", "digits", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value} must be at least 1")
        for name, most in (("digits", MOST_DIGITS), ("wrong_keys", MOST_KEYS), ("trials", MOST_TRIALS)):
            if getattr(self, name) > most:
                raise UserError(f"{name}={getattr(self, name)} are too many; give at most {most:,}")
        if self.wrong_keys >= 9 * 10 ** (self.digits - 1):
            raise UserError(
                f"wrong_keys={self.wrong_keys} are more than there are other numbers of digits={self.digits}; give fewer"
            )
        if self.seed < 0:
            raise UserError(f"seed={self.seed} must be at least 0")
        if "{key}" not in self.statement:
            raise UserError(f"statement={shown(self.statement)} must have {{key}} where the key is to stand")
        if not self.question.endswith("{key}") or self.question.count("{key}") > 1:
            raise UserError(f"question={shown(self.question)} must end with {{key}}, and have it nowhere else")
        object.__setattr__(self, "lengths", tuple(sorted(map(int, self.lengths))))
        object.__setattr__(self, "depths", tuple(sorted(map(float, self.depths))))


def prepare(config: LlamaConfig, tokenizer: Tokenizer, haystack: Sequence[int] | np.ndarray, hidden: Hidden) -> Prepared:
    """The part of `needle` that needs no parameters, all checks included; see there for arguments and errors."""
    haystack = np.asarray(haystack)
    check_tokens(config, haystack, "haystack token")
    shortest, longest = hidden.lengths[0], hidden.lengths[-1]
    if haystack.size < longest:
        raise UserError(
            f"length={longest} needs a haystack of as many tokens, and this one has {haystack.size}; give a longer text"
        )
    drawn = draw_keys(hidden.wrong_keys + 1, hidden.digits, hidden.seed)
    keys = encode_keys(tokenizer, drawn, hidden.statement, hidden.question)
    start = [tokenizer.bos_id] if tokenizer.add_bos else []
    overhead = sum(map(len, (start, keys.question))) + max(
        len(said) + len(answer) for said, answer in zip(keys.statements, keys.answers, strict=True)
    )
    if shortest <= overhead:
        raise UserError(f"length={shortest} leaves no haystack beside needle and question, which take {overhead} tokens")
    places = np.random.default_rng([hidden.seed, 1]).random(hidden.trials)
    trials = [Trial(number % len(keys.answers), float(place)) for number, place in enumerate(places)]
    return Prepared(start, keys, trials)


def draw_keys(count: int, digits: int, seed: int) -> list[str]:
    """Different random numbers without a leading zero."""
    random = np.random.default_rng([seed, 0])
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys[str(random.integers(10 ** (digits - 1), 10**digits))] = None
    return list(keys)


def encode_keys(tokenizer: Tokenizer, keys: Sequence[str], statement: str, question: str) -> Keys:
    """Needle, question and answers in tokens: each sentence encoded whole, as it would be in a text."""
    # Where the vocabulary does not put a space before a text, a sentence brings its own.
    space = "" if tokenizer.space_prefix else " "
    said, asked = (
        [tokenizer.encode(space + sentence.replace("{key}", key), bos=False, eos=False) for key in keys]
        for sentence in (statement, question)
    )
    # A key may begin inside a token, or all keys may share their first token: up to there it belongs to the question.
    shared = next((i for i, tokens in enumerate(zip(*asked, strict=False)) if len(set(tokens)) > 1), len(asked[0]))
    answers = [tokens[shared:] for tokens in asked]
    if len(set(map(tuple, answers))) < len(keys) or not all(answers):
        raise TokenizerError(
            f"the vocabulary does not tell {' and '.join(keys[:2])} apart: it has no digits; give another with --tokenizer"
        )
    return Keys(said, asked[0][:shared], answers)


def word_starts(tokenizer: Tokenizer, haystack: np.ndarray) -> np.ndarray:
    """Which tokens of the haystack begin with white space, so that a sentence may stand before them: bool[n]."""
    used, places = np.unique(haystack, return_inverse=True)
    spaces = [tokenizer.token_bytes(int(token))[:1].isspace() for token in used]
    return np.array(spaces, bool)[places]


def lay_prompt(
    start: Sequence[int], haystack: np.ndarray, words: np.ndarray, keys: Keys, trial: Trial, length: int, depth: float
) -> np.ndarray:
    """The prompt of a trial up to its answer, with which it has exactly `length` tokens: int32[n]."""
    said, answer = keys.statements[trial.key], keys.answers[trial.key]
    room = length - len(start) - len(said) - len(keys.question) - len(answer)
    # If the text is long enough all lengths begin at the same place, so that the shorter are prefixes of the longer.
    begin = min(int(trial.start * haystack.size), haystack.size - room)
    hay = haystack[begin : begin + room]
    place = round(depth * room)
    near = np.flatnonzero(words[begin : begin + room][max(place - FARTHEST, 0) : place + 1])
    if 0 < place < room and len(near):
        place = max(place - FARTHEST, 0) + int(near[-1])
    return np.concatenate([start, hay[:place], said, hay[place:], keys.question]).astype(np.int32)
