"""The model as the engine runs it: its compiled programs with all that is the same in every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from llama_jax import ops
from llama_jax.config import LlamaConfig
from llama_jax.inference.placement import check_rows, layout_of
from llama_jax.inference.sampling import Sampling
from llama_jax.inference.state import Reading, Request, State
from llama_jax.model.adapter_table import adapters_in
from llama_jax.model.cache import KVCache
from llama_jax.model.forward import head_of
from llama_jax.model.options import Compute, Layout, Places
from llama_jax.model.params import Llama
from llama_jax.model.window import CacheOptions
from llama_jax.ops.platform import native_code
from llama_jax.ops.rope_scaling import BY_LENGTH
from llama_jax.serving.programs import Programs, Wishes, programs_for

STOPS = 16  # places for stop tokens in each row


@dataclass(frozen=True)
class ServedModel:
    """Model, layout and programs of an engine."""

    config: LlamaConfig
    params: Llama
    cache: CacheOptions
    compute: Compute
    layout: Layout
    programs: Programs
    native: tuple[str, bool]  # what `ops.native_anyway` asks
    adapters: int = 0  # in the table beside the parameters

    @classmethod
    def of(cls, config: LlamaConfig, params: Llama, cache: CacheOptions, compute: Compute) -> ServedModel:
        """Of parameters that lie on one device, or on a mesh.

        Raises:
          MeshError: a mesh that divides the rows of a batch: prompts are read one by one.
        """
        layout = Layout()
        if isinstance(getattr(params.embedding, "sharding", None), NamedSharding):
            layout = layout_of(params)
            check_rows(layout, 1)
        (device, *_) = jax.tree.leaves(params)[0].devices()
        divided = layout.mesh is not None and layout.mesh.size > 1
        asks, programs = (device.platform, divided), programs_for(device.platform)
        return cls(config, params, cache, compute, layout, programs, asks, adapters_in(params))

    @property
    def vocab(self) -> int:
        """Rows of the output projection: V, or more where it is divided over devices."""
        return int(head_of(self.config, self.params).shape[0])

    @property
    def reads_filled_slots(self) -> bool:
        """Whether a turn takes as long however many empty slots a row has: it attends by the native kernel of `ops.cpu`."""
        own = self.compute.attention == "auto" and self.compute.attend is None and self.layout.attend is None
        dtypes = self.params.embedding.dtype, self.compute.dtype, self.cache.dtype
        floats = all(dtype is None or dtype == np.float32 for dtype in dtypes)
        with ops.native_anyway(*self.native):
            return native_code.value and own and floats and self.config.window is None

    def rope_root(self, length: int) -> int:
        """What keys depend on beside the tokens before them: the length of the prompt, for some scalings."""
        scaling = self.config.rope_scaling
        return length if scaling is not None and scaling.kind in BY_LENGTH else 0

    def empty_state(self, rows: int, capacity: int) -> State:
        reading = self.programs.empty_reading(self.config, self.params, rows, capacity, self.cache, self.layout)
        stop = np.full((rows, STOPS), -1, np.int32)
        request = Request(Sampling().per_row(rows), np.ones(rows, np.int32), stop)
        return self.programs.empty_state(self.config, self.params, reading, request, self.layout)

    def empty_reading(self, capacity: int) -> Reading:
        reading = self.programs.empty_reading(self.config, self.params, 1, capacity, self.cache, self.layout)
        return reading._replace(cache=reading.cache.replace(fresh=False))  # one program for first and later pieces

    def enlarge(self, reading: Reading, capacity: int) -> Reading:
        if capacity <= reading.cache.capacity:
            return reading
        return reading._replace(cache=self.programs.enlarge(reading.cache, capacity, self.layout))

    def read(self, reading: Reading, tokens: np.ndarray, places: Places, adapter: int) -> Reading:
        args = reading, tokens, places, np.array([adapter], np.int32), self.compute, self.layout
        return self.programs.read(self.config, self.params, *args)

    def score(
        self, reading: Reading, tokens: np.ndarray, targets: np.ndarray, places: Places, adapter: int, wanted: bool
    ) -> tuple[Reading, jax.Array]:
        args = tokens, targets, places, np.array([adapter], np.int32), np.bool_(wanted), self.compute, self.layout
        return self.programs.score(self.config, self.params, *reading, *args)

    def begin(self, reading: Reading, seen: np.ndarray, request: Request, wishes: Wishes) -> tuple[State, jax.Array]:
        return self.programs.begin(self.config, self.params, *reading, seen, request, wishes, self.layout)

    def take_turn(self, state: State, wishes: Wishes) -> tuple[State, jax.Array]:
        with ops.native_anyway(*self.native):
            return self.programs.take_turn(self.config, self.params, state, wishes, self.compute, self.layout)

    def take_drafts(self, state: State, wishes: Wishes, drafts: np.ndarray) -> tuple[State, jax.Array]:
        with ops.native_anyway(*self.native):
            args = self.config, self.params, state, wishes, drafts, self.compute, self.layout
            return self.programs.take_drafts(*args)

    def arrange(self, state: State, order: list[int], capacity: int) -> State:
        return self.programs.arrange(state, np.array(order, np.int32), capacity, self.layout)

    def take_row(self, state: State, row: int) -> State:
        return self.programs.take_row(state, np.int32(row), self.layout)

    def insert(self, state: State, row: int, one: State) -> State:
        return self.programs.insert(state, np.int32(row), one)

    def cut(self, cache: KVCache, start: int, size: int) -> Any:
        return self.programs.cut(cache, np.int32(start), size)

    def paste(self, reading: Reading, piece: Any, start: int) -> Reading:
        return reading._replace(cache=self.programs.paste(reading.cache, piece, np.int32(start)))
