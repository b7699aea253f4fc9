"""Hugging Face folders with quantized weights, written by plain NumPy: the formats' layouts once more, by other means.

Each writer is given random numbers of a weight and returns its tensors, by the end of their names, and the matrix that they
stand for, computed by the format's own formula in float32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.formats.huggingface import config_to_dict

CONFIG = LlamaConfig(
    vocab_size=96,
    dim=128,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=768,
    max_seq_len=64,
    norm_eps=1e-5,
    rope_theta=1e4,
    tie_embeddings=False,
)
GOLDENS = Path(__file__).parent / "goldens"
KINDS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
}
Parts = tuple[dict[str, np.ndarray], np.ndarray]


def packed(numbers: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Integers of 4 bits along an axis, eight in each int32: nibble i, from the lowest, is number order[i]."""
    numbers = np.moveaxis(numbers.astype(np.int64), axis, -1)
    missing = -numbers.shape[-1] % 8
    numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, missing)])
    eight = numbers.reshape(*numbers.shape[:-1], -1, 8)
    words = sum(eight[..., order[i]] << (4 * i) for i in range(8))
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


def by_group(factors: np.ndarray, columns: int) -> np.ndarray:
    """[rows, groups] as [rows, columns]."""
    return np.repeat(factors, columns // factors.shape[1], axis=1).astype(np.float32)


def compressed_int4(group: int | None, symmetric: bool) -> Callable[[np.random.Generator, tuple[int, int]], Parts]:
    def write(rng: np.random.Generator, shape: tuple[int, int]) -> Parts:
        rows, columns = shape
        groups = columns // (group or columns)
        q, z = rng.integers(-8, 8, shape), rng.integers(-8, 8, (rows, groups)) * (not symmetric)
        s = rng.uniform(0.001, 0.01, (rows, groups)).astype(ml_dtypes.bfloat16)
        found = {
            ".weight_packed": packed(q + 8, 1),
            ".weight_scale": s,
            ".weight_shape": np.asarray(shape, np.int64),
        }
        if not symmetric:
            found[".weight_zero_point"] = packed(z + 8, 0)
        return found, (q - by_group(z, columns)).astype(np.float32) * by_group(s, columns)

    return write


def compressed_int8(per_row: bool) -> Callable[[np.random.Generator, tuple[int, int]], Parts]:
    def write(rng: np.random.Generator, shape: tuple[int, int]) -> Parts:
        q = rng.integers(-128, 128, shape).astype(np.int8)
        s = rng.uniform(0.0001, 0.001, (shape[0], 1) if per_row else (1,)).astype(np.float32)
        return {".weight": q, ".weight_scale": s, ".input_scale": np.ones(1, np.float32)}, q * s

    return write


def fp8(scales: str, end: str = ".weight_scale") -> Callable[[np.random.Generator, tuple[int, int]], Parts]:
    def write(rng: np.random.Generator, shape: tuple[int, int]) -> Parts:
        q = rng.normal(0, 60, shape).astype(ml_dtypes.float8_e4m3fn)
        size = {"tensor": (), "row": (shape[0], 1), "block": (-(-shape[0] // 128), -(-shape[1] // 128))}[scales]
        s = rng.uniform(0.0001, 0.001, size).astype(np.float32)
        whole = s if scales != "block" else np.repeat(np.repeat(s, 128, 0), 128, 1)[: shape[0], : shape[1]]
        return {".weight": q, end: np.asarray(s)}, q.astype(np.float32) * whole

    return write


def gptq(
    group: int | None, symmetric: bool, version: int = 1, reordered: bool = False
) -> Callable[[np.random.Generator, tuple[int, int]], Parts]:
    def write(rng: np.random.Generator, shape: tuple[int, int]) -> Parts:
        rows, columns = shape
        width = group or columns
        q = rng.integers(0, 16, (columns, rows))
        z = np.full((columns // width, rows), 8) if symmetric else rng.integers(0, 16, (columns // width, rows))
        s = rng.uniform(0.001, 0.01, z.shape).astype(np.float16)
        of = np.arange(columns) // width
        if reordered:
            of = rng.permutation(of)
        zeros = packed(z, 1)
        if version == 1:
            zeros = (zeros.view(np.uint32).astype(np.int64) - 0x11111111).astype(np.uint32).view(np.int32)
        found = {".qweight": packed(q, 0), ".qzeros": zeros, ".scales": s, ".g_idx": of.astype(np.int32)}
        return found, ((q - z[of]).astype(np.float32) * s[of].astype(np.float32)).T

    return write


def awq(rng: np.random.Generator, shape: tuple[int, int]) -> Parts:
    rows, columns = shape
    q, z = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (columns // 128, rows))
    s = rng.uniform(0.001, 0.01, z.shape).astype(np.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    of = np.arange(columns) // 128
    found = {".qweight": packed(q, 1, order), ".qzeros": packed(z, 1, order), ".scales": s}
    return found, ((q - z[of]).astype(np.float32) * s[of].astype(np.float32)).T


PACKAGES = {
    kind: {"quant_method": kind.split("_")[0], "bits": 4, "group_size": 32, **more}
    for kind, more in {
        "gptq": {"desc_act": False, "sym": False},
        "gptq_symmetric": {"desc_act": False, "sym": True},
        "gptq_reordered": {"desc_act": True, "sym": False},
        "awq": {"zero_point": True, "version": "gemm"},
    }.items()
}


def by_package(kind: str) -> Callable[[np.random.Generator, tuple[int, int]], Parts]:
    """Matrices of the same 64 rows of 128 columns over and over, as the format's own package packed and decoded them."""
    golden = {name: array for name, array in np.load(GOLDENS / "gptq_awq.npz").items() if name.startswith(kind + "/")}

    def write(rng: np.random.Generator, shape: tuple[int, int]) -> Parts:
        down, across = shape[0] // 64, shape[1] // 128
        names = [name for name in ("qweight", "qzeros", "scales") if f"{kind}/{name}" in golden]
        found = {f".{name}": np.tile(golden[f"{kind}/{name}"], (across, down)) for name in names}
        if kind != "awq":
            found[".g_idx"] = np.concatenate([golden[f"{kind}/g_idx"] + 4 * i for i in range(across)]).astype(np.int32)
        return found, np.tile(golden[f"{kind}/decoded"], (down, across)).astype(np.float32)

    return write


def nf4(double: bool) -> Callable[[np.random.Generator, tuple[int, int]], Parts]:
    with np.load(GOLDENS / "nf4.npz") as golden:
        table, nested_table = golden["quant_map"], golden["nested_quant_map"]

    def write(rng: np.random.Generator, shape: tuple[int, int]) -> Parts:
        count = shape[0] * shape[1]
        q = rng.integers(0, 16, count).astype(np.uint8)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
        found = {".weight": (q[::2] * 16 + q[1::2])[:, None].astype(np.uint8), ".weight.quant_map": table}
        if double:
            codes, offset = rng.integers(0, 256, count // 64).astype(np.uint8), 0.0625
            nested = rng.uniform(0.01, 0.05, -(-len(codes) // 256)).astype(np.float32)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            found |= {".weight.absmax": codes, ".weight.nested_absmax": nested, ".weight.nested_quant_map": nested_table}
            absmax = nested_table[codes] * np.repeat(nested, 256)[: len(codes)] + np.float32(offset)
        else:
            absmax = found[".weight.absmax"] = rng.uniform(0.05, 0.1, count // 64).astype(np.float32)
        found[".weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        return found, (table[q] * np.repeat(absmax, 64)).reshape(shape).astype(np.float32)

    return write


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    """The ``quantization_config`` of compressed-tensors."""
    more = {"symmetric": True, "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax"}
    activations = {"num_bits": 8, "type": weights["type"], "strategy": "token", "dynamic": True, "symmetric": True}
    group = {"targets": ["Linear"], "weights": more | weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _int4(**more: Any) -> dict[str, Any]:
    return compressed("pack-quantized", num_bits=4, type="int", **more)


def _fp8(**more: Any) -> dict[str, Any]:
    return compressed("float-quantized", num_bits=8, type="float", **more)


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.01}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}

# By name: the setting in config.json, the writer, and the kinds of weights that "keep" gives, of rows of 128 and of 768.
FOLDERS: dict[str, tuple[dict[str, Any], Callable[..., Parts], tuple[str, str] | None]] = {
    "int4": (_int4(strategy="group", group_size=128), compressed_int4(128, True), ("int4", "int4")),
    "int4 by 32, asymmetric": (
        _int4(strategy="group", group_size=32, symmetric=False),
        compressed_int4(32, False),
        ("int4_asym_32", "int4_asym_32"),
    ),
    "int4 by rows": (_int4(strategy="channel"), compressed_int4(None, True), ("int4", "int4")),
    "int8": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        compressed_int8(True),
        ("int8", "int8"),
    ),
    "int8 by tensor": (
        compressed("int-quantized", num_bits=8, type="int", strategy="tensor"),
        compressed_int8(False),
        ("int8", "int8"),
    ),
    "float8 by tensor": (_fp8(strategy="tensor"), fp8("tensor"), ("fp8", "fp8")),
    "float8 by rows": (_fp8(strategy="channel"), fp8("row"), ("fp8", "fp8")),
    "float8 by blocks": (_fp8(strategy="block", block_structure=[128, 128]), fp8("block"), ("fp8_128", "fp8_128")),
    "fp8": (_FP8, fp8("block", ".weight_scale_inv"), ("fp8_128", "fp8_128")),
    "fp8 by tensor": (_FP8 | {"weight_block_size": None}, fp8("tensor"), ("fp8", "fp8")),
    "gptq": (_GPTQ, gptq(128, True), ("int4", "int4")),
    "gptq, asymmetric": (_GPTQ | {"sym": False, "group_size": 64}, gptq(64, False), ("int4_asym_64", "int4_asym_64")),
    "gptq_v2": (_GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, gptq(128, False, 2), ("int4_asym", "int4_asym")),
    "gptq by rows": (_GPTQ | {"group_size": -1}, gptq(None, True), ("int4", "int4")),
    "gptq, reordered": (_GPTQ | {"desc_act": True, "sym": False}, gptq(128, False, 1, True), None),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        awq,
        ("int4_asym",) * 2,
    ),
    "nf4": (_NF4, nf4(False), ("nf4_single", "nf4_single")),
    "nf4 twice": (_NF4 | {"bnb_4bit_use_double_quant": True}, nf4(True), ("nf4", "nf4_256")),
}


def tensors_of(
    config: LlamaConfig, write: Callable[..., Parts], seed: int = 0
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """All tensors of a folder, and those of the same model in float32; what is no projection of a layer is dense."""
    import make_goldens

    rng = np.random.default_rng(seed)
    dense = make_goldens.random_tensors(config)
    for name in [name for name in dense if ".mlp." in name and config.experts]:
        array, (layer, part) = dense.pop(name), name.split(".mlp.")
        which = {"gate": "w1", "down": "w2", "up": "w3"}[part.partition("_")[0]]
        dense |= {f"{layer}.block_sparse_moe.experts.{i}.{which}.weight": array for i in range(config.experts)}
        dense[f"{layer}.block_sparse_moe.gate.weight"] = rng.normal(0, 1, (config.experts, config.dim)).astype(np.float32)
    found: dict[str, np.ndarray] = {}
    for name, array in dense.items():
        if re.search(r"(_proj|w[123])\.weight$", name):
            parts, dense[name] = write(rng, array.shape)
            found |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
        else:
            found[name] = array
    return found, {name: np.ascontiguousarray(array, np.float32) for name, array in dense.items()}


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file; the library's own writer has no floats of 8 bits."""
    header, at = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": KINDS[array.dtype.name], "shape": array.shape, "data_offsets": (at, at + array.nbytes)}
        at += array.nbytes
    text = json.dumps(header).encode()
    content = [np.ascontiguousarray(array).tobytes() for array in tensors.values()]
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *content]))


def write_folder(
    folder: Path, kind: str, config: LlamaConfig = CONFIG, *, files: int = 1, **changes: Any
) -> dict[str, np.ndarray]:
    """A folder of a kind, in one file or several with an index; returns the tensors of the same model in float32."""
    setting, write, _ = FOLDERS[kind]
    tensors, dense = tensors_of(config, write)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_to_dict(config) | {"quantization_config": setting | changes}))
    if files == 1:
        save(folder / "model.safetensors", tensors)
        return dense
    names, places = sorted(tensors), {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        some = names[i::files]  # so that the parts of a weight lie in different files
        save(folder / file, {name: tensors[name] for name in some})
        places |= dict.fromkeys(some, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return dense
