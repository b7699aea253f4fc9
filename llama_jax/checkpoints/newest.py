"""The newest step of a run that goes on saving, and removing, while it is read."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from llama_jax.checkpoints.steps import cannot_read, find_checkpoints, steps_in
from llama_jax.errors import CheckpointError, UserError
from llama_jax.storage import Location

TRIES = 5  # so many steps are taken before the error of the last is raised

Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


class StepRemovedError(CheckpointError):
    """A step in a store of which files were to be read that are there no more: the run has removed it."""


def taking_the_newest(read: Callable[Arguments, Found]) -> Callable[Arguments, Found]:
    """`read` again where its first argument, `path`, is a run whose newest step has become another one meanwhile.

    A run keeps its last few steps: one that was found may be removed before all of it is read.
    """

    @functools.wraps(read)
    def again(*arguments: Arguments.args, **named: Arguments.kwargs) -> Found:
        path = arguments[0] if arguments else named.get("path")
        for left in reversed(range(TRIES)):
            before = _newest(path)
            try:
                return read(*arguments, **named)
            except StepRemovedError:  # a step itself is not found the next time
                if not left:
                    raise
            except (UserError, OSError) as error:
                now = None if before is None else _newest(path)
                if left and now != before:
                    continue
                if isinstance(error, FileNotFoundError):  # that it existed has been seen
                    raise CheckpointError(f"{error.filename} was removed while it was read; try again") from None
                if before is None or isinstance(error, UserError):
                    raise
                raise CheckpointError(cannot_read(before, str(error))) from None
        raise AssertionError("the last try returns or raises")

    return again


def _newest(path: object) -> Location | None:
    """The step that is taken of a run; None where a path is something else, as a step itself is."""
    if not isinstance(path, str | os.PathLike) or not os.path.isdir(path):
        return None
    folder = find_checkpoints(Path(os.fsdecode(path)))
    steps = [] if folder is None else steps_in(folder)
    return folder / str(steps[-1]) if folder is not None and steps else None
