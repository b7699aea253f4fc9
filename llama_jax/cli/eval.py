"""``llama-jax eval``: how well a model predicts texts, the assistant's messages in chats, or preferred answers."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

import llama_jax
from llama_jax.cli.options import (
    DocumentOptions,
    ExactOption,
    ModelPath,
    SingleAdapterOption,
    TemplateArgOption,
    WeightOptions,
    stored_tokenizer,
    unless_auto,
    with_rope,
)
from llama_jax.cli.terminal import as_json, clean_exit, columns, printable
from llama_jax.config import LlamaConfig
from llama_jax.errors import UserError, short_repr
from llama_jax.runs.log import progress_bar
from llama_jax.settings import at_least
from llama_jax.storage import Location
from llama_jax.tokenizers import Format, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from llama_jax.data import Corpus
    from llama_jax.data.chat_tokens import ExampleCounts
    from llama_jax.evaluation.perplexity import PreferenceAccuracy

Measure = Callable[["llama_jax.LlamaParams", "llama_jax.LlamaParams | None"], "Measurement"]
CHATS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"})


class Measurement(NamedTuple):
    """A measurement: the numbers that must be finite, the facts for JSON, the tokens that were read, and the page."""

    finite: dict[str, float]
    facts: dict[str, Any]
    tokens: int
    page: Callable[[dict[str, Any]], str]


@dataclass(frozen=True, kw_only=True)
class Eval(ExactOption, SingleAdapterOption, DocumentOptions, WeightOptions, TemplateArgOption):
    """Print loss, perplexity and bits per byte of a model on texts; bits per byte compare across tokenizers.

    With --against: the divergence of its predictions from those of another model with the same vocabulary. For the cost of
    quantization, use --quantize and --against PATH.

    For chats: the same for the assistant's messages. For preferences: how often the chosen answer is the more
    probable one. With --against or --adapter, this is relative to a reference: that model, or PATH without the adapter.
    """

    SHOWN_FIRST = ("path", "data")

    path: tyro.conf.Positional[ModelPath]
    """Folder or file of a model, in any supported format."""
    data: Annotated[tuple[ModelPath, ...], tyro.conf.UseAppendAction]
    """Files, or folders of them: text, .jsonl, .json (all also .gz and .zst), .parquet, .arrow, or token ids in .bin,
    .array_record or .corpus, which `data build` makes. Pass several after one --data, or repeat it. Tokenized once, then
    cached."""
    max_documents: Annotated[int, at_least(1)] | None = None
    """Number of documents to use, from the first. The default is all."""
    token_type: Literal["auto", "uint16", "uint32"] = "auto"
    """Type of the ids in .bin and .array_record. auto is uint16 if the vocabulary fits."""
    json: bool = False
    """Print a JSON object; NaN and infinity become null."""
    data_type: Literal["auto", "text", "chats", "preferences"] = "auto"
    """Kind of the data. auto looks at the first line or row of a .jsonl, .json, .parquet or .arrow, which is text if it has
    --field."""
    format: Format = "auto"
    """For chats and preferences: the chat format. auto takes the model's own template, or llama3 for the vocabulary of Llama
    3."""
    too_long: Literal["cut", "drop"] = "cut"
    """For chats and preferences: how to treat examples longer than --length tokens."""
    template_time: str | None = None
    """For chats and preferences: the time that a chat template writes, for example 2026-07-31; chats.template_time in the
    recipe.json of a run. The default is the current time."""
    against: ModelPath | None = None
    """A reference model: print divergence, ratio of perplexities, and how often the most probable token agrees. It may be
    PATH itself; --quantize and --rope apply to PATH only, --dtype to both. Both models are in memory."""
    length: int | None = None
    """Size of the sliding window in tokens. The default is the model's context, but at most 4096."""
    stride: int | None = None
    """Tokens between windows. The default is half a window. A larger stride is faster and gives tokens less context."""
    batch: int | None = None
    """Rows of a batch. The default is 1 on a CPU, whose caches hold no more, and 8 elsewhere."""

    def run(self) -> None:
        import jax

        from llama_jax.cli.jax_setup import CompileClock, loading_bar
        from llama_jax.formats.loading import load, open_checkpoint
        from llama_jax.formats.quantize_on_load import describe_quantized_types
        from llama_jax.model.checks import check_parts
        from llama_jax.model.trees import bytes_in_memory, kinds_in_memory
        from llama_jax.ops.attention import record_backends

        if self.exact and self.against is not None:
            raise UserError("exact is only for a single model; omit it or --against")
        self.start_jax()
        compiling = CompileClock()
        # Quick checks come first: no mistake should be found after minutes of loading.
        config, tokenizer = self._open()
        data_type = detect_data_type(self.data, self.field) if self.data_type == "auto" else self.data_type
        self._check_options(data_type)
        reference = None if self.against is None else self._reference_config(self.against, config, tokenizer)
        config, *references = self.with_parts(config, *([] if reference is None else [reference]))
        reference = references[0] if references else None
        for model_config in (config, *references):
            check_parts(model_config, self.compute())
        shorter = min([config, reference or config], key=lambda model_config: model_config.max_seq_len)
        if data_type == "preferences":
            settings, measure = self._preferences(config, tokenizer, reference, shorter.max_seq_len)
        else:
            corpus, settings = self._corpus(config, tokenizer, data_type)
            sizes, measure = self._by_window(config, reference, shorter, corpus)
            settings |= {**sizes, "unknown_tokens": _unknown(tokenizer, corpus)}
        dtype = unless_auto(self.dtype)
        other: llama_jax.LlamaParams | None = None
        params = load(
            self.path,
            dtype,
            quantize=unless_auto(self.quantize),
            tokenizer=self.tokenizer,
            adapter=self.adapter,
            progress=loading_bar,
        ).params
        if self.against is not None:  # as floats, where it is quantized
            floats = (
                "float32" if dtype is None and describe_quantized_types(open_checkpoint(self.against).tensors) else dtype
            )
            other = load(self.against, floats, progress=loading_bar).params

        started, compiled = time.perf_counter(), compiling.seconds
        with record_backends() as attention:
            result = measure(params, other)
        seconds = time.perf_counter() - started - (compiling.seconds - compiled)
        for name, value in result.finite.items():
            if not math.isfinite(value):
                remedy = "is the model whole?" if self.dtype == "float32" else "try --dtype float32"
                raise UserError(f"the {name} is {value}: the model's outputs are not finite; {remedy}")
        facts = {
            "model": str(self.path),
            "adapter": None if self.adapter is None else str(self.adapter),
            "data": list(map(str, self.data)),
            "rope": self.rope or None,
            "context": config.max_seq_len,
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "dtype": str(params.embedding.dtype),
            "weights": kinds_in_memory(params),
            "weight_bytes": bytes_in_memory(params),
            "seconds": round(seconds, 3),
            "compile_seconds": round(compiling.seconds, 3),
            "tokens_per_second": round(result.tokens / seconds, 1) if seconds > 0 else 0.0,
            **result.facts,
            **settings,
            "attention": " and ".join(attention),
            "data_type": data_type,
        }
        if self.json:
            print(as_json(facts))
            return
        print(result.page(facts))
        attention_text = f" · attention {facts['attention']}" if attention else ""
        print(
            f"{facts['backend']} ({facts['device']}) · {facts['dtype']} · weights {facts['weights']},"
            f" {facts['weight_bytes'] / 1e6:,.1f} MB{attention_text} · compile {facts['compile_seconds']:.2f} s"
            f" · {seconds:.2f} s, {facts['tokens_per_second']:,.1f} tokens/s",
            file=sys.stderr,
        )

    def _open(self) -> tuple[LlamaConfig, Tokenizer]:
        """The model without its weights, with the rope scaling of the options, and its vocabulary.

        Raises:
          UserError: no vocabulary.
        """
        from llama_jax.formats.adapters import with_adapter_parts
        from llama_jax.formats.loading import open_checkpoint

        opened = open_checkpoint(self.path)
        config = with_adapter_parts(opened.config, () if self.adapter is None else [self.adapter])
        config = with_rope(config, self.rope)
        return config, stored_tokenizer(self.path, opened) if self.tokenizer is None else load_tokenizer(self.tokenizer)

    def _corpus(self, config: LlamaConfig, tokenizer: Tokenizer, data_type: str) -> tuple[Corpus, dict[str, Any]]:
        """Texts; or conversations whose targets are the assistant's messages, with the counts of examples."""
        import numpy as np

        from llama_jax.data import open_corpus
        from llama_jax.data.chat_tokens import ChatReading, open_chats
        from llama_jax.data.corpus import check_corpus_rows

        settings: dict[str, Any] = {}
        if data_type == "text":
            reading = self.document_format(unless_auto(self.token_type))
            with clean_exit("stopped"):
                corpus = open_corpus(self.data, tokenizer, reading=reading, progress=progress_bar("tokenizing", "MB"))
        else:
            chats = ChatReading(self.format, self.too_long, False, self.template_time, self.template_arg)
            corpus, counts = open_chats(self.data, tokenizer, self._length(config), chats)
            settings["examples"] = asdict(counts)
        if self.max_documents is not None:
            corpus = corpus.select(np.arange(corpus.document_count)[: self.max_documents])
        check_corpus_rows(corpus, config.vocab_size, tokenizer)
        return corpus, settings

    def _length(self, config: LlamaConfig) -> int:
        """Predicted tokens of a row of whole examples."""
        from llama_jax.evaluation.measure import MAX_DEFAULT_WINDOW

        return min(config.default_context, MAX_DEFAULT_WINDOW) if self.length is None else self.length

    def _by_window(
        self, config: LlamaConfig, reference: LlamaConfig | None, shorter: LlamaConfig, corpus: Corpus
    ) -> tuple[dict[str, Any], Measure]:
        """Through a sliding window, alone or against a reference."""
        from llama_jax.evaluation.measure import choose_sizes
        from llama_jax.evaluation.perplexity import evaluate, kl_to_reference
        from llama_jax.model.trees import bytes_in_memory, kinds_in_memory

        sizes = choose_sizes(shorter, corpus, length=self.length, stride=self.stride, batch=self.batch)._asdict()
        options: dict[str, Any] = {**sizes, "compute": self.compute(), "progress": progress_bar("evaluating", "batches")}

        def measure(params: llama_jax.LlamaParams, other: llama_jax.LlamaParams | None) -> Measurement:
            if reference is None or other is None:
                alone = evaluate(config, params, corpus, **options)
                return Measurement({"loss": alone.loss}, asdict(alone), alone.tokens, partial(evaluation_page, alone))
            comparison = kl_to_reference(config, params, other, corpus, reference_config=reference, **options)
            between = {name: value for name, value in asdict(comparison).items() if name not in ("model", "reference")}
            weight_facts = {"weights": kinds_in_memory(other), "weight_bytes": bytes_in_memory(other)}
            against = {"model": str(self.against), **weight_facts, **asdict(comparison.reference), **between}
            finite = {
                "loss": comparison.model.loss,
                "reference's loss": comparison.reference.loss,
                "divergence": comparison.kl,
            }
            return Measurement(
                finite,
                asdict(comparison.model) | {"against": against},
                comparison.model.tokens,
                partial(evaluation_page, comparison),
            )

        return sizes, measure

    def _preferences(
        self, config: LlamaConfig, tokenizer: Tokenizer, reference: LlamaConfig | None, context: int
    ) -> tuple[dict[str, Any], Measure]:
        """Accuracy and margin on pairs."""
        import numpy as np

        from llama_jax.data.chat_tokens import ChatReading, open_preferences
        from llama_jax.data.preference_batches import Pairs
        from llama_jax.evaluation.measure import check_batch, default_batch
        from llama_jax.evaluation.perplexity import pair_logprobs, preference_accuracy
        from llama_jax.model.lora import base_of

        length, batch = self._length(config), self.batch or default_batch()
        if not 1 <= length <= context:
            raise UserError(f"length={length} must be at least 1 and within the context of {context}")
        check_batch(batch, length)
        reading = ChatReading(self.format, self.too_long, False, self.template_time, self.template_arg)
        chosen, rejected, counts = open_preferences(self.data, tokenizer, length, reading)
        pairs = Pairs(chosen, rejected)
        pairs = pairs.select(np.arange(pairs.count)[: self.max_documents])
        pairs.check_rows(config.vocab_size, tokenizer)
        bar = progress_bar("evaluating", "batches")
        score = partial(pair_logprobs, pairs=pairs, length=length, batch=batch, compute=self.compute(), progress=bar)

        def measure(params: llama_jax.LlamaParams, other: llama_jax.LlamaParams | None) -> Measurement:
            scores, theirs, name = score(config, params), None, None
            if reference is not None and other is not None:
                name, theirs = str(self.against), score(reference, other)
            elif self.adapter is not None:
                name, theirs = f"{self.path} without the adapter", score(config, base_of(params))
            accuracy = preference_accuracy(scores, theirs)
            page = partial(preference_page, accuracy, counts=counts)
            return Measurement({"margin": accuracy.margin}, asdict(accuracy) | {"against": name}, accuracy.tokens, page)

        return {"examples": asdict(counts), "length": length, "batch": batch}, measure

    def _check_options(self, data_type: str) -> None:
        """Raise UserError for options that do not apply to this kind of data."""
        texts = ("format", "too_long", "template_time", "template_arg")
        unread = texts if data_type == "text" else ("separator", "longest", "token_type", "stride")
        for name in unread:
            value = getattr(self, name)
            if value != getattr(type(self), name):
                raise UserError(
                    f"{name}={short_repr(value, 40)} does not apply to {data_type}, the kind of these data; omit it"
                )

    def _reference_config(self, path: ModelPath, config: LlamaConfig, tokenizer: Tokenizer) -> LlamaConfig:
        """The configuration of the model at a path; UserError where its vocabulary is another."""
        from llama_jax.formats.loading import open_checkpoint
        from llama_jax.verify.activations import SAMPLE_TEXT

        opened = open_checkpoint(path)
        size = opened.config.vocab_size
        theirs = opened.tokenizer() if size == config.vocab_size else None
        is_same = theirs is None or theirs.encode(SAMPLE_TEXT, bos=False) == tokenizer.encode(SAMPLE_TEXT, bos=False)
        if size != config.vocab_size or not is_same:
            raise UserError(
                f"against={path} has another vocabulary than the model ({size} and {config.vocab_size} tokens): their"
                " predictions cannot be compared; choose a model with the same vocabulary"
            )
        return opened.config


