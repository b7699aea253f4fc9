"""What a run trains on, and by which loss: what the loop and the program ask for, whatever it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax

from llama_jax.data.sources import FoundData
from llama_jax.model.options import Compute
from llama_jax.model.params import Llama
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.processes import Processes
from llama_jax.runs.log import Log
from llama_jax.runs.recipe import Recipe
from llama_jax.tokenizers import Tokenizer
from llama_jax.training.batch import predicted_count
from llama_jax.training.step import Loss, TrainState

if TYPE_CHECKING:
    from llama_jax.runs.program import Backend, TrainingProgram


class Frozen(NamedTuple):
    """Models that a step reads and does not change.

    Attributes:
      base: under adapters that are trained, in the shape that the layout's configuration has: what the model is with its
        adapters switched off. None where the whole model is trained.
      other: what the task brought along, `Objective.frozen`, as a teacher.
    """

    base: Llama | None
    other: Any


@dataclass(frozen=True)
class Objective:
    """The part of a task that is compiled.

    Attributes:
      shapes: the batch of all processes, a tree of `jax.ShapeDtypeStruct` [B, ...].
      loss: given the frozen models, the loss of one part of a batch, see `training.step.Loss`.
      count: see `StepOptions.count`.
      prepare: None, or given the frozen models a function with the arguments of a loss that gives the batch anew, with what
        is computed of all its rows before it is divided into parts, without gradients: the log-probabilities of a reference,
        or a mean over the batch. It gets the whole batch and must divide it itself where memory needs that
        (`training.step.in_parts`). What it returns has B rows as well.
      frozen: arrays that are handed to the step as `Frozen.other`, where they are to lie.
    """

    shapes: Any
    loss: Callable[[Frozen], Loss]
    count: Callable[[Any], jax.Array] = predicted_count
    prepare: Callable[[Frozen], Callable[..., Any]] | None = None
    frozen: Any = None


class Finding(NamedTuple):
    """What an evaluation found.

    Attributes:
      loss: by which the best checkpoints are known: the lower, the better.
      numbers: for the line in metrics.jsonl, `loss` among them.
      text: for the log: "loss 2.1, perplexity 8.2".
      result: what `Result.validation` is; it has a `loss`.
    """

    loss: float
    numbers: dict[str, float]
    text: str
    result: Any


class Feed(Protocol):
    """A run's data on their way, for one process."""

    @property
    def state(self) -> dict[str, Any]:
        """What brings back this place, as JSON: the `Beginning.place` of a run that goes on. No name in it is a digest's."""

    def next(self, model: Callable[[], Llama]) -> Any:
        """This process's rows of the next batch, a tree as `Objective.shapes`.

        Args:
          model: gives the model as it is before the step, with adapters joined to their base; its arrays are deleted in the
            step. Who asks for it waits for the step before. What is made of it must depend on the model, the recipe's seed
            and the number of the batch alone, so that a resumed run makes it again.
        """

    def report(self, metrics: dict[str, float]) -> dict[str, float]:
        """Numbers for the line of a report, beside loss and speed: of a step's metrics, and of what the batches were."""

    def evaluate(self, model: Llama) -> Finding:
        """How good a model is; all processes take part, and each gets the whole answer."""

    def close(self) -> None:
        """Stop making batches."""


class Beginning(NamedTuple):
    """What is there when the batches begin.

    Attributes:
      program: compiled, and where its arrays lie.
      state: before the first step; the first step deletes its arrays.
      base: the model under adapters that are trained, or None.
      place: what `Feed.state` was, with the digests, in the checkpoint that the run goes on from; None for a new run.
      folder: of the run.
    """

    program: TrainingProgram
    state: TrainState
    base: Llama | None
    place: dict[str, Any] | None
    folder: Path
    processes: Processes
    log: Log


@dataclass(frozen=True)
class Task:
    """A kind of training with its data, read and checked.

    Attributes:
      objective: what is compiled.
      digests: of "train" and "validation", by which a resumed run knows its data again, and of what else it must be the same
        for. Each is kept in checkpoints and compared.
      facts: lines about the data, for the log.
      tokens: that a step reads, padding included: for tokens per second.
      flops: of a step, for MFU.
      begin: the feed, once everything is compiled.
      mixture: the share of each source, as it is written in the note of a checkpoint; None where there is but one.
      load: reads what all processes must read together, as the weights of a teacher; None where there is nothing. It comes
        when the data of all are known to be the same, and gives the task with it.
      shown: names of `Feed.report` that the log's line has; the others are in metrics.jsonl alone.
    """

    objective: Objective
    digests: dict[str, str]
    facts: tuple[str, ...]
    tokens: int
    flops: float
    begin: Callable[[Beginning], Feed]
    mixture: dict[str, str] | None = None
    load: Callable[[], Task] | None = None
    shown: tuple[str, ...] = ()


class Given(NamedTuple):
    """What a task is made of, beside the recipe.

    Attributes:
      sources: of a mixture, or the only one.
      validation_sources: likewise; none where a share of the data is kept for validation.
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
      check: raises what is wrong with a recipe, a mesh or a backend, without looking at any data.
      open: reads the data; raises DataError or TrainingError.
      backends: that it can be trained by.
      mixes: whether several sources can have each its share.
      tokenizer: of a model that is made anew, where neither --tokenizer nor --weights gives one.
    """

    name: str
    open: Callable[[Recipe, Given], Task]
    check: Callable[[Recipe, MeshSizes], None] = field(default=lambda recipe, mesh: None)
    backends: tuple[Backend, ...] = ("jit",)
    mixes: bool = False
    tokenizer: Callable[[Recipe], Tokenizer | None] = field(default=lambda recipe: None)


def compute_of(recipe: Recipe) -> Compute:
    """How a recipe's passes compute."""
    return Compute(recipe.dtype, recipe.remat, recipe.attention, recipe.attend)
