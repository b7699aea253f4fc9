"""The interface of a kind of training, its data and loss, to the loop and the program."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jax

from llama_jax.config import LlamaConfig
from llama_jax.data.data_files import FoundData
from llama_jax.errors import GenerationError, TrainingError
from llama_jax.model.forward_options import Compute, Sharding
from llama_jax.model.params import Llama
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.multihost import Processes
from llama_jax.runs.log import Log
from llama_jax.runs.recipe import Recipe
from llama_jax.tokenizers import Tokenizer
from llama_jax.training.batch import predicted_count
from llama_jax.training.step import Loss, TrainState

Backend = Literal["jit", "pmap"]
StepMetrics = dict[str, jax.Array]


class FrozenModels(NamedTuple):
    """Models that a step reads and does not change.

    Attributes:
      base: the model under the adapters in training, in the shapes of the layout's configuration: the model with its
        adapters switched off. None if the whole model is trained.
      other: the task's own, `Objective.frozen`, such as a teacher.
    """

    base: Llama | None
    other: Any


@dataclass(frozen=True)
class Objective:
    """The compiled part of a task.

    Attributes:
      shapes: the batch of all processes, a tree of `jax.ShapeDtypeStruct` [B, ...].
      loss: given the frozen models, the loss of one part of a batch, see `training.step.Loss`.
      count: see `StepOptions.count`.
      prepare: None, or given the frozen models a function with the arguments of a loss that returns the batch extended by
        what is computed from all its rows, without gradients, before it is divided into parts: the log-probabilities of a
        reference, or a mean over the batch. It gets the whole batch and must divide it itself if memory requires it
        (`training.step.microbatches`). Its result has B rows as well.
      frozen: arrays that are passed to the step as `FrozenModels.other`, already placed.
    """

    shapes: Any
    loss: Callable[[FrozenModels], Loss]
    count: Callable[[Any], jax.Array] = predicted_count
    prepare: Callable[[FrozenModels], Callable[..., Any]] | None = None
    frozen: Any = None


class EvalResult(NamedTuple):
    """The result of an evaluation on held-out data.

    Attributes:
      numbers: for the line in metrics.jsonl; "loss" is what the best checkpoints are chosen by: lower is better.
      text: for the log: "loss 2.1, perplexity 8.2".
    """

    numbers: dict[str, float]
    text: str

    @property
    def loss(self) -> float:
        return self.numbers["loss"]


class BatchSource(Protocol):
    """The batches of a run, for one process."""

    @property
    def state(self) -> dict[str, Any]:
        """The position in the data as JSON, `TaskContext.data_state` of a resumed run. No name in it is that of a digest."""

    def next(self, model: Callable[[], Llama]) -> Any:
        """This process's rows of the next batch, a tree as `Objective.shapes`.

        Args:
          model: returns the model before the step, with adapters joined to their base; its arrays are deleted in the step.
            Calling it waits for the previous step. Whatever is computed from it must depend on the model, the recipe's seed
            and the number of the batch alone, so that a resumed run computes the same.
        """

    def report(self, metrics: dict[str, float]) -> dict[str, float]:
        """Numbers for the line of a report besides loss and speed: from a step's metrics, and about the batches."""

    def evaluate(self, model: Llama) -> EvalResult:
        """Evaluate a model; all processes take part, and each gets the whole result."""

    def close(self) -> None:
        """Stop making batches."""


@dataclass(frozen=True)
class TrainingProgram:
    """The functions that the loop calls.

    Attributes:
      step: from a state, which is donated, and a placed batch to the next state and the step's metrics.
      place: puts the rows that this process reads onto its devices.
      share: which part of a batch these rows are, and of how many.
      start: the state before the first step, from random parameters or from given ones: sharded by `param_specs`, and not
        to be used again.
      shapes: of the state, with shardings, for `CheckpointManager.restore`.
      adopt: turns a restored state into one that `step` accepts.
      model: the model of trained parameters: they themselves, or adapters joined with their base.
      jit: `jax.jit` of a function of such a model and of arrays that every process has; every process gets the result.
      fit: turns such a model into one of `config`, which can be evaluated and can generate where it lies.
      config: of that model, as the mesh holds it.
      sharding: of forward passes for evaluation and generation; rows are divided into `batch_shards` shards.
      devices: their number.
      description: of the devices, in words.
      compile_seconds: of `step`.
      attention: how `step` computes attention, in words; empty if it is compiled later, as by pmap.
    """

    step: Callable[[TrainState, Any], tuple[TrainState, StepMetrics]]
    place: Callable[[Any], Any]
    share: tuple[int, int]
    start: Callable[[Llama | None], TrainState]
    shapes: TrainState
    adopt: Callable[[TrainState], TrainState]
    model: Callable[[Llama], Llama]
    jit: Callable[[Callable[..., Any]], Callable[..., Any]]
    fit: Callable[[Llama], Llama]
    config: LlamaConfig
    sharding: Sharding
    devices: int
    description: str
    compile_seconds: float
    attention: str = ""


