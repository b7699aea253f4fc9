"""A function mapped over many arguments by a process for each core."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any

from llama_jax.errors import DataError

Call = tuple[Any, ...]
"""A function of a module, and its arguments: whatever can be pickled."""
Progress = Callable[[int, int], None]
"""Called after each call with how many are done, of how many."""
Workers = Callable[[Sequence[Call], Progress | None], list[Any]]
"""Returns the results of the calls in their order, wherever they run; the first that fails ends it."""


def cores() -> int:
    """The number of cores that this process may use, if the system tells; else of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def working(processes: int) -> Iterator[Workers]:
    """This many processes, started when there is work and ended with this object; 1 runs in the first process itself."""
    if processes == 1:
        yield call_here
        return
    # Anew and not by fork: the threads of libraries that are imported here would be missing there.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin_process) as pool:
        yield partial(_call_in, pool)


def call_here(calls: Sequence[Call], progress: Progress | None = None) -> list[Any]:
    """Workers that are this process."""
    found = []
    for function, *args in calls:
        found.append(function(*args))
        if progress is not None:
            progress(len(found), len(calls))
    return found


def _call_in(pool: ProcessPoolExecutor, calls: Sequence[Call], progress: Progress | None = None) -> list[Any]:
    """What has begun is finished also where another call fails."""
    running: list[Future[Any]] = [pool.submit(*call) for call in calls]
    try:
        for done, future in enumerate(as_completed(running), 1):
            future.result()
            if progress is not None:
                progress(done, len(calls))
    except BrokenProcessPool:
        raise DataError(
            "a process ended early, perhaps for lack of memory; the same command continues with the rest, and with"
            " fewer --processes takes less memory"
        ) from None
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    return [future.result() for future in running]


def _begin_process() -> None:
    """Set up a worker: Ctrl-C is left to the first process; the worker ends with that one, however it dies; and libraries
    start no threads of their own in it, since it is one of many."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    threading.Thread(target=_end_with_the_first, daemon=True).start()


def _end_with_the_first() -> None:
    if (first := multiprocessing.parent_process()) is not None:
        first.join()
        os._exit(1)
