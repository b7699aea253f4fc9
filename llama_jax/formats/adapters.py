"""LoRA adapters: read from a PEFT folder, a GGUF of llama.cpp's or a training run; written for PEFT and llama.cpp.

PEFT has ``adapter_config.json`` and ``adapter_model.safetensors``. llama.cpp has one GGUF (convert_lora_to_gguf.py and
src/llama-adapter.cpp): A and B of ``blk.0.attn_q.weight`` are ``blk.0.attn_q.weight.lora_a`` and ``.lora_b``, the change
counts alpha / R times, and there are no magnitudes. In both the rows of B of q and k have the rotary layout of the base.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, ConfigError, reading, shown
from llama_jax.formats import gguf
from llama_jax.formats.device_fill import check
from llama_jax.formats.gguf_families import ARCHITECTURES, architecture_of
from llama_jax.formats.huggingface import NAMES, header, is_interleaved, read_config, read_safetensors
from llama_jax.formats.lazy_tensors import FLOATS, ArrayTensor, Tensor, kind_of, target_dtype
from llama_jax.formats.orbax_format import OrbaxArrayInfo, adapters_of, describe, name_of, read_arrays, with_short_errors
from llama_jax.formats.step_dirs import (
    ABOUT,
    EMA,
    NOTE,
    PARAMS,
    existing_step,
    fetch_step,
    find_checkpoints,
    is_step,
    of_model,
    retry_with_newest_step,
    verify,
)
from llama_jax.formats.tensor_export import RopePermuted, new_output
from llama_jax.formats.tensor_names import Share, shares_of
from llama_jax.gguf_header import is_gguf
from llama_jax.model.lora import TARGETS, Lora, adapted, adapter_shapes, build_adapters, precompute_dora_scale
from llama_jax.model.multi_lora import attach_adapter_table, stack_adapters
from llama_jax.model.params import PARAM_SPECS, Llama, ParamSpec, shape_of
from llama_jax.ops.weights import LowRank
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.padding import pad_params, unpad_params
from llama_jax.storage import Location, StoredPath, locate
from llama_jax.storage.paths import read_object

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Settings without effect on what the adapter computes.
IGNORED_SETTINGS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
        *("lora_dropout", "exclude_modules", "megatron_config", "megatron_core", "qalora_group_size", "eva_config"),
    }
)
READ_SETTINGS = frozenset({"peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "use_dora", "init_lora_weights"})
# Those that leave the base as it is; the others, as PiSSA's, change it before training begins.
INITIALIZATIONS = (True, False, None, "gaussian", "orthogonal", "eva")
# By target: the tensor of the base that it changes.
BASES: dict[str, tuple[ParamSpec, Share]] = {
    name: (row, share)
    for row in PARAM_SPECS
    for share in shares_of(row)
    for name in TARGETS
    if row.path == TARGETS[name].path and NAMES[share.name].endswith(f".{name}.weight")
}


# Metadata of a GGUF.
TYPE, ADAPTER_TYPE, ALPHA, BASE_NAME = "general.type", "adapter.type", "adapter.lora.alpha", "general.base_model.0.name"


class Adapter(NamedTuple):
    """A LoRA adapter.

    Attributes:
      lora: its settings.
      params: the adapters.
      base: the model that it names as its base, a path or a name on a hub; None if it names none.
    """

    lora: Lora
    params: Llama
    base: str | None


class AdapterLayout(NamedTuple):
    """How a file stores the tensors of an adapter.

    Attributes:
      names: of a target in a layer: A, B, and the magnitude.
      interleaved: whether files of a base of this configuration have the interleaved rotary layout.
    """

    names: Callable[[str, int], tuple[str, str, str]]
    interleaved: Callable[[LlamaConfig], bool]


def _peft_names(target: str, layer: int) -> tuple[str, str, str]:
    stem = f"base_model.model.{_module(target, layer)}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight", f"{stem}.lora_magnitude_vector"


def _gguf_names(target: str, layer: int) -> tuple[str, str, str]:
    name = gguf.NAMES[BASES[target][1].name].format(layer)
    return f"{name}.lora_a", f"{name}.lora_b", ""


def _module(target: str, layer: int) -> str:
    return NAMES[BASES[target][1].name].format(layer).removesuffix(".weight")


PEFT = AdapterLayout(_peft_names, is_interleaved)
LLAMA_CPP = AdapterLayout(_gguf_names, lambda config: ARCHITECTURES[architecture_of(config.kind)].interleaved)


@retry_with_newest_step
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
                return _read_run(step, config, dtype)
        return (_read_gguf if _is_gguf(folder) else _read_peft)(folder, config, dtype)


@retry_with_newest_step
def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether a path holds an adapter and no model."""
    folder = locate(path)
    with reading(folder, CheckpointError):
        with _step_in(folder) as step:
            if step is not None:
                return adapters_of(step) is not None
        return (folder / ADAPTER_CONFIG).is_file() or _is_gguf(folder)


