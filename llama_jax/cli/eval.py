"""``llama-jax eval``: how well a model predicts texts, the assistant's messages in chats, or preferred answers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from llama_jax.cli.options import ATTENTION, RememberOptions
from llama_jax.cli.page import columns, printable
from llama_jax.cli.paths import ModelPath
from llama_jax.cli.plot import check_picture, save_picture
from llama_jax.cli.reading import Subject, TextOptions, numbers
from llama_jax.cli.rope import say_beyond
from llama_jax.errors import UserError, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_jax.config import LlamaConfig
    from llama_jax.data import Corpus
    from llama_jax.model.params import Llama
    from llama_jax.runs.divergence import Divergence
    from llama_jax.runs.evaluate import Evaluation
    from llama_jax.runs.lengths import LengthLoss
    from llama_jax.tokenizers import Tokenizer


@dataclass(frozen=True)
class Eval(TextOptions, RememberOptions):
    """Print loss, perplexity and bits per byte of a model on texts; bits per byte compare across tokenizers.

    With --against: how far its predictions are from those of another model of the same vocabulary; with --quantize and
    --against PATH itself, what quantising costs.

    For chats in .jsonl: the same of the assistant's messages. For preferences: how often the chosen answer is the more
    probable one, relative to a reference if --against or --adapter gives one (with --adapter PATH without it).

    With --lengths: the loss of the same text in windows of each length, and by position in them; then --cache, --window and
    --sinks say how the model remembers what it has read.
    """

    SHOWN_FIRST = ("path", "data")

    path: tyro.conf.Positional[ModelPath]
    """A model's folder or file, of any format that is read."""
    kind: Literal["auto", "text", "chats", "preferences"] = "auto"
    """What the data are; auto looks at the first line of a .jsonl, which is text where it has --field."""
    format: Literal["auto", "llama2", "llama3", "zephyr", "template", "plain"] = "auto"
    """Of chats and preferences: the chat format; auto is the model's own template, or Llama 3's for its vocabulary."""
    too_long: Literal["cut", "drop"] = "cut"
    """Of chats and preferences: what is done with an example of more than --length tokens."""
    against: ModelPath | None = None
    """A reference: divergence, ratio of perplexities, and how often the most probable token is the same. It may be PATH;
    --quantize and --rope are for PATH alone, --dtype is for both. Both are in memory at once."""
    length: int | None = None
    """Tokens of the sliding window; by default the model's context, at most 4096."""
    stride: int | None = None
    """Tokens from one window to the next; by default half of it. A larger stride is faster and gives tokens less context."""
    batch: int | None = None
    """Rows of a batch; by default 1 on a CPU, where more would not fit its caches, and 8 elsewhere, or with --lengths as
    many as make up 32,768 tokens."""
    attention: ATTENTION = "auto"
    """The implementation of attention; auto takes the device's kernel where it can, and the output names it."""
    lengths: Annotated[str, tyro.conf.arg(metavar="N,N,...")] = ""
    """Several windows without overlap, as in 256,512,1024: does context help, and how far?
    They may go beyond the model's context."""
    max_tokens: int | None = None
    """With --lengths: most tokens to predict at each, in windows spread evenly over the text; by default all of it."""
    plot: Path | None = None
    """With --lengths: draw the loss by position, a curve for each, as .png, .pdf or .svg. Needs the extra 'plot'."""

    def run(self) -> None:
        lengths = self._check()
        from llama_jax.cli.eval_answers import ExampleOptions, kind_of_lines
        from llama_jax.ops.attention import observed

        # Quick checks come first: no mistake should be found after minutes of loading.
        subject = self.open(self.path)
        config = subject.config
        kind = kind_of_lines(self.data, self.field) if self.kind == "auto" else self.kind
        self._check_kind(kind)
        if kind == "preferences":
            return self._preferences(subject)
        counts = None
        if kind == "chats":
            corpus, counts = ExampleOptions(self.format, self.too_long, self.max_documents).chats(
                self.data, subject.tokenizer, self._length(config)
            )
        else:
            corpus = self.corpus(subject.tokenizer, lengths)
        reference = None if self.against is None else self._reference_config(self.against, subject)
        shorter = min([config] if reference is None else [config, reference], key=lambda one: one.max_seq_len)
        sizes = self._sizes(shorter, corpus, lengths)
        params = self.load(subject)
        other = None if self.against is None else self.load_dense(self.against)

        seconds = subject.stopwatch()
        found: Evaluation | tuple[LengthLoss, ...]
        compared = None
        with observed() as attention:
            if lengths:
                found = self._by_length(config, params, corpus, lengths)
            elif reference is not None and other is not None:
                compared = self._compared((config, params), (reference, other), corpus, sizes)
                found = compared.model
            else:
                found = self._by_window(config, params, corpus, sizes)
        tokens = sum(one.tokens for one in found) if isinstance(found, tuple) else found.tokens
        facts = {
            **self.facts(subject, params, tokens, seconds()),
            **(_of_lengths(found, config) if isinstance(found, tuple) else asdict(found)),
            **({} if compared is None else {"against": self._of_comparison(compared, other)}),
            **sizes,
            "unknown_tokens": _unknown(subject.tokenizer, corpus),
            "attention": " and ".join(attention),
            "kind": kind,
            **({} if counts is None else {"examples": asdict(counts)}),
        }
        self.show(facts, page_of_lengths(found, facts) if isinstance(found, tuple) else as_page(found, facts, compared))
        if self.plot is not None and isinstance(found, tuple):
            from llama_jax.runs.plot import draw_lengths

            # Last, so that the results are not lost if the picture cannot be written.
            name = f"{self.path} {self.rope}".strip()
            save_picture(draw_lengths(found, context=config.max_seq_len, title=name), self.plot)

    def _check_kind(self, kind: str) -> None:
        """Raise UserError for options that do not apply to this kind of data."""
        texts = ("lengths", "separator", "longest", "token_type")
        answers = ("format", "too_long")
        unread = answers if kind == "text" else (*texts, "stride")
        for name in unread:
            value = getattr(self, name)
            if value != getattr(type(self), name):
                raise UserError(f"{name}={shown(value, 40)} does not apply to {kind}, as these data are; leave it out")

    def _length(self, config: LlamaConfig) -> int:
        """Predicted tokens of a row of whole examples."""
        from llama_jax.runs.evaluate import LONGEST

        return min(config.max_seq_len, LONGEST) if self.length is None else self.length

    def _preferences(self, subject: Subject) -> None:
        """Accuracy and margin on pairs."""
        from tqdm import tqdm

        from llama_jax.cli.eval_answers import ExampleOptions, page_of_preferences
        from llama_jax.model.adapters import base_of
        from llama_jax.model.options import Compute
        from llama_jax.runs.evaluate import check_batch
        from llama_jax.runs.preferring import log_answers, prefer

        config, length, batch = subject.config, self._length(subject.config), self.batch or 1
        against = None if self.against is None else self._reference_config(self.against, subject)
        shortest = min([config] if against is None else [config, against], key=lambda one: one.max_seq_len).max_seq_len
        if not 1 <= length <= shortest:
            raise UserError(f"length={length} must be at least 1 and within the context of {shortest}")
        check_batch(batch, length)
        reading = ExampleOptions(self.format, self.too_long, self.max_documents)
        pairs, counts = reading.preferences(self.data, subject.tokenizer, length)
        params = self.load(subject)
        seconds = subject.stopwatch()
        bar = partial(tqdm, desc="evaluating", unit=" batches", leave=False, disable=None)
        measure = partial(
            log_answers, pairs=pairs, length=length, batch=batch, compute=Compute(attention=self.attention), progress=bar
        )
        own, reference, name = measure(config, params), None, None
        if self.against is not None and against is not None:
            name, reference = str(self.against), measure(against, self.load_dense(self.against))
        elif self.adapter is not None:
            name, reference = f"{self.path} without the adapter", measure(config, base_of(params))
        found = prefer(own, reference)
        if not math.isfinite(found.margin):
            raise self.not_finite("margin", found.margin)
        facts = {
            **self.facts(subject, params, found.tokens, seconds()),
            **asdict(found),
            "kind": "preferences",
            "against": name,
            "examples": asdict(counts),
            "length": length,
            "batch": batch,
        }
        self.show(facts, page_of_preferences(found, facts, counts))

    def _check(self) -> tuple[int, ...]:
        """The lengths, or none; UserError for options that do not go together."""
        self.check()
        self.cache_options()
        cache = None if self.cache == "auto" else self.cache
        alone = {"max_tokens": self.max_tokens, "plot": self.plot, "cache": cache, "window": self.window}
        for name, value in alone.items():
            if value is not None and not self.lengths:
                raise UserError(f"{name}={value} goes with --lengths alone")
        for name, given in (("length", self.length), ("stride", self.stride), ("against", self.against)):
            if given is not None and self.lengths:
                raise UserError(
                    f"{name}={given} and lengths={shown(self.lengths)} exclude each other; leave one of them out"
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

    def _reference_config(self, path: ModelPath, subject: Subject) -> LlamaConfig:
        """The configuration of the model at a path; UserError where its vocabulary is another."""
        from llama_jax.formats.loading import open_checkpoint
        from llama_jax.verify.soundness import TEXT

        opened = open_checkpoint(path)
        sizes = opened.config.vocab_size, subject.config.vocab_size
        if sizes[0] != sizes[1]:
            raise UserError(
                f"against={path} has a vocabulary of {sizes[0]}, the model one of {sizes[1]}: their predictions cannot be"
                " compared; give a model of the same vocabulary"
            )
        theirs = opened.tokenizer()
        if theirs is not None and theirs.encode(TEXT, bos=False) != subject.tokenizer.encode(TEXT, bos=False):
            raise UserError(
                f"against={path} has another vocabulary than the model: its tokens stand for other text; give a model of the"
                " same vocabulary"
            )
        return opened.config

    def _compared(
        self,
        model: tuple[LlamaConfig, Llama],
        reference: tuple[LlamaConfig, Llama],
        corpus: Corpus,
        sizes: dict[str, Any],
    ) -> Divergence:
        from tqdm import tqdm

        from llama_jax.model.options import Compute
        from llama_jax.runs.divergence import divergence

        bar = partial(tqdm, desc="comparing", unit=" batches", leave=False, disable=None)
        found = divergence(
            *model,
            reference[1],
            corpus,
            reference_config=reference[0],
            compute=Compute(attention=self.attention),
            progress=bar,
            **sizes,
        )
        for name, one in (("loss", found.model), ("reference's loss", found.reference)):
            if not math.isfinite(one.loss):
                raise self.not_finite(name, one.loss)
        if not math.isfinite(found.kl):
            raise self.not_finite("divergence", found.kl)
        return found

    def _of_comparison(self, found: Divergence, reference: Llama | None) -> dict[str, Any]:
        """What was found of the reference, and between both, as JSON has it."""
        from llama_jax.model.trees import bytes_in_memory, kinds_in_memory

        between = {name: value for name, value in asdict(found).items() if name not in ("model", "reference")}
        held = {"weights": kinds_in_memory(reference), "weight_bytes": bytes_in_memory(reference)}
        return {"model": str(self.against), **held, **asdict(found.reference), **between}

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
    """Tokens that stand for characters that the vocabulary does not have."""
    unknown = tokenizer.special_tokens.get("<unk>")
    if unknown is None:
        return 0
    return sum(int((corpus.document(number) == unknown).sum()) for number in range(corpus.document_count))


def _plus_minus(error: float) -> str:
    """A standard error; nothing where there is none."""
    return "" if math.isnan(error) else f" ± {error:.2g}"


def as_page(found: Evaluation, facts: dict[str, Any], compared: Divergence | None = None) -> str:
    """The three numbers, the data they are about, and their distance from a reference's."""
    bits = "none, as the text has no bytes" if math.isnan(found.bits_per_byte) else f"{found.bits_per_byte:.4f}"
    rows = [
        ["loss", f"{found.loss:.4f}{_plus_minus(found.standard_error)} nats per token"],
        ["perplexity", f"{found.perplexity:.5g}"],
        ["bits per byte", bits],
        *([] if compared is None else _rows_of_comparison(compared)),
        ["read", f"{found.tokens:,} tokens, {found.bytes:,} bytes, {found.documents:,} documents"],
        ["window", f"{facts['length']:,} tokens, stride {facts['stride']:,}"],
    ]
    if "examples" in facts:
        rows.append(["chats", "{kept:,} of {read:,} examples, {cut:,} of them cut".format(**facts["examples"])])
    if facts["unknown_tokens"]:
        share = f"{facts['unknown_tokens'] / found.tokens:.2%}"
        rows.append(["unknown", f"{share} of the tokens are <unk>: the text under them is not predicted, only that it is"])
    about = printable(facts["model"])
    if compared is not None:
        about += f" ({facts['weights']}) against {printable(facts['against']['model'])} ({facts['against']['weights']})"
    return f"{about}\n\n{columns(rows)}"


def _rows_of_comparison(found: Divergence) -> list[list[str]]:
    """The distance of a model from a reference."""
    difference = f"{found.loss_difference:+.4f}{_plus_minus(found.loss_difference_error)}"
    spread = f"half of the tokens at most {found.kl_median:.1e}, 99 in 100 {found.kl_99:.1e}, largest {found.kl_max:.2g}"
    return [
        ["reference", f"loss {found.reference.loss:.4f}, perplexity {found.reference.perplexity:.5g}"],
        ["difference", f"{difference} nats per token, perplexity times {found.perplexity_ratio:.5f}"],
        ["divergence", f"KL {found.kl:.2e}{_plus_minus(found.kl_error)} nats per token; {spread}"],
        ["top token", f"the same at {found.same_top:.2%} of the tokens"],
    ]


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
