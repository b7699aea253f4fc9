"""Speed of building a corpus from text, compared with the tokenizer libraries' batch encoding, in one interleaved run.

    pip install -e ".[data]"
    python experiments/bench_data.py [--megabytes 1000] [--data TEXT ...] [--repeats 3]

A text of that size is made from a smaller one by repeating its documents with some words replaced. For each kind of
vocabulary it is tokenized in turns: by the library's `encode_batch` with 1, 2, ... threads, in memory, and by `data build`
with the same number of processes, from the file to the finished corpus. The library's time is encoding only; the build's
time includes starting its processes, and its CPU time covers all of them from their start. A turn uses as much of the text
as the library encodes in some seconds with one thread.

Finally the whole text is built once with one process per core, and then a quarter of it. Peak memory is given for the first
process and for the largest worker; it is constant if both builds have the same peak. Writes
``experiments/results/bench_data_cpu.json`` and prints a table of medians; ratios are medians of the ratios of the turns.
With --megabytes 200 it takes about 7 minutes on two cores.
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
from measuring import machine, settings, text_of, versions, write_report

from llama_jax.data.build_corpus import cpu_count
from llama_jax.formats.loading import bundled

RESULTS = Path(__file__).parent / "results"
SEPARATOR = "\n<|endoftext|>\n"
CHANGED = 0.03  # share of words replaced
AT_ONCE = 4000  # documents per call of the library: some megabytes, so that its threads seldom wait for one another
CLOCK, PROCESSOR = "megabytes_per_second", "megabytes_per_processor_second"
PEAKS = ("first_process_peak_mb", "largest_worker_peak_mb")


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    megabytes: float = 1000
    """Size of the text."""
    data: tuple[Path, ...] = ()
    """Source texts; by default the documentation of this repository."""
    kinds: tuple[str, ...] = ("sentencepiece", "tokenizers")
    """The bundled vocabulary, and one of 16,384 tokens that the tokenizers library learns from the text."""
    processes: tuple[int, ...] = field(default_factory=lambda: tuple(sorted({1, cpu_count()})))
    """Numbers of processes to measure."""
    repeats: int = 3
    """Turns of each case."""
    turn_seconds: float = 15
    """Seconds that one thread of the library takes for the text of a turn."""
    out: Path = RESULTS / "bench_data_cpu.json"
    """The report."""


def documents(texts: list[str], size: int) -> Iterator[str]:
    """Yield documents of about `size` bytes in total: those of the texts, repeated with some words replaced."""
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
    """Train a byte-level BPE like Llama 3's on the first 20 MB of a text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from llama_jax.tokenizers.tiktoken import LLAMA3_SPLIT

    library = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_SPLIT), "isolated")
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


def encoder(kind: str, tokenizer: Path, threads: int = 1) -> Callable[[list[str]], Any]:
    """Return the library's batch encoder; tokenizers takes the number of threads from RAYON_NUM_THREADS."""
    if kind == "sentencepiece":
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer / "tokenizer.model"))
        return lambda texts: processor.Encode(texts, num_threads=threads)
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    return lambda texts: [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=False)]


def encode_all(kind: str, tokenizer: str, path: str, threads: int, found: Any) -> None:
    """Encode every document; put elapsed seconds and CPU seconds of all threads into `found`."""
    texts = Path(path).read_text("utf-8").split(SEPARATOR)
    encode = encoder(kind, Path(tokenizer), threads)
    encode(texts[:100])
    start, busy = time.perf_counter(), time.process_time()
    for at in range(0, len(texts), AT_ONCE):
        encode(texts[at : at + AT_ONCE])
    found.put((time.perf_counter() - start, time.process_time() - busy))


def by_library(kind: str, tokenizer: Path, path: Path, threads: int) -> dict[str, float]:
    """Speed of the library in a separate process, because its threads are started once, at the first encoding."""
    os.environ.update(TOKENIZERS_PARALLELISM=str(threads > 1).lower(), RAYON_NUM_THREADS=str(threads))
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    process = context.Process(target=encode_all, args=(kind, str(tokenizer), str(path), threads, found))
    process.start()
    seconds, busy = found.get()
    process.join()
    return speeds(path, seconds, busy)


def speeds(path: Path, seconds: float, busy: float) -> dict[str, float]:
    """Speeds by elapsed time and by the CPU time of all processes, which excludes other work of the machine."""
    size = path.stat().st_size / 1e6
    return {CLOCK: size / seconds, PROCESSOR: size / busy}


BUILDING = """
import json, os, resource, sys, time
os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
from llama_jax.data.build_corpus import tokenize_files

if __name__ == "__main__":
    path, out, tokenizer, processes = sys.argv[1:]
    start = time.perf_counter()
    tokenize_files(path, out, tokenizer, processes=int(processes))
    seconds = time.perf_counter() - start
    # On Linux, ru_maxrss of a process includes its parent's memory at the start; VmHWM does not.
    first = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    times = os.times()
    print(json.dumps(dict(seconds=seconds, busy=sum(times[:4]), first=first * 1024, worker=worker * 1024)))
"""


