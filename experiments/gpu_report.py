"""Correctness and speed on this machine's accelerator, as one JSON file and one table, in under 8 minutes.

    python experiments/gpu_report.py                                  (PYTHONPATH=. where the package is not installed)
    python experiments/gpu_report.py --sections yardsticks decode

Sections, in the order of their worth, because the time limit cuts from the end:
  training          the library's train step in bfloat16 with AdamW, by ways to rematerialise and batches; one process per
                    shape, and first, for it needs nearly all of the device's memory
  yardsticks        what the device itself can do: copy and read bandwidth, bfloat16 matrix rate
  correctness       a small model against the CPU in float32 and bfloat16; generation against repeated `logits`
  decode            greedy tokens/s of the library's compiled decode loop, random bfloat16 weights made on the device
  prefill           tokens/s of the library's compiled prefill
  programs          those of compile_report that are of one device: the plan of the compiler, with and without the device,
                    and beside it what is measured
  attention         every backend that the device has, forward and backward, from short to long; the shortest against the
                    reference in float32
  transformers      its decode with a static cache, compiled to CUDA graphs where there is a GPU; one process per shape
  compiler_options  decode compiled with XLA options that may matter on a GPU

Beside other sections training has at most TRAINING_SHARE of the time, divided among its shapes: each measures as many of its
candidates as that allows, the least memory first. With `--sections training` alone it has all, to choose by. Attention has
ATTENTION_SHARE in the same way, the shortest first. What runs out of time elsewhere is cut in the order compiler_options,
transformers, attention, programs, prefill, decode.

Later work adds a function to SECTIONS: it takes the `Run` and gives rows, plain dicts, one by one. Without an accelerator
the same code runs small shapes, so that it is always tested; they lie in the CPU's caches and their shares mean nothing.
The JSON is written anew after every row: a run that is killed leaves what it had. The exit code is 1 if anything failed,
and 0 if measurements were only skipped.
"""

from __future__ import annotations

import datetime
import functools
import gc
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Read when JAX's backend starts: it would otherwise take most of the GPU's memory, and torch, in its own process, would
# find none left.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from measuring import versions, write_report

import llama_jax
from llama_jax import ops
from llama_jax.analysis.hardware import find_hardware
from llama_jax.checkpoints.huggingface_config import config_from_dict, config_to_dict
from llama_jax.errors import ConfigError
from llama_jax.inference import generate as library
from llama_jax.inference.state import CHUNK, Request, State
from llama_jax.ops.attention import Seen, View
from llama_jax.training import flops

Row = dict[str, Any]
Section = Callable[["Run"], Iterable[Row]]

GOAL_SHAPE, GOAL_SHARE = "llama-2-7b", 0.85
TRAINING_GOAL = 0.5  # of the published peak
TRAINING_SHARE = 0.4  # of the time limit
ATTENTION_SHARE = 0.2
FORMULAS = {
    "copy": "2 * bytes / seconds of `x + 1`: every byte is read once and written once",
    "read": "bytes / seconds of `sum(x)`",
    "matrix": "2 * n**3 / seconds of a bfloat16 product with a float32 result",
    "gb_per_step": "weights (the embedding table only where it is also the head) and the whole capacity of the cache",
    "share_of_copy": "gb_per_step / seconds per step / copy bandwidth",
    "tflop": "2 * layer parameters * tokens + 2 * L * N * H * B * T**2 for the causal half of attention; no head",
    "share_of_matrix": "tflop / seconds / matrix rate",
    "attention_tflop": "2 * N * H * B * T**2 forward: two products, of which causality needs half; 3.5 times that with"
    " backward, which has five, the scores again among them (Dao 2023, section 4.1)",
    "tflop_per_step": flops.FORMULA,
    "mfu": "tflop_per_step / seconds per step / the device's published dense bfloat16 rate (llama_jax/analysis/hardware.py)",
    "mfu_of_matrix": "tflop_per_step / seconds per step / matrix_tflops, measured as `matrix` in the same process",
    "plan_gb": "XLA's plan of the step: arguments, results that are not updated in place, and temporaries",
    "peak_gb": "the allocator's peak of the process, where this candidate raised it",
    "spread": "(slowest - fastest) / median of the repetitions",
}


@dataclass(frozen=True)
class Arguments:
    """Check and measure llama_jax on the default device."""

    sections: tuple[str, ...] = ()
    """Sections to run, all when none is named. The file then holds only these."""
    time_limit: float = 460.0
    """Seconds; a measurement that might not end within them is not started."""
    output_folder: Path = Path("experiments/results")
    device_json: str = ""
    """File name in the output folder; by default gpu_report_<device kind>.json."""


@dataclass(frozen=True)
class Training:
    """A shape to train, and the candidates to choose from."""

    shape: str
    length: int
    candidates: tuple[tuple[str, int], ...]
    """(what is rematerialised, rows), the least memory first: after one that does not fit none is tried."""
    parameters: str = "float32"
    """The dtype of parameters, gradients and moments: 16 bytes for each parameter in float32, 8 in bfloat16."""


@dataclass(frozen=True)
class Heads:
    """The shape of attention, and the lengths to measure it at, the shortest first."""

    lengths: tuple[int, ...]
    queries: int
    keys: int
    width: int
    batch: int = 1


@dataclass(frozen=True)
class Plan:
    """The sizes to measure with."""

    shapes: dict[str, llama_jax.LlamaConfig]
    trainings: tuple[Training, ...]
    decode_batches: tuple[int, ...]
    prefills: tuple[tuple[int, int], ...]  # (rows, tokens of each)
    heads: Heads  # for attention
    peer_shapes: tuple[str, ...]  # for transformers
    options_shape: str  # for the compiler options
    repetitions: int
    new_tokens: int
    copy_bytes: int
    matrix_size: int
    small_programs: bool = False
    capacity: int = 256
    prompt_tokens: int = 64


