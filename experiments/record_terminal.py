"""Record the picture at the top of the README: the first command and its output, as an SVG.

python experiments/record_terminal.py docs/images/first_command.svg
"""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COMMAND = ("llama-jax", "generate", "Once upon a time", "--seed", "0")

# Rich's template, but with the reader's fonts: its @font-face would be fetched from a font host.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>A prompt, and the story that the bundled model writes</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px;
  line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-family: ui-sans-serif, Arial, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


@dataclass(frozen=True)
class Record:
    """Run the README's first command and write its terminal as an SVG."""

    output: tyro.conf.Positional[Path]
    """Output .svg."""
    width: int = 100
    """Characters per line."""

    def run(self) -> None:
        program = [sys.executable, "-m", "llama_jax", *COMMAND[1:]]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        said = f'llama-jax generate "{COMMAND[2]}" {" ".join(COMMAND[3:])}'
        terminal = Console(record=True, width=self.width, file=io.StringIO(), force_terminal=True)
        terminal.print(Text.assemble(("$ ", "bold green"), said))
        terminal.print(Text(done.stdout.strip()))
        terminal.print(Text("$ ", "bold green"), end="")
        self.output.write_text(
            terminal.export_svg(title="llama_jax", theme=MONOKAI, code_format=SVG, unique_id="llama-jax"), "utf-8"
        )


if __name__ == "__main__":
    tyro.cli(Record).run()