def by_build(tokenizer: Path, path: Path, processes: int, folder: Path) -> dict[str, float]:
    """Megabytes per second of `data build`, and peak memory in megabytes."""
    (folder / "building.py").write_text(BUILDING)
    out = folder / "out"
    command = [sys.executable, folder / "building.py", path, out, tokenizer, processes]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    shutil.rmtree(out)
    found = json.loads(done.stdout)
    return {
        **speeds(path, found["seconds"], found["busy"]),
        "first_process_peak_mb": found["first"] / 1e6,
        "largest_worker_peak_mb": found["worker"] / 1e6,
    }


def write(path: Path, texts: list[str], megabytes: float) -> None:
    """Write a text of this size."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(text + SEPARATOR for text in documents(texts, int(megabytes * 1e6)))


def compared(measured: dict[tuple[str, int], list[dict[str, float]]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each case: medians, also of ratios to the library with as many threads and to the fewest processes."""
    fewest = min(processes for _, processes in measured)
    for (what, processes), found in measured.items():
        row: dict[str, Any] = {"what": what, "processes": processes}
        row |= {name: round(statistics.median(one[name] for one in found), 2) for name in found[0]}
        beside = (
            ("of_fewest", CLOCK, measured[what, fewest]),
            ("of_library", CLOCK, measured["library", processes]),
            ("of_library_by_processor", PROCESSOR, measured["library", processes]),
        )
        for key, name, others in beside:
            pairs = zip(found, others, strict=True)
            row[key] = round(statistics.median(one[name] / other[name] for one, other in pairs), 3)
        yield {**row, "runs": found}


def main(arguments: Arguments) -> dict[str, Any]:
    """Measure, write the report and print the table."""
    given = arguments.data or tuple(sorted(Path(__file__).resolve().parents[1].rglob("*.md")))
    texts = [text_of(path) for path in given]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path, quarter, turn = (folder / f"{name}.txt" for name in ("text", "quarter", "turn"))
        write(path, texts, arguments.megabytes)
        write(quarter, texts, arguments.megabytes / 4)
        for kind in arguments.kinds:
            tokenizer = bundled() if kind == "sentencepiece" else folder / "tokenizer.json"
            if kind == "tokenizers":
                learn(path, tokenizer)
            write(turn, texts, min(2, arguments.megabytes))
            speed = by_library(kind, tokenizer, turn, 1)[CLOCK]
            write(turn, texts, min(speed * arguments.turn_seconds, arguments.megabytes))
            measured: dict[tuple[str, int], list[dict[str, float]]] = {}
            for _ in range(arguments.repeats):
                for processes in arguments.processes:
                    measured.setdefault(("library", processes), []).append(by_library(kind, tokenizer, turn, processes))
                    measured.setdefault(("build", processes), []).append(by_build(tokenizer, turn, processes, folder))
            about = {"vocabulary": kind, "megabytes": round(turn.stat().st_size / 1e6, 1)}
            rows += [about | row for row in compared(measured)]
            most = max(arguments.processes)
            whole = by_build(tokenizer, path, most, folder)
            library = measured["library", most]
            rows.append(
                {
                    **{"vocabulary": kind, "megabytes": arguments.megabytes, "what": "build of all", "processes": most},
                    **whole,
                    "of_library": whole[CLOCK] / statistics.median(one[CLOCK] for one in library),
                    "of_library_by_processor": whole[PROCESSOR] / statistics.median(one[PROCESSOR] for one in library),
                    "of_a_quarter": by_build(tokenizer, quarter, most, folder),
                }
            )
    report = {
        "settings": settings(arguments) | {"data": [one.name for one in given], "out": arguments.out.name},
        "machine": machine(),
        "versions": versions("sentencepiece", "tokenizers", "numpy"),
        "rows": rows,
    }
    write_report(arguments.out, report)
    print(
        "| vocabulary | | MB | processes or threads | MB/s | of the fewest | of the library's | by processor | peaks, MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        ratios = (row.get(name) for name in (CLOCK, "of_fewest", "of_library", "of_library_by_processor"))
        numbers = " | ".join("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        peaks = ", ".join(f"{row[name]:,.0f}" for name in PEAKS if row.get(name))
        if "of_a_quarter" in row:
            peaks += "; of a quarter " + ", ".join(f"{row['of_a_quarter'][name]:,.0f}" for name in PEAKS)
        about = f"{row['vocabulary']} | {row['what']} | {row['megabytes']:,.0f} | {row['processes']}"
        print(f"| {about} | {numbers} | {peaks} |")
    return report


if __name__ == "__main__":
    main(tyro.cli(Arguments))
