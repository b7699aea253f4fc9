"""How fast text becomes shards, beside the tokenizer libraries' own encoding of many texts, in one interleaved run.

    pip install -e ".[data]"
    python experiments/bench_data.py [--megabytes 1000] [--data TEXT] [--repeats 3]

A text of that size is made of a smaller one, whose documents are repeated with other words here and there. For each kind of
vocabulary it is then tokenised in turns: by the library alone, from memory and without writing anything, in 1, 2 ...
processes of one thread, each of which has its share of the documents; and by `data build`, from the file to the finished
manifest, in as many. The clock of the library runs while it encodes; that of the build from its call on, the start of its
processes included; the processor's time is that of all its processes from their very beginning. Peak memory is that of the
largest process. Writes ``experiments/results/bench_data_cpu.json`` and prints a table of medians.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from measuring import cpu_name, settings, text_of, versions, write_report

from llama_jax.checkpoints.bundled import bundled
from llama_jax.data.workers import cores

RESULTS = Path(__file__).parent / "results"
SEPARATOR = "\n<|endoftext|>\n"
CHANGED = 0.03  # of the words
CLOCK, PROCESSOR = "megabytes_per_second", "megabytes_per_processor_second"


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    megabytes: float = 1000
    """Of text."""
    data: tuple[Path, ...] = ()
    """Texts to make it of; by default the documentation of this repository."""
    kinds: tuple[str, ...] = ("sentencepiece", "tokenizers")
    """The bundled vocabulary, and one of 16,384 tokens that the tokenizers library learns from the text."""
    processes: tuple[int, ...] = field(default_factory=lambda: tuple(sorted({1, cores()})))
    """How many to measure with."""
    repeats: int = 3
    """Of each case, in turns."""
    near_duplicates: bool = False
    """Measure the search for near duplicates, too."""
    out: Path = RESULTS / "bench_data_cpu.json"
    """The report."""


def documents(texts: list[str], size: int) -> Iterator[str]:
    """Documents of about `size` bytes in all: those of the texts again and again, each time with other words."""
    whole = [part.strip() for text in texts for part in text.split("<|endoftext|>") if part.strip()]
    short = [part[start : start + 2000] for part in whole for start in range(0, len(part), 2000)]
    words = sorted({word for part in short for word in part.split(" ")})
    rng = np.random.default_rng(0)
    done = 0
    while True:
        for number in rng.permutation(len(short)).tolist():
            found = short[number].split(" ")
            for at in rng.integers(len(found), size=int(CHANGED * len(found)) + 1).tolist():
                found[at] = words[int(rng.integers(len(words)))]
            text = " ".join(found)
            yield text
            done += len(text.encode()) + len(SEPARATOR)
            if done >= size:
                return


def learn(path: Path, out: Path) -> None:
    """A byte-level BPE in the manner of Llama 3, of the first 20 MB of a text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from llama_jax.tokenizers.tiktoken import SPLIT

    library = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([cut, bytes_])
    library.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=16_384, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    with path.open(encoding="utf-8") as file:
        library.train_from_iterator(file.read(20 << 20).split(SEPARATOR), trainer)
    library.save(str(out))


def encoder(kind: str, tokenizer: Path) -> Callable[[list[str]], Any]:
    """The library's own way to encode many texts, with one thread."""
    if kind == "sentencepiece":
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer / "tokenizer.model"))
        return lambda texts: processor.Encode(texts, num_threads=1)
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    return lambda texts: [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=False)]


def encode_share(kind: str, tokenizer: str, path: str, share: int, of: int, barrier: Any, found: Any) -> None:
    """Encode every `of`-th document; the seconds it took, and those of the processor."""
    texts = Path(path).read_text("utf-8").split(SEPARATOR)[share::of]
    encode = encoder(kind, Path(tokenizer))
    encode(texts[:100])
    barrier.wait()
    start, busy = time.perf_counter(), time.process_time()
    for at in range(0, len(texts), 1000):
        encode(texts[at : at + 1000])
    found.put((time.perf_counter() - start, time.process_time() - busy))


