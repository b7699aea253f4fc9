"""experiments/gpu_report.py: that it measures, and that neither a failure nor the clock costs more than one row."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from bundle import bundle
from gpu_parts import attention, decode, prefill
from gpu_parts import programs as device_programs
from gpu_parts.plan import GOAL_SHAPE, SMALL
from gpu_parts.run import Run

import llama_jax
from llama_jax.analysis.hardware import find_hardware
from llama_jax.config import FAMILY_FEATURES
from llama_jax.model.trees import param_shapes

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


def run_sections(report, folder: Path, *sections: str, **arguments) -> tuple[list[int], dict]:
    """Each in this process."""
    codes = [report.run_section(section, arguments_of(report, folder, **arguments)) for section in sections]
    return codes, read(folder)


@pytest.mark.slow
@pytest.mark.rotating
def test_every_section_measures(report, tmp_path, capfd):
    """The whole report, as on a device, with a process for each section."""
    code = report.main(arguments_of(report, tmp_path, time_limit=3000))
    assert code == 0, capfd.readouterr().out
    found = read(tmp_path)
    sections = found["sections"]
    assert list(sections) == list(report.SECTIONS)
    assert all(row["value"] > 0 for row in sections["yardsticks"][:3])
    assert len(sections["correctness"]) == 3 + 3 * 3  # formats, numbers of tokens
    assert all(row["ok"] for row in sections["correctness"])
    assert len(sections["families"]) == 3 * len(FAMILY_FEATURES)
    assert all(row["ok"] for row in sections["families"]), sections["families"]
    for name, count in (("decode", 4 * 2), ("formats", 1), ("prefill", 2 * 2)):  # shapes and weights, cases
        assert len(sections[name]) == count
        assert all(row["tokens_per_s"] > 0 and row["compile_s"] > 0 for row in sections[name])
    products = {(row["rows"], row["format"], row["way"]) for row in sections["matmuls"]}
    assert {
        (1, "bfloat16", "dense"),
        (1, "int8", "in the matmul"),
        (4, "q4_0", "chunks"),
        (1, "q4_0", "weights"),
    } <= products
    assert all(row["gb_per_s"] > 0 for row in sections["matmuls"])
    assert all(row["share_of_copy"] > 0 for row in sections["decode"])
    assert all(row["share_of_matrix"] > 0 for row in sections["prefill"])
    usual, exact, *loads = sections["serving"]
    assert usual["requests"] == exact["requests"] == 6
    assert exact["ok"]
    assert [row["requests"] for row in loads] == [1, 4]
    assert all(row["tokens_per_s"] > 0 for row in loads)
    assert [row["program"] for row in sections["programs"]] == ["small-train", "small-prefill", "small-decode"]
    assert all(row["ms"] > 0 and row["plan_gb"] > 0 and row["spread"] >= 0 for row in sections["programs"])
    decode = sections["programs"][2]
    assert decode["read_gb_per_s"] > 0
    assert decode["read_over_least"] > 0.5
    assert decode["kernels_a_layer"] > 1
    attended = [row for row in sections["attention"] if "refused" not in row]
    assert len(attended) == 2 * 2 * (5 - len(sections["attention"]) + len(attended))  # lengths, passes, backends
    assert all(row["ms"] > 0 and row["share_of_matrix"] > 0 and row["temp_mb"] >= 0 for row in attended)
    assert all(row["ok"] for row in attended if row["tokens"] == SMALL.heads.lengths[0])
    trained = sections["training"]
    assert [(row["parameters"], row["remat"]) for row in trained] == [
        ("float32", "full"),
        ("bfloat16", "dots"),
    ]
    assert all(row["ok"] and row["tokens_per_s"] > 0 and row["plan_gb"] > 0 and row["compile_s"] > 0 for row in trained)
    assert all((row["mfu"] is None) == (find_hardware(jax.devices()[0].device_kind) is None) for row in trained)
    (peer,) = sections["transformers"]
    assert "skipped" in peer or peer["llama_jax_over_it"] > 0
    assert found["device"]["platform"] == jax.devices()[0].platform
    numbers = [x for rows in sections.values() for row in rows for x in row.values() if isinstance(x, float)]
    assert all(math.isfinite(x) and x >= 0 for x in numbers)


def test_programs_stand_beside_what_compilers_foretold_of_them(tmp_path):
    hardware = "h100"
    cases = {case.name: case for case in device_programs.cases_of(hardware)}
    assert {"1b-train", "8b-prefill", "8b-decode"} <= set(cases)
    assert all(case.hardware == {hardware: "data=1"} for case in cases.values())
    assert "8b-train" not in cases  # of eight devices
    row = {"program": "8b-decode", "hardware": hardware, "token": {"read_ratio": 1.004, "kernels_per_layer": 9.0}}
    row["bytes_per_device"] = {"total": 16_500_000_000, "temporaries": 2_000_000, "gradients": 0}
    (tmp_path / "compile_report_gpu.json").write_text(json.dumps({"programs": [row, row | {"flags": "off", "token": None}]}))
    assert device_programs.find_prediction(cases["8b-decode"], hardware, tmp_path) == {
        "table_plan_gb": 16.5,
        "table_temporaries_gb": 0.002,
        "table_read_over_least": 1.004,
        "table_kernels_a_layer": 9.0,
    }
    assert device_programs.find_prediction(cases["1b-train"], hardware, tmp_path) == {}
    assert device_programs.hardware_of(SimpleNamespace(device_kind="NVIDIA H200")) == "h200"
    assert device_programs.hardware_of(jax.devices("cpu")[0]) is None


def test_failures_are_rows_and_the_rest_goes_on(report, monkeypatch, tmp_path, capsys):
    def breaks(run):
        yield {"shape": "a", "value": 1.5}
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand a long story")

    def one_row_fails(run):
        yield run.attempt({"shape": "b"}, lambda: 1 / 0)
        yield run.attempt({"shape": "c"}, lambda: {"value": 123456.0})

    sections = {"breaks": breaks, "one": one_row_fails, "list": lambda run: [{"check": "x", "ok": True}]}
    monkeypatch.setattr(report, "SECTIONS", sections)
    codes, found = run_sections(report, tmp_path, *sections)
    assert codes == [1, 1, 0]
    assert found["failures"] == 2
    assert found["sections"] == {
        "breaks": [
            {"shape": "a", "value": 1.5},
            {"error": "RuntimeError: RESOURCE_EXHAUSTED: out of memory\nand a long story"},
        ],
        "one": [{"shape": "b", "error": "ZeroDivisionError: division by zero"}, {"shape": "c", "value": 123456.0}],
        "list": [{"check": "x", "ok": True}],
    }
    printed = capsys.readouterr().out
    assert "error: RuntimeError: RESOURCE_EXHAUSTED: out of memory\n" in printed
    assert "123,456" in printed


def test_a_report_continues(report, monkeypatch, tmp_path):
    """What was measured is kept, what failed is tried again; rows of other source code are not kept."""
    measured, fails = [], {"b"}

    def section(run):
        for name in "abc":

            def measure(name=name):
                measured.append(name)
                if name == "c" and "c" in fails:
                    raise KeyboardInterrupt
                if name in fails:
                    raise RuntimeError("no")
                return {"value": len(measured)}

            yield run.attempt({"name": name}, measure)

    monkeypatch.setattr(report, "SECTIONS", {"one": section, "other": lambda run: [{"value": 0}]})
    fails.add("c")
    with pytest.raises(KeyboardInterrupt):
        run_sections(report, tmp_path, "one")
    fails.clear()
    _, found = run_sections(report, tmp_path, "other", "one")
    assert measured == ["a", "b", "c", "b", "c"]
    assert found["sections"]["one"] == [{"name": "a", "value": 1}, {"name": "b", "value": 4}, {"name": "c", "value": 5}]
    assert found["sections"]["other"] == [{"value": 0}]
    monkeypatch.setattr(report, "digest_source", lambda: "other")
    assert report.run_section("one", arguments_of(report, tmp_path)) == 0
    (tmp_path / "report.old.json").unlink()
    found = read(tmp_path)
    assert measured[5:] == ["a", "b", "c"]
    assert list(found["sections"]) == ["one"]


def test_what_is_not_measured_again_is_kept(report, monkeypatch, tmp_path):
    """Other shapes, and rows after a failure; a check that failed is tried again."""
    results = iter([{"ok": False}, {"value": 1}, {"ok": True}])

    def section(run):
        for name in ("check", "speed"):
            yield run.attempt({"name": name}, lambda: next(results))
        raise RuntimeError("no")

    monkeypatch.setattr(report, "SECTIONS", {"section": section})
    run_sections(report, tmp_path, "section")
    monkeypatch.setattr(report, "SECTIONS", {"section": lambda run: [run.attempt({"name": "check"}, lambda: next(results))]})
    _, found = run_sections(report, tmp_path, "section")
    rows = [row for row in found["sections"]["section"] if "error" not in row]
    assert rows == [{"name": "check", "ok": True}, {"name": "speed", "value": 1}]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"device": null}', "{}"])
def test_a_report_that_cannot_be_continued_is_renamed(report, monkeypatch, tmp_path, content):
    (tmp_path / "report.json").write_text(content)
    monkeypatch.setattr(report, "SECTIONS", {"section": lambda run: [{"value": 0}]})
    assert report.run_section("section", arguments_of(report, tmp_path)) == 0
    assert (tmp_path / "report.old.json").read_text() == content
    assert json.loads((tmp_path / "report.json").read_text())["sections"] == {"section": [{"value": 0}]}


def test_a_bundle_is_not_copied_into_itself():
    with pytest.raises(SystemExit, match="outside"):
        bundle(SCRIPT.parent / "bundle")


def test_the_sections_share_the_time(report, monkeypatch, tmp_path):
    """A process that dies or does not end costs only its section."""
    asked = {}

    def worker(command, env, timeout):
        section, request = command[-2], json.loads(command[-1])
        asked[section] = request["time_limit"], env.get("XLA_PYTHON_CLIENT_PREALLOCATE"), timeout
        if section == "decode":
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, -9 if section == "prefill" else 0)

    monkeypatch.setattr(report.subprocess, "run", worker)
    sections = ("decode", "prefill", "training", "yardsticks")
    assert report.main(arguments_of(report, tmp_path, sections=sections, time_limit=100)) == 1
    assert list(asked) == list(sections)
    limits = [limit for limit, *_ in asked.values()]
    assert limits == pytest.approx([60, 60, 50, 60], abs=5)
    assert [memory for _, memory, _ in asked.values()] == ["false", "false", "true", "false"]
    assert report.main(arguments_of(report, tmp_path, sections=("training",), time_limit=100)) == 0
    assert asked["training"][0] == pytest.approx(100, abs=5)


@pytest.mark.slow
@pytest.mark.rotating
def test_no_time_left_skips_everything(report, tmp_path):
    measured = [section for section in report.SECTIONS if section != "published"]
    codes, found = run_sections(report, tmp_path, *measured, time_limit=0)
    assert set(codes) == {0}
    assert list(found["sections"]) == measured
    assert all("skipped" in row for rows in found["sections"].values() for row in rows)
    assert len(found["sections"]["decode"]) == 8


def test_only_the_named_shapes_are_measured(report, tmp_path, capsys):
    sections = ("decode", "training", "serving")
    codes, found = run_sections(report, tmp_path, *sections, time_limit=0, shapes=("small-gqa",))
    assert codes == [0, 0, 0]
    assert {row["shape"] for rows in found["sections"].values() for row in rows if "shape" in row} == {"small-gqa"}
    assert report.main(report.Arguments(output_folder=tmp_path, shapes=("large",))) == 2
    assert "unknown shape 'large'; the shapes are stories-260k, small-gqa" in capsys.readouterr().err


def attentions(monkeypatch, measure, **given):
    """The rows of the section when `measure(backend, tokens, direction)` stands for every measurement."""
    monkeypatch.setattr(attention, "measure_attention", lambda run, *case: measure(*case))
    run = Run(jax.devices()[0], SMALL, **{"time_limit": 100, **given})
    return list(attention.attention(run))


def test_attention_that_does_not_fit_or_is_not_there_is_a_finding(monkeypatch):
    def measure(backend, tokens, direction):
        if backend == "splash":
            return {"refused": "no TPU"}
        if backend == "reference" and direction != "forward":
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        if backend == "dense" and tokens == 96:
            return {"does_not_fit": "the plan is 99 GB"}
        return {"ms": 1.0}

    rows = attentions(monkeypatch, measure)
    assert [row for row in rows if row["backend"] == "splash"] == [{"backend": "splash", "refused": "no TPU"}]
    assert [row["tokens"] for row in rows if "tokens" in row] == [64] * 8 + [96] * 8
    reference = [row for row in rows if row["backend"] == "reference"]
    assert [row.get("ms") for row in reference] == [1.0, None, 1.0, None]
    assert "Out of memory" in reference[1]["does_not_fit"]
    assert reference[3]["skipped"] == "less did not fit"
    assert not any("error" in row for row in rows)


def test_goals_are_judged_by_one_row_and_the_best_candidate(report, monkeypatch, tmp_path, capsys):
    shapes = [(64, "bfloat16", 0.5, 99.0), (1, "bfloat16", 0.9, 200.0), (1, "int8", 0.4, 290.0)]
    decoding = [
        {"shape": GOAL_SHAPE, "weights": weights, "batch": batch, "share_of_copy": share, "tokens_per_s": speed}
        for batch, weights, share, speed in shapes
    ]
    (case, *_) = SMALL.trainings
    row = {"shape": case.shape, "parameters": case.parameters, "length": case.length, "remat": "full"}
    found = [row | {"batch": batch, "mfu": mfu} for batch, mfu in ((1, 0.4), (2, 0.6), (4, 0.5))]
    no_peak = row | {"parameters": "bfloat16", "batch": 1, "mfu": None}
    sections = {"decode": lambda run: decoding, "training": lambda run: [*found, no_peak]}
    monkeypatch.setattr(report, "SECTIONS", sections)
    _, judged = run_sections(report, tmp_path, *sections)
    assert judged["goals"] == [
        f"reached: {GOAL_SHAPE} in bfloat16, one row, share of the copy bandwidth 0.90, 0.85 wanted",
        f"missed: {GOAL_SHAPE} in int8, one row, over bfloat16 1.45, 1.5 wanted",
        f"reached: training {case.shape} (float32, remat full, 2 rows), MFU 0.60, 0.5 wanted",
    ]
    assert "goal missed" in capsys.readouterr().out


def test_bytes_and_operations_counted_by_hand():
    config = llama_jax.LlamaConfig(
        vocab_size=10,
        dim=4,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        hidden_dim=6,
        max_seq_len=8,
        norm_eps=1e-5,
        rope_theta=1e4,
        tie_embeddings=False,
    )
    layer = 4 * (2 + 2 * 1) * 2 + 4 * 4 + 3 * 4 * 6 + 2 * 4  # qkv, output, feed-forward, two normalizations
    cache = 2 * 2 * 3 * 1 * 5 * 2  # keys and values, layers, rows, heads, slots, features
    assert decode.step_bytes(config, param_shapes(config, jnp.bfloat16), 3, 5) == 2 * (2 * layer + 4 + 10 * 4) + 2 * cache
    attention = 2 * 2 * (2 * 3 * 2 * 2) * 5 * 5 // 2  # two products, a multiply and an add each, halved by causality
    assert prefill.prefill_flop(config, 3, 5) == 2 * (2 * layer + 4) * 15 + attention
