"""Serialized programs: the library's pytrees can be arguments and results of functions that `jax.export` serializes.

Parameters and cache are arguments of an exported program, so that a program of a few megabytes works for every checkpoint of
a configuration. It runs wherever these pytrees are registered:

    register_for_export()
    exported = jax.export.export(jax.jit(partial(llama_jax.forward, config)))(params, tokens, cache)
    data = exported.serialize()  # needs the package flatbuffers: the extra "export"
    hidden, cache = jax.export.deserialize(data).call(params, tokens, cache)
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jax import export

from llama_jax.inference.decode import DecodeSettings, DecodeState, PrefillState, TokenChunk
from llama_jax.inference.sampling import Sampling
from llama_jax.model.cache import KVCache
from llama_jax.model.forward_options import Positions
from llama_jax.model.params import Attention, Block, FeedForward, LlamaParams
from llama_jax.ops.int8 import Quantized
from llama_jax.ops.weights.lora import LoraWeight, LowRank
from llama_jax.ops.weights.multi_lora import MultiLoraWeight
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight
from llama_jax.training.batch import Batch
from llama_jax.training.step import TrainState

TREES: tuple[type[Any], ...] = (
    *(LlamaParams, Block, Attention, FeedForward),
    *(QuantizedWeight, JoinedWeight, LoraWeight, MultiLoraWeight, LowRank, KVCache, Quantized, Sampling),
    *(DecodeSettings, DecodeState, TrainState),
)
TUPLES: tuple[type[Any], ...] = (Positions, PrefillState, TokenChunk, Batch)


@cache
def register_for_export() -> None:
    """Register the library's pytrees with `jax.export`; further calls have no effect."""
    for tree in TREES:
        export.register_pytree_node_serialization(
            tree,
            serialized_name=f"llama_jax.{tree.__name__}",
            serialize_auxdata=lambda static: json.dumps(static).encode(),
            deserialize_auxdata=lambda data: tuple(tuple(x) if isinstance(x, list) else x for x in json.loads(data)),
        )
    for tuple_type in TUPLES:
        export.register_namedtuple_serialization(tuple_type, serialized_name=f"llama_jax.{tuple_type.__name__}")
