"""The option ``--draft``: what proposes tokens, and what it was worth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_jax.errors import GenerationError, shown

if TYPE_CHECKING:
    from llama_jax.config import LlamaConfig
    from llama_jax.inference.drafter import Counts
    from llama_jax.inference.speculation import DraftModel, PromptLookup
    from llama_jax.parallel.mesh import MeshSizes
    from llama_jax.tokenizers import Tokenizer

PROMPT = "prompt"


def parse_draft(text: str) -> tuple[str, int | None]:
    """The text before the colon, and the number after it or None; GenerationError for an invalid number."""
    from llama_jax.inference.drafter import MAX_DRAFT_TOKENS, check_number

    found = re.fullmatch(r"(.+):(-?\d{1,18})", text)
    if not found:
        return text, None
    number = int(found[2])
    check_number("tokens", number, MAX_DRAFT_TOKENS)
    return found[1], number


def check_draft(text: str, config: LlamaConfig) -> None:
    """Raise GenerationError for a draft whose vocabulary is not the model's, before anything is loaded."""
    name, _ = parse_draft(text)
    if name == PROMPT:
        return
    from llama_jax.formats import open_checkpoint

    size = open_checkpoint(name).config.vocab_size
    if size != config.vocab_size:
        raise GenerationError(
            f"--draft {shown(name, 80)} has a vocabulary of {size}, the model one of {config.vocab_size}; use a draft with"
            " the model's own tokenizer"
        )


def load_draft(text: str, dtype: str | None, tokenizer: Tokenizer, mesh: MeshSizes | None) -> PromptLookup | DraftModel:
    """The drafter of --draft; GenerationError for a model whose vocabulary has other pieces."""
    import llama_jax
    from llama_jax.cli.jax_setup import loading_bar

    name, tokens = parse_draft(text)
    if name == PROMPT:
        return llama_jax.PromptLookup() if tokens is None else llama_jax.PromptLookup(tokens)
    config, params, own = llama_jax.load(name, dtype, mesh=mesh, progress=loading_bar)
    if own is not None:
        pieces = [(each.vocab_size, *map(each.token_bytes, range(each.vocab_size))) for each in (tokenizer, own)]
        different = next((i - 1 for i, (a, b) in enumerate(zip(*pieces, strict=False)) if a != b), None)
        if different is not None:
            what = "is of another size" if different < 0 else f"differs at token {different}"
            raise GenerationError(
                f"the vocabulary of --draft {shown(name, 80)} {what}; use a draft with the model's own tokenizer"
            )
    found = llama_jax.DraftModel(config, params)
    return found if tokens is None else found.replace(tokens=tokens)


def draft_statistics(text: str, tokens: int, counts: Sequence[Counts]) -> dict[str, Any]:
    """The statistics of drafting for `tokens` generated after the first of each row, from the counts of each chunk."""
    passes, drafted, accepted = (sum(int(each.sum()) for each in part) for part in zip(*counts, strict=True))
    return {
        "draft": text,
        "passes": passes,
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_pass": round(tokens / passes, 3) if passes else 0.0,
    }


def draft_summary(statistics: dict[str, Any]) -> str:
    """The same as words."""
    accepted, drafted = statistics["accepted"], statistics["drafted"]
    return f"{statistics['tokens_per_pass']:.2f} tokens per pass, {accepted} of {drafted} drafted tokens accepted"
