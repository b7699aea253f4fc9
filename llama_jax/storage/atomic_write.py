"""Files and folders that appear under their name complete or not at all, on a disk or in a store; locks; leftovers.

A writer works in a locked temporary file or folder next to the target. Leftovers of killed writers are not locked, and are
removed by the next writer in the same folder.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import shutil
import sys
import tempfile
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from llama_jax.errors import UserError, reason_of
from llama_jax.storage.paths import Location, StoredPath

try:
    import fcntl
except ImportError:  # on Windows, without locks
    fcntl = None  # type: ignore[assignment]

# Next to the target until it is complete ("partial"), and the previous file or folder of that name ("old").
TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.llama_jax-(?P<kind>partial|old)", re.DOTALL)
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


def _temporary(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.llama_jax-{kind}")


@contextmanager
def write_atomically(
    path: Location,
    *,
    folder: bool = False,
    check: Callable[[], None] | None = None,
    raises: Callable[[str], UserError] = UserError,
    last: Collection[str] = (),
) -> Iterator[Path]:
    """A new file, or an empty folder, on this machine; it becomes `path` as a whole at the end, or is removed on an error.

    On a disk it lies next to `path`; it is flushed before it is renamed, and the new name before this returns. For a store
    it lies in TMPDIR and is then uploaded, without a lock. If two processes write to one stored folder, one gets an error;
    for a single object the later write wins.

    Args:
      check: called before the renaming or the upload, and prevents it by raising an error.
      raises: makes the error from a message that says that `path` cannot be written, and why.
      last: for a folder in a store: names of files by which it is recognized; the one that it has is deleted first and
        uploaded last.
    """
    check = check or (lambda: None)
    if isinstance(path, StoredPath):
        with tempfile.TemporaryDirectory(prefix="llama_jax-") as scratch:
            target = Path(scratch) / "model"
            target.mkdir() if folder else target.touch()
            try:
                yield target
                check()
                if folder:
                    _upload_folder(target, path.resolve(), last)
                else:
                    path.view.write(path.key, target)
            except OSError as error:
                if not str(error.filename or path).startswith((str(path), tempfile.gettempdir())):
                    raise  # about something that was read meanwhile
                raise raises(cannot_write(path, error)) from None
        return
    path = Path(os.path.realpath(path))  # `resolve` raises a RuntimeError for symlink loops
    made = [parent for parent in path.parents if not parent.exists()]
    with ExitStack() as cleanup:

        @cleanup.callback
        def remove_empty_parents() -> None:
            for parent in made:
                with suppress(OSError):
                    parent.rmdir()

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(path.parent)
            target, lock = _create_locked(path, folder)
        except OSError as error:
            raise raises(cannot_write(path, error)) from None
        cleanup.callback(_discard, target, lock)
        try:
            yield target
            flush(target)
            check()
            replace_path(target, path)
        except OSError as error:
            if isinstance(error.filename, str | bytes):
                named = Path(os.fsdecode(error.filename)).absolute()
                if named not in (path, path.parent) and not named.is_relative_to(target):
                    raise  # about something that was read meanwhile
            raise raises(cannot_write(path, error)) from None


def replace_path(target: Path, path: Path) -> None:
    """Rename `target` to `path`, atomically if the system can; a folder that was at `path` is at `target` afterwards.

    Raises:
      OSError: the system refuses, or `target` is a file and `path` a folder, whose content would be lost.
    """
    if path.is_dir() and not path.is_symlink() and not target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not path.is_dir() or path.is_symlink():
        target.replace(path)
    elif not _exchange(target, path):
        old, lock = _temporary(path, "old"), _lock(path)
        try:
            path.rename(old)  # if the process is killed now, `remove_leftovers` restores the old folder
            try:
                target.rename(path)
            except OSError:
                old.rename(path)
                raise
            old.rename(target)
        finally:
            _close(lock)
    _flush_entry(path.parent)


def _upload_folder(folder: Path, path: StoredPath, last_names: Collection[str]) -> None:
    files = {os.fspath(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    (last,) = files.keys() & set(last_names)
    before = set(path.view.names(path.key))
    for name in before & set(last_names):
        path.view.delete((path / name).key)
    before -= set(last_names)
    written: list[str] = []
    try:
        for name in sorted(files.keys() - {last}):
            key = (path / name).key
            path.view.write(key, files[name])
            written.append(key)
        written.append((path / last).key)
        try:
            path.view.create((path / last).key, files[last].read_bytes())
        except FileExistsError:
            written.clear()  # some of it may belong to the other writer
            raise OSError(errno.EEXIST, "another writer wrote there meanwhile; check it", str(path)) from None
    except BaseException:
        for key in written:
            with suppress(OSError):
                path.view.delete(key)
        raise
    for name in before - files.keys():
        path.view.delete((path / name).key)


def _discard(path: Path, lock: int | None) -> None:
    _close(lock)
    remove(path)


def remove_leftovers(folder: Path) -> None:
    """Remove leftovers of killed writers in a folder, and restore what they had moved aside.

    Without locks, as on some network file systems, nothing is changed.
    """
    with suppress(OSError):
        for entry in sorted(folder.iterdir()):
            found = TEMPORARY.fullmatch(entry.name)
            if found is None or (lock := _lock(entry)) is None:
                continue
            try:
                with suppress(OSError):
                    if found["kind"] == "old" and not (folder / found["name"]).exists():
                        entry.rename(folder / found["name"])
                    else:
                        remove(entry)
            finally:
                os.close(lock)


def free_bytes(path: Location) -> int:
    """The free bytes on the disk of `path`, which need not exist; for a store, on that of TMPDIR."""
    where = Path(tempfile.gettempdir()) if isinstance(path, StoredPath) else path.absolute()
    return shutil.disk_usage(next(folder for folder in (where, *where.parents) if folder.exists())).free


def flush(target: Path) -> None:
    """Flush a file, or all of a folder: without this a power failure can leave a name without its content."""
    if not target.is_dir():
        with target.open("rb") as file:
            os.fsync(file.fileno())
        return
    for where, _, names in os.walk(target):
        for name in names:
            flush(Path(where) / name)
    flush_folders(target)


def flush_folders(target: Path) -> None:
    """Flush the directory entries of a folder and of its subfolders; the files are already flushed."""
    for where, _, _ in os.walk(target):
        _flush_entry(Path(where))


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists and may be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def hold_lock(path: Path, taken: Callable[[str], UserError], what: str) -> int:
    """Create and lock a file; the descriptor holds the lock until it is closed, or the process ends.

    On a system without file locks nothing is locked; on a file system without them, this also warns.

    Args:
      taken: makes the error from the name of the process that holds the lock.
      what: the kind of job that writes in the folder, for the warning.

    Raises:
      OSError: the file cannot be created.
    """
    while True:
        with ExitStack() as unless_held:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            unless_held.callback(os.close, descriptor)
            try:
                free = lock_descriptor(descriptor)
            except OSError as error:
                free = True
                message = f"{path.parent} cannot be locked ({error.strerror}): do not start a second {what} in it"
                warnings.warn(message, stacklevel=3)
            if not free:
                raise taken(path.read_text("utf-8").strip() or "unknown")
            with suppress(FileNotFoundError):  # its holder removed it between opening and locking: create a new one
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    unless_held.pop_all()
                    return descriptor


def sign_lock(descriptor: int) -> None:
    """Write the name of this process into the lock file that it holds."""
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()} on {platform.node()}\n".encode())


def lock_descriptor(descriptor: int) -> bool:
    """Lock a file or folder while the descriptor is open: False if another process holds it; OSError without locks."""
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _lock(path: Path) -> int | None:
    """A descriptor that locks a file or folder; None if another process holds the lock, or without locks."""
    if fcntl is None:
        return None
    with suppress(OSError), ExitStack() as until_locked:
        mode = os.O_RDONLY if path.is_dir() else os.O_RDWR  # NFS can lock only files opened for writing
        descriptor = os.open(path, mode | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        until_locked.callback(os.close, descriptor)
        if lock_descriptor(descriptor):
            until_locked.pop_all()
            return descriptor
    return None


def _close(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _create_locked(path: Path, folder: bool) -> tuple[Path, int | None]:
    """Create the temporary file or folder of `path`, locked; after three failures without a lock: some systems have none."""
    for last in (False, False, False, True):
        target = _temporary(path, "partial")
        if folder:
            target.mkdir()
        else:
            target.touch(exist_ok=False)
        lock = _lock(target)
        if lock is not None and target.exists():
            return target, lock
        _close(lock)  # another process that removes leftovers has locked or removed it
        if not last:
            remove(target)
    return target, None


def discard_output(descriptor: int) -> None:
    """Discard what is written to a descriptor from now on: nothing may be flushed to a closed pipe at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def cannot_write(path: os.PathLike[str], error: BaseException) -> str:
    """The message that a path cannot be written, with reason and remedy."""
    reason = (error.strerror if isinstance(error, OSError) else None) or reason_of(error, 200)
    return f"{path} cannot be written ({reason}){remedy_for(error)}"


