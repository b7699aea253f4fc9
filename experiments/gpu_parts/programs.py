"""The single-device programs of compile_report: the compilers' predictions, and measurements."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

from gpu_parts.run import Row, Run


def programs(run: Run) -> Iterator[Row]:
    """Yield the compilers' predictions and the measurements of each program."""
    import device_programs as beside  # imported here, so that its imports do not slow down other sections

    hardware = None if run.plan.small_programs else beside.hardware_of(run.device)
    for case in beside.cases_of(hardware):
        row = {"program": case.name, "batch": case.batch, "length": case.length}
        row |= beside.foretold(case, hardware, Path(__file__).parents[1] / "results")
        gc.collect()
        row = run.attempt(row, lambda case=case: beside.measure(case, run.device, run.plan.repetitions))
        if "RESOURCE_EXHAUSTED" in row.get("error", ""):
            row["does_not_fit"] = row.pop("error")
        yield row
