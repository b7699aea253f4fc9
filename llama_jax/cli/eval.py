"""``llama-jax eval``: how well a model predicts a text."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from llama_jax.cli.options import DTYPES
from llama_jax.cli.page import columns, printable
from llama_jax.errors import UserError

if TYPE_CHECKING:
    from llama_jax.data import Corpus
    from llama_jax.runs.evaluate import Evaluation
    from llama_jax.tokenizers import Tokenizer


@dataclass(frozen=True)
class Eval:
    """Print loss, perplexity and bits per byte of a model on texts; bits per byte compare across tokenizers."""

    path: tyro.conf.Positional[Path]
    """A model's folder or file, of any format that is read."""
    data: tuple[Path, ...]
    """Files, or folders of them: text, .jsonl, or token ids in .bin or .array_record. Tokenised once, then cached."""
    tokenizer: Path | None = None
    """A SentencePiece .model, a rank file of Llama 3 or a tokenizer.json; by default the one with the weights."""
    length: int | None = None
    """Tokens of the sliding window; by default the model's context, 4096 at most."""
    stride: int | None = None
    """Tokens from a window to the next; by default half of it. More is quicker, but leaves tokens with less context."""
    batch: int | None = None
    """Rows that are read at once; by default 1 on a CPU, whose caches more would leave, and 8 elsewhere."""
    dtype: DTYPES = "auto"
    """Of the weights and the arithmetic; auto is that of the stored embedding, float32 where it is quantised."""
    max_documents: int | None = None
    """Read the first so many documents only."""
    separator: str = "<|endoftext|>"
    """What stands between the documents of a text file."""
    longest: int = 1 << 17
    """Characters of the longest document of a text file; a longer one is cut into several."""
    field: str = "text"
    """Of each object of a .jsonl file that is the text."""
    token_type: Literal["auto", "uint16", "uint32"] = "auto"
    """Of the ids in .bin and .array_record; auto is uint16 where that holds the vocabulary."""
    json: bool = False
    """Print one JSON object; what is not a number is null."""

    def run(self) -> None:
        if self.max_documents is not None and self.max_documents < 1:
            raise UserError(f"max_documents={self.max_documents} must be at least 1")
        import jax
        import numpy as np
        from tqdm import tqdm

        from llama_jax.checkpoints.loading import load, open_checkpoint
        from llama_jax.cli.runtime import CompileClock, loading_bar, start_backend, use_compilation_cache
        from llama_jax.runs.evaluate import choose_sizes, evaluate
        from llama_jax.tokenizers import load_tokenizer

        # What is quick comes first: no mistake shall be found after minutes of loading.
        use_compilation_cache()
        compiling = CompileClock()
        start_backend()
        opened = open_checkpoint(self.path)
        tokenizer = opened.tokenizer() if self.tokenizer is None else load_tokenizer(self.tokenizer)
        if tokenizer is None:
            raise UserError(f"no vocabulary lies with {self.path}; give one with --tokenizer")
        if tokenizer.vocab_size > opened.config.vocab_size:
            raise UserError(
                f"{self.tokenizer or self.path} has a vocabulary of {tokenizer.vocab_size}, the model one of"
                f" {opened.config.vocab_size}; give the model's own with --tokenizer"
            )
        corpus = self._read(tokenizer)
        if self.max_documents is not None:
            corpus = corpus.select(np.arange(min(self.max_documents, corpus.document_count)))
        sizes = choose_sizes(opened.config, corpus, length=self.length, stride=self.stride, batch=self.batch)
        dtype = None if self.dtype == "auto" else self.dtype
        params = load(self.path, dtype, tokenizer=self.tokenizer, progress=loading_bar).params

        started, compiled = time.perf_counter(), compiling.seconds
        bar = partial(tqdm, desc="evaluating", unit=" batches", leave=False, disable=None)
        found = evaluate(opened.config, params, corpus, progress=bar, **sizes._asdict())
        seconds = time.perf_counter() - started - (compiling.seconds - compiled)
        if not math.isfinite(found.loss):
            remedy = "is the model whole?" if self.dtype == "float32" else "try --dtype float32"
            raise UserError(f"the loss is {found.loss}: the model gives numbers that are not finite; {remedy}")
        facts = {
            "model": str(self.path),
            "data": list(map(str, self.data)),
            **asdict(found),
            **sizes._asdict(),
            "unknown_tokens": _unknown(tokenizer, corpus),
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "dtype": str(params.embedding.dtype),
            "seconds": round(seconds, 3),
            "compile_seconds": round(compiling.seconds, 3),
            "tokens_per_second": round(found.tokens / seconds, 1) if seconds > 0 else 0.0,
        }
        if self.json:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}
            print(json.dumps(finite, ensure_ascii=False))
        else:
            print(as_page(found, facts))
            print(_statistics(facts), file=sys.stderr)

    def _read(self, tokenizer: Tokenizer) -> Corpus:
        """The files as documents of tokens."""
        from tqdm import tqdm

        from llama_jax.data import Reading, open_corpus

        token_type = None if self.token_type == "auto" else self.token_type
        reading = Reading(separator=self.separator, longest=self.longest, field=self.field, token_type=token_type)
        bar = partial(tqdm, desc="tokenising", unit=" MB", leave=False, disable=None)
        # This may end in order, and must: a temporary file would be left behind.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return open_corpus(self.data, tokenizer, reading=reading, progress=bar)
        except KeyboardInterrupt:
            print("\nllama-jax: stopped", file=sys.stderr)
            os._exit(130)
        finally:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def _unknown(tokenizer: Tokenizer, corpus: Corpus) -> int:
    """Tokens that stand for characters which the vocabulary has not."""
    unknown = tokenizer.special_tokens.get("<unk>")
    if unknown is None:
        return 0
    return sum(int((corpus.document(number) == unknown).sum()) for number in range(corpus.document_count))


def as_page(found: Evaluation, facts: dict[str, Any]) -> str:
    """The three numbers, and of what they are."""
    error = "" if math.isnan(found.standard_error) else f" ± {found.standard_error:.2g}"
    bits = "none, as the text has no bytes" if math.isnan(found.bits_per_byte) else f"{found.bits_per_byte:.4f}"
    rows = [
        ["loss", f"{found.loss:.4f}{error} nats per token"],
        ["perplexity", f"{found.perplexity:.5g}"],
        ["bits per byte", bits],
        ["read", f"{found.tokens:,} tokens, {found.bytes:,} bytes, {found.documents:,} documents"],
        ["window", f"{facts['length']:,} tokens, stride {facts['stride']:,}"],
    ]
    if facts["unknown_tokens"]:
        share = f"{facts['unknown_tokens'] / found.tokens:.2%}"
        rows.append(["unknown", f"{share} of the tokens are <unk>: what they stand for is not predicted, only that it is"])
    return f"{printable(facts['model'])}\n\n{columns(rows)}"


def _statistics(facts: dict[str, Any]) -> str:
    return (
        f"{facts['backend']} ({facts['device']}) · {facts['dtype']} · compile {facts['compile_seconds']:.2f} s"
        f" · {facts['seconds']:.2f} s, {facts['tokens_per_second']:,.1f} tokens/s"
    )
