"""Commands that end in order: what they were writing is gone, and the exit code is the signal's."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from llama_jax.cli.terminal import clean_exit

PROGRAM = """
import os, signal, sys
from pathlib import Path
from llama_jax.cli.terminal import clean_exit
from llama_jax.storage.atomic_write import write_atomically

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background process ignores
with clean_exit("stopped"), write_atomically(Path(sys.argv[1])) as target:
    target.write_text("half")
    os.kill(os.getpid(), signal.{0})
print("went on")
"""


def test_a_command_ends_while_its_main_thread_is_in_compiled_code():
    """A hash that takes an hour stands for a compilation: Python's handlers wait for its end."""
    program = """
import hashlib
from llama_jax.runs import interrupts

interrupts.install()
print("begins", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "\nllama-jax: stopped\n")


@pytest.mark.parametrize("name", ["SIGINT", *(pytest.param(x, marks=pytest.mark.slow) for x in ("SIGTERM", "SIGHUP"))])
def test_what_was_being_written_is_removed(name, tmp_path):
    command = [sys.executable, "-c", PROGRAM.format(name), tmp_path / "file"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.Signals[name], "")
    assert done.stderr == "\nllama-jax: stopped\n"
    assert not os.listdir(tmp_path)


def test_a_signal_in_a_destructor_is_not_lost(monkeypatch, capsys):
    """What is raised there Python prints, and goes on."""

    class Dying:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    def work():
        with clean_exit("stopped"):
            Dying()
            threading.Event().wait(20)

    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        work()
    assert ended.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "\nllama-jax: stopped\n"


def test_what_is_ignored_stays_ignored(tmp_path):
    """As under nohup."""
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + PROGRAM.format("SIGHUP")
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "file"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert (tmp_path / "file").read_text() == "half"
