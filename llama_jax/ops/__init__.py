"""Arrays in, arrays out: no configuration, no parameters' containers, no files.

Shapes are written in one alphabet: B batch, T query tokens, S cache slots, L layers, D model, N = K * G query heads,
K key/value heads, G queries per key/value head, H head dim, F feed-forward, E experts, V vocabulary.
"""

from llama_jax.ops.attention import attend, attend_paged, write_paged
from llama_jax.ops.cross_entropy import LogitOptions, cross_entropy, token_logprobs
from llama_jax.ops.int8 import smooth_keys
from llama_jax.ops.layers import embed, feed_forward, project, rms_norm
from llama_jax.ops.moe import ExpertSharding, Routing, experts
from llama_jax.ops.rope_layout import half_from_interleaved
from llama_jax.ops.rotary import apply_rotary, inverse_frequencies, rotary_table

__all__ = [
    "ExpertSharding",
    "LogitOptions",
    "Routing",
    "apply_rotary",
    "attend",
    "attend_paged",
    "cross_entropy",
    "embed",
    "experts",
    "feed_forward",
    "half_from_interleaved",
    "inverse_frequencies",
    "project",
    "rms_norm",
    "rotary_table",
    "smooth_keys",
    "token_logprobs",
    "write_paged",
]
