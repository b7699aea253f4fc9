"""Attention: the keys and values (`View`), the mask (`Seen`), one entry (`attend`) and its backends."""

from llama_jax.ops.attention.attend import AttentionBackend, attend, choose
from llama_jax.ops.attention.kernels import Division, Problem
from llama_jax.ops.attention.paged import PagedView, attend_paged, write_paged
from llama_jax.ops.attention.view import NO_KEY, NO_QUERY, Seen, View, visible
from llama_jax.ops.platform import announce, observed

__all__ = [
    "NO_KEY",
    "NO_QUERY",
    "AttentionBackend",
    "Division",
    "PagedView",
    "Problem",
    "Seen",
    "View",
    "announce",
    "attend",
    "attend_paged",
    "choose",
    "observed",
    "visible",
    "write_paged",
]
