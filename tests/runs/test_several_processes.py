"""`llama-jax train` over two processes of four simulated devices each: the same run as in one, and one fate."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import object_server
import pytest
from mortal_run import recipe
from running import (  # noqa: F401  # two are fixtures
    EAST,
    WEST,
    all_lines,
    download,
    environment_fixture,
    lines,
    same,
    state_in,
    text_fixture,
    write_dated_vocabulary,
    write_dialogs,
)

from llama_jax.errors import TrainingError
from llama_jax.formats.step_dirs import CHECKPOINTS
from llama_jax.parallel.multihost import HEARTBEAT_TIMEOUT
from llama_jax.runs.loop import train

RECIPES = Path(__file__).with_name("mortal_run.py")
SHORT = ("steps=6", "evaluate_every=3", "save_every=3", 'prompts=["the "]', "sample_tokens=2")
RUN = ("-m", "llama_jax")
IMPATIENT = "from llama_jax.runs import preflight; preflight.MARK_SECONDS = 1; from llama_jax.cli import main; main()"
EIGHT_HEADS = ("model.n_heads=8", "model.n_kv_heads=8")


@pytest.fixture(scope="module")
def started(text, environment):
    """Starts one run in `count` processes, with eight devices in all; none outlives the block."""

    @contextmanager
    def started(
        folder,
        *arguments,
        count=2,
        of=None,
        resume=True,
        own=("", ""),
        devices=(),
        function="recipe",
        data=text,
        program=RUN,
        zones=(),
        caches=(),
    ):
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        joining = ["--coordinator", f"127.0.0.1:{port}", "--processes", of or count] if (of or count) > 1 else []
        running = []
        try:
            for index in range(count):
                command = [f"{RECIPES}:{function}", "--workdir", folder, "--data", data, *arguments]
                command += ["--resume"] * resume + [*joining, *(["--process-id", index] if joining else [])]
                command += [own[index]] if own[index % 2] else []
                variables = {"JAX_NUM_CPU_DEVICES": str((devices or [8 // count] * count)[index])}
                variables |= {"TZ": zones[index]} if zones else {}
                variables |= {"LLAMA_JAX_CACHE": str(caches[index])} if caches else {}
                running.append(
                    subprocess.Popen(
                        [sys.executable, "-u", *program, "train", *map(str, command)],
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                        env=environment | variables,
                    )
                )
            yield running
        finally:
            for process in running:
                process.kill()
                process.communicate()

    return started


def ended(running, seconds=120):
    """[(exit code, stdout, stderr)]"""
    deadline = time.monotonic() + seconds
    said = [process.communicate(timeout=max(deadline - time.monotonic(), 0.1)) for process in running]
    return [(process.returncode, *texts) for process, texts in zip(running, said, strict=True)]


def read_until(process, start):
    """Read what it prints until a line begins so."""
    for line in process.stdout:
        if line.startswith(start):
            return
    raise AssertionError(f"no line began with {start!r}: {process.stderr.read()}")


def check_died(code, said, victim):
    """JAX's words for a process that was killed; they name the number of any but the first."""
    assert code == -signal.SIGABRT, said
    assert ("leader task was preempted/died" if victim == 0 else f"stopped sending heartbeats):\n{victim}\n") in said


def check_the_same(folder, alone, *changes):
    """The same data in the same order, and loss to 1e-5; parameters to 3e-5.

    Devices add in other orders, and AdamW divides a gradient near zero by its own size: of some ten thousand parameters
    one was 1.6e-5 off after six steps on tensor=8.
    """
    (state, note), (expected, wanted) = state_in(folder, *changes), state_in(alone, *changes)
    assert note["data"] == wanted["data"]
    assert note["tokens"] == wanted["tokens"]
    for tree, other in ((state.params, expected.params), (state.ema, expected.ema)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), tree, other)
    for kind, names in (("train", ("loss", "tokens")), ("validation", ("loss", "bits_per_byte"))):
        found, wanted = lines(folder, kind), lines(alone, kind)
        assert [line["step"] for line in found] == [line["step"] for line in wanted]
        for name in names:
            np.testing.assert_allclose([line[name] for line in found], [line[name] for line in wanted], rtol=1e-5)


@pytest.fixture(scope="module")
def alone(started, tmp_path_factory):
    """{changes: folder} of short runs in one process with eight devices."""
    folders = {}

    def alone(*changes):
        if changes not in folders:
            folders[changes] = tmp_path_factory.mktemp("alone")
            with started(folders[changes], *SHORT, *changes, count=1) as running:
                ((code, _, said),) = ended(running)
            assert code == 0, said
        return folders[changes]

    return alone


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        pytest.param("fsdp=2,data=4", (), id="fsdp", marks=pytest.mark.nightly),
        # A head on every device: both processes read all rows.
        pytest.param("tensor=8", EIGHT_HEADS, id="tensor over both"),
    ],
)
def test_two_processes_train_what_one_does(started, alone, tmp_path, mesh, changes):
    expected = alone(*changes)
    with started(tmp_path, *SHORT, *changes, "--mesh", mesh, resume=False) as running:
        (first, second) = ended(running)
    assert first[0] == second[0] == 0, first[2] + second[2]
    check_the_same(tmp_path, expected, *SHORT, *changes)
    assert "done: step 6, validation loss" in first[1]
    assert second[1] == "", "only process 0 prints"
    assert len(lines(tmp_path, "train")) == 6, "only process 0 writes"
    (sample, *_), (wanted, *_) = lines(tmp_path, "sample"), lines(expected, "sample")
    assert sample["text"] == wanted["text"]


