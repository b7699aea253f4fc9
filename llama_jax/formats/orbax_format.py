"""Models in orbax format, written by `save_orbax` or training runs; orbax's errors in one line, without tracebacks."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, reason_of, short_repr
from llama_jax.formats.huggingface import read_config_json, write_config_json
from llama_jax.formats.lazy_tensors import FLOAT_DTYPES, OrbaxWeightInfo, Unquantized, target_dtype
from llama_jax.formats.model_folder import read_model_metadata
from llama_jax.formats.quantize_on_load import can_be_kept, check_block_columns
from llama_jax.formats.step_dirs import (
    ABOUT,
    EMA,
    METADATA_FILE,
    PARAMS,
    DamagedError,
    cannot_read,
    check_checksums,
    existing_step,
    fetch_model,
    find_checkpoints,
    is_step,
    steps_in,
)
from llama_jax.formats.weight_format import OpenedCheckpoint, WeightFormat
from llama_jax.model.params import LlamaParams, spec_at
from llama_jax.model.trees import convert_layers, is_weight, param_shapes, restack_layers
from llama_jax.ops.weights.device_layout import to_device_layout
from llama_jax.ops.weights.format_spec import FP8, INT4, QuantField, pack_int4
from llama_jax.ops.weights.formats import QUANT_FORMATS
from llama_jax.ops.weights.layers import MixedStack
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight, shardings_of_planes
from llama_jax.storage import Location, StoredPath
from llama_jax.storage.atomic_write import DISK_FULL_ERRNOS, cannot_write
from llama_jax.storage.paths import read_object
from llama_jax.tokenizers import find_tokenizer

# Errors of memory, disks and networks: stale mounts, permissions, too many open files.
TRANSIENT_NAMES = (
    *("ENOMEM", "EIO", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EHOSTDOWN"),
    *("EACCES", "EPERM", "EMFILE", "ENFILE", "EREMOTEIO"),
)
WRITE_ERRNOS = (*DISK_FULL_ERRNOS, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
TRANSIENT_ERRNOS = tuple(getattr(errno, name) for name in TRANSIENT_NAMES if hasattr(errno, name))


@contextmanager
def without_tracebacks() -> Iterator[None]:
    """Suppress the tracebacks that orbax's threads log for errors that are also raised, and those of messages that
    TensorStore sends to an event loop that the first error has closed.

    TensorStore may send them later, so that part stays in place after an error. Contexts may overlap in several threads.
    """

    def is_of_others(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname or record.levelno >= logging.CRITICAL

    log, before = logging.getLogger("absl"), sys.unraisablehook
    hook = before if isinstance(before, _WithoutClosedLoops) else _WithoutClosedLoops(before)
    log.addFilter(is_of_others)
    sys.unraisablehook = hook
    try:
        yield
        if sys.unraisablehook is hook:
            sys.unraisablehook = before
    finally:
        log.removeFilter(is_of_others)


class _WithoutClosedLoops:
    """`sys.unraisablehook`, without the leftovers of a closed event loop: messages to it, and orbax's coroutines, which
    raise an error when they are collected."""

    def __init__(self, before: Callable[[Any], object]) -> None:
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        of_orbax = code is not None and f"{os.sep}orbax{os.sep}" in code.co_filename
        if str(unraisable.exc_value) != "Event loop is closed" and not of_orbax:
            self._before(unraisable)


def root_cause(error: BaseException, most: int = 300) -> str:
    """The message of the innermost error, which names the file."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return reason_of(error, most)


def write_error(error: BaseException) -> OSError:
    """The cause of a failed write, with its errno for a full disk or missing permissions.

    TensorStore's errors have only a message, which ends, after long paths, in the system's message.
    """
    message = root_cause(error, most=10_000)
    number = next((number for number in WRITE_ERRNOS if os.strerror(number) in message), None)
    return OSError(root_cause(error)) if number is None else OSError(number, os.strerror(number))


