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
from llama_jax.errors import CheckpointError, short_repr
from llama_jax.formats.device_fill import (
    FILL_READ_BYTES,
    FILL_THREADS,
    ArrayMemory,
    ArraySource,
    StackedSource,
    TensorSlice,
    cast,
    check_finite,
)
from llama_jax.formats.lazy_tensors import (
    Joined,
    MappedRows,
    Tensor,
    default_dtype,
    find_tensor,
    min_rows,
    pad_tensor,
    permute_rope,
    repeat_heads,
    target_dtype,
)
from llama_jax.formats.quantize_on_load import Quantization, parameter_fill, put_on_default_device
from llama_jax.formats.weight_format import OpenedCheckpoint, parts_of, parts_with_columns
from llama_jax.model.mixtures import formats_of_parameter
from llama_jax.model.params import PARAM_SPECS, LlamaParams, ParamSpec, shape_of, specs_for
from llama_jax.model.trees import build_tree
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.padding import padded_shapes_config
from llama_jax.storage import StoredPath

LayerProgress = Callable[[Sequence[int]], Iterable[int]]


def build_params(
    opened: OpenedCheckpoint,
    dtype: jax.typing.DTypeLike | None,
    *,
    quantize: Quantization | None = None,
    shardings: LlamaParams | None = None,
    unstack_layers: bool = False,
    progress: LayerProgress | None = None,
) -> LlamaParams:
    """The parameters. All names and shapes are checked before any tensor is read.

    Args:
      dtype: of all parameters; for None see `lazy_tensors.default_dtype`, and mixed files are then cast to it.
      quantize: the quantized format of the matrices, see `parameter_fill`; None gives floats.
      shardings: a `LlamaParams` of `jax.sharding.Sharding`; None puts all on the default device. Each process reads only the
        rows of a sharded array that its own devices need.
      unstack_layers: store each layer's matrices in separate arrays, see `ops.weights.layers.unstack`.
      progress: wraps the sequence of layers, as `tqdm.tqdm` does.

    Raises:
      CheckpointError: a tensor is missing, unexpected, of the wrong shape or not finite; the message names it.
    """
    made_of = plan(opened)
    embedding = made_of.embedding.parts[0].tensor
    target = target_dtype(opened.path, dtype, default_dtype(embedding, embedding.dtype))

    memory = ArrayMemory()

    def formats_of(array: ArraySource) -> tuple[str, ...]:
        assert quantize is not None
        return formats_of_parameter(array.path, quantize, array.layer, opened.config.n_layers)

    formats = quantize if quantize in (None, "keep") else formats_of
    parameters: list[Any]
    structure: Any
    parameters, structure = jax.tree.flatten(made_of)
    placements = [None] * len(parameters) if shardings is None else structure.flatten_up_to(shardings)
    jobs = [
        parameter_fill(source, target, formats, sharding, memory, unstack_layers=unstack_layers)
        for source, sharding in zip(parameters, placements, strict=True)
    ]
    stacked_jobs = [job for job, source in zip(jobs, parameters, strict=True) if isinstance(source, StackedSource)]
    single_jobs = [job for job, source in zip(jobs, parameters, strict=True) if not isinstance(source, StackedSource)]

    def read(layer: int) -> None:
        for stack in stacked_jobs:
            stack.fill(layer)

    with _start_fills(in_order=isinstance(opened.path, StoredPath)) as begin:
        # The largest matrices first: the buffers for reading them are freed before memory holds everything else.
        layers = range(opened.config.n_layers)
        waiting = [begin(job.fill, 0) for job in single_jobs], [begin(read, layer) for layer in layers]
        for wait in waiting[0]:
            wait()
        for layer in progress(layers) if progress else layers:
            waiting[1][layer]()
    params = jax.tree.unflatten(structure, [job.done() for job in jobs])
    return put_on_default_device(params) if shardings is None else params


