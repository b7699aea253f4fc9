"""Checksums of a step's files, which prove whether the files are what was saved.

They are in ``about/SHA256SUMS`` in the format of coreutils: in the folder of a step, ``sha256sum -c about/SHA256SUMS``
checks them as well. The last line is a comment with the checksum of those above.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llama_jax.checkpoints.steps import ABOUT, SUMS, DamagedError, cannot_read
from llama_jax.errors import CheckpointError
from llama_jax.storage import Location

LINE = re.compile(r"(?P<sum>[0-9a-f]{64})  (?P<name>[^\\\n]+)")
THREADS = 8  # hashing lets others run


def write_sums(step: Path, elsewhere: Mapping[str, str] = {}) -> None:
    """Write the checksums of all files of a step, and flush them to the disk.

    Args:
      elsewhere: {name: checksum} of files of the step that another host has.
    """
    sums = {**elsewhere, **sums_of(step, files_in(step))}
    text = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
    with (step / ABOUT / SUMS).open("w", encoding="utf-8") as file:
        file.write(f"{text}# {hashlib.sha256(text.encode()).hexdigest()}\n")
        file.flush()
        os.fsync(file.fileno())


def files_in(step: Path) -> list[str]:
    """The names of all files of a step: params/_METADATA."""
    return sorted(path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file())


def sums_of(step: Path, names: Collection[str]) -> dict[str, str]:
    """{name: checksum} of files of a step, which are on the disk afterwards."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _sum_of(step / name, flush=True), names), strict=True))


def verify(step: Location, parts: Collection[str] | None = None, *, share: tuple[int, int] = (0, 1)) -> bool:
    """Whether a step's files are known to be what was saved; False without checksums, as in steps of older versions.

    Args:
      parts: the folders of the step to look at, besides the files that lie in no folder; None is all.
      share: (i, n): every n-th file from the i-th on.

    Raises:
      DamagedError: a file is missing or differs.
      CheckpointError: a file cannot be read, which proves nothing.
    """
    sums = read_sums(step)
    if sums is None:
        return False
    wanted = [name for name in sums if "/" not in name or parts is None or name.partition("/")[0] in parts]
    with ThreadPoolExecutor(THREADS) as pool:
        problems = pool.map(lambda name: _problem(step / name, sums[name]), wanted[share[0] :: share[1]])
        first = next(filter(None, problems), None)
    if first is None:
        return True
    if not (step / ABOUT / SUMS).resolve().exists():
        raise CheckpointError(f"{step} was removed while it was read; read another step")
    raise first


def _problem(path: Location, expected: str) -> CheckpointError | None:
    try:
        found = _sum_of(path)
    except FileNotFoundError:
        return DamagedError(f"{path} is missing")
    except OSError as error:
        return CheckpointError(cannot_read(path, error.strerror or str(error)))
    return None if found == expected else DamagedError(f"{path} is not what was saved (its SHA-256 is another)")


def read_sums(step: Location) -> dict[str, str] | None:
    """{name: checksum} of a step; None if there are none, or if the list itself is damaged.

    Raises:
      CheckpointError: they cannot be read, which proves nothing.
    """
    path = step / ABOUT / SUMS
    try:
        with path.open("rb") as file:
            text, mark, last = file.read().decode().rpartition("# ")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise CheckpointError(cannot_read(path, error.strerror or str(error))) from None
    if not mark or last != hashlib.sha256(text.encode()).hexdigest() + "\n":
        return None
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    return {line["name"]: line["sum"] for line in found if line is not None}


def _sum_of(path: Location, *, flush: bool = False) -> str:
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
