"""The options of ``llama-jax eval`` that say what is measured: the text, its vocabulary, and the model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import tyro

from llama_jax.cli.interrupts import ending_in_order
from llama_jax.cli.options import DocumentOptions, ModelPath, SingleAdapterOption, WeightOptions, unless_auto, with_rope
from llama_jax.cli.output_format import as_json
from llama_jax.errors import UserError, shown
from llama_jax.progress import progress_bar
from llama_jax.settings import at_least

if TYPE_CHECKING:
    from llama_jax.cli.jax_setup import CompileClock
    from llama_jax.config import LlamaConfig
    from llama_jax.data import Corpus
    from llama_jax.formats.orbax_format import OrbaxCheckpoint
    from llama_jax.formats.weight_format import Opened
    from llama_jax.model.params import Llama
    from llama_jax.storage import Location
    from llama_jax.tokenizers import Tokenizer

Number = TypeVar("Number", int, float)


class Subject(NamedTuple):
    """The model to be measured, before its weights are loaded, and a clock of compilation."""

    path: Location
    config: LlamaConfig
    tokenizer: Tokenizer
    compiling: CompileClock

    def stopwatch(self) -> Callable[[], float]:
        """A function that returns the seconds from now on, without those of compiling."""
        started, compiled = time.perf_counter(), self.compiling.seconds
        return lambda: time.perf_counter() - started - (self.compiling.seconds - compiled)


def stored_tokenizer(path: Location, opened: Opened | OrbaxCheckpoint) -> Tokenizer:
    """The vocabulary that is stored with a model; UserError if there is none."""
    tokenizer = opened.tokenizer()
    if tokenizer is None:
        raise UserError(f"no vocabulary is stored with {path}; pass one with --tokenizer")
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class TextOptions(SingleAdapterOption, DocumentOptions, WeightOptions):
    data: Annotated[tuple[ModelPath, ...], tyro.conf.UseAppendAction]
    """Files, or folders of them: text, .jsonl (both also .gz and .zst), .parquet, .arrow, or token ids in .bin,
    .array_record or .corpus, which `data build` makes; several after one --data, or one after each. Tokenized once, then
    cached."""
    max_documents: Annotated[int, at_least(1)] | None = None
    """Use only this many documents, the first ones."""
    token_type: Literal["auto", "uint16", "uint32"] = "auto"
    """Type of the ids in .bin and .array_record; auto is uint16 where that holds the vocabulary."""
    json: bool = False
    """Print one JSON object; what is not a number is null."""

    def vocabulary(self, path: Location, opened: Opened | OrbaxCheckpoint) -> Tokenizer:
        """The tokenizer of --tokenizer or else the model's; UserError for none, and for one of another model."""
        from llama_jax.tokenizers import load_tokenizer

        tokenizer = stored_tokenizer(path, opened) if self.tokenizer is None else load_tokenizer(self.tokenizer)
        if tokenizer.vocab_size > opened.config.vocab_size:
            raise UserError(
                f"{self.tokenizer or path} has a vocabulary of {tokenizer.vocab_size}, the model one of"
                f" {opened.config.vocab_size}; pass the model's own with --tokenizer"
            )
        return tokenizer

    def corpus(self, tokenizer: Tokenizer, lengths: tuple[int, ...] = ()) -> Corpus:
        """The files as documents of tokens, long enough for rows of these lengths where the text is."""
        import numpy as np

        from llama_jax.data import open_corpus

        reading = self.document_format(lengths, unless_auto(self.token_type))
        bar = progress_bar("tokenizing", "MB")
        with ending_in_order("stopped"):
            corpus = open_corpus(self.data, tokenizer, reading=reading, progress=bar)
        if self.max_documents is None:
            return corpus
        return corpus.select(np.arange(min(self.max_documents, corpus.document_count)))

    def open(self, path: Location) -> Subject:
        """The model at a path without its weights, with the rope scaling and vocabulary of the options."""
        from llama_jax.cli.jax_setup import CompileClock, start_backend, use_compilation_cache
        from llama_jax.formats.adapters import with_attend
        from llama_jax.formats.loading import open_checkpoint
        from llama_jax.model.checks import check_attend
        from llama_jax.model.forward_options import Compute

        use_compilation_cache(self.no_cache)
        compiling = CompileClock()
        start_backend()
        opened = open_checkpoint(path)
        config = with_attend(opened.config, () if self.adapter is None else [self.adapter])
        check_attend(config, Compute())
        return Subject(path, with_rope(config, self.rope), self.vocabulary(path, opened), compiling)

    def load(self, subject: Subject) -> Llama:
        """The weights."""
        from llama_jax.cli.jax_setup import loading_bar
        from llama_jax.formats.loading import load

        return load(
            subject.path,
            unless_auto(self.dtype),
            quantize=unless_auto(self.quantize),
            tokenizer=self.tokenizer,
            adapter=self.adapter,
            progress=loading_bar,
        ).params

    def load_dense(self, path: Location) -> Llama:
        """The weights at another path in the same type, as floats: in float32 where they are quantized."""
        from llama_jax.cli.jax_setup import loading_bar
        from llama_jax.formats.loading import load, open_checkpoint
        from llama_jax.formats.quantize_on_load import quantized_kinds

        dtype = unless_auto(self.dtype)
        if dtype is None and quantized_kinds(open_checkpoint(path).tensors):
            dtype = "float32"
        return load(path, dtype, progress=loading_bar).params

    def facts(self, subject: Subject, params: Llama, tokens: int, seconds: float) -> dict[str, Any]:
        """Facts about the measurement: the model, the device, and the speed of reading `tokens`."""
        import jax

        from llama_jax.model.trees import bytes_in_memory, kinds_in_memory

        return {
            "model": str(subject.path),
            "adapter": None if self.adapter is None else str(self.adapter),
            "data": list(map(str, self.data)),
            "rope": self.rope or None,
            "context": subject.config.max_seq_len,
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "dtype": str(params.embedding.dtype),
            "weights": kinds_in_memory(params),
            "weight_bytes": bytes_in_memory(params),
            "seconds": round(seconds, 3),
            "compile_seconds": round(subject.compiling.seconds, 3),
            "tokens_per_second": round(tokens / seconds, 1) if seconds > 0 else 0.0,
        }

    def show(self, facts: dict[str, Any], page: str) -> None:
        """Print the facts as JSON; or the page, and on stderr the device and the speed."""
        if self.json:
            print(as_json(facts))
        else:
            print(page)
            print(statistics(facts), file=sys.stderr)

    def not_finite(self, what: str, value: float) -> UserError:
        """The error for an output of the model that is not finite."""
        remedy = "is the model whole?" if self.dtype == "float32" else "try --dtype float32"
        return UserError(f"the {what} is {value}: the model's outputs are not finite; {remedy}")


def numbers(name: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """The numbers of a list like 256,512,1024; UserError that names a part that is not a number."""
    found = []
    for part in text.split(","):
        try:
            found.append(kind(part))
        except ValueError:
            raise UserError(
                f"{name}={shown(text)} has {shown(part, 20)} where a number is needed, as in 256,512,1024"
            ) from None
    return tuple(found)


def statistics(facts: dict[str, Any]) -> str:
    """The device and the speed, for stderr."""
    attention = f" · attention {facts['attention']}" if facts.get("attention") else ""
    return (
        f"{facts['backend']} ({facts['device']}) · {facts['dtype']} · weights {facts['weights']},"
        f" {facts['weight_bytes'] / 1e6:,.1f} MB{attention} · compile {facts['compile_seconds']:.2f} s"
        f" · {facts['seconds']:.2f} s, {facts['tokens_per_second']:,.1f} tokens/s"
    )
