"""The metrics of a run, written as lines of JSON."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from llama_jax.runs.errors import TrainingError

METRICS = "metrics.jsonl"  # in the folder of a run
PARTS = "metrics"  # of one in a store, which appends to nothing: a folder of 000001.jsonl and so on


class Metrics:
    """Appends to ``metrics.jsonl`` in a run's folder, one object a line, each written whole before the next step."""

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / METRICS
        # The last line of a killed run may be incomplete: the next one begins on a new line.
        broken = _last_byte(path) not in (b"", b"\n")
        self._file = path.open("a", encoding="utf-8")
        if broken:
            self._file.write("\n")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Write a line. A number that is not finite becomes null, for JSON cannot express it.

        Raises:
          TrainingError: the disk is full, or the file cannot be written to any more.
        """
        values = finite(values)
        try:
            self._file.write(json.dumps({"kind": kind, "step": step, **values}, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(
                f"{self._path} cannot be written to ({error.strerror}); fix that and go on from the last checkpoint with"
                " --resume"
            ) from None

    def close(self) -> None:
        """End it."""
        with suppress(OSError):  # what could not be written has been told of
            self._file.close()


def finite(value: Any) -> Any:
    """A value as JSON can hold it: None for each number in it that is not finite."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _last_byte(path: Path) -> bytes:
    if not (path.exists() and path.stat().st_size):
        return b""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()
