"""Loading models of any format."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, MeshError, reading, short_repr
from llama_jax.formats.adapters import (
    ADAPTER_CONFIG,
    attach_loaded_adapter,
    attach_loaded_adapters,
    load_adapter,
    with_adapter_parts,
)
from llama_jax.formats.build_params import LayerProgress, build_params, pad_to_mesh, plan
from llama_jax.formats.gguf import GGUF_FORMAT
from llama_jax.formats.huggingface import SAFETENSORS_FORMAT, is_safetensors, open_huggingface
from llama_jax.formats.lazy_tensors import FLOAT_DTYPES, default_dtype
from llama_jax.formats.llama2c import LLAMA2C_FORMAT, open_llama2c
from llama_jax.formats.meta import META_FORMAT
from llama_jax.formats.model_folder import ModelMetadata
from llama_jax.formats.orbax_format import ORBAX_FORMAT, OrbaxCheckpoint, load_orbax_params, open_orbax, refuse_adapter
from llama_jax.formats.quantize_on_load import (
    Quantization,
    can_be_kept,
    check_kept,
    check_quantize,
    log_what_becomes_floats,
)
from llama_jax.formats.step_dirs import find_checkpoints, retry_with_newest_step
from llama_jax.formats.torch_pickle import is_torch
from llama_jax.formats.weight_format import OpenedCheckpoint, WeightFormat
from llama_jax.model.forward_options import is_floating
from llama_jax.model.params import LlamaParams
from llama_jax.model.trees import bytes_in_memory, dequantize, param_shapes, unstack_layers
from llama_jax.model.trees import quantize as quantized_params
from llama_jax.ops.platform import lowering_platform
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.padding import padded_config
from llama_jax.storage import Location, StoredPath, locate
from llama_jax.tokenizers import Tokenizer, load_tokenizer
from llama_jax.tokenizers.load import warn_of_size

_log = logging.getLogger("llama_jax.formats")
BUNDLED_NAME = "the bundled stories model"


def bundled() -> Path:
    """Folder of a small Llama trained on TinyStories, for `load`; its README.md has its quality and license."""
    return Path(str(files("llama_jax"))) / "assets"


# By name, in the order in which they are tried on a path.
WEIGHT_FORMATS: dict[str, WeightFormat] = {
    weight_format.name: weight_format
    for weight_format in (ORBAX_FORMAT, GGUF_FORMAT, LLAMA2C_FORMAT, SAFETENSORS_FORMAT, META_FORMAT)
}


@dataclass(frozen=True)
class Checkpoint:
    """A model and its vocabulary, which unpacks as ``config, params, tokenizer``.

    Attributes:
      read_tokenizer: reads the vocabulary; see `tokenizer`.
      read_metadata: reads the other files next to the weights; see `metadata`.
    """

    config: LlamaConfig
    params: LlamaParams
    read_tokenizer: Callable[[], Tokenizer | None]
    read_metadata: Callable[[], ModelMetadata] = ModelMetadata

    @cached_property
    def metadata(self) -> ModelMetadata:
        """Descriptions next to the weights, for `save`: sampling settings, the model's name and license."""
        return self.read_metadata()

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The vocabulary, or None if there is none with the weights; read on first access.

        Raises:
          TokenizerError: a damaged vocabulary.
        """
        return self.read_tokenizer()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.config, self.params, self.tokenizer))

    def __getitem__(self, index: int) -> Any:
        return (self.config, self.params, self.tokenizer)[index]


@retry_with_newest_step
def load(
    path: str | os.PathLike[str] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    *,
    quantize: Quantization | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    adapters: Sequence[str | os.PathLike[str]] = (),
    mesh: MeshSizes | None = None,
    shardings: LlamaParams | None = None,
    progress: LayerProgress | None = None,
) -> Checkpoint:
    """Read a model, recognized by its content, and the tokenizer inside it or next to it.

    Args:
      path: a model's folder or file, or a URL in a store, in a format of `open_checkpoint`; None is the small stories
        model that comes with the package (`bundled`).
      dtype: of the parameters, which are then floats whatever the file holds. None keeps the file's: quantized tensors of a
        GGUF, a Hugging Face folder or an orbax checkpoint stay quantized, and the rest and the computation have the dtype of
        the stored embedding. If that is quantized, the dtype is float32 on a CPU and bfloat16 on accelerators; if it is
        float16, which is slow on CPUs, float32 on a CPU. Unsupported quantized tensors (the other IQ types, reordered
        columns) become floats, with a warning.
      quantize: quantize the matrices while reading: "int8", "int4", "fp8", "nf4", "q8_0", "q4_0", "q4_k" and others
        (`ops.weights`), with a wider format for the embedding and the output projection, and with "q4_k" and "q5_k" for some
        layers (`model.mixtures`), unless "-pure" follows, as in "q4_0-pure". "keep" keeps the file's blocks, like None with
        no `dtype`, and is an error if there are none. With either, `dtype` is the dtype of the computation.
      tokenizer: a vocabulary's file or folder, instead of the one with the weights.
      adapter: a PEFT or training run folder, see `load_adapter`; the parameters then include it
        (`model.lora.apply_adapters`).
      adapters: several such folders: the parameters then have a table of adapters, and each row of a batch may use one
        (`model.multi_lora.choose_adapters`, by its index in this list).
      mesh: shard the model over devices for generation. Its vocabulary is padded and its key/value heads are copied to fit
        (`parallel.padding`), and the configuration is then the padded one. Each device receives its share as it is read;
        only for orbax, padding and copying is done on the devices, one array at a time.
      shardings: a custom layout without padding: a `LlamaParams` of `jax.sharding.Sharding`. Without mesh and shardings
        everything is put on the default device.
      progress: wraps the sequence of layers as they are read, as `tqdm.tqdm` does (orbax reads all at once).

    Returns:
      The configuration, the parameters, and the tokenizer, which is read on first access. On a GPU each layer's matrices are
      separate arrays (`ops.weights.layers.unstack`) unless `shardings` is set; elsewhere all layers are one array.

    Raises:
      CheckpointError: no model at the path, or a damaged or unsupported one.
      TokenizerError: the given vocabulary is damaged; for the model's own, on first access.
      MeshError: the model cannot be divided over the mesh, or there are too few devices; nothing was read.
    """
    _check_dtype(dtype)
    check_quantize(quantize)
    is_path, has_adapters = isinstance(adapters, str | os.PathLike), adapter is not None or adapters
    both = "adapter is for all rows, and adapters is a table to choose from; pass only one of them"
    if is_path:
        raise CheckpointError(f"adapters={str(adapters)!r} is one path; pass a list of them, or adapter for all rows")
    if adapter is not None and adapters:
        raise CheckpointError(both)
    is_mesh, is_custom = isinstance(mesh, MeshSizes | None), shardings is not None
    if not is_mesh:
        raise MeshError(f"mesh={short_repr(mesh, 40)} must be a MeshSizes, such as MeshSizes(tensor=2)")
    if is_custom and has_adapters:
        raise MeshError("adapters cannot be sharded by custom shardings; pass mesh instead")
    if is_custom and mesh:
        raise MeshError(f"mesh {mesh} and shardings both say how the parameters are sharded; pass only one")
    # Custom shardings are for training, which scans the layers.
    split_layers = shardings is None and lowering_platform() == "gpu"
    opened = open_checkpoint(bundled() if path is None else path)
    config = opened.config
    log_notes(opened)
    if quantize == "keep":
        check_kept(list(opened.tensors.values()), opened.path)
    elif quantize is None and dtype is None:
        log_what_becomes_floats(opened.tensors, opened.path)
        quantize = "keep"
    loaded_adapter = None if adapter is None else load_adapter(adapter, config)
    table = [load_adapter(folder, config) for folder in adapters]
    config = with_adapter_parts(config, adapters if adapter is None else [adapter])
    if mesh is not None:
        from llama_jax.parallel.generation_sharding import pad_on_mesh, param_shardings  # imports what training needs too

        shardings = param_shardings(config, mesh, padded=not isinstance(opened, OrbaxCheckpoint))
        config = padded_config(config, mesh)
    read_tokenizer, read_metadata = opened.tokenizer, opened.metadata
    if tokenizer is not None:
        chosen_tokenizer = load_tokenizer(tokenizer)
        warn_of_size(chosen_tokenizer, opened.config.vocab_size, tokenizer)
        read_tokenizer = lambda: chosen_tokenizer
    elif isinstance(opened, OrbaxCheckpoint):  # a run may remove the step later
        stored_tokenizer, stored_metadata = opened.tokenizer(), opened.metadata()
        read_tokenizer, read_metadata = lambda: stored_tokenizer, lambda: stored_metadata
    if isinstance(opened, OrbaxCheckpoint):
        params = load_orbax_params(opened, dtype, shardings=shardings)
        if quantize != "keep":
            params = dequantize(params) if quantize is None else quantized_params(params, quantize)
        if mesh is not None:
            params = pad_on_mesh(opened.config, mesh, params)
        params = unstack_layers(params) if split_layers else params
    else:
        padded = opened if mesh is None else pad_to_mesh(opened, mesh)
        params = build_params(
            padded, dtype, quantize=quantize, shardings=shardings, unstack_layers=split_layers, progress=progress
        )
    if loaded_adapter is not None:
        params = attach_loaded_adapter(opened.config, params, loaded_adapter, mesh)
    if table:
        params = attach_loaded_adapters(opened.config, params, table, mesh)
    return Checkpoint(config, params, read_tokenizer, read_metadata)


def planned_weights(
    opened: OpenedCheckpoint,
    dtype: jax.typing.DTypeLike | None = None,
    quantize: Quantization | None = None,
) -> tuple[np.dtype, int]:
    """The compute dtype and the size in bytes of the weights that `load` would return, without reading them."""
    tables = (opened.names.get(name, name) for name in ("embedding", "lm_head"))
    embedding = next((opened.tensors[name] for name in tables if name in opened.tensors), None)  # None: damaged
    default = jnp.float32 if embedding is None else default_dtype(embedding, embedding.dtype)
    target = jnp.dtype(default if dtype is None else dtype)
    if quantize is not None and quantize != "keep":
        return target, bytes_in_memory(quantized_params(param_shapes(opened.config, target), quantize))
    keep = quantize == "keep" or dtype is None
    sizes = (
        tensor.nbytes if keep and can_be_kept(tensor) else math.prod(tensor.shape) * target.itemsize
        for tensor in opened.tensors.values()
    )
    return target, sum(sizes)


@retry_with_newest_step
def open_checkpoint(path: str | os.PathLike[str]) -> OpenedCheckpoint:
    """Recognize a model by its content and read everything except its weights.

    Args:
      path: a Hugging Face folder (``config.json`` and safetensors or ``pytorch_model.bin``, single or sharded) or one of its
        files; Meta's folder (``params.json`` and ``consolidated.NN.pth``) or one of its files; a GGUF file (any part of a
        split one); a llama2.c ``.bin`` or ``ckpt.pt``; a folder that `save` wrote as orbax; a training run's folder, whose
        newest step is read, or one of its steps; or a folder with exactly one such file. If a run keeps a moving
        average of the parameters, that is the model. Or a URL in a store (`storage.locate`) of any of these, except folders
        that `save` wrote as orbax.

    Raises:
      CheckpointError: no model at the path, or a damaged or unsupported one.
    """
    with reading(path, CheckpointError):
        return _open_location(locate(path))


def log_notes(opened: OpenedCheckpoint) -> None:
    """Log what a user should know about how the files are read, such as which of their tensors are ignored."""
    for note in opened.notes:
        _log.warning("%s: %s", opened.path, note)


def check_names(opened: OpenedCheckpoint) -> None:
    """Raise CheckpointError for a tensor that is missing, unexpected or of the wrong shape."""
    if not isinstance(opened, OrbaxCheckpoint):  # its arrays were checked when it was opened
        plan(opened)


def _open_location(path: Location) -> OpenedCheckpoint:
    if not path.is_dir() and not path.is_file():  # reading a pipe would block
        is_broken = isinstance(path, Path) and path.is_symlink()
        missing = "is a broken symbolic link" if is_broken else "does not exist"
        raise CheckpointError(
            f"{path} {'is neither a file nor a folder' if path.exists() else missing}; pass a model's folder or file"
            " (llama-jax fetch downloads one), or hf://ORGANIZATION/NAME"
        )
    for format in WEIGHT_FORMATS.values():
        if format.recognizes(path):
            return format.open(path)
    return _open_within(path) if path.is_dir() else _open_unknown(path)


def _open_within(folder: Location) -> OpenedCheckpoint:
    """The only model file in a folder that is not a model itself, or the newest step of a run's folder."""
    inside: list[Location] = [*folder.iterdir()]
    models = [file for file in sorted(inside, key=lambda file: file.name) if file.is_file() and _is_model_file(file)]
    if len(models) > 1:
        raise CheckpointError(f"{folder} holds several models ({', '.join(f.name for f in models)}); pass one of the files")
    if models:
        return _open_location(models[0])
    if find_checkpoints(folder) is not None:
        return open_orbax(folder)
    if (folder / "config.json").exists():
        return open_huggingface(folder)  # says which weights are missing
    if (folder / ADAPTER_CONFIG).exists():
        refuse_adapter(folder)
    raise CheckpointError(f"{folder} holds no model: no config.json, no params.json, no GGUF and no whole llama2.c file")


