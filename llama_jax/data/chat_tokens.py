"""Chats and preferences as tokens, with the assistant's messages as their targets."""

from __future__ import annotations

import hashlib
import warnings
from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from llama_jax.data.chat_jsonl import Example, read_chats, read_labeled, read_preferences
from llama_jax.data.corpus import Corpus
from llama_jax.data.data_files import Paths, check_untouched, describe_source, find_files
from llama_jax.data.documents import RECORD_UNITS, errors_at, file_type, location
from llama_jax.errors import DataError, short_repr
from llama_jax.settings import check_fields
from llama_jax.tokenizers import Format, Tokenizer
from llama_jax.tokenizers.chat_targets import EncodedExample, ReplyEncoder
from llama_jax.tokenizers.chat_template import parse_template_args
from llama_jax.tokenizers.interface import special_pattern

TooLong = Literal["cut", "drop"]


@dataclass(frozen=True)
class ChatReading:
    """Settings for reading chats as tokens.

    Attributes:
      format: the chat format, see `tokenizers.resolve_format`. Prompts and completions that are texts have none.
      too_long: what to do with an example that exceeds a row: "cut" keeps its beginning, so that its last reply does not
        end, "drop" omits it. Both are counted.
      special: whether ``<|eot_id|>`` and the like are special tokens in prompts and completions that are texts, as in files
        with rendered chats; by default they are text. In messages they are always text.
      template_time: the time that a chat template writes (`strftime_now`), in ISO 8601; None for the current local time. A
        run that trains on such chats records that of its start, and keeps it when it is resumed.
      template_args: variables of the chat template, each as NAME=VALUE, for example enable_thinking=false.

    Raises:
      DataError: another `too_long`, or an invalid time.
    """

    format: Format = "auto"
    too_long: TooLong = "cut"
    special: bool = False
    template_time: str | None = None
    template_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_time(self.template_time)
        parse_template_args(self.template_args)
        check_fields(self, DataError)


def check_time(template_time: str | None) -> None:
    """Raise DataError for a time that is not in ISO 8601."""
    try:
        datetime.fromisoformat(template_time or "2026-01-01")
    except (TypeError, ValueError):
        raise DataError(
            f"template_time={short_repr(template_time, 40)} must be a date or a time such as 2026-07-31T12:00:00"
        ) from None


@dataclass
class ExampleCounts:
    """Counts of the examples read, kept and dropped.

    Attributes:
      read: examples in the files.
      kept: examples to train on; the others are in the next two counts, and in `same`.
      without_targets: dropped because they have none of the assistant's tokens.
      too_long: dropped by `ChatReading.too_long`.
      cut: kept in part.
      tokens, targets: counted in the kept examples.
      longest: tokens of the longest example, before cutting.
      same: pairs dropped because both answers have the same tokens after cutting.
    """

    read: int = 0
    kept: int = 0
    without_targets: int = 0
    too_long: int = 0
    cut: int = 0
    tokens: int = 0
    targets: int = 0
    longest: int = 0
    same: int = 0

    def __str__(self) -> str:
        share = self.targets / max(self.tokens, 1)
        dropped = f"{self.without_targets:,} dropped without a target, {self.too_long:,} as too long"
        if self.same:
            dropped += f", {self.same:,} because both answers are the same when cut"
        return (
            f"{self.kept:,} of {self.read:,} examples, {self.tokens:,} tokens, {share:.1%} of them targets; {dropped};"
            f" {self.cut:,} cut; the longest has {self.longest:,} tokens"
        )


class Chats(NamedTuple):
    """Conversations to train on, each a document with targets, and counts of the examples."""

    corpus: Corpus
    counts: ExampleCounts


class Preferences(NamedTuple):
    """Two corpora: document n of the first is preferred to document n of the second; targets are the answers."""

    chosen: Corpus
    rejected: Corpus
    counts: ExampleCounts


class LabeledAnswers(NamedTuple):
    """Single answers, and whether each is good: bool[N]."""

    answers: Corpus
    desirable: np.ndarray
    counts: ExampleCounts


def open_chats(paths: Paths, tokenizer: Tokenizer, length: int, reading: ChatReading = ChatReading()) -> Chats:
    """The conversations of files as tokens and targets, in memory; see `read_chats` for the forms of a line.

    Args:
      paths: JSONL, JSON, Parquet and Arrow files, or folders of them, see `data_files.find_files`.
      length: T, predicted tokens of the rows that they are for: a conversation has at most T + 1 tokens.

    Raises:
      DataError: a line that cannot be used, by its file, line and field; or files without a target.

    Warns if no target is a token that ends a reply, since a model trained on them would never end one; if texts contain the
    names of special tokens as plain text; and of fields that are ignored.
    """
    corpora, counts, _ = _read_examples(paths, tokenizer, length, reading, read_chats)
    return Chats(corpora[0], counts)


