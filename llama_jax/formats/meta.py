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
from llama_jax.errors import CheckpointError, ConfigError, shown
from llama_jax.formats.lazy_tensors import Joined, Tensor
from llama_jax.formats.model_folder import read_about
from llama_jax.formats.torch_pickle import is_torch, read_tensors
from llama_jax.formats.weight_format import TENSOR_NAMES, Opened, WeightFormat, describe_ignored, ignored_tensors
from llama_jax.storage import Location
from llama_jax.storage.paths import read_object
from llama_jax.tokenizers import find_tokenizer

NAMES = {part: names.meta for part, names in TENSOR_NAMES.items() if names.meta}
# Axis along which the ranks' parts are concatenated; every rank has all of the tensors that are not listed (norms).
SPLIT_AXES = dict.fromkeys(("q", "k", "v", "gate", "up", "lm_head"), 0) | dict.fromkeys(("out", "down"), 1)
# Required settings of params.json, and all known ones.
REQUIRED_SETTINGS = ("dim", "n_layers", "n_heads", "vocab_size", "norm_eps")
KNOWN_SETTINGS = {*REQUIRED_SETTINGS, "n_kv_heads", "multiple_of", "ffn_dim_multiplier", "max_seq_len", "max_batch_size"}
KNOWN_SETTINGS |= {"rope_theta", "use_scaled_rope", "rope_scaling_factor", "rope_high_freq_factor"}


def open_folder(path: Location) -> Opened:
    """The model in a folder, or in the folder of one of its files; its weights are not read."""
    folder = path if path.is_dir() else path.parent
    stored = list(map(read_tensors, _files(folder)))
    ignored = ignored_tensors(stored[0])
    ranks = [{name: rank[name] for name in rank if name not in ignored} for rank in stored]
    tensors: dict[str, Tensor] = {}
    axes = {template: SPLIT_AXES.get(part) for part, template in NAMES.items()}
    for name in ranks[0]:
        if any(name not in rank for rank in ranks):
            raise CheckpointError(
                f"{folder}: tensor {shown(name, 80)} is not in all {len(ranks)} files; copy them from one release"
            )
        parts = [rank[name] for rank in ranks]
        axis = axes.get(re.sub(r"^layers\.\d+", "layers.{}", name))
        if len(ranks) == 1 or (axis is None and name != NAMES["embedding"]):
            tensors[name] = parts[0]
            continue
        if any(part.shape != parts[0].shape or part.kind != parts[0].kind for part in parts) or len(parts[0].shape) != 2:
            raise CheckpointError(f"{folder}: the parts of tensor {shown(name, 80)} do not fit together; copy them again")
        if axis is None:
            # Split by vocabulary if each part is as wide as a norm, which ranks do not split.
            norm = ranks[0].get(NAMES["final_norm"])
            axis = 0 if norm is not None and parts[0].shape[1:] == norm.shape else 1
        tensors[name] = Joined(parts, axis)
    config = _config(folder, tensors)
    _check_ranks(folder, ranks[0], config, len(ranks))
    return Opened(
        format=f"Meta .pth, {len(ranks)} file{'s' * (len(ranks) > 1)}",
        path=folder,
        config=config,
        tensors=tensors,
        names=NAMES,
        interleaved=True,
        tokenizer=partial(find_tokenizer, folder, config.vocab_size),
        about=partial(read_about, folder),
        notes=describe_ignored(ignored),
    )


def recognizes(path: Location) -> bool:
    """Whether a folder holds a params.json and at least one .pth file, or a torch file is next to a params.json."""
    if path.is_dir():
        return (path / "params.json").exists() and any(path.glob("*.pth"))
    return is_torch(path) and (path.parent / "params.json").exists()


def files(names: Collection[str], read: Callable[[str], bytes], place: str) -> list[str] | None:
    """See `WeightFormat.files`."""
    shards = [name for name in names if name.endswith(".pth") and "/" not in name]
    return ["params.json", *shards] if "params.json" in names and shards else None


