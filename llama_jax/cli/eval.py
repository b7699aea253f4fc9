"""``llama-jax eval``: how well a model predicts a text."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from llama_jax.cli.options import ATTENTION, RememberOptions
from llama_jax.cli.page import columns, printable
from llama_jax.cli.plot import check_picture, save_picture
from llama_jax.cli.reading import TextOptions, numbers
from llama_jax.cli.rope import say_beyond
from llama_jax.errors import UserError, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_jax.config import LlamaConfig
    from llama_jax.data import Corpus
    from llama_jax.model.params import Llama
    from llama_jax.runs.evaluate import Evaluation
    from llama_jax.runs.lengths import LengthLoss
    from llama_jax.tokenizers import Tokenizer


@dataclass(frozen=True)
class Eval(TextOptions, RememberOptions):
    """Print loss, perplexity and bits per byte of a model on texts; bits per byte compare across tokenizers.

    With --lengths: the loss of the same text in windows of each length, and by position in them; then --cache, --window and
    --sinks say how the model remembers what it has read.
    """

    path: tyro.conf.Positional[Path]
    """A model's folder or file, of any format that is read."""
    length: int | None = None
    """Tokens of the sliding window; by default the model's context, 4096 at most."""
    stride: int | None = None
    """Tokens from a window to the next; by default half of it. More is quicker, but leaves tokens with less context."""
    batch: int | None = None
    """Rows that are read at once; by default 1 on a CPU, whose caches more would leave, and 8 elsewhere.
    With --lengths elsewhere as many as make up 32,768 tokens."""
    attention: ATTENTION = "auto"
    """How attention is computed; auto takes the device's kernel where it can, and says what it took."""
    lengths: str = ""
    """Several windows without overlap, as in 256,512,1024: does context help, and how far?
    They may go beyond the model's context."""
    max_tokens: int | None = None
    """With --lengths: predict so many tokens at each, at most, in windows evenly over the text; by default all of it."""
    plot: Path | None = None
    """With --lengths: draw the loss by position, a curve for each, as .png, .pdf or .svg. Needs the extra 'plot'."""

    def run(self) -> None:
        lengths = self._check()
        from llama_jax.ops.attention import observed

        # What is quick comes first: no mistake shall be found after minutes of loading.
        subject = self.open(self.path)
        config = subject.config
        corpus = self.corpus(subject.tokenizer, lengths)
        sizes = self._sizes(config, corpus, lengths)
        params = self.load(subject)

        seconds = subject.stopwatch()
        found: Evaluation | tuple[LengthLoss, ...]
        with observed() as attention:
            if lengths:
                found = self._by_length(config, params, corpus, lengths)
            else:
                found = self._by_window(config, params, corpus, sizes)
        tokens = sum(one.tokens for one in found) if isinstance(found, tuple) else found.tokens
        facts = {
            **self.facts(subject, params, tokens, seconds()),
            **(_of_lengths(found, config) if isinstance(found, tuple) else asdict(found)),
            **sizes,
            "unknown_tokens": _unknown(subject.tokenizer, corpus),
            "attention": " and ".join(attention),
        }
        self.show(facts, page_of_lengths(found, facts) if isinstance(found, tuple) else as_page(found, facts))
        if self.plot is not None and isinstance(found, tuple):
            from llama_jax.runs.plot import draw_lengths

            # Last, so that what was measured is not lost where there is no room for a picture.
            name = f"{self.path} {self.rope}".strip()
            save_picture(draw_lengths(found, context=config.max_seq_len, title=name), self.plot)

    def _check(self) -> tuple[int, ...]:
        """The lengths, or none; UserError for options that do not go together."""
        self.check()
        self.cache_options()
        cache = None if self.cache == "auto" else self.cache
        alone = {"max_tokens": self.max_tokens, "plot": self.plot, "cache": cache, "window": self.window}
        for name, value in alone.items():
            if value is not None and not self.lengths:
                raise UserError(f"{name}={value} goes with --lengths alone")
        for name, value in (("length", self.length), ("stride", self.stride)):
            if value is not None and self.lengths:
                raise UserError(
                    f"{name}={value} and lengths={shown(self.lengths)} exclude each other; leave one of them out"
                )
        if self.plot is not None:
            check_picture("plot", self.plot)
        return numbers("lengths", self.lengths, int) if self.lengths else ()

    def _sizes(self, config: LlamaConfig, corpus: Corpus, lengths: Sequence[int]) -> dict[str, Any]:
        """How the corpus will be read, after all checks that need no parameters."""
        from llama_jax.runs.evaluate import choose_sizes
        from llama_jax.runs.lengths import choose_lengths

        if not lengths:
            return choose_sizes(config, corpus, length=self.length, stride=self.stride, batch=self.batch)._asdict()
        choose_lengths(config, corpus, lengths, max_tokens=self.max_tokens, batch=self.batch)
        if self.window is None:  # with a window no distance is longer than it
            say_beyond(config, lengths)
        remembered = {"cache": self.cache, "window": self.window, "sinks": self.sinks}
        return {"batch": self.batch, "max_tokens": self.max_tokens, **remembered}

    def _by_window(self, config: LlamaConfig, params: Llama, corpus: Corpus, sizes: dict[str, Any]) -> Evaluation:
        from tqdm import tqdm

        from llama_jax.model.options import Compute
        from llama_jax.runs.evaluate import evaluate

        bar = partial(tqdm, desc="evaluating", unit=" batches", leave=False, disable=None)
        found = evaluate(config, params, corpus, compute=Compute(attention=self.attention), progress=bar, **sizes)
        if not math.isfinite(found.loss):
            raise self.not_finite("loss", found.loss)
        return found

    def _by_length(
        self, config: LlamaConfig, params: Llama, corpus: Corpus, lengths: Sequence[int]
    ) -> tuple[LengthLoss, ...]:
        from tqdm import tqdm

        from llama_jax.model.options import Compute
        from llama_jax.runs.lengths import evaluate_lengths

        bar = partial(tqdm, desc="evaluating", unit=" pieces", leave=False, disable=None)
        found = evaluate_lengths(
            config,
            params,
            corpus,
            lengths,
            max_tokens=self.max_tokens,
            batch=self.batch,
            cache=self.cache_options(),
            compute=Compute(attention=self.attention),
            progress=bar,
        )
        for one in found:
            if not math.isfinite(one.loss):
                raise self.not_finite(f"loss at length={one.length}", one.loss)
        return found


