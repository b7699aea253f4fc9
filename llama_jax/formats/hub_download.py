"""Downloads of models from the Hugging Face Hub: only the files of a repository that llama_jax reads.
A repository often holds the weights twice, for other frameworks or in many quantizations; only one copy is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from llama_jax.errors import CheckpointError
from llama_jax.formats.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from llama_jax.formats.gguf import SPLIT_FILE_NAME
from llama_jax.formats.huggingface import PICKLED, SAFETENSORS
from llama_jax.formats.loading import WEIGHT_FORMATS
from llama_jax.formats.model_folder import SETTINGS_FILES
from llama_jax.storage.atomic_write import cannot_write, free_bytes
from llama_jax.storage.consistent_reader import FOLDER_ENTRY
from llama_jax.storage.hub import Repository, hub_cache_folder, open_hub
from llama_jax.tokenizers.load import VOCABULARY_NAMES
from llama_jax.tokenizers.tokenizer_config import TEMPLATE_FOLDER

NO_MODELS = (*PICKLED, "training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin", "scheduler.bin")
SOURCE_EXAMPLE = "ORGANIZATION/NAME, optionally with @REVISION and the path of a file or folder in the repository"
SOURCE_PATTERN = re.compile(r"(?:hf://)?([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+?))?/?")


class Fetched(NamedTuple):
    """A download's path, and the number and total bytes of its files."""

    path: Path
    files: int
    size: int


def fetch(source: str, revision: str | None = None, folder: Path | None = None) -> Fetched:
    """Download a model, an adapter or a vocabulary from the Hub, as `load` reads them. Existing files are kept.

    Args:
      source: a repository, or a file or folder in it: ``ORGANIZATION/NAME``, ``ORGANIZATION/NAME/FILE.gguf``; also as the
        URL that `storage.locate` reads.
      revision: a branch, tag or commit; by default the one in `source`, or else the newest commit.
      folder: where to put the files; by default the cache of huggingface_hub, in which ``hf://`` finds them.

    Raises:
      CheckpointError: no such repository, no permission to read it, nothing in it that llama_jax reads, several models, no
        network, or no room on the disk.
    """
    match = SOURCE_PATTERN.fullmatch(source)
    if match is None:
        raise CheckpointError(f"{source!r} is not a repository of the Hub; pass {SOURCE_EXAMPLE}")
    name, within, inside = match[1], match[2], match[3] or ""
    if revision is not None and within is not None and revision != within:
        raise CheckpointError(f"{source} names the revision {within}, but --revision is {revision}; pass one of them")
    revision = within if revision is None else revision
    root = f"hf://{name}" if revision is None else f"hf://{name}@{revision}"
    target = hub_cache_folder() if folder is None else folder
    with _short_errors(target):
        repository = open_hub(root)
        chosen = _choose_files(repository, inside, f"{root}/{inside}".rstrip("/"))
        _check_disk_space(repository, chosen.sizes, root, target, cached=folder is None)
        local = repository.download(revision, list(chosen.sizes), folder)
    return Fetched(local / chosen.key, len(chosen.sizes), sum(chosen.sizes.values()))


@contextmanager
def _short_errors(target: Path) -> Iterator[None]:
    """Turn errors of the Hub, the network or the disk into one-line errors."""
    try:
        yield
    except OSError as error:
        is_of_hub = str(error.filename).startswith("hf://")
        problem = f"{error.filename} cannot be fetched: {error.strerror}" if is_of_hub else cannot_write(target, error)
        raise CheckpointError(problem) from None


class _ChosenFiles(NamedTuple):
    """The key to pass as the model, and the sizes of all files that it needs, by key."""

    key: str
    sizes: dict[str, int]


