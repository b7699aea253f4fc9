"""Checks before the first step of a run: its folder, data and prompts, the same in all processes."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.data.errors import DataError
from llama_jax.data.sources import Data, FoundData
from llama_jax.errors import reading, shown
from llama_jax.formats.step_dirs import ABOUT, CHECKPOINTS, DamagedError, read_note, verify
from llama_jax.model.adapters import adapter_count
from llama_jax.model.trees import parameter_count
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.processes import Processes
from llama_jax.runs.errors import TrainingError
from llama_jax.runs.locks import run_of
from llama_jax.runs.log import Log, duration
from llama_jax.runs.metrics import METRICS
from llama_jax.runs.plan import FROM_DATA
from llama_jax.runs.program import Backend
from llama_jax.runs.recipe import RECIPE, Recipe, differences, to_dict
from llama_jax.runs.run_folder import RunFolder
from llama_jax.runs.snapshots import Snapshots
from llama_jax.runs.tasks.choose import check_task, kind_of
from llama_jax.runs.tasks.task import Task
from llama_jax.storage import Location, StoredPath
from llama_jax.storage.atomic_write import write_atomically
from llama_jax.tokenizers import Tokenizer
from llama_jax.training.optimizer import OptimizerSettings, learning_rates

# Of a processor's time, at any depth, since the layers are a loop: 2.3 to 5.5 for models of 0.3M to 1.1B parameters.
COMPILE_SECONDS = 5.0
MARK_SECONDS = 30  # until the others see what one host writes: network file systems cache missing files


def is_extended(model: LlamaConfig, original: LlamaConfig) -> bool:
    """Whether two models differ at most in their context and rotary settings: the parameters of one fit the other."""
    return original == replace(
        model,
        rope_scaling=original.rope_scaling,
        rope_theta=original.rope_theta,
        max_seq_len=original.max_seq_len,
        attend=original.attend,
    )


def agree(
    processes: Processes,
    run: RunFolder,
    recipe: Recipe,
    mesh: MeshSizes,
    backend: Backend,
    task: Task,
    note: dict[str, Any] | None,
) -> None:
    """Compare the arguments of all processes: those that compute different things would wait for each other forever."""
    if processes.count == 1:
        return
    processes.agree(
        "what is trained",
        {
            "--workdir": _mark_of(run, processes),
            **{f"recipe {name}": value for name, value in to_dict(recipe).items()},
            "mesh": str(mesh),
            "backend": backend,
            **{f"{name} data": digest for name, digest in task.digests.items()},
            "shares of the data": str(task.mixture),
            "checkpoint to go on from": None if note is None else f"step {note['step']}",
        },
    )


def _mark_of(run: RunFolder, processes: Processes) -> str:
    """Check that every process can read what process 0 has just written into the folder of the run."""
    if isinstance(run.place, StoredPath):
        with reading(run.place, TrainingError):
            return f"{run.place} with the lease of run {run_of(run.place)}"
    folder = run.path
    mark = folder / ".shared"
    if processes.index == 0:
        mark.write_text(f"{folder.resolve()} on {platform.node()}")
    processes.wait("mark")
    deadline = time.monotonic() + MARK_SECONDS
    while processes.index and not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        found = mark.read_text()
    except OSError:
        found = f"{folder.resolve()} on {platform.node()}, which is not the same folder"
    processes.wait("mark read")
    if processes.index == 0:
        mark.unlink(missing_ok=True)
    return found


def check_sources(recipe: Recipe, training: Sequence[FoundData], validation: Sequence[FoundData]) -> None:
    """Raise TrainingError for a mixture in a kind of training without mixtures, or validation files of other sources."""
    kind = kind_of(recipe)
    if len(training) > 1 and not kind.mixes:
        raise TrainingError(f"{kind.name} are not mixed by weights; give the files without names and weights")
    names, held = ([source.name for source in sources] for sources in (training, validation))
    if held and held != [""] and sorted(held) != sorted(names):
        raise TrainingError(
            f"the validation data are of {', '.join(filter(None, held))}, and the data of"
            f" {', '.join(filter(None, names)) or 'no named source'}; give files for each of the latter, or without names"
        )


def check(recipe: Recipe, folder: Location, trace: range | None, mesh: MeshSizes, backend: Backend) -> None:
    """Checks that need no data; raises TrainingError, MeshError."""
    if isinstance(folder, Path) and folder.exists() and not folder.is_dir():
        raise TrainingError(f"{folder} is a file; give a folder for the run with --workdir")
    check_trace(recipe, trace)
    check_task(recipe, mesh, backend)


def check_trace(recipe: Recipe, trace: range | None) -> None:
    """Raise TrainingError for steps to trace that the run does not have, once its steps are known."""
    if trace is not None and recipe.steps and not 1 <= trace.start < trace.stop <= recipe.steps + 1:
        raise TrainingError(f"trace={trace.start}:{trace.stop} must lie within the run's steps, 1 to {recipe.steps}")


def note_of(snapshots: Snapshots, folder: Location, recipe: Recipe, resume: bool) -> dict[str, Any] | None:
    """The note of the checkpoint to resume from, or None for a new run."""
    latest = snapshots.latest()
    if latest is None:
        return None
    if not resume:
        raise TrainingError(f"{folder} holds a run that is at step {latest}; go on with --resume, or give another --workdir")
    step = folder / CHECKPOINTS / str(latest)
    try:
        verify(step, {ABOUT})
        note = read_note(folder / CHECKPOINTS, latest)
    except DamagedError as error:
        older = max((step for step in snapshots.steps() if step < latest), default=None)
        remedy = "there is no older one" if older is None else f"remove that folder, and the run goes on from step {older}"
        raise TrainingError(f"the checkpoint in {step} is damaged ({error}); {remedy}") from None
    missing = [name for name in ("recipe", "data", "tokens") if name not in note]
    if missing:
        raise TrainingError(f"{step} was not saved by train: its note has no {missing[0]}; give another --workdir")
    check_recipe(note, folder, recipe)
    return note


def check_recipe(note: dict[str, Any], folder: Location, recipe: Recipe) -> None:
    """Raise TrainingError if a run is resumed by another recipe; sizes from the data are compared once they are known."""
    changed = differences(note["recipe"], json.loads(json.dumps(to_dict(recipe))))
    if not recipe.steps:
        changed = [one for one in changed if one.partition(":")[0] not in FROM_DATA]
    if changed and not (recipe.steps and _prolongs(recipe, note["recipe"], note["step"], changed)):
        longer = ""
        if any(difference.startswith("steps:") for difference in changed):
            longer = "; other steps need optimizer.schedule=constant from the beginning, or wsd whose decay has not begun"
        raise TrainingError(
            f"{folder} holds a run of another recipe ({'; '.join(changed)}); resume with the same, or give another --workdir"
            f"{longer}"
        )


def _prolongs(recipe: Recipe, before: dict[str, Any], done: int, changed: Sequence[str]) -> bool:
    """Whether only the future of the learning rate differs, and not its values in the steps that are done."""
    names = {difference.partition(":")[0] for difference in changed}
    if not names <= {"steps", "optimizer.schedule", "optimizer.decay_share", "optimizer.final_share"} or recipe.steps < done:
        return False
    old = learning_rates(OptimizerSettings(**before["optimizer"]), before["steps"])
    new = learning_rates(recipe.optimizer, recipe.steps)
    updates = np.arange(done)
    return bool(np.array_equal(old(updates) + 0 * updates, new(updates) + 0 * updates))


def describe(log: Log, recipe: Recipe, facts: Sequence[str]) -> None:
    """Print what is trained, before the compilation, which may take minutes."""
    r = recipe
    learnt = ""
    if r.lora is not None:
        kept = "" if r.quantize == "none" else f" in {r.quantize}"
        learnt = f"{kept} that stay as they are, {adapter_count(r.model, r.lora):,} of adapters of rank {r.lora.rank}"
    log.line(f"model: {parameter_count(r.model):,} parameters{learnt}, computed in {r.dtype}, remat {r.remat}")
    for fact in facts:
        log.line(fact)


def tell_of_compiling(log: Log, folder: Path) -> None:
    """Print that the step is compiled now, and how long that takes: as when this run last began, or as on CPUs."""
    seconds = COMPILE_SECONDS if jax.default_backend() == "cpu" else None
    if (folder / METRICS).exists():
        for line in (folder / METRICS).read_text("utf-8", errors="replace").splitlines():
            if '"compile_seconds"' in line:
                with suppress(ValueError):  # half a line of a run that was killed
                    seconds = json.loads(line)["compile_seconds"] or seconds
    log.progress("compiling the training step" + ("" if seconds is None else f", about {duration(seconds)}"))


@contextmanager
def unchanged(note: dict[str, Any] | None) -> Iterator[None]:
    """In a resumed run, which has read its data before, an error of opening them says that they changed."""
    try:
        yield
    except (DataError, TrainingError) as error:
        if note is None:
            raise
        raise TrainingError(
            f"the data (or the teacher) changed since this run began: {error}; resume with the same files"
        ) from None


def check_data(note: dict[str, Any] | None, task: Task, *, reweigh: bool) -> None:
    """Raise TrainingError if a resumed run is given other data than before, or other shares without `reweigh`."""
    if note is None:
        return
    for name, digest in task.digests.items():
        if note["data"].get(name) != digest:
            what = f"{name} data" if name in ("train", "validation") else name
            raise TrainingError(f"the {what} is not what this run began with; resume with the same files")
    before = note["data"].get("mixture", [[0, None]])[-1][1]
    if before != task.mixture and not reweigh:
        old, new = (", ".join(f"{name} {share}" for name, share in (of or {}).items()) for of in (before, task.mixture))
        raise TrainingError(
            f"the shares of the data were {old}, and are {new} now; resume with the same weights, or add --reweigh"
            " (reweigh=True) to go on with these, which the checkpoints then tell"
        )


def encode_prompts(recipe: Recipe, tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts as tokens that leave room for an answer: checked now rather than hours later at the first evaluation."""
    found = [tokenizer.encode(prompt, eos=False) for prompt in recipe.prompts]
    context = recipe.model.max_seq_len
    for prompt, ids in zip(recipe.prompts, found, strict=True):
        if not 0 < len(ids) < context:
            raise TrainingError(
                f"prompts: {shown(prompt, 40)} is {len(ids)} tokens; a sample needs at least 1 and fewer than the model's"
                f" context of {context}"
            )
    return found


def is_given(paths: Data) -> bool:
    """Whether there are any."""
    return isinstance(paths, str | os.PathLike) or len(paths) > 0


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the recipe for people to read; a resumed run reads the copy in its checkpoint."""
    if jax.process_index() == 0:
        with write_atomically(folder / RECIPE, raises=TrainingError) as target:
            target.write_text(json.dumps(to_dict(recipe), indent=2) + "\n", encoding="utf-8")
