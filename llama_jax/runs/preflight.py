"""Before the first step of a run: its kind of training, its tokenizer, its plan, and checks, the same in all processes."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.analysis.hardware import find_hardware
from llama_jax.config import LlamaConfig
from llama_jax.data import ChatReading
from llama_jax.data.data_files import SourceFiles
from llama_jax.data.documents import TOKEN_SUFFIXES, file_type, read_documents
from llama_jax.data.load_corpus import examine
from llama_jax.errors import DataError, TokenizerError, TrainingError, UserError, short_repr
from llama_jax.formats.step_dirs import ABOUT, CHECKPOINTS, DamagedError, check_checksums, existing_step, read_metadata
from llama_jax.model.checks import check_parts_found
from llama_jax.model.lora import adapter_count
from llama_jax.model.trees import parameter_count
from llama_jax.ops import project
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.multihost import Processes
from llama_jax.runs.checkpoint_manager import CheckpointManager
from llama_jax.runs.compiled_step import UTILIZATION, check_mesh
from llama_jax.runs.log import Log, duration
from llama_jax.runs.metrics import METRICS
from llama_jax.runs.recipe import FITTED_SETTINGS, RECIPE_FILE, Recipe, RewardSettings, differences, to_dict
from llama_jax.runs.run_folder import RunFolder, check_resume
from llama_jax.runs.tasks import distillation, grpo, language_modeling, preferences
from llama_jax.runs.tasks.interface import Backend, Task, TaskType
from llama_jax.storage import Location, StoredPath
from llama_jax.storage.atomic_write import write_atomically
from llama_jax.tokenizers import Tokenizer, find_tokenizer, load_tokenizer
from llama_jax.tokenizers.interface import check_token_rows
from llama_jax.tokenizers.load import warn_of_size
from llama_jax.tokenizers.sentencepiece import byte_tokenizer, train_bpe
from llama_jax.training.optimizer import OptimizerSettings, learning_rate_schedule

# CPU seconds to compile a step: 2.3 to 5.5 for models of 0.3M to 1.1B parameters, at any depth, since the layers are a scan.
DEFAULT_COMPILE_SECONDS = 5.0
MARK_SECONDS = 30  # until the others see what one host writes: network file systems cache missing files


def extends_context(model: LlamaConfig, original: LlamaConfig) -> bool:
    """Whether two models differ at most in their context and rotary settings: the parameters of one fit the other."""
    return original == replace(
        model,
        rope_scaling=original.rope_scaling,
        rope_theta=original.rope_theta,
        max_seq_len=original.max_seq_len,
        unscaled_max_seq_len=original.unscaled_max_seq_len,
        parts=original.parts,
    )


def check_same_arguments(
    processes: Processes,
    run: RunFolder,
    recipe: Recipe,
    mesh: MeshSizes,
    backend: Backend,
    task: Task,
    metadata: dict[str, Any] | None,
) -> None:
    """Raise MeshError if the arguments of processes differ: their collectives would then wait for each other forever."""
    if processes.count == 1:
        return
    processes.assert_equal(
        "what is trained",
        {
            "--workdir": _mark_of(run, processes),
            **{f"recipe {name}": value for name, value in to_dict(recipe).items()},
            "mesh": str(mesh),
            "backend": backend,
            **{f"{name} data": digest for name, digest in task.digests.items()},
            "shares of the data": str(task.mixture),
            "checkpoint to resume from": None if metadata is None else f"step {metadata['step']}",
        },
    )


def _mark_of(run: RunFolder, processes: Processes) -> str:
    """Check that every process can read what process 0 has just written into the folder of the run."""
    folder = run.path
    mark = folder / ".shared"
    if processes.index == 0:
        mark.write_text(f"{folder.resolve()} on {platform.node()}")
    processes.barrier("mark")
    deadline = time.monotonic() + MARK_SECONDS
    while processes.index and not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    try:
        text = mark.read_text()
    except OSError:
        remedy = " (LLAMA_JAX_CACHE must be on a disk that all hosts share)" if isinstance(run.location, StoredPath) else ""
        text = f"{folder.resolve()} on {platform.node()}, which is not the same folder{remedy}"
    processes.barrier("mark read")
    if processes.index == 0:
        mark.unlink(missing_ok=True)
    return text


def check_sources(recipe: Recipe, training: Sequence[SourceFiles], validation: Sequence[SourceFiles]) -> None:
    """Raise TrainingError for a mixture in a kind of training without mixtures, or validation files of other sources."""
    task_type = find_task_type(recipe)
    if len(training) > 1 and not task_type.mixes:
        raise TrainingError(f"mixtures are not supported for {task_type.name}; pass the files without names and weights")
    names, validation_names = ([source.name for source in sources] for sources in (training, validation))
    if validation_names and validation_names != [""] and sorted(validation_names) != sorted(names):
        raise TrainingError(
            f"the validation data have the sources {', '.join(filter(None, validation_names))}, but the data"
            f" {', '.join(filter(None, names)) or 'no named source'}; pass files for each of these, or without names"
        )


def check_run(recipe: Recipe, folder: Location, trace: range | None, mesh: MeshSizes, backend: Backend) -> None:
    """Checks that need no data; raises TrainingError, ConfigError, MeshError."""
    check_trace(recipe, trace)
    check_parts_found(recipe.model)
    check_task(recipe, mesh, backend)


def check_trace(recipe: Recipe, trace: range | None) -> None:
    """Raise TrainingError for steps to trace that the run does not have, once its steps are known."""
    if trace is not None and recipe.steps and not 1 <= trace.start < trace.stop <= recipe.steps + 1:
        raise TrainingError(f"trace={trace.start}:{trace.stop} must lie within the run's steps, 1 to {recipe.steps}")


def resume_metadata(
    checkpoints: CheckpointManager, folder: Path, recipe: Recipe, resume: bool
) -> tuple[dict[str, Any] | None, Recipe]:
    """The metadata of the checkpoint to resume from, or None for a new run; and the recipe.

    If the recipe has no `warmup_steps`, it gets those of the resumed run.
    """
    latest = checkpoints.latest()
    check_resume(folder, latest, resume)
    if latest is None:
        return None, recipe
    step = folder / CHECKPOINTS / str(latest)
    try:
        check_checksums(step, {ABOUT})
        metadata = read_metadata(folder / CHECKPOINTS, latest)
    except DamagedError as error:
        older = max((step for step in checkpoints.steps() if step < latest), default=None)
        remedy = "there is no older one" if older is None else f"remove that folder to continue from step {older}"
        raise TrainingError(f"the checkpoint in {step} is damaged ({error}); {remedy}") from None
    missing = [name for name in ("recipe", "data", "tokens") if name not in metadata]
    if missing:
        raise TrainingError(f"{step} was not saved by train: its metadata has no {missing[0]}; use another --workdir")
    begun = metadata["recipe"]["optimizer"]["warmup_steps"]
    if recipe.optimizer.warmup_steps is None and (not recipe.steps or begun < recipe.steps):
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, warmup_steps=begun))
    check_recipe(metadata, folder, recipe)
    return metadata, recipe


def check_recipe(metadata: dict[str, Any], folder: Path, recipe: Recipe) -> None:
    """Raise TrainingError if a run is resumed by another recipe; sizes from the data are compared once they are known."""
    changed = differences(metadata["recipe"], json.loads(json.dumps(to_dict(recipe))))
    if not recipe.steps:
        changed = [difference for difference in changed if difference.partition(":")[0] not in FITTED_SETTINGS]
    if changed and not (recipe.steps and _prolongs(recipe, metadata["recipe"], metadata["step"], changed)):
        longer = ""
        if any(difference.startswith("steps:") for difference in changed):
            longer = "; to change steps, the run must have optimizer.schedule=constant, or wsd before its decay"
        raise TrainingError(
            f"{folder} holds a run of another recipe ({'; '.join(changed)}); resume with the same, or use another --workdir"
            f"{longer}"
        )


def _prolongs(recipe: Recipe, before: dict[str, Any], done: int, changed: Sequence[str]) -> bool:
    """Whether only the future of the learning rate differs, and not its values in the steps that are done."""
    names = {difference.partition(":")[0] for difference in changed}
    if not names <= {"steps", "optimizer.schedule", "optimizer.decay_share", "optimizer.final_share"} or recipe.steps < done:
        return False
    old = learning_rate_schedule(OptimizerSettings(**before["optimizer"]), before["steps"])
    new = learning_rate_schedule(recipe.optimizer, recipe.steps)
    updates = np.arange(done)
    return bool(np.array_equal(old(updates) + 0 * updates, new(updates) + 0 * updates))


def log_model(log: Log, recipe: Recipe, facts: Sequence[str]) -> None:
    """Print what is trained, before the compilation, which may take minutes."""
    r = recipe
    learned = ""
    if r.lora is not None:
        quantization = "" if r.quantize == "none" else f" in {r.quantize}"
        learned = (
            f"{quantization} that stay as they are, {adapter_count(r.model, r.lora):,} of adapters of rank {r.lora.rank}"
        )
    log.line(f"model: {parameter_count(r.model):,} parameters{learned}, computed in {r.dtype}, remat {r.remat}")
    for fact in facts:
        log.line(fact)


def estimate_compile_seconds(folder: Path) -> float | None:
    """Estimated seconds to compile the step: those of this run's last start, else a constant on CPUs, else None."""
    seconds = DEFAULT_COMPILE_SECONDS if jax.default_backend() == "cpu" else None
    if (folder / METRICS).exists():
        for line in (folder / METRICS).read_bytes().splitlines():
            with suppress(ValueError, RecursionError, AttributeError):  # a killed run may leave an incomplete line
                seconds = json.loads(line).get("compile_seconds") or seconds
    return seconds


