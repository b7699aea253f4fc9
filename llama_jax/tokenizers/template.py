"""A checkpoint's own chat template, which comes from whoever made the checkpoint: rendered in a process of its own.

The process (`sandbox`, which imports Jinja and nothing of this library) is ended after SECONDS on every system. On Linux it
gets MEMORY bytes and a few for each of the request's, and no more. On other systems, which have no such limit for a process,
memory is bounded by the sandbox's own budget, which does not know of everything. A rendering costs the start of a Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llama_jax.errors import GenerationError, reason_of, shown

SECONDS = 5
MEMORY = 100 << 20  # bytes
MEMORY_PER_BYTE = 16  # of the template and the messages: texts on their way are copied
NEEDED = ("jinja2", "markupsafe")  # packages
START = 60  # seconds that the process may take to begin, from a slow disk


def render(template: str, messages: Sequence[Mapping[str, Any]], *, bos_token: str, eos_token: str, reply: bool) -> str:
    """The text of a chat.

    Args:
      messages: each with its "role" and "content".
      bos_token, eos_token: what stands for these tokens, "" for none.
      reply: whether the beginning of the assistant's next message is added.

    Raises:
      GenerationError: a template that is no Jinja, refuses the messages, fails, or needs too much time or memory.
    """
    values: dict[str, Any] = {
        "messages": [dict(message) for message in messages],
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    values |= {"add_generation_prompt": reply, "tools": None, "documents": None}
    try:
        asked = json.dumps({"template": template, "values": values}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        raise GenerationError(f"messages must be made of texts, numbers, lists and objects ({reason_of(error)})") from None
    memory = MEMORY + MEMORY_PER_BYTE * len(asked)
    answer = _ask(asked, str(SECONDS), str(memory))
    if answer[:1] == b"t":
        return answer[1:].decode("utf-8", "surrogatepass")
    reason = answer[1:].decode() or f"it takes over {SECONDS} s or {memory >> 20} MB, or crashes"
    raise GenerationError(f"the checkpoint's chat template cannot be used here: {reason}")


def _ask(request: bytes, *limits: str) -> bytes:
    """What the sandbox answers: "t" and a text, "e" and an error, or "e" alone where it was ended."""
    # Without `site`, which can take longer than all the rest; Jinja and what it needs are found where this process has them.
    places = [str(Path(spec.origin).parents[1]) for name in NEEDED if (spec := find_spec(name)) and spec.origin]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON") or name == "PYTHONHOME"}
    command = [sys.executable, "-S", "-s", "-P", str(Path(__file__).with_name("sandbox.py")), *limits]
    try:
        ended = subprocess.run(
            command,
            input=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=inherited | {"PYTHONPATH": os.pathsep.join(places)},
            timeout=SECONDS + START,
            check=False,
        )
        begun, answer = ended.stdout[:1], ended.stdout[1:]
    except (OSError, subprocess.TimeoutExpired) as error:
        begun, answer = b"", reason_of(error).encode()
    if begun != b"r":
        raise GenerationError(f"no process could be started for the chat template ({sys.executable}: {shown(answer, 80)})")
    return answer if ended.returncode == 0 and answer else b"e"
