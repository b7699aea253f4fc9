"""The header of a GGUF file, versions 1 to 3: its settings, a vocabulary among them.

Source: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llama_jax.errors import UserError, reason_of, shown
from llama_jax.storage import Location, StoredPath

# Types of settings by number: struct's letter, or one of the two below.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# A text or an entry of a table costs up to a hundred bytes here for each of its own. Llama 3's vocabulary has 410,000 texts.
MOST_TEXTS = 1 << 20
MOST_ENTRIES = 1 << 16
READ_AHEAD = 1 << 20  # bytes of a header in a store, which has several million


def is_gguf(path: Location) -> bool:
    """Whether the file begins as GGUF does."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


@contextmanager
def open_header(path: Location, kind: type[UserError]) -> Iterator[Header]:
    """The header of a file, to be read from its start.

    Raises:
      UserError: of this kind, for a damaged file, or what the caller finds damaged in it.
    """
    with path.open("rb", buffering=READ_AHEAD if isinstance(path, StoredPath) else -1) as file:
        try:
            yield Header(path, kind, file)
        except UserError:
            raise
        except (struct.error, ValueError, KeyError, OverflowError) as error:
            raise kind(f"{path} is not a whole GGUF file ({reason_of(error)}); copy it again") from None


class Header:
    """Reads a header from its start. Every length in it is checked against the rest of the file before it is used."""

    def __init__(self, path: Location, kind: type[UserError], file: Any) -> None:
        self.file = file
        self.size = file.seek(0, os.SEEK_END)
        self.texts_left = MOST_TEXTS
        self.at = file.seek(4)  # after the magic
        self.version = self.scalar("I")
        self.length = "I" if self.version == 1 else "Q"
        if self.version not in (1, 2, 3):
            big = self.version in (1 << 24, 2 << 24, 3 << 24)
            what = "is in big-endian byte order" if big else f"has version {self.version}"
            raise kind(f"{path} {what}, which is not supported; little-endian versions 1 to 3 are")
        self.tensor_count, self.field_count = self.scalar(self.length), self.scalar(self.length)
        if max(self.tensor_count, self.field_count) > MOST_ENTRIES:
            raise ValueError(f"{self.field_count} settings and {self.tensor_count} tensors are announced")

    def fields(self) -> dict[str, Any]:
        """All settings by key, with the format's version as ``GGUF.version``; what follows them are the tensors' entries."""
        found: dict[str, Any] = {"GGUF.version": self.version}
        for _ in range(self.field_count):
            key = self.string()
            if key in found:
                raise ValueError(f"the key {shown(key, 40)} occurs twice")
            found[key] = self.value(self.scalar("I"))
        return found

    def take(self, size: int) -> bytes:
        if size > self.size - self.at:
            raise ValueError(f"{size} bytes are announced, {self.size - self.at} are left")
        found = self.file.read(size)
        if len(found) < size:
            raise ValueError("the file ended while it was read")
        self.at += size
        return found

    def scalar(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize(letter)))[0]

    def string(self) -> str:
        # A vocabulary may hold pieces that are no UTF-8 by themselves.
        return self.take(self.scalar(self.length)).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar(self.length)
        if kind == STRING:
            self.texts_left -= count
            if count > self.size - self.at or self.texts_left < 0:
                raise ValueError(f"{count} strings are announced")
            return [self.string() for _ in range(count)]
        letter = SCALARS[kind]
        # Packed, since a list takes twenty bytes for each of a file's.
        found = array("B" if letter == "?" else letter, self.take(count * struct.calcsize(letter)))
        if sys.byteorder == "big":
            found.byteswap()
        return found