def is_transient(error: BaseException) -> bool:
    """Whether an error concerns the machine, a disk or a network rather than the contents of the files."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None:
        chain.append(current)
        current = current.__cause__ or current.__context__
    if any(isinstance(cause, MemoryError) or getattr(cause, "errno", None) in TRANSIENT_ERRNOS for cause in chain):
        return True
    message = " ".join(map(str, chain))
    return any(
        text in message
        for text in (*map(os.strerror, TRANSIENT_ERRNOS), "RESOURCE_EXHAUSTED", "out of memory", "Out of memory")
    )


def wait_for_writers() -> None:
    """Wait for the threads of a failed save: orbax raises the first error while they are still writing other arrays."""
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            threading.Thread.join(thread, 60)  # orbax's `join` would raise their errors


FORMATS_FILE = "quantized.json"
# For each weight's name, its quantization format, or None for floats; for a joined weight, a list with one per part; for
# layers that differ, {"layers": [one per layer]}.
StoredFormats = Mapping[str, Any]


def stored_format_of(leaf: Any) -> Any:
    """A weight's entry in `StoredFormats`."""
    if isinstance(leaf, JoinedWeight):
        return [stored_format_of(part) for part in leaf.parts]
    if isinstance(leaf, MixedStack):
        formats = [stored_format_of(stack) for stack in leaf.stacks]
        return {"layers": [formats[stack] for stack, _ in leaf.locations]}
    return getattr(leaf, "quant_format", None)


def read_stored_formats(folder: Path) -> tuple[StoredFormats, str]:
    """The kinds and the compute dtype; no kinds if the file does not exist."""
    if not (folder / FORMATS_FILE).exists():
        return {}, "float32"
    content = read_object(folder / FORMATS_FILE, CheckpointError)
    formats, dtype = content.get("kinds"), content.get("dtype")
    if not isinstance(formats, dict) or dtype not in {str(floating) for floating in FLOAT_DTYPES.values()}:
        raise CheckpointError(f"{folder / FORMATS_FILE} has no kinds or no dtype ({short_repr(dtype, 40)}); copy it again")
    return formats, dtype


