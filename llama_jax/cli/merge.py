"""``llama-jax merge``: a model and an adapter as one model."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from llama_jax.cli.convert import FORMATS
from llama_jax.cli.options import CompileOptions
from llama_jax.cli.paths import ModelPath, bytes_at
from llama_jax.cli.stopping import ending_in_order

if TYPE_CHECKING:
    from llama_jax.formats.saving import WrittenDtype


@dataclass(frozen=True)
class Merge(CompileOptions):
    """Write a model with a LoRA adapter added to its weights; it then needs no adapter. The model must fit into memory."""

    base: tyro.conf.Positional[Annotated[ModelPath, tyro.conf.arg(metavar="BASE")]]
    """The model that the adapter was trained on, of any format that is read."""
    adapter: tyro.conf.Positional[Annotated[ModelPath, tyro.conf.arg(metavar="ADAPTER")]]
    """A folder of PEFT's, or of a run that trains one."""
    destination: tyro.conf.Positional[Annotated[ModelPath, tyro.conf.arg(metavar="OUT")]]
    """A folder for safetensors (the Hugging Face layout) and orbax, a file for gguf and llama2c."""
    format: FORMATS = "auto"
    """What to write; by default what the name of OUT says: gguf, llama2c where it ends in .bin, else safetensors."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "q8_0", "q4_0"] = "auto"
    """Type of what is written; auto is that of BASE, or float32 if that is quantized. The sum is computed in float32 and
    rounded once. q8_0 and q4_0 are for gguf alone."""
    overwrite: bool = False
    """Replace what is at OUT: a file, or a folder that holds nothing but a model."""

    def run(self) -> None:
        from tqdm import tqdm

        from llama_jax.cli.runtime import loading_bar, start_backend, use_compilation_cache
        from llama_jax.formats import load, load_adapter, open_checkpoint, save
        from llama_jax.formats.adapters import with_attend
        from llama_jax.formats.quantize_on_load import quantized_kinds
        from llama_jax.formats.saving import FOLDERS, format_of
        from llama_jax.formats.tensor_export import check_room
        from llama_jax.model.lora import merge

        started = time.perf_counter()
        use_compilation_cache(self.no_cache)
        start_backend()
        format = None if self.format == "auto" else self.format
        folder = (format or format_of(self.destination)) in FOLDERS
        sources = [self.base, self.adapter]
        check_room(self.destination, folder=folder, overwrite=self.overwrite, sources=sources)
        base = open_checkpoint(self.base)
        adapter = load_adapter(self.adapter, base.config)  # before minutes go into loading
        dtype: WrittenDtype | None = None if self.dtype == "auto" else self.dtype
        exact = dtype is None
        if kinds := quantized_kinds(base.tensors):
            exact = False
            print(f"{self.base}: {kinds} dequantized to float32, to which the adapter is added", file=sys.stderr)
        bar = partial(tqdm, desc="writing", unit=" tensors", leave=False, disable=None)
        with ending_in_order("stopped; nothing was written"):
            # In float32 if it is written in fewer bits than it has, so that it is rounded only once.
            config, params, tokenizer = load(self.base, None if exact else "float32", progress=loading_bar)
            config = with_attend(config, [self.adapter])
            merged = merge(params, adapter.params, adapter.lora)
            save(
                self.destination,
                config,
                merged,
                tokenizer,
                format=format,
                dtype=dtype,
                overwrite=self.overwrite,
                progress=bar,
            )
        size = bytes_at(self.destination)
        print(f"{self.destination}: {size / 1e6:.1f} MB in {time.perf_counter() - started:.1f} s", file=sys.stderr)