def open_preferences(paths: Paths, tokenizer: Tokenizer, length: int, reading: ChatReading = ChatReading()) -> Preferences:
    """Preferred and rejected answers as tokens and targets; see `read_preferences`, and `open_chats` for the rest.

    A pair is dropped if one of its answers is, or if both answers are the same after cutting. Token counts include both
    answers, each with the prompt.
    """
    corpora, counts, _ = _read_examples(paths, tokenizer, length, reading, read_preferences)
    return Preferences(corpora[0], corpora[1], counts)


def open_labeled(paths: Paths, tokenizer: Tokenizer, length: int, reading: ChatReading = ChatReading()) -> LabeledAnswers:
    """Single answers as tokens and targets, with their labels; see `read_labeled`, and `open_chats` for the rest."""
    corpora, counts, desirable = _read_examples(paths, tokenizer, length, reading, read_labeled)
    return LabeledAnswers(corpora[0], np.array(desirable, bool), counts)


def examples_of(paths: Paths, read: Callable[[Path], Iterator[Example]]) -> Iterator[tuple[Path, Example]]:
    """The examples in files, each with its file.

    Raises:
      DataError: a file of another type, or one that changes while being read.
    """
    files = find_files(paths)
    for file in files:
        if file_type(file) not in RECORD_UNITS:
            raise DataError(f"{file} has no chats or other examples; use files that end in {', '.join(RECORD_UNITS)}")
    for file in files:
        source = describe_source(file)
        yield from ((file, example) for example in read(file))
        check_untouched(file, source)


def encode_example(encoder: ReplyEncoder, example: Example, *, special: bool = False) -> tuple[EncodedExample, ...]:
    """The tokens of an example, one sequence for each of its answers.

    Args:
      special: see `ChatReading`.

    Raises:
      GenerationError, TokenizerError: see `ReplyEncoder`.
    """
    sequences = []
    for answer in example.answers:
        if isinstance(example.prompt, str) and isinstance(answer, str):
            sequences.append(encoder.pair(example.prompt, answer, special=special))
        else:  # the readers of examples refuse texts beside messages
            assert not isinstance(answer, str)
            assert not (isinstance(example.prompt, str) and example.prompt)
            sequences.append(encoder.chat([*example.prompt, *answer], len(example.prompt), example.tools))
    return tuple(sequences)


def for_format(encoder: ReplyEncoder, example: Example) -> Example:
    """The example as its chat format can write it: only a checkpoint's template may write names of speakers.

    Raises:
      GenerationError: messages without a chat format.
    """
    is_text = isinstance(example.answers[0] if example.answers else example.prompt, str)
    if is_text or encoder.format == "template":
        return example

    def without_names(messages: Any) -> Any:
        return tuple({key: value for key, value in message.items() if key != "name"} for message in messages)

    unnamed = example._replace(prompt=without_names(example.prompt), answers=tuple(map(without_names, example.answers)))
    return unnamed if unnamed == example else unnamed._replace(ignored=(*example.ignored, "name of messages"))


def warn_of_ignored(ignored: Collection[str], where: str) -> None:
    """Warn of fields of examples that have no effect, in one line."""
    if ignored:
        warnings.warn(f"{where}: ignored fields: {', '.join(sorted(ignored))}", stacklevel=4)


def shorten_example(encoded: EncodedExample, length: int, too_long: TooLong) -> EncodedExample | None:
    """At most T + 1 tokens of an example; None if it is longer and `too_long` is "drop"."""
    if len(encoded.ids) <= length + 1:
        return encoded
    return None if too_long == "drop" else EncodedExample(encoded.ids[: length + 1], encoded.targets[: length + 1])


