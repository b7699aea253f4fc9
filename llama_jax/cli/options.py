"""The options that several commands share: the model, its types, sampling, adapters, texts, drafts, processes."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import tyro
from tyro.constructors import PrimitiveConstructorSpec

import llama_jax
from llama_jax.config import ROPE_FIELDS, LlamaConfig, RopeScaling, RopeScalingKind
from llama_jax.config.rope import scaled_length
from llama_jax.errors import ConfigError, GenerationError, MeshError, UserError, short_repr
from llama_jax.inference.sampling_settings import Sampling
from llama_jax.settings import check_value
from llama_jax.storage import Location, StoredPath, locate
from llama_jax.tokenizers import Format, Tokenizer

if TYPE_CHECKING:
    from llama_jax.data import DocumentFormat
    from llama_jax.formats.build_params import LayerProgress
    from llama_jax.formats.weight_format import OpenedCheckpoint
    from llama_jax.parallel.multihost import Processes

LOAD_DTYPES = Literal["auto", "float32", "bfloat16", "float16"]
BLOCK_FORMATS = Literal["q8_0", "q6_k", "q5_k", "q5_k-pure", "q4_k", "q4_k-pure", "q4_0", "q4_0-pure"]
QUANTIZE = Literal["auto", "int8", "int4", "int4-pure", "fp8", "nf4", "nf4-pure", BLOCK_FORMATS, "keep"]
ATTENTION = Literal["auto", "reference", "dense", "blockwise", "cudnn", "splash"]
PROMPT = "prompt"  # a draft that is no model
LOCATION_SPEC: PrimitiveConstructorSpec[Location] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="PATH",
    instance_from_str=lambda texts: locate(texts[0]),
    is_instance=lambda value: isinstance(value, Path | StoredPath),
    str_from_instance=lambda location: [os.fspath(location)],
)
ModelPath = Annotated[Location, LOCATION_SPEC]
"""A model or a vocabulary: a path on this machine, or a URL."""


def unless_auto(value: Any) -> Any:
    """The value of an option; None for auto."""
    return None if value == "auto" else value


def stored_tokenizer(path: Location, opened: OpenedCheckpoint) -> Tokenizer:
    """The vocabulary that is stored with a model; UserError if there is none."""
    tokenizer = opened.tokenizer()
    if tokenizer is None:
        raise UserError(no_vocabulary(path))
    return tokenizer


def no_vocabulary(path: Location) -> str:
    """The message for a model without a vocabulary."""
    from llama_jax.tokenizers.load import unsupported_files

    return f"no vocabulary is stored with {path}{unsupported_files(path)}; pass one with --tokenizer"


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    SHOWN_LAST: ClassVar[tuple[str, ...]] = ("no_cache",)

    no_cache: bool = False
    """Do not use the folder of cached programs: trace and compile everything again, and store nothing."""

    def start_jax(self) -> None:
        """Open the cache of compiled programs, and start the backend of the devices."""
        from llama_jax.cli.jax_setup import start_backend, use_compilation_cache

        use_compilation_cache(self.no_cache)
        start_backend()


@dataclass(frozen=True, kw_only=True)
class PartsOption:
    parts: Annotated[Path | None, tyro.conf.arg(metavar="FILE.py")] = None
    """A Python file with the functions that a model names as its attention, norm, feed-forward or rotary embedding. The file
    is executed."""

    def with_parts(self, *configs: LlamaConfig) -> tuple[LlamaConfig, ...]:
        """The configurations of all models of a command, with the functions of the file in place of their names.

        Raises:
          ConfigError: names and no file, or not their functions in it; a file and no names.
        """
        from llama_jax.model.checks import check_parts_found

        if self.parts is None:
            for config in configs:
                check_parts_found(config)
            return configs
        if not any(config.parts.missing for config in configs):
            raise ConfigError(f"--parts {self.parts} is only for a model that names custom functions; omit it")
        file = self.parts
        return tuple(llama_jax.with_parts(config, file) if config.parts.missing else config for config in configs)


@dataclass(frozen=True, kw_only=True)
class AttentionOption:
    attention: ATTENTION = "auto"
    """Implementation of attention. auto uses the device's kernel where possible; the output names the one used."""

    def compute(self) -> llama_jax.ComputeOptions:
        """The options of a forward pass."""
        return llama_jax.ComputeOptions(attention=self.attention)


@dataclass(frozen=True, kw_only=True)
class ExactOption(AttentionOption):
    exact: bool = False
    """Make each text and the bits of its log-probabilities independent of everything computed at the same time."""

    def compute(self) -> llama_jax.ComputeOptions:
        return replace(super().compute(), exact=self.exact)


