"""Files to a corpus, tokenized once."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llama_jax.data.corpus import Corpus
from llama_jax.data.corpus_file import CORPUS_SUFFIX, TokenBlock, read_corpus, write_corpus
from llama_jax.data.data_cache import CORPORA, cache_folder, cannot_cache, make_room, note_use
from llama_jax.data.data_cache import cache_limit as limit_of_environment
from llama_jax.data.data_files import Paths, Source, describe, find_files, unchanged, untouched
from llama_jax.data.documents import DocumentFormat, kind_of
from llama_jax.data.token_stream import Vocabulary, check_corpus, examine, read_tokens
from llama_jax.errors import DataError
from llama_jax.tokenizers import Tokenizer

MEGABYTE = 1 << 20
Progress = Callable[[range], Iterable[int]]


def open_corpus(
    paths: Paths,
    tokenizer: Tokenizer,
    *,
    reading: DocumentFormat = DocumentFormat(),
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """The documents of files as tokens: tokenized the first time, mapped from a corpus file every other time.

    What `build` has made is mapped as it is. For all else there is a corpus file in a cache. It is made again when a source
    has other content, the tokenizer encodes otherwise, `reading` is another, or the file itself is damaged (which warns).
    Memory is a block of a file, and 16 bytes per document.

    Args:
      paths: files, or folders, of this machine or in a store, whose files with one of `data_files.DATA_SUFFIXES` are read in
        order of their names. See `DocumentFormat` for where documents end, `read_tokens` for what tokens they become.
      cache: folder of the cache files; None takes corpora/ in that named by LLAMA_JAX_CACHE, or in the user's cache folder.
      cache_limit: bytes of all corpora in it, above which the least recently opened ones are removed; None takes
        LLAMA_JAX_CACHE_LIMIT, gigabytes, or 100 of them. Several processes may use one cache at a time.
      progress: wraps the range of megabytes to read, as `tqdm.tqdm` does, where there is something to tokenize.

    Raises:
      DataError: an empty, damaged or binary file, a token outside the vocabulary, or a file that changes meanwhile; a build
        that is not finished, or that another tokenizer made.
    """
    files = find_files(paths)
    vocabulary = examine(tokenizer)
    if len(files) == 1 and kind_of(files[0]) == CORPUS_SUFFIX:
        corpus, info = read_corpus(files[0])
        check_corpus(files[0], info, vocabulary, reading)
        return corpus
    recipe = {"files": [str(file) for file in files], "reading": asdict(reading), "fingerprint": vocabulary.fingerprint}
    folder = cache_folder() / CORPORA if cache is None else Path(cache)
    limit = limit_of_environment() if cache_limit is None else cache_limit
    path = folder / f"{hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:32]}{CORPUS_SUFFIX}"
    found = _cached(path, files, recipe)
    if found is None:
        sources = [describe(file) for file in files]
        blocks = _read_all(files, sources, tokenizer, vocabulary, reading, progress)
        write_corpus(path, blocks, vocabulary.size, recipe | {"sources": sources}, raises=cannot_cache)
        found = read_corpus(path)[0]
        make_room(folder, limit, path)
    return found


def _cached(path: Path, files: list[Path], recipe: dict[str, Any]) -> Corpus | None:
    """The corpus in a cache file; None where there is none, or one of another content, or a damaged one, which warns."""
    try:
        corpus, info = read_corpus(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DataError:
        warnings.warn(f"{path} is not a whole corpus of tokens; tokenizing again", stacklevel=3)
        return None
    sources = [Source(*source) for source in info.origin["sources"]]
    if info.origin | recipe != info.origin or not all(map(unchanged, files, sources)):
        return None
    note_use(path)
    return corpus


def _read_all(
    files: list[Path],
    sources: list[Source],
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    reading: DocumentFormat,
    progress: Progress | None,
) -> Iterator[TokenBlock]:
    """The tokens of all files, each megabyte of them seen by `progress`."""
    megabytes = range(-(-sum(source.size for source in sources) // MEGABYTE))
    walk = iter(progress(megabytes) if progress else megabytes)
    before = done = 0
    for file, source in zip(files, sources, strict=True):
        block = None
        for block in read_tokens(file, tokenizer, vocabulary, reading):
            yield block
            while done < (before + min(block.read, source.size)) // MEGABYTE:  # unpacked a file may be larger
                next(walk)
                done += 1
        if block is None:
            raise DataError(f"{file} holds no document; is it the right file?")
        if not untouched(file, source):
            raise DataError(f"{file} changed while it was read; try again when nothing writes to it")
        before += source.size
    for _ in walk:  # lets a progress bar see its end
        pass
