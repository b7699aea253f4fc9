"""The command line: a dataclass per command. Heavy imports wait until a command runs, so that ``--help`` is quick."""

from __future__ import annotations

import atexit
import difflib
import gc
import importlib
import io
import os
import sys
import warnings
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import llama_jax
from llama_jax.cli.terminal import end_at_once
from llama_jax.errors import StuckSaveError, UserError, reason_of, short_repr
from llama_jax.runs import interrupts
from llama_jax.storage.atomic_write import cannot_write, discard_output, remedy_for

# By group: a command, its file and class, and what it does, in one line of at most 80 columns.
COMMANDS = {
    "Generate and serve": {
        "generate": ("generate.Generate", "Continue a prompt, or every prompt of a .jsonl."),
        "chat": ("chat.Chat", "Chat with a model in the terminal."),
        "serve": ("serve.Serve", "Serve a model over HTTP: OpenAI's API and a chat page."),
        "batch": ("batch.BatchPrompts", "Continue the prompts of a large file, with resume."),
    },
    "Get, inspect and convert models": {
        "fetch": ("convert.Fetch", "Download a model from the Hugging Face hub."),
        "inspect": ("inspect.Inspect", "Show the contents of a model's files."),
        "verify": ("verify.Verify", "Compare a model's logits and layers with a reference."),
        "convert": ("convert.Convert", "Convert a model to another format: safetensors, GGUF, ..."),
        "merge": ("convert.Merge", "Merge a LoRA adapter into a model's weights."),
    },
    "Train and evaluate": {
        "train": ("train.Train", "Train, fine-tune or distill a model with a recipe."),
        "data": ("data.DataCommand", "Show training data as tokens, or tokenize it in advance."),
        "eval": ("eval.Eval", "Measure loss and perplexity on texts, chats or preferences."),
        "lm-eval": ("lm_eval.LmEval", "Run tasks of the lm-evaluation-harness."),
    },
    "Plan and set up": {
        "estimate": ("estimate.Estimate", "Estimate memory, communication and time of a run."),
        "compile": ("setup.Compile", "Compile a model's programs in advance, for fast starts."),
        "quickstart": ("setup.Quickstart", "Check the installation with a small random model."),
        "completion": ("setup.Completion", "Print a completion script for your shell."),
    },
}
USAGE = """\
usage: llama-jax COMMAND [OPTIONS]

Llama in JAX: load, run, train, measure and serve models. To try it with the
small model of the package: llama-jax generate "Once upon a time"
"""
FURTHER_HELP = """\
  llama-jax COMMAND --help        list the options of a command
  llama-jax train RECIPE --help   list the settings of a recipe
  llama-jax --version             print the version
"""


def main() -> None:
    """Run the command that the arguments name. Exit codes: 2 for what the user can fix, 130 for Ctrl-C."""
    _collect_seldom()
    interrupts.install()
    warnings.formatwarning = lambda message, *_: f"llama-jax: {' '.join(str(message).split())}\n"
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal cannot show must not end a command
    try:
        _run_command(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout has left (`| head`): nothing to say, and nothing may be flushed at exit.
        discard_output(sys.stdout.fileno())
        sys.exit(1)
    except StuckSaveError as error:
        end_at_once(error)
    except Exception as error:
        message = _error_message(error)
        if message is None:
            raise
        with suppress(OSError):  # where stderr cannot be written either
            print("llama-jax: error:", message, file=sys.stderr)
        sys.exit(2)


def _error_message(error: Exception) -> str | None:
    """What to print about an error that the user can fix; None for a defect of this program, whose traceback is shown."""
    # Training takes its settings as KEY=VALUE.
    smaller = "try dtype=bfloat16 or a smaller batch" if sys.argv[1:2] == ["train"] else "try --dtype bfloat16"
    match error:
        case OSError(filename=None) if remedy_for(error):  # code that writes files names them
            discard_output(sys.stdout.fileno())  # so that nothing is tried again at exit
            return cannot_write(Path("stdout"), error)
        case FileNotFoundError(filename=None) if not _current_folder_exists():
            return "the current folder has been removed; change to one that exists"
        case UserError() | OSError():
            return " ".join(str(error).split("\n"))
        case ValueError() if "for JAX flag" in str(error):  # JAX reads it from the environment when it is imported
            return f"{reason_of(error, 200)}; correct or unset the environment variable of this name"
        case MemoryError():
            return f"the machine's memory is too small ({reason_of(error, 200) or 'nothing is left'}); {smaller}"
        case RuntimeError() if "RESOURCE_EXHAUSTED" in str(error):
            return f"the device's memory is too small ({reason_of(error, 200)}); {smaller}"
    return None


def _current_folder_exists() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def overview() -> str:
    """The help of the program: its commands by group."""
    groups = [
        "\n".join([group, *(f"  {name:<12}{summary}" for name, (_, summary) in commands.items())])
        for group, commands in COMMANDS.items()
    ]
    return "\n".join([USAGE, "\n\n".join(groups), "", FURTHER_HELP]).rstrip()


def command_type(name: str) -> Any:
    """The class of a command, from its file; UserError if there is no such command."""
    class_paths = {command: class_path for commands in COMMANDS.values() for command, (class_path, _) in commands.items()}
    if name not in class_paths:
        near = difflib.get_close_matches(name, class_paths, 1)
        hint = f"did you mean {near[0]}?" if near else "llama-jax --help lists the commands"
        raise UserError(f"there is no command {short_repr(name)}; {hint}")
    file, _, class_name = class_paths[name].partition(".")
    return getattr(importlib.import_module(f"llama_jax.cli.{file}"), class_name)


def _run_command(arguments: list[str]) -> None:
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
    from llama_jax.cli.argv import check_settings, parse_command, reorder_argv, requested_recipe

    recipe = requested_recipe(arguments)
    if recipe is not None:
        from llama_jax.cli.train import settings_page

        print(settings_page(*recipe))
        return
    if name == "train":
        check_settings(command.__dataclass_fields__, arguments)
    if name in ("chat", "serve") and len(arguments) > 1 and not arguments[1].startswith("-"):  # others take the path so
        raise UserError(f"{name} takes the model as an option; write --model {arguments[1]}")
    if ("--model", "") in pairwise(arguments):  # after an error of $(llama-jax fetch NAME)
        raise UserError("--model is empty; pass the path of a model")
    parse_command(command, name, reorder_argv(arguments)[1:]).run()


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
            # Takes the lowest number that is free. Writing to stdout then fails, as for any closed stream.
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
