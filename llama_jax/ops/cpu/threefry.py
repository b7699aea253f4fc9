"""The random numbers of `jax.random` as plain arithmetic, which XLA fuses into one loop.

JAX uses a kernel on GPUs, this form on TPUs, and a loop over whole arrays, which compiles faster, on CPUs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Hashable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import random

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def _threefry(key: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, section 3.3) of two counters, each uint32[...]."""
    keys = key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)
    a, b = a + keys[0], b + keys[1]
    for i in range(5):
        for turn in ROTATIONS[i % 2]:
            a = a + b
            b = a ^ (b << jnp.uint32(turn) | b >> jnp.uint32(32 - turn))
        a, b = a + keys[(i + 1) % 3], b + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return a, b


@functools.cache
def unrolled_threefry() -> Hashable:
    """Threefry for the keys of `jax.random`; the same numbers as JAX's with `jax_threefry_partitionable`."""
    jax_own: Any = random.threefry_prng_impl

    def fold_in(key: jax.Array, data: jax.Array) -> jax.Array:
        return jnp.stack(_threefry(key, *jax_own.seed(data.astype(jnp.uint32))))

    def random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        if width != 32 or math.prod(shape) >= 2**32:
            return cast(jax.Array, jax_own.random_bits(key, width, shape))
        counts = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        return operator.xor(*_threefry(key, jnp.zeros_like(counts), counts))

    its = dict(key_shape=jax_own.key_shape, seed=jax_own.seed, split=jax_own.split, fold_in=fold_in, random_bits=random_bits)
    return random.define_prng_impl(**its, name="unrolled threefry2x32", tag="unrolled")
