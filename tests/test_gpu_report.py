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
import jax.numpy as jnp
import pytest
from gpu_parts import attention, decode, prefill, training
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


def run_main(report, folder: Path, **arguments) -> tuple[int, dict]:
    code = report.main(report.Arguments(output_folder=folder, device_json="report.json", **arguments))
    assert [path.name for path in folder.iterdir()] == ["report.json"]
    return code, json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.slow
@pytest.mark.rotating
def test_every_section_measures(report, tmp_path, capsys):
    code, found = run_main(report, tmp_path, time_limit=3000)
    assert code == 0, capsys.readouterr().out
    sections = found["sections"]
    assert list(sections) == list(report.SECTIONS)
    assert all(row["value"] > 0 for row in sections["yardsticks"])
    assert len(sections["correctness"]) == 3
    assert all(row["ok"] for row in sections["correctness"])
    assert len(sections["families"]) == 3 * len(FAMILY_FEATURES)
    assert all(row["ok"] for row in sections["families"]), sections["families"]
    for name in ("decode", "prefill"):
        assert len(sections[name]) == 2 * 2  # shapes, cases
        assert all(row["tokens_per_s"] > 0 and row["compile_s"] > 0 for row in sections[name])
    assert all(row["share_of_copy"] > 0 for row in sections["decode"])
    assert all(row["share_of_matrix"] > 0 for row in sections["prefill"])
    usual, exact, *loads = sections["serving"]
    assert usual["requests"] == exact["requests"] == 6
    assert exact["ok"]
    assert [row["requests"] for row in loads] == [1, 4]
    assert all(row["tokens_per_s"] > 0 for row in loads)
    compared = [row for row in sections["quantized"] if "tokens" in row]
    assert len(compared) == 2 * 2  # formats, numbers of tokens
    assert all(row["ok"] for row in compared)
    assert len(sections["quantized"]) == 2 * len(compared)
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


@pytest.mark.slow
@pytest.mark.rotating
def test_no_time_left_skips_everything(report, tmp_path):
    code, found = run_main(report, tmp_path, time_limit=0)
    assert code == 0
    assert list(found["sections"]) == list(report.SECTIONS)
    assert all("skipped" in row for rows in found["sections"].values() for row in rows)
    assert len(found["sections"]["decode"]) == 4


def test_only_the_named_shapes_are_measured(report, tmp_path, capsys):
    code, found = run_main(report, tmp_path, time_limit=0, sections=("decode", "training", "serving"), shapes=("small-gqa",))
    assert code == 0
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


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        ({"returncode": -9, "stderr": "Killed"}, {"error": "the worker ended with -9: Killed"}),
        ({"cmd": "worker", "timeout": 50}, {"skipped": "time limit"}),
    ],
)
def test_a_training_worker_that_dies_or_is_late_keeps_its_rows(monkeypatch, ended, reason):
    printed = 'a warning\n{"remat": "full", "mfu": 0.4}\n{"remat": "do'

    def worker(command, **_):
        if "timeout" in ended:
            raise subprocess.TimeoutExpired(**ended, output=printed.encode())
        return subprocess.CompletedProcess(command, stdout=printed, **ended)

    monkeypatch.setattr(training.subprocess, "run", worker)
    rows = list(training.training(Run(jax.devices()[0], SMALL, time_limit=100, alone=True)))
    assert rows[0] == {"remat": "full", "mfu": 0.4}
    assert reason.items() <= rows[1].items()


def test_goals_are_judged_by_the_first_batch_and_the_best_candidate(report, monkeypatch, tmp_path, capsys):
    decoding = [{"shape": GOAL_SHAPE, "batch": batch, "share_of_copy": share} for batch, share in ((8, 0.5), (1, 0.9))]
    (case, *_) = SMALL.trainings
    row = {"shape": case.shape, "parameters": case.parameters, "length": case.length, "remat": "full"}
    found = [row | {"batch": batch, "mfu": mfu} for batch, mfu in ((1, 0.4), (2, 0.6), (4, 0.5))]
    no_peak = row | {"parameters": "bfloat16", "batch": 1, "mfu": None}
    sections = {
        "decode": lambda run: decoding,
        "training": lambda run: [*found, no_peak],
        "check": lambda run: [{"ok": False}],
    }
    monkeypatch.setattr(report, "SECTIONS", sections)
    code, judged = run_main(report, tmp_path)
    assert code == 1  # of the check that failed
    assert judged["goal"]["share_of_copy"] == 0.9
    assert [goal["mfu"] for goal in judged["training_goals"]] == [0.6]
    printed = capsys.readouterr().out
    assert f"goal reached: {case.shape} (float32, remat full, 2 rows) trains at 60.0% MFU" in printed
    assert printed.count("goal reached") == 2


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
