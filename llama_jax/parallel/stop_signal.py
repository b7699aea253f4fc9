"""A vote of all processes between steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class StopVote:
    """A vote on stop signals: every process contributes two numbers, and all learn the maximum of each.

    An all-reduce over one device per process, started between two steps and read one step later, so that nothing waits.
    """

    def __init__(self) -> None:
        first = {device.process_index: device for device in reversed(jax.devices())}
        mesh = Mesh(np.array([first[index] for index in sorted(first)]), ("process",), axis_types=(AxisType.Auto,))
        self._mine = first[jax.process_index()]
        self._shape = len(first), 2
        self._each = NamedSharding(mesh, P("process"))
        self._largest = jax.jit(lambda votes: jnp.max(votes, axis=0), out_shardings=NamedSharding(mesh, P()))
        self._cast: jax.Array | None = None

    def cast(self, signal: int, microseconds: int) -> None:
        """Contribute this process's numbers; all processes must call this between the same steps."""
        mine = jax.device_put(np.array([[signal, min(microseconds, 2**31 - 1)]], np.int32), self._mine)
        self._cast = self._largest(jax.make_array_from_single_device_arrays(self._shape, self._each, [mine]))

    def read(self) -> tuple[int, int] | None:
        """The maxima of the last vote, once; None if there was none."""
        if self._cast is None:
            return None
        (signal, microseconds), self._cast = np.asarray(self._cast).tolist(), None
        return signal, microseconds
