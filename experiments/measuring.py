"""What all experiments share: where data and results are, what a report says of the machine, peers that take turns."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
DATA = Path(os.environ.get("LLAMA_JAX_TEST_DATA", ROOT.parent / "shared" / "data"))
"""Real texts and vocabularies, which are not part of the repository."""

Measure: TypeAlias = Callable[[], float]
Runs: TypeAlias = dict[str, list[float]]
"""The value of each counted repetition, by peer."""


# --- reports -------------------------------------------------------------------------------------------------------------


def cpu_name() -> str:
    """The processor's model name according to Linux."""
    try:
        return next(x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x)
    except (OSError, StopIteration):
        return platform.processor()


def versions(*packages: str) -> dict[str, str]:
    """Versions of the packages, and of Python."""
    installed = {"python": platform.python_version()}
    for package in packages:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def settings(arguments: Any) -> dict[str, Any]:
    """The arguments of an experiment, with paths as text: relative to the repository's root, or only their last part."""

    def path_as_text(value: Any) -> Any:
        if isinstance(value, tuple):
            return [path_as_text(item) for item in value]
        if not isinstance(value, Path):
            return value
        absolute = value.resolve()
        return str(absolute.relative_to(ROOT)) if absolute.is_relative_to(ROOT) else absolute.name

    return {name: path_as_text(value) for name, value in vars(arguments).items()}


def describe_run(arguments: Any, *packages: str) -> dict[str, Any]:
    """How a report begins: the machine, the versions of JAX and of these packages, and the arguments."""
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "platform": platform.platform()}
    return {"machine": machine, "versions": versions("jax", "jaxlib", *packages), "settings": settings(arguments)}


def devices() -> str:
    """JAX's devices and their machine, for a report on training."""
    import jax

    several = f"{jax.device_count()} x " if jax.device_count() > 1 else ""
    device_name = cpu_name() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
    return f"{several}{device_name}, {platform.machine()}, {os.cpu_count()} cores"


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole, so that earlier measurements survive if the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.new")
    written.write_text(text, "utf-8")
    written.replace(path)


def write_report(path: Path, report: Any) -> None:
    """Write JSON."""
    write_text(path, json.dumps(report, indent=1) + "\n")


