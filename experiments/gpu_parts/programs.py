"""The programs of compile_report that are of one device: what compilers foretell of them, and what they do."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

from gpu_parts.run import Row, Run


def programs(run: Run) -> Iterator[Row]:
    """What compilers foretell of a program, and what it does."""
    import device_programs as beside  # so that what it needs beside costs no other section anything

    hardware = None if run.plan.small_programs else beside.hardware_of(run.device)
    for case in beside.cases_of(hardware):
        row = {"program": case.name, "batch": case.batch, "length": case.length}
        row |= beside.foretold(case, hardware, Path(__file__).parents[1] / "results")
        gc.collect()
        row = run.attempt(row, lambda case=case: beside.measure(case, run.device, run.plan.repetitions))
        if "RESOURCE_EXHAUSTED" in row.get("error", ""):
            row["does_not_fit"] = row.pop("error")
        yield row
