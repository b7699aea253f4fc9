"""The manifest of a folder of shards, from the beginning of its build; and checks that the files are what was built."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llama_jax.data.errors import DataError
from llama_jax.errors import shown
from llama_jax.storage import resolved
from llama_jax.storage.atomic_write import write_atomically

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class ShardFacts:
    """The contents of a shard.

    Attributes:
      name: of the file; None if no document is left.
      documents, tokens, text_bytes: their numbers; bytes are those of the texts in UTF-8.
      duplicates: documents that were left out, because the same text came before.
      near_duplicates: documents that were left out, because a similar text came before.
      sha256: of the file.
    """

    name: str | None
    documents: int
    tokens: int
    text_bytes: int
    duplicates: int
    near_duplicates: int
    sha256: str | None


@dataclass(frozen=True)
class Manifest:
    """A build, finished or not.

    Attributes:
      plan: everything that determines it: sources with their bytes and SHA-256, the tokenizer's fingerprint, the settings.
      command: the command that continues it; empty when it is finished.
      tokenizer: where the vocabulary was found.
      vocab_size: V; shards have ids of `token_type`, uint16 or uint32.
      finished: whether all shards are made; before that none is named.
      shards: in the order of the documents.
      listing: name and SHA-256 of the list of near duplicates, if they were looked for.
    """

    plan: dict[str, Any]
    command: str
    tokenizer: str
    vocab_size: int
    token_type: str
    finished: bool = False
    shards: tuple[ShardFacts, ...] = ()
    listing: tuple[str, str] | None = None

    def total(self, name: str) -> int:
        """The sum of a field of `ShardFacts` over all shards."""
        return sum(getattr(shard, name) for shard in self.shards)


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest that `build` wrote.

    Raises:
      DataError: there is none, or it is damaged.
    """
    path = Path(folder) / MANIFEST
    found = read_json(path, "manifest of a build", f"remove {folder}, and build again")
    try:
        listing = found.get("listing") and (str(found["listing"][0]), str(found["listing"][1]))
        shards = tuple(_as_facts(shard) for shard in found["shards"])
        manifest = Manifest(**{**found, "shards": shards, "listing": listing})
        if not isinstance(manifest.plan["tokenizer"], str) or not isinstance(manifest.finished, bool):
            raise TypeError
        return manifest
    except (TypeError, KeyError, IndexError):
        raise DataError(f"{path} is no manifest of a build; remove {folder}, and build again") from None


def write_json(path: Path, found: Any) -> None:
    """Write an object, so that all of it appears or nothing."""
    with write_atomically(path, raises=DataError) as target:
        target.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest in a folder, or make it."""
    write_json(folder / MANIFEST, asdict(manifest))


def read_facts(path: Path) -> ShardFacts:
    """The description of a shard, written when it was made.

    Raises:
      DataError: another file.
    """
    remedy = "remove it, and build again: its shard alone is made anew"
    found = read_json(path, "description of a shard", remedy)
    try:
        return _as_facts(found)
    except TypeError:
        raise DataError(f"{path} is no description of a shard; {remedy}") from None


def read_json(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """The object in a file.

    Raises:
      DataError: there is none.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no {what} ({type(error).__name__}); {remedy}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} is no {what}; {remedy}")
    return found


def _as_facts(found: Any) -> ShardFacts:
    """TypeError for something else."""
    if not isinstance(found, dict):
        raise TypeError
    facts = ShardFacts(**found)
    texts, numbers = (facts.name, facts.sha256), (facts.documents, facts.tokens, facts.text_bytes, facts.duplicates)
    if not all(isinstance(text, str | None) for text in texts) or not all(type(number) is int for number in numbers):
        raise TypeError
    return facts


# --- reading what was built ----------------------------------------------------------------------------------------------


def builds_of(paths: Iterable[Path], files: Iterable[Path] = ()) -> list[Path]:
    """The folders of builds in which files of token ids are, or which are below a folder that was given."""
    found = {file.parent for file in files if file.suffix.lower() == ".array_record" and _is_build(file.parent / MANIFEST)}
    for path in paths:
        if path.is_dir():
            given = resolved(path)
            below = (manifest.parent for manifest in given.rglob(MANIFEST) if _is_build(manifest))
            found |= {build for build in below if not any(part.startswith(".") for part in build.relative_to(given).parts)}
    return sorted(found)


def _is_build(path: Path) -> bool:
    """Whether it may be our manifest rather than another program's of the same name; a damaged one may be ours."""
    if not path.is_file():
        return False
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return True
    return isinstance(found, dict) and {"plan", "token_type"} <= found.keys()


def check_finished(folder: Path) -> Manifest:
    """The manifest of a build.

    Raises:
      DataError: it is not finished.
    """
    manifest = read_manifest(folder)
    if not manifest.finished:
        raise DataError(f"{folder} holds a build that is not finished; this continues it: {manifest.command}")
    return manifest


def check_built(folder: Path, fingerprint: str, token_type: str | None, files: Iterable[Path]) -> Manifest:
    """The manifest of a folder of which files are to be read.

    Args:
      fingerprint: of the vocabulary that the ids are read with.
      token_type: which was asked for.

    Raises:
      DataError: the build is not finished or has another vocabulary, a shard is missing, or a file is not one of its shards.
    """
    manifest = check_finished(folder)
    if (built := manifest.plan["tokenizer"]) != fingerprint:
        raise DataError(
            f"{folder} was built with the tokenizer {manifest.tokenizer} (fingerprint {built[:12]}), and is read with"
            f" another one (fingerprint {fingerprint[:12]}); give --tokenizer {manifest.tokenizer}, or build with yours"
        )
    if token_type not in (None, manifest.token_type):
        raise DataError(f"{folder} was built with ids of {manifest.token_type}, but token_type={token_type!r} was given")
    names = {shard.name for shard in manifest.shards if shard.name is not None}
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise DataError(f"{folder} has no {missing[0]}, which its manifest names; copy it again, or build again")
    for file in files:
        if file.parent == folder and file.suffix.lower() == ".array_record" and file.name not in names:
            raise DataError(f"{file} is not one of the shards that {folder / MANIFEST} names; move it to another folder")
    return manifest


def check_contents(folder: Path, manifest: Manifest, digests: Mapping[Path, str]) -> None:
    """Compare files with what was built.

    Args:
      digests: SHA-256 of files, among them of shards.

    Raises:
      DataError: a shard is another.
    """
    for shard in manifest.shards:
        found = None if shard.name is None else digests.get(folder / shard.name)
        if found not in (None, shard.sha256):
            raise DataError(
                f"{shown(shard.name)[1:-1]} in {folder} is not what was built: its SHA-256 differs; copy it again, or"
                " remove the folder and build again"
            )
