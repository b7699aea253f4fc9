"""experiments/gpu_report.py: that it measures, and that neither a failure nor the clock costs more than one row."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import device_programs
import jax
import numpy as np
import pytest
from gpu_parts import attention, attention_one, correctness, decode, options, peer, prefill, training, training_one, weights
from gpu_parts.plan import GOAL_SHAPE, SMALL, SMALL_GQA
from gpu_parts.run import Run

import llama_jax
from llama_jax.analysis.hardware import find_hardware

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


def run_main(report, folder: Path, **arguments) -> tuple[int, dict]:
    code = report.main(report.Arguments(output_folder=folder, device_json="report.json", **arguments))
    assert [path.name for path in folder.iterdir()] == ["report.json"]
    return code, json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.slow
def test_every_section_measures(report, tmp_path, capsys):
    code, found = run_main(report, tmp_path)
    assert code == 0, capsys.readouterr().out
    sections = found["sections"]
    assert list(sections) == list(report.SECTIONS)
    assert all(row["value"] > 0 for row in sections["yardsticks"])
    assert len(sections["correctness"]) == 3
    assert all(row["ok"] for row in sections["correctness"])
    for name in ("decode", "prefill"):
        assert len(sections[name]) == 2 * 2  # shapes, cases
        assert all(row["tokens_per_s"] > 0 and row["compile_s"] > 0 for row in sections[name])
    assert all(row["share_of_copy"] > 0 for row in sections["decode"])
    assert all(row["share_of_matrix"] > 0 for row in sections["prefill"])
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
    assert device_programs.foretold(cases["8b-decode"], hardware, tmp_path) == {
        "table_plan_gb": 16.5,
        "table_temporaries_gb": 0.002,
        "table_read_over_least": 1.004,
        "table_kernels_a_layer": 9.0,
    }
    assert device_programs.foretold(cases["1b-train"], hardware, tmp_path) == {}
    assert device_programs.hardware_of(SimpleNamespace(device_kind="NVIDIA H200")) == "h200"
    assert device_programs.hardware_of(jax.devices("cpu")[0]) is None


def test_failures_are_rows_and_the_rest_goes_on(report, monkeypatch, tmp_path, capsys):
    def breaks(run):
        yield {"shape": "a", "value": 1.5}
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand a long story")

    def one_row_fails(run):
        yield run.attempt({"shape": "b"}, lambda: 1 / 0)
        yield run.attempt({"shape": "c"}, lambda: {"value": 123456.0})

    monkeypatch.setattr(
        report, "SECTIONS", {"breaks": breaks, "one": one_row_fails, "list": lambda run: [{"check": "x", "ok": True}]}
    )
    code, found = run_main(report, tmp_path)
    assert code == 1
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


def test_what_was_found_is_on_disk_before_the_end(report, monkeypatch, tmp_path):
    def killed(run):
        yield {"value": 1}
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "SECTIONS", {"killed": killed})
    with pytest.raises(KeyboardInterrupt):
        run_main(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["sections"] == {"killed": [{"value": 1}]}


def test_failed_check_gives_exit_code_1(report, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "SECTIONS", {"check": lambda run: [{"ok": False}], "other": lambda run: []})
    assert run_main(report, tmp_path)[0] == 1
    code, found = run_main(report, tmp_path, sections=("other",))
    assert (code, found["sections"]) == (0, {"other": []})


def test_unknown_section(report, tmp_path, capsys):
    assert report.main(report.Arguments(sections=("decoding",), output_folder=tmp_path)) == 2
    assert "unknown section 'decoding'" in capsys.readouterr().err


@pytest.mark.slow
def test_no_time_left_skips_everything(report, tmp_path):
    code, found = run_main(report, tmp_path, time_limit=0)
    assert code == 0
    assert list(found["sections"]) == list(report.SECTIONS)
    assert all("skipped" in row for rows in found["sections"].values() for row in rows)
    assert len(found["sections"]["decode"]) == 4


def test_measurement_that_may_not_fit_is_not_started():
    run = Run(jax.devices()[0], SMALL, time_limit=100)
    run.longest = 200.0
    assert run.attempt({"a": 1}, lambda: pytest.fail("started")) == {"a": 1, "skipped": "time limit"}


def test_goal_is_judged_by_batch_1(report, monkeypatch, tmp_path, capsys):
    rows = [{"shape": GOAL_SHAPE, "batch": batch, "share_of_copy": share} for batch, share in ((8, 0.5), (1, 0.9))]
    monkeypatch.setattr(report, "SECTIONS", {"decode": lambda run: rows})
    assert run_main(report, tmp_path)[1]["goal"]["share_of_copy"] == 0.9
    assert "goal reached" in capsys.readouterr().out


def test_refused_compiler_option_is_a_finding(monkeypatch):
    def compile_something(*_, compiler_options):
        return {"compiled": str(jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=compiler_options))}

    monkeypatch.setattr(options, "COMPILER_OPTIONS", ({}, {"xla_no_such_option": True}))
    monkeypatch.setattr(options, "measure_decode", compile_something)
    monkeypatch.setattr(weights.Weights, "made", lambda self: None)
    run = Run(SimpleNamespace(platform="gpu"), SMALL, time_limit=100)
    usual, refused = options.compiler_options(run)
    assert "compiled" in usual
    assert "xla_no_such_option" in refused["refused"]
    assert "error" not in refused


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


def test_attention_has_its_share_of_the_time(monkeypatch):
    assert all(row["skipped"] == "time limit" for row in attentions(monkeypatch, pytest.fail, time_limit=0))
    clock = iter(range(0, 1000, 3))
    for module in (attention, sys.modules["gpu_parts.run"]):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    rows = attentions(monkeypatch, lambda *_: {"ms": 1.0}, start=0)
    assert 0 < sum("ms" in row for row in rows) < sum("skipped" in row for row in rows)


def test_attention_is_measured_and_compared():
    run = Run(jax.devices()[0], SMALL, time_limit=100)
    row = attention_one.measure_attention(run, "dense", 64, "forward and backward")
    assert row["ok"]
    assert 0 < row["max_diff"] < attention_one.ATTENTION_TOLERANCE
    assert row["ms"] > 0
    assert row["temp_mb"] >= 0
    forward = 2 * (2 * 4 * 16) * 64 * 64 // 2  # two products, a multiply and an add each, halved by causality
    assert attention_one.attention_flop(run.plan.heads, 64, "forward") == forward
    assert row["attention_tflop"] * 1e12 == pytest.approx(3.5 * forward)
    if jax.default_backend() == "cpu":
        assert "needs an NVIDIA GPU" in attention_one.measure_attention(run, "cudnn", 64, "forward")["refused"]


def test_attention_that_is_wrong_is_a_failure():
    shapes = ([(1, 1, 8, 1, 4)], [(1, 1, 8, 4)] * 2)
    given = [[jax.ShapeDtypeStruct(shape, "bfloat16") for shape in some] for some in shapes]
    arrays = [array for some in given for array in attention_one.attention_arrays(some)]
    right = attention_one.attend("reference", 4, *arrays)
    assert not attention_one.against_reference(right * 1.1, arrays, 4)["ok"]
    broken = attention_one.against_reference(right * np.float32("nan"), arrays, 4)
    assert (broken["ok"], broken["max_diff"]) == (False, "nan")


def trainings(monkeypatch, alone: bool, **ended) -> tuple[list[dict], list[dict]]:
    """The rows of the section when every worker ends in the same way, and what the workers were asked for."""
    asked = []

    def worker(command, **_):
        asked.append(json.loads(command[-1]))
        if "raises" in ended:
            raise ended["raises"]
        return subprocess.CompletedProcess(command, **ended)

    monkeypatch.setattr(training.subprocess, "run", worker)
    run = Run(jax.devices()[0], SMALL, time_limit=100, alone=alone)
    return list(training.training(run)), asked


def test_a_training_worker_that_dies_keeps_its_rows(monkeypatch):
    printed = 'a warning\n{"remat": "full", "mfu": 0.4}\n{"remat": "do'
    rows, asked = trainings(monkeypatch, True, returncode=-9, stdout=printed, stderr="Killed")
    assert len(asked) == 2
    assert rows[0] == rows[2] == {"remat": "full", "mfu": 0.4}
    assert rows[1]["error"] == "the worker ended with -9: Killed"
    assert (rows[3]["parameters"], "error" in rows[3]) == ("bfloat16", True)


def test_a_training_worker_that_is_late_keeps_its_rows(monkeypatch):
    late = subprocess.TimeoutExpired("worker", 50, output=b'{"remat": "full"}\n{"remat"')
    rows, _ = trainings(monkeypatch, True, raises=late)
    assert rows[0] == {"remat": "full"}
    assert rows[1]["skipped"] == "time limit"


@pytest.mark.parametrize(("alone", "share"), [(True, 1.0), (False, 0.4)])
def test_training_has_its_share_of_the_time(monkeypatch, alone, share):
    _, asked = trainings(monkeypatch, alone, returncode=0, stdout="", stderr="")
    # What the first shape leaves, which here is all, is the second's.
    assert [request["time_limit"] for request in asked] == pytest.approx([50 * share, 100 * share], rel=0.05)


@pytest.mark.slow
def test_after_a_candidate_that_does_not_fit_none_is_tried(monkeypatch):
    def measure(config, parameters, length, remat, batch, repetitions, rate):
        if remat == "broken":
            raise ValueError("no such policy")
        if batch > 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return {"mfu": 0.1 * batch}

    monkeypatch.setattr(training_one, "measure_training", measure)
    monkeypatch.setattr(training_one, "matrix_rate", lambda size, repetitions: 1.0)
    row = {"shape": "small-gqa", "parameters": "float32", "length": 8}
    candidates = [("full", 1), ("broken", 1), ("full", 2), ("full", 4), ("full", 8)]
    settings = training.config_to_dict(SMALL_GQA)
    rows = list(training_one.training_worker(settings, row, candidates, repetitions=1, matrix_size=8, time_limit=100))
    assert rows[0] == row | {"remat": "full", "batch": 1, "mfu": 0.1}
    assert rows[1]["error"] == "ValueError: no such policy"
    assert rows[2]["mfu"] == 0.2
    assert "Out of memory" in rows[3]["does_not_fit"]
    assert "error" not in rows[3]  # a finding
    assert rows[4]["skipped"] == "less did not fit"


def test_training_is_judged_by_the_best_candidate(report, monkeypatch, tmp_path, capsys):
    (case, *_) = SMALL.trainings
    row = {"shape": case.shape, "parameters": case.parameters, "length": case.length, "remat": "full"}
    found = [row | {"batch": batch, "mfu": mfu} for batch, mfu in ((1, 0.4), (2, 0.6), (4, 0.5))]
    no_peak = row | {"parameters": "bfloat16", "batch": 1, "mfu": None}
    monkeypatch.setattr(report, "SECTIONS", {"training": lambda run: [*found, no_peak]})
    assert [goal["mfu"] for goal in run_main(report, tmp_path)[1]["training_goals"]] == [0.6]
    assert f"goal reached: {case.shape} (float32, remat full, 2 rows) trains at 60.0% MFU" in capsys.readouterr().out


def test_transformers_is_optional(monkeypatch):
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: None)
    run = Run(jax.devices()[0], SMALL, time_limit=100)
    assert list(peer.transformers(run)) == [{"skipped": "torch is not installed"}]


def test_logits_that_differ_or_are_not_finite_fail():
    expected = np.linspace(-1, 1, 12, dtype=np.float32).reshape(1, 2, 6)
    assert correctness.compared(expected + 1e-5, expected, 1e-4)["ok"]
    assert not correctness.compared(expected + 1e-3, expected, 1e-4)["ok"]
    broken = correctness.compared(expected * np.float32("nan"), expected, 1e-4)
    assert (broken["ok"], broken["max_abs_diff"]) == (False, "nan")


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
    assert decode.step_bytes(config, 3, 5) == 2 * (2 * layer + 4 + 10 * 4) + 2 * cache
    attention = 2 * 2 * (2 * 3 * 2 * 2) * 5 * 5 // 2  # two products, a multiply and an add each, halved by causality
    assert prefill.prefill_flop(config, 3, 5) == 2 * (2 * layer + 4) * 15 + attention
