"""``quantization_config`` of Hugging Face folders: how their weights are quantised; unsupported ones are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llama_jax.errors import ConfigError, shown

METHODS = "compressed-tensors, fp8, gptq, awq and bitsandbytes"
SMALLEST_GROUP = 32
COMPRESSED_TENSORS = "compressed-tensors"


@dataclass(frozen=True)
class Scheme:
    """How the weights of a folder are quantised.

    Attributes:
      method: by its name in the file.
      layout: how a weight is stored: "packed" (4 bits, compressed-tensors), "int8", "fp8", "gptq", "awq" or "nf4".
      group: numbers of a row that share a factor; None for a whole row.
      block: rows and columns that share a factor, of fp8; None where all or a row do.
      symmetric: whether zero is always the middle of the integers.
      reordered: whether `g_idx` says of each column which group it belongs to.
      zeros_less_one: whether integers that stand for zero are stored less one.
    """

    method: str
    layout: Literal["packed", "int8", "fp8", "gptq", "awq", "nf4"]
    group: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    reordered: bool = False
    zeros_less_one: bool = False


def scheme_from_dict(found: Any) -> Scheme:
    """The scheme that a parsed ``quantization_config`` describes.

    Raises:
      ConfigError: an unsupported method, or an unsupported setting of one.
    """
    if not isinstance(found, Mapping):
        raise ConfigError(f"quantization_config={shown(found, 40)} must be an object")
    method = found.get("quant_method")
    read = {
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "gptq": _gptq,
        "awq": _awq,
        "bitsandbytes": _bitsandbytes,
    }.get(method if isinstance(method, str) else "")
    if read is None:
        raise _unsupported("quant_method", method, f"{METHODS} are read; use such a release, or the unquantised one")
    return read(found)


def _unsupported(name: str, value: Any, remedy: str) -> ConfigError:
    return ConfigError(f"quantization_config: {name}={shown(value, 60)} is not supported; {remedy}")


def _need(found: Mapping[str, Any], where: str, **allowed: Sequence[Any]) -> None:
    """Raise for a setting that has none of the accepted values; the first of them is the default of a missing one."""
    for name, values in allowed.items():
        value = found.get(name, values[0])
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values):
            words = " or ".join(repr(each) for each in values)
            raise _unsupported(name, value, f"{where} are read with {words}")


def _group(value: Any) -> int | None:
    """A group's size; None for -1, which stands for a whole row."""
    if value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < SMALLEST_GROUP or value % SMALLEST_GROUP:
        raise _unsupported("group_size", value, f"a multiple of {SMALLEST_GROUP}, or -1, is read")
    return value


def _gptq(found: Mapping[str, Any]) -> Scheme:
    of = "weights of GPTQ"
    _need(found, of, bits=(4,), is_marlin_format=(False, None), pack_dtype=("int32", None), dynamic=(None, {}))
    _need(found, of, desc_act=(False, True), sym=(True, False))
    version = found.get("checkpoint_format") or found.get("format") or "gptq"
    _need({"checkpoint_format": version}, of, checkpoint_format=("gptq", "gptq_v2"))
    return Scheme(
        "gptq",
        "gptq",
        _group(found.get("group_size", 128)),
        symmetric=found.get("sym", True),
        reordered=found.get("desc_act", False),
        zeros_less_one=version == "gptq",
    )


def _awq(found: Mapping[str, Any]) -> Scheme:
    of = "weights of AWQ"
    version = found.get("version") or found.get("format") or "gemm"
    _need({"version": str(version).lower()}, of, version=("gemm",))
    _need({"bits": found.get("bits", found.get("w_bit", 4))}, of, bits=(4,))
    _need(found, of, zero_point=(True,))
    return Scheme("awq", "awq", _group(found.get("group_size", found.get("q_group_size", 128))), symmetric=False)


def _bitsandbytes(found: Mapping[str, Any]) -> Scheme:
    of = "weights of bitsandbytes"
    _need(found, of, load_in_8bit=(False, None), load_in_4bit=(True,), bnb_4bit_quant_storage=("uint8", None))
    _need({"bnb_4bit_quant_type": found.get("bnb_4bit_quant_type", "fp4")}, of, bnb_4bit_quant_type=("nf4",))
    return Scheme("bitsandbytes", "nf4")


def _fp8(found: Mapping[str, Any]) -> Scheme:
    _need(found, "weights in fp8", fmt=("e4m3", None), expert_dtype=("fp8", None))
    return Scheme("fp8", "fp8", block=_block(found.get("weight_block_size"), "weight_block_size"))


def _block(value: Any, name: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = value if isinstance(value, list) and len(value) == 2 else []
    if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or not 0 < n <= 1 << 20 for n in sizes):
        raise _unsupported(name, value, "two sizes, as [128, 128], are read")
    if sizes[1] % SMALLEST_GROUP:
        raise _unsupported(name, value, f"columns in multiples of {SMALLEST_GROUP} are read")
    return sizes[0], sizes[1]


# By the format of compressed-tensors: what its weights must be, and in which layout they lie.
COMPRESSED: dict[str, tuple[str, int, Literal["packed", "int8", "fp8"]]] = {
    "pack-quantized": ("int", 4, "packed"),
    "int-quantized": ("int", 8, "int8"),
    "float-quantized": ("float", 8, "fp8"),
}


def _compressed_tensors(found: Mapping[str, Any]) -> Scheme:
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1 or not isinstance(scheme := next(iter(groups.values())), Mapping):
        raise _unsupported("config_groups", groups, "one group, for all linear layers, is read")
    format = scheme.get("format") or found.get("format")
    if not isinstance(format, str) or format not in COMPRESSED:
        raise _unsupported("format", format, f"{', '.join(COMPRESSED)} are read")
    sparsity = found.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise _unsupported("sparsity_config", sparsity, "weights without sparsity are read")
    _need(found, "weights", kv_cache_scheme=(None,), transform_config=(None, {}))
    _need(scheme, "weights", output_activations=(None,))
    weights = scheme.get("weights")
    if not isinstance(weights, Mapping):
        raise _unsupported("weights", weights, "an object is needed")
    kind, bits, layout = COMPRESSED[format]
    _need(weights, f"{format} weights", type=(kind,), num_bits=(bits,), dynamic=(False,), symmetric=(True, False))
    _need(weights, f"{format} weights", actorder=(None, False, "weight", "static"))
    symmetric, strategy = weights.get("symmetric", True), weights.get("strategy")
    if not symmetric and layout != "packed":
        raise _unsupported("symmetric", False, f"{format} weights are read with True")
    if layout == "packed":
        _need({"strategy": strategy}, f"{format} weights", strategy=("group", "channel"))
        group = _group(weights.get("group_size")) if strategy == "group" else None
        return Scheme(COMPRESSED_TENSORS, "packed", group, symmetric=symmetric)
    known = ("channel", "tensor") if layout == "int8" else ("channel", "tensor", "block")
    _need({"strategy": strategy}, f"{format} weights", strategy=known)
    block = _block(weights.get("block_structure"), "block_structure") if strategy == "block" else None
    return Scheme(COMPRESSED_TENSORS, layout, block=block)
