"""``python -m llama_jax`` is ``llama-jax``."""

from llama_jax.cli import main

main()