def with_stored_planes(shapes: LlamaParams, formats: StoredFormats, where: Location) -> LlamaParams:
    """The shapes of a model's parameters, with the shapes of the stored planes for each quantized weight."""
    unused = set(formats)

    def change(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
        name, spec = array_name(path), spec_at(path)
        stored_format = formats.get(name)
        if stored_format is None:
            return leaf
        unused.discard(name)
        layers = leaf.shape[0] if spec.in_blocks else 1
        is_joined = isinstance(stored_format, list)
        parts = stored_format if is_joined else [stored_format]
        try:
            layer_formats = [part["layers"] if isinstance(part, dict) else [part] * layers for part in parts]
            is_valid = (
                spec.is_quantizable
                and (not is_joined or (len(parts), spec.axes) == (3, "K G+2 H D"))
                and all(len(part) == layers for part in layer_formats)
                and not any(leaf.shape[-1] % QUANT_FORMATS[used].block for used in set().union(*layer_formats) - {None})
            )
        except (TypeError, KeyError):  # an unknown format, or no format
            is_valid = False
        if not is_valid:
            raise CheckpointError(
                f"{where / FORMATS_FILE} has {name} in {short_repr(stored_format, 40)}, which is invalid; copy it again"
            )
        return convert_layers(leaf, list(zip(*layer_formats, strict=True)), quantized_shape)

    def quantized_shape(leaf: jax.ShapeDtypeStruct, quant_format: str | None) -> Any:
        if quant_format is None:
            return leaf
        form, shape = QUANT_FORMATS[quant_format], leaf.shape
        planes = (plane.packed_shape(shape) for plane in form.planes)
        stored = (jax.ShapeDtypeStruct(size, np.dtype(np.uint8) if dtype == FP8 else dtype) for size, dtype in planes)
        return QuantizedWeight(tuple(stored), quant_format, "float32")

    stored_shapes = jax.tree_util.tree_map_with_path(change, shapes)
    if unused:
        raise CheckpointError(
            f"{where / FORMATS_FILE} names {short_repr(min(unused), 60)}, which this model lacks; copy it again"
        )
    return stored_shapes


def placement_request(shape: Any, target: np.dtype, sharding: Any, where: Location) -> Any:
    """The request to orbax to place a parameter at `sharding`: floats cast, planes unchanged."""
    if isinstance(shape, JoinedWeight | MixedStack):
        is_inner = lambda leaf: leaf is not shape and is_weight(leaf)
        return jax.tree.map(lambda part: placement_request(part, target, sharding, where), shape, is_leaf=is_inner)
    if not isinstance(shape, QuantizedWeight):
        return jax.ShapeDtypeStruct(shape.shape, target, sharding=sharding)
    form, matrix = shape.form, matrix_of(shape)
    check_block_columns(where, matrix, form, sharding)
    plane_shardings = shardings_of_planes(form, sharding, len(matrix))
    planes = [
        jax.ShapeDtypeStruct(plane.shape, plane.dtype, sharding=plane_sharding)
        for plane, plane_sharding in zip(shape.planes, plane_shardings, strict=True)
    ]
    return QuantizedWeight(tuple(planes), shape.quant_format, str(target))


def matrix_of(stored: QuantizedWeight) -> tuple[int, ...]:
    """The shape of the matrix that planes are stored for."""
    first, array = stored.form.planes[0], stored.planes[0]
    if first.grouped:
        return (*array.shape[:-2], array.shape[-2] * first.numbers)
    return (*array.shape[:-1], array.shape[-1] * first.numbers // first.entries)


def to_arrays(params: LlamaParams) -> LlamaParams:
    """The parameters with planes as they are stored."""

    def stored(array: Any, plane: QuantField) -> Any:
        if plane.dtype == FP8:
            return lax.bitcast_convert_type(array, jnp.uint8)
        return jax.jit(pack_int4)(array) if array.dtype == INT4 else array

    return _change_planes(params, stored)


def from_arrays(params: LlamaParams) -> LlamaParams:
    """The inverse of `to_arrays`."""

    def restored(array: jax.Array, plane: QuantField) -> jax.Array:
        if plane.dtype == FP8:
            return to_device_layout(plane, lax.bitcast_convert_type(array, FP8))
        device_array = to_device_layout(plane, array)
        if device_array is not array:
            array.delete()
        return device_array

    return _change_planes(params, restored)


def _change_planes(params: LlamaParams, change: Callable[[Any, QuantField], Any]) -> LlamaParams:
    is_quantized = lambda leaf: isinstance(leaf, QuantizedWeight)

    def changed(leaf: Any) -> Any:
        if not is_quantized(leaf):
            return leaf
        return leaf.replace(planes=tuple(map(change, leaf.planes, leaf.form.planes)))

    return jax.tree.map(changed, params, is_leaf=is_quantized)


# One program per shape instead of one per operation, and no second array.
_all_finite = jax.jit(lambda array: jnp.isfinite(array).all())

Requests = TypeVar("Requests")  # a tree of requests, and of the arrays returned for it


@dataclass(frozen=True)
class OrbaxArrayInfo(Unquantized):
    """An array in orbax's metadata; as a request to orbax without a sharding, an array in host memory."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True, kw_only=True)
class OrbaxCheckpoint(OpenedCheckpoint):
    """A checkpoint in the orbax format, whose tensors are parameters: they have no other names.

    Attributes:
      arrays: the folder that orbax wrote, and the name of the parameters in it.
      of_run: whether it is a step of a training run.
      array_infos: all stored arrays by name; several may belong to one of the tensors.
      quant_formats: formats of the quantized weights, see `StoredFormats`.
    """

    arrays: tuple[Path, str]
    of_run: bool
    array_infos: Mapping[str, OrbaxArrayInfo]
    quant_formats: StoredFormats


def is_orbax(path: Location) -> bool:
    """Whether a folder is a step of a run, or holds a configuration and a finished orbax checkpoint."""
    if not path.is_dir():
        return False
    return is_step(path) or ((path / "config.json").exists() and (path / PARAMS / "_CHECKPOINT_METADATA").exists())


def open_orbax(path: Location) -> OrbaxCheckpoint:
    """The model in a folder that `save_orbax` wrote, in a step of a run, or in a run's newest step; no weights are read."""
    is_model = is_step(path) if isinstance(path, StoredPath) else is_orbax(path)
    location = path if is_model else find_checkpoints(path)
    if location is None:
        raise CheckpointError(
            f"{path} is an orbax checkpoint outside of a run, which is read only from a local path: copy it"
            " here, or store it as safetensors (llama-jax convert)"
        )
    if isinstance(location, StoredPath):
        step, folder = fetch_model(location)
        return replace(open_orbax_folder(folder), path=step)
    return open_orbax_folder(location if is_model else location / str(existing_step(location, None)))


def open_orbax_folder(folder: Path) -> OrbaxCheckpoint:
    """The model in a folder; its weights are not read."""
    of_run = is_step(folder)
    if of_run:
        if adapters_of(folder) is not None:
            refuse_adapter(folder)
        about_folder, arrays = folder / ABOUT, (folder, EMA if (folder / EMA).is_dir() else PARAMS)
    else:
        about_folder, arrays = folder, (folder / PARAMS, "state")
    config = read_config_json(about_folder, scaled_context=True)
    stored_formats, dtype = ({}, "float32") if of_run else read_stored_formats(folder)
    infos = describe_arrays(*arrays)
    stored = OrbaxCheckpoint(
        format=f"orbax, step {folder.resolve().name} of a run" if of_run else "orbax",
        path=folder,
        config=config,
        tensors=infos,
        names={},
        interleaved=False,
        tokenizer=partial(find_tokenizer, about_folder, config.vocab_size),
        arrays=arrays,
        of_run=of_run,
        array_infos=infos,
        quant_formats=stored_formats,
        metadata=partial(read_model_metadata, about_folder),
    )
    return replace(stored, tensors=_list_tensors(_stored_shapes(stored), infos, np.dtype(dtype)))


def refuse_adapter(folder: Location) -> NoReturn:
    """Raise the error for an adapter in place of a model."""
    raise CheckpointError(
        f"{folder} holds an adapter, not a model; pass its base as the model and this as --adapter, or merge them first"
        " (llama-jax merge BASE ADAPTER OUT)"
    )


def adapters_of(step: Path) -> dict[str, Any] | None:
    """The settings of the adapters in a step of a run; None if it holds a model."""
    metadata = step / ABOUT / METADATA_FILE
    recipe = read_object(metadata, CheckpointError).get("recipe") if metadata.is_file() else None
    settings = recipe.get("lora") if isinstance(recipe, dict) else None
    return settings if isinstance(settings, dict) else None


def _list_tensors(
    shapes: LlamaParams, infos: Mapping[str, OrbaxArrayInfo], dtype: np.dtype
) -> dict[str, OrbaxArrayInfo | OrbaxWeightInfo]:
    """The stored arrays, with the planes of each quantized matrix as one entry."""
    tensors: dict[str, OrbaxArrayInfo | OrbaxWeightInfo] = {}
    for path, leaf in jax.tree.leaves_with_path(shapes, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight)):
        name = array_name(path)
        if isinstance(leaf, QuantizedWeight):
            size = sum(infos[array_name((*path, *rest))].nbytes for rest, _ in jax.tree.leaves_with_path(leaf))
            tensors[name] = OrbaxWeightInfo(matrix_of(leaf), dtype, leaf.quant_format.upper(), size)
        else:
            tensors[name] = infos[name]
    return tensors


def describe_arrays(folder: Path, name: str) -> dict[str, OrbaxArrayInfo]:
    """The arrays that orbax wrote into a folder under a name, keyed as in `read_arrays`."""
    return {
        array_name(path): OrbaxArrayInfo(tuple(leaf.shape), np.dtype(leaf.dtype))
        for path, leaf in jax.tree.leaves_with_path(_metadata(folder, name))
        if hasattr(leaf, "shape")
    }


def read_arrays(folder: Path, name: str, requests: Requests) -> Requests:
    """The arrays that orbax wrote into a folder under a name, placed and cast.

    Args:
      requests: a tree of `jax.ShapeDtypeStruct` with shardings, or of `OrbaxArrayInfo`, for all arrays of `describe_arrays`.

    Raises:
      Exception: any error that orbax raises for damaged files.
    """
    from orbax.checkpoint import v1 as ocp

    leaves = {array_name(path): leaf for path, leaf in jax.tree.leaves_with_path(requests)}
    request = jax.tree_util.tree_map_with_path(
        lambda path, stored: leaves[array_name(path)] if hasattr(stored, "shape") else stored, _metadata(folder, name)
    )
    loaded = ocp.load(folder.absolute(), request, checkpointable_name=name)
    arrays = {array_name(path): array for path, array in jax.tree.leaves_with_path(loaded)}
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[array_name(path)], requests)


