"""Decode and prefill speed on this machine's CPU, compared with llama.cpp and transformers, in float32 or quantized.

Each peer runs in a separate process, loads random weights of the same shape once, and then runs one repetition of each
measurement in turn, so that changes of the machine's speed affect all peers. Reported are medians, their spread, and the
ratio of medians within the run; absolute figures depend on the machine and on its other load.

    pip install -e ".[parity]"
    python experiments/bench_generate.py --shapes stories-15m stories-110m tinyllama-1.1b
    python experiments/bench_generate.py --shapes stories-110m --peers llama_jax llama_jax:bfloat16 llama_jax:int8 \
        llama_jax:q4_0 llama.cpp:q8_0 llama.cpp:q4_0
    python experiments/bench_generate.py --shapes stories-110m --peers llama_jax:q4_k llama.cpp:q4_k  # both read one file
    python experiments/bench_generate.py --model SmolLM2-135M-Instruct.Q4_1.gguf --peers llama_jax:keep llama.cpp \
        llama_jax llama_jax:bfloat16 llama_jax:int8 llama_jax:q4_0     # a real model, in its file's format and in others

What is timed:
  decode   tokens/s of `new_tokens` greedy steps after a prompt of `prompt_tokens`, batch 1 and batch 8 (sum of rows).
           llama_jax: the whole public `generate`, with sampling and logprobs. transformers: its model called in a loop
           with its cache and argmax, which is faster than its `generate`. llama.cpp: `eval` of one token, no sampling.
  prefill  tokens/s of prefilling a 256-token prompt, to the logits of its last token.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from measuring import machine, settings, versions, write_report

Measure = Callable[[], float]
THREADS = os.cpu_count() or 1
# Formats that only files have, with llama.cpp's numbers of their file types (for K-quants, the small mix).
FILE_KINDS = {
    **{"q4_1": 3, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 11, "q4_k": 14, "q5_k": 16, "q6_k": 18},
    **{"iq4_nl": 25, "iq4_xs": 30, "mxfp4": 38},
}


@dataclass(frozen=True)
class Arguments:
    """Compare generation speed with llama.cpp and transformers."""

    shapes: tuple[str, ...] = ("stories-15m", "stories-110m", "tinyllama-1.1b")
    """Presets to measure, with random weights."""
    model: Path | None = None
    """A GGUF to measure instead of the shapes. llama.cpp uses its format, llama_jax the format after the colon of the peer;
    "keep" keeps the file's format."""
    peers: tuple[str, ...] = ("llama_jax", "llama.cpp", "transformers")
    """Peers; the first is the baseline. They use float32, or, for llama_jax and llama.cpp, the format after a colon, for
    example llama_jax:int8 and llama.cpp:q8_0. llama.cpp is not measured with batch 8."""
    measurements: tuple[str, ...] = ("decode 1", "decode 8", "prefill 256")
    repetitions: int = 9
    """Interleaved repetitions; the first is a warm-up and not counted."""
    prompt_tokens: int = 64
    new_tokens: int = 64
    output: Path = Path("experiments/results/bench_generate_cpu.json")


def ours(shape: str, kind: str, arguments: Arguments) -> dict[str, Measure]:
    import jax
    import jax.numpy as jnp

    import llama_jax
    from llama_jax.formats.build_params import build_params
    from llama_jax.formats.huggingface import from_params
    from llama_jax.model.cache import init_cache
    from llama_jax.model.trees import quantize

    if arguments.model is None:
        config = llama_jax.preset(shape)
    if arguments.model is not None:
        dtype, quantize = ("bfloat16", None) if kind == "bfloat16" else ("float32", None if kind == "float32" else kind)
        config, params, _ = llama_jax.load(arguments.model, dtype, quantize=quantize)
    elif kind in FILE_KINDS:
        with tempfile.TemporaryDirectory() as folder:
            write_random_gguf(Path(folder) / "model.gguf", config, kind)
            params = llama_jax.load(Path(folder) / "model.gguf", "float32", quantize="keep").params
    else:
        params = llama_jax.init(config, jax.random.key(0), jnp.bfloat16 if kind == "bfloat16" else jnp.float32)
        if kind in ("float32", "bfloat16"):
            params = build_params(from_params(config, params, None), None)  # in the memory that `load` uses
        else:
            params = quantize(params, kind)
    rng = np.random.default_rng(0)

    def decode(batch: int) -> float:
        prompts = rng.integers(3, config.vocab_size, (batch, arguments.prompt_tokens)).tolist()
        pieces = llama_jax.stream(config, params, prompts, max_new_tokens=arguments.new_tokens, max_chunks=1 << 20)
        next(pieces)
        start = time.perf_counter()
        made = sum(int(piece.valid.sum()) for piece in pieces)
        return made / (time.perf_counter() - start)

    @jax.jit
    def read(params, tokens):
        cache = init_cache(config, 1, 256)
        hidden, cache = llama_jax.forward(config, params, tokens, cache)
        return llama_jax.unembed(config, params, hidden[:, -1]), cache

    def prefill() -> float:
        tokens = rng.integers(3, config.vocab_size, (1, 256), dtype=np.int32)
        start = time.perf_counter()
        jax.block_until_ready(read(params, tokens))
        return 256 / (time.perf_counter() - start)

    return {"decode 1": lambda: decode(1), "decode 8": lambda: decode(8), "prefill 256": prefill}


