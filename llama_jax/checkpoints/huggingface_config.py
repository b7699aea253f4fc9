"""``config.json`` of Hugging Face folders: the meaning of its settings; every other one is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from llama_jax.checkpoints.huggingface_families import FAMILIES, object_in
from llama_jax.checkpoints.quantized_config import Scheme, scheme_from_dict
from llama_jax.checkpoints.rope import NOTE, in_known_kinds, note_of, with_note
from llama_jax.config import LlamaConfig, RopeScaling, RopeScalingKind
from llama_jax.config.validation import require_positive_int
from llama_jax.errors import CheckpointError, ConfigError, shown
from llama_jax.files import read_object
from llama_jax.storage import Location

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
# Settings that change what is computed, with the value that each of these models has. Others, such as dropout, token ids and
# settings of a trainer, do not matter here.
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
    "use_bidirectional_attention": False,
    "clip_qkv": None,
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
ATTEND = "llama_jax_attend"  # `LlamaConfig.attend`, which other libraries do not read
MOST_LAYERS = 10_000
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def read_config(folder: Location) -> LlamaConfig:
    """The configuration in ``folder/config.json``."""
    path = folder / "config.json"
    try:
        return config_from_dict(read_object(path, CheckpointError))
    except ConfigError as error:
        in_file = re.sub(r"\b(\w+)(?==)", lambda name: SETTINGS.get(name[0], name[0]), str(error))
        raise CheckpointError(f"{path}: {in_file}") from None


def read_scheme(folder: Location) -> Scheme | None:
    """How the weights of a folder with this ``config.json`` are quantised; None if they are not."""
    found = read_object(folder / "config.json", CheckpointError).get("quantization_config")
    return None if found is None else scheme_from_dict(found)


def write_config(folder: Path, config: LlamaConfig, **more: Any) -> None:
    """Write ``config.json``, with settings that are not part of a configuration, such as token ids."""
    (folder / "config.json").write_text(json.dumps(config_to_dict(config) | more, indent=2) + "\n")


def config_from_dict(found: Mapping[str, Any]) -> LlamaConfig:
    """The configuration that a parsed ``config.json`` describes; absent fields take the values transformers documents.

    Raises:
      ConfigError: a model that is not a Llama, or a setting that this library does not support.
    """
    if isinstance(text := found.get("text_config"), Mapping):  # of a model that also reads pictures
        shared = {name: found[name] for name in ("quantization_config", "tie_word_embeddings") if name in found}
        found = shared | dict(text)
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f"model_type={shown(kind)} is not supported; llama_jax reads {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    for name, supported in PLAIN.items():
        if found.get(name, supported) not in (supported, None) and name not in family.reads:
            raise ConfigError(f"{name}={shown(found[name])} is not supported; a {kind} has {name}={supported!r}")
    if found.get("quantization_config") is not None:
        scheme_from_dict(found["quantization_config"])

    found = dict(family.absent) | dict(found)
    missing = [name for name in _REQUIRED if name not in found]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is missing")
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):  # of which families compute others
        require_positive_int(name, found[name])
    if found["num_hidden_layers"] > MOST_LAYERS:  # what is said of each layer is as long as this claims
        raise ConfigError(f"num_hidden_layers={found['num_hidden_layers']} must be at most {MOST_LAYERS}")
    if "rope_scaling" in family.absent and found.get("rope_parameters"):
        del found["rope_scaling"]  # what is absent is said in the other spelling
    found = family.rope(found)
    theta, scaling = _rope(found)
    more = family.fields(found | {"theta": theta, "scaled": scaling is not None})
    # A dynamic scaling is for lengths beyond the context in the file, which is the one that it begins at.
    extended = scaling.extended_max_seq_len if scaling is not None and scaling.kind == "dynamic" else None
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
        hidden_dim=more.pop("hidden_dim", found["intermediate_size"]),
        max_seq_len=extended or found.get("max_position_embeddings", 2048),
        norm_eps=found.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=found.get("tie_word_embeddings", False),
        attend=found.get(ATTEND),
        **more,
    )
    return config if note is None else with_note(config, note)


def _rope(found: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, in the spelling of transformers 5 (``rope_parameters``) or before (``rope_scaling``)."""
    new, old = object_in(found, "rope_parameters"), object_in(found, "rope_scaling")
    scaling = dict(new or old)
    if new and old and _plain(new) != _plain(old):
        raise ConfigError(
            f"rope_parameters={shown(new, 80)} and rope_scaling={shown(old, 80)} contradict each other; remove one"
        )
    theta = scaling.get("rope_theta", found.get("rope_theta", 10_000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE:
        raise ConfigError(f"rope scaling {shown(kind, 40)} is not supported; {', '.join(map(repr, ROPE))} are")
    extra = [name for name in scaling if name not in ("rope_theta", "rope_type", "type", *ROPE[kind])]
    for name in extra:
        if (name, scaling[name]) not in HARMLESS:
            raise ConfigError(f"rope scaling {kind!r} with {name}={shown(scaling[name], 40)} is not supported")
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
    if kind == "dynamic":  # the context in the file is what the model was first trained at
        settings["original_max_seq_len"] = context
    return theta, RopeScaling(cast(RopeScalingKind, kind), settings.pop("factor"), **settings)


def _require_ratio(context: Any, original: Any) -> None:
    for name, value in (("max_position_embeddings", context), ("original_max_position_embeddings", original)):
        if not isinstance(value, int | float) or not 0 < value < 1e30:
            raise ConfigError(f"{name}={shown(value, 40)} must be a positive number below 1e30")


def _plain(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A rope scaling in one spelling, without theta."""
    rest = {name: value for name, value in scaling.items() if name not in ("rope_theta", "type", "rope_type")}
    return rest | {"kind": scaling.get("rope_type", scaling.get("type", "default"))}


def config_to_dict(config: LlamaConfig) -> dict[str, Any]:
    """The settings of ``config.json`` for a configuration, in the spelling that old and new transformers read.

    A rope scaling that transformers does not have is written as an equivalent one that it has, with a note of its kind here.
    """
    found = _in_their_words(in_known_kinds(config))
    if config_from_dict(found) != config and config.rope_scaling is not None:
        found[NOTE] = note_of(config)
    back = config_from_dict(found)
    for name in (field.name for field in fields(config)):
        if getattr(back, name) != getattr(config, name):
            raise ConfigError(f"{name}={shown(getattr(config, name))} has no place in the config.json of a {config.kind}")
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
    family = FAMILIES[config.kind]
    parameters = rope | {"rope_theta": config.rope_theta}
    return {
        "model_type": config.kind,
        "architectures": [family.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": parameters,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **({} if config.attend is None else {ATTEND: config.attend}),
    } | family.settings(config, parameters)
