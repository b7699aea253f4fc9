"""The options of every command that runs a model: which one, how to choose tokens, in which type, what to remember."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from llama_jax.cli.draft import check_draft, load_draft
from llama_jax.cli.paths import ModelPath
from llama_jax.cli.rope import with_rope
from llama_jax.errors import GenerationError, shown
from llama_jax.storage import Location, locate

if TYPE_CHECKING:
    from llama_jax.config import LlamaConfig
    from llama_jax.formats.build_params import Progress
    from llama_jax.formats.lazy_tensors import Opened
    from llama_jax.formats.orbax_format import OrbaxCheckpoint
    from llama_jax.inference.sampling import Sampling
    from llama_jax.inference.speculation import DraftModel, PromptLookup
    from llama_jax.model.cache import CacheOptions
    from llama_jax.model.params import Llama
    from llama_jax.parallel.mesh import MeshSizes
    from llama_jax.tokenizers import Tokenizer

DTYPES = Literal["auto", "float32", "bfloat16", "float16"]
BLOCKS = Literal["q8_0", "q6_k", "q5_k", "q5_k-pure", "q4_k", "q4_k-pure", "q4_0", "q4_0-pure"]
QUANTIZE = Literal["auto", "int8", "int4", "int4-pure", "fp8", "nf4", "nf4-pure", BLOCKS, "keep"]
ATTENTION = Literal["auto", "reference", "dense", "blockwise", "cudnn", "splash"]


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    SHOWN_LAST = ("no_cache",)

    no_cache: bool = False
    """Trace and compile every program anew: none is taken from the cache folder, and none is kept there."""


@dataclass(frozen=True, kw_only=True)
class RememberOptions:
    cache: Literal["auto", "int8"] = "auto"
    """Type of the key/value cache: auto is that of the computation; int8 adds a scale of 4 bytes for each head and
    position."""
    window: int | None = None
    """Each token attends to this many tokens only: the cache stops growing, and the text may outgrow the context."""
    sinks: int = 0
    """With --window: this many first tokens stay visible (attention sinks), which keeps a long text fluent; 4 are usual."""

    def cache_options(self) -> CacheOptions:
        """How to remember; GenerationError for an impossible value."""
        from llama_jax.model.cache import CacheOptions

        return CacheOptions(dtype=None if self.cache == "auto" else self.cache, window=self.window, sinks=self.sinks)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(CompileOptions):
    model: ModelPath | None = None
    """A model's folder or file: Hugging Face, Meta .pth, GGUF, llama2.c or orbax, recognized by content.
    By default the small stories model that comes with the package."""
    tokenizer: ModelPath | None = None
    """A SentencePiece .model, a rank file of Llama 3, a tokenizer.json or a GGUF; by default the one with the weights."""
    dtype: DTYPES = "auto"
    """Type of weights and cache, which are then floats. auto keeps quantized weights as the file has them; for the rest it
    is the type of the stored embedding. Where that is quantized, float32 on a CPU and bfloat16 on accelerators; where it is
    float16, float32 on a CPU."""
    quantize: QUANTIZE = "auto"
    """Quantize the matrices: int8 and fp8 with a scale for each row, int4 with one for each 128 numbers, nf4 as in QLoRA,
    the others as in GGUF, q4_k and q5_k mixed as in llama.cpp's Q4_K_M and Q5_K_M. The embedding and the output projection
    get 6 or 8 bits, unless -pure. auto is as --dtype says; keep leaves a quantized file as it is and computes in --dtype."""
    rope: Annotated[str, tyro.conf.arg(metavar="KIND:FACTOR")] = ""
    """Replace the model's rope scaling: KIND:FACTOR and further fields, as in yarn:4,beta_fast=16, which also lengthens the
    context; none removes it."""
    attention: ATTENTION = "auto"
    """The implementation of attention; auto takes the device's kernel where it can, and the output names it."""
    mesh: Annotated[str, tyro.conf.arg(metavar="tensor=N")] = ""
    """Shard the model over devices, as in tensor=8. By default it is on one device."""

    def mesh_sizes(self) -> MeshSizes | None:
        """The sizes of the mesh, or None; MeshError for one that divides more than the model."""
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
        """Begin to compile, beside the loading of a model, what a CPU compiles once; over a mesh nothing is native."""
        import jax

        from llama_jax import ops
        from llama_jax.formats.loading import planned_weights
        from llama_jax.formats.quantize_on_load import can_be_kept

        dtype = None if self.dtype == "auto" else jax.numpy.dtype(self.dtype)
        if self.quantize not in ("auto", "keep"):
            kinds = {self.quantize.removesuffix("-pure")}
        else:
            keep = dtype is None or self.quantize == "keep"
            kinds = {tensor.kind.lower() for tensor in opened.tensors.values() if keep and can_be_kept(tensor)}
        if not self.mesh:
            keys = jax.ShapeDtypeStruct((opened.config.head_dim,), planned_weights(opened, dtype)[0])
            ops.compile_native(kinds, keys)

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
        from llama_jax.cli.runtime import loading_bar
        from llama_jax.formats.adapters import with_attend
        from llama_jax.formats.loading import BUNDLED_NAME, bundled
        from llama_jax.model.checks import check_attend

        dtype = None if self.dtype == "auto" else jnp.dtype(self.dtype)
        path = bundled() if self.model is None else self.model
        # What cannot be is said before minutes go into loading.
        mesh = self.mesh_sizes()
        opened = llama_jax.formats.open_checkpoint(path)
        config = with_rope(opened.config, self.rope)
        check_attend(with_attend(config, adapters if adapter is None else [adapter]), llama_jax.Compute())
        self.compile_native(opened)
        config, params, tokenizer = llama_jax.load(
            path,
            dtype,
            quantize=None if self.quantize == "auto" else self.quantize,
            tokenizer=self.tokenizer,
            adapter=adapter,
            adapters=adapters,
            mesh=mesh,
            progress=progress or loading_bar,
        )
        if self.model is None:
            size = llama_jax.parameter_count(llama_jax.formats.open_checkpoint(path).config) / 1e6
            print(f"model: {BUNDLED_NAME} ({size:.1f}M parameters, TinyStories); --model gives another", file=sys.stderr)
        if tokenizer is None:
            raise GenerationError(
                f"no vocabulary of at most {config.vocab_size} pieces lies with {path}; give one with --tokenizer"
            )
        if tokenizer.vocab_size > config.vocab_size:
            raise GenerationError(
                f"{self.tokenizer} has {tokenizer.vocab_size} pieces, the model a vocabulary of {config.vocab_size};"
                " give the model's own"
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
        """The others by name, in the order of their numbers; GenerationError for what is no name or has two."""
        found: dict[str, Location] = {}
        for text in () if self.for_all() is not None else self.adapter:
            name, _, path = text.partition("=")
            if not name or not path:
                raise GenerationError(f"adapter={shown(text)} must be NAME=PATH, or a single PATH for all requests")
            if name in found:
                raise GenerationError(f"adapter={shown(text)}: {shown(name)} is the name of another; give one of its own")
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
        """How to choose tokens; GenerationError for an impossible value."""
        import llama_jax

        sampling = llama_jax.Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
        )
        sampling.per_row(1)
        return sampling


