"""The cost of long rows: attention by backend and length, a training step, prefill of a long prompt, decoding after it.

    python experiments/bench_long_context.py [--sections attention step prompt decode] [--lengths 512 2048 ...]

attention: seconds of every backend that runs here, forward and with gradients, for 8 heads of 64 features in float32, and
  the compiler's plan for temporaries in bytes. The definition ("reference") stores several copies of the [8, T, T] scores
  and is omitted if one copy exceeds 4 GB.
step: one training step of the 15M shape with one row and full rematerialization.
prompt: prefilling a prompt in chunks of 512 into a cache with room for all of it, as `generate` does.
decode: tokens/s after a number of tokens with a float32, bfloat16 or int8 cache, and the size of the cache in bytes.

All candidates of a comparison take turns in one process; the figures are medians, so that ratios are meaningful even on a
shared machine. Parameters are random, which does not affect the results. Writes
``experiments/results/bench_long_context_cpu.json`` and prints tables.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from measuring import machine, versions, write_report

from llama_jax import (
    Batch,
    CacheOptions,
    Compute,
    LossOptions,
    OptimizerSettings,
    Sampling,
    StepOptions,
    cache_bytes,
    forward,
    init,
    init_cache,
    init_state,
    make_optimizer,
    preset,
    stream,
    train_step,
)
from llama_jax.inference import decode as states
from llama_jax.inference.compiled_decode import MAX_PREFILL_CHUNK
from llama_jax.inference.prepare_inputs import prepare_inputs
from llama_jax.ops import attend
from llama_jax.ops.attention import AttentionMask, KVView

RESULTS = Path(__file__).parent / "results"
MAX_SCORE_BYTES = 4 * 2**30
HEADS, WIDTH = 8, 64


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    sections: tuple[str, ...] = ("attention", "step", "prompt", "decode")
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 32_768)
    """Lengths for attention."""
    step: int = 16_384
    """Row length of the training step."""
    prompt: int = 100_000
    """Tokens of the prompt."""
    filled: tuple[int, ...] = (4_000, 16_000, 64_000)
    """Tokens in the cache when decoding."""
    turns: int = 7
    shape: str = "stories-15m"
    output: Path = RESULTS / "bench_long_context_cpu.json"


Name = TypeVar("Name", bound=Hashable)


def in_turns(candidates: Mapping[Name, Callable[[], Any]], turns: int) -> dict[Name, list[float]]:
    """Seconds of `turns` interleaved runs of each candidate, after one uncounted run."""
    seconds: dict[Name, list[float]] = {name: [] for name in candidates}
    for turn in range(turns + 1):
        for name, run in candidates.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def temporaries(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def attention(lengths: Sequence[int], turns: int) -> list[dict[str, Any]]:
    rows = []
    for length in lengths:
        shapes = (1, HEADS, length, 1, WIDTH), (1, HEADS, length, WIDTH), (1, HEADS, length, WIDTH)
        arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
        programs = {}
        for backend in ("reference", "dense", "blockwise"):
            if backend != "blockwise" and 4 * HEADS * length**2 > MAX_SCORE_BYTES:
                continue
            mix = partial(_mixed, backend)
            both = jax.grad(lambda q, k, v, mix=mix: jnp.sum(mix(q, k, v) ** 2), argnums=(0, 1, 2))
            for what, function in (("forward", mix), ("with gradients", both)):
                programs[backend, what] = jax.jit(function).lower(*arrays).compile()
        runs = {key: partial(program, *arrays) for key, program in programs.items()}
        seconds = in_turns(runs, turns if length < 8192 else min(turns, 2))
        for (backend, what), program in programs.items():
            taken = seconds[backend, what]
            rows.append(
                {
                    "length": length,
                    "backend": backend,
                    "what": what,
                    "seconds": median(taken),
                    "all_seconds": taken,
                    "temporaries": temporaries(program),
                }
            )
            print(
                f"{length:7,} {backend:10} {what:15} {1e3 * median(taken):10.1f} ms {temporaries(program) / 2**20:8.1f} MiB"
            )
    return rows


def _mixed(backend: Any, queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attention of whole rows."""
    return attend(queries, KVView(keys, values), AttentionMask.causal(keys.shape[2]), scale=WIDTH**-0.5, backend=backend)


def long_config(shape: str, length: int) -> Any:
    """A preset with another maximum length."""
    return replace(preset(shape), max_seq_len=length)


def step(shape: str, length: int) -> dict[str, Any]:
    config = long_config(shape, length)
    optimizer = make_optimizer(OptimizerSettings(clip_norm=0.0), steps=10)
    state = init_state(optimizer, init(config, jax.random.key(0)))
    batch = Batch(jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1)), jnp.int32))
    options = StepOptions(LossOptions(Compute(remat="full")))
    jitted = jax.jit(partial(train_step, config, optimizer, options=options), donate_argnums=0)
    compiled = jitted.lower(state, batch).compile()
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"length": length, "seconds": median(seconds), "temporaries": temporaries(compiled), "peak": peak}
    print(
        f"step of {length:,} tokens: {median(seconds):.1f} s, {temporaries(compiled) / 2**20:.0f} MiB of temporaries,"
        f" peak of the process so far {peak / 1e9:.2f} GB"
    )
    return found


