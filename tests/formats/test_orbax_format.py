"""The orbax format: its errors are said once, by this library."""

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llama_jax.errors import CheckpointError
from llama_jax.formats import orbax_format
from llama_jax.formats.orbax_format import with_short_errors
from llama_jax.storage.atomic_write import cannot_write


def left_over(pathname):
    """A coroutine of that file which is closed while it waits, as Python tells of it."""
    waiting = SimpleNamespace(cr_code=SimpleNamespace(co_filename=pathname))
    return SimpleNamespace(exc_value=Exception("Encountered error while reading array index"), object=waiting)


@pytest.mark.parametrize("number", orbax_format.WRITE_ERRNOS)
def test_the_systems_words_are_found_after_long_paths(number):
    path = "/a/long/way" * 40
    error = ValueError(f'RESOURCE_EXHAUSTED: Error writing "{path}": Failed to write 9 bytes: {os.strerror(number)} [os_e')
    found = orbax_format.write_error(error)
    assert (found.errno, found.strerror) == (number, os.strerror(number))
    assert cannot_write(Path("model"), found).startswith(f"model cannot be written ({os.strerror(number)}); ")
    assert str(orbax_format.write_error(ValueError(path))) == path[:300]


def test_a_load_that_fails_leaves_no_tracebacks(tmp_path, monkeypatch, caplog):
    """Orbax's coroutines that waited for the other arrays raise an error when they are collected, some time later."""
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)

    def fails():
        for package in ("orbax", "etils"):
            path = os.path.join("lib", package, "future.py")
            logging.getLogger("absl").handle(logging.LogRecord("absl", logging.ERROR, path, 1, package, None, None))
        raise ValueError("a chunk is missing")

    monkeypatch.setattr(logging.getLogger("absl"), "propagate", True)
    with pytest.raises(CheckpointError, match="a chunk is missing"):
        with_short_errors(tmp_path, fails)
    assert caplog.messages == ["etils"]
    late, other = (SimpleNamespace(exc_value=RuntimeError(text), object=None) for text in ("Event loop is closed", "else"))
    of_orbax, of_others = (left_over(os.path.join("lib", package, "reading.py")) for package in ("orbax", "etils"))
    for said in (late, other, of_orbax, of_others):
        sys.unraisablehook(said)
    assert heard == [other, of_others]
