"""What the experiments draw with."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from plotting import draw_runs, read_metrics, smooth


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=50), st.integers(0, 20))
def test_smoothing_stays_within_the_values(values, reach):
    values = np.array(values)
    smoothed = smooth(values, reach)
    assert smoothed.shape == values.shape
    assert smoothed.min() >= values.min() - 1e-9
    assert smoothed.max() <= values.max() + 1e-9
    np.testing.assert_allclose(smooth(values, 0), values, atol=1e-9)


def test_smoothing_passes_over_gaps():
    values = np.array([2.0, 2, 2, 2, np.nan, np.inf, 2, 2, 2])
    np.testing.assert_allclose(smooth(values, 3), [2, 2, 2, 2, np.nan, np.nan, 2, 2, 2])


def test_curves_of_a_run_that_was_killed_and_resumed(tmp_path):
    values = {"learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 9.0, "mfu": None}
    lines = [
        {"kind": "train", "step": step, "loss": loss, "tokens": 8 * step, **values}
        for step, loss in ((1, 3.0), (2, 9.0), (3, None), (2, 2.0))
    ]
    lines.append({"kind": "validation", "step": 2, "loss": 2.5})
    lines.append({"kind": "event", "step": 2, "event": "resume"})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra')
    columns = read_metrics(tmp_path, "train")
    np.testing.assert_array_equal(columns["step"], [1, 2, 3])
    np.testing.assert_array_equal(columns["loss"], [3, 2, np.nan])
    assert "mfu" not in columns
    figure = draw_runs({"run": tmp_path})
    figure.savefig(tmp_path / "curves.png", dpi=20)
    training, held = (np.asarray(line.get_xydata()) for line in figure.axes[0].lines)
    np.testing.assert_array_equal(training, [[8, 3], [16, 2], [24, np.nan]])
    np.testing.assert_array_equal(held, [[16, 2.5]])
