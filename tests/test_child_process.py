"""Programs in processes of their own: what is asked of one that has ended is asked of the next."""

from contextlib import closing
from pathlib import Path

import pytest

from llama_jax.child_process import ChildProcess, isolated

# Answers with what it is asked; `end` is what it does before that.
ECHO = """
import os, sys

def begin(source):
    def answer(content):
        {end}
        return content

    return answer
"""


def child(folder: Path, end: str = "pass") -> ChildProcess:
    script = folder / "echo.py"
    script.write_text(ECHO.format(end=end))
    return ChildProcess(*isolated(script, ()), 60)


def test_an_idle_process_that_was_killed_is_replaced(tmp_path):
    with closing(child(tmp_path)) as asked:
        assert asked.ask(b"one") == b"one"
        first = asked.process
        first.kill()
        first.wait()
        assert asked.ask(b"two") == b"two"
        assert asked.process.pid != first.pid
        assert asked.ask(b"three") == b"three"


def test_what_a_process_has_not_read_is_asked_of_another(tmp_path):
    with closing(child(tmp_path, end="os.dup2(os.pipe()[0], 0)")) as asked:
        assert asked.ask(b"one") == b"one"  # and lives on, but reads no more
        assert asked.process.poll() is None
        assert asked.ask(b"two") == b"two"


@pytest.mark.parametrize("request_of", [b"x", b"x" * (1 << 20)])
def test_what_ends_each_process_is_asked_once(tmp_path, request_of):
    ended = tmp_path / "ended"
    end = f"content.startswith(b'x') and (open({str(ended)!r}, 'a').write('.'), sys.exit())"
    with closing(child(tmp_path, end=end)) as asked:
        assert asked.ask(b"one") == b"one"
        assert asked.ask(request_of) is None
        assert ended.read_text() == "."
        assert asked.ask(b"two") == b"two"
