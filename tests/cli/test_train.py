"""`llama-jax train` as a user meets it: its arguments, its output, its exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import environment, outcome

import llama_jax
from llama_jax.cli.train import Train
from llama_jax.errors import TrainingError
from llama_jax.formats.step_dirs import check_checksums
from llama_jax.runs.metrics import Metrics
from llama_jax.runs.overrides import override
from llama_jax.runs.preflight import choose_tokenizer
from llama_jax.runs.recipes import find
from llama_jax.runs.run_folder import lock_run

RECIPES = """
from llama_jax.config import LlamaConfig
from llama_jax.data import DocumentFormat
from llama_jax.runs.recipe import Recipe
from llama_jax.training.optimizer import OptimizerSettings

def small():
    return Recipe(
        model=LlamaConfig(vocab_size=320, dim=32, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=64, max_seq_len=64,
                          norm_eps=1e-5, rope_theta=10_000.0, tie_embeddings=True),
        steps=4, batch=8, length=24, optimizer=OptimizerSettings(learning_rate=1e-2, warmup_steps=1), vocabulary="byte",
        reading=DocumentFormat(longest=60), validation=0.2, evaluate_every=0, save_every=2, log_every=2)
"""
SMALL = "recipes.py:small"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Recipes and data; all that a command line here names is in this folder."""
    folder = tmp_path_factory.mktemp("files")
    random = np.random.default_rng(0)
    words = random.choice(["the", "llama", "ate", "grass", "and", "slept"], 400)
    (folder / "recipes.py").write_text(RECIPES)
    (folder / "text.txt").write_text(" ".join(words))
    (folder / "other.txt").write_text(" ".join(words[::-1]))
    (folder / "binary.txt").write_bytes(random.bytes(3000))
    (folder / "short.txt").write_text("one two three")
    np.array([5, 6, 7, 999, 8], "<u2").tofile(folder / "ids.bin")
    return folder


@pytest.fixture
def run(files, monkeypatch):
    """Run the command in this process, in the folder of the files: (exit code, stdout, stderr)."""
    monkeypatch.chdir(files)
    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "cache"))
    return partial(outcome, "train")


