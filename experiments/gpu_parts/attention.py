"""Every attention backend of the device, from short to long."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gpu_parts.attention_one import PASSES, measure_attention
from gpu_parts.run import Row, Run

ATTENTION_SHARE = 0.2  # of the time limit
BACKENDS = ("cudnn", "splash", "blockwise", "dense", "reference")


def attention(run: Run) -> Iterator[Row]:
    """Measure every backend at every length: the attention of one layer, for one row."""
    share = 1.0 if run.alone else ATTENTION_SHARE
    end = time.monotonic() + min(share * run.time_limit, run.time_left())
    ended: set[tuple[str, str]] = set()  # did not fit; longer ones are skipped
    refused: set[str] = set()
    for tokens in run.plan.heads.lengths:
        for backend in BACKENDS:
            for direction in PASSES:
                if backend in refused:
                    continue
                row = {"backend": backend, "tokens": tokens, "pass": direction}
                if time.monotonic() >= end:
                    yield row | {"skipped": "time limit"}
                    continue
                if (backend, direction) in ended:
                    yield row | {"skipped": "less did not fit"}
                    continue
                row = run.attempt(
                    row,
                    lambda backend=backend, tokens=tokens, direction=direction: measure_attention(
                        run, backend, tokens, direction
                    ),
                )
                if "RESOURCE_EXHAUSTED" in row.get("error", ""):
                    row["does_not_fit"] = row.pop("error")
                if "does_not_fit" in row:
                    ended.add((backend, direction))
                if "refused" in row:
                    refused.add(backend)
                    row = {"backend": backend, "refused": row["refused"]}
                yield row
