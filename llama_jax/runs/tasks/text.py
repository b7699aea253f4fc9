"""Training on text, or on what the assistant says in chats: the next token's loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from llama_jax.data import Batch, Corpus, open_chats, open_corpus, split, training_batches
from llama_jax.data.duplicates import without
from llama_jax.errors import GenerationError
from llama_jax.model.params import Llama
from llama_jax.runs.errors import TrainingError
from llama_jax.runs.evaluate import evaluate, token_nats, usual_batch
from llama_jax.runs.log import Log
from llama_jax.runs.recipe import Recipe
from llama_jax.runs.tasks.task import Beginning, Finding, Given, Objective, Task, TaskKind, compute_of
from llama_jax.tokenizers import Tokenizer
from llama_jax.training.flops import step_flops
from llama_jax.training.objective import total_loss


@dataclass(frozen=True)
class Corpora:
    """What a run reads: the documents to train on, and those that are kept apart.

    Attributes:
      kept: share of the tokens that was kept for validation; None where it has files of its own.
    """

    train: Corpus
    validation: Corpus
    kept: float | None = None


def open_task(recipe: Recipe, given: Given) -> Task:
    """Text or chats as a task; see `read_data` for the errors."""
    return task_of(recipe, read_data(recipe, given.data, given.validation_data, given.tokenizer, given.log))


def task_of(recipe: Recipe, corpora: Corpora) -> Task:
    """Documents as a task."""
    return Task(
        objective=objective(recipe),
        digests={"train": corpora.train.digest, "validation": corpora.validation.digest},
        facts=(about(recipe, corpora),),
        tokens=recipe.batch * recipe.length,
        flops=step_flops(recipe.model, recipe.batch, recipe.length, frozen=recipe.lora is not None),
        begin=partial(TextFeed, recipe, shortened(corpora, recipe.evaluate_tokens)),
    )


KIND = TaskKind("text", open_task, backends=("jit", "pmap"))


def objective(recipe: Recipe) -> Objective:
    """The recipe's loss of packed rows."""
    rows = jax.ShapeDtypeStruct((recipe.batch, recipe.length + 1), jnp.int32)
    mask = None if recipe.chats is None else jax.ShapeDtypeStruct(rows.shape, jnp.bool_)
    noise = jax.ShapeDtypeStruct(rows.shape, jnp.uint32) if recipe.neftune else None
    return Objective(Batch(rows, rows, rows, mask, noise), lambda _: recipe.loss or total_loss)


def noise_of(seed: int, number: int, rows: tuple[int, int, int], length: int) -> np.ndarray:
    """Random numbers for some rows of a batch, uint32[rows, T + 1]: the same on any number of hosts.

    Args:
      number: of the batch.
      rows: the first, how many, and of how many of all hosts.
    """
    first, count, batch = rows
    bits = np.random.Philox(key=[seed, number]).random_raw(batch * (length + 1)).astype(np.uint32)
    return bits.reshape(batch, length + 1)[first : first + count]


class TextFeed:
    """Packed rows, epoch after epoch; see `task.Feed`."""

    def __init__(self, recipe: Recipe, corpora: Corpora, beginning: Beginning) -> None:
        share, shares = beginning.program.share
        first = 0 if beginning.place is None else beginning.place["next_batch"]
        self._recipe, self._held = recipe, corpora.validation
        own = recipe.batch // shares
        self._rows = own * share, own, recipe.batch
        self._batches = training_batches(
            corpora.train, recipe.batch, recipe.length, seed=recipe.seed, host=share, hosts=shares, start=first
        )
        self._program = program = beginning.program
        nats = partial(token_nats, program.config, compute=compute_of(recipe), layout=program.layout)
        self._measure = program.jit(nats)

    @property
    def state(self) -> dict[str, Any]:
        return self._batches.state

    def next(self, model: Callable[[], Llama]) -> Batch:
        number = self._batches.state["next_batch"]
        batch = next(self._batches)
        if not self._recipe.neftune:
            return batch
        return batch._replace(noise=noise_of(self._recipe.seed, number, self._rows, self._recipe.length))

    def report(self, metrics: dict[str, float]) -> dict[str, float]:
        return {}

    def evaluate(self, model: Llama) -> Finding:
        program, length = self._program, self._recipe.length
        found = evaluate(
            program.config,
            program.fit(model),
            self._held,
            length=length,
            stride=length,
            batch=program.layout.shares * usual_batch(),
            measure=self._measure,
        )
        numbers = {name: asdict(found)[name] for name in ("loss", "perplexity", "bits_per_byte")}
        text = f"loss {found.loss:.4f}, perplexity {found.perplexity:.2f}, {found.bits_per_byte:.4f} bits per byte"
        return Finding(found.loss, numbers, text, found)

    def close(self) -> None:
        self._batches.close()


