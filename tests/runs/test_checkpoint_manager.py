"""Checkpoints of a run: restored to the bit, kept as asked, and whole however the process ends."""

import errno
import gc
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vocabularies
from commands import run_here
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from running import same
from small_run import CASES, CONFIG, save, shapes_of, state_of

import llama_jax
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.formats.step_dirs import by_loss, steps_in
from llama_jax.runs import checkpoint_manager
from llama_jax.runs.checkpoint_manager import CheckpointManager, read_metadata
from llama_jax.tokenizers import load_tokenizer

NOTE = {"recipe": {"steps": 60}, "data": {"next_batch": 7, "digest": "ab12"}, "seed": 3}


def over(devices: int, axis: int):
    """Places arrays over so many devices, cut along an axis where that can be."""
    mesh = Mesh(jax.devices()[:devices], ("fsdp",), axis_types=(AxisType.Auto,))

    def place(shape):
        cut = len(shape) > 1 and shape[axis] % devices == 0
        return NamedSharding(
            mesh, P(*["fsdp" if i == axis % len(shape) else None for i in range(len(shape))]) if cut else P()
        )

    return place


def placed(shapes, place):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place(a.shape)), shapes)


@pytest.fixture
def kept(tmp_path):
    with CheckpointManager(tmp_path / "run" / "checkpoints") as kept:
        yield kept


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(vocabularies.write(tmp_path_factory.mktemp("vocabulary"), "sentencepiece"))


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory, tokenizer):
    """The folder of a run with the steps 10 and 20; read only."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    with CheckpointManager(folder / "checkpoints") as kept:
        for step in (10, 20):
            kept.save(step, state_of(step), NOTE, CONFIG, tokenizer, validation_loss=step / 10)
    return folder


@pytest.fixture
def run(saved_run, tmp_path):
    """The same, to be spoiled."""
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


def test_what_is_saved_comes_back_to_the_bit(kept):
    state = state_of(1, ema=True)
    kept.save(40, state, NOTE, CONFIG, None, validation_loss=2.5)
    restored, note = kept.restore(shapes_of(ema=True))
    same(restored, state)
    assert type(restored) is type(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert {"float32", "bfloat16", "int32"} == {str(a.dtype) for a in jax.tree.leaves(restored)}
    assert note == read_metadata(kept.folder) == NOTE | {"step": 40, "validation_loss": 2.5, "versions": note["versions"]}
    assert note["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((8, -1), (1, 0)),
        pytest.param((8, 0), (4, -1), marks=pytest.mark.slow),
    ],
)
def test_any_number_of_devices_restores_what_another_saved(kept, before, after):
    state = state_of(2, over(*before), ema=True)
    kept.save(1, state, NOTE, CONFIG, None)
    shapes = placed(shapes_of(ema=True), over(*after))
    restored, _ = kept.restore(shapes)
    same(restored, state)
    for array, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(shapes), strict=True):
        assert array.sharding.is_equivalent_to(wanted.sharding, array.ndim)


def test_a_state_may_be_donated_at_once(kept, monkeypatch):
    import tensorstore

    done, real_open = threading.Event(), tensorstore.open

    def open_later(*arguments, **options):  # which is how the writing of every array begins
        assert done.wait(60)
        return real_open(*arguments, **options)

    step = jax.jit(lambda state: jax.tree.map(lambda a: a + 1, state), donate_argnums=0)
    state, copy, note = state_of(3, over(8, -1)), state_of(3), dict(NOTE)
    monkeypatch.setattr(tensorstore, "open", open_later)
    kept.save(1, state, note, CONFIG, None)
    for _ in range(3):
        state = step(state)
    jax.block_until_ready(state)
    note["seed"] = 4
    done.set()
    kept.wait()
    monkeypatch.undo()
    restored, noted = kept.restore(shapes_of())
    same(restored, copy)
    assert noted["seed"] == NOTE["seed"]


def test_the_last_and_the_best_stay(tmp_path):
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: float("nan"), 50: 1.5, 60: None}
    with CheckpointManager(tmp_path, keep_last=2, keep_best=2) as kept:
        assert (kept.latest(), kept.steps()) == (None, [])
        for step, loss in losses.items():
            save(kept, step, step, validation_loss=loss)
        kept.wait()
        assert (kept.steps(), kept.latest(), by_loss(kept.folder)[0]) == ([20, 50, 60], 60, 20)
        assert {path.name for path in tmp_path.iterdir()} == {"20", "50", "60"}
        save(kept, 5, 5)  # resumed from before all of them
        kept.wait()
        assert kept.steps() == [5, 20, 50, 60]
        same(kept.restore(shapes_of(), step=5)[0], state_of(5))


@pytest.fixture(scope="module")
def died(saved_run, tmp_path_factory):
    """A folder of checkpoints for every case of a process that died."""
    folder = tmp_path_factory.mktemp("died")
    for case in CASES:
        shutil.copytree(saved_run / "checkpoints", folder / case)
    program = [sys.executable, Path(__file__).with_name("small_run.py"), folder]
    subprocess.run(program, check=True, timeout=120, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "steps", "newest"),
    [
        ("making the folder", [10, 20], 20),
        ("writing", [10, 20], 20),
        ("renaming", [10, 20], 20),
        ("renamed", [10, 20], 20),
        ("writing the checksums", [10, 20], 20),
        ("complete", [10, 20, 30], 30),
        ("removing the oldest", [20, 30], 30),
    ],
)
def test_a_killed_save_leaves_whole_checkpoints(died, case, steps, newest):
    before = [path.name for path in (died / case).iterdir()]
    with CheckpointManager(died / case) as kept:
        assert len(before) > 1
        assert kept.steps() == steps
        assert {path.name for path in kept.folder.iterdir()} == set(map(str, steps)), "the rest is cleared up"
        same(kept.restore(shapes_of())[0], state_of(newest))
        save(kept, 40, 40)
        same(kept.restore(shapes_of(), 40)[0], state_of(40))


def test_a_failed_save_is_told_at_the_next_call(kept):
    class Broken:
        def save(self, folder):
            raise OSError("no room for the vocabulary")

    save(kept, 10, 10)
    kept.save(20, state_of(11), NOTE, CONFIG, Broken())
    with pytest.raises(CheckpointError, match=r"step 20 could not .*no room for the vocabulary.*last good .* is step 10$"):
        save(kept, 20, 20)
    assert [path.name for path in kept.folder.iterdir()] == ["10"]
    threads = threading.active_count()
    save(kept, 20, 20)
    same(kept.restore(shapes_of())[0], state_of(20))
    assert threading.active_count() <= threads


@pytest.mark.parametrize("seconds", [0.0, float("inf"), float("nan")])
def test_a_time_that_no_save_can_have(seconds, tmp_path):
    """A timer that waits for ever raises in its thread."""
    with pytest.raises(ConfigError, match=f"save_timeout={seconds:g} must be above 0 and at most 1e7 seconds"):
        CheckpointManager(tmp_path, timeout=seconds)


def test_a_failed_save_is_one_error_though_several_writers_fail(kept, monkeypatch, caplog):
    """Orbax raises the first one's error and logs the traceback of a second, which is still writing."""
    failed = threading.Event()

    def second_writer():
        failed.wait(30)
        path = os.path.join("lib", "orbax", "future.py")
        logging.getLogger("absl").handle(logging.LogRecord("absl", logging.ERROR, path, 1, "of a writer", None, None))

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def wait_for_writers():
        failed.set()
        writer.join(30)

    def save_and_wait():
        save(kept, 10, 10)
        kept.wait()

    writer = threading.Thread(target=second_writer)
    writer.start()
    monkeypatch.setattr(logging.getLogger("absl"), "propagate", True)
    monkeypatch.setattr(checkpoint_manager.ocp, "save_checkpointables_async", fail)
    monkeypatch.setattr(checkpoint_manager, "wait_for_writers", wait_for_writers)
    with pytest.raises(CheckpointError, match="the disk is full"):
        save_and_wait()
    assert "of a writer" not in caplog.text


