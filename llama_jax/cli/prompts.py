"""The prompts of ``generate``: from an argument, a file or stdin, or one for each line of a .jsonl."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path
from typing import BinaryIO, NamedTuple

from llama_jax.errors import GenerationError, reading, shown

STDIN = "-"
LARGEST = 256 << 20  # bytes of prompts; ten million tokens have 40
EXAMPLE = "pass some text to continue, such as 'Once upon a time'"


class PromptLine(NamedTuple):
    """A line of a .jsonl: the prompt, and the name of the adapter that it asks for, if any."""

    prompt: str
    adapter: str | None


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """The prompts, checked: one, or those of a .jsonl.

    Args:
      prompt: the text itself; ``-`` reads stdin.
      file: text in UTF-8, or a .jsonl whose lines are objects with "prompt"; ``-`` reads stdin as text. One line end at the
        end of a text is dropped, as a shell drops it from the output of a command.

    Raises:
      GenerationError: both or neither, a file that cannot be read, a prompt that is empty or not text, or a line that asks
        for an adapter.
    """
    if (prompt is None) == (file is None):
        both = "not both" if file else f"or {STDIN} for stdin"
        raise GenerationError(f"pass a prompt or --prompt-file FILE, {both}")
    if file is not None and str(file) != STDIN:
        where, content = str(file), _content(file)
        if file.suffix.lower() == ".jsonl":
            return [line.prompt for line in _without_adapters(_of_lines(content, where), where)]
    elif file is not None or prompt == STDIN:
        where, content = "stdin", _bounded("stdin", sys.stdin.buffer)
    else:
        assert prompt is not None
        try:
            content = prompt.encode()
        except UnicodeEncodeError:
            raise GenerationError("the prompt is not valid UTF-8; is the terminal's encoding (LANG) set?") from None
        if not prompt:
            raise GenerationError(f"the prompt is empty; {EXAMPLE}")
        return [prompt]
    text = _text(content, where).removesuffix("\n")
    if not text:
        raise GenerationError(f"the prompt in {where} is empty; {EXAMPLE}")
    return [text]


def read_lines(file: Path) -> list[PromptLine]:
    """The lines of a .jsonl; GenerationError for another file, or as `read_prompts`."""
    if file.suffix.lower() != ".jsonl":
        raise GenerationError(f"{file} is not a .jsonl, whose lines are objects with a prompt")
    return _of_lines(_content(file), str(file))


def _without_adapters(lines: list[PromptLine], where: str) -> list[PromptLine]:
    """The same lines; GenerationError where one asks for an adapter of its own."""
    adapter = next((line.adapter for line in lines if line.adapter is not None), None)
    if adapter is not None:
        raise GenerationError(
            f"{where} asks for the adapter {shown(adapter, 40)}, and generate has one for all prompts; use llama-jax batch,"
            " whose --adapter NAME=PATH names several"
        )
    return lines


def _content(file: Path) -> bytes:
    with reading(file, GenerationError), file.open("rb") as opened:
        return _bounded(str(file), opened)


def _bounded(where: str, file: BinaryIO) -> bytes:
    """The content of a file that may have no end."""
    content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise GenerationError(f"{where} has more than {LARGEST >> 20} MiB of prompts; split it into several files")
    return content


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise GenerationError(f"{where}, line {line} is not valid UTF-8; save the text as UTF-8") from None


def _of_lines(content: bytes, where: str) -> list[PromptLine]:
    from llama_jax.data.documents import json_objects

    found = []
    for value, number in json_objects(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), where):
        prompt = value.get("prompt")
        if not (isinstance(prompt, str) and prompt):
            raise GenerationError(f'{where}, line {number} must be an object like {{"prompt": "Once upon a time"}}')
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise GenerationError(
                f"{where}, line {number}: the prompt has half a surrogate pair, which is not text"
            ) from None
        adapter = value.get("adapter")
        if not (adapter is None or isinstance(adapter, str)):
            raise GenerationError(f"{where}, line {number}: adapter={shown(adapter, 40)} must be a name, or be left out")
        found.append(PromptLine(prompt, adapter))
    if not found:
        raise GenerationError(f"{where} holds no prompt; {EXAMPLE}")
    return found
