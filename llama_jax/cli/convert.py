"""``llama-jax fetch``, ``convert`` and ``merge``: get models, and write them in other formats."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from llama_jax.cli.options import (
    BLOCK_FORMATS,
    QUANTIZE,
    CompileOptions,
    ModelPath,
    unless_auto,
)
from llama_jax.cli.terminal import clean_exit, size
from llama_jax.runs.log import progress_bar
from llama_jax.storage import Location, resolved

if TYPE_CHECKING:
    from llama_jax.formats.saving import WrittenDtype

FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OUTPUT_FORMATS = Literal["auto", "safetensors", "gguf", "llama2c", "orbax"]


@dataclass(frozen=True)
class Fetch:
    """Download a model from the Hugging Face hub: only the files that llama-jax reads. It prints the path for --model.

    If a model needs a license, accept it on the model's page in a browser, then log in with hf auth login or set HF_TOKEN.
    Existing files are not downloaded again.

    Afterwards --model hf://ORG/NAME finds the files in the cache; without a network pass the printed path to --model.
    """

    repository: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="ORG/NAME")]]
    """The repository. For one model of several in it: ORG/NAME/FILE.gguf or ORG/NAME/FOLDER."""
    revision: Annotated[str | None, tyro.conf.arg(metavar="REVISION")] = None
    """Branch, tag or commit. The default is the newest commit."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for the files. The default is the cache of huggingface_hub, which HF_HOME moves."""

    def run(self) -> None:
        if not sys.stderr.isatty():  # progress is for people, and the hub's library shows it in logs as well
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from llama_jax.formats.hub_download import fetch

        download = fetch(self.repository, self.revision, self.out)
        print(
            f"{download.files} file{'s' * (download.files > 1)}, {size(download.size)}; pass this path to --model:",
            file=sys.stderr,
        )
        print(download.path)


@dataclass(frozen=True)
class Convert:
    """Convert a model to another format. Only reading or writing orbax needs memory for the whole model.

    An adapter stays an adapter: for llama.cpp if the destination ends in .gguf, otherwise a folder for PEFT.
    """

    source: tyro.conf.Positional[Annotated[ModelPath, tyro.conf.arg(metavar="SOURCE")]]
    """Folder or file of a model in any supported format, or of an adapter."""
    destination: tyro.conf.Positional[Annotated[ModelPath, tyro.conf.arg(metavar="DESTINATION")]]
    """A folder for safetensors (the Hugging Face layout) and orbax; a file for gguf and llama2c."""
    format: OUTPUT_FORMATS = "auto"
    """Format to write. auto follows the name of the destination: gguf for .gguf, llama2c for .bin, otherwise safetensors.
    llama2c is the legacy .bin in float32."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", BLOCK_FORMATS] = "auto"
    """Type of the written tensors. auto keeps the type of the source. It also keeps blocks from GGUF to GGUF or orbax; in
    other formats they become float32. Types that begin with q are only for gguf: q4_k and q5_k are llama.cpp's Q4_K_M and
    Q5_K_M; with -pure all matrices, including the embedding, have the same type."""
    quantize: QUANTIZE = "auto"
    """For orbax only: quantize the matrices. Without it, quantized matrices of the source stay as they are."""
    calibrate: ModelPath | None = None
    """A sample of the kind of text that the model is used for. Channels are scaled by its activations (AWQ) before the
    matrices are quantized to --dtype or --quantize. Takes minutes and memory for the whole model in float32."""
    tokenizer: ModelPath | None = None
    """A SentencePiece .model, a Llama 3 tokenizer.model, a tokenizer.json, a GGUF or a folder, instead of the source's."""
    base: ModelPath | None = None
    """For an adapter: the model it was trained on; only its settings are read. The default is the base that it names."""
    overwrite: bool = False
    """Replace the destination: a file, or a folder that contains only a model."""

    def run(self) -> None:
        from llama_jax.formats.saving import convert, describe_requantization

        dtype, format, quantize = unless_auto(self.dtype), unless_auto(self.format), unless_auto(self.quantize)
        quant_format = None if quantize == "keep" else quantize
        for line in describe_requantization(self.source, self.destination, format, dtype or quant_format):
            print(line, file=sys.stderr)
        with _report_write(self.destination) as progress:
            convert(
                self.source,
                self.destination,
                format=format,
                dtype=dtype,
                quantize=quantize,
                calibrate=self.calibrate,
                tokenizer=self.tokenizer,
                base=self.base,
                overwrite=self.overwrite,
                progress=progress,
            )