def _unknown(tokenizer: Tokenizer, corpus: Corpus) -> int:
    """Tokens that stand for characters that the vocabulary does not have."""
    unknown = tokenizer.special_tokens.get("<unk>")
    if unknown is None:
        return 0
    return sum(int((corpus.document(number) == unknown).sum()) for number in range(corpus.document_count))


def _plus_minus(error: float) -> str:
    """A standard error as text; empty for NaN."""
    return "" if math.isnan(error) else f" ± {error:.2g}"


def evaluation_page(result: llama_jax.Evaluation | llama_jax.Divergence, facts: dict[str, Any]) -> str:
    """The three numbers, the data they are about, and their distance from a reference's."""
    compared = result if isinstance(result, llama_jax.Divergence) else None
    evaluation = result.model if isinstance(result, llama_jax.Divergence) else result
    bits = "none, as the text has no bytes" if math.isnan(evaluation.bits_per_byte) else f"{evaluation.bits_per_byte:.4f}"
    rows = [
        ["loss", f"{evaluation.loss:.4f}{_plus_minus(evaluation.standard_error)} nats per token"],
        ["perplexity", f"{evaluation.perplexity:.5g}"],
        ["bits per byte", bits],
        *([] if compared is None else _rows_of_comparison(compared)),
        ["read", f"{evaluation.tokens:,} tokens, {evaluation.bytes:,} bytes, {evaluation.documents:,} documents"],
        ["window", f"{facts['length']:,} tokens, stride {facts['stride']:,}"],
    ]
    if "examples" in facts:
        rows.append(["chats", "{kept:,} of {read:,} examples, {cut:,} of them cut".format(**facts["examples"])])
    if facts["unknown_tokens"]:
        share = f"{facts['unknown_tokens'] / evaluation.tokens:.2%}"
        rows.append(["unknown", f"{share} of the tokens are <unk>, so their text itself is not predicted"])
    heading = _model_of(facts)
    if compared is not None:
        heading += f" ({facts['weights']}) against {printable(facts['against']['model'])} ({facts['against']['weights']})"
    return f"{heading}\n\n{columns(rows)}"