def _read_examples(
    paths: Paths,
    tokenizer: Tokenizer,
    length: int,
    reading: ChatReading,
    read: Callable[[Path], Iterator[Example]],
) -> tuple[list[Corpus], ExampleCounts, list[bool | None]]:
    counts = ExampleCounts()
    builders: list[_CorpusBuilder] = []
    desirable: list[bool | None] = []
    special = special_pattern(tokenizer.special_tokens)
    spelled = ""  # the first text that spells a special token
    ignored: set[str] = set()
    template_args = parse_template_args(reading.template_args)
    with ReplyEncoder(tokenizer, reading.format, reading.template_time, template_args) as encoder:
        for file, example in examples_of(paths, read):
            where = location(file, example.line)
            example = for_format(encoder, example)  # a missing format is not the line's fault
            ignored.update(example.ignored)
            with errors_at(where):
                answers = encode_example(encoder, example, special=reading.special)
            counts.read += 1
            counts.longest = max(counts.longest, *(len(encoded.ids) for encoded in answers))
            if not spelled and not reading.special:
                texts = [text for text in (example.prompt, *example.answers) if isinstance(text, str)]
                spelled = next((f"{where}: {short_repr(f[0])}" for text in texts if (f := special.search(text))), "")
            builders = builders or [_CorpusBuilder(tokenizer.vocab_size) for _ in answers]
            if _take(builders, answers, length, reading.too_long, counts):
                desirable.append(example.desirable)
        if not counts.targets:
            file_names = ", ".join(map(str, find_files(paths)))
            raise DataError(
                f"{file_names}: no example has a target ({counts}); are there `messages` of the assistant, is `length` large"
                " enough, and does {% generation %} in the chat template enclose the assistant's text?"
            )
        lengths = np.array([len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)], np.int64)
        corpora = [builder.corpus(lengths) for builder in builders]
        _warn(corpora, encoder, spelled)
    warn_of_ignored(ignored, ", ".join(map(str, find_files(paths))))
    return corpora, counts, desirable


def _take(
    builders: list[_CorpusBuilder],
    answers: tuple[EncodedExample, ...],
    length: int,
    too_long: TooLong,
    counts: ExampleCounts,
) -> bool:
    """Add an example to the corpora unless it is dropped; count it, and return whether it was kept."""
    shortened = [shorten_example(encoded, length, too_long) for encoded in answers]
    remaining = [encoded for encoded in shortened if encoded is not None]
    if len(remaining) < len(shortened):
        counts.too_long += 1
    elif not all(any(encoded.targets[1:]) for encoded in remaining):  # the first token is not predicted
        counts.without_targets += 1
    elif len(remaining) == 2 and remaining[0].ids == remaining[1].ids:
        counts.same += 1
    else:
        counts.kept += 1
        counts.cut += any(len(short.ids) < len(encoded.ids) for short, encoded in zip(remaining, answers, strict=True))
        for builder, encoded in zip(builders, remaining, strict=True):
            builder.add(encoded)
            counts.tokens += len(encoded.ids)
            counts.targets += sum(encoded.targets)
        return True
    return False


def _warn(corpora: list[Corpus], encoder: ReplyEncoder, spelled: str) -> None:
    ends = encoder.ends
    for corpus in corpora:
        if not np.isin(corpus.tokens[corpus.targets], ends).any():
            warnings.warn(
                f"no target is a token that ends a reply (ids {', '.join(map(str, ends)) or 'none'}), so a model trained"
                " on this never ends one; put the end of a turn into {% generation %} in the chat template, name the"
                " token as eos_token next to the vocabulary, or use longer rows if all examples are cut",
                stacklevel=4,
            )
            break
    if spelled:
        warnings.warn(
            f"{spelled} is a special token in the vocabulary but text in the data; if a chat template wrote it, read it"
            " with special=True, or use messages",
            stacklevel=4,
        )


@dataclass
class _CorpusBuilder:
    """Collects documents with their targets."""

    vocab_size: int
    tokens: array[int] = field(default_factory=lambda: array("I"))
    targets: bytearray = field(default_factory=bytearray)
    stops: array[int] = field(default_factory=lambda: array("q"))

    def add(self, encoded: EncodedExample) -> None:
        self.tokens.extend(encoded.ids)
        self.targets.extend(encoded.targets)
        self.stops.append(len(self.tokens))

    def corpus(self, lengths: np.ndarray) -> Corpus:
        """The documents as a corpus, given the number of bytes of each token of the vocabulary."""
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        tokens = np.array(self.tokens, dtype)
        targets = np.array(self.targets, np.uint8).astype(bool)
        stops = np.array(self.stops, np.int64)
        starts = np.concatenate([[0], stops[:-1]])
        bytes_so_far = np.concatenate([[0], np.cumsum(lengths[tokens] * targets)])
        digest = hashlib.sha256(stops.astype("<i8").tobytes())
        digest.update(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
        digest.update(targets.tobytes())
        return Corpus(
            tokens=tokens,
            starts=starts,
            stops=stops,
            byte_counts=bytes_so_far[stops] - bytes_so_far[starts],
            vocab_size=self.vocab_size,
            digest=digest.hexdigest(),
            targets=targets,
        )