# The shape of the goal comes first, should the time run out.
LARGE = Plan(
    shapes={name: llama_jax.preset(name) for name in (GOAL_SHAPE, "tinyllama-1.1b", "llama-3-8b")},
    decode_batches=(1, 64),
    prefills=((1, 512), (64, 128)),
    # In float32 the states take 18 and 108 GB. Scores of attention, [rows, heads, 2048, 2048], are the largest of the rest.
    trainings=(
        Training(GOAL_SHAPE, 2048, (("full", 1), ("full", 2), ("dots", 2), ("full", 4))),
        Training("tinyllama-1.1b", 2048, (("full", 8), ("dots", 8), ("none", 2), ("dots", 16), ("full", 32))),
        Training(GOAL_SHAPE, 2048, (("full", 4), ("dots", 4), ("full", 8)), parameters="bfloat16"),
    ),
    heads=Heads((2048, 4096, 8192, 16384, 32768), queries=32, keys=8, width=128),  # those of llama-3-8b
    peer_shapes=(GOAL_SHAPE, "tinyllama-1.1b"),
    options_shape="tinyllama-1.1b",
    repetitions=5,
    new_tokens=64,
    copy_bytes=1 << 32,
    matrix_size=8192,
)
SMALL_GQA = llama_jax.LlamaConfig(
    vocab_size=1000,
    dim=256,
    n_layers=2,
    n_heads=8,
    n_kv_heads=2,
    hidden_dim=704,
    max_seq_len=512,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_embeddings=False,
)
SMALL = Plan(
    shapes={"stories-260k": llama_jax.preset("stories-260k"), "small-gqa": SMALL_GQA},
    decode_batches=(1, 4),
    prefills=((1, 64), (4, 32)),
    trainings=(
        Training("stories-260k", 32, (("full", 2),)),
        Training("stories-260k", 32, (("dots", 2),), parameters="bfloat16"),
    ),
    heads=Heads((64, 96), queries=4, keys=2, width=16),
    peer_shapes=("small-gqa",),
    options_shape="small-gqa",
    repetitions=3,
    new_tokens=16,
    copy_bytes=1 << 26,
    matrix_size=512,
    small_programs=True,
)


@dataclass
class Run:
    """What every section is given: the device, the sizes, the time left and what has been found so far."""

    device: jax.Device
    plan: Plan
    time_limit: float
    results: dict[str, list[Row]] = field(default_factory=dict)
    start: float = field(default_factory=time.monotonic)
    longest: float = 0.0
    alone: bool = False  # whether there is only one section to run

    def time_left(self) -> float:
        return self.time_limit - (time.monotonic() - self.start)

    def attempt(self, row: Row, measure: Callable[[], Row]) -> Row:
        """`row` and what `measure` gives; or why it gives nothing, so that one failure does not cost the other rows.

        Nothing can be interrupted once it has started: a measurement is skipped unless the longest so far would still fit.
        """
        if self.time_left() <= self.longest:
            return row | {"skipped": "time limit"}
        start = time.monotonic()
        try:
            return row | measure()
        except Exception as error:
            return row | {"error": describe(error)}
        finally:
            self.longest = max(self.longest, time.monotonic() - start)

    def found(self, section: str, key: str, **where: Any) -> float | None:
        """The value of `key` in the first row of `section` that has it and matches, or None."""
        for row in self.results.get(section, []):
            if key in row and all(row.get(name) == value for name, value in where.items()):
                return row[key]
        return None


# Yardsticks


