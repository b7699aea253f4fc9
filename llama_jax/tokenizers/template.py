"""A checkpoint's own chat template, which comes from whoever made the checkpoint: rendered in a process of its own.

The process (`sandbox`, which imports Jinja and nothing of this library) is ended after SECONDS on every system. On Linux it
gets MEMORY bytes and a few for each of the request's, and no more. On other systems, which have no such limit for a process,
memory is bounded by the sandbox's own budget, which does not know of everything. `render` costs the start of a Python and a
compilation, which a `Renderer` pays once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from llama_jax.child_process import START, ChildProcess, isolated
from llama_jax.errors import GenerationError, reason_of, shown

SECONDS = 5
MEMORY = 100 << 20  # bytes
MEMORY_PER_BYTE = 16  # of the template and the messages: texts on their way are copied
NEEDED = ("jinja2", "markupsafe")  # packages
USUAL = 1 << 20  # bytes of a request that a process which stays takes


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str,
    eos_token: str,
    reply: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    marks: tuple[str, str] = ("", ""),
) -> str:
    """The text of a chat.

    Args:
      messages: each with its "role" and "content".
      bos_token, eos_token: what stands for these tokens, "" for none.
      reply: whether the beginning of the assistant's next message is added.
      tools: functions that the model may call, as OpenAI describes them.
      marks: written before and after what the template encloses in ``{% generation %}``: what the assistant says.

    Raises:
      GenerationError: a template that is no Jinja, refuses the messages, fails, or needs too much time or memory.
    """
    asked = _request(template, messages, _values(bos_token, eos_token, reply, tools), marks)
    memory = MEMORY + MEMORY_PER_BYTE * len(asked)
    return _text_of(_ask(asked, str(SECONDS), str(memory)), memory)


class Renderer:
    """Renders chat after chat in one process, which spares each the start of a Python: for servers. From any thread.

    What that process cannot do, for its memory or as it has ended, is done by `render`, in a new one.
    """

    def __init__(self) -> None:
        command, environment = _command(str(SECONDS), str(MEMORY + MEMORY_PER_BYTE * USUAL), "several")
        self._child = ChildProcess(command, environment, SECONDS + START)  # it has a timer of its own, unless it was halted

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        bos_token: str,
        eos_token: str,
        reply: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        """What `render` gives, and raises."""
        asked = _request(template, messages, _values(bos_token, eos_token, reply, tools), marks)
        if len(asked) <= USUAL:
            answer = self._child.ask(asked)
            if answer == b"e":
                self._child.close()  # its memory is full
            elif answer is not None:
                return _text_of(answer, 0)
        told: dict[str, Any] = dict(bos_token=bos_token, eos_token=eos_token, reply=reply, tools=tools, marks=marks)
        return render(template, messages, **told)

    def close(self) -> None:
        """End the process; a further rendering begins another."""
        self._child.close()


@cache
def shared_renderer(process: int) -> Renderer:
    """The renderer of all chats of a process (by its id, as a forked one must have its own pipe) that bring none."""
    return Renderer()


def _values(bos_token: str, eos_token: str, reply: bool, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a template is given beside the messages."""
    values: dict[str, Any] = {"bos_token": bos_token, "eos_token": eos_token}
    return values | {"add_generation_prompt": reply, "tools": list(tools) or None, "documents": None}


def _request(template: str, messages: Sequence[Mapping[str, Any]], values: dict[str, Any], marks: tuple[str, str]) -> bytes:
    values = {"messages": [dict(message) for message in messages]} | values
    asked = {"template": template, "values": values, "marks": marks}
    try:
        return json.dumps(asked, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        raise GenerationError(f"messages must be made of texts, numbers, lists and objects ({reason_of(error)})") from None


def _text_of(answer: bytes, memory: int) -> str:
    """The text of an answer, or its GenerationError."""
    if answer[:1] == b"t":
        return answer[1:].decode("utf-8", "surrogatepass")
    reason = answer[1:].decode() or f"it takes over {SECONDS} s or {memory >> 20} MB, or crashes"
    raise GenerationError(f"the checkpoint's chat template cannot be used here: {reason}")


def _ask(request: bytes, *limits: str) -> bytes:
    """What the sandbox answers: "t" and a text, "e" and an error, or "e" alone where it was ended."""
    command, environment = _command(*limits)
    try:
        ended = subprocess.run(
            command,
            input=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=SECONDS + START,
            check=False,
        )
        begun, answer = ended.stdout[:1], ended.stdout[1:]
    except (OSError, subprocess.TimeoutExpired) as error:
        begun, answer = b"", reason_of(error).encode()
    if begun != b"r":
        raise GenerationError(f"no process could be started for the chat template ({sys.executable}: {shown(answer, 80)})")
    return answer if ended.returncode == 0 and answer else b"e"


def _command(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """How the sandbox is started, and its environment."""
    return isolated(Path(__file__).with_name("sandbox.py"), NEEDED, *arguments)