def remedy_for(error: BaseException) -> str:
    """The remedy for a write error, after a semicolon; "" if none is known. Some errors of libraries have only a text."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if number in DISK_FULL_ERRNOS or any(os.strerror(full) in text for full in DISK_FULL_ERRNOS):
        return "; the disk is full: free some space, or write to another disk"
    if "requested and" in text:  # NumPy's error for a short write, without a reason
        return "; the disk is full, or file sizes are limited (ulimit -f): free some space, or write elsewhere"
    if number == errno.EFBIG or os.strerror(errno.EFBIG) in text:
        return "; file sizes are limited (ulimit -f, or the file system): write elsewhere"
    if number == errno.EBADF:
        return "; it is closed"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "; use a folder that you may write to"
    if number == errno.ENOTDIR or (isinstance(error, FileExistsError) and error.strerror == os.strerror(errno.EEXIST)):
        return "; a file is where a folder is needed: choose another path"
    if number == errno.EISDIR:
        return "; a folder has that name: choose another path"
    return ""


def _exchange(target: Path, path: Path) -> bool:
    """Exchange the names of two paths atomically; False if the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # a C library without it
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(renameat2(here, os.fsencode(target), here, os.fsencode(path), exchange) == 0)


def _flush_entry(folder: Path) -> None:
    """Flush the directory entries of a folder."""
    if fcntl is None:
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
