"""Files and folders that appear whole under their name, or not at all, however the process ends; and who writes to them."""

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
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llama_jax.errors import UserError, reason_of

# What lies beside the name until it is whole, and what had the name until then. Its writer holds a lock on it.
NAME = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.llama_jax-(?P<kind>partial|old)", re.DOTALL)
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def appearing(
    path: Path,
    *,
    folder: bool = False,
    check: Callable[[], None] | None = None,
    raises: Callable[[str], UserError] = UserError,
) -> Iterator[Path]:
    """A new file, or an empty folder, beside `path`; all of it gets that name in the end, and nothing when something fails.

    It is on the disk before it has the name, and the name before this returns. What a killed process left in the same
    folder is removed first.

    Args:
      check: called before the renaming; what it raises stops that.
      raises: makes the error of a text that says that it cannot be written, and why.
    """
    path = Path(os.path.realpath(path))  # `resolve` raises a RuntimeError for links that lead to one another
    made = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_up(path.parent)
        target, lock = _begin(path, folder)
    except OSError as error:
        _remove_empty(made)
        raise raises(cannot_write(path, error)) from None
    try:
        yield target
        flush(target)
        if check is not None:
            check()
        put(target, path)
    except OSError as error:
        if error.filename is not None and not _is_in(error.filename, (target, path, path.parent)):
            raise  # of something that was read meanwhile
        raise raises(cannot_write(path, error)) from None
    finally:
        if lock is not None:
            os.close(lock)
        remove(target)
        _remove_empty(made)


def put(target: Path, path: Path) -> None:
    """Give `target` the name `path`, in one step where the system can; a folder that had it is `target` afterwards.

    Raises:
      OSError: the system refuses, or `target` is a file and `path` a folder, of which all content would be lost.
    """
    if path.is_dir() and not path.is_symlink() and not target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not path.is_dir() or path.is_symlink():
        target.replace(path)
    elif not _exchange(target, path):
        old = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.llama_jax-old")
        lock = _lock(path)
        try:
            path.rename(old)  # between the two a killed process leaves neither name: `clear_up` gives the old one back
            try:
                target.rename(path)
            except OSError:
                old.rename(path)
                raise
            old.rename(target)
        finally:
            if lock is not None:
                os.close(lock)
    _flush_entry(path.parent)


class ScratchFolder:
    """An empty folder in TMPDIR, until it is closed or nobody has it any more. What killed processes left of theirs goes
    when the next one is made.

    Attributes:
      path: of the folder.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path` is the one of another host, for a folder of the same name on this one.

        Raises:
          OSError: it cannot be made, or is there.
        """
        wanted = Path(tempfile.gettempdir()) / "scratch" if path is None else path
        clear_up(wanted.parent)
        self.path, lock = _begin(wanted, folder=True, as_it_is=path is not None)
        self.close = weakref.finalize(self, _discard, self.path, lock)


def _discard(path: Path, lock: int | None) -> None:
    remove(path)
    if lock is not None:
        os.close(lock)


def clear_up(folder: Path) -> None:
    """Remove what processes that have died left of `appearing` in a folder, and give back what they had taken the name of.

    What a living process writes is locked; without locks, as on Windows and some file systems over a network, all stays.
    """
    with suppress(OSError):
        for entry in sorted(folder.iterdir()):
            found = NAME.fullmatch(entry.name)
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


def flush(target: Path) -> None:
    """Onto the disk before the renaming: otherwise a power cut can leave the name without the content."""
    if not target.is_dir():
        with target.open("rb") as file:
            os.fsync(file.fileno())
        return
    for where, _, names in os.walk(target):
        for name in names:
            flush(Path(where) / name)
    flush_folders(target)


