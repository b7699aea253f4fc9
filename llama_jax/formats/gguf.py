"""Models in GGUF: read and write their settings and tensors.

Source: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.config.families import ARCHITECTURES, FAMILIES, architecture_of
from llama_jax.config.families.shared import WINDOW_KEY, refuse_to_store
from llama_jax.errors import CheckpointError, ConfigError, short_repr
from llama_jax.formats.build_params import WrittenTensor, fuse, split_fused, tensors_to_write
from llama_jax.formats.lazy_tensors import (
    FLOAT_DTYPES,
    Dense,
    Offset,
    Tensor,
    TensorInfo,
    read_bytes,
    row_bytes_of,
    storage_type_of,
)
from llama_jax.formats.model_folder import config_errors, metadata_from_fields, metadata_to_fields
from llama_jax.formats.quantize_on_load import ENCODED_AT_ONCE
from llama_jax.formats.rope_conversion import ROPE_TENSORS, settings_and_tensors, with_scaling
from llama_jax.formats.weight_format import TENSOR_NAMES, OpenedCheckpoint, WeightFormat, describe_ignored, ignored_tensors
from llama_jax.model.mixtures import base_format, format_of_part
from llama_jax.ops.weights.format_spec import blocks_from_planes
from llama_jax.ops.weights.formats import QUANT_FORMATS, with_fallback
from llama_jax.settings import PositiveInt, check_value
from llama_jax.storage import Location, StoredPath
from llama_jax.tokenizers import Tokenizer, find_tokenizer
from llama_jax.tokenizers.gguf_header import MAX_ENTRIES, Header, is_gguf, open_header, short_decimal
from llama_jax.tokenizers.load import warn_of_size

# Tensor types by number: name, values per block, bytes per block.
GGUF_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
MAX_AXES = 4


@dataclass(frozen=True)
class BlockTensor:
    """A tensor [rows, columns] or [entries, rows, columns] in blocks along the columns; `read` returns float32."""

    path: Location
    offset: int
    shape: tuple[int, ...]
    storage_type: str
    block: tuple[int, int]  # values, bytes
    dtype = np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.block[0] * self.block[1]

    def read(self, start: int, stop: int) -> np.ndarray:
        from gguf import GGMLQuantizationType, quants

        blocks = self.shape[-1] // self.block[0] * self.block[1]
        row = math.prod(self.shape[1:-1]) * blocks
        raw = read_bytes(self.path, self.offset + start * row, (stop - start) * row)
        raw = raw.reshape(stop - start, *self.shape[1:-1], blocks)
        with np.errstate(all="ignore"):  # damaged scales give infinity or NaN, reported later
            return quants.dequantize(raw, GGMLQuantizationType[self.storage_type])

    @property
    def blocks(self) -> Tensor:
        """See `lazy_tensors.row_bytes_of`."""
        width = self.shape[-1] // self.block[0] * self.block[1]
        return Dense(self.path, self.offset, (*self.shape[:-1], width), "U8")

    def entry(self, index: int) -> BlockTensor:
        """One matrix of a tensor with three axes."""
        return replace(self, offset=self.offset + index * self.nbytes // self.shape[0], shape=self.shape[1:])


def read_file(path: Location, *, texts: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """All settings by key, see `Header.fields`, and all tensors by name."""
    with open_header(path, CheckpointError) as header:
        return _read_model(path, header, texts)


def _read_model(path: Location, header: Header, texts: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensor_count = header.tensor_count
    fields = header.fields(texts=texts)
    listed = []
    for _ in range(tensor_count):
        name = header.string()
        axes = header.scalar("I")
        if axes > MAX_AXES:
            raise ValueError(f"tensor {short_repr(name)} has {axes} axes")
        *sizes, number, offset = header.scalars(header.length * axes + "IQ")
        listed.append((name, tuple(sizes[::-1]), number, offset))

    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {short_repr(alignment, 40)}")
    start = -(-header.at // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, number, offset in listed:
        if number not in GGUF_TYPES:
            from gguf import GGMLQuantizationType

            type_name = next((gguf_type.name for gguf_type in GGMLQuantizationType if gguf_type == number), number)
            known = ", ".join(known_type for known_type, *_ in GGUF_TYPES.values())
            raise CheckpointError(f"{path}: tensor {short_repr(name)} has type {type_name}; use a file with {known}")
        storage_type, *block = GGUF_TYPES[number]
        if name in tensors:
            raise ValueError(f"tensor {short_repr(name)} occurs twice")
        if not shape or shape[-1] % block[0]:
            raise ValueError(f"tensor {short_repr(name)} of {list(shape)} is not divisible into blocks of {block[0]}")
        tensor: Dense | BlockTensor
        if storage_type in FLOAT_DTYPES:
            tensor = Dense(path, start + offset, shape, storage_type)
        else:
            tensor = BlockTensor(path, start + offset, shape, storage_type, (block[0], block[1]))
        excess = tensor.offset + tensor.nbytes - header.size
        if excess > 0:
            raise ValueError(f"tensor {short_repr(name)} ends {excess} bytes after the end of the file")
        tensors[name] = tensor
    total = sum(tensor.nbytes for tensor in tensors.values())
    if total > header.size:
        raise ValueError(f"its tensors have {total} bytes, but the file has {header.size}")
    return fields, tensors


GGUF_NAMES = {part: names.gguf for part, names in TENSOR_NAMES.items()}
NORM_SUFFIX = "norm.weight"
BIAS_TENSORS = {
    "qkv_bias": "q_bias",
    "out_bias": "out_bias",
    "mlp_bias": "gate_bias",
}  # a tensor of each, which no setting tells
# Settings that change what is computed; values other than 0 are rejected unless the architecture reads them.
REFUSED = (
    "expert_count",
    WINDOW_KEY,
    "attention.temperature_scale",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "attention.scale",
    "logit_scale",
    "attention.clamp_kqv",
)
PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
SPLIT_FILE_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def is_whole(path: Location) -> bool:
    """Whether a file is a whole model, or the first part of a split one."""
    part = SPLIT_FILE_NAME.search(path.name)
    return is_gguf(path) and (part is None or int(part[1]) == 1)


def open_gguf(path: Location) -> OpenedCheckpoint:
    """The model in a file, or in all files of a split model; the weights are not read."""
    fields: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for part in _part_paths(path):
        part_fields, part_tensors = read_file(part, texts=isinstance(path, StoredPath))
        fields = part_fields | fields  # the first part has the settings
        tensors |= part_tensors
    is_adapter, count = fields.get("general.type") == "adapter", fields.get("split.tensors.count", len(tensors))
    if is_adapter:
        raise CheckpointError(f"{path} is an adapter; pass its base as the model, and this as the adapter")
    if count != len(tensors):
        raise CheckpointError(f"{path}: expected {count} tensors, found {len(tensors)}; copy all parts again")
    with config_errors(path):
        config = config_from_fields(fields, tensors)
    architecture = ARCHITECTURES[fields["general.architecture"]]
    ignored = ignored_tensors(tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ROPE_TENSORS and name not in ignored}
    tensors = split_fused(config, tensors, architecture.fused, GGUF_NAMES)
    if architecture.norm_shift:
        shift = -architecture.norm_shift
        tensors = {name: Offset(t, shift) if name.endswith(NORM_SUFFIX) else t for name, t in tensors.items()}
    return OpenedCheckpoint(
        format=f"GGUF version {fields['GGUF.version']}",
        path=path,
        config=config,
        tensors=tensors,
        names=GGUF_NAMES,
        interleaved=architecture.interleaved,
        tokenizer=partial(_tokenizer, fields, path, config.vocab_size),
        metadata=lambda: metadata_from_fields(_with_texts(fields, path)),
        notes=describe_ignored(ignored),
    )


def config_from_fields(fields: dict[str, Any], tensors: Mapping[str, Tensor]) -> LlamaConfig:
    """The configuration that a GGUF's settings describe."""
    prefix = fields.get("general.architecture")
    if not isinstance(prefix, str) or prefix not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"general.architecture={short_repr(prefix)} is not supported; llama_jax reads {known}")
    architecture = ARCHITECTURES[prefix]

    def need(key: str) -> Any:
        if f"{prefix}.{key}" not in fields:
            raise ConfigError(f"{prefix}.{key} is missing")
        return fields[f"{prefix}.{key}"]

    def maybe(key: str, default: Any) -> Any:
        return short_decimal(fields.get(f"{prefix}.{key}", default))

    refused = {key: (maybe(key, 0), 0) for key in REFUSED if key not in architecture.reads}
    for key, (value, supported) in (refused | {"attention.causal": (maybe("attention.causal", True), True)}).items():
        if value != supported:
            raise ConfigError(f"{prefix}.{key}={short_repr(value, 40)} is not supported")
    if not tensors:
        raise ConfigError("this is a vocabulary without weights; pass a model, and this as its tokenizer (--tokenizer)")
    if GGUF_NAMES["embedding"] not in tensors:
        raise ConfigError(f"tensor {GGUF_NAMES['embedding']!r} is missing")
    block_count, mtp_layers = need("block_count"), maybe("nextn_predict_layers", 0)
    check_value(f"{prefix}.block_count", block_count, PositiveInt, ConfigError)
    if block_count > MAX_ENTRIES:  # bounds lists that have an entry per layer
        raise ConfigError(f"{prefix}.block_count={block_count} must be at most {MAX_ENTRIES}")
    if type(mtp_layers) is not int or not 0 <= mtp_layers < block_count:
        raise ConfigError(
            f"{prefix}.nextn_predict_layers={short_repr(mtp_layers, 40)} must be below block_count={block_count}"
        )
    n_layers = block_count - mtp_layers
    fields = fields | {
        key: _uniform(key, fields[key], block_count) for name in PER_LAYER if (key := f"{prefix}.{name}") in fields
    }
    dim, n_heads = need("embedding_length"), need("attention.head_count")
    for name, value in (("embedding_length", dim), ("attention.head_count", n_heads)):
        check_value(f"{prefix}.{name}", value, PositiveInt, ConfigError)
    head_dim = maybe("attention.key_length", 0)
    constants = next(family.constants for family in FAMILIES.values() if family.gguf is architecture)
    family_fields = dict(constants) | architecture.fields(maybe, n_layers)
    if architecture.biases:
        family_fields |= {field: GGUF_NAMES[part].format(0) in tensors for field, part in BIAS_TENSORS.items()}
    sizes = LlamaConfig(
        vocab_size=tensors[GGUF_NAMES["embedding"]].shape[0],
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=maybe("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        hidden_dim=family_fields.pop("hidden_dim", None) or need("feed_forward_length"),
        max_seq_len=need("context_length"),
        norm_eps=short_decimal(need("attention.layer_norm_rms_epsilon")),
        rope_theta=maybe("rope.freq_base", 10_000.0),
        tie_embeddings=GGUF_NAMES["lm_head"] not in tensors,
        rope_scaling=None,
        **family_fields,
    )
    for key, size in (("rope.dimension_count", sizes.rope_dim), ("attention.value_length", sizes.head_dim)):
        if maybe(key, size) != size:
            raise ConfigError(
                f"{prefix}.{key}={short_repr(maybe(key, 0), 40)} is not supported with head_dim={sizes.head_dim}"
            )
    return with_scaling(fields, sizes, tensors, prefix, whole_yarn=architecture.whole_yarn)


def _uniform(key: str, value: Any, n_layers: int) -> Any:
    """A setting that must be equal for all layers; a file may list it per layer."""
    if not hasattr(value, "__len__") or isinstance(value, str):
        return value
    if len(value) != n_layers or any(number != value[0] for number in value):
        raise ConfigError(f"{key}={short_repr(list(value), 40)} must be one number, or {n_layers} equal ones")
    return value[0]


def _part_paths(path: Location) -> list[Location]:
    name = SPLIT_FILE_NAME.search(path.name)
    if name is None:
        return [path]
    count = int(name[2])
    stem = path.name[: name.start()]
    parts: list[Location] = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file() or not is_gguf(part):
            raise CheckpointError(f"{path} is one of {count} parts, but {part.name} is missing; copy it to the same folder")
    return parts


def _tokenizer(fields: Mapping[str, Any], path: Location, vocab_size: int) -> Tokenizer | None:
    if fields.get("tokenizer.ggml.model", "no_vocab") in ("no_vocab", "none"):
        return find_tokenizer(path.parent, vocab_size)
    from llama_jax.tokenizers.gguf import from_metadata

    tokenizer = from_metadata(_with_texts(fields, path), str(path))
    warn_of_size(tokenizer, vocab_size, path)
    return tokenizer


def _with_texts(fields: Mapping[str, Any], path: Location) -> Mapping[str, Any]:
    """All fields of a file, including the strings, which reading a model does not need."""
    if isinstance(path, StoredPath):
        return fields
    with open_header(_part_paths(path)[0], CheckpointError) as header:
        return header.fields()


# The values of general.file_type for the type of the matrices, and the quantization_version.
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18}
KEPT_TYPES = FILE_TYPES | {
    **{"Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "MXFP4": 38},
    **{"IQ1_S": 24, "IQ1_M": 31, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ2_S": 28, "IQ3_XXS": 23, "IQ3_S": 26},
    **{"IQ4_NL": 25, "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37},
}
QUANTIZATION_VERSION = 2
Blocks = Literal["q8_0", "q6_k", "q5_k", "q5_k-pure", "q4_k", "q4_k-pure", "q4_0", "q4_0-pure"]  # types to quantize to


def read_storage_types(path: Location) -> dict[str, str]:
    """The kind of every tensor by its name in a file, or in all files of a split model."""
    return {
        name: tensor.storage_type for part in _part_paths(path) for name, tensor in read_file(part, texts=False)[1].items()
    }


def can_copy_blocks(tensor: TensorInfo) -> bool:
    """Whether a tensor's blocks can be copied into a GGUF."""
    return tensor.storage_type in KEPT_TYPES and row_bytes_of(tensor) is not None


# By kind: numbers in a block with its own scale, steps of its grid, and whether that is around 0 or from the least number.
GRIDS = {
    **{"Q4_0": (32, 8, True), "Q5_0": (32, 16, True), "Q8_0": (32, 127, True), "Q6_K": (16, 32, True)},
    **{"Q4_1": (32, 15, False), "Q5_1": (32, 31, False), "Q4_K": (32, 15, False), "Q5_K": (32, 31, False)},
}


def dither(rows: np.ndarray, storage_type: str, noise: np.random.Generator) -> np.ndarray:
    """Rows, float32[rows, columns], that quantizing rounds up or down at random, so that the mean stays as it is.

    Rounded to the nearest, numbers of a grid to which an adapter adds less than half a step would all become what they were,
    and nothing would be left of the adapter. The largest of a block, from which its scale follows, are not changed.
    """
    block, steps, around_zero = GRIDS[storage_type]
    x = rows.reshape(-1, block)
    high = np.abs(x).max(axis=1, keepdims=True) if around_zero else x.max(axis=1, keepdims=True)
    low = -high if around_zero else x.min(axis=1, keepdims=True)
    step = (high if around_zero else high - low) / steps
    moved = np.clip(x + step * (noise.random(x.shape, np.float32) - np.float32(0.5)), low, high)
    return np.where((x == low) | (x == high), x, moved).reshape(rows.shape)


def write_gguf(
    path: Path,
    opened: OpenedCheckpoint,
    tokenizer: Tokenizer | None,
    storage_type: str | None = None,
    *,
    before: Mapping[str, str] = MappingProxyType({}),
    progress: Callable[[list[WrittenTensor]], Iterable[WrittenTensor]] | None = None,
) -> None:
    """Write a model as GGUF version 3, tensor by tensor, as llama.cpp reads it.

    Args:
      tokenizer: stored in the file, except for tokens without a row in the embedding, which llama.cpp rejects; None gives a
        file that runs only on token ids.
      storage_type: type of the matrices: "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K" or "Q6_K", mixed as in
        `model.mixtures` unless it ends in "-pure"; None keeps blocks of quantized tensors and gives the others the type of
        the embedding. Vectors are float32, as llama.cpp's kernels require.
      before: types of the model's matrices, by their names in the file, before a small change was added to them. Without
        `storage_type`, those that are floats now are quantized as before, and rounded at random if the type is the same
        (`dither`).
    """
    from llama_jax.tokenizers.gguf import to_metadata

    c = opened.config
    architecture = architecture_of(c)
    names, todo = GGUF_NAMES, tensors_to_write(opened, interleaved=architecture.interleaved)
    if (c.out_bias or c.mlp_bias) and not architecture.biases:
        refuse_to_store(f"out_bias={c.out_bias} and mlp_bias={c.mlp_bias}", f"ignore them in {architecture.name}")
    if architecture.fused:
        todo, fused_names = fuse(todo, architecture.fused)
        names = names | fused_names
    if architecture.norm_shift:
        todo = [replace(p, tensor=Offset(p.tensor, architecture.norm_shift)) if p.part.endswith("norm") else p for p in todo]
    keep, storage_type = storage_type is None, storage_type or storage_type_of(todo[0].tensor.dtype)
    if base_format(storage_type) not in FILE_TYPES:
        raise CheckpointError(f"{opened.path} is {storage_type}; GGUF is written only as {', '.join(FILE_TYPES)}")

    def name_of(piece: WrittenTensor) -> str:
        return names[piece.part].format(piece.layer)

    def stored_as(piece: WrittenTensor) -> str:
        if keep and can_copy_blocks(piece.tensor):
            return piece.tensor.storage_type
        if len(piece.tensor.shape) == 1 or (piece.part == "router" and storage_type not in FLOAT_DTYPES):
            return "F32"
        if keep and name_of(piece) in before:
            return before[name_of(piece)]
        if storage_type in FLOAT_DTYPES:
            return storage_type
        part = format_of_part(piece.part, storage_type.lower(), piece.layer, c.n_layers)
        return with_fallback(part, piece.tensor.shape[-1]).name.upper()

    storage_types = [stored_as(piece) for piece in todo]
    for piece, stored in zip(todo, storage_types, strict=True):
        block = next((numbers for name, numbers, _ in GGUF_TYPES.values() if name == stored), 1)
        if piece.tensor.shape[-1] % block:
            raise CheckpointError(f"{piece.label} has rows of {piece.tensor.shape[-1]}; {stored} needs multiples of {block}")
        if (
            stored not in FLOAT_DTYPES
            and not (keep and can_copy_blocks(piece.tensor))
            and QUANT_FORMATS[stored.lower()].encode is None
        ):
            made = ", ".join(get_args(Blocks))
            raise CheckpointError(f"{piece.label} is in {stored.lower()}, which is only read; set another dtype: {made}")
    matrices = Counter(stored for piece, stored in zip(todo, storage_types, strict=True) if len(piece.tensor.shape) > 1)
    most = matrices.most_common(1)[0][0]
    rope, rope_tensors = settings_and_tensors(c, architecture.name, whole_yarn=architecture.whole_yarn)

    sizes = {
        "vocab_size": c.vocab_size,
        "embedding_length": c.dim,
        "block_count": c.n_layers,
        "feed_forward_length": c.hidden_dim,
        "attention.head_count": c.n_heads,
        "attention.head_count_kv": c.n_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "rope.dimension_count": c.rope_dim,
    }
    eps = {"attention.layer_norm_rms_epsilon": float(c.norm_eps)}
    settings: dict[str, Any] = {"general.file_type": KEPT_TYPES[most if keep else base_format(storage_type)]}
    settings |= {"general.quantization_version": QUANTIZATION_VERSION}
    architecture_settings = {key: int(size) for key, size in sizes.items()} | eps | architecture.settings(c)
    settings |= {f"{architecture.name}.{key}": value for key, value in architecture_settings.items()} | rope
    settings |= metadata_to_fields(opened.metadata(), bool(getattr(tokenizer, "strips_right", ())))
    settings |= to_metadata(tokenizer, c.vocab_size) if tokenizer else {"tokenizer.ggml.model": "no_vocab"}
    listed = [(name, factors.shape, "F32") for name, factors in rope_tensors.items()]
    listed += [(name_of(p), p.tensor.shape, stored) for p, stored in zip(todo, storage_types, strict=True)]
    noise = np.random.default_rng(0)
    with new_file(path, architecture.name, settings, listed) as write:
        for factors in rope_tensors.values():
            write(factors)
        stored_in = dict(zip(map(id, todo), storage_types, strict=True))
        for piece in progress(todo) if progress else todo:
            stored = stored_in[id(piece)]
            blocks = row_bytes_of(piece.tensor) if keep and stored == piece.tensor.storage_type else None
            if blocks is not None:
                write(blocks.read(0, blocks.shape[0]))
            elif stored not in FLOAT_DTYPES:
                form = QUANT_FORMATS[stored.lower()]
                assert form.encode is not None  # true of all types in `FILE_TYPES`
                runs = []
                for unrounded in piece.rows(FLOAT_DTYPES["F32"]):
                    rows = dither(unrounded, stored, noise) if stored == before.get(name_of(piece)) else unrounded
                    step = max(1, ENCODED_AT_ONCE * len(rows) // rows.size)  # rows that fit into a CPU's cache
                    runs += [blocks_from_planes(form.encode(rows[i : i + step]), form) for i in range(0, len(rows), step)]
                write(np.concatenate(runs).reshape(-1))
            else:
                buffer, at = np.empty(piece.tensor.shape, FLOAT_DTYPES[stored]), 0
                for rows in piece.rows(FLOAT_DTYPES[stored]):
                    buffer[at : at + len(rows)] = rows
                    at += len(rows)
                write(buffer.view(np.uint8))


@contextmanager
def new_file(
    path: Path, architecture: str, settings: Mapping[str, Any], tensors: Iterable[tuple[str, tuple[int, ...], str]]
) -> Iterator[Callable[[np.ndarray], None]]:
    """Write all of a GGUF except its tensors' data; yields a function that writes the next tensor's data.

    Args:
      tensors: name, shape and type of each tensor.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(path, architecture)
    try:
        for key, value in settings.items():
            writer.add_key_value(key, _as_bytes(value), *_gguf_types(value))
        for name, shape, storage_type in tensors:
            raw = GGMLQuantizationType[storage_type]
            in_bytes = quants.quant_shape_to_byte_shape(shape, raw)
            writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), math.prod(in_bytes), raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        yield writer.write_tensor_data
    finally:
        writer.close()


def _as_bytes(value: Any) -> Any:
    """Strings as the bytes that they were read from (`Header.string`)."""
    if isinstance(value, list):
        return [_as_bytes(entry) for entry in value]
    return value.encode(errors="surrogateescape") if isinstance(value, str) else value


def _gguf_types(value: Any) -> tuple[Any, Any]:
    """The GGUF type of a setting, and of a list's entries; llama.cpp checks both."""
    from gguf import GGUFValueType as Type

    if isinstance(value, list):
        return Type.ARRAY, {bool: Type.BOOL, int: Type.INT32, float: Type.FLOAT32, str: Type.STRING}[type(value[0])]
    integer_type = Type.INT32 if type(value) is int and value < 0 else Type.UINT32
    return {bool: Type.BOOL, int: integer_type, float: Type.FLOAT32, str: Type.STRING}[type(value)], None


GGUF_FORMAT = WeightFormat(
    "gguf",
    lambda path: path.is_file() and is_gguf(path),
    open_gguf,
    write_gguf,
    suffixes=(".gguf",),
    is_whole=is_whole,
    dtypes=(*WeightFormat.dtypes, *get_args(Blocks)),
    can_keep=can_copy_blocks,
    in_stores=True,
)
