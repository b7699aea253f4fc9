"""The command line: one file per command. Heavy imports wait until a command runs, so that ``--help`` is quick."""

from __future__ import annotations

import atexit
import difflib
import gc
import importlib
import io
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import llama_jax
from llama_jax.cli.arguments import arranged, check_settings, recipe_asked_about
from llama_jax.cli.stopping import end_at_once
from llama_jax.errors import StuckSaveError, UserError, reason_of, shown
from llama_jax.storage.atomic_write import cannot_write, discard_output, remedy_for

# By group: a command, its class in the file of the command's name, and what it does, in one line of at most 80 columns.
COMMANDS = {
    "Generate and serve": {
        "generate": ("Generate", "Continue a prompt, or every prompt of a .jsonl."),
        "chat": ("Chat", "Talk with a chat model in the terminal."),
        "serve": ("Serve", "Serve a model over HTTP with OpenAI's API and a page."),
        "batch": ("BatchPrompts", "Continue the prompts of a large file; it can be resumed."),
    },
    "Get, look at and convert models": {
        "fetch": ("Fetch", "Download a model from the Hugging Face hub."),
        "inspect": ("Inspect", "Show what is in a model's files."),
        "verify": ("Verify", "Compare a model's logits and layers with a reference."),
        "convert": ("Convert", "Write a model in another format: safetensors, GGUF, ..."),
        "merge": ("Merge", "Add a LoRA adapter to a model's weights."),
    },
    "Train and evaluate": {
        "train": ("Train", "Train, fine-tune or distill a model by a recipe."),
        "data": ("Data", "Show training data as tokens, or tokenize it ahead."),
        "eval": ("Eval", "Measure loss and perplexity on texts, chats, preferences."),
        "lm-eval": ("LmEval", "Run tasks of the lm-evaluation-harness."),
        "plot": ("Plot", "Draw the curves of training runs."),
    },
    "Plan and set up": {
        "estimate": ("Estimate", "Compute memory, communication and time before a run."),
        "compile": ("Compile", "Compile a model's programs ahead, for a quick start."),
        "quickstart": ("Quickstart", "Check the installation with a small random model."),
        "completion": ("Completion", "Print a completion script for your shell."),
    },
}
ABOUT = """\
usage: llama-jax COMMAND [OPTIONS]

Llama in JAX: load, run, train, measure and serve models. A first try, with the
small model of the package: llama-jax generate "Once upon a time"
"""
MORE = """\
  llama-jax COMMAND --help        list the options of a command
  llama-jax train RECIPE --help   list the settings of a recipe
  llama-jax --version             print the version
"""


def main() -> None:
    """Run the command that the arguments name. Exit codes: 2 for what the user can fix, 130 for Ctrl-C."""
    _collect_seldom()
    signal.signal(signal.SIGINT, _interrupted)
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal cannot show must not end a command
    try:
        _run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout has left (`| head`): nothing to say, and nothing may be flushed at exit.
        discard_output(sys.stdout.fileno())
        sys.exit(1)
    except StuckSaveError as error:
        end_at_once(error)
    except (UserError, OSError) as error:
        _end(_of_stdout(error) or _of_here(error) or " ".join(str(error).split("\n")))
    except ValueError as error:
        if "for JAX flag" not in str(error):  # which JAX reads from the environment when it is imported
            raise
        _end(f"{reason_of(error, 200)}; give the variable of this name another value, or none")
    except MemoryError as error:
        _end(f"the machine's memory is too small ({reason_of(error, 200) or 'nothing is left'}); {_smaller()}")
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _end(f"the device's memory is too small ({reason_of(error, 200)}); {_smaller()}")


def _smaller() -> str:
    """What to try where memory is too small; a training run is told its settings as KEY=VALUE."""
    return "try dtype=bfloat16 or a smaller batch" if sys.argv[1:2] == ["train"] else "try --dtype bfloat16"


def overview() -> str:
    """The help of the program: its commands by group."""
    groups = [
        "\n".join([group, *(f"  {name:<12}{about}" for name, (_, about) in commands.items())])
        for group, commands in COMMANDS.items()
    ]
    return "\n".join([ABOUT, "\n\n".join(groups), "", MORE]).rstrip()


def command_type(name: str) -> Any:
    """The class of a command, from its file; UserError if there is no such command."""
    classes = {command: kind for commands in COMMANDS.values() for command, (kind, _) in commands.items()}
    if name not in classes:
        near = difflib.get_close_matches(name, classes, 1)
        meant = f"did you mean {near[0]}?" if near else "llama-jax --help lists the commands"
        raise UserError(f"there is no command {shown(name)}; {meant}")
    return getattr(importlib.import_module(f"llama_jax.cli.{name.replace('-', '_')}"), classes[name])


def _run(arguments: list[str]) -> None:
    name = arguments[0] if arguments else ""
    if not name:
        print(overview(), file=sys.stderr)
        sys.exit(2)
    if name in ("-h", "--help"):
        print(overview())
        return
    if name == "--version":
        print(f"llama-jax {llama_jax.__version__}")
        return
    command = command_type(name)
    recipe = recipe_asked_about(arguments)
    if recipe is not None:
        from llama_jax.cli.train import settings_page

        print(settings_page(*recipe))
        return
    if name == "train":
        check_settings(command.__dataclass_fields__, arguments)
    from llama_jax.cli.parsing import parsed

    parsed(command, name, arranged(arguments)[1:]).run()


def _end(said: str) -> NoReturn:
    with suppress(OSError):  # where stderr cannot be written either
        print("llama-jax: error:", said, file=sys.stderr)
    sys.exit(2)


def _collect_seldom() -> None:
    """Let Python look for garbage in cycles at every 10,000 new objects, not 700, and not once more at its end.

    Imports and traced programs are a million objects that stay. A fifth of what `generate` takes.
    """
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)


def _open_closed_streams() -> None:
    """Open stdin, stdout and stderr on nothing where the process was started without them (`>&-`): otherwise a file opened
    later would get their numbers, and everything written to them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Takes the lowest number that is free. Writing to stdout then fails, as everywhere: what is lost was asked for.
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _of_stdout(error: Exception) -> str | None:
    """The message of a write error without a file name; those with a name are reported by the code that writes the file."""
    if not isinstance(error, OSError) or error.filename is not None or not remedy_for(error):
        return None
    discard_output(sys.stdout.fileno())  # so that nothing is tried again at exit
    return cannot_write(Path("stdout"), error)


def _of_here(error: Exception) -> str | None:
    """The message of an error that no file is named in, where the current folder has been removed."""
    if not isinstance(error, FileNotFoundError) or error.filename is not None:
        return None
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the current folder has been removed; change to one that exists"
    return None


def _interrupted(*_: object) -> None:
    """Exit at once: XLA may be compiling in its own threads, which crash when the interpreter shuts down in order; and
    extension modules do not survive an exception while they are imported."""
    os.write(sys.stderr.fileno(), b"\nllama-jax: stopped\n")
    os._exit(130)
