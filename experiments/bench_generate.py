"""Decode and prefill speed on this machine's CPU, compared with llama.cpp, transformers and earlier commits.

Each peer runs in a separate process, loads its model once, and then runs one repetition of each measurement in turn, so that
changes of the machine's speed affect all peers. Reported are medians, and the ratios of speeds within the turns; absolute
figures depend on the machine and on its other load.

    pip install -e ".[parity]"
    python experiments/bench_generate.py --shapes stories-15m stories-110m tinyllama-1.1b
    python experiments/bench_generate.py --shapes stories-110m --peers llama_jax llama_jax:int8 llama_jax:q4_0 llama.cpp:q4_0
    python experiments/bench_generate.py --shapes stories-15m --peers llama_jax llama_jax@HEAD~20      # an earlier commit
    python experiments/bench_generate.py --model SmolLM2-135M-Instruct.Q4_1.gguf --peers llama_jax:keep llama.cpp llama_jax

What is timed:
  start    1 / seconds of `llama-jax generate` for one token of the bundled model, with warm caches.
  decode   tokens/s of `new_tokens` greedy steps after a prompt of `prompt_tokens`, batch 1 and batch 8 (sum of rows).
           llama_jax: the whole public `generate`, with sampling and logprobs. transformers: its model called in a loop with
           its cache and argmax, which is faster than its `generate`. llama.cpp: `eval` of one token, no sampling.
  prefill  tokens/s of prefilling a 256-token prompt, to the logits of its last token.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from measuring import Measure, describe_run, print_speeds, take_turns, write_random_model, write_report

THREADS = os.cpu_count() or 1
PREFILL = 256  # tokens
START = "start"


@dataclass(frozen=True)
class Arguments:
    """Compare generation speed with llama.cpp, transformers and earlier commits."""

    shapes: tuple[str, ...] = ("stories-15m", "stories-110m", "tinyllama-1.1b")
    """Presets to measure, with random weights."""
    model: Path | None = None
    """A GGUF to measure instead of the shapes. llama.cpp uses its format, llama_jax the format after the colon of the peer;
    "keep" keeps the file's format."""
    peers: tuple[str, ...] = ("llama_jax", "llama.cpp", "transformers")
    """Peers; the first is the baseline. They use float32, or, for llama_jax and llama.cpp, the format after a colon, for
    example llama_jax:int8 and llama.cpp:q8_0. llama_jax@COMMIT is an earlier commit."""
    start: bool = False
    """Also time the command line's start."""
    repetitions: int = 9
    """Interleaved repetitions; the first is a warm-up and not counted."""
    prompt_tokens: int = 64
    new_tokens: int = 64
    output: Path = Path("experiments/results/bench_generate_cpu.json")


def build_ours(shape: str, quant: str, arguments: Arguments) -> dict[str, Measure]:
    import jax

    import llama_jax

    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or write_random_model(Path(folder) / "model.gguf", shape, "float32")
        dtype, quantize = (quant, None) if quant in ("float32", "bfloat16") else ("float32", quant)
        config, params, _ = llama_jax.load(path, dtype, quantize=quantize)
    random = np.random.default_rng(0)

    def decode(batch: int) -> float:
        prompts = random.integers(3, config.vocab_size, (batch, arguments.prompt_tokens)).tolist()
        pieces = llama_jax.stream(config, params, prompts, max_new_tokens=arguments.new_tokens, max_chunks=1 << 20)
        next(pieces)
        start = time.perf_counter()
        tokens = sum(int(piece.valid.sum()) for piece in pieces)
        return tokens / (time.perf_counter() - start)

    @jax.jit
    def read(params: Any, tokens: jax.Array) -> Any:
        cache = llama_jax.init_cache(config, 1, PREFILL, params.embedding.dtype)
        hidden, cache = llama_jax.forward(config, params, tokens, cache)
        return llama_jax.unembed(config, params, hidden[:, -1]), cache

    def prefill() -> float:
        tokens = random.integers(3, config.vocab_size, (1, PREFILL), dtype=np.int32)
        start = time.perf_counter()
        jax.block_until_ready(read(params, tokens))
        return PREFILL / (time.perf_counter() - start)

    def start_command() -> float:
        command = [sys.executable, "-m", "llama_jax", "generate", "Once upon a time", "--max-new-tokens", "1"]
        environment = os.environ | {"PYTHONPATH": str(Path(llama_jax.__file__).parents[1])}
        start = time.perf_counter()
        subprocess.run(command, env=environment, check=True, capture_output=True)
        return 1 / (time.perf_counter() - start)

    measures = {"decode 1": partial(decode, 1), "decode 8": partial(decode, 8), "prefill 256": prefill}
    return measures | ({START: start_command} if arguments.start else {})


