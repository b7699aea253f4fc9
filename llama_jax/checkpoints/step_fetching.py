"""Steps of training runs that lie in a store: brought to this machine, each file checked by its checksum on the way."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llama_jax.checkpoints.newest import TRIES, StepRemovedError
from llama_jax.checkpoints.steps import ABOUT, EMA, PARAMS, DamagedError, existing_step, is_step, steps_in
from llama_jax.checkpoints.sums import read_sums
from llama_jax.errors import CheckpointError, UserError
from llama_jax.storage import StoredPath
from llama_jax.storage.view import MOST_OPEN
from llama_jax.writing import ScratchFolder, cannot_write

THREADS = 8  # files at a time, each in pieces of up to MOST_OPEN
# The files in which orbax puts the numbers of arrays. All others of a step are small: what describes the arrays, the index
# that says where in these files they are, the configuration and the vocabulary.
OF_NUMBERS = re.compile(r"[^/]+/ocdbt\.process_[^/]+/d/.+")


@dataclass(frozen=True)
class FetchedStep:
    """Files of a step, as long as this lives.

    Attributes:
      folder: of this machine, in TMPDIR, with the number of the step as its name.
      url: where they are from.
      sums: {name: checksum} of the files that were asked for, also of those that `complete` has yet to bring.
    """

    folder: Path
    url: StoredPath
    sums: Mapping[str, str]
    scratch: ScratchFolder

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let errors name the place in the store in place of the folder."""
        try:
            yield
        except UserError as error:
            raise type(error)(str(error).replace(str(self.folder), str(self.url))) from None

    def complete(self) -> None:
        """Bring the files that are not here yet.

        Raises:
          StepRemovedError: the run has removed the step meanwhile.
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
    """Of the folders of a step those that make a model: not what training needs besides."""
    return {ABOUT, EMA if EMA in parts else PARAMS}


def fetch_step(
    place: StoredPath, choose: Callable[[Collection[str]], Collection[str]], *, numbers: bool = True
) -> FetchedStep:
    """A step, or the newest one of a folder of checkpoints, also while a run goes on saving there.

    Args:
      choose: given the folders in a step those that are wanted.
      numbers: whether to bring the numbers of arrays at once, and not when they are asked for (`FetchedStep.complete`).

    Raises:
      CheckpointError: no step, or one that cannot be read; a DamagedError where a file is not what was saved.
      OSError: the store gives no answer; it names the object.
    """
    for left in reversed(range(TRIES)):
        now = place.resolve()
        step = now if is_step(now) else now / str(existing_step(now, None))
        scratch = ScratchFolder()
        try:
            folder = scratch.path / step.name
            sums = _wanted(step, choose)
            _fetch_all(step, folder, {name: sums[name] for name in sums if numbers or not OF_NUMBERS.fullmatch(name)})
            return FetchedStep(folder, step, sums, scratch)
        except (CheckpointError, OSError):
            scratch.close()
            if not left or step is now or steps_in(place.resolve())[-1:] == [int(step.name)]:
                raise
    raise AssertionError("the last try returns or raises")


def fetch_files(step: StoredPath, folder: Path) -> None:
    """All files of a step, into a folder, which is made; see `fetch_step`."""
    _fetch_all(step, folder, _wanted(step, lambda parts: parts))


def _wanted(step: StoredPath, choose: Callable[[Collection[str]], Collection[str]]) -> dict[str, str]:
    """{name: checksum} of the files in the chosen folders."""
    sums = read_sums(step)
    if sums is None:
        raise DamagedError(f"{step} has no checksums, or others than were written; read another step")
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
            raise CheckpointError(f"{cannot_write(target, error)}; the variable TMPDIR says where {step} is put") from None
        if found != sums[name]:
            raise DamagedError(f"{step / name} is not what was saved (its SHA-256 is another)")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fetch, sums))


def _fetch(source: StoredPath, target: Path) -> str:
    """The SHA-256 of a file that was brought here: all of it, or nothing is here."""
    digest, size = hashlib.sha256(), source.stat().st_size
    try:
        with target.open("wb") as file:
            for first in range(0, size, MOST_OPEN):
                piece = source.view.read(source.key, first, min(first + MOST_OPEN, size))
                digest.update(piece)
                file.write(piece)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return digest.hexdigest()