def yardsticks(run: Run) -> Iterator[Row]:
    """What the device can do with the simplest programs: every share below is a share of these."""
    repetitions = run.plan.repetitions
    increment, total = jax.jit(lambda x: x + 1), jax.jit(jnp.sum)

    def bandwidth(program: Callable, size: int, passes: int) -> float:
        x = jnp.zeros(size // 4, jnp.float32)
        return passes * size / statistics.median(seconds(lambda: program(x), repetitions, calls=10)) / 1e9

    # The best of two sizes: neither is known to be the better one on every device.
    sizes = (run.plan.copy_bytes // 4, run.plan.copy_bytes)
    yield run.attempt(
        {"name": "copy", "unit": "GB/s"}, lambda: {"value": max(bandwidth(increment, size, 2) for size in sizes)}
    )
    yield run.attempt({"name": "read", "unit": "GB/s"}, lambda: {"value": max(bandwidth(total, size, 1) for size in sizes)})
    yield run.attempt(
        {"name": "matrix bf16", "unit": "TFLOP/s"}, lambda: {"value": matrix_rate(run.plan.matrix_size, repetitions)}
    )


def matrix_rate(n: int, repetitions: int) -> float:
    """TFLOP/s of a square bfloat16 product."""
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    return 2 * n**3 / statistics.median(seconds(lambda: product(a, b), repetitions, calls=10)) / 1e12


def seconds(program: Callable[[], Any], repetitions: int, calls: int = 1) -> list[float]:
    """Seconds per call of each repetition. `calls` are queued at once, which hides the cost of launching them."""
    jax.block_until_ready(program())
    found = []
    for _ in range(repetitions):
        start = time.perf_counter()
        for _ in range(calls):
            result = program()
        jax.block_until_ready(result)
        found.append((time.perf_counter() - start) / calls)
    return found


def spread(times: list[float]) -> float:
    return (max(times) - min(times)) / statistics.median(times)


# Correctness

CHECK_TOKENS = (4, 48)
FLOAT32_TOLERANCE = 1e-4  # of the largest logit
# bfloat16 rounds every product to 8 bits, about 0.4 %: four layers of that stay within a few percent of the largest logit.
BFLOAT16_TOLERANCE = 0.05
BFLOAT16_AGREEMENT = 0.9  # of the positions; random weights have many near ties


def correctness(run: Run) -> Iterator[Row]:
    """Both ways to run the layers on this device against scanned layers on the CPU, and `generate` against `logits`.

    Where the device is the CPU this still compares unrolled with scanned layers and bfloat16 with float32.
    """
    cpu, config = jax.devices("cpu")[0], SMALL_GQA

    @functools.cache  # made by the first check and not before: with no time left nothing is
    def params(dtype: jnp.dtype) -> llama_jax.Llama:
        with jax.default_device(cpu):
            return jax.jit(llama_jax.init, static_argnums=(0, 2))(config, jax.random.key(0), dtype)

    tokens = np.random.default_rng(0).integers(0, config.vocab_size, CHECK_TOKENS, dtype=np.int32)
    program = jax.jit(llama_jax.logits, static_argnums=0)

    def on(device: jax.Device, params: llama_jax.Llama) -> np.ndarray:
        return np.asarray(program(config, jax.device_put(params, device), jax.device_put(tokens, device)))

    def float32(driver: str) -> Row:
        # A GPU would otherwise multiply float32 matrices in TensorFloat-32.
        with jax.default_matmul_precision("highest"):
            expected, got = on(cpu, params(jnp.float32)), on(run.device, arranged(params(jnp.float32), driver))
        return compared(got, expected, FLOAT32_TOLERANCE)

    def bfloat16(driver: str) -> Row:
        with jax.default_matmul_precision("highest"):
            expected = on(cpu, jax.tree.map(lambda x: x.astype(jnp.float32), params(jnp.bfloat16)))
        row = compared(on(run.device, arranged(params(jnp.bfloat16), driver)), expected, BFLOAT16_TOLERANCE)
        row["ok"] = row["ok"] and row["top1_agreement"] >= BFLOAT16_AGREEMENT
        theirs = compared(on(cpu, params(jnp.bfloat16)), expected, BFLOAT16_TOLERANCE)
        return row | {"cpu_max_abs_diff": theirs["max_abs_diff"]}

    def greedy(driver: str) -> Row:
        with jax.default_matmul_precision("highest"):
            here = jax.device_put(arranged(params(jnp.float32), driver), run.device)
            return greedy_agreement(config, here, [tokens[0, :5].tolist(), tokens[1, :11].tolist()])

    for check, name in ((float32, "float32 logits"), (bfloat16, "bfloat16 logits"), (greedy, "float32 greedy tokens")):
        for driver in ("scanned", "unrolled"):
            yield run.attempt({"check": name, "layers": driver}, lambda check=check, driver=driver: check(driver))


def arranged(params: llama_jax.Llama, driver: str) -> llama_jax.Llama:
    """The parameters in the form that makes `forward` scan over the layers, or unroll them."""
    return llama_jax.unstack(params) if driver == "unrolled" else llama_jax.stack(params)


def compared(got: np.ndarray, expected: np.ndarray, tolerance: float) -> Row:
    """How far two sets of logits [B, T, V] are apart; `tolerance` is a share of the largest expected one."""
    difference, scale = np.abs(got - expected).max(), np.abs(expected).max()
    return {
        "ok": bool(difference <= tolerance * scale),
        "max_abs_diff": number(difference),
        "allowed": number(tolerance * scale),
        "max_abs_logit": number(scale),
        "top1_agreement": float((got.argmax(-1) == expected.argmax(-1)).mean()),
    }


def greedy_agreement(
    config: llama_jax.LlamaConfig, params: llama_jax.Llama, prompts: list[list[int]], new_tokens: int = 16
) -> Row:
    """Whether `generate` gives the tokens that the argmax of `logits` over the growing sequence gives."""
    program = jax.jit(llama_jax.logits, static_argnums=0)
    # Padded to one length, so that there is one program: what follows a position cannot change it.
    padded = np.zeros((len(prompts), max(map(len, prompts)) + new_tokens), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    rows, ends = np.arange(len(prompts)), np.array([len(prompt) for prompt in prompts])
    for step in range(new_tokens):
        best = np.asarray(program(config, params, padded)).argmax(-1)
        padded[rows, ends + step] = best[rows, ends + step - 1]
    expected = [padded[i, end : end + new_tokens].tolist() for i, end in enumerate(ends)]
    got = [row.tokens for row in llama_jax.generate(config, params, prompts, max_new_tokens=new_tokens)]
    same = [a == b for mine, theirs in zip(got, expected, strict=True) for a, b in zip(mine, theirs, strict=True)]
    return {"ok": all(same), "top1_agreement": sum(same) / len(same)}


# Speed of the library


def decode(run: Run) -> Iterator[Row]:
    cases = [{"batch": batch} for batch in run.plan.decode_batches]
    yield from for_every_shape(run, cases, measure_decode)


def prefill(run: Run) -> Iterator[Row]:
    cases = [{"batch": batch, "tokens": tokens} for batch, tokens in run.plan.prefills]
    yield from for_every_shape(run, cases, measure_prefill)


class Weights:
    """Random bfloat16 weights of one shape, made on the device when first asked for, scanned before unrolled.

    Unstacking copies, and the stack is freed after it: at most two copies of the weights exist, and later only one.
    """

    def __init__(self, config: llama_jax.LlamaConfig):
        self.config = config
        self.params: llama_jax.Llama | None = None

    def for_layers(self, driver: str) -> llama_jax.Llama:
        if self.params is None:
            make = jax.jit(llama_jax.init, static_argnums=(0, 2))
            self.params = jax.block_until_ready(make(self.config, jax.random.key(0), jnp.bfloat16))
        if driver == "unrolled":
            self.params = jax.block_until_ready(llama_jax.unstack(self.params))
        return self.params


def for_every_shape(run: Run, cases: list[Row], measure: Callable[..., Row]) -> Iterator[Row]:
    """A row for every shape, way to run the layers, and case."""
    for shape, config in run.plan.shapes.items():
        weights = Weights(config)
        for driver in ("scanned", "unrolled"):
            for case in cases:
                row = {"shape": shape, "layers": driver, **case}
                if not fits(run.device, config):
                    yield row | {"skipped": "two copies of the weights do not fit into the device's memory"}
                    continue
                yield run.attempt(
                    row,
                    lambda weights=weights, driver=driver, case=case: measure(
                        run, weights.config, weights.for_layers(driver), **case
                    ),
                )


def fits(device: jax.Device, config: llama_jax.LlamaConfig) -> bool:
    limit = memory_limit(device)
    return limit is None or 2 * 2 * llama_jax.parameter_count(config) < limit


def measure_decode(
    run: Run,
    config: llama_jax.LlamaConfig,
    params: llama_jax.Llama,
    batch: int,
    compiler_options: dict[str, Any] | None = None,
) -> Row:
    """Time `new_tokens` steps of the library's own decode loop."""
    plan = run.plan
    state = decode_state(plan, config, params, batch)
    most = plan.new_tokens // CHUNK
    lowered = library._decode_for(jax.default_backend()).lower(config, params, state, np.int32(most), most)
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=compiler_options or {})
    compile_seconds = time.perf_counter() - start

    times = []
    for _ in range(plan.repetitions + 1):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state, packed = jax.block_until_ready(compiled(params, state, np.int32(most)))
        times.append((time.perf_counter() - start) / plan.new_tokens)
        _, _, taken = library.unpack(packed)
        assert taken == most, "the decode loop ended early"
        state = state.replace(cache=state.cache.replace(length=jnp.full(batch, plan.prompt_tokens, jnp.int32)))
    times = times[1:]  # the first loads the program

    step, read = statistics.median(times), step_bytes(config, batch, plan.capacity)
    copy = run.found("yardsticks", "value", name="copy")
    return {
        "ms_per_step": 1e3 * step,
        "tokens_per_s": batch / step,
        "gb_per_step": read / 1e9,
        **({} if copy is None else {"share_of_copy": read / step / 1e9 / copy}),
        "spread": spread(times),
        "compile_s": compile_seconds,
        **temporary_memory(compiled),
    }


def decode_state(plan: Plan, config: llama_jax.LlamaConfig, params: llama_jax.Llama, batch: int) -> State:
    """What `generate` has after a prompt, without compiling a prefill for it: the speed does not depend on the values.

    The cache holds noise and not zeros, with which a chip draws less power and may clock higher.
    """
    stacked = not isinstance(params.blocks, tuple)
    cache = llama_jax.init_cache(config, batch, plan.capacity, params.embedding.dtype, stacked=stacked)
    noise = jax.jit(lambda key, like: jax.random.normal(key, like.shape, like.dtype))
    k, v = jax.tree.map(lambda buffer: noise(jax.random.key(0), buffer), (cache.k, cache.v))
    limit = np.full(batch, 1 << 30, np.int32)  # never reached: every repetition does the same work
    return State(
        cache=cache.replace(k=k, v=v, length=jnp.full(batch, plan.prompt_tokens, jnp.int32)),
        request=Request(llama_jax.Sampling().per_row(batch), limit, np.full((batch, 4), -1, np.int32)),
        token=jnp.ones(batch, jnp.int32),
        seen=jnp.zeros((batch, config.vocab_size), bool),
        count=jnp.ones(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
    )


def step_bytes(config: llama_jax.LlamaConfig, batch: int, capacity: int) -> int:
    """What one decode step has to read, in bfloat16."""
    lookup_only = 0 if config.tie_embeddings else config.vocab_size * config.dim
    weights = 2 * (llama_jax.parameter_count(config) - lookup_only)
    return weights + llama_jax.cache_bytes(config, batch, capacity, jnp.bfloat16)


def measure_prefill(run: Run, config: llama_jax.LlamaConfig, params: llama_jax.Llama, batch: int, tokens: int) -> Row:
    """Time the library's own reading of a prompt into an empty cache."""
    reading = library._empty_reading(config, params, batch, tokens)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (batch, tokens), dtype=np.int32))
    lengths = jnp.full(batch, tokens, jnp.int32)
    places = llama_jax.Places(lengths, rope_lengths=lengths)
    lowered = library._read.lower(config, params, reading, ids, places)
    start = time.perf_counter()
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - start

    times = []
    for _ in range(run.plan.repetitions + 1):
        empty = reading.cache.replace(length=jnp.zeros(batch, jnp.int32), fresh=True)
        reading = jax.block_until_ready(reading._replace(cache=empty))
        start = time.perf_counter()
        reading = jax.block_until_ready(compiled(params, reading, ids, places))
        times.append(time.perf_counter() - start)
    times = times[1:]

    taken, flop = statistics.median(times), prefill_flop(config, batch, tokens)
    rate = run.found("yardsticks", "value", name="matrix bf16")
    return {
        "ms": 1e3 * taken,
        "tokens_per_s": batch * tokens / taken,
        "tflop": flop / 1e12,
        **({} if rate is None else {"share_of_matrix": flop / taken / 1e12 / rate}),
        "spread": spread(times),
        "compile_s": compile_seconds,
        **temporary_memory(compiled),
    }


def prefill_flop(config: llama_jax.LlamaConfig, batch: int, tokens: int) -> int:
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * config.dim
    layers = llama_jax.parameter_count(config) - tables
    attention = 2 * config.n_layers * config.n_heads * config.head_dim * batch * tokens**2
    return 2 * layers * batch * tokens + attention


def temporary_memory(compiled: Any) -> Row:
    """Megabytes that the program needs beside its arguments and results: copies of weights or cache show here."""
    analysis = compiled.memory_analysis()
    return {} if analysis is None else {"temp_mb": analysis.temp_size_in_bytes / 1e6}


# Attention

BACKENDS = ("cudnn", "splash", "blockwise", "rows", "reference")
PASSES = ("forward", "forward and backward")
ATTENTION_TOLERANCE = 0.03  # of the largest number: bfloat16 rounds queries, weights and results to 8 bits
MEASURED_SECONDS = 0.05  # that the calls of one repetition take together, so that launching them is not measured


def attention(run: Run) -> Iterator[Row]:
    """Every backend at every length, by itself: a row of each layer of a Llama with these heads."""
    share = 1.0 if run.alone else ATTENTION_SHARE
    end = time.monotonic() + min(share * run.time_limit, run.time_left())
    ended: set[tuple[str, str]] = set()  # what did not fit: nothing longer will
    refused: set[str] = set()
    for tokens in run.plan.heads.lengths:
        for backend in BACKENDS:
            for direction in PASSES:
                if backend in refused:
                    continue
                row = {"backend": backend, "tokens": tokens, "pass": direction}
                if time.monotonic() >= end:
                    yield row | {"skipped": "time limit"}
                    continue
                if (backend, direction) in ended:
                    yield row | {"skipped": "less did not fit"}
                    continue
                row = run.attempt(
                    row,
                    lambda backend=backend, tokens=tokens, direction=direction: measure_attention(
                        run, backend, tokens, direction
                    ),
                )
                if "RESOURCE_EXHAUSTED" in row.get("error", ""):
                    row["does_not_fit"] = row.pop("error")
                if "does_not_fit" in row:
                    ended.add((backend, direction))
                if "refused" in row:
                    refused.add(backend)
                    row = {"backend": backend, "refused": row["refused"]}
                yield row


def measure_attention(run: Run, backend: str, tokens: int, direction: str) -> Row:
    """Time, memory and share of the matrix rate; at the shortest length also how far it is from the reference."""
    heads = run.plan.heads
    shapes = attention_shapes(heads, tokens)[: 3 if direction == PASSES[0] else 4]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = jax.jit(functools.partial(attend, backend, heads.width))
    try:
        lowered = program.lower(*arguments)
    except ConfigError as error:
        return {"refused": str(error)}
    start = time.perf_counter()
    compiled = lowered.compile()
    known = {"compile_s": time.perf_counter() - start, **temporary_memory(compiled)}
    plan, limit = compiled.memory_analysis(), memory_limit(run.device)
    if plan is not None and limit is not None:
        planned = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
        if planned > limit:
            return known | {"does_not_fit": f"the plan is {planned / 1e9:.1f} GB, the device gives {limit / 1e9:.1f}"}
    arrays = attention_arrays(arguments)
    jax.block_until_ready(compiled(*arrays))
    once = max(seconds(lambda: compiled(*arrays), 1)[0], 1e-6)
    calls = int(np.clip(MEASURED_SECONDS / once, 1, 50))
    times = seconds(lambda: compiled(*arrays), run.plan.repetitions, calls)
    taken, flop = statistics.median(times), attention_flop(heads, tokens, direction)
    rate = run.found("yardsticks", "value", name="matrix bf16")
    row = {
        "ms": 1e3 * taken,
        "attention_tflop": flop / 1e12,
        **({} if rate is None else {"share_of_matrix": flop / taken / 1e12 / rate}),
        "spread": spread(times),
        **known,
    }
    if tokens != heads.lengths[0]:
        return row
    return row | against_reference(compiled(*arrays), arrays, heads.width)


def attend(
    backend: str, width: int, queries: jax.Array, keys: jax.Array, values: jax.Array, of_mixed: jax.Array | None = None
) -> Any:
    """What attention gives, and with `of_mixed`, the gradient of that, also those of its arguments."""

    def program(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        whole = Seen.whole(keys.shape[2])
        return ops.attend(queries, View.of(keys, values), whole, scale=width**-0.5, backend=backend)

    if of_mixed is None:
        return program(queries, keys, values)
    mixed, backward = jax.vjp(program, queries, keys, values)
    return mixed, *backward(of_mixed)


def attention_shapes(heads: Heads, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Of queries, keys, values, and the gradient of the result."""
    rows = (heads.batch, heads.keys, tokens)
    of_queries = (*rows, heads.queries // heads.keys, heads.width)
    return of_queries, (*rows, heads.width), (*rows, heads.width), of_queries


def attention_arrays(arguments: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Noise: with zeros a chip draws less power and may clock higher."""
    noise = jax.jit(lambda key, like: jax.random.normal(key, like.shape, like.dtype), static_argnums=1)
    return [noise(jax.random.key(i), argument) for i, argument in enumerate(arguments)]


def attention_flop(heads: Heads, tokens: int, direction: str) -> float:
    forward = 2 * heads.queries * heads.width * heads.batch * tokens**2
    return forward * (1.0 if direction == PASSES[0] else 3.5)


def against_reference(got: Any, arrays: list[jax.Array], width: int) -> Row:
    """How far results are from the reference in float32, as a share of the largest number of each."""
    wide = [array.astype(jnp.float32) for array in arrays]
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(attend, "reference", width))(*wide)
    apart = [
        float(jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b)))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    ]
    return {"ok": max(apart) <= ATTENTION_TOLERANCE, "max_diff": number(max(apart))}  # nan is not within any tolerance