DAMAGE = {
    "one bit": (lambda step: flip(largest(step / "rest")), r"rest/.* is not what was saved"),
    "truncated": (lambda step: os.truncate(largest(step / "rest"), 1000), r"rest/.* is not what was saved"),
    "array gone": (lambda step: largest(step / "params").unlink(), r"params/.* is missing"),
    "metadata": (lambda step: (step / "params/_METADATA").write_text("{"), "params/_METADATA is not what was saved"),
    "part gone": (lambda step: shutil.rmtree(step / "rest"), "rest/.* is missing"),
    "note": (lambda step: (step / "about/note.json").write_text("{"), "about/note.json is not what was saved"),
    "checkpoint metadata": (lambda step: (step / "_CHECKPOINT_METADATA").unlink(), ""),
}


@pytest.mark.parametrize("how", ["one bit", *(pytest.param(how, marks=pytest.mark.slow) for how in [*DAMAGE][1:])])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax drops what it was reading besides
def test_a_damaged_step_is_named_and_a_whole_one_found(run, how):
    spoil, named = DAMAGE[how]
    named = rf"checkpoints/20/?{named}"
    spoil(run / "checkpoints/20")
    with CheckpointManager(run / "checkpoints") as kept:
        with pytest.raises(CheckpointError, match=rf"step 20 is damaged: .*{named}.*last good checkpoint is step 10"):
            kept.restore(shapes_of())
        same(kept.restore(shapes_of(), 10)[0], state_of(10))
        spoil(run / "checkpoints/10")
        with pytest.raises(CheckpointError, match="no older step is intact"):
            kept.restore(shapes_of())
    gc.collect()  # so that what was dropped is told of here


