"""A bounded pool of daemon threads: unlike with `concurrent.futures` and asyncio, nothing waits for them at exit."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from llama_jax.serving.requests import BusyError

LOW_NICENESS = 10  # niceness of work with lower priority than the engine: on a busy machine it gets a tenth of a core
IDLE_SECONDS = 1.0  # time that an idle thread waits for more work before it ends
T = TypeVar("T")


class DaemonThreadPool:
    """Runs functions in a few threads, in the order of submission.

    Args:
      name: name of the threads, and of the work in error messages.
      most_waiting: maximum number of functions that wait for a thread; None for no limit.
      niceness: niceness of the threads, on systems with one per thread. Threads inherit it: do not use it for threads that
        may start XLA's.
    """

    def __init__(self, name: str, threads: int, most_waiting: int | None = None, niceness: int = 0) -> None:
        self._name = name
        self._niceness = niceness
        self._threads = threads
        self._most_waiting = most_waiting
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._alive = self._idle = self._busy = 0  # threads

    @property
    def waiting(self) -> int:
        """The number of functions that wait for a thread."""
        return len(self._work)

    def submit(self, run: Callable[[], T]) -> Future[T]:
        """The future result of a function; it can be cancelled until a thread starts it.

        Raises:
          BusyError: the maximum number of functions is already waiting.
        """
        future: Future[T] = Future()
        with self._changed:
            unfinished = len(self._work) + self._busy
            if self._most_waiting is not None and unfinished >= self._threads + self._most_waiting:
                raise BusyError(
                    f"{len(self._work)} requests wait for {self._name}, which is the limit; try again later", 2.0
                )
            self._work.append((future, run))
            if self._idle < len(self._work) and self._alive < self._threads:
                self._alive += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            else:
                self._changed.notify()
        return future

    def _run(self) -> None:
        if self._niceness and sys.platform == "linux":
            this = os.PRIO_PROCESS, threading.get_native_id()
            os.setpriority(*this, os.getpriority(*this) + self._niceness)
        while True:
            with self._changed:
                self._idle += 1
                has_work = self._changed.wait_for(lambda: self._work, IDLE_SECONDS)
                self._idle -= 1
                if not has_work:
                    self._alive -= 1
                    return
                future, run = self._work.popleft()
                self._busy += 1
            is_active = future.set_running_or_notify_cancel()
            try:
                set_result = partial(future.set_result, run()) if is_active else None
            except BaseException as error:
                set_result = partial(future.set_exception, error)
            with self._changed:
                self._busy -= 1
            if set_result is not None:
                set_result()
            del future, run, set_result