# Training

TRAINING_WORKER = "--training-worker"


def training(run: Run) -> Iterator[Row]:
    """Every candidate of every shape, a process per shape: what the allocator has taken goes back with it."""
    if run.device.platform not in ("cpu", "gpu"):
        yield {"skipped": "a second process cannot use the device"}
        return
    share = 1.0 if run.alone else TRAINING_SHARE
    end = time.monotonic() + min(share * run.time_limit, run.time_left())
    for i, case in enumerate(run.plan.trainings):
        left = (end - time.monotonic()) / (len(run.plan.trainings) - i)
        row = {"shape": case.shape, "parameters": case.parameters, "length": case.length}
        if left <= 0:
            yield row | {"skipped": "time limit"}
            continue
        yield from train_in_a_process(run, case, row, left)


def train_in_a_process(run: Run, case: Training, row: Row, time_limit: float) -> Iterator[Row]:
    """The rows that a worker prints. What was finished before it died or ran out of time counts."""
    request = {
        "settings": config_to_dict(run.plan.shapes[case.shape]),
        "row": row,
        "candidates": case.candidates,
        "repetitions": run.plan.repetitions,
        "matrix_size": run.plan.matrix_size,
        "time_limit": time_limit,
    }
    # One piece of memory from the beginning: what grows by pieces is too scattered for the largest arrays.
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    command = [sys.executable, __file__, TRAINING_WORKER, json.dumps(request)]
    ended = None
    try:
        worker = subprocess.run(
            command, capture_output=True, text=True, timeout=max(time_limit, 1.0), env={**os.environ, **memory}
        )
        printed = worker.stdout
        if worker.returncode:
            ended = {"error": f"the worker ended with {worker.returncode}: {worker.stderr.strip()[-400:]}"}
    except subprocess.TimeoutExpired as late:
        printed = (late.stdout or b"").decode()
        ended = {"skipped": "time limit"}
    for line in printed.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("}\n"):  # others may print too, and the last line may be cut
            yield json.loads(line)
    if ended:
        yield row | ended


