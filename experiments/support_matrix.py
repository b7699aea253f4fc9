"""Which features work for which family of models, and where: `docs/support.md`, made of the tests that passed.

    LLAMA_JAX_SUPPORT_RUN=run.jsonl pytest -m "(supports or refuses) and not nightly"
    python experiments/support_matrix.py --runs run.jsonl     # experiments/results/support.json and docs/support.md
    python experiments/support_matrix.py --runs run.jsonl --check

A test claims cells by a mark, `@pytest.mark.supports("GGUF")` (`tests/support_claims.py`). A cell enters the JSON
when a test that claims it passes in one of the given runs, and leaves it when no test claims it any longer. What is
claimed and failed, or ran in no run yet, is "pending". `--check` writes nothing and fails if a cell of the JSON did not
pass in the runs. Cells compiled for GPUs are exempt, since that compiler needs an environment of its own, and so are
tests of another turn (LLAMA_JAX_TURN). Without a run the page is written anew. The page also shows what
`compile_report.py` compiled, and what `gpu_report.py` ran on devices (section families), as far as their reports are in
experiments/results.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from measuring import write_rows

from llama_jax.config import ModelType
from llama_jax.storage.atomic_write import write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
PAGE = ROOT / "docs" / "support.md"
FAMILIES: dict[ModelType, str] = {
    "llama": "Llama 1 to 3.3, TinyLlama, SmolLM2",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "smollm3": "SmolLM3",
    "cwm": "CWM",
    "ministral3": "Ministral 3",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "gemma3_text": "Gemma 3",
    "granite": "Granite 3",
    "phi3": "Phi-3, Phi-4",
    "llama4_text": "Llama 4 Scout",
}
# By table: each feature, and what its tests compare. Not all features of the library: those that every family may have.
FEATURES: dict[str, dict[str, str]] = {
    "Files and reference": {
        "safetensors": "a Hugging Face folder is written and read back, and one that transformers writes is read",
        "GGUF": "a file of floats is written and read back",
        "Q8_0": "a GGUF file of Q8_0 blocks is written, read and converted to safetensors",
        "orbax": "an orbax folder is written and read back",
        "logits": "within 1e-4 of transformers', also with a cache that is filled in chunks",
        "ragged": "each row of a ragged batch has the logits that transformers gives for the row alone",
        "gradients": "those of every parameter match transformers', within 1e-4 of the largest",
    },
    "Inference": {
        "generate": "greedy tokens of a ragged batch, with a cache, are the argmax of the logits of full rows",
        "speculation": "prompt lookup changes no token",
        "engine": "the server's engine gives the same tokens",
        "int8": "int8 weights generate, with the dequantized model's logits within 5 % of their norm",
        "Q4_0": "the same for Q4_0 blocks in memory",
        "int8 cache": "an int8 cache changes logits by at most 5 % of their norm",
        "window": "a cache with a window gives the same tokens as a model with that window",
        "exact": "`exact=True`: a row has the same bits alone and in a batch",
        "hooks": "hooks affect the generated tokens in the same way as the logits of full rows",
        "mesh": "a model loaded over fsdp=2, tensor=2 from safetensors or orbax has the logits of one device",
    },
    "Training": {
        "training": "steps of AdamW lower the loss, and every parameter learns",
        "packed": "documents packed into a row have the same logits as alone and in transformers",
        "LoRA": "adapters lower the loss of a frozen base; merged into the weights, they give the same logits",
        "fsdp, tensor": "a training step over fsdp=2, tensor=2 gives the results of one device",
        "context": "a training step over a ring of devices (context=2) gives the results of one device",
    },
    "Compiled": {
        "prefill": "a prompt is read into the cache",
        "decode": "greedy tokens with the cache, in one program",
        "step": "a training step in bfloat16 with AdamW and full rematerialization",
    },
}
PLATFORMS = {"cpu": "run on CPU", "tpu": "compiled for TPU", "gpu": "compiled for GPU"}
BY_HAND = ("gpu",)
ON_DEVICE = ("logits", "generate", "training step")
"""What the section families of `gpu_report` checks."""
SIGN = {"supports": "✓", "refuses": "error", "pending": "?"}


class Cell(NamedTuple):
    """A cell of the matrix, and the test that says it."""

    platform: str
    feature: str
    family: str
    test: str
    says: str
    """"supports" or "refuses"; "pending" if that is claimed, and no run has confirmed it."""

    @property
    def pending(self) -> Cell:
        return self._replace(says="pending")


def check(cell: Cell) -> None:
    """Raises: ValueError: a platform, feature or family that is not in the tables above."""
    features = [feature for group in FEATURES.values() for feature in group]
    for value, known in ((cell.platform, PLATFORMS), (cell.feature, features), (cell.family, FAMILIES)):
        if value not in known:
            raise ValueError(f"{cell.test} claims to support {value!r}, which support_matrix.py has not: {', '.join(known)}")


def read_run(paths: Iterable[Path]) -> tuple[set[str], set[Cell], set[Cell], set[Cell], set[Cell]]:
    """The collected test files of the runs, and the cells that were claimed, passed, failed and left to another turn."""
    files: set[str] = set()
    found: dict[str, set[Cell]] = defaultdict(set)
    for path in paths:
        for line in path.read_text().splitlines():
            outcome, *rest = json.loads(line)
            if outcome == "collected":
                files.update(rest)
            else:
                found[outcome].add(Cell(*rest))
    return files, found["claimed"], found["passed"] - found["failed"], found["failed"], found["rotated"]


def updated(known: set[Cell], paths: Iterable[Path]) -> set[Cell]:
    """The cells once the runs are added."""
    files, claimed, passed, failed, _ = read_run(paths)
    claimed |= {cell for cell in known if cell.says != "pending" and cell.test.split("::")[0] not in files}
    pending = {cell for cell in known if cell.says == "pending" and cell.test.split("::")[0] not in files}
    confirmed = (known - failed | passed) & (claimed | passed)
    return confirmed | {cell.pending for cell in claimed - confirmed} | pending - {cell.pending for cell in confirmed}


def read_report(path: Path) -> tuple[dict[str, Any], set[Cell]]:
    """When each platform was run last, and the cells."""
    report = json.loads(path.read_text())
    cells = {
        Cell(row["platform"], row["feature"], family, row["test"], says)
        for row in report["cells"]
        for says in SIGN
        for family in row.get(says, ())
    }
    return report["runs"], cells


def write_report(path: Path, runs: Mapping[str, Any], cells: set[Cell]) -> None:
    """A line for each test and feature, whatever the families."""
    rows: dict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for cell in sorted(cells):
        rows[cell.platform, cell.feature, cell.test][cell.says].append(cell.family)
    named = [dict(zip(("platform", "feature", "test"), key, strict=True)) | says for key, says in rows.items()]
    write_rows(path, {"runs": runs}, "cells", named)


def _table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heading = list(heading)
    lines = [heading, ["---", *[":---:"] * (len(heading) - 1)], *map(list, rows)]
    return "\n".join("| " + " | ".join(cells).replace("|  |", "| |") + " |" for cells in lines) + "\n"


def _signs(cells: set[Cell]) -> dict[tuple[str, str, str], str]:
    said = defaultdict(set)
    for cell in cells:
        said[cell.platform, cell.feature, cell.family].add(cell.says)
    return {key: " ".join(sign for name, sign in SIGN.items() if name in says) for key, says in said.items()}


def _legend(group: str, cells: set[Cell]) -> str:
    """What each column means, and the tests that say it."""
    lines = [f"- **{feature}**: {meaning}\n" for feature, meaning in FEATURES[group].items()]
    tests = sorted({cell.test for cell in cells if cell.feature in FEATURES[group]})
    return f"{''.join(lines)}\nTests: {', '.join(f'`{test}`' for test in tests) or 'none yet'}.\n"


def _program(row: Mapping[str, Any]) -> str | None:
    """What a program of `compile_report` is, in words."""
    kind, options, mesh = row["kind"], row["options"], row["mesh"]
    ring, several = "context" in mesh, not mesh.endswith("=1")
    if kind == "train":
        adapters = "QLoRA step (nf4)" if "weights" in options else "LoRA step"
        dense = "training step around a ring" if ring else "training step, sharded" if several else "training step"
        return adapters if "rank" in options else dense
    if kind == "decode":
        return "decode, int8 weights" if "quantized" in options else "decode, sharded" if several else "decode"
    if kind == "step":
        exact = ", exact" if "exact" in options else ""
        return f"engine step{', table of adapters' if 'adapters' in options else exact}"
    names = {"pmap": "training step by pmap", "prefill": "prefill around a ring" if ring else "prefill"}
    names |= {"drafted": "engine step with drafts", "rollout": "rollouts for rewards"}
    return names.get(kind)


def _programs(results: Path) -> str:
    """The programs of Llama at real sizes that `compile_report` found to fit, by accelerator and the sizes of models."""
    found: dict[str, dict[str, dict[str, set[str]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
    for compiler in ("tpu", "gpu"):
        path = results / f"compile_report_{compiler}.json"
        for row in json.loads(path.read_text())["programs"] if path.exists() else ():
            if row["fits"] and (name := _program(row)):
                found[name][compiler][row["hardware"]].add(row["program"].split("-")[0].upper())
    of = lambda each: "; ".join(
        f"{hardware}: {', '.join(sorted(sizes, key=lambda size: int(size[:-1])))}"
        for hardware, sizes in sorted(each.items())
    )
    return _table(["program", "TPU", "GPU"], ([name, of(each["tpu"]), of(each["gpu"])] for name, each in found.items()))


def _devices(results: Path) -> str:
    """What ran on accelerators, a table for each device."""
    parts = []
    for path in sorted(results.glob("gpu_report_*.json")):
        report = json.loads(path.read_text())
        rows = report["sections"].get("families", [])
        if not rows or report["device"]["platform"] == "cpu":
            continue
        said = {(row["family"], row["feature"]): "✓" if row["ok"] else "differs" for row in rows if "ok" in row}
        said |= {(row["family"], row["feature"]): "failed" for row in rows if "error" in row}
        about = f"{report['device']['kind']}, {report['device']['date'][:10]}, jax {report['versions']['jax']}"
        table = _table(
            ["family", *ON_DEVICE],
            ([name, *(said.get((kind, feature), "") for feature in ON_DEVICE)] for kind, name in FAMILIES.items()),
        )
        parts.append(
            f"{about} ([report](../{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name});"
            f" empty: not run):\n\n{table}"
        )
    return "\n".join(parts) or "No such report is recorded yet: everything above was computed on CPUs or only compiled.\n"


def render(runs: Mapping[str, Any], cells: set[Cell], results: Path = RESULTS) -> str:
    """The page."""
    signs = _signs(cells)
    when = ", ".join(f"{PLATFORMS[name]} {run['date']} (jax {run['jax']})" for name, run in sorted(runs.items()))
    tables = {}
    for group, features in FEATURES.items():
        columns = [("cpu", feature) for feature in features]
        if group == "Compiled":
            columns = [(platform, feature) for platform in ("tpu", "gpu") for feature in features]
        heading = ["family", *(f"{'' if p == 'cpu' else p.upper() + ' '}{feature}" for p, feature in columns)]
        tables[group] = _table(
            heading, ([name, *(signs.get((p, f, kind), "") for p, f in columns)] for kind, name in FAMILIES.items())
        )
    on_cpu = "\n".join(
        f"## {group}\n\n{tables[group]}\n{_legend(group, cells)}" for group in FEATURES if group != "Compiled"
    )
    return f"""# Supported models and features

