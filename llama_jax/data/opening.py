"""Files to a corpus, tokenised once."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llama_jax.data.cache import cache_folder, make_room, note_use, read_corpus, write_corpus
from llama_jax.data.cache import cache_limit as limit_of_environment
from llama_jax.data.corpus import Corpus
from llama_jax.data.documents import DocumentFormat
from llama_jax.data.errors import DataError
from llama_jax.data.manifest import builds_of, check_built, check_contents, check_finished
from llama_jax.data.pieces import DocumentPart, read_pieces
from llama_jax.data.sources import Paths, Source, describe, find_files, given_paths, unchanged, untouched
from llama_jax.data.vocabulary import Vocabulary, examine
from llama_jax.tokenizers import Tokenizer

MEGABYTE = 1 << 20
CORPORA = "corpora"  # in the cache
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
    """The documents of files as tokens: tokenised the first time, mapped from a cache file every other time.

    The cache file is made again when a source has other content, the tokenizer encodes otherwise, `reading` is another, or
    the file itself is damaged (which warns). Memory is a block of a file, and 16 bytes per document.

    Args:
      paths: files, or folders, of this machine or in a store, whose files with one of `sources.SUFFIXES` are read in order
        of their names. See `DocumentFormat` for where documents end, `read_pieces` for what tokens they become.
      cache: folder of the cache files; None takes corpora/ in that named by LLAMA_JAX_CACHE, or in the user's cache folder.
      cache_limit: bytes of all corpora in it, above which those go that were not opened for longest; None takes
        LLAMA_JAX_CACHE_LIMIT, gigabytes, or 100 of them. Several processes may use one cache at a time.
      progress: wraps the range of megabytes to read, as `tqdm.tqdm` does, where there is something to tokenise.

    Raises:
      DataError: an empty, damaged or binary file, a token outside the vocabulary, or a file that changes meanwhile; shards
        of `data.building` that are not all there, or that another tokenizer made.
    """
    given = given_paths(paths)
    for build in builds_of(given):
        check_finished(build)  # before there is a shard in it, too
    files = find_files(given)
    vocabulary = examine(tokenizer)
    builds = [
        (build, check_built(build, vocabulary.fingerprint, reading.token_type, files)) for build in builds_of(given, files)
    ]
    recipe = {"files": [str(file) for file in files], "reading": asdict(reading), "tokenizer": vocabulary.fingerprint}
    folder = cache_folder() / CORPORA if cache is None else Path(cache)
    limit = limit_of_environment() if cache_limit is None else cache_limit
    path = folder / f"{hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:32]}.corpus"
    corpus = _cached(path, files, recipe)
    if corpus is None:
        sources = [describe(file) for file in files]
        digests = {file: source.sha256 for file, source in zip(files, sources, strict=True)}
        for build, manifest in builds:
            check_contents(build, manifest, digests)
        pieces = _read_all(files, sources, tokenizer, vocabulary, reading, progress)
        write_corpus(path, pieces, vocabulary.size, {"recipe": recipe, "sources": sources})
        corpus = read_corpus(path)[0]
        make_room(folder, limit, path)
    return corpus


def _cached(path: Path, files: list[Path], recipe: dict[str, Any]) -> Corpus | None:
    """The corpus in a cache file; None where there is none, or one of another content, or a damaged one, which warns."""
    try:
        corpus, origin = read_corpus(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DataError as error:
        warnings.warn(f"{error}; tokenising again", stacklevel=3)
        return None
    sources = [Source(*source) for source in origin["sources"]]
    if origin["recipe"] != recipe or not all(map(unchanged, files, sources)):
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
) -> Iterator[DocumentPart]:
    """The pieces of all files, each megabyte of them seen by `progress`."""
    megabytes = range(-(-sum(source.size for source in sources) // MEGABYTE))
    walk = iter(progress(megabytes) if progress else megabytes)
    before = done = 0
    for file, source in zip(files, sources, strict=True):
        piece = None
        for piece in read_pieces(file, tokenizer, vocabulary, reading):
            yield piece
            while done < (before + min(piece.read, source.size)) // MEGABYTE:  # unpacked a file may be larger
                next(walk)
                done += 1
        if piece is None:
            raise DataError(f"{file} holds no document; is it the right file?")
        if not untouched(file, source):
            raise DataError(f"{file} changed while it was read; try again when nothing writes to it")
        before += source.size
    for _ in walk:  # lets a progress bar see its end
        pass
