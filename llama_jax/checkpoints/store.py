"""The orbax format: the parameters as they are in memory; nothing is renamed or reordered.

There are two layouts: a folder that `save` wrote, with ``config.json`` and ``params``; and a step of a training
run (`steps`), from which the moving average is read if the run keeps one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.checkpoints import stored_weights
from llama_jax.checkpoints.beside import About, read_about
from llama_jax.checkpoints.chunks import ArrayRows, ChunkedArray, read_index
from llama_jax.checkpoints.fill import ArrayMemory, ArrayParts, Part, StackParts
from llama_jax.checkpoints.huggingface_config import read_config, write_config
from llama_jax.checkpoints.orbax_errors import error_of_writing, is_passing, quiet, root_cause, wait_for_writers
from llama_jax.checkpoints.quantising import filling_of
from llama_jax.checkpoints.step_fetching import FetchedStep, fetch_step, of_model
from llama_jax.checkpoints.steps import ABOUT, EMA, NOTE, PARAMS, DamagedError, cannot_read, is_step, steps_in
from llama_jax.checkpoints.sums import verify
from llama_jax.checkpoints.tensors import kind_of, target_dtype
from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError
from llama_jax.files import read_object
from llama_jax.model.params import Llama, Row
from llama_jax.model.trees import build, is_weight, layers_together, param_shapes
from llama_jax.ops.weights import QuantizedWeight
from llama_jax.storage import Location, StoredPath
from llama_jax.tokenizers import Tokenizer, find_tokenizer
from llama_jax.writing import cannot_write

# One program for a shape and not one for each operation, nor a second array.
_all_finite = jax.jit(lambda array: jnp.isfinite(array).all())

Wanted = TypeVar("Wanted")  # a tree of what is wanted, and of the arrays that are given for it


@dataclass(frozen=True)
class StoredArray:
    """The facts about an array in orbax's metadata."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def kind(self) -> str:
        return kind_of(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OnHost:
    """Asks orbax for an array in the host's memory, by having no sharding."""

    shape: tuple[int, ...]
    dtype: jnp.dtype


@dataclass(frozen=True)
class Stored:
    """A checkpoint in the orbax format; its weights have not been read. See `Opened` for the other attributes.

    Attributes:
      arrays: the folder that orbax wrote, and by which name the parameters are in it.
      of_run: whether it is a step of a training run.
      found: all arrays that are stored, by name; several may be one of the tensors.
      kinds: of the weights that are quantised, see `stored_weights`.
      fetched: what `arrays` lie in, of a step in a store.
    """

    format: str
    path: Location
    config: LlamaConfig
    tensors: Mapping[str, StoredArray | stored_weights.StoredWeight]
    tokenizer: Callable[[], Tokenizer | None]
    arrays: tuple[Path, str]
    of_run: bool
    found: Mapping[str, StoredArray]
    kinds: stored_weights.Kinds
    fetched: FetchedStep | None = None
    about: Callable[[], About] = About


def recognises(folder: Location) -> bool:
    """Whether a folder holds a configuration and what orbax finished writing."""
    saved = (folder / "config.json").exists() and (folder / PARAMS / "_CHECKPOINT_METADATA").exists()
    return saved or is_step(folder)


def open_folder(folder: Path) -> Stored:
    """The model in a folder; its weights are not read.

    Raises:
      CheckpointError: a damaged file, or arrays that are not those of the configuration.
    """
    of_run = is_step(folder)
    if of_run:
        if adapters_of(folder) is not None:
            raise CheckpointError(
                f"{folder} holds adapters and not a model; give their base as the model, and this as its adapter (--adapter)"
            )
        about, arrays = folder / ABOUT, (folder, EMA if (folder / EMA).is_dir() else PARAMS)
    else:
        about, arrays = folder, (folder / PARAMS, "state")
    config = read_config(about)
    kinds, dtype = ({}, "float32") if of_run else stored_weights.read_kinds(folder)
    found = describe(*arrays)
    stored = Stored(
        format=f"orbax, step {folder.resolve().name} of a run" if of_run else "orbax",
        path=folder,
        config=config,
        tensors=found,
        tokenizer=partial(find_tokenizer, about, config.vocab_size),
        arrays=arrays,
        of_run=of_run,
        found=found,
        kinds=kinds,
        about=partial(read_about, about),
    )
    return replace(stored, tensors=_tensors(_shape(stored), found, np.dtype(dtype)))


def open_stored(place: StoredPath) -> Stored:
    """The model of a run in a store: a step, or the newest of a folder of them. Of its files those without numbers are
    fetched.

    Raises:
      CheckpointError: as `open_folder` does; no step, or a damaged one.
    """
    fetched = fetch_step(place, of_model, numbers=False)
    with fetched.named():
        try:
            stored = open_folder(fetched.folder)
        except DamagedError:  # orbax keeps what describes an array apart from its numbers where that is short
            fetched.complete()
            stored = open_folder(fetched.folder)
        return replace(stored, path=fetched.url, fetched=fetched)


def adapters_of(step: Path) -> dict[str, Any] | None:
    """The settings of the adapters that a step of a run holds; None where it holds a model."""
    note = step / ABOUT / NOTE
    recipe = read_object(note, CheckpointError).get("recipe") if note.is_file() else None
    settings = recipe.get("lora") if isinstance(recipe, dict) else None
    return settings if isinstance(settings, dict) else None


def _tensors(
    shapes: Llama, found: Mapping[str, StoredArray], dtype: np.dtype
) -> dict[str, StoredArray | stored_weights.StoredWeight]:
    """The stored arrays, with the planes of each quantised matrix as one."""
    tensors: dict[str, StoredArray | stored_weights.StoredWeight] = {}
    for path, leaf in jax.tree.leaves_with_path(shapes, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight)):
        name = name_of(path)
        if isinstance(leaf, QuantizedWeight):
            size = sum(found[name_of((*path, *rest))].nbytes for rest, _ in jax.tree.leaves_with_path(leaf))
            tensors[name] = stored_weights.StoredWeight(stored_weights.matrix_of(leaf), dtype, leaf.kind.upper(), size)
        else:
            tensors[name] = found[name]
    return tensors