def flip(path: Path) -> None:
    """One bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_bit_of_an_array_is_noticed_by_all_that_read_it(run):
    """orbax reads other numbers, and says nothing."""
    file = largest(run / "checkpoints/20/params")
    flip(file)
    with pytest.raises(CheckpointError, match=rf"{file} is not what was saved .*try another step: 10$"):
        llama_jax.load(run)
    found = run_here("inspect", run, "--json")
    assert found.returncode == 2
    assert f"{file} is not what was saved" in found.stderr
    assert f"{file} is not what was saved" in json.loads(found.stdout)["problems"][0]
    check, step = ["sha256sum", "--quiet", "-c", "about/SHA256SUMS"], run / "checkpoints/20"
    done = subprocess.run(check, cwd=step, capture_output=True)
    assert done.stdout.decode().splitlines() == [f"{file.relative_to(step)}: FAILED"]
    flip(file)
    assert run_here("inspect", run).returncode == 0
    done = subprocess.run(check, cwd=step, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no memory left"),
        OSError(errno.EIO, "Input/output error"),
        pytest.param(ValueError("DATA_LOSS: Error reading [Input/output error]"), marks=pytest.mark.slow),
    ],
    ids=["memory", "disk", "disk, in words"],
)
def test_what_says_nothing_about_the_files_advises_no_deletion(error, run, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(ocp, "load", fail)
    reason = re.escape((error.strerror if isinstance(error, OSError) else None) or str(error))
    said = rf"20/params cannot be read \(.*{reason}\), which does not prove damage"
    with CheckpointManager(run / "checkpoints") as kept, pytest.raises(CheckpointError, match=said) as restoring:
        kept.restore(shapes_of())
    with pytest.raises(CheckpointError, match=said) as loading:
        llama_jax.load(run)
    for raised in (restoring, loading):
        assert not re.search("remove|damaged|copy it again|not a whole", str(raised.value))
    monkeypatch.undo()
    llama_jax.load(run)


def test_a_disk_that_fails_under_the_checksums_is_no_damage(run, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("hashlib.file_digest", fail)
    with CheckpointManager(run / "checkpoints") as kept:
        for read in (lambda: kept.restore(shapes_of()), lambda: llama_jax.load(run)):
            with pytest.raises(CheckpointError, match=r"cannot be read \(Input/output error\), which does not prove damage"):
                read()


def test_a_step_whose_checksums_are_damaged_or_missing(run):
    """Without them it is not a step; what else a list of checksums could hide is damage."""
    file = run / "checkpoints/20/about/SHA256SUMS"
    flip(file)
    with CheckpointManager(run / "checkpoints") as kept:
        with pytest.raises(CheckpointError, match=rf"step 20 is damaged: {file} is not what was saved; .* is step 10"):
            kept.restore(shapes_of())
        with pytest.raises(CheckpointError, match="SHA256SUMS is not what was saved"):
            llama_jax.load(run)
    file.unlink()
    same(llama_jax.load(run).params, state_of(10).params)
    with CheckpointManager(run / "checkpoints") as kept:
        assert [path.name for path in kept.folder.iterdir()] == ["10"]


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_a_state_of_another_run_is_refused(run):
    with CheckpointManager(run / "checkpoints") as kept:
        with pytest.raises(CheckpointError, match=r"'ema.blocks.attention.out' is absent in .* and float32\[2, 64, 64\]"):
            kept.restore(shapes_of(ema=True))
        half = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), shapes_of())
        with pytest.raises(CheckpointError, match=r"is float32\[2, 64, 64\] in the .* and bfloat16\[2, 64, 64\] in this"):
            kept.restore(half)
        with pytest.raises(CheckpointError, match=r"'rest.opt_state.0.count' is int32\[\] in .* and absent in this run"):
            kept.restore(shapes_of().replace(opt_state=()))
        with pytest.raises(CheckpointError, match="no step 15; pass one of 10, 20"):
            kept.restore(shapes_of(), 15)


@pytest.mark.parametrize("path", ["", "checkpoints", "checkpoints/20"])
def test_a_run_is_a_model(saved_run, tokenizer, path):
    loaded = llama_jax.load(saved_run / path)
    assert loaded.config == CONFIG
    same(loaded.params, state_of(20).params)
    assert loaded.tokenizer.encode("once upon a time") == tokenizer.encode("once upon a time")


@pytest.mark.slow
def test_a_run_is_read_while_it_saves(tmp_path):
    """In a thread a run saves and keeps the newest step alone; whatever is read is one of its steps, whole.

    While one is read there are at most two more, and two whose writing had begun: of a run that saves without end, reading
    gives up at some time.
    """
    turn = threading.Condition()
    step, last = 0, 1  # written, and to be written; 0 ends

    def go_on():
        nonlocal step
        with CheckpointManager(tmp_path / "checkpoints", keep_last=1, keep_best=0) as kept:
            while True:
                with turn:
                    turn.wait_for(lambda: step < last or not last)  # noqa: B023 - it is called here and now
                    if not last:
                        return
                    step += 1
                save(kept, step, step % 3)

    states = [state_of(seed).params for seed in range(3)]
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        while not steps_in(tmp_path / "checkpoints"):
            assert thread.is_alive()
        for _ in range(6):
            with turn:
                last = step + 2
                turn.notify()
            found = llama_jax.load(tmp_path).params
            assert any(jax.tree.all(jax.tree.map(np.array_equal, found, state)) for state in states)
    finally:
        with turn:
            last = 0
            turn.notify()
        thread.join()


def test_other_commands_know_a_run(saved_run, tmp_path):
    facts = json.loads(run_here("inspect", saved_run, "--json").stdout)
    assert facts["format"] == "orbax, step 20 of a run"
    assert facts["problems"] == []

    llama_jax.convert(saved_run, tmp_path / "converted")
    same(llama_jax.load(tmp_path / "converted").params, state_of(20).params)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_or_empty_run_is_no_model(run, tmp_path):
    largest(run / "checkpoints/20/params").unlink()
    with pytest.raises(CheckpointError, match=r"20/params is not a whole orbax checkpoint .*try another step: 10$"):
        llama_jax.load(run)
    gc.collect()
    (run / "checkpoints/20/about/config.json").unlink()
    with pytest.raises(CheckpointError, match=r"20/about/config\.json is "):
        llama_jax.load(run)
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="new/checkpoints holds no checkpoint; train until"):
        llama_jax.load(tmp_path / "new")
