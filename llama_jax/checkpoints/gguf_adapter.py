"""Adapters in GGUF, which llama.cpp applies beside a model (--lora): one file with their settings and tensors.

Source: ggml-org/llama.cpp, convert_lora_to_gguf.py and src/llama-adapter.cpp. A and B of ``blk.0.attn_q.weight`` are
``blk.0.attn_q.weight.lora_a`` and ``.lora_b``; a change counts alpha / R times; rows of B are in the order that those of the
weight have, so of q and k in the interleaved rotary layout. A magnitude has no place there.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llama_jax.checkpoints.fill import check
from llama_jax.checkpoints.gguf import NAMES
from llama_jax.checkpoints.gguf_families import ARCHITECTURES, architecture_of
from llama_jax.checkpoints.gguf_file import read_file
from llama_jax.checkpoints.memory import Held
from llama_jax.checkpoints.peft import BASES, Names, pairs_of, read_pairs, turned
from llama_jax.checkpoints.tensors import Tensor, kind_of
from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, ConfigError, shown
from llama_jax.gguf_header import is_gguf
from llama_jax.model.adapters import TARGETS, Lora
from llama_jax.model.params import Llama
from llama_jax.parallel.fit import unfit
from llama_jax.storage import Location

TYPE, ADAPTER_TYPE, ALPHA, BASE = "general.type", "adapter.type", "adapter.lora.alpha", "general.base_model.0.name"


def recognises(path: Location) -> bool:
    """Whether it is a GGUF of an adapter."""
    return path.is_file() and is_gguf(path) and read_file(path, texts=False)[0].get(TYPE) == "adapter"


def base_in(path: Location) -> str | None:
    """The base model that a file names."""
    return read_file(path)[0].get(BASE)


def read(path: Location, config: LlamaConfig, dtype: jax.typing.DTypeLike) -> tuple[Lora, Llama, str | None]:
    """The adapter in a file: its settings, its tensors, and the base that it names; see `adapters.load_adapter`."""
    fields, tensors = read_file(path)
    wanted = {TYPE: "adapter", ADAPTER_TYPE: "lora", "general.architecture": architecture_of(config.kind)}
    for key, value in wanted.items():
        if fields.get(key) != value:
            raise CheckpointError(f"{path}: {key}={shown(fields.get(key), 40)}, but an adapter of this base has {value!r}")
    targets = tuple(name for name in TARGETS if _keys(name, 0)[0] in tensors)
    if not targets:
        raise CheckpointError(
            f"{path} has no tensor {_keys('q_proj', 0)[0]!r}, nor another of layer 0; is it a LoRA of a Llama?"
        )
    rank, alpha = tensors[_keys(targets[0], 0)[0]].shape[0], fields.get(ALPHA)
    try:
        lora = Lora(rank=rank, alpha=alpha or float(rank), targets=targets)  # of 0 llama.cpp takes a change as it is
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    base = fields.get(BASE)
    names = Names(_keys, base)
    return lora, read_pairs(path, config, lora, _turned(tensors, config, interleave=False), dtype, names), base


def write(path: Path, config: LlamaConfig, adapters: Llama, lora: Lora, base: str | None) -> None:
    """Write adapters into a file; see `adapters.save_adapter`.

    Raises:
      CheckpointError: adapters with magnitudes.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    if lora.dora:
        raise CheckpointError(
            "dora=True: llama.cpp does not support magnitudes; merge the adapter into its model, or write it for PEFT"
        )
    tensors = _as_file(config, unfit(config, adapters), lora)
    writer = GGUFWriter(path, architecture_of(config.kind))
    try:
        writer.add_type("adapter")
        writer.add_string(ADAPTER_TYPE, "lora")
        writer.add_float32(ALPHA, lora.scale * lora.rank)
        if base is not None:
            writer.add_base_model_count(1)
            writer.add_base_model_name(0, base)
        for name, array in tensors.items():
            raw = GGMLQuantizationType[kind_of(array.dtype)]
            shape = quants.quant_shape_to_byte_shape(array.shape, raw)
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, array in tensors.items():
            check(array, array.dtype, f"adapter's tensor {name!r}")
            writer.write_tensor_data(np.ascontiguousarray(array).view(np.uint8))
    finally:
        writer.close()


def _as_file(config: LlamaConfig, adapters: Llama, lora: Lora) -> dict[str, np.ndarray]:
    held: dict[str, Any] = {
        name: Held(np.ascontiguousarray(array)) for name, array in pairs_of(config, adapters, lora, _keys)
    }
    in_file = _turned(held, config, interleave=True)
    return {name: tensor.read(0, tensor.shape[0]) for name, tensor in in_file.items()}


def _turned(tensors: dict[str, Tensor], config: LlamaConfig, *, interleave: bool) -> dict[str, Tensor]:
    """The same with the rows of B of queries and keys in the other rotary layout, where the architecture has that."""
    if not ARCHITECTURES[architecture_of(config.kind)].interleaved:
        return tensors
    return turned(tensors, config, _keys, interleave=interleave)


def _keys(target: str, layer: int) -> tuple[str, str, str]:
    """The names of A and B; there is none of a magnitude."""
    name = NAMES[BASES[target][1].name].format(layer)
    return f"{name}.lora_a", f"{name}.lora_b", ""
