"""Hugging Face folders: ``config.json`` and safetensors or ``pytorch_model.bin``, single or sharded with an index."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError, safe_open

from llama_jax.checkpoints.layout import Piece, pieces
from llama_jax.checkpoints.names import names
from llama_jax.checkpoints.pickled import read_tensors
from llama_jax.checkpoints.rope import NOTE, in_known_kinds, note_of, with_note
from llama_jax.checkpoints.tensors import FLOATS, Dense, Opened, Stacked, Tensor, read_bytes
from llama_jax.config import LlamaConfig, RopeScaling, RopeScalingKind
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.tokenizers import Tokenizer, find_tokenizer

# Name in the file, by what it is here.
NAMES = names("huggingface")
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
    "window": "sliding_window",
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
# What transformers takes for a setting that is not there, by the kind of model.
ABSENT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "head_dim": 128},
    "mixtral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
ARCHITECTURES = {kind: f"{kind.capitalize()}ForCausalLM" for kind in ABSENT}
# Settings that change what is computed, with the value that each of these models has. Others, such as dropout, token ids and
# what a trainer left behind, do not matter here.
PLAIN = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "num_local_experts": None,
    "use_qk_norm": False,
    "use_sliding_window": False,
    "use_mrope": False,
}
# Of these, what a kind of model reads, or what means nothing to it.
READ = {
    "mistral": ("sliding_window",),
    "qwen2": ("sliding_window",),  # where use_sliding_window is set, which is refused
    "qwen3": ("sliding_window",),
    "mixtral": ("sliding_window", "num_local_experts"),
}
# Name here of what a rope scaling says, by its name in the file where the two differ.
ROPE_NAMES = {"original_max_position_embeddings": "original_max_seq_len"}
# What a kind of rope scaling may say, besides its name and theta; and what of it may be missing.
ROPE = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"),
}
OPTIONAL = {"beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"}
# What else it may say, since it changes nothing.
HARMLESS = (("partial_rotary_factor", 1), ("finetuned", True), ("finetuned", False))
# Buffers that old versions of transformers saved with the weights; the configuration says the same.
IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
LARGEST_JSON = 64 << 20  # bytes; the index of a 405B model has a five-hundredth
# The two ways to store the weights, the better first: name of a single file, and of the index of several.
SAFETENSORS = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PICKLED = "pytorch_model.bin", "pytorch_model.bin.index.json"


def open_folder(folder: Path) -> Opened:
    """The model in a folder; its weights are not read.

    Raises:
      CheckpointError: a file that is missing, damaged or of an unsupported kind.
    """
    config = read_config(folder)
    for (single, index), read, what in (
        (SAFETENSORS, _read_safetensors, "safetensors"),
        (PICKLED, read_tensors, "pytorch_model.bin"),
    ):
        if (folder / index).exists():
            tensors = _read_indexed(folder / index, read)
        elif (folder / single).is_file():
            tensors = read(folder / single)
        else:
            continue
        return Opened(
            format=f"Hugging Face {what}",
            path=folder,
            config=config,
            tensors=_experts_joined(folder, {name: t for name, t in tensors.items() if not IGNORED.fullmatch(name)}),
            names=NAMES,
            interleaved=False,
            tokenizer=partial(find_tokenizer, folder, config.vocab_size),
        )
    raise CheckpointError(
        f"{folder} has a config.json but none of the weights it should have: {', '.join(SAFETENSORS + PICKLED)}"
    )


EXPERT = re.compile(r"(model\.layers\.\d+\.block_sparse_moe\.experts)\.(\d+)\.(w[123]\.weight)")


def _experts_joined(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with those of a layer's experts as one under the name in the table."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    for name, of_layer in experts.items():
        parts = [of_layer[i] for i in sorted(of_layer)]
        if sorted(of_layer) != list(range(len(parts))):
            raise CheckpointError(f"{folder}: of the experts of {name!r} there are only {sorted(of_layer)}; copy all files")
        if any((part.shape, part.kind) != (parts[0].shape, parts[0].kind) for part in parts):
            raise CheckpointError(f"{folder}: the experts of {name!r} have different shapes or types; copy them again")
        found[name] = Stacked(parts)
    return found


def _experts_apart(piece: Piece) -> list[Piece]:
    """A tensor to be written, or those of the experts that it holds."""
    if len(piece.tensor.shape) < 3:
        return [piece]
    tensor: Any = piece.tensor
    return [replace(piece, tensor=tensor.entry(i), expert=i) for i in range(tensor.shape[0])]


def _name(piece: Piece) -> str:
    name = NAMES[piece.part].format(piece.layer)
    return name if piece.expert is None else name.replace(".experts.", f".experts.{piece.expert}.")


def has_weights(folder: Path) -> bool:
    """Whether weights under the names that transformers gives them lie beside a config.json."""
    return any((folder / name).exists() for name in (*SAFETENSORS, *PICKLED))


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
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in ABSENT:
        raise ConfigError(f"model_type={kind!r:.60} is not supported; llama_jax reads {', '.join(ABSENT)}")
    for name, supported in PLAIN.items():
        if found.get(name, supported) not in (supported, None) and name not in READ.get(kind, ()):
            raise ConfigError(f"{name}={found[name]!r:.60} is not supported; a {kind} has {name}={supported!r}")
    if found.get("quantization_config") is not None:
        raise ConfigError("quantization_config is set: quantised weights are not supported; use the unquantised release")

    missing = [name for name in _REQUIRED if name not in found]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is missing")
    found = ABSENT[kind] | dict(found)
    window = found.get("sliding_window") if kind in ("mistral", "mixtral") else None
    _check_layers(found, "full_attention" if window is None else "sliding_attention")
    theta, scaling = _rope(found)
    note = found.get(NOTE)
    n_heads = found["num_attention_heads"]
    n_kv_heads = found.get("num_key_value_heads")
    config = LlamaConfig(
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
        window=window,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        experts=found["num_local_experts"] if kind == "mixtral" else 0,
        experts_per_token=found["num_experts_per_tok"] if kind == "mixtral" else 0,
    )
    return config if note is None else with_note(config, note)


def _check_layers(found: Mapping[str, Any], needed: str) -> None:
    """Raise unless all layers attend in the same way."""
    kinds = found.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != needed for kind in kinds)):
        raise ConfigError(f"layer_types={kinds!r:.60} is not supported; all layers must be {needed!r}")


_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def _rope(found: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, in the spelling of transformers 5 (``rope_parameters``) or before (``rope_scaling``)."""
    new, old = found.get("rope_parameters") or {}, found.get("rope_scaling") or {}
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}={value!r:.60} must be an object")
    scaling = {name: value for name, value in (new or old).items() if value is not None}
    if new and old and _plain(new) != _plain(old):
        raise ConfigError(f"rope_parameters={new!r:.80} and rope_scaling={old!r:.80} contradict each other; remove one")
    theta = scaling.get("rope_theta", found.get("rope_theta", 10_000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE:
        raise ConfigError(f"rope scaling {kind!r:.40} is not supported; {', '.join(map(repr, ROPE))} are")
    extra = [name for name in scaling if name not in ("rope_theta", "rope_type", "type", *ROPE[kind])]
    for name in extra:
        if (name, scaling[name]) not in HARMLESS:
            raise ConfigError(f"rope scaling {kind!r} with {name}={scaling[name]!r:.40} is not supported")
    if kind == "default":
        return theta, None
    context = found.get("max_position_embeddings", 2048)
    if kind in ("yarn", "longrope"):  # what transformers takes where they are not given
        original = found.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings", context)
        scaling["original_max_position_embeddings"] = original
        if "factor" not in scaling:
            _require_ratio(context, original)
            scaling["factor"] = context / original
    if kind == "llama3" and found.get("original_max_position_embeddings"):
        scaling["original_max_position_embeddings"] = found["original_max_position_embeddings"]
    if scaling.get("attention_factor") is not None or not (scaling.get("mscale") and scaling.get("mscale_all_dim")):
        for name in ("mscale", "mscale_all_dim"):  # which transformers then does not read
            scaling.pop(name, None)
    missing = [name for name in ROPE[kind] if name not in scaling and name not in OPTIONAL]
    if missing:
        raise ConfigError(f"rope scaling {kind!r} has no {missing[0]}")
    settings = {ROPE_NAMES.get(name, name): scaling[name] for name in ROPE[kind] if name in scaling}
    if kind == "dynamic":  # the model's whole context is what it was first trained at
        settings["original_max_seq_len"] = context
    return theta, RopeScaling(cast(RopeScalingKind, kind), settings.pop("factor"), **settings)


def _require_ratio(context: Any, original: Any) -> None:
    for name, value in (("max_position_embeddings", context), ("original_max_position_embeddings", original)):
        if not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{name}={value!r:.40} must be a positive number")


def _plain(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A rope scaling in one spelling, without theta."""
    rest = {name: value for name, value in scaling.items() if name not in ("rope_theta", "type", "rope_type")}
    return rest | {"kind": scaling.get("rope_type", scaling.get("type", "default"))}


def config_to_dict(config: LlamaConfig) -> dict[str, Any]:
    """The settings of ``config.json`` for a configuration, in the spelling that old and new transformers read.

    A rope scaling that transformers has no word for is written in those it has, so that it computes the same, with a note of
    what it is here.
    """
    found = _in_their_words(in_known_kinds(config))
    if config_from_dict(found) != config:
        found[NOTE] = note_of(config)
    return found


def _in_their_words(config: LlamaConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    context: Any
    context, scaling = config.max_seq_len, config.rope_scaling
    if scaling is not None:
        settings = {name: list(value) if isinstance(value, tuple) else value for name, value in scaling.settings.items()}
        names = {ours: theirs for theirs, ours in ROPE_NAMES.items()}
        rope = {"rope_type": scaling.kind}
        if scaling.kind == "dynamic":
            context = settings.pop("original_max_seq_len")
        rope |= {names.get(name, name): value for name, value in settings.items() if value is not None}
    kind = config.kind
    more: dict[str, Any] = {}
    if kind in ("mistral", "mixtral"):
        more["sliding_window"] = config.window
    if kind in ("qwen2", "qwen3"):
        more["use_sliding_window"] = False
    if kind == "mixtral":
        more |= {"num_local_experts": config.experts, "num_experts_per_tok": config.experts_per_token}
    return {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope | {"rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    } | more


def write_folder(
    folder: Path,
    opened: Opened,
    tokenizer: Tokenizer | None,
    kind: str | None = None,
    *,
    largest_file: int = 5_000_000_000,
    progress: Callable[[list[Piece]], Iterable[Piece]] | None = None,
) -> None:
    """Write a model into an empty folder, tensor by tensor.

    Args:
      kind: of all tensors, as safetensors spells it; None keeps each tensor's own.
      largest_file: bytes of tensors in a file; more become several files and an index.
    """
    todo = [one for piece in pieces(opened, interleaved=False) for one in _experts_apart(piece)]
    kinds = [kind or _kind(piece.tensor) for piece in todo]
    sizes = [math.prod(p.tensor.shape) * FLOATS[k].itemsize for p, k in zip(todo, kinds, strict=True)]
    files: list[dict[str, tuple[str, tuple[int, ...], int]]] = [{}]
    for piece, stored, size in zip(todo, kinds, sizes, strict=True):
        if files[-1] and sum(n for *_, n in files[-1].values()) + size > largest_file:
            files.append({})
        files[-1][_name(piece)] = (stored, piece.tensor.shape, size)

    walk = iter(progress(todo) if progress else todo)
    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(files):
        name = SAFETENSORS[0] if len(files) == 1 else f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys(tensors, name)
        with (folder / name).open("wb") as file:
            file.write(_header(tensors))
            for stored, *_ in tensors.values():
                for rows in next(walk).rows(FLOATS[stored]):
                    file.write(rows.view(np.uint8).data)
    for _ in walk:  # lets a progress bar see its end
        pass
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (folder / SAFETENSORS[1]).write_text(json.dumps(index, indent=2) + "\n")
    ids: dict[str, Any] = {}
    if tokenizer is not None:
        tokenizer.save(folder)
        named = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        ids = {name: token for name, token in named.items() if token >= 0}
    write_config(folder, opened.config, dtype=DTYPES[kinds[0]], **ids)


def _kind(tensor: Tensor) -> str:
    return next(kind for kind, dtype in FLOATS.items() if dtype == tensor.dtype)


def _header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """The beginning of a safetensors file: the length of a JSON text, and the text, padded to eight bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    end = 0
    for name, (kind, shape, size) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_config(folder: Path, config: LlamaConfig, **more: Any) -> None:
    """Write ``config.json``, with settings that are not part of a configuration, such as token ids."""
    (folder / "config.json").write_text(json.dumps(config_to_dict(config) | more, indent=2) + "\n")


def _read_json(path: Path) -> Any:
    if not path.is_file():  # reading a pipe would wait for ever
        raise CheckpointError(f"{path} is not a file; copy the model again")
    if path.stat().st_size > LARGEST_JSON:
        raise CheckpointError(f"{path} is over {LARGEST_JSON} bytes, too large to be a model's; copy it again")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({str(error)[:80]}); copy it again") from None


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. The library checks the header against the file, and says no more than where data begins."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); copy it again") from None
    size = int.from_bytes(read_bytes(path, 0, 8).tobytes(), "little")
    header = json.loads(read_bytes(path, 8, size).tobytes())
    return {
        name: Dense(path, 8 + size + tensor["data_offsets"][0], tuple(tensor["shape"]), tensor["dtype"])
        for name, tensor in header.items()
        if name != "__metadata__"
    }


def _read_indexed(index: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all files that an index names, after checking it against what each file holds."""
    folder = index.parent
    found = _read_json(index)
    try:
        weight_map = found["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of weights ({error!r}); copy it again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file of its own folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is missing from {folder}; copy it there")
    tensors: dict[str, Tensor] = {}
    for name in names:
        held = read(folder / name)
        listed = {tensor for tensor, file in weight_map.items() if file == name}
        if held.keys() != listed:
            odd = sorted(held.keys() ^ listed)[0]
            raise CheckpointError(f"{index} and {name} disagree about tensor {odd!r}; copy both from one release")
        tensors |= held
    return tensors
