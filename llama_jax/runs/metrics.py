"""The numbers of a run, as they come: lines of JSON always, TensorBoard where it is installed."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"


class Metrics:
    """Appends to ``metrics.jsonl`` in a run's folder, one object a line, each written whole before the next step."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        # The last line of a run that was killed may be half a line: what follows begins on its own.
        broken = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if broken and path.stat().st_size:
            self._file.write("\n")
        self._board: Any = None
        if importlib.util.find_spec("tensorboardX") is not None:
            from tensorboardX import SummaryWriter  # type: ignore[import-not-found, import-untyped, unused-ignore]

            self._board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, kind: str, step: int, **values: Any) -> None:
        """A line. A number that is not finite is null, for JSON has no name for it."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
        }
        self._file.write(json.dumps({"kind": kind, "step": step, **finite}, ensure_ascii=False) + "\n")
        self._file.flush()
        if self._board is not None and kind in ("train", "validation"):
            for name, value in finite.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """End both."""
        self._file.close()
        if self._board is not None:
            self._board.close()
