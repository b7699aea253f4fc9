"""RoPE scaling: extending a Llama's context beyond its training length."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from llama_jax.errors import ConfigError, short_repr
from llama_jax.settings import Bounds, PositiveFloat, PositiveInt, check_fields, check_value

RopeScalingKind = Literal["linear", "dynamic", "yarn", "llama3", "longrope"]

REQUIRED: Any = object()  # marks a field without a default
# The fields that each kind of RoPE scaling uses in addition to its factor, with defaults. The formulas are in
# `ops.rope_scaling.SCALINGS`.
ROPE_FIELDS: dict[str, dict[str, Any]] = {
    "linear": {},
    "dynamic": {"original_max_seq_len": REQUIRED},
    "yarn": {
        "original_max_seq_len": REQUIRED,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
    },
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192},
    "longrope": {
        "original_max_seq_len": REQUIRED,
        "short_factor": REQUIRED,
        "long_factor": REQUIRED,
        "attention_factor": None,
    },
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled beyond the model's original context length.

    A field that the kind does not use is None, and setting it is an error. To use a model at four times its context:
    ``replace(config, max_seq_len=4 * n, rope_scaling=RopeScaling("yarn", 4.0, original_max_seq_len=n))``.

    Attributes:
      kind: ``linear`` divides the frequency of every pair of features by `factor` (position interpolation: Chen et al. 2023,
        section 3.2). ``dynamic`` raises theta depending on the length of the sequence ("dynamic NTK": Peng et al. 2023,
        section 3.3, with transformers' factor). ``yarn`` divides the frequencies of pairs with few rotations within the
        original context, leaves the others unchanged, and lowers the temperature of the attention softmax (section 3.4).
        ``llama3`` has a ramp over rotations instead of pairs (Llama 3.1 reference
        code, ``apply_scaling``). ``longrope`` divides the frequency of each pair by its entry in one of two lists, chosen by
        the length (Ding et al. 2024, section 3).
      factor: the ratio of the new context to the original one, at least 1; ``longrope`` uses it only for the attention
        factor.
      low_freq_factor, high_freq_factor: numbers of rotations within the original context: the frequency of a pair with at
        most the first is divided, that of one with at least the second is unchanged; default 1 and 4. For ``llama3``.
      original_max_seq_len: the original context length of the model; default 8,192 for ``llama3``. Required for ``dynamic``,
        ``yarn`` and ``longrope``.
      beta_fast, beta_slow: numbers of rotations: the frequency of a pair with at least the first is unchanged, that of one
        with at most the second is divided; default 32 and 1. For ``yarn``.
      truncate: whether the ramp between them begins and ends at whole pairs; default True.
      attention_factor: factor of cosine and sine; attention scores are scaled by its square; default 0.1 ln(factor) + 1 for
        ``yarn``, and sqrt(1 + ln(factor) / ln(original_max_seq_len)) for ``longrope``.
      mscale, mscale_all_dim: weights of the logarithm in a ratio of two such factors, in place of `attention_factor`
        (DeepSeek-V2's YaRN); both or neither. For ``yarn``.
      short_factor, long_factor: one divisor for each of the H/2 pairs, for sequences up to the original context and for
        longer ones. For ``longrope``.

    Raises:
      ConfigError: an unknown kind; a required field that is missing, or one that the kind does not use; an invalid value.
    """

    kind: RopeScalingKind
    factor: Annotated[float, Bounds(1)]
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_seq_len: PositiveInt | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    truncate: bool | None = None
    attention_factor: PositiveFloat | None = None
    mscale: PositiveFloat | None = None
    mscale_all_dim: PositiveFloat | None = None
    short_factor: tuple[PositiveFloat, ...] | None = None
    long_factor: tuple[PositiveFloat, ...] | None = None

    def __post_init__(self) -> None:
        check_value("rope scaling kind", self.kind, RopeScalingKind, ConfigError)
        read = ROPE_FIELDS[self.kind]
        for field in fields(self)[2:]:
            name, value = field.name, getattr(self, field.name)
            if value is not None and name not in read:
                raise ConfigError(
                    f"rope scaling kind={self.kind!r} does not read {name}={short_repr(value, 40)}; leave it out"
                )
            if value is None and read.get(name) is REQUIRED:
                raise ConfigError(f"rope scaling kind={self.kind!r} needs {name}")
            value = read.get(name) if value is None else value
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        check_fields(self, ConfigError)
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            # Llama 4 Scout has no ramp: both are 1.
            step = self.kind == "llama3" and getattr(self, high) == getattr(self, low)
            if low in read and not getattr(self, high) > getattr(self, low) and not step:
                raise ConfigError(f"{high}={getattr(self, high)} must be larger than {low}={getattr(self, low)}")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ConfigError(f"mscale={self.mscale} and mscale_all_dim={self.mscale_all_dim} go together; set both")
        if self.mscale is not None and self.attention_factor is not None:
            raise ConfigError(f"attention_factor={self.attention_factor} and mscale={self.mscale} exclude each other")
        if self.kind == "longrope" and self.original_max_seq_len == 1:
            raise ConfigError("original_max_seq_len=1 must be at least 2: longrope divides by its logarithm")

    @property
    def extended_max_seq_len(self) -> int | None:
        """The context length with the scaling; None if the original one is unknown."""
        original = self.original_max_seq_len
        return None if original is None else scaled_length(original, self.factor)

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that the kind uses, by name."""
        return {"factor": self.factor} | {name: getattr(self, name) for name in ROPE_FIELDS[self.kind]}


def scaled_length(length: int, factor: float) -> int:
    """A context length times the factor of a scaling, rounded down; exact if the factor is a rounded quotient of lengths."""
    return int(length * factor + 1e-6)


def unscaled_length(length: int, factor: float) -> int:
    """The shortest context length that `scaled_length` extends to at least `length`."""
    return math.ceil(length / factor - 1e-6)


def check_fits(scaling: RopeScaling, head_dim: int) -> None:
    """Raise ConfigError for a scaling that does not fit this head size."""
    if scaling.kind == "dynamic" and head_dim < 4:
        raise ConfigError(f"head_dim={head_dim} is too small for rope scaling kind={scaling.kind!r}, which needs two pairs")
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        if factors is not None and len(factors) != head_dim // 2:
            raise ConfigError(
                f"{name} has {len(factors)} numbers, head_dim={head_dim} needs {head_dim // 2}, one for each pair"
            )
