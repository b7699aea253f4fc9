"""The support matrix: which features work for which family of models, as tests claim by their marks (docs/support.md).

`@pytest.mark.supports("GGUF")` claims that a family has a feature of `FEATURES`, `refuses` that it is an error. Braces stand
for the test's parameters: `supports("{format}", family="{model}")`. By default the family is the parameter `kind` and the
platform "cpu", or that of the parameter `hardware`, whose compiler is asked. A test compares the page with the marks.

    python tests/support_claims.py        collects the tests and writes tests/support.json and docs/support.md
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
CELLS = ROOT / "tests" / "support.json"
PAGE = ROOT / "docs" / "support.md"
RESULTS = ROOT / "experiments" / "results"
SKIPPED = ("nightly", "llama_cpp")  # are run by hand, and claim nothing
FAMILIES: dict[str, str] = {
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
PLATFORMS = ("cpu", "tpu", "gpu")
ON_DEVICE = ("logits", "generate", "training step")
"""What the section families of `gpu_report` checks."""
SIGNS = {"supports": "✓", "refuses": "error"}


class Cell(NamedTuple):
    """A cell of the matrix, and the test that claims it; `says` is "supports" or "refuses"."""

    platform: str
    feature: str
    family: str
    test: str
    says: str


COLLECTED = pytest.StashKey[tuple[set[str], set[Cell]]]()
"""The files that were collected as a whole, and the claims of their tests."""


def claims_of(item: pytest.Item) -> Iterator[Cell]:
    """The cells that a test claims.

    Raises:
      ValueError: no such feature, family or platform.
    """
    if any(item.get_closest_marker(name) for name in SKIPPED):
        return
    params = getattr(getattr(item, "callspec", None), "params", {})
    test = item.nodeid.split("[")[0]
    features = [feature for group in FEATURES.values() for feature in group]
    for name in SIGNS:
        for mark in item.iter_markers(name):
            families = mark.kwargs.get("family", "{kind}")
            hardware = str(params.get("hardware", ""))
            platform = mark.kwargs.get("platform", "cpu" if not hardware else "tpu" if "tpu" in hardware else "gpu")
            for family in [families] if isinstance(families, str) else families:
                for feature in mark.args:
                    cell = Cell(platform, feature.format(**params), family.format(**params).split(",")[0], test, name)
                    for value, known in ((cell.platform, PLATFORMS), (cell.feature, features), (cell.family, FAMILIES)):
                        if value not in known:
                            raise ValueError(f"{test} claims to support {value!r}, which is not one of {', '.join(known)}")
                    yield cell


class SupportClaims:
    """A plugin of pytest that collects the claims of whole files."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Before any are left out."""
        claims = {cell for item in items for cell in claims_of(item)}
        if not any("::" in argument for argument in config.args):
            config.stash[COLLECTED] = {item.nodeid.split("::")[0] for item in items}, claims


def read_cells() -> set[Cell]:
    """The recorded cells."""
    rows = json.loads(CELLS.read_text("utf-8"))
    return {
        Cell(row["platform"], row["feature"], family, row["test"], says)
        for row in rows
        for says in SIGNS
        for family in row.get(says, ())
    }


