"""Speculative decoding: several tokens per pass of the model, with the same results as without it."""

from llama_jax.inference.drafter import Drafter
from llama_jax.inference.speculation.draft_model import DraftModel
from llama_jax.inference.speculation.prompt_lookup import PromptLookup

__all__ = ["DraftModel", "Drafter", "PromptLookup"]
