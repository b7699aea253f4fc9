"""The checkpoints of a run while it trains: saved in the background, the last and best kept, restored bit for bit.

orbax writes a step; its checksums are written when it is complete, and removed first when it is deleted. Without them it is
not a step (`llama_jax.formats.step_dirs`), so whenever the process dies, earlier steps can be restored.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, ConfigError, StuckSaveError, UserError
from llama_jax.formats.huggingface import write_config_json
from llama_jax.formats.orbax_format import (
    array_name,
    describe_arrays,
    read_arrays,
    wait_for_writers,
    with_short_errors,
    without_tracebacks,
    write_error,
)
from llama_jax.formats.step_dirs import (
    ABOUT,
    EMA,
    METADATA_FILE,
    PARAMS,
    REST,
    DamagedError,
    by_loss,
    check_checksums,
    existing_step,
    is_step,
    read_metadata,
    remove_step,
    steps_in,
    write_checksums,
)
from llama_jax.runs.run_folder import Mirror
from llama_jax.storage import Location
from llama_jax.storage.atomic_write import remedy_for
from llama_jax.tokenizers import Tokenizer
from llama_jax.training.step import TrainState

TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"  # of a folder that orbax is writing
SAVE_TIMEOUT = 1800.0  # seconds


class CheckpointManager:
    """The checkpoints of one run, for the process that trains it: two must not write into one folder at the same time.

    With several processes, each makes one for the same folder, on a disk that they share, and calls the same methods; the
    first of them writes what is not an array.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        timeout: float = SAVE_TIMEOUT,
        check: Callable[[], None] = lambda: None,
        mirror: Mirror | None = None,
    ) -> None:
        """Open a folder, which need not exist, and clean up after a killed process.

        Args:
          keep_last: number of newest steps to keep, at least 1.
          keep_best: number of additional steps to keep, those with the lowest validation loss.
          timeout: maximum seconds of a save.
          check: raises TrainingError if another run has the folder now.
          mirror: uploads complete steps.

        Raises:
          ConfigError: an invalid time.
        """
        if not 0 < timeout <= 1e7:
            raise ConfigError(f"save_timeout={timeout:g} must be above 0 and at most 1e7 seconds")
        self.folder = folder.absolute()
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._timeout = timeout
        self._check = check
        self._mirror = mirror
        self._pending: _Save | None = None
        if _is_first() and self.folder.exists():
            self._clear_up()
        _wait_for_all("opened")
        self._latest = self.latest()  # as last known

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()

    def save(
        self,
        step: int,
        state: TrainState,
        metadata: Mapping[str, Any],
        config: LlamaConfig,
        tokenizer: Tokenizer | None,
        *,
        validation_loss: float | None = None,
    ) -> None:
        """Start writing the checkpoint of a new step, after waiting for a save in progress.

        Returns once the state may be donated and `metadata` changed.

        Args:
          metadata: JSON values; "step", "validation_loss" and "versions" are added to it.
          validation_loss: ranks the best steps; a non-finite loss counts as none.

        Raises:
          CheckpointError: this save or the previous one failed; the message names the last good checkpoint. The next call
            can succeed.
          StuckSaveError: a device or a disk does not respond within the timeout.
          TrainingError: another run has taken the folder over; nothing was written.
        """
        self._check()
        if validation_loss is not None and not math.isfinite(validation_loss):
            validation_loss = None
        versions = {name: version(name) for name in ("llama_jax", "jax", "orbax-checkpoint")}
        added = {"step": step, "validation_loss": validation_loss, "versions": versions}
        text = json.dumps({**metadata, **added}, indent=2) + "\n"
        self.wait()
        write_metadata = partial(_write_metadata, self.folder / str(step) / ABOUT, text, config, tokenizer)
        self._pending = _Save(step, partial(self._write, step, state, write_metadata), self._upload, self._timeout)
        self._pending.start()
        self._wait_for(self._pending.copied)
        if self._pending.ended.is_set():
            self.wait()

    def wait(self) -> None:
        """Wait until a started save is complete.

        Raises:
          CheckpointError: it failed; see `save`. A StuckSaveError if it exceeded the timeout, or its thread has died.
          TrainingError: another run has taken the folder over.
        """
        if self._pending is not None:
            self._wait_for(self._pending.ended)
            error, self._pending = self._pending.error, None
            if error is not None:
                raise error

    def check(self) -> None:
        """Raise the error of `wait` once a save is known to have failed or to take too long; never waits."""
        self._check()
        pending = self._pending
        if pending is not None and (pending.ended.is_set() or time.monotonic() >= pending.deadline):
            self.wait()

    def steps(self) -> list[int]:
        """The steps that can be restored, ascending, without one that is being saved."""
        return steps_in(self.folder)

    def latest(self) -> int | None:
        """The newest step, or None if there is none."""
        return max(self.steps(), default=None)

    def restore(self, shapes: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """The saved state, bit for bit, and its metadata.

        Args:
          shapes: arrays or `jax.ShapeDtypeStruct`s of the requested state; each array is placed by its `sharding`, which may
            be over other devices than it was saved from. Without a sharding it is put on the default device.
          step: the step; None is the newest.

        Raises:
          CheckpointError: no such step, other array names, shapes or dtypes, or damage; the message then names an intact
            older step.
        """
        self.wait()
        _wait_for_all("restoring")  # the first process has completed saved steps
        step = existing_step(self.folder, step)
        try:
            return self._restore(shapes, step)
        except DamagedError as error:
            intact = (other for other in reversed(self.steps()) if other < step and _is_intact(self.folder / str(other)))
            older = next(intact, None)
            here = self.folder / str(step)
            remedy = f"the last good checkpoint is step {older}: remove {here} to resume from there"
            remedy = "no older step is intact" if older is None else remedy
            raise CheckpointError(f"step {step} is damaged: {error}; {remedy}") from None

    def _restore(self, shapes: TrainState, step: int) -> tuple[TrainState, dict[str, Any]]:
        folder = self.folder / str(step)
        targets = {name: jax.tree.map(_shape_struct, part) for name, part in _split_state(shapes).items()}
        self._verify(folder)
        metadata = read_metadata(folder.parent, int(folder.name))
        stored = {name: describe_arrays(folder, name) for name in (PARAMS, EMA, REST) if (folder / name).is_dir()}
        stored_arrays = {f"{part}.{name}": (a.shape, str(a.dtype)) for part in stored for name, a in stored[part].items()}
        target_arrays = {
            f"{part}.{array_name(path)}": (leaf.shape, str(leaf.dtype))
            for part in targets
            for path, leaf in jax.tree.leaves_with_path(targets[part])
        }
        for name in sorted(stored_arrays.keys() | target_arrays.keys()):
            if stored_arrays.get(name) != target_arrays.get(name):
                raise CheckpointError(
                    f"{folder}: array {name!r} is {_array_words(stored_arrays.get(name))} in the checkpoint and"
                    f" {_array_words(target_arrays.get(name))} in this run; resume with the settings it was trained with"
                )
        loaded = {
            name: with_short_errors(folder / name, partial(read_arrays, folder, name, part))
            for name, part in targets.items()
        }
        return loaded[REST].replace(params=loaded[PARAMS], ema=loaded.get(EMA)), metadata

    def _verify(self, folder: Path) -> None:
        """Verify the files, a share in each process; all processes raise if one finds damage."""
        problem: CheckpointError | None = None
        try:
            check_checksums(folder, share=(jax.process_index(), jax.process_count()))
        except CheckpointError as error:
            problem = error
        worst = 0 if problem is None else 2 if isinstance(problem, DamagedError) else 1
        if jax.process_count() > 1:
            worst = int(multihost_utils.process_allgather(np.int32(worst)).max())
        if worst == 2 and not isinstance(problem, DamagedError):
            raise DamagedError(f"a file in {folder} is not what was saved, according to another process")
        if problem is not None or worst:
            raise problem or CheckpointError(f"{folder} cannot be read by another process")

    @without_tracebacks()  # until the writers of a failed save have ended
    def _write(self, step: int, state: TrainState, write_metadata: Callable[[], None], copied: threading.Event) -> None:
        """In the thread: write a step, then delete those that are not kept."""
        folder = self.folder / str(step)
        try:
            with _orbax_settings():
                saving = ocp.save_checkpointables_async(folder, _split_state(state))
                copied.set()
                saving.result()
            if _is_first():
                self._check()
                write_metadata()
                write_checksums(folder)
            self._latest = step
        except UserError:  # the files may belong to another run now
            raise
        except Exception as error:  # orbax and its dependencies raise any type for a full disk
            raise self._failure(step, error) from None
        if not _is_first():
            return
        try:
            for old in set(self.steps()) - {step, *self._choose_steps(self.folder)}:
                remove_step(self.folder / str(old))
        except OSError as error:
            raise CheckpointError(f"step {step} is saved, but an older checkpoint cannot be removed ({error})") from None

    def _choose_steps(self, folder: Location) -> set[int]:
        """The steps to keep of those in a folder."""
        return {*steps_in(folder)[-self._keep_last :], *by_loss(folder)[: self._keep_best]}

    def _upload(self) -> None:
        if self._mirror is not None:
            self._mirror.upload(self._choose_steps)

    def finish_mirror(self) -> None:
        """At the end of the run: upload the rest; raises TrainingError if that fails."""
        if self._mirror is not None:
            self._mirror.finish(self._choose_steps)

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        """Clean up after a failed save; return the error, which names the last good checkpoint."""
        left = ""
        wait_for_writers()
        self._check()
        if _is_first():
            try:
                self._clear_up()
            except OSError as problem:
                left = f"; its files cannot be removed ({problem})"
        cause = write_error(error)
        why = f"({cause.strerror or cause}){remedy_for(cause)}{left}"
        return CheckpointError(f"{self.folder}: step {step} could not be saved {why}; {self._last_good()}")

    def _wait_for(self, event: threading.Event) -> None:
        """Wait for an event of the pending save, or raise a StuckSaveError; its files stay, since its thread may write."""
        pending = self._pending
        assert pending is not None
        while not event.wait(min(1.0, max(0.0, pending.deadline - time.monotonic()))):
            why = ""
            if not pending.is_alive() and not event.is_set():
                why = "the thread that writes it has died"
            elif time.monotonic() >= pending.deadline:
                why = (
                    f"it has not been written within {self._timeout:g} s: a device or a disk does not respond; if writing"
                    " takes that long, raise the limit with --save-timeout (save_timeout=)"
                )
            if why:
                self._pending = None
                raise StuckSaveError(f"{self.folder}: step {pending.step} is not saved: {why}; {self._last_good()}")

    def _last_good(self) -> str:
        """The last good checkpoint as last known: a disk that does not respond could not list them."""
        return (
            "there is no good checkpoint yet" if self._latest is None else f"the last good checkpoint is step {self._latest}"
        )

    def _clear_up(self) -> None:
        """Remove whatever is left of steps that are not complete."""
        for path in sorted(self.folder.iterdir()):
            if path.name.endswith(TEMPORARY_SUFFIX) or (path.name.isdecimal() and not is_step(path)):
                shutil.rmtree(path)


class _Save(threading.Thread):
    """A save in the background. It may hang on a disk or network that does not respond, so the process does not wait for it
    when it ends.

    Attributes:
      copied: set when the state may be donated, or the save has failed.
      ended: set when it ends, with or without an `error`; never set if the thread dies before it runs.
      deadline: when it has taken too long, by the monotonic clock; requests of an upload have their own limits.
    """

    def __init__(
        self, step: int, write: Callable[[threading.Event], None], upload: Callable[[], None], timeout: float
    ) -> None:
        super().__init__(name=f"saving step {step}", daemon=True)
        self.step = step
        self.copied, self.ended = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.deadline = time.monotonic() + timeout
        self._write = write
        self._upload = upload

    def run(self) -> None:
        try:
            self._write(self.copied)
            self.deadline = math.inf
            self._upload()
        except BaseException as error:  # raised by `wait`
            self.error = error
        finally:
            self.ended.set()
            self.copied.set()


def _write_metadata(folder: Path, metadata: str, config: LlamaConfig, tokenizer: Tokenizer | None) -> None:
    """Write the files of a step other than arrays."""
    folder.mkdir()
    write_config_json(folder, config, scaled_context=True)
    (folder / METADATA_FILE).write_text(metadata, encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)


def _split_state(state: TrainState) -> dict[str, Any]:
    """The parts of a state that orbax writes, by folder name; `rest` has None in place of the others."""
    average = {} if state.ema is None else {EMA: state.ema}
    return {PARAMS: state.params, **average, REST: state.replace(params=None, ema=None)}


def _orbax_settings() -> ocp.Context:
    """The settings with which orbax writes."""
    context = ocp.Context()
    # Trained float32 values shrink by 7%, and compressing them takes the CPU from training for a second or more.
    context.array_options.saving.use_compression = False
    # After an error the writers would wait for the folders until they time out.
    context.async_options.create_directories_asynchronously = False
    # A process writes its copies of an array to one disk; splitting them would compile a program per shape.
    context.array_options.saving.use_replica_parallel = jax.process_count() > 1
    return context


def _shape_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _array_words(array: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if array is None else f"{array[1]}{list(array[0])}"


def _is_first() -> bool:
    return jax.process_index() == 0


def _wait_for_all(what: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"snapshots {what}")


def _is_intact(step: Path) -> bool:
    try:
        check_checksums(step)
    except CheckpointError:
        return False
    return True
