"""Metrics of runs, whole and broken, as curves."""

import json
import subprocess
import sys
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.errors import UserError
from llama_jax.runs.metrics import RunHistory, read_run, read_runs
from llama_jax.runs.plot import COLORS, draw, smooth


def train(step, **values):
    found = {"loss": 5 / step, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1e4, "tokens": 100 * step}
    return {"kind": "train", "step": step, "mfu": None, "skipped": 0, "seconds": 1.0, **found, **values}


def validation(step, **values):
    return {"kind": "validation", "step": step, "loss": 6 / step, "perplexity": 2.0, "bits_per_byte": 0.7, **values}


def event(step, name):
    return {"kind": "event", "step": step, "event": name}


WHOLE = [event(0, "start"), *map(train, range(10, 60, 10)), validation(25), validation(50), event(50, "end")]


def write(folder, lines, end=""):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return folder


def png(figure):
    file = BytesIO()
    figure.savefig(file, format="png", dpi=20)
    return file.getvalue()


def curves(figure, panel):
    return [np.asarray(line.get_xydata()) for line in figure.axes[panel].lines]


# -- reading -------------------------------------------------------------------------------------------------------------


def test_a_run(tmp_path):
    run = read_run(write(tmp_path / "run", [*WHOLE, {"kind": "sample", "step": 50, "prompt": "a", "text": "b"}]))
    assert (run.name, run.unreadable) == ("run", ())
    np.testing.assert_array_equal(run.train["step"], [10, 20, 30, 40, 50])
    np.testing.assert_array_equal(run.train["loss"], 5 / run.train["step"])
    np.testing.assert_array_equal(run.validation["step"], [25, 50])
    np.testing.assert_array_equal(run.validation["tokens"], [2500, 5000])  # of the training lines around


@given(st.lists(st.tuples(st.sampled_from(["train", "validation", "resume"]), st.integers(1, 12)), max_size=30))
def test_any_history_is_what_the_last_process_saw(tmp_path_factory, history):
    """Plain: a dictionary of steps to the number of the line that wrote them."""
    lines, kept = [train(1)], {"train": {1: 5.0}, "validation": {}}
    for number, (kind, step) in enumerate(history):
        if kind == "resume":
            lines.append(event(step, kind))
            kept = {name: {s: loss for s, loss in steps.items() if s <= step} for name, steps in kept.items()}
        else:
            lines.append({"train": train, "validation": validation}[kind](step, loss=float(number)))
            kept[kind][step] = float(number)
    run = read_run(write(tmp_path_factory.mktemp("run"), lines))
    for kind, found in (("train", run.train), ("validation", run.validation)):
        assert dict(zip(found["step"], found["loss"], strict=True)) == kept[kind]


def test_lines_that_are_not_whole(tmp_path):
    half = json.dumps(train(60))[:40]
    run = read_run(write(tmp_path / "last", WHOLE, end=half))
    assert run.unreadable == (len(WHOLE) + 1,)
    assert len(run.train["step"]) == 5
    # A process that was killed while it wrote, and one that went on after that.
    run = read_run(write(tmp_path / "middle", WHOLE[:3], end=half + json.dumps(event(20, "resume")) + "\n" + half))
    assert run.unreadable == (4, 5)


@pytest.mark.parametrize(
    "line", ["3", "[]", "{}", '{"kind": "train"}', '{"step": Infinity, "kind": "train"}', "\0", "[" * 9999]
)
def test_lines_of_another_kind(tmp_path, line):
    run = read_run(write(tmp_path, [train(1)], end=line + "\n"))
    assert run.unreadable == (2,)


@pytest.mark.parametrize(
    "value", [float("nan"), *(pytest.param(x, marks=pytest.mark.slow) for x in (None, float("inf"), "low", 10**400))]
)
def test_a_value_that_is_no_number_is_a_gap(tmp_path, value):
    run = read_run(write(tmp_path, [train(1), train(2, loss=value), train(3)]))
    np.testing.assert_array_equal(run.train["loss"], [5, np.nan, 5 / 3])
    assert png(draw([run]))


def test_lines_without_some_of_the_values(tmp_path):
    run = read_run(write(tmp_path, [{"kind": "train", "step": 1, "loss": 2.0}, validation(1)]))
    assert np.isnan(run.train["tokens"]).all()
    assert png(draw([run], log=True))
    with pytest.raises(UserError, match="has no token counts; plot it with by='step'"):
        draw([run], by="tokens")


@pytest.mark.parametrize(
    ("lines", "end", "message"),
    [
        ([], "", "metrics.jsonl has no line of training to draw; has the run"),
        ([event(0, "start"), validation(1)], "", "metrics.jsonl has no line of training"),
        ([], '{"kind": "tr', "metrics.jsonl has no line of training to draw; 1 of its lines are incomplete"),
    ],
)
def test_a_run_without_training(tmp_path, lines, end, message):
    with pytest.raises(UserError, match=message):
        read_run(write(tmp_path, lines, end))


def test_what_is_no_run(tmp_path):
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl; pass the folder of a run"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="no run given"):
        read_runs([])


def test_names_are_as_long_as_it_takes(tmp_path):
    folders = [write(tmp_path / name, WHOLE) for name in ("a/x/run", "b/x/run", "other")]
    assert [run.name for run in read_runs(folders[1:])] == ["run", "other"]
    assert [run.name for run in read_runs(folders)] == ["a/x/run", "b/x/run", "other"]
    with pytest.raises(UserError, match=r"run/\.\./run is given twice"):
        read_runs([folders[0], f"{folders[0]}/../run"])


