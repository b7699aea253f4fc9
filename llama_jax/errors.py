"""The one kind of error that the user can mend; the command line prints it as one line and exits with 2."""


class UserError(ValueError):
    """Something given to llama_jax cannot be used: the message names the thing, its value, the need and the remedy."""


class ConfigError(UserError):
    """Sizes or constants that cannot be a Llama."""


class CheckpointError(UserError):
    """A file that cannot be read as a Llama: damaged, incomplete, or of a kind that is not supported."""


class TokenizerError(UserError):
    """A vocabulary that cannot be read."""


class GenerationError(UserError):
    """A prompt, a sampling value or a length that cannot be generated from."""


class MeshError(UserError):
    """A mesh that cannot be: of nonsense sizes, of more devices than there are, or not fitting the model or the batch."""
