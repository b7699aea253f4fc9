"""The error of data."""

from llama_jax.errors import UserError


class DataError(UserError):
    """A file that no documents can be read from, or a split or a setting that leaves none."""