def transformers(shape: str, kind: str, arguments: Arguments) -> dict[str, Measure]:
    import torch
    from transformers import LlamaForCausalLM

    import llama_jax
    from llama_jax.formats.huggingface import config_to_dict

    torch.set_num_threads(THREADS)
    config = llama_jax.preset(shape)
    from transformers import LlamaConfig

    with torch.inference_mode():
        model = LlamaForCausalLM(LlamaConfig(**config_to_dict(config))).eval()
    rng = np.random.default_rng(0)

    @torch.inference_mode()
    def decode(batch: int) -> float:
        tokens = torch.from_numpy(rng.integers(3, config.vocab_size, (batch, arguments.prompt_tokens)))
        out = model(tokens, use_cache=True, logits_to_keep=1)
        token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        start = time.perf_counter()
        for _ in range(arguments.new_tokens - 1):
            out = model(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return batch * (arguments.new_tokens - 1) / (time.perf_counter() - start)

    @torch.inference_mode()
    def prefill() -> float:
        tokens = torch.from_numpy(rng.integers(3, config.vocab_size, (1, 256)))
        start = time.perf_counter()
        model(tokens, use_cache=True, logits_to_keep=1)
        return 256 / (time.perf_counter() - start)

    return {"decode 1": lambda: decode(1), "decode 8": lambda: decode(8), "prefill 256": prefill}


def llama_cpp(shape: str, kind: str, arguments: Arguments) -> dict[str, Measure]:
    from llama_cpp import Llama

    import llama_jax

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf" if arguments.model is None else arguments.model
        if arguments.model is None:
            write_random_gguf(path, llama_jax.preset(shape), kind)
        model = Llama(
            str(path),
            n_ctx=512,
            n_batch=512,
            n_threads=THREADS,
            n_threads_batch=THREADS,
            type_k=0,
            type_v=0,
            verbose=False,
            use_mmap=False,
        )
    rng = np.random.default_rng(0)

    def tokens(n: int) -> list[int]:
        return rng.integers(3, model.n_vocab(), n).tolist()

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
        prompt = tokens(256)
        start = time.perf_counter()
        model.eval(prompt)
        return 256 / (time.perf_counter() - start)

    return {"decode 1": decode, "prefill 256": prefill}


def write_random_gguf(path: Path, config, kind: str) -> None:
    """Write a GGUF file of the shape, with a made-up vocabulary, that llama.cpp can load."""
    import gguf

    if kind in FILE_KINDS:
        dense = path.with_name("dense.gguf")
        write_random_gguf(dense, config, "float32")
        quantize_file(dense, path, FILE_KINDS[kind], pure=True)
        dense.unlink()
        return
    blocks = None if kind == "float32" else gguf.GGMLQuantizationType[kind.upper()]

    c, rng = config, np.random.default_rng(0)
    file = gguf.GGUFWriter(str(path), "llama")
    file.add_block_count(c.n_layers)
    file.add_context_length(c.max_seq_len)
    file.add_embedding_length(c.dim)
    file.add_feed_forward_length(c.hidden_dim)
    file.add_head_count(c.n_heads)
    file.add_head_count_kv(c.n_kv_heads)
    file.add_layer_norm_rms_eps(c.norm_eps)
    file.add_rope_dimension_count(c.head_dim)
    file.add_vocab_size(c.vocab_size)
    file.add_tokenizer_model("llama")
    file.add_token_list([b"<unk>", b"<s>", b"</s>", *(f"t{i}".encode() for i in range(c.vocab_size - 3))])
    file.add_token_scores([0.0] * c.vocab_size)
    file.add_token_types([2, 3, 3] + [1] * (c.vocab_size - 3))

    def matrix(name: str, *shape: int) -> None:
        values = 0.02 * rng.standard_normal(shape, dtype=np.float32)
        file.add_tensor(name, values if blocks is None else gguf.quants.quantize(values, blocks), raw_dtype=blocks)

    def ones(name: str) -> None:
        file.add_tensor(name, np.ones(c.dim, np.float32))

    matrix("token_embd.weight", c.vocab_size, c.dim)
    ones("output_norm.weight")
    if not c.tie_embeddings:
        matrix("output.weight", c.vocab_size, c.dim)
    for i in range(c.n_layers):
        ones(f"blk.{i}.attn_norm.weight")
        ones(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", c.n_heads * c.head_dim, c.dim)
        matrix(f"blk.{i}.attn_k.weight", c.n_kv_heads * c.head_dim, c.dim)
        matrix(f"blk.{i}.attn_v.weight", c.n_kv_heads * c.head_dim, c.dim)
        matrix(f"blk.{i}.attn_output.weight", c.dim, c.n_heads * c.head_dim)
        matrix(f"blk.{i}.ffn_gate.weight", c.hidden_dim, c.dim)
        matrix(f"blk.{i}.ffn_up.weight", c.hidden_dim, c.dim)
        matrix(f"blk.{i}.ffn_down.weight", c.dim, c.hidden_dim)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def quantize_file(source: Path, target: Path, file_type: int, *, pure: bool) -> None:
    """Quantize with llama.cpp, by its number of the mix; `pure` uses the same format for every matrix."""
    import llama_cpp
    from llama_cpp import _logger

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, None)  # otherwise it logs a line for every tensor
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.pure = file_type, pure
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), options)
    llama_cpp.llama_log_set(_logger.llama_log_callback, None)  # `silent` is freed when this function returns
    if failed:
        raise SystemExit(f"llama.cpp could not write {target.name}; K-quants need a row length that is a multiple of 256")


