"""Ragged batches of mixed requests, each row against what it is alone: `python .ci/nightly/ragged_batches.py --help`.

In a batch every row has a prompt, a limit, a seed and sampling parameters of its own, and in half of the batches stop
tokens of its own, which `generate` gives all rows alike. The stop tokens are such as the rows would generate. Of every 125
batches 25 have a cache in int8 and 25 a window with sinks. The model is small, random and in float32, and lengths are such
that few programs are compiled.

Prints one JSON object, and exits with 1 where a row was not token for token what it is alone. A batch is remade from the
seed and its number alone (`--only`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.append(str(Path(__file__).parents[2] / "tests"))

import conftest  # noqa: F401  XLA's settings for tests
import jax
import numpy as np
from conftest import louder

import llama_jax
from llama_jax import CacheOptions, Sampling
from llama_jax.inference import compiled_decode as module
from llama_jax.inference.prepare_inputs import prepare_inputs
from llama_jax.model.forward_options import ComputeOptions, Sharding

ROWS = (3, 8)
LENGTHS = ((1, 16), (33, 64), (257, 330))  # of prompts: each of one program
NEW = 24
BLOCK = 25  # batches with the same kind of cache
CACHES = (*[CacheOptions()] * 3, CacheOptions(dtype="int8"), CacheOptions(window=40, sinks=2))
CHOICES: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 0.5, 1.0, 2.0, 5.0),
    "top_k": (0, 0, 1, 7, 100),
    "top_p": (1.0, 1.0, 0.95, 0.3),
    "min_p": (0.0, 0.0, 0.02, 0.4),
    "repetition_penalty": (1.0, 1.0, 0.8, 1.3),
    "seed": (0, 1, 12345, 2**32 - 1),
}

Model = tuple[llama_jax.LlamaConfig, llama_jax.LlamaParams]


def make_model() -> Model:
    """Random, with logits so sharp that rounding, which differs with the number of rows, chooses no other token."""
    config = replace(llama_jax.preset("stories-260k"), n_layers=2)
    params = llama_jax.init(config, jax.random.key(1))
    return config, louder(params, 8)


def generated(
    model: Model,
    prompts: list[list[int]],
    limits: list[int],
    sampling: Sampling,
    stops: list[list[int]],
    cache: CacheOptions,
) -> list[list[int]]:
    """What `llama_jax.generate` gives for each row, the stop token with it; rows may have stop tokens of their own."""
    if all(stop == stops[0] for stop in stops):
        options = dict(max_new_tokens=limits, sampling=sampling, stop_tokens=stops[0], cache=cache)
        found = llama_jax.generate(*model, prompts, **options)  # type: ignore[arg-type]
        assert all((row.finish_reason == "length") == (len(row.tokens) == n) for row, n in zip(found, limits, strict=True))
        return [row.tokens for row in found]
    tokens, lengths, request = prepare_inputs(model[0], prompts, limits, sampling, [0] * max(map(len, stops)), cache)
    for row, stop in zip(request.stop, stops, strict=True):
        row[:] = [*stop, *[-1] * (len(row) - len(stop))]
    run = module.CompiledDecode(*model, ComputeOptions(), Sharding())
    pieces = list(run.stream(tokens, lengths, request, cache, module.MAX_CHUNKS_PER_CALL))
    ids, valid = (np.concatenate([getattr(piece, name) for piece in pieces], axis=1) for name in ("tokens", "valid"))
    rows = [row[own].tolist() for row, own in zip(ids, valid, strict=True)]
    return [row[:-1] if row[-1] in stop else row for row, stop in zip(rows, stops, strict=True)]


def compare(model: Model, seed: int, number: int) -> dict[str, Any]:
    """One batch: its rows that are not what they are alone, and how much it was."""
    rng = random.Random(f"{seed} {number}")
    batch, longest = rng.choice(ROWS), rng.choice([1, 1, 2, 2, 3])
    prompts = [
        [rng.randrange(model[0].vocab_size) for _ in range(rng.randint(*rng.choice(LENGTHS[:longest])))]
        for _ in range(batch)
    ]
    if rng.random() < 0.3:
        prompts[-1] = list(prompts[0])  # the same prompt with other settings
    limits = [rng.randint(1, NEW) for _ in prompts]
    settings = [{name: rng.choice(values) for name, values in CHOICES.items()} for _ in prompts]
    sampling = Sampling(**{name: [each[name] for each in settings] for name in CHOICES})
    cache = CACHES[number // BLOCK % len(CACHES)]
    stops: list[list[int]] = [[] for _ in prompts]
    way = rng.choice(["none", "all alike", "own", "own"])
    if way != "none":
        likely = sorted({token for row in generated(model, prompts, limits, sampling, stops, cache) for token in row})
        stops = [rng.sample(likely, min(len(likely), rng.randint(1, 4))) for _ in prompts]
        stops = [stops[0]] * batch if way == "all alike" else stops
    together = generated(model, prompts, limits, sampling, stops, cache)
    wrong = []
    for row in range(batch):
        own = Sampling(**settings[row])
        alone = generated(model, [prompts[row]], [limits[row]], own, [stops[row]], cache)[0]
        if alone != together[row]:
            wrong.append({"row": row, "alone": alone, "together": together[row], "settings": settings[row]})
    new = [len(row) for row in together]
    ended = sum(length < limit for length, limit in zip(new, limits, strict=True))
    return {"number": number, "rows": batch, "tokens": sum(new), "stopped": ended, "cache": repr(cache), "wrong": wrong}


def run(numbers: range, seed: int) -> dict[str, Any]:
    """What came of the batches; those with a wrong row one by one."""
    started, model = time.monotonic(), make_model()
    results = [compare(model, seed, number) for number in numbers]
    return {
        "batches": len(results),
        "seed": seed,
        **{name: sum(each[name] for each in results) for name in ("rows", "tokens", "stopped")},
        "seconds": round(time.monotonic() - started, 1),
        "failures": [each for each in results if each["wrong"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time() // 86400), help="by default that of the day")
    parser.add_argument("--only", type=int, help="the batch of this number")
    given = parser.parse_args()
    report = run(range(given.cases) if given.only is None else range(given.only, given.only + 1), given.seed)
    print(json.dumps(report, indent=2))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
