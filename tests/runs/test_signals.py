"""Signals at a terminal that has hung up, and in a step that does not end; of several processes: test_several_processes."""

import errno
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from running import environment_fixture, text_fixture  # noqa: F401  # two fixtures

from llama_jax.runs import signals
from llama_jax.runs.log import Log


def test_a_terminal_that_has_hung_up_does_not_stop_the_saving(monkeypatch, tmp_path):
    """stdout and stderr then give errors, and it is the signal's handler that would raise them."""

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with (tmp_path / "terminal").open("w") as terminal:
        stream = SimpleNamespace(isatty=lambda: True, write=fail, fileno=terminal.fileno)
        log = Log(stream)
        with signals.StopRequest() as request, monkeypatch.context() as patch:
            request.begin_steps()
            patch.setattr(os, "write", fail)
            signal.raise_signal(signal.SIGHUP)
            log.line("stopped and saved")
            log.end()
        assert request.name == "SIGHUP"


LONG_STEPS = """
import threading
from dataclasses import replace

import jax
import numpy as np
from mortal_run import recipe

from llama_jax.training.loss import total_loss

steps = 0


def hang():
    global steps
    steps += 1
    if steps > {quick}:
        print("in the step", flush=True)
        threading.Event().wait()
    return np.float32(0)


def loss(config, params, *others):
    zero = jax.pure_callback(hang, jax.ShapeDtypeStruct((), "float32"))
    return total_loss(config, params.replace(embedding=params.embedding + zero), *others)


def long():
    return replace(recipe(), evaluate_every=0, save_every=1, loss=loss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("quick", [0, 3])
def test_ctrl_c_within_a_step_that_does_not_end(quick, text, environment, tmp_path):
    """The first step has nothing to save and is left at once; a later one is left by the second Ctrl-C."""
    (tmp_path / "long.py").write_text(LONG_STEPS.replace("{quick}", str(quick)))
    command = [sys.executable, "-m", "llama_jax", "train", f"{tmp_path / 'long.py'}:long", "--data", text]
    command += ["--workdir", tmp_path / "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "in the step" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        process.send_signal(signal.SIGINT)
        if quick:
            while "SIGINT" not in (line := process.stderr.readline()):
                assert line
            assert line.startswith("SIGINT: finishing and saving this step")
            assert "Ctrl-C stops at once, and --resume then continues from step 2" in line
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    how = "without saving, and --resume continues from step 2"
    how = how if quick else "before its first step; there was nothing to save"
    assert err.endswith(f"llama-jax: stopped {how}\n")
    assert process.returncode == 130
