"""LoRA adapters: read from a PEFT folder, a llama.cpp GGUF or a training run; written for PEFT and llama.cpp.

PEFT has ``adapter_config.json`` and ``adapter_model.safetensors``. llama.cpp has one GGUF (convert_lora_to_gguf.py and
src/llama-adapter.cpp): A and B of ``blk.0.attn_q.weight`` are ``blk.0.attn_q.weight.lora_a`` and ``.lora_b``, the update
is scaled by alpha / R, and there are no magnitudes. In both, the rows of B for q and k have the base's rotary layout.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.config.families import architecture_of
from llama_jax.errors import CheckpointError, ConfigError, reading, short_repr
from llama_jax.formats import gguf
from llama_jax.formats.device_fill import check_finite
from llama_jax.formats.huggingface import HF_NAMES, is_interleaved, read_config_json, read_safetensors, safetensors_header
from llama_jax.formats.lazy_tensors import Tensor, find_tensor, storage_type_of, target_dtype
from llama_jax.formats.model_folder import config_errors, new_output
from llama_jax.formats.orbax_format import (
    OrbaxArrayInfo,
    adapters_of,
    array_name,
    describe_arrays,
    read_arrays,
    with_short_errors,
)
from llama_jax.formats.step_dirs import (
    ABOUT,
    EMA,
    METADATA_FILE,
    PARAMS,
    check_checksums,
    existing_step,
    fetch_model,
    find_checkpoints,
    is_step,
    retry_with_newest_step,
)
from llama_jax.formats.weight_format import TensorPart, parts_of, parts_with_columns
from llama_jax.model.lora import TARGETS, Lora, adapter_shapes, apply_adapters, build_adapters, precompute_dora_scale
from llama_jax.model.multi_lora import attach_adapter_table, stack_adapters
from llama_jax.model.params import PARAM_SPECS, LlamaParams, ParamSpec, shape_of
from llama_jax.ops.rotary import half_from_interleaved, interleaved_from_half
from llama_jax.ops.weights.lora import LowRank
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.padding import pad_params, unpad_params
from llama_jax.storage import Location, StoredPath, locate
from llama_jax.storage.paths import read_object
from llama_jax.tokenizers.gguf_header import is_gguf

_log = logging.getLogger("llama_jax.formats")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # before the name of a module in a tensor's name
# Settings that do not affect what the adapter computes: of training, or details of other settings, which are refused if they
# are active. PEFT itself ignores `fan_in_fan_out` for the matrices of a Llama.
IGNORED_SETTINGS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
        *("lora_dropout", "fan_in_fan_out", "runtime_config", "megatron_config", "megatron_core", "qalora_group_size"),
        *("eva_config", "corda_config", "lora_ga_config", "loftq_config", "ensure_weight_tying"),
        "layers_pattern",  # the name of the list of layers, of which a Llama has one
    }
)
READ_SETTINGS = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "init_lora_weights"),
        *("target_modules", "exclude_modules", "layers_to_transform"),
    }
)
# These leave the base unchanged; others, such as PiSSA, change it before training begins.
PLAIN_LORA = "convert the adapter to a plain LoRA with PEFT"
INITIALIZATIONS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
# For each target, the base tensor that it changes.
BASE_TENSORS: dict[str, tuple[ParamSpec, TensorPart]] = {
    name: (spec, part)
    for spec in PARAM_SPECS
    for part in parts_of(spec)
    for name in TARGETS
    if spec.path == TARGETS[name].path and HF_NAMES[part.name].endswith(f".{name}.weight")
}


# GGUF metadata keys.
GENERAL_TYPE, ADAPTER_TYPE, ALPHA_KEY, BASE_NAME_KEY = (
    "general.type",
    "adapter.type",
    "adapter.lora.alpha",
    "general.base_model.0.name",
)


class Adapter(NamedTuple):
    """A LoRA adapter.

    Attributes:
      lora: the settings.
      params: the adapter's weights.
      base: the base model that it names, a path or a name on a hub; None if it names none.
    """

    lora: Lora
    params: LlamaParams
    base: str | None


class AdapterLayout(NamedTuple):
    """How a file stores the tensors of an adapter.

    Attributes:
      names: maps a target and a layer to the names of A, B and the magnitude; None if the layer has no adapter there.
      interleaved: whether files of a base with this configuration have the interleaved rotary layout.
    """

    names: Callable[[str, int], tuple[str, str, str] | None]
    interleaved: Callable[[LlamaConfig], bool]


def _peft_names(target: str, layer: int) -> tuple[str, str, str]:
    stem = f"{PEFT_PREFIX}{_module(target, layer)}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight", f"{stem}.lora_magnitude_vector"


def _gguf_names(target: str, layer: int) -> tuple[str, str, str]:
    name = gguf.GGUF_NAMES[BASE_TENSORS[target][1].name].format(layer)
    return f"{name}.lora_a", f"{name}.lora_b", ""


def _module(target: str, layer: int) -> str:
    return HF_NAMES[BASE_TENSORS[target][1].name].format(layer).removesuffix(".weight")


PEFT = AdapterLayout(_peft_names, is_interleaved)
LLAMA_CPP = AdapterLayout(_gguf_names, lambda config: architecture_of(config).interleaved)


@retry_with_newest_step
def load_adapter(path: str | os.PathLike[str], config: LlamaConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> Adapter:
    """Read an adapter for a base of this configuration.

    Args:
      path: a PEFT folder, with ``adapter_config.json`` and ``adapter_model.safetensors``; a llama.cpp GGUF; or a training
        run with adapters (its newest step), or one of its steps. If the run keeps a moving average, that is read.
      config: the base's configuration.
      dtype: type of the adapter, float32 as in PEFT, whatever the base has.

    Raises:
      CheckpointError: no such folder, a damaged file, an unsupported kind of adapter or setting, or a tensor that is
        missing, unexpected or of the wrong shape; the message names it.
    """
    folder = locate(path)
    with reading(folder, CheckpointError):
        opened = open_adapter(folder)
        if opened is not None:
            return opened.read(config, dtype)
        if not folder.exists():
            problem = "does not exist; pass a folder written by PEFT or train"
        elif step_at(folder) is not None:
            problem = "holds a whole model, not an adapter; pass it as the model"
        else:
            problem = f"holds no adapter: it has no {ADAPTER_CONFIG}; pass a folder written by PEFT or train"
        raise CheckpointError(f"{folder} {problem}")


class OpenedAdapter(NamedTuple):
    """An adapter that was recognized; its tensors have not been read.

    Attributes:
      base: see `Adapter`.
      base_config: configuration of the base, which training runs store; None for other adapters.
      read: reads the adapter for a base configuration, in a dtype; for errors see `load_adapter`.
    """

    base: str | None
    base_config: LlamaConfig | None
    read: Callable[[LlamaConfig, jax.typing.DTypeLike], Adapter]


@retry_with_newest_step
def open_adapter(path: str | os.PathLike[str]) -> OpenedAdapter | None:
    """Recognize an adapter by its content; None if the path holds none."""
    folder = locate(path)
    with reading(folder, CheckpointError):
        step = step_at(folder)
        if isinstance(step, StoredPath):
            return _open_step(fetch_model(step)[1])
        if step is not None:
            return _open_step(step)
        if (folder / ADAPTER_CONFIG).is_file():
            return _open_peft(folder)
        return _open_gguf(folder) if folder.is_file() and is_gguf(folder) else None


def step_at(folder: Location) -> Location | None:
    """A step of a training run, or the newest in its folder; in an object store, the folder of steps. None otherwise."""
    if not folder.is_dir():
        return None
    location = folder if is_step(folder) else find_checkpoints(folder)
    if location is None or is_step(location) or isinstance(location, StoredPath):
        return location
    return location / str(existing_step(location, None))


def with_adapter_parts(config: LlamaConfig, adapters: Sequence[str | os.PathLike[str]]) -> LlamaConfig:
    """The base's configuration for these adapters: with the custom parts that runs trained them with."""
    opened = filter(None, map(open_adapter, adapters))
    parts = {adapter.base_config.parts for adapter in opened if adapter.base_config is not None}
    if len(parts) > 1:
        different = ", ".join(sorted(map(str, parts)))
        raise CheckpointError(f"adapters trained with different custom parts ({different}); pass one of them")
    return replace(config, parts=parts.pop()) if parts else config