def _choose_files(repository: Repository, inside: str, location: str) -> _ChosenFiles:
    folder, file, entries = inside, "", repository.names(inside)
    if inside and not entries:
        folder, _, file = inside.rpartition("/")
        entries = repository.names(folder)
        if file not in entries:
            raise CheckpointError(
                f"{location}: there is no such file or folder in the repository; look at its list of files"
            )
    sizes = {name: listed.size for name, listed in entries.items() if listed.size is not None}
    for name in ("original", TEMPLATE_FOLDER):  # the first is Meta's: the vocabulary, and the weights again
        if entries.get(name) == FOLDER_ENTRY:
            below = repository.names(f"{folder}/{name}".lstrip("/"))
            sizes |= {f"{name}/{inner}": listed.size for inner, listed in below.items() if listed.size is not None}

    def read(index: str) -> bytes:
        return bytes(repository.read(f"{folder}/{index}".lstrip("/"), 0, sizes[index], None))

    if _is_single_file(file):
        names = _single_files(file, sizes)
    elif file and file not in (*SAFETENSORS, *PICKLED):
        names = [file]
    else:
        names = _choose_in_folder(sizes, read, location)
        file = names[0] if _is_single_file(names[0]) else ""  # the file itself, since other models may be put next to it
    return _ChosenFiles(f"{folder}/{file}".strip("/"), {f"{folder}/{name}".lstrip("/"): sizes[name] for name in names})


def _is_single_file(name: str) -> bool:
    """Whether a file with this name is a whole model, or a part of a split one."""
    suffixes = {suffix for format in WEIGHT_FORMATS.values() for suffix in format.suffixes}
    return name.endswith(tuple(suffixes)) and "/" not in name and name not in NO_MODELS


def _choose_in_folder(sizes: Mapping[str, int], read: Callable[[str], bytes], location: str) -> list[str]:
    """The files of a folder that are read, in the order in which `open_checkpoint` looks for models."""
    beside = [name for name in ("config.json", *VOCABULARY_NAMES) if name in sizes] + _settings_files(sizes)
    for format in WEIGHT_FORMATS.values():
        if format.files is not None and (names := format.files(sizes, read, location)):
            return [*names, *beside]
    models = [name for name in sizes if _is_single_file(name)]
    models = [name for name in models if name.endswith(".gguf")] or models
    firsts = [name for name in models if (part := SPLIT_FILE_NAME.search(name)) is None or int(part[1]) == 1]
    if len(firsts) > 1:
        listed = ", ".join(
            f"{name} ({sum(sizes[part] for part in _single_files(name, sizes)) / 1e9:.1f} GB)" for name in firsts
        )
        raise CheckpointError(f"{location} holds several models; pass one of them, such as {location}/{firsts[0]}: {listed}")
    if firsts:
        return _single_files(firsts[0], sizes)
    if ADAPTER_CONFIG in sizes and ADAPTER_WEIGHTS in sizes:
        return [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    if set(VOCABULARY_NAMES) & set(beside):
        return beside
    raise CheckpointError(f"{location} holds no supported model: no weights next to a config.json, no Meta .pth, no GGUF")


def _single_files(file: str, sizes: Mapping[str, int]) -> list[str]:
    """A file that is a whole model, with its vocabulary unless that is inside; or all parts of a split one."""
    if SPLIT_FILE_NAME.search(file):
        stem = SPLIT_FILE_NAME.sub("", file)
        return sorted(name for name in sizes if SPLIT_FILE_NAME.search(name) and SPLIT_FILE_NAME.sub("", name) == stem)
    if file.endswith(".gguf"):
        return [file]
    return [file, *(name for name in VOCABULARY_NAMES if name in sizes), *_settings_files(sizes)]


def _settings_files(sizes: Mapping[str, int]) -> list[str]:
    """The files of a folder that are read with a vocabulary."""
    templates = [name for name in sizes if name.startswith(f"{TEMPLATE_FOLDER}/")]
    return [*(name for name in SETTINGS_FILES if name in sizes), *templates]


def _check_disk_space(repository: Repository, sizes: Mapping[str, int], root: str, target: Path, *, cached: bool) -> None:
    """Raise CheckpointError if the disk has no room for the missing files."""

    def is_present(key: str) -> bool:
        if cached:
            return repository.in_cache(key) is not None
        return (target / key).is_file() and (target / key).stat().st_size == sizes[key]

    needed = sum(size for key, size in sizes.items() if not is_present(key))
    free = free_bytes(target)
    if needed > free:
        raise CheckpointError(
            f"{root} needs {needed / 1e9:.1f} GB, and {target} has {free / 1e9:.1f} GB left; make room, or set a folder on"
            " another disk with --out"
        )
