"""Reproducible permutations."""

from __future__ import annotations

import numpy as np

from llama_jax.data.errors import DataError


def shuffled(count: int, seed: int, stream: int) -> np.ndarray:
    """A permutation of `count` numbers that depends on `seed` and `stream` alone: int64[count].

    It sorts the raw numbers of a counter-based generator (Philox; Salmon et al. 2011), which are the same in every version
    of NumPy, while its distributions and permutations may change (NEP 19).

    Raises:
      DataError: see `check_seed`.
    """
    check_seed(seed)
    numbers = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(count)
    return np.argsort(numbers, kind="stable")


def check_seed(seed: int) -> None:
    """Raise DataError for a seed that no 64 bits hold."""
    if not 0 <= seed < 1 << 64:
        raise DataError(f"seed={seed} must be at least 0 and below 2**64")
