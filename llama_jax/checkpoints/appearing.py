"""Files and folders that appear whole under their name, or not at all."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llama_jax.errors import CheckpointError

# What a folder of a model may hold: one that holds anything else is never replaced.
OF_A_MODEL = re.compile(
    r"(config|generation_config|tokenizer_config|special_tokens_map|added_tokens|tokenizer)\.json|tokenizer\.model|"
    r"chat_template\.jinja|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|params"
)


@contextmanager
def appearing(path: Path, *, folder: bool, overwrite: bool, sources: Iterable[Path] = ()) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it when all is written, removed when something fails.

    Args:
      folder: whether a folder is written; only an empty one, or with `overwrite` one that holds nothing but a model, makes
        room for it.
      overwrite: whether a file makes room for a file.
      sources: what is read meanwhile, and must not be touched.

    Raises:
      CheckpointError: what is at `path` does not make room.
    """
    path = path.resolve()
    check_room(path, folder=folder, overwrite=overwrite, sources=sources)
    made = _make_parents(path)
    target = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        yield target
        _flush(target)
        check_room(path, folder=folder, overwrite=overwrite)  # again: somebody else may have written meanwhile
        if folder and path.exists():
            old = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
            path.rename(old)  # a folder cannot be replaced in one step
            target.rename(path)
            _remove(old)
        else:
            target.replace(path)
    finally:
        _remove(target)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()  # only if it is empty


def check_room(path: Path, *, folder: bool, overwrite: bool, sources: Iterable[Path] = ()) -> None:
    """Raise as `appearing` would, without writing anything."""
    path = path.resolve()
    for source in map(Path.resolve, sources):
        if path == source or path in source.parents or source in path.parents:
            raise CheckpointError(f"{path} is, holds or lies in the model that is read ({source}); write elsewhere")
    if not path.exists():
        return
    if not path.is_dir() and not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder; give another path")
    if path.is_dir() != folder:
        there, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise CheckpointError(f"{path} is a {there}, and this format is a {wanted}; give another path")
    inside = sorted(entry.name for entry in path.iterdir()) if folder else []
    if folder and not inside:
        return
    if not overwrite:
        raise CheckpointError(f"{path} exists; remove it, or replace it with overwrite=True (--overwrite)")
    foreign = [name for name in inside if not OF_A_MODEL.fullmatch(name)]
    if foreign:
        raise CheckpointError(f"{path} holds more than a model ({foreign[0]}), so it is not replaced; give another path")


def _make_parents(path: Path) -> list[Path]:
    """Make the folders above, and say which were made, the deepest first."""
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    return made


def _flush(target: Path) -> None:
    """Onto the disk before the rename: otherwise a power cut can leave the name without the content."""
    files = [path for path in target.rglob("*") if path.is_file()] if target.is_dir() else [target]
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
