"""Hugging Face folders: ``config.json`` and safetensors, single or sharded with an index.

Weights are read tensor by tensor from a memory map; a row range of a tensor can be read alone, so that a file is never in
memory as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from llama_jax.checkpoints.assemble import Progress, Reader, assemble
from llama_jax.config import LlamaConfig, RopeScaling
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.model.params import Llama

# Name in the file, by what it is here. Each maps to one tensor [out, in] or [features].
NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "attention_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "out": "model.layers.{}.self_attn.o_proj.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
# Name of a setting in the file, by its name here, for messages.
SETTINGS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
# Buffers that old versions of transformers saved with the weights; the configuration says the same.
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def read_config(folder: Path) -> LlamaConfig:
    """The configuration in ``folder/config.json``."""
    path = folder / "config.json"
    found = _read_json(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__} where an object of settings should be; copy it again")
    try:
        return config_from_dict(found)
    except ConfigError as error:
        in_file = re.sub(r"\b(\w+)(?==)", lambda name: SETTINGS.get(name[0], name[0]), str(error))
        raise CheckpointError(f"{path}: {in_file}") from None


def config_from_dict(found: Mapping[str, Any]) -> LlamaConfig:
    """The configuration that a parsed ``config.json`` describes; absent fields take the values transformers documents.

    Raises:
      ConfigError: a model that is not a Llama, or a setting that this library does not support.
    """
    model_type = found.get("model_type")
    if model_type != "llama":
        raise ConfigError(f"model_type={model_type!r:.60} is not supported; llama_jax reads model_type='llama'")
    for name, supported in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if found.get(name, supported) != supported:
            raise ConfigError(f"{name}={found[name]!r} is not supported; a Llama has {name}={supported!r}")
    if found.get("quantization_config") is not None:
        raise ConfigError("quantization_config is set: quantised weights are not supported; use the unquantised release")

    missing = [name for name in _REQUIRED if name not in found]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is missing")
    theta, scaling = _rope(found)
    n_heads = found["num_attention_heads"]
    n_kv_heads = found.get("num_key_value_heads")
    return LlamaConfig(
        vocab_size=found["vocab_size"],
        dim=found["hidden_size"],
        n_layers=found["num_hidden_layers"],
        n_heads=n_heads,
        n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        head_dim=found.get("head_dim") or 0,
        hidden_dim=found["intermediate_size"],
        max_seq_len=found.get("max_position_embeddings", 2048),
        norm_eps=found.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=found.get("tie_word_embeddings", False),
    )


_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def _rope(found: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, in the spelling of transformers 5 (``rope_parameters``) or before (``rope_scaling``)."""
    scaling = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"rope_scaling={scaling!r} must be an object")
    theta = scaling.get("rope_theta", found.get("rope_theta", 10_000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    try:
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, RopeScaling("linear", scaling["factor"])
        if kind == "llama3":
            return theta, RopeScaling(
                "llama3",
                scaling["factor"],
                low_freq_factor=scaling["low_freq_factor"],
                high_freq_factor=scaling["high_freq_factor"],
                original_max_seq_len=scaling["original_max_position_embeddings"],
            )
    except KeyError as error:
        raise ConfigError(f"rope scaling {kind!r} has no {error.args[0]}") from None
    raise ConfigError(f"rope scaling {kind!r} is not supported; 'default', 'linear' and 'llama3' are")


def config_to_dict(config: LlamaConfig) -> dict[str, Any]:
    """The settings of ``config.json`` for a configuration, in the spelling that old and new transformers read."""
    rope: dict[str, Any] = {"rope_type": "default"}
    scaling = config.rope_scaling
    if scaling is not None:
        rope = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def load_params(
    folder: Path, config: LlamaConfig, dtype: jax.typing.DTypeLike | None, progress: Progress | None = None
) -> Llama:
    """The parameters in a folder's safetensors, cast to `dtype` (None keeps what is stored)."""
    files = {name: _open(path) for name, path in _files(folder).items()}
    stored = {tensor: file for file in files.values() for tensor in file.keys()}
    where = str(folder)

    def get(name: str) -> np.ndarray:
        try:
            return stored[name].get_tensor(name)
        except (SafetensorError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where}: tensor {name!r} cannot be read ({error})") from None

    ignored = {name for name in stored if IGNORED.fullmatch(name)}
    return assemble(config, Reader(where, set(stored) - ignored, NAMES, get), dtype, interleaved=False, progress=progress)


def _read_json(path: Path) -> Any:
    if not path.is_file():  # reading a pipe would wait for ever
        raise CheckpointError(f"{path} is not a file; copy the model again")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({str(error)[:80]}); copy it again") from None


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); copy it again") from None


def _files(folder: Path) -> dict[str, Path]:
    """The safetensors files of a folder by name, after checking the index against what each file holds."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        single = folder / "model.safetensors"
        if single.is_file():
            return {single.name: single}
        raise CheckpointError(
            f"{folder} has a config.json but no model.safetensors and no model.safetensors.index.json;"
            " other weights (pytorch_model.bin) become safetensors with transformers' save_pretrained"
        )
    found = _read_json(index)
    try:
        weight_map = found["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not a safetensors index ({error!r}); copy it again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file of its own folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is missing from {folder}; copy it there")
    files = {name: folder / name for name in names}
    for name, path in files.items():
        held, listed = set(_open(path).keys()), {tensor for tensor, file in weight_map.items() if file == name}
        if held != listed:
            odd = sorted(held ^ listed)[0]
            raise CheckpointError(f"{index} and {name} disagree about tensor {odd!r}; copy both from one release")
    return files
