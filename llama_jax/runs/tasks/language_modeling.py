"""Training on text, or on the assistant's messages in chats, with the next-token loss."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.data import Batch, Batches, Corpus, Split, open_chats, open_corpus, split
from llama_jax.data.batches import Rows, row_count, whole_rows
from llama_jax.data.corpus import check_corpus_rows, without
from llama_jax.data.data_files import SourceFiles
from llama_jax.data.mixture import Mixture
from llama_jax.errors import TrainingError
from llama_jax.evaluation.measure import default_batch, token_nats
from llama_jax.evaluation.perplexity import evaluate
from llama_jax.model.params import LlamaParams
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.log import progress_bar
from llama_jax.runs.recipe import MAX_EPOCHS, Recipe, data_warnings, fit_to_data
from llama_jax.runs.tasks.interface import (
    EvalResult,
    Objective,
    Task,
    TaskContext,
    TaskInputs,
    TaskType,
    compute_of,
    name_format_setting,
    name_size_setting,
)
from llama_jax.training.flops import step_flops
from llama_jax.training.loss import total_loss

REPEATED = 4  # epochs up to which repeated text teaches almost as much as new text: Muennighoff et al. 2023


class ValidationSource(NamedTuple):
    """Held-out documents of a source, and the weight of their loss in the total."""

    name: str
    corpus: Corpus
    share: Fraction


@dataclass(frozen=True)
class Corpora:
    """The training and held-out documents of a run.

    Attributes:
      train: by source name; a single source without a name has the empty one.
      shares: of each source, in the rows of a batch.
      validation: for each source, or a single unnamed one if plain validation files were given.
      validation_share: share of the tokens that was held out for validation; None if validation has separate files.
    """

    train: dict[str, Corpus]
    shares: dict[str, Fraction]
    validation: tuple[ValidationSource, ...]
    validation_share: float | None = None

    @property
    def mixture(self) -> dict[str, str] | None:
        """The shares as stored in the metadata of a checkpoint; None for a single source."""
        return {name: str(share) for name, share in self.shares.items()} if len(self.train) > 1 else None


def open_text(recipe: Recipe, inputs: TaskInputs) -> Task:
    """Text or chats as a task; see `read_data` for the errors."""
    return task_of(recipe, inputs.mesh, read_data(recipe, inputs))


def task_of(recipe: Recipe, mesh: MeshSizes, corpora: Corpora) -> Task:
    """Documents as a task."""
    validation = {validation.name: validation.corpus for validation in corpora.validation}
    train, whole_rows = corpora.train.values(), recipe.chats is not None
    if whole_rows:
        longest = max(int((corpus.stops - corpus.starts).max()) for corpus in (*train, *validation.values())) - 1
    else:
        longest = max(corpus.token_count for corpus in train) - 1
    recipe = fit_to_data(recipe, mesh, longest, lambda length: sum(count_rows(recipe, length, corpus) for corpus in train))
    return Task(
        recipe=recipe,
        objective=text_objective(recipe),
        digests={"train": _corpora_digest(corpora.train), "validation": _corpora_digest(validation)},
        facts=describe_corpora(recipe, corpora),
        tokens=recipe.batch * recipe.length,
        flops=step_flops(recipe.model, recipe.batch, recipe.length, lora=recipe.lora),
        mixture=corpora.mixture,
        begin=partial(TextBatchSource, recipe, limit_validation(corpora, recipe.evaluate_tokens)),
    )


def _corpora_digest(corpora: dict[str, Corpus]) -> str:
    if len(corpora) == 1:
        return next(iter(corpora.values())).digest
    return hashlib.sha256("\n".join(f"{name} {corpus.digest}" for name, corpus in corpora.items()).encode()).hexdigest()


TEXT = TaskType("text", open_text, backends=("jit", "pmap"), mixes=True, exact=True)


def text_objective(recipe: Recipe) -> Objective:
    """The recipe's loss for packed rows."""
    rows = jax.ShapeDtypeStruct((recipe.batch, recipe.length + 1), jnp.int32)
    mask = None if recipe.chats is None else jax.ShapeDtypeStruct(rows.shape, jnp.bool_)
    noise = jax.ShapeDtypeStruct(rows.shape, jnp.uint32) if recipe.neftune else None
    return Objective(Batch(rows, rows, rows, mask, noise), lambda _: recipe.loss or total_loss)


def noise_bits(seed: int, batch_index: int, rows: tuple[int, int, int], length: int) -> np.ndarray:
    """`Batch.noise` for some rows of a batch, uint32[rows, T + 1]: the same for any number of hosts.

    Args:
      rows: (first row, number of rows, number of rows of the whole batch).
    """
    first, count, batch = rows
    bits = np.random.Philox(key=[seed, batch_index]).random_raw(batch * (length + 1)).astype(np.uint32)
    return bits.reshape(batch, length + 1)[first : first + count]