def _of_lengths(found: Sequence[LengthLoss], config: LlamaConfig) -> dict[str, Any]:
    """What was found as JSON has it."""
    names = ("length", "windows", "tokens", "loss", "standard_error", "perplexity", "last_quarter")
    return {
        "lengths": [
            {name: getattr(one, name) for name in names}
            | {"beyond_context": one.length > config.max_seq_len, "by_context": [bucket._asdict() for bucket in one.buckets]}
            for one in found
        ]
    }


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


def page_of_lengths(found: Sequence[LengthLoss], facts: dict[str, Any]) -> str:
    """A line for each length, then the loss by how much context there was, a column for each length."""
    # Through a window no distance is longer than it, however long the text.
    context = facts["context"] if facts["window"] is None else math.inf
    rows = [["window", "predicted", "loss", "", "perplexity", "last quarter", ""]]
    for one in found:
        error = "" if math.isnan(one.standard_error) else f"± {one.standard_error:.2g}"
        beyond = f"beyond the context of {context:,}" if one.length > context else ""
        cells = f"{one.length:,}", f"{one.tokens:,}", f"{one.loss:.4f}", error, f"{one.perplexity:.5g}"
        rows.append([*cells, f"{one.last_quarter:.4f}", beyond])
    tables = [columns(rows, right=(0, 1, 2, 4, 5))]
    # Where lengths are no powers of two their last buckets are cut short, and lie in the row of the whole one.
    whole = [(bucket.first, 1 << (bucket.last - 1).bit_length()) for bucket in found[-1].buckets]
    losses = [{bucket.first: f"{bucket.loss:.4f}" for bucket in one.buckets} for one in found]
    rows = [["tokens of context", *(f"{one.length:,}" for one in found), ""]]
    for first, last in whole:
        place = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        rows.append([place, *(loss.get(first, "") for loss in losses), "beyond" if first > context else ""])
    tables.append(columns(rows, right=range(1, len(found) + 1)))
    note = "Loss in nats per token; the last quarter of each window is what has the most context."
    if facts["unknown_tokens"]:
        note += f" {facts['unknown_tokens']:,} tokens of the text are <unk>."
    about = printable(facts["model"]) + (f", rope {printable(facts['rope'])}" if facts["rope"] else "")
    if facts["cache"] != "auto":
        about += f", cache {facts['cache']}"
    if facts["window"] is not None:
        about += f", each token sees {facts['window']:,} back" + (f" and {facts['sinks']} sinks" if facts["sinks"] else "")
    return "\n\n".join([about, *tables, note])
