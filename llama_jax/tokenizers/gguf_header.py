"""The header of a GGUF file, versions 1 to 3: its metadata, including the vocabulary.

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

from llama_jax.errors import UserError, reason_of, short_repr
from llama_jax.storage import Location, StoredPath

# Types of metadata values by number: struct's letter, or one of the two below.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# A string or a table entry takes up to 100 times its size in memory. Llama 3's vocabulary has 410,000 strings.
MAX_TEXTS = 1 << 20
MAX_ENTRIES = 1 << 16
MAX_FLOAT32 = float.fromhex("0x1.fffffep+127")
TEXT_WINDOW = 1 << 20  # bytes of strings that are parsed together
HEADER_READ_AHEAD = 1 << 20  # bytes per request for a header in a store; a header has several million


def is_gguf(path: Location) -> bool:
    """Whether the file starts with GGUF's magic bytes."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def short_decimal(value: Any) -> Any:
    """The shortest decimal of a number stored as float32: 1e-5, not 9.99999974e-06.

    A float64 beyond the range of float32, and any value that is not a float, is returned unchanged.
    """
    import numpy as np  # not needed to read only a tokenizer

    return float(str(np.float32(value))) if isinstance(value, float) and abs(value) < MAX_FLOAT32 else value


@contextmanager
def open_header(path: Location, error_type: type[UserError]) -> Iterator[Header]:
    """A reader positioned at the start of a file's header.

    Raises:
      UserError: of type `error_type`, for a damaged file, also if the caller detects the damage.
    """
    with path.open("rb", buffering=HEADER_READ_AHEAD if isinstance(path, StoredPath) else -1) as file:
        try:
            yield Header(path, error_type, file)
        except UserError:
            raise
        except (struct.error, ValueError, KeyError, OverflowError) as error:
            raise error_type(f"{path} is not a whole GGUF file ({reason_of(error)}); copy it again") from None


class Header:
    """Reads a header from its start. Every length is checked against the remaining bytes of the file before use."""

    def __init__(self, path: Location, error_type: type[UserError], file: Any) -> None:
        self.file = file
        self.size = file.seek(0, os.SEEK_END)
        self.texts_left = MAX_TEXTS
        self.at = file.seek(4)  # after the magic
        self.version = self.scalar("I")
        self.length = "I" if self.version == 1 else "Q"
        if self.version not in (1, 2, 3):
            big = self.version in (1 << 24, 2 << 24, 3 << 24)
            what = "is in big-endian byte order" if big else f"has version {self.version}"
            raise error_type(f"{path} {what}, which is not supported; little-endian versions 1 to 3 are")
        self.tensor_count, self.field_count = self.scalar(self.length), self.scalar(self.length)
        if max(self.tensor_count, self.field_count) > MAX_ENTRIES:
            raise ValueError(f"{self.field_count} settings and {self.tensor_count} tensors are announced")

    def fields(self, *, texts: bool = True) -> dict[str, Any]:
        """All metadata by key, with the format's version as ``GGUF.version``; the tensors' entries follow in the file.

        Args:
          texts: whether to read lists of strings, which make up the vocabulary; otherwise they are skipped.
        """
        fields: dict[str, Any] = {"GGUF.version": self.version}
        for _ in range(self.field_count):
            key = self.string()
            if key in fields:
                raise ValueError(f"the key {short_repr(key, 40)} occurs twice")
            value = self.value(self.scalar("I"), texts)
            if value is not None:
                fields[key] = value
        return fields

    def take(self, size: int) -> bytes:
        content = self.file.read(min(size, self.size - self.at))
        if len(content) < size:
            raise ValueError(f"{size} bytes are announced, {len(content)} are left")
        self.at += size
        return content

    def scalar(self, letter: str) -> Any:
        return self.scalars(letter)[0]

    def scalars(self, letters: str) -> tuple[Any, ...]:
        """Consecutive numbers, whose types are given by struct's letters."""
        return struct.unpack("<" + letters, self.take(struct.calcsize("<" + letters)))

    def string(self) -> str:
        # Some tokens of a vocabulary are not valid UTF-8 by themselves.
        return self.take(self.scalar(self.length)).decode("utf-8", "surrogateescape")

    def value(self, value_type: int, texts: bool) -> Any:
        """A metadata value, or None for a list of strings that is skipped."""
        if value_type == STRING:
            return self.string()
        if value_type != ARRAY:
            return self.scalar(SCALARS[value_type])
        value_type, count = self.scalar("I"), self.scalar(self.length)
        if value_type == STRING:
            self.texts_left -= count
            if count > self.size - self.at or self.texts_left < 0:
                raise ValueError(f"{count} strings are announced")
            decoded: list[str] = []
            while count:
                n_texts = self.run_of_texts(count, decoded if texts else None)
                if not n_texts:  # a long or empty string, or the last ones of a file
                    last = self.string()
                    decoded += [last] if texts else []
                count -= max(n_texts, 1)
            return decoded if texts else None
        letter = SCALARS[value_type]
        # An array, because a list takes 20 times as many bytes as the file.
        numbers = array("B" if letter == "?" else letter, self.take(count * struct.calcsize(letter)))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def run_of_texts(self, most: int, decoded: list[str] | None) -> int:
        """Append consecutive strings of 1 to 255 bytes, and return their number.

        Lengths are found by their seven zero bytes, and each string must end where the next length starts. This takes 10 ms
        for the 98,000 strings of a vocabulary, instead of 80 ms one by one.
        """
        import numpy as np  # not needed to read only a tokenizer

        zeros = 3 if self.length == "I" else 7
        window = np.frombuffer(self.file.read(min(TEXT_WINDOW, self.size - self.at)), np.uint8)
        following = np.zeros(max(0, len(window) - zeros), np.uint8)
        for i in range(1, zeros + 1):
            following |= window[i : i + len(following)]
        starts = np.flatnonzero((following == 0) & (window[: len(following)] != 0))[:most]
        ends = starts + 1 + zeros + window[starts]
        ends = ends[: int(np.searchsorted(ends, len(window), "right"))]
        starts = starts[: len(ends)]
        wrong = np.flatnonzero(starts != np.concatenate([[0], ends[:-1]])) if len(starts) else starts
        count = int(wrong[0]) if len(wrong) else len(starts)
        size = int(ends[count - 1]) if count else 0
        self.file.seek(self.at + size)
        self.at += size
        if decoded is None or not count:
            return count
        texts = window[:size].copy()
        texts[starts[:count]] = 0
        if size - np.count_nonzero(texts) == count * (zeros + 1):  # the strings contain no zeros, so one can separate them
            is_start = np.zeros(size, bool)
            is_start[starts[:count]] = True
            decoded += texts[(texts != 0) | is_start].tobytes().decode("utf-8", "surrogateescape").split("\0")[1:]
        else:
            spans = zip((starts[:count] + 1 + zeros).tolist(), ends[:count].tolist(), strict=True)
            decoded += [window[start:end].tobytes().decode("utf-8", "surrogateescape") for start, end in spans]
        return count
