"""The support matrix: that the committed page says what the tests claim, and how runs become a page."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
import support_matrix
from gpu_parts import families
from gpu_parts.plan import SMALL
from gpu_parts.run import Run
from support_claims import COLLECTED, SupportClaims
from support_matrix import Cell

from llama_jax.config import FAMILY_FEATURES

ROOT = Path(__file__).parents[1]
HERE = "tests/test_a.py::test_a"
GGUF, LORA = (Cell("cpu", feature, "cwm", HERE, "supports") for feature in ("GGUF", "LoRA"))


def test_every_family_has_a_row():
    assert set(support_matrix.FAMILIES) == set(FAMILY_FEATURES)


def test_the_committed_matrix_is_what_the_tests_claim(request):
    """For the test files that this run collected."""
    _, committed = support_matrix.read_report(support_matrix.RESULTS / "support.json")
    assert all((ROOT / cell.test.split("::")[0]).exists() for cell in committed)
    if COLLECTED not in request.config.stash:
        pytest.skip("a part of a file was collected")
    files, claims = request.config.stash[COLLECTED]
    recorded = {cell for cell in committed if cell.test.split("::")[0] in files}
    # A claim that no run has confirmed stands there as well, as such.
    wanted = {cell if cell in recorded else cell.pending for cell in claims}
    assert recorded == wanted, "marks and matrix differ: run experiments/support_matrix.py, see docs/extending.md"


def test_the_committed_page_is_of_the_committed_matrix():
    report = support_matrix.read_report(support_matrix.RESULTS / "support.json")
    assert support_matrix.PAGE.read_text() == support_matrix.render(*report)


def record(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(folder, *runs, check=False):
    return support_matrix.Arguments(runs, check, folder / "support.json", folder / "support.md")


def test_runs_are_merged_and_what_fails_or_is_claimed_no_longer_leaves(tmp_path, capsys):
    first = record(
        tmp_path / "first",
        ["collected", "tests/test_a.py"],
        *(["claimed", *cell] for cell in (GGUF, LORA)),
        *(["passed", *cell] for cell in (GGUF, LORA)),
    )
    elsewhere = GGUF._replace(test="tests/test_b.py::test_b", says="refuses")
    second = record(tmp_path / "second", ["collected", "tests/test_b.py"], ["claimed", *elsewhere], ["passed", *elsewhere])
    assert support_matrix.main(arguments(tmp_path, first, second)) == 0
    runs, cells = support_matrix.read_report(tmp_path / "support.json")
    assert cells == {GGUF, LORA, elsewhere}
    assert set(runs) == {"cpu"}
    page = (tmp_path / "support.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| CWM") and "✓ error" in line)
    assert row.split("|")[3].strip() == "✓ error"
    assert support_matrix.main(arguments(tmp_path, first, second, check=True)) == 0

    # A test that has several cases of a cell passes where all of them do.
    third = record(tmp_path / "third", ["passed", *GGUF], ["failed", *GGUF], ["skipped", *LORA])
    assert support_matrix.main(arguments(tmp_path, third, check=True)) == 1
    printed = capsys.readouterr().err
    assert f"{HERE} did not pass for cwm, GGUF (run on CPU)" in printed
    assert printed.count("did not pass") == 3
    support_matrix.main(arguments(tmp_path, third))
    assert support_matrix.read_report(tmp_path / "support.json")[1] == {GGUF.pending, LORA, elsewhere}
    assert " ? |" in (tmp_path / "support.md").read_text()
    assert support_matrix.main(arguments(tmp_path, first, second, check=True)) == 0
    support_matrix.main(arguments(tmp_path, second))
    assert support_matrix.read_report(tmp_path / "support.json")[1] == {GGUF.pending, LORA, elsewhere}
    fourth = record(tmp_path / "fourth", ["collected", "tests/test_a.py"])
    support_matrix.main(arguments(tmp_path, fourth))
    assert support_matrix.read_report(tmp_path / "support.json")[1] == {elsewhere}


def test_what_is_compiled_for_gpus_is_confirmed_by_hand(tmp_path):
    of_gpu = Cell("gpu", "decode", "llama", HERE, "supports")
    support_matrix.write_report(tmp_path / "support.json", {"gpu": {"date": "2026-01-01", "jax": "0"}}, {of_gpu})
    assert support_matrix.main(arguments(tmp_path, check=True)) == 0


def item(params, *marks, name="test_a[x]"):
    return SimpleNamespace(
        nodeid=f"tests/test_a.py::{name}",
        callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda wanted: next((mark for mark in marks if mark.name == wanted), None),
        iter_markers=lambda wanted: [mark for mark in marks if mark.name == wanted],
        user_properties=[],
    )


def test_marks_become_claims_and_outcomes_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_JAX_SUPPORT_RUN", str(tmp_path / "run"))
    config = SimpleNamespace(args=["tests"], stash={})
    claims = SupportClaims(config)
    of_kind = item({"kind": "cwm", "format": "GGUF"}, pytest.mark.supports("{format}").mark)
    named = item({"model": "phi3, window"}, pytest.mark.refuses("LoRA", family="{model}").mark)
    compiled = item({"hardware": "tpu-v5e"}, pytest.mark.supports("decode", "step", family=["llama"]).mark)
    by_hand = item({"kind": "cwm"}, pytest.mark.supports("GGUF").mark, pytest.mark.nightly.mark)
    claims.pytest_collection_modifyitems(config, [of_kind, named, compiled, by_hand])
    wanted = {
        GGUF,
        Cell("cpu", "LoRA", "phi3", HERE, "refuses"),
        *(Cell("tpu", feature, "llama", HERE, "supports") for feature in ("decode", "step")),
    }
    assert config.stash[COLLECTED] == ({"tests/test_a.py"}, wanted)
    for when, outcome in (("setup", "passed"), ("call", "passed"), ("teardown", "failed")):
        claims.pytest_runtest_logreport(
            SimpleNamespace(when=when, outcome=outcome, passed=outcome == "passed", user_properties=of_kind.user_properties)
        )
    assert support_matrix.read_run([tmp_path / "run"]) == ({"tests/test_a.py"}, wanted, set(), {GGUF}, set())
    with pytest.raises(ValueError, match="claims to support 'flying'"):
        claims.pytest_collection_modifyitems(config, [item({"kind": "cwm"}, pytest.mark.supports("flying").mark)])


def test_what_a_device_ran_has_a_table_of_its_own(tmp_path):
    rows = [{"family": "cwm", "feature": feature, "ok": feature != "generate"} for feature in support_matrix.ON_DEVICE]
    rows += [{"family": "phi3", "feature": "logits", "error": "no memory"}]
    rows += [{"family": "phi3", "feature": "generate", "skipped": "time limit"}]
    report = {"device": {"kind": "NVIDIA X", "platform": "gpu", "date": "2026-01-02T03:04:05"}, "versions": {"jax": "0.1"}}
    report["sections"] = {"families": rows}
    (tmp_path / "gpu_report_families_X.json").write_text(json.dumps(report))
    report["device"] = report["device"] | {"platform": "cpu", "kind": "some processor"}
    (tmp_path / "gpu_report_cpu.json").write_text(json.dumps(report))
    page = support_matrix.render({}, set(), tmp_path)
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
    assert [(row["family"], row["feature"]) for row in rows] == [("olmo2", name) for name in support_matrix.ON_DEVICE]
    assert all(row.get("ok") for row in rows), rows


@pytest.mark.slow
def test_the_checks_of_a_device_find_what_is_wrong(monkeypatch):
    monkeypatch.setattr(families, "FAMILY_MODELS", {"mistral": families.FAMILY_MODELS["mistral"]})
    honest = families.as_float64
    monkeypatch.setattr(families, "as_float64", lambda params: jax.tree.map(lambda leaf: leaf * 1.01, honest(params)))
    monkeypatch.setattr(families, "generate", lambda kind, device: {"ok": False})
    rows = list(families.families(Run(jax.devices()[0], SMALL, time_limit=1e9)))
    assert [row["ok"] for row in rows] == [False] * 3


def test_tests_of_another_turn_are_no_failures(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_JAX_SUPPORT_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("LLAMA_JAX_TURN", "3")
    claims = SupportClaims(SimpleNamespace())
    marks = pytest.mark.supports("GGUF").mark, pytest.mark.rotating.mark
    claims.pytest_deselected([item({"kind": "cwm"}, *marks), item({"kind": "phi3"}, marks[0])])
    support_matrix.write_report(tmp_path / "support.json", {"cpu": {"date": "2026-01-01", "jax": "0"}}, {GGUF})
    assert support_matrix.main(arguments(tmp_path, tmp_path / "run", check=True)) == 0
    support_matrix.write_report(tmp_path / "support.json", {}, {GGUF._replace(family="phi3")})
    assert support_matrix.main(arguments(tmp_path, tmp_path / "run", check=True)) == 1
