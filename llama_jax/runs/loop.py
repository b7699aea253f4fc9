"""The training loop: steps, logging, evaluation and checkpoints, until the last step or a stop signal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from llama_jax.analysis.hardware import find_hardware
from llama_jax.data.data_files import Data, find_data
from llama_jax.errors import CheckpointError, StuckSaveError, TrainingError, reading
from llama_jax.formats import open_checkpoint
from llama_jax.formats.step_dirs import CHECKPOINTS, by_loss
from llama_jax.inference.generate import generate
from llama_jax.inference.sampling import Sampling
from llama_jax.model.params import LlamaParams
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.multihost import Processes
from llama_jax.runs import preflight
from llama_jax.runs.checkpoint_manager import SAVE_TIMEOUT, CheckpointManager
from llama_jax.runs.compiled_step import make_program
from llama_jax.runs.log import Log, duration
from llama_jax.runs.metrics import Metrics, Track, Tracking, check_trackers
from llama_jax.runs.preflight import choose_tokenizer, describe_plan, find_task_type
from llama_jax.runs.pretrained import describe_weights, load_weights
from llama_jax.runs.recipe import Recipe, to_dict
from llama_jax.runs.recipes import check_weights, find
from llama_jax.runs.run_folder import RunFolder, open_run
from llama_jax.runs.signals import Stopping, StopRequest
from llama_jax.runs.tasks.interface import Backend, BatchSource, EvalResult, Task, TaskContext, TaskInputs, TrainingProgram
from llama_jax.storage import locate, resolved
from llama_jax.tokenizers import Tokenizer
from llama_jax.training.flops import FORMULA, flops_utilization
from llama_jax.training.optimizer import learning_rate_schedule
from llama_jax.training.step import TrainState


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
      step: the number of steps taken.
      state: the state after them.
      validation: the result of the last evaluation; None if there was none.
      stopped: the name of the signal that ended the run before its last step, or None.
    """

    step: int
    state: TrainState = field(repr=False)
    validation: EvalResult | None
    stopped: str | None