@contextmanager
def explain_changed_data(metadata: dict[str, Any] | None) -> Iterator[None]:
    """In a resumed run, report an error in opening the data as a change of the data, which could be read before."""
    try:
        yield
    except (DataError, TrainingError) as error:
        if metadata is None:
            raise
        raise TrainingError(
            f"the data (or the teacher) changed since this run began: {error}; resume with the same files"
        ) from None


def check_data(metadata: dict[str, Any] | None, task: Task, *, reweigh: bool) -> None:
    """Raise TrainingError if a resumed run is given other data than before, or other shares without `reweigh`."""
    if metadata is None:
        return
    for name, digest in task.digests.items():
        if metadata["data"].get(name) != digest:
            what = f"{name} data" if name in ("train", "validation") else name
            time_hint = _other_template_time(metadata, task.recipe)
            raise TrainingError(f"the {what} is not what this run began with; resume with the same files{time_hint}")
    before = metadata["data"].get("mixture", [[0, None]])[-1][1]
    if before != task.mixture and not reweigh:
        old, new = (", ".join(f"{name} {share}" for name, share in (of or {}).items()) for of in (before, task.mixture))
        raise TrainingError(
            f"the shares of the data were {old}, but are {new} now; resume with the same weights, or accept the new ones"
            " with --reweigh (reweigh=True)"
        )


