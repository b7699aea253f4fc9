"""Loading of a vocabulary, recognized by its content."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from llama_jax.errors import TokenizerError, reading, short_repr
from llama_jax.storage import Location, StoredPath, locate
from llama_jax.storage.paths import read_object, read_whole
from llama_jax.tokenizers.gguf import from_metadata
from llama_jax.tokenizers.gguf_header import is_gguf, open_header
from llama_jax.tokenizers.huggingface import from_json, is_tokenizer_json
from llama_jax.tokenizers.interface import Tokenizer, token_name
from llama_jax.tokenizers.sentencepiece import SentencePieceTokenizer, is_sentencepiece
from llama_jax.tokenizers.tiktoken import TiktokenTokenizer, is_rank_file
from llama_jax.tokenizers.tokenizer_config import Settings, read_settings

MAX_VOCABULARY_BYTES = 64 << 20  # bytes; more than any vocabulary, less than any useful weight file
MAX_PADDING = 1024  # rows of an embedding beyond the vocabulary, so that it can be sharded
VOCABULARY_FORMATS = "a SentencePiece model, a rank file of Llama 3, a tokenizer.json or a GGUF file"
# Unambiguous names: transformers prefers the first if both exist; Meta's repositories have theirs in a subfolder.
VOCABULARY_NAMES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
# Vocabularies of other kinds: Mistral's, of GPT-2 in two files, BERT's, and ranks that are not Llama 3's.
UNSUPPORTED_NAMES = ("tekken.json", "vocab.json", "merges.txt", "encoder.json", "vocab.bpe", "vocab.txt", "qwen.tiktoken")


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
        if not path.is_dir():
            if not path.is_file():
                problem = "is neither a file nor a folder" if path.exists() else "does not exist"
                raise TokenizerError(f"{path} {problem}; pass {VOCABULARY_FORMATS}, or a folder with one")
            if is_gguf(path):
                with open_header(path, TokenizerError) as header:
                    return from_metadata(header.fields(), str(path))
            return _read_vocabulary(path, read_settings(path.parent))
        settings = read_settings(path)
        for name in VOCABULARY_NAMES:
            if (path / name).is_file():
                return _read_vocabulary(path / name, settings)
        candidates = _other_vocabularies(path, settings)
        supported = f"SentencePiece model, rank file of Llama 3 or tokenizer.json{unsupported_files(path)}"
        if not candidates:
            raise TokenizerError(f"{path} has no {supported}; for a GGUF file, pass the file")
        if len(candidates) > 1:
            raise TokenizerError(f"{path} has several vocabularies ({_join_names(candidates)}); pass one of them")
        return candidates[0][1]


def replace_chat_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """The tokenizer with another chat template for all chats, whose tokens are then special (`is_template_token`)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save(folder)
        config = read_object(folder / "tokenizer_config.json", TokenizerError) | {"chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return load_tokenizer(folder)


def find_tokenizer(folder: Location, vocab_size: int) -> Tokenizer | None:
    """The tokenizer in a model's folder; None if there is no supported vocabulary (see `unsupported_files`).

    Of several, the first in `load_tokenizer`'s order whose size is about the model's (within a tenth: a model may have
    padding for more tokens, and lack rows for some that were added, see `warn_of_size`), else the one of the nearest size.

    Raises:
      TokenizerError: several candidates, or a damaged ``tokenizer.json`` or ``tokenizer.model``.
    """
    with reading(folder, TokenizerError):
        settings = read_settings(folder)
        candidates: list[tuple[Location, Tokenizer]] = []
        distance = lambda candidate: abs(candidate[1].vocab_size - vocab_size)
        for path in (folder / name for name in VOCABULARY_NAMES):
            if path.is_file():
                candidates.append((path, _read_vocabulary(path, settings)))
                if distance(candidates[-1]) <= vocab_size // 10:
                    break
        else:
            candidates += _other_vocabularies(folder, settings)
        if not candidates:
            if unsupported := unsupported_files(folder):
                warnings.warn(f"{folder} has no vocabulary{unsupported}", stacklevel=2)
            return None
        smallest = min(map(distance, candidates))
        nearest = [candidate for candidate in candidates if distance(candidate) == smallest]
        path, tokenizer = nearest[0]
        if len(nearest) > 1 and path.name not in VOCABULARY_NAMES:
            raise TokenizerError(f"{folder} has several vocabularies ({_join_names(nearest)}); remove all but one")
        warn_of_size(tokenizer, vocab_size, path)
        return tokenizer


def warn_of_size(tokenizer: Tokenizer, vocab_size: int, where: object) -> None:
    """Warn if a vocabulary has tokens without a row in the model's embedding, or much fewer tokens than rows."""
    size = tokenizer.vocab_size
    is_other = abs(size - vocab_size) >= max(MAX_PADDING, vocab_size // 10)
    other = ": it may be another model's vocabulary" * is_other
    if size > vocab_size:
        first = short_repr(token_name(tokenizer, vocab_size), 80)
        warnings.warn(
            f"{where} has {size} tokens, but the model's embedding {vocab_size} rows{other}; text with the tokens from"
            f" {first} (id {vocab_size}) on is refused",
            stacklevel=2,
        )
    elif is_other:
        warnings.warn(f"{where} has {size} tokens, but the model {vocab_size}{other}", stacklevel=2)


def unsupported_files(path: Location) -> str:
    """The vocabularies of a model's folder, or next to its file, that are not supported, for a message about a missing
    vocabulary: " (unsupported: tekken.json; ...)"; "" if there are none."""
    folder = path if path.is_dir() else path.parent
    names = [name for name in UNSUPPORTED_NAMES if (folder / name).is_file()]
    return f" (unsupported: {', '.join(names)}; a tokenizer.json is needed)" if names else ""


def _read_vocabulary(path: Location, settings: Settings) -> Tokenizer:
    content = read_whole(path, TokenizerError, MAX_VOCABULARY_BYTES, "vocabulary")
    where = str(path)
    if path.suffix == ".json" or is_tokenizer_json(content):
        return from_json(content, where, settings)
    if is_rank_file(content):
        return TiktokenTokenizer(content, where, settings)
    if is_sentencepiece(content):
        return SentencePieceTokenizer(content, where, settings)
    raise TokenizerError(f"{path} is not {VOCABULARY_FORMATS}; is it whole, and the right file?")


def _other_vocabularies(folder: Location, settings: Settings) -> list[tuple[Location, Tokenizer]]:
    """The vocabularies in a folder with other names; none in a store, where reading each file would take a request."""
    candidates: list[tuple[Location, Tokenizer]] = []
    if isinstance(folder, StoredPath):
        return candidates
    for path in sorted(folder.iterdir()):
        if path.name not in (*VOCABULARY_NAMES, *UNSUPPORTED_NAMES) and path.is_file() and _looks_like_vocabulary(path):
            try:
                candidates.append((path, _read_vocabulary(path, settings)))
            except TokenizerError:
                if path.name.startswith("tokenizer."):
                    raise
                continue  # another kind of file with the same first bytes
    return candidates


def _looks_like_vocabulary(path: Location) -> bool:
    if path.stat().st_size > MAX_VOCABULARY_BYTES:
        return False
    with path.open("rb") as file:
        start = file.read(1024)
    return any(recognizes(start) for recognizes in (is_tokenizer_json, is_rank_file, is_sentencepiece))


def _join_names(candidates: Sequence[tuple[Location, Tokenizer]]) -> str:
    return ", ".join(path.name for path, _ in candidates)
