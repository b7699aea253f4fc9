"""A vocabulary of the 256 bytes, BOS and EOS, and corpora of it: no library, no file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llama_jax.data import Corpus
from llama_jax.tokenizers.interface import check_text

BOS, EOS = 256, 257


@dataclass
class ByteTokenizer:
    """As much of a `Tokenizer` as `llama_jax.data` asks for; `encoded` counts the texts."""

    vocab_size: int = 258
    bos_id: int = BOS
    eos_id: int = EOS
    puts_bos: bool = True
    space_prefix: bool = False
    shift: int = 0  # another way to encode
    encoded: int = 0

    @property
    def add_bos(self) -> bool:
        return self.puts_bos and self.bos_id >= 0

    @property
    def special_tokens(self) -> dict[str, int]:
        return {"<s>": self.bos_id, "</s>": self.eos_id}

    def encode(self, text: str, bos: bool | None = None, eos: bool | None = None, special: bool = False) -> list[int]:
        check_text(text)
        self.encoded += 1
        ids = [(byte + self.shift) % 256 for byte in text.encode()]
        return [self.bos_id] * (self.add_bos if bos is None else bos) + ids + [self.eos_id] * bool(eos)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text, bos=False) for text in texts]

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


def corpus_of(lengths: list[int]) -> Corpus:
    """Documents of these lengths, whose tokens are all different."""
    stops = np.cumsum(np.array(lengths, np.int64))
    return Corpus(
        tokens=np.arange(1000, 1000 + sum(lengths), dtype=np.uint32),
        starts=stops - lengths,
        stops=stops,
        byte_counts=np.array(lengths, np.int64) * 3,
        vocab_size=1 << 20,
        digest="",
    )
