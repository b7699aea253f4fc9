"""The options of ``llama-jax eval`` that say what is measured: the text, its vocabulary, and the model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import tyro

from llama_jax.cli.options import DTYPES, QUANTIZE, CompileOptions
from llama_jax.cli.page import as_json
from llama_jax.cli.paths import ModelPath
from llama_jax.cli.rope import with_rope
from llama_jax.cli.stopping import ending_in_order
from llama_jax.errors import UserError, shown
from llama_jax.progress import progress_bar

if TYPE_CHECKING:
    from llama_jax.cli.runtime import CompileClock
    from llama_jax.config import LlamaConfig
    from llama_jax.data import Corpus
    from llama_jax.formats.lazy_tensors import Opened
    from llama_jax.formats.orbax_format import OrbaxCheckpoint
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
        raise UserError(f"no vocabulary is stored with {path}; give one with --tokenizer")
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class TextOptions(CompileOptions):
    data: Annotated[tuple[ModelPath, ...], tyro.conf.UseAppendAction]
    """Files, or folders of them: text, .jsonl (both also .gz and .zst), .parquet, .arrow, or token ids in .bin,
    .array_record or .corpus, which `data build` makes; several after one --data, or one after each. Tokenized once, then
    cached."""
    tokenizer: ModelPath | None = None
    """A SentencePiece .model, a rank file of Llama 3, a tokenizer.json or a GGUF; by default the one with the weights."""
    dtype: DTYPES = "auto"
    """Type of weights and arithmetic; auto keeps quantized weights as the file has them, and is for the rest the type of the
    stored embedding. Where that is quantized, float32 on a CPU and bfloat16 on accelerators; where it is float16, float32 on
    a CPU."""
    quantize: QUANTIZE = "auto"
    """Quantize the matrices, to see what it costs, as for generate. keep: those of the files in --dtype."""
    adapter: ModelPath | None = None
    """A LoRA adapter for the model: a folder of PEFT's, or of a run that trains one."""
    rope: Annotated[str, tyro.conf.arg(metavar="KIND:FACTOR")] = ""
    """Another rope scaling, to try without training: KIND:FACTOR and further fields, as in yarn:4,beta_fast=16.
    The context is then FACTOR times as long; none removes the model's own."""
    max_documents: int | None = None
    """Use only this many documents, the first ones."""
    separator: Annotated[str, tyro.conf.arg(metavar="TEXT")] = "<|endoftext|>"
    """What stands between the documents of a text file."""
    longest: int | None = None
    """Characters of the longest document of a text file; a longer one is cut into several.
    By default 131,072, or 64 for each token of the longest of --lengths where that is more."""
    field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """The field or column that holds the text in .jsonl, .parquet and .arrow."""
    token_type: Literal["auto", "uint16", "uint32"] = "auto"
    """Type of the ids in .bin and .array_record; auto is uint16 where that holds the vocabulary."""
    json: bool = False
    """Print one JSON object; what is not a number is null."""

    def vocabulary(self, path: Location, opened: Opened | OrbaxCheckpoint) -> Tokenizer:
        """The model's tokenizer, or the one that was given; UserError where there is none, or one of another model."""
        from llama_jax.tokenizers import load_tokenizer

        tokenizer = stored_tokenizer(path, opened) if self.tokenizer is None else load_tokenizer(self.tokenizer)
        if tokenizer.vocab_size > opened.config.vocab_size:
            raise UserError(
                f"{self.tokenizer or path} has a vocabulary of {tokenizer.vocab_size}, the model one of"
                f" {opened.config.vocab_size}; give the model's own with --tokenizer"
            )
        return tokenizer

    def corpus(self, tokenizer: Tokenizer, lengths: tuple[int, ...] = ()) -> Corpus:
        """The files as documents of tokens, long enough for rows of these lengths where the text is."""
        import numpy as np

        from llama_jax.data import DocumentFormat, open_corpus

        token_type = None if self.token_type == "auto" else self.token_type
        longest = self.longest
        if longest is None:
            longest = max([DocumentFormat.longest, *(64 * length for length in lengths)])
        reading = DocumentFormat(separator=self.separator, longest=longest, field=self.field, token_type=token_type)
        bar = progress_bar("tokenizing", "MB")
        with ending_in_order("stopped"):
            corpus = open_corpus(self.data, tokenizer, reading=reading, progress=bar)
        if self.max_documents is None:
            return corpus
        return corpus.select(np.arange(min(self.max_documents, corpus.document_count)))

    def open(self, path: Location) -> Subject:
        """The model at a path without its weights, with the given rope scaling and vocabulary."""
        from llama_jax.cli.runtime import CompileClock, start_backend, use_compilation_cache
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
        from llama_jax.cli.runtime import loading_bar
        from llama_jax.formats.loading import load

        dtype = None if self.dtype == "auto" else self.dtype
        quantize = None if self.quantize == "auto" else self.quantize
        found = load(
            subject.path, dtype, quantize=quantize, tokenizer=self.tokenizer, adapter=self.adapter, progress=loading_bar
        )
        return found.params

    def load_dense(self, path: Location) -> Llama:
        """The weights at another path in the same type, as floats: in float32 where they are quantized."""
        from llama_jax.cli.runtime import loading_bar
        from llama_jax.formats.loading import load, open_checkpoint
        from llama_jax.formats.quantize_on_load import quantized_kinds

        dtype = None if self.dtype == "auto" else self.dtype
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

    def check(self) -> None:
        """Check the options alone; raises UserError."""
        if self.max_documents is not None and self.max_documents < 1:
            raise UserError(f"max_documents={self.max_documents} must be at least 1")

    def not_finite(self, what: str, value: float) -> UserError:
        """The error for an output of the model that is not finite."""
        remedy = "is the model whole?" if self.dtype == "float32" else "try --dtype float32"
        return UserError(f"the {what} is {value}: the model's outputs are not finite; {remedy}")


def numbers(name: str, text: str, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """The numbers of a list like 256,512,1024; UserError that names a part that is no number."""
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
