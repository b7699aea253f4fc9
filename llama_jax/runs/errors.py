"""What goes wrong with a run."""

from llama_jax.errors import UserError


class TrainingError(UserError):
    """A recipe that cannot be trained, a work directory of another run, or a run that has come to nothing."""
