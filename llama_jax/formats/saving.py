"""Writing parameters, or a checkpoint of any format, in another format."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, reading, short_repr
from llama_jax.formats.adapters import OpenedAdapter, load_adapter, open_adapter, save_adapter, with_adapter_parts
from llama_jax.formats.build_params import WrittenTensor
from llama_jax.formats.device_fill import check_largest
from llama_jax.formats.gguf import GGUF_NAMES as GGUF_NAMES
from llama_jax.formats.gguf import Blocks, read_storage_types
from llama_jax.formats.huggingface import from_params
from llama_jax.formats.lazy_tensors import FLOAT_DTYPES
from llama_jax.formats.loading import WEIGHT_FORMATS, load, log_notes, open_checkpoint
from llama_jax.formats.model_folder import (
    ModelMetadata,
    all_settings,
    check_output,
    describe_missing,
    missing_settings,
    new_output,
    vocabulary_files,
    write_model_metadata,
    write_vocabulary_files,
)
from llama_jax.formats.orbax_format import OrbaxCheckpoint, array_name
from llama_jax.formats.quantize_on_load import Quantization, check_quantize, describe_quantized_types
from llama_jax.formats.weight_format import OpenedCheckpoint
from llama_jax.model.awq import scale_channels
from llama_jax.model.checks import check_no_hooks
from llama_jax.model.mixtures import MIXTURES, base_format
from llama_jax.model.params import LlamaParams
from llama_jax.model.trees import dequantize
from llama_jax.model.trees import quantize as quantized_params
from llama_jax.ops.layers import Weight
from llama_jax.ops.weights.formats import FormatName
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight
from llama_jax.parallel.padding import unpad_params
from llama_jax.storage import Location, StoredPath, locate
from llama_jax.storage.atomic_write import remove
from llama_jax.tokenizers import Tokenizer, load_tokenizer
from llama_jax.tokenizers.interface import check_token_rows, token_name
from llama_jax.tokenizers.load import warn_of_size

WrittenFormat = Literal["safetensors", "gguf", "llama2c", "orbax"]
WrittenDtype = Literal["float32", "bfloat16", "float16", Blocks]
FOLDERS = tuple(format.name for format in WEIGHT_FORMATS.values() if format.is_folder)
TENSOR_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"} | {
    dtype: base_format(dtype).upper() + dtype.removeprefix(base_format(dtype)) for dtype in get_args(Blocks)
}
CALIBRATION = 2048  # tokens
_log = logging.getLogger(__name__)
WritingProgress = Callable[[list[WrittenTensor]], Iterable[WrittenTensor]]


def save(
    path: str | os.PathLike[str],
    config: LlamaConfig,
    params: LlamaParams,
    tokenizer: Tokenizer | None = None,
    *,
    format: WrittenFormat | None = None,
    dtype: WrittenDtype | None = None,
    overwrite: bool = False,
    like: str | os.PathLike[str] | None = None,
    progress: WritingProgress | None = None,
    metadata: ModelMetadata = ModelMetadata(),
) -> None:
    """Write a model: it appears under `path` only when completely written.

    Args:
      config, params: the model. Padding and copies made for a mesh are removed (`parallel.padding`); if heads were copied,
        pass the configuration of the model's file, not the one that `load` returned for the mesh.
      path: a folder for "safetensors" (the Hugging Face layout, several files above 5 GB) and "orbax", a file for "gguf"
        and "llama2c" (legacy ``.bin``, which run.c reads).
      format: None chooses by the name: "gguf" for ``.gguf``, "llama2c" for ``.bin``, else "safetensors".
      tokenizer: written into a GGUF, or next to the weights (for "llama2c" the file's folder must not have another).
      dtype: of the written tensors; None keeps that of the parameters, and in a GGUF their blocks. Blocks ("q8_0", "q4_k")
        are only for GGUF; "llama2c" is float32. "orbax" keeps quantized parameters as they are; other formats and dtypes
        store the dequantized values.
      overwrite: replace a file, or a folder that contains only a model.
      like: for "gguf", the quantized GGUF that `params` differ from by small changes, as after `merge`. Without a dtype,
        matrices are quantized as in it. In the same blocks they are rounded up or down at random, which keeps the changes
        on average; rounding to nearest would lose changes below half a step.
      progress: wraps the list of tensors, as `tqdm.tqdm` does, to show progress ("orbax" writes all at once).
      metadata: descriptions next to the weights (`load(path).metadata`). Settings of it and of the tokenizer that the format
        cannot store are logged.

    Raises:
      CheckpointError: something is at `path`; or the format cannot store this model (the message gives the reason).
      ConfigError: parameters with hooks.
    """
    format = format_of(path) if format is None else format
    _check_target(path, format, dtype)
    types_before: dict[str, str] = {}
    if like is not None:
        model = open_checkpoint(like)
        if format != "gguf" or model.names is not GGUF_NAMES:
            raise CheckpointError(f"like={os.fspath(like)!r} is only for format='gguf'; omit it")
        types_before = read_storage_types(model.path)
    _check_leaves(params)
    check_no_hooks(params)
    params = unpad_params(config, params)
    write_params = WEIGHT_FORMATS[format].write_params
    if write_params is None:
        opened = from_params(config, params, tokenizer, metadata)
        _write_checkpoint(locate(path), opened, format, dtype, overwrite, progress, before=types_before)
        return
    with new_output(Path(path), folder=True, overwrite=overwrite) as target:
        write_params(target, config, _cast_finite(params if dtype is None else dequantize(params), dtype), Path(path))
        if tokenizer is not None:
            tokenizer.save(target)
        write_model_metadata(target, metadata)
        _log_lost(path, all_settings(tokenizer, metadata), target)


def _log_lost(path: object, before: Mapping[str, Any], written: Location) -> None:
    """Log the settings that the format of a written model cannot store."""
    if before:
        reopened = open_checkpoint(written)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the source's vocabulary, about the temporary path
            after = all_settings(reopened.tokenizer(), reopened.metadata())
        if missing := missing_settings(before, after):
            _log.warning(describe_missing(path, missing))


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: WrittenFormat | None = None,
    dtype: WrittenDtype | None = None,
    quantize: Quantization | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: WritingProgress | None = None,
) -> None:
    """Write the model at `source`, of any format, in another format: tensor by tensor, so that it need not fit into memory.

    An adapter, from PEFT, a GGUF or a run, is written as an adapter: for PEFT, or as "gguf" for llama.cpp.

    From and to "orbax", and with `calibrate`, the model is loaded into memory. See `save` for the arguments and errors; None
    for `dtype` keeps each tensor's dtype, and from GGUF to GGUF or orbax its blocks, which become float32 in other formats.
    For `quantize`, which is only for "orbax", see `load`.

    Args:
      calibrate: a text; its first 2,048 tokens are used to scale channels before the matrices are quantized, see
        `model.awq`.
      tokenizer: a vocabulary's file or folder, written instead of the source's.
      base: for an adapter, the model that it was trained on; only its settings are read. By default the one it names.
    """
    format = format_of(path) if format is None else format
    _check_target(path, format, dtype)
    opened_adapter = open_adapter(source)
    if opened_adapter is not None:
        is_float, has_format = dtype not in get_args(Blocks) and quantize is None, format in ("safetensors", "gguf")
        is_misnamed = (format == "gguf") != (Path(path).suffix.lower() == ".gguf")
        in_float = f"{source} is an adapter: write it as safetensors or gguf, in a 16- or 32-bit float"
        if not is_float or not has_format or calibrate is not None:
            raise CheckpointError(in_float)
        if tokenizer is not None:
            raise CheckpointError(f"tokenizer={str(tokenizer)!r} is for a model, but {source} is an adapter; omit it")
        if is_misnamed:
            raise CheckpointError(f"{os.fspath(path)}: an adapter in GGUF is a file named .gguf; for PEFT it is a folder")
        _convert_adapter(source, opened_adapter, path, dtype, base, overwrite)
        return
    quant_format, is_written_quantized = dtype if quantize is None else quantize, format == "orbax" and dtype is None
    for_orbax = f"{quantize=} is for format='orbax' without a dtype; for blocks in a GGUF set dtype, such as 'q4_k'"
    how = "dtype='q4_k' for a GGUF, or quantize='int4' for orbax"
    if base is not None:
        raise CheckpointError(f"base={str(base)!r} is for an adapter, but {source} is a model; omit it")
    if quantize is not None and not is_written_quantized:
        raise CheckpointError(for_orbax)
    if calibrate and quant_format not in MIXTURES:
        raise CheckpointError(f"calibrate={str(calibrate)!r} needs quantization: {how}")
    check_quantize(quantize)
    opened = open_checkpoint(source)
    if tokenizer is not None:
        chosen_tokenizer = load_tokenizer(tokenizer)
        warn_of_size(chosen_tokenizer, opened.config.vocab_size, tokenizer)
        opened = replace(opened, tokenizer=lambda: chosen_tokenizer)
    sources = [locate(source), opened.path]
    if calibrate is None and not isinstance(opened, OrbaxCheckpoint) and WEIGHT_FORMATS[format].write is not None:
        log_notes(opened)
        _write_checkpoint(locate(path), opened, format, dtype, overwrite, progress, sources)
        return
    check_output(locate(path), folder=format in FOLDERS, overwrite=overwrite, sources=sources)
    if calibrate is None:
        halves = opened.names and opened.tensors[opened.names["embedding"]].storage_type == "F16"
        # A copy keeps float16, although CPUs do not compute in it, see `lazy_tensors.default_dtype`.
        stored = jnp.float16 if halves and quantize is None else None
        loaded = load(source, stored, quantize=quantize, tokenizer=tokenizer)
        params = loaded.params
    else:
        loaded = load(source, "float32", tokenizer=tokenizer)
        tokens = _calibration(calibrate, loaded.config, loaded.tokenizer)
        params = scale_channels(loaded.config, loaded.params, tokens, cast(str, quant_format), progress=cast(Any, progress))
        params = params if quantize is None else quantized_params(params, cast(FormatName, quantize))
    options: Any = dict(format=format, dtype=dtype, overwrite=overwrite, progress=progress, metadata=loaded.metadata)
    save(path, loaded.config, params, loaded.tokenizer, **options)


def _calibration(text: str | os.PathLike[str], config: LlamaConfig, tokenizer: Tokenizer | None) -> np.ndarray:
    """The first tokens of a text, int32[rows, length]."""
    if tokenizer is None:
        raise CheckpointError(f"calibrate={os.fspath(text)!r}: the model has no vocabulary to encode a text with")
    with reading(text, CheckpointError), locate(text).open("rb") as file:
        tokens = tokenizer.encode(file.read(16 * CALIBRATION).decode("utf-8", "ignore"))[:CALIBRATION]
    check_token_rows(tokenizer, tokens, config.vocab_size, os.fspath(text))
    length = min(len(tokens), 512, config.max_seq_len)
    if length < 16:
        raise CheckpointError(f"calibrate={os.fspath(text)!r} has {len(tokens)} tokens; at least a few hundred are needed")
    return np.asarray(tokens[: len(tokens) // length * length], np.int32).reshape(-1, length)


def describe_requantization(
    source: str | os.PathLike[str], path: str | os.PathLike[str], format: WrittenFormat | None, rounded: str | None
) -> list[str]:
    """A line about how `convert` treats the quantized tensors of a model; no line if there are none.

    Args:
      rounded: the requested dtype or quantization format.
    """
    if open_adapter(source) is not None:
        return []
    tensors = open_checkpoint(source).tensors
    into = format_of(path) if format is None else format
    is_kept = WEIGHT_FORMATS[into].can_keep
    kept_types = describe_quantized_types(tensors, lambda tensor: rounded is None and is_kept(tensor))
    dequantized_types = describe_quantized_types(tensors, lambda tensor: rounded is not None or not is_kept(tensor))
    lines = [f"{kept_types} kept as they are"] if kept_types else []
    target = f"float32 and requantized as {rounded}" if rounded in MIXTURES else rounded or "float32"
    lines += [f"{dequantized_types} dequantized to {target}"] if dequantized_types else []
    return [f"{os.fspath(source)}: {', '.join(lines)}"] if lines else []


def _convert_adapter(
    source: str | os.PathLike[str],
    opened: OpenedAdapter,
    path: str | os.PathLike[str],
    dtype: WrittenDtype | None,
    base: str | os.PathLike[str] | None,
    overwrite: bool,
) -> None:
    base_name = opened.base
    where = locate(base or base_name or "")
    config = opened.base_config if base is None else None
    if config is None and base is None and (base_name is None or not where.exists()):
        reason = (
            "does not name its base" if base_name is None else f"was trained on {short_repr(base_name)}, which was not found"
        )
        raise CheckpointError(f"{source} {reason}; pass the base's folder or file as base (--base)")
    folder = Path(path).suffix.lower() != ".gguf"
    check_output(locate(path), folder=folder, overwrite=overwrite, sources=[locate(source), where])
    config = open_checkpoint(where).config if config is None else config
    config = with_adapter_parts(config, [source])
    adapter = load_adapter(source, config, jnp.float32 if dtype is None else FLOAT_DTYPES[TENSOR_TYPES[dtype]])
    save_adapter(path, config, adapter.params, adapter.lora, base=base_name or os.fspath(where), overwrite=overwrite)


def format_of(path: str | os.PathLike[str]) -> WrittenFormat:
    """The format for a path's suffix; safetensors for any other suffix."""
    suffix = Path(path).suffix.lower()
    matching = (
        format.name for format in WEIGHT_FORMATS.values() if format.write is not None and suffix in format.suffixes[:1]
    )
    return cast(WrittenFormat, next(matching, "safetensors"))


def _write_checkpoint(
    path: Location,
    opened: OpenedCheckpoint,
    format: WrittenFormat,
    dtype: WrittenDtype | None,
    overwrite: bool,
    progress: WritingProgress | None,
    sources: Iterable[Location] = (),
    before: Mapping[str, str] | None = None,
) -> None:
    if opened.config.parts and not WEIGHT_FORMATS[format].names_parts:
        raise CheckpointError(
            f"{opened.config.parts} cannot be stored in {format}, whose readers have fixed parts; write safetensors or orbax"
        )
    storage_type, write = None if dtype is None else TENSOR_TYPES[dtype], WEIGHT_FORMATS[format].write
    assert write is not None
    tokenizer = opened.tokenizer()
    beside = {}
    if format == "llama2c" and tokenizer is not None and isinstance(path, Path):
        beside = vocabulary_files(tokenizer, path, opened.config.vocab_size, opened.metadata())
    written: list[Path] = []
    try:
        with new_output(path, folder=format in FOLDERS, overwrite=overwrite, sources=sources) as target:
            write(target, opened, tokenizer, storage_type, progress=progress, **({"before": before} if before else {}))
            # Before the weights get their name: without a vocabulary the model is incomplete.
            write_vocabulary_files(beside, written)
            _log_lost(path, all_settings(tokenizer, opened.metadata()), target)
    except BaseException:
        for file in written:
            remove(file)
        raise
    rows = opened.config.vocab_size
    if format == "gguf" and tokenizer is None:
        _log.warning("%s has no vocabulary, so llama.cpp cannot open it; set one as tokenizer (--tokenizer)", path)
    elif format == "gguf" and tokenizer and tokenizer.vocab_size > rows:
        first = short_repr(token_name(tokenizer, rows), 80)
        _log.warning("%s has no tokens from %s (id %d) on, as llama.cpp requires: they have no row", path, first, rows)


def _check_target(path: str | os.PathLike[str], format: WrittenFormat, dtype: WrittenDtype | None) -> None:
    if format not in get_args(WrittenFormat):
        raise CheckpointError(f"format={format!r} is not one of {', '.join(get_args(WrittenFormat))}")
    name, weight_format = os.fspath(path), WEIGHT_FORMATS[format]
    is_folder, is_stored = format in FOLDERS, isinstance(locate(path), StoredPath)
    like_file = Path(name).suffix in (".gguf", ".bin", ".safetensors", ".pth", ".pt")
    dtypes = ", ".join(weight_format.dtypes)
    capable = [f"format={name!r}" for name in get_args(WrittenFormat) if dtype in WEIGHT_FORMATS[name].dtypes]
    remedy = f"choose {' or '.join(capable)}, or another dtype" if capable else "choose another dtype"
    if is_stored and not weight_format.in_stores:
        raise CheckpointError(f"{name} is in a store, but {format} can only be written to a local path")
    if is_folder and like_file:
        raise CheckpointError(f"{name} is named like a file, but {format} is a folder; use another name or format")
    if not is_folder and name.endswith(os.sep):
        raise CheckpointError(f"{name} is named like a folder, but {format} is a file; pass its name")
    if dtype not in (None, *weight_format.dtypes):
        raise CheckpointError(f"{dtype=}: the {format} format supports only {dtypes}; {remedy}")


def _check_leaves(params: LlamaParams) -> None:
    """Raise CheckpointError for a leaf that is not a weight, such as an adapter."""
    is_leaf = lambda leaf: isinstance(leaf, Weight)
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_leaf):
        if is_leaf(leaf) and not isinstance(leaf, QuantizedWeight | JoinedWeight):
            raise CheckpointError(
                f"{array_name(path)} is a {type(leaf).__name__}; files store only weights: merge it with its weight"
            )


# One program per shape instead of one per operation.
_largest = jax.jit(lambda array: jnp.maximum(array.max(), -array.min()))


def _cast_finite(params: LlamaParams, dtype: WrittenDtype | None) -> LlamaParams:
    """The parameters cast and checked to be finite, as the other formats do tensor by tensor."""

    def cast(path: tuple[Any, ...], array: jax.Array) -> jax.Array:
        if dtype is None and (not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize == 1):
            return array  # integers of a quantized weight; its scales are checked
        target = array.dtype if dtype is None else FLOAT_DTYPES[TENSOR_TYPES[dtype]]
        check_largest(float(_largest(array)), target, f"array {array_name(path)!r}", "pass finite parameters")
        return array.astype(target)

    return jax.tree_util.tree_map_with_path(cast, params)
