"""Rope scalings in the settings of other formats.

A context that other libraries would not infer is written with a note of ours. A GGUF has settings, and per-frequency
factors as tensors (ggml-org/llama.cpp, src/llama-model.cpp and src/llama-context.cpp): for the architecture "llama" none,
linear, yarn with 32 and 1 turns, longrope, and, without a name, Llama 3.1's. llama.cpp's longrope depends on the context
size that it was started with; ours and that of transformers on the length of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from llama_jax.config import LlamaConfig, RopeScaling
from llama_jax.config.families import FAMILIES
from llama_jax.config.families.shared import refuse_to_store
from llama_jax.config.rope import scaled_length, unscaled_length
from llama_jax.errors import ConfigError, short_repr
from llama_jax.formats.lazy_tensors import Tensor
from llama_jax.ops.rope_scaling import SCALINGS, yarn_attention_factor
from llama_jax.ops.rotary import inverse_frequencies
from llama_jax.settings import Bounds, NonNegativeFloat, PositiveInt, check_value
from llama_jax.tokenizers.gguf_header import short_decimal

NOTE = "llama_jax"  # the key of our note in a config.json, and the prefix of our keys in a GGUF


def with_context(config: LlamaConfig, *, scaled_context: bool = False) -> LlamaConfig:
    """The configuration of a file, in which `max_seq_len` is the context that the file states, with the extended context.

    As in vLLM (`_get_and_verify_max_len` in vllm/config/model.py): the original context times the factor for yarn, the
    stated one times the factor for linear and dynamic; other scalings do not change it. transformers has no limit.

    Args:
      scaled_context: whether the stated context includes the factor, also in families where it does not (`Family`). That
        of dynamic never does: its frequencies depend on the original one.
    """
    scaling, stated = config.rope_scaling, config.max_seq_len
    if scaling is None or scaling.kind in ("llama3", "longrope"):
        return config
    if scaling.kind != "dynamic" and (scaled_context or FAMILIES[config.model_type].scaled_context):
        return config
    context = scaling.extended_max_seq_len or scaled_length(stated, scaling.factor)
    return replace(config, max_seq_len=context, unscaled_max_seq_len=stated)


def stated_context(config: LlamaConfig, *, scaled_context: bool = False) -> int:
    """The context that a file states for a configuration; see `with_context`, which may extend it to another one."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        return scaling.original_max_seq_len or config.max_seq_len
    if scaling is None or scaled_context or FAMILIES[config.model_type].scaled_context:
        return config.max_seq_len
    if scaling.kind == "linear" and config.unscaled_max_seq_len is None:
        return unscaled_length(config.max_seq_len, scaling.factor)
    return config.default_context


def infer_context(config: LlamaConfig) -> LlamaConfig:
    """The configuration with the context that readers infer from the one that its file states."""
    return with_context(replace(config, max_seq_len=stated_context(config), unscaled_max_seq_len=None))


NOTE_FIELDS = ("max_seq_len", "unscaled_max_seq_len")


def context_note(config: LlamaConfig) -> dict[str, int | None]:
    """The note of a context that readers would not infer."""
    return {name: getattr(config, name) for name in NOTE_FIELDS}


def with_note(config: LlamaConfig, note: Any, *, scaled_context: bool = False) -> LlamaConfig:
    """The configuration of a file, in which `max_seq_len` is the stated context, with the context of its note.

    Raises:
      ConfigError: not a note, or one of another stated context.
    """
    if not isinstance(note, Mapping) or note.keys() != set(NOTE_FIELDS):
        raise ConfigError(f"{NOTE}={short_repr(note, 80)} is not a note of a context; remove it")
    noted = replace(config, **note)
    if stated_context(noted, scaled_context=scaled_context) != config.max_seq_len:
        raise ConfigError(
            f"{NOTE}={short_repr(note, 80)} contradicts the stated context of {config.max_seq_len}; remove it, or correct it"
        )
    return noted


LLAMA3_FACTORS = "rope_freqs.weight"  # the divisors of the frequencies of Llama 3.1's scaling, which has no key
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (LLAMA3_FACTORS, LONG_FACTORS, SHORT_FACTORS)
LLAMA3_KEYS = {  # Llama 3.1's parameters, since a GGUF stores only their factors, and their defaults
    f"{NOTE}.rope.low_freq_factor": ("low_freq_factor", 1.0),
    f"{NOTE}.rope.high_freq_factor": ("high_freq_factor", 4.0),
    f"{NOTE}.rope.original_max_seq_len": ("original_max_seq_len", 8192),
}
# Settings that llama.cpp does not read for this architecture, with the values it uses instead.
FIXED_YARN = {
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_log_multiplier": 0,
}
# Those that architectures with all yarn settings read, and our names for them.
YARN_KEYS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_log_multiplier": ""}


