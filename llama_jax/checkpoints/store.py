"""The orbax format: a folder with ``config.json`` and the parameters as they lie in memory, in ``params``.

Nothing is renamed or reordered; arrays are written and read by shards and in parallel. It is the format to train from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.checkpoints import huggingface
from llama_jax.checkpoints.tensors import FLOATS, Described
from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError
from llama_jax.model.params import Llama, init, unstack
from llama_jax.tokenizers import Tokenizer, find_tokenizer

PARAMS = "params"


@dataclass(frozen=True)
class Array:
    """What orbax's metadata says of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def kind(self) -> str:
        return next((kind for kind, dtype in FLOATS.items() if dtype == self.dtype), str(self.dtype))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """A checkpoint in the orbax format; its weights have not been read. See `Opened` for the attributes."""

    format: str
    path: Path
    config: LlamaConfig
    tensors: Mapping[str, Described]
    tokenizer: Callable[[], Tokenizer | None]


def recognises(folder: Path) -> bool:
    """Whether a folder holds a configuration and what orbax finished writing."""
    return (folder / "config.json").exists() and (folder / PARAMS / "_CHECKPOINT_METADATA").exists()


def open_folder(folder: Path) -> Stored:
    """The model in a folder; its weights are not read.

    Raises:
      CheckpointError: a damaged file, or arrays that are not those of the configuration.
    """
    from orbax.checkpoint import v1 as ocp

    config = huggingface.read_config(folder)
    metadata = _asking_orbax(folder, lambda: ocp.metadata(folder.absolute() / PARAMS).metadata)
    if metadata is None:  # how orbax says that it could not read them
        raise CheckpointError(f"{folder / PARAMS} is not a whole orbax checkpoint; copy it again")
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): Array(tuple(leaf.shape), np.dtype(leaf.dtype))
        for path, leaf in jax.tree.leaves_with_path(metadata)
        if hasattr(leaf, "shape")
    }
    stored = Stored(
        format="orbax",
        path=folder,
        config=config,
        tensors=found,
        tokenizer=partial(find_tokenizer, folder, config.vocab_size),
    )
    _shape(stored)
    return stored


def save(folder: Path, config: LlamaConfig, params: Llama) -> None:
    """Write a model into a folder that exists."""
    from orbax.checkpoint import v1 as ocp

    huggingface.write_config(folder, config)
    try:
        ocp.save(folder.absolute() / PARAMS, unstack(params))
    except Exception as error:  # of a full disk orbax and what lies under it raise whatever comes up
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{folder / PARAMS} cannot be written ({reason})") from None


def load_params(
    stored: Stored,
    dtype: jax.typing.DTypeLike | None,
    *,
    shardings: Llama | None = None,
) -> Llama:
    """The parameters with a tuple of blocks, cast to `dtype` (None: as the embedding is stored) and placed; see `assemble`.

    Raises:
      CheckpointError: a file that is damaged, or an array that is not finite.
    """
    from orbax.checkpoint import v1 as ocp

    shape = _shape(stored)
    target = stored.tensors["embedding"].dtype if dtype is None else jnp.dtype(dtype)  # type: ignore[attr-defined]
    if jax.dtypes.canonicalize_dtype(target) != target:
        raise CheckpointError(f"{stored.path}: {target} needs jax_enable_x64; load with dtype='float32'")
    if shardings is None:
        shardings = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shape)
    else:
        shardings = shardings.replace(blocks=(shardings.blocks,) * stored.config.n_layers)
    wanted = jax.tree.map(lambda array, place: jax.ShapeDtypeStruct(array.shape, target, sharding=place), shape, shardings)
    params = _asking_orbax(stored.path, lambda: ocp.load(stored.path.absolute() / PARAMS, wanted))
    for path, array in jax.tree.leaves_with_path(params):
        if not bool(jnp.isfinite(array).all()):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise CheckpointError(f"{stored.path}: array {name!r} holds NaN or infinity for {target}; the file is damaged")
    return params


def _shape(stored: Stored) -> Llama:
    """The shapes of the configuration, with a tuple of blocks.

    Raises:
      CheckpointError: the stored arrays have others.
    """
    config, found = stored.config, stored.tensors
    if config.n_layers > 1 << 16:
        raise CheckpointError(f"{stored.path}: its config.json has {config.n_layers} layers; copy it again")
    shape = jax.eval_shape(lambda key: init(config, key), jax.random.key(0))
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), shape.blocks)
    shape = shape.replace(blocks=(one,) * config.n_layers)
    needed = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in jax.tree.leaves_with_path(shape)
    }
    for name in sorted(needed.keys() | found.keys()):
        held = list(found[name].shape) if name in found else None
        wanted = list(needed[name]) if name in needed else None
        if held != wanted:
            raise CheckpointError(
                f"{stored.path}: array {name!r} has shape {held}, the configuration needs {wanted}; are both of one model?"
            )
    return shape


def _asking_orbax(path: Path, ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:  # of damaged files orbax and what lies under it raise whatever comes up
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(f"{path} is not a whole orbax checkpoint ({reason}); copy it again") from None
