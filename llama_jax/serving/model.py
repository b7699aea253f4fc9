"""The model as the engine runs it: its compiled programs with the arguments that are the same in every call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from llama_jax import ops
from llama_jax.config import LlamaConfig
from llama_jax.inference.drafting import Drafter
from llama_jax.inference.placement import check_rows, layout_of
from llama_jax.inference.sampling import Sampling
from llama_jax.inference.speculation import DraftModel
from llama_jax.inference.state import Reading, Request, State
from llama_jax.model.adapter_table import adapters_in
from llama_jax.model.cache import KVCache
from llama_jax.model.forward import head_of
from llama_jax.model.options import Compute, Layout, Places
from llama_jax.model.params import Llama
from llama_jax.model.window import CacheOptions
from llama_jax.ops.platform import native_code
from llama_jax.ops.rope_scaling import BY_LENGTH
from llama_jax.serving.choosing import Wishes
from llama_jax.serving.programs import Programs, programs_for

STOPS = 16  # places for stop tokens in each row


class Slots(NamedTuple):
    """Rows that are decoded, an immutable pytree.

    Attributes:
      state: of the model.
      memory: the draft model's cache of the same rows, with as many slots; None without one.
    """

    state: State
    memory: KVCache | None = None


@dataclass(frozen=True)
class ServedModel:
    """Model, layout and programs of an engine, and the smaller model that drafts for it."""

    config: LlamaConfig
    params: Llama
    cache: CacheOptions
    compute: Compute
    layout: Layout
    programs: Programs
    native: bool  # see `ops.native_anyway`
    adapters: int = 0  # how many there are in the parameters' table
    draft: ServedModel | None = None

    @classmethod
    def of(
        cls, config: LlamaConfig, params: Llama, cache: CacheOptions, compute: Compute, draft: Drafter | None = None
    ) -> ServedModel:
        """The model of parameters on one device or on a mesh.

        Raises:
          GenerationError: a draft model with another vocabulary.
          MeshError: a mesh that divides rows, because prompts are read one by one; a draft model on other devices.
        """
        beside = None
        if isinstance(draft, DraftModel):
            draft.check_model(config, params, 1)
            beside = cls.of(draft.config, draft.params, cache, Compute())
        layout = layout_of(params)
        check_rows(layout, 1)
        (device, *_) = jax.tree.leaves(params)[0].devices()
        native, programs = ops.decodes_natively(params, compute.dtype, layout.mesh), programs_for(device.platform)
        return cls(config, params, cache, compute, layout, programs, native, adapters_in(params), beside)

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """This model, and the draft model."""
        return (self,) if self.draft is None else (self, self.draft)

    def with_programs(self, programs: Programs) -> ServedModel:
        """The same with other programs, also in the draft model."""
        return replace(self, programs=programs, draft=self.draft and self.draft.with_programs(programs))

    @property
    def vocab(self) -> int:
        """Rows of the output projection: V, or more where it is divided over devices."""
        return int(head_of(self.config, self.params).shape[0])

    @property
    def reads_filled_slots(self) -> bool:
        """Whether empty slots do not change the time of a turn, because it attends by the native kernel of `ops.cpu`."""
        own = self.compute.attention == "auto" and self.compute.attend is None and self.layout.attend is None
        of_model = np.dtype(self.params.embedding.dtype)
        floats = all(dtype is None or np.dtype(dtype) == of_model for dtype in (self.compute.dtype, self.cache.dtype))
        with ops.native_anyway(self.native):
            whole = all(layer.window is None and layer.chunk is None for layer in self.config.layer_kinds)
            return native_code.value and own and floats and whole

    def rope_root(self, length: int) -> int:
        """What keys depend on besides the tokens before them: the length of the prompt, for some RoPE scalings."""
        scaling = self.config.rope_scaling
        return length if scaling is not None and scaling.kind in BY_LENGTH else 0

    def empty_state(self, rows: int, capacity: int) -> State:
        reading = self.programs.empty_reading(self.config, self.params, rows, capacity, self.cache, self.layout)
        stop = np.full((rows, STOPS), -1, np.int32)
        request = Request(Sampling().per_row(rows), np.ones(rows, np.int32), stop)
        return self.programs.empty_state(self.config, self.params, reading, request, self.layout)

    def empty_slots(self, rows: int, capacity: int) -> Slots:
        if self.draft is None:
            return Slots(self.empty_state(rows, capacity))
        return Slots(self.empty_state(rows, capacity), self.draft.empty_reading(capacity, rows).cache)

    def empty_reading(self, capacity: int, rows: int = 1) -> Reading:
        reading = self.programs.empty_reading(self.config, self.params, rows, capacity, self.cache, self.layout)
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

    def take_turn(self, slots: Slots, wishes: Wishes) -> tuple[Slots, jax.Array]:
        with ops.native_anyway(self.native):
            args = self.config, self.params, slots.state, wishes, self.compute, self.layout
            state, packed = self.programs.take_turn(*args)
        return slots._replace(state=state), packed

    def take_burst(self, slots: Slots, wishes: Wishes, count: int, most: int) -> tuple[Slots, jax.Array]:
        """Turns for `count` tokens, at most `most`, in one program."""
        with ops.native_anyway(self.native):
            args = self.config, self.params, slots.state, wishes, np.int32(count), most, self.compute, self.layout
            state, packed = self.programs.take_burst(*args)
        return slots._replace(state=state), packed

    def take_drafts(self, slots: Slots, wishes: Wishes, told: np.ndarray, count: int) -> tuple[Slots, jax.Array]:
        """A turn with `count` drafts: the given ones, or the draft model's continuation of the given tokens."""
        draft, here = self.draft, (self.compute, self.layout)
        with ops.native_anyway(self.native):
            if draft is None:
                args = self.config, self.params, slots.state, wishes, told
                state, packed = self.programs.take_drafts(*args, *here)
                return slots._replace(state=state), packed
            both = self.config, self.params, draft.config, draft.params, *slots
            state, memory, packed = self.programs.take_own_drafts(*both, wishes, told, count, *here, draft.layout)
            return Slots(state, memory), packed

    def catch_up(self, slots: Slots, tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Slots:
        """Let the draft model read these tokens of each row, from slot `starts` on."""
        draft = self.draft
        assert draft is not None
        args = draft.config, draft.params, slots.memory, tokens, starts, lengths, draft.layout
        return slots._replace(memory=self.programs.catch_up(*args))

    def arrange(self, slots: Slots, order: list[int], capacity: int) -> Slots:
        rows, memory = np.array(order, np.int32), slots.memory
        if self.draft is not None:
            memory = self.programs.arrange_cache(memory, rows, capacity, self.draft.layout)
        return Slots(self.programs.arrange(slots.state, rows, capacity, self.layout), memory)

    def take_row(self, slots: Slots, row: int) -> Slots:
        memory = slots.memory
        if memory is not None and self.draft is not None:
            memory = self.programs.arrange_cache(memory, np.array([row], np.int32), memory.capacity, self.draft.layout)
        return Slots(self.programs.take_row(slots.state, np.int32(row), self.layout), memory)

    def insert(self, slots: Slots, row: int, one: Slots) -> Slots:
        memory = None if slots.memory is None else self.programs.insert_cache(slots.memory, np.int32(row), one.memory)
        return Slots(self.programs.insert(slots.state, np.int32(row), one.state), memory)

    def cut(self, cache: KVCache, start: int, size: int) -> Any:
        return self.programs.cut(cache, np.int32(start), size)

    def paste(self, reading: Reading, piece: Any, start: int) -> Reading:
        return reading._replace(cache=self.programs.paste(reading.cache, piece, np.int32(start)))