def describe(folder: Path, name: str) -> dict[str, StoredArray]:
    """The arrays of what orbax wrote into a folder under a name, by the names that `read_arrays` gives them.

    Raises:
      CheckpointError: it cannot be read.
    """
    return {
        name_of(path): StoredArray(tuple(leaf.shape), np.dtype(leaf.dtype))
        for path, leaf in jax.tree.leaves_with_path(_metadata(folder, name))
        if hasattr(leaf, "shape")
    }


def read_arrays(folder: Path, name: str, wanted: Wanted) -> Wanted:
    """The arrays of what orbax wrote into a folder under a name, placed and cast.

    Args:
      wanted: a tree of `jax.ShapeDtypeStruct` with shardings, or of `OnHost`, for all that is stored (see `describe`).

    Raises:
      Exception: whatever orbax raises of damaged files.
    """
    from orbax.checkpoint import v1 as ocp

    leaves = {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(wanted)}
    request = jax.tree_util.tree_map_with_path(
        lambda path, stored: leaves[name_of(path)] if hasattr(stored, "shape") else stored, _metadata(folder, name)
    )
    found = ocp.load(folder.absolute(), request, checkpointable_name=name)
    arrays = {name_of(path): array for path, array in jax.tree.leaves_with_path(found)}
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[name_of(path)], wanted)


