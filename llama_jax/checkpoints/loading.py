"""One door for every format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from llama_jax.checkpoints import huggingface, llama2c
from llama_jax.checkpoints.assemble import Progress
from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError
from llama_jax.model.params import Llama
from llama_jax.tokenizers import Tokenizer, find_tokenizer


class Checkpoint(NamedTuple):
    """What a path held; `tokenizer` is None where none lies beside the weights."""

    config: LlamaConfig
    params: Llama
    tokenizer: Tokenizer | None


def load(
    path: str | os.PathLike[str], dtype: jax.typing.DTypeLike | None = None, *, progress: Progress | None = None
) -> Checkpoint:
    """Read a model, recognised by its content, and the tokenizer beside it.

    Args:
      path: a Hugging Face folder (``config.json`` and safetensors, single or sharded), one of its safetensors files, a
        llama2.c ``.bin`` file, or a folder that holds one.
      dtype: of the parameters; None keeps that of the file.
      progress: wraps the sequence of layers as they are read, as `tqdm.tqdm` does.

    Returns:
      The configuration, the parameters with one block per layer, and the tokenizer.

    Raises:
      CheckpointError: no model at the path, or a damaged or unsupported one.
    """
    _check_dtype(dtype)
    source = _recognise(_existing(path))
    if source.is_dir():
        config = huggingface.read_config(source)
        params = huggingface.load_params(source, config, dtype, progress)
        folder = source
    else:
        config = llama2c.read_config(source)
        params = llama2c.load_params(source, config, dtype, progress)
        folder = source.parent
    return Checkpoint(config, params, find_tokenizer(folder, config.vocab_size))


def _check_dtype(dtype: jax.typing.DTypeLike | None) -> None:
    try:
        known = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        known = False
    if not known:
        raise CheckpointError(f"dtype={dtype!r} is not a floating-point type; use 'float32', 'bfloat16' or 'float16'")


def _existing(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a model's folder or file (a name on a hub is not downloaded)")
    return path


def _recognise(path: Path) -> Path:
    """The folder of a Hugging Face model, or the file of a llama2.c model."""
    if path.is_dir():
        if (path / "config.json").exists():
            return path
        found = [file for file in sorted(path.iterdir()) if file.is_file() and llama2c.recognises(file)]
        if len(found) == 1:
            return found[0]
        if found:
            raise CheckpointError(f"{path} holds several models ({', '.join(f.name for f in found)}); give one of the files")
        raise CheckpointError(f"{path} holds no model: neither a config.json nor a whole llama2.c .bin file")
    if not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder; give a model's folder or file")
    if llama2c.recognises(path):
        return path
    with path.open("rb") as file:
        start = file.read(16)
    if start[8:9] == b"{":  # a safetensors header
        if (path.parent / "config.json").exists():
            return path.parent
        raise CheckpointError(f"{path} is a safetensors file; its config.json must lie beside it")
    if path.suffix == ".bin" and start[:4] not in (b"GGUF", b"ak42") and start[:2] != b"PK":
        raise CheckpointError(
            f"{path} is not a whole llama2.c file: its size does not follow from its header; copy it again"
        )
    raise CheckpointError(
        f"{path} is not a model of a supported format: a Hugging Face safetensors folder or a legacy llama2.c .bin file"
    )