@retry_with_newest_step
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
            found = gguf.read_file(folder)[0].get(BASE_NAME)
        else:
            found = read_object(folder / ADAPTER_CONFIG, CheckpointError).get("base_model_name_or_path")
    return found if isinstance(found, str) and found else None


@retry_with_newest_step
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
    to_gguf = Path(path).suffix.lower() == ".gguf"
    with new_output(locate(path), folder=not to_gguf, overwrite=overwrite) as target:
        (_write_gguf if to_gguf else _write_peft)(target, config, adapters, lora, base)


def attach_adapter(config: LlamaConfig, params: Llama, adapter: Adapter, mesh: MeshSizes | None) -> Llama:
    """The parameters with an adapter attached.

    Args:
      config: of the base, as its file has it.
      mesh: over which the parameters lie, fitted.
    """
    return precompute_dora_scale(adapted(params, _placed(config, adapter.params, adapter.lora, mesh), adapter.lora))


def attach_adapters(config: LlamaConfig, params: Llama, adapters: Sequence[Adapter], mesh: MeshSizes | None) -> Llama:
    """The parameters with several adapters, one for each row of a batch, see `model.multi_lora`."""
    given = [(adapter.params, adapter.lora) for adapter in adapters]
    table = stack_adapters(config, given, params.embedding.dtype)
    return attach_adapter_table(params, table._replace(params=_placed(config, table.params, table.lora, mesh)))


def _placed(config: LlamaConfig, pairs: Llama, lora: Lora, mesh: MeshSizes | None) -> Llama:
    """Adapters placed like the matrices that they change."""
    if mesh is None:
        return pairs
    from llama_jax.parallel.sharding import adapter_specs, shardings  # imports what training needs too

    specs = adapter_specs(config, mesh, lora, padded=True)
    return jax.device_put(pad_params(config, mesh, pairs), shardings(make_mesh(mesh), specs))


