"""Adapters as PEFT keeps them: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.checkpoints.fill import check
from llama_jax.checkpoints.huggingface import NAMES, header, is_interleaved, read_safetensors
from llama_jax.checkpoints.layout import Turned
from llama_jax.checkpoints.memory import Held
from llama_jax.checkpoints.names import Share, shares_of
from llama_jax.checkpoints.tensors import FLOATS, Tensor, kind_of, target_dtype
from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, ConfigError, reading, shown
from llama_jax.files import read_object
from llama_jax.model.adapters import TARGETS, Lora, build_adapters
from llama_jax.model.params import TABLE, Llama, Row, shape_of
from llama_jax.ops.weights import LowRank
from llama_jax.parallel.fit import unfit
from llama_jax.storage import Location

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Settings without effect on what the adapter computes.
IGNORED = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
        *("lora_dropout", "exclude_modules", "megatron_config", "megatron_core", "qalora_group_size", "eva_config"),
    }
)
READ = frozenset({"peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "use_dora", "init_lora_weights"})
# Those that leave the base as it is; the others, as PiSSA's, change it before training begins.
STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
# By target: the tensor of the base that it is, as `names` has it.
BASES: dict[str, tuple[Row, Share]] = {
    name: (row, share)
    for row in TABLE
    for share in shares_of(row)
    for name in TARGETS
    if row.path == TARGETS[name].path and NAMES[share.name].endswith(f".{name}.weight")
}


def read_folder(folder: Location, config: LlamaConfig, dtype: jax.typing.DTypeLike) -> tuple[Lora, Llama, str | None]:
    """The adapter in a folder: its settings, its tensors, and the base that it names; see `adapters.load_adapter`."""
    with reading(folder, CheckpointError):
        if not folder.exists():
            raise CheckpointError(f"{folder} does not exist; give a folder that PEFT or train wrote")
        if not (folder / CONFIG).is_file():
            raise CheckpointError(f"{folder} holds no adapter: it has no {CONFIG}; give a folder that PEFT or train wrote")
        settings = read_object(folder / CONFIG, CheckpointError)
        if not (folder / WEIGHTS).is_file():
            raise CheckpointError(f"{folder} has no {WEIGHTS}; save the adapter as safetensors with PEFT")
        tensors = read_safetensors(folder / WEIGHTS)
    lora = _lora_of(folder, settings, tensors)
    said = settings.get("base_model_name_or_path")
    base = said if isinstance(said, str) and said else None
    if is_interleaved(config):
        tensors = turned(tensors, config, _keys, interleave=False)
    return lora, read_pairs(folder / WEIGHTS, config, lora, tensors, dtype, Names(_keys, base)), base


def write_folder(folder: Path, config: LlamaConfig, adapters: Llama, lora: Lora, base: str | None) -> None:
    """Write adapters into an empty folder; see `adapters.save_adapter`."""
    tensors = dict(pairs_of(config, unfit(config, adapters), lora, _keys))
    if is_interleaved(config):
        held: dict[str, Tensor] = {name: Held(np.ascontiguousarray(array)) for name, array in tensors.items()}
        held = turned(held, config, _keys, interleave=True)
        tensors = {name: tensor.read(0, tensor.shape[0]) for name, tensor in held.items()}
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
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    with (folder / WEIGHTS).open("wb") as file:
        file.write(header({name: (kind_of(one.dtype), one.shape, one.nbytes) for name, one in tensors.items()}))
        for name, array in tensors.items():
            check(array, array.dtype, f"adapter's tensor {name!r}")
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _lora_of(folder: Location, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Lora:
    """The settings; the targets are those of the tensors, for a file may name them by a pattern."""
    where, kind = folder / CONFIG, settings.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{where}: peft_type={shown(kind)} is not supported; adapters are read of the type LORA")
    for name, value in settings.items():
        if name not in IGNORED | READ and value and value != "none":
            raise CheckpointError(f"{where}: {shown(name, 40)}={shown(value)} is not supported; train an adapter without it")
    if settings.get("init_lora_weights") not in STARTS:
        raise CheckpointError(
            f"{where}: init_lora_weights={shown(settings['init_lora_weights'])} may have changed the base; convert it to a"
            " plain LoRA with PEFT"
        )
    asked = settings.get("target_modules")
    names = [name for name in TARGETS if any(_module(name, 0) in key for key in tensors)]
    for name in asked if isinstance(asked, list) else ():
        if str(name).split(".")[-1] not in names:
            raise CheckpointError(
                f"{where} names the target {shown(name, 80)}, for which {WEIGHTS} has no tensor of layer 0; the targets"
                f" of a Llama are {', '.join(TARGETS)}"
            )
    try:
        rank, alpha = settings.get("r"), settings.get("lora_alpha")
        rslora, dora = bool(settings.get("use_rslora")), bool(settings.get("use_dora"))
        return Lora(rank=rank, alpha=alpha, targets=tuple(names), rslora=rslora, dora=dora)  # type: ignore[arg-type]  # checked there
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


class Names(NamedTuple):
    """The names of an adapter's tensors in a file, and the base that it names.

    Attributes:
      of: of a target in a layer: A, B, and the magnitude.
    """

    of: Callable[[str, int], tuple[str, str, str]]
    base: str | None


def read_pairs(
    where: Location,
    config: LlamaConfig,
    lora: Lora,
    tensors: Mapping[str, Tensor],
    dtype: jax.typing.DTypeLike,
    names: Names,
) -> Llama:
    """Adapters, of the tensors in a file; for errors see `adapters.load_adapter`."""
    target, unread = target_dtype(where, dtype, np.dtype(np.float32)), set(tensors)
    of_whom = "" if names.base is None else f", which was trained on {shown(names.base)}"

    def tensor(name: str, *shape: int) -> np.ndarray:
        if name not in tensors:
            raise CheckpointError(f"{where}: tensor {shown(name, 120)} is missing; is this the adapter's base{of_whom}?")
        unread.discard(name)
        found = tensors[name]
        if found.shape != shape:
            raise CheckpointError(
                f"{where}: tensor {shown(name, 120)} has shape {list(found.shape)}, rank {lora.rank} and this base need"
                f" {list(shape)}; is this the adapter's base{of_whom}?"
            )
        if found.dtype not in FLOATS.values():
            raise CheckpointError(f"{where}: tensor {shown(name, 120)} is {found.kind}; a float of 16 or 32 bits is needed")
        rows = found.read(0, found.shape[0])
        check(rows, target, f"{where}: tensor {name!r}")
        return rows.astype(target)

    def pair(row: Row, shape: LowRank, layer: int) -> LowRank:
        sizes = {name: shape_of(share.axes, config) for name, share in _shares_at(row)}
        thin = {name: tensor(names.of(name, layer)[0], lora.rank, sizes[name][1]) for name in sizes if name in lora.targets}
        tall = {name: tensor(names.of(name, layer)[1], sizes[name][0], lora.rank) for name in sizes if name in lora.targets}
        long = {name: tensor(names.of(name, layer)[2], sizes[name][0]) for name in thin} if lora.dora else {}
        for name in sizes.keys() - thin.keys():
            thin[name] = np.zeros((lora.rank, sizes[name][1]), target)
            tall[name] = np.zeros((sizes[name][0], lora.rank), target)
            long[name] = np.zeros(sizes[name][0], target)

        def rows_of(parts: Mapping[str, np.ndarray]) -> jax.Array:
            """As one, rows of each head side by side."""
            if len(sizes) == 1:
                return jnp.asarray(next(iter(parts.values())))
            heads = config.n_kv_heads, -1, config.head_dim
            return jnp.asarray(
                np.concatenate([parts[name].reshape(*heads, *parts[name].shape[1:]) for name in sizes], axis=1)
            )

        a = np.stack([thin[name] for name in sizes]).reshape(shape.a.shape)
        return LowRank(jnp.asarray(a), rows_of(tall), rows_of(long) if lora.dora else None)

    def pairs(row: Row, shape: LowRank) -> LowRank:
        one = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), shape)
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *(pair(row, one, layer) for layer in range(config.n_layers)))

    if config.n_layers > len(tensors):
        raise CheckpointError(
            f"{where} has {len(tensors)} tensors, the base {config.n_layers} layers; is this the adapter's base{of_whom}?"
        )
    try:
        found = build_adapters(config, lora, pairs)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    if unread:
        raise CheckpointError(
            f"{where}: tensor {shown(min(unread), 120)} is no part of a LoRA of this base ({len(unread)} such); is this the"
            f" adapter's base{of_whom}?"
        )
    return found


def pairs_of(
    config: LlamaConfig, adapters: Llama, lora: Lora, names: Callable[[str, int], tuple[str, str, str]]
) -> list[tuple[str, np.ndarray]]:
    """The tensors of a file, layer by layer, under its names."""
    found: list[tuple[str, np.ndarray]] = []
    on_host = jax.tree.map(np.asarray, adapters)

    def put(row: Row, layer: int) -> None:
        pair, first = jax.tree.map(lambda array: array[layer], attrgetter(row.path)(on_host)), 0
        for part, (name, share) in enumerate(_shares_at(row)):
            a, b, magnitude = (pair.a[part] if pair.a.ndim > 2 else pair.a), pair.b, pair.magnitude
            if share.width:
                own = slice(first, first + shape_of(share.width, config)[0])
                b, magnitude, first = b[:, own], None if magnitude is None else magnitude[:, own], own.stop
            if name in lora.targets:
                arrays = [a, b.reshape(shape_of(share.axes, config)[0], lora.rank)]
                arrays += [] if magnitude is None else [magnitude.reshape(-1)]
                found.extend(zip(names(name, layer), arrays, strict=False))

    matrices: list[Row] = []
    build_adapters(config, lora, lambda row, _: matrices.append(row))
    for layer in range(config.n_layers):
        for row in matrices:
            put(row, layer)
    return found


def turned(
    tensors: Mapping[str, Tensor],
    config: LlamaConfig,
    names: Callable[[str, int], tuple[str, str, str]],
    *,
    interleave: bool,
) -> dict[str, Tensor]:
    """The same with what has the rows of queries and keys, B and the magnitudes, in the other rotary layout."""
    rotary = [name for name, (_, share) in BASES.items() if share.rotary]
    those = {key for name in rotary for layer in range(config.n_layers) for key in names(name, layer)[1:]} & tensors.keys()
    whole = {name for name in those if math.prod(tensors[name].shape[:1]) % config.head_dim == 0}  # others are refused later
    return {name: Turned(t, config.head_dim, interleave) if name in whole else t for name, t in tensors.items()}


def _shares_at(row: Row) -> list[tuple[str, Share]]:
    return [(name, share) for name, (its_row, share) in BASES.items() if its_row is row]


def _module(target: str, layer: int) -> str:
    return NAMES[BASES[target][1].name].format(layer).removesuffix(".weight")


def _keys(target: str, layer: int) -> tuple[str, str, str]:
    """The names of A, B and the magnitude."""
    stem = f"base_model.model.{_module(target, layer)}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight", f"{stem}.lora_magnitude_vector"
