"""``llama-jax convert``: write a model in another format."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from llama_jax.cli.options import BLOCKS, QUANTIZE
from llama_jax.cli.paths import ModelPath, bytes_at
from llama_jax.cli.stopping import ending_in_order

if TYPE_CHECKING:
    from llama_jax.formats.saving import WrittenDtype

FORMATS = Literal["auto", "safetensors", "gguf", "llama2c", "orbax"]


@dataclass(frozen=True)
class Convert:
    """Write a model in another format. Only orbax, read or written, needs the model to fit into memory.

    An adapter is written as one: for llama.cpp where the destination ends in .gguf, else a folder for PEFT.
    """

    source: tyro.conf.Positional[Annotated[ModelPath, tyro.conf.arg(metavar="SOURCE")]]
    """A model's folder or file, of any format that is read, or an adapter's."""
    destination: tyro.conf.Positional[Annotated[ModelPath, tyro.conf.arg(metavar="DESTINATION")]]
    """A folder for safetensors (the Hugging Face layout) and orbax, a file for gguf and llama2c."""
    format: FORMATS = "auto"
    """What to write; auto is what the destination's name says: gguf, llama2c where it ends in .bin, else safetensors.
    llama2c is the legacy .bin, float32."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", BLOCKS] = "auto"
    """Type of what is written; auto keeps that of the source: from GGUF to GGUF or orbax its blocks too, which become
    float32 in any other format. Those that begin with q are for gguf alone: q4_k and q5_k are llama.cpp's Q4_K_M and
    Q5_K_M, and with -pure all matrices are of one kind, the embedding too."""
    quantize: QUANTIZE = "auto"
    """For orbax alone: write the matrices in fewer bits; what is quantized in the files stays as it is without this."""
    calibrate: ModelPath | None = None
    """A text like those that the model is for: channels are scaled by what it makes of their errors (AWQ), and only then the
    matrices quantized to --dtype or --quantize. Takes minutes, and floats of the whole model in memory."""
    tokenizer: ModelPath | None = None
    """A SentencePiece .model, a rank file of Llama 3, a tokenizer.json, a GGUF or a folder, in place of the source's."""
    base: ModelPath | None = None
    """For an adapter: the model that it was trained on, whose settings alone are read; by default the one it names."""
    overwrite: bool = False
    """Replace what is at the destination: a file, or a folder that holds nothing but a model."""

    def run(self) -> None:
        from tqdm import tqdm

        from llama_jax.formats.saving import about_blocks, convert

        started = time.perf_counter()
        dtype: WrittenDtype | None = None if self.dtype == "auto" else self.dtype
        format = None if self.format == "auto" else self.format
        quantize = None if self.quantize in ("auto", "keep") else self.quantize
        for line in about_blocks(self.source, self.destination, format, dtype or quantize):
            print(line, file=sys.stderr)
        bar = partial(tqdm, desc="writing", unit=" tensors", leave=False, disable=None)
        with ending_in_order("stopped; nothing was written"):
            convert(
                self.source,
                self.destination,
                format=format,
                dtype=dtype,
                quantize=None if self.quantize == "auto" else self.quantize,
                calibrate=self.calibrate,
                tokenizer=self.tokenizer,
                base=self.base,
                overwrite=self.overwrite,
                progress=bar,
            )
        size = bytes_at(self.destination)
        print(f"{self.destination}: {size / 1e6:.1f} MB in {time.perf_counter() - started:.1f} s", file=sys.stderr)
