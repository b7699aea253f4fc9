"""Uploads to a store: files and folders are made on this machine, and appear there whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llama_jax.storage.location import StoredPath


@contextmanager
def uploading(path: StoredPath, *, folder: bool, last: Collection[str], check: Callable[[], None]) -> Iterator[Path]:
    """A file, or an empty folder, on this machine (in TMPDIR), whose content is put into the store in the end.

    An object appears there whole or not at all. In a folder, the file named in `last`, without which it is not recognised as
    a model, is written after all others; when a folder is replaced, this file is removed first, and files that the new
    folder lacks are removed in the end. On failure, what was written is removed. There is no lock: if two write to one name
    at the same time, one gets an error at the file `last`, which must not exist yet; for single files the later write wins.

    Args:
      check: called before anything is written; what it raises stops that.

    Raises:
      OSError: with the URL of an object that cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="llama_jax-") as scratch:
        target = Path(scratch) / "model"
        if folder:
            target.mkdir()
        else:
            target.touch()
        yield target
        check()
        if folder:
            _put_folder(target, path.resolve(), last)
        else:
            path.view.write(path.key, target)


def _put_folder(folder: Path, path: StoredPath, names_of_last: Collection[str]) -> None:
    files = {os.fspath(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    (last,) = files.keys() & set(names_of_last)
    before = set(path.view.names(path.key))
    for name in before & set(names_of_last):
        path.view.delete((path / name).key)
    before -= set(names_of_last)
    written: list[str] = []
    try:
        for name in sorted(files.keys() - {last}):
            key = (path / name).key
            path.view.write(key, files[name])
            written.append(key)
        try:
            path.view.create((path / last).key, files[last].read_bytes())
        except FileExistsError:
            written.clear()  # some of it may belong to the other writer
            raise OSError(errno.EEXIST, "another has written there meanwhile; look at it", str(path)) from None
    except BaseException:
        for key in written:
            with suppress(OSError):
                path.view.delete(key)
        raise
    for name in before - files.keys():
        path.view.delete((path / name).key)
