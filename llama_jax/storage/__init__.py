"""Files and folders on this machine, or in a store at a URL. See docs/storage.md.

A failure to read or write raises an `OSError` that names the path; a wrong URL or a missing library, a `UserError`.
"""

from llama_jax.storage.paths import Location, StoredPath, locate, on_disk, resolved

__all__ = ["Location", "StoredPath", "locate", "on_disk", "resolved"]
