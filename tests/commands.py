"""Commands run in the process of the tests: to start Python and JAX for each would take most of a test's time.

What belongs to a process (signals, pipes, terminals, devices, what is imported) is tested with processes, in the same files.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys

import jax
import pytest

from llama_jax.cli import main

DEVICES = 8
"""CPU devices that the tests' process has; see conftest."""
PROGRAM = (sys.executable, "-c", "from llama_jax.cli import main; main()")


def outcome(*arguments: object) -> tuple[int, str, str]:
    """`llama-jax ARGUMENTS`: exit code, stdout and stderr."""
    done = run_here(*arguments)
    return done.returncode, done.stdout, done.stderr


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error that the user can fix, which comes with exit code 2 and before any output."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("llama-jax: error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def run_here(*arguments: object, lines: bytes = b"") -> subprocess.CompletedProcess[str]:
    """`llama-jax ARGUMENTS` with `lines` as its input: exit code, stdout and stderr, as `subprocess.run` gives them.

    Any exception but SystemExit is the test's: it would have been a traceback.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    update = jax.config.update

    def update_once(name: str, value: object) -> None:
        """JAX has started: what a command asks of it before that can only be checked."""
        if name == "jax_num_cpu_devices":
            assert isinstance(value, int)
            assert value <= DEVICES
        elif name != "jax_platforms":
            update(name, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["llama-jax", *map(str, arguments)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8", errors="surrogateescape"))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.setattr(jax.config, "update", update_once)
        patch.setattr("llama_jax.cli.jax_setup.use_compilation_cache", lambda *_: None)
        # A command's clock would go on listening in the tests that follow.
        patch.setattr(jax.monitoring, "register_event_duration_secs_listener", lambda listener: None)
        patch.setenv("COLUMNS", "200")
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            for name, handler in handlers.items():
                signal.signal(name, handler)
    texts = (stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err))
    return subprocess.CompletedProcess(arguments, code, *texts)


def environment(**more: object) -> dict[str, str]:
    """The variables of a process of its own, which looks for no accelerator."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "200"} | {name: str(value) for name, value in more.items()}


def process(*arguments: object, lines: str | None = None, **variables: object) -> subprocess.CompletedProcess[str]:
    """`llama-jax ARGUMENTS` as a process of its own, with `lines` as its input."""
    command, variables_ = [*PROGRAM, *map(str, arguments)], environment(**variables)
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=600, env=variables_, check=False)
