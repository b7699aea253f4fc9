"""llama2.c's files: ``.bin`` of version 0 (legacy, float32), 1 (float32) and 2 (int8), and its training ``ckpt.pt``.

Source: karpathy/llama2.c, export.py (legacy_export, version1_export, version2_export) and train.py. No file stores norm_eps
or theta: the code that reads and writes them uses 1e-5 and 10,000.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.config.families import features
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.formats.build_params import WrittenTensor, tensors_to_write
from llama_jax.formats.lazy_tensors import FLOAT_DTYPES, Dense, Tensor, read_bytes
from llama_jax.formats.meta import META_NAMES
from llama_jax.formats.model_folder import read_model_metadata
from llama_jax.formats.torch_pickle import is_torch, read_pickled, tensors_of
from llama_jax.formats.weight_format import OpenedCheckpoint, WeightFormat, describe_ignored, ignored_tensors, parts_of
from llama_jax.model.params import shape_of, specs_for
from llama_jax.model.rope import rotary_frequencies
from llama_jax.storage import Location
from llama_jax.tokenizers import Tokenizer, find_tokenizer

LLAMA2C_MAGIC = struct.pack("<I", 0x616B3432)  # "ak42"; a legacy file has none
HEADER_BYTES = 256  # bytes, from version 1 on
NORM_EPS, THETA = 1e-5, 10_000.0  # not stored in any file
MAX_LLAMA2C_LAYERS = 4096  # a layer can take less space in a file than in memory
# The parts in each version's order; a part of all layers is contiguous. The files have no names: these, including those of
# the two tables of angles, are from llama2.c's run.c.
RUN_C_NAMES = {
    "embedding": "token_embedding_table",
    "attention_norm": "rms_att_weight.{}",
    "q": "wq.{}",
    "k": "wk.{}",
    "v": "wv.{}",
    "out": "wo.{}",
    "ffn_norm": "rms_ffn_weight.{}",
    "gate": "w1.{}",
    "up": "w3.{}",
    "down": "w2.{}",
    "final_norm": "rms_final_weight",
    "lm_head": "wcls",
    "cos": "freq_cis_real",
    "sin": "freq_cis_imag",
}
IN_LAYER = ("attention_norm", "q", "k", "v", "out", "ffn_norm", "gate", "down", "up")
LEGACY = ("embedding", *IN_LAYER, "final_norm", "cos", "sin", "lm_head")
RUN_C_NORMS = ("attention_norm", "ffn_norm", "final_norm")
VERSIONED = (*RUN_C_NORMS, "embedding", "q", "k", "v", "out", "gate", "down", "up", "lm_head")
COMPILED_PREFIX = "_orig_mod."  # in a ckpt.pt, added to names by torch.compile


@dataclass(frozen=True)
class GroupedTensor:
    """A tensor of version 2: int8[rows, columns], then a float32 scale for each run of `group` values."""

    path: Location
    offset: int
    shape: tuple[int, ...]
    group: int
    dtype = np.dtype(np.float32)
    storage_type = "int8"

    @property
    def nbytes(self) -> int:
        numbers = math.prod(self.shape)
        return numbers + numbers // self.group * 4

    def read(self, start: int, stop: int) -> np.ndarray:
        columns = self.shape[1]
        first, last = start * columns, stop * columns
        low, high = first // self.group, -(-last // self.group)  # groups may span rows
        numbers = read_bytes(self.path, self.offset + first, last - first).view(np.int8)
        at = self.offset + math.prod(self.shape) + 4 * low
        scales = read_bytes(self.path, at, 4 * (high - low)).view("<f4")
        spread = np.repeat(scales, self.group)[first - low * self.group :][: last - first]
        with np.errstate(all="ignore"):  # a damaged scale gives NaN, reported later
            return (numbers * spread).reshape(stop - start, columns)


def is_llama2c(path: Location) -> bool:
    """Whether header and size are those of a ``.bin`` file, or the content is that of a ``ckpt.pt``."""
    if not path.is_file():
        return False
    if is_torch(path):
        try:
            return "model_args" in read_pickled(path)
        except CheckpointError:
            return False
    with path.open("rb") as file:
        return file.read(4) == LLAMA2C_MAGIC or _legacy_config(path) is not None


def open_llama2c(path: Location) -> OpenedCheckpoint:
    """The model in a file; its weights are not read."""
    if is_torch(path):
        return _open_training(path)
    with path.open("rb") as file:
        start = file.read(HEADER_BYTES)
    if start[:4] != LLAMA2C_MAGIC:
        config = _legacy_config(path)
        if config is None:
            raise CheckpointError(f"{path} is not a whole llama2.c file: its header implies another size; copy it again")
        legacy = dict(_locate_tensors(path, config, LEGACY, 28))
        _check_rotary(path, config, legacy.pop(RUN_C_NAMES["cos"]), legacy.pop(RUN_C_NAMES["sin"]))
        return _checkpoint("llama2.c", path, config, legacy)
    try:
        version, *sizes, tied, group = struct.unpack("<i7iBi", start[4:41])
        if version not in (1, 2):
            raise CheckpointError(f"{path}: version {version} of llama2.c's format is not supported; use 0, 1 or 2")
        config = _config_from_sizes(sizes, bool(tied))
    except (struct.error, ConfigError) as error:
        raise CheckpointError(f"{path}: its header is damaged ({error}); copy it again") from None
    largest = path.stat().st_size
    if config.n_layers > MAX_LLAMA2C_LAYERS or (version == 2 and not 0 < group < largest):
        raise CheckpointError(f"{path}: its header is damaged ({config.n_layers} layers, groups of {group}); copy it again")
    tensors = dict(_locate_tensors(path, config, VERSIONED, HEADER_BYTES, group if version == 2 else None))
    end = max(tensor.offset + tensor.nbytes for tensor in tensors.values())
    if end != largest:
        raise CheckpointError(f"{path} has {largest} bytes, but its header implies {end}; copy it again")
    return _checkpoint(f"llama2.c version {version}", path, config, tensors)


def _checkpoint(
    what: str, path: Location, config: LlamaConfig, tensors: Mapping[str, Tensor], names=RUN_C_NAMES
) -> OpenedCheckpoint:
    return OpenedCheckpoint(
        format=what,
        path=path,
        config=config,
        tensors=tensors,
        names=names,
        interleaved=True,
        tokenizer=partial(find_tokenizer, path.parent, config.vocab_size),
        metadata=partial(read_model_metadata, path.parent, card=False),
    )


def _config_from_sizes(sizes: Any, tied: bool) -> LlamaConfig:
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len = map(int, sizes)
    return LlamaConfig(
        vocab_size=vocab_size,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        hidden_dim=hidden_dim,
        max_seq_len=max_seq_len,
        norm_eps=NORM_EPS,
        rope_theta=THETA,
        tie_embeddings=tied,
    )


def _legacy_config(path: Location) -> LlamaConfig | None:
    """The configuration if the header, seven int32, describes a file of this size."""
    with path.open("rb") as file:
        start = file.read(28)
    if len(start) < 28:
        return None
    sizes = list(struct.unpack("<7i", start))
    tied = sizes[5] > 0  # a negative vocabulary means a separate classifier
    sizes[5] = abs(sizes[5])
    try:
        config = _config_from_sizes(sizes, tied)
    except ConfigError:
        return None
    if config.n_layers > MAX_LLAMA2C_LAYERS:
        return None
    numbers = sum(
        math.prod(shape) * (config.n_layers if "{}" in RUN_C_NAMES[part] else 1)
        for part, shape in _part_shapes(config, LEGACY).items()
    )
    return config if path.stat().st_size == 28 + 4 * numbers else None


def _part_shapes(c: LlamaConfig, order: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """The shape of each part in one layer, in the file's order."""
    shapes = {part.name: shape_of(part.axes, c) for spec in specs_for(c) for part in parts_of(spec)}
    shapes |= dict.fromkeys(("cos", "sin"), (c.max_seq_len, c.head_dim // 2))
    return {part: shapes[part] for part in order if part in shapes}


def _locate_tensors(
    path: Location, config: LlamaConfig, order: tuple[str, ...], offset: int, group: int | None = None
) -> Iterator[tuple[str, Dense | GroupedTensor]]:
    """Name and location of every tensor, in the file's order; with a `group`, matrices are those of version 2."""
    for part, shape in _part_shapes(config, order).items():
        for i in range(config.n_layers if "{}" in RUN_C_NAMES[part] else 1):
            name = RUN_C_NAMES[part].format(i)
            tensor: Dense | GroupedTensor = Dense(path, offset, shape, "F32")
            if group is not None and part not in RUN_C_NORMS:
                if math.prod(shape) % group:
                    raise CheckpointError(
                        f"{path}: {name} of {list(shape)} does not divide into groups of {group}; copy it again"
                    )
                tensor = GroupedTensor(path, offset, shape, group)
            yield name, tensor
            offset += tensor.nbytes


def _check_rotary(path: Location, config: LlamaConfig, cos: Tensor, sin: Tensor) -> None:
    """Reject a file made with another theta: its stored angles differ, and the header has no theta."""
    rows = min(16, config.max_seq_len)
    angles = np.outer(np.arange(rows), rotary_frequencies(config)[0])
    stored = cos.read(0, rows) + 1j * sin.read(0, rows)
    if stored.any() and not np.allclose(stored, np.exp(1j * angles), atol=1e-4):
        raise CheckpointError(
            f"{path}: the stored rotary angles are not those of theta={config.rope_theta:g}, which this format implies"
        )


def _open_training(path: Location) -> OpenedCheckpoint:
    """A ``ckpt.pt``: settings under "model_args", weights by Meta's names under "model", and the optimizer's state."""
    content = read_pickled(path)
    args = content["model_args"]
    try:
        stored = tensors_of(content["model"], path)
        ignored = ignored_tensors(stored)
        tensors = {name.removeprefix(COMPILED_PREFIX): tensor for name, tensor in stored.items() if name not in ignored}
        table, head = tensors[META_NAMES["embedding"]], tensors.get(META_NAMES["lm_head"])
        config = LlamaConfig(
            vocab_size=table.shape[0],
            dim=args["dim"],
            n_layers=args["n_layers"],
            n_heads=args["n_heads"],
            n_kv_heads=args.get("n_kv_heads") or args["n_heads"],
            hidden_dim=tensors[META_NAMES["gate"].format(0)].shape[0],
            max_seq_len=args["max_seq_len"],
            norm_eps=args.get("norm_eps", NORM_EPS),
            rope_theta=THETA,
            tie_embeddings=head is None or head == table,
        )
    except (LookupError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{path}: its contents do not describe a Llama ({error}); copy it again") from None
    return replace(_checkpoint("llama2.c ckpt.pt", path, config, tensors, META_NAMES), notes=describe_ignored(ignored))


def write_llama2c(
    path: Path,
    opened: OpenedCheckpoint,
    tokenizer: Tokenizer | None = None,
    storage_type: str | None = None,
    *,
    progress: Callable[[list[WrittenTensor]], Iterable[WrittenTensor]] | None = None,
) -> None:
    """Write a model as a legacy ``.bin``, float32, as run.c reads it; the vocabulary is written next to it."""
    c = opened.config
    fixed: dict[str, Any] = {"norm_eps": NORM_EPS, "rope_theta": THETA, "rope_scaling": None, "head_dim": c.dim // c.n_heads}
    beyond = [*sorted(features(c)), *(f"{name}={getattr(c, name)}" for name in fixed if getattr(c, name) != fixed[name])]
    if beyond:
        raise CheckpointError(f"{' and '.join(beyond)} cannot be stored in llama2.c's format, which supports only Llama")
    angles = np.outer(np.arange(c.max_seq_len), rotary_frequencies(c)[0])
    todo = sorted(tensors_to_write(opened, interleaved=True), key=lambda piece: (LEGACY.index(piece.part), piece.layer))
    with path.open("wb") as file:
        vocab_size = c.vocab_size if c.tie_embeddings else -c.vocab_size
        file.write(struct.pack("<7i", c.dim, c.hidden_dim, c.n_layers, c.n_heads, c.n_kv_heads, vocab_size, c.max_seq_len))
        for piece in progress(todo) if progress else todo:
            for rows in piece.rows(FLOAT_DTYPES["F32"]):
                file.write(rows.data)
            if piece.part == "final_norm":
                file.write(np.cos(angles).astype("<f4").data)
                file.write(np.sin(angles).astype("<f4").data)


LLAMA2C_FORMAT = WeightFormat(
    "llama2c",
    is_llama2c,
    open_llama2c,
    write_llama2c,
    suffixes=(".bin", ".pt"),
    is_whole=is_llama2c,
    dtypes=("float32",),
)