def train(
    recipe: Recipe | str,
    workdir: str | os.PathLike[str],
    data: Data,
    *,
    validation_data: Data = (),
    tokenizer: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    resume: bool = False,
    reweigh: bool = False,
    mesh: MeshSizes = MeshSizes(),
    backend: Backend = "jit",
    trace: range | None = None,
    track: Sequence[Track] = (),
    save_timeout: float = SAVE_TIMEOUT,
    processes: Processes | None = None,
    log: Log | None = None,
) -> Result:
    """Train a recipe, and write checkpoints into a folder, from which `llama_jax.load` reads the model at any time.

    Deterministic: the result depends only on the recipe, the data and the software. A run that is killed and resumed on the
    same devices has bit-identical results. On other devices it reads the data in the same order, and with `Recipe.exact` its
    results are bit-identical too.

    Args:
      recipe: a `Recipe`, the name of a built-in one, or FILE.py:FUNCTION (`runs.recipes.find`).
      workdir: a folder that no other run uses at the same time, for recipe.json, metrics.jsonl and checkpoints/STEP. Several
        processes need it on a shared file system. Or a URL, s3:// or gs://: the run is then written to a folder in the
        cache, and uploaded with each checkpoint (docs/storage.md).
      data: a file, a folder or several, see `data.open_corpus`; or a mixture of several `WeightedData`, each with exactly
        its share of the rows, and epochs of its own.
      validation_data: as `data`; by default a share of the documents of each source of `data` is held out.
      tokenizer: the file or folder of a tokenizer, for a recipe that does not train its own.
      weights: a model in any format to continue training from; its configuration and tokenizer replace the recipe's. If the
        recipe's model differs only in RoPE scaling, theta and context, the recipe's values are used: a context extension.
      resume: continue from the newest checkpoint in `workdir`, if there is one.
      reweigh: allow resuming with other weights of the same sources.
      mesh: the sizes of the mesh axes over which batch, parameters and heads are sharded.
      backend: "jit", or "pmap" for `mesh.data` replicas of the model.
      trace: steps, counted from 1, whose profile is written into `workdir`/trace, for TensorBoard or Perfetto.
      track: trackers that get the numbers of metrics.jsonl too, see `runs.metrics`.
      save_timeout: maximum seconds for writing a checkpoint in the background; if exceeded, the run ends with an error.
      processes: with several processes, the result of `parallel.multihost.join_job`; all call this with the same arguments.
      log: prints progress, such as `runs.log.Log()`; None prints nothing.

    Raises:
      TrainingError: the folder contains another run or is in use; a tokenizer or prompts that do not match the recipe; a
        trace of steps that the run does not have; or a loss that is not finite for `recipe.skip_limit` steps in a row.
      UserError: invalid data, checkpoint or mesh; a checkpoint that could not be written; or processes with different
        arguments.
    """
    processes = Processes() if processes is None else processes
    if processes.count != jax.process_count():
        raise TrainingError(
            f"this is one of {jax.process_count()} processes; join them with llama_jax.parallel.multihost.join_job, and"
            " pass its result as processes="
        )
    # Before anything else, because JAX's own barriers assume that all processes have the same number of devices.
    processes.assert_equal("devices", {"devices": jax.local_device_count()})
    log = Log(quiet=True) if log is None else log
    if isinstance(recipe, str):
        check_weights(recipe, has_weights=weights is not None)
        recipe = find(recipe)
    location = locate(workdir)
    pretrained = open_checkpoint(weights) if weights is not None else None
    if pretrained is not None:
        model = recipe.model if preflight.extends_context(recipe.model, pretrained.config) else pretrained.config
        recipe = replace(recipe, model=replace(model, parts=pretrained.config.parts), vocabulary="given")
    elif recipe.lora is not None:
        raise TrainingError("lora trains adapters on a frozen model; pass the model with --weights (weights=)")
    if reweigh and not resume:
        raise TrainingError("--reweigh (reweigh=True) changes the weights of a run's data; it needs --resume")
    # Quick checks come first, so that no mistake is found after minutes of reading data or training a tokenizer.
    preflight.check_run(recipe, location, trace, mesh, backend)
    if not processes.first_of_host:  # the first process fetches data from object stores
        processes.barrier("data fetched")
    sources = find_data(data)
    is_given = isinstance(validation_data, str | os.PathLike) or len(validation_data) > 0
    validation_sources = find_data(validation_data) if is_given else []
    if processes.first_of_host:
        processes.barrier("data fetched")
    check_trackers(track)
    preflight.check_sources(recipe, sources, validation_sources)
    with (
        open_run(location, processes, log, resume=resume) as run_folder,
        CheckpointManager(
            run_folder.path / CHECKPOINTS,
            keep_last=recipe.keep_last,
            keep_best=recipe.keep_best,
            timeout=save_timeout,
            check=run_folder.check,
            mirror=run_folder.mirror,
        ) as checkpoints,
        StopRequest(alone=processes.count == 1, quiet=processes.index > 0) as stop,
    ):
        folder = run_folder.path
        metadata, recipe = preflight.resume_metadata(checkpoints, folder, recipe, resume)
        stop.saved_step = None if metadata is None else metadata["step"]
        if metadata is None and recipe.vocabulary == "bpe":
            log.line(f"learning a vocabulary of {recipe.model.vocab_size} pieces from the text")
        run_tokenizer = choose_tokenizer(
            recipe,
            [file for source in sources for file in source.files],
            tokenizer_path=tokenizer,
            pretrained=find_task_type(recipe).tokenizer(recipe) if pretrained is None else pretrained.tokenizer(),
            resumed_run=folder if metadata else None,
        )
        recipe = preflight.fix_template_time(recipe, run_tokenizer, metadata, processes)
        prompts = preflight.encode_prompts(recipe, run_tokenizer)
        if not processes.first_of_host:  # the first process writes the tokenized text to the cache
            processes.barrier("text tokenized")
        with preflight.explain_changed_data(metadata):
            inputs = TaskInputs(sources, validation_sources, run_tokenizer, mesh, log, weights)
            task = find_task_type(recipe).open(recipe, inputs)
        given_recipe, recipe = recipe, task.recipe
        preflight.check_data(metadata, task, reweigh=reweigh)
        if metadata is not None:
            preflight.check_recipe(metadata, folder, recipe)
        preflight.check_trace(recipe, trace)
        if processes.first_of_host:
            processes.barrier("text tokenized")
        facts = [] if pretrained is None else describe_weights(recipe, pretrained.tensors)
        compile_seconds = preflight.estimate_compile_seconds(folder)
        done = 0 if metadata is None else metadata["step"]
        plan = describe_plan(given_recipe, task, mesh.devices, compile_seconds, done)
        preflight.log_model(log, recipe, (*facts, *task.facts, plan))
        preflight.check_same_arguments(processes, run_folder, recipe, mesh, backend, task, metadata)
        if task.load is not None:
            task = task.load()
            preflight.check_data(metadata, task, reweigh=reweigh)
        initial_params, base = load_weights(recipe, weights, mesh, metadata)
        base_params = None if base is None else base.params
        if backend == "jit":  # under pmap the first step compiles
            estimate = "" if compile_seconds is None else f", about {duration(compile_seconds)}"
            log.progress(f"compiling the training step{estimate}")
        program = make_program(recipe, task.objective, mesh, backend, base_params)
        processes.barrier("compiled")  # compilation times differ
        if metadata is None:
            state = program.init_state(initial_params)
        else:
            state, metadata = checkpoints.restore(program.state_shapes)
            state = program.place_restored(state)
        del initial_params
        data_state = None if metadata is None else metadata["data"]
        batches = task.begin(TaskContext(program, state, base_params, data_state, folder, processes, log))
        preflight.write_recipe(folder, recipe)
        stop.begin_steps()
        run = _TrainingRun(
            recipe=recipe,
            folder=run_folder,
            program=program,
            checkpoints=checkpoints,
            tokenizer=run_tokenizer,
            prompts=prompts,
            task=task,
            batches=batches,
            log=log,
            stop=Stopping(stop, processes.count),
            profile=Profile(folder, trace, log),
            processes=processes,
            track=track,
            base=None if base is None else base.metadata,
        )
        run.log_start(state, resumed=metadata is not None)
        return run.run(state, metadata)


