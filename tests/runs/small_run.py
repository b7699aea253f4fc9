"""A small run's states, and, as a program, processes of it that are killed in the middle of a save.

python small_run.py FOLDER      for every case, saves into FOLDER/CASE, a folder of checkpoints with the steps 10 and 20
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorstore
from orbax.checkpoint._src.path import async_path

from llama_jax.config import LlamaConfig
from llama_jax.formats import step_dirs
from llama_jax.model.trees import init
from llama_jax.runs import checkpoint_manager
from llama_jax.runs.checkpoint_manager import CheckpointManager
from llama_jax.training.step import TrainState, init_state

CONFIG = LlamaConfig(
    vocab_size=384,
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    hidden_dim=96,
    norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_seq_len=64,
    tie_embeddings=True,
)
OPTIMIZER = optax.adamw(1e-3, mu_dtype=jnp.bfloat16)  # so that a state holds float32, bfloat16 and int32


def shapes_of(*, ema: bool = False) -> TrainState:
    return jax.eval_shape(lambda key: init_state(OPTIMIZER, init(CONFIG, key), ema=ema), jax.random.key(0))


def state_of(seed: int, place: Callable | None = None, *, ema: bool = False) -> TrainState:
    """A state of random numbers, each array placed by the sharding that `place` gives for its shape; nothing is compiled."""
    random = np.random.default_rng(seed)

    def make(leaf):
        array = np.asarray(
            random.integers(0, 1 << 20, leaf.shape) if leaf.dtype == jnp.int32 else random.normal(size=leaf.shape)
        )
        return jax.device_put(array.astype(leaf.dtype), place(leaf.shape) if place else None)

    return jax.tree.map(make, shapes_of(ema=ema))


def save(kept: CheckpointManager, step: int, seed: int, **options) -> None:
    kept.save(step, state_of(seed), {"seed": seed}, CONFIG, None, **options)


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_removing(path: Path, **_: object) -> None:
    if not path.name.isdecimal():
        return  # not a step
    next(file for file in sorted(path.rglob("*")) if file.is_file()).unlink()
    die()


# Of each case: what to replace by a way to die while step 30 is saved.
CASES: dict[str, tuple[object, str, Callable]] = {
    "making the folder": (async_path, "mkdir", die),
    "writing": (tensorstore, "open", die),
    "renaming": (async_path, "rename", die),
    "renamed": (checkpoint_manager, "_write_metadata", die),
    "writing the checksums": (step_dirs, "write_atomically", die),
    "complete": (checkpoint_manager, "by_loss", die),
    "removing the oldest": (shutil, "rmtree", die_removing),
}


def main(folder: Path) -> None:
    """Every case in a process of its own, forked before JAX starts its threads."""
    for case in CASES:
        child = os.fork()
        if child == 0:
            where, name, death = CASES[case]
            kept = CheckpointManager(folder / case, keep_best=0)
            setattr(where, name, death)
            save(kept, 30, 30)
            kept.wait()
            os._exit(1)  # it lives on
        _, status = os.waitpid(child, 0)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            sys.exit(f"{case}: status {status}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
