"""Reading adapters from a folder of PEFT's, a GGUF, or a run that trains them; and writing them for PEFT and llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llama_jax.checkpoints import gguf_adapter, peft, store
from llama_jax.checkpoints.appearing import appearing
from llama_jax.checkpoints.huggingface_config import read_config
from llama_jax.checkpoints.newest import taking_the_newest
from llama_jax.checkpoints.step_fetching import fetch_step, of_model
from llama_jax.checkpoints.steps import ABOUT, EMA, NOTE, PARAMS, existing_step, find_checkpoints, is_step
from llama_jax.checkpoints.sums import verify
from llama_jax.checkpoints.tensors import target_dtype
from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, ConfigError, reading
from llama_jax.files import read_object
from llama_jax.model.adapter_table import side_by_side, tabled
from llama_jax.model.adapters import Lora, adapted, adapter_shapes, settled
from llama_jax.model.params import Llama
from llama_jax.parallel.fit import fit
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.storage import Location, StoredPath, locate


class Adapter(NamedTuple):
    """An adapter as it was read.

    Attributes:
      lora: its settings.
      params: the adapters.
      base: the model that it names as its base, a path or a name on a hub; None if it names none.
    """

    lora: Lora
    params: Llama
    base: str | None


@taking_the_newest
def load_adapter(path: str | os.PathLike[str], config: LlamaConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> Adapter:
    """Read an adapter for a base of this configuration.

    Args:
      path: a folder of PEFT's, with ``adapter_config.json`` and ``adapter_model.safetensors``; a GGUF of llama.cpp's; or a
        folder of a training run with adapters, whose newest step is read, or one of its steps. If the run keeps a moving
        average, that is read.
      config: of the base.
      dtype: of the adapter, float32 as in PEFT, whatever the base has.

    Raises:
      CheckpointError: no such folder, a damaged file, an unsupported kind of adapter or setting, or a tensor that is
        missing, unexpected or of the wrong shape; the message names it.
    """
    folder = locate(path)
    with reading(folder, CheckpointError):
        with _step_in(folder, of_model) as step:
            if step is not None:
                return _of_run(step, config, dtype)
        if gguf_adapter.recognises(folder):
            return Adapter(*gguf_adapter.read(folder, config, dtype))
    return Adapter(*peft.read_folder(folder, config, dtype))


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether a path holds an adapter and no model."""
    folder = locate(path)
    with reading(folder, CheckpointError):
        with _step_in(folder) as step:
            if step is not None:
                return store.adapters_of(step) is not None
        return (folder / peft.CONFIG).is_file() or gguf_adapter.recognises(folder)


def base_of(path: str | os.PathLike[str]) -> str | None:
    """The model that an adapter names as its base; None if it names none.

    Raises:
      CheckpointError: a damaged file.
    """
    folder = locate(path)
    with reading(folder, CheckpointError), _step_in(folder) as step:
        if step is not None:
            found = read_object(step / ABOUT / NOTE, CheckpointError).get("base", {}).get("path")
        elif folder.is_file():
            found = gguf_adapter.base_in(folder)
        else:
            found = read_object(folder / peft.CONFIG, CheckpointError).get("base_model_name_or_path")
    return found if isinstance(found, str) and found else None


@taking_the_newest
def base_config(path: str | os.PathLike[str]) -> LlamaConfig | None:
    """The configuration of an adapter's base, which training runs keep; None for other adapters.

    Raises:
      CheckpointError: a damaged file.
    """
    with reading(path, CheckpointError), _step_in(locate(path)) as step:
        return None if step is None else read_config(step / ABOUT)


def with_attend(config: LlamaConfig, adapters: Sequence[str | os.PathLike[str]]) -> LlamaConfig:
    """The configuration of a base under adapters: with the attention of their own that runs trained them with.

    Raises:
      CheckpointError: a damaged file, or adapters that were trained with different ones.
    """
    names = {path: trained.attend for path in adapters if (trained := base_config(path)) is not None}
    different = sorted({str(name) for name in names.values()})
    if len(different) > 1:
        raise CheckpointError(f"adapters trained with different attentions ({', '.join(different)}); pass one of them")
    return replace(config, attend=next(iter(names.values()))) if names else config


@contextmanager
def _step_in(
    folder: Location, choose: Callable[[Collection[str]], Collection[str]] = lambda _: {ABOUT}
) -> Iterator[Path | None]:
    """A step of a training run, or the newest step in its folder; from a store only the chosen parts are fetched."""
    found = folder if folder.is_dir() and is_step(folder) else find_checkpoints(folder) if folder.is_dir() else None
    if isinstance(found, StoredPath):
        fetched = fetch_step(found, choose)
        with fetched.named():
            yield fetched.folder
    else:
        yield found if found is None or is_step(found) else found / str(existing_step(found, None))


def save_adapter(
    path: str | os.PathLike[str],
    config: LlamaConfig,
    adapters: Llama,
    lora: Lora,
    *,
    base: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write adapters for PEFT or llama.cpp: all of it appears under `path` at once, or nothing does.

    Args:
      path: a folder for PEFT, or a file whose name ends in ``.gguf`` for llama.cpp.
      config: of the base, as its file has it.
      adapters: also as a mesh holds them.
      base: the name of the base to write down, a path or a name on a hub.
      overwrite: replace a folder that holds an adapter, or a model, and nothing else.

    Raises:
      CheckpointError: something is at `path`, numbers that are not finite, or magnitudes, which llama.cpp does not support;
        a base with an attention of its own, which no such file names.
    """
    if config.attend is not None:
        raise CheckpointError(f"attend={config.attend!r} has no place in an adapter's files; load the run as the adapter")
    if config.kind == "phi3":
        raise CheckpointError("adapters of a phi3, whose projections other libraries hold in one matrix, cannot be written")
    if Path(path).suffix.lower() == ".gguf":
        with appearing(locate(path), folder=False, overwrite=overwrite) as file:
            gguf_adapter.write(file, config, adapters, lora, base)
        return
    with appearing(locate(path), folder=True, overwrite=overwrite) as folder:
        peft.write_folder(folder, config, adapters, lora, base)


def attached(config: LlamaConfig, params: Llama, adapter: Adapter, mesh: MeshSizes | None) -> Llama:
    """The parameters that `load` read, with an adapter beside them.

    Args:
      config: of the base, as its file has it.
      mesh: over which the parameters lie, fitted.
    """
    return settled(adapted(params, _placed(config, adapter.params, adapter.lora, mesh), adapter.lora))


def attached_table(config: LlamaConfig, params: Llama, adapters: Sequence[Adapter], mesh: MeshSizes | None) -> Llama:
    """The same with several adapters, one of which each row of a batch may use, see `model.adapter_table`."""
    given = [(adapter.params, adapter.lora) for adapter in adapters]
    table = side_by_side(config, given, params.embedding.dtype)
    return tabled(params, table._replace(params=_placed(config, table.params, table.lora, mesh)))


def _placed(config: LlamaConfig, pairs: Llama, lora: Lora, mesh: MeshSizes | None) -> Llama:
    """Adapters placed like the matrices that they change."""
    if mesh is None:
        return pairs
    from llama_jax.parallel.specs import adapter_specs, shardings  # imports what training needs too

    specs = adapter_specs(config, mesh, lora, fitted=True)
    return jax.device_put(fit(config, mesh, pairs), shardings(make_mesh(mesh), specs))


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
    return Adapter(lora, jax.tree.map(jnp.asarray, found), note.get("base", {}).get("path"))