def build_transformers(shape: str, quant: str, arguments: Arguments) -> dict[str, Measure]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import llama_jax
    from llama_jax.formats.huggingface import config_to_dict

    torch.set_num_threads(THREADS)
    config = llama_jax.preset(shape)
    with torch.inference_mode():
        model = LlamaForCausalLM(LlamaConfig(**config_to_dict(config))).eval()
    random = np.random.default_rng(0)

    @torch.inference_mode()
    def decode(batch: int) -> float:
        tokens = torch.from_numpy(random.integers(3, config.vocab_size, (batch, arguments.prompt_tokens)))
        out = model(tokens, use_cache=True, logits_to_keep=1)
        token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        start = time.perf_counter()
        for _ in range(arguments.new_tokens - 1):
            out = model(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return batch * (arguments.new_tokens - 1) / (time.perf_counter() - start)

    @torch.inference_mode()
    def prefill() -> float:
        tokens = torch.from_numpy(random.integers(3, config.vocab_size, (1, PREFILL)))
        start = time.perf_counter()
        model(tokens, use_cache=True, logits_to_keep=1)
        return PREFILL / (time.perf_counter() - start)

    return {"decode 1": partial(decode, 1), "decode 8": partial(decode, 8), "prefill 256": prefill}


def build_llama_cpp(shape: str, quant: str, arguments: Arguments) -> dict[str, Measure]:
    from llama_cpp import Llama

    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or write_random_model(Path(folder) / "model.gguf", shape, quant)
        sizes = {"n_ctx": 512, "n_batch": 512, "n_threads": THREADS, "n_threads_batch": THREADS}
        model = Llama(str(path), **sizes, type_k=0, type_v=0, verbose=False, use_mmap=False)  # keys and values in float32
    random = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return random.integers(3, model.n_vocab(), count).tolist()

    def decode() -> float:
        model.reset()
        model.eval(tokens(arguments.prompt_tokens))
        steps = tokens(arguments.new_tokens - 1)
        start = time.perf_counter()
        for token in steps:
            model.eval([token])
        return len(steps) / (time.perf_counter() - start)

    def prefill() -> float:
        model.reset()
        prompt = tokens(PREFILL)
        start = time.perf_counter()
        model.eval(prompt)
        return PREFILL / (time.perf_counter() - start)

    return {"decode 1": decode, "prefill 256": prefill}


BUILDERS = {"llama_jax": build_ours, "transformers": build_transformers, "llama.cpp": build_llama_cpp}


def build_peer(shape: str, arguments: Arguments, peer: str) -> dict[str, Measure]:
    name, _, quant = peer.partition(":")
    return BUILDERS[name](shape, quant or "float32", arguments)


def main(arguments: Arguments) -> None:
    if arguments.model is not None and "transformers" in arguments.peers:
        raise SystemExit("--peers transformers measures random weights only; with --model use llama_jax and llama.cpp")
    report = describe_run(arguments, "torch", "transformers", "llama-cpp-python", "numpy") | {"tokens_per_second": {}}
    print(f"{'':30} {'peer':24} {'median/s':>10}  {arguments.peers[0]} over it, within turns")
    for shape in arguments.shapes if arguments.model is None else (arguments.model.stem,):
        results = take_turns(partial(build_peer, shape, arguments), arguments.peers, arguments.repetitions)
        report["tokens_per_second"][shape] = results
        for name, runs in results.items():
            print_speeds(f"{shape}, {name}", runs)
    write_report(arguments.output, report)
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