def config_from_params(found: Mapping[str, Any], vocab_size: int, hidden_dim: int, tied: bool = False) -> LlamaConfig:
    """The configuration that a parsed ``params.json`` describes.

    Some of it is fixed by Meta's code rather than the file. The rope scaling factor is 8 for Llama 3.1 and 32 for 3.2, which
    is recognized by its sizes. The context is not stored: 2,048 for Llama 1, 4,096 for 2, 8,192 for 3, 131,072 with scaled
    rope, 16,384 for CodeLlama (theta 1e6).

    Args:
      found: the settings.
      vocab_size: V of the embedding; early releases store -1, the tokenizer's size.
      hidden_dim: F of the weights, which `multiple_of` and `ffn_dim_multiplier` imply by a rule that changed.
      tied: whether there is no output projection.
    """
    unknown = [name for name in found if name not in KNOWN_SETTINGS]
    if unknown:
        raise ConfigError(f"{unknown[0][:60]}={shown(found[unknown[0]])} is not supported")
    missing = [name for name in REQUIRED_SETTINGS if name not in found]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is missing")
    if found["vocab_size"] not in (-1, vocab_size):
        raise ConfigError(f"vocab_size={shown(found['vocab_size'], 40)} but the embedding has {vocab_size} rows")
    n_heads, theta = found["n_heads"], found.get("rope_theta", 10_000.0)
    n_kv_heads = found.get("n_kv_heads")
    scaling = None
    if found.get("use_scaled_rope", False):
        sizes = found["dim"], found["n_layers"], n_heads
        small = any(sizes == (c.dim, c.n_layers, c.n_heads) for name, c in PRESETS.items() if name.startswith("llama-3.2"))
        scaling = RopeScaling(
            "llama3",
            found.get("rope_scaling_factor") or (32.0 if small else 8.0),
            high_freq_factor=found.get("rope_high_freq_factor") or 4.0,
        )
    if "max_seq_len" in found:
        context = found["max_seq_len"]
    elif scaling is not None:
        context = 131_072
    elif theta == 500_000:
        context = 8192
    elif theta == 1_000_000:
        context = 16_384
    else:  # Llama 1 has eps 1e-6, except 65B: 64 heads without grouping, unlike any Llama 2
        first = found["norm_eps"] == 1e-6 or (n_heads == 64 and n_kv_heads is None)
        context = 2048 if first else 4096
    return LlamaConfig(
        vocab_size=vocab_size,
        dim=found["dim"],
        n_layers=found["n_layers"],
        n_heads=n_heads,
        n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        hidden_dim=hidden_dim,
        max_seq_len=context,
        norm_eps=found["norm_eps"],
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=tied,
    )


def _config(folder: Location, tensors: Mapping[str, Tensor]) -> LlamaConfig:
    path = folder / "params.json"
    found = read_object(path, CheckpointError)
    shapes = {}
    for part in ("embedding", "gate"):
        name = NAMES[part].format(0)
        if name not in tensors:
            raise CheckpointError(f"{folder}: tensor {name!r} is missing; the configuration needs it")
        shapes[part] = tensors[name].shape
        if len(shapes[part]) != 2:
            raise CheckpointError(
                f"{folder}: tensor {name!r} has shape {list(shapes[part])}; a matrix is needed; copy it again"
            )
    try:
        tied = NAMES["lm_head"] not in tensors
        return config_from_params(found, shapes["embedding"][0], shapes["gate"][0], tied)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _check_ranks(folder: Location, rank: Mapping[str, Tensor], config: LlamaConfig, found: int) -> None:
    """Check the number of files: each holds its part of the rows of the query projection."""
    query = rank.get(NAMES["q"].format(0))
    rows = config.n_heads * config.head_dim
    if query is not None and query.shape and query.shape[0] < rows and rows % query.shape[0] == 0:
        needed = rows // query.shape[0]
        if needed != found:
            raise CheckpointError(f"{folder} has {found} of the {needed} files consolidated.NN.pth; copy the others there")


def _files(folder: Location) -> list[Location]:
    found: list[Location] = [*folder.glob("*.pth")]
    found.sort(key=lambda path: path.name)
    for i, path in enumerate(found):
        if path.name != f"consolidated.{i:02}.pth":
            raise CheckpointError(f"{folder} has {path.name} where consolidated.{i:02}.pth should be; copy all of the model")
        if not path.is_file():  # reading a pipe would block
            raise CheckpointError(f"{path} is not a file; copy the model again")
    return found


FORMAT = WeightFormat("meta", recognizes, open_folder, files=files)
