"""Runs in a store: written to a disk, mirrored after each checkpoint, and resumed anywhere with the same bits."""

import signal
import threading

import mortal_run
import numpy as np
import object_server
import pytest
from running import check_same_lines, download, environment_fixture, same, state_in, text_fixture  # noqa: F401  # two fixtures
from small_run import CONFIG, save, shapes_of, state_of

import llama_jax
from llama_jax.cli.inspect import inspect_checkpoint
from llama_jax.errors import CheckpointError, TrainingError
from llama_jax.formats import open_checkpoint
from llama_jax.formats.step_dirs import steps_in
from llama_jax.parallel.multihost import Processes
from llama_jax.runs.checkpoint_manager import CheckpointManager
from llama_jax.runs.log import Log
from llama_jax.runs.loop import train
from llama_jax.runs.run_folder import open_run
from llama_jax.storage import locate

RUN = "s3://bucket/run"
STEPS = f"{RUN}/checkpoints"


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMA_JAX_CACHE", str(tmp_path / "cache"))
    with object_server.emulated(monkeypatch) as server:
        yield server


def opened(*, resume=True):
    return open_run(locate(RUN), Processes(), Log(quiet=True), resume=resume)


@pytest.fixture
def run(store):
    with opened() as run:
        yield run


def manager(run, **options):
    return CheckpointManager(run.path / "checkpoints", check=run.check, mirror=run.mirror, **options)


@pytest.fixture
def kept(run):
    with manager(run, keep_last=1) as kept:
        yield kept


def stored_steps():
    return steps_in(locate(STEPS))


@pytest.mark.slow
def test_the_store_has_what_the_disk_has(store, run, kept):
    (run.path / "metrics.jsonl").write_text("{}\n")
    for step, loss in ((10, 2.0), (20, 1.0), (30, 3.0)):
        save(kept, step, step, validation_loss=loss)
        kept.wait()
        changed = [key for _, key in store.changes if f"/checkpoints/{step}/" in key]
        assert changed[-1].endswith("about/SHA256SUMS")
        assert sum(key.endswith("SHA256SUMS") for key in changed) == 1
    assert stored_steps() == kept.steps() == [20, 30], "the best and the last"
    assert not [key for key in store.objects if "checkpoints/10/" in key or key.startswith(("run/lock", "run/."))]
    assert store.objects["run/metrics.jsonl"] == b"{}\n"
    assert [path for _, path in store.changes].count("run/metrics.jsonl") == 1, "it did not change"
    files = {path.relative_to(kept.folder).as_posix(): path for path in kept.folder.rglob("*") if path.is_file()}
    assert {f"run/checkpoints/{name}": path.read_bytes() for name, path in files.items()}.items() <= store.objects.items()


@pytest.mark.slow
def test_a_model_is_read_from_a_run(store, kept):
    for step in (10, 20):
        save(kept, step, step)
        kept.wait()
    store.asked.clear()
    model = llama_jax.load(RUN)
    assert model.config == CONFIG
    same(model.params, state_of(20).params)
    assert not [key for key in store.asked if "/10/" in key or "/rest/" in key], "neither the older step nor the optimizer"
    store.asked.clear()
    same(llama_jax.load(f"{STEPS}/20").params, model.params)
    assert not [key for key in store.asked if "/params/" in key], "the copy in the cache"
    facts = inspect_checkpoint(open_checkpoint(RUN))
    assert (facts["path"], facts["problems"]) == (f"{STEPS}/20", [])
    assert sum(facts["files"].values()) > 4 * facts["parameters"]
    victim = next(key for key in store.objects if "/20/params/d/" in key)
    store.objects[victim] = bytes(len(store.objects[victim]))
    with pytest.raises(CheckpointError, match=f"{victim.partition('/20/')[2]} is not what was saved"):
        llama_jax.load(RUN)


@pytest.mark.slow
def test_an_upload_that_ends_before_the_checksums_is_no_step(store, run, kept):
    """As of a process that was killed: the next upload writes the step again, or removes what is left of it."""
    save(kept, 10, 10)
    kept.wait()
    complete = dict(store.objects)
    del store.objects["run/checkpoints/10/about/SHA256SUMS"]
    store.objects |= {"run/checkpoints/5/params/manifest.ocdbt": b"half", "run/checkpoints/5/about/note.json": b"{}"}
    assert stored_steps() == []
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        llama_jax.load(RUN)
    kept.finish_mirror()
    assert store.objects == complete


@pytest.mark.slow
@pytest.mark.parametrize("fault", [503, 403, "slow"])
def test_a_store_that_fails_does_not_end_the_run(store, request, fault, monkeypatch, caplog):
    monkeypatch.setattr("llama_jax.storage.object_store.CLIENT_OPTIONS", {"timeout": "500ms", "allow_http": True})
    kept = request.getfixturevalue("kept")  # which opens the store
    save(kept, 10, 10)
    kept.wait()
    store.write_fault = lambda key, changes: fault if "/rest/" in key else None
    for step in (20, 30):
        save(kept, step, step)
        kept.wait()
    assert (stored_steps(), kept.steps()) == ([10], [30])
    assert f"{RUN}: not uploaded (s3://bucket/run/checkpoints/20/rest/" in caplog.messages[0]
    with pytest.raises(TrainingError, match=r"s3://bucket/run does not have all of this run \(s3://.*/30/rest/.*--resume"):
        kept.finish_mirror()
    store.write_fault = lambda key, changes: None
    kept.finish_mirror()
    assert stored_steps() == [30]
    same(llama_jax.load(RUN).params, state_of(30).params)


