"""Files and folders that appear under their name complete or not at all, on a disk or in a store; locks.

A writer works in a hidden folder next to the target, whose file `lock` it holds; then it renames the result. The next writer
beside it removes such folders of killed writers, and restores what they had moved aside.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from llama_jax.errors import UserError, reason_of
from llama_jax.storage.paths import Location, StoredPath

WORK_SUFFIX = ".llama_jax-partial"
WORK_FOLDER = re.compile(rf"\.(?P<name>.+)\..{{8}}{re.escape(WORK_SUFFIX)}", re.DOTALL)
LOCK, NEW, OLD = "lock", "new", "old"  # in a work folder: what is written, and what it replaces
NO_LOCKS_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


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

    On a disk, the contents are flushed before the rename, and the folder of the new name after it. For a store, the file or
    folder is made in TMPDIR and uploaded at the end, without a lock. If two processes write to one stored folder, one gets
    an error; for a single object the later write wins.

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
            with _write_errors(path, raises, lambda name: name.startswith((str(path), tempfile.gettempdir()))):
                yield target
                check()
                if folder:
                    _upload_folder(target, path.resolve(), last)
                else:
                    path.view.write(path.key, target)
        return
    path = Path(os.path.realpath(path))  # `resolve` raises a RuntimeError for symlink loops
    with ExitStack() as cleanup:
        with _write_errors(path, raises):
            cleanup.enter_context(_created(path.parent))
            remove_leftovers(path.parent)
            work = cleanup.enter_context(_work_folder(path))
            target = work / NEW
            target.mkdir() if folder else target.touch()

        def is_own(name: str) -> bool:
            failed_path = Path(name).absolute()
            return failed_path in (path, path.parent) or failed_path.is_relative_to(work)

        with _write_errors(path, raises, is_own):
            yield target
            flush(target)
            check()
            _rename(work, path)


@contextmanager
def _write_errors(
    path: Location, raises: Callable[[str], UserError], is_own: Callable[[str], bool] = lambda name: True
) -> Iterator[None]:
    """Convert an OSError to one that says that `path` cannot be written, unless it names a file that is not the writer's own
    but was read meanwhile."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str | bytes) and not is_own(os.fsdecode(error.filename)):
            raise
        raise raises(cannot_write(path, error)) from None


@contextmanager
def _work_folder(path: Path) -> Iterator[Path]:
    """A locked folder next to `path`, which is removed at the end."""
    from filelock import FileLock, Timeout

    while True:
        work = Path(tempfile.mkdtemp(WORK_SUFFIX, f".{path.name}.", path.parent))
        lock = FileLock(work / LOCK, fallback_to_soft=False)
        try:
            lock.acquire(blocking=False)
        except (Timeout, FileNotFoundError):  # taken by `remove_leftovers` of another process, which removes it
            continue
        except OSError:
            pass  # without locks, only this process removes it
        break
    try:
        yield work
    finally:
        lock.release()
        remove(work)


def _rename(work: Path, path: Path) -> None:
    """Give the result its name; a folder that had it is in `work` afterwards."""
    new, old = work / NEW, work / OLD
    if not (new.is_dir() and path.is_dir()):
        new.replace(path)
    elif not _exchange(new, path):
        path.rename(old)  # if the process is killed now, `remove_leftovers` restores it
        try:
            new.rename(path)
        except OSError:
            old.rename(path)
            raise
        old.rename(new)
    flush(path.parent, inside=False)


def _exchange(path: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; False if the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except (OSError, TypeError, AttributeError):  # not on Linux
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(renameat2(here, os.fsencode(path), here, os.fsencode(other), exchange) == 0)


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


def remove_leftovers(folder: Path) -> None:
    """Remove work folders of killed writers from a folder, and restore what they had moved aside."""
    from filelock import FileLock

    for work in sorted(folder.iterdir()):
        if (match := WORK_FOLDER.fullmatch(work.name)) is not None:
            with suppress(OSError), FileLock(work / LOCK, fallback_to_soft=False).acquire(blocking=False):
                if (work / OLD).exists() and not (folder / match["name"]).exists():
                    (work / OLD).rename(folder / match["name"])
                remove(work)


@contextmanager
def lock_file(path: Path, subject: Path, raises: Callable[[str], UserError]) -> Iterator[Callable[[], bool]]:
    """Hold the lock of a file, whose folder is created if missing; it ends with the process, however that ends.

    At the end the file is removed, and the folder too if it was created here and is empty.

    Args:
      subject: what only one process may use at a time, for the messages.
      raises: makes the error from a message that another process holds the lock, or that the file cannot be written.

    Yields:
      Whether the lock still protects the folder: False once the folder or the file was removed, renamed or replaced.
    """
    from filelock import FileLock, Timeout

    with ExitStack() as cleanup:
        with _write_errors(path, raises):
            cleanup.enter_context(_created(path.parent))
            try:
                cleanup.enter_context(FileLock(path, fallback_to_soft=False).acquire(blocking=False))
            except Timeout:
                holder = path.read_text("utf-8").strip() or "unknown"
                raise raises(f"{subject} is in use by process {holder}; wait until it ends, or use another path") from None
            except OSError as error:
                if error.errno not in NO_LOCKS_ERRNOS:
                    raise
                message = f"{subject} cannot be locked ({error.strerror}): use it in one process at a time"
                warnings.warn(message, stacklevel=4)
            path.write_text(f"{os.getpid()} on {platform.node()}\n", "utf-8")
            status = path.stat()

        def is_locked() -> bool:
            try:
                return os.path.samestat(path.stat(), status)
            except (FileNotFoundError, NotADirectoryError):
                return False
            except OSError:  # a network file system that does not respond now
                return True

        try:
            yield is_locked
        finally:
            if is_locked():
                path.unlink(missing_ok=True)


@contextmanager
def _created(folder: Path) -> Iterator[None]:
    """Create a folder and its parents; remove those that were created at the end, if they are empty."""
    missing = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with suppress(OSError):
            for path in missing:
                path.rmdir()


def free_bytes(path: Location) -> int:
    """The free bytes on the disk of `path`, which need not exist; for a store, on that of TMPDIR."""
    where = Path(tempfile.gettempdir()) if isinstance(path, StoredPath) else path.absolute()
    return shutil.disk_usage(next(folder for folder in (where, *where.parents) if folder.exists())).free


def flush(path: Path, *, inside: bool = True) -> None:
    """Flush a file or folder, with all files and folders inside: a power failure could leave a name without its content."""
    for entry in (*path.rglob("*"), path) if inside else (path,):
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists and may be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


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
