"""`llama-jax train` of a small recipe, as a program that is killed from within while it saves.

python mortal_run.py STAGE SAVE ARGUMENTS...    dies at that stage (of `small_run.CASES`) of the so-manieth save; "-" lives
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.data import ChatReading, DocumentFormat
from llama_jax.runs.recipe import Recipe, RewardSettings
from llama_jax.training.optimizer import OptimizerSettings
from llama_jax.training.preference_loss import PreferenceOptions


def recipe() -> Recipe:
    """Saves often, at steps that are not all logged or evaluated, and keeps all that a state can have."""
    return Recipe(
        model=LlamaConfig(
            vocab_size=320,
            dim=32,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            hidden_dim=64,
            max_seq_len=64,
            norm_eps=1e-5,
            rope_theta=10_000.0,
            tie_embeddings=True,
        ),
        steps=60,
        batch=8,
        length=24,
        optimizer=OptimizerSettings(learning_rate=1e-2, warmup_steps=2),
        vocabulary="byte",
        reading=DocumentFormat(longest=60),
        validation=0.2,
        evaluate_every=8,
        save_every=4,
        log_every=1,
        ema_decay=0.9,
    )


def preferring() -> Recipe:
    """The same shape, all of which learns preferences; what it begins with is given by --weights."""
    return replace(
        recipe(),
        steps=8,
        batch=4,
        length=40,
        optimizer=OptimizerSettings(learning_rate=3e-3, warmup_steps=1),
        chats=ChatReading(),
        preference=PreferenceOptions(beta=0.5),
        evaluate_every=4,
        save_every=4,
        ema_decay=0.0,
    )


def rewarding() -> Recipe:
    """The same shape, which learns what a function of this file rewards, twice from the same answers."""
    return replace(
        recipe(),
        steps=4,
        batch=32,
        length=16,
        rewards=RewardSettings((f"{__file__}:letters",), group=4, answer=8, held=8, samples=1, updates=2),
        optimizer=OptimizerSettings(learning_rate=1e-2, schedule="constant"),
        evaluate_every=2,
        save_every=2,
        ema_decay=0.0,
    )


def letters(completions: list[str], **columns: list[str]) -> list[float]:
    """The share of characters that are letters."""
    return [sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def write_words(folder: Path) -> Path:
    """A text to train on."""
    words = np.random.default_rng(0).choice(["the", "llama", "ate", "grass", "and", "slept"], 900)
    (folder / "text.txt").write_text(" ".join(words))
    return folder / "text.txt"


def environment_of(cache: Path) -> dict[str, str]:
    """What all processes of a test share: compiled programs, tokenized text, and this folder to import from."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache / "programs"),
        "XDG_CACHE_HOME": str(cache),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))),
    }


def live(
    environment: Mapping[str, str],
    *arguments: object,
    stage: str = "-",
    save: int = 0,
    lines: int = 1000,
    started: Callable[[subprocess.Popen[str]], object] = lambda process: None,
) -> int:
    """Runs `llama-jax train ARGUMENTS` as this program, kills it after so many lines about steps, and says how it ended."""
    command = [sys.executable, __file__, stage, str(save), "train", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        started(process)
        for line in process.stdout:
            lines -= line.startswith("step ") and " · " in line
            if lines == 0:
                process.kill()
    return process.returncode


def main(stage: str, number: int, arguments: list[str]) -> None:
    """Run the command, with a way to die put in the place of a function when the save begins."""
    from small_run import CASES

    from llama_jax.cli import main as command
    from llama_jax.runs.checkpoint_manager import CheckpointManager

    real_save, saves = CheckpointManager.save, 0

    def save(*positional, **named):
        nonlocal saves
        saves += 1
        if saves == number:
            where, name, death = CASES[stage]
            setattr(where, name, death)
        real_save(*positional, **named)

    if stage != "-":
        CheckpointManager.save = save
    sys.argv[1:] = arguments
    command()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
