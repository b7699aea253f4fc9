"""Shared data, models and compiled programs."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import make_goldens
import numpy as np
import pytest
from hypothesis import settings
from safetensors.numpy import save_file

import llama_jax
from llama_jax.checkpoints.assemble import assemble
from llama_jax.checkpoints.huggingface import NAMES, config_to_dict
from llama_jax.checkpoints.memory import Held
from llama_jax.checkpoints.tensors import Opened

# Enough to split a model in every way. JAX must be told before its backend starts, so no test module may start it on import.
jax.config.update("jax_num_cpu_devices", 8)

# Compiling is most of the time of a test, so an example may be slow without the code being slow.
settings.register_profile("llama_jax", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("llama_jax")


def shared_data(name: str) -> Path:
    """A file or folder of ../shared/data; skips the test in a clone that has none beside it."""
    path = Path(os.environ.get("LLAMA_JAX_TEST_DATA", Path(__file__).parents[2] / "shared" / "data")) / name
    if not path.exists():
        assert "LLAMA_JAX_NO_SKIP" not in os.environ, f"{path} is missing, and here no test may skip"
        pytest.skip(f"needs test data that is not beside this clone: {path}")
    return path


@pytest.fixture(scope="session")
def stories_folder() -> Path:
    return shared_data("stories260K")


@pytest.fixture(scope="session")
def stories(stories_folder):
    """The real trained model of 260 thousand parameters."""
    return llama_jax.load(stories_folder)


@pytest.fixture(scope="session")
def goldens() -> dict[str, np.ndarray]:
    with np.load(make_goldens.GOLDENS / "logits.npz") as file:
        return dict(file)


def params_of(config, tensors: dict[str, np.ndarray], dtype=None):
    """Parameters from tensors by Hugging Face name."""
    held = {name: Held(array) for name, array in tensors.items()}
    return assemble(Opened("test", Path("test"), config, held, NAMES, False, lambda: None), dtype)


@pytest.fixture(scope="session")
def models() -> dict[str, tuple]:
    """{kind: (config, params)} of the small random models of every kind, the same as the goldens'."""
    return {
        kind: (config, params_of(config, make_goldens.random_tensors(config))) for kind, config in make_goldens.KINDS.items()
    }


@pytest.fixture
def hf_folder(tmp_path) -> Path:
    """A small Hugging Face folder to spoil."""
    return write_hf_folder(tmp_path / "model", make_goldens.KINDS["gqa"])


def write_hf_folder(folder: Path, config, tensors: dict[str, np.ndarray] | None = None, **changes) -> Path:
    import json

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_to_dict(config) | changes))
    save_file(tensors or make_goldens.random_tensors(config), folder / "model.safetensors")
    return folder


def as_float64(params):
    """The same parameters in float64; use under `jax.enable_x64`."""
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), params)
