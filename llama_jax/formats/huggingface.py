"""Hugging Face folders: the settings in ``config.json``, with unknown ones rejected by name, and the tensors."""

from __future__ import annotations

import json
import math
import os.path
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from llama_jax.config import LlamaConfig, Parts, RopeScaling, RopeScalingKind
from llama_jax.config.families import FAMILIES
from llama_jax.config.families.llama import RENAMED
from llama_jax.config.families.shared import object_in
from llama_jax.errors import CheckpointError, ConfigError, short_repr
from llama_jax.formats.build_params import WrittenTensor, fuse, plan, split_fused, tensors_to_write
from llama_jax.formats.hf_quantized import Scheme, join_quantized_weights, scheme_from_dict
from llama_jax.formats.lazy_tensors import (
    FLOAT_DTYPES,
    ArrayTensor,
    Dense,
    QuantizedArrayTensor,
    Stacked,
    Tensor,
    Transposed,
    read_bytes,
    storage_type_of,
)
from llama_jax.formats.model_folder import (
    ModelMetadata,
    check_present,
    read_model_metadata,
    special_token_ids,
    write_model_metadata,
)
from llama_jax.formats.rope_conversion import (
    NOTE,
    context_note,
    stated_context,
    with_context,
    with_note,
)
from llama_jax.formats.torch_pickle import is_torch, read_tensors
from llama_jax.formats.weight_format import (
    TENSOR_NAMES,
    OpenedCheckpoint,
    WeightFormat,
    describe_ignored,
    ignored_tensors,
    parts_of,
    parts_with_columns,
)
from llama_jax.model.params import BLOCKS_PREFIX, LlamaParams, ParamSpec, shape_of, specs_for
from llama_jax.model.trees import layers_of
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight
from llama_jax.settings import PositiveFloat, PositiveInt, check_value
from llama_jax.storage import Location, StoredPath
from llama_jax.storage.paths import MAX_JSON_BYTES, read_object
from llama_jax.tokenizers import Tokenizer, find_tokenizer

