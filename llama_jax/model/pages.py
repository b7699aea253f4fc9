"""The paged cache: keys and values in pages of one pool, and for each row a table of its pages (Kwon et al. 2023)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from llama_jax.config import LlamaConfig
from llama_jax.ops.attention import PagedView, View
from llama_jax.ops.quantized import Quantized, over_rows

PAGE = 16  # tokens of a page


class PagedCache(struct.PyTreeNode):
    """Keys and values of the tokens that the model has read.

    Rows of any lengths share the pages of one pool: a row grows by an entry in its table, and rows that begin alike may have
    the same pages there. Which pages are free, the caller keeps in mind.

    Attributes:
      pages: [L, P, page, 2K, H], of each token the key and the value of each head side by side; `Quantized` for int8.
      table: int32[R, n], the pages of each row in order.
      length: int32[R], tokens that each row has read.
    """

    pages: Any
    table: Any
    length: Any

    window, sinks, fresh = None, 0, False  # as of a `KVCache`

    @property
    def capacity(self) -> int:
        """Tokens that a row can have."""
        return self.table.shape[-1] * self.pages.shape[2]

    def view(self, starts: jax.Array) -> PagedView:
        """What the layers read, before it is known which layer and with which pages."""
        return PagedView(None, None, self.table, self.length + starts[1:] - starts[:-1], starts)


def init_pages(config: LlamaConfig, count: int, dtype: jax.typing.DTypeLike = jnp.float32, page: int = PAGE) -> Any:
    """`count` empty pages [L, P, page, 2K, H]; of int8 `Quantized`, with a factor for each head and position."""
    shape = (config.n_layers, count, page, 2 * config.n_kv_heads, config.head_dim)
    if jnp.dtype(dtype) == jnp.int8:
        return Quantized(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
    return jnp.zeros(shape, dtype)


def page_bytes(config: LlamaConfig, dtype: jax.typing.DTypeLike, page: int = PAGE) -> int:
    """Bytes of one page of all layers."""
    dtype = jnp.dtype(dtype)
    row = config.head_dim * dtype.itemsize + (4 if dtype == jnp.int8 else 0)
    return config.n_layers * page * 2 * config.n_kv_heads * row


def gathered(view: PagedView, count: int) -> View:
    """The pages of each of `count` tokens' rows as keys and values [T, K, S, H], for an attention that knows no pages."""
    row, _ = view.tokens(count)

    def of(first: int) -> Any:
        def take(pages: jax.Array) -> jax.Array:
            found = pages[view.layer, view.table[row], :, first::2]  # [T, n, page, K, H]
            return found.reshape(count, -1, *found.shape[3:]).swapaxes(1, 2)

        return over_rows(take, view.pages)

    return View(of(0), of(1))
