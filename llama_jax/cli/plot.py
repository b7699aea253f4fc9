"""``llama-jax plot``: the curves of training runs as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from llama_jax.cli.options import ModelPath
from llama_jax.cli.output_format import note
from llama_jax.errors import UserError
from llama_jax.storage.atomic_write import write_atomically

FORMATS = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Plot:
    """Draw loss, learning rate, gradient norm and throughput of one or several runs. Needs the extra 'plot'."""

    runs: tyro.conf.Positional[Annotated[tuple[ModelPath, ...], tyro.conf.arg(metavar="RUN ...")]]
    """Folders of runs, each with a metrics.jsonl, or in a store with metrics/; several are drawn over each other."""
    output: Path | None = None
    """The picture, .png, .pdf or .svg; by default curves.png in the run's folder, or in the current folder for several runs
    or one in a store."""
    by: Literal["step", "tokens"] = "step"
    """The horizontal axis."""
    log: bool = False
    """Logarithmic axes for steps or tokens, loss and gradient norm."""
    smoothing: float = 0.01
    """Reach of the moving mean that is drawn over the faint curve, as a fraction of a run; 0 draws the curve alone."""

    def run(self) -> None:
        from llama_jax.runs.metrics import METRICS, read_runs
        from llama_jax.runs.plot import draw

        output = self._output()
        runs = read_runs(self.runs)
        for folder, run in zip(self.runs, runs, strict=True):
            if run.unreadable:
                numbers = ", ".join(map(str, run.unreadable[:5])) + ", ..." * (len(run.unreadable) > 5)
                where = folder / METRICS
                note(f"{where}: incomplete lines were skipped (line {numbers})")
        figure = draw(runs, by=self.by, log=self.log, smoothing=self.smoothing)
        with write_atomically(output) as target:
            figure.savefig(target, format=output.suffix[1:].lower())
        print(output)

    def _output(self) -> Path:
        if self.output is None:
            only = self.runs[0] if len(self.runs) == 1 else None
            return (only if isinstance(only, Path) else Path()) / "curves.png"
        if self.output.suffix.lower() not in FORMATS:
            raise UserError(f"output={self.output} must end in {', '.join(FORMATS)}")
        if self.output.is_dir():
            raise UserError(f"output={self.output} is a folder, not a file")
        if not self.output.parent.is_dir():
            raise UserError(f"output={self.output}: the folder {self.output.parent} does not exist; create it")
        return self.output