@dataclass(frozen=True, kw_only=True)
class CacheOption:
    cache: Literal["auto", "int8"] = "auto"
    """Type of the key/value cache: auto is the type of the computation; int8 has a scale of 4 bytes per head and
    position."""

    def cache_options(self) -> llama_jax.CacheOptions:
        """The options of the cache; GenerationError for an invalid value."""
        return llama_jax.CacheOptions(dtype=unless_auto(self.cache))


@dataclass(frozen=True, kw_only=True)
class SingleAdapterOption:
    adapter: ModelPath | None = None
    """A LoRA adapter: a PEFT folder, or the folder of a run that trained one."""


@dataclass(frozen=True, kw_only=True)
class TemplateArgOption:
    template_arg: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE"), tyro.conf.UseAppendAction] = ()
    """A variable of the chat template, for example enable_thinking=false. VALUE is JSON or a text. Can be repeated."""

    def template_args(self) -> dict[str, Any]:
        """The variables of the chat template; GenerationError for an invalid one."""
        from llama_jax.tokenizers.chat_template import parse_template_args

        return parse_template_args(self.template_arg)


@dataclass(frozen=True, kw_only=True)
class TemplateOptions(TemplateArgOption):
    chat_template: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A file with a Jinja chat template, in place of the model's own."""

    def check_template(self, format: Format) -> None:
        """Check the options alone; GenerationError for a file that does not exist or that the format does not use."""
        self.template_args()
        if self.chat_template is not None and format not in ("auto", "template"):
            raise GenerationError(f"the format {format} does not use --chat-template; omit one of the two")
        if self.chat_template is not None and not self.chat_template.is_file():
            state = "is a folder" if self.chat_template.is_dir() else "does not exist"
            raise GenerationError(f"--chat-template {self.chat_template} {state}; pass a file with a Jinja template")

    def with_template(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer with the chat template of the file, if there is one.

        Raises:
          GenerationError: a template that renders no chat, or that lacks a variable.
        """
        from llama_jax.storage.paths import read_text
        from llama_jax.tokenizers import reply_ends
        from llama_jax.tokenizers.chat_template import Renderer, check_template_args
        from llama_jax.tokenizers.load import replace_chat_template

        if self.chat_template is not None:
            tokenizer = replace_chat_template(tokenizer, read_text(self.chat_template, GenerationError))
        check_template_args(tokenizer, self.template_args())
        if self.chat_template is not None:
            try:
                with closing(Renderer(template_args=self.template_args())) as renderer:
                    reply_ends(tokenizer, "template", renderer)
            except GenerationError as error:
                raise GenerationError(f"--chat-template {self.chat_template}: {error}") from None
        return tokenizer


@dataclass(frozen=True, kw_only=True)
class FormatOption(TemplateOptions):
    format: Format = "auto"
    """Chat format. auto takes the model's own template, or llama3 for the vocabulary of Llama 3. A served model with
    neither only completes texts."""


@dataclass(frozen=True, kw_only=True)
class StopOptions:
    stop: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT"), tyro.conf.UseAppendAction] = ()
    """Stop at this text and do not print it. Can be repeated."""
    ignore_eos: bool = False
    """Ignore end-of-text tokens: stop only at --stop or --max-new-tokens."""

    def check_stops(self) -> None:
        """Raise GenerationError for a text of --stop that no text can contain."""
        for text in self.stop:
            is_valid = text.encode(errors="ignore").decode() == text
            if not text or not is_valid:
                raise GenerationError(f"--stop {short_repr(text)} must be a text, in the terminal's encoding (LANG)")


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    separator: Annotated[str, tyro.conf.arg(metavar="TEXT")] = "<|endoftext|>"
    """The text that separates the documents of a text file."""
    longest: int | None = None
    """Maximum length of a document of a text file, in characters; longer ones are split. The default is 131,072."""
    field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """Field or column with the text in .jsonl, .json, .parquet and .arrow files."""

    def document_format(self, token_type: Literal["uint16", "uint32"] | None = None) -> DocumentFormat:
        """How files are read."""
        from llama_jax.data import DocumentFormat

        longest = DocumentFormat.longest if self.longest is None else self.longest
        return DocumentFormat(separator=self.separator, longest=longest, field=self.field, token_type=token_type)


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    SHOWN_LAST: ClassVar[tuple[str, ...]] = ("distributed", "coordinator", "processes", "process_id", "start_timeout")

    distributed: bool = False
    """Join the other processes that Slurm, Open MPI, Kubernetes or the TPU pod started."""
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Without --distributed: the address of process 0, with a free port; the same in all processes."""
    processes: int | None = None
    """Without --distributed: the number of processes."""
    process_id: int | None = None
    """Without --distributed: the index of this process, from 0."""
    start_timeout: float = 300.0
    """Seconds to wait for all processes. After that, those that started report which are missing."""

    def join_processes(self) -> AbstractContextManager[Processes]:
        """All processes of the command, once they have found each other."""
        from llama_jax.parallel import multihost

        return multihost.join_job(
            self.coordinator,
            self.processes,
            self.process_id,
            detect=self.distributed,
            timeout=self.start_timeout,
        )


@dataclass(frozen=True, kw_only=True)
class WeightOptions(PartsOption, CompileOptions):
    tokenizer: ModelPath | None = None
    """A SentencePiece .model, a Llama 3 tokenizer.model, a tokenizer.json or a GGUF. The default is the one stored with the
    model."""
    dtype: LOAD_DTYPES = "auto"
    """Type of weights, arithmetic and cache; quantized weights are dequantized. auto keeps quantized weights as they are in
    the file and takes the type of the stored embedding for the rest. If that is quantized, auto is float32 on a CPU and
    bfloat16 on accelerators; if it is float16, float32 on a CPU."""
    quantize: QUANTIZE = "auto"
    """Quantize the matrices: int8 and fp8 with one scale per row, int4 with one per 128 numbers, nf4 as in QLoRA, the others
    as in GGUF; q4_k and q5_k are llama.cpp's mixtures Q4_K_M and Q5_K_M. Without -pure, the embedding and the output
    projection get 6 or 8 bits. auto follows --dtype; keep leaves a quantized file as it is and computes in --dtype."""
    rope: Annotated[str, tyro.conf.arg(metavar="KIND:FACTOR")] = ""
    """Replace the model's RoPE scaling and extend its context accordingly: KIND:FACTOR and optional fields, for example
    yarn:4,beta_fast=16. none removes the scaling."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions(AttentionOption, WeightOptions):
    model: ModelPath | None = None
    """Folder or file of a model: Hugging Face, Meta .pth, GGUF, llama2.c or orbax, recognized by its content.
    The default is the small stories model of the package."""
    mesh: Annotated[str, tyro.conf.arg(metavar="tensor=N")] = ""
    """Shard the model over several devices, for example tensor=8. The default is one device."""

    @property
    def model_path(self) -> Location:
        """The model's folder or file, or that of the bundled one."""
        from llama_jax.formats.loading import bundled

        return bundled() if self.model is None else self.model

    def draft_model(self) -> str:
        """The path of the model that drafts; empty without one."""
        return ""

    def mesh_sizes(self) -> llama_jax.MeshSizes | None:
        """The sizes of the mesh, or None; MeshError for a mesh that shards more than the model."""
        from llama_jax.parallel.mesh import make_mesh, parse_mesh

        if not self.mesh:
            return None
        sizes = parse_mesh(self.mesh)
        if sizes.data * sizes.fsdp > 1:
            raise MeshError(f"mesh {sizes}: only the Python API splits prompts over data and fsdp; use only tensor")
        if sizes.context > 1:
            raise MeshError(f"mesh {sizes}: generation has no sequence to split over context; use only tensor")
        make_mesh(sizes)
        return sizes

    def compile_native(self, opened: OpenedCheckpoint) -> None:
        """Begin to compile the native kernels of a CPU while the model is loaded; over a mesh there are none."""
        import jax

        from llama_jax.formats.loading import planned_weights
        from llama_jax.formats.quantize_on_load import can_be_kept
        from llama_jax.ops.cpu import compile_native

        dtype = unless_auto(self.dtype)
        if self.quantize not in ("auto", "keep"):
            quant_formats = {self.quantize.removesuffix("-pure")}
        else:
            keep = dtype is None or self.quantize == "keep"
            quant_formats = {
                tensor.storage_type.lower() for tensor in opened.tensors.values() if keep and can_be_kept(tensor)
            }
        if not self.mesh:
            keys = jax.ShapeDtypeStruct((opened.config.head_dim,), planned_weights(opened, dtype)[0])
            compile_native(quant_formats, keys, self.compute().exact)

    def load_with_tokenizer(
        self, adapter: Location | None = None, adapters: Sequence[Location] = (), progress: LayerProgress | None = None
    ) -> tuple[LlamaConfig, llama_jax.LlamaParams, Tokenizer]:
        """The model and its vocabulary; GenerationError where there is none.

        Args:
          adapter, adapters: for all rows, or a table of them, see `formats.load`.
          progress: wraps the layers as they are read; by default in a bar.
        """
        from llama_jax.cli.jax_setup import loading_bar
        from llama_jax.formats.adapters import with_adapter_parts
        from llama_jax.formats.loading import BUNDLED_NAME
        from llama_jax.model.checks import check_parts

        path = self.model_path
        # Invalid options end the command before minutes go into loading.
        mesh = self.mesh_sizes()
        opened = llama_jax.formats.open_checkpoint(path)
        stored_config = with_adapter_parts(with_rope(opened.config, self.rope), adapters if adapter is None else [adapter])
        draft = self.draft_model()
        model_config, *_ = self.with_parts(
            stored_config, *([llama_jax.formats.open_checkpoint(draft).config] if draft else [])
        )
        check_parts(model_config, self.compute())
        if self.compute().exact:
            features = (
                ("a mesh", mesh is not None),
                ("adapters by name", adapters),
                ("a mixture of experts", model_config.experts),
            )
            if refused := next((name for name, is_given in features if is_given), None):
                raise GenerationError(f"exact cannot be combined with {refused}; omit one of the two")
        self.compile_native(opened)
        config, params, tokenizer = llama_jax.load(
            path,
            unless_auto(self.dtype),
            quantize=unless_auto(self.quantize),
            tokenizer=self.tokenizer,
            adapter=adapter,
            adapters=adapters,
            mesh=mesh,
            progress=progress or loading_bar,
        )
        if self.model is None:
            size = llama_jax.parameter_count(opened.config) / 1e6
            print(f"model: {BUNDLED_NAME} ({size:.1f}M parameters, TinyStories); pass another with --model", file=sys.stderr)
        if tokenizer is None:
            raise GenerationError(no_vocabulary(path))
        return replace(with_rope(config, self.rope), parts=model_config.parts), params, tokenizer


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(LoadOptions):
    adapter: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=]PATH"), tyro.conf.UseAppendAction] = ()
    """NAME=PATH: a LoRA adapter that requests select by name, a PEFT folder or the folder of a run that trained one. Can be
    repeated; the model is not copied. A single PATH without a name applies to all requests."""

    def shared_adapter(self) -> Location | None:
        """The adapter without a name."""
        only = self.adapter[0] if len(self.adapter) == 1 else ""
        return locate(only) if only and ("=" not in only or Path(only).exists()) else None

    def named_adapters(self) -> dict[str, Location]:
        """The other adapters by name, in the order of their numbers; GenerationError for a missing or repeated name."""
        adapters: dict[str, Location] = {}
        for text in () if self.shared_adapter() is not None else self.adapter:
            name, _, path = text.partition("=")
            if not name or not path or name in adapters:
                raise GenerationError(
                    f"adapter={short_repr(text)} must be NAME=PATH with a name of its own, or a single PATH for all requests"
                )
            adapters[name] = locate(path)
        return adapters

    def load(self, progress: LayerProgress | None = None) -> tuple[LlamaConfig, llama_jax.LlamaParams, Tokenizer]:
        """The model, with its adapters, and its vocabulary, see `load_with_tokenizer`."""
        return self.load_with_tokenizer(self.shared_adapter(), tuple(self.named_adapters().values()), progress)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = Sampling(temperature=0.8, top_p=0.95)
    seed: int | None = None
    """Random seed. By default it is taken from the clock and printed."""

    def choose_seed(self) -> int:
        return time.time_ns() % 2**32 if self.seed is None else self.seed

    def seeded_sampling(self, seed: int) -> llama_jax.Sampling:
        """The sampling; GenerationError for an invalid value."""
        sampling = self.sampling.replace(seed=seed)
        sampling.per_row(1)
        return sampling


