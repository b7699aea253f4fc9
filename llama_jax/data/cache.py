"""The file of a tokenised corpus: written whole or not at all, checked whole when it is opened.

    8 bytes     MAGIC
    8 bytes     size of the description
    32 bytes    SHA-256 of the description, which holds that of the data
    tokens      uint16 or uint32 [all], filled up to a multiple of 8 bytes
    starts      int64[N + 1], where documents begin, and the end of the last
    bytes       int64[N], UTF-8 bytes of each document's text
    description JSON

All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import time
from array import array
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from llama_jax.data.corpus import Corpus
from llama_jax.data.errors import DataError
from llama_jax.data.pieces import DocumentPart
from llama_jax.storage.atomic_write import cannot_write, write_atomically

MAGIC = b"llamajx1"
CORPUS = re.compile(r"[0-9a-f]{32}\.corpus")  # a file's name in a cache
RECENT = 600  # seconds
LIMIT = 100  # gigabytes of a cache
HEADER = struct.Struct("<8sQ32s")


def write_corpus(path: Path, pieces: Iterable[DocumentPart], vocab_size: int, origin: dict[str, Any]) -> None:
    """Write pieces as they come: under `path` appears the whole corpus, or nothing.

    Args:
      origin: what the corpus was made from, in values of JSON, for `read_corpus` to give back.

    Raises:
      DataError: it cannot be written.
    """
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    starts, byte_counts = array("q"), array("q")
    total = 0
    digest = hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise elsewhere(cannot_write(path.parent, error)) from None
    with write_atomically(path, raises=elsewhere) as target, target.open("wb") as file:

        def put(content: bytes) -> None:
            digest.update(content)
            file.write(content)

        file.write(bytes(HEADER.size))
        for piece in pieces:
            if piece.begins:
                starts.append(total)
                byte_counts.append(0)
            byte_counts[-1] += piece.text_bytes
            total += len(piece.tokens)
            put(piece.tokens.astype(dtype).tobytes())
        put(bytes(-total * dtype.itemsize % 8))
        starts.append(total)
        for numbers in (starts, byte_counts):
            put(np.array(numbers, "<i8").tobytes())
        description = {
            "token_type": dtype.str,
            "tokens": total,
            "documents": len(byte_counts),
            "vocab_size": vocab_size,
            "sha256": digest.hexdigest(),
            "origin": origin,
        }
        text = json.dumps(description).encode()
        file.write(text)
        file.seek(0)
        file.write(HEADER.pack(MAGIC, len(text), hashlib.sha256(text).digest()))


def make_room(folder: Path, limit: int, kept: Path) -> None:
    """Remove the least recently opened corpora from a cache until no more than `limit` bytes are left.

    A corpus that was opened in the last minutes stays, since another process may be about to read it, and so does `kept`. A
    mapped corpus stays readable in the processes that have it open. Only files named as corpora are touched.
    """
    found: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        for path in folder.iterdir():
            if CORPUS.fullmatch(path.name):
                with suppress(OSError):
                    stat = path.stat()
                    found.append((stat.st_mtime, stat.st_size, path))
    total = sum(size for _, size, _ in found)
    for opened, size, path in sorted(found):
        if total <= limit or opened > time.time() - RECENT:
            break
        if path != kept:
            with suppress(OSError):  # it is somebody else's, or gone
                path.unlink()
                total -= size


def note_use(path: Path) -> None:
    """Record that a corpus was opened just now, for `make_room`."""
    with suppress(OSError):  # a cache that is only read
        os.utime(path)


def cache_folder() -> Path:
    """The folder named by LLAMA_JAX_CACHE, or the user's cache folder."""
    return Path(os.environ.get("LLAMA_JAX_CACHE") or platformdirs.user_cache_dir("llama_jax"))


def cache_limit() -> int:
    """LLAMA_JAX_CACHE_LIMIT in bytes, or LIMIT.

    Raises:
      DataError: it is no number of gigabytes.
    """
    text = os.environ.get("LLAMA_JAX_CACHE_LIMIT", str(LIMIT))
    try:
        limit = int(float(text) * 1e9)
    except (ValueError, OverflowError):
        limit = -1
    if limit < 0:
        raise DataError(f"LLAMA_JAX_CACHE_LIMIT={text} must be a number of gigabytes, at least 0; set it so, or not at all")
    return limit


def elsewhere(text: str) -> DataError:
    """The message that a cache cannot be written to, with the remedy."""
    return DataError(f"{text}; name another folder as `cache`, or as LLAMA_JAX_CACHE in the environment")


def read_corpus(path: Path) -> tuple[Corpus, dict[str, Any]]:
    """The corpus in a file, its tokens mapped, and the origin that was written with it. All of it is read once to check it.

    Raises:
      DataError: a file that is not what was written.
    """
    damaged = DataError(f"{path} is not a whole corpus of tokens")
    size = path.stat().st_size
    if size < HEADER.size:
        raise damaged
    mapped = np.asarray(np.memmap(path, np.uint8, "r"))
    magic, length, checksum = HEADER.unpack(mapped[: HEADER.size].tobytes())
    text = mapped[max(size - length, HEADER.size) :]
    if magic != MAGIC or hashlib.sha256(text.data).digest() != checksum:
        raise damaged
    # The description is authentic from here on, and its sizes are checked against the file's.
    description = json.loads(text.tobytes())
    data = mapped[HEADER.size : size - length]
    dtype, total, count = np.dtype(description["token_type"]), description["tokens"], description["documents"]
    end = -(-total * dtype.itemsize // 8) * 8
    if hashlib.sha256(data.data).hexdigest() != description["sha256"]:
        raise damaged
    numbers = np.array(data[end:].view("<i8"))
    corpus = Corpus(
        tokens=data[: total * dtype.itemsize].view(dtype),
        starts=numbers[:count],
        stops=numbers[1 : count + 1],
        byte_counts=numbers[count + 1 :],
        vocab_size=description["vocab_size"],
        digest=description["sha256"],
    )
    return corpus, description["origin"]
