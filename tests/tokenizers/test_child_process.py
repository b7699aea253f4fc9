"""Programs in processes of their own: one that has ended is replaced, and what takes too much is asked once."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from llama_jax.tokenizers.child_process import ChildProcess

# Answers with what it is asked, and what it was begun with; `end` is what it does before that.
ECHO = """
import sys

def begin(initial):
    def answer(value):
        {end}
        return [initial, value]

    return answer
"""


def child(folder: Path, end: str = "pass", seconds: int = 60) -> ChildProcess:
    script = folder / "echo.py"
    script.write_text(ECHO.format(end=end))
    return ChildProcess(script, seconds, 50 << 20, {"a": "\ud800"})


def test_an_idle_process_that_was_killed_is_replaced(tmp_path):
    with closing(child(tmp_path)) as asked:
        assert asked.ask("é\n\ud800") == [{"a": "\ud800"}, "é\n\ud800"]
        first = asked.process
        first.kill()
        first.wait()
        assert asked.ask(2) == [{"a": "\ud800"}, 2]
        assert asked.process.pid != first.pid
        assert asked.ask(None)[1] is None


@pytest.mark.parametrize("request_of", ["x", "x" * (1 << 20)])
def test_what_ends_each_process_is_asked_once(tmp_path, request_of):
    ended = tmp_path / "ended"
    end = f"value.startswith('x') and (open({str(ended)!r}, 'a').write('.'), sys.exit())"
    with closing(child(tmp_path, end=end)) as asked:
        assert asked.ask("one")[1] == "one"
        assert asked.ask(request_of) is None
        assert ended.read_text() == "."
        assert asked.ask("two")[1] == "two"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit a process's memory")
@pytest.mark.parametrize("end", ["value == 'x' and 3**40000000", "value == 'x' and bytearray(60 << 20)"])
def test_limits_of_time_and_memory(tmp_path, end):
    """They count from the beginning of each request."""
    with closing(child(tmp_path, end=end, seconds=1)) as asked:
        assert asked.ask("one")[1] == "one"
        first = asked.process
        assert asked.ask("x") is None
        assert first.poll() is not None
        assert asked.ask("two")[1] == "two"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit a process's memory")
def test_a_long_request_may_take_more_memory(tmp_path):
    with closing(child(tmp_path, end="bytearray(8 * len(value))")) as asked:
        for size in (1, 10 << 20, 1):
            assert len(asked.ask("x" * size)[1]) == size


def test_a_process_that_does_nothing_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("llama_jax.tokenizers.child_process.WALL_FACTOR", 0.1)
    with closing(child(tmp_path, end="import time; time.sleep(1000)", seconds=1)) as asked:
        assert asked.ask("x") is None