PEERS = {"llama_jax": ours, "transformers": transformers, "llama.cpp": llama_cpp}


def worker(peer: str, shape: str, arguments: Arguments, pipe) -> None:
    name, _, kind = peer.partition(":")
    measures = PEERS[name](shape, kind or "float32", arguments)
    pipe.send(list(measures))
    while (name := pipe.recv()) is not None:
        pipe.send(measures[name]())


def measure(shape: str, arguments: Arguments) -> dict[str, dict[str, list[float]]]:
    """{measurement: {peer: [tokens/s of each counted repetition]}}."""
    spawn = multiprocessing.get_context("spawn")
    workers = {}
    for peer in arguments.peers:
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=worker, args=(peer, shape, arguments, theirs), daemon=True)
        process.start()
        theirs.close()  # if a worker dies, recv() then raises EOFError instead of waiting forever
        workers[peer] = (process, mine, mine.recv())  # one loads at a time
    results: dict[str, dict[str, list[float]]] = {}
    for repetition in range(arguments.repetitions):
        for name in arguments.measurements:
            for peer, (_, pipe, names) in workers.items():
                if name not in names:
                    continue
                pipe.send(name)
                speed = pipe.recv()
                if repetition:
                    results.setdefault(name, {}).setdefault(peer, []).append(speed)
    for process, pipe, _ in workers.values():
        pipe.send(None)
        process.join()
    return results


def main(arguments: Arguments) -> None:
    report = {
        "machine": machine(),
        "versions": versions("jax", "jaxlib", "torch", "transformers", "llama-cpp-python", "numpy"),
        "settings": settings(arguments),
        "tokens_per_second": {},
    }
    first = arguments.peers[0]
    strangers = [peer for peer in arguments.peers if peer != "llama.cpp" and peer.partition(":")[0] != "llama_jax"]
    if arguments.model is not None and strangers:
        raise SystemExit(f"--peers {' '.join(strangers)}: with --model use llama_jax, llama_jax:KIND and llama.cpp")
    print(f"{'shape':16} {'measurement':12} {'peer':18} {'median':>9} {'min':>9} {'max':>9}  {first} / peer")
    for shape in arguments.shapes if arguments.model is None else (arguments.model.stem,):
        results = measure(shape, arguments)
        report["tokens_per_second"][shape] = results
        for name, peers in results.items():
            own = statistics.median(peers[first]) if first in peers else float("nan")
            for peer, speeds in peers.items():
                median = statistics.median(speeds)
                spread = f"{median:9.1f} {min(speeds):9.1f} {max(speeds):9.1f}"
                print(f"{shape:16} {name:12} {peer:18} {spread}  {own / median:.2f}", flush=True)
    write_report(arguments.output, report)
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
