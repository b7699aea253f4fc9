"""The model as the engine runs it: its compiled programs with the arguments that are the same in every call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np

from llama_jax import ops
from llama_jax.config import LlamaConfig
from llama_jax.inference.drafting import Drafter
from llama_jax.inference.placement import check_rows, layout_of
from llama_jax.inference.speculation import DraftModel
from llama_jax.model.adapter_table import adapters_in
from llama_jax.model.cache import PAGE, CacheOptions, cache_bytes
from llama_jax.model.forward import head_of
from llama_jax.model.options import Compute, Layout
from llama_jax.model.params import Llama
from llama_jax.ops.rope_scaling import BY_LENGTH
from llama_jax.serving.programs import Programs, ServingState, StepBatch, programs_for
from llama_jax.serving.row_sampling import RowSettings

STOPS = 16  # places for stop tokens in each row
BURST = 8  # most tokens of a row in a turn without drafts


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
          MeshError: a mesh that divides rows, because a step has all rows' tokens in one; a draft model on other devices.
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
    def cache_dtype(self) -> str:
        """Of keys and values."""
        return str(np.dtype(self.cache.dtype or self.params.embedding.dtype))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, with the draft model's."""
        return sum(cache_bytes(model.config, 1, PAGE, model.cache_dtype) for model in self.models)

    def rope_root(self, length: int) -> int:
        """What keys depend on besides the tokens before them: the length of the prompt, for some RoPE scalings."""
        scaling = self.config.rope_scaling
        return length if scaling is not None and scaling.kind in BY_LENGTH else 0

    def empty(self, seats: int, count: int) -> ServingState:
        """The state before the first step, of so many seats and pages."""
        draft = None if self.draft is None else self.draft.config
        return self.programs.empty(self.config, self.params, draft, seats, count, self.cache_dtype, self.layout)

    def enter(self, state: ServingState, seat: int, seen: np.ndarray) -> ServingState:
        return self.programs.enter(state, np.int32(seat), seen, self.layout)

    def step(self, state: ServingState, batch: StepBatch, settings: RowSettings) -> tuple[ServingState, jax.Array]:
        """A token of each live row, after what the rows read."""
        with ops.native_anyway(self.native):
            return self.programs.step(self.config, self.params, state, batch, settings, self.compute, self.layout)

    def burst(
        self, state: ServingState, batch: StepBatch, settings: RowSettings, count: int
    ) -> tuple[ServingState, jax.Array]:
        """`count` tokens, at most `BURST`, of a single row."""
        args = state, batch, settings, np.int32(count), BURST, self.compute, self.layout
        with ops.native_anyway(self.native):
            return self.programs.burst(self.config, self.params, *args)

    def score(
        self, state: ServingState, batch: StepBatch, settings: RowSettings, targets: np.ndarray
    ) -> tuple[ServingState, jax.Array]:
        args = state, batch, settings, targets, self.compute, self.layout
        return self.programs.score(self.config, self.params, *args)

    def verify(
        self, state: ServingState, batch: StepBatch, settings: RowSettings, told: np.ndarray, count: int
    ) -> tuple[ServingState, jax.Array]:
        """A step with `count` drafts: the given ones, or the draft model's continuation of the given tokens."""
        draft, rest = self.draft, (state, batch, settings, told)
        with ops.native_anyway(self.native):
            if draft is None:
                return self.programs.verify_drafts(self.config, self.params, *rest, self.compute, self.layout)
            both = self.config, self.params, draft.config, draft.params
            return self.programs.verify_own_drafts(*both, *rest, count, self.compute, self.layout, draft.layout)

    def read_draft(self, state: ServingState, batch: StepBatch) -> ServingState:
        """Let the draft model read the tokens of a batch, none of which is the device's own."""
        draft = self.draft
        assert draft is not None
        args = draft.config, draft.params, state.draft_pages, batch, draft.layout
        return state.replace(draft_pages=self.programs.read_draft(*args))
