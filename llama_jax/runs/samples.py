"""Samples of a model in training: its continuations of the recipe's prompts."""

from __future__ import annotations

from collections.abc import Sequence

from llama_jax.inference.generate import generate
from llama_jax.inference.sampling import Sampling
from llama_jax.model.options import Compute
from llama_jax.model.params import Llama
from llama_jax.runs.program import TrainingProgram
from llama_jax.runs.recipe import Recipe
from llama_jax.tokenizers import Tokenizer


def continued(
    recipe: Recipe, program: TrainingProgram, model: Llama, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> list[str]:
    """The prompts with their continuations, generated in the training layout: all processes take part.

    Args:
      model: as `TrainingProgram.model` gives it.
      prompts: those of the recipe as tokens.
    """
    if not prompts:
        return []
    # Rows are divided over the devices, so the last prompt is repeated up to a multiple of the shares.
    rows = [*prompts, *[prompts[-1]] * (-len(prompts) % program.layout.shares)]
    new = min(recipe.sample_tokens, recipe.model.max_seq_len - max(map(len, prompts)))
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=recipe.seed % 2**32)
    results = generate(
        program.config,
        program.fit(model),
        rows,
        max_new_tokens=new,
        sampling=sampling,
        stop_tokens=tokenizer.stop_ids,
        compute=Compute(attend=recipe.attend),
    )
    found = []
    for ids, result in zip(prompts, results, strict=False):
        # A padded vocabulary has tokens that stand for nothing, and a young model may choose one.
        known = [token for token in result.tokens if token < tokenizer.vocab_size]
        found.append(tokenizer.decode([*ids, *known]))
    return found
