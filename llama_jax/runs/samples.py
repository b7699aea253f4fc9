"""What a model that is being trained writes after the prompts of its recipe."""

from __future__ import annotations

from collections.abc import Sequence

from llama_jax.inference.generate import generate
from llama_jax.inference.sampling import Sampling
from llama_jax.model.options import Compute
from llama_jax.model.params import Llama
from llama_jax.runs.program import on_one_device
from llama_jax.runs.recipe import Recipe
from llama_jax.tokenizers import Tokenizer


def continued(recipe: Recipe, params: Llama, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[str]:
    """The prompts with what comes after them, by process 0; nothing in the others, which take part.

    Args:
      prompts: those of the recipe as tokens.
    """
    if not prompts:
        return []
    gathered = on_one_device(params)
    if gathered is None:
        return []
    new = min(recipe.sample_tokens, recipe.model.max_seq_len - max(map(len, prompts)))
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=recipe.seed % 2**32)
    results = generate(
        recipe.model,
        gathered,
        prompts,
        max_new_tokens=new,
        sampling=sampling,
        stop_tokens=tokenizer.stop_ids,
        compute=Compute(attend=recipe.attend),
    )
    found = []
    for ids, result in zip(prompts, results, strict=True):
        # A padded vocabulary has tokens that stand for nothing, and a young model may choose one.
        known = [token for token in result.tokens if token < tokenizer.vocab_size]
        found.append(tokenizer.decode([*ids, *known]))
    return found
