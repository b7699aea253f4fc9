"""The error of training runs."""

from llama_jax.errors import UserError


class TrainingError(UserError):
    """A recipe that cannot be trained, a work directory of another run, or a run that has failed."""
