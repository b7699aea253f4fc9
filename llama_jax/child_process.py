"""A Python program in a child process, for work that may never end: the process is killed at its time limit.

The program is a file that imports nothing from this library, so that it starts quickly. Its `begin(source, *arguments)` may
read initial input from `source`, and returns the function that answers requests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

START_SECONDS = 60  # time limit for starting a process, allowing for a slow disk


def isolated(script: Path, packages: Sequence[str], *arguments: str, niceness: int = 0) -> tuple[list[str], dict[str, str]]:
    """The command and the environment that run a program with only these packages, which must be installed.

    Args:
      niceness: minimum niceness of the process; higher values give other processes priority.
    """
    # Without `site`, which can take longer than everything else; packages are found where this process has them.
    places = [str(Path(spec.origin).parents[1]) for name in packages if (spec := find_spec(name)) and spec.origin]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON") or name == "PYTHONHOME"}
    command = [sys.executable, "-S", "-s", "-P", __file__, str(niceness), str(script), *arguments]
    return command, inherited | {"PYTHONPATH": os.pathsep.join(places)}


class ChildProcess:
    """A process that answers requests one by one. It starts on first use and again after it was killed, and ends with this
    object or this process.

    It writes one byte when it is ready. Requests and answers are preceded by their lengths, as 8 bytes. Thread-safe.

    Args:
      command, environment: from `isolated`.
      seconds: time limit for a request, unless a timer inside the process ends it earlier.
      first: initial input of each new process, which it reads before it is ready.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], seconds: float, first: bytes = b"") -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._command = command
        self._environment = environment
        self._seconds = seconds
        self._first = first
        self._lock = threading.Lock()

    def ask(self, request: bytes, *, again: bool = False) -> bytes | None:
        """The answer; None if the process did not answer in time and was killed. If the process has ended or the pipe breaks
        before the whole request is sent, the request is retried once in a new process.

        Args:
          again: also retry, once, if a process that has answered requests before does not answer this one.
        """
        with self._lock:
            if self.process is not None and self.process.poll() is not None:
                self.close()
            for is_new in (self.process is None, True):
                answer, is_sent = self._try(request)
                if answer is not None:
                    return answer
                was_closed = self.process is None  # by another thread, to end it
                self.close()
                if is_new or was_closed or (is_sent and not again):
                    break
            return None

    def _try(self, request: bytes) -> tuple[bytes | None, bool]:
        """The answer, or None, and whether the request was sent."""
        size, answer, is_sent = -1, b"", False
        try:
            process = self.process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(self._seconds, process.kill)
            timer.daemon = True
            timer.start()
            try:
                process.stdin.write(len(request).to_bytes(8, "big") + request)
                process.stdin.flush()
                is_sent = True
                size = int.from_bytes(process.stdout.read(8), "big")
                answer = process.stdout.read(size)
            finally:
                timer.cancel()
        except (OSError, ValueError):  # ValueError: `close` has closed its pipes
            pass
        return (answer if answer and len(answer) == size else None), is_sent

    def _start(self) -> subprocess.Popen[bytes]:
        process = self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
        )
        self._end = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(START_SECONDS, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(self._first)
            process.stdin.flush()
            process.stdout.read(1)
        finally:
            timer.cancel()
        return process

    def close(self) -> None:
        """Kill the process; the next request starts a new one."""
        process, self.process = self.process, None
        if process is not None:
            self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _main(niceness: int, script: str, *arguments: str) -> None:
    """Run a program in this process: signal that it is ready, and answer requests until the input ends."""
    source, out = sys.stdin.buffer, sys.stdout.buffer
    if niceness and hasattr(os, "nice"):
        os.nice(max(niceness - os.nice(0), 0))  # the starting thread may already have a low priority
    spec = spec_from_file_location("program", script)
    assert spec is not None
    assert spec.loader is not None
    program = module_from_spec(spec)
    spec.loader.exec_module(program)
    answer = program.begin(source, *arguments)
    out.write(b"r")
    out.flush()
    while size := source.read(8):
        reply = answer(source.read(int.from_bytes(size, "big")))
        out.write(len(reply).to_bytes(8, "big"))
        out.write(reply)
        out.flush()
        del reply


if __name__ == "__main__":
    _main(int(sys.argv[1]), *sys.argv[2:])
