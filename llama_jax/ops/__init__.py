"""Arrays in, arrays out: no configuration, no parameters' containers, no files.

Shapes are written in one alphabet: B batch, T query tokens, S cache slots, L layers, D model, N = K * G query heads,
K key/value heads, G queries per key/value head, H head dim (W of values, where it may differ), F feed-forward, E experts,
V vocabulary. Signatures say them by `jaxtyping`: ``Float[Array, "B T D"]`` is an array of any floating-point type,
``*batch`` are any axes, ``#B`` is B or 1, ``half`` is H/2, and a name has one size in a call. Only the tests check that.

Every model has what is here; `cross_entropy`, `moe`, `int8`, `rope_layout` and `weights` are imported by name.
"""

from llama_jax.ops.attention import attend, attend_paged, write_paged
from llama_jax.ops.layers import embed, feed_forward, project, rms_norm
from llama_jax.ops.rotary import apply_rotary, inverse_frequencies, rotary_table

__all__ = [
    "apply_rotary",
    "attend",
    "attend_paged",
    "embed",
    "feed_forward",
    "inverse_frequencies",
    "project",
    "rms_norm",
    "rotary_table",
    "write_paged",
]