@dataclass(frozen=True, kw_only=True)
class DraftOptions(ExactOption, LoadOptions):
    draft: Annotated[str, tyro.conf.arg(metavar="prompt|PATH")] = ""
    """Speculative decoding: draft several tokens and verify them in one pass. The text is the same, except for near ties of
    16-bit and quantized weights. prompt drafts what followed the last words earlier in the text; PATH is a smaller model
    with the same vocabulary. prompt:8 or PATH:4 sets the maximum length of a draft; shorter or no drafts are used when
    that is faster."""

    def parse_draft(self) -> tuple[str, int | None]:
        """What --draft names, and its number of tokens or None; GenerationError for an invalid number."""
        match = re.fullmatch(r"(.+):(-?\d{1,18})", self.draft)
        if not match:
            return self.draft, None
        from llama_jax.inference.drafter import DraftTokens

        number = int(match[2])
        check_value("tokens", number, DraftTokens, GenerationError)
        return match[1], number

    def draft_model(self) -> str:
        name, _ = self.parse_draft()
        return "" if name == PROMPT else name

    def check_draft(self) -> None:
        """Raise GenerationError for a draft of another vocabulary, before minutes go into loading."""
        name = self.draft_model()
        if not name:
            return
        vocab_size, size = (llama_jax.formats.open_checkpoint(path).config.vocab_size for path in (self.model_path, name))
        if size != vocab_size:
            raise GenerationError(
                f"--draft {short_repr(name, 80)} has a vocabulary of {size}, but the model's has {vocab_size}; use a draft"
                " with the model's tokenizer"
            )

    def drafter(self, tokenizer: Tokenizer) -> llama_jax.PromptLookup | llama_jax.DraftModel | None:
        """The drafter, or None; GenerationError for a model whose vocabulary has other pieces."""
        from llama_jax.cli.jax_setup import loading_bar

        name, tokens = self.parse_draft()
        limit = {} if tokens is None else {"tokens": tokens}
        if not name:
            return None
        if name == PROMPT:
            return llama_jax.PromptLookup(**limit)
        dtype = unless_auto(self.dtype)
        config, params, draft_tokenizer = llama_jax.load(name, dtype, mesh=self.mesh_sizes(), progress=loading_bar)
        if draft_tokenizer is not None:
            ids = range(config.vocab_size)
            different = next((i for i in ids if tokenizer.token_bytes(i) != draft_tokenizer.token_bytes(i)), None)
            if different is not None:
                raise GenerationError(
                    f"the vocabulary of --draft {short_repr(name, 80)} differs at token {different}; use a draft with the"
                    " model's tokenizer"
                )
        if config.parts and self.parts is not None:
            config = llama_jax.with_parts(config, self.parts)
        return llama_jax.DraftModel(config, params).replace(**limit)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(SingleAdapterOption, DraftOptions, CacheOption, SamplingOptions, LoadOptions):
    window: int | None = None
    """Let each token attend only to this many tokens before it. The cache stops growing, and the text may exceed the
    context."""
    sinks: int = 0
    """With --window: keep this many first tokens visible (attention sinks). 4 is usual and keeps long texts fluent."""

    def cache_options(self) -> llama_jax.CacheOptions:
        return replace(super().cache_options(), window=self.window, sinks=self.sinks)

    def load(self) -> tuple[LlamaConfig, llama_jax.LlamaParams, Tokenizer]:
        """The model and its vocabulary; GenerationError as well for a draft of another vocabulary."""
        self.check_draft()
        return self.load_with_tokenizer(self.adapter)