@dataclass
class _TrainingRun:
    """The training loop: what a run's steps need, and the state of the loop besides the `TrainState`.

    Attributes:
      base: path and digest of the frozen base model of adapters, for the checkpoints; None if the whole model is trained.
      tokens: target tokens of all finished steps, including those before a resume.
      tokens_read: tokens without padding of the finished steps since the last line of the log.
      validation: the result of the last evaluation, and `validation_step` its step; None and -1 if there was none.
    """

    recipe: Recipe
    folder: RunFolder
    program: TrainingProgram
    checkpoints: CheckpointManager
    tokenizer: Tokenizer
    prompts: list[list[int]]
    task: Task
    batches: BatchSource
    log: Log
    stop: Stopping
    profile: Profile
    processes: Processes
    track: Sequence[Track] = ()
    base: dict[str, str] | None = None
    tokens: int = 0
    tokens_read: float = 0.0
    validation: EvalResult | None = None
    validation_step: int = -1

    def __post_init__(self) -> None:
        self.learning_rate = learning_rate_schedule(self.recipe.optimizer, self.recipe.steps)
        hardware = find_hardware(jax.devices()[0].device_kind)
        self.peak_flops = None if hardware is None else hardware.flops  # FLOP/s of a device

    def log_start(self, state: TrainState, *, resumed: bool) -> None:
        """Log that training begins."""
        if self.peak_flops is not None:
            self.log.line(FORMULA)
        at_step = f"; resumed at step {int(state.step)}" if resumed else ""
        attention = f", attention by {self.program.attention}" if self.program.attention else ""
        compiled = f"compiled in {self.program.compile_seconds:.1f} s for {self.program.description}{attention}"
        self.log.line(f"{compiled}{at_step}")

    def run(self, state: TrainState, metadata: dict[str, Any] | None) -> Result:
        """Take all remaining steps, until the last one or a stop signal.

        Steps are counted from 1. A step is dispatched asynchronously; the loop reads the metrics of the step before while it
        runs, so that the device never waits for the host.

        Args:
          metadata: from the checkpoint that the run resumes from, or None.
        """
        recipe, batches = self.recipe, self.batches
        start_step = int(state.step)
        self.tokens = 0 if metadata is None else metadata["tokens"]
        self.metrics = self.tracking = None
        if self.processes.index == 0:
            self.metrics = Metrics(self.folder.path)
            self.tracking = Tracking(self.track, self.folder.path, to_dict(recipe), start_step, self.log)
        event, compile_seconds = "start" if metadata is None else "resume", round(self.program.compile_seconds, 3)
        self._write("event", start_step, event=event, devices=self.program.devices, compile_seconds=compile_seconds)
        start_time = self._last_log_time = time.perf_counter()
        last_logged, last_saved = start_step, start_step if metadata is not None else None
        pending_metrics: dict[str, jax.Array] | None = None  # of the last step, not yet read
        self.profile.log_missed(start_step)
        try:
            step = start_step
            while step < recipe.steps and not self.stop.should_stop():
                self.profile.before(step + 1, state)
                batch = self.program.shard_batch(batches.next(partial(self.program.model_params, state.params)))
                state, metrics = self.program.step(state, batch)
                if pending_metrics is not None:
                    self._finish_step(step, pending_metrics)
                pending_metrics, step = metrics, step + 1
                should_log, should_evaluate, should_save = (
                    (every and step % every == 0) or step == recipe.steps
                    for every in (recipe.log_every, recipe.evaluate_every, recipe.save_every)
                )
                is_first = step == start_step + 1
                if should_log or should_save or is_first:
                    self._finish_step(step, pending_metrics)
                    pending_metrics = None
                if is_first:
                    self.stop.request.step_seconds = time.perf_counter() - start_time
                if is_first and not should_log:
                    self._log_first_step(step, time.perf_counter() - start_time)
                if should_log:
                    self._log_step(step, metrics, last_logged, start_time)
                    last_logged = step
                if should_evaluate:
                    self._untimed(lambda step=step, state=state: self._evaluate(step, state))
                if should_save:
                    self._untimed(lambda step=step, state=state: self._save(step, state, batches.state))
                    # This save runs in the background; the one before is complete, because `save` waits for it.
                    self.stop.request.saved_step, last_saved = last_saved, step
            if pending_metrics is not None:
                self._finish_step(step, pending_metrics)
            if last_saved != step:
                self._save(step, state, batches.state)
            self.checkpoints.wait()
            self._write("event", step, event="end" if step == recipe.steps else "stop", signal=self.stop.name)
        finally:
            self.profile.end()
            self.log.end()
            batches.close()
            if self.metrics is not None:
                self.metrics.close()
            if self.tracking is not None:
                self.tracking.close()
        self.folder.check()
        self.checkpoints.finish_mirror()
        self._log_end(step)
        stopped = self.stop.name if step < recipe.steps else None
        return Result(step, state, self.validation, stopped)

    def _finish_step(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Wait for a step and count its tokens; raise after `skip_limit` skipped steps in a row."""
        names = "tokens", "tokens_read", "skipped_in_a_row"
        tokens, tokens_read, skipped_in_a_row = jax.device_get([metrics[name] for name in names])
        self.tokens += int(tokens)
        self.tokens_read += float(tokens_read)
        if skipped_in_a_row >= self.recipe.skip_limit:
            try:
                self.checkpoints.wait()  # for a checkpoint that is being written, which the message names
            except StuckSaveError:  # its threads hang, and a normal exit would wait for them
                raise
            except CheckpointError:
                pass  # matters less than the error below
            last = self.checkpoints.latest()
            saved = "no checkpoint was saved" if last is None else f"the last checkpoint is step {last}"
            raise TrainingError(
                f"loss or gradients were not finite for {skipped_in_a_row} steps in a row, the last of them step {step},"
                f" which reads batch {step - 1} of seed {self.recipe.seed}; {saved}; try a lower optimizer.learning_rate or"
                f" a longer warm-up, or look at llama_jax.data.training_batches(..., start={step - 1})"
            )

    def _log_first_step(self, step: int, seconds: float) -> None:
        """Log the first step, because the next line may come much later."""
        every = self.recipe.log_every
        steps_to_next_line = min((step // every + 1) * every, self.recipe.steps) - step
        left = duration((self.recipe.steps - step) * seconds)
        next_line = duration(steps_to_next_line * seconds)
        self.log.progress(f"first step in {seconds:.1f} s, about {left} left; the next line comes in about {next_line}")

    def _log_step(self, step: int, metrics: dict[str, jax.Array], last_logged: int, start_time: float) -> None:
        """Write progress to the log and the metrics; raise the error of a failed save."""
        self.checkpoints.check()
        now = time.perf_counter()
        seconds = now - self._last_log_time
        step_seconds = self.stop.request.step_seconds = seconds / (step - last_logged)
        tokens_per_second = self.tokens_read / seconds
        self._last_log_time, self.tokens_read = now, 0.0
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        loss, grad_norm, skipped = values["loss"], values["grad_norm"], int(values["skipped"])
        task_values = self.batches.report(values)
        learning_rate = float(self.learning_rate(max(step - 1 - skipped, 0)))
        mfu = flops_utilization(self.task.flops, step_seconds, self.program.devices, self.peak_flops)
        self._write(
            "train",
            step,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            tokens_per_second=tokens_per_second,
            mfu=mfu,
            tokens=self.tokens,
            skipped=skipped,
            seconds=now - start_time,
            **task_values,
        )
        parts = [
            f"step {step:,}/{self.recipe.steps:,}",
            f"loss {loss:.4f}",
            *(f"{name} {task_values[name]:.4g}" for name in self.task.logged_metrics if name in task_values),
            f"lr {learning_rate:.2e}",
            f"grad norm {grad_norm:.3f}",
            f"{tokens_per_second:,.0f} tokens/s",
            *([f"MFU {mfu:.1%}"] if mfu is not None else []),
            *([f"{skipped} skipped"] if skipped else []),
            f"{duration((self.recipe.steps - step) * step_seconds)} left",
        ]
        self.log.progress(" · ".join(parts))

    def _untimed(self, work: Callable[..., None]) -> None:
        """Do work whose time does not count in tokens per second."""
        before = time.perf_counter()
        work()
        self._last_log_time += time.perf_counter() - before

    def _evaluate(self, step: int, state: TrainState) -> None:
        params = self.program.model_params(state.params if state.ema is None else state.ema)
        validation = self.batches.evaluate(params)
        self.validation, self.validation_step = validation, step
        self._write("validation", step, **validation.numbers)
        self.log.line(f"step {step:,}: validation {validation.text}")
        texts = sample_prompts(self.recipe, self.program, params, self.prompts, self.tokenizer)
        for prompt, text in zip(self.recipe.prompts, texts, strict=True):
            self._write("sample", step, prompt=prompt, text=text)
            self.log.line("    " + text.replace("\n", "\n    "))
        self.processes.barrier("samples")  # here, because a collective in the next step could time out

    def _save(self, step: int, state: TrainState, data_state: dict[str, Any]) -> None:
        metadata = {
            "recipe": to_dict(self.recipe),
            "data": {**data_state, **self.task.digests},
            "tokens": self.tokens,
            **({} if self.base is None else {"base": self.base}),
        }
        loss = self.validation.loss if self.validation is not None and self.validation_step == step else None
        self.checkpoints.save(step, state, metadata, self.recipe.model, self.tokenizer, validation_loss=loss)
        self._write("event", step, event="save")

    def _log_end(self, step: int) -> None:
        if self.stop.name is not None and step < self.recipe.steps:
            self.log.line(f"{self.stop.name}: stopped and saved at step {step}; continue with --resume")
            return
        text = f"done: step {step}" + ("" if self.validation is None else f", validation {self.validation.text}")
        stored = resolved(self.folder.location) / CHECKPOINTS
        with reading(stored, TrainingError):
            best = next(iter(by_loss(stored)), step)
        if best != step:
            text += f"; the best was step {best}, in {self.folder.location / CHECKPOINTS / str(best)}"
        self.log.line(text)

    def _write(self, line_type: str, step: int, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(line_type, step, **values)
        if self.tracking is not None:
            self.tracking.write(line_type, step, values)


class Profile:
    """Profiles a range of steps, counted from 1, into `trace` in a run's folder; nothing if the range is None."""

    def __init__(self, folder: Path, steps: range | None, log: Log) -> None:
        self._folder, self._steps, self._log = folder / "trace", steps, log
        self._running = False

    def before(self, step: int, state: TrainState) -> None:
        """Start or stop the profile at the ends of the range. Call it before each step, with the state at that point."""
        if self._steps and step in (self._steps.start, self._steps.stop):
            jax.block_until_ready(state)
            self.end()
            if step == self._steps.start:
                # Without Python frames: recording them can kill a thread that is just starting, and a save would then wait
                # forever for its thread.
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0
                jax.profiler.start_trace(str(self._folder), profiler_options=options)
                self._running = True

    def end(self) -> None:
        """Stop the profile, if it is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            self._log.line(f"profile in {self._folder}")

    def log_missed(self, done: int) -> None:
        """Log that there is no profile if the range began within the `done` steps before a resume."""
        if self._steps and done >= self._steps.start:
            self._log.line(f"no profile: step {self._steps.start} was taken before this start")


def sample_prompts(
    recipe: Recipe, program: TrainingProgram, model: LlamaParams, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> list[str]:
    """The prompts with their continuations, generated with the sharding of training, by all processes together.

    Args:
      model: the result of `TrainingProgram.model_params`.
      prompts: the prompts of the recipe as token ids.
    """
    if not prompts:
        return []
    # Rows are sharded over the devices: the last prompt is repeated until their number is a multiple of the shards.
    rows = [*prompts, *[prompts[-1]] * (-len(prompts) % program.eval_sharding.batch_shards)]
    max_new_tokens = min(recipe.sample_tokens, recipe.model.max_seq_len - max(map(len, prompts)))
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=recipe.seed % 2**32)
    results = generate(
        program.config,
        program.prepare_params(model),
        rows,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_tokens=tokenizer.stop_ids,
    )
    texts = []
    for ids, result in zip(prompts, results, strict=False):
        texts.append(tokenizer.decode([*ids, *result.tokens]))
    return texts
