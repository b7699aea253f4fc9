"""Runs in a store: the same as on a disk, whole at every moment, and of one writer at a time."""

import json
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import mortal_run
import numpy as np
import object_server
import pytest
from running import check_same_lines, download, environment_fixture, same, state_in, text_fixture  # noqa: F401  # two fixtures
from small_run import CONFIG, save, shapes_of, state_of

import llama_jax
from llama_jax.cli.inspect import describe
from llama_jax.errors import CheckpointError, TrainingError
from llama_jax.formats import open_checkpoint, step_dirs
from llama_jax.formats.orbax_format import load_params
from llama_jax.formats.step_dirs import StepRemovedError, by_loss, steps_in
from llama_jax.parallel.multihost import Processes
from llama_jax.runs import locks, run_folder
from llama_jax.runs.checkpoint_manager import CheckpointManager
from llama_jax.runs.log import Log
from llama_jax.runs.loop import train
from llama_jax.runs.run_folder import StoredRun, open_run
from llama_jax.storage import locate, object_store

RUN = "s3://bucket/run"
STEPS = f"{RUN}/checkpoints"


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(run_folder, "PATIENCE", ())
    monkeypatch.setattr(locks, "POLL", 0.01)
    with object_server.emulated(monkeypatch) as server:
        yield server


@pytest.fixture
def run(store):
    """The folder of a run, that is the writer's."""
    with open_run(locate(RUN), Processes(), Log(quiet=True)) as run:
        yield run


@pytest.fixture
def kept(run):
    with CheckpointManager(run.path / "checkpoints", store=run, keep_last=1) as kept:
        yield kept


def whole_at_every_change(store, step):
    """The changes until a step is there, and that what makes it one came last."""
    written = [key for way, key in store.changes if f"/checkpoints/{step}/" in key]
    assert written[-1].endswith("about/SHA256SUMS")
    assert sum(key.endswith("SHA256SUMS") for key in written) == 1


@pytest.mark.slow
def test_what_is_saved_comes_back(store, kept):
    for step, loss in ((10, 2.0), (20, 1.0), (30, 3.0)):
        save(kept, step, step, validation_loss=loss)
        kept.wait()
        whole_at_every_change(store, step)
    assert steps_in(locate(STEPS)) == kept.steps() == [20, 30], "the best and the last"
    assert by_loss(locate(STEPS)) == [20, 30]
    assert (kept.best(), kept.latest()) == (20, 30)
    same(kept.restore(shapes_of())[0], state_of(30))
    same(kept.restore(shapes_of(), 20)[0], state_of(20))
    assert not [key for key in store.objects if "checkpoints/10/" in key]
    assert [path.name for path in kept.folder.iterdir()] == []
    store.answers.clear()
    told = describe(open_checkpoint(STEPS))
    assert told["problems"] == []
    assert (told["path"], sum(told["files"].values()) > 4 * told["parameters"]) == (f"{STEPS}/30", True)
    assert not [answer.key for answer in store.answers if answer.method == "GET" and "/ocdbt.process_0/d/" in answer.key]
    assert store.sent() < 30_000 < 4 * told["parameters"], "what describes the arrays, and not they"
    model = llama_jax.load(f"{STEPS}/20")
    assert model.config == CONFIG
    same(model.params, state_of(20).params)
    same(llama_jax.load(RUN).params, state_of(30).params)
    store.asked.clear()
    llama_jax.load(RUN)
    assert {key.split("/")[3] for key in store.asked if "/30/" in key} == {"about", "params"}, "and no optimizer"
    opened = open_checkpoint(RUN)
    save(kept, 40, 40)
    kept.wait()
    with pytest.raises(StepRemovedError, match=r"^s3://bucket/run/checkpoints/30 was removed while it was read; try again$"):
        load_params(opened, None)
    del store.objects[next(key for key in store.objects if "/40/params/ocdbt.process_0/d/" in key)]
    problems = describe(open_checkpoint(f"{STEPS}/40"))["problems"]
    assert len(problems) == 1
    assert re.fullmatch(r"s3://bucket/run/checkpoints/40/params/ocdbt.process_0/d/\w+ is missing", problems[0])


def test_half_of_a_step_is_none_and_goes(store, kept):
    save(kept, 10, 10)
    kept.wait()
    store.objects |= {"run/checkpoints/20/params/manifest.ocdbt": b"half", "run/checkpoints/20/about/note.json": b"{}"}
    assert (kept.steps(), steps_in(locate(STEPS))) == ([10], [10])
    save(kept, 20, 20)
    kept.wait()
    same(kept.restore(shapes_of())[0], state_of(20))
    store.objects |= {
        "run/checkpoints/30/params/d/half": b"half",
        "run/checkpoints/020/note": b"not a step, and not step 20",
    }
    kept._store.clear_up()
    assert not [key for key in store.objects if "/30/" in key]
    assert kept.steps() == [20]


