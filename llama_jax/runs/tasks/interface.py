"""The interface between a kind of training, its data and loss, and the training loop and compiled step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from llama_jax.config import LlamaConfig
from llama_jax.data.data_files import SourceFiles
from llama_jax.errors import DataError, GenerationError, TokenizerError, TrainingError
from llama_jax.model.forward_options import ComputeOptions, Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.multihost import Processes
from llama_jax.runs.log import Log
from llama_jax.runs.recipe import Recipe
from llama_jax.tokenizers import Tokenizer
from llama_jax.training.batch import target_count
from llama_jax.training.step import LossFn, TrainState

Backend = Literal["jit", "pmap"]
StepMetrics = dict[str, jax.Array]


class FrozenModels(NamedTuple):
    """Models that a step reads but does not train.

    Attributes:
      base: the base model of the adapters in training, that is, the model with its adapters disabled, as
        `Sharding.prepare_params` returns it. None if the whole model is trained.
      other: models of the task, from `Objective.frozen`, such as a teacher.
    """

    base: LlamaParams | None
    other: Any


def count_tokens(batch: Any) -> jax.Array:
    """The number of tokens in a batch with segments, without padding, float32[]. A row's last token is only a target."""
    return jnp.sum(batch.segment_ids[..., :-1] > 0, dtype=jnp.float32)


@dataclass(frozen=True)
class Objective:
    """The part of a task that is compiled into the training step.

    Attributes:
      batch_shapes: the batch of all processes, a tree of `jax.ShapeDtypeStruct` [B, ...].
      make_loss: makes the loss function of a microbatch from the frozen models, see `training.step.LossFn`.
      count: see `StepOptions.count`.
      make_prepare_batch: None, or makes from the frozen models a function with the arguments of a loss. The step calls it
        once per batch, before the split into microbatches and without gradients. It returns the batch with values added
        that depend on frozen models or on all rows: the log-probabilities of a reference, or a mean over the batch. If
        memory requires it, it must itself split the batch (`training.step.microbatches`). Its result also has B rows.
      frozen: arrays that are passed to the step as `FrozenModels.other`, already sharded.
      count_tokens: maps the batch of `make_loss` to the number of tokens that are not padding, for tokens per second.
    """

    batch_shapes: Any
    make_loss: Callable[[FrozenModels], LossFn]
    count: Callable[[Any], jax.Array] = target_count
    make_prepare_batch: Callable[[FrozenModels], Callable[..., Any]] | None = None
    frozen: Any = None
    count_tokens: Callable[[Any], jax.Array] = count_tokens


class EvalResult(NamedTuple):
    """The result of an evaluation on held-out data.

    Attributes:
      numbers: for the line in metrics.jsonl; "loss" ranks checkpoints: lower is better.
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
        """The position in the data as JSON, `TaskContext.data_state` of a resumed run; no name equals that of a digest."""

    def next(self, model: Callable[[], LlamaParams]) -> Any:
        """This process's rows of the next batch, a tree like `Objective.batch_shapes`.

        Args:
          model: returns the model before the step, `TrainingProgram.model_params`; the step deletes its arrays.
            Calling it waits for the previous step. Anything computed from it must depend only on the model, the recipe's
            seed and the index of the batch, so that a resumed run computes the same.
        """

    def report(self, metrics: dict[str, float]) -> dict[str, float]:
        """Numbers for a line of metrics besides loss and speed: from a step's metrics, and about the batches."""

    def evaluate(self, model: LlamaParams) -> EvalResult:
        """Evaluate a model; all processes take part, and each receives the whole result."""

    def close(self) -> None:
        """Stop preparing batches."""


@dataclass(frozen=True)
class TrainingProgram:
    """The compiled training step, and what the loop needs around it: state, batches, and models for evaluation.

    Attributes:
      step: maps a state, which is donated, and a batch from `shard_batch` to the next state and the step's metrics.
      shard_batch: makes the global arrays of a batch from the rows that this process reads.
      data_shard: (index, number) of the equal shards of a batch that processes read: this process reads shard `index`.
      init_state: the state before the first step, from random parameters (None) or given ones, which are sharded by
        `param_specs` and donated.
      state_shapes: shapes of the state, with shardings, for `CheckpointManager.restore`.
      place_restored: turns a restored state into one that `step` accepts.
      model_params: the model of trained parameters: the parameters themselves, or the base model with the adapters.
      jit: `jax.jit` of a function of such a model and of arrays that every process has; every process receives the result.
      prepare_params: turns such a model into one for `config` and `eval_sharding`, to evaluate it and to generate.
      config: the configuration of that model on the mesh.
      eval_sharding: for forward passes in evaluation and generation; rows are divided into `batch_shards` shards.
      devices: number of devices.
      description: description of the devices.
      compile_seconds: time to compile `step`.
      attention: the attention backends in `step`; empty under pmap, which compiles at the first step.
    """

    step: Callable[[TrainState, Any], tuple[TrainState, StepMetrics]]
    shard_batch: Callable[[Any], Any]
    data_shard: tuple[int, int]
    init_state: Callable[[LlamaParams | None], TrainState]
    state_shapes: TrainState
    place_restored: Callable[[TrainState], TrainState]
    model_params: Callable[[LlamaParams], LlamaParams]
    jit: Callable[[Callable[..., Any]], Callable[..., Any]]
    prepare_params: Callable[[LlamaParams], LlamaParams]
    config: LlamaConfig
    eval_sharding: Sharding
    devices: int
    description: str
    compile_seconds: float
    attention: str = ""


