"""Loading of a vocabulary, recognized by its content."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace

from llama_jax.errors import TokenizerError, reading
from llama_jax.gguf_header import is_gguf, open_header
from llama_jax.storage import Location, StoredPath, locate
from llama_jax.storage.paths import read_whole
from llama_jax.tokenizers import gguf, huggingface, sentencepiece, tiktoken
from llama_jax.tokenizers.interface import Tokenizer
from llama_jax.tokenizers.tokenizer_config import Settings, read_settings

MAX_VOCABULARY_BYTES = 64 << 20  # bytes; more than any vocabulary, less than any useful weight file
MAX_PADDING = 1024  # ids of a model beyond its vocabulary, so that the embedding can be sharded
VOCABULARY_KINDS = "a SentencePiece model, a rank file of Llama 3, a tokenizer.json or a GGUF file"
# Unambiguous names: transformers prefers the first if both exist; Meta's repositories have theirs in a subfolder.
VOCABULARY_NAMES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a file or folder, with the settings of the files in the same folder (`read_settings`).

    Args:
      path: a path on this machine, or a URL (`storage.locate`). From a folder the first of ``tokenizer.json``,
        ``tokenizer.model`` and ``original/tokenizer.model`` is loaded, else the only vocabulary with another name (in a
        store other names are not tried: pass the file). A GGUF file, with or without weights, contains its settings.

    Raises:
      TokenizerError: there is no vocabulary, a damaged one, or several with other names.
    """
    with reading(path, TokenizerError):
        path = locate(path)
        if not path.exists():
            raise TokenizerError(f"{path} does not exist; pass {VOCABULARY_KINDS}, or a folder with one")
        if not path.is_dir():
            if not path.is_file():
                raise TokenizerError(f"{path} is neither a file nor a folder; pass {VOCABULARY_KINDS}")
            if is_gguf(path):
                with open_header(path, TokenizerError) as header:
                    return gguf.from_metadata(header.fields(), str(path))
            return _read(path, read_settings(path.parent))
        settings = read_settings(path)
        for name in VOCABULARY_NAMES:
            if (path / name).is_file():
                return _read(path / name, settings)
        others = _others(path, settings)
        if not others:
            raise TokenizerError(
                f"{path} has no SentencePiece model, rank file of Llama 3 or tokenizer.json; for a GGUF file, pass the file"
            )
        if len(others) > 1:
            raise TokenizerError(f"{path} has several vocabularies ({_listed(others)}); pass one of them")
        return others[0][1]


def find_tokenizer(folder: Location, vocab_size: int) -> Tokenizer | None:
    """The tokenizer in a model's folder, or None: one of the model's size, else a smaller one, since models pad theirs.

    Among several of the model's size, or else the largest smaller ones, the first in `load_tokenizer`'s order is used.

    Raises:
      TokenizerError: several candidates, or a damaged ``tokenizer.json`` or ``tokenizer.model``.
    """
    with reading(folder, TokenizerError):
        settings = read_settings(folder)
        smaller: list[tuple[Location, Tokenizer]] = []
        for name in VOCABULARY_NAMES:
            if (folder / name).is_file():
                tokenizer = _read(folder / name, settings)
                if tokenizer.vocab_size > vocab_size and name.endswith(".json"):  # it has tokens without rows in the model
                    within = tuple(token for token in settings.added_tokens if token.id < vocab_size)
                    tokenizer = _read(folder / name, replace(settings, added_tokens=within, extra_tokens=()))
                if tokenizer.vocab_size == vocab_size:
                    return tokenizer
                if tokenizer.vocab_size < vocab_size:
                    smaller.append((folder / name, tokenizer))
        others = [found for found in _others(folder, settings) if found[1].vocab_size <= vocab_size]
        size = max((tokenizer.vocab_size for _, tokenizer in smaller + others), default=0)
        named = [found for found in smaller if found[1].vocab_size == size]
        found = named[:1] or [found for found in others if found[1].vocab_size == size]
        if len(found) > 1:
            raise TokenizerError(f"{folder} has several vocabularies ({_listed(found)}); remove all but one")
        if found:
            warn_if_small(found[0][1], vocab_size, found[0][0])
        return found[0][1] if found else None


def warn_if_small(tokenizer: Tokenizer, vocab_size: int, where: object) -> None:
    """Warn if a vocabulary is much smaller than the model's, beyond usual padding: it may be another model's."""
    if vocab_size - tokenizer.vocab_size >= max(MAX_PADDING, vocab_size // 10):
        warnings.warn(
            f"{where} has {tokenizer.vocab_size} tokens, but the model {vocab_size}: it may be another model's vocabulary",
            stacklevel=2,
        )


def _read(path: Location, settings: Settings) -> Tokenizer:
    content = read_whole(path, TokenizerError, MAX_VOCABULARY_BYTES, "vocabulary")
    where = str(path)
    if path.suffix == ".json" or huggingface.recognizes(content):
        return huggingface.from_json(content, where, settings)
    if tiktoken.recognizes(content):
        return tiktoken.TiktokenTokenizer(content, where, settings)
    if sentencepiece.recognizes(content):
        return sentencepiece.SentencePieceTokenizer(content, where, settings)
    raise TokenizerError(f"{path} is not {VOCABULARY_KINDS}; is it whole, and the right file?")


def _others(folder: Location, settings: Settings) -> list[tuple[Location, Tokenizer]]:
    """The vocabularies in a folder with other names; none in a store, where reading each file would take a request."""
    found: list[tuple[Location, Tokenizer]] = []
    if isinstance(folder, StoredPath):
        return found
    for path in sorted(folder.iterdir()):
        if path.name not in VOCABULARY_NAMES and path.is_file() and _looks_like_one(path):
            try:
                found.append((path, _read(path, settings)))
            except TokenizerError:
                if path.name.startswith("tokenizer."):
                    raise
                continue  # another kind of file with the same first bytes
    return found


def _looks_like_one(path: Location) -> bool:
    if path.stat().st_size > MAX_VOCABULARY_BYTES:
        return False
    with path.open("rb") as file:
        start = file.read(1024)
    return any(kind.recognizes(start) for kind in (huggingface, tiktoken, sentencepiece))


def _listed(found: Sequence[tuple[Location, Tokenizer]]) -> str:
    return ", ".join(path.name for path, _ in found)