# Settings for fields that all families write alike.
SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
# Names of settings in messages.
SETTING_NAMES = SIZES | {
    "window": "sliding_window",
    "qkv_bias": "attention_bias",
    "out_bias": "attention_bias",
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
# Settings that change what is computed, with the value required in families that do not read them. Others, such as dropout,
# token ids and a trainer's settings, do not matter here.
SUPPORTED = {
    "hidden_act": "silu",
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
    "use_mrope": False,
    "use_bidirectional_attention": False,
    "clip_qkv": None,
}
# Settings that only some families read, and their fields; transformers ignores them in the other families.
BIAS_SETTINGS = {"attention_bias": ("qkv_bias", "out_bias"), "mlp_bias": ("mlp_bias",)}
# Our names for settings of a rope scaling whose names differ from those in the file.
ROPE_NAMES = {"original_max_position_embeddings": "original_max_seq_len"}
# The settings of each kind of rope scaling, in addition to its name and theta; and those that may be missing.
ROPE_SETTINGS = {
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
OPTIONAL_ROPE = {"beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"}
# Settings that are accepted because they have no effect.
IGNORED_ROPE = (
    *(("partial_rotary_factor", 1), ("finetuned", True), ("finetuned", False)),
    *(("attn_factor", 1), ("extrapolation_factor", 1)),
)
PARTS_KEY = "llama_jax_parts"  # the names in `LlamaConfig.parts`, which other libraries do not read
MAX_LAYERS = 10_000
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def read_config_json(folder: Location, *, scaled_context: bool = False) -> LlamaConfig:
    """The configuration in ``folder/config.json``; see `config_from_dict`."""
    path = folder / "config.json"
    try:
        return config_from_dict(read_object(path, CheckpointError), scaled_context=scaled_context)
    except ConfigError as error:
        in_file = re.sub(r"\b(\w+)(?==)", lambda name: SETTING_NAMES.get(name[0], name[0]), str(error))
        raise CheckpointError(f"{path}: {in_file}") from None


def write_config_json(folder: Path, config: LlamaConfig, *, scaled_context: bool = False, **extra_settings: Any) -> None:
    """Write ``config.json``, with additional settings such as token ids; see `config_from_dict`."""
    settings = config_to_dict(config, scaled_context=scaled_context) | extra_settings
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def config_from_dict(settings: Mapping[str, Any], *, scaled_context: bool = False) -> LlamaConfig:
    """The configuration that a parsed ``config.json`` describes; absent fields take the values transformers documents.

    Args:
      scaled_context: whether `max_position_embeddings` includes the factor of a linear or YaRN scaling, as in orbax
        checkpoints; else, for most families, the scaling extends it (`rope_conversion.with_context`).
    """
    if isinstance(text := settings.get("text_config"), Mapping):  # a multimodal model
        shared = {name: settings[name] for name in ("quantization_config", "tie_word_embeddings") if name in settings}
        settings = shared | dict(text)
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES | RENAMED:
        known = ", ".join((*FAMILIES, *RENAMED))
        raise ConfigError(f"model_type={short_repr(model_type)} is not supported; llama_jax supports {known}")
    if model_type in RENAMED:
        return config_from_dict(RENAMED[model_type](settings), scaled_context=scaled_context)
    family = FAMILIES[model_type]
    for name, supported in SUPPORTED.items():
        if settings.get(name, supported) not in (supported, None) and name not in family.absent:
            raise ConfigError(
                f"{name}={short_repr(settings[name])} is not supported; a {model_type} has {name}={supported!r}"
            )
    if settings.get("quantization_config") is not None:
        scheme_from_dict(settings["quantization_config"])

    settings = dict(family.absent) | dict(settings)
    check_present(settings, _REQUIRED)
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):  # families compute others from these
        check_value(name, settings[name], PositiveInt, ConfigError)
    if settings["num_hidden_layers"] > MAX_LAYERS:  # bounds lists that have an entry per layer
        raise ConfigError(f"num_hidden_layers={settings['num_hidden_layers']} must be at most {MAX_LAYERS}")
    if "rope_scaling" in family.absent and settings.get("rope_parameters"):
        del settings["rope_scaling"]  # set in the other spelling
    settings = family.rope(settings)
    theta, scaling = _read_rope(settings)
    family_fields = dict(family.constants) | family.fields(settings | {"theta": theta, "scaled": scaling is not None})
    for setting, names in BIAS_SETTINGS.items():
        if setting in family.features:
            family_fields |= dict.fromkeys(names, settings.get(setting) or False)
    note = settings.get(NOTE)
    n_heads = settings["num_attention_heads"]
    n_kv_heads = settings.get("num_key_value_heads")
    config = LlamaConfig(
        vocab_size=settings["vocab_size"],
        dim=settings["hidden_size"],
        n_layers=settings["num_hidden_layers"],
        n_heads=n_heads,
        n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        head_dim=settings.get("head_dim") or 0,
        hidden_dim=family_fields.pop("hidden_dim", settings["intermediate_size"]),
        max_seq_len=settings.get("max_position_embeddings", 2048),
        norm_eps=settings.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=settings.get("tie_word_embeddings", False),
        parts=_read_layer_parts(object_in(settings, PARTS_KEY)),
        **family_fields,
    )
    if note is not None:
        return with_note(config, note, scaled_context=scaled_context)
    return with_context(config, scaled_context=scaled_context)


def _read_layer_parts(names: Mapping[str, Any]) -> Parts:
    """The names of user functions."""
    for part, name in names.items():
        if part not in vars(Parts()) or not isinstance(name, str) or not name.partition(":")[2]:
            raise ConfigError(
                f"{PARTS_KEY} has {part}={short_repr(name, 80)}; name a function for {', '.join(vars(Parts()))}"
            )
    return Parts(**names)


def _read_rope(settings: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, in the spelling of transformers 5 (``rope_parameters``) or before (``rope_scaling``)."""
    new, old = object_in(settings, "rope_parameters"), object_in(settings, "rope_scaling")
    scaling = dict(new or old)
    if new and old and _normalize_rope(new) != _normalize_rope(old):
        raise ConfigError(
            f"rope_parameters={short_repr(new, 80)} and rope_scaling={short_repr(old, 80)} contradict each other; remove one"
        )
    theta = scaling.get("rope_theta", settings.get("rope_theta", 10_000.0))
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ROPE_SETTINGS:
        raise ConfigError(
            f"rope scaling {short_repr(rope_type, 40)} is not supported; use {', '.join(map(repr, ROPE_SETTINGS))}"
        )
    context = settings.get("max_position_embeddings", 2048)
    extra = [name for name in scaling if name not in ("rope_theta", "rope_type", "type", *ROPE_SETTINGS[rope_type])]
    for name in extra:
        if (name, scaling[name]) not in (*IGNORED_ROPE, ("original_max_position_embeddings", context)):
            raise ConfigError(f"rope scaling {rope_type!r} with {name}={short_repr(scaling[name], 40)} is not supported")
    if rope_type == "default":
        return theta, None
    if rope_type in ("yarn", "longrope"):  # defaults of transformers
        original = settings.get("original_max_position_embeddings") or scaling.get(
            "original_max_position_embeddings", context
        )
        scaling["original_max_position_embeddings"] = original
        if "factor" not in scaling:
            for name, value in (("max_position_embeddings", context), ("original_max_position_embeddings", original)):
                check_value(name, value, PositiveFloat, ConfigError)
            scaling["factor"] = context / original
    if rope_type == "llama3" and settings.get("original_max_position_embeddings"):
        scaling["original_max_position_embeddings"] = settings["original_max_position_embeddings"]
    if scaling.get("attention_factor") is not None or not (scaling.get("mscale") and scaling.get("mscale_all_dim")):
        for name in ("mscale", "mscale_all_dim"):  # ignored by transformers in this case
            scaling.pop(name, None)
    missing = [name for name in ROPE_SETTINGS[rope_type] if name not in scaling and name not in OPTIONAL_ROPE]
    if missing:
        raise ConfigError(f"rope scaling {rope_type!r} has no {missing[0]}")
    arguments = {ROPE_NAMES.get(name, name): scaling[name] for name in ROPE_SETTINGS[rope_type] if name in scaling}
    if rope_type == "dynamic":  # the file's context is the length that the model was pretrained at
        arguments["original_max_seq_len"] = context
    return theta, RopeScaling(cast(RopeScalingKind, rope_type), arguments.pop("factor"), **arguments)


def _normalize_rope(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A rope scaling in one spelling, without theta."""
    rest = {name: value for name, value in scaling.items() if name not in ("rope_theta", "type", "rope_type")}
    return rest | {"kind": scaling.get("rope_type", scaling.get("type", "default"))}


def config_to_dict(config: LlamaConfig, *, scaled_context: bool = False) -> dict[str, Any]:
    """The settings of ``config.json`` for a configuration, in the spelling that old and new transformers read.

    A context that other libraries would not infer is written with a note of ours.

    Args:
      scaled_context: see `config_from_dict`.
    """
    config = replace(config, parts=config.parts.names)
    settings = _plain_settings(config, scaled_context)
    if config_from_dict(settings, scaled_context=scaled_context) != config and config.rope_scaling is not None:
        settings[NOTE] = context_note(config)
    back = config_from_dict(settings, scaled_context=scaled_context)
    for name in (field.name for field in fields(config)):
        if getattr(back, name) != getattr(config, name):
            value = short_repr(getattr(config, name))
            raise ConfigError(f"{name}={value} cannot be stored in the config.json of {config.model_type}")
    return settings


def _plain_settings(config: LlamaConfig, scaled_context: bool) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    scaling, family = config.rope_scaling, FAMILIES[config.model_type]
    if scaling is not None:
        settings = {name: list(value) if isinstance(value, tuple) else value for name, value in scaling.settings.items()}
        names = {ours: theirs for theirs, ours in ROPE_NAMES.items()}
        rope = {"rope_type": scaling.kind}
        if scaling.kind == "dynamic":
            del settings["original_max_seq_len"]  # transformers has the stated context
        rope |= {names.get(name, name): value for name, value in settings.items() if value is not None}
    parameters = rope | {"rope_theta": config.rope_theta}
    return {
        "model_type": config.model_type,
        "architectures": [family.architecture],
        **{setting: getattr(config, field) for field, setting in SIZES.items()},
        "max_position_embeddings": stated_context(config, scaled_context=scaled_context),
        "rope_parameters": parameters,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias and config.out_bias,
        "mlp_bias": config.mlp_bias,
        **({PARTS_KEY: config.parts.missing} if config.parts else {}),
    } | family.settings(config, parameters)


HF_NAMES = {part: names.huggingface for part, names in TENSOR_NAMES.items()}
# Tensors that fuse several of the table's, by rows in this order (Phi-3).
FUSED = {
    "model.layers.{}.self_attn.qkv_proj.weight": ("q", "k", "v"),
    "model.layers.{}.mlp.gate_up_proj.weight": ("gate", "up"),
}
# The two ways to store the weights, the preferred one first: name of a single file, and of the index of several.
SAFETENSORS = "model.safetensors", "model.safetensors.index.json"
CONFIG_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PICKLED = "pytorch_model.bin", "pytorch_model.bin.index.json"


def open_huggingface(path: Location) -> OpenedCheckpoint:
    """The model in a folder, or in the folder of one of its files; its weights are not read."""
    folder = path if path.is_dir() else path.parent
    config = read_config_json(folder)
    quantization = read_object(folder / "config.json", CheckpointError).get("quantization_config")
    scheme = None if quantization is None else scheme_from_dict(quantization)
    for (single, index), read, what in (
        (SAFETENSORS, read_safetensors, "safetensors"),
        (PICKLED, read_tensors, "pytorch_model.bin"),
    ):
        if (folder / single).is_file():  # before an index, as in transformers
            stored = _StoredTensors(read(folder / single))
        elif (folder / index).exists():
            stored = _read_indexed(folder / index, read)
        else:
            continue
        if scheme is not None and what != "safetensors":
            raise CheckpointError(f"{folder} has quantized weights in {what}; save them as safetensors")
        open_tensors = partial(_open_tensors, folder, config, scheme, what)
        unlisted = dict.fromkeys(stored.unlisted, f"tensors that are not in {index}") | ignored_tensors(stored.unlisted)
        try:
            opened = open_tensors(stored.tensors, {**stored.ignored, **unlisted})
            if stored.missing is not None or stored.unlisted:
                plan(opened)
        except CheckpointError:
            if stored.missing is not None:
                raise stored.missing from None
            if not stored.unlisted:
                raise
            return open_tensors({**stored.tensors, **stored.unlisted}, stored.ignored)
        return opened
    raise CheckpointError(f"{folder} has a config.json, but no weights: {', '.join(SAFETENSORS + PICKLED)}")


def _open_tensors(
    folder: Location,
    config: LlamaConfig,
    scheme: Scheme | None,
    what: str,
    tensors: Mapping[str, Tensor],
    ignored: Mapping[str, str],
) -> OpenedCheckpoint:
    """The model in the tensors of a folder's files.

    Args:
      ignored: names of other tensors and entries of an index, and what they are.
    """
    reasons, notes = ignored_tensors(tensors), []
    tensors = _standard_names(folder, {name: tensor for name, tensor in tensors.items() if name not in reasons})
    names = names_of(config)
    has_out_bias = any(names["out_bias"].format(layer) in tensors for layer in range(config.n_layers))
    if config.out_bias and config.model_type == "llama" and not has_out_bias:  # a Qwen under the names of a Llama
        config = replace(config, out_bias=False)
        notes.append("attention_bias is true, but no layer has o_proj.bias: it is zero, as in transformers")
    tensors = split_fused(config, tensors, FUSED, HF_NAMES)
    if scheme is not None:
        tensors = join_quantized_weights(str(folder), tensors, scheme)
        if scheme.method == "gptq":
            zeros = _unused_zero_biases(config, tensors, names)
            tensors = {name: tensor for name, tensor in tensors.items() if name not in zeros}
            reasons |= dict.fromkeys(zeros, "zero biases of GPTQ")
    table, head = (tensors.get(names[part]) for part in ("embedding", "lm_head"))
    if config.tie_embeddings and table is not None and head is not None and not _are_equal(table, head):
        config = replace(config, tie_embeddings=False)
        notes.append("lm_head.weight differs from the embedding: tie_word_embeddings is ignored, as in transformers")
    return OpenedCheckpoint(
        format=f"Hugging Face {what}" + (f", {scheme.method}" if scheme else ""),
        path=folder,
        config=config,
        tensors=_join_experts(folder, tensors),
        names=names,
        interleaved=is_interleaved(config),
        tokenizer=partial(find_tokenizer, folder, config.vocab_size),
        metadata=partial(read_model_metadata, folder),
        notes=(*describe_ignored({**reasons, **ignored}), *notes),
    )


# Modules that wrap others without a prefix of their own: torch.compile, FSDP, activation checkpointing.
WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
IN_ATTENTION = re.compile(r"((?:.*\.)?)layers\.\d+\.self_attn\.")
IN_BACKBONE = re.compile(r"(?:embed_tokens|layers|norm)\.")


def _standard_names(folder: Location, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of a causal language model, if all layers have another prefix than "model.".

    A backbone that was saved alone has none. Wrappers, such as DDP ("module."), PEFT ("base_model.model.") and multimodal
    models ("language_model."), add one.
    """
    plain = {WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}
    prefixes = {match[1] for name in plain if (match := IN_ATTENTION.match(name))}
    prefix = prefixes.pop() if len(prefixes) == 1 else "model."

    def standard_name(name: str) -> str:
        before, head, rest = name.partition("lm_head.")
        if head and prefix.startswith(before):
            return head + rest
        in_backbone = name.startswith(prefix) and IN_BACKBONE.match(name, len(prefix))
        return f"model.{name.removeprefix(prefix)}" if in_backbone else name

    renamed = {standard_name(name): tensor for name, tensor in plain.items()}
    if len(renamed) < len(tensors):
        raise CheckpointError(f"{folder} has tensors whose names differ only in a prefix; keep one copy of each tensor")
    return renamed


def _unused_zero_biases(config: LlamaConfig, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> set[str]:
    """Names of biases that the model does not have, and that are zero: GPTQ's packages add them to every matrix."""
    parts = {share.name for spec in specs_for(config) for share in parts_of(spec)}
    unused = [name for part, name in names.items() if part.endswith("_bias") and part not in parts]
    stored = {name.format(layer) for name in unused for layer in range(config.n_layers)} & tensors.keys()
    return {
        name for name in stored if len(tensors[name].shape) == 1 and not tensors[name].read(0, tensors[name].shape[0]).any()
    }


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two matrices have the same shape and values."""
    if a == b or a.shape != b.shape:
        return a.shape == b.shape
    rows, step = a.shape[0], max(1, (1 << 22) // max(1, math.prod(a.shape[1:])))
    return all(np.array_equal(a.read(i, min(i + step, rows)), b.read(i, min(i + step, rows))) for i in range(0, rows, step))


QWEN_EXPERTS = {"router": "model.layers.{}.mlp.gate.weight"}
# Llama 4's files store the experts of a layer as one transposed tensor: [E, D, 2F] for gate and up, which are split here,
# and [E, F, D] for down.
LLAMA4_FUSED = {"model.layers.{}.feed_forward.experts.gate_up_proj": ("expert_gate", "expert_up")}
LLAMA4_TENSOR = re.compile(r"(model\.layers\.\d+\.feed_forward\.experts\.)(gate_up|down)_proj")
LLAMA4_EXPERTS = {"router": "model.layers.{}.feed_forward.router.weight"}
LLAMA4_EXPERTS |= {
    f"expert_{name}": f"model.layers.{{}}.feed_forward.experts.{name}_proj" for name in ("gate", "up", "down")
}
QWEN_EXPERTS |= {f"expert_{name}": f"model.layers.{{}}.mlp.experts.{name}_proj.weight" for name in ("gate", "up", "down")}


def names_of(config: LlamaConfig) -> dict[str, str]:
    """The tensor names of a model; some depend on its norms, or on the family of its experts."""
    names = HF_NAMES | ({"ffn_norm": "model.layers.{}.pre_feedforward_layernorm.weight"} if config.norm == "both" else {})
    if config.experts:
        names |= {"qwen3_moe": QWEN_EXPERTS, "llama4_text": LLAMA4_EXPERTS}.get(config.model_type, {})
    return names


def is_interleaved(config: LlamaConfig) -> bool:
    """Whether a model's files have the rows of q and k in the interleaved rotary layout."""
    try:
        return FAMILIES[config.model_type].interleaved
    except ConfigError:  # no family: as in Llama
        return False


EXPERT = re.compile(r"(model\.layers\.\d+\.(?:block_sparse_moe|mlp)\.experts)\.(\d+)\.(\w+\.weight)")


def _join_experts(folder: Location, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with a layer's experts stacked as [E, rows, columns] under the names in the table."""
    joined: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        elif (match := LLAMA4_TENSOR.fullmatch(name)) and len(tensor.shape) == 3:
            half = tensor.shape[2] // 2
            rows = {"down": (0, None)} if match[2] == "down" else {"gate": (0, half), "up": (half, None)}
            joined |= {f"{match[1]}{part}_proj": Transposed(tensor, *ends) for part, ends in rows.items()}
        else:
            joined[name] = tensor
    for name, by_index in experts.items():
        parts = [by_index[i] for i in sorted(by_index)]
        has_all, types = sorted(by_index) == list(range(len(parts))), {(part.shape, part.storage_type) for part in parts}
        if not has_all or len(types) > 1:
            raise CheckpointError(
                f"{folder}: {short_repr(name, 80)} has only the experts {short_repr(sorted(by_index))}, or they have"
                " different shapes or types; copy all files"
            )
        joined[name] = Stacked(parts)
    return joined


def _split_experts(piece: WrittenTensor) -> list[WrittenTensor]:
    """A tensor to be written, or one for each expert if it holds several."""
    if len(piece.tensor.shape) < 3:
        return [piece]
    tensor: Any = piece.tensor
    return [replace(piece, tensor=tensor.entry(i), expert=i) for i in range(tensor.shape[0])]


def _written_name(names: Mapping[str, str], piece: WrittenTensor) -> str:
    name = names[piece.part].format(piece.layer)
    return name if piece.expert is None else name.replace(".experts.", f".experts.{piece.expert}.")


def is_huggingface(path: Location) -> bool:
    """Whether a folder holds a config.json and weights by transformers' names, or a file is in such a folder."""
    if path.is_dir():
        return (path / "config.json").exists() and any((path / name).exists() for name in (*SAFETENSORS, *PICKLED))
    if not (path.parent / "config.json").exists():
        return False
    has_meta_settings = (path.parent / "params.json").exists()
    return path.name == "config.json" or is_safetensors(path) or (is_torch(path) and not has_meta_settings)


def list_weight_files(names: Collection[str], read: Callable[[str], bytes], folder: str) -> list[str] | None:
    """See `WeightFormat.files`."""
    if "config.json" not in names:
        return None
    for single, index in (SAFETENSORS, PICKLED):
        if single in names:
            return [single]
        if index in names:
            return [index, *_index_files(read(index), names, f"{folder}/{index}")]
    return None


def _index_files(content: bytes, present: Collection[str], index: str) -> list[str]:
    """The files that an index of weights lists, without those that hold only tensors that are ignored."""
    try:
        weight_map = json.loads(content)["weight_map"]
        used = weight_map.keys() - ignored_tensors(weight_map)
        names = sorted({weight_map[tensor] for tensor in used} | set(weight_map.values()) & set(present))
        missing = [name for name in names if name not in present]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{index} is not an index of weights; choose another revision") from None
    if missing:
        raise CheckpointError(f"{index} names {short_repr(missing[0], 80)}, which does not exist; choose another revision")
    return names


def is_safetensors(path: Location) -> bool:
    """Whether a file begins like safetensors: with the length of a header, and a JSON object."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def write_huggingface(
    folder: Path,
    opened: OpenedCheckpoint,
    tokenizer: Tokenizer | None,
    storage_type: str | None = None,
    *,
    largest_file: int = 5_000_000_000,
    progress: Callable[[list[WrittenTensor]], Iterable[WrittenTensor]] | None = None,
) -> None:
    """Write a model into an empty folder, tensor by tensor.

    Args:
      storage_type: the type of all tensors, by its name in safetensors; None keeps each tensor's type.
      largest_file: maximum bytes of tensors in a file; larger models are split into several files and an index.
    """
    names = names_of(opened.config)
    todo = tensors_to_write(opened, interleaved=is_interleaved(opened.config))
    if opened.config.model_type == "llama4_text":
        todo, fused_names = fuse(todo, LLAMA4_FUSED, axis=1)
        todo = [replace(p, tensor=Transposed(p.tensor)) if len(p.tensor.shape) == 3 else p for p in todo]
        names |= fused_names
    else:
        todo = [expert for piece in todo for expert in _split_experts(piece)]
    if opened.config.model_type == "phi3":
        todo, fused_names = fuse(todo, FUSED)
        names |= fused_names
    storage_types = [storage_type or storage_type_of(piece.tensor.dtype) for piece in todo]
    sizes = [math.prod(p.tensor.shape) * FLOAT_DTYPES[k].itemsize for p, k in zip(todo, storage_types, strict=True)]
    shards: list[dict[str, tuple[str, tuple[int, ...], int]]] = [{}]
    for piece, stored, size in zip(todo, storage_types, sizes, strict=True):
        if shards[-1] and sum(n for *_, n in shards[-1].values()) + size > largest_file:
            shards.append({})
        shards[-1][_written_name(names, piece)] = (stored, piece.tensor.shape, size)

    walk = iter(progress(todo) if progress else todo)
    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(shards):
        name = SAFETENSORS[0] if len(shards) == 1 else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(tensors, name)
        with (folder / name).open("wb") as file:
            file.write(safetensors_header(tensors))
            for stored, *_ in tensors.values():
                for rows in next(walk).rows(FLOAT_DTYPES[stored]):
                    file.write(rows.view(np.uint8).data)
    for _ in walk:  # lets a progress bar see its end
        pass
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (folder / SAFETENSORS[1]).write_text(json.dumps(index, indent=2) + "\n")
    ids: dict[str, Any] = {"pad_token_id": None}  # overrides transformers' default
    if tokenizer is not None:
        tokenizer.save(folder)
        # transformers cannot build an embedding without a row for the padding token.
        ids |= {name: token for name, token in special_token_ids(tokenizer).items() if token < opened.config.vocab_size}
    write_model_metadata(folder, opened.metadata())
    write_config_json(folder, opened.config, dtype=CONFIG_DTYPES[storage_types[0]], **ids)


def safetensors_header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """The beginning of a safetensors file: the length of the JSON header, and the header, padded to eight bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers rejects files without it
    end = 0
    for name, (storage_type, shape, size) in tensors.items():
        entries[name] = {"dtype": storage_type, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_safetensors(path: Location) -> dict[str, Tensor]:
    """The tensors of a file. The library checks its header, but does not say where the data begins."""
    size = int.from_bytes(read_bytes(path, 0, 8).tobytes(), "little") if path.stat().st_size >= 8 else 0
    if MAX_JSON_BYTES < size < path.stat().st_size:
        raise CheckpointError(f"{path} has a header of {size} bytes, too large for a model; copy it again")
    try:
        with _local_header(path, size) as local, safe_open(local, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); copy it again") from None
    entries = json.loads(read_bytes(path, 8, size).tobytes())
    return {
        name: Dense(path, 8 + size + tensor["data_offsets"][0], tuple(tensor["shape"]), tensor["dtype"])
        for name, tensor in entries.items()
        if name != "__metadata__"
    }


@contextmanager
def _local_header(path: Location, size: int) -> Iterator[Path]:
    """A file that the library can open: for an object in a store, a sparse file of equal size with only the header."""
    if not isinstance(path, StoredPath):
        yield path
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(read_bytes(path, 0, min(8 + size, path.stat().st_size)).data)
        file.truncate(path.stat().st_size)
        file.flush()
        yield Path(file.name)


class _StoredTensors(NamedTuple):
    """The tensors of a folder.

    Attributes:
      tensors: those of a single file, or those that an index lists.
      unlisted: others in the files that the index lists.
      ignored: names in the files or the index that stand for no tensor of the model, and what they are.
      missing: the error if a tensor of the model is missing, and a file that the index lists is missing.
    """

    tensors: Mapping[str, Tensor]
    unlisted: Mapping[str, Tensor] = MappingProxyType({})
    ignored: Mapping[str, str] = MappingProxyType({})
    missing: CheckpointError | None = None


def _read_indexed(index: Location, read: Callable[[Location], dict[str, Tensor]]) -> _StoredTensors:
    """The tensors of the files that an index lists. Of copies of a tensor, that of the listed file counts."""
    folder, missing = index.parent, None
    parsed = read_object(index, CheckpointError)
    try:
        weight_map = parsed["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of weights ({short_repr(error, 80)}); copy it again") from None
    files: dict[str, dict[str, Tensor]] = {}
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {short_repr(name, 80)}, which is not in the same folder")
        file = folder / name
        # Path.is_file raises for invalid file names.
        if file.is_file() if isinstance(file, StoredPath) else os.path.isfile(file):
            files[name] = read(file)
        else:
            missing = CheckpointError(f"{index} names {short_repr(name, 80)}, which is missing from {folder}; copy it there")
    stored = {name: tensor for content in files.values() for name, tensor in content.items()}
    listed = {name: files[file][name] for name, file in weight_map.items() if name in files.get(file, {})}
    unlisted = {name: tensor for name, tensor in stored.items() if name not in listed}
    stale = dict.fromkeys(weight_map.keys() - stored.keys(), f"names in {index.name} without a tensor")
    count = Counter(name for content in files.values() for name in content)
    copies = dict.fromkeys((name for name in listed if count[name] > 1), "copies of a tensor in another file")
    return _StoredTensors(listed, unlisted, stale | copies, missing)


def from_params(
    config: LlamaConfig, params: LlamaParams, tokenizer: Tokenizer | None, metadata: ModelMetadata = ModelMetadata()
) -> OpenedCheckpoint:
    """Parameters in memory as an `OpenedCheckpoint` checkpoint with Hugging Face's names."""
    on_host = params.replace(blocks=jax.tree.map(np.asarray, params.blocks))
    tensors: dict[str, ArrayTensor | QuantizedArrayTensor] = {}
    names = names_of(config)

    def put(spec: ParamSpec, node: Any, layer: int = 0) -> None:
        leaf = jax.tree.map(np.asarray, attrgetter(spec.path.removeprefix(BLOCKS_PREFIX))(node))
        for i, (part, columns) in enumerate(parts_with_columns(spec, config)):
            weight, shape = leaf, shape_of(part.axes, config)
            if isinstance(leaf, JoinedWeight):  # the parts are the shares
                weight = leaf.parts[i]
            elif columns is not None:
                weight = jax.tree.map(lambda array, columns=columns: array[:, columns], leaf)
            quantized = isinstance(weight, QuantizedWeight)
            tensors[names[part.name].format(layer)] = (
                QuantizedArrayTensor(weight, shape) if quantized else ArrayTensor(weight, shape)
            )

    layers = layers_of(on_host)
    for spec in specs_for(config):
        if not spec.in_blocks:
            put(spec, params)
            continue
        for i in range(config.n_layers):
            put(spec, layers[i], i)
    where = Path("parameters")
    return OpenedCheckpoint(
        "parameters in memory", where, config, tensors, names, False, lambda: tokenizer, lambda: metadata
    )


SAFETENSORS_FORMAT = WeightFormat(
    "safetensors",
    is_huggingface,
    open_huggingface,
    write_huggingface,
    files=list_weight_files,
    in_stores=True,
    names_parts=True,
)
