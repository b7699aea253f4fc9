"""Some of the cases of the nightly scripts, of all kinds."""

import json
import subprocess
import sys
from pathlib import Path

import damaged_files
import pytest
import ragged_batches

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="waits for pipes")


@pytest.mark.slow
@pytest.mark.rotating
def test_ten_thousand_cases(tmp_path):
    found = damaged_files.run(10_000, seed=2, workers=2, keep=str(tmp_path))
    assert found["failures"] == []
    assert found["cases"] == 10_000
    assert all(found["kinds"][kind].get("refused", 0) > 20 for kind in damaged_files.SHARES)


def script(name, *arguments):
    """What a nightly script reports, run as a process: some are killed, or would wait for ever."""
    command = [sys.executable, Path(damaged_files.__file__).with_name(name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and Linux's names of open files")
def test_some_moments_of_writing():
    """Each thing that is written is killed once and once finds no room."""
    found = script("killed_writes.py", "--cases", 20, "--seed", 1)
    assert found["failures"] == []
    assert found["cases"] == len(found["operations"]) == 20
    assert found["moments"]["kill"] > found["moments"].get("kill, and it had ended", 0) + 5


@pytest.mark.slow
@pytest.mark.rotating
def test_some_ragged_batches():
    found = ragged_batches.run(range(15), seed=1)
    assert found["failures"] == []
    assert found["rows"] > 45
    assert found["stopped"] > 12


@pytest.mark.slow
@pytest.mark.rotating
def test_some_profiles_over_saves():
    found = script("profiled_saves.py", "--cases", 3, "--seed", 1)
    assert found["failures"] == []
    assert found["saves"] == 24