def write_cells(cells: set[Cell]) -> None:
    """A line for each test and feature, whatever the families."""
    rows: dict[tuple[str, str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for cell in sorted(cells):
        rows[cell.platform, cell.feature, cell.test][cell.says].append(cell.family)
    keys = ("platform", "feature", "test")
    lines = [json.dumps(dict(zip(keys, key, strict=True)) | families) for key, families in rows.items()]
    CELLS.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


def render(cells: set[Cell], results: Path = RESULTS) -> str:
    """The page."""
    says = defaultdict(set)
    for cell in cells:
        says[cell.platform, cell.feature, cell.family].add(cell.says)
    sections = []
    for group, features in FEATURES.items():
        columns = [("cpu", feature) for feature in features]
        if group == "Compiled":
            columns = [(platform, feature) for platform in ("tpu", "gpu") for feature in features]
        heading = [f"{'' if platform == 'cpu' else platform.upper() + ' '}{feature}" for platform, feature in columns]
        signs = {
            family: [
                " ".join(SIGNS[name] for name in SIGNS if name in says[column[0], column[1], family]) for column in columns
            ]
            for family in FAMILIES
        }
        legend = "".join(f"- **{feature}**: {meaning}\n" for feature, meaning in features.items())
        tests = sorted({cell.test for cell in cells if cell.feature in features})
        named = ", ".join(f"`{test}`" for test in tests)
        title = "Compiled for TPU and GPU" if group == "Compiled" else group
        about = f"\n{COMPILED}" if group == "Compiled" else ""
        sections.append(f"## {title}\n{about}\n{family_table(heading, signs)}\n{legend}\nTests: {named}.\n")
    return HEAD + "\n".join(sections) + DEVICES + (device_tables(results) or "No such report is recorded yet.\n")


def family_table(heading: Iterable[str], cells: dict[str, list[str]]) -> str:
    """A table with a row for each family."""
    lines = [["family", *heading], ["---", *[":---:" for _ in heading]]]
    lines += [[name, *cells[family]] for family, name in FAMILIES.items()]
    return "\n".join("| " + " | ".join(line).replace("|  |", "| |") + " |" for line in lines) + "\n"


def device_tables(results: Path) -> str:
    """What ran on accelerators, a table for each device."""
    parts = []
    for path in sorted(results.glob("gpu_report_*.json")):
        report = json.loads(path.read_text("utf-8"))
        rows = report["sections"].get("families", [])
        if not rows or report["device"]["platform"] == "cpu":
            continue
        outcomes = {(row["family"], row["feature"]): "✓" if row["ok"] else "differs" for row in rows if "ok" in row}
        outcomes |= {(row["family"], row["feature"]): "failed" for row in rows if "error" in row}
        cells = {family: [outcomes.get((family, feature), "") for feature in ON_DEVICE] for family in FAMILIES}
        about = f"{report['device']['kind']}, {report['device']['date'][:10]}, jax {report['versions']['jax']}"
        link = f"[report](../experiments/results/{path.name})"
        parts.append(f"{about} ({link}; empty: not run):\n\n{family_table(ON_DEVICE, cells)}")
    return "\n".join(parts)


HEAD = """# Supported models and features

<!-- Written by tests/support_claims.py; do not edit. -->

Every ✓ and every error on this page is what a test checks. The tests build a small random model of each family, with
everything that the family adds to Llama, and compare it with transformers or with another way to compute the same numbers.
Features that do not depend on the family are tested with Llama only and are not listed here.

- ✓: a test checks it.
- error: the library refuses the combination with an error that names it, and a test checks this.
- an empty cell: no test covers it.

[Models](models.md#models) describes the families.

"""
COMPILED = """\
The compilers for TPU v5e and H100 accept these programs of each family, on a machine with neither device. This says nothing
about numbers or speed. [Compiled programs](compiled.md) has those of Llama at real sizes.
"""
DEVICES = """
## Run on a device

On a machine with a GPU or TPU, this command compares logits, greedy tokens and a training step of each family with float64
on the CPU. It writes a report that this page then includes:

<!-- not run: needs a GPU or TPU -->
```bash
python experiments/gpu_report.py --sections families --device-json gpu_report_families_NAME.json
```

"""


class Recorder(SupportClaims):
    """Writes the matrix of what it collects; files that could not be collected keep their cells."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        files, claims = session.config.stash[COLLECTED]
        cells = {cell for cell in read_cells() if cell.test.split("::")[0] not in files} | claims
        write_cells(cells)
        PAGE.write_text(render(cells), "utf-8")


if __name__ == "__main__":
    sys.exit(pytest.main(["--collect-only", "-q", "-n", "0", str(ROOT / "tests")], plugins=[Recorder()]))