@pytest.mark.slow
def test_another_machine_fetches_the_newest_step(store, monkeypatch, tmp_path):
    with opened() as run, manager(run) as kept:
        (run.path / "metrics.jsonl").write_text("{}\n")
        for step, loss in ((10, 1.0), (20, 2.0), (30, 3.0)):
            save(kept, step, step, validation_loss=loss)
    monkeypatch.setenv("LLAMA_JAX_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(TrainingError, match="s3://bucket/run holds a run that is at step 30; continue with --resume"):
        opened(resume=False).__enter__()
    assert not (tmp_path / "elsewhere").exists()
    with opened() as run, manager(run) as kept:
        assert (kept.steps(), (run.path / "metrics.jsonl").read_text()) == ([30], "{}\n")
        same(kept.restore(shapes_of())[0], state_of(30))
        save(kept, 40, 40)
    assert stored_steps() == [10, 30, 40], "the best of the store, and the last"
    monkeypatch.setenv("LLAMA_JAX_CACHE", str(tmp_path / "cache"))
    with opened() as run, manager(run) as kept:  # which had stopped at 30
        assert kept.latest() == 40
    victim = next(key for key in store.objects if "/40/params/d/" in key)
    store.objects[victim] = bytes(len(store.objects[victim]))
    monkeypatch.setenv("LLAMA_JAX_CACHE", str(tmp_path / "third"))
    with pytest.raises(TrainingError, match=rf"^s3://bucket/{victim} is not what was saved .*; remove {STEPS}/40 to resume"):
        opened().__enter__()


@pytest.mark.slow
def test_two_machines_write_to_one_url(store, monkeypatch, tmp_path, caplog):
    """The process whose newest step is older leaves what the other one has written."""
    with opened() as older, manager(older) as older_manager:
        save(older_manager, 10, 10)
        older_manager.wait()
        monkeypatch.setenv("LLAMA_JAX_CACHE", str(tmp_path / "elsewhere"))
        with opened() as ahead, manager(ahead) as kept_ahead:
            save(kept_ahead, 20, 20)
            save(kept_ahead, 30, 30)
            kept_ahead.wait()
        written = dict(store.objects)
        save(older_manager, 20, 21)
        older_manager.wait()
        assert store.objects == written
        said = "it has step 30 of another process, which writes there too; end one of the two"
        assert caplog.messages[0].startswith(f"{RUN}: not uploaded ({said})")
        with pytest.raises(TrainingError, match=said):
            older_manager.finish_mirror()


def test_one_process_of_a_machine_writes(run):
    with pytest.raises(TrainingError, match="is in use by process"):
        opened().__enter__()


def test_where_no_run_can_be():
    with pytest.raises(TrainingError, match="hf://a/b is on the Hub, where runs cannot be stored"):
        train("tiny", "hf://a/b", [__file__])


# Whole runs.


def live(store, environment, cache, *arguments, **death):
    there = environment | object_server.environment(store) | {"JAX_NUM_CPU_DEVICES": "1", "LLAMA_JAX_CACHE": str(cache)}
    given = f"{mortal_run.__file__}:recipe", "steps=24", "--resume", *arguments
    return mortal_run.live(there, *given, **death)


@pytest.fixture(scope="module")
def local(text, environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local") / "run"
    with object_server.serving() as unused:
        assert live(unused, environment, folder.parent / "cache", "--workdir", folder, "--data", text) == 0
    return folder


@pytest.mark.parametrize(
    ("kills", "seed"),
    [
        pytest.param(2, 0, marks=[pytest.mark.slow, pytest.mark.rotating]),
        *(pytest.param(5, seed, marks=pytest.mark.nightly) for seed in range(1, 5)),
    ],
)
def test_killed_and_the_same_to_the_bit(environment, text, local, tmp_path, kills, seed):
    """A run that is killed after so many changes of the store, goes on on this machine or on another one, and then lives."""
    random = np.random.default_rng(seed)
    with object_server.serving() as store:
        for life in range(kills + 1):
            process, ended = [], threading.Event()
            until = len(store.changes) + int(random.integers(1, 60))
            wait = float(random.random() * 0.01)

            def watch(until=until, process=process, ended=ended, wait=wait):
                while not ended.is_set():
                    if len(store.changes) >= until and process:
                        ended.wait(wait)
                        process[0].kill()
                        return
                    ended.wait(0.001)

            thread = threading.Thread(target=watch)
            if life < kills:
                thread.start()
            cache = tmp_path / f"machine{random.integers(2)}"
            status = live(store, environment, cache, "--workdir", RUN, "--data", text, started=process.append)
            ended.set()
            assert status in ((-signal.SIGKILL, 0) if life < kills else (0,))
        stored = download(store, tmp_path / "copy") / "run"
    steps = {path.name for path in (local / "checkpoints").iterdir()}
    assert {path.name for path in (stored / "checkpoints").iterdir()} == steps
    check_same_lines(stored, local)
    for step in sorted(map(int, steps)):
        (state, note), (expected, wanted) = (state_in(run, "steps=24", step=step) for run in (stored, local))
        same(state, expected)
        assert note == wanted
