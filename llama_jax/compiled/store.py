"""Files of executables: read only if no other user could have written them, written atomically, bounded in total size.

    line 1    MAGIC
    line 2    SHA-256 of the rest, in hexadecimal
    line 3    the key, in hexadecimal
    the rest  the content

An executable is a pickle and machine code: anyone who can write the file can run code as its reader. So, as ssh does with
keys, a folder or file is used only if it is owned by the user (or root) and writable by nobody else.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

import jax

from llama_jax.errors import UserError

EXECUTABLES_ENV = "LLAMA_JAX_EXECUTABLES"
"""The environment variable with the folder, or "off". If unset, nothing is stored: commands set it, Python programs may."""
MAGIC = b"llama_jax executable 1"
SUFFIX = ".executable"
LIMIT = 2 * 10**9  # bytes of the folder, unless JAX_COMPILATION_CACHE_MAX_SIZE says otherwise
ROOT = 0
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_log = logging.getLogger("llama_jax.compiled")


def folder() -> Path | None:
    """The folder for executables; None if they are not stored."""
    name = os.environ.get(EXECUTABLES_ENV, "")
    return None if name in ("", "off") else Path(name)


def read(path: Path, key: str) -> bytes | None:
    """The content of a file with this key; None if it is missing or damaged, or another user could have written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb") as file:
            problem = reason_unsafe(path.parent) or _exposed(os.fstat(descriptor))
            content = b"" if problem else file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        _log.info("%s is not used: %s", path, problem)
        return None
    magic, checksum, own_key, rest = [*content.split(b"\n", 3), b"", b"", b""][:4]
    if magic != MAGIC or own_key != key.encode() or checksum != hashlib.sha256(rest).hexdigest().encode():
        _log.info("%s is not used: it is damaged or belongs to another program", path)
        return None
    with suppress(OSError):  # a read-only folder
        os.utime(path)  # for `make_room`
    return rest


def write(path: Path, key: str, content: bytes) -> None:
    """Write a file that `read` finds, and make room for it. Failures are logged, not raised."""
    head = b"\n".join((MAGIC, hashlib.sha256(content).hexdigest().encode(), key.encode(), b""))
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        problem = reason_unsafe(path.parent)
        if problem is None:
            from llama_jax.storage.atomic_write import write_atomically

            with write_atomically(path) as target:
                target.chmod(0o600)
                target.write_bytes(head + content)
            make_room(path.parent, path)
    except (UserError, OSError) as error:
        problem = str(error)
    if problem:
        _log.info("%s is not stored: %s", path, problem)


def remove(path: Path) -> None:
    """Remove a useless file, if permitted."""
    with suppress(OSError):
        path.unlink()


def make_room(folder: Path, kept: Path) -> None:
    """Remove the least recently used files until the folder is within its limit; `kept` stays.

    Processes that have loaded an executable keep it. Only files with names of executables are touched.
    """
    most: int = jax.config.jax_compilation_cache_max_size  # type: ignore[attr-defined]  # made when JAX is imported
    limit = LIMIT if most < 0 else most
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            about = path.stat()
            found.append((about.st_mtime, about.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total > limit and path != kept:
            remove(path)
            total -= size


def reason_unsafe(folder: Path) -> str | None:
    """The reason why executables in a folder are not used: another user could have written them. None if safe or missing."""
    try:
        return _exposed(folder.stat())
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)


def _exposed(about: os.stat_result) -> str | None:
    """The reason why another user may have written a file or folder, or None. On Windows, the user's folders are private."""
    if not hasattr(os, "geteuid"):
        return None
    if about.st_uid not in (ROOT, os.geteuid()):
        return f"it belongs to another user (uid {about.st_uid})"
    return f"others may write to it (mode {stat.S_IMODE(about.st_mode):o})" if about.st_mode & OTHERS_WRITE else None
