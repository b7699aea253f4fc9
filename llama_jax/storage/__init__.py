"""Files and folders on this machine, or in a store that a URL names. See docs/storage.md.

What cannot be read or written raises an `OSError` that names it; a wrong URL, or a library that is missing, a `UserError`.
"""

from llama_jax.storage.paths import Location, StoredPath, locate, on_disk, resolved

__all__ = ["Location", "StoredPath", "locate", "on_disk", "resolved"]
