"""Sampling answers from a model in its training layout, as one function to compile."""

from __future__ import annotations

from collections.abc import Callable

from jax.sharding import Mesh

from llama_jax.config import LlamaConfig
from llama_jax.inference.rollouts import Answers, Prompts, RolloutOptions, roll_out
from llama_jax.model.options import Compute
from llama_jax.model.params import Llama
from llama_jax.parallel.serving import layout_to_generate


def sampler(
    config: LlamaConfig, mesh: Mesh, options: RolloutOptions, compute: Compute
) -> Callable[[Llama, Prompts], Answers]:
    """`roll_out` from a model sharded as in training, possibly with adapters or quantised weights."""
    held, layout = layout_to_generate(config, mesh)

    def sample(model: Llama, prompts: Prompts) -> Answers:
        with layout.context():
            fitted = layout.fit(model)
        return roll_out(held, fitted, prompts, options, compute, layout)

    return sample