def training_worker(
    settings: dict[str, Any],
    row: Row,
    candidates: list[tuple[str, int]],
    repetitions: int,
    matrix_size: int,
    time_limit: float,
) -> Iterator[Row]:
    """A row for every candidate."""
    config = config_from_dict(settings)
    run = Run(jax.devices()[0], SMALL, time_limit)
    rate = functools.cache(lambda: matrix_rate(matrix_size, repetitions))
    fits = True
    for remat, batch in candidates:
        case = row | {"remat": remat, "batch": batch}
        if not fits:
            yield case | {"skipped": "less did not fit"}
            continue
        gc.collect()  # what failed may lie in a cycle with its traceback, arrays and all
        measure = functools.partial(measure_training, config, row["parameters"], row["length"], remat, batch, repetitions)
        case = run.attempt(case, lambda measure=measure: measure(rate()))
        if "RESOURCE_EXHAUSTED" in case.get("error", ""):
            case["does_not_fit"] = case.pop("error")
        fits = "does_not_fit" not in case
        yield case


def measure_training(
    config: llama_jax.LlamaConfig, parameters: str, length: int, remat: str, batch: int, repetitions: int, rate: float
) -> Row:
    """Time steps of the library's own train step, one after the other as in a run; `rate` is that of a matrix product."""
    device = jax.devices()[0]
    peak_before = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    settings = llama_jax.OptimizerSettings(learning_rate=1e-4, schedule="constant")
    optimizer = llama_jax.make_optimizer(settings, 1000)
    options = llama_jax.StepOptions(llama_jax.LossOptions(llama_jax.Compute(jnp.bfloat16, remat)))

    def make() -> Any:
        params = llama_jax.init(config, jax.random.key(0), jnp.dtype(parameters))
        return llama_jax.init_state(optimizer, params, dtype=parameters)

    # Compiled before there is a state: the compiler tries kernels out, in the same memory.
    step = jax.jit(functools.partial(llama_jax.train_step, config, optimizer, options=options), donate_argnums=0)
    tokens = llama_jax.Batch(np.random.default_rng(0).integers(0, config.vocab_size, (batch, length + 1), dtype=np.int32))
    lowered = step.lower(jax.eval_shape(make), tokens)
    start = time.perf_counter()
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - start
    plan = compiled.memory_analysis()
    planned = 0
    if plan is not None:
        planned = (
            plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
        )
    known = {"compile_s": compile_seconds, "plan_gb": planned / 1e9}
    limit = memory_limit(device)
    if limit is not None and planned > limit:
        return known | {"does_not_fit": f"the plan is {planned / 1e9:.1f} GB, the device gives {limit / 1e9:.1f}"}

    state = jax.block_until_ready(jax.jit(make)())
    times = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, tokens))
        times.append(time.perf_counter() - start)
    times = times[1:]

    taken, needed = statistics.median(times), flops.step_flops(config, batch, length)
    hardware = find_hardware(device.device_kind)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    loss = float(metrics["loss"])
    return {
        "ok": math.isfinite(loss),
        "ms_per_step": 1e3 * taken,
        "tokens_per_s": batch * length / taken,
        "tflop_per_step": needed / 1e12,
        "mfu": flops.flops_utilization(needed, taken, 1, hardware.flops if hardware else None),
        "mfu_of_matrix": needed / taken / 1e12 / rate,
        "matrix_tflops": rate,
        **known,
        **({"peak_gb": peak / 1e9} if peak > peak_before else {}),
        "loss": number(loss),
        "spread": spread(times),
    }


