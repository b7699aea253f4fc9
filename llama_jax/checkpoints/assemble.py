"""From named tensors to parameters: what every file format shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError
from llama_jax.model.params import Attention, Block, FeedForward, Llama
from llama_jax.ops.rotary import half_from_interleaved

Progress = Callable[[Sequence[int]], Iterable[int]]
ALIGNMENT = 64  # bytes; what XLA for CPU asks of a buffer that it does not copy


@dataclass(frozen=True)
class Reader:
    """Tensors of one checkpoint by name.

    Attributes:
      where: the path, for messages.
      stored: the tensors that must be used up; one left over is an error.
      names: the format's name of each part, "{}" standing for the layer.
      get: reads one tensor, as it is stored.
    """

    where: str
    stored: set[str]
    names: Mapping[str, str]
    get: Callable[[str], np.ndarray]


def assemble(
    config: LlamaConfig,
    reader: Reader,
    dtype: jax.typing.DTypeLike | None,
    *,
    interleaved: bool,
    progress: Progress | None = None,
) -> Llama:
    """Parameters with a tuple of blocks, each array made from its tensors and put on the device before the next is read.

    Args:
      dtype: of all parameters; None takes that of the stored embedding, and mixed files are then cast to it.
      interleaved: whether the rows of q and k are in the interleaved rotary layout.
      progress: wraps the sequence of layers, as `tqdm.tqdm` does, to see them go by.

    Raises:
      CheckpointError: a tensor that is missing, left over, misshapen or not finite; the message names it.
    """
    c = config
    unread = set(reader.stored)
    target = None if dtype is None else jnp.dtype(dtype)

    def tensor(part: str, *shape: int, layer: int = 0) -> np.ndarray:
        name = reader.names[part].format(layer)
        if name not in reader.stored:
            raise CheckpointError(f"{reader.where}: tensor {name!r} is missing; the configuration needs it")
        unread.discard(name)
        found = reader.get(name)
        if found.shape != shape:
            raise CheckpointError(
                f"{reader.where}: tensor {name!r} has shape {list(found.shape)}, the configuration needs {list(shape)}"
            )
        if not jnp.issubdtype(found.dtype, jnp.floating):
            raise CheckpointError(f"{reader.where}: tensor {name!r} is {found.dtype}; floating-point weights are needed")
        if not _finite(found, np.inf):
            raise CheckpointError(f"{reader.where}: tensor {name!r} holds NaN or infinity; the file is damaged")
        if (
            target is not None
            and target.itemsize < found.dtype.itemsize
            and not _finite(found, float(jnp.finfo(target).max))
        ):
            raise CheckpointError(f"{reader.where}: tensor {name!r} holds numbers too large for {target}; use another dtype")
        return found

    def heads(part: str, queries: int, layer: int) -> np.ndarray:
        """[K, queries, H, D]."""
        weight = tensor(part, c.n_kv_heads * queries * c.head_dim, c.dim, layer=layer)
        weight = weight.reshape(c.n_kv_heads, queries, c.head_dim, c.dim)
        return half_from_interleaved(weight) if interleaved and part in "qk" else weight

    embedding = tensor("embedding", c.vocab_size, c.dim)
    if target is None:
        target = embedding.dtype
    if jax.dtypes.canonicalize_dtype(target) != target:
        raise CheckpointError(f"{reader.where}: {target} needs jax_enable_x64; load with dtype='float32'")

    def block(i: int) -> Block:
        qkv = [heads("q", c.queries_per_kv_head, i), heads("k", 1, i), heads("v", 1, i)]
        gate_up = [tensor(part, c.hidden_dim, c.dim, layer=i)[:, None] for part in ("gate", "up")]
        return Block(
            attention_norm=place([tensor("attention_norm", c.dim, layer=i)], 0, target),
            attention=Attention(
                qkv=place(qkv, 1, target),
                out=place([tensor("out", c.dim, c.n_heads * c.head_dim, layer=i)], 0, target),
            ),
            ffn_norm=place([tensor("ffn_norm", c.dim, layer=i)], 0, target),
            feed_forward=FeedForward(
                gate_up=place(gate_up, 1, target),
                down=place([tensor("down", c.dim, c.hidden_dim, layer=i)], 0, target),
            ),
        )

    layers = range(c.n_layers)
    blocks = tuple(block(i) for i in (progress(layers) if progress else layers))
    final_norm = place([tensor("final_norm", c.dim)], 0, target)
    head = reader.names["lm_head"]
    lm_head = None
    if not c.tie_embeddings:
        lm_head = place([tensor("lm_head", c.vocab_size, c.dim)], 0, target)
    elif head in reader.stored and not np.array_equal(tensor("lm_head", c.vocab_size, c.dim), embedding):
        raise CheckpointError(
            f"{reader.where}: tie_embeddings is set but {head!r} differs from the embedding; one of the two is wrong"
        )
    if unread:
        raise CheckpointError(
            f"{reader.where}: tensor {min(unread)!r} is not part of a Llama of this configuration"
            f" ({len(unread)} such); is config.json that of these weights?"
        )
    return Llama(embedding=place([embedding], 0, target), blocks=blocks, final_norm=final_norm, lm_head=lm_head)


def place(parts: Sequence[np.ndarray], axis: int, dtype: np.dtype) -> jax.Array:
    """The parts joined along `axis`, cast to `dtype`, as an array on the default device.

    They are written once, into memory aligned as XLA wants it, so that a CPU device takes that memory over and no second
    copy is made. NumPy asks for huge pages for it, XLA's own allocator does not.
    """
    sizes = [part.shape[axis] for part in parts]
    shape = list(parts[0].shape)
    shape[axis] = sum(sizes)
    bytes_needed = math.prod(shape) * dtype.itemsize
    memory = np.empty(bytes_needed + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    joined = memory[start : start + bytes_needed].view(dtype).reshape(shape)
    for part, hole in zip(parts, np.split(joined, np.cumsum(sizes)[:-1], axis), strict=True):
        hole[...] = part
    return jax.device_put(joined, may_alias=True)


def _finite(weight: np.ndarray, largest: float) -> bool:
    """Whether all entries are finite and at most `largest` in size; by rows: no second array of the weight's size."""
    rows = weight.reshape(-1, weight.shape[-1])
    step = max(1, (1 << 22) // rows.shape[1])
    pieces = (rows[i : i + step] for i in range(0, len(rows), step))
    if largest == np.inf:
        return all(bool(np.isfinite(piece).all()) for piece in pieces)
    return all(bool((np.abs(piece) <= largest).all()) for piece in pieces)