@pytest.mark.slow
def test_a_save_that_fails_leaves_the_last_good_one(store, kept):
    save(kept, 10, 10)
    kept.wait()
    store.write_fault = lambda key, changes: 503 if "/20/rest/" in key else None
    save(kept, 20, 20)
    with pytest.raises(
        CheckpointError,
        match=r"^s3://bucket/run/checkpoints: step 20 could not be saved \(s3://bucket/run/checkpoints/20/rest/[^ ]*: no"
        r" complete response in 4 tries, the last: 503 InternalError.*; the last good checkpoint is step 10$",
    ):
        kept.wait()
    store.write_fault = lambda key, changes: None
    assert kept.steps() == [10]
    same(kept.restore(shapes_of())[0], state_of(10))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [500, "lost", "torn"])
def test_a_save_goes_on_where_answers_go_wrong(store, kept, fault, monkeypatch):
    if fault == "torn":  # a file goes in parts, and one of them does not arrive
        monkeypatch.setattr(object_store, "MIN_PART_BYTES", 4096)
        fault = 500
    failed = set()

    def once(key, changes):
        first = key not in failed
        failed.add(key)
        return fault if first else None

    store.write_fault = once
    store.fault = lambda key, before: ("reset", "cut", None)[before % 3]
    save(kept, 10, 10)
    kept.wait()
    assert any(way == "PARTS" for way, _ in store.changes) == (object_store.MIN_PART_BYTES == 4096)
    same(kept.restore(shapes_of())[0], state_of(10))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["slow", "late"])
def test_slow_bodies_lose_nothing_and_show_no_half(store, kept, fault, monkeypatch):
    monkeypatch.setattr(object_store, "MIN_SECONDS", 0.5)
    monkeypatch.setattr(object_store, "MIN_RATE", 1 << 30)
    seen, failed = set(), set()

    def once(key, changes):
        if "/checkpoints/" in key and not key.endswith("SHA256SUMS"):
            seen.update(steps_in(locate(STEPS)))
        wanted = key.endswith(("SHA256SUMS", "params/manifest.ocdbt", "rest/_METADATA")) and key not in failed
        failed.add(key)
        return fault if wanted else None

    store.write_fault = once
    save(kept, 10, 10)
    kept.wait()
    assert not seen, "no step while it is written"
    store.write_fault = lambda key, changes: None
    store.fault = lambda key, before: "slow" if before == 0 and key.endswith("manifest.ocdbt") else None
    same(kept.restore(shapes_of())[0], state_of(10))
    store.write_fault = lambda key, changes: fault if "/20/params/d/" in key else None
    save(kept, 20, 20)
    with pytest.raises(
        CheckpointError,
        match=r"step 20 could not be saved \(s3://bucket/run/checkpoints/20/params/d/[^ ]*: no complete response in 3 tries,"
        r" the last: not done within 0.5 s\); the last good checkpoint is step 10$",
    ):
        kept.wait()
    assert kept.steps() == [10]
    same(kept.restore(shapes_of())[0], state_of(10))


@pytest.mark.slow
def test_damage_is_named(store, kept):
    for step in (10, 20):
        save(kept, step, step)
    kept.wait()
    victim = next(key for key in store.objects if "/20/params/d/" in key)
    store.objects[victim] = bytes(len(store.objects[victim]))
    with pytest.raises(CheckpointError, match=rf"^s3://bucket/{victim} is not what was saved"):
        llama_jax.load(RUN)
    with pytest.raises(CheckpointError, match=rf"step 20 is damaged: s3://bucket/{victim} is not what was saved.*no older"):
        kept.restore(shapes_of())
    lines = store.objects["run/checkpoints/20/about/SHA256SUMS"].decode().replace("about/note.json", "../../../note.json")
    text = lines.rpartition("# ")[0]
    store.objects["run/checkpoints/20/about/SHA256SUMS"] = (
        f"{text}# {step_dirs.hashlib.sha256(text.encode()).hexdigest()}\n".encode()
    )
    with pytest.raises(CheckpointError, match="its checksums name a file outside of it"):
        llama_jax.load(RUN)


def test_who_loses_the_folder_writes_nothing_more(store, run, kept):
    save(kept, 10, 10)
    kept.wait()
    store.written["run/lease.json"] -= 100
    other = StoredRun(locate(RUN), Processes(), Log(quiet=True))
    run._lease._renewed -= 100  # this process stood still
    changes = len(store.changes)
    save(kept, 20, 20)
    with pytest.raises(TrainingError, match=r"lease.json was taken over by another run, process .*nothing more is written"):
        kept.wait()
    with pytest.raises(TrainingError, match="taken over"):
        kept.check()
    (run.path / "recipe.json").write_text("{}")
    with pytest.raises(TrainingError, match="taken over"):
        run.put()
    run.end(failed=False)
    assert len(store.changes) == changes
    other.end(failed=False)
    assert steps_in(locate(STEPS)) == [10]


