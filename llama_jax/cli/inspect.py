"""``llama-jax inspect``: what is in a model's files."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import tyro

from llama_jax.cli.options import ModelPath
from llama_jax.cli.terminal import columns, printable, size
from llama_jax.config import LlamaConfig
from llama_jax.config.presets import PRESETS, SHAPE_FIELDS
from llama_jax.errors import UserError
from llama_jax.storage import Location
from llama_jax.tokenizers import Tokenizer

if TYPE_CHECKING:
    from llama_jax.formats.lazy_tensors import TensorInfo
    from llama_jax.formats.weight_format import OpenedCheckpoint

CACHE_DTYPES = ("bfloat16", "float32")
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")  # kinds whose names say their bits


@dataclass(frozen=True)
class Inspect:
    """Show what is in a model's files: types and bytes of the tensors, configuration, parameters, cache, vocabulary.

    No weights are read, except for the checksums of a run's checkpoint, which is fetched from a store. Exit code 2 if
    something is wrong with the files."""

    path: tyro.conf.Positional[ModelPath]
    """Folder or file of a model, in any supported format."""
    tensors: bool = False
    """List every tensor."""
    json: bool = False
    """Print a JSON object instead."""

    def run(self) -> None:
        import jax

        from llama_jax.formats.loading import open_checkpoint

        jax.config.update("jax_platforms", "cpu")  # nothing is computed: no accelerator need be there, or be free
        opened = open_checkpoint(self.path)
        facts = inspect_checkpoint(opened)
        if self.tensors:
            facts["tensors"] = [
                {"name": name, "kind": tensor.storage_type, "shape": tensor.shape, "bytes": tensor.nbytes}
                for name, tensor in opened.tensors.items()
            ]
        print(json.dumps(facts) if self.json else inspection_page(facts))
        if facts["problems"]:
            raise UserError(facts["problems"][0])


def inspect_checkpoint(opened: OpenedCheckpoint) -> dict[str, Any]:
    """The findings of `inspect`, as in its JSON."""
    import jax.numpy as jnp

    from llama_jax.formats.loading import check_names
    from llama_jax.model.cache import cache_bytes
    from llama_jax.model.trees import parameter_count

    config = opened.config
    problems: list[str] = []

    def run_check(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except UserError as error:
            problems.append(str(error))
            return None

    run_check(lambda: check_names(opened))
    before = len(problems)
    tokenizer = run_check(opened.tokenizer)
    is_known = len(problems) == before
    run_check(lambda: _check_sums(opened))
    return {
        "path": str(opened.path),
        "format": opened.format,
        "files": {str(file): file.stat().st_size for file in _checkpoint_files(opened)},
        "config": asdict(config),
        "presets": _presets(config),
        "parameters": parameter_count(config),
        "kinds": _tensor_statistics(opened.tensors),
        "cache_bytes_per_token": {dtype: cache_bytes(config, 1, 1, jnp.dtype(dtype)) for dtype in CACHE_DTYPES},
        "vocabulary": None if tokenizer is None else _vocabulary_facts(tokenizer),
        "vocabulary_is_known": is_known,
        "problems": problems,
    }


def inspection_page(facts: Mapping[str, Any]) -> str:
    """The same as text, but for the first problem, which is the error that the command ends with."""
    parts = [f"{printable(facts['path'])}: {facts['format']}", columns(_rows(facts), indent="  ")]
    if "tensors" in facts:
        rows = [[printable(t["name"]), t["kind"], str(list(t["shape"])), size(t["bytes"])] for t in facts["tensors"]]
        parts.append(columns(rows, right=(3,), indent="  "))
    parts += [f"problem: {printable(problem)}" for problem in facts["problems"][1:]]
    return "\n\n".join(parts)


def _rows(facts: Mapping[str, Any]) -> list[list[str]]:
    c, files, tensor_types = facts["config"], facts["files"], facts["kinds"]
    presets = [
        f"the sizes of {preset['name']}, but not {', '.join(preset['differs'])}" if preset["differs"] else preset["name"]
        for preset in facts["presets"]
    ]
    stated = c["unscaled_max_seq_len"]
    unscaled = "" if stated is None else f", {stated:,} without the RoPE scaling"
    rows = [
        ["layers", f"{c['n_layers']:,}"],
        ["embedding width", f"{c['dim']:,}"],
        ["query heads", f"{c['n_heads']:,}"],
        ["key/value heads", f"{c['n_kv_heads']:,}"],
        ["head dimension", f"{c['head_dim']:,}"],
        ["feed-forward width", f"{c['hidden_dim']:,}"],
        ["vocabulary size", f"{c['vocab_size']:,}"],
        ["context length", f"{c['max_seq_len']:,}{unscaled}"],
        ["RoPE theta", f"{c['rope_theta']:,.12g}"],
        ["RoPE scaling", _scaling(c["rope_scaling"])],
        ["RMSNorm epsilon", f"{c['norm_eps']:g}"],
        ["tied embeddings", "yes" if c["tie_embeddings"] else "no"],
        *_only_in_siblings(c),
        *([f"own {part}", printable(name)] for part, name in c["parts"].items() if name is not None),
        ["preset", "; ".join(presets) or "none of these sizes"],
        ["", ""],
        ["parameters", f"{facts['parameters']:,}"],
        ["files", f"{len(files):,}, {size(sum(files.values()))}"],
    ]
    for tensor_type, counts in tensor_types.items():
        bits = "" if tensor_type in FLOAT_TYPES else f", {counts['bits']:.4g} bits a number"
        rows.append([f"{tensor_type} tensors", f"{counts['tensors']:,}, {size(counts['bytes'])}{bits}"])
    for dtype, count in facts["cache_bytes_per_token"].items():
        full = f"{size(count * c['max_seq_len'])} for the whole context"
        rows.append([f"{dtype} cache", f"{size(count)} per token, {full}"])
    return [*rows, ["vocabulary", _vocabulary_words(facts["vocabulary"]) if facts["vocabulary_is_known"] else "unknown"]]


def _check_sums(opened: OpenedCheckpoint) -> None:
    """Raise CheckpointError for a step of a run with changed files; of a step in a store, the model's files were fetched."""
    from llama_jax.formats.orbax_format import OrbaxCheckpoint
    from llama_jax.formats.step_dirs import ABOUT, check_checksums
    from llama_jax.storage import StoredPath

    if isinstance(opened, OrbaxCheckpoint) and opened.of_run:
        folder, name = opened.arrays
        check_checksums(folder, {ABOUT, name} if isinstance(opened.path, StoredPath) else None)


