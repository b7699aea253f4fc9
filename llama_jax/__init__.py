"""Llama in JAX, as pure functions.

The public face, loaded on first use so that importing the package costs nothing:

  load(path)                          -> Checkpoint(config, params, tokenizer), from any format
  save(path, config, params)          a file of a chosen format;  convert(source, path) from one to another
  forward(config, params, tokens)     -> hidden states and cache;  unembed(...) -> logits
  logits(config, params, tokens)      the plain case of both
  generate(config, params, prompts)   continuations of a ragged batch;  stream(...) yields them as they come
  LlamaConfig, RopeScaling, preset    what a Llama is
  Sampling                            how to choose tokens
  load_tokenizer, TextStream          text to ids and back, text from a stream of tokens;  encode_chat for messages
  KVCache, init_cache, cache_bytes    the cache, an immutable tree;  CacheOptions: int8, a window with sinks
  MeshSizes                           how a model is divided over devices: load(path, mesh=MeshSizes(tensor=8))
  train(recipe, workdir, data)        train a Recipe into a folder;  evaluate(...) a model on a text
  evaluate_lengths(...), needle(...)  how far a model uses its context: loss by length and position, a sentence to find
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Checkpoint": "checkpoints",
    "convert": "checkpoints",
    "load": "checkpoints",
    "save": "checkpoints",
    "LlamaConfig": "config",
    "RopeScaling": "config",
    "preset": "config",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "GenerationError": "errors",
    "MeshError": "errors",
    "TokenizerError": "errors",
    "UserError": "errors",
    "Generation": "inference.generate",
    "Piece": "inference.generate",
    "generate": "inference.generate",
    "stream": "inference.generate",
    "Sampling": "inference.sampling",
    "CacheOptions": "model.cache",
    "KVCache": "model.cache",
    "cache_bytes": "model.cache",
    "grow": "model.cache",
    "init_cache": "model.cache",
    "forward": "model.forward",
    "logits": "model.forward",
    "rotary_frequencies": "model.forward",
    "unembed": "model.forward",
    "Llama": "model.params",
    "init": "model.params",
    "parameter_count": "model.params",
    "MeshSizes": "parallel.mesh",
    "stack": "model.params",
    "unstack": "model.params",
    "Evaluation": "runs.evaluate",
    "evaluate": "runs.evaluate",
    "LengthLoss": "runs.lengths",
    "evaluate_lengths": "runs.lengths",
    "NeedleTest": "runs.needle",
    "needle": "runs.needle",
    "Recipe": "runs.recipe",
    "train": "runs.loop",
    "Message": "tokenizers",
    "TextStream": "tokenizers",
    "encode_chat": "tokenizers",
    "load_tokenizer": "tokenizers",
}
_ROOMS = (
    "analysis",
    "checkpoints",
    "config",
    "data",
    "errors",
    "inference",
    "model",
    "ops",
    "parallel",
    "runs",
    "tokenizers",
    "training",
)
__all__ = [
    "CacheOptions",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Evaluation",
    "Generation",
    "GenerationError",
    "KVCache",
    "LengthLoss",
    "Llama",
    "LlamaConfig",
    "MeshError",
    "MeshSizes",
    "Message",
    "NeedleTest",
    "Piece",
    "Recipe",
    "RopeScaling",
    "Sampling",
    "TextStream",
    "TokenizerError",
    "UserError",
    "cache_bytes",
    "convert",
    "encode_chat",
    "evaluate",
    "evaluate_lengths",
    "forward",
    "generate",
    "grow",
    "init",
    "init_cache",
    "load",
    "load_tokenizer",
    "logits",
    "needle",
    "parameter_count",
    "preset",
    "rotary_frequencies",
    "save",
    "stack",
    "stream",
    "train",
    "unembed",
    "unstack",
]

if TYPE_CHECKING:
    from llama_jax.checkpoints import Checkpoint, convert, load, save
    from llama_jax.config import LlamaConfig, RopeScaling, preset
    from llama_jax.errors import CheckpointError, ConfigError, GenerationError, MeshError, TokenizerError, UserError
    from llama_jax.inference.generate import Generation, Piece, generate, stream
    from llama_jax.inference.sampling import Sampling
    from llama_jax.model.cache import CacheOptions, KVCache, cache_bytes, grow, init_cache
    from llama_jax.model.forward import forward, logits, rotary_frequencies, unembed
    from llama_jax.model.params import Llama, init, parameter_count, stack, unstack
    from llama_jax.parallel.mesh import MeshSizes
    from llama_jax.runs.evaluate import Evaluation, evaluate
    from llama_jax.runs.lengths import LengthLoss, evaluate_lengths
    from llama_jax.runs.loop import train
    from llama_jax.runs.needle import NeedleTest, needle
    from llama_jax.runs.recipe import Recipe
    from llama_jax.tokenizers import Message, TextStream, encode_chat, load_tokenizer


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"llama_jax.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'llama_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"llama_jax.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_HOME, *_ROOMS, "__version__"})
