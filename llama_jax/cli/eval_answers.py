"""``llama-jax eval`` of chats and preferences: how data are recognised and read, and the output about pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from llama_jax.cli.page import columns, printable

if TYPE_CHECKING:
    from llama_jax.data import Corpus
    from llama_jax.data.chat_tokens import ExampleCounts
    from llama_jax.data.preference_batches import Pairs
    from llama_jax.runs.preferring import Preferring
    from llama_jax.storage import Location
    from llama_jax.tokenizers import Tokenizer

CHATS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"})


def kind_of_lines(data: Sequence[Location], field: str) -> Literal["text", "chats", "preferences"]:
    """The kind of the first object of the first .jsonl: text if it has `field`, or if there is no such file."""
    from llama_jax.data.data_files import find_files
    from llama_jax.data.documents import jsonl_objects

    files = [file for file in find_files(data) if file.suffix.lower() == ".jsonl"]
    first = next((set(found) for file in files for found, _, _ in islice(jsonl_objects(file), 1)), set())
    if field in first:
        return "text"
    if {"chosen", "rejected"} <= first:
        return "preferences"
    return "chats" if any(fields <= first for fields in CHATS) else "text"


@dataclass(frozen=True)
class ExampleOptions:
    """How examples are read: the chat format, the treatment of long ones, and the most that are taken."""

    format: Any
    too_long: Literal["cut", "drop"]
    most: int | None

    def chats(self, data: Sequence[Location], tokenizer: Tokenizer, length: int) -> tuple[Corpus, ExampleCounts]:
        """Conversations whose targets are the assistant's messages."""
        import numpy as np

        from llama_jax.data.chat_tokens import ChatReading, open_chats

        corpus, counts = open_chats(data, tokenizer, length, ChatReading(self.format, self.too_long))
        return corpus.select(np.arange(corpus.document_count)[: self.most]), counts

    def preferences(self, data: Sequence[Location], tokenizer: Tokenizer, length: int) -> tuple[Pairs, ExampleCounts]:
        """Pairs of answers."""
        import numpy as np

        from llama_jax.data.chat_tokens import ChatReading, open_preferences
        from llama_jax.data.preference_batches import Pairs

        chosen, rejected, counts = open_preferences(data, tokenizer, length, ChatReading(self.format, self.too_long))
        pairs = Pairs(chosen, rejected)
        return pairs.select(np.arange(pairs.count)[: self.most]), counts


def page_of_preferences(found: Preferring, facts: dict[str, Any], counts: ExampleCounts) -> str:
    """How often the chosen answer is preferred, and by how much."""
    against = "" if facts["against"] is None else f" against {printable(facts['against'])}"
    error = "" if math.isnan(found.margin_error) else f" ± {found.margin_error:.2g}"
    rows = [
        ["accuracy", f"{found.accuracy:.2%} ± {found.accuracy_error:.1%} of {found.pairs:,} pairs"],
        ["margin", f"{found.margin:.4f}{error} nats"],
        ["per token", f"accuracy {found.accuracy_per_token:.2%}"],
        ["log-probability", f"chosen {found.chosen_logprob:.3f}, rejected {found.rejected_logprob:.3f}"],
        ["read", f"{found.tokens:,} tokens of answers; {counts}"],
    ]
    return f"{printable(facts['model'])}{against}\n\n{columns(rows)}"
