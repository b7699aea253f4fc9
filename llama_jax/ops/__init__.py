"""Arrays in, arrays out: no configuration, no parameter trees, no files.

Shapes are written in one alphabet: B batch, T query tokens, S cache slots, R rows, P pages, L layers, D model, N = K * G
query heads, K key/value heads, G queries per key/value head, H head dim (W for values, if it may differ), F feed-forward,
E experts, V vocabulary. In `weights` and `grouped` a matrix is [N, D] or [N, K], with N output and D or K input features,
and [*out, D] has several axes of output features. Signatures use `jaxtyping`: ``Float[Array, "B T D"]`` is an array of any
floating-point type, ``*batch`` are any axes, ``#B`` is B or 1, ``half`` is H/2, and a name has one size within a call. Only
the tests check this.

This module exports what every model uses. Import the rest by module.
"""

from llama_jax.ops.attention import attend, attend_paged, write_paged
from llama_jax.ops.layers import add_bias, embed, feed_forward, gated_activation, map_all_tokens, project, rms_norm
from llama_jax.ops.platform import before_cpu_programs
from llama_jax.ops.rotary import apply_rotary, inverse_frequencies, rotary_table

__all__ = [
    "add_bias",
    "apply_rotary",
    "attend",
    "attend_paged",
    "embed",
    "feed_forward",
    "gated_activation",
    "inverse_frequencies",
    "map_all_tokens",
    "project",
    "rms_norm",
    "rotary_table",
    "write_paged",
]


@before_cpu_programs
def import_cpu_variants() -> None:
    """Register the variants in `ops.cpu`."""
    import llama_jax.ops.cpu  # noqa: F401
