"""An all-reduce over processes, by which they agree to stop after the same step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class StopVote:
    """A vote on stop signals: every process contributes two numbers, and all receive the maximum of each.

    An all-reduce over one device per process, dispatched between two steps and read one step later, so that no process waits
    for it.
    """

    def __init__(self) -> None:
        first_device = {device.process_index: device for device in reversed(jax.devices())}  # of each process
        mesh = Mesh(np.array([first_device[i] for i in sorted(first_device)]), ("process",), axis_types=(AxisType.Auto,))
        self._device = first_device[jax.process_index()]
        self._shape = len(first_device), 2
        self._sharding = NamedSharding(mesh, P("process"))
        self._max = jax.jit(lambda votes: jnp.max(votes, axis=0), out_shardings=NamedSharding(mesh, P()))
        self._result: jax.Array | None = None

    def cast(self, signal: int, microseconds: int) -> None:
        """Contribute this process's numbers; all processes must call this between the same steps."""
        vote = jax.device_put(np.array([[signal, min(microseconds, 2**31 - 1)]], np.int32), self._device)
        self._result = self._max(jax.make_array_from_single_device_arrays(self._shape, self._sharding, [vote]))

    def read(self) -> tuple[int, int] | None:
        """The maxima of the last vote, at the first call after it; else None."""
        if self._result is None:
            return None
        (signal, microseconds), self._result = np.asarray(self._result).tolist(), None
        return signal, microseconds
