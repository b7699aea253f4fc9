"""Runs that are killed, again and again, and end as if they had not been."""

import dataclasses
import signal
from pathlib import Path

import mortal_run
import numpy as np
import pytest
from mortal_run import recipe
from running import check_same_lines, environment_fixture, lines, same, state_in, text_fixture  # noqa: F401  # two fixtures

from llama_jax.formats.step_dirs import CHECKPOINTS
from llama_jax.runs.loop import train

PROGRAM = Path(__file__).with_name("mortal_run.py")
STAGES = (
    "making the folder",
    "writing",
    "renaming",
    "renamed",
    "writing the checksums",
    "removing the oldest",
)  # of a save, see small_run


@pytest.fixture(scope="module")
def live(text, environment):
    """Starts or goes on with a run; ends how it died, after `lines` lines about steps if not before."""

    def live(folder, devices, *changes, **death):
        given = f"{PROGRAM}:recipe", "--workdir", folder, "--data", text, "--resume", *changes
        return mortal_run.live(environment | {"JAX_NUM_CPU_DEVICES": str(devices)}, *given, **death)

    return live


def deaths(seed: int) -> list[dict]:
    """Five: three after some lines, one of them before anything is saved, and two in the middle of a save."""
    random = np.random.default_rng(seed)
    by_lines = [{"lines": int(k)} for k in random.integers(4, 13, 2)]
    in_a_save = [
        {"stage": str(stage), "save": int(random.integers(1, 4))} for stage in random.choice(STAGES, 2, replace=False)
    ]
    later = random.permutation(np.array([*by_lines, *in_a_save], dtype=object)).tolist()
    return [{"lines": int(random.integers(1, 4))}, *later]


def check_the_same(folder, whole):
    """The same parameters, optimizer's numbers, average, counters and place in the data; the same numbers at every step."""
    (state, note), (expected, expected_note) = state_in(folder), state_in(whole)
    same(state, expected)
    assert note == expected_note
    assert note["data"]["next_batch"] == note["step"] == int(state.step)
    check_same_lines(folder, whole)
    assert [line["step"] for line in lines(folder, "train")] == list(range(1, note["step"] + 1))


@pytest.fixture(scope="module")
def whole(live, tmp_path_factory):
    """{devices: folder} of runs that nobody interrupted."""
    folders = {devices: tmp_path_factory.mktemp("whole") / str(devices) for devices in (1, 8)}
    for devices, folder in folders.items():
        assert live(folder, devices) == 0
    return folders


@pytest.mark.parametrize(
    ("devices", "seed"),
    [
        pytest.param(8, 3, marks=(pytest.mark.slow, pytest.mark.rotating)),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((1, 0), (1, 1), (8, 2))),
    ],
)
def test_killed_five_times_and_the_same_to_the_bit(live, whole, tmp_path, devices, seed):
    for death in deaths(seed):
        assert live(tmp_path, devices, **death) == -signal.SIGKILL, death
    assert live(tmp_path, devices) == 0
    check_the_same(tmp_path, whole[devices])


@pytest.mark.slow
def test_killed_in_a_save_that_is_not_logged(live, text, environment, tmp_path, monkeypatch):
    """Of the steps 4 and 8 that are saved none is a line of the log, but what they count must be right."""
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_: environment["XDG_CACHE_HOME"])
    short = dataclasses.replace(recipe(), steps=12, log_every=3, evaluate_every=0)
    changes = ["steps=12", "log_every=3", "evaluate_every=0"]
    assert live(tmp_path / "killed", 1, *changes, stage="writing", save=2) == -signal.SIGKILL
    before = sorted(path.name for path in (tmp_path / "killed" / CHECKPOINTS).iterdir())
    assert before[0] == "4"
    assert before[1].startswith("8.orbax-checkpoint-tmp"), "it died in the middle of the save"
    resumed = train(short, tmp_path / "killed", [text], resume=True)
    expected = train(short, tmp_path / "whole", [text])
    same(resumed.state, expected.state)
    assert state_in(tmp_path / "killed")[1] == state_in(tmp_path / "whole")[1]
    check_same_lines(tmp_path / "killed", tmp_path / "whole")
