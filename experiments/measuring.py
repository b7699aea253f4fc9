"""Shared parts of measurement reports: machine, versions, settings, and an atomically written file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from llama_jax.storage.atomic_write import write_atomically

ROOT = Path(__file__).resolve().parents[1]


def cpu_name() -> str:
    """The processor's model name according to Linux."""
    try:
        return next(x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x)
    except (OSError, StopIteration):
        return platform.processor()


def machine() -> dict[str, Any]:
    """CPU, cores and operating system, for a report on speed."""
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "platform": platform.platform()}


def devices() -> str:
    """JAX's devices and their machine, for a report on training."""
    import jax

    found = jax.devices()
    several = f"{len(found)} x " if len(found) > 1 else ""
    return f"{several}{found[0].device_kind}, {platform.machine()}, {os.cpu_count()} cores"


def versions(*packages: str) -> dict[str, str]:
    """Versions of the packages, and of Python."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def settings(arguments: Any) -> dict[str, Any]:
    """The arguments of an experiment, with paths as text: relative to the repository's root, or only their last part."""

    def shown(value: Any) -> Any:
        if not isinstance(value, Path):
            return value
        whole = value.resolve()
        return str(whole.relative_to(ROOT)) if whole.is_relative_to(ROOT) else whole.name

    return {name: shown(value) for name, value in vars(arguments).items()}


def write_report(path: Path, report: Any) -> None:
    """Write JSON atomically, so that measurements survive if the process is killed."""
    with write_atomically(path) as target:
        target.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def write_rows(path: Path, about: dict[str, Any], name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write a report with many rows atomically; the rows are under `name`, one per line."""
    lines = ",\n  ".join(map(json.dumps, rows))
    with write_atomically(path) as target:
        target.write_text(f'{json.dumps(about)[:-1]}, "{name}": [\n  {lines}\n]}}\n', "utf-8")


def text_of(path: Path) -> str:
    """Read a text that is not part of the repository; exit with an explanation if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise SystemExit(
            f"--data: {path} cannot be read ({error.strerror}); it is not part of the repository, pass another file"
        ) from None
