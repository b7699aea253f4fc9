"""The cost of quantization: weight formats by size, speed and divergence from float32, on this machine's CPU.

    python experiments/quantization.py                      about ten minutes on two cores
    python experiments/quantization.py --stages quality     only divergence, which does not depend on the machine's load
    python experiments/quantization.py --stages speed       only speed; the report keeps its results of the other stage and
                                                            of other shapes and formats
    python experiments/quantization.py --stages quality --model SmolLM2-135M-Instruct.Q4_1.gguf --tokens 4096
                                                            a real model, compared with llama.cpp's quantizers; the report
                                                            keeps the other models

quality  For trained models, compared with float32: KL divergence of the next token with its standard error, ratio of
         perplexities, how often the most probable token is the same, and the errors of each layer's output and of each
         matrix. The models are the bundled one and, if the shared data is next to this clone (or in LLAMA_JAX_TEST_DATA),
         the 260K stories model, on its validation stories; without the data, on stories that each model generates. A real
         model (--model) uses WikiText's test split from the shared data. If llama-cpp-python is installed, llama.cpp also
         quantizes its floats, each type with llama.cpp's default mix, and this library loads the files.
speed    With random weights of larger shapes: decoding one row after a prompt, and prefilling 256 tokens. All formats are in
         memory and take turns, so that changes of the machine's speed affect all of them; medians.

Formats are those that the library can quantize to (`ops.weights.formats.ENCODABLE`), float32 and bfloat16. The speed stage
also has formats that exist only in files, made of random bytes; `--gguf` adds files of the first model to the quality stage,
in their format. The computation is in float32 except for bfloat16. Writes ``experiments/results/quantization_cpu.json``, the
tables in ``.md`` and a picture in ``.png``.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import tyro
from bench_generate import quantize_file
from measuring import cpu_name, settings, versions, write_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from llama_jax.config import LlamaConfig
    from llama_jax.data import Corpus
    from llama_jax.model.params import Llama
    from llama_jax.tokenizers import Tokenizer

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("LLAMA_JAX_TEST_DATA", ROOT.parent / "shared" / "data"))
FLOATS = ("float32", "bfloat16")
SHOWN_LAYERS = 8  # more matrices would be most of the report
LENGTH = 512  # maximum tokens of a window
WRITTEN = 24  # stories that a model generates if there is no text


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    stages: tuple[str, ...] = ("quality", "speed")
    """Stages: quality and speed; the report keeps its results of an omitted stage."""
    model: Path | None = None
    """A real model, of any supported format; only its quality is measured."""
    llama_cpp: tuple[str, ...] = ("Q8_0", "Q6_K", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0", "IQ4_NL", "Q3_K_M", "Q2_K")
    """llama.cpp's mixes to compare, by llama.cpp's names."""
    kinds: tuple[str, ...] = ()
    """Only these formats; all by default."""
    gguf: tuple[Path, ...] = ()
    """Quantized files of the model (the bundled one without --model), measured in their format."""
    tokens: int = 16_384
    """Maximum tokens for the divergence of each model."""
    shapes: tuple[str, ...] = ("stories-110m",)
    """Presets whose speed is measured, with random weights."""
    repetitions: int = 7
    """Interleaved repetitions of each measurement of speed, after an uncounted warm-up."""
    new_tokens: int = 32
    """Tokens decoded in each repetition."""
    output: Path = ROOT / "experiments" / "results" / "quantization_cpu.json"
    """The report; tables and picture are next to it."""


def kinds_of(arguments: Arguments) -> tuple[str, ...]:
    """Floats, formats that the library quantizes to, and formats that only files have."""
    from llama_jax.ops.weights.formats import ENCODABLE, QUANT_FORMATS, PureFormatName

    every = (*FLOATS, *ENCODABLE, *(kind for kind, form in QUANT_FORMATS.items() if form.is_gguf and kind not in ENCODABLE))
    pure = get_args(PureFormatName)
    unknown = set(arguments.kinds) - {*every, *pure}
    if unknown:
        raise SystemExit(f"--kinds {' '.join(sorted(unknown))}: unknown; the kinds are {', '.join(every)}")
    return tuple(kind for kind in (*every, *pure) if kind in (arguments.kinds or every))


def in_kind(params: Llama, kind: str) -> Llama:
    """Convert float32 parameters to another kind; ConfigError if rows are not a multiple of its block size."""
    import jax

    from llama_jax.model.trees import quantize

    if kind in FLOATS:
        return jax.tree.map(lambda leaf: leaf.astype(kind), params)
    return quantize(params, kind)


def in_random_blocks(params: Llama, kind: str) -> Llama:
    """Parameters of a kind that the library cannot quantize to: random bytes, with factors that keep numbers small."""
    import jax
    import jax.numpy as jnp

    from llama_jax.model.params import spec_at
    from llama_jax.ops.weights.formats import QUANT_FORMATS
    from llama_jax.ops.weights.quantized_matmul import QuantizedWeight

    random, form = np.random.default_rng(0), QUANT_FORMATS[kind]

    def plane(dtype: Any, shape: tuple[int, ...]) -> Any:
        if np.dtype(dtype).kind == "f":
            return jnp.asarray(random.uniform(0, 1e-4, shape).astype(dtype))
        return jnp.asarray(random.integers(0, 256, shape, np.uint8).view(dtype))

    def blocks(path: tuple, leaf: Any) -> Any:
        if not spec_at(path).is_quantizable:
            return leaf
        planes = tuple(plane(one.dtype, one.shape(leaf.shape)) for one in form.planes)
        return QuantizedWeight(planes, kind, str(leaf.dtype))

    return jax.tree_util.tree_map_with_path(blocks, params)


def held(params: Llama) -> dict[str, float]:
    """Bytes, and bits per parameter, including norms."""
    from llama_jax.model.trees import bytes_in_memory, count

    size = bytes_in_memory(params)
    return {"bytes": size, "bits": 8 * size / count(params)}


# --- quality -------------------------------------------------------------------------------------------------------------


def trained_models() -> dict[str, Path]:
    """The bundled model and the available shared ones, by name."""
    from llama_jax.formats.loading import bundled

    stories = DATA / "stories260K"
    return {"bundled": bundled()} | ({"stories-260k": stories} if stories.is_dir() else {})


def text_for(config: LlamaConfig, params: Llama, tokenizer: Tokenizer, tokens: int, path: Path) -> tuple[str, Corpus]:
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
    found = llama_jax.generate(
        config, params, prompts, max_new_tokens=most, sampling=sampling, stop_tokens=tokenizer.stop_ids
    )
    written = [[tokenizer.bos_id, *one.tokens] for one in found]
    stops = np.cumsum([len(one) for one in written])
    starts = stops - [len(one) for one in written]
    flat = np.concatenate(written).astype(np.uint32)
    return "stories of its own", Corpus(flat, starts, stops, np.zeros(len(stops), np.int64), config.vocab_size, "")


def errors_by_layer(config: LlamaConfig, params: Llama, reference: Llama, tokens: np.ndarray) -> list[float]:
    """Relative root mean square errors of the embedding and of each layer's output."""
    import jax
    import jax.numpy as jnp

    import llama_jax

    @partial(jax.jit, static_argnums=0)
    def streams(config: LlamaConfig, params: Llama) -> Any:
        keep = lambda x, at: (x, x)
        hooks = {"residual_before": keep, "residual_after": keep}
        _, _, kept = llama_jax.observe(config, params, tokens[None], hooks)
        return [kept["residual_before"][0], *kept["residual_after"]]

    pairs = zip(streams(config, params), streams(config, reference), strict=True)
    return [float(jnp.linalg.norm(ours.astype(jnp.float32) - theirs) / jnp.linalg.norm(theirs)) for ours, theirs in pairs]