def test_metrics_are_put_in_parts(store, run, monkeypatch):
    monkeypatch.setattr(run_folder, "PART", 300)
    line = lambda step: json.dumps({"kind": "train", "step": step, "loss": 1 / step, "tokens": step}) + "\n"
    whole = ""
    with (run.path / "metrics.jsonl").open("a") as file:
        for step in range(1, 20):
            file.write(line(step) + line(step)[:7])
            file.flush()
            whole += line(step)
            run.put()
            parts = b"".join(body for key, body in sorted(store.objects.items()) if key.startswith("run/metrics/"))
            assert parts.decode() == whole, "no half of a line"
            file.seek(len(whole))
            file.truncate()
    assert sorted(key for key in store.objects if "metrics" in key) == [f"run/metrics/{n:06}.jsonl" for n in range(1, 5)]
    (run.path / "trace").mkdir()
    (run.path / "trace/x").write_bytes(b"x")
    (run.path / "reference.npz").write_bytes(b"r")
    run.end(failed=False)
    assert (store.objects["run/trace/x"], store.objects["run/reference.npz"]) == (b"x", b"r")
    with open_run(locate(RUN), Processes(), Log(quiet=True)) as later:
        assert [path.name for path in later.path.iterdir()] == ["reference.npz"]
        (later.path / "metrics.jsonl").write_text(line(20))
    assert store.objects["run/metrics/000005.jsonl"] == line(20).encode()


def test_hosts_whose_scratch_folder_is_the_same(run):
    second = Processes(1, ("host0", "host1"))
    with pytest.raises(TrainingError, match=r"cannot be created on \S+ \(File exists\); TMPDIR must be set to"):
        StoredRun(locate(RUN), second, Log(quiet=True), run.path)


def test_where_no_run_can_be():
    with pytest.raises(TrainingError, match="hf://a/b is on the Hub, where runs cannot be stored"):
        train("tiny", "hf://a/b", [__file__])


# Whole runs.


def check_the_same(store, folder, tmp_path):
    """What is in the store is, to the bit, what the run on a disk wrote."""
    stored = download(store, tmp_path / "copy") / "run"
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert {path.name for path in (stored / "checkpoints").iterdir()} == names
    check_same_lines(stored, folder)
    for step in sorted(map(int, names)):
        (state, note), (expected, wanted) = (state_in(run, "steps=24", step=step) for run in (stored, folder))
        same(state, expected)
        assert note == wanted


def live(store, environment, *arguments, **death):
    there = environment | object_server.environment(store) | {"JAX_NUM_CPU_DEVICES": "1", "LLAMA_JAX_TEST_LEASE": "1"}
    given = f"{mortal_run.__file__}:recipe", "steps=24", "--resume", *arguments
    return mortal_run.live(there, *given, **death)


@pytest.fixture(scope="module")
def local(text, environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local") / "run"
    with object_server.serving() as unused:
        assert live(unused, environment, "--workdir", folder, "--data", text) == 0
    return folder


def killed(environment, text, local, tmp_path, kills, seed):
    """A run that is killed after so many requests that change something, again and again, and then let live."""
    random = np.random.default_rng(seed)
    with object_server.serving() as store:
        for _ in range(kills):
            process = []
            until = len(store.changes) + int(random.integers(1, 60))
            ended = threading.Event()

            def watch(until=until, process=process, ended=ended, wait=float(random.random() * 0.01)):
                while not ended.is_set():
                    if len(store.changes) >= until and process:
                        time.sleep(wait)
                        process[0].kill()
                        return
                    time.sleep(0.001)

            thread = threading.Thread(target=watch)
            thread.start()
            status = live(store, environment, "--workdir", RUN, "--data", text, started=process.append)
            ended.set()
            thread.join()
            assert status in (-signal.SIGKILL, 0)
        assert live(store, environment, "--workdir", RUN, "--data", text) == 0
        check_the_same(store, local, tmp_path)


@pytest.mark.slow
@pytest.mark.rotating
def test_killed_and_the_same_to_the_bit(environment, text, local, tmp_path):
    killed(environment, text, local, tmp_path, 2, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 5))
def test_killed_twenty_times_and_the_same_to_the_bit(environment, text, local, tmp_path, seed):
    killed(environment, text, local, tmp_path, 5, seed)


@pytest.mark.slow
@pytest.mark.rotating
def test_commands_read_a_run_in_a_store(store, environment, text, local, tmp_path, monkeypatch, calling):
    from llama_jax.cli.inspect import Inspect

    url = store.upload(local, "copied")
    assert f"{url}/checkpoints/24: orbax, step 24 of a run" in calling(Inspect, url).out
    same(llama_jax.load(url).params, llama_jax.load(local).params)
    again = Path(shutil.copytree(local, tmp_path / "again"))
    same(llama_jax.load(again).params, llama_jax.load(url).params)