def with_scaling(
    fields: Mapping[str, Any],
    plain: LlamaConfig,
    tensors: Mapping[str, Tensor],
    architecture: str,
    *,
    whole_yarn: bool = False,
) -> LlamaConfig:
    """The configuration with the rope scaling that settings and tensors describe.

    Args:
      architecture: the prefix of the keys.
      whole_yarn: whether the architecture reads all yarn settings.
    """
    scaling = _read_scaling(fields, plain, tensors, f"{architecture}.rope.scaling.", whole_yarn)
    config = replace(plain, rope_scaling=scaling)
    if f"{NOTE}.{NOTE_FIELDS[0]}" in fields:
        return with_note(config, {name: fields.get(f"{NOTE}.{name}") for name in NOTE_FIELDS})
    return with_context(config)


def _read_scaling(
    fields: Mapping[str, Any], config: LlamaConfig, tensors: Mapping[str, Tensor], prefix: str, whole_yarn: bool
) -> RopeScaling | None:
    # llama.cpp's converter stores a longrope without a type; its readers recognize it by the two tensors.
    silent = "longrope" if LONG_FACTORS in tensors and SHORT_FACTORS in tensors else "none"
    scaling_type = fields.get(f"{prefix}type", silent)
    if scaling_type not in ("none", "linear", "yarn", "longrope"):
        raise ConfigError(
            f"{prefix}type={short_repr(scaling_type, 40)} is not supported; use none, linear, yarn or longrope"
        )
    for name, supported in FIXED_YARN.items():
        if fields.get(prefix + name, supported) != supported and not (whole_yarn and name in YARN_KEYS):
            raise ConfigError(
                f"{prefix}{name}={short_repr(fields[prefix + name], 40)} is not supported; llama.cpp uses {supported}"
            )
    sharper = short_decimal(fields.get(f"{prefix}attn_factor", 1.0))
    check_value(f"{prefix}attn_factor", sharper, Annotated[float, Bounds()], ConfigError)
    log_multiplier = fields.get(f"{prefix}yarn_log_multiplier", 0.0) if scaling_type == "yarn" else 0.0
    if sharper != 1 and (scaling_type not in ("yarn", "longrope") or log_multiplier):
        raise ConfigError(
            f"{prefix}attn_factor={short_repr(sharper, 40)} is not supported with type {scaling_type!r} and"
            f" yarn_log_multiplier={short_repr(log_multiplier, 40)}"
        )
    possible: list[set[str]] = [set(), {LLAMA3_FACTORS}]
    if scaling_type in ("longrope", "yarn"):
        possible = [{LONG_FACTORS, SHORT_FACTORS} if scaling_type == "longrope" else set()]
    if set(ROPE_TENSORS) & tensors.keys() not in possible:
        names = ", ".join(name for name in ROPE_TENSORS if name in tensors) or "none"
        raise ConfigError(f"{prefix}type={scaling_type!r} is not supported with these tensors of factors: {names}")
    factor = short_decimal(fields.get(f"{prefix}factor", fields.get(f"{prefix.removesuffix('scaling.')}scale_linear")))
    if factor not in (None, 0, 1) and set(ROPE_TENSORS) & tensors.keys():
        raise ConfigError(f"{prefix}factor={short_repr(factor, 40)} is not supported with tensors of factors")
    original = fields.get(f"{prefix}original_context_length", config.max_seq_len)
    check_value(f"{prefix}original_context_length", original, PositiveInt, ConfigError)
    if factor is not None or scaling_type == "yarn":
        check_value(f"{prefix}factor", factor, NonNegativeFloat, ConfigError)
    if scaling_type == "yarn":
        settings: dict[str, Any] = {"original_max_seq_len": original}
        if whole_yarn:
            turns = {name: fields.get(prefix + key, FIXED_YARN[key]) for key, name in YARN_KEYS.items() if name}
            settings |= {name: short_decimal(value) for name, value in turns.items()}
        if log_multiplier:
            return RopeScaling("yarn", factor, **settings, mscale=1.0, mscale_all_dim=short_decimal(log_multiplier))
        sharp = None if sharper == 1 else short_decimal(yarn_attention_factor(max(factor, 1.0)) * sharper)
        return RopeScaling("yarn", factor, **settings, attention_factor=sharp)
    if scaling_type == "longrope":
        short, long = (
            tuple(map(short_decimal, _read_factors(tensors[name]).tolist())) for name in (SHORT_FACTORS, LONG_FACTORS)
        )
        longrope = RopeScaling(
            "longrope",
            max(config.max_seq_len / original, 1.0),
            original_max_seq_len=original,
            short_factor=short,
            long_factor=long,
        )
        return longrope if np.isclose(sharper, sharpening(config, longrope)) else replace(longrope, attention_factor=sharper)
    if LLAMA3_FACTORS not in tensors:
        scaled = scaling_type == "linear" or f"{prefix}type" not in fields
        return RopeScaling("linear", factor) if scaled and factor not in (None, 1) else None
    # The stored factors are those of Llama 3.1's scaling: its parameters follow from them, or from our keys, and must
    # reproduce them.
    stored = _read_factors(tensors[LLAMA3_FACTORS])
    settings = {name: fields.get(key, default) for key, (name, default) in LLAMA3_KEYS.items()}
    llama3 = RopeScaling("llama3", short_decimal(stored.max()), **settings)
    step = replace(llama3, high_freq_factor=llama3.low_freq_factor)  # as in Llama 4
    for scaling in (llama3, step) if stored.shape == (config.rope_dim // 2,) else ():
        if np.allclose(factors_of(config, scaling), stored, rtol=1e-4):
            return None if scaling.factor == 1 else scaling
    raise ConfigError(f"{LLAMA3_FACTORS} does not hold the frequency factors of Llama 3.1's rope scaling")


def settings_and_tensors(
    config: LlamaConfig, architecture: str, *, whole_yarn: bool = False
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The context, theta and the rope scaling as a file stores them: settings by key, and tensors float32[H/2] by name."""
    scaling, prefix = config.rope_scaling, f"{architecture}.rope.scaling."
    settings: dict[str, Any] = {
        f"{architecture}.context_length": stated_context(config),
        f"{architecture}.rope.freq_base": float(config.rope_theta),
    }
    if scaling is None:
        return settings, {}
    if infer_context(config) != config:
        settings |= {f"{NOTE}.{name}": value for name, value in context_note(config).items() if value is not None}
    if scaling.kind == "dynamic":
        refuse_to_store("rope scaling kind='dynamic'", "support no frequencies that depend on the length")
    if scaling.kind == "llama3":
        settings |= {key: getattr(scaling, name) for key, (name, _) in LLAMA3_KEYS.items()}
        return settings, {LLAMA3_FACTORS: factors_of(config, scaling).astype(np.float32)}
    settings[f"{prefix}type"] = scaling.kind
    if scaling.kind != "longrope":  # llama.cpp would apply it to longrope as well
        settings[f"{prefix}factor"] = float(scaling.factor)
    if scaling.kind == "linear":
        return settings, {}
    for name, only in (("beta_fast", 32.0), ("beta_slow", 1.0), ("truncate", True)):
        if scaling.kind == "yarn" and whole_yarn and name != "truncate":
            settings[f"{prefix}yarn_{name}"] = float(getattr(scaling, name))
        elif scaling.kind == "yarn" and getattr(scaling, name) != only:
            refuse_to_store(f"rope scaling kind={scaling.kind!r} with {name}={getattr(scaling, name)}", f"assume {only}")
    settings[f"{prefix}original_context_length"] = scaling.original_max_seq_len
    if whole_yarn and scaling.mscale == 1.0:
        settings[f"{prefix}yarn_log_multiplier"] = float(scaling.mscale_all_dim or 0.0)
        return settings, {}
    settings[f"{prefix}attn_factor"] = sharpening(config, scaling)
    if scaling.kind == "yarn":
        settings[f"{prefix}attn_factor"] /= yarn_attention_factor(scaling.factor)  # llama.cpp multiplies by it
        return settings, {}
    return settings, {
        LONG_FACTORS: np.array(scaling.long_factor, np.float32),
        SHORT_FACTORS: np.array(scaling.short_factor, np.float32),
    }


def factors_of(config: LlamaConfig, scaling: RopeScaling) -> np.ndarray:
    """The divisors of the frequencies in a scaling: float64[H/2]."""
    plain = inverse_frequencies(config.rope_dim, config.rope_theta)
    return plain / _scale_frequencies(config, scaling)[0]


def sharpening(config: LlamaConfig, scaling: RopeScaling) -> float:
    """The attention factor of a scaling."""
    return _scale_frequencies(config, scaling)[1]


def _scale_frequencies(config: LlamaConfig, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    plain = inverse_frequencies(config.rope_dim, config.rope_theta)
    frequencies, factor = SCALINGS[scaling.kind](plain, config.rope_theta, None, scaling)
    return np.asarray(frequencies), factor


def _read_factors(tensor: Tensor) -> np.ndarray:
    return tensor.read(0, tensor.shape[0]).astype(np.float64)
