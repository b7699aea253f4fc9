"""How signatures say the dtypes and shapes of arrays, by `jaxtyping`, in the alphabet of `llama_jax.ops`.

``Float[Array, "B T D"]`` is an array of any floating-point type. ``*batch`` stands for any axes, ``#B`` for B or 1 where the
array is broadcast, ``half`` for H/2; a name has one size in a call. Nothing is checked when the library is used, only by its
tests.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import numpy as np

AnyArray: TypeAlias = jax.Array | np.ndarray