<!-- Written by experiments/support_matrix.py; do not edit. -->

Every ✓ and every error on this page comes from a test that passed. The tests build a small random model of each family, with
everything that the family adds to Llama, and compare it with transformers or with another way to compute the same numbers.
Features that do not depend on the family are tested with Llama only and are not listed here.

- ✓: a test passed.
- error: the library refuses the combination with an error that names it, and a test checks this.
- ?: tests claim it, but not all of them have passed in a recorded run.
- an empty cell: no test covers it.

Last runs: {when}. [Models](models.md#models) describes the families.

{on_cpu}
## Compiled for TPU and GPU

The compilers for TPU v5e and H100 accept these programs of each family, on a machine with neither device. This says nothing
about numbers or speed.

{tables["Compiled"]}
{_legend("Compiled", cells)}
Llama programs at real sizes that were compiled and fit into memory, by device and model size ([details](compiled.md)):

{_programs(results)}
## Run on a device

On a machine with a GPU or TPU, this command compares logits, greedy tokens and a training step of each family with float64
on the CPU. It writes a report that this page then includes:

<!-- not run: needs a GPU or TPU -->
```bash
python experiments/gpu_report.py --sections families --device-json gpu_report_families_NAME.json
```

{_devices(results)}
## How this page is made

Tests claim cells with pytest marks. A run of `.ci/run` must confirm all cells, with two exceptions: cells compiled for a GPU
are confirmed by hand, and slow tests take turns, so that all of them run within five days. A default test compares the marks
with this page.
[Extending](extending.md#a-row-of-the-support-matrix) describes how a family gets its row.
"""


@dataclass(frozen=True)
class Arguments:
    """Write the support matrix from runs of the tests, or check it against them."""

    runs: tuple[Path, ...] = ()
    """Files that runs with LLAMA_JAX_SUPPORT_RUN wrote."""
    check: bool = False
    """Write nothing; the exit code is 1 if a cell did not pass in the runs."""
    report: Path = RESULTS / "support.json"
    page: Path = PAGE


def main(arguments: Arguments) -> int:
    """Check or write; the exit code."""
    runs, known = read_report(arguments.report) if arguments.report.exists() else ({}, set())
    _, _, passed, failed, rotated = read_run(arguments.runs)
    if arguments.check:
        confirmed = passed | (rotated - failed)
        confirmed |= {cell.pending for cell in confirmed}
        missing = sorted(cell for cell in known - confirmed if cell.platform not in BY_HAND)
        for cell in missing:
            print(
                f"{cell.test} did not pass for {cell.family}, {cell.feature} ({PLATFORMS[cell.platform]})", file=sys.stderr
            )
        print(f"{len(known)} cells, {len(missing)} of them not confirmed")
        return 1 if missing else 0
    today = {"date": datetime.date.today().isoformat(), "jax": metadata.version("jax")}
    runs |= {cell.platform: today for cell in passed}
    cells = updated(known, arguments.runs)
    write_report(arguments.report, runs, cells)
    with write_atomically(arguments.page) as target:
        target.write_text(render(runs, cells), "utf-8")
    print(f"{len(cells)} cells in {arguments.report} and {arguments.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
