"""``llama-jax completion``: commands, options and their values by the Tab key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import tyro

from llama_jax.cli.parsing import MARKERS, RULES


@dataclass(frozen=True)
class Completion:
    """Print a script that lets your shell complete the commands of llama-jax, their options and their values.

    bash: llama-jax completion bash > ~/.local/share/bash-completion/completions/llama-jax

    zsh: llama-jax completion zsh > _llama-jax, in a folder of $fpath

    fish: llama-jax completion fish > ~/.config/fish/completions/llama-jax.fish
    """

    shell: tyro.conf.Positional[Annotated[Literal["bash", "zsh", "fish"], tyro.conf.arg(metavar="bash|zsh|fish")]]
    """The shell that the script is for."""

    def run(self) -> None:
        from llama_jax.cli import COMMANDS, command_type

        commands: list[Any] = []
        for group in COMMANDS.values():
            for name, (_, about) in group.items():
                named = tyro.conf.subcommand(name, description=about, prefix_name=False)
                commands.append(Annotated[command_type(name), named])
        all_of_them: Any = Union[tuple(commands)]  # noqa: UP007
        tyro.cli(
            all_of_them,
            prog="llama-jax",
            args=["--tyro-print-completion", self.shell],
            config=MARKERS,
            registry=RULES,
        )