class TextBatchSource:
    """Packed rows, epoch after epoch; see `interface.BatchSource`."""

    def __init__(self, recipe: Recipe, corpora: Corpora, context: TaskContext) -> None:
        shard, shards = context.program.data_shard
        position: dict[str, Any] = {"next_batch": 0} if context.data_state is None else context.data_state
        self._recipe, self._validation = recipe, corpora.validation
        rows = recipe.batch // shards
        self._rows = rows * shard, rows, recipe.batch
        self._changes: list[Any] = position.get("mixture", [])
        if corpora.mixture is not None and (not self._changes or self._changes[-1][1] != corpora.mixture):
            self._changes = [*self._changes, [position["next_batch"] * recipe.batch, corpora.mixture]]
        changes = [(row, {name: Fraction(part) for name, part in of.items()}) for row, of in self._changes]
        mixture = Mixture(changes) if changes else None
        sources = list(corpora.train.values())
        self._numbered = Rows(sources, recipe.batch, recipe.length, recipe.seed, shard, shards, mixture)
        self._batches = Batches(self._numbered, position["next_batch"])
        self._epochs = [f"epochs/{name}".removesuffix("/") for name in corpora.train]
        self._program = program = context.program
        nats = partial(token_nats, program.config, compute=compute_of(recipe), sharding=program.eval_sharding)
        self._measure = program.jit(nats)

    @property
    def state(self) -> dict[str, Any]:
        return self._batches.state | ({"mixture": self._changes} if self._changes else {})

    def next(self, model: Callable[[], LlamaParams]) -> Batch:
        batch_index = self._batches.state["next_batch"]
        batch = next(self._batches)
        if not self._recipe.neftune:
            return batch
        return batch._replace(noise=noise_bits(self._recipe.seed, batch_index, self._rows, self._recipe.length))

    def report(self, metrics: dict[str, float]) -> dict[str, float]:
        return dict(zip(self._epochs, self._numbered.epochs(self._batches.state["next_batch"]), strict=True))

    def evaluate(self, model: LlamaParams) -> EvalResult:
        fitted = self._program.prepare_params(model)
        return evaluate_sources(self._validation, lambda corpus: self._evaluate(fitted, corpus))

    def _evaluate(self, fitted: LlamaParams, corpus: Corpus) -> EvalResult:
        program, length = self._program, self._recipe.length
        evaluation = evaluate(
            program.config,
            fitted,
            corpus,
            length=length,
            stride=length,
            batch=program.eval_sharding.batch_shards * default_batch(),
            measure=self._measure,
        )
        numbers = {name: getattr(evaluation, name) for name in ("loss", "standard_error", "perplexity", "bits_per_byte")}
        per_byte = f"{evaluation.bits_per_byte:.4f} bits per byte"
        text = f"loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.2f}, {per_byte}"
        return EvalResult(numbers, text)

    def close(self) -> None:
        self._batches.close()


def evaluate_sources(sources: Sequence[ValidationSource], find: Callable[[Corpus], EvalResult]) -> EvalResult:
    """Evaluate each source with a function, and average by the shares; a single source is evaluated by itself.

    The numbers of a mixture are `loss/NAME` for each source, and the mean loss.
    """
    results = {source.name: find(source.corpus) for source in sources}
    if len(sources) == 1:
        return results[sources[0].name]
    loss = sum(float(source.share) * results[source.name].loss for source in sources)
    numbers = {f"{key}/{name}": value for name, result in results.items() for key, value in result.numbers.items()}
    text = ", ".join(f"{name} {result.loss:.4f}" for name, result in results.items())
    return EvalResult({"loss": loss, **numbers}, f"loss {loss:.4f} ({text})")


def count_rows(recipe: Recipe, length: int, corpus: Corpus) -> int:
    """Number of rows of T target tokens in an epoch of a corpus."""
    return row_count(corpus, length) if recipe.chats is None else len(whole_rows(corpus, length, recipe.seed))


