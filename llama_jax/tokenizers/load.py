"""Finding a vocabulary by its content."""

from __future__ import annotations

import os
from pathlib import Path

from llama_jax.errors import TokenizerError
from llama_jax.tokenizers.base import Tokenizer
from llama_jax.tokenizers.sentencepiece import SentencePieceTokenizer

LARGEST = 64 << 20  # bytes; no vocabulary comes near, every weight file of use is beyond


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The vocabulary in a file, or the one in a folder.

    Raises:
      TokenizerError: none there, several there, or a damaged one.
    """
    path = Path(path)
    if not path.exists():
        raise TokenizerError(f"{path} does not exist; give a SentencePiece .model file or a folder with one")
    if not path.is_dir():
        if not path.is_file():
            raise TokenizerError(f"{path} is neither a file nor a folder; give a SentencePiece .model file")
        if not _looks_like_sentencepiece(path):
            raise TokenizerError(
                f"{path} is not a SentencePiece model; other vocabularies, such as those of Llama 3, are not read yet"
            )
        return SentencePieceTokenizer(path)
    found = _vocabularies(path)
    if not found:
        raise TokenizerError(f"{path} holds no SentencePiece model")
    if len(found) > 1:
        raise TokenizerError(f"{path} holds several vocabularies ({', '.join(p.name for p, _ in found)}); give one of them")
    return found[0][1]


def find_tokenizer(folder: Path, vocab_size: int) -> Tokenizer | None:
    """The vocabulary in a model's folder, or None: one of the model's size, else a smaller one, as models pad theirs.

    Raises:
      TokenizerError: several that could be it.
    """
    fitting = [(path, tokenizer) for path, tokenizer in _vocabularies(folder) if tokenizer.vocab_size <= vocab_size]
    found = [(path, tokenizer) for path, tokenizer in fitting if tokenizer.vocab_size == vocab_size] or fitting
    if len(found) > 1:
        names = ", ".join(path.name for path, _ in found)
        raise TokenizerError(f"{folder} holds several vocabularies ({names}); remove all but one")
    return found[0][1] if found else None


def _vocabularies(folder: Path) -> list[tuple[Path, Tokenizer]]:
    found: list[tuple[Path, Tokenizer]] = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and _looks_like_sentencepiece(path):
            try:
                found.append((path, SentencePieceTokenizer(path)))
            except TokenizerError:
                continue  # some other file whose first bytes are alike
    return found


def _looks_like_sentencepiece(path: Path) -> bool:
    """Whether the file begins with the first piece of a SentencePiece protocol buffer (field 1, then its text)."""
    if path.stat().st_size > LARGEST:
        return False
    with path.open("rb") as file:
        start = file.read(3)
    return len(start) == 3 and start[0] == 0x0A and start[2] == 0x0A
