"""The checkpoints of a training run on disk: a folder with a self-contained folder for each step.

    checkpoints/40/params   the parameters (orbax)
                   ema      their moving average, if the run keeps one (orbax)
                   rest     the rest of the training state (orbax)
                   about    config.json, the tokenizer's files, note.json, and SHA256SUMS of all files of the step

The checksums are written or uploaded last, and removed first: a folder without them is not a step.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from llama_jax.errors import CheckpointError, UserError
from llama_jax.storage import Location, StoredPath
from llama_jax.storage.atomic_write import flush, write_atomically
from llama_jax.storage.object_cache import fetch_to_cache, objects_below
from llama_jax.storage.paths import read_object, resolved

CHECKPOINTS = "checkpoints"  # in the folder of a run
PARAMS, EMA, REST, ABOUT = "params", "ema", "rest", "about"
METADATA_FILE, CHECKSUMS_FILE = "note.json", "SHA256SUMS"


class DamagedError(CheckpointError):
    """A file of a step provably differs from what was saved."""


def steps_in(folder: Location) -> list[int]:
    """The steps in a folder of checkpoints, ascending."""
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir())
    steps = sorted(int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name)) == name)
    return [step for step in steps if is_step(folder / str(step))]


def is_step(folder: Location) -> bool:
    """Whether a folder is a complete step of a run."""
    return (folder / ABOUT / CHECKSUMS_FILE).exists()


def existing_step(folder: Location, step: int | None) -> int:
    """The given step, or the newest for None."""
    steps = steps_in(folder)
    if not steps:
        raise CheckpointError(f"{folder} holds no checkpoint; train until the first one is saved")
    if step not in (None, *steps):
        raise CheckpointError(f"{folder} holds no step {step}; pass one of {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step


def read_metadata(folder: Location, step: int | None = None) -> dict[str, Any]:
    """The metadata of a step, by default the newest: its recipe, its position in the data, and so on.

    Raises:
      CheckpointError: no such step, or a file that cannot be read; a DamagedError if it is not a JSON object.
    """
    path = folder / str(existing_step(folder, step)) / ABOUT / METADATA_FILE
    with _disk_errors(path):
        if not path.exists() and is_step(resolved(path.parent.parent)):
            raise DamagedError(f"{path} is missing")
        path.stat()  # raises if missing: the step has been removed
        return read_object(path, DamagedError)


@contextmanager
def _disk_errors(path: Location) -> Iterator[None]:
    """Say of a file that was removed, or cannot be read, that this does not prove damage."""
    try:
        yield
    except FileNotFoundError:
        refuse_removed(path)
    except OSError as error:
        raise CheckpointError(cannot_read(path, error.strerror or str(error))) from None


def refuse_removed(path: object) -> NoReturn:
    raise CheckpointError(f"{path} was removed while it was read; try again, or read another step") from None


def cannot_read(path: Location, reason: str) -> str:
    """The error message for a path that cannot be read, for a reason unrelated to its contents."""
    return f"{path} cannot be read ({reason}), which does not prove damage; fix the cause and try again"


def validation_loss(folder: Location, step: int) -> float:
    """The validation loss in a step's metadata; infinity if there is none, or it cannot be read on a disk.

    Raises:
      CheckpointError: a store does not respond.
    """
    try:
        loss = read_metadata(folder, step).get("validation_loss")
    except CheckpointError as error:
        if isinstance(folder, StoredPath) and not isinstance(error, DamagedError):
            raise  # so that no step is removed because its loss is not known
        return math.inf
    return float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else math.inf


def by_loss(folder: Location) -> list[int]:
    """The steps that have a validation loss, the best first; among equal ones the later first."""
    losses = {step: validation_loss(folder, step) for step in steps_in(folder)}
    return sorted((step for step in losses if losses[step] < math.inf), key=lambda step: (losses[step], -step))


def find_checkpoints(path: Location) -> Location | None:
    """The folder of checkpoints at a path, or in the run's folder at a path; None if it is neither."""
    if (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS
    return path if steps_in(path) else None


CHECKSUM_LINE = re.compile(r"(?P<sum>[0-9a-f]{64})  (?P<name>[^\\\n]+)")
FILE_THREADS = 8  # files hashed concurrently


def write_checksums(step: Path) -> None:
    """Flush all files of a step to disk, then write their checksums, with which the step is complete."""
    flush(step)
    names = sorted(path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file())
    with ThreadPoolExecutor(FILE_THREADS) as pool:
        checksums = pool.map(lambda name: _hash_file(step / name), names)
        text = "".join(f"{checksum}  {name}\n" for checksum, name in zip(checksums, names, strict=True))
    with write_atomically(step / ABOUT / CHECKSUMS_FILE, raises=CheckpointError) as target:
        target.write_text(f"{text}# {hashlib.sha256(text.encode()).hexdigest()}\n", encoding="utf-8")


def remove_step(step: Path) -> None:
    """Remove a step, its checksums first."""
    (step / ABOUT / CHECKSUMS_FILE).unlink(missing_ok=True)
    shutil.rmtree(step)


def check_checksums(step: Location, parts: Collection[str] | None = None, *, share: tuple[int, int] = (0, 1)) -> None:
    """Verify that a step's files are what was saved.

    Args:
      parts: the folders of the step to check, in addition to files that are in no folder; None is all.
      share: (i, n): every n-th file, starting with the i-th.

    Raises:
      DamagedError: a file is missing or differs.
      CheckpointError: a file cannot be read, which does not prove damage.
    """
    checksums = read_checksums(step)
    names = [name for name in checksums if "/" not in name or parts is None or name.partition("/")[0] in parts]
    with ThreadPoolExecutor(FILE_THREADS) as pool:
        problems = pool.map(lambda name: _problem(step / name, checksums[name]), names[share[0] :: share[1]])
        first = next(filter(None, problems), None)
    if first is not None and not is_step(resolved(step)):
        refuse_removed(step)
    if first is not None:
        raise first


def _problem(path: Location, expected: str) -> CheckpointError | None:
    try:
        checksum = _hash_file(path)
    except FileNotFoundError:
        return DamagedError(f"{path} is missing")
    except OSError as error:
        return CheckpointError(cannot_read(path, error.strerror or str(error)))
    return None if checksum == expected else DamagedError(f"{path} is not what was saved (its SHA-256 differs)")


def read_checksums(step: Location) -> dict[str, str]:
    """{name: checksum} of a step's files.

    Raises:
      DamagedError: the list itself is damaged.
      CheckpointError: it was removed, or cannot be read.
    """
    path = step / ABOUT / CHECKSUMS_FILE
    with _disk_errors(path), path.open("rb") as file:
        text, _, last = file.read().decode(errors="replace").rpartition("# ")
    if last != hashlib.sha256(text.encode()).hexdigest() + "\n":
        raise DamagedError(f"{path} is not what was saved")
    matches = [CHECKSUM_LINE.fullmatch(line) for line in text.splitlines()]
    return {match["name"]: match["sum"] for match in matches if match is not None}


def _hash_file(path: Location) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


STEP_TRIES = 5  # attempts before the last error is raised

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def retry_with_newest_step(read: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Call `read` again if its first argument, `path`, is a run that has saved a newer step in the meantime.

    A run keeps its last few steps: one that was found may be removed before it is completely read.
    """

    @functools.wraps(read)
    def retrying(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        path = arguments[0] if arguments else keywords.get("path")
        tries_left = STEP_TRIES
        while True:
            before = _newest(path)
            try:
                return read(*arguments, **keywords)
            except (UserError, OSError) as error:
                tries_left -= 1
                now = None if before is None else _newest(path)
                if tries_left and now != before:
                    continue
                if isinstance(error, FileNotFoundError):  # it existed before
                    refuse_removed(error.filename)
                if before is None or isinstance(error, UserError):
                    raise
                raise CheckpointError(cannot_read(before, str(error))) from None

    return retrying


def _newest(path: object) -> Location | None:
    """The newest step of a run; None if the path is something else, such as a step."""
    if not isinstance(path, str | os.PathLike) or not os.path.isdir(path):
        return None
    folder = find_checkpoints(Path(os.fsdecode(path)))
    steps = [] if folder is None else steps_in(folder)
    return folder / str(steps[-1]) if folder is not None and steps else None


def fetch_model(location: StoredPath) -> tuple[StoredPath, Path]:
    """Fetch the model of a step, or of the newest one in a folder of checkpoints, into the cache.

    Returns:
      The step, and its copy: its configuration, vocabulary and parameters, without the rest of the training state.

    Raises:
      CheckpointError: no step; or it was removed meanwhile, or the cache cannot be written to.
      OSError: the store does not respond.
    """
    step = location if is_step(location) else location / str(existing_step(location, None))
    unread = {REST, PARAMS} if (step / EMA).is_dir() else {REST}
    files = ((name, entry) for name, entry in objects_below(step) if name.partition("/")[0] not in unread)
    entries = {f"{step.name}/{name}": entry for name, entry in files}
    try:
        return step, fetch_to_cache(step.parent, entries, CheckpointError) / step.name
    except FileNotFoundError:
        refuse_removed(step)
