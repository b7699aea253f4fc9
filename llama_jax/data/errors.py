"""What can be wrong with data."""

from llama_jax.errors import UserError


class DataError(UserError):
    """A file that no documents can be read from, or a way of dividing them that leaves none."""
