"""Run every command of docs/first_hour.md in order; print its output and how long it takes.

python experiments/first_hour.py --model SmolLM2-135M-Instruct.Q4_1.gguf [--workdir first_hour]

Each block runs in a separate process, in a folder with only the page's data. `llama-jax serve` runs until the section ends.
Blocks with a comment <!-- not run: ... --> are skipped. If the machine has other load, compare CPU time, not seconds.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import tyro
from measuring import ROOT, machine, settings, versions, write_report

PAGE = ROOT / "docs" / "first_hour.md"
PORT = "8000"  # used by the page
TYPED = "What is the capital of Japan?\n"  # input of commands that read the terminal


class Block(NamedTuple):
    section: str
    language: str
    """bash or python."""
    code: str


@dataclass(frozen=True)
class Done:
    """A block that ran: its output (stdout and stderr together), and how long it took."""

    section: str
    code: str
    output: str
    seconds: float
    processor_seconds: float | None
    """CPU seconds of all threads; None for a server, which keeps running."""


def blocks(page: str) -> list[Block]:
    """The code blocks of a page to run."""
    found, section = [], ""
    pattern = r"^## ([^\n]+)$|^(<!-- not run: [^\n]+ -->\n)?```(\w+)\n(.*?)^```$"
    for match in re.finditer(pattern, page, re.MULTILINE | re.DOTALL):
        if match[1]:
            section = match[1]
        elif match[2] is None and match[3] in ("bash", "python"):
            found.append(Block(section, match[3], match[4]))
    return found


def run(wanted: list[Block], model: Path, workdir: Path, port: int = 8000) -> Iterator[Done]:
    """Run blocks in a new folder; yield the result of each as soon as it ends.

    Raises:
      subprocess.CalledProcessError: a block failed; its `output` says why.
    """
    workdir.mkdir(parents=True)
    (workdir / "docs").symlink_to(ROOT / "docs")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    options = {"cwd": workdir, "env": os.environ | {"PATH": path, "MODEL": str(model.resolve()), "COLUMNS": "120"}}
    section = ""
    with ExitStack() as servers:
        for block in wanted:
            if block.section != section:
                servers.close()
                section = block.section
            code = block.code.replace(PORT, str(port))
            command = [sys.executable, "-c", code] if block.language == "python" else ["bash", "-euc", code]
            begun, spent = time.perf_counter(), _processor_seconds()
            if code.startswith("llama-jax serve"):
                output = servers.enter_context(_serving(["bash", "-euc", f"exec {code}"], options))
                yield Done(section, block.code, output, time.perf_counter() - begun, None)
                continue
            both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            done = subprocess.run(command, check=False, input=TYPED, **both, **options)
            if done.returncode:
                raise subprocess.CalledProcessError(done.returncode, block.code, done.stdout)
            seconds = time.perf_counter() - begun
            yield Done(section, block.code, done.stdout, seconds, _processor_seconds() - spent)


@contextmanager
def _serving(command: list[str], options: dict) -> Iterator[str]:
    """Start a server; when it is ready, yield its output so far."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            said = ""
            for line in process.stderr:
                said += line
                if "ready after" in line:
                    break
            else:
                raise subprocess.CalledProcessError(process.wait(), command, said)
            yield said
        finally:
            process.terminate()
            process.communicate()


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Arguments:
    """Run the commands of docs/first_hour.md."""

    model: Path
    """SmolLM2-135M-Instruct as a GGUF file, or another chat model."""
    workdir: Path = Path("first_hour")
    """A new folder for what the commands write."""
    output: Path = Path("build/first_hour.json")

    def run(self) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "machine": machine(),
            "versions": versions("jax", "transformers"),
            "settings": settings(self),
            "blocks": [],
        }
        for done in run(blocks(PAGE.read_text("utf-8")), self.model, self.workdir):
            print(f"== {done.section}\n{done.code}{done.output}-- {done.seconds:.1f} s", end="")
            print(
                "\n" if done.processor_seconds is None else f", {done.processor_seconds:.1f} s CPU time\n",
                flush=True,
            )
            report["blocks"].append(asdict(done))
            write_report(self.output, report)


if __name__ == "__main__":
    tyro.cli(Arguments).run()
