"""Files and folders on this machine, or in a store that a URL names. See docs/storage.md."""

from llama_jax.storage.paths import Location, StoredPath, locate, on_disk, resolved

__all__ = ["Location", "StoredPath", "locate", "on_disk", "resolved"]
