"""One door for adapters: a folder of PEFT's, or a run that trains them; and the way out, into a folder of PEFT's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llama_jax.checkpoints import peft, store
from llama_jax.checkpoints.appearing import appearing
from llama_jax.checkpoints.newest import taking_the_newest
from llama_jax.checkpoints.steps import ABOUT, EMA, NOTE, PARAMS, existing_step, find_checkpoints, is_step
from llama_jax.checkpoints.sums import verify
from llama_jax.checkpoints.tensors import target_dtype
from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, ConfigError, reading
from llama_jax.files import read_object
from llama_jax.model.adapters import Lora, adapted, adapter_shapes
from llama_jax.model.params import Llama
from llama_jax.model.trees import unstack
from llama_jax.parallel.fit import fit
from llama_jax.parallel.mesh import MeshSizes, make_mesh


class Adapter(NamedTuple):
    """What a folder held.

    Attributes:
      lora: its settings.
      params: the adapters, for a tuple of blocks.
      base: what it says of the model that it was trained on, a path or a name on a hub; None where it says nothing.
    """

    lora: Lora
    params: Llama
    base: str | None


@taking_the_newest
def load_adapter(path: str | os.PathLike[str], config: LlamaConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> Adapter:
    """Read an adapter for a base of this configuration.

    Args:
      path: a folder of PEFT's, with ``adapter_config.json`` and ``adapter_model.safetensors``; or one of a training run with
        adapters, of which the newest step is taken, or one of its steps. Of a run that keeps a moving average, that is it.
      config: of the base.
      dtype: of the adapter, float32 as in PEFT, whatever the base has.

    Raises:
      CheckpointError: no such folder, a damaged file, a kind of adapter or a setting that is not supported, a tensor that is
        missing, left over or misshapen; the message names it.
    """
    folder = Path(path)
    with reading(folder, CheckpointError):
        if is_step(folder):
            return _of_run(folder, config, dtype)
        checkpoints = find_checkpoints(folder)
        if checkpoints is not None:
            return _of_run(checkpoints / str(existing_step(checkpoints, None)), config, dtype)
    return Adapter(*peft.read_folder(folder, config, dtype))


def save_adapter(
    path: str | os.PathLike[str],
    config: LlamaConfig,
    adapters: Llama,
    lora: Lora,
    *,
    base: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write adapters into a folder that PEFT reads: all of it appears under `path` at once, or nothing does.

    Args:
      config: of the base, as its file has it.
      adapters: stacked or not, also as a mesh holds them.
      base: what the folder is to say of the base, a path or a name on a hub.
      overwrite: replace a folder that holds an adapter, or a model, and nothing else.

    Raises:
      CheckpointError: something is at `path`, or numbers that are not finite.
    """
    with appearing(Path(path), folder=True, overwrite=overwrite) as folder:
        peft.write_folder(folder, config, adapters, lora, base)


def attached(config: LlamaConfig, params: Llama, adapter: Adapter, mesh: MeshSizes | None) -> Llama:
    """The parameters that `load` read, with an adapter beside them.

    Args:
      config: of the base, as its file has it.
      mesh: over which the parameters lie, fitted.
    """
    pairs = adapter.params
    if mesh is not None:
        from llama_jax.parallel.specs import adapter_specs, shardings  # imports what training needs too

        specs = adapter_specs(config, mesh, adapter.lora, stacked=False, fitted=True)
        pairs = jax.device_put(fit(config, mesh, pairs), shardings(make_mesh(mesh), specs))
    return adapted(params, pairs, adapter.lora)


def _of_run(step: Path, config: LlamaConfig, dtype: jax.typing.DTypeLike) -> Adapter:
    settings = store.adapters_of(step)
    if settings is None:
        raise CheckpointError(f"{step} holds a whole model and no adapter; give it as the model")
    try:
        lora = Lora(**settings | {"targets": tuple(settings["targets"])})
        shapes = adapter_shapes(config, lora)
    except (ConfigError, TypeError, KeyError) as error:
        raise CheckpointError(f"{step / ABOUT / NOTE}: {error}") from None
    name = EMA if (step / EMA).is_dir() else PARAMS
    needed = {store.name_of(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(shapes)}
    held = {array: one.shape for array, one in store.describe(step, name).items()}
    for array in sorted(needed.keys() | held.keys()):
        if needed.get(array) != held.get(array):
            raise CheckpointError(
                f"{step}: array {array!r} has shape {held.get(array)}, this base needs {needed.get(array)}; is this the"
                " adapter's base?"
            )
    verify(step, {ABOUT, name})
    target = target_dtype(step, dtype, jnp.dtype(jnp.float32))
    wanted = jax.tree.map(lambda leaf: store.OnHost(leaf.shape, target), shapes)
    found: Any = store.asking_orbax(step / name, lambda: store.read_arrays(step, name, wanted))
    note = read_object(step / ABOUT / NOTE, CheckpointError)
    return Adapter(lora, unstack(jax.tree.map(jnp.asarray, found)), note.get("base", {}).get("path"))
