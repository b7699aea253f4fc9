"""A Python program in a child process with limits of time and memory, for work that may never end.

The program is a file that imports nothing from this library, so that it starts quickly. Its `begin(initial)` returns the
function that answers requests. All values are JSON, one per line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from importlib import import_module
from pathlib import Path
from typing import Any

MEMORY_PER_BYTE = 16  # additional memory per byte of a request, because texts are copied on the way
WALL_FACTOR = 10  # limit of wall time, as a multiple of that of CPU time, for busy machines


class ChildProcess:
    """A process that answers requests one by one. It starts on first use and again after it has ended, and ends with this
    object or this process. Thread-safe.

    Args:
      script: file of the program.
      seconds: CPU time that a request may take; wall time is limited to WALL_FACTOR times as much.
      memory: bytes that a request may take in addition to what the process has, on Linux.
      initial: the argument of `begin`.
      niceness: minimum niceness of the process; higher values give other processes priority.
    """

    def __init__(self, script: Path, seconds: int, memory: int, initial: Any = None, niceness: int = 0) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        # Without `site`, which can take longer than everything else; packages are found where this process finds them.
        limits = map(str, (seconds, memory, niceness))
        self._command = [sys.executable, "-S", "-s", "-P", __file__, str(script), *limits]
        self._wall_seconds = WALL_FACTOR * seconds
        self._initial = _line(initial)
        self._lock = threading.Lock()

    def ask(self, request: Any) -> Any:
        """The answer; None if the process has exceeded a limit or failed, or does not start.

        Raises:
          TypeError, ValueError, RecursionError: the request is not JSON.
        """
        line, answer = _line(request), b""
        with self._lock:
            try:
                process = self._running()
                assert process.stdin is not None
                assert process.stdout is not None
                timer = threading.Timer(self._wall_seconds, process.kill)
                timer.daemon = True
                timer.start()
                try:
                    process.stdin.write(line)
                    process.stdin.flush()
                    answer = process.stdout.readline()
                finally:
                    timer.cancel()
            except (OSError, ValueError):  # ValueError: another thread has closed it
                pass
            if not answer.endswith(b"\n"):
                self.close()
                return None
            return json.loads(answer)

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self.process.poll() is not None:
            self.close()
        if self.process is None:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self.process = subprocess.Popen(self._command, env=environment, **pipes)
            self._end = weakref.finalize(self, _end, self.process)
            assert self.process.stdin is not None
            self.process.stdin.write(self._initial)
        return self.process

    def close(self) -> None:
        """Kill the process; the next request starts a new one."""
        process, self.process = self.process, None
        if process is not None:
            self._end()


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _main(script: Path, seconds: int, memory: int, niceness: int) -> None:
    """Run a program in this process: answer requests until the input ends."""
    if niceness and hasattr(os, "nice"):
        os.nice(max(niceness - os.nice(0), 0))  # the starting thread may already have a low priority
    sys.path.append(str(script.parent))
    answer = import_module(script.stem).begin(json.loads(sys.stdin.buffer.readline()))
    for line in sys.stdin.buffer:
        _limit(seconds, memory + MEMORY_PER_BYTE * len(line))
        sys.stdout.buffer.write(_line(answer(json.loads(line))))
        sys.stdout.buffer.flush()


def _limit(seconds: int, memory: int) -> None:
    """End this process if it takes more than this from now on."""
    if sys.platform != "win32":
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + memory, resource.RLIM_INFINITY))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
