"""The checkpoints of a training run on disk: a folder with a self-contained folder for each step.

    checkpoints/40/params   the parameters (orbax)
                   ema      their moving average, if the run keeps one (orbax)
                   rest     the rest of the training state (orbax)
                   about    config.json, the tokenizer's files, note.json, and SHA256SUMS of all files of the step

A folder whose name is a number is complete, since it is renamed to it after everything is written. Object stores cannot
rename: there the checksums are written last, and a folder without them is not a step.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ParamSpec, TypeVar

from llama_jax.errors import CheckpointError, UserError
from llama_jax.storage import Location, StoredPath
from llama_jax.storage.atomic_write import ScratchFolder, cannot_write
from llama_jax.storage.consistent_reader import MAX_REQUEST_BYTES
from llama_jax.storage.paths import read_object

CHECKPOINTS = "checkpoints"  # in the folder of a run
PARAMS, EMA, REST, ABOUT = "params", "ema", "rest", "about"
METADATA_FILE, SUMS = "note.json", "SHA256SUMS"


class DamagedError(CheckpointError):
    """A file of a step provably differs from what was saved."""


def steps_in(folder: Location) -> list[int]:
    """The steps in a folder of checkpoints, ascending."""
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir() if entry.is_dir())
    steps = sorted(int(name) for name in names if name.isascii() and name.isdecimal() and str(int(name)) == name)
    return [step for step in steps if is_step(folder / str(step))] if isinstance(folder, StoredPath) else steps


def is_step(folder: Location) -> bool:
    """Whether a folder is a step of a run."""
    return (folder / ABOUT / SUMS).exists() if isinstance(folder, StoredPath) else (folder / ABOUT).is_dir()


def existing_step(folder: Location, step: int | None) -> int:
    """The given step, or the newest for None."""
    steps = steps_in(folder)
    if not steps:
        raise CheckpointError(f"{folder} holds no checkpoint; train until the first one is saved")
    if step is not None and step not in steps:
        raise CheckpointError(f"{folder} holds no step {step}; pass one of {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step


def read_metadata(folder: Location, step: int | None = None) -> dict[str, Any]:
    """The metadata of a step, by default the newest: its recipe, its position in the data, and so on.

    Raises:
      CheckpointError: no such step, or a file that cannot be read; a DamagedError if it is not a JSON object.
    """
    path = folder / str(existing_step(folder, step)) / ABOUT / METADATA_FILE
    try:
        path.stat()  # raises if missing, which is no damage: the step may have been removed
        return read_object(path, DamagedError)
    except OSError as error:
        raise CheckpointError(cannot_read(path, error.strerror or str(error))) from None


def cannot_read(path: Location, reason: str) -> str:
    """The error message for a path that cannot be read, for a reason unrelated to its contents."""
    return f"{path} cannot be read ({reason}), which does not prove damage; fix the cause and try again"


def validation_loss(folder: Location, step: int) -> float:
    """The validation loss in a step's metadata; infinity if there is none, or it cannot be read."""
    try:
        loss = read_metadata(folder, step).get("validation_loss")
    except CheckpointError:
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
    return path if any(is_step(path / str(step)) for step in steps_in(path)) else None


SUM_LINE = re.compile(r"(?P<sum>[0-9a-f]{64})  (?P<name>[^\\\n]+)")
FILE_THREADS = 8  # files hashed or fetched concurrently


