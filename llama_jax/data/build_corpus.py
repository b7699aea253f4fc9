"""Tokenizes many files into one corpus file before training, on all cores.

The result depends only on the files, the tokenizer and the settings, not on the number of processes or of interruptions.
The files are cut into spans of some megabytes. Each becomes a part, which is a corpus file too; existing parts are not made
again. At the end the parts are joined.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from llama_jax.data.corpus import fingerprints
from llama_jax.data.corpus_file import CorpusInfo, TokenBlock, corpus_blocks, read_corpus, write_corpus
from llama_jax.data.data_files import UNFINISHED, Paths, check_untouched, describe_source, find_files
from llama_jax.data.documents import TOKEN_SUFFIXES, DocumentFormat, Span, file_type, spans_of
from llama_jax.data.load_corpus import VocabularyInfo, examine, read_tokens
from llama_jax.errors import DataError, short_repr
from llama_jax.settings import Bounds, check_fields
from llama_jax.storage import locate, on_disk, resolved
from llama_jax.storage.atomic_write import lock_file, remove, write_atomically
from llama_jax.tokenizers import Tokenizer, load_tokenizer

# Minimum and maximum bytes of a file per part: syncing one to disk takes about 30 ms.
PART_BYTES = (8 << 20, 64 << 20)
PART_COUNT = 128  # parts, within these sizes: enough for the processes of a large machine
CORPUS_NAME = "tokens.corpus"
PART_NAME, ALL_PARTS = "part-{:05d}.unfinished", "part-*.unfinished"
BUILD_LOCK = ".lock"
Call = tuple[Any, ...]
"""A module's function, and its arguments, all picklable."""
CallProgress = Callable[[int, int], None]
"""Called after each call with the numbers done and in total."""
Workers = Callable[[Sequence[Call], CallProgress | None], list[Any]]
"""Runs calls anywhere and returns their results in order; the first error ends it."""


@dataclass(frozen=True)
class BuildOptions:
    """Settings of a build.

    Attributes:
      reading: where documents end, see `DocumentFormat`.
      unit: approximate bytes of a file per part; documents are not split between parts. Compressed files are
        read whole. None means a 128th of all files, between 8 and 64 MiB.
      drop_duplicates: whether to keep only the first of several documents with the same tokens.
    """

    reading: DocumentFormat = DocumentFormat()
    unit: Annotated[int, Bounds(1)] | None = None
    drop_duplicates: bool = False

    def __post_init__(self) -> None:
        check_fields(self, DataError)


class PartJob(NamedTuple):
    """The settings of a worker process, the same for all parts."""

    folder: str
    tokenizer: str
    reading: DocumentFormat


def tokenize_files(
    paths: Paths,
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    *,
    options: BuildOptions = BuildOptions(),
    processes: int | None = None,
    workers: Workers | None = None,
    progress: CallProgress | None = None,
) -> CorpusInfo:
    """Tokenize files into ``tokens.corpus`` in a folder, for `open_corpus` and ``train``.

    An interrupted build in the folder is resumed; if it is finished its description is returned, whose ``origin`` has the
    sources with their sizes and SHA-256, the tokenizer, the settings, and the number of duplicates dropped.

    Args:
      paths: text, JSONL, JSON, Parquet and Arrow, the first three also compressed by gzip or zstd, or folders of them.
      tokenizer: a vocabulary's file or folder; every process reads it.
      processes: number of processes, by default one per available core; 1 starts none.
      workers: used instead of processes on this machine; they need the same paths for `out`, the files and the tokenizer.
      progress: called after each part with the numbers done and in total.

    Raises:
      DataError: files that cannot be read, that changed or that hold no document; or a folder that holds something else,
        was begun with other settings, or is in use by another process.
    """
    files, folder = find_files(paths), resolved(on_disk(out, "the folder of a build"))
    for path in map(locate, [paths] if isinstance(paths, str | os.PathLike) else paths):
        if isinstance(path, Path) and path.is_dir() and folder.is_relative_to(resolved(path)):
            raise DataError(f"{folder} is inside {path}, so it would be read as data next time; use a folder elsewhere")
    for file in files:
        if file_type(file) in TOKEN_SUFFIXES:
            raise DataError(f"{file} already holds token ids; build from text, JSONL, JSON, Parquet or Arrow")
    with (
        lock_file(folder / BUILD_LOCK, folder, DataError),
        process_pool(processes or cpu_count()) if workers is None else nullcontext(workers) as pool,
    ):
        return _build(files, folder, tokenizer, options, pool, progress)