@contextmanager
def _start_fills(*, in_order: bool) -> Iterator[Callable[..., Callable[[], Any]]]:
    """A function that starts a call on a thread and returns a function that waits for its result. With `in_order`, that
    function makes the call itself: processes that exchange what they read from an object store must keep the same order.
    """
    if in_order:
        yield partial
        return
    threads = ThreadPoolExecutor(FILL_THREADS)
    try:
        yield lambda call, *arguments: threads.submit(call, *arguments).result
    finally:
        threads.shutdown(cancel_futures=True)


def plan(opened: OpenedCheckpoint, *, interleaved: bool = False) -> LlamaParams:
    """A `LlamaParams` of `ArraySource`, with `StackedSource` in its blocks: the tensors of each parameter.

    Args:
      interleaved: whether to put the rows of q and k in the interleaved rotary layout.
    """
    c, where = opened.config, opened.path
    unread = set(opened.tensors)

    def source_tensor(name: str, shape: tuple[int, ...], columns: slice | None, rotary: bool) -> TensorSlice:
        of_head = " as tie_word_embeddings is false; save the model with its head, not only the backbone"
        tensor = find_tensor(where, opened.tensors, name, shape, "the configuration", of_head if name == head else "")
        unread.discard(name)
        if rotary and opened.interleaved != interleaved:
            tensor = permute_rope(tensor, c.head_dim, interleave=interleaved)
        return TensorSlice(f"{where}: tensor {name!r}", tensor, columns)

    def array(spec: ParamSpec, layer: int) -> ArraySource:
        """A parameter; its shares, if several, are concatenated along the second axis."""
        parts = []
        for tensor_part, columns in parts_with_columns(spec, c):
            name = table if tensor_part.name == "embedding" else opened.names[tensor_part.name].format(layer)
            parts.append(source_tensor(name, shape_of(tensor_part.axes, c), columns, tensor_part.rotary))
        return ArraySource(spec.shape(c), tuple(parts), spec.is_quantizable, isinstance(where, StoredPath), spec.path, layer)

    # Checked by count before the names are built: a configuration may claim a billion layers.
    if c.n_layers > len(opened.tensors):
        raise CheckpointError(f"{where}: {c.n_layers} layers are configured, but the file has {len(opened.tensors)} tensors")
    table, head = opened.names["embedding"], opened.names["lm_head"]
    if c.tie_embeddings and head in opened.tensors:
        unread.discard(head)
        if table not in opened.tensors:  # some writers store a tied tensor under the other name
            table = head

    def parameter(spec: ParamSpec) -> ArraySource | StackedSource:
        return StackedSource(tuple(array(spec, layer) for layer in range(c.n_layers))) if spec.in_blocks else array(spec, 0)

    sources = build_tree(c, parameter)
    if unread:
        raise CheckpointError(
            f"{where}: tensor {short_repr(min(unread), 80)} is not part of a Llama of this configuration"
            f" ({len(unread)} such); do the configuration and these weights belong together?"
        )
    return sources