def array_name(path: tuple[Any, ...]) -> str:
    """The name of an array in a tree: blocks.attention.qkv."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _metadata(folder: Path, name: str) -> Any:
    from orbax.checkpoint import v1 as ocp

    where = folder if name == "state" else folder / name
    metadata = with_short_errors(where, lambda: ocp.metadata(folder.absolute(), checkpointable_name=name).metadata)
    if metadata is None:  # orbax could not read it
        raise unreadable(where, ValueError("its metadata cannot be read"))
    return metadata


def save_orbax(folder: Path, config: LlamaConfig, params: LlamaParams, path: Path | None = None) -> None:
    """Write a model into an existing folder; errors name `path`, the folder's final name, if it differs.

    Raises:
      CheckpointError: `path` cannot be written.
    """
    from orbax.checkpoint import v1 as ocp

    write_config_json(folder, config, scaled_context=True)
    params = restack_layers(params)
    weights = jax.tree.leaves_with_path(params, is_leaf=is_weight)
    if formats := {array_name(path): stored_format_of(leaf) for path, leaf in weights if is_weight(leaf)}:
        content = {"dtype": str(params.embedding.dtype), "kinds": formats}
        (folder / FORMATS_FILE).write_text(json.dumps(content, indent=1) + "\n")
    with without_tracebacks():
        try:
            ocp.save(folder.absolute() / PARAMS, to_arrays(params))
        except Exception as error:  # orbax and its dependencies raise any type for a full disk
            wait_for_writers()
            raise CheckpointError(cannot_write(path or folder, write_error(error))) from None


def load_orbax_params(
    stored: OrbaxCheckpoint,
    dtype: jax.typing.DTypeLike | None,
    *,
    shardings: LlamaParams | None = None,
) -> LlamaParams:
    """The parameters, cast to `dtype` (None: the stored embedding's) and placed; see `build_params`."""
    placements = shardings
    if placements is None:
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        placements = jax.tree.map(lambda _: default, param_shapes(stored.config))
    _check_same_step(stored, placements)
    shape = _stored_shapes(stored)
    target = target_dtype(stored.path, dtype, stored.tensors["embedding"].dtype)
    folder, name = stored.arrays
    if stored.of_run:
        try:
            check_checksums(folder, {ABOUT, name})
        except DamagedError as damage:
            raise DamagedError(f"{folder / name} is not a whole orbax checkpoint ({damage}); {_remedy(folder)}") from None
    request = partial(placement_request, target=target, where=stored.path)
    requests = jax.tree.map(lambda array, sharding: request(array, sharding=sharding), shape, placements, is_leaf=is_weight)
    params = from_arrays(with_short_errors(folder / name, lambda: read_arrays(folder, name, requests)))
    for path, array in jax.tree.leaves_with_path(params):
        if jnp.issubdtype(array.dtype, jnp.floating) and not _all_finite(array):
            name = array_name(path)
            cause = f"the training diverged, or {target} has too small a range" if stored.of_run else "the file is damaged"
            raise CheckpointError(f"{stored.path}: array {name!r} holds NaN or infinity in {target}; {cause}")
    return params


def _check_same_step(stored: OrbaxCheckpoint, shardings: LlamaParams) -> None:
    """Raise CheckpointError if processes that share arrays would read different steps, as of a run that is still saving."""
    from jax.experimental import multihost_utils

    owners = [{device.process_index for device in sharding.device_set} for sharding in jax.tree.leaves(shardings)]
    if not stored.of_run or all(len(processes) == 1 for processes in owners):
        return
    step = int(stored.arrays[0].name)
    steps = np.asarray(multihost_utils.process_allgather(np.int32(step))).reshape(-1).tolist()
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"{stored.path} is the step that this process found, but others found the steps"
            f" {', '.join(map(str, sorted(set(steps))))}, because the run is still saving; pass one step to all of them"
        )


