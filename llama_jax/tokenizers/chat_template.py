"""A checkpoint's own chat template, which comes from whoever made the checkpoint: rendered in a process of its own.

The process (`template_worker`, which imports Jinja and nothing of this library) is ended when a chat takes over
RENDER_SECONDS. On Linux it gets RENDER_MEMORY bytes and a few for each of the request's, and no more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from llama_jax.child_process import START, ChildProcess, isolated
from llama_jax.errors import GenerationError, reason_of

RENDER_SECONDS = 5
RENDER_MEMORY = 100 << 20  # bytes
RENDER_PACKAGES = ("jinja2", "markupsafe")  # packages


class Renderer:
    """Renders chat after chat in one process, which spares each the start of a Python and a compilation. From any thread."""

    def __init__(self) -> None:
        script, limits = Path(__file__).with_name("template_worker.py"), (str(RENDER_SECONDS), str(RENDER_MEMORY))
        command, environment = isolated(script, RENDER_PACKAGES, *limits)
        self._child = ChildProcess(command, environment, RENDER_SECONDS + START)  # unless halted it has a timer of its own

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
        """The text of a chat.

        Args:
          messages: each with its "role" and "content".
          bos_token, eos_token: what stands for these tokens, "" for none.
          reply: whether the beginning of the assistant's next message is added.
          tools: functions that the model may call, as OpenAI describes them.
          marks: written before and after what the template encloses in ``{% generation %}``: what the assistant says.

        Raises:
          GenerationError: a template that is not Jinja, refuses the messages, fails, or needs too much time or memory.
        """
        values = {
            "messages": [dict(message) for message in messages],
            "bos_token": bos_token,
            "eos_token": eos_token,
            "add_generation_prompt": reply,
            "tools": list(tools) or None,
            "documents": None,
        }
        asked = {"template": template, "values": values, "marks": marks}
        try:
            request = json.dumps(asked, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            reason = reason_of(error)
            raise GenerationError(f"messages must be made of texts, numbers, lists and objects ({reason})") from None
        while True:
            is_new = self._child.process is None
            answer = self._child.ask(request) or b"e"
            if answer[:1] == b"t":
                return answer[1:].decode("utf-8", "surrogatepass")
            if answer == b"e":  # it was ended, or its memory is full, perhaps with chats before: then a new one is tried
                self._child.close()
                if not is_new:
                    continue
            limits = f"{RENDER_SECONDS} s or {RENDER_MEMORY >> 20} MB"
            reason = answer[1:].decode() or f"it takes over {limits}, or {sys.executable} fails"
            raise GenerationError(f"the checkpoint's chat template cannot be used here: {reason}")

    def close(self) -> None:
        """End the process; a further rendering begins another."""
        self._child.close()


@cache
def shared_renderer(process: int) -> Renderer:
    """The renderer of all chats of a process (by its id, as a forked one must have its own pipe) that bring none."""
    return Renderer()