# transformers beside it

WORKER = "--transformers-worker"


def transformers(run: Run) -> Iterator[Row]:
    """Decode with batch 1, a process per shape: torch's memory goes back and a crash is only a row."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing or run.device.platform not in ("cpu", "gpu"):
        yield {"skipped": f"{missing[0]} is not installed" if missing else "only on a GPU or CPU"}
        return
    for shape in run.plan.peer_shapes:
        yield run.attempt({"shape": shape, "batch": 1}, lambda shape=shape: measure_transformers(run, shape))


def measure_transformers(run: Run, shape: str) -> Row:
    plan, config = run.plan, run.plan.shapes[shape]
    request = {
        "settings": config_to_dict(config),
        "use_gpu": run.device.platform == "gpu",
        **{name: getattr(plan, name) for name in ("capacity", "prompt_tokens", "new_tokens", "repetitions")},
    }
    try:
        worker = subprocess.run(
            [sys.executable, __file__, WORKER, json.dumps(request)], capture_output=True, text=True, timeout=run.time_left()
        )
    except subprocess.TimeoutExpired:
        return {"skipped": "time limit"}
    if worker.returncode:
        raise RuntimeError(f"the worker ended with {worker.returncode}: {worker.stderr.strip()[-400:]}")
    row = json.loads(worker.stdout.splitlines()[-1])
    if "skipped" in row:
        return row
    step, read = row["ms_per_step"] / 1e3, step_bytes(config, 1, plan.capacity)
    copy = run.found("yardsticks", "value", name="copy")
    ours = run.found("decode", "tokens_per_s", shape=shape, layers="unrolled", batch=1)
    return {
        **row,
        **({} if copy is None else {"share_of_copy": read / step / 1e9 / copy}),
        **({} if ours is None else {"llama_jax_over_it": ours / row["tokens_per_s"]}),
    }


def transformers_worker(
    settings: dict[str, Any], use_gpu: bool, capacity: int, prompt_tokens: int, new_tokens: int, repetitions: int
) -> Row:
    """One step at a time with argmax, which is faster than its `generate`; runs in a process that never starts JAX."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    if use_gpu and not torch.cuda.is_available():
        return {"skipped": "this torch has no CUDA"}
    if not use_gpu:
        torch.set_num_threads(1)  # the small shapes gain nothing from more, and lose much where others use the cores
    device = torch.device("cuda" if use_gpu else "cpu")
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
        prompt = torch.randint(0, settings["vocab_size"], (1, prompt_tokens))
    cache = StaticCache(config=model.config, max_cache_len=capacity)

    def next_token(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # transformers 4 reads cache_position, 5 only position_ids.
        out = model(
            tokens,
            position_ids=positions[None],
            cache_position=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1:].argmax(-1)

    # A CUDA graph for the whole step is what makes a step of many small kernels fast.
    step = torch.compile(next_token, mode="reduce-overhead", fullgraph=True) if use_gpu else next_token

    @torch.no_grad()
    def once(steps: int) -> float:
        """Seconds of `steps` steps after a freshly read prompt."""
        cache.reset()
        token = next_token(prompt, torch.arange(prompt_tokens, device=device))
        positions = torch.arange(prompt_tokens, prompt_tokens + steps, device=device)[:, None]
        synchronize()
        start = time.perf_counter()
        for position in positions:
            token = step(token, position).clone()  # a CUDA graph overwrites its result at the next call
        synchronize()
        return time.perf_counter() - start

    def synchronize() -> None:
        if use_gpu:
            torch.cuda.synchronize()

    compile_seconds = once(4)  # traced, compiled, and recorded as a graph at the calls after
    times = [once(new_tokens) / new_tokens for _ in range(repetitions + 1)][1:]
    taken = statistics.median(times)
    return {
        "ms_per_step": 1e3 * taken,
        "tokens_per_s": 1 / taken,
        "spread": spread(times),
        "compile_s": compile_seconds,
        "compiled": use_gpu,
    }


# The programs of the compile report


def programs(run: Run) -> Iterator[Row]:
    """What compilers foretell of a program, and what it does."""
    beside = sibling("device_programs")
    hardware = None if run.plan.small_programs else beside.hardware_of(run.device)
    for case in beside.cases_of(hardware):
        row = {"program": case.name, "batch": case.batch, "length": case.length}
        row |= beside.foretold(case, hardware, Path(__file__).parent / "results")
        gc.collect()
        row = run.attempt(row, lambda case=case: beside.measure(case, run.device, run.plan.repetitions))
        if "RESOURCE_EXHAUSTED" in row.get("error", ""):
            row["does_not_fit"] = row.pop("error")
        yield row


def sibling(name: str) -> Any:
    """The experiment of that name, wherever this one was started from."""
    folder = str(Path(__file__).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


# XLA options

# By that name in XLA's debug options. A list replaces the default one, and "+WHILE" is understood only in XLA_FLAGS.
COMMAND_BUFFER = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL"
COMPILER_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"xla_gpu_enable_command_buffer": f"{COMMAND_BUFFER},WHILE"},
    {"xla_gpu_enable_command_buffer": f"{COMMAND_BUFFER},WHILE", "xla_gpu_command_buffer_unroll_loops": True},
    {"xla_gpu_enable_command_buffer": ""},
    {"xla_gpu_graph_min_graph_size": 1},
    {"xla_gpu_enable_triton_gemm": False},
    {"xla_gpu_enable_dynamic_slice_fusion": True},
    {"xla_gpu_enable_command_buffer": "+WHILE"},
)


