"""The kind of training of a recipe: the only place that decides it."""

from __future__ import annotations

from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.errors import TrainingError
from llama_jax.runs.program import Backend, check_mesh
from llama_jax.runs.recipe import Recipe
from llama_jax.runs.tasks import distillation, preferences, rewards, text
from llama_jax.runs.tasks.task import TaskKind


def kind_of(recipe: Recipe) -> TaskKind:
    """The kind whose settings the recipe has."""
    if recipe.preference is not None:
        return preferences.KIND
    if recipe.distill is not None:
        return distillation.KIND
    if recipe.rewards is not None:
        return rewards.KIND
    return text.KIND


def check_task(recipe: Recipe, mesh: MeshSizes, backend: Backend) -> None:
    """Checks that need no data; raises TrainingError, MeshError."""
    kind = kind_of(recipe)
    check_mesh(recipe, mesh, backend)
    if backend not in kind.backends:
        raise TrainingError(f"the backend {backend} does not train on {kind.name}; use {' or '.join(kind.backends)}")
    if recipe.neftune and kind is not text.KIND:
        raise TrainingError(f"neftune={recipe.neftune} works for texts and chats, not for {kind.name}; leave it at 0")
    kind.check(recipe, mesh)