# -- rope ------------------------------------------------------------------------------------------------------------------

FIELD_SEPARATOR = re.compile(r",(?![^\[]*\])")  # commas outside of brackets


def with_rope(config: LlamaConfig, text: str) -> LlamaConfig:
    """The configuration with another rope scaling and the context that follows from it.

    Args:
      text: ``KIND:FACTOR`` and further fields of `RopeScaling`, as in ``yarn:4,beta_fast=16``; ``none`` leaves out the
        model's own; an empty one changes nothing. `original_max_seq_len` is by default the model's own context.

    Raises:
      UserError: a text that is not a rope scaling.
      ConfigError: an invalid one.
    """
    if not text:
        return config
    original = config.base_context
    if text == "none":
        return replace(config, rope_scaling=None, max_seq_len=config.unscaled_max_seq_len or original)
    first, *rest = FIELD_SEPARATOR.split(text)
    rope_type, colon, number = first.partition(":")
    fields = ROPE_FIELDS.get(rope_type)
    if fields is None or not colon:
        rope_types = ", ".join(ROPE_FIELDS)
        raise UserError(f"rope={short_repr(text)} must be none, or KIND:FACTOR such as yarn:4; the kinds are {rope_types}")
    values: dict[str, Any] = {}
    for part in rest:
        name, equals, value = part.partition("=")
        if name not in fields or not equals:
            has = ", ".join(fields) or "none"
            raise UserError(
                f"rope={short_repr(text)} has {short_repr(part, 40)} after its factor; the other fields of {rope_type} are:"
                f" {has}"
            )
        values[name] = _parse_number(text, value)
    if "original_max_seq_len" in fields:
        values.setdefault("original_max_seq_len", original)
    scaling = RopeScaling(cast("RopeScalingKind", rope_type), _parse_number(text, number), **values)  # a key of the table
    context = scaling.extended_max_seq_len or scaled_length(original, scaling.factor)
    return replace(config, rope_scaling=scaling, max_seq_len=context, unscaled_max_seq_len=None)


def _parse_number(text: str, value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise UserError(f"rope={short_repr(text)} has {short_repr(value, 40)} instead of a number, true or false") from None