def prompt(shape: str, length: int) -> dict[str, Any]:
    config = long_config(shape, 2 * length)
    params = init(config, jax.random.key(0))
    rows = {}
    for capacity in (8_192, 131_072):
        cache = jax.eval_shape(partial(init_cache, config, 1, capacity))
        piece = jax.ShapeDtypeStruct((1, MAX_PREFILL_CHUNK), jnp.int32)
        jitted = jax.jit(forward, static_argnums=0, donate_argnums=3)
        rows[str(capacity)] = temporaries(jitted.lower(config, params, piece, cache).compile())
    ids = np.random.default_rng(0).integers(0, config.vocab_size, length).tolist()
    began = time.perf_counter()
    next(stream(config, params, [ids], max_new_tokens=1))
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    held = cache_bytes(config, 1, 131_072, jnp.float32)
    sizes = ", ".join(f"{v / 2**20:.1f} MiB with room for {int(k):,}" for k, v in rows.items())
    print(
        f"prompt of {length:,} tokens: {seconds:.1f} s with compiling, {length / seconds:,.0f} tokens/s; temporaries of a"
        f" chunk {sizes}; cache {held / 1e6:.0f} MB,"
        f" peak of the process so far {peak / 1e9:.2f} GB"
    )
    return {"length": length, "seconds": seconds, "temporaries": rows, "cache": held, "peak": peak}


def decode(shape: str, filled: Sequence[int], turns: int) -> list[dict[str, Any]]:
    rows = []
    for length in filled:
        config = long_config(shape, 2 * length)
        capacity = -(-length // 4096) * 4096 + 4096
        held: dict[str, states.DecodeState] = {}
        runs = {}
        for name, dtype, options in (
            ("float32", jnp.float32, CacheOptions()),
            ("float32, int8 cache", jnp.float32, CacheOptions(dtype="int8")),
            ("bfloat16", jnp.bfloat16, CacheOptions()),
            ("bfloat16, int8 cache", jnp.bfloat16, CacheOptions(dtype="int8")),
        ):
            params = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), init(config, jax.random.key(0)))
            asked = prepare_inputs(config, [[1]], length, Sampling(temperature=0.0), ())
            reading = states.init_prefill(config, params, 1, capacity, options)
            state, _ = states.begin_decode(config, params, reading, *asked)
            held[name] = _filled(state, length)
            program = jax.jit(partial(states.decode, config, max_chunks=TURNS), donate_argnums=1)
            runs[name] = partial(_run, program, params, held, name)
        seconds = in_turns(runs, turns)
        for name, taken in seconds.items():
            dtype = jnp.int8 if "int8" in name else jnp.dtype(name)
            size = cache_bytes(config, 1, capacity, dtype)
            rate = TOKENS / median(taken)
            row = {"filled": length, "cache": name, "tokens_per_second": rate, "bytes": size, "all_seconds": taken}
            rows.append(row)
            print(f"decode after {length:7,} {name:22} {rate:8.1f} tokens/s  cache {size / 1e6:7.1f} MB")
    return rows


TURNS = 4
TOKENS = TURNS * states.STEPS_PER_CHUNK


def _run(program: Any, params: Any, held: dict[str, states.DecodeState], name: str) -> jax.Array:
    """Decode TOKENS tokens, always from the same state."""
    state, _, produced = program(params, held[name], jnp.int32(TURNS))
    length = state.cache.length - TOKENS
    held[name] = state.replace(cache=state.cache.replace(length=length), count=state.count * 0, done=state.done & False)
    return produced.tokens


def _filled(state: states.DecodeState, length: int) -> states.DecodeState:
    """The state after `length` tokens, with random keys and values."""

    def noise(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.int8:
            return jax.random.randint(jax.random.key(0), x.shape, -127, 128, jnp.int8)
        return (jax.random.normal(jax.random.key(0), x.shape) * (0.01 if x.ndim == 4 else 1)).astype(x.dtype)

    pages = jax.tree.map(noise, state.cache.pages)
    return state.replace(cache=state.cache.replace(pages=pages, length=jnp.full(1, length, jnp.int32)))


def main(arguments: Arguments) -> None:
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "machine": machine(),
        "versions": versions("jax", "jaxlib"),
        "shape": arguments.shape,
    }
    if "step" in arguments.sections:  # first, because the peak is that of the whole process
        report["step"] = step(arguments.shape, arguments.step)
    if "prompt" in arguments.sections:
        report["prompt"] = prompt(arguments.shape, arguments.prompt)
    if "decode" in arguments.sections:
        report["decode"] = decode(arguments.shape, arguments.filled, arguments.turns)
    if "attention" in arguments.sections:
        report["attention"] = attention(arguments.lengths, arguments.turns)
    write_report(arguments.output, report)
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
