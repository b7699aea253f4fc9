"""``llama-jax completion``: scripts that complete commands, options and values in a shell."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import tyro

from llama_jax.cli.parsing import MARKERS, RULES

# tyro's scripts complete file names only after options whose type is a path, and ours are texts, for they may be URLs: let
# them complete file names wherever they know no word.
FILES = (
    ('[[ "$completions" == ', '[[ -z "$completions" || "$completions" == '),  # bash and zsh
    (  # fish, whose script gives all options and leaves it to fish which of them fit
        'if test "$results" = ',
        'if begin; not string match -q -- "-*" (commandline -ct); and not string match -qv -- "-*" $results; end'
        '; or test "$results" = ',
    ),
    (  # with a slash after a folder, and names with spaces as one; "$cur" has the words before as well
        'COMPREPLY=($(compgen -f -- "$cur"))',
        "local IFS=$'\\n'; compopt -o filenames; COMPREPLY=($(compgen -f -- \"${COMP_WORDS[COMP_CWORD]}\"))",
    ),
)


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
        written, args = io.StringIO(), ["--tyro-print-completion", self.shell]
        with redirect_stdout(written), suppress(SystemExit):
            tyro.cli(all_of_them, prog="llama-jax", args=args, config=MARKERS, registry=RULES)
        script = written.getvalue()
        for plain, more in FILES:
            script = script.replace(plain, more)
        # A choice that may be left out is not given as None.
        print(re.sub(r"'choices': \[[^]]*\]", lambda found: re.sub(r"'None', |, 'None'", "", found[0]), script), end="")