class TaskContext(NamedTuple):
    """The arguments of `Task.begin`.

    Attributes:
      program: compiled, with the placement of its arrays.
      state: before the first step, which deletes its arrays.
      base: the model under the adapters in training, or None.
      data_state: `BatchSource.state` with the digests, from the checkpoint that the run resumes from; None for a new run.
      folder: of the run.
    """

    program: TrainingProgram
    state: TrainState
    base: Llama | None
    data_state: dict[str, Any] | None
    folder: Path
    processes: Processes
    log: Log


@dataclass(frozen=True)
class Task:
    """A kind of training with its data, read and checked.

    Attributes:
      recipe: with its warm-up, and with the sizes that follow from the data if the given one has no steps
        (`recipe.fit_to_data`).
      objective: the compiled part.
      digests: of "train" and "validation", by which a resumed run recognizes its data, and of everything else that must not
        change. They are kept in checkpoints and compared.
      facts: lines about the data, for the log.
      tokens: that a step reads, padding included: for tokens per second.
      flops: of a step, for MFU.
      decoded: tokens that are sampled one after another for a step, in each of its rows.
      begin: makes the batch source, once everything is compiled.
      mixture: the share of each source, as written in the note of a checkpoint; None for a single source.
      load: reads what all processes must read together, such as the weights of a teacher, and returns the task with it; None
        if there is nothing. Called when the data of all processes are known to be the same.
      shown: names of `BatchSource.report` that the log's line has; the others are in metrics.jsonl alone.
    """

    recipe: Recipe
    objective: Objective
    digests: dict[str, str]
    facts: tuple[str, ...]
    tokens: int
    flops: float
    begin: Callable[[TaskContext], BatchSource]
    mixture: dict[str, str] | None = None
    load: Callable[[], Task] | None = None
    shown: tuple[str, ...] = ()
    decoded: float = 0.0


class TaskInputs(NamedTuple):
    """The inputs of a task besides the recipe.

    Attributes:
      sources: of a mixture, or the only one.
      validation_sources: likewise; empty if a share of the data is held out for validation.
    """

    sources: Sequence[FoundData]
    validation_sources: Sequence[FoundData]
    tokenizer: Tokenizer
    mesh: MeshSizes
    log: Log
    weights: str | os.PathLike[str] | None = None

    @property
    def data(self) -> list[Path]:
        """The files of all sources."""
        return [file for source in self.sources for file in source.files]

    @property
    def validation_data(self) -> list[Path]:
        """The files of all sources."""
        return [file for source in self.validation_sources for file in source.files]


@dataclass(frozen=True)
class TaskKind:
    """A kind of training, before its data are read.

    Attributes:
      name: in messages: "preferences".
      check: raises errors about a recipe, a mesh or a backend, without looking at any data.
      open: reads the data; raises DataError or TrainingError.
      backends: those that support it.
      mixes: whether it supports mixtures of sources.
      divides_rows: whether a mesh may divide rows over its context axis.
      exact: whether it supports `Recipe.exact`.
      tokenizer: for a new model if neither --tokenizer nor --weights gives one.
    """

    name: str
    open: Callable[[Recipe, TaskInputs], Task]
    check: Callable[[Recipe, MeshSizes], None] = field(default=lambda recipe, mesh: None)
    backends: tuple[Backend, ...] = ("jit",)
    mixes: bool = False
    divides_rows: bool = True
    exact: bool = False
    tokenizer: Callable[[Recipe], Tokenizer | None] = field(default=lambda recipe: None)


def check_vocabulary(recipe: Recipe, size: int) -> None:
    """Raise TrainingError for a vocabulary larger than the model's."""
    if size > recipe.model.vocab_size:
        raise TrainingError(
            f"the tokenizer has {size} tokens, the model a vocabulary of {recipe.model.vocab_size};"
            f" set model.vocab_size={size} or more, or give a model of --weights that vocabulary first (docs/models.md)"
        )


@contextmanager
def name_format_setting(setting: str) -> Iterator[None]:
    """Raise TrainingError that names a recipe's setting for messages without a chat format."""
    try:
        yield
    except GenerationError as error:
        raise TrainingError(f"{error}; in training as {setting}=plain") from None


def compute_of(recipe: Recipe) -> Compute:
    """The `Compute` options of a recipe."""
    exact = recipe.exact and recipe.rewards is not None  # elsewhere exact runs have `exact_shards`
    return Compute(recipe.dtype, recipe.remat, recipe.attention, exact=exact)