def _is_model_file(file: Location) -> bool:
    """Whether a file is a whole model by itself. In a store, only files with a known suffix are examined: each takes a
    request."""
    formats = [format for format in WEIGHT_FORMATS.values() if format.is_whole is not None]
    if isinstance(file, StoredPath):
        formats = [format for format in formats if file.suffix in format.suffixes]
    return any(format.is_whole(file) for format in formats if format.is_whole is not None)


def _open_unknown(path: Location) -> OpenedCheckpoint:
    """Say why a file is not a model."""
    if is_safetensors(path):
        problem = "is a safetensors file; its config.json must be next to it"
    elif is_torch(path):
        problem = "holds weights without settings; its config.json or params.json must be next to it"
    elif path.suffix == ".bin":
        return open_llama2c(path)  # says what is wrong with it
    else:
        formats = "safetensors, Meta .pth, GGUF, llama2.c, orbax or pytorch_model.bin"
        problem = f"is not a model of a supported format: {formats}"
    raise CheckpointError(f"{path} {problem}")


def _check_dtype(dtype: jax.typing.DTypeLike | None) -> None:
    if dtype is not None and (not is_floating(dtype) or jnp.dtype(dtype) not in FLOAT_DTYPES.values()):
        raise CheckpointError(
            f"dtype={dtype!r} is not a floating-point type; use 'float32', 'bfloat16' or 'float16'; for fewer bits set"
            " quantize="
        )