def _stored_shapes(stored: OrbaxCheckpoint) -> LlamaParams:
    """The shapes of the configuration's parameters, with quantized weights as stored."""
    config, infos = stored.config, stored.array_infos
    shape = param_shapes(config)
    if stored.quant_formats:
        shape = with_stored_planes(shape, stored.quant_formats, stored.path)
    needed = {array_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(shape)}
    for name in sorted(needed.keys() | infos.keys()):
        stored_shape = list(infos[name].shape) if name in infos else None
        needed_shape = list(needed[name]) if name in needed else None
        if stored_shape != needed_shape:
            raise CheckpointError(
                f"{stored.path}: array {name!r} has shape {stored_shape}; the configuration needs {needed_shape}; are both"
                " of one model?"
            )
    for path, leaf in jax.tree.leaves_with_path(shape) if stored.quant_formats else ():
        name, inside = array_name(path), array_name(path).rpartition(".planes.")[0]
        if inside and infos[name].dtype != leaf.dtype:
            raise CheckpointError(f"{stored.path}: array {name!r} is {infos[name].dtype}, but its format needs {leaf.dtype}")
    return shape


def with_short_errors(path: Path, ask: Callable[[], Any]) -> Any:
    """Call `ask`; errors of orbax become a one-line CheckpointError with `path` and the cause."""
    try:
        with without_tracebacks():
            return ask()
    except CheckpointError:
        raise
    except Exception as error:  # orbax and its dependencies raise any type for damaged files
        raise unreadable(path, error) from None


def unreadable(path: Path, error: BaseException) -> CheckpointError:
    """The error for a folder of arrays that cannot be read; a DamagedError only if damage is proven.

    Args:
      path: a step, or a folder with arrays, in a step or elsewhere.
    """
    reason = root_cause(error)
    step = path if is_step(path) else path.parent
    if is_transient(error):
        return CheckpointError(cannot_read(path, reason))
    if not is_step(step):
        return CheckpointError(f"{path} is not a whole orbax checkpoint ({reason}); copy it again")
    try:
        check_checksums(step)
    except DamagedError as damage:
        return DamagedError(f"{path} is not a whole orbax checkpoint ({damage}); {_remedy(step)}")
    except CheckpointError as problem:
        return problem
    return CheckpointError(f"{path} cannot be read ({reason}), although its files are as they were saved; {_remedy(step)}")


def _remedy(step: Path) -> str:
    """The remedy for an unreadable step: another step."""
    other_steps = [str(other) for other in steps_in(step.parent) if str(other) != step.name]
    return f"try another step: {', '.join(other_steps)}" if other_steps else "copy it again"


ORBAX_FORMAT = WeightFormat("orbax", is_orbax, open_orbax, write_params=save_orbax, can_keep=can_be_kept, names_parts=True)