def compiler_options(run: Run) -> Iterator[Row]:
    """Unrolled decode with batch 1, compiled with other options. They differ between versions: a refusal is a finding."""
    if run.device.platform != "gpu":
        yield {"skipped": "only on a GPU"}
        return
    config = run.plan.shapes[run.plan.options_shape]
    weights = Weights(config)
    for options in COMPILER_OPTIONS:
        row = {"shape": run.plan.options_shape, "batch": 1, "options": " ".join(f"{k}={v}" for k, v in options.items())}
        row = run.attempt(
            row,
            lambda options=options: measure_decode(run, config, weights.for_layers("unrolled"), 1, compiler_options=options),
        )
        if options and "INVALID_ARGUMENT" in row.get("error", ""):
            row["refused"] = row.pop("error")
        yield row


SECTIONS: dict[str, Section] = {
    "training": training,
    "yardsticks": yardsticks,
    "correctness": correctness,
    "decode": decode,
    "prefill": prefill,
    "programs": programs,
    "attention": attention,
    "transformers": transformers,
    "compiler_options": compiler_options,
}


# The report


def main(arguments: Arguments) -> int:
    """Run the sections, write the JSON, print the tables; the exit code."""
    unknown = [name for name in arguments.sections if name not in SECTIONS]
    if unknown:
        print(f"unknown section {unknown[0]!r}; the sections are {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    device = jax.devices()[0]
    sections = arguments.sections or tuple(SECTIONS)
    run = Run(device, SMALL if device.platform == "cpu" else LARGE, arguments.time_limit, alone=len(sections) == 1)
    name = arguments.device_json or f"gpu_report_{re.sub(r'[^0-9A-Za-z]', '_', device.device_kind)}.json"
    path = arguments.output_folder / name
    settings = {key: value for key, value in vars(run.plan).items() if isinstance(value, int)}
    report = {
        "device": describe_device(device),
        "versions": versions("jax", "jaxlib", "flax", "numpy", "torch", "transformers")
        | {"llama_jax": llama_jax.__version__},
        "settings": settings | {"time_limit": arguments.time_limit},
        "formulas": FORMULAS,
        "sections": run.results,
    }
    print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}")

    for section in sections:
        rows = run.results[section] = []
        start = time.monotonic()
        try:
            for row in SECTIONS[section](run):
                rows.append(row)
                write_report(path, report)
        except Exception as error:
            rows.append({"error": describe(error)})
        print(f"\n{section} ({time.monotonic() - start:.0f} s)\n{table(rows)}", flush=True)
        write_report(path, report)

    share = run.found("decode", "share_of_copy", shape=GOAL_SHAPE, layers="unrolled", batch=1)
    if share is not None:
        report["goal"] = {"shape": GOAL_SHAPE, "batch": 1, "share_of_copy": share, "goal": GOAL_SHARE}
        reached = "reached" if share >= GOAL_SHARE else "missed"
        print(f"\ngoal {reached}: {GOAL_SHAPE} with batch 1 runs at {share:.1%} of copy bandwidth, {GOAL_SHARE:.0%} wanted")
    for case in run.plan.trainings:
        best = best_training(run.results.get("training", []), case)
        if best is not None:
            report.setdefault("training_goals", []).append(best | {"goal": TRAINING_GOAL})
            reached = "reached" if best["mfu"] >= TRAINING_GOAL else "missed"
            chosen = f"{case.parameters}, remat {best['remat']}, {best['batch']} rows"
            print(f"goal {reached}: {case.shape} ({chosen}) trains at {best['mfu']:.1%} MFU, {TRAINING_GOAL:.0%} wanted")
    failures = [row for rows in run.results.values() for row in rows if "error" in row or row.get("ok") is False]
    report |= {"seconds": time.monotonic() - run.start, "failures": len(failures)}
    write_report(path, report)
    print(f"\n{len(failures)} failures; {report['seconds']:.0f} s; written to {path}")
    return 1 if failures else 0


