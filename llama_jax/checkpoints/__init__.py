"""Files in: `load` recognises what a path holds."""

from llama_jax.checkpoints.loading import Checkpoint, load

__all__ = ["Checkpoint", "load"]
