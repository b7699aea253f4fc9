"""Llama in JAX, as pure functions.

The public API, imported lazily:

  load(path)                          -> Checkpoint(config, params, tokenizer), from any format; load() is the bundled model
  save(path, config, params)          writes a file in a chosen format;  convert(source, path) from one format to another
  forward(config, params, tokens)     -> hidden states and cache;  unembed(...) -> logits;
                                      logits_and_activations(...) also returns what hooks keep
  logits(config, params, tokens)      forward and unembed of whole sequences, without a cache
  generate(config, params, prompts)   continuations of a ragged batch;  stream(...) yields tokens as they are generated
  train_step(config, optimizer, state, batch)  -> the next TrainState and metrics, from init_state and make_optimizer
  next_token_loss(config, params, batch)       the loss that train_step minimizes, for a Batch of rows
  apply_adapters(params, adapters, lora)  a model with LoRA adapters, from init_adapters or load_adapter; freeze_base(...)
                                      trains only them, save_adapter writes PEFT files, merge(...) adds them to the weights
  adapter_table(config, params, [(adapters, lora), ...])  the model with several adapters; choose_adapters(params, rows)
                                      selects one for each row of a batch, for `generate` and every other function
  sharded_train_step(config, mesh)    train_step over a mesh (make_mesh), for a state sharded by train_state_specs
  pmap_step(step, devices)            train_step with `jax.pmap`, for a state from pmap_replicate;  pmap_generate likewise
  LlamaModule(config, params)         the model as a `flax.nnx.Module`
  train(recipe, workdir, data)        trains a Recipe into a folder;  evaluate(...) evaluates a model on a text
  kl_to_reference(config, params, reference, corpus)  how far a quantized model's predictions are from the dense model's
  register_for_export()               lets `jax.export` serialize programs of these functions

and their arguments:

  LlamaConfig, RopeScaling, preset    the sizes and constants of a model;  LayerConfig, QueryScaling: additions for
                                      related families
  Parts                               custom functions that replace parts of every layer; with_parts(config, "mine.py")
                                      finds those that a loaded model names
  ComputeOptions, Positions, Sharding  how a pass computes (dtype, rematerialization, kernels), the positions of its tokens,
                                      and how it is sharded over devices
  LossOptions, StepOptions            options of the loss (including ComputeOptions) and of a training step (including a
                                      LossOptions);  OptimizerSettings: the optimizer and its learning-rate schedule
  Sampling                            how to sample tokens
  PromptLookup, DraftModel            speculative decoding: several drafted tokens are verified in one pass; same tokens,
                                      lower latency
  Lora                                configuration of adapters: rank, alpha, which matrices
  KVCache, init_cache, cache_bytes    the cache, an immutable tree;  CacheOptions: int8, a window with sinks
  load_tokenizer, TextStream          text to ids and back, text from a stream of tokens;  encode_chat for messages
  MeshSizes                           how a model is sharded over devices: load(path, mesh=MeshSizes(tensor=8))

`llama_jax.serving.engine.Engine` serves requests as they arrive. For your own loop, use the parts of `generate`:
`llama_jax.inference.prepare_inputs.prepare_inputs`, then `prefill`, `begin_decode`, `decode_step` and `decode` in
`llama_jax.inference.decode`, pure functions from one `DecodeState` to the next.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The modules that have the names of this package, which are imported on first use.
_NAMES = {
    "formats": "Checkpoint convert load load_adapter save save_adapter",
    "config": "LayerConfig LlamaConfig Parts QueryScaling RopeScaling",
    "config.presets": "preset",
    "errors": "CheckpointError ConfigError GenerationError MeshError TokenizerError UserError",
    "export": "register_for_export",
    "inference.speculation": "DraftModel PromptLookup",
    "inference.generate": "Generation generate stream",
    "inference.decode": "TokenChunk",
    "inference.sampling": "Sampling",
    "model.multi_lora": "adapter_table choose_adapters",
    "model.lora": "Lora apply_adapters init_adapters merge freeze_base",
    "model.cache": "CacheOptions KVCache cache_bytes init_cache",
    "model.forward": "forward unembed",
    "model.logits": "logits logits_and_activations",
    "model.hooks": "with_hooks",
    "model.rope": "rotary_frequencies",
    "model.forward_options": "ComputeOptions Sharding Positions",
    "model.params": "LlamaParams",
    "model.trees": "init parameter_count layers_of stack_layers",
    "parallel.mesh": "MeshSizes make_mesh",
    "parallel.pmap": "pmap_generate pmap_step pmap_replicate",
    "parallel.sharding": "sharded_train_step train_state_specs",
    "nnx_module": "LlamaModule",
    "evaluation.perplexity": "Divergence kl_to_reference Evaluation evaluate",
    "runs.loop": "train",
    "runs.recipe": "Recipe",
    "runs.user_functions": "with_parts",
    "tokenizers": "Message TextStream encode_chat load_tokenizer",
    "training.batch": "Batch",
    "training.loss": "LossOptions next_token_loss",
    "serving.options": "EngineOptions",
    "serving.offline": "complete_requests",
    "training.optimizer": "OptimizerSettings make_optimizer",
    "training.step": "StepOptions TrainState init_state train_step",
}
_LAZY_ATTRIBUTES = {name: module for module, names in _NAMES.items() for name in names.split()}
_SUBPACKAGES = (
    "analysis",
    "formats",
    "config",
    "data",
    "errors",
    "evaluation",
    "inference",
    "model",
    "ops",
    "parallel",
    "runs",
    "serving",
    "tokenizers",
    "training",
    "verify",
)
__all__ = [
    "Batch",
    "CacheOptions",
    "Checkpoint",
    "CheckpointError",
    "ComputeOptions",
    "ConfigError",
    "Divergence",
    "DraftModel",
    "EngineOptions",
    "Evaluation",
    "Generation",
    "GenerationError",
    "KVCache",
    "LayerConfig",
    "LlamaConfig",
    "LlamaModule",
    "LlamaParams",
    "Lora",
    "LossOptions",
    "MeshError",
    "MeshSizes",
    "Message",
    "OptimizerSettings",
    "Parts",
    "Positions",
    "PromptLookup",
    "QueryScaling",
    "Recipe",
    "RopeScaling",
    "Sampling",
    "Sharding",
    "StepOptions",
    "TextStream",
    "TokenChunk",
    "TokenizerError",
    "TrainState",
    "UserError",
    "adapter_table",
    "apply_adapters",
    "cache_bytes",
    "choose_adapters",
    "complete_requests",
    "convert",
    "encode_chat",
    "evaluate",
    "forward",
    "freeze_base",
    "generate",
    "init",
    "init_adapters",
    "init_cache",
    "init_state",
    "kl_to_reference",
    "layers_of",
    "load",
    "load_adapter",
    "load_tokenizer",
    "logits",
    "logits_and_activations",
    "make_mesh",
    "make_optimizer",
    "merge",
    "next_token_loss",
    "parameter_count",
    "pmap_generate",
    "pmap_replicate",
    "pmap_step",
    "preset",
    "register_for_export",
    "rotary_frequencies",
    "save",
    "save_adapter",
    "sharded_train_step",
    "stack_layers",
    "stream",
    "train",
    "train_state_specs",
    "train_step",
    "unembed",
    "with_hooks",
    "with_parts",
]

if TYPE_CHECKING:
    from llama_jax.config import LayerConfig, LlamaConfig, Parts, QueryScaling, RopeScaling
    from llama_jax.config.presets import preset
    from llama_jax.errors import CheckpointError, ConfigError, GenerationError, MeshError, TokenizerError, UserError
    from llama_jax.evaluation.perplexity import Divergence, Evaluation, evaluate, kl_to_reference
    from llama_jax.export import register_for_export
    from llama_jax.formats import Checkpoint, convert, load, load_adapter, save, save_adapter
    from llama_jax.inference.decode import TokenChunk
    from llama_jax.inference.generate import Generation, generate, stream
    from llama_jax.inference.sampling import Sampling
    from llama_jax.inference.speculation import DraftModel, PromptLookup
    from llama_jax.model.cache import CacheOptions, KVCache, cache_bytes, init_cache
    from llama_jax.model.forward import forward, unembed
    from llama_jax.model.forward_options import ComputeOptions, Positions, Sharding
    from llama_jax.model.hooks import with_hooks
    from llama_jax.model.logits import logits, logits_and_activations
    from llama_jax.model.lora import Lora, apply_adapters, freeze_base, init_adapters, merge
    from llama_jax.model.multi_lora import adapter_table, choose_adapters
    from llama_jax.model.params import LlamaParams
    from llama_jax.model.rope import rotary_frequencies
    from llama_jax.model.trees import init, layers_of, parameter_count, stack_layers
    from llama_jax.nnx_module import LlamaModule
    from llama_jax.parallel.mesh import MeshSizes, make_mesh
    from llama_jax.parallel.pmap import pmap_generate, pmap_replicate, pmap_step
    from llama_jax.parallel.sharding import sharded_train_step, train_state_specs
    from llama_jax.runs.loop import train
    from llama_jax.runs.recipe import Recipe
    from llama_jax.runs.user_functions import with_parts
    from llama_jax.serving.offline import complete_requests
    from llama_jax.serving.options import EngineOptions
    from llama_jax.tokenizers import Message, TextStream, encode_chat, load_tokenizer
    from llama_jax.training.batch import Batch
    from llama_jax.training.loss import LossOptions, next_token_loss
    from llama_jax.training.optimizer import OptimizerSettings, make_optimizer
    from llama_jax.training.step import StepOptions, TrainState, init_state, train_step


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"llama_jax.{name}")
    if name not in _LAZY_ATTRIBUTES:
        raise AttributeError(f"module 'llama_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"llama_jax.{_LAZY_ATTRIBUTES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_LAZY_ATTRIBUTES, *_SUBPACKAGES, "__version__"})
