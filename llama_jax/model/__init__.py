"""Where the operations meet parameters and cache: the only room that knows the whole model."""
