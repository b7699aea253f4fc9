"""Functions in the user's own Python files: ``FILE.py:FUNCTION``."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llama_jax.errors import UserError, reason_of
from llama_jax.runs.errors import TrainingError
from llama_jax.storage import resolved


def function_of(name: str, what: str) -> Callable[..., Any]:
    """Run the file, which may import from its own folder, and return its function of that name.

    Args:
      what: what it is for, in messages.

    Raises:
      TrainingError: a name of another form, a file that does not exist or that fails, or no such function in it.
    """
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py") or not function:
        raise TrainingError(f"{what} {name!r} is not FILE.py:FUNCTION")
    path = resolved(Path(file))
    if not path.is_file():
        raise TrainingError(f"{what} {name!r}: {path} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # where dataclasses of the file look up the names in their annotations
    sys.path.insert(0, str(path.parent))  # the file may import its neighbours, as a script may
    try:
        with _running(path, name, what):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    found = getattr(module, function, None)
    if not callable(found):
        there = "is no function" if found is not None else "is not there"
        raise TrainingError(f"{what} {name!r}: {path} has no function {function!r}: it {there}")
    return found


def result_of(name: str, what: str) -> Any:
    """What the function of that name returns without arguments; TrainingError as `function_of`, or where it fails."""
    make = function_of(name, what)
    with _running(resolved(Path(name.rpartition(":")[0])), name, what):
        return make()


@contextmanager
def _running(path: Path, name: str, what: str) -> Iterator[None]:
    """Turn what the user's code raises, or that it exits, into an error that names the line; ours are as they are."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = own[-1].lineno if own else getattr(error, "lineno", None)
        at = f", line {line}" if line else ""
        raise TrainingError(f"{what} {name!r}: {path}{at} fails with {type(error).__name__}: {reason_of(error)}") from None