def _read_run(step: Path, config: LlamaConfig, dtype: jax.typing.DTypeLike) -> Adapter:
    settings = adapters_of(step)
    if settings is None:
        raise CheckpointError(f"{step} holds a whole model and no adapter; give it as the model")
    try:
        lora = Lora(**settings | {"targets": tuple(settings["targets"])})
        shapes = adapter_shapes(config, lora)
    except (ConfigError, TypeError, KeyError) as error:
        raise CheckpointError(f"{step / ABOUT / NOTE}: {error}") from None
    name = EMA if (step / EMA).is_dir() else PARAMS
    needed = {name_of(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(shapes)}
    held = {array: one.shape for array, one in describe(step, name).items()}
    for array in sorted(needed.keys() | held.keys()):
        if needed.get(array) != held.get(array):
            raise CheckpointError(
                f"{step}: array {array!r} has shape {held.get(array)}, this base needs {needed.get(array)}; is this the"
                " adapter's base?"
            )
    verify(step, {ABOUT, name})
    target = target_dtype(step, dtype, jnp.dtype(jnp.float32))
    wanted = jax.tree.map(lambda leaf: OrbaxArrayInfo(leaf.shape, target), shapes)
    found: Any = with_short_errors(step / name, lambda: read_arrays(step, name, wanted))
    note = read_object(step / ABOUT / NOTE, CheckpointError)
    return Adapter(lora, jax.tree.map(jnp.asarray, found), note.get("base", {}).get("path"))


def _read_peft(folder: Location, config: LlamaConfig, dtype: jax.typing.DTypeLike) -> Adapter:
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist; give a folder that PEFT or train wrote")
    if not (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{folder} holds no adapter: it has no {ADAPTER_CONFIG}; give a folder that PEFT or train wrote"
        )
    settings = read_object(folder / ADAPTER_CONFIG, CheckpointError)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(f"{folder} has no {ADAPTER_WEIGHTS}; save the adapter as safetensors with PEFT")
    tensors = read_safetensors(folder / ADAPTER_WEIGHTS)
    lora = _lora_of(folder, settings, tensors)
    named = settings.get("base_model_name_or_path")
    base = named if isinstance(named, str) and named else None
    return Adapter(lora, read_pairs(folder / ADAPTER_WEIGHTS, config, lora, tensors, dtype, (PEFT, base)), base)


def _write_peft(folder: Path, config: LlamaConfig, adapters: Llama, lora: Lora, base: str | None) -> None:
    tensors = tensors_of_adapter(config, adapters, lora, PEFT)
    settings = {
        "base_model_name_or_path": base,
        "bias": "none",
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
        file.write(header({name: (kind_of(one.dtype), one.shape, one.nbytes) for name, one in tensors.items()}))
        for name, array in tensors.items():
            file.write(_bytes_of(name, array).data)


def _lora_of(folder: Location, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Lora:
    """The settings; the targets are those of the tensors, for a file may name them by a pattern."""
    where, kind = folder / ADAPTER_CONFIG, settings.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{where}: peft_type={shown(kind)} is not supported; adapters are read of the type LORA")
    for name, value in settings.items():
        if name not in IGNORED_SETTINGS | READ_SETTINGS and value and value != "none":
            raise CheckpointError(f"{where}: {shown(name, 40)}={shown(value)} is not supported; train an adapter without it")
    if settings.get("init_lora_weights") not in INITIALIZATIONS:
        raise CheckpointError(
            f"{where}: init_lora_weights={shown(settings['init_lora_weights'])} may have changed the base; convert it to a"
            " plain LoRA with PEFT"
        )
    targets = settings.get("target_modules")
    names = [name for name in TARGETS if any(_module(name, 0) in key for key in tensors)]
    for name in targets if isinstance(targets, list) else ():
        if str(name).split(".")[-1] not in names:
            raise CheckpointError(
                f"{where} names the target {shown(name, 80)}, for which {ADAPTER_WEIGHTS} has no tensor of layer 0; the"
                f" targets of a Llama are {', '.join(TARGETS)}"
            )
    try:
        rank, alpha = settings.get("r"), settings.get("lora_alpha")
        rslora, dora = bool(settings.get("use_rslora")), bool(settings.get("use_dora"))
        return Lora(rank=rank, alpha=alpha, targets=tuple(names), rslora=rslora, dora=dora)  # type: ignore[arg-type]  # checked there
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _is_gguf(path: Location) -> bool:
    return path.is_file() and is_gguf(path) and gguf.read_file(path, texts=False)[0].get(TYPE) == "adapter"


def _read_gguf(path: Location, config: LlamaConfig, dtype: jax.typing.DTypeLike) -> Adapter:
    fields, tensors = gguf.read_file(path)
    wanted = {TYPE: "adapter", ADAPTER_TYPE: "lora", "general.architecture": architecture_of(config.kind)}
    for key, value in wanted.items():
        if fields.get(key) != value:
            raise CheckpointError(f"{path}: {key}={shown(fields.get(key), 40)}, but an adapter of this base has {value!r}")
    targets = tuple(name for name in TARGETS if _gguf_names(name, 0)[0] in tensors)
    if not targets:
        raise CheckpointError(
            f"{path} has no tensor {_gguf_names('q_proj', 0)[0]!r}, nor another of layer 0; is it a LoRA of a Llama?"
        )
    rank, alpha = tensors[_gguf_names(targets[0], 0)[0]].shape[0], fields.get(ALPHA)
    try:
        lora = Lora(rank=rank, alpha=alpha or float(rank), targets=targets)  # of 0 llama.cpp takes a change as it is
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    base = fields.get(BASE_NAME)
    return Adapter(lora, read_pairs(path, config, lora, tensors, dtype, (LLAMA_CPP, base)), base)


def _write_gguf(path: Path, config: LlamaConfig, adapters: Llama, lora: Lora, base: str | None) -> None:
    if lora.dora:
        raise CheckpointError(
            "dora=True: llama.cpp does not support magnitudes; merge the adapter into its model, or write it for PEFT"
        )
    tensors = tensors_of_adapter(config, adapters, lora, LLAMA_CPP)
    settings: dict[str, Any] = {TYPE: "adapter", ADAPTER_TYPE: "lora", ALPHA: float(lora.scale * lora.rank)}
    settings |= {} if base is None else {"general.base_model.count": 1, BASE_NAME: base}
    listed = [(name, array.shape, kind_of(array.dtype)) for name, array in tensors.items()]
    with gguf.new_file(path, architecture_of(config.kind), settings, listed) as write:
        for name, array in tensors.items():
            write(_bytes_of(name, array))


def read_pairs(
    where: Location,
    config: LlamaConfig,
    lora: Lora,
    tensors: Mapping[str, Tensor],
    dtype: jax.typing.DTypeLike,
    source: tuple[AdapterLayout, str | None],
) -> Llama:
    """The adapters in the tensors of a file of this layout, which names this base; for errors see `load_adapter`."""
    (names, interleaved), base = source
    if interleaved(config):
        tensors = permute_rope(tensors, config, names, interleave=False)
    target, unread = target_dtype(where, dtype, np.dtype(np.float32)), set(tensors)
    whose = "" if base is None else f", which was trained on {shown(base)}"

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in tensors:
            raise CheckpointError(f"{where}: tensor {shown(name, 120)} is missing; is this the adapter's base{whose}?")
        unread.discard(name)
        found = tensors[name]
        if found.shape != shape:
            raise CheckpointError(
                f"{where}: tensor {shown(name, 120)} has shape {list(found.shape)}, rank {lora.rank} and this base need"
                f" {list(shape)}; is this the adapter's base{whose}?"
            )
        if found.dtype not in FLOATS.values():
            raise CheckpointError(f"{where}: tensor {shown(name, 120)} is {found.kind}; a float of 16 or 32 bits is needed")
        rows = found.read(0, found.shape[0])
        check(rows, target, f"{where}: tensor {name!r}")
        return rows.astype(target)

    def pair(row: ParamSpec, shape: LowRank, layer: int) -> LowRank:
        sizes = {name: shape_of(share.axes, config) for name, share in _shares_at(row)}
        a, b, magnitude = {}, {}, {}
        for name, (outputs, inputs) in sizes.items():
            shapes = (lora.rank, inputs), (outputs, lora.rank), (outputs,)
            if name in lora.targets:
                found = [tensor(*each) for each in zip(names(name, layer)[: 2 + lora.dora], shapes, strict=False)]
            else:
                found = [np.zeros(shape, target) for shape in shapes]
            a[name], b[name] = found[:2]
            magnitude[name] = found[-1]

        def rows_of(parts: Mapping[str, np.ndarray]) -> jax.Array:
            """One array, with the rows of each head side by side."""
            if len(sizes) == 1:
                return jnp.asarray(next(iter(parts.values())))
            heads = config.n_kv_heads, -1, config.head_dim
            return jnp.asarray(
                np.concatenate([parts[name].reshape(*heads, *parts[name].shape[1:]) for name in sizes], axis=1)
            )

        stacked = np.stack([a[name] for name in sizes]).reshape(shape.a.shape)
        return LowRank(jnp.asarray(stacked), rows_of(b), rows_of(magnitude) if lora.dora else None)

    def pairs(row: ParamSpec, shape: LowRank) -> LowRank:
        one = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), shape)
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *(pair(row, one, layer) for layer in range(config.n_layers)))

    if config.n_layers > len(tensors):
        raise CheckpointError(
            f"{where} has {len(tensors)} tensors, the base {config.n_layers} layers; is this the adapter's base{whose}?"
        )
    try:
        found = build_adapters(config, lora, pairs)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    if unread:
        raise CheckpointError(
            f"{where}: tensor {shown(min(unread), 120)} is no part of a LoRA of this base ({len(unread)} such); is this the"
            f" adapter's base{whose}?"
        )
    return found


