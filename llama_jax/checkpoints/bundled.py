"""The model that comes with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from llama_jax.errors import CheckpointError

NAME = "the bundled stories model"


def bundled() -> Path:
    """The folder of a small Llama trained on TinyStories, for `load`; its README.md says how well it does and its licence.

    Raises:
      CheckpointError: an installation without its assets.
    """
    folder = Path(str(files("llama_jax"))) / "assets"
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder} does not hold {NAME}; install llama_jax again, or give a model with --model")
    return folder
