"""Files in and out: `load` recognises what a path holds, `save` and `convert` write."""

from llama_jax.checkpoints.loading import Checkpoint, load, open_checkpoint
from llama_jax.checkpoints.saving import convert, save

__all__ = ["Checkpoint", "convert", "load", "open_checkpoint", "save"]