@dataclass(frozen=True, kw_only=True)
class DraftOptions(LoadOptions):
    draft: Annotated[str, tyro.conf.arg(metavar="prompt|PATH")] = ""
    """Speculative decoding: draft several tokens, which the model verifies at once. The text is the same (but for
    near ties of 16-bit and quantized weights), often sooner.
    prompt looks for the last words earlier in the text; PATH is a smaller model with the same vocabulary. prompt:8 or PATH:4
    limits the tokens of a draft; fewer are drafted, or none, where that is faster."""

    def drafter(self, tokenizer: Tokenizer) -> PromptLookup | DraftModel | None:
        """What proposes tokens, or None; GenerationError for a draft with another vocabulary than the model's."""
        if not self.draft:
            return None
        return load_draft(self.draft, None if self.dtype == "auto" else self.dtype, tokenizer, self.mesh_sizes())

    def check_draft(self) -> None:
        """Raise GenerationError for a draft of another vocabulary, before minutes go into loading."""
        if self.draft:
            from llama_jax.formats import open_checkpoint
            from llama_jax.formats.loading import bundled

            check_draft(self.draft, open_checkpoint(bundled() if self.model is None else self.model).config)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DraftOptions, RememberOptions, SamplingOptions, LoadOptions):
    adapter: ModelPath | None = None
    """A LoRA adapter for the model: a folder of PEFT's, or of a run that trains one."""

    def load(self) -> tuple[LlamaConfig, Llama, Tokenizer]:
        """The model and its vocabulary; GenerationError as well for a draft of another vocabulary."""
        self.check_draft()
        return self.load_beside(self.adapter)
