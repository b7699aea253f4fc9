"""Prompts for training with rewards: their tokens, and the columns used to judge the answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from llama_jax.data.chat_jsonl import read_prompts
from llama_jax.data.chat_tokens import examples_of, for_format, warn_of_ignored
from llama_jax.data.corpus import hold_out, row_order, unseen
from llama_jax.data.data_files import Paths, find_files
from llama_jax.data.documents import errors_at, location
from llama_jax.errors import DataError
from llama_jax.tokenizers import Format, ReplyEncoder, Tokenizer
from llama_jax.tokenizers.chat_template import parse_template_args

ANSWER_STREAM, VALIDATION_STREAM = 1 << 62, (1 << 62) + 1  # random streams in addition to those that shuffle data


@dataclass(frozen=True)
class PromptReading:
    """Settings for reading prompts as tokens; a recipe checks them.

    Attributes:
      format: chat format for prompts that are messages, see `tokenizers.resolve_format`. Texts have none.
      special: whether "<|eot_id|>" and the like are special tokens in texts; by default they are text.
      template_time, template_args: see `ChatReading`.
    """

    format: Format = "auto"
    special: bool = False
    template_time: str | None = None
    template_args: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class PromptSet:
    """Prompts, in the order of their files.

    Attributes:
      ids: tokens of each prompt.
      columns: for each field of the lines, its values for all prompts, including "prompt".
      stops: the tokens that end an answer.
      digest: SHA-256 of all this except the stops.
      dropped: number of prompts omitted because they were too long.
    """

    ids: tuple[tuple[int, ...], ...] = field(repr=False)
    columns: dict[str, list[Any]] = field(repr=False)
    stops: tuple[int, ...]
    digest: str
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.ids))

    @property
    def marks(self) -> np.ndarray:
        """uint64[N]: equal numbers for equal tokens."""
        digests = (hashlib.blake2b(np.array(ids, "<u4").tobytes(), digest_size=8).digest() for ids in self.ids)
        return np.frombuffer(b"".join(digests), "<u8")

    def select(self, numbers: Sequence[int] | np.ndarray) -> PromptSet:
        """The prompts with these indices, in this order."""
        columns = {name: [values[i] for i in numbers] for name, values in self.columns.items()}
        ids = tuple(self.ids[i] for i in numbers)
        return replace(self, ids=ids, columns=columns, digest=_prompts_digest(ids, columns), dropped=0)


class PromptBatch(NamedTuple):
    """Prompts of a step.

    Attributes:
      numbers: int64[P], indices of the prompts.
      seeds: uint32[P * group], seeds of the answers' random streams.
    """

    numbers: np.ndarray
    seeds: np.ndarray


def open_prompts(paths: Paths, tokenizer: Tokenizer, longest: int, reading: PromptReading = PromptReading()) -> PromptSet:
    """The prompts of files, in memory; see `read_prompts` for the form of a line.

    A text begins with BOS if the vocabulary has one; messages are a chat up to the beginning of the assistant's reply.

    Args:
      paths: see `chat_tokens.open_chats`.
      longest: maximum tokens of a prompt; longer ones are omitted and counted.

    Raises:
      DataError: a line that cannot be used, by its file, line and field; files with different columns; or no prompt that is
        short enough.
      GenerationError: messages without a chat format.
    """
    ids: list[tuple[int, ...]] = []
    columns: dict[str, list[Any]] = {}
    sizes: list[int] = []
    ignored: set[str] = set()
    template_args = parse_template_args(reading.template_args)
    with ReplyEncoder(tokenizer, reading.format, reading.template_time, template_args) as encoder:
        for file, example in examples_of(paths, read_prompts):
            example = for_format(encoder, example)  # a missing format is not the line's fault
            ignored.update(example.ignored)
            with errors_at(location(file, example.line)):
                tokens = encoder.prompt(example.prompt, example.tools, special=reading.special)
            if not tokens:
                raise DataError(f"{location(file, example.line)}: prompt='' has no token; write at least one")
            columns = columns or {name: [] for name in example.columns}
            if set(columns) != set(example.columns):
                differing = ", ".join(sorted(set(columns) ^ set(example.columns)))
                raise DataError(f"{file} has other fields than the files before it ({differing}); use the same in all")
            sizes.append(len(tokens))
            if len(tokens) <= longest:
                ids.append(tuple(tokens))
                for name, value in example.columns.items():
                    columns[name].append(value)
        stops = encoder.ends
    file_names = ", ".join(map(str, find_files(paths)))
    warn_of_ignored(ignored, file_names)
    if not ids:
        short = f": the shortest of {len(sizes)} has {min(sizes)}" if sizes else ""
        raise DataError(f"{file_names}: no prompt has at most {longest} tokens{short}; use longer rows, or shorter answers")
    return PromptSet(tuple(ids), columns, stops, _prompts_digest(ids, columns), len(sizes) - len(ids))


def split_prompts(prompts: PromptSet, share: float, seed: int) -> tuple[PromptSet, PromptSet]:
    """Split prompts at random into training prompts and a share of evaluation prompts. Both keep their order; identical
    prompts are in the same part.

    Raises:
      DataError: all prompts are the same.
    """
    marks = prompts.marks
    train, validation = map(prompts.select, hold_out(marks, max(round(share * len(marks)), 1), seed, "prompt"))
    return replace(train, dropped=prompts.dropped), validation


def without_prompts(prompts: PromptSet, validation: PromptSet) -> PromptSet:
    """The prompts that are not among others; DataError if all are."""
    return replace(prompts.select(unseen(prompts.marks, validation.marks, "prompt")), dropped=prompts.dropped)


def prompt_batch(count: int, prompts: int, group: int, *, seed: int, number: int) -> PromptBatch:
    """The prompts of batch `number`, from 0: in a different order in every epoch; a batch may span its end.

    The random streams of the answers depend only on the seed, the prompt's position in the whole training and the answer's
    index, so that a resumed run samples the same.

    Args:
      count: number of prompts.
      prompts: P, prompts per batch.
      group: answers per prompt.

    Raises:
      DataError: an invalid seed.
    """
    places = number * prompts + np.arange(prompts)
    epochs, at = np.divmod(places, count)
    numbers = np.array([_order(count, seed, int(epoch))[i] for epoch, i in zip(epochs, at, strict=True)])
    return PromptBatch(numbers, _seeds(places, group, seed, ANSWER_STREAM))


def validation_prompt_batch(numbers: np.ndarray, group: int, seed: int) -> PromptBatch:
    """Prompts with the indices int64[P], with the same random streams at every evaluation."""
    return PromptBatch(numbers, _seeds(numbers, group, seed, VALIDATION_STREAM))


_order = lru_cache(maxsize=2)(row_order)


def _seeds(positions: np.ndarray, group: int, seed: int, stream: int) -> np.ndarray:
    """uint32[P * group]; different within a group."""
    key = np.array([seed, stream], np.uint64)
    drawn = [
        np.random.Philox(key=key, counter=np.array([position, 0, 0, 0], np.uint64)).random_raw() for position in positions
    ]
    of_prompts = (np.array(drawn, np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return (of_prompts[:, None] + np.arange(group, dtype=np.uint32)).reshape(-1)


def _prompts_digest(ids: Sequence[Sequence[int]], columns: dict[str, list[Any]]) -> str:
    digest = hashlib.sha256()
    for row in ids:
        digest.update(np.array([len(row), *row], "<u4").tobytes())
    digest.update(json.dumps(columns, sort_keys=True, default=str).encode())  # tables have dates, among others
    return digest.hexdigest()
