"""Curves elsewhere: what is sent, under which name a resumed run goes on, and that no run ends for them."""

import io
import json
import sys

import pytest

from llama_jax.errors import TrainingError
from llama_jax.runs import metrics
from llama_jax.runs.log import Log
from llama_jax.runs.metrics import TRACKER_NAMES, Tracking, check_trackers

RECIPE = {"steps": 3, "model": {"dim": 8}}


def written(track, folder, steps, *, log=None):
    """A run that goes on from a step."""
    tracking = Tracking((track,), folder, RECIPE, steps.start, Log(quiet=True) if log is None else log)
    for step in steps:
        tracking.write("train", step + 1, {"loss": 1.0 + step, "mfu": None, "norm": float("nan")})
    tracking.write("validation", steps.stop, {"loss": 0.5})
    tracking.write("event", steps.stop, {"event": "end"})
    tracking.close()


def test_tensorboard_has_each_step_once(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    written("tensorboard", tmp_path, range(3))
    written("tensorboard", tmp_path, range(2, 4))
    found, purged = [], []
    for file in sorted((tmp_path / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:  # records: their size in 8 bytes, its checksum in 4, the event, its checksum in 4
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.HasField("session_log"):
                purged.append(event.step)
            found += [
                (value.tag, event.step, value.simple_value) for value in event.summary.value if "recipe" not in value.tag
            ]
    assert found[:4] == [("train/loss", 1, 1.0), ("train/loss", 2, 2.0), ("train/loss", 3, 3.0), ("validation/loss", 3, 0.5)]
    assert found[4:] == [("train/loss", 3, 3.0), ("train/loss", 4, 4.0), ("validation/loss", 4, 0.5)]
    assert purged == [3]  # from which on what the earlier process wrote is not shown


@pytest.mark.parity
def test_mlflow_goes_on_with_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    written("mlflow", tmp_path, range(2))
    written("mlflow", tmp_path, range(2, 3))
    from mlflow import MlflowClient

    client = MlflowClient()
    [experiment] = [each for each in client.search_experiments() if each.name == "llama_jax"]
    [run] = client.search_runs([experiment.experiment_id])
    assert json.loads((tmp_path / TRACKER_NAMES).read_text()) == {"mlflow": run.info.run_id}
    assert (run.info.status, run.data.params["steps"]) == ("FINISHED", "3")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 2.0), (3, 3.0)]


@pytest.mark.parity
def test_wandb_goes_on_with_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    written("wandb", tmp_path, range(2))
    before = json.loads((tmp_path / TRACKER_NAMES).read_text())
    written("wandb", tmp_path, range(1, 3))
    assert json.loads((tmp_path / TRACKER_NAMES).read_text()) == before
    assert list((tmp_path / "wandb").glob(f"offline-run-*-{before['wandb']}"))


class _Failing:
    name = "it"

    def __init__(self, *_):
        pass

    def write(self, step, values):
        raise ConnectionError("no route\nto the service")

    def close(self):
        raise AssertionError("is asked no more")


def test_a_service_that_fails_is_left_out_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(metrics.TRACKERS, "wandb", _Failing)
    said = io.StringIO()
    written("wandb", tmp_path, range(3), log=Log(said))
    assert said.getvalue() == "wandb failed and gets no more metrics; metrics.jsonl has all of them: no route\n"


def test_one_that_cannot_begin_ends_the_run_in_a_line(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("not logged in; run wandb login")

    monkeypatch.setitem(metrics.TRACKERS, "wandb", refuse)
    with pytest.raises(TrainingError, match="wandb cannot record this run: not logged in"):
        written("wandb", tmp_path, range(1))
    assert not (tmp_path / TRACKER_NAMES).exists()


def test_what_is_not_installed_is_told_before_anything_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(TrainingError, match=r'--track mlflow needs a package .*pip install -e "\.\[mlflow\]"'):
        check_trackers(("mlflow",))