def about(recipe: Recipe, corpora: Corpora) -> str:
    """How much there is to train on, and how often it is read."""
    r, train, held = recipe, corpora.train, corpora.validation
    epochs = r.steps * r.batch * r.length / max(train.token_count, 1)
    share = "" if corpora.kept is None else f" ({corpora.kept:.1%} of the data was kept for it)"
    return (
        f"data: {train.token_count:,} tokens in {train.document_count:,} documents to train, {held.token_count:,} in"
        f" {held.document_count:,} to validate{share}; {r.steps:,} steps of {r.batch} x {r.length} are {epochs:.1f} epochs"
    )


def read_data(
    recipe: Recipe, data: Sequence[Path], validation_data: Sequence[Path], tokenizer: Tokenizer, log: Log
) -> Corpora:
    """The files as documents of tokens, and which of them are kept for validation where no files are.

    Raises:
      TrainingError: nothing to validate on, or a vocabulary larger than the model's.
      DataError: files that cannot be used.
    """

    def read(paths: Sequence[Path]) -> Corpus:
        if recipe.chats is not None:
            try:
                found = open_chats(paths, tokenizer, recipe.length, recipe.chats)
            except GenerationError as error:  # no format
                raise TrainingError(f"{error}; in training as chats.format=plain") from None
            log.line(f"chats: {found.counts}")
            return found.corpus

        def bar(megabytes: range) -> Any:
            disable = True if log.quiet else None
            return tqdm(megabytes, desc="tokenising", unit=" MB", leave=False, delay=1.0, disable=disable)

        return open_corpus(paths, tokenizer, reading=recipe.reading, progress=bar)

    if validation_data:
        training, held = read(data), read(validation_data)
        corpora = Corpora(without(training, held), held)
        twice = training.document_count - corpora.train.document_count
        if twice:
            warnings.warn(f"{twice} documents of the data are in the validation data: not trained on", stacklevel=2)
    else:
        corpus = read(data)
        if corpus.document_count < 2 and recipe.chats is not None:
            raise TrainingError("the data is a single conversation; give more, or others with --validation-data")
        if corpus.document_count < 2:
            raise TrainingError(
                "the data is a single document, of which nothing can be kept for validation; give other files with"
                " --validation-data, or cut a long text into documents of fewer characters, as reading.longest=4000"
            )
        divisible = None if recipe.chats is not None else tokenizer  # a conversation is read whole
        parts = split(corpus, recipe.validation, seed=recipe.seed, tokenizer=divisible)
        corpora = Corpora(*parts, kept=parts.validation.token_count / corpus.token_count)
    check_vocabulary(recipe, corpora.train.vocab_size)
    return corpora


def check_vocabulary(recipe: Recipe, size: int) -> None:
    """Raise TrainingError for a vocabulary larger than the model's."""
    if size > recipe.model.vocab_size:
        raise TrainingError(
            f"the tokenizer has {size} tokens, the model a vocabulary of {recipe.model.vocab_size};"
            f" set model.vocab_size={size} or more"
        )


def shortened(corpora: Corpora, limit: int) -> Corpora:
    """With whole documents of about `limit` tokens to evaluate on, where that is not 0."""
    if not limit:
        return corpora
    held = corpora.validation
    sizes = np.cumsum(held.stops - held.starts)
    chosen = np.arange(1 + int(np.searchsorted(sizes, limit)))[: held.document_count]
    return replace(corpora, validation=held.select(chosen))