def _checkpoint_files(opened: OpenedCheckpoint) -> list[Location]:
    """The files that hold the model's tensors."""
    from llama_jax.formats.orbax_format import OrbaxCheckpoint

    if isinstance(opened, OrbaxCheckpoint):
        folder, name = opened.arrays  # of a run's checkpoint the model alone, not the optimizer's numbers
        where = folder / name if opened.of_run else folder.parent
        within = folder if opened.of_run else folder.parent
        files = sorted(file for file in where.rglob("*") if file.is_file())
        return [opened.path / file.relative_to(within).as_posix() for file in files]
    return sorted({file for tensor in opened.tensors.values() for file in _tensor_files(tensor)}, key=str)


def _tensor_files(tensor: Any) -> list[Location]:
    from llama_jax.formats.hf_quantized import QuantizedTensor
    from llama_jax.formats.lazy_tensors import Combined, Derived

    if isinstance(tensor, QuantizedTensor):
        return [part.path for part in tensor.parts.values()]
    if isinstance(tensor, Combined):
        return [file for part in tensor.parts for file in _tensor_files(part)]
    return _tensor_files(tensor.tensor) if isinstance(tensor, Derived) else [tensor.path]


NORM_WORDS = {"post": "after attention and feed-forward", "both": "before and after attention and feed-forward"}
QK_NORM_WORDS = {"head": "of each head", "all": "of all heads together", "l2": "of each head after RoPE, without weights"}
BIAS_WORDS = {"qkv_bias": "query, key and value biases", "out_bias": "output bias", "mlp_bias": "feed-forward biases"}
MULTIPLIER_FIELDS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


def _only_in_siblings(c: Mapping[str, Any]) -> list[list[str]]:
    """The parts of a model that no Llama has."""
    rows = [["attention window", f"{c['window']:,} tokens"]] if c["window"] else []
    rows += [[name, "yes"] for field, name in BIAS_WORDS.items() if c[field]]
    rows += [["query and key norms", QK_NORM_WORDS[c["qk_norm"]]]] if c["qk_norm"] else []
    attention_counts = Counter(
        _attention_of(c["layers"][i % len(c["layers"])]) for i in range(c["n_layers"] if c["layers"] else 0)
    )
    rows += [["attention", f"{count:,} layers {words}"] for words, count in attention_counts.items()]
    rows += [["rotated features", f"{c['rotary_dim']:,} of a head"]] if c["rotary_dim"] else []
    if c["query_scaling"]:
        rows.append(["query scaling", "beta {beta:g} beyond {context:,} tokens".format(**c["query_scaling"])])
    rows += [["norms", NORM_WORDS[c["norm"]]]] if c["norm"] != "pre" else []
    rows += [["activation", c["activation"]]] if c["activation"] != "silu" else []
    rows += [[name.replace("_", " "), f"{c[name]:g}"] for name in MULTIPLIER_FIELDS if c[name] not in (None, 1)]
    shared = " and one for all" if c["shared_expert"] else ""
    return rows + (
        [["experts", f"{c['experts']:,}, {c['experts_per_token']:,} for a token{shared}"]] if c["experts"] else []
    )


