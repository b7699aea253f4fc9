"""Some of the cases of the nightly scripts; all kinds of them, and that they see what they are to see."""

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


def test_failures_are_seen(monkeypatch):
    """A worker that ends, and one that does not answer."""
    monkeypatch.setattr(damaged_files, "PATIENCE", 1)
    started = []

    def start(seed):
        then = "import time; time.sleep(9)" if started else "import os; os.abort()"
        code = f"print('ready', flush=True); input(); {then}"
        started.append(
            damaged_files.subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, stderr=-3, text=True)
        )
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    monkeypatch.setattr(damaged_files, "_start", start)
    found = damaged_files.run(2, seed=1, workers=1)
    assert [each["found"].split(":")[0] for each in found["failures"]] == ["crash", "hang"]
    damaged_files._end(started[-1])


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


# A writer without care: it writes under the name itself, and leaves there what it had when it fails.
CARELESS = """
import contextlib, json, shutil, sys
sys.path.insert(0, sys.argv[1])
import killed_writes
from llama_jax.formats import saving

@contextlib.contextmanager
def careless(path, **options):
    old = path.with_name("old")
    if path.exists():
        path.rename(old)
    path.mkdir()
    yield path
    shutil.rmtree(old, ignore_errors=True)

perform = killed_writes.Work.perform
def broken(self, operation, folder, which="new"):
    saving.new_output = careless
    perform(self, operation, folder, which)
killed_writes.Work.perform = broken
print(json.dumps(killed_writes.run(range(0, 80, 10), 1)))
"""


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and Linux's names of open files")
def test_a_careless_writer_is_seen():
    done = subprocess.run(
        [sys.executable, "-c", CARELESS, Path(damaged_files.__file__).parent], capture_output=True, text=True
    )
    assert done.stdout, done.stderr
    assert {each["way"] for each in json.loads(done.stdout)["failures"]} == {"kill", "full"}


@pytest.mark.slow
@pytest.mark.rotating
def test_some_ragged_batches():
    found = ragged_batches.run(range(15), seed=1)
    assert found["failures"] == []
    assert found["rows"] > 45
    assert found["stopped"] > 12


def test_a_row_that_minds_its_neighbours_is_seen(monkeypatch):
    def generated(model, prompts, limits, sampling, stops, cache):
        return [[len(prompts)] * limit for limit in limits]

    monkeypatch.setattr(ragged_batches, "generated", generated)
    config = ragged_batches.llama_jax.preset("stories-260k")
    found = ragged_batches.compare((config, None), seed=1, number=0)
    assert [each["row"] for each in found["wrong"]] == list(range(found["rows"]))


@pytest.mark.slow
@pytest.mark.rotating
def test_some_profiles_over_saves():
    found = script("profiled_saves.py", "--cases", 3, "--seed", 1)
    assert found["failures"] == []
    assert found["saves"] == 24
