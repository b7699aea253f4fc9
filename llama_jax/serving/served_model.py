"""The model of an engine: its compiled programs, with the arguments that are the same in every call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.inference.compiled_decode import decoding_compute
from llama_jax.inference.decode import planned_rope_length
from llama_jax.inference.drafter import Drafter
from llama_jax.inference.sharding import check_row_shards, sharding_of
from llama_jax.inference.speculation import DraftModel
from llama_jax.model.cache import PAGE_SIZE, CacheOptions, cache_bytes
from llama_jax.model.forward import lm_head_of
from llama_jax.model.forward_options import ComputeOptions
from llama_jax.model.multi_lora import adapters_in
from llama_jax.model.params import LlamaParams
from llama_jax.ops.rope_scaling import LENGTH_DEPENDENT
from llama_jax.serving.programs import Programs, ServingState, StaticModel, StepBatch, programs_for
from llama_jax.serving.row_sampling import RowSettings

STOPS = 16  # maximum number of stop tokens per row
StateAndTokens = tuple[ServingState, jax.Array]  # with packed `ChosenTokens`


@dataclass(frozen=True)
class ServedModel:
    """Model, sharding and programs of an engine, and its draft model."""

    static: StaticModel
    params: LlamaParams
    cache: CacheOptions
    programs: Programs
    adapters: int = 0  # number of adapters in the parameters
    draft: ServedModel | None = None

    @classmethod
    def of(
        cls,
        config: LlamaConfig,
        params: LlamaParams,
        cache: CacheOptions,
        compute: ComputeOptions,
        draft: Drafter | None = None,
    ) -> ServedModel:
        """The model of parameters on one device or on a mesh.

        Raises:
          GenerationError: a draft model with another vocabulary.
          MeshError: a mesh that shards rows, which a step concatenates; a draft model on other devices.
        """
        draft_model = None
        if isinstance(draft, DraftModel):
            draft.check_model(config, params, 1)
            draft_model = cls.of(draft.config, draft.params, cache, ComputeOptions())
        sharding = sharding_of(params)
        check_row_shards(sharding, 1)
        (device, *_) = jax.tree.leaves(params)[0].devices()
        static = StaticModel(config, decoding_compute(params, compute, sharding.mesh), sharding)
        return cls(static, params, cache, programs_for(device.platform), adapters_in(params), draft_model)

    @property
    def platform(self) -> str:
        """The platform of the parameters' devices: "cpu", "gpu" or "tpu"."""
        return next(iter(jax.tree.leaves(self.params)[0].devices())).platform

    @property
    def config(self) -> LlamaConfig:
        return self.static.config

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """This model, and its draft model if it has one."""
        return (self,) if self.draft is None else (self, self.draft)

    def with_programs(self, programs: Programs) -> ServedModel:
        """A copy with other programs, also in the draft model."""
        return replace(self, programs=programs, draft=self.draft and self.draft.with_programs(programs))

    @property
    def vocab(self) -> int:
        """Rows of the output projection: V, or more if it is padded to be sharded."""
        return int(lm_head_of(self.config, self.params).shape[0])

    @property
    def cache_dtype(self) -> str:
        """The dtype of keys and values."""
        return str(np.dtype(self.cache.dtype or self.params.embedding.dtype))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, including the draft model's."""
        return sum(cache_bytes(model.config, 1, PAGE_SIZE, model.cache_dtype) for model in self.models)

    def rope_root(self, length: int, limit: int) -> int:
        """A value on which keys depend in addition to tokens, for RoPE scalings that depend on the length."""
        scaling = self.config.rope_scaling
        if scaling is None or scaling.kind not in LENGTH_DEPENDENT:
            return 0
        planned = planned_rope_length(self.config, length, limit)
        return int(planned > scaling.original_max_seq_len) if scaling.kind == "longrope" else planned

    def empty(self, seats: int, count: int) -> ServingState:
        """The state before the first step, with this many seats and pages."""
        draft = None if self.draft is None else self.draft.static
        return self.programs.empty(self.static, self.params, draft, seats, count, self.cache_dtype)

    def enter(self, state: ServingState, seat: int, seen: np.ndarray) -> ServingState:
        return self.programs.enter(state, np.int32(seat), seen, self.static.sharding)

    def step(self, state: ServingState, batch: StepBatch, settings: RowSettings) -> StateAndTokens:
        """Process the tokens of all rows, and sample a token of each live row."""
        return self.programs.step(self.static, self.params, state, batch, settings)

    def burst(self, state: ServingState, batch: StepBatch, settings: RowSettings, count: int) -> StateAndTokens:
        """Sample `count` tokens, at most `BURST`, of a single row."""
        return self.programs.burst(self.static, self.params, state, batch, settings, np.int32(count))

    def score(self, state: ServingState, batch: StepBatch, settings: RowSettings, targets: np.ndarray) -> StateAndTokens:
        """See `programs.score`."""
        return self.programs.score(self.static, self.params, state, batch, settings, targets)

    def verify(
        self, state: ServingState, batch: StepBatch, settings: RowSettings, drafts: np.ndarray, count: int
    ) -> StateAndTokens:
        """A step with `count` drafts: `drafts`, or with a draft model its continuation of these tokens."""
        draft, args = self.draft, (state, batch, settings, drafts)
        if draft is None:
            return self.programs.verify_drafts(self.static, self.params, *args)
        return self.programs.verify_own_drafts(self.static, self.params, draft.static, draft.params, *args, count)

    def read_draft(self, state: ServingState, batch: StepBatch) -> ServingState:
        """Prefill the draft model with the tokens of a batch, all of which the host must know."""
        draft = self.draft
        assert draft is not None
        pages = self.programs.read_draft(draft.static, draft.params, state.draft_pages, batch)
        return state.replace(draft_pages=pages)