def _attention_of(layer: Mapping[str, Any]) -> str:
    span = "over all tokens" if layer["window"] is None else f"within {layer['window']:,} tokens"
    span = span if layer["chunk"] is None else f"within chunks of {layer['chunk']:,} tokens"
    theta = "" if layer["rope_theta"] is None else f" and theta {layer['rope_theta']:,.12g}"
    return span + {"none": ", without RoPE", "unscaled": f", with unscaled RoPE{theta}", "model": ""}[layer["rope"]]


def _tensor_statistics(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, Any]]:
    """How many tensors, numbers and bytes there are of each kind, and bits for a number, the most bytes first."""
    statistics: dict[str, dict[str, Any]] = {}
    for tensor in tensors.values():
        counts = statistics.setdefault(tensor.storage_type, {"tensors": 0, "numbers": 0, "bytes": 0})
        counts["tensors"] += 1
        counts["numbers"] += math.prod(tensor.shape)
        counts["bytes"] += tensor.nbytes
    for counts in statistics.values():
        counts["bits"] = round(8 * counts["bytes"] / max(1, counts["numbers"]), 3)
    return dict(sorted(statistics.items(), key=lambda item: -item[1]["bytes"]))


def _presets(config: LlamaConfig) -> list[dict[str, Any]]:
    """The presets equal to this configuration; or if there is none, those of its sizes, with the differences."""
    differing = {
        name: [f.name for f in fields(LlamaConfig) if getattr(config, f.name) != getattr(preset, f.name)]
        for name, preset in PRESETS.items()
    }
    sizes = {*SHAPE_FIELDS, "tie_embeddings"}
    least = [] if [] in differing.values() else [name for name in differing if sizes.isdisjoint(differing[name])]
    return [{"name": name, "differs": differs} for name, differs in differing.items() if not differs or name in least]


def _scaling(scaling: Mapping[str, Any] | None) -> str:
    if scaling is None:
        return "none"
    words = [scaling["kind"], f"factor {scaling['factor']:g}"]
    for low, high, name in (
        ("low_freq_factor", "high_freq_factor", "low and high frequency factors"),
        ("beta_slow", "beta_fast", "slow and fast beta"),
        ("mscale", "mscale_all_dim", "mscale and mscale_all_dim"),
        ("short_factor", "long_factor", "short and long factors"),
    ):
        if scaling[low] is not None:
            words.append(f"{name} {_span(scaling[low])} and {_span(scaling[high])}")
    if scaling["attention_factor"] is not None:
        words.append(f"attention factor {scaling['attention_factor']:g}")
    if scaling["truncate"] is False:
        words.append("not truncated")
    if scaling["original_max_seq_len"] is not None:
        words.append(f"trained at {scaling['original_max_seq_len']:,}")
    return ", ".join(words)


def _span(value: float | Sequence[float]) -> str:
    """A number, or the range of several."""
    return f"{min(value):g}..{max(value):g}" if isinstance(value, Sequence) else f"{value:g}"


def _vocabulary_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "kind": type(tokenizer).__name__.removesuffix("Tokenizer"),
        "size": tokenizer.vocab_size,
        "bos": tokenizer.bos_id,
        "add_bos": tokenizer.add_bos,
        "eos": tokenizer.eos_id,
        "stop": tokenizer.stop_ids,
        "chat_template": tokenizer.chat_template is not None,
    }


def _vocabulary_words(vocabulary: Mapping[str, Any] | None) -> str:
    if vocabulary is None:
        return "none"
    put = "" if vocabulary["add_bos"] or vocabulary["bos"] < 0 else " (not before a text)"
    ids = f"bos {vocabulary['bos']}{put}, eos {vocabulary['eos']}, stop {' '.join(map(str, vocabulary['stop'])) or 'none'}"
    template = "with" if vocabulary["chat_template"] else "no"
    return f"{vocabulary['kind']}, {vocabulary['size']:,} pieces; {ids}; {template} chat template"
