"""Loss of the same text in windows of several lengths, and by position in them: does more context help?

    python experiments/loss_by_length.py PATH --data book.txt --lengths 512 2048 8192 --rope yarn:4

The text is cut into spans of the longest length, and each span into windows of every other length, without overlap. All
lengths therefore predict the same tokens, with different amounts of context. A model that uses its context has a lower loss
at a greater length; one that fails beyond its training length has a higher loss from that position on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tyro

from llama_jax import CacheOptions, ComputeOptions, UserError

if TYPE_CHECKING:
    import jax

    from llama_jax import LlamaConfig
    from llama_jax.model.cache import KVCache
    from llama_jax.model.params import LlamaParams

CHUNK = 512  # most tokens of a window per forward pass


def cut_spans(tokens: np.ndarray, length: int, max_tokens: int | None = None) -> np.ndarray:
    """Spans of `length` tokens and the token after them, without overlap: int32[spans, length + 1].

    Args:
      tokens: the text, int[n].
      max_tokens: maximum number of tokens to predict, in whole spans spread evenly over the text; by default all.
    """
    count = (len(tokens) - 1) // length
    kept = count if max_tokens is None else min(count, max_tokens // length)
    if kept < 1:
        raise UserError(
            f"no window of length={length}: the text has {len(tokens)} tokens, max_tokens={max_tokens}; use a shorter length"
        )
    starts = np.arange(kept) * count // kept * length
    return np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int32)


def window_losses(
    config: LlamaConfig,
    params: LlamaParams,
    spans: np.ndarray,
    length: int,
    *,
    batch: int = 1,
    cache: CacheOptions = CacheOptions(),
    compute: ComputeOptions = ComputeOptions(),
) -> np.ndarray:
    """Losses in nats of the spans' tokens in consecutive windows: float64[windows, length].

    A window is read in chunks with a cache, so that memory holds that cache and the attention scores of one chunk.

    Args:
      spans: from `cut_spans`.
      length: tokens of a window, a divisor of the spans' length. It may exceed the model's context.
      batch: windows per forward pass.
      cache: the cache, as in generation, to measure the cost of int8 or a window.
      compute: dtype and attention.
    """
    import jax
    import jax.numpy as jnp

    import llama_jax
    from llama_jax.evaluation.measure import target_nats

    if (spans.shape[1] - 1) % length:
        raise UserError(f"length={length} does not divide the longest, {spans.shape[1] - 1}; choose a divisor of it")
    chunks = -(-length // CHUNK)
    size = -(-length // chunks)

    @partial(jax.jit, donate_argnums=1)
    def read(params: LlamaParams, state: KVCache, tokens: jax.Array, targets: jax.Array) -> tuple[KVCache, jax.Array]:
        positions = llama_jax.Positions(rope_lengths=jnp.full(batch, length, jnp.int32))
        hidden, state = llama_jax.forward(config, params, tokens, state, positions=positions, compute=compute)
        return state, target_nats(config, params, hidden, targets)

    windows = spans[:, :-1].reshape(-1, length)
    padding = (0, -len(windows) % batch), (0, size * chunks - length)
    tokens = np.pad(windows, padding)
    targets = np.pad(spans[:, 1:].reshape(-1, length), padding, constant_values=-1)
    nats = np.empty(tokens.shape)
    dtype = jnp.dtype(cache.dtype or params.embedding.dtype)
    ring = {"window": cache.window, "sinks": cache.sinks, "max_tokens_per_pass": size}
    for first in range(0, len(tokens), batch):
        state = llama_jax.init_cache(config, batch, size * chunks, dtype, **ring)
        for begin in range(0, size * chunks, size):
            part = np.s_[first : first + batch, begin : begin + size]
            state, nats[part] = read(params, state, tokens[part], targets[part])
    return nats[: len(windows), :length]


def as_page(losses: dict[int, np.ndarray], context: int) -> str:
    """A line for each length, then the mean loss by tokens of context, with a column for each length."""
    from llama_jax.cli.terminal import columns

    rows = [["window", "loss", "", "perplexity", "last quarter", ""]]
    spans = len(losses[max(losses)])
    for length, nats in losses.items():
        of_spans = nats.reshape(spans, -1).mean(axis=1)
        error = f"± {of_spans.std(ddof=1) / math.sqrt(spans):.2g}" if spans > 1 else ""
        beyond = f"beyond the context of {context:,}" if length > context else ""
        loss, last = nats.mean(), nats[:, length * 3 // 4 :].mean()
        rows.append([f"{length:,}", f"{loss:.4f}", error, f"{np.exp(loss):.5g}", f"{last:.4f}", beyond])
    table = [["context of up to", *(f"{length:,}" for length in losses)]]
    end = 1
    while (begin := end // 2) < max(losses):
        means = [f"{nats[:, begin:end].mean():.4f}" if begin < length else "" for length, nats in losses.items()]
        table.append([f"{end:,}", *means])
        end *= 2
    return f"{columns(rows, right=(0, 1, 3, 4))}\n\n{columns(table, right=range(len(losses) + 1))}"


@dataclass(frozen=True)
class Arguments:
    """Print the loss of a text in windows of each length, and by position in them, in nats per token."""

    path: tyro.conf.Positional[Path]
    """A model's folder or file, of any format."""
    data: Path
    """A text file."""
    lengths: tuple[int, ...] = ()
    """Tokens of the windows, divisors of the longest; by default the model's context, half of it and a quarter of it."""
    max_tokens: int | None = None
    """Maximum number of tokens to predict at each length; by default the whole text."""
    batch: int = 1
    """Windows per forward pass."""
    rope: str = ""
    """Another RoPE scaling, as in `llama-jax generate --rope`."""
    cache: CacheOptions = field(default_factory=CacheOptions)
    """The cache: --cache.dtype int8, --cache.window N, --cache.sinks N."""
    dtype: str | None = None
    quantize: str | None = None


def main(arguments: Arguments) -> None:
    import llama_jax
    from llama_jax.cli.options import with_rope

    a = arguments
    config, params, tokenizer = llama_jax.load(a.path, a.dtype, quantize=a.quantize)
    config = with_rope(config, a.rope)
    tokens = np.array(tokenizer.encode(a.data.read_text("utf-8", errors="replace")))
    lengths = sorted(a.lengths or [config.max_seq_len // part for part in (4, 2, 1)])
    spans = cut_spans(tokens, lengths[-1], a.max_tokens)
    options: dict[str, Any] = {"batch": a.batch, "cache": a.cache}
    losses = {length: window_losses(config, params, spans, length, **options) for length in lengths}
    print(as_page(losses, config.max_seq_len))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
