"""The command line: one file per command. Heavy imports wait until a command runs, so that ``--help`` is quick."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import tyro

import llama_jax
from llama_jax.cli.arguments import arranged
from llama_jax.cli.batch import BatchPrompts
from llama_jax.cli.chat import Chat
from llama_jax.cli.convert import Convert
from llama_jax.cli.data import Data
from llama_jax.cli.estimate import Estimate
from llama_jax.cli.eval import Eval
from llama_jax.cli.generate import Generate
from llama_jax.cli.inspect import Inspect
from llama_jax.cli.lm_eval import LmEval
from llama_jax.cli.merge import Merge
from llama_jax.cli.needle import Needle
from llama_jax.cli.plot import Plot
from llama_jax.cli.quickstart import Quickstart
from llama_jax.cli.serve import Serve
from llama_jax.cli.train import Train
from llama_jax.cli.verify import Verify
from llama_jax.errors import StuckSaveError, UserError, reason_of
from llama_jax.writing import cannot_write, remedy_for, send_nowhere

Command = (
    Annotated[Generate, tyro.conf.subcommand("generate", prefix_name=False)]
    | Annotated[Estimate, tyro.conf.subcommand("estimate", prefix_name=False)]
    | Annotated[Inspect, tyro.conf.subcommand("inspect", prefix_name=False)]
    | Annotated[Verify, tyro.conf.subcommand("verify", prefix_name=False)]
    | Annotated[BatchPrompts, tyro.conf.subcommand("batch", prefix_name=False)]
    | Annotated[Serve, tyro.conf.subcommand("serve", prefix_name=False)]
    | Annotated[Chat, tyro.conf.subcommand("chat", prefix_name=False)]
    | Annotated[Convert, tyro.conf.subcommand("convert", prefix_name=False)]
    | Annotated[Merge, tyro.conf.subcommand("merge", prefix_name=False)]
    | Annotated[Data, tyro.conf.subcommand("data", prefix_name=False)]
    | Annotated[Eval, tyro.conf.subcommand("eval", prefix_name=False)]
    | Annotated[LmEval, tyro.conf.subcommand("lm-eval", prefix_name=False)]
    | Annotated[Needle, tyro.conf.subcommand("needle", prefix_name=False)]
    | Annotated[Plot, tyro.conf.subcommand("plot", prefix_name=False)]
    | Annotated[Train, tyro.conf.subcommand("train", prefix_name=False)]
    | Annotated[Quickstart, tyro.conf.subcommand("quickstart", prefix_name=False)]
)


def main() -> None:
    """Run the command that the arguments name. Exit codes: 2 for what the user can fix, 130 for Ctrl-C."""
    signal.signal(signal.SIGINT, _interrupted)
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end a command
    try:
        if sys.argv[1:] == ["--version"]:
            print(f"llama-jax {llama_jax.__version__}")
            return
        about = "Llama in JAX, as pure functions. --version prints the version."
        tyro.cli(Command, prog="llama-jax", description=about, args=arranged(sys.argv[1:])).run()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout has left (`| head`): nothing to say, and nothing may be flushed at exit.
        send_nowhere(sys.stdout.fileno())
        sys.exit(1)
    except StuckSaveError as error:
        print("llama-jax: error:", " ".join(str(error).split("\n")), file=sys.stderr, flush=True)
        os._exit(2)  # an end in order would wait for the threads that hang
    except (UserError, OSError) as error:
        _end(_of_stdout(error) or " ".join(str(error).split("\n")))
    except MemoryError as error:
        _end(f"the machine's memory is too small ({reason_of(error, 200) or 'nothing is left'}); try --dtype bfloat16")
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _end(f"the device's memory is too small ({reason_of(error, 200)}); try --dtype bfloat16")


def _end(said: str) -> NoReturn:
    print("llama-jax: error:", said, file=sys.stderr)
    sys.exit(2)


def _open_closed_streams() -> None:
    """Of a process that was started without them (`>&-`), stdin, stdout and stderr are nowhere: no file that is opened
    later may get their numbers, and what is written to them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _of_stdout(error: Exception) -> str | None:
    """The message of an error of writing that names no file: of those with a name each is told by whom writes it."""
    if not isinstance(error, OSError) or error.filename is not None or not remedy_for(error):
        return None
    send_nowhere(sys.stdout.fileno())  # so that nothing is tried again at exit
    return cannot_write(Path("stdout"), error)


def _interrupted(*_: object) -> None:
    """Leave at once: XLA may be compiling in threads of its own, and a Python that ends in order pulls itself from under
    them; nor do extension modules survive an exception while they are imported."""
    os.write(sys.stderr.fileno(), b"\nllama-jax: stopped\n")
    os._exit(130)