def write_rows(path: Path, about: dict[str, Any], name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write a report with many rows; the rows are under `name`, one per line."""
    lines = ",\n  ".join(map(json.dumps, rows))
    write_text(path, f'{json.dumps(about)[:-1]}, "{name}": [\n  {lines}\n]}}\n')


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown; all columns but the first are aligned to the right."""
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


def once(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a stage, with its seconds; for a finished stage, the stored result."""
    if not path.exists():
        began = time.perf_counter()
        result = make()
        write_report(path, result | {"seconds": time.perf_counter() - began})
    return json.loads(path.read_text("utf-8"))


def read_text(path: Path) -> str:
    """Read a text that is not part of the repository; exit with an explanation if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise SystemExit(
            f"{path} cannot be read ({error.strerror}); it is not part of the repository, pass another file"
        ) from None


# --- peers that take turns -----------------------------------------------------------------------------------------------


class PeerProcess:
    """A process that prepares the measurements of a peer once and repeats them on request.

    A peer `NAME@COMMIT` imports the library as it was at that commit.
    """

    def __init__(self, build: Callable[[str], Mapping[str, Measure]], peer: str, folder: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other_end = spawn.Pipe()
        name, colon, rest = peer.partition(":")
        name, at, commit = name.partition("@")
        process = spawn.Process(target=_serve, args=(build, name + colon + rest, other_end), daemon=True)
        if at:
            sys.path.insert(0, unpack_commit(commit, folder))  # a process begins with the path of the one that starts it
        process.start()
        if at:
            del sys.path[0]
        other_end.close()  # if the process dies, recv() then raises EOFError instead of waiting forever
        self.peer = peer
        self.measurements: list[str] = self._receive()

    def measure(self, measurement: str) -> float:
        self._pipe.send(measurement)
        return self._receive()

    def close(self) -> None:
        self._pipe.close()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit(f"the process of {self.peer} ended; its error is above") from None


def _serve(build: Callable[[str], Mapping[str, Measure]], peer: str, pipe: Any) -> None:
    measures = build(peer)
    pipe.send(list(measures))
    while True:
        try:
            measurement = pipe.recv()
        except EOFError:
            return
        pipe.send(measures[measurement]())


def unpack_commit(commit: str, folder: Path) -> str:
    """The folder of a commit's library."""
    archive = subprocess.run(["git", "archive", commit, "llama_jax"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        raise SystemExit(f"{commit} is not a commit of this repository: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder / commit, filter="data")
    return str(folder / commit)


def take_turns(
    build: Callable[[str], Mapping[str, Measure]], peers: Sequence[str], repetitions: int, at_end: Sequence[str] = ()
) -> dict[str, Runs]:
    """Measure peers in turn, so that changes of the machine's speed affect all of them: values by measurement and peer.

    Args:
      build: makes the measurements of a peer, by name; a function of a module, since it is called in a process of its own.
      repetitions: turns of each peer; the first is a warm-up and not counted.
      at_end: measurements that are made once, after the turns.
    """
    results: dict[str, Runs] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        processes = []
        for peer in peers:  # one prepares at a time
            processes.append(PeerProcess(build, peer, Path(folder)))
            stack.callback(processes[-1].close)
        names = list(dict.fromkeys(name for process in processes for name in process.measurements))
        for repetition in range(repetitions):
            for name in (name for name in names if name not in at_end):
                for process in (process for process in processes if name in process.measurements):
                    value = process.measure(name)
                    if repetition:
                        results.setdefault(name, {}).setdefault(process.peer, []).append(value)
        for name in at_end:
            results[name] = {process.peer: [process.measure(name)] for process in processes}
    return results


def print_speeds(title: str, runs: Runs) -> None:
    """Print medians and, within turns, the ratios of the first peer's speed to the others': median and range."""
    first = next(iter(runs.values()))
    for peer, speeds in runs.items():
        ratios = [ours / theirs for ours, theirs in zip(first, speeds, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{title:30} {peer:24} {statistics.median(speeds):10.1f}  {spread}", flush=True)


def seconds_of(function: Callable[[], Any], calls: int) -> list[float]:
    """Seconds of each call of a function of arrays, after one that is not counted."""
    import jax

    seconds = []
    for _ in range(calls + 1):
        start = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def write_random_model(path: Path, shape: str, dtype: str | None = None) -> Path:
    """Write a model of a preset, with random weights and a made-up vocabulary, in a file that llama.cpp reads, too."""
    import jax

    import llama_jax
    from llama_jax.tokenizers.sentencepiece import Entry, EntryType, write_model

    config = llama_jax.preset(shape)
    pieces = [Entry("<unk>", 0.0, EntryType.UNKNOWN), *(Entry(text, 0.0, EntryType.CONTROL) for text in ("<s>", "</s>"))]
    pieces += [Entry(f"<0x{byte:02X}>", 0.0, EntryType.BYTE) for byte in range(256)]
    rest = config.vocab_size - len(pieces)
    pieces += [Entry(chr(0x4E00 + i) if i < 20_000 else f"t{i}", -1.0 - i, EntryType.NORMAL) for i in range(rest)]
    vocabulary = path.with_name("tokenizer.model")
    vocabulary.write_bytes(write_model(pieces, bos="<s>", eos="</s>", space_prefix=True))
    tokenizer = llama_jax.load_tokenizer(vocabulary)
    params = jax.jit(partial(llama_jax.init, config))(jax.random.key(0))
    llama_jax.save(path, config, params, tokenizer, dtype=dtype)
    return path
