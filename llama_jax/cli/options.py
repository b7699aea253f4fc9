"""The options that several commands share: the model, its types, sampling, adapters, texts, processes."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from llama_jax.cli.draft import check_draft, load_draft, parse_draft
from llama_jax.cli.output_format import note
from llama_jax.errors import GenerationError, UserError, shown
from llama_jax.storage import Location, StoredPath, locate
from llama_jax.tokenizers import Format

if TYPE_CHECKING:
    from llama_jax.config import LlamaConfig, RopeScalingKind
    from llama_jax.data import DocumentFormat
    from llama_jax.formats.build_params import Progress
    from llama_jax.formats.orbax_format import OrbaxCheckpoint
    from llama_jax.formats.weight_format import Opened
    from llama_jax.inference.sampling import Sampling
    from llama_jax.inference.speculation import DraftModel, PromptLookup
    from llama_jax.model.cache import CacheOptions
    from llama_jax.model.forward_options import Compute
    from llama_jax.model.params import Llama
    from llama_jax.parallel.mesh import MeshSizes
    from llama_jax.parallel.multihost import Processes
    from llama_jax.tokenizers import Tokenizer

DTYPES = Literal["auto", "float32", "bfloat16", "float16"]
BLOCKS = Literal["q8_0", "q6_k", "q5_k", "q5_k-pure", "q4_k", "q4_k-pure", "q4_0", "q4_0-pure"]
QUANTIZE = Literal["auto", "int8", "int4", "int4-pure", "fp8", "nf4", "nf4-pure", BLOCKS, "keep"]
ATTENTION = Literal["auto", "reference", "dense", "blockwise", "cudnn", "splash"]
PLACE: PrimitiveConstructorSpec[Location] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="PATH",
    instance_from_str=lambda texts: locate(texts[0]),
    is_instance=lambda value: isinstance(value, Path | StoredPath),
    str_from_instance=lambda place: [os.fspath(place)],
)
ModelPath = Annotated[Location, PLACE]
"""A model or a vocabulary: a path on this machine, or a URL."""


def unless_auto(value: Any) -> Any:
    """The value of an option; None for auto."""
    return None if value == "auto" else value


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    SHOWN_LAST: ClassVar[tuple[str, ...]] = ("no_cache",)

    no_cache: bool = False
    """Trace and compile every program anew: none is taken from the cache folder, and none is kept there."""


@dataclass(frozen=True, kw_only=True)
class AttentionOption:
    attention: ATTENTION = "auto"
    """The implementation of attention; auto uses the device's kernel where it can, and the output names it."""

    def compute(self) -> Compute:
        """The options of a forward pass."""
        from llama_jax.model.forward_options import Compute

        return Compute(attention=self.attention)


@dataclass(frozen=True, kw_only=True)
class ExactOption(AttentionOption):
    exact: bool = False
    """The same bits in any company: a text and its log-probabilities do not depend on what else is computed with it."""

    def compute(self) -> Compute:
        return replace(super().compute(), exact=self.exact)


@dataclass(frozen=True, kw_only=True)
class CacheOption:
    cache: Literal["auto", "int8"] = "auto"
    """Type of the key/value cache: auto is that of the computation; int8 adds a scale of 4 bytes for each head and
    position."""

    def cache_options(self) -> CacheOptions:
        """The options of the cache; GenerationError for an invalid value."""
        from llama_jax.model.cache import CacheOptions

        return CacheOptions(dtype=unless_auto(self.cache))


@dataclass(frozen=True, kw_only=True)
class RememberOptions(CacheOption):
    window: int | None = None
    """Each token attends to this many tokens only: the cache stops growing, and the text may outgrow the context."""
    sinks: int = 0
    """With --window: this many first tokens stay visible (attention sinks), which keeps a long text fluent; 4 are usual."""

    def cache_options(self) -> CacheOptions:
        return replace(super().cache_options(), window=self.window, sinks=self.sinks)


@dataclass(frozen=True, kw_only=True)
class SingleAdapterOption:
    adapter: ModelPath | None = None
    """A LoRA adapter for the model: a folder of PEFT's, or of a run that trains one."""