@pytest.mark.slow
@pytest.mark.rotating
def test_exact_training_on_any_devices(started, environment, tmp_path, monkeypatch):
    """As XLA compiles by default: 50 steps on one device, and in two processes that stop at 20 and go on by pmap."""
    monkeypatch.delitem(environment, "XLA_FLAGS", raising=False)
    constant = ("exact=true", "optimizer.schedule=constant", "evaluate_every=0", "save_every=0")
    two = ("--mesh", "data=2,fsdp=4")
    lives = [
        ("alone", {"count": 1, "devices": (1,)}, ("steps=50",)),
        ("moved", {}, ("steps=20", *two)),
        ("moved", {"count": 1}, ("steps=50", "--mesh", "data=8", "--backend", "pmap")),
        ("both", {}, ("steps=50", *two)),
    ]
    for name, options, arguments in lives:
        with started(tmp_path / name, *constant, *arguments, **options) as running:
            results = ended(running)
        assert [code for code, *_ in results] == [0] * len(results), results
    expected, _ = state_in(tmp_path / "alone", "steps=50", *constant)
    for name in ("moved", "both"):
        found, _ = state_in(tmp_path / name, "steps=50", *constant)
        same(found, expected)
        numbers = [[(x["step"], x["loss"], x["grad_norm"]) for x in lines(tmp_path / f, "train")] for f in (name, "alone")]
        assert numbers[0] == numbers[1]


@pytest.mark.slow
@pytest.mark.rotating
def test_two_processes_train_into_a_store(started, environment, tmp_path, monkeypatch):
    """Both are on one host: the first uploads what they write, and fetches what they go on from."""
    with object_server.serving() as store:
        for name, value in object_server.environment(store).items():
            monkeypatch.setitem(environment, name, value)
        for number, changes in enumerate((("steps=3",), ())):
            changes = (*SHORT, "optimizer.schedule=constant", *changes)
            monkeypatch.setitem(environment, "LLAMA_JAX_CACHE", str(tmp_path / f"machine{number}"))
            with started("s3://bucket/run", *changes, "--mesh", "data=8") as running:
                (first, second) = ended(running)
            assert first[0] == second[0] == 0, first[2] + second[2]
        download(store, tmp_path)
    assert "resumed at step 3" in first[1]
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == list(range(1, 7))
    state, _ = state_in(tmp_path / "run", *changes)
    assert int(state.step) == 6


@pytest.mark.slow
@pytest.mark.rotating
def test_processes_on_both_sides_of_midnight_render_one_date(started, tmp_path):
    """That of the first process at the start of the run, also when it is resumed on another date."""
    vocabulary, data = write_dated_vocabulary(tmp_path / "vocabulary"), write_dialogs(tmp_path / "dialogs.jsonl")
    chats = ("vocabulary=given", "chats.format=template", "length=40", "optimizer.schedule=constant")
    for steps, zones in ((3, (WEST, EAST)), (6, (EAST, WEST))):
        changes = (*SHORT, *chats, f"steps={steps}", "--tokenizer", vocabulary, "--mesh", "data=8")
        with started(tmp_path / "run", *changes, data=data, zones=zones) as running:
            (first, second) = ended(running)
        assert first[0] == second[0] == 0, first[2] + second[2]
    assert "resumed at step 3" in first[1]


@pytest.mark.slow
@pytest.mark.rotating
def test_a_signal_to_one_saves_all(started, tmp_path):
    """Sent to the second alone: both end after the same step, with 0, and go on in one process."""
    with started(tmp_path, "steps=3000", "save_every=0", "evaluate_every=0") as running:
        read_until(running[0], "step 2/")
        running[1].send_signal(signal.SIGTERM)
        (first, second) = ended(running)
    assert first[0] == second[0] == 0, first[2] + second[2]
    (stopped,) = re.findall(r"SIGTERM: stopped and saved at step (\d+); continue with --resume", first[1])
    assert 2 <= int(stopped) < 3000
    assert second[1] == ""
    assert (tmp_path / CHECKPOINTS / stopped).is_dir()


