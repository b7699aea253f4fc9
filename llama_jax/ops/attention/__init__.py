"""Attention: the keys and values (`KVView`), the mask (`AttentionMask`), one entry (`attend`) and its backends."""

from llama_jax.ops.attention.dispatch import AttentionBackend, attend, choose_backend
from llama_jax.ops.attention.mask import NO_KEY, NO_QUERY, AttentionMask, AttentionShape, HeadSharding, KVView, visible
from llama_jax.ops.attention.paged import PagedView, attend_paged, write_paged
from llama_jax.ops.platform import log_backend, record_backends

__all__ = [
    "NO_KEY",
    "NO_QUERY",
    "AttentionBackend",
    "AttentionMask",
    "AttentionShape",
    "HeadSharding",
    "KVView",
    "PagedView",
    "attend",
    "attend_paged",
    "choose_backend",
    "log_backend",
    "record_backends",
    "visible",
    "write_paged",
]