@dataclass(frozen=True, kw_only=True)
class FormatOption:
    format: Format = "auto"
    """The chat format; auto is the model's own template, or else llama3 where the vocabulary is Llama 3's. A served model
    with neither completes texts and does not chat."""


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    stop: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT"), tyro.conf.UseAppendAction] = ()
    """Stop at this text, which is not printed. May be repeated."""
    ignore_eos: bool = False
    """Do not stop at the end-of-text tokens, only at --stop or --max-new-tokens."""

    def check_stops(self) -> None:
        """Raise GenerationError for a text of --stop that no text can contain."""
        for text in self.stop:
            if not text:
                raise GenerationError("--stop is empty; pass the text at which to end")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise GenerationError(
                    f"--stop {shown(text)} is not valid UTF-8, and so in no text; is the terminal's encoding (LANG) set?"
                ) from None


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    separator: Annotated[str, tyro.conf.arg(metavar="TEXT")] = "<|endoftext|>"
    """What stands between the documents of a text file."""
    longest: int | None = None
    """Characters of the longest document of a text file; a longer one is cut into several. By default 131,072, or more
    where the rows that are measured need it."""
    field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """The field or column that holds the text in .jsonl, .parquet and .arrow."""

    def document_format(
        self, lengths: Sequence[int] = (), token_type: Literal["uint16", "uint32"] | None = None
    ) -> DocumentFormat:
        """How files are read: by default with documents long enough for rows of these lengths."""
        from llama_jax.data import DocumentFormat

        longest = self.longest
        if longest is None:
            longest = max([DocumentFormat.longest, *(64 * length for length in lengths)])
        return DocumentFormat(separator=self.separator, longest=longest, field=self.field, token_type=token_type)


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    SHOWN_LAST: ClassVar[tuple[str, ...]] = ("distributed", "coordinator", "processes", "process_id", "start_timeout")

    distributed: bool = False
    """Find the other processes through Slurm, Open MPI, Kubernetes or the TPU pod that started this one."""
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Without --distributed: HOST:PORT of process 0, whose port must be free; the same in all processes."""
    processes: int | None = None
    """Without --distributed: the number of processes."""
    process_id: int | None = None
    """Without --distributed: the number of this one, from 0."""
    start_timeout: float = 300.0
    """Seconds to wait for all processes; then those that have started name the missing ones."""

    def join_processes(self, *, resumes: bool = True) -> AbstractContextManager[Processes]:
        """All processes of the command, once they have found each other."""
        from llama_jax.parallel import multihost

        return multihost.join_job(
            self.coordinator,
            self.processes,
            self.process_id,
            detect=self.distributed,
            timeout=self.start_timeout,
            resumes=resumes,
        )


@dataclass(frozen=True, kw_only=True)
class WeightOptions(CompileOptions):
    tokenizer: ModelPath | None = None
    """A SentencePiece .model, a rank file of Llama 3, a tokenizer.json or a GGUF; by default the one with the weights."""
    dtype: DTYPES = "auto"
    """Type of weights, arithmetic and cache, which are then floats. auto keeps quantized weights as the file has them; for
    the rest it is the type of the stored embedding. Where that is quantized, float32 on a CPU and bfloat16 on accelerators;
    where it is float16, float32 on a CPU."""
    quantize: QUANTIZE = "auto"
    """Quantize the matrices: int8 and fp8 with a scale for each row, int4 with one for each 128 numbers, nf4 as in QLoRA,
    the others as in GGUF, q4_k and q5_k mixed as in llama.cpp's Q4_K_M and Q5_K_M. The embedding and the output projection
    get 6 or 8 bits, unless -pure. auto is as --dtype says; keep leaves a quantized file as it is and computes in --dtype."""
    rope: Annotated[str, tyro.conf.arg(metavar="KIND:FACTOR")] = ""
    """Replace the model's rope scaling: KIND:FACTOR and further fields, as in yarn:4,beta_fast=16, which also lengthens the
    context; none removes it."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions(AttentionOption, WeightOptions):
    model: ModelPath | None = None
    """A model's folder or file: Hugging Face, Meta .pth, GGUF, llama2.c or orbax, recognized by content.
    By default the small stories model that comes with the package."""
    mesh: Annotated[str, tyro.conf.arg(metavar="tensor=N")] = ""
    """Shard the model over devices, as in tensor=8. By default it is on one device."""

    def mesh_sizes(self) -> MeshSizes | None:
        """The sizes of the mesh, or None; MeshError for a mesh that shards more than the model."""
        from llama_jax.errors import MeshError
        from llama_jax.parallel.mesh import make_mesh, parse_mesh

        if not self.mesh:
            return None
        sizes = parse_mesh(self.mesh)
        if sizes.data * sizes.fsdp > 1:
            raise MeshError(f"mesh {sizes}: prompts are split over data and fsdp from Python only; use tensor alone")
        if sizes.context > 1:
            raise MeshError(f"mesh {sizes}: generating has no sequence to split over context; use tensor alone")
        make_mesh(sizes)
        return sizes

    def compile_native(self, opened: Opened | OrbaxCheckpoint) -> None:
        """Begin to compile the native kernels of a CPU while the model is loaded; over a mesh there are none."""
        import jax

        from llama_jax.formats.loading import planned_weights
        from llama_jax.formats.quantize_on_load import can_be_kept
        from llama_jax.ops.cpu import compile_native

        dtype = None if self.dtype == "auto" else jax.numpy.dtype(self.dtype)
        if self.quantize not in ("auto", "keep"):
            kinds = {self.quantize.removesuffix("-pure")}
        else:
            keep = dtype is None or self.quantize == "keep"
            kinds = {tensor.kind.lower() for tensor in opened.tensors.values() if keep and can_be_kept(tensor)}
        if not self.mesh:
            keys = jax.ShapeDtypeStruct((opened.config.head_dim,), planned_weights(opened, dtype)[0])
            compile_native(kinds, keys)

    def load_beside(
        self, adapter: Location | None = None, adapters: Sequence[Location] = (), progress: Progress | None = None
    ) -> tuple[LlamaConfig, Llama, Tokenizer]:
        """The model and its vocabulary; GenerationError where there is none, or one that is not the model's.

        Args:
          adapter, adapters: for all rows, or a table of them, see `formats.load`.
          progress: wraps the layers as they are read; by default in a bar.
        """
        import jax.numpy as jnp

        import llama_jax
        from llama_jax.cli.jax_setup import loading_bar
        from llama_jax.formats.adapters import with_attend
        from llama_jax.formats.loading import BUNDLED_NAME, bundled
        from llama_jax.model.checks import check_attend

        dtype = None if self.dtype == "auto" else jnp.dtype(self.dtype)
        path = bundled() if self.model is None else self.model
        # Invalid options end the command before minutes go into loading.
        mesh = self.mesh_sizes()
        opened = llama_jax.formats.open_checkpoint(path)
        config = with_rope(opened.config, self.rope)
        check_attend(with_attend(config, adapters if adapter is None else [adapter]), llama_jax.Compute())
        self.compile_native(opened)
        config, params, tokenizer = llama_jax.load(
            path,
            dtype,
            quantize=unless_auto(self.quantize),
            tokenizer=self.tokenizer,
            adapter=adapter,
            adapters=adapters,
            mesh=mesh,
            progress=progress or loading_bar,
        )
        if self.model is None:
            size = llama_jax.parameter_count(llama_jax.formats.open_checkpoint(path).config) / 1e6
            print(f"model: {BUNDLED_NAME} ({size:.1f}M parameters, TinyStories); pass another with --model", file=sys.stderr)
        if tokenizer is None:
            raise GenerationError(
                f"{path} has no vocabulary of at most {config.vocab_size} pieces; pass one with --tokenizer"
            )
        if tokenizer.vocab_size > config.vocab_size:
            raise GenerationError(
                f"{self.tokenizer} has {tokenizer.vocab_size} pieces, the model a vocabulary of {config.vocab_size};"
                " pass the model's own"
            )
        return with_rope(config, self.rope), params, tokenizer


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(LoadOptions):
    adapter: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=]PATH"), tyro.conf.UseAppendAction] = ()
    """NAME=PATH, a LoRA adapter that a request may ask for by this name: a folder of PEFT's, or of a run that trains one.
    May be repeated, and needs no copy of the model. A single PATH without a name is for all requests."""

    def for_all(self) -> Location | None:
        """The adapter without a name."""
        only = self.adapter[0] if len(self.adapter) == 1 else ""
        return locate(only) if only and ("=" not in only or Path(only).exists()) else None

    def named(self) -> dict[str, Location]:
        """The other adapters by name, in the order of their numbers; GenerationError for a missing or repeated name."""
        found: dict[str, Location] = {}
        for text in () if self.for_all() is not None else self.adapter:
            name, _, path = text.partition("=")
            if not name or not path:
                raise GenerationError(f"adapter={shown(text)} must be NAME=PATH, or a single PATH for all requests")
            if name in found:
                raise GenerationError(
                    f"adapter={shown(text)}: {shown(name)} is the name of another; choose a different name"
                )
            found[name] = locate(path)
        return found

    def load(self, progress: Progress | None = None) -> tuple[LlamaConfig, Llama, Tokenizer]:
        """The model, with its adapters, and its vocabulary, see `load_beside`."""
        return self.load_beside(self.for_all(), tuple(self.named().values()), progress)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    temperature: float = 0.8
    """Divide the logits by this; 0 always takes the most probable token, whatever top-k, top-p, min-p and seed are."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 0.95
    """Keep the most probable tokens whose probabilities sum to p; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the probability of the most probable one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Make tokens that the text already contains less probable; 1 turns it off."""
    seed: int | None = None
    """Seed of the sampling; by default taken from the clock and printed."""

    def choose_seed(self) -> int:
        return time.time_ns() % 2**32 if self.seed is None else self.seed

    def sampling(self, seed: int) -> Sampling:
        """The sampling; GenerationError for an invalid value."""
        import llama_jax

        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(SamplingOptions)}
        sampling = llama_jax.Sampling(**values | {"seed": seed})
        sampling.per_row(1)
        return sampling


@dataclass(frozen=True, kw_only=True)
class DraftOptions(ExactOption, LoadOptions):
    draft: Annotated[str, tyro.conf.arg(metavar="prompt|PATH")] = ""
    """Speculative decoding: draft several tokens, which the model verifies at once. The text is the same (but for
    near ties of 16-bit and quantized weights), often sooner.
    prompt looks for the last words earlier in the text; PATH is a smaller model with the same vocabulary. prompt:8 or PATH:4
    limits the tokens of a draft; fewer are drafted, or none, where that is faster."""

    def drafter(self, tokenizer: Tokenizer) -> PromptLookup | DraftModel | None:
        """The drafter, or None; GenerationError for a draft with another vocabulary than the model's."""
        if not self.draft:
            return None
        return load_draft(self.draft, unless_auto(self.dtype), tokenizer, self.mesh_sizes())

    def check_draft_name(self) -> None:
        """Raise GenerationError for an invalid number of tokens; nothing is opened."""
        if self.draft:
            parse_draft(self.draft)

    def check_draft(self) -> None:
        """Raise GenerationError for a draft of another vocabulary, before minutes go into loading."""
        if self.draft:
            from llama_jax.formats import open_checkpoint
            from llama_jax.formats.loading import bundled

            check_draft(self.draft, open_checkpoint(bundled() if self.model is None else self.model).config)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(SingleAdapterOption, DraftOptions, RememberOptions, SamplingOptions, LoadOptions):
    def load(self) -> tuple[LlamaConfig, Llama, Tokenizer]:
        """The model and its vocabulary; GenerationError as well for a draft of another vocabulary."""
        self.check_draft()
        return self.load_beside(self.adapter)


