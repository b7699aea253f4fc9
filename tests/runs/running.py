"""What tests of runs share: a text, caches, logs that send signals, and what a run left."""

from __future__ import annotations

import io
import json
import signal
import time
from pathlib import Path

import jax
import mortal_run
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from llama_jax.formats.step_dirs import CHECKPOINTS
from llama_jax.model.trees import init
from llama_jax.runs.checkpoint_manager import CheckpointManager
from llama_jax.runs.log import Log
from llama_jax.runs.overrides import override
from llama_jax.tokenizers.sentencepiece import byte_tokenizer
from llama_jax.training.optimizer import make_optimizer
from llama_jax.training.step import init_state

WEST, EAST = "AAA12", "BBB-14"  # values of TZ, 26 hours apart: never the same date
DATED = (
    "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
COUNTED = ("loss", "learning_rate", "grad_norm", "tokens", "skipped")


@pytest.fixture(scope="module", name="text")
def text_fixture(tmp_path_factory):
    return mortal_run.write_words(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module", name="environment")
def environment_fixture(tmp_path_factory):
    return mortal_run.environment_of(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory):
    """Away from the user's: of tokenized text, and of compiled programs, for every run of a module compiles the same few."""
    folder = str(tmp_path_factory.mktemp("cache"))
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("platformdirs.user_cache_dir", lambda *_: folder)
        for values in (settings, before):
            for name, value in values.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            if values is settings:
                yield


@pytest.fixture(name="zone")
def zone_fixture(monkeypatch):
    """Sets the time zone of this process and of those that it starts."""

    def set_zone(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_zone
    monkeypatch.undo()
    time.tzset()


class StopAt(Log):
    """Sends a signal when a line begins so, or calls `action`; keeps what was said."""

    def __init__(self, start="never", number=signal.SIGTERM, action=None):
        super().__init__(io.StringIO())
        self.start, self.action = start, action or (lambda: signal.raise_signal(number))

    def _write(self, text, *, stays):
        super()._write(text, stays=stays)
        if text.startswith(self.start):
            self.action()

    @property
    def said(self):
        return self._stream.getvalue()


def same(tree, other):
    """Asserts that two trees hold the same bits."""
    for (path, a), (there, b) in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves_with_path(other), strict=True):
        assert path == there
        assert a.dtype == b.dtype, jax.tree_util.keystr(path)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def all_lines(folder):
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def lines(folder, kind):
    """The lines of this kind that hold: those of steps that were taken again after a kill are dropped."""
    kept: list[dict] = []
    for line in all_lines(folder):
        if line.get("event") in ("start", "resume"):
            kept = [old for old in kept if old["step"] <= line["step"]]
        if line["kind"] == kind:
            kept.append(line)
    return kept


def state_in(folder, *changes, step=None):
    """A state of a run of `mortal_run.recipe` and its note, by default the newest, wherever it was trained."""
    recipe = override(mortal_run.recipe(), changes)
    optimizer = make_optimizer(recipe.optimizer, recipe.steps)
    shapes = jax.eval_shape(lambda key: init_state(optimizer, init(recipe.model, key), ema=True), jax.random.key(0))
    with CheckpointManager(folder / CHECKPOINTS) as checkpoints:
        return checkpoints.restore(shapes, step)


def check_same_lines(folder, other):
    """The same numbers at the same steps."""
    for kind, names in (("train", COUNTED), ("validation", ("loss", "bits_per_byte"))):
        found, wanted = (
            [(line["step"], *(line[name] for name in names)) for line in lines(f, kind)] for f in (folder, other)
        )
        assert found == wanted


def write_dated_vocabulary(folder):
    """A vocabulary of bytes whose chat template writes the date."""
    folder.mkdir()
    byte_tokenizer().save(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": DATED}))
    return folder


def write_dialogs(file, count=40, question="question"):
    """Chats with a question and an answer."""
    answer = {"role": "assistant", "content": "yes"}
    chats = [[{"role": "user", "content": f"{question} {i}"}, answer] for i in range(10, 10 + count)]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return file


def download(store, folder: Path) -> Path:
    """Copy the objects of a store into a folder."""
    for key, body in store.objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(body)
    return folder
