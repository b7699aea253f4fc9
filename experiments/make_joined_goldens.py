"""Write checkpoints with `gate_up` [F, 2, D], as they were before gate and up became arrays of their own.

    git checkout 64b236f -- llama_jax && python experiments/make_joined_goldens.py

Only the code of that commit or an older one writes them. For each optimizer there is a run stopped halfway (parameters,
moving average and optimizer state), and what the same code made of it: the model's logits, and the parameters at its end.
One model is also stored as `llama_jax.save` wrote orbax.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Literal

import jax
import numpy as np

import llama_jax
from llama_jax.data import DocumentFormat
from llama_jax.runs.loop import train
from llama_jax.runs.recipe import Recipe
from llama_jax.training.optimizer import OptimizerSettings

JOINED = Path(__file__).parent.parent / "tests" / "goldens" / "joined"
TOKENS = np.arange(36).reshape(2, 18) * 7 % 256
CONFIG = llama_jax.LlamaConfig(
    vocab_size=264,
    dim=8,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    hidden_dim=12,
    max_seq_len=32,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_embeddings=True,
)
OPTIMIZERS: tuple[Literal["adamw", "muon"], ...] = ("adamw", "muon")


def recipe_of(optimizer: Literal["adamw", "muon"]) -> Recipe:
    return Recipe(
        model=CONFIG,
        steps=6,
        batch=4,
        length=16,
        optimizer=OptimizerSettings(name=optimizer, learning_rate=1e-2, warmup_steps=2),
        vocabulary="byte",
        reading=DocumentFormat(longest=40),
        evaluate_every=3,
        save_every=3,
        log_every=3,
        ema_decay=0.9,
    )


def write_text(folder: Path) -> Path:
    words = np.random.default_rng(0).choice(["the", "llama", "ate", "grass", "and", "slept"], 400)
    (folder / "text.txt").write_text(" ".join(words))
    return folder / "text.txt"


def zipped(folder: Path, target: Path) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock"):
            content = b"" if path.name == "commit_success.txt" else path.read_bytes()  # which says where it lay
            archive.writestr(zipfile.ZipInfo(path.relative_to(folder).as_posix()), content, zipfile.ZIP_DEFLATED)


def logits_of(path: Path) -> np.ndarray:
    config, params, _ = llama_jax.load(path)
    return np.asarray(llama_jax.logits(config, params, TOKENS))[:, ::6]


def main() -> None:
    JOINED.mkdir(exist_ok=True)
    expected: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_text(folder)
        for optimizer in OPTIMIZERS:
            run = folder / optimizer
            state = train(recipe_of(optimizer), run, [text]).state
            shutil.rmtree(run / "checkpoints" / "6")
            expected[f"{optimizer}.logits"] = logits_of(run)
            for kept, params in (("params", state.params), ("ema", state.ema)):
                for path, array in jax.tree.leaves_with_path(params):
                    expected[f"{optimizer}.{kept}.{jax.tree_util.keystr(path, simple=True, separator='.')}"] = array
            zipped(run, JOINED / f"{optimizer}.zip")
        llama_jax.save(folder / "saved", CONFIG, llama_jax.init(CONFIG, jax.random.key(0)), format="orbax")
        expected["saved.logits"] = logits_of(folder / "saved")
        zipped(folder / "saved", JOINED / "saved.zip")
    np.savez_compressed(JOINED / "expected.npz", **expected)


if __name__ == "__main__":
    main()
