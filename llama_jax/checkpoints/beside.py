"""A vocabulary written beside a file of weights, in a folder with other files."""

from __future__ import annotations

import tempfile
from pathlib import Path

from llama_jax.data.vocabulary import examine
from llama_jax.errors import CheckpointError
from llama_jax.storage import resolved
from llama_jax.tokenizers import Tokenizer, find_tokenizer
from llama_jax.writing import appearing

VOCABULARIES = ("tokenizer.model", "tokenizer.json")
# What is read with a vocabulary from its folder.
SETTINGS = (
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def files_beside(tokenizer: Tokenizer, path: Path, vocab_size: int) -> dict[Path, bytes]:
    """The files to write beside the weights at `path`, for a model of V = `vocab_size`, so that they are read with its
    tokenizer; none if it is there already.

    Raises:
      CheckpointError: another vocabulary or the settings of another model are there: they must not be replaced, and would be
        read with these weights.
    """
    folder = resolved(path).parent
    there = next((folder / name for name in VOCABULARIES if (folder / name).exists()), None)
    if there is not None:
        found = find_tokenizer(folder, vocab_size)
        if found is None or examine(found).fingerprint != examine(tokenizer).fingerprint:
            raise CheckpointError(
                f"{there} is another vocabulary than this model's, and {path.name} would be read with it; write into"
                " another folder"
            )
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save(Path(scratch))
        files = {folder / file.name: file.read_bytes() for file in Path(scratch).iterdir()}
    for path in [folder / name for name in SETTINGS]:
        if path.exists() and not (path.is_file() and path.read_bytes() == files.get(path)):
            raise CheckpointError(
                f"{path} is of another model, and this one's vocabulary would be read with it; write into another folder"
            )
    return {path: content for path, content in files.items() if not path.exists()}


def write_beside(files: dict[Path, bytes], written: list[Path]) -> None:
    """Write the files of `files_beside`, noting each in `written`; the vocabulary last, since without it the others are not
    read."""
    for path in sorted(files, key=lambda path: path.name in VOCABULARIES):
        with appearing(path, raises=CheckpointError) as target:
            target.write_bytes(files[path])
        written.append(path)
