"""Distillation: a student learns a teacher's predictions on text or chats."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from llama_jax.config import LlamaConfig
from llama_jax.data import Corpus
from llama_jax.errors import TrainingError
from llama_jax.evaluation.perplexity import compare_tokens, kl_to_reference
from llama_jax.formats import open_checkpoint
from llama_jax.model.params import LlamaParams
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.sharding import check_model, training_sharding
from llama_jax.runs.pretrained import load_frozen
from llama_jax.runs.recipe import Recipe
from llama_jax.runs.tasks import language_modeling
from llama_jax.runs.tasks.interface import EvalResult, FrozenModels, Task, TaskContext, TaskInputs, TaskType, compute_of
from llama_jax.runs.user_functions import with_parts
from llama_jax.tokenizers import Tokenizer
from llama_jax.training.distillation import DistillOptions, Teacher, distillation_loss
from llama_jax.training.flops import step_flops
from llama_jax.training.step import LossFn

VOCABULARY_PROBE = "One day, a llama said 42 times: Grüße, world!\n"  # different vocabularies rarely encode it alike


def distill_options(recipe: Recipe) -> DistillOptions:
    """The distillation settings of a recipe that has them."""
    assert recipe.distill is not None
    return recipe.distill


def teacher_config(recipe: Recipe) -> LlamaConfig:
    """The configuration of the teacher.

    Raises:
      TrainingError: no teacher, or one with another vocabulary or a context shorter than the rows.
      CheckpointError: no model at its path.
      ConfigError: it has custom parts that the recipe does not have.
    """
    path = distill_options(recipe).teacher
    if not path:
        raise TrainingError("distillation needs a teacher; pass a model's folder or file with --teacher (distill.teacher=)")
    config = open_checkpoint(path).config
    if config.vocab_size != recipe.model.vocab_size:
        raise TrainingError(
            f"the teacher {path} has a vocabulary of {config.vocab_size}, but the student one of {recipe.model.vocab_size},"
            " and predictions are compared token by token; use a teacher with the same vocabulary, or, for a new"
            f" student, model.vocab_size={config.vocab_size}"
        )
    if config.max_seq_len < recipe.length:
        raise TrainingError(
            f"length={recipe.length} is above the context of the teacher {path}, {config.max_seq_len}; set"
            f" length={config.max_seq_len} or less"
        )
    return with_parts(config, recipe.parts) if config.parts else config


def check_distillation(recipe: Recipe, mesh: MeshSizes) -> None:
    """Raise TrainingError or MeshError for a teacher that does not fit the student or the mesh."""
    check_model(teacher_config(recipe), mesh)


def tokenizer_of(recipe: Recipe) -> Tokenizer | None:
    """The teacher's tokenizer, which a new student uses."""
    return open_checkpoint(distill_options(recipe).teacher).tokenizer()


def open_distillation(recipe: Recipe, inputs: TaskInputs) -> Task:
    """Text or chats with a teacher; for the errors see `language_modeling.read_data` and `teacher_config`."""
    options, config = distill_options(recipe), teacher_config(recipe)
    teacher_tokenizer = tokenizer_of(recipe)
    if teacher_tokenizer is not None and teacher_tokenizer.encode(VOCABULARY_PROBE, bos=False) != inputs.tokenizer.encode(
        VOCABULARY_PROBE, bos=False
    ):
        raise TrainingError(
            f"the teacher {options.teacher} has another vocabulary than the student: its tokens have other texts; use a"
            " teacher with the same vocabulary"
        )
    corpora = language_modeling.read_data(recipe, inputs)
    task = language_modeling.task_of(recipe, inputs.mesh, corpora)
    recipe = task.recipe
    validation = language_modeling.limit_validation(corpora, recipe.evaluate_tokens)

    def make_loss(frozen: FrozenModels) -> LossFn:
        fitted, sharding = training_sharding(config, make_mesh(inputs.mesh))
        return distillation_loss(options, Teacher(fitted, frozen.other, sharding))

    task = replace(
        task,
        objective=replace(task.objective, make_loss=make_loss),
        facts=(*task.facts, f"teacher: {options.teacher}"),
        flops=task.flops + step_flops(config, recipe.batch, recipe.length) / 3,
        logged_metrics=("kl",),
    )

    def load() -> Task:
        params, origin = load_frozen(options.teacher, config, inputs.mesh, recipe.dtype, options.quantize)
        return replace(
            task,
            objective=replace(task.objective, frozen=params),
            digests={**task.digests, "teacher": origin["digest"]},
            begin=partial(DistillationBatchSource, recipe, validation, (config, params)),
        )

    return replace(task, load=load)


DISTILLATION = TaskType("a teacher's predictions", open_distillation, check_distillation, tokenizer=tokenizer_of, mixes=True)


class DistillationBatchSource(language_modeling.TextBatchSource):
    """Batches of text, evaluated by the divergence from the teacher too; see `interface.BatchSource`."""

    def __init__(
        self,
        recipe: Recipe,
        corpora: language_modeling.Corpora,
        teacher: tuple[LlamaConfig, LlamaParams],
        context: TaskContext,
    ) -> None:
        super().__init__(recipe, corpora, context)
        config, _ = self._teacher = teacher
        self._compare = context.program.jit(partial(compare_tokens, recipe.model, config, compute=compute_of(recipe)))

    def report(self, metrics: dict[str, float]) -> dict[str, float]:
        tokens = max(metrics["tokens"], 1.0)
        return {name: metrics[name] / tokens for name in ("kl", "cross_entropy")}

    def evaluate(self, model: LlamaParams) -> EvalResult:
        return language_modeling.evaluate_sources(self._validation, lambda corpus: self._evaluate(model, corpus))

    def _evaluate(self, model: LlamaParams, corpus: Corpus) -> EvalResult:
        (config, teacher), length = self._teacher, self._recipe.length
        compared = kl_to_reference(
            *(self._recipe.model, model, teacher, corpus),
            reference_config=config,
            length=length,
            stride=length,
            measure=self._compare,
        )
        evaluation, kl = compared.model, compared.kl
        weight = distill_options(self._recipe).weight
        loss = weight * kl + (1 - weight) * evaluation.loss  # at temperature 1
        text, per_byte = evaluation.perplexity, evaluation.bits_per_byte
        numbers = {"loss": loss, "kl": kl, "cross_entropy": evaluation.loss, "perplexity": text, "bits_per_byte": per_byte}
        return EvalResult(numbers, f"loss {loss:.4f}, KL {kl:.4f}, perplexity {text:.2f}, {per_byte:.4f} bits per byte")
