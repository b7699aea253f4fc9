"""The tokenizer with which a run reads its data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from llama_jax.data.documents import DocumentFormat, read_documents
from llama_jax.data.vocabulary import examine
from llama_jax.errors import TokenizerError, UserError
from llama_jax.formats.step_dirs import ABOUT, CHECKPOINTS, existing_step
from llama_jax.runs.errors import TrainingError
from llama_jax.runs.recipe import Recipe
from llama_jax.storage import Location
from llama_jax.tokenizers import Tokenizer, find_tokenizer, load_tokenizer
from llama_jax.tokenizers.making import byte_tokenizer, train_bpe


def choose_tokenizer(
    recipe: Recipe,
    data: Sequence[Path],
    *,
    given: str | os.PathLike[str] | None,
    of_weights: Tokenizer | None,
    of_run: Location | None,
) -> Tokenizer:
    """The one that the run has had so far (`of_run`, its folder); else the one given, that of the weights, or a new one.

    Raises:
      TrainingError: none of them, or two that differ.
      TokenizerError, DataError: files that cannot be used.
    """
    if given is not None and recipe.vocabulary != "given":
        raise TrainingError(
            f"the recipe makes a vocabulary of its own ({recipe.vocabulary}); add vocabulary=given to train with"
            f" {os.fspath(given)}"
        )
    if of_run is not None:
        folder = of_run / CHECKPOINTS
        found = find_tokenizer(folder / str(existing_step(folder, None)) / ABOUT, recipe.model.vocab_size)
        if found is None:
            raise TrainingError(f"the newest checkpoint in {folder} has no tokenizer; resume from a copy that has")
        if given is not None and examine(load_tokenizer(given)).fingerprint != examine(found).fingerprint:
            raise TrainingError(
                f"{os.fspath(given)} is not the tokenizer that the run in {of_run} began with; resume without --tokenizer"
            )
        return found
    if given is not None:
        return load_tokenizer(given)
    if of_weights is not None:
        return of_weights
    match recipe.vocabulary:
        case "byte":
            return byte_tokenizer()
        case "bpe":
            return _learn(data, recipe)
        case _:
            raise TrainingError(
                "the recipe needs a tokenizer; give one with --tokenizer, or add vocabulary=bpe to learn one from the data"
            )


def _learn(data: Sequence[Path], recipe: Recipe) -> Tokenizer:
    """A vocabulary learnt from the data. An error in a file passes through SentencePiece and comes back as it was."""
    failed: list[UserError] = []

    def texts() -> Iterator[str]:
        try:
            yield from _texts(data, recipe.reading)
        except UserError as error:
            failed.append(error)
            raise

    try:
        return train_bpe(texts(), recipe.model.vocab_size)
    except TokenizerError:
        if failed:
            raise failed[0] from None
        raise


def _texts(data: Sequence[Path], reading: DocumentFormat) -> Iterator[str]:
    for path in data:
        if path.suffix.lower() in (".bin", ".array_record"):
            raise TrainingError(f"{path} holds tokens and no text to learn a vocabulary from; give theirs with --tokenizer")
        for document in read_documents(path, reading):
            yield document.text
