"""Files in: `load` recognises what a path holds."""

from llama_jax.checkpoints.load import Checkpoint, load

__all__ = ["Checkpoint", "load"]
