"""What orbax and TensorStore say of a save that fails is said once, by this library."""

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_jax.checkpoints import orbax_format
from llama_jax.checkpoints.orbax_format import with_short_errors
from llama_jax.errors import CheckpointError
from llama_jax.storage.atomic_write import cannot_write


def logged(pathname, level, caplog):
    caplog.clear()
    logging.getLogger("absl").handle(logging.LogRecord("absl", level, pathname, 1, "said", None, None))
    return bool(caplog.records)


@pytest.mark.parametrize("first", [0, 1])
def test_what_orbax_logs_is_not_heard_until_the_last_of_two_saves_has_ended(first, caplog, monkeypatch):
    """They may end in any order; one after the other would leave the level of the other."""
    theirs, others = (os.path.join("lib", package, "future.py") for package in ("orbax", "etils"))
    logging.getLogger("absl").addHandler(caplog.handler)
    try:
        saves = [orbax_format.without_tracebacks() for _ in range(2)]
        for save in saves:
            save.__enter__()
        for save in (saves[first], saves[1 - first]):
            assert not logged(theirs, logging.ERROR, caplog)
            assert logged(theirs, logging.CRITICAL, caplog)
            assert logged(others, logging.ERROR, caplog), "what others say is heard"
            save.__exit__(None, None, None)
        assert logged(theirs, logging.ERROR, caplog)
    finally:
        logging.getLogger("absl").removeHandler(caplog.handler)


def left_over(pathname):
    """A coroutine of that file which is closed while it waits, as Python tells of it."""
    waiting = SimpleNamespace(cr_code=SimpleNamespace(co_filename=pathname))
    return SimpleNamespace(exc_value=Exception("Encountered error while reading array index"), object=waiting)


@pytest.mark.parametrize("failing", [False, True])
def test_what_comes_after_an_event_loop_has_ended_is_no_traceback(failing, monkeypatch):
    """Also later, where a save has failed; once is enough."""
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    late, other = (
        SimpleNamespace(exc_value=RuntimeError(text), object=None) for text in ("Event loop is closed", "something else")
    )
    left = [left_over(os.path.join("lib", package, "reading.py")) for package in ("orbax", "etils")]
    hooks = []
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError), orbax_format.without_tracebacks():
            sys.unraisablehook(late)
            sys.unraisablehook(other)
            for one in left:
                sys.unraisablehook(one)
            if failing:
                raise ZeroDivisionError
        hooks.append(sys.unraisablehook)
    assert heard == [other, left[1]] * 2
    sys.unraisablehook(late)
    assert heard[4:] == ([] if failing else [late])
    assert hooks[0] is hooks[1] or hooks == [heard.append] * 2


def test_writers_are_waited_for_whatever_their_own_join_raises():
    """It raises what the writer of one array met, and that would hide the message of the save, and leave the rest."""
    going_on, ended = threading.Event(), []

    class Writer(threading.Thread):
        __module__ = "orbax.checkpoint"

        def join(self, timeout=None):
            super().join(timeout)
            raise ValueError("RESOURCE_EXHAUSTED")

        def run(self):
            going_on.wait(60)
            ended.append(self)

    writers = [Writer() for _ in range(2)]
    for writer in writers:
        writer.start()
    threading.Timer(0.01, going_on.set).start()
    orbax_format.wait_for_writers()
    assert sorted(map(id, ended)) == sorted(map(id, writers))


@pytest.mark.parametrize("number", orbax_format.OF_WRITING)
def test_the_systems_words_are_found_after_long_paths(number):
    path = "/a/long/way" * 40
    error = ValueError(f'RESOURCE_EXHAUSTED: Error writing "{path}": Failed to write 9 bytes: {os.strerror(number)} [os_e')
    found = orbax_format.error_of_writing(error)
    assert (found.errno, found.strerror) == (number, os.strerror(number))
    assert cannot_write(Path("model"), found).startswith(f"model cannot be written ({os.strerror(number)}); ")
    assert str(orbax_format.error_of_writing(ValueError(path))) == path[:300]


def test_a_load_that_fails_leaves_no_tracebacks(tmp_path, monkeypatch):
    """Orbax's coroutines that waited for the other arrays raise an error when they are collected, some time later."""
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)

    def fails():
        raise ValueError("a chunk is missing")

    with pytest.raises(CheckpointError, match="a chunk is missing"):
        with_short_errors(tmp_path, fails)
    sys.unraisablehook(left_over(os.path.join("lib", "orbax", "reading.py")))
    assert heard == []
