"""Tensors to be written: in the order of rows and the type of another format, to a path that may be replaced."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, reading
from llama_jax.formats.build_params import plan
from llama_jax.formats.device_fill import READ_BYTES, cast, check
from llama_jax.formats.lazy_tensors import Joined, MappedRows, Opened, Tensor, min_rows, permute_rope
from llama_jax.formats.tensor_names import Share, shares_of
from llama_jax.formats.tokenizer_files import SETTINGS_FILES, VOCABULARIES
from llama_jax.model.params import PARAM_SPECS, shape_of, specs_for
from llama_jax.storage import Location, StoredPath, resolved
from llama_jax.storage.atomic_write import write_atomically

# What a folder of a model may hold: one that holds anything else is never replaced.
WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|params")
DECISIVE_FILES = ("config.json", "adapter_config.json")  # without which nobody takes a folder for a model, or an adapter
OTHER_FILES = {"config.json", "adapter_config.json", "adapter_model.safetensors", *VOCABULARIES, *SETTINGS_FILES}


@contextmanager
def new_output(path: Location, *, folder: bool, overwrite: bool, sources: Iterable[Location] = ()) -> Iterator[Path]:
    """A new empty file or folder that becomes `path` when all of it is written, see `atomic_write.write_atomically`.

    Args:
      folder: whether a folder is written; it replaces only an empty one, or with `overwrite` one that holds only a model.
      overwrite: whether a file may be replaced by a file.
      sources: paths that are read at the same time, and must not be touched.
    """
    path = resolved(path)
    check_room(path, folder=folder, overwrite=overwrite, sources=sources)
    again = partial(check_room, path, folder=folder, overwrite=overwrite)  # somebody else may have written meanwhile
    with write_atomically(path, folder=folder, check=again, raises=CheckpointError, last=DECISIVE_FILES) as target:
        yield target


def check_room(path: Location, *, folder: bool, overwrite: bool, sources: Iterable[Location] = ()) -> None:
    """Raise as `new_output` would, without writing anything."""
    if isinstance(path, StoredPath) and path.view.root.startswith("hf://"):
        raise CheckpointError(f"{path} is on the hub: write to a path of this machine, and upload that with `hf upload`")
    with reading(path, CheckpointError):
        _check_room(resolved(path), folder, overwrite, sources)


def _check_room(path: Location, folder: bool, overwrite: bool, sources: Iterable[Location]) -> None:
    for source in map(resolved, sources):
        if path == source or path in source.parents or source in path.parents:
            raise CheckpointError(f"{path} is, contains or is inside the model that is read ({source}); write elsewhere")
    if not path.exists():
        return
    if not path.is_dir() and not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder; use another path")
    if folder and isinstance(path, Path) and path.is_dir() and path.samefile("."):
        raise CheckpointError(f"{path} is the current folder, and another would take its place; use a folder inside it")
    if path.is_dir() != folder:
        there, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise CheckpointError(f"{path} is a {there}, and this format is a {wanted}; use another path")
    inside = sorted(entry.name for entry in path.iterdir()) if folder else []
    if folder and not inside:
        return
    if not overwrite:
        raise CheckpointError(f"{path} exists; remove it, or replace it with overwrite=True (--overwrite)")
    foreign = [name for name in inside if name not in OTHER_FILES and not WEIGHT_FILES.fullmatch(name)]
    if foreign:
        raise CheckpointError(f"{path} holds more than a model ({foreign[0]}), so it is not replaced; use another path")


# Bytes, of an object store: runs are read one after the other, and each answer takes long to begin.
STORED_READ_AHEAD = 16 << 20


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor of a Llama, to be written.

    Attributes:
      part: its name in the table of names.
      layer: its layer; 0 for tensors outside of layers.
      tensor: its rows.
      label: for messages.
      expert: its number in the layer, if each expert is a tensor of its own.
      run: bytes to read at a time.
    """

    part: str
    layer: int
    tensor: Tensor
    label: str
    expert: int | None = None
    run: int = READ_BYTES

    def rows(self, dtype: np.dtype) -> Iterator[np.ndarray]:
        """The rows in runs, checked and cast."""
        shape = self.tensor.shape
        least = min_rows(self.tensor)
        step = max(1, self.run * shape[0] // max(1, self.tensor.nbytes), least)
        for start in range(0, shape[0], step):
            found = self.tensor.read(start, min(start + step, shape[0]))
            check(found, dtype, self.label)
            run = np.empty(found.shape, dtype)
            cast(found, run)
            yield run


def tensors_to_write(opened: Opened, *, interleaved: bool) -> list[WrittenTensor]:
    """All tensors of a model: embedding, then layer by layer, final norm, and the output projection if there is one.

    Args:
      interleaved: the rotary layout for the rows of q and k.
    """
    plan(opened)
    config = opened.config
    run = STORED_READ_AHEAD if isinstance(opened.path, StoredPath) else READ_BYTES

    def piece(share: Share, layer: int = 0) -> WrittenTensor:
        name = opened.names[share.name].format(layer)
        if share.name == "embedding" and name not in opened.tensors:
            name = opened.names["lm_head"]  # a tied model that keeps the other name
        tensor = opened.tensors[name]
        if share.rotary and opened.interleaved != interleaved:
            tensor = permute_rope(tensor, config.head_dim, interleave=interleaved)
        return WrittenTensor(share.name, layer, tensor, f"{opened.path}: tensor {name!r}", run=run)

    table = specs_for(config)
    layers = [piece(share, i) for i in range(config.n_layers) for row in table if row.in_blocks for share in shares_of(row)]
    first, *rest = (piece(share) for row in table if not row.in_blocks for share in shares_of(row))
    return [first, *layers, *rest]


def split_fused(
    config: LlamaConfig, tensors: Mapping[str, Tensor], fused_names: Mapping[str, Sequence[str]], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """The tensors, with each fused tensor of a layer split into its parts.

    Args:
      fused_names: by the name of such a tensor, "{}" standing for the layer, the parts that it holds by rows in order.
      names: of each part.
    """
    found = dict(tensors)
    rows = {share.name: shape_of(share.axes, config)[0] for row in PARAM_SPECS for share in shares_of(row)}
    for name, parts in fused_names.items():
        if name.format(0) not in found:
            continue
        ends = list(itertools.accumulate((rows[part] for part in parts), initial=0))
        for i in range(config.n_layers):
            whole = found.get(name.format(i))
            if whole is None or whole.shape[0] != ends[-1]:
                continue  # named as missing or misshapen where all names and shapes are checked
            del found[name.format(i)]
            for part, start, stop in zip(parts, ends, ends[1:], strict=False):
                found[names[part].format(i)] = MappedRows(whole, np.arange(start, stop))
    return found


def fuse(
    todo: Sequence[WrittenTensor], fused_names: Mapping[str, Sequence[str]], axis: int = 0
) -> tuple[list[WrittenTensor], dict[str, str]]:
    """The inverse of `split_fused` for tensors to be written, along an axis; also the names of the fused tensors."""
    groups = {parts[0]: parts for parts in fused_names.values()}
    rest = {part for parts in groups.values() for part in parts[1:]}
    found = []
    for i, piece in enumerate(todo):
        if piece.part in groups:
            parts = [piece.tensor, *(after.tensor for after in todo[i + 1 : i + len(groups[piece.part])])]
            piece = replace(piece, tensor=Joined(parts, axis))
        if piece.part not in rest:
            found.append(piece)
    return found, {parts[0]: name for name, parts in fused_names.items()}
