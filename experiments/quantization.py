"""The cost of quantization: weight formats by size and divergence from float32.

    python experiments/quantization.py                      the bundled model, minutes on two cores
    python experiments/quantization.py --model SmolLM2-135M-Instruct.Q4_1.gguf --tokens 4096
                                                            a real model, compared with llama.cpp's quantizers

Measured against float32: KL divergence of the next token with its standard error, ratio of perplexities, how often the most
probable token is the same, and the errors of each layer's output and of each matrix. The text is --text; by default the
validation stories of the shared data (../shared/data, or LLAMA_JAX_TEST_DATA), or WikiText's test split for a real model;
without the data, stories that the model generates. If llama-cpp-python is installed, llama.cpp also quantizes a real model's
floats, each type with llama.cpp's default mix, and this library loads the files. `bench_generate.py` compares the speed of
formats.

The report keeps earlier results of other models and formats. Writes ``experiments/results/quantization_cpu.json``, the table
in ``.md`` and a picture in ``.png``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import tyro
from measuring import DATA, RESULTS, describe_run, markdown_table, write_report, write_text
from plotting import COLORS, DASHES, finish, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from llama_jax.config import LlamaConfig
    from llama_jax.data import Corpus
    from llama_jax.model.params import LlamaParams
    from llama_jax.tokenizers import Tokenizer

FLOATS = ("float32", "bfloat16")
SHOWN_LAYERS = 8  # more matrices would be most of the report
LENGTH = 512  # maximum tokens of a window
WRITTEN = 24  # stories that a model generates if there is no text


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    model: Path | None = None
    """A model of any supported format; the bundled one by default."""
    text: Path | None = None
    """A text file, one document."""
    llama_cpp: tuple[str, ...] = ("Q8_0", "Q6_K", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0", "IQ4_NL", "Q3_K_M", "Q2_K")
    """llama.cpp's mixes to compare, by llama.cpp's names."""
    formats: tuple[str, ...] = ()
    """Only these formats; by default floats and all that the library quantizes to."""
    tokens: int = 16_384
    """Maximum tokens of the text."""
    output: Path = RESULTS / "quantization_cpu.json"
    """The report; table and picture are next to it."""


def formats_of(arguments: Arguments) -> tuple[str, ...]:
    """The formats to measure."""
    from llama_jax.model.mixtures import MIXTURES

    unknown = set(arguments.formats) - {*FLOATS, *MIXTURES}
    if unknown:
        raise SystemExit(f"--formats {' '.join(sorted(unknown))}: unknown; they are {', '.join((*FLOATS, *MIXTURES))}")
    return arguments.formats or (*FLOATS, *MIXTURES)


def convert(params: LlamaParams, name: str) -> LlamaParams:
    """Float32 parameters in another format; ConfigError if rows are not a multiple of its block size."""
    import jax

    from llama_jax.model.trees import quantize

    if name in FLOATS:
        return jax.tree.map(lambda leaf: leaf.astype(name), params)
    return quantize(params, name)


def size_of(params: LlamaParams) -> dict[str, float]:
    """Bytes, and bits per parameter, including norms."""
    from llama_jax.model.trees import bytes_in_memory, count

    size = bytes_in_memory(params)
    return {"bytes": size, "bits": 8 * size / count(params)}


def read_corpus(
    config: LlamaConfig, params: LlamaParams, tokenizer: Tokenizer, tokens: int, path: Path
) -> tuple[str, Corpus]:
    """A description of the text, and documents of at most `tokens` tokens from a file or from stories of the model."""
    import llama_jax
    from llama_jax.data import Corpus, open_corpus

    if path.is_file():
        corpus = open_corpus([path], tokenizer)
        stops = np.minimum(corpus.stops, corpus.starts[0] + tokens)
        there = stops > corpus.starts
        shortened = (corpus.starts[there], stops[there], corpus.byte_counts[there])
        return path.name, Corpus(corpus.tokens, *shortened, corpus.vocab_size, corpus.digest)
    sampling = llama_jax.Sampling(temperature=1.0, seed=list(range(WRITTEN)))
    prompts, most = [[tokenizer.bos_id]] * WRITTEN, min(config.max_seq_len // 2, tokens // WRITTEN)
    stops = tokenizer.stop_ids
    stories = llama_jax.generate(config, params, prompts, max_new_tokens=most, sampling=sampling, stop_tokens=stops)
    written = [[tokenizer.bos_id, *story.tokens] for story in stories]
    stops = np.cumsum([len(story) for story in written])
    starts = stops - [len(story) for story in written]
    flat = np.concatenate(written).astype(np.uint32)
    return "stories of its own", Corpus(flat, starts, stops, np.zeros(len(stops), np.int64), config.vocab_size, "")


def errors_by_layer(config: LlamaConfig, params: LlamaParams, reference: LlamaParams, tokens: np.ndarray) -> list[float]:
    """Relative root mean square errors of the embedding and of each layer's output."""
    import jax
    import jax.numpy as jnp

    import llama_jax

    @partial(jax.jit, static_argnums=0)
    def streams(config: LlamaConfig, params: LlamaParams) -> Any:
        keep = lambda x, at: (x, x)
        hooks = {"residual_before": keep, "residual_after": keep}
        _, _, kept = llama_jax.logits_and_activations(config, params, tokens[None], hooks)
        return [kept["residual_before"][0], *kept["residual_after"]]

    pairs = zip(streams(config, params), streams(config, reference), strict=True)
    return [float(jnp.linalg.norm(ours.astype(jnp.float32) - theirs) / jnp.linalg.norm(theirs)) for ours, theirs in pairs]


