"""Meta's releases: ``params.json`` and ``consolidated.NN.pth``, one file for each rank of model parallelism.

Source: meta-llama/llama and meta-llama/llama-models, model.py: ColumnParallelLinear holds rows of its weight [out, in],
RowParallelLinear columns; the embedding is split by columns in Llama 1 and 2, by rows (the vocabulary) since Llama 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from llama_jax.config import LlamaConfig, RopeScaling
from llama_jax.config.presets import PRESETS
from llama_jax.errors import CheckpointError, ConfigError, short_repr
from llama_jax.formats.lazy_tensors import Joined, Tensor
from llama_jax.formats.model_folder import check_present, config_errors, read_model_metadata
from llama_jax.formats.torch_pickle import is_torch, read_tensors
from llama_jax.formats.weight_format import TENSOR_NAMES, OpenedCheckpoint, WeightFormat, describe_ignored, ignored_tensors
from llama_jax.storage import Location
from llama_jax.storage.paths import read_object
from llama_jax.tokenizers import find_tokenizer

META_NAMES = {part: names.meta for part, names in TENSOR_NAMES.items() if names.meta}
# Axis along which the ranks' parts are concatenated; every rank has all of the tensors that are not listed (norms).
SPLIT_AXES = dict.fromkeys(("q", "k", "v", "gate", "up", "lm_head"), 0) | dict.fromkeys(("out", "down"), 1)
# Required settings of params.json, and all known ones.
REQUIRED_SETTINGS = ("dim", "n_layers", "n_heads", "vocab_size", "norm_eps")
KNOWN_SETTINGS = {*REQUIRED_SETTINGS, "n_kv_heads", "multiple_of", "ffn_dim_multiplier", "max_seq_len", "max_batch_size"}
KNOWN_SETTINGS |= {"rope_theta", "use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor"}


def open_meta(path: Location) -> OpenedCheckpoint:
    """The model in a folder, or in the folder of one of its files; its weights are not read."""
    folder = path if path.is_dir() else path.parent
    stored = list(map(read_tensors, _pth_files(folder)))
    ignored = ignored_tensors(stored[0])
    ranks = [{name: rank[name] for name in rank if name not in ignored} for rank in stored]
    tensors: dict[str, Tensor] = {}
    axes = {template: SPLIT_AXES.get(part) for part, template in META_NAMES.items()}
    for name in ranks[0]:
        if any(name not in rank for rank in ranks):
            raise CheckpointError(
                f"{folder}: tensor {short_repr(name, 80)} is not in all {len(ranks)} files; copy them from one release"
            )
        parts = [rank[name] for rank in ranks]
        axis = axes.get(re.sub(r"^layers\.\d+", "layers.{}", name))
        if len(ranks) == 1 or (axis is None and name != META_NAMES["embedding"]):
            tensors[name] = parts[0]
            continue
        if (
            any(part.shape != parts[0].shape or part.storage_type != parts[0].storage_type for part in parts)
            or len(parts[0].shape) != 2
        ):
            raise CheckpointError(
                f"{folder}: the parts of tensor {short_repr(name, 80)} do not fit together; copy them again"
            )
        if axis is None:
            # Split by vocabulary if each part is as wide as a norm, which ranks do not split.
            norm = ranks[0].get(META_NAMES["final_norm"])
            axis = 0 if norm is not None and parts[0].shape[1:] == norm.shape else 1
        tensors[name] = Joined(parts, axis)
    config = _read_params_json(folder, tensors)
    _check_ranks(folder, ranks[0], config, len(ranks))
    return OpenedCheckpoint(
        format=f"Meta .pth, {len(ranks)} file{'s' * (len(ranks) > 1)}",
        path=folder,
        config=config,
        tensors=tensors,
        names=META_NAMES,
        interleaved=True,
        tokenizer=partial(find_tokenizer, folder, config.vocab_size),
        metadata=partial(read_model_metadata, folder),
        notes=describe_ignored(ignored),
    )


def is_meta(path: Location) -> bool:
    """Whether a folder holds a params.json and at least one .pth file, or a torch file is next to a params.json."""
    if path.is_dir():
        return (path / "params.json").exists() and any(path.glob("*.pth"))
    return is_torch(path) and (path.parent / "params.json").exists()


def list_pth_files(names: Collection[str], read: Callable[[str], bytes], folder: str) -> list[str] | None:
    """See `WeightFormat.files`."""
    shards = [name for name in names if name.endswith(".pth") and "/" not in name]
    return ["params.json", *shards] if "params.json" in names and shards else None


def config_from_params(settings: Mapping[str, Any], vocab_size: int, hidden_dim: int, tied: bool = False) -> LlamaConfig:
    """The configuration that a parsed ``params.json`` describes.

    Some of it is fixed by Meta's code rather than the file. The rope scaling factor is 8 for Llama 3.1 and 32 for 3.2, which
    is recognized by its sizes. The context is not stored: 2,048 for Llama 1, 4,096 for 2, 8,192 for 3, 131,072 with scaled
    rope, 16,384 for CodeLlama (theta 1e6).

    Args:
      settings: the settings.
      vocab_size: V of the embedding; early releases store -1, the tokenizer's size.
      hidden_dim: F of the weights, which `multiple_of` and `ffn_dim_multiplier` imply by a rule that changed.
      tied: whether there is no output projection.
    """
    unknown = [name for name in settings if name not in KNOWN_SETTINGS]
    if unknown:
        raise ConfigError(f"{unknown[0][:60]}={short_repr(settings[unknown[0]])} is not supported")
    check_present(settings, REQUIRED_SETTINGS)
    if settings["vocab_size"] not in (-1, vocab_size):
        raise ConfigError(f"vocab_size={short_repr(settings['vocab_size'], 40)} but the embedding has {vocab_size} rows")
    n_heads, theta = settings["n_heads"], settings.get("rope_theta", 10_000.0)
    n_kv_heads = settings.get("n_kv_heads")
    scaling = None
    if settings.get("use_scaled_rope", False):
        sizes = settings["dim"], settings["n_layers"], n_heads
        small = any(sizes == (c.dim, c.n_layers, c.n_heads) for name, c in PRESETS.items() if name.startswith("llama-3.2"))
        scaling = RopeScaling(
            "llama3",
            settings.get("rope_scaling_factor") or (32.0 if small else 8.0),
            high_freq_factor=settings.get("rope_high_freq_factor") or 4.0,
        )
    if "max_seq_len" in settings:
        context = settings["max_seq_len"]
    elif scaling is not None:
        context = 131_072
    elif theta == 500_000:
        context = 8192
    elif theta == 1_000_000:
        context = 16_384
    else:  # Llama 1 has eps 1e-6, except 65B: 64 heads without grouping, unlike any Llama 2
        first = settings["norm_eps"] == 1e-6 or (n_heads == 64 and n_kv_heads is None)
        context = 2048 if first else 4096
    return LlamaConfig(
        vocab_size=vocab_size,
        dim=settings["dim"],
        n_layers=settings["n_layers"],
        n_heads=n_heads,
        n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        hidden_dim=hidden_dim,
        max_seq_len=context,
        norm_eps=settings["norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=tied,
    )


def _read_params_json(folder: Location, tensors: Mapping[str, Tensor]) -> LlamaConfig:
    path = folder / "params.json"
    settings = read_object(path, CheckpointError)
    rows = {}
    for part in ("embedding", "gate"):
        name = META_NAMES[part].format(0)
        if name not in tensors or len(tensors[name].shape) != 2:
            raise CheckpointError(f"{folder}: tensor {name!r} is missing or not a matrix; the configuration needs it")
        rows[part] = tensors[name].shape[0]
    with config_errors(path):
        return config_from_params(settings, rows["embedding"], rows["gate"], tied=META_NAMES["lm_head"] not in tensors)


def _check_ranks(folder: Location, rank: Mapping[str, Tensor], config: LlamaConfig, n_files: int) -> None:
    """Check the number of files: each holds its part of the rows of the query projection."""
    query = rank.get(META_NAMES["q"].format(0))
    rows = config.n_heads * config.head_dim
    if query is not None and query.shape and query.shape[0] < rows and rows % query.shape[0] == 0:
        needed = rows // query.shape[0]
        if needed != n_files:
            raise CheckpointError(f"{folder} has {n_files} of the {needed} files consolidated.NN.pth; copy the others there")


def _pth_files(folder: Location) -> list[Location]:
    paths: list[Location] = [*folder.glob("*.pth")]
    paths.sort(key=lambda path: path.name)
    for i, path in enumerate(paths):
        if path.name != f"consolidated.{i:02}.pth" or not path.is_file():  # reading a pipe would block
            raise CheckpointError(f"{folder} has {path.name} where consolidated.{i:02}.pth should be; copy all of the model")
    return paths


META_FORMAT = WeightFormat("meta", is_meta, open_meta, files=list_pth_files)
