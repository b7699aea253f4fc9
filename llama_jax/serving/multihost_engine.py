"""One engine over several processes: the first process decides, and the others run the same programs.

Everything that an engine does on devices is a call of one of its `Programs`. On a mesh over several processes, each process
must make the same calls, in the same order, with the same host values. So the first process sends each call to the others
before it makes it: arrays on devices by number, the rest by value. The others know nothing about requests or the engine.
"""

from __future__ import annotations

import pickle
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import numpy as np

from llama_jax.ops.platform import lowering_platform
from llama_jax.serving.programs import Programs
from llama_jax.serving.served_model import ServedModel

LOCAL_FIELDS = ("static", "params", "static.sharding")  # arguments that every process already has


@dataclass(frozen=True, slots=True)
class _LocalField:
    """A field of the model, or of its draft model."""

    name: str


@dataclass(frozen=True, slots=True)
class _ArrayRef:
    """A reference to an array by number, valid in all processes from this call on.

    Attributes:
      values: the values, if only the first process had the array before; otherwise None.
    """

    number: int
    values: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a program.

    Attributes:
      first: number of the first returned array; the others follow.
      dropped: numbers of arrays that are no longer needed.
    """

    program: str
    args: tuple[Any, ...]
    first: int
    dropped: tuple[int, ...]


def leading(model: ServedModel, send: Callable[[bytes], None]) -> ServedModel:
    """The model for the engine of the first process: it sends every program call to the others first.

    Args:
      send: sends a message to the other processes, in the order of the calls; `follow` receives it.
    """
    leader = _Leader(model, send)
    return model.with_programs(Programs(*(partial(leader.call, name) for name in Programs._fields)))


def launched(program: Callable[..., Any], *args: Any) -> Any:
    """The results of a program over several processes; accelerators run programs in the order of the calls."""
    results = program(*args)
    # XLA would run independent programs concurrently on CPUs, and their all-reduces over processes could be mixed up.
    return jax.block_until_ready(results) if lowering_platform() == "cpu" else results


class _Leader:
    def __init__(self, model: ServedModel, send: Callable[[bytes], None]) -> None:
        self._model = model
        self._send = send
        self._fields = [*LOCAL_FIELDS, *(f"draft.{name}" for name in LOCAL_FIELDS if model.draft is not None)]
        self._numbers: dict[int, tuple[int, Any]] = {}  # by id of the array: its number, and its finalizer
        self._values: dict[int, np.ndarray] = {}  # values of arrays that only this process has
        self._dropped: deque[int] = deque()  # may grow on any thread, when arrays are garbage-collected
        self._next = 0

    def call(self, program: str, *args: Any) -> Any:
        encoded = tuple(self._encode(arg) for arg in args)
        dropped = tuple(self._dropped.popleft() for _ in range(len(self._dropped)))
        call = _Call(program, encoded, self._next, dropped)
        self._send(pickle.dumps(call, pickle.HIGHEST_PROTOCOL))
        result = launched(getattr(self._model.programs, program), *map(self._local, args))
        for leaf in jax.tree.leaves(result):
            if id(leaf) in self._numbers:  # an argument, returned unchanged
                self._dropped.append(self._next)
                self._next += 1
            else:
                self._number(leaf)
        return result

    def _encode(self, arg: Any) -> Any:
        name = self._field_name(arg)
        return jax.tree.map(self._encode_leaf, arg) if name is None else _LocalField(name)

    def _encode_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if (known := self._numbers.get(id(leaf))) is not None:
            return _ArrayRef(known[0])
        number = self._number(leaf)
        self._values[number] = np.array(leaf)  # a copy: a view would keep the array alive forever
        return _ArrayRef(number, self._values[number])

    def _local(self, arg: Any) -> Any:
        """The argument of this process's own call: the values of an array that only this process has."""
        if self._field_name(arg) is not None or not self._values:
            return arg
        return jax.tree.map(lambda leaf: self._values.get(self._numbers.get(id(leaf), (-1,))[0], leaf), arg)

    def _field_name(self, arg: Any) -> str | None:
        return next((name for name in self._fields if arg is attrgetter(name)(self._model)), None)

    def _number(self, array: jax.Array) -> int:
        number, key = self._next, id(array)
        self._next += 1
        self._numbers[key] = number, weakref.ref(array, lambda _: self._forget(key, number))
        return number

    def _forget(self, key: int, number: int) -> None:
        self._numbers.pop(key, None)
        self._values.pop(number, None)
        self._dropped.append(number)


class Follower:
    """Makes the calls that another process sends.

    Attributes:
      arrays: the arrays that are still needed, by number.
    """

    def __init__(self, model: ServedModel) -> None:
        self.arrays: dict[int, Any] = {}
        self._model = model

    def take(self, message: bytes) -> Any:
        """Make a call and return its results. Only for messages of process 0 of the same job, which are trusted."""
        call: _Call = pickle.loads(message)
        for number in call.dropped:
            del self.arrays[number]
        result = launched(getattr(self._model.programs, call.program), *map(self._decode, call.args))
        for number, leaf in enumerate(jax.tree.leaves(result), call.first):
            self.arrays[number] = leaf
        return result

    def _decode(self, arg: Any) -> Any:
        if isinstance(arg, _LocalField):
            return attrgetter(arg.name)(self._model)
        return jax.tree.map(self._decode_leaf, arg)

    def _decode_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, _ArrayRef):
            return leaf
        if leaf.values is not None:
            self.arrays[leaf.number] = leaf.values
        return self.arrays[leaf.number]


def follow(model: ServedModel, receive: Callable[[], bytes]) -> None:
    """Make every received call, until `b""` is received."""
    follower = Follower(model)
    while message := receive():
        follower.take(message)
