"""Speed of loading a Hugging Face folder, compared with transformers' from_pretrained in one interleaved run.

    pip install -e ".[parity]"
    python experiments/bench_load.py [--gigabytes 4] [--repeats 5]

A folder of bfloat16 safetensors is written and then read by separate processes, in turns, from a warm page cache. The clock
stops when every page of every array has been read once, because a library that maps the file into memory has not read it
before. Before each measurement another process allocates the memory that will be needed and frees it: on a virtual machine
whose host reclaims free memory, getting it back takes time (0.25 GB/s on ours) and would slow down one of the libraries by
chance. Writes ``experiments/results/bench_load_cpu.json`` and prints a table of medians.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from measuring import machine, versions, write_report

RESULTS = Path(__file__).parent / "results"

OURS = """
import time, jax, numpy as np, llama_jax
jax.device_put(np.ones(4)).block_until_ready()
start = time.perf_counter()
params = llama_jax.load(path, dtype).params
jax.block_until_ready(params)
loaded = time.perf_counter()
arrays = [np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(params)]
version = f"jax {jax.__version__}"
"""
THEIRS = """
import time, torch, transformers
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.zeros(4)
start = time.perf_counter()
model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
loaded = time.perf_counter()
arrays = [p.detach().reshape(-1).view(torch.uint8) for p in model.parameters()]
version = f"transformers {transformers.__version__}, torch {torch.__version__}"
"""
END = """
total = sum(int(array[::4096].sum()) for array in arrays)
touched = time.perf_counter()
import json, resource
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
held = sum(array.nbytes for array in arrays)
print(json.dumps(dict(load=loaded - start, touched=touched - start, peak=peak, held=held, version=version)))
"""
PEERS = {"llama_jax": OURS, "transformers": THEIRS}


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    gigabytes: float = 4.0
    """Size of the folder."""
    repeats: int = 5
    """Interleaved repetitions of each case."""


def write_folder(folder: Path, gigabytes: float) -> None:
    """Write a Llama with 2,560 features and enough layers to fill the size, in files of 1 GB."""
    import llama_jax
    from llama_jax.formats import huggingface
    from llama_jax.formats.lazy_tensors import FLOAT_DTYPES, ArrayTensor
    from llama_jax.formats.weight_format import OpenedCheckpoint

    dim, hidden, vocab = 2560, 6912, 32_000
    layer = 4 * dim * dim + 3 * dim * hidden
    layers = round((gigabytes * 1e9 / 2 - 2 * vocab * dim) / layer)
    config = llama_jax.LlamaConfig(
        vocab_size=vocab,
        dim=dim,
        n_layers=layers,
        n_heads=20,
        n_kv_heads=20,
        hidden_dim=hidden,
        max_seq_len=2048,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_embeddings=False,
    )
    numbers = np.random.default_rng(0).standard_normal(vocab * dim, np.float32).astype(FLOAT_DTYPES["BF16"])
    shapes = dict.fromkeys(("embedding", "lm_head"), (vocab, dim)) | dict.fromkeys(("q", "k", "v", "out"), (dim, dim))
    shapes |= dict.fromkeys(("gate", "up"), (hidden, dim)) | {"down": (dim, hidden)}
    shapes |= dict.fromkeys(("attention_norm", "ffn_norm", "final_norm"), (dim,))
    tensors = {
        name.format(i): ArrayTensor(numbers[: int(np.prod(shapes[part]))].reshape(shapes[part]))
        for part, name in huggingface.HF_NAMES.items()
        for i in range(layers if "{}" in name else 1)
        if part in shapes
    }
    opened = OpenedCheckpoint("made here", folder, config, tensors, huggingface.HF_NAMES, False, lambda: None)
    huggingface.write_huggingface(folder, opened, None, largest_file=1_000_000_000)


WARM = """
import sys, numpy as np
held = []
for _ in range(int(sys.argv[1]) >> 26):
    held.append(np.ones(1 << 26, np.uint8))
"""


def measure(peer: str, folder: Path, dtype: str, warm: int) -> dict:
    subprocess.run([sys.executable, "-c", WARM, str(warm)], check=True)
    code = f"path, dtype = {str(folder)!r}, {dtype!r}\n{PEERS[peer]}{END}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{peer} failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def main(arguments: Arguments) -> None:
    scratch = Path(tempfile.mkdtemp(prefix="bench_load-"))
    try:
        write_folder(scratch, arguments.gigabytes)
        size = sum(file.stat().st_size for file in scratch.glob("*.safetensors"))
        runs: dict[tuple[str, str], list[dict]] = {}
        for _ in range(arguments.repeats):
            for dtype in ("bfloat16", "float32"):
                for peer in PEERS:
                    runs.setdefault((dtype, peer), []).append(measure(peer, scratch, dtype, int(3.2 * size)))
    finally:
        shutil.rmtree(scratch)
    results = []
    print(f"{size / 1e9:.2f} GB of bfloat16; seconds, medians of {arguments.repeats}")
    print(f"{'to':9} {'reader':13} {'load':>7} {'and touch':>10} {'fastest':>8} {'peak GB':>8} {'held GB':>8}")
    for (dtype, peer), found in runs.items():
        medians = {key: statistics.median(run[key] for run in found) for key in ("load", "touched", "peak", "held")}
        fastest = min(run["touched"] for run in found)
        results.append(dict(dtype=dtype, reader=peer, version=found[0]["version"], fastest=fastest, **medians))
        print(
            f"{dtype:9} {peer:13} {medians['load']:7.2f} {medians['touched']:10.2f} {fastest:8.2f}"
            f" {medians['peak'] / 1e9:8.2f} {medians['held'] / 1e9:8.2f}"
        )
    about = {"machine": machine(), "versions": versions("jax", "jaxlib", "numpy")}
    report = about | {"bytes": size, "repeats": arguments.repeats, "results": results}
    write_report(RESULTS / "bench_load_cpu.json", report)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