class TaskContext(NamedTuple):
    """The arguments of `Task.begin`.

    Attributes:
      program: the compiled training step.
      state: the state before the first step, which will be donated to that step.
      base: the base model of the adapters in training, or None.
      data_state: `BatchSource.state` with the digests, from the checkpoint that the run resumes from; None for a new run.
      folder: the run's folder.
    """

    program: TrainingProgram
    state: TrainState
    base: LlamaParams | None
    data_state: dict[str, Any] | None
    folder: Path
    processes: Processes
    log: Log


@dataclass(frozen=True)
class Task:
    """A kind of training with its data, read and checked.

    Attributes:
      recipe: the recipe with its warm-up, and with sizes that follow from the data if the given one had no steps
        (`recipe.fit_to_data`).
      objective: the part that is compiled into the step.
      digests: of "train" and "validation", by which a resumed run recognizes its data, and of everything else that must not
        change. They are stored in checkpoints and compared.
      facts: lines about the data, for the log.
      tokens: tokens of a step's rows, including padding, for the plan.
      flops: FLOPs of a step on these rows, for MFU.
      decoded: number of tokens that a step samples one after another, in each of its rows.
      begin: makes the batch source, once everything is compiled.
      mixture: the share of each source, as stored in the metadata of a checkpoint; None for a single source.
      load: reads what all processes must read together, such as the weights of a teacher, and returns the task with it; None
        if there is nothing. Called once all processes are known to have the same data.
      logged_metrics: names from `BatchSource.report` that appear in the log; the others are only in metrics.jsonl.
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
    logged_metrics: tuple[str, ...] = ()
    decoded: float = 0.0


class TaskInputs(NamedTuple):
    """The inputs of a task in addition to the recipe.

    Attributes:
      sources: the sources of a mixture, or the only one.
      validation_sources: those for validation; empty if a share of the data is held out instead.
    """

    sources: Sequence[SourceFiles]
    validation_sources: Sequence[SourceFiles]
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
        """The validation files of all sources."""
        return [file for source in self.validation_sources for file in source.files]


@dataclass(frozen=True)
class TaskType:
    """A kind of training, before its data is read.

    Attributes:
      name: for messages: "preferences".
      check: raises errors about a recipe, a mesh or a backend, without reading any data.
      open: reads the data; raises DataError or TrainingError.
      backends: backends that support it.
      mixes: whether it supports mixtures of sources.
      divides_rows: whether a mesh may divide rows over its context axis.
      exact: whether it supports `Recipe.exact`.
      tokenizer: for a new model if neither --tokenizer nor --weights provides one.
    """

    name: str
    open: Callable[[Recipe, TaskInputs], Task]
    check: Callable[[Recipe, MeshSizes], None] = field(default=lambda recipe, mesh: None)
    backends: tuple[Backend, ...] = ("jit",)
    mixes: bool = False
    divides_rows: bool = True
    exact: bool = False
    tokenizer: Callable[[Recipe], Tokenizer | None] = field(default=lambda recipe: None)


@contextmanager
def name_size_setting(tokenizer: Tokenizer) -> Iterator[None]:
    """For tokens without a row in the model's embedding, raise a TrainingError that names the recipe's setting."""
    try:
        yield
    except (DataError, TokenizerError) as error:
        raise TrainingError(
            f"{error}; for a new model set model.vocab_size={tokenizer.vocab_size} or more, give one of --weights the"
            " vocabulary first (docs/models.md)"
        ) from None


@contextmanager
def name_format_setting(setting: str) -> Iterator[None]:
    """For messages without a chat format, raise a TrainingError that names the recipe's setting."""
    try:
        yield
    except GenerationError as error:
        raise TrainingError(f"{error}; in training set {setting}=plain") from None


def compute_of(recipe: Recipe) -> ComputeOptions:
    """The `ComputeOptions` options of a recipe."""
    exact = recipe.exact and recipe.rewards is not None  # elsewhere exact runs have `exact_shards`
    return ComputeOptions(recipe.dtype, recipe.remat, recipe.attention, exact=exact)
