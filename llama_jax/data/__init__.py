"""Text to tokens to packed batches that can be resumed from any step.

open_corpus(paths, tokenizer)             -> Corpus, tokenized once; DocumentFormat: where documents end
split(corpus, 0.1)                        -> Split(train, validation), two corpora
open_chats(paths, tokenizer, T)           -> Chats(corpus, counts): conversations, with the assistant's messages as targets
open_preferences(paths, tokenizer, T)     -> Preferences(chosen, rejected, counts), two such corpora
training_batches(corpus, B, T, seed=0)    -> endless iterator of Batch, with its `state`
validation_batches(corpus, B, T)          -> each token once, in order
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llama_jax.data.chat_tokens import ChatReading, Chats, Preferences, open_chats, open_preferences
from llama_jax.data.corpus import Corpus, Split, split
from llama_jax.data.data_files import WeightedData
from llama_jax.data.documents import DocumentFormat
from llama_jax.data.load_corpus import open_corpus
from llama_jax.errors import DataError

# Making batches needs JAX, which the processes of `tokenize_files` do not need: it is imported on first use.
_LAZY_MODULES = {
    "Batch": "llama_jax.training.batch",
    "Batches": "llama_jax.data.batches",
    "row_count": "llama_jax.data.batches",
    "training_batches": "llama_jax.data.batches",
    "validation_batches": "llama_jax.data.batches",
}
__all__ = [
    "Batch",
    "Batches",
    "ChatReading",
    "Chats",
    "Corpus",
    "DataError",
    "DocumentFormat",
    "Preferences",
    "Split",
    "WeightedData",
    "open_chats",
    "open_corpus",
    "open_preferences",
    "row_count",
    "split",
    "training_batches",
    "validation_batches",
]

if TYPE_CHECKING:
    from llama_jax.data.batches import Batches, row_count, training_batches, validation_batches
    from llama_jax.training.batch import Batch


def __getattr__(name: str) -> Any:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module 'llama_jax.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY_MODULES[name]), name)
    globals()[name] = value
    return value