def save_adapter(
    path: str | os.PathLike[str],
    config: LlamaConfig,
    adapters: LlamaParams,
    lora: Lora,
    *,
    base: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write adapters for PEFT or llama.cpp: all of it appears under `path` at once, or nothing does.

    Args:
      path: a folder for PEFT, or a file whose name ends in ``.gguf`` for llama.cpp.
      config: configuration of the base, as in its file.
      adapters: may be sharded over a mesh.
      base: the base's name to store, a path or a name on a hub.
      overwrite: replace a folder that holds only an adapter or a model.

    Raises:
      CheckpointError: something is at `path`; non-finite values; magnitudes, which llama.cpp does not support; or a base
        with custom parts, which such files cannot name.
    """
    if config.parts:
        raise CheckpointError(f"{config.parts} cannot be stored in adapter files; load the run as the adapter")
    if config.model_type == "phi3":
        raise CheckpointError("adapters of phi3, which other libraries train on fused projections, cannot be written")
    to_gguf = Path(path).suffix.lower() == ".gguf"
    with new_output(locate(path), folder=not to_gguf, overwrite=overwrite) as target:
        (_write_gguf if to_gguf else _write_peft)(target, config, adapters, lora, base)


def attach_loaded_adapter(config: LlamaConfig, params: LlamaParams, adapter: Adapter, mesh: MeshSizes | None) -> LlamaParams:
    """The parameters with an adapter attached.

    Args:
      config: configuration of the base, as in its file.
      mesh: the mesh over which the padded parameters are sharded.
    """
    return precompute_dora_scale(
        apply_adapters(params, _shard_adapters(config, adapter.params, adapter.lora, mesh), adapter.lora)
    )


def attach_loaded_adapters(
    config: LlamaConfig, params: LlamaParams, adapters: Sequence[Adapter], mesh: MeshSizes | None
) -> LlamaParams:
    """The parameters with several adapters, one for each row of a batch, see `model.multi_lora`."""
    pairs = [(adapter.params, adapter.lora) for adapter in adapters]
    table = stack_adapters(config, pairs, params.embedding.dtype)
    return attach_adapter_table(params, table._replace(params=_shard_adapters(config, table.params, table.lora, mesh)))


def _shard_adapters(config: LlamaConfig, pairs: LlamaParams, lora: Lora, mesh: MeshSizes | None) -> LlamaParams:
    """Adapters sharded like the matrices that they change."""
    if mesh is None:
        return pairs
    from llama_jax.parallel.sharding import adapter_specs, shardings  # imports what training needs too

    specs = adapter_specs(config, mesh, lora, padded=True)
    return jax.device_put(pad_params(config, mesh, pairs), shardings(make_mesh(mesh), specs))


def _open_step(step: Path) -> OpenedAdapter | None:
    """The adapter in a step of a training run; None if it holds a whole model."""
    settings = adapters_of(step)
    if settings is None:
        return None
    base = _base_name(read_object(step / ABOUT / METADATA_FILE, CheckpointError).get("base", {}).get("path"))
    return OpenedAdapter(
        base, read_config_json(step / ABOUT, scaled_context=True), partial(_read_step, step, settings, base)
    )


def _read_step(
    step: Path, settings: Mapping[str, Any], base: str | None, config: LlamaConfig, dtype: jax.typing.DTypeLike
) -> Adapter:
    try:
        lora = Lora(**{**settings, "targets": tuple(settings["targets"])})
        shapes = adapter_shapes(config, lora)
    except (ConfigError, TypeError, KeyError) as error:
        raise CheckpointError(f"{step / ABOUT / METADATA_FILE}: {error}") from None
    name = EMA if (step / EMA).is_dir() else PARAMS
    needed = {array_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(shapes)}
    stored = {array: info.shape for array, info in describe_arrays(step, name).items()}
    for array in sorted(needed.keys() | stored.keys()):
        if needed.get(array) != stored.get(array):
            raise CheckpointError(
                f"{step}: array {array!r} has shape {stored.get(array)}, this base needs {needed.get(array)}; is this the"
                " adapter's base?"
            )
    check_checksums(step, {ABOUT, name})
    _warn_of_another_base(step, read_config_json(step / ABOUT, scaled_context=True), config)
    target = target_dtype(step, dtype, jnp.dtype(jnp.float32))
    requests = jax.tree.map(lambda leaf: OrbaxArrayInfo(leaf.shape, target), shapes)
    loaded: Any = with_short_errors(step / name, lambda: read_arrays(step, name, requests))
    return Adapter(lora, jax.tree.map(jnp.asarray, loaded), base)


def _warn_of_another_base(step: Path, before: LlamaConfig, config: LlamaConfig) -> None:
    """Warn of settings in which a base differs from that of a run, among those that affect what it computes."""
    for field in fields(LlamaConfig):
        old, new = getattr(before, field.name), getattr(config, field.name)
        same = math.isclose(old, new, rel_tol=1e-6) if isinstance(old, float) and isinstance(new, float) else old == new
        no_effect = ("parts", "max_seq_len", "unscaled_max_seq_len", "vocab_size", "tie_embeddings")
        if not same and field.name not in no_effect:
            _log.warning(
                "%s: its base had %s=%s, this one has %s", step, field.name, short_repr(old, 60), short_repr(new, 60)
            )


def _base_name(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _open_peft(folder: Location) -> OpenedAdapter:
    settings = read_object(folder / ADAPTER_CONFIG, CheckpointError)
    base = _base_name(settings.get("base_model_name_or_path"))

    def read(config: LlamaConfig, dtype: jax.typing.DTypeLike) -> Adapter:
        weights = folder / ADAPTER_WEIGHTS
        if not weights.is_file():
            raise CheckpointError(f"{folder} has no {ADAPTER_WEIGHTS}; save the adapter as safetensors in PEFT")
        tensors = read_safetensors(weights)
        lora, modules = _lora_of(folder, settings, tensors, config.n_layers)
        names = lambda target, layer: _peft_names(target, layer) if _module(target, layer) in modules else None
        return Adapter(
            lora, read_adapter_tensors(weights, config, lora, tensors, dtype, PEFT._replace(names=names), base), base
        )

    return OpenedAdapter(base, None, read)


def _write_peft(folder: Path, config: LlamaConfig, adapters: LlamaParams, lora: Lora, base: str | None) -> None:
    tensors = tensors_of_adapter(config, adapters, lora, PEFT)
    stems = {name.partition(".lora_")[0] for name in tensors}
    adapted_stems = {name.partition(".lora_")[0] for name, array in tensors.items() if array.any()} or stems
    # Modules without an adapter are excluded: PEFT would multiply by a magnitude of 0.
    tensors = {name: array for name, array in tensors.items() if name.partition(".lora_")[0] in adapted_stems}
    excluded = sorted(stem.removeprefix(PEFT_PREFIX) for stem in stems - adapted_stems)
    settings = {
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": excluded or None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": list(lora.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    with (folder / ADAPTER_WEIGHTS).open("wb") as file:
        file.write(
            safetensors_header(
                {name: (storage_type_of(array.dtype), array.shape, array.nbytes) for name, array in tensors.items()}
            )
        )
        for name, array in tensors.items():
            file.write(_array_bytes(name, array).data)


def _lora_of(
    folder: Location, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], n_layers: int
) -> tuple[Lora, frozenset[str]]:
    """The settings, and the names of the modules that have an adapter."""
    where, peft_type, start = folder / ADAPTER_CONFIG, settings.get("peft_type"), settings.get("init_lora_weights")
    if peft_type != "LORA":
        raise CheckpointError(
            f"{where}: peft_type={short_repr(peft_type)} is not supported; only LORA adapters are supported"
        )
    if start not in INITIALIZATIONS:
        raise CheckpointError(f"{where}: init_lora_weights={short_repr(start)} may have changed the base; {PLAIN_LORA}")
    for name, value in settings.items():
        if name not in IGNORED_SETTINGS | READ_SETTINGS and value and value != "none":
            raise CheckpointError(
                f"{where}: {short_repr(name, 40)}={short_repr(value)} is not supported; train an adapter without it"
            )
    stored = {key.removeprefix(PEFT_PREFIX).partition(".lora_")[0] for key in tensors}
    modules = _selected_modules(where, settings, stored, n_layers)
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    rslora, dora = bool(settings.get("use_rslora")), bool(settings.get("use_dora"))
    names = tuple(name for name, of_layers in modules.items() if of_layers)
    with config_errors(where):
        lora = Lora(rank=rank, alpha=alpha, targets=names, rslora=rslora, dora=dora)  # type: ignore[arg-type]  # checked there
    return lora, frozenset().union(*modules.values())


def _selected_modules(
    where: Location, settings: Mapping[str, Any], stored: Set[str], n_layers: int
) -> dict[str, frozenset[str]]:
    """For each target, the modules that have an adapter by the rules of PEFT, `check_target_module_exists`.

    Args:
      stored: the modules that have tensors.

    Raises:
      CheckpointError: invalid settings, a target without a tensor, or tensors of a module that is not selected.
    """
    for name in ("target_modules", "exclude_modules"):
        _check_pattern(where, name, settings.get(name))
    by_target = {name: {_module(name, layer): layer for layer in range(n_layers)} for name in TARGETS}
    targets, excluded = settings.get("target_modules"), settings.get("exclude_modules") or []
    if targets in (None, "all-linear"):  # all that PEFT found in the base
        targets = [name for name, modules in by_target.items() if stored & modules.keys()]
    layers = settings.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    if not (layers is None or (isinstance(layers, list) and all(isinstance(layer, int) for layer in layers))):
        raise CheckpointError(f"{where}: layers_to_transform={short_repr(layers, 80)} must be a layer or a list of layers")
    if not layers or isinstance(targets, str):  # PEFT ignores layers beside a regular expression
        layers = range(n_layers)

    def is_selected(module: str, layer: int) -> bool:
        is_in_layers = layer in layers or module in targets  # PEFT ignores layers beside a whole name
        return _matches(targets, module) and is_in_layers and not _matches(excluded, module)

    selected = {
        name: frozenset(module for module, layer in modules.items() if is_selected(module, layer))
        for name, modules in by_target.items()
    }
    in_model, with_adapter = set().union(*by_target.values()), frozenset().union(*selected.values())
    for target in targets if isinstance(targets, list) else ():
        modules = {module for module in in_model if _matches([target], module)}
        if not modules or (modules & with_adapter and not modules & stored):
            raise CheckpointError(
                f"{where} names the target {short_repr(target, 80)}, but {ADAPTER_WEIGHTS} has no tensor for it in any"
                f" layer; the targets of a Llama are {', '.join(TARGETS)}"
            )
    if unselected := (stored & in_model) - with_adapter:
        raise CheckpointError(
            f"{where} selects no adapter of {min(unselected)}, but {ADAPTER_WEIGHTS} has its tensors; correct"
            " target_modules, exclude_modules and layers_to_transform, or remove the tensors"
        )
    return selected


def _check_pattern(where: Location, name: str, pattern: Any) -> None:
    """Raise CheckpointError for a pattern that `_matches` does not read."""
    try:
        if pattern is None or (isinstance(pattern, list) and all(isinstance(module, str) for module in pattern)):
            return
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise CheckpointError(
            f"{where}: {name}={short_repr(pattern, 80)} must be a regular expression or a list of modules ({error})"
        ) from None


def _matches(pattern: str | list[str], module: str) -> bool:
    """Whether a regular expression matches the whole name of a module, or the name ends in one of a list."""
    if isinstance(pattern, str):
        return re.fullmatch(pattern, module) is not None
    return any(f".{module}".endswith(f".{end}") for end in pattern)


def _open_gguf(path: Location) -> OpenedAdapter | None:
    """The adapter in a GGUF; None if it holds something else."""
    fields, tensors = gguf.read_file(path, texts=False)
    if fields.get(GENERAL_TYPE) != "adapter":
        return None
    base = _base_name(fields.get(BASE_NAME_KEY))

    def read(config: LlamaConfig, dtype: jax.typing.DTypeLike) -> Adapter:
        for key, value in ((ADAPTER_TYPE, "lora"), ("general.architecture", architecture_of(config).name)):
            if fields.get(key) != value:
                stored = short_repr(fields.get(key), 40)
                raise CheckpointError(f"{path}: {key}={stored}, but an adapter of this base has {value!r}")
        targets = tuple(name for name in TARGETS if _gguf_names(name, 0)[0] in tensors)
        if not targets:
            raise CheckpointError(
                f"{path} has no tensor {_gguf_names('q_proj', 0)[0]!r}, nor another of layer 0; is it a LoRA of a Llama?"
            )
        rank, alpha = tensors[_gguf_names(targets[0], 0)[0]].shape[0], fields.get(ALPHA_KEY)
        with config_errors(path):
            lora = Lora(rank=rank, alpha=alpha or float(rank), targets=targets)  # for 0 llama.cpp adds the update unscaled
        return Adapter(lora, read_adapter_tensors(path, config, lora, tensors, dtype, LLAMA_CPP, base), base)

    return OpenedAdapter(base, None, read)


def _write_gguf(path: Path, config: LlamaConfig, adapters: LlamaParams, lora: Lora, base: str | None) -> None:
    if lora.dora:
        raise CheckpointError(
            "dora=True: llama.cpp does not support magnitudes; merge the adapter into its model, or write it for PEFT"
        )
    tensors = tensors_of_adapter(config, adapters, lora, LLAMA_CPP)
    settings: dict[str, Any] = {GENERAL_TYPE: "adapter", ADAPTER_TYPE: "lora", ALPHA_KEY: float(lora.scale * lora.rank)}
    settings |= {} if base is None else {"general.base_model.count": 1, BASE_NAME_KEY: base}
    listed = [(name, array.shape, storage_type_of(array.dtype)) for name, array in tensors.items()]
    with gguf.new_file(path, architecture_of(config).name, settings, listed) as write:
        for name, array in tensors.items():
            write(_array_bytes(name, array))


def read_adapter_tensors(
    where: Location,
    config: LlamaConfig,
    lora: Lora,
    tensors: Mapping[str, Tensor],
    dtype: jax.typing.DTypeLike,
    layout: AdapterLayout,
    base: str | None,
) -> LlamaParams:
    """The adapter in the tensors of a file with this layout and base name; for errors see `load_adapter`."""
    target, unread = target_dtype(where, dtype, np.dtype(np.float32)), set(tensors)
    trained_on = "" if base is None else f", which was trained on {short_repr(base)}"
    its_base, needs = f"; is this the adapter's base{trained_on}?", f"an adapter of rank {lora.rank} of this base"
    interleaved = layout.interleaved(config)

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        stored = find_tensor(where, tensors, name, shape, needs, its_base)
        unread.discard(name)
        rows = stored.read(0, stored.shape[0])
        check_finite(rows, target, f"{where}: tensor {name!r}")
        return rows.astype(target)

    def read_layer(spec: ParamSpec, layer: int) -> LowRank:
        parts = []  # A, B and the magnitude of each tensor
        for name, part in _targets_of(spec):
            outputs, inputs = shape_of(part.axes, config)
            shapes = ((lora.rank, inputs), (outputs, lora.rank), (outputs,))[: 2 + lora.dora]
            names = layout.names(name, layer) if name in lora.targets else None
            if names is None:
                parts.append([np.zeros(shape, target) for shape in shapes])
                continue
            a, *rows = map(tensor, names, shapes)
            if part.rotary and interleaved:
                rows = [_reordered(array, config, half_from_interleaved) for array in rows]
            parts.append([a, *rows])
        a_parts, *row_parts = zip(*parts, strict=True)
        b, magnitude = (*map(by_heads, row_parts), None)[:2]
        return LowRank(a_parts[0] if len(a_parts) == 1 else np.stack(a_parts), b, magnitude)

    def by_heads(pieces: Sequence[np.ndarray]) -> np.ndarray:
        """One array, with the rows of each head next to each other."""
        if len(pieces) == 1:
            return pieces[0]
        heads = [piece.reshape(config.n_kv_heads, -1, config.head_dim, *piece.shape[1:]) for piece in pieces]
        return np.concatenate(heads, axis=1)

    layers = range(config.n_layers)
    stacked = lambda *arrays: jnp.stack(arrays)
    with config_errors(where):
        adapters = build_adapters(
            config, lora, lambda spec, _: jax.tree.map(stacked, *(read_layer(spec, layer) for layer in layers))
        )
    if unread:
        raise CheckpointError(
            f"{where}: tensor {short_repr(min(unread), 120)} does not belong to a LoRA of this base ({len(unread)} such)"
            f"{its_base}"
        )
    return adapters


def tensors_of_adapter(
    config: LlamaConfig, adapters: LlamaParams, lora: Lora, layout: AdapterLayout
) -> dict[str, np.ndarray]:
    """The inverse of `read_adapter_tensors`: the tensors of a file, layer by layer; adapters may be padded for a mesh."""
    tensors: dict[str, np.ndarray] = {}
    on_host = jax.tree.map(np.asarray, unpad_params(config, adapters))
    interleaved = layout.interleaved(config)

    def put(spec: ParamSpec, layer: int) -> None:
        pair = jax.tree.map(lambda array: array[layer], attrgetter(spec.path)(on_host))
        for index, ((name, _), (part, columns)) in enumerate(
            zip(_targets_of(spec), parts_with_columns(spec, config), strict=True)
        ):
            outputs = shape_of(part.axes, config)[0]
            rows = [pair.b] if pair.magnitude is None else [pair.b, pair.magnitude]
            if columns is not None:
                rows = [array[:, columns] for array in rows]
            if name in lora.targets:
                rows = [array.reshape(outputs, *shape) for array, shape in zip(rows, ((lora.rank,), ()), strict=False)]
                if part.rotary and interleaved:
                    rows = [_reordered(array, config, interleaved_from_half) for array in rows]
                a = pair.a[index] if pair.a.ndim > 2 else pair.a
                tensors.update(zip(layout.names(name, layer) or (), [a, *rows], strict=False))

    matrices: list[ParamSpec] = []
    build_adapters(config, lora, lambda spec, _: matrices.append(spec))
    for layer in range(config.n_layers):
        for spec in matrices:
            put(spec, layer)
    return tensors


def _reordered(rows: np.ndarray, config: LlamaConfig, order: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Rows of B, or the magnitude, for queries or keys in the other rotary layout."""
    return order(rows.reshape(-1, config.head_dim, math.prod(rows.shape[1:]))).reshape(rows.shape)


def _array_bytes(name: str, array: np.ndarray) -> np.ndarray:
    check_finite(array, array.dtype, f"adapter's tensor {name!r}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _targets_of(spec: ParamSpec) -> list[tuple[str, TensorPart]]:
    return [(name, part) for name, (its_spec, part) in BASE_TENSORS.items() if its_spec is spec]