def _model_of(facts: dict[str, Any]) -> str:
    """The model and its adapter, as the title of a page."""
    return printable(facts["model"]) + (f" with adapter {printable(facts['adapter'])}" if facts["adapter"] else "")


def _rows_of_comparison(comparison: llama_jax.Divergence) -> list[list[str]]:
    """The distance of a model from a reference."""
    difference = f"{comparison.loss_difference:+.4f}{_plus_minus(comparison.loss_difference_error)}"
    spread = (
        f"half of the tokens at most {comparison.kl_median:.1e}, 99 in 100 {comparison.kl_99:.1e},"
        f" largest {comparison.kl_max:.2g}"
    )
    return [
        ["reference", f"loss {comparison.reference.loss:.4f}, perplexity {comparison.reference.perplexity:.5g}"],
        ["difference", f"{difference} nats per token, perplexity times {comparison.perplexity_ratio:.5f}"],
        ["divergence", f"KL {comparison.kl:.2e}{_plus_minus(comparison.kl_error)} nats per token; {spread}"],
        ["top token", f"the same at {comparison.same_top:.2%} of the tokens"],
    ]


def detect_data_type(data: Sequence[Location], field: str) -> Literal["text", "chats", "preferences"]:
    """The kind of the first record: text if it has `field`, or if no file has records."""
    from llama_jax.data.data_files import find_files
    from llama_jax.data.documents import first_fields

    first = first_fields(find_files(data))
    if field in first:
        return "text"
    if {"chosen", "rejected"} <= first:
        return "preferences"
    return "chats" if any(fields <= first for fields in CHATS) else "text"


def preference_page(accuracy: PreferenceAccuracy, facts: dict[str, Any], counts: ExampleCounts) -> str:
    """How often the chosen answer is preferred, and by how much."""
    against = "" if facts["against"] is None else f" against {printable(facts['against'])}"
    rows = [
        ["accuracy", f"{accuracy.accuracy:.2%} ± {accuracy.accuracy_error:.1%} of {accuracy.pairs:,} pairs"],
        ["margin", f"{accuracy.margin:.4f}{_plus_minus(accuracy.margin_error)} nats"],
        ["per token", f"accuracy {accuracy.accuracy_per_token:.2%}"],
        ["log-probability", f"chosen {accuracy.chosen_logprob:.3f}, rejected {accuracy.rejected_logprob:.3f}"],
        ["read", f"{accuracy.tokens:,} tokens of answers; {counts}"],
    ]
    return f"{_model_of(facts)}{against}\n\n{columns(rows)}"
