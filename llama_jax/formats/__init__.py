"""Files in and out: `load` recognizes what a path holds, `save` and `convert` write; `load_adapter` and `save_adapter`.

Anything missing, damaged, unsupported or impossible to write raises a one-line `CheckpointError` that names the file and the
remedy; an invalid configuration raises a `ConfigError` until a reader adds the file's name.
"""

from llama_jax.formats.adapters import load_adapter, save_adapter
from llama_jax.formats.loading import Checkpoint, load, open_checkpoint
from llama_jax.formats.saving import convert, save

__all__ = ["Checkpoint", "convert", "load", "load_adapter", "open_checkpoint", "save", "save_adapter"]