def pad_to_mesh(opened: OpenedCheckpoint, sizes: MeshSizes) -> OpenedCheckpoint:
    """The same checkpoint with the configuration and tensors of the padded model, see `parallel.padding`."""
    config, target = opened.config, padded_shapes_config(opened.config, sizes)
    plan(opened)  # so that errors about the file report its unpadded shapes
    copies = target.n_kv_heads // config.n_kv_heads
    tensors = dict(opened.tensors)
    if target.vocab_size != config.vocab_size:
        tables = {opened.names[part.name] for spec in PARAM_SPECS if spec.has_vocabulary for part in parts_of(spec)}
        tensors |= {name: pad_tensor(tensors[name], target.vocab_size) for name in tables & tensors.keys()}
    if copies > 1:
        part_names = [part.name for spec in specs_for(config) for part in parts_of(spec) if part.axes.startswith("K*H")]
        heads = [opened.names[name].format(i) for i in range(config.n_layers) for name in part_names]
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
    run: int = FILL_READ_BYTES

    def rows(self, dtype: np.dtype) -> Iterator[np.ndarray]:
        """The rows in runs, checked and cast."""
        shape = self.tensor.shape
        least = min_rows(self.tensor)
        step = max(1, self.run * shape[0] // max(1, self.tensor.nbytes), least)
        for start in range(0, shape[0], step):
            values = self.tensor.read(start, min(start + step, shape[0]))
            check_finite(values, dtype, self.label)
            run = np.empty(values.shape, dtype)
            cast(values, run)
            yield run


def tensors_to_write(opened: OpenedCheckpoint, *, interleaved: bool) -> list[WrittenTensor]:
    """All tensors of a model: embedding, then layer by layer, final norm, and the output projection if any.

    Args:
      interleaved: whether to put the rows of q and k in the interleaved rotary layout.
    """
    made_of, table = plan(opened, interleaved=interleaved), specs_for(opened.config)
    run = STORED_READ_AHEAD if isinstance(opened.path, StoredPath) else FILL_READ_BYTES

    def pieces(spec: ParamSpec, layer: int = 0) -> list[WrittenTensor]:
        source = attrgetter(spec.path)(made_of)
        parts = zip(parts_of(spec), (source.layers[layer] if spec.in_blocks else source).parts, strict=True)
        return [
            WrittenTensor(part.name, layer, source_tensor.tensor, source_tensor.label, run=run)
            for part, source_tensor in parts
        ]

    inside, outside = [spec for spec in table if spec.in_blocks], [spec for spec in table if not spec.in_blocks]
    layers = [piece for layer in range(opened.config.n_layers) for spec in inside for piece in pieces(spec, layer)]
    first, *rest = (piece for spec in outside for piece in pieces(spec))
    return [first, *layers, *rest]


def split_fused(
    config: LlamaConfig, tensors: Mapping[str, Tensor], fused_names: Mapping[str, Sequence[str]], names: Mapping[str, str]
) -> dict[str, Tensor]:
    """The tensors, with each layer's fused tensors split into their parts.

    Args:
      fused_names: maps a fused tensor's name ("{}" is the layer) to the parts that it holds, in order of rows.
      names: the name of each part.
    """
    split = dict(tensors)
    rows = {part.name: shape_of(part.axes, config)[0] for spec in PARAM_SPECS for part in parts_of(spec)}
    for name, parts in fused_names.items():
        if name.format(0) not in split:
            continue
        ends = list(itertools.accumulate((rows[part] for part in parts), initial=0))
        for i in range(config.n_layers):
            fused_tensor = split.get(name.format(i))
            if fused_tensor is None or fused_tensor.shape[0] != ends[-1]:
                continue  # reported later, where all names and shapes are checked
            del split[name.format(i)]
            for part, start, stop in zip(parts, ends, ends[1:], strict=False):
                split[names[part].format(i)] = MappedRows(fused_tensor, np.arange(start, stop))
    return split


def fuse(
    todo: Sequence[WrittenTensor], fused_names: Mapping[str, Sequence[str]], axis: int = 0
) -> tuple[list[WrittenTensor], dict[str, str]]:
    """The inverse of `split_fused` for tensors to be written, along an axis; also returns the fused tensors' names."""
    groups = {parts[0]: parts for parts in fused_names.values()}
    rest = {part for parts in groups.values() for part in parts[1:]}
    fused = []
    for i, piece in enumerate(todo):
        if piece.part in groups:
            parts = [piece.tensor, *(after.tensor for after in todo[i + 1 : i + len(groups[piece.part])])]
            piece = replace(piece, tensor=Joined(parts, axis))
        if piece.part not in rest:
            fused.append(piece)
    return fused, {parts[0]: name for name, parts in fused_names.items()}