# -- rope ------------------------------------------------------------------------------------------------------------------

SPLIT = re.compile(r",(?![^\[]*\])")  # commas outside of brackets


def with_rope(config: LlamaConfig, text: str) -> LlamaConfig:
    """The configuration with another rope scaling and the context that follows from it.

    Args:
      text: ``KIND:FACTOR`` and further fields of `RopeScaling`, as in ``yarn:4,beta_fast=16``; ``none`` leaves out the
        model's own; an empty one changes nothing. `original_max_seq_len` is by default the model's own context.

    Raises:
      UserError: a text that is not a rope scaling.
      ConfigError: an invalid one.
    """
    from llama_jax.config import ROPE_FIELDS, RopeScaling

    if not text:
        return config
    original = _trained(config)
    if text == "none":
        return replace(config, rope_scaling=None, max_seq_len=original)
    first, *rest = SPLIT.split(text)
    kind, colon, number = first.partition(":")
    fields = ROPE_FIELDS.get(kind)
    if fields is None or not colon:
        kinds = ", ".join(ROPE_FIELDS)
        raise UserError(f"rope={shown(text)} must be none, or KIND:FACTOR as in yarn:4 with one of the kinds {kinds}")
    values: dict[str, Any] = {}
    for part in rest:
        name, equals, value = part.partition("=")
        if name not in fields or not equals:
            has = ", ".join(fields) or "none"
            raise UserError(
                f"rope={shown(text)} has {shown(part, 40)} after its factor; the further fields of {kind} are: {has}"
            )
        values[name] = _value(text, value)
    if "original_max_seq_len" in fields:
        values.setdefault("original_max_seq_len", original)
    scaling = RopeScaling(cast("RopeScalingKind", kind), _value(text, number), **values)  # a key of the table
    context = scaling.extended_max_seq_len or int(original * scaling.factor)
    return replace(config, rope_scaling=scaling, max_seq_len=context)


def _trained(config: LlamaConfig) -> int:
    """Tokens of the context without the model's rope scaling."""
    scaling = config.rope_scaling
    if scaling is None:
        return config.max_seq_len
    return scaling.original_max_seq_len or max(int(config.max_seq_len / scaling.factor), 1)


def _value(text: str, value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise UserError(f"rope={shown(text)} has {shown(value, 40)} where a number is needed, or true or false") from None


def say_beyond(config: LlamaConfig, lengths: Sequence[int]) -> None:
    """Report on stderr which lengths are beyond the model's context, where that is allowed."""
    beyond = [f"{length:,}" for length in sorted(lengths) if length > config.max_seq_len]
    if beyond:
        note(
            f"{', '.join(beyond)}: beyond the model's context of {config.max_seq_len:,} tokens, for which it was not made;"
            " this measures what happens"
        )
