"""Some of the cases of `nightly.py`; all kinds of them, and that it sees what it is to see."""

import sys

import nightly
import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="waits for pipes")


def test_some_cases(tmp_path):
    found = nightly.run(60, seed=1, workers=1, keep=str(tmp_path))
    assert found["failures"] == []
    assert found["cases"] == 60


@pytest.mark.slow
def test_ten_thousand_cases(tmp_path):
    found = nightly.run(10_000, seed=2, workers=2, keep=str(tmp_path))
    assert found["failures"] == []
    assert found["cases"] == 10_000
    assert all(found["kinds"][kind].get("refused", 0) > 20 for kind in nightly.SHARES)


def test_failures_are_seen(monkeypatch):
    """A worker that ends, and one that does not answer."""
    monkeypatch.setattr(nightly, "PATIENCE", 1)
    started = []

    def start(seed):
        then = "import time; time.sleep(9)" if started else "import os; os.abort()"
        code = f"print('ready', flush=True); input(); {then}"
        started.append(nightly.subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, stderr=-3, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    monkeypatch.setattr(nightly, "_start", start)
    found = nightly.run(2, seed=1, workers=1)
    assert [each["found"].split(":")[0] for each in found["failures"]] == ["crash", "hang"]
    nightly._end(started[-1])