def tensors_of_adapter(config: LlamaConfig, adapters: Llama, lora: Lora, layout: AdapterLayout) -> dict[str, np.ndarray]:
    """The inverse of `read_pairs`: the tensors of a file, layer by layer; adapters may be padded to fit a mesh."""
    found: dict[str, np.ndarray] = {}
    on_host = jax.tree.map(np.asarray, unpad_params(config, adapters))

    def put(row: ParamSpec, layer: int) -> None:
        pair, first = jax.tree.map(lambda array: array[layer], attrgetter(row.path)(on_host)), 0
        for part, (name, share) in enumerate(_shares_at(row)):
            a, b, magnitude = (pair.a[part] if pair.a.ndim > 2 else pair.a), pair.b, pair.magnitude
            if share.width:
                own = slice(first, first + shape_of(share.width, config)[0])
                b, magnitude, first = b[:, own], None if magnitude is None else magnitude[:, own], own.stop
            if name in lora.targets:
                arrays = [a, b.reshape(shape_of(share.axes, config)[0], lora.rank)]
                arrays += [] if magnitude is None else [magnitude.reshape(-1)]
                found.update(zip(layout.names(name, layer), arrays, strict=False))

    matrices: list[ParamSpec] = []
    build_adapters(config, lora, lambda row, _: matrices.append(row))
    for layer in range(config.n_layers):
        for row in matrices:
            put(row, layer)
    if not layout.interleaved(config):
        return found
    held: dict[str, Tensor] = {name: ArrayTensor(np.ascontiguousarray(array)) for name, array in found.items()}
    permuted = permute_rope(held, config, layout.names, interleave=True)
    return {name: tensor.read(0, tensor.shape[0]) for name, tensor in permuted.items()}


def _bytes_of(name: str, array: np.ndarray) -> np.ndarray:
    check(array, array.dtype, f"adapter's tensor {name!r}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def permute_rope(
    tensors: Mapping[str, Tensor],
    config: LlamaConfig,
    names: Callable[[str, int], tuple[str, str, str]],
    *,
    interleave: bool,
) -> dict[str, Tensor]:
    """The tensors with B and the magnitudes of queries and keys in the other rotary layout."""
    rotary = [name for name, (_, share) in BASES.items() if share.rotary]
    those = {key for name in rotary for layer in range(config.n_layers) for key in names(name, layer)[1:]} & tensors.keys()
    whole = {name for name in those if math.prod(tensors[name].shape[:1]) % config.head_dim == 0}  # others are refused later
    return {name: RopePermuted(t, config.head_dim, interleave) if name in whole else t for name, t in tensors.items()}


def _shares_at(row: ParamSpec) -> list[tuple[str, Share]]:
    return [(name, share) for name, (its_row, share) in BASES.items() if its_row is row]