def fix_template_time(recipe: Recipe, tokenizer: Tokenizer, metadata: dict[str, Any] | None, processes: Processes) -> Recipe:
    """The recipe with the time that its chat template writes, if it writes one and the recipe sets none: that of the resumed
    run, or the current time of process 0."""
    name, settings = _chat_settings(recipe)
    templates = (tokenizer.chat_template or "", *tokenizer.chat_templates.values())
    writes_time = any("strftime_now" in template for template in templates)
    if settings is None or settings.template_time is not None or not writes_time:
        return recipe
    template_time = _stored_template_time(metadata, name)
    if template_time is None:
        template_time = datetime.now().isoformat(timespec="seconds")
        if processes.count > 1 and processes.index == 0:
            processes.broadcast(template_time.encode())
        elif processes.count > 1:
            template_time = processes.receive().decode()
    dated: dict[str, Any] = {name: replace(settings, template_time=template_time)}
    return replace(recipe, **dated)


def _chat_settings(recipe: Recipe) -> tuple[str, ChatReading | RewardSettings | None]:
    """The settings for reading chats, and their name in the recipe; None for a recipe that reads texts."""
    return ("rewards", recipe.rewards) if recipe.chats is None else ("chats", recipe.chats)


def _stored_template_time(metadata: dict[str, Any] | None, name: str) -> str | None:
    """The time in the metadata of a checkpoint; None if an earlier version saved it, or for a new run."""
    return None if metadata is None else (metadata["recipe"].get(name) or {}).get("template_time")


