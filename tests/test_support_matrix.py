"""The support matrix: that the committed page says what the tests claim."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
import support_claims
from gpu_parts import families
from gpu_parts.plan import SMALL
from gpu_parts.run import Run
from support_claims import COLLECTED, Cell, SupportClaims

from llama_jax.config import FAMILY_FEATURES

ROOT = Path(__file__).parents[1]
TEST = "tests/test_a.py::test_a"


def test_every_family_has_a_row():
    assert set(support_claims.FAMILIES) == set(FAMILY_FEATURES)


def test_the_committed_matrix_is_what_the_tests_claim(request):
    """For the test files that this run collected."""
    committed = support_claims.read_cells()
    assert all((ROOT / cell.test.split("::")[0]).exists() for cell in committed)
    if COLLECTED not in request.config.stash:
        pytest.skip("a part of a file was collected")
    files, claims = request.config.stash[COLLECTED]
    recorded = {cell for cell in committed if cell.test.split("::")[0] in files}
    assert recorded == claims, "marks and matrix differ: run tests/support_claims.py, see docs/extending.md"


def test_the_committed_page_is_of_the_committed_matrix():
    assert support_claims.PAGE.read_text("utf-8") == support_claims.render(support_claims.read_cells())


def item(params, *marks, name="test_a[x]"):
    return SimpleNamespace(
        nodeid=f"tests/test_a.py::{name}",
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda wanted: next((mark for mark in marks if mark.name == wanted), None),
        iter_markers=lambda wanted: [mark for mark in marks if mark.name == wanted],
    )


def test_marks_become_claims():
    config = SimpleNamespace(args=["tests"], stash={})
    collect = SupportClaims().pytest_collection_modifyitems
    of_kind = item({"kind": "cwm", "format": "GGUF"}, pytest.mark.supports("{format}").mark)
    named = item({"model": "phi3, window"}, pytest.mark.refuses("LoRA", family="{model}").mark)
    compiled = item({"hardware": "tpu-v5e"}, pytest.mark.supports("decode", "step", family=["llama"]).mark)
    by_hand = item({"kind": "cwm"}, pytest.mark.supports("GGUF").mark, pytest.mark.nightly.mark)
    collect(config, [of_kind, named, compiled, by_hand])
    claims = {
        Cell("cpu", "GGUF", "cwm", TEST, "supports"),
        Cell("cpu", "LoRA", "phi3", TEST, "refuses"),
        *(Cell("tpu", feature, "llama", TEST, "supports") for feature in ("decode", "step")),
    }
    assert config.stash[COLLECTED] == ({"tests/test_a.py"}, claims)
    page = support_claims.render(claims)
    assert "| CWM | | ✓ |" in page
    with pytest.raises(ValueError, match="claims to support 'flying'"):
        collect(config, [item({"kind": "cwm"}, pytest.mark.supports("flying").mark)])


def test_what_a_device_ran_has_a_table_of_its_own(tmp_path):
    rows = [{"family": "cwm", "feature": feature, "ok": feature != "generate"} for feature in support_claims.ON_DEVICE]
    rows += [{"family": "phi3", "feature": "logits", "error": "no memory"}]
    rows += [{"family": "phi3", "feature": "generate", "skipped": "time limit"}]
    report = {"device": {"kind": "NVIDIA X", "platform": "gpu", "date": "2026-01-02T03:04:05"}, "versions": {"jax": "0.1"}}
    report["sections"] = {"families": rows}
    (tmp_path / "gpu_report_families_X.json").write_text(json.dumps(report))
    report["device"] = report["device"] | {"platform": "cpu", "kind": "some processor"}
    (tmp_path / "gpu_report_cpu.json").write_text(json.dumps(report))
    page = support_claims.render(set(), tmp_path)
    assert "NVIDIA X, 2026-01-02, jax 0.1" in page
    assert "some processor" not in page
    on_device = page.split("## Run on a device")[1]
    found = {
        line.split("|")[1].strip(): [x.strip() for x in line.split("|")[2:-1]]
        for line in on_device.splitlines()
        if "|" in line
    }
    assert found["CWM"] == ["✓", "differs", "✓"]
    assert found["Phi-3, Phi-4"] == ["failed", "", ""]


@pytest.mark.slow
def test_the_checks_of_a_device_pass_on_this_one(monkeypatch):
    """All families: tests/test_gpu_report.py."""
    monkeypatch.setattr(families, "FAMILY_MODELS", {"olmo2": families.FAMILY_MODELS["olmo2"]})
    rows = list(families.families(Run(jax.devices()[0], SMALL, time_limit=1e9)))
    assert [(row["family"], row["feature"]) for row in rows] == [("olmo2", name) for name in support_claims.ON_DEVICE]
    assert all(row.get("ok") for row in rows), rows


@pytest.mark.slow
def test_the_checks_of_a_device_find_what_is_wrong(monkeypatch):
    monkeypatch.setattr(families, "FAMILY_MODELS", {"mistral": families.FAMILY_MODELS["mistral"]})
    honest = families.as_float64
    monkeypatch.setattr(families, "as_float64", lambda params: jax.tree.map(lambda leaf: leaf * 1.01, honest(params)))
    monkeypatch.setattr(families, "generate", lambda kind, device: {"ok": False})
    rows = list(families.families(Run(jax.devices()[0], SMALL, time_limit=1e9)))
    assert [row["ok"] for row in rows] == [False] * 3
