"""The engine: its speed under load, and whether other requests change a request's tokens."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import llama_jax
from gpu_parts.decode import mean_length, step_bytes
from gpu_parts.plan import SMALL_GQA
from gpu_parts.run import Row, Run
from gpu_parts.timing import seconds, spread
from gpu_parts.weights import Weights, laid_out
from llama_jax.serving.engine import Engine
from llama_jax.serving.requests import GenerationRequest

Tokens = list[tuple[int, float]]  # ids and log-probabilities


def serving(run: Run) -> Iterator[Row]:
    """Compare requests alone and together, with and without exact; then time requests that arrive at once."""
    for exact in (False, True):
        yield run.attempt({"check": "alone and together", "exact": exact}, lambda exact=exact: compare(run, exact))
    for shape in run.plan.served_shapes:
        weights = Weights(run.plan.shapes[shape])
        for requests in (1, run.plan.served_rows):
            case = {"shape": shape, "requests": requests}
            yield run.attempt(case, lambda weights=weights, requests=requests: measure(run, weights, requests))


def answers(engine: Engine, prompts: list[list[int]], new_tokens: int) -> list[Tokens]:
    """Tokens of all prompts, requested at once."""
    received: list[Tokens] = [[] for _ in prompts]
    for prompt, into in zip(prompts, received, strict=True):
        take = lambda update, into=into: into.extend((token.id, token.logprob) for token in update.tokens)
        engine.submit(GenerationRequest(prompt=prompt, max_new_tokens=new_tokens), take)
    while engine.step():
        pass
    return received


def random_prompts(config: llama_jax.LlamaConfig, lengths: list[int]) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, config.vocab_size, length).tolist() for length in lengths]


def compare(run: Run, exact: bool) -> Row:
    """Count requests with other tokens, or other bits of log-probabilities, if others are served at the same time."""
    params = laid_out(jax.jit(llama_jax.init, static_argnums=(0, 2))(SMALL_GQA, jax.random.key(0), jnp.bfloat16))
    compute = llama_jax.ComputeOptions(exact=exact)
    options = llama_jax.EngineOptions(rows=16, context=512, compute=compute, prefix_bytes=0)
    engine = Engine(SMALL_GQA, params, options)
    prompts = random_prompts(SMALL_GQA, [1 + 17 * i % 300 for i in range(run.plan.compared_requests)])
    try:
        alone = [answers(engine, [prompt], 16)[0] for prompt in prompts]
        together = answers(engine, prompts, 16)
    finally:
        engine.close()
    offline = [
        list(zip(row.tokens, row.logprobs, strict=True))
        for row in llama_jax.generate(SMALL_GQA, params, prompts, max_new_tokens=16, compute=compute)
    ]
    ids = lambda rows: [[token for token, _ in row] for row in rows]
    other = lambda mine, theirs: sum(a != b for a, b in zip(mine, theirs, strict=True))
    row = {
        "requests": len(prompts),
        "other_tokens": other(ids(alone), ids(together)),
        "other_bits": other(alone, together),
        "generate_other_tokens": other(ids(alone), ids(offline)),
        "generate_other_bits": other(alone, offline),
    }
    return row | ({"ok": not row["other_bits"] and not row["generate_other_bits"]} if exact else {})


def measure(run: Run, weights: Weights, requests: int) -> Row:
    """Tokens/s of requests that arrive at once, including their prefill."""
    plan, config = run.plan, weights.config
    options = llama_jax.EngineOptions(rows=plan.served_rows, context=plan.capacity, prefix_bytes=0)
    engine = Engine(config, weights.made(), options)
    try:
        warm_seconds = engine.warm()
        prompts = random_prompts(config, [plan.prompt_tokens] * requests)
        times = seconds(lambda: answers(engine, prompts, plan.new_tokens), plan.repetitions)
    finally:
        engine.close()
    taken = statistics.median(times)
    step, read = taken / plan.new_tokens, step_bytes(config, weights.made(), requests, mean_length(plan))
    copy = run.found("yardsticks", "value", name="copy")
    return {
        "tokens_per_s": requests / step,
        "ms_per_token": 1e3 * step,
        **({} if copy is None else {"share_of_copy": read / step / 1e9 / copy}),
        "spread": spread(times),
        "warm_s": warm_seconds,
    }