def name_of(path: tuple[Any, ...]) -> str:
    """The name of an array in a tree: blocks.attention.qkv."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _metadata(folder: Path, name: str) -> Any:
    from orbax.checkpoint import v1 as ocp

    where = folder if name == "state" else folder / name
    metadata = asking_orbax(where, lambda: ocp.metadata(folder.absolute(), checkpointable_name=name).metadata)
    if metadata is None:  # how orbax says that it could not read them
        raise unreadable(where, ValueError("its metadata cannot be read"))
    return metadata


def save(folder: Path, config: LlamaConfig, params: Llama, path: Path | None = None) -> None:
    """Write a model into a folder that exists; an error names `path`, what the folder will be called, if that is another.

    Raises:
      CheckpointError: `path` cannot be written.
    """
    from orbax.checkpoint import v1 as ocp

    write_config(folder, config)
    params = layers_together(params)
    stored_weights.write_kinds(folder, stored_weights.kinds_of(params, name_of), str(params.embedding.dtype))
    with quiet():
        try:
            ocp.save(folder.absolute() / PARAMS, stored_weights.to_arrays(params))
        except Exception as error:  # of a full disk orbax and what lies under it raise whatever comes up
            wait_for_writers()
            raise CheckpointError(cannot_write(path or folder, error_of_writing(error))) from None


def load_params(
    stored: Stored,
    dtype: jax.typing.DTypeLike | None,
    *,
    shardings: Llama | None = None,
) -> Llama:
    """The parameters, cast to `dtype` (None: as the embedding is stored) and placed; see `assemble`.

    Raises:
      CheckpointError: a file that is damaged, or an array that is not finite.
    """
    if stored.fetched is None:
        return _load_params(stored, dtype, shardings)
    with stored.fetched.named():
        if shardings is not None and _over_several(shardings):
            arrays = read_index(*stored.arrays, stored.fetched.url / stored.arrays[1])
            if arrays is not None and stored.found.keys() <= arrays.keys():
                return _load_shares(stored, arrays, dtype, shardings)
        stored.fetched.complete()
        return _load_params(stored, dtype, shardings)


def _over_several(shardings: Llama) -> bool:
    """Whether an array is sharded over devices of several processes, so that every process has to read some of it."""
    devices = [place.device_set for place in jax.tree.leaves(shardings)]
    return any(len({device.process_index for device in each}) > 1 for each in devices)


def _load_shares(
    stored: Stored, arrays: Mapping[str, ChunkedArray], dtype: jax.typing.DTypeLike | None, shardings: Llama
) -> Llama:
    """What `_load_params` gives, of which each process fetches what its devices hold: ranges of files, so that no checksum
    of a file says whether they are what was saved."""
    _check_same_step(stored)
    target = target_dtype(stored.path, dtype, stored.tensors["embedding"].dtype)

    def parts(row: Row) -> ArrayParts | StackParts:
        shape = row.shape(stored.config)
        rows = math.prod(shape[:-1])

        def of_layer(layer: int) -> ArrayParts:
            tensor = ArrayRows(arrays[row.path], layer * rows, shape if len(shape) == 1 else (rows, shape[-1]))
            return ArrayParts(shape, (Part(f"{stored.path}: array {row.path!r}", tensor),), row.is_matrix, stored=True)

        return StackParts(tuple(map(of_layer, range(stored.config.n_layers)))) if row.in_blocks else of_layer(0)

    memory = ArrayMemory()

    def read(array: ArrayParts | StackParts, place: Any) -> Any:
        filling = filling_of(array, target, None, place, memory)
        for layer in range(len(array.layers) if isinstance(array, StackParts) else 1):
            filling.fill(layer)
        return filling.done()

    return jax.tree.map(read, build(stored.config, parts), shardings)


def _check_same_step(stored: Stored) -> None:
    """Raise CheckpointError where processes would read different steps, as of a run that goes on saving."""
    from jax.experimental import multihost_utils

    step = int(stored.arrays[0].name)
    others = np.asarray(multihost_utils.process_allgather(np.int32(step))).reshape(-1).tolist()
    if len(set(others)) > 1:
        raise CheckpointError(
            f"{stored.path} is what this process would read, and not all others: the run goes on, and they found the steps"
            f" {', '.join(map(str, sorted(set(others))))}; give all of them one that stays"
        )


def _load_params(stored: Stored, dtype: jax.typing.DTypeLike | None, shardings: Llama | None) -> Llama:
    shape = _shape(stored)
    target = target_dtype(stored.path, dtype, stored.tensors["embedding"].dtype)
    folder, name = stored.arrays
    if stored.of_run:
        try:
            verify(folder, {ABOUT, name})
        except DamagedError as damage:
            raise DamagedError(f"{folder / name} is not a whole orbax checkpoint ({damage}); {_remedy(folder)}") from None
    asked = partial(stored_weights.placed, target=target, where=stored.path)
    places = shardings
    if places is None:
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        places = jax.tree.map(lambda _: default, param_shapes(stored.config))
    wanted = jax.tree.map(lambda array, place: asked(array, place=place), shape, places, is_leaf=is_weight)
    params = stored_weights.from_arrays(asking_orbax(folder / name, lambda: read_arrays(folder, name, wanted)))
    for path, array in jax.tree.leaves_with_path(params):
        if jnp.issubdtype(array.dtype, jnp.floating) and not _all_finite(array):
            name = name_of(path)
            raise CheckpointError(
                f"{stored.path}: array {name!r} holds NaN or infinity for {target}; the training went wrong, or {target} is"
                " too small"
                if stored.of_run
                else f"{stored.path}: array {name!r} holds NaN or infinity for {target}; the file is damaged"
            )
    return params


def _shape(stored: Stored) -> Llama:
    """The shapes of the configuration, of weights as they are stored.

    Raises:
      CheckpointError: the stored arrays have others.
    """
    config, found = stored.config, stored.found
    if config.n_layers > 1 << 16:
        raise CheckpointError(f"{stored.path}: its config.json has {config.n_layers} layers; copy it again")
    shape = param_shapes(config)
    if stored.kinds:
        shape = stored_weights.with_kinds(config, shape, stored.kinds, name_of, stored.path)
    needed = {name_of(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(shape)}
    for name in sorted(needed.keys() | found.keys()):
        held = list(found[name].shape) if name in found else None
        wanted = list(needed[name]) if name in needed else None
        if held != wanted:
            raise CheckpointError(
                f"{stored.path}: array {name!r} has shape {held}, the configuration needs {wanted}; are both of one model?"
            )
    for path, leaf in jax.tree.leaves_with_path(shape) if stored.kinds else ():
        name, inside = name_of(path), name_of(path).rpartition(".planes.")[0]
        if inside and found[name].dtype != leaf.dtype:
            raise CheckpointError(f"{stored.path}: array {name!r} is {found[name].dtype}, its kind needs {leaf.dtype}")
    return shape


def asking_orbax(path: Path, ask: Callable[[], Any]) -> Any:
    """Call `ask`; whatever orbax raises becomes a CheckpointError that names `path` and the cause as far as it is known."""
    try:
        with quiet():
            return ask()
    except CheckpointError:
        raise
    except Exception as error:  # of damaged files orbax and what lies under it raise whatever comes up
        raise unreadable(path, error) from None


def unreadable(path: Path, error: BaseException) -> CheckpointError:
    """Why a folder of arrays cannot be read: damaged only where that is proven, a DamagedError then.

    Args:
      path: a step, or a folder with arrays in one or elsewhere.
    """
    reason = root_cause(error)
    step = path if is_step(path) else path.parent
    if is_passing(error):
        return CheckpointError(cannot_read(path, reason))
    if not is_step(step):
        return CheckpointError(f"{path} is not a whole orbax checkpoint ({reason}); copy it again")
    try:
        known = verify(step)
    except DamagedError as damage:
        return DamagedError(f"{path} is not a whole orbax checkpoint ({damage}); {_remedy(step)}")
    except CheckpointError as problem:
        return problem
    proof = "although its files are what was saved" if known else "and has no checksums, by which damage would be known"
    return CheckpointError(f"{path} cannot be read ({reason}), {proof}; {_remedy(step)}")


def _remedy(step: Path) -> str:
    """What to do about a step that cannot be read: there are others beside it."""
    others = [str(other) for other in steps_in(step.parent) if str(other) != step.name]
    return f"try another step: {', '.join(others)}" if others else "copy it again"