@pytest.mark.slow
@pytest.mark.rotating
def test_what_is_missing_and_what_differs(started, tmp_path):
    with started(tmp_path, "--start-timeout", 1.5, of=3) as running:
        results = ended(running)
    for code, _, said in results:
        assert code == 2
        assert re.search(r"llama-jax: error: 1 of 3 processes did not connect to \S+ in time: 2; start them", said)
    with started(tmp_path, own=("steps=5", "steps=6")) as running:
        results = ended(running)
    for code, _, said in results:
        assert code == 2
        assert "recipe steps: process 1 has 6, but process 0 has 5; use the same command" in said
    with started(tmp_path, devices=(2, 3)) as running:  # as where a node has lost a GPU
        results = ended(running)
    for code, _, said in results:
        assert code == 2
        assert "devices: process 1 has 3, but process 0 has 2" in said
        assert "Traceback" not in said
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.rotating
def test_a_folder_of_the_run_that_is_not_the_same(started, tmp_path):
    """As where every host has a disk of its own under the same name: checkpoints would wait for each other for ever."""
    with started(tmp_path / "one", own=("", f"--workdir={tmp_path / 'other'}"), program=("-c", IMPATIENT)) as running:
        for code, _, said in ended(running):
            assert code == 2
            assert "which is not the same folder" in said
    assert not (tmp_path / "one" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.rotating
def test_hosts_without_a_shared_disk_do_not_train_into_a_store(started, environment, tmp_path, monkeypatch):
    with object_server.serving() as store:
        for name, value in object_server.environment(store).items():
            monkeypatch.setitem(environment, name, value)
        caches = (tmp_path / "host0", tmp_path / "host1")
        with started("s3://bucket/run", *SHORT, program=("-c", IMPATIENT), caches=caches) as running:
            for code, _, said in ended(running):
                assert code == 2
                assert "is not the same folder (LLAMA_JAX_CACHE must be on a disk that all hosts share)" in said
        assert store.objects == {}


@pytest.fixture(scope="module")
def whole(started, tmp_path_factory):
    """A run of 20 steps in two processes that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    with started(folder, "steps=20") as running:
        assert [code for code, *_ in ended(running)] == [0, 0]
    return folder


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(("victim", "next_count"), [pytest.param(0, 2, marks=pytest.mark.nightly), (1, 1)])
def test_one_is_killed_and_the_other_says_so(started, whole, tmp_path, victim, next_count):
    """In the middle of training; then the run goes on, in two processes or in one, with the same data."""
    with started(tmp_path, "steps=20") as running:
        read_until(running[0], "step 9/")  # the save of step 8 has waited for that of step 4
        running[victim].kill()
        code, _, said = ended([running[1 - victim]], seconds=2 * HEARTBEAT_TIMEOUT)[0]
    check_died(code, said, victim)
    with started(tmp_path, "steps=20", count=next_count) as running:
        for code, _, said in ended(running):
            assert code == 0, said
    check_the_same(tmp_path, whole, "steps=20")
    assert [line["step"] for line in all_lines(tmp_path) if line.get("event") == "resume"] in ([4], [8])


def test_processes_that_nobody_joined(text, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        TrainingError, match=r"this is one of 2 processes; join them with llama_jax\.parallel\.multihost\.join_job"
    ):
        train(recipe(), tmp_path, [text])


@pytest.fixture(scope="module")
def base(started, tmp_path_factory):
    """A model that others begin with, or learn from."""
    folder = tmp_path_factory.mktemp("base")
    with started(folder, "steps=3", "evaluate_every=0", "save_every=0", count=1) as running:
        assert ended(running)[0][0] == 0
    return folder


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["preferences", "teacher", "rewards"])
def test_other_kinds_of_training_are_the_same_in_two_processes(started, base, text, tmp_path, kind):
    """A reference of preferences is computed once by all, a teacher read by all together, and answers are sampled so."""
    given = {"function": "recipe"}
    arguments = ["--teacher", base, "steps=6", "evaluate_every=3", "save_every=3"]
    if kind == "preferences":
        pairs = tmp_path / "pairs.jsonl"
        some = [{"prompt": f"ask {n}", "chosen": " the llama", "rejected": " no grass"} for n in range(60)]
        pairs.write_text("".join(json.dumps(line) + "\n" for line in some))
        given = {"function": "preferring", "data": pairs}
        arguments = ["--weights", base, "batch=8", "steps=6", "evaluate_every=3", "save_every=3"]
    if kind == "rewards":
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"{n:02} llama"}) + "\n" for n in range(40)))
        given, arguments = {"function": "rewarding", "data": prompts}, ["--weights", base]
    for name, count in (("two", 2), ("one", 1)):
        with started(tmp_path / name, *arguments, count=count, **given) as running:
            for code, _, error in ended(running):
                assert code == 0, error
    for of in ("train", "validation"):
        found, expected = (lines(tmp_path / name, of) for name in ("two", "one"))
        assert len(found) == len(expected) > 1
        np.testing.assert_allclose([line["loss"] for line in found], [line["loss"] for line in expected], rtol=1e-4)
        assert [line.get("reward") for line in found] == [line.get("reward") for line in expected], "the same answers"