def describe_corpora(recipe: Recipe, corpora: Corpora) -> tuple[str, ...]:
    """Lines about the amount of data, and how often it is read."""
    r, train = recipe, corpora.train.values()
    train_documents = sum(corpus.document_count for corpus in train)
    sizes = f"{sum(corpus.token_count for corpus in train):,} tokens in {train_documents:,} documents"
    tokens = sum(source.corpus.token_count for source in corpora.validation)
    documents = sum(source.corpus.document_count for source in corpora.validation)
    share = "" if corpora.validation_share is None else f" ({corpora.validation_share:.1%} of the data was kept for it)"
    epochs = {
        name: float(corpora.shares[name]) * r.steps * r.batch / count_rows(r, r.length, corpus)
        for name, corpus in corpora.train.items()
    }
    epoch_words = f" are {epochs['']:.1f} epochs" if "" in epochs else f" of {len(epochs)} sources"
    lines = [
        f"data: {sizes} to train, {tokens:,} in {documents:,} to validate{share};"
        f" {r.steps:,} steps of {r.batch} x {r.length}{epoch_words}"
    ]
    if "" not in epochs:
        lines += [
            f"  {name}: {corpora.shares[name]} of the rows ({float(corpora.shares[name]):.1%}), {corpus.token_count:,}"
            f" tokens, {epochs[name]:.1f} epochs"
            for name, corpus in corpora.train.items()
        ]
        lines += [
            f"  {name} is read {count:.1f} times; beyond {REPEATED} times repeated text helps less and less"
            for name, count in epochs.items()
            if REPEATED < count <= MAX_EPOCHS
        ]
    for name, corpus in corpora.train.items():
        lines += data_warnings(epochs[name], count_rows(r, r.length, corpus), float(corpora.shares[name]) * r.batch, name)
    return tuple(lines)


def read_data(recipe: Recipe, inputs: TaskInputs) -> Corpora:
    """The files as documents of tokens, split for validation if no validation files are given.

    Raises:
      TrainingError: nothing to validate on, or a token without a row in the model's embedding.
      DataError: invalid files.
    """
    shares = {source.name: source.share for source in inputs.sources}
    if inputs.validation_sources:
        corpora = {source.name: _read_corpus(recipe, inputs, source.files) for source in inputs.sources}
        validation = tuple(
            ValidationSource(source.name, _read_corpus(recipe, inputs, source.files), shares.get(source.name, Fraction(1)))
            for source in inputs.validation_sources
        )
        validation_share = None
    else:
        parts = {source.name: _split_source(recipe, inputs, source) for source in inputs.sources}
        corpora = {name: part.train for name, part in parts.items()}
        validation = tuple(ValidationSource(name, part.validation, shares[name]) for name, part in parts.items())
        tokens = sum(source.corpus.token_count for source in validation)
        validation_share = tokens / (tokens + sum(corpus.token_count for corpus in corpora.values()))
    train = dict(corpora)
    if inputs.validation_sources or len(corpora) > 1:
        for name in train:
            for source in validation:
                train[name] = without(train[name], source.corpus)
        twice = sum(corpora[name].document_count - train[name].document_count for name in train)
        if twice:
            warnings.warn(f"{twice} documents of the data are also in the validation data: not trained on", stacklevel=2)
    return Corpora(train, shares, validation, validation_share)


def _read_corpus(recipe: Recipe, inputs: TaskInputs, paths: Sequence[Path]) -> Corpus:
    if recipe.chats is not None:
        with name_format_setting("chats.format"):
            chats = open_chats(paths, inputs.tokenizer, recipe.length, recipe.chats)
        inputs.log.line(f"chats: {chats.counts}")
        corpus = chats.corpus
    else:
        bar = progress_bar("tokenizing", "MB", quiet=inputs.log.quiet, delay=1.0)
        corpus = open_corpus(paths, inputs.tokenizer, reading=recipe.reading, progress=bar)
    with name_size_setting(inputs.tokenizer):
        check_corpus_rows(corpus, recipe.model.vocab_size, inputs.tokenizer)
    return corpus


def _split_source(recipe: Recipe, inputs: TaskInputs, source: SourceFiles) -> Split:
    """A source's documents, some of them held out for validation."""
    corpus, what = _read_corpus(recipe, inputs, source.files), source.name or "the data"
    if corpus.document_count < 2:
        remedy = "add more conversations" if recipe.chats is not None else "cut a long text, such as by reading.longest=4000"
        raise TrainingError(
            f"{what} is a single document, which cannot be split for validation; pass other files with"
            f" --validation-data, or {remedy}"
        )
    divisible = None if recipe.chats is not None else inputs.tokenizer  # conversations are not divided
    return split(corpus, recipe.validation, seed=recipe.seed, tokenizer=divisible)


def limit_validation(corpora: Corpora, limit: int) -> Corpora:
    """Limit each source's held-out data to whole documents of about `limit` tokens; 0 sets no limit."""
    if not limit:
        return corpora
    sources = []
    for source in corpora.validation:
        sizes = np.cumsum(source.corpus.stops - source.corpus.starts)
        first = np.arange(1 + int(np.searchsorted(sizes, limit)))[: source.corpus.document_count]
        sources.append(source._replace(corpus=source.corpus.select(first)))
    return replace(corpora, validation=tuple(sources))