def by_library(kind: str, tokenizer: Path, path: Path, processes: int) -> dict[str, float]:
    """Megabytes a second of the library in processes that begin at the same moment."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(processes), context.Queue()
    started = [
        context.Process(target=encode_share, args=(kind, str(tokenizer), str(path), share, processes, barrier, found))
        for share in range(processes)
    ]
    for process in started:
        process.start()
    taken = [found.get() for _ in started]
    for process in started:
        process.join()
    return speeds(path, max(seconds for seconds, _ in taken), sum(busy for _, busy in taken))


def speeds(path: Path, seconds: float, busy: float) -> dict[str, float]:
    """By the clock, and by the processor's time in all processes: what others do on the machine is not in that."""
    size = path.stat().st_size / 1e6
    return {CLOCK: size / seconds, PROCESSOR: size / busy}


BUILDING = """
import json, os, resource, sys, time
os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
from llama_jax.data.building import BuildOptions, build

if __name__ == "__main__":
    path, out, tokenizer, processes, near = sys.argv[1:]
    start = time.perf_counter()
    build(path, out, tokenizer, options=BuildOptions(near_duplicates=float(near) or None), processes=int(processes))
    seconds = time.perf_counter() - start
    # Linux counts into ru_maxrss of a process what its parent had when it was started; not into this line.
    first = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    times = os.times()
    print(json.dumps(dict(seconds=seconds, busy=sum(times[:4]), first=first * 1024, worker=worker * 1024)))
"""


def by_build(tokenizer: Path, path: Path, processes: int, folder: Path, near: float = 0.0) -> dict[str, float]:
    """Megabytes a second of `data build`, and peak memory in megabytes."""
    (folder / "building.py").write_text(BUILDING)
    out = folder / "out"
    command = [sys.executable, folder / "building.py", path, out, tokenizer, processes, near]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    shutil.rmtree(out)
    found = json.loads(done.stdout)
    return {
        **speeds(path, found["seconds"], found["busy"]),
        "first_process_peak_mb": found["first"] / 1e6,
        "largest_worker_peak_mb": found["worker"] / 1e6,
    }


def main(arguments: Arguments) -> dict[str, Any]:
    """Measure, write the report and print the table."""
    given = arguments.data or tuple(sorted(Path(__file__).resolve().parents[1].rglob("*.md")))
    texts = [text_of(path) for path in given]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path = folder / "text.txt"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(text + SEPARATOR for text in documents(texts, int(arguments.megabytes * 1e6)))
        for kind in arguments.kinds:
            tokenizer = bundled() if kind == "sentencepiece" else folder / "tokenizer.json"
            if kind == "tokenizers":
                learn(path, tokenizer)
            measured: dict[tuple[str, int], list[dict[str, float]]] = {}
            for _ in range(arguments.repeats):
                for processes in arguments.processes:
                    measured.setdefault(("library", processes), []).append(by_library(kind, tokenizer, path, processes))
                    measured.setdefault(("build", processes), []).append(by_build(tokenizer, path, processes, folder))
                    if arguments.near_duplicates:
                        found = by_build(tokenizer, path, processes, folder, near=0.8)
                        measured.setdefault(("build, near duplicates", processes), []).append(found)
            for (what, processes), found in measured.items():
                median = {name: round(statistics.median(one[name] for one in found), 2) for name in found[0]}
                row: dict[str, Any] = {"vocabulary": kind, "what": what, "processes": processes, **median}
                for name, key in ((CLOCK, "of_library"), (PROCESSOR, "of_library_by_processor")):
                    pairs = zip(found, measured["library", processes], strict=True)
                    row[key] = round(statistics.median(one[name] / other[name] for one, other in pairs), 3)
                rows.append({**row, "runs": found})
    report = {
        "settings": settings(arguments) | {"data": [one.name for one in given], "out": arguments.out.name},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "versions": versions("sentencepiece", "tokenizers", "array-record", "numpy", "rensa"),
        "rows": rows,
    }
    write_report(arguments.out, report)
    print(
        "| vocabulary | | processes | MB/s | of the library's | by processor | peak of the first process, MB | of a worker |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        peaks = [
            f"{row[name]:,.0f}" if row.get(name) else "" for name in ("first_process_peak_mb", "largest_worker_peak_mb")
        ]
        numbers = f"{row[CLOCK]:.2f} | {row['of_library']:.2f} | {row['of_library_by_processor']:.2f}"
        print(f"| {row['vocabulary']} | {row['what']} | {row['processes']} | {numbers} | {' | '.join(peaks)} |")
    return report


if __name__ == "__main__":
    main(tyro.cli(Arguments))