def quantize_file(source: Path, target: Path, file_type: int) -> None:
    """Quantize with llama.cpp, by its number of the mix."""
    import llama_cpp
    from llama_cpp import _logger

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, None)  # otherwise it logs a line for every tensor
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = file_type
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), options)
    llama_cpp.llama_log_set(_logger.llama_log_callback, None)  # `silent` is freed when this function returns
    if failed:
        raise SystemExit(f"llama.cpp could not write {target.name}; K-quants need a row length that is a multiple of 256")


def quantize_with_llama_cpp(path: Path, names: tuple[str, ...], folder: Path) -> dict[str, Path]:
    """Quantize a model's floats with llama.cpp; return the files by name, or none if it is not installed."""
    if not names or find_spec("llama_cpp") is None:
        return {}
    import llama_cpp

    import llama_jax

    floats = folder / "float32.gguf"
    llama_jax.convert(path, floats, dtype="float32")
    files = {}
    for name in names:
        files[f"llama.cpp {name}"] = file = folder / f"{name}.gguf"
        quantize_file(floats, file, getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}"))
    return files


def file_size(path: Path) -> dict[str, float]:
    """Bytes of a GGUF's tensors, and bits per parameter."""
    from gguf import GGUFReader

    tensors = GGUFReader(path).tensors
    size = int(sum(tensor.n_bytes for tensor in tensors))
    return {"bytes": size, "bits": 8 * size / int(sum(tensor.n_elements for tensor in tensors))}