def _build(
    files: Sequence[Path],
    folder: Path,
    tokenizer: str | os.PathLike[str],
    options: BuildOptions,
    workers: Workers,
    progress: CallProgress | None,
) -> CorpusInfo:
    where, reading = os.fspath(resolved(locate(tokenizer))), options.reading
    vocabulary = examine(load_tokenizer(tokenizer))
    sources = workers([(describe_source, file) for file in files], None)
    size = options.unit or min(max(sum(source.size for source in sources) // PART_COUNT, PART_BYTES[0]), PART_BYTES[1])
    plan: dict[str, Any] = {
        "files": [str(file) for file in files],
        "sources": [[source.size, source.sha256] for source in sources],
        "fingerprint": vocabulary.fingerprint,
        "reading": asdict(reading),
        "drop_duplicates": options.drop_duplicates,
    }
    info = _begin(folder, plan, size)
    spans = workers([(spans_of, file, reading, size) for file in files], None) if info is None else []
    units = [(str(file), span) for file, some in zip(files, spans, strict=False) for span in some]
    parts = [folder / PART_NAME.format(number) for number in range(len(units))]
    if info is None:
        job = PartJob(str(folder), where, reading)
        workers([(make_part, job, number, *unit) for number, unit in enumerate(units)], progress)
        for file, source in zip(files, sources, strict=True):
            check_untouched(file, source)
        info = _join_parts(folder / CORPUS_NAME, parts, vocabulary, plan | {"tokenizer": where})
    for path in (*folder.glob(ALL_PARTS), folder / UNFINISHED):
        remove(path)
    if not info.documents:
        remove(folder / CORPUS_NAME)
        subject = f"{files[0]} holds" if len(files) == 1 else f"{files[0]} and {len(files) - 1} more hold"
        raise DataError(f"{subject} no document; are these the right files?")
    return info


def make_part(job: PartJob, number: int, path: str, span: Span | None) -> None:
    """Write the part for a span of a file, unless it exists."""
    part = Path(job.folder) / PART_NAME.format(number)
    with suppress(DataError, FileNotFoundError):
        read_corpus(part)
        return
    tokenizer, vocabulary = _loaded(job.tokenizer)
    write_corpus(part, read_tokens(Path(path), tokenizer, vocabulary, job.reading, span), vocabulary.size, {})


@lru_cache(maxsize=1)
def _loaded(path: str) -> tuple[Tokenizer, VocabularyInfo]:
    tokenizer = load_tokenizer(path)
    return tokenizer, examine(tokenizer)


def _join_parts(path: Path, parts: Sequence[Path], vocabulary: VocabularyInfo, origin: dict[str, Any]) -> CorpusInfo:
    """Write the documents of all parts in order; with `drop_duplicates`, only the first of those with the same tokens."""
    corpora = [read_corpus(part)[0] for part in parts]
    duplicates = 0
    if origin["drop_duplicates"] and corpora:
        marks = np.concatenate([fingerprints(corpus) for corpus in corpora])
        is_first = np.zeros(len(marks), bool)
        is_first[np.unique(marks, return_index=True)[1]] = True
        duplicates = len(is_first) - int(is_first.sum())
        ends = np.cumsum([corpus.document_count for corpus in corpora])[:-1]
        corpora = [
            corpus.select(np.flatnonzero(selected))
            for corpus, selected in zip(corpora, np.split(is_first, ends), strict=True)
        ]

    def blocks() -> Iterator[TokenBlock]:
        for corpus in corpora:
            yield from corpus_blocks(corpus)

    return write_corpus(path, blocks(), vocabulary.size, origin | {"duplicates": duplicates})


# --- the folder ----------------------------------------------------------------------------------------------------------


def _begin(folder: Path, plan: dict[str, Any], size: int) -> CorpusInfo | None:
    """Write the plan of a build into a folder, if it can begin or resume there; the description of a finished build.

    Raises:
      DataError: the folder holds something else, a damaged corpus, or a build with another plan.
    """
    plan_file = folder / UNFINISHED
    if (folder / CORPUS_NAME).is_file():
        info = read_corpus(folder / CORPUS_NAME)[1]
        _check_plan(folder, info.origin, plan)
        return info
    plan = plan | {"unit": size}
    if plan_file.is_file():
        if any(folder.glob(ALL_PARTS)):
            stored_plan: Any = None
            with suppress(ValueError, RecursionError):
                stored_plan = json.loads(plan_file.read_bytes())
            _check_plan(folder, stored_plan if isinstance(stored_plan, dict) else {}, plan)
            return None
    else:
        other = next((entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")), None)
        if other is not None:
            raise DataError(f"{folder} holds {short_repr(other.name, 40)}, not a build; use an empty folder, or a new one")
    with write_atomically(plan_file, raises=DataError) as target:
        target.write_text(json.dumps(plan), "utf-8")
    return None


def _check_plan(folder: Path, stored_plan: dict[str, Any], plan: dict[str, Any]) -> None:
    changed = [name for name, value in plan.items() if stored_plan.get(name) != value]
    if changed:
        raise DataError(f"{folder} was built with different {', '.join(changed)}; use another folder, or remove it")


# --- processes -----------------------------------------------------------------------------------------------------------


def cpu_count() -> int:
    """The number of cores available to this process, or of all cores if that is unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def process_pool(processes: int) -> Iterator[Workers]:
    """A pool of processes, started when there is work and ended with this context; 1 runs calls in this process."""
    if processes == 1:
        yield call_serially
        return
    # Spawned, not forked: a fork would lack the threads of libraries that are imported here.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin_process) as pool:
        yield partial(_call_in, pool)


def call_serially(calls: Sequence[Call], progress: CallProgress | None = None) -> list[Any]:
    """Workers that run calls in this process."""
    results = []
    for function, *args in calls:
        results.append(function(*args))
        if progress is not None:
            progress(len(results), len(calls))
    return results


def _call_in(pool: ProcessPoolExecutor, calls: Sequence[Call], progress: CallProgress | None = None) -> list[Any]:
    """Run calls in a pool; those that have started are finished even if another one fails."""
    running: list[Future[Any]] = [pool.submit(*call) for call in calls]
    try:
        for done, future in enumerate(as_completed(running), 1):
            future.result()
            if progress is not None:
                progress(done, len(calls))
    except BrokenProcessPool:
        raise DataError(
            "a process ended early, perhaps for lack of memory; the same command resumes, and takes less memory with"
            " fewer --processes"
        ) from None
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    return [future.result() for future in running]


def _begin_process() -> None:
    """Set up a worker: Ctrl-C is left to the main process; the worker ends with the main process, however that dies; and
    libraries start no threads, since it is one of many workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    threading.Thread(target=_end_with_the_first, daemon=True).start()


def _end_with_the_first() -> None:
    if (first := multiprocessing.parent_process()) is not None:
        first.join()
        os._exit(1)