def _other_template_time(metadata: dict[str, Any], recipe: Recipe) -> str:
    """The end of a message about changed data, if a chat template writes another time than before."""
    name, settings = _chat_settings(recipe)
    stored = _stored_template_time(metadata, name)
    if settings is None or settings.template_time == stored:
        return ""
    if stored is not None:
        return f" and {name}.template_time={stored}"
    return (
        f" and {name}.template_time=DATE, the day on which the run began: its chat template writes the date, which earlier"
        " versions did not record"
    )


def encode_prompts(recipe: Recipe, tokenizer: Tokenizer) -> list[list[int]]:
    """The prompts as tokens that leave room for an answer: checked now rather than hours later at the first evaluation."""
    encoded = [tokenizer.encode(prompt, eos=False) for prompt in recipe.prompts]
    context = recipe.model.max_seq_len
    for prompt, ids in zip(recipe.prompts, encoded, strict=True):
        if not 0 < len(ids) < context:
            raise TrainingError(
                f"prompts: {short_repr(prompt, 40)} is {len(ids)} tokens; a sample needs at least 1 and fewer than the"
                f" model's context of {context}"
            )
        check_token_rows(tokenizer, ids, recipe.model.vocab_size, f"prompts: {short_repr(prompt, 40)}")
    return encoded


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the recipe for people to read; a resumed run reads the copy in its checkpoint."""
    if jax.process_index() == 0:
        with write_atomically(folder / RECIPE_FILE, raises=TrainingError) as target:
            target.write_text(json.dumps(to_dict(recipe), indent=2) + "\n", encoding="utf-8")


def choose_tokenizer(
    recipe: Recipe,
    data: Sequence[Path],
    *,
    tokenizer_path: str | os.PathLike[str] | None,
    pretrained: Tokenizer | None,
    resumed_run: Path | None,
) -> Tokenizer:
    """The tokenizer of the resumed run; else the given one, that of the pretrained model, or a new one for the recipe.

    Args:
      data: the training files, from which a BPE vocabulary is learned.
      tokenizer_path: the file or folder of a tokenizer.
      pretrained: the tokenizer of the pretrained model or of the teacher.
      resumed_run: the folder of the run that is resumed.

    Raises:
      TrainingError: none of them, or two that differ.
      TokenizerError, DataError: files that cannot be used.
    """
    if tokenizer_path is not None and recipe.vocabulary != "given":
        raise TrainingError(
            f"the recipe makes its own vocabulary ({recipe.vocabulary}); add vocabulary=given to train with"
            f" {os.fspath(tokenizer_path)}"
        )
    if resumed_run is not None:
        folder = resumed_run / CHECKPOINTS
        tokenizer = find_tokenizer(folder / str(existing_step(folder, None)) / ABOUT, recipe.model.vocab_size)
        assert tokenizer is not None  # every run saves its tokenizer, and `verify` finds a missing file
        if (
            tokenizer_path is not None
            and examine(load_tokenizer(tokenizer_path)).fingerprint != examine(tokenizer).fingerprint
        ):
            raise TrainingError(
                f"{os.fspath(tokenizer_path)} is not the tokenizer that the run in {resumed_run} began with; resume without"
                " --tokenizer"
            )
        return tokenizer
    if tokenizer_path is not None:
        tokenizer = load_tokenizer(tokenizer_path)
        warn_of_size(tokenizer, recipe.model.vocab_size, tokenizer_path)
        return tokenizer
    if pretrained is not None:
        return pretrained
    match recipe.vocabulary:
        case "byte":
            return byte_tokenizer()
        case "bpe":
            return _learn(data, recipe)
        case _:
            raise TrainingError(
                "the recipe needs a tokenizer; pass one with --tokenizer, or add vocabulary=bpe to learn one from the data"
            )


def _learn(data: Sequence[Path], recipe: Recipe) -> Tokenizer:
    """A vocabulary learned from the data. An error in a file passes through SentencePiece and comes back as it was."""
    failed: list[UserError] = []

    def texts() -> Iterator[str]:
        try:
            for path in data:
                if file_type(path) in TOKEN_SUFFIXES:
                    raise TrainingError(
                        f"{path} holds tokens, not text to learn a vocabulary from; pass their tokenizer with --tokenizer"
                    )
                for document in read_documents(path, recipe.reading):
                    yield document.text
        except UserError as error:
            failed.append(error)
            raise

    try:
        return train_bpe(texts(), recipe.model.vocab_size)
    except TokenizerError:
        if failed:
            raise failed[0] from None
        raise


def find_task_type(recipe: Recipe) -> TaskType:
    """The kind of training of a recipe, by its settings."""
    if recipe.preference is not None:
        return preferences.PREFERENCES
    if recipe.distill is not None:
        return distillation.DISTILLATION
    if recipe.rewards is not None:
        return grpo.REWARDS
    return language_modeling.TEXT


def check_task(recipe: Recipe, mesh: MeshSizes, backend: Backend) -> None:
    """Checks that need no data; raises TrainingError, MeshError."""
    task_type = find_task_type(recipe)
    check_mesh(recipe, mesh, backend)
    if backend not in task_type.backends:
        raise TrainingError(
            f"the backend {backend} does not train on {task_type.name}; use {' or '.join(task_type.backends)}"
        )
    if mesh.context > 1 and not task_type.divides_rows:
        raise TrainingError(
            f"mesh {mesh} divides rows over context, but {task_type.name} need whole rows; use data, fsdp and tensor"
        )
    if recipe.exact and not task_type.exact:
        raise TrainingError(f"exact=true supports text, chats and rewards, but not {task_type.name}; omit it")
    task_type.check(recipe, mesh)


def describe_plan(original: Recipe, task: Task, devices: int, compiling: float | None = None, done: int = 0) -> str:
    """A line with the steps of a run, its settings that follow from the data, and how long it will take.

    The time is estimated from the FLOPs of the task; for sampled answers also from the speed of a matmul with as many rows
    as there are answers.

    Args:
      original: the recipe before it was fitted to the data; `task.recipe` is the fitted one.
      compiling: seconds to compile the step, if known; a sampler takes about as long again.
      done: steps that a resumed run has taken.
    """
    recipe = task.recipe
    fitted = [
        f"{name}={now} of at most {bound}"
        for name, now, bound in (("batch", recipe.batch, original.batch), ("length", recipe.length, original.length))
        if now != bound
    ]
    optimizer = original.optimizer
    if optimizer.warmup_steps is None and recipe.optimizer.warmup_steps != optimizer.max_warmup_steps:
        fitted.append(f"warm-up {recipe.optimizer.warmup_steps} of at most {optimizer.max_warmup_steps}")
    hardware = find_hardware(jax.devices()[0].device_kind)
    peak = matmul_flops(recipe.dtype) if hardware is None else hardware.flops
    seconds = task.flops / (UTILIZATION * peak * devices)
    if task.decoded:
        compiling = 2 * compiling if compiling else None
        # Token by token, which reads all weights for few rows; the FLOPs are in those of the task.
        rows, weights = -(-recipe.batch // devices), parameter_count(recipe.model)
        if hardware is None:
            slow = 1 / matmul_flops(recipe.dtype, rows, 4096) - 1 / peak
            seconds += task.decoded * 2 * rows * weights * slow / UTILIZATION
        else:
            seconds += task.decoded * weights * jnp.dtype(recipe.dtype).itemsize / hardware.memory_bandwidth
    steps = f"plan: {recipe.steps:,} steps of {task.tokens:,} tokens" + (f" ({', '.join(fitted)})" if fitted else "")
    left = f"{recipe.steps - done:,} left, " if done else ""
    step_time = f"{seconds:.2g} s" if seconds < 10 else duration(seconds)
    total = duration((recipe.steps - done) * seconds + (compiling or 0.0))
    exclusions = (
        f"with {duration(compiling)} to compile, besides evaluations" if compiling else "besides compiling and evaluations"
    )
    return (
        f"{steps}: {left}about {step_time} each, {total} in all {exclusions}; estimated at {UTILIZATION:.0%} of"
        f" {peak / 1e9:,.0f} GFLOP/s"
    )


def matmul_flops(dtype: str, rows: int = 512, size: int = 1024, repetitions: int = 5) -> float:
    """FLOP/s of a matrix product of some rows on the first device, for devices without a datasheet, such as CPUs: the
    fastest of some repetitions."""
    x, weight = jnp.ones((rows, size), dtype), jnp.ones((size, size), dtype)
    multiply = jax.jit(project)
    multiply(x, weight).block_until_ready()
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        multiply(x, weight).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * rows * size * size / min(seconds)
