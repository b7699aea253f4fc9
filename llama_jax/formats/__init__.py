"""Files in and out: `load` recognizes what a path holds, `save` and `convert` write; `load_adapter` and `save_adapter`.

What is missing, damaged, not supported or cannot be written raises a `CheckpointError` of one line, which names the file and
the remedy; in a configuration a `ConfigError`, until a reader adds the file's name.
"""

from llama_jax.formats.adapters import load_adapter, save_adapter
from llama_jax.formats.loading import Checkpoint, load, open_checkpoint
from llama_jax.formats.saving import convert, save

__all__ = ["Checkpoint", "convert", "load", "load_adapter", "open_checkpoint", "save", "save_adapter"]
