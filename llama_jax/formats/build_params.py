"""Builds parameters, or the tensors of another format, from a checkpoint's named tensors: the same for all formats."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, shown
from llama_jax.formats.device_fill import FILL_THREADS, READ_BYTES, ArrayMemory, ArrayParts, Part, StackParts, cast, check
from llama_jax.formats.lazy_tensors import (
    FLOATS,
    Joined,
    MappedRows,
    Tensor,
    default_dtype,
    min_rows,
    pad_tensor,
    permute_rope,
    repeat_heads,
    target_dtype,
)
from llama_jax.formats.quantize_on_load import Quantization, parameter_fill, placed
from llama_jax.formats.weight_format import Opened, shares_in, shares_of
from llama_jax.model.mixtures import kinds_of_parameter
from llama_jax.model.params import PARAM_SPECS, Llama, ParamSpec, shape_of, specs_for
from llama_jax.model.trees import build_tree
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.padding import padded_shapes_config
from llama_jax.storage import StoredPath

Progress = Callable[[Sequence[int]], Iterable[int]]


def build_params(
    opened: Opened,
    dtype: jax.typing.DTypeLike | None,
    *,
    quantize: Quantization | None = None,
    shardings: Llama | None = None,
    unstack_layers: bool = False,
    progress: Progress | None = None,
) -> Llama:
    """The parameters. All names and shapes are checked before any tensor is read.

    Args:
      dtype: of all parameters; for None see `lazy_tensors.default_dtype`, and mixed files are then cast to it.
      quantize: the quantized format of the matrices, see `parameter_fill`; None gives floats.
      shardings: a `Llama` of `jax.sharding.Sharding`; None puts all on the default device. Each process reads only the rows
        of a sharded array that its own devices need.
      unstack_layers: store each layer's matrices in separate arrays, see `ops.weights.layers.unstack`.
      progress: wraps the sequence of layers, as `tqdm.tqdm` does.

    Raises:
      CheckpointError: a tensor is missing, unexpected, of the wrong shape or not finite; the message names it.
    """
    made_of = plan(opened)
    embedding = made_of.embedding.parts[0].tensor
    target = target_dtype(opened.path, dtype, default_dtype(embedding, embedding.dtype))

    memory = ArrayMemory()

    def kinds(array: ArrayParts) -> tuple[str, ...]:
        assert quantize is not None
        return kinds_of_parameter(array.path, quantize, array.layer, opened.config.n_layers)

    wanted = quantize if quantize in (None, "keep") else kinds
    parameters: list[Any]
    structure: Any
    parameters, structure = jax.tree.flatten(made_of)
    places = [None] * len(parameters) if shardings is None else structure.flatten_up_to(shardings)
    fillings = [
        parameter_fill(parts, target, wanted, place, memory, unstack_layers=unstack_layers)
        for parts, place in zip(parameters, places, strict=True)
    ]
    stacks = [one for one, parts in zip(fillings, parameters, strict=True) if isinstance(parts, StackParts)]
    alone = [one for one, parts in zip(fillings, parameters, strict=True) if not isinstance(parts, StackParts)]

    def read(layer: int) -> None:
        for stack in stacks:
            stack.fill(layer)

    with _filling(alone=isinstance(opened.path, StoredPath)) as begin:
        # The largest matrices first: the buffers for reading them are freed before memory holds everything else.
        layers = range(opened.config.n_layers)
        waiting = [begin(one.fill, 0) for one in alone], [begin(read, layer) for layer in layers]
        for wait in waiting[0]:
            wait()
        for layer in progress(layers) if progress else layers:
            waiting[1][layer]()
    found = jax.tree.unflatten(structure, [one.done() for one in fillings])
    return placed(found) if shardings is None else found


@contextmanager
def _filling(*, alone: bool) -> Iterator[Callable[..., Callable[[], Any]]]:
    """A function that starts a call on a thread and returns a function that waits for its result. With `alone`, that
    function makes the call itself: processes that exchange what they read from an object store must keep the same order.
    """
    if alone:
        yield partial
        return
    threads = ThreadPoolExecutor(FILL_THREADS)
    try:
        yield lambda call, *arguments: threads.submit(call, *arguments).result
    finally:
        threads.shutdown(cancel_futures=True)


def plan(opened: Opened, *, interleaved: bool = False) -> Llama:
    """A `Llama` of `ArrayParts`, with `StackParts` in its blocks: the tensors of each parameter.

    Args:
      interleaved: whether to put the rows of q and k in the interleaved rotary layout.
    """
    c, where = opened.config, opened.path
    unread = set(opened.tensors)

    def part(name: str, shape: tuple[int, ...], columns: slice | None, rotary: bool) -> Part:
        if name not in opened.tensors:
            of_head = " as tie_word_embeddings is false; save the model with its head, not only the backbone"
            raise CheckpointError(
                f"{where}: tensor {name!r} is missing; the configuration needs it{of_head if name == head else ''}"
            )
        unread.discard(name)
        tensor = opened.tensors[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{where}: tensor {name!r} has shape {list(tensor.shape)}; the configuration needs {list(shape)}"
            )
        if tensor.dtype not in FLOATS.values():
            raise CheckpointError(f"{where}: tensor {name!r} is {tensor.kind}; a 16- or 32-bit float is needed")
        if rotary and opened.interleaved != interleaved:
            tensor = permute_rope(tensor, c.head_dim, interleave=interleaved)
        return Part(f"{where}: tensor {name!r}", tensor, columns)

    def array(row: ParamSpec, layer: int) -> ArrayParts:
        """A parameter; its shares, if several, are concatenated along the second axis."""
        parts = []
        for share, columns in shares_in(row, c):
            name = table if share.name == "embedding" else opened.names[share.name].format(layer)
            parts.append(part(name, shape_of(share.axes, c), columns, share.rotary))
        return ArrayParts(row.shape(c), tuple(parts), row.is_quantizable, isinstance(where, StoredPath), row.path, layer)

    # Checked by count before the names are built: a configuration may claim a billion layers.
    if c.n_layers > len(opened.tensors):
        raise CheckpointError(f"{where}: {c.n_layers} layers are configured, but the file has {len(opened.tensors)} tensors")
    table, head = opened.names["embedding"], opened.names["lm_head"]
    if c.tie_embeddings and head in opened.tensors:
        unread.discard(head)
        if table not in opened.tensors:  # some writers store a tied tensor under the other name
            table = head

    def parameter(row: ParamSpec) -> ArrayParts | StackParts:
        return StackParts(tuple(array(row, layer) for layer in range(c.n_layers))) if row.in_blocks else array(row, 0)

    found = build_tree(c, parameter)
    if unread:
        raise CheckpointError(
            f"{where}: tensor {shown(min(unread), 80)} is not part of a Llama of this configuration"
            f" ({len(unread)} such); do the configuration and these weights belong together?"
        )
    return found


def pad_to_mesh(opened: Opened, sizes: MeshSizes) -> Opened:
    """The same checkpoint with the configuration and tensors of the padded model, see `parallel.padding`."""
    config, target = opened.config, padded_shapes_config(opened.config, sizes)
    plan(opened)  # so that errors about the file report its unpadded shapes
    copies = target.n_kv_heads // config.n_kv_heads
    tensors = dict(opened.tensors)
    if target.vocab_size != config.vocab_size:
        tables = {opened.names[share.name] for row in PARAM_SPECS if row.has_vocabulary for share in shares_of(row)}
        tensors |= {name: pad_tensor(tensors[name], target.vocab_size) for name in tables & tensors.keys()}
    if copies > 1:
        shares = [share.name for row in specs_for(config) for share in shares_of(row) if share.axes.startswith("K*H")]
        heads = [opened.names[name].format(i) for i in range(config.n_layers) for name in shares]
        tensors |= {name: repeat_heads(tensors[name], config.head_dim, copies) for name in heads}
    return replace(opened, config=target, tensors=tensors)


# Bytes read at a time from an object store: runs are read one after another, and each response has a high latency.
STORED_READ_AHEAD = 16 << 20


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor of a Llama to be written.

    Attributes:
      part: its key in the table of names.
      layer: its layer; 0 for tensors outside layers.
      tensor: reads its rows.
      label: name for messages.
      expert: index of the expert in the layer, if each expert is a separate tensor.
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
    """All tensors of a model: embedding, then layer by layer, final norm, and the output projection if any.

    Args:
      interleaved: whether to put the rows of q and k in the interleaved rotary layout.
    """
    made_of, table = plan(opened, interleaved=interleaved), specs_for(opened.config)
    run = STORED_READ_AHEAD if isinstance(opened.path, StoredPath) else READ_BYTES

    def pieces(row: ParamSpec, layer: int = 0) -> list[WrittenTensor]:
        found = attrgetter(row.path)(made_of)
        parts = zip(shares_of(row), (found.layers[layer] if row.in_blocks else found).parts, strict=True)
        return [WrittenTensor(share.name, layer, part.tensor, part.label, run=run) for share, part in parts]

    inside, outside = [row for row in table if row.in_blocks], [row for row in table if not row.in_blocks]
    layers = [piece for layer in range(opened.config.n_layers) for row in inside for piece in pieces(row, layer)]
    first, *rest = (piece for row in outside for piece in pieces(row))
    return [first, *layers, *rest]


def split_fused(
    config: LlamaConfig, tensors: Mapping[str, Tensor], fused_names: Mapping[str, Sequence[str]], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """The tensors, with each layer's fused tensors split into their parts.

    Args:
      fused_names: maps a fused tensor's name ("{}" is the layer) to the parts that it holds, in order of rows.
      names: the name of each part.
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
                continue  # reported later, where all names and shapes are checked
            del found[name.format(i)]
            for part, start, stop in zip(parts, ends, ends[1:], strict=False):
                found[names[part].format(i)] = MappedRows(whole, np.arange(start, stop))
    return found


def fuse(
    todo: Sequence[WrittenTensor], fused_names: Mapping[str, Sequence[str]], axis: int = 0
) -> tuple[list[WrittenTensor], dict[str, str]]:
    """The inverse of `split_fused` for tensors to be written, along an axis; also returns the fused tensors' names."""
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
