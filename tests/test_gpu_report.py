"""experiments/gpu_report.py measures, with small shapes."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
from gpu_parts.plan import SMALL

from llama_jax.config.families import FAMILIES

SCRIPT = Path(__file__).parents[1] / "experiments" / "gpu_report.py"


@pytest.fixture
def report(monkeypatch):
    """The script as a module; small shapes on every device, so that a GPU machine's test run stays short."""
    spec = importlib.util.spec_from_file_location("gpu_report", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_report", module)  # where dataclasses look up the names in annotations
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # what the import would set, undone after the test
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LARGE", SMALL)
    return module


def arguments_of(report, folder: Path, **arguments):
    return report.Arguments(output_folder=folder, device_json="report.json", **arguments)


def read(folder: Path) -> dict:
    assert [path.name for path in folder.iterdir()] == ["report.json"]
    return json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.slow
@pytest.mark.rotating
def test_every_section_measures(report, tmp_path, capfd):
    """The whole report, as on a device, with a process for each section."""
    code = report.main(arguments_of(report, tmp_path, time_limit=3000))
    assert code == 0, capfd.readouterr().out
    sections = read(tmp_path)["sections"]
    assert list(sections) == list(report.SECTIONS)
    for name in ("correctness", "families", "training"):
        assert all(row["ok"] for row in sections[name]), sections[name]
    assert len(sections["families"]) == 3 * len(FAMILIES)
    for name in ("decode", "formats", "prefill", "training"):
        assert all(row["tokens_per_s"] > 0 and row["compile_s"] > 0 for row in sections[name])
    assert [row["program"] for row in sections["programs"]] == ["small-train", "small-prefill", "small-decode"]
    attended = [row for row in sections["attention"] if "refused" not in row]
    assert all(row["ms"] > 0 and row["share_of_matrix"] > 0 for row in attended)
    numbers = [x for rows in sections.values() for row in rows for x in row.values() if isinstance(x, float)]
    assert all(math.isfinite(x) and x >= 0 for x in numbers)