@pytest.fixture
def start(files):
    """Start a process that runs some Python first, and then the command."""

    def start(code, *arguments):
        program = f"import sys\n{code}\nfrom llama_jax.cli import main\nmain()"
        return subprocess.Popen(
            [sys.executable, "-c", program, "train", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(XDG_CACHE_HOME=files / "cache"),
            cwd=files,
        )

    return start


@pytest.fixture(scope="module")
def ended(files, tmp_path_factory):
    """The folder of a run of 4 steps; read only."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(files)
        patch.setenv("XDG_CACHE_HOME", str(files / "cache"))
        code, _, err = outcome("train", SMALL, "--workdir", folder, "--data", "text.txt", "--mesh", "data=1")
    assert code == 0, err
    return folder


def numbers(folder, kind="train"):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def refused(outcome):
    """The one line of an error, with exit code 2 and before anything was compiled."""
    code, out, err = outcome
    assert code == 2, err
    assert "compiled" not in out
    assert err.startswith("llama-jax: error: ")
    assert err.count("\n") == 1
    return err


def test_a_run_leaves_a_model(ended):
    assert {path.name for path in ended.iterdir()} == {"checkpoints", "metrics.jsonl", "recipe.json"}
    assert [line["step"] for line in numbers(ended)] == [2, 4]
    config, _, tokenizer = llama_jax.load(ended)
    assert config.n_layers == 1
    assert tokenizer.decode(tokenizer.encode("a llama")) == "a llama"


def test_resume_of_an_ended_run_changes_nothing(run, ended, tmp_path):
    folder = Path(shutil.copytree(ended, tmp_path / "run"))
    before = {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}
    code, out, err = run(SMALL, "--workdir", folder, "--data", "text.txt", "--resume", "--trace", "3:5")
    assert (code, err) == (0, "")
    assert "resumed at step 4" in out
    assert "no profile: step 3 was taken before this start" in out
    assert before == {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*") if path.is_file()}


@pytest.mark.slow
def test_changes_anywhere_pmap_and_a_profile(run, tmp_path):
    code, out, err = run(
        *(SMALL, "steps=3", "--workdir", tmp_path, "optimizer.b2=0.9", "--data", "text.txt", "--backend", "pmap"),
        *("--mesh", "data=2", "seed=7", "--trace", "2:3"),
    )
    assert (code, err) == (0, "")
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    assert (recipe["steps"], recipe["optimizer"]["b2"], recipe["seed"]) == (3, 0.9, 7)
    assert "for pmap over 2 devices" in out
    assert numbers(tmp_path, "event")[0]["devices"] == 2
    assert out.count("profile in ") == 1
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("smal --data text.txt", "no recipe 'smal'; use tiny, shakespeare"),
        ("SMALL --data a=text.txt", "--data a=text.txt has no weight; write NAME=PATH:WEIGHT"),
        (
            "SMALL --data text.txt --reweigh",
            "--reweigh (reweigh=True) changes the weights of a run's data; it needs --resume",
        ),
        ("tiny --data binary.txt", "so it is not text"),
        ("tiny --data ids.bin", "ids.bin holds tokens, not text to learn a vocabulary from"),
        ("SMALL --data short.txt", "a single document, which cannot be split for validation; pass other files with"),
        ("SMALL --data text.txt stepss=3", "'stepss' is not a setting of the recipe; did you mean 'steps'?"),
        ("SMALL --data text.txt --trace 1:" + "9" * 5000, "must be two steps"),
        ("SMALL --data text.txt --trace 0:2", "trace=0:2 must lie within"),
        (
            "SMALL --data text.txt prompts=PROMPT",
            "is 81 tokens; a sample needs at least 1 and fewer than the model's",
        ),
        ("SMALL --data text.txt --tokenizer recipes.py", "makes its own vocabulary (byte); add vocabulary=given"),
        ("SMALL --data text.txt --weights missing model.dim=8", "model.dim=8 and --weights exclude each other"),
        ("SMALL --data text.txt --weights missing model.rope_scaling.kind=yarn", "missing does not exist"),
    ],
)
def test_what_is_refused_in_one_line(run, tmp_path, arguments, message):
    words = [word.replace("SMALL", SMALL).replace("PROMPT", "x" * 80) for word in arguments.split()]
    assert message in refused(run(*words, "--workdir", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_on_resume_is_refused(files, ended, stories_folder):
    recipe = override(find(f"{files / 'recipes.py'}:small"), ["vocabulary=given"])
    own = ended / "checkpoints/4/about"
    assert choose_tokenizer(recipe, [], tokenizer_path=own, pretrained=None, resumed_run=ended).vocab_size == 259
    with pytest.raises(TrainingError, match=r"is not the tokenizer that the run in .* began with"):
        choose_tokenizer(recipe, [], tokenizer_path=stories_folder, pretrained=None, resumed_run=ended)


def test_a_folder_in_use_is_refused(run, tmp_path):
    with lock_run(tmp_path):
        err = refused(run(SMALL, "--workdir", tmp_path, "--data", "text.txt"))
    assert f"{tmp_path} is in use by process {os.getpid()} on " in err
    with lock_run(tmp_path):
        pass  # the lock has ended with its holder, though the file stays


def test_a_file_system_without_locks_warns(tmp_path, monkeypatch):
    import fcntl

    def flock(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.warns(UserWarning, match="cannot be locked \\(No locks available\\): use it in one process"),
        lock_run(tmp_path),
    ):
        pass


def test_a_full_disk_under_the_metrics(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    metrics = Metrics(tmp_path)
    with pytest.raises(TrainingError, match=r"metrics\.jsonl cannot be written to \(No space left on device\); .* --resume"):
        metrics.write("train", 1, loss=2.0)
    metrics.close()


HANGING = """
import threading
from llama_jax.runs import checkpoint_manager
real, saves = checkpoint_manager.ocp.save_checkpointables_async, []
def save(*arguments):
    saves.append(arguments)
    if len(saves) == 2:
        threading.Event().wait()
    return real(*arguments)
checkpoint_manager.ocp.save_checkpointables_async = save
"""


@pytest.mark.slow
def test_a_save_that_hangs_ends_the_process(start, files, tmp_path):
    changes = ["steps=100000", "save_every=100", "--workdir", tmp_path / "run", "--data", "text.txt", "--save-timeout", 5]
    process = start(HANGING, SMALL, *changes)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    last = err.splitlines()[-1]
    assert last.startswith(f"llama-jax: error: {tmp_path / 'run/checkpoints'}: step 200 is not saved: it has not been")
    assert last.endswith("(save_timeout=); the last good checkpoint is step 100")
    assert "Traceback" not in err
    check_checksums(tmp_path / "run/checkpoints/100")


FULL_DISK = """
import resource
from llama_jax.runs.checkpoint_manager import CheckpointManager
real = CheckpointManager.save
def save(self, step, *arguments, **options):
    if step == 200:
        self.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    real(self, step, *arguments, **options)
CheckpointManager.save = save
"""


@pytest.mark.slow
def test_a_full_disk_in_the_middle_of_a_save(start, run, files, tmp_path):
    """The run says so at the next line of its log, not only when the next save comes; what was saved before goes on."""
    changes = ["steps=100000", "save_every=100", "log_every=1", "--workdir", tmp_path, "--data", "text.txt"]
    process = start(FULL_DISK, SMALL, *changes)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "step 200 could not be saved (" in err
    assert "File too large" in err
    assert err.endswith("the last good checkpoint is step 100\n")
    assert "Traceback" not in err
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["100"]
    assert 200 <= numbers(tmp_path)[-1]["step"] < 300
    llama_jax.load(tmp_path)


# Short waits, one after the other: of a signal that comes just before a long one Python would hear only after it.
SLOW_END = """
import select
from llama_jax.runs.checkpoint_manager import CheckpointManager
def save(*arguments, **options):
    print("saving", flush=True)
    while True:
        select.select([], [], [], 0.05)
CheckpointManager.save = save
"""


def until(stream, text):
    """Read lines until one has the text."""
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"{text!r} never came")


@pytest.mark.parametrize(("stopped", "code"), [("SIGINT", 130), ("SIGTERM", 0), ("SIGHUP", 0), (None, 0)])
def test_the_exit_code_of_a_stopped_run(run, tmp_path, monkeypatch, stopped, code):
    monkeypatch.setattr("llama_jax.runs.loop.train", lambda *_, **__: SimpleNamespace(stopped=stopped))
    assert run(SMALL, "--workdir", tmp_path, "--data", "text.txt", "--mesh", "data=1")[0] == code


@pytest.mark.slow
def test_ctrl_c_twice_leaves_at_once(start, tmp_path):
    process = start(SLOW_END, SMALL, "--workdir", tmp_path, "--data", "text.txt", "steps=100000", "save_every=0")
    until(process.stdout, "step 4/")
    process.send_signal(signal.SIGINT)
    until(process.stdout, "saving")
    process.send_signal(signal.SIGTERM)  # a scheduler's, which does not count as the second
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "SIGINT: finishing and saving this step; Ctrl-C stops at once" in err
    assert "stopped without saving" in err
    assert "Traceback" not in err


def test_weights_bring_their_model_and_changes_may_extend_it(hf_folder):
    """The length is that of the recipe, and is held against the context of the weights, as changed."""
    arguments = {"recipe": "tiny", "workdir": Path("w"), "data": (Path("d"),), "weights": hf_folder}
    scaling = ("model.rope_scaling.kind=yarn", "model.rope_scaling.factor=8", "model.rope_scaling.original_max_seq_len=64")
    recipe = Train(**arguments, changes=("model.max_seq_len=512", *scaling))._recipe()
    before = llama_jax.formats.open_checkpoint(hf_folder).config
    longer = llama_jax.RopeScaling("yarn", 8.0, original_max_seq_len=64)
    assert recipe.model == replace(before, max_seq_len=512, rope_scaling=longer)
    assert recipe.length == find("tiny").length
    with pytest.raises(llama_jax.UserError, match=r"length=\d+ is above the model's context, max_seq_len=64"):
        Train(**arguments)._recipe()