def write_sums(step: Path, elsewhere: Mapping[str, str] = {}) -> None:
    """Write the checksums of all files of a step, and flush the files to disk.

    Args:
      elsewhere: {name: checksum} of files of the step that other hosts have.
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
    """{name: checksum} of files of a step, flushing them to disk."""
    with ThreadPoolExecutor(FILE_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _sum_of(step / name, flush=True), names), strict=True))


def verify(step: Location, parts: Collection[str] | None = None, *, share: tuple[int, int] = (0, 1)) -> bool:
    """Whether a step's files are verified to be what was saved; False without checksums.

    Args:
      parts: the folders of the step to check, in addition to files that are in no folder; None is all.
      share: (i, n): every n-th file, starting with the i-th.

    Raises:
      DamagedError: a file is missing or differs.
      CheckpointError: a file cannot be read, which does not prove damage.
    """
    sums = read_sums(step)
    if sums is None:
        return False
    wanted = [name for name in sums if "/" not in name or parts is None or name.partition("/")[0] in parts]
    with ThreadPoolExecutor(FILE_THREADS) as pool:
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
    return None if found == expected else DamagedError(f"{path} is not what was saved (its SHA-256 differs)")


def read_sums(step: Location) -> dict[str, str] | None:
    """{name: checksum} of a step; None if there are none, or if the list itself is damaged."""
    path = step / ABOUT / SUMS
    try:
        with path.open("rb") as file:
            text, mark, last = file.read().decode().rpartition("# ")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    except OSError as error:
        raise CheckpointError(cannot_read(path, error.strerror or str(error))) from None
    if not mark or last != hashlib.sha256(text.encode()).hexdigest() + "\n":
        return None
    found = [SUM_LINE.fullmatch(line) for line in text.splitlines()]
    return {line["name"]: line["sum"] for line in found if line is not None}


def _sum_of(path: Location, *, flush: bool = False) -> str:
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


STEP_TRIES = 5  # attempts before the last error is raised

Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


class StepRemovedError(CheckpointError):
    """The run has removed a step while it was being read."""


def retry_with_newest_step(read: Callable[Arguments, Found]) -> Callable[Arguments, Found]:
    """Call `read` again if its first argument, `path`, is a run that has saved a newer step in the meantime.

    A run keeps its last few steps: one that was found may be removed before it is completely read.
    """

    @functools.wraps(read)
    def again(*arguments: Arguments.args, **named: Arguments.kwargs) -> Found:
        path = arguments[0] if arguments else named.get("path")
        for left in reversed(range(STEP_TRIES)):
            before = _newest(path)
            try:
                return read(*arguments, **named)
            except StepRemovedError:  # unless `path` is the run, the next try cannot succeed
                if not left:
                    raise
            except (UserError, OSError) as error:
                now = None if before is None else _newest(path)
                if left and now != before:
                    continue
                if isinstance(error, FileNotFoundError):  # it existed before
                    raise CheckpointError(f"{error.filename} was removed while it was read; try again") from None
                if before is None or isinstance(error, UserError):
                    raise
                raise CheckpointError(cannot_read(before, str(error))) from None
        raise AssertionError("the last try returns or raises")

    return again


def _newest(path: object) -> Location | None:
    """The newest step of a run; None if the path is something else, such as a step."""
    if not isinstance(path, str | os.PathLike) or not os.path.isdir(path):
        return None
    folder = find_checkpoints(Path(os.fsdecode(path)))
    steps = [] if folder is None else steps_in(folder)
    return folder / str(steps[-1]) if folder is not None and steps else None


# The files in which orbax stores array data. All other files of a step are small: array metadata, the index of these files,
# the configuration and the vocabulary.
NUMBER_FILES = re.compile(r"[^/]+/ocdbt\.process_[^/]+/d/.+")


@dataclass(frozen=True)
class FetchedStep:
    """Local copies of a step's files, deleted with this object.

    Attributes:
      folder: a local folder, in TMPDIR, with the number of the step as its name.
      url: the step's URL.
      sums: {name: checksum} of the requested files, including those that `complete` has yet to fetch.
    """

    folder: Path
    url: StoredPath
    sums: Mapping[str, str]
    scratch: ScratchFolder

    @contextmanager
    def named(self) -> Iterator[None]:
        """Make errors name the location in the store instead of the folder."""
        try:
            yield
        except UserError as error:
            raise type(error)(str(error).replace(str(self.folder), str(self.url))) from None

    def complete(self) -> None:
        """Fetch the remaining files.

        Raises:
          StepRemovedError: the run has removed the step in the meantime.
          CheckpointError, OSError: see `fetch_step`.
        """
        left = {name: found for name, found in self.sums.items() if not (self.folder / name).exists()}
        try:
            _fetch_all(self.url, self.folder, left)
        except (CheckpointError, OSError):
            if not is_step(self.url.resolve()):
                raise StepRemovedError(f"{self.url} was removed while it was read; try again") from None
            raise


def of_model(parts: Collection[str]) -> set[str]:
    """The folders of a step that make up a model, without the rest of the training state."""
    return {ABOUT, EMA if EMA in parts else PARAMS}


def fetch_step(
    place: StoredPath, choose: Callable[[Collection[str]], Collection[str]], *, numbers: bool = True
) -> FetchedStep:
    """Fetch a step, or the newest one in a folder of checkpoints; see `retry_with_newest_step` for runs in progress.

    Args:
      choose: selects folders of the step.
      numbers: whether to fetch array data at once, rather than in `FetchedStep.complete`.

    Raises:
      StepRemovedError: the run has saved a newer step in the meantime, and may have removed this one.
      CheckpointError: no step, or one that cannot be read; a DamagedError if a file is not what was saved.
      OSError: the store does not respond; the message names the object.
    """
    now = place.resolve()
    step = now if is_step(now) else now / str(existing_step(now, None))
    scratch = ScratchFolder()
    try:
        folder = scratch.path / step.name
        sums = _wanted(step, choose)
        _fetch_all(step, folder, {name: sums[name] for name in sums if numbers or not NUMBER_FILES.fullmatch(name)})
        return FetchedStep(folder, step, sums, scratch)
    except (CheckpointError, OSError):
        scratch.close()
        if step is not now and steps_in(place.resolve())[-1:] != [int(step.name)]:
            raise StepRemovedError(f"{step} was removed while it was read; try again") from None
        raise


def fetch_files(step: StoredPath, folder: Path) -> None:
    """Fetch all files of a step into a new folder; see `fetch_step`."""
    _fetch_all(step, folder, _wanted(step, lambda parts: parts))


def _wanted(step: StoredPath, choose: Callable[[Collection[str]], Collection[str]]) -> dict[str, str]:
    """{name: checksum} of the files in the chosen folders."""
    sums = read_sums(step)
    if sums is None:
        raise DamagedError(f"{step} has missing or damaged checksums; read another step")
    if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in sums):
        raise DamagedError(f"{step}: its checksums name a file outside of it; read another step")
    wanted = set(choose({name.partition("/")[0] for name in sums}))
    return {name: found for name, found in sums.items() if name.partition("/")[0] in wanted}


def _fetch_all(step: StoredPath, folder: Path, sums: Mapping[str, str]) -> None:
    def fetch(name: str) -> None:
        target = folder / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            found = _fetch(step / name, target)
        except FileNotFoundError:
            raise DamagedError(f"{step / name} is missing") from None
        except OSError as error:
            if isinstance(error.filename, str) and "://" in error.filename:
                raise
            raise CheckpointError(f"{cannot_write(target, error)}; TMPDIR sets the folder for {step}") from None
        if found != sums[name]:
            raise DamagedError(f"{step / name} is not what was saved (its SHA-256 differs)")

    with ThreadPoolExecutor(FILE_THREADS) as pool:
        list(pool.map(fetch, sums))


def _fetch(source: StoredPath, target: Path) -> str:
    """Fetch a file completely or not at all; returns its SHA-256."""
    digest, size = hashlib.sha256(), source.stat().st_size
    try:
        with target.open("wb") as file:
            for first in range(0, size, MAX_REQUEST_BYTES):
                piece = source.view.read(source.key, first, min(first + MAX_REQUEST_BYTES, size))
                digest.update(piece)
                file.write(piece)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return digest.hexdigest()
