"""Which kind of training a recipe is: the only place that asks."""

from __future__ import annotations

from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.errors import TrainingError
from llama_jax.runs.program import Backend, check_mesh
from llama_jax.runs.recipe import Recipe
from llama_jax.runs.tasks import distillation, preferences, rewards, text
from llama_jax.runs.tasks.task import TaskKind


def kind_of(recipe: Recipe) -> TaskKind:
    """By the settings that only this kind has."""
    if recipe.preference is not None:
        return preferences.KIND
    if recipe.distill is not None:
        return distillation.KIND
    if recipe.rewards is not None:
        return rewards.KIND
    return text.KIND


def check_task(recipe: Recipe, mesh: MeshSizes, backend: Backend) -> None:
    """What can be wrong without looking at the data: TrainingError, MeshError."""
    kind = kind_of(recipe)
    check_mesh(recipe, mesh, backend)
    if backend not in kind.backends:
        raise TrainingError(f"{backend} does not train on {kind.name}; use the backend {' or '.join(kind.backends)}")
    if recipe.neftune and kind is not text.KIND:
        raise TrainingError(f"neftune={recipe.neftune} is noise in learning texts and chats, not {kind.name}; leave it at 0")
    kind.check(recipe, mesh)