def flush_folders(target: Path) -> None:
    """Likewise the names in a folder and in those below, where the files are on the disk already."""
    for where, _, _ in os.walk(target):
        _flush_entry(Path(where))


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there, as far as that can be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def hold(path: Path, taken: Callable[[str], UserError], what: str) -> int:
    """A descriptor that holds the file of a lock while it is open, and so no longer than this process lives.

    On Windows, which has no such locks, nothing is held; on a file system without them neither, which warns.

    Args:
      taken: makes the error of who holds it, where another process does.
      what: is written in the folder, for the warning.

    Raises:
      OSError: the file cannot be made.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _hold(descriptor, path, taken, what)
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # who held it has removed it between opening and holding: then there is a new one


def sign(descriptor: int) -> None:
    """Write into the file of a lock which process holds it."""
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()} on {platform.node()}\n".encode())


def _hold(descriptor: int, path: Path, taken: Callable[[str], UserError], what: str) -> None:
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise taken(path.read_text("utf-8").strip() or "unknown") from None
    except OSError as error:
        message = f"{path.parent} cannot be locked ({error.strerror}): start no second {what} in it"
        warnings.warn(message, stacklevel=4)


def send_nowhere(descriptor: int) -> None:
    """Let what is written to a descriptor from now on vanish: nothing may be flushed at exit to where it cannot go."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def cannot_write(path: os.PathLike[str], error: BaseException) -> str:
    """That a path cannot be written, why, and what to do."""
    reason = (error.strerror if isinstance(error, OSError) else None) or reason_of(error, 200)
    return f"{path} cannot be written ({reason}){remedy_for(error)}"


def remedy_for(error: BaseException) -> str:
    """What to do about an error of writing, with a semicolon before it; libraries have only its text. Else nothing."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if number in FULL or any(os.strerror(full) in text for full in FULL):
        return "; the disk is full: make room there, or write to another one"
    if "requested and" in text:  # NumPy's short write, of which it tells no reason
        return "; the disk is full, or files have a largest size here (ulimit -f): make room there, or write elsewhere"
    if number == errno.EFBIG or os.strerror(errno.EFBIG) in text:
        return "; files have a largest size here (ulimit -f, or the file system): write elsewhere"
    if number == errno.EBADF:
        return "; it is closed"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "; give a folder that you may write to"
    if number == errno.ENOTDIR or (isinstance(error, FileExistsError) and error.strerror == os.strerror(errno.EEXIST)):
        return "; a file is where a folder is needed: give another path"
    if number == errno.EISDIR:
        return "; a folder is there: give another path"
    return ""


def _begin(path: Path, folder: bool, *, as_it_is: bool = False) -> tuple[Path, int | None]:
    """Make the file or folder, locked; after some trials without a lock, for some file systems have none.

    Args:
      as_it_is: whether `path` is such a name already.
    """
    for last in (False, False, False, True):
        target = path if as_it_is else path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.llama_jax-partial")
        if folder:
            target.mkdir()
        else:
            target.touch(exist_ok=False)
        lock = _lock(target)
        if lock is not None and target.exists():
            break
        # Another process that clears up has come between, and has it, or has removed it.
        if lock is not None:
            os.close(lock)
            lock = None
        if not last:
            remove(target)
    return target, lock


def _lock(path: Path) -> int | None:
    """A descriptor that holds a lock on a file or folder while it is open; None where another has it, or none can be."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        how = os.O_RDONLY if path.is_dir() else os.O_RDWR  # over a network only what may be written can be locked
        descriptor = os.open(path, how | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _exchange(target: Path, path: Path) -> bool:
    """Let two paths change names in one step; False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # a C library without it
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(renameat2(here, os.fsencode(target), here, os.fsencode(path), exchange) == 0)


def _flush_entry(folder: Path) -> None:
    """The names in a folder onto the disk; where a folder cannot be opened for that, the system does it by itself."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_in(name: object, places: tuple[Path, ...]) -> bool:
    """Whether a file that an error names is one of these places, or in the first of them."""
    found = Path(os.fsdecode(name)).absolute() if isinstance(name, str | bytes | os.PathLike) else Path()
    return found in places or found.is_relative_to(places[0])


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()  # only if it is empty