def by_llama_cpp(path: Path, names: tuple[str, ...], folder: Path) -> dict[str, Path]:
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
        quantize_file(floats, file, getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}"), pure=False)
    return files


def in_file(path: Path) -> dict[str, float]:
    """Bytes of a GGUF's tensors, and bits per parameter."""
    from gguf import GGUFReader

    tensors = GGUFReader(path).tensors
    size = int(sum(tensor.n_bytes for tensor in tensors))
    return {"bytes": size, "bits": 8 * size / int(sum(tensor.n_elements for tensor in tensors))}


def quality(
    path: Path,
    text: Path,
    kinds: tuple[str, ...],
    files: dict[str, Path],
    most: int,
    write: Callable[[dict[str, Any]], None],
) -> None:
    """Measure each kind and each file of a model and add the results to the report; for an unsupported kind, the reason."""
    import llama_jax
    from llama_jax.errors import UserError
    from llama_jax.evaluation.perplexity import kl_to_reference
    from llama_jax.verify.rounding_error import matrix_errors

    config, params, tokenizer = llama_jax.load(path, "float32")
    assert tokenizer is not None
    read, corpus = text_for(config, params, tokenizer, most, text)
    made: dict[str, Callable[[], Llama]] = {kind: partial(in_kind, params, kind) for kind in kinds}
    kept = lambda file: llama_jax.load(file, "float32", quantize="keep").params
    made |= {name: partial(kept, file) for name, file in files.items()}
    rows: dict[str, Any] = {}
    for kind, make in made.items():
        try:
            ours = make()
        except UserError as error:
            rows[kind] = {"refused": str(error)}
            print(f"  {kind:16} {error}", flush=True)
            continue
        found = asdict(kl_to_reference(config, ours, params, corpus, batch=1, length=min(LENGTH, config.max_seq_len)))
        model, dense = found.pop("model"), found.pop("reference")
        first = corpus.document(0)[: min(LENGTH, config.max_seq_len) // 2].astype(np.int32)
        rows[kind] = {
            **(in_file(files[kind]) if kind in files else held(ours)),
            **found,
            "perplexity": model["perplexity"],
            "by_layer": errors_by_layer(config, ours, params, first),
        }
        if config.n_layers <= SHOWN_LAYERS:
            rows[kind]["matrices"] = [error._asdict() for error in matrix_errors(ours, params)]
        print(
            f"  {kind:16} {rows[kind]['bits']:6.2f} bits  KL {found['kl']:.2e} ± {found['kl_error']:.0e}"
            f"  perplexity x {found['perplexity_ratio']:.4f}  same token {found['same_top']:.2%}",
            flush=True,
        )
        write({"read": read, "tokens": dense["tokens"], "perplexity": dense["perplexity"], "kinds": rows})


# --- speed ---------------------------------------------------------------------------------------------------------------


def speed(shape: str, kinds: tuple[str, ...], arguments: Arguments) -> dict[str, Any]:
    """Tokens/s of every kind, interleaved."""
    import jax

    import llama_jax
    from llama_jax.errors import UserError
    from llama_jax.model.cache import init_cache
    from llama_jax.ops.weights.formats import QUANT_FORMATS

    config = llama_jax.preset(shape)
    params = llama_jax.init(config, jax.random.key(0))
    models: dict[str, Llama] = {}
    rows: dict[str, Any] = {}
    for kind in kinds:
        made_here = kind in FLOATS or QUANT_FORMATS[kind].encode is not None
        if not made_here and (config.dim % QUANT_FORMATS[kind].block or config.hidden_dim % QUANT_FORMATS[kind].block):
            rows[kind] = {"refused": f"rows of {config.dim} and {config.hidden_dim} numbers are not whole blocks of it"}
            continue
        try:
            models[kind] = in_kind(params, kind) if made_here else in_random_blocks(params, kind)
        except UserError as error:
            rows[kind] = {"refused": str(error)}
    random = np.random.default_rng(0)

    def decode(params: Llama) -> float:
        prompt = random.integers(3, config.vocab_size, (1, 64)).tolist()
        pieces = llama_jax.stream(config, params, prompt, max_new_tokens=arguments.new_tokens, max_chunks=1 << 20)
        next(pieces)
        start = time.perf_counter()
        made = sum(int(piece.valid.sum()) for piece in pieces)
        return made / (time.perf_counter() - start)

    @jax.jit
    def read(params: Llama, tokens: Any) -> Any:
        cache = init_cache(config, 1, 256, params.embedding.dtype)
        hidden, cache = llama_jax.forward(config, params, tokens, cache)
        return llama_jax.unembed(config, params, hidden[:, -1]), cache

    def prefill(params: Llama) -> float:
        tokens = random.integers(3, config.vocab_size, (1, 256), dtype=np.int32)
        start = time.perf_counter()
        jax.block_until_ready(read(params, tokens))
        return 256 / (time.perf_counter() - start)

    taken: dict[str, dict[str, list[float]]] = {kind: {"decode": [], "prefill": []} for kind in models}
    for repetition in range(arguments.repetitions + 1):
        for kind, ours in models.items():
            for name, measure in (("decode", decode), ("prefill", prefill)):
                rate = measure(ours)
                if repetition:
                    taken[kind][name].append(round(rate, 2))
    for kind, ours in models.items():
        medians = {f"{name}_median": statistics.median(rates) for name, rates in taken[kind].items()}
        rows[kind] = {**held(ours), **taken[kind], **medians}
    return {kind: rows[kind] for kind in kinds}


# --- what is written -----------------------------------------------------------------------------------------------------


def as_tables(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    lines = ["# Weights in fewer bits", "", f"{report['device']}, {report['cores']} cores.", ""]
    for name, found in report.get("quality", {}).items():
        lines += [f"## {name}: divergence from float32", ""]
        lines += [f"{found['tokens']:,} tokens of {found['read']}; perplexity {found['perplexity']:.3f} in float32.", ""]
        lines += ["| kind | bits a weight | MB | KL, nats a token | perplexity x | same top token | last layer off by |"]
        lines += ["|---|---:|---:|---:|---:|---:|---:|"]
        for kind, row in found["kinds"].items():
            if "refused" not in row:
                kl = f"{row['kl']:.1e} ± {row['kl_error']:.0e}" if row["kl"] else "0"
                cells = [f"{row['bits']:.2f}", f"{row['bytes'] / 1e6:.2f}", kl]
                cells += [f"{row['perplexity_ratio']:.4f}", f"{row['same_top']:.2%}", f"{row['by_layer'][-1]:.2%}"]
                lines.append(f"| {kind} | " + " | ".join(cells) + " |")
        refused = [kind for kind, row in found["kinds"].items() if "refused" in row]
        if refused:
            lines += ["", f"Not of this model, whose rows are not made of whole blocks: {', '.join(refused)}."]
        lines.append("")
    for shape, rows in report.get("speed", {}).items():
        there = {kind: row for kind, row in rows.items() if "refused" not in row}
        base = next(iter(there.values()))
        lines += [
            f"## {shape}: tokens/s",
            "",
            "One row, medians of interleaved runs; after the slash, over the first.",
            "",
        ]
        lines += ["| kind | bits a weight | MB | decode | prefill of 256 |", "|---|---:|---:|---:|---:|"]
        for kind, row in there.items():
            cells = [f"{row['bits']:.2f}", f"{row['bytes'] / 1e6:.0f}"]
            for name in ("decode_median", "prefill_median"):
                cells.append(f"{row[name]:,.1f} / {row[name] / base[name]:.2f}")
            lines.append(f"| {kind} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def draw(report: dict[str, Any]) -> Figure:
    """Draw divergence over bits per weight, with a mark for each kind, and the error of each layer of the first model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from plotting import COLORS, DASHES

    figure = Figure(figsize=(10, 4.2), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.4, 1))
    for (name, found), color, mark in zip(report["quality"].items(), COLORS, "os^v", strict=False):
        rows = {kind: row for kind, row in found["kinds"].items() if row.get("kl", 0) > 0}
        points = [(row["bits"], row["kl"]) for row in rows.values()]
        left.plot(*zip(*points, strict=True), mark, color=color, ms=7, label=name)
        for kind, point in zip(rows, points, strict=True):
            left.annotate(kind, point, xytext=(6, 4), textcoords="offset points", fontsize=9, color=color)
    left.set(xscale="log", yscale="log", xlabel="bits for each weight", title="KL divergence from float32, nats a token")
    ticks = (4, 6, 8, 16)
    left.set_xticks(ticks, map(str, ticks))
    left.minorticks_off()
    left.margins(x=0.12)
    left.legend(frameon=False)
    first = next(iter(report["quality"].values()))["kinds"]
    looks = itertools.cycle((color, dashes) for dashes in DASHES for color in COLORS)
    for kind, row in first.items():
        if "refused" not in row and row["by_layer"][-1] > 0:
            color, dashes = next(looks)
            right.plot(row["by_layer"], color=color, ls=dashes, marker="o", ms=4, lw=1.2, label=kind)
    count = len(next(row for row in first.values() if "by_layer" in row)["by_layer"])
    names = ["embedding", *(f"layer {i}" for i in range(count - 1))]
    step = -(-count // 6)
    right.set_xticks(range(0, count, step), names[::step], fontsize=8)
    right.set(yscale="log", title=f"Error of each layer's output,\n{next(iter(report['quality']))}")
    right.legend(frameon=False, fontsize=7, ncols=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD", lw=0.6)
        axes.title.set(ha="left", x=0, fontsize=11)
    return figure


def main(arguments: Arguments) -> None:
    import jax

    from llama_jax.ops.cpu import native

    unknown = set(arguments.stages) - {"quality", "speed"}
    if unknown:
        raise SystemExit(f"--stages {' '.join(sorted(unknown))}: unknown; the stages are quality and speed")
    kinds = kinds_of(arguments)
    report: dict[str, Any] = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    report |= {
        "device": f"{jax.devices()[0].device_kind}, {cpu_name()}",
        "cores": os.cpu_count(),
        "kernel": "native" if native.compiler() else "XLA",
        "versions": versions("jax", "jaxlib", "numpy", "gguf"),
        "settings": settings(arguments) | {"gguf": [file.name for file in arguments.gguf], "output": arguments.output.name},
    }
    if "quality" in arguments.stages:
        from llama_jax.model.mixtures import MIXTURES

        makes = tuple(kind for kind in kinds if kind in (*FLOATS, *MIXTURES))
        with TemporaryDirectory() as folder:
            if arguments.model is None:
                gguf = {file.stem: file for file in arguments.gguf}
                stories = DATA / "text" / "tinystories-valid.txt"
                models = {
                    name: (path, stories, gguf if name == "bundled" else {}) for name, path in trained_models().items()
                }
            else:
                blocks = by_llama_cpp(arguments.model, arguments.llama_cpp, Path(folder))
                blocks |= {file.stem: file for file in arguments.gguf}
                models = {arguments.model.stem: (arguments.model, DATA / "text" / "wikitext-2-test.txt", blocks)}
            for name, (path, text, files) in models.items():
                print(f"{name}:", flush=True)

                def write(found: dict[str, Any], name: str = name) -> None:
                    before = report.get("quality", {})
                    same = before.get(name, {})
                    if (same.get("read"), same.get("tokens")) == (found["read"], found["tokens"]):
                        found["kinds"] = same["kinds"] | found["kinds"]
                    report["quality"] = ({name: found} if arguments.model else {}) | before | {name: found}
                    write_report(arguments.output, report)

                quality(path, text, makes, files, arguments.tokens, write)
    if "speed" in arguments.stages:
        for shape in arguments.shapes:
            report["speed"] = report.get("speed", {}) | {shape: speed(shape, kinds, arguments)}
            write_report(arguments.output, report)
    tables = as_tables(report)
    arguments.output.with_suffix(".md").write_text(tables, "utf-8")
    print(tables)
    if "quality" in report:
        draw(report).savefig(arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