def measure(
    path: Path, text: Path, formats: tuple[str, ...], files: dict[str, Path], arguments: Arguments
) -> Iterator[dict[str, Any]]:
    """Yield the results so far after each format and each file of a model; for an unsupported format, the reason."""
    import llama_jax
    from llama_jax.errors import UserError
    from llama_jax.evaluation.perplexity import kl_to_reference
    from llama_jax.verify.rounding_error import matrix_errors

    config, params, tokenizer = llama_jax.load(path, "float32")
    read, corpus = read_corpus(config, params, tokenizer, arguments.tokens, text)
    length = min(LENGTH, config.max_seq_len)
    first = corpus.document(0)[: length // 2].astype(np.int32)
    load = lambda file: llama_jax.load(file, "float32", quantize="keep").params
    models: dict[str, Callable[[], LlamaParams]] = {name: partial(convert, params, name) for name in formats}
    models |= {name: partial(load, file) for name, file in files.items()}
    rows: dict[str, Any] = {}
    for name, make in models.items():
        try:
            quantized = make()
        except UserError as error:
            rows[name] = {"refused": str(error)}
            print(f"  {name:16} {error}", flush=True)
            continue
        row = asdict(kl_to_reference(config, quantized, params, corpus, batch=1, length=length))
        model, dense = row.pop("model"), row.pop("reference")
        row |= file_size(files[name]) if name in files else size_of(quantized)
        row |= {"perplexity": model["perplexity"], "by_layer": errors_by_layer(config, quantized, params, first)}
        if config.n_layers <= SHOWN_LAYERS:
            row["matrices"] = [error._asdict() for error in matrix_errors(quantized, params)]
        rows[name] = row
        print(
            f"  {name:16} {row['bits']:6.2f} bits  KL {row['kl']:.2e} ± {row['kl_error']:.0e}"
            f"  perplexity x {row['perplexity_ratio']:.4f}  same token {row['same_top']:.2%}",
            flush=True,
        )
        yield {"read": read, "tokens": dense["tokens"], "perplexity": dense["perplexity"], "kinds": rows}


def as_tables(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    lines = ["# Weights in fewer bits", "", f"{report['machine']['cpu']}, {report['machine']['cores']} cores.", ""]
    for name, results in report["quality"].items():
        lines += [f"## {name}: divergence from float32", ""]
        lines += [
            f"{results['tokens']:,} tokens of {results['read']}; perplexity {results['perplexity']:.3f} in float32.",
            "",
        ]
        heading = (
            "format",
            "bits a weight",
            "MB",
            "KL, nats a token",
            "perplexity x",
            "same top token",
            "last layer off by",
        )
        cells = []
        for quant, row in results["kinds"].items():
            if "refused" not in row:
                kl = f"{row['kl']:.1e} ± {row['kl_error']:.0e}" if row["kl"] else "0"
                shares = f"{row['perplexity_ratio']:.4f}", f"{row['same_top']:.2%}", f"{row['by_layer'][-1]:.2%}"
                cells.append((quant, f"{row['bits']:.2f}", f"{row['bytes'] / 1e6:.2f}", kl, *shares))
        lines += [markdown_table(heading, cells), ""]
        refused = [quant for quant, row in results["kinds"].items() if "refused" in row]
        if refused:
            lines += [f"Not of this model, whose rows are not made of whole blocks: {', '.join(refused)}.", ""]
    return "\n".join(lines)


def draw(report: dict[str, Any]) -> Figure:
    """Draw divergence over bits per weight, with a mark for each format, and the error of each layer of the first model."""
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2, width_ratios=(1.4, 1))
    for (name, results), color, mark in zip(report["quality"].items(), COLORS, "os^v", strict=False):
        rows = {quant: row for quant, row in results["kinds"].items() if row.get("kl", 0) > 0}
        points = [(row["bits"], row["kl"]) for row in rows.values()]
        left.plot(*zip(*points, strict=True), mark, color=color, ms=7, label=name)
        for quant, point in zip(rows, points, strict=True):
            left.annotate(quant, point, xytext=(6, 4), textcoords="offset points", fontsize=9, color=color)
    left.set(xscale="log", yscale="log", xlabel="bits for each weight", title="KL divergence from float32, nats a token")
    ticks = (4, 6, 8, 16)
    left.set_xticks(ticks, map(str, ticks))
    left.minorticks_off()
    left.margins(x=0.12)
    model, first = next(iter(report["quality"].items()))
    looks = itertools.cycle((color, dashes) for dashes in DASHES for color in COLORS)
    measured = {quant: row for quant, row in first["kinds"].items() if "refused" not in row}
    for quant, row in measured.items():
        if row["by_layer"][-1] > 0:
            color, dashes = next(looks)
            right.plot(row["by_layer"], color=color, ls=dashes, marker="o", ms=4, lw=1.2, label=quant)
    count = len(next(iter(measured.values()))["by_layer"])
    names = ["embedding", *(f"layer {i}" for i in range(count - 1))]
    step = -(-count // 6)
    right.set_xticks(range(0, count, step), names[::step], fontsize=8)
    right.set(yscale="log", title=f"Error of each layer's output,\n{model}")
    finish(left, right)
    right.legend(frameon=False, fontsize=7, ncols=2)
    return figure


def main(arguments: Arguments) -> None:
    from llama_jax.formats.loading import bundled

    formats = formats_of(arguments)
    report: dict[str, Any] = json.loads(arguments.output.read_text("utf-8")) if arguments.output.exists() else {}
    report |= describe_run(arguments, "numpy", "gguf")
    before = report.get("quality", {})
    name = "bundled" if arguments.model is None else arguments.model.stem
    default = "tinystories-valid.txt" if arguments.model is None else "wikitext-2-test.txt"
    print(f"{name}:", flush=True)
    with TemporaryDirectory() as folder:
        files = (
            {} if arguments.model is None else quantize_with_llama_cpp(arguments.model, arguments.llama_cpp, Path(folder))
        )
        path, text = arguments.model or bundled(), arguments.text or DATA / "text" / default
        for results in measure(path, text, formats, files, arguments):
            same = before.get(name, {})
            if (same.get("read"), same.get("tokens")) == (results["read"], results["tokens"]):
                results = results | {"kinds": same["kinds"] | results["kinds"]}
            report["quality"] = ({name: results} if arguments.model else {}) | before | {name: results}
            write_report(arguments.output, report)
    tables = as_tables(report)
    write_text(arguments.output.with_suffix(".md"), tables)
    print(tables)
    draw(report).savefig(arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