@dataclass(frozen=True)
class Merge(CompileOptions):
    """Merge a LoRA adapter into the weights of a model, which must fit into memory.

    From GGUF to GGUF, matrices keep their quantization types: llama-jax merge BASE.gguf ADAPTER OUT.gguf."""

    base: tyro.conf.Positional[Annotated[ModelPath, tyro.conf.arg(metavar="BASE")]]
    """The model that the adapter was trained on, in any supported format."""
    adapter: tyro.conf.Positional[Annotated[ModelPath, tyro.conf.arg(metavar="ADAPTER")]]
    """A PEFT folder, or the folder of a run that trained one."""
    destination: tyro.conf.Positional[Annotated[ModelPath, tyro.conf.arg(metavar="OUT")]]
    """A folder for safetensors (the Hugging Face layout) and orbax; a file for gguf and llama2c."""
    format: OUTPUT_FORMATS = "auto"
    """Format to write. auto follows the name of OUT: gguf for .gguf, llama2c for .bin, otherwise safetensors."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", BLOCK_FORMATS] = "auto"
    """Type of the written tensors. auto is the type of BASE: from GGUF to GGUF each matrix is quantized as before, and in
    other formats a quantized BASE becomes float32. The sum is computed in float32 and rounded once. Types that begin with q
    are only for gguf, see convert."""
    overwrite: bool = False
    """Replace OUT: a file, or a folder that contains only a model."""

    def run(self) -> None:
        from llama_jax.cli.jax_setup import loading_bar
        from llama_jax.formats import load, load_adapter, open_checkpoint, save
        from llama_jax.formats.adapters import with_adapter_parts
        from llama_jax.formats.model_folder import check_output
        from llama_jax.formats.quantize_on_load import describe_quantized_types
        from llama_jax.formats.saving import FOLDERS, format_of
        from llama_jax.model.lora import merge
        from llama_jax.model.trees import parameter_count

        self.start_jax()
        dtype: WrittenDtype | None = unless_auto(self.dtype)
        format = unless_auto(self.format)
        into = format or format_of(self.destination)
        folder = into in FOLDERS
        sources = [self.base, self.adapter]
        check_output(self.destination, folder=folder, overwrite=self.overwrite, sources=sources)
        base = open_checkpoint(self.base)
        adapter = load_adapter(self.adapter, base.config)  # before minutes go into loading
        quantization, before = describe_quantized_types(base.tensors), sum(tensor.nbytes for tensor in base.tensors.values())
        is_gguf = base.format.startswith("GGUF")
        as_base = bool(quantization) and dtype is None and into == "gguf" and is_gguf
        if as_base:
            print(
                f"{self.base}: the adapter is added in float32, and the sum quantized again: {quantization}", file=sys.stderr
            )
        elif quantization and (dtype is None or dtype in FLOAT_BYTES):
            after = parameter_count(base.config) * FLOAT_BYTES[dtype or "float32"]
            fewer = (
                "a destination named *.gguf keeps the quantization"
                if is_gguf
                else "--dtype q4_k and a destination named *.gguf give 4 bits"
            )
            print(
                f"{self.base}: {quantization} ({size(before)}) become {dtype or 'float32'} ({size(after)}),"
                f" {after / before:.1f} times as large; {fewer}",
                file=sys.stderr,
            )
        with _report_write(self.destination, f"; the weights of {self.base} have {size(before)}") as progress:
            # In float32 if it is written in fewer bits than it has, so that it is rounded only once.
            exact = dtype is None and not quantization
            config, params, tokenizer = load(
                self.base,
                None if exact else "float32",
                quantize="keep" if as_base else None,
                progress=loading_bar,
            )
            save(
                self.destination,
                with_adapter_parts(config, [self.adapter]),
                merge(params, adapter.params, adapter.lora),
                tokenizer,
                format=format,
                dtype=dtype,
                like=self.base if quantization and into == "gguf" and is_gguf else None,
                overwrite=self.overwrite,
                progress=progress,
            )


@contextmanager
def _report_write(destination: Location, beside: str = "") -> Iterator[Any]:
    """A progress bar for writing a model, which a signal interrupts in order; prints the size and the time at the end."""
    started = time.perf_counter()
    with clean_exit("stopped; nothing was written"):
        yield progress_bar("writing", "tensors")
    location: Any = resolved(destination)
    inside = (
        [location] if not location.is_dir() else location.rglob("*") if isinstance(location, Path) else location.iterdir()
    )
    total = sum(path.stat().st_size for path in inside if path.is_file())
    print(f"{destination}: {total / 1e6:.1f} MB in {time.perf_counter() - started:.1f} s{beside}", file=sys.stderr)
