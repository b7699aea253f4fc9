"""``llama-jax data``: show training data as tokens and targets, and tokenize many files ahead of training."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from llama_jax.cli.options import DocumentOptions, ModelPath, TemplateArgOption, stored_tokenizer
from llama_jax.cli.terminal import columns, print_status, printable
from llama_jax.errors import UserError
from llama_jax.runs.log import progress_counter
from llama_jax.settings import at_least
from llama_jax.tokenizers import EncodedExample, Format, ReplyEncoder, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from llama_jax.data.chat_jsonl import Example

SHOW = "Show chats and preferences as tokens, as in training."
BUILD = "Tokenize files into a corpus of token ids, on all cores."
TARGET, SPECIAL, PLAIN = "\x1b[32m", "\x1b[36m", "\x1b[0m"


@dataclass(frozen=True, kw_only=True)
class ShowData(TemplateArgOption):
    """Show chats and preferences as tokens: the id and the text of each, and whether it is a target."""

    file: tyro.conf.Positional[Annotated[ModelPath, tyro.conf.arg(metavar="FILE")]]
    """A .jsonl, .json, .parquet or .arrow whose lines or rows are chats (messages, or ShareGPT's conversations), a prompt
    and a completion, an instruction and an output (Alpaca), or preferences (prompt, chosen, rejected)."""
    model: ModelPath | None = None
    """Folder or file of a model, for its vocabulary and chat template. The default is the bundled stories model."""
    tokenizer: ModelPath | None = None
    """A SentencePiece .model, a Llama 3 tokenizer.model, a tokenizer.json, a GGUF or a folder, instead of the model's."""
    format: Format = "auto"
    """Chat format. auto takes the model's own template, or llama3 for the vocabulary of Llama 3."""
    data_type: Literal["auto", "chats", "preferences"] = "auto"
    """Kind of the lines. auto takes preferences if the first line has chosen and rejected."""
    examples: Annotated[int, at_least(1)] = 1
    """Number of examples to show."""
    line: Annotated[int, at_least(1)] = 1
    """Line or row of the first example, or the next one that has one."""
    length: Annotated[int, at_least(1)] | None = None
    """Predicted tokens of a row: longer examples are cut or dropped, as in training with this length."""
    too_long: Literal["cut", "drop"] = "cut"
    """With --length: how to treat longer examples."""
    special: bool = False
    """Read "<|eot_id|>" and the like in prompts and completions as special tokens, not as text."""
    count: bool = False
    """Read the whole file and count the examples that are kept, dropped and cut."""
    color: Literal["auto", "always", "never"] = "auto"
    """Print targets in green and special tokens in cyan. auto does so on a terminal unless NO_COLOR is set."""
    json: bool = False
    """Print one JSON object per example."""

    def run(self) -> None:
        from llama_jax.data.chat_jsonl import read_chats, read_preferences
        from llama_jax.data.chat_tokens import (
            ChatReading,
            encode_example,
            for_format,
            open_chats,
            open_preferences,
            shorten_example,
            warn_of_ignored,
        )
        from llama_jax.data.data_files import find_files
        from llama_jax.data.documents import RECORD_UNITS, file_type, first_fields
        from llama_jax.formats.loading import bundled, open_checkpoint

        if self.length is None and self.too_long == "drop":
            raise UserError("--too-long drop needs --length, the predicted tokens of a row")
        if self.tokenizer is not None:
            tokenizer = load_tokenizer(self.tokenizer)
        else:
            path = bundled() if self.model is None else self.model
            tokenizer = stored_tokenizer(path, open_checkpoint(path))
        file, *_ = find_files(self.file)
        if file_type(file) not in RECORD_UNITS or self.file.is_dir():
            raise UserError(f"{self.file} is not a file that ends in {', '.join(RECORD_UNITS)}")
        is_pair = self.data_type == "auto" and {"chosen", "rejected"} <= first_fields([file])
        is_preferences = self.data_type == "preferences" or is_pair
        examples = (
            example for example in (read_preferences if is_preferences else read_chats)(file) if example.line >= self.line
        )
        answers: tuple[EncodedExample | None, ...] | None = None  # of the last example, None for an answer that is dropped
        ignored: set[str] = set()
        with ReplyEncoder(tokenizer, self.format, template_args=self.template_args()) as encoder:
            for example in islice(examples, self.examples):
                where = f"{self.file}, {RECORD_UNITS[file_type(file)]} {example.line}"
                try:
                    example = for_format(encoder, example)
                    answers = encode_example(encoder, example, special=self.special)
                except UserError as error:
                    raise UserError(f"{where}: {error}") from None
                ignored.update(example.ignored)
                if self.length is not None:
                    answers = tuple(answer and shorten_example(answer, self.length, self.too_long) for answer in answers)
                print(
                    json.dumps(as_facts(tokenizer, example, answers)) if self.json else self._page(tokenizer, where, answers)
                )
        if answers is None:
            raise UserError(f"{self.file} has no example from line {self.line} on")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if self.count:
                reading = ChatReading(self.format, self.too_long, self.special, template_args=self.template_arg)
                read = open_preferences if is_preferences else open_chats
                print(read(self.file, tokenizer, self.length or 1 << 30, reading).counts, file=sys.stderr)
            else:
                warn_of_ignored(ignored, str(file))
        for warning in warned:
            print_status(str(warning.message))

    def _page(self, tokenizer: Tokenizer, where: str, answers: Sequence[EncodedExample | None]) -> str:
        colored = self.color == "always"
        if self.color == "auto":
            colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        names = ("",) if len(answers) == 1 else (" · chosen", " · rejected")
        parts = []
        for name, encoded in zip(names, answers, strict=True):
            heading = f"{printable(where)}{name}"
            if encoded is None:
                parts.append(f"{heading}: dropped, because it has over {self.length} + 1 tokens")
                continue
            heading += f": {len(encoded.ids):,} tokens, {sum(encoded.targets):,} targets"
            parts.append("\n".join([heading, *table(tokenizer, encoded, colored=colored)]))
        return "\n\n".join(parts) + "\n"


@dataclass(frozen=True, kw_only=True)
class BuildData(DocumentOptions):
    """Tokenize files into a corpus of token ids."""

    files: tyro.conf.Positional[Annotated[tuple[ModelPath, ...], tyro.conf.arg(metavar="FILE ...")]]
    """Text, JSONL, JSON (all also as .gz or .zst), Parquet or Arrow files, or folders of them, such as one split of a
    Hugging Face dataset."""
    out: Path
    """Folder for tokens.corpus, which train and eval accept as --data. Its bytes depend only on the files, the tokenizer and
    the settings. The same command resumes after a stop."""
    tokenizer: ModelPath | None = None
    """A SentencePiece .model, a Llama 3 tokenizer.model, a tokenizer.json, a GGUF or a folder with one. The default is the
    vocabulary of the bundled stories model."""
    processes: Annotated[int, at_least(1)] | None = None
    """Number of processes. The default is one per core."""
    unit: Annotated[int, at_least(1)] | None = None
    """Approximate size of the pieces of a file that a process takes at a time, in megabytes. The default is 1/128 of all
    files, between 8 and 64. Compressed files are not split."""
    drop_duplicates: bool = False
    """Drop documents whose tokens are the same as those of an earlier one."""

    def run(self) -> None:
        from llama_jax.data.build_corpus import BuildOptions, tokenize_files
        from llama_jax.formats.loading import bundled

        reading = self.document_format()
        unit = None if self.unit is None else self.unit << 20
        options = BuildOptions(reading, unit, self.drop_duplicates)
        began = time.perf_counter()
        with progress_counter("building", "parts") as progress:
            corpus = tokenize_files(
                self.files,
                self.out,
                bundled() if self.tokenizer is None else self.tokenizer,
                options=options,
                processes=self.processes,
                progress=progress,
            )
        seconds = time.perf_counter() - began
        left_out = f", {corpus.origin['duplicates']:,} duplicates left out" if self.drop_duplicates else ""
        print(
            f"{corpus.tokens:,} tokens of {corpus.documents:,} documents{left_out} in {self.out};"
            f" {corpus.text_bytes / seconds / 1e6:.1f} MB of text a second"
        )


@dataclass(frozen=True, kw_only=True)
class DataCommand:
    """Show training data as tokens, or tokenize it in advance."""

    action: tyro.conf.OmitSubcommandPrefixes[
        Annotated[ShowData, tyro.conf.subcommand("show", description=SHOW)]
        | Annotated[BuildData, tyro.conf.subcommand("build", description=BUILD)]
    ]
    """What to do."""

    def run(self) -> None:
        self.action.run()


def texts_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token: the name of a special one, else its text in quotes, or its bytes if they are not text."""
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    texts = []
    for token in ids:
        spelled = tokenizer.token_bytes(token)
        if token in names:
            texts.append(printable(names[token]))
            continue
        try:
            text = spelled.decode()
            texts.append(json.dumps(text, ensure_ascii=not text.isprintable()))
        except UnicodeDecodeError:
            texts.append("".join(f"<0x{byte:02X}>" for byte in spelled))
    return texts


def table(tokenizer: Tokenizer, encoded: EncodedExample, *, colored: bool = False) -> list[str]:
    """The lines of a table of tokens: place, id, text, and whether each is a target."""
    rows = [["", "id", "text", "mask"]]
    for position, (token, text, target) in enumerate(
        zip(encoded.ids, texts_of(tokenizer, encoded.ids), encoded.targets, strict=True)
    ):
        rows.append([str(position), str(token), text, "target" if target else "·"])
    lines = columns(rows, right=(0, 1), indent="  ").split("\n")
    if not colored:
        return lines
    special = set(tokenizer.special_tokens.values())
    for i, (token, target) in enumerate(zip(encoded.ids, encoded.targets, strict=True), 1):
        color = TARGET if target else SPECIAL if token in special else ""
        lines[i] = f"{color}{lines[i]}{PLAIN}" if color else lines[i]
    return lines


def as_facts(tokenizer: Tokenizer, example: Example, answers: Sequence[EncodedExample | None]) -> dict[str, Any]:
    """An example as JSON: of a preference the chosen answer first; a dropped one is null."""
    shown = [
        None
        if encoded is None
        else {"ids": encoded.ids, "texts": texts_of(tokenizer, encoded.ids), "targets": list(map(int, encoded.targets))}
        for encoded in answers
    ]
    return {"line": example.line, "answers": shown}
