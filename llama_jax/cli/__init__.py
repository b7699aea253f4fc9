"""The command line: one file per command. Heavy imports wait until a command runs, so that ``--help`` is quick."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import tyro

import llama_jax
from llama_jax.cli.generate import Generate
from llama_jax.cli.quickstart import Quickstart
from llama_jax.errors import UserError

Command = (
    Annotated[Generate, tyro.conf.subcommand("generate", prefix_name=False)]
    | Annotated[Quickstart, tyro.conf.subcommand("quickstart", prefix_name=False)]
)


def main() -> None:
    """Run the command that the arguments name. Exit codes: 2 for what the user can mend, 130 for Ctrl-C."""
    if sys.argv[1:] == ["--version"]:
        print(f"llama-jax {llama_jax.__version__}")
        return
    command = tyro.cli(
        Command, prog="llama-jax", description="Llama in JAX, as pure functions. --version prints the version."
    )
    try:
        command.run()
    except (UserError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader of stdout has left (`| head`): nothing to say, and nothing may be flushed at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        print(f"llama-jax: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nllama-jax: stopped", file=sys.stderr, flush=True)
        # Not sys.exit: XLA may be compiling in a thread of its own, and Python would take the interpreter from under it.
        os._exit(130)
