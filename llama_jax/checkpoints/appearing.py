"""Where a model may be written: what it may replace, and what never."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from llama_jax import writing
from llama_jax.checkpoints.beside import SETTINGS, VOCABULARIES
from llama_jax.errors import CheckpointError, reading
from llama_jax.storage import Location, StoredPath, resolved
from llama_jax.storage.uploading import uploading

# What a folder of a model may hold: one that holds anything else is never replaced.
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|params")
LAST = ("config.json", "adapter_config.json")  # without which no reader takes a folder for a model, or an adapter
OTHERS = {"config.json", "adapter_config.json", "adapter_model.safetensors", *VOCABULARIES, *SETTINGS}


@contextmanager
def appearing(path: Location, *, folder: bool, overwrite: bool, sources: Iterable[Location] = ()) -> Iterator[Path]:
    """As `writing.appearing`, an empty file or folder that becomes `path`; for a store as `uploading`.

    Args:
      folder: whether a folder is written; it replaces only an empty one, or with `overwrite` one that holds only a model.
      overwrite: whether a file may be replaced by a file.
      sources: paths that are read at the same time, and must not be touched.

    Raises:
      CheckpointError: what is at `path` must not be replaced, or `path` cannot be written.
    """
    path = resolved(path)
    check_room(path, folder=folder, overwrite=overwrite, sources=sources)
    again = partial(check_room, path, folder=folder, overwrite=overwrite)  # somebody else may have written meanwhile
    if isinstance(path, StoredPath):
        try:
            with uploading(path, folder=folder, last=LAST, check=again) as target:
                yield target
        except OSError as error:
            named = str(error.filename or path)
            if not named.startswith((str(path), tempfile.gettempdir())):
                raise  # of something that was read meanwhile
            raise CheckpointError(writing.cannot_write(path, error)) from None
        return
    with writing.appearing(path, folder=folder, check=again, raises=CheckpointError) as target:
        yield target


def check_room(path: Location, *, folder: bool, overwrite: bool, sources: Iterable[Location] = ()) -> None:
    """Raise as `appearing` would, without writing anything."""
    if isinstance(path, StoredPath) and path.view.root.startswith("hf://"):
        raise CheckpointError(f"{path} is on the hub: write to a path of this machine, and upload that with `hf upload`")
    with reading(path, CheckpointError):
        _check_room(resolved(path), folder, overwrite, sources)


def _check_room(path: Location, folder: bool, overwrite: bool, sources: Iterable[Location]) -> None:
    for source in map(resolved, sources):
        if path == source or path in source.parents or source in path.parents:
            raise CheckpointError(f"{path} is, contains or is inside the model that is read ({source}); write elsewhere")
    if not path.exists():
        return
    if not path.is_dir() and not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder; give another path")
    if folder and isinstance(path, Path) and path.is_dir() and path.samefile("."):
        raise CheckpointError(f"{path} is the current folder, and another would take its place; give a folder inside it")
    if path.is_dir() != folder:
        there, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise CheckpointError(f"{path} is a {there}, and this format is a {wanted}; give another path")
    inside = sorted(entry.name for entry in path.iterdir()) if folder else []
    if folder and not inside:
        return
    if not overwrite:
        raise CheckpointError(f"{path} exists; remove it, or replace it with overwrite=True (--overwrite)")
    foreign = [name for name in inside if name not in OTHERS and not WEIGHTS.fullmatch(name)]
    if foreign:
        raise CheckpointError(f"{path} holds more than a model ({foreign[0]}), so it is not replaced; give another path")
