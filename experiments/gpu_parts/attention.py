"""Every attention backend of the device, from short to long."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_parts.attention_one import PASSES, measure_attention
from gpu_parts.run import Row, Run

BACKENDS = ("cudnn", "splash", "blockwise", "dense", "reference")


def attention(run: Run) -> Iterator[Row]:
    """Measure every backend at every length: the attention of one layer, for one row."""
    ended: set[tuple[str, str]] = set()  # did not fit; longer ones are skipped
    refused: set[str] = set()
    for tokens in run.plan.heads.lengths:
        for backend in BACKENDS:
            for direction in PASSES:
                if backend in refused:
                    continue
                row = {"backend": backend, "tokens": tokens, "pass": direction}
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