def best_training(rows: list[Row], case: Training) -> Row | None:
    """The row of the fastest candidate, where there is a published peak to compare with."""
    found = [row for row in rows if row.get("mfu") and (row["shape"], row["parameters"]) == (case.shape, case.parameters)]
    return max(found, key=lambda row: row["mfu"], default=None)


REASONS = ("error", "refused", "does_not_fit", "skipped")


def table(rows: list[Row]) -> str:
    """The rows below one another; a column for every key, and why a row has no numbers at its end."""
    if not rows:
        return "nothing"
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in REASONS))
    cells = [columns, *([shown(row.get(column)) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    for i, row in enumerate(rows, start=1):
        for reason in REASONS:
            if reason in row:
                lines[i] = f"{lines[i]}  {reason}: {row[reason].splitlines()[0][:150]}"
    return "\n".join(line.strip() for line in lines if line.strip())  # rows of reasons alone have no heading


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def number(value: Any) -> float | str:
    """A float, or its name where JSON has none for it."""
    return float(value) if math.isfinite(value) else str(value)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def describe_device(device: jax.Device) -> Row:
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "count": jax.device_count(),
        "memory_limit_bytes": memory_limit(device),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "host": platform.platform(),
        "cores": os.cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def memory_limit(device: jax.Device) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")


def command_line() -> Arguments:
    """The arguments given; a borrowed GPU machine without tyro still makes the whole report."""
    try:
        import tyro
    except ImportError:
        if len(sys.argv) > 1:
            sys.exit("options need tyro: pip install tyro")
        return Arguments()
    return tyro.cli(Arguments, description=__doc__)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        print(json.dumps(transformers_worker(**json.loads(sys.argv[2]))))
    elif sys.argv[1:2] == [TRAINING_WORKER]:
        for row in training_worker(**json.loads(sys.argv[2])):
            print(json.dumps(row), flush=True)
    else:
        sys.exit(main(command_line()))