# -- smoothing -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=50), st.integers(0, 20))
def test_smoothing_stays_within_the_values(values, reach):
    values = np.array(values)
    found = smooth(values, reach)
    assert found.shape == values.shape
    assert found.min() >= values.min() - 1e-9
    assert found.max() <= values.max() + 1e-9
    np.testing.assert_allclose(smooth(values, 0), values, atol=1e-9)


def test_smoothing_quietens_without_delay():
    place = np.arange(1000)
    noise = np.random.default_rng(0).standard_normal(1000)
    found = smooth(0.1 * place + noise, 20)[100:-100]
    assert np.std(found - 0.1 * place[100:-100]) < 0.25
    assert abs(np.mean(found - 0.1 * place[100:-100])) < 0.05


def test_smoothing_passes_over_gaps():
    values = np.array([2.0, 2, 2, 2, np.nan, np.inf, 2, 2, 2])
    np.testing.assert_allclose(smooth(values, 3), [2, 2, 2, 2, np.nan, np.nan, 2, 2, 2])


# -- drawing -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    return read_run(write(tmp_path / "run", WHOLE))


def test_a_figure_of_four(run):
    figure = draw([run])
    assert png(figure).startswith(b"\x89PNG")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["Loss, nats per token", "Learning rate", "Gradient norm", "Throughput, tokens per second"]
    training, dots = curves(figure, 0)
    np.testing.assert_allclose(training, np.stack([run.train["step"], run.train["loss"]], axis=1))
    np.testing.assert_allclose(dots, [[25, 6 / 25], [50, 6 / 50]])
    for panel, name in enumerate(("learning_rate", "grad_norm", "tokens_per_second"), 1):
        np.testing.assert_allclose(curves(figure, panel)[0][:, 1], run.train[name])
    assert figure.axes[2].get_xlabel() == "step"


def test_what_only_some_runs_have_is_in_panels_of_its_own(run, tmp_path):
    """As rewards, whose validation loss is no loss of tokens."""
    judged = [train(step, reward=step / 10, flat=0.5) for step in (1, 2)]
    other = read_run(write(tmp_path / "other", [*judged, validation(2, reward=0.3)]))
    figure = draw([run, other], smoothing=0, log=True)
    assert png(figure)
    assert [axes.get_title(loc="left") for axes in figure.axes][4:] == ["Reward", "Share of groups without variance"]
    assert len(curves(figure, 0)) == 3, "two curves, and the dots of the first run"
    np.testing.assert_allclose(np.concatenate(curves(figure, 4)), [[1, 0.1], [2, 0.2], [2, 0.3]])
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear", "log", "linear", "linear", "linear"]


def test_by_tokens_and_logarithmic(run):
    figure = draw([run], by="tokens", log=True)
    assert png(figure)
    np.testing.assert_array_equal(curves(figure, 0)[0][:, 0], run.train["tokens"])
    np.testing.assert_array_equal(curves(figure, 0)[1][:, 0], [2500, 5000])
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear", "log", "linear"]
    assert {axes.get_xscale() for axes in figure.axes} == {"log"}


def test_the_curve_as_it_is_lies_faint_under_the_smooth_one(tmp_path):
    run = read_run(write(tmp_path, [train(step, loss=step % 2) for step in range(1, 201)]))
    faint, bold = draw([run], smoothing=0.1).axes[0].lines
    assert faint.get_alpha() < 0.5
    np.testing.assert_array_equal(faint.get_ydata(), run.train["loss"])
    assert np.std(bold.get_ydata()[50:]) < 0.1
    assert len(draw([run], smoothing=0).axes[0].lines) == 1


def test_several_runs_have_looks_and_names_of_their_own(run):
    names = ["_hidden", "5$ and $6", *(f"run {i}" for i in range(10))]
    runs = [RunHistory(name, run.train, run.validation) for name in names]
    figure = draw(runs, smoothing=0)
    assert png(figure)
    (legend,) = figure.legends
    assert [text.get_text().replace("\\", "").strip() for text in legend.get_texts()] == names
    looks = {(line.get_color(), str(line._dash_pattern)) for line in figure.axes[1].lines}
    assert len(looks) == len(names) > len(COLORS)


def test_a_run_of_one_step_and_without_validation(tmp_path):
    run = read_run(write(tmp_path, [train(1)]))
    (line,) = draw([run]).axes[0].lines
    assert line.get_marker() == "."
    assert png(draw([run], log=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "time"}, "by='time' must be one of step, tokens"),
        ({"smoothing": 1.0}, "smoothing=1.0 must be a fraction"),
        ({"smoothing": float("nan")}, "smoothing=nan must be a fraction"),
    ],
)
def test_arguments_that_cannot_be(run, arguments, message):
    with pytest.raises(UserError, match=message):
        draw([run], **arguments)
    with pytest.raises(UserError, match="no run given"):
        draw([])


def test_without_matplotlib(run, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="plots need matplotlib: pip install -e"):
        draw([run])


def test_reading_needs_neither_matplotlib_nor_jax(tmp_path):
    write(tmp_path, WHOLE)
    code = "import sys; from llama_jax.runs.metrics import read_run; read_run(sys.argv[1]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert {"matplotlib", "jax"}.isdisjoint(done.stdout.split())
