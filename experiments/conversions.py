"""Which files and settings next to the weights conversions preserve: 20 models in every format, converted to each other.

  python experiments/conversions.py --output docs/conversions.md

The models are small and random, with vocabularies and settings typical of the families. A cell is the share of the source's
settings that are kept in the output of `convert`. The other settings must be named in the line that it logs; otherwise they
are listed as lost silently.
"""

from __future__ import annotations

import base64
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
import tyro
from measuring import ROOT

import llama_jax
from llama_jax import LayerConfig, LlamaConfig, QueryScaling, RopeScaling
from llama_jax.errors import CheckpointError
from llama_jax.formats import open_checkpoint
from llama_jax.formats.huggingface import from_params
from llama_jax.formats.model_folder import all_settings, metadata_from_fields, metadata_to_fields, missing_settings
from llama_jax.tokenizers.gguf import from_metadata, to_metadata
from llama_jax.tokenizers.huggingface import BYTE_CHARACTERS
from llama_jax.tokenizers.pre_tokenizers import PRE_TOKENIZERS, build_pre_tokenizer
from llama_jax.tokenizers.sentencepiece import Entry, EntryType, write_model
from llama_jax.tokenizers.tiktoken import SPECIAL_TOKENS

sys.path.append(str(ROOT / "tests"))

from make_format_goldens import write_meta

BASE = LlamaConfig(
    vocab_size=544,
    dim=16,
    n_layers=1,
    n_heads=8,
    n_kv_heads=8,
    hidden_dim=32,
    max_seq_len=4096,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_embeddings=False,
)
SOURCES = ("safetensors", "gguf", "meta", "llama2c", "orbax")
TARGETS = ("safetensors", "gguf", "llama2c", "orbax")
NAMES = {"gguf": "model.gguf", "llama2c": "model.bin"}
LICENSE_TEXT = "Use it for good.\n"


def sentencepiece_file(*added: tuple[str, EntryType]) -> bytes:
    pieces = [Entry("<unk>", 0.0, EntryType.UNKNOWN), *(Entry(name, 0.0, EntryType.CONTROL) for name in ("<s>", "</s>"))]
    pieces += [Entry(f"<0x{byte:02X}>", 0.0, EntryType.BYTE) for byte in range(256)]
    pieces += [Entry(text, -1.0 - i, EntryType.NORMAL) for i, text in enumerate(["▁", *"abcdefghijklmnop", "▁a", "▁b"])]
    pieces += [Entry(text, 0.0, entry_kind) for text, entry_kind in added]
    return write_model(pieces, bos="<s>", eos="</s>", space_prefix=True)


def rank_file() -> bytes:
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the"]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def bytes_json(pre: str, *special: str, plain: tuple[str, ...] = (), bos: bool = False, rstrip: bool = False) -> bytes:
    """A byte-level tokenizer.json with this pre-tokenizer."""
    rule = PRE_TOKENIZERS[pre]
    vocabulary = {BYTE_CHARACTERS[byte]: byte for byte in range(256)} | {"th": 256, "the": 257}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")], ignore_merges=rule.ignore_merges)
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = build_pre_tokenizer(rule)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens([tokenizers.AddedToken(name, normalized=False, rstrip=rstrip) for name in special])
    library.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in plain])
    if bos:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], library.token_to_id(special[0]))]
        )
    text: str = library.to_str()
    return text.encode()


@dataclass(frozen=True)
class Model:
    """A published model: its configuration, and the files next to its weights by name."""

    config: LlamaConfig
    vocabulary: bytes
    files: dict[str, Any] = field(default_factory=dict)
    gguf: dict[str, Any] = field(default_factory=dict)
    """Fields of its GGUF in addition to those that `convert` writes."""

    @property
    def vocabulary_name(self) -> str:
        return "tokenizer.json" if self.vocabulary[:1] == b"{" else "tokenizer.model"


def _named(bos: str | None, eos: str, **more: Any) -> dict[str, Any]:
    return {"bos_token": bos, "eos_token": eos, **more}


def _card(**entries: Any) -> str:
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in entries.items()), "---", "# A model", ""])


def models() -> dict[str, Model]:
    """The models by name."""
    im = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    llama3 = _named("<|begin_of_text|>", "<|eot_id|>", pad_token="<|finetune_right_pad_id|>")
    qwen2, qwen3 = replace(BASE, qkv_bias=True), replace(BASE, qk_norm="head", head_dim=4)
    gemma = replace(
        BASE, norm="both", norm_offset=1.0, activation="gelu", qk_norm="head", embedding_multiplier=8.0, tie_embeddings=True
    )
    local = LayerConfig(8, rope="unscaled", rope_theta=1e4)
    gemma = replace(gemma, layers=(local,) * 5 + (LayerConfig(None),), rope_theta=1e6, n_layers=6, dim=64, head_dim=8)
    yarn = RopeScaling("yarn", 4.0, original_max_seq_len=16)
    vocabulary = sentencepiece_file()
    turns = sentencepiece_file(("<start_of_turn>", EntryType.CONTROL), ("<end_of_turn>", EntryType.CONTROL))
    users = sentencepiece_file(("<|user|>", EntryType.USER_DEFINED), ("<pad>", EntryType.CONTROL))
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    published = {
        "llama-1": Model(BASE, vocabulary),
        "llama-2": Model(
            BASE,
            vocabulary,
            {
                "tokenizer_config.json": _named("<s>", "</s>", unk_token="<unk>", add_bos_token=True, legacy=False),
                "generation_config.json": ids | {"pad_token_id": 0, "max_length": 4096} | sampled,
                "LICENSE.txt": LICENSE_TEXT,
                "USE_POLICY.md": LICENSE_TEXT,
            },
        ),
        "llama-2-chat": Model(
            BASE,
            users,
            {
                "tokenizer_config.json": _named("<s>", "</s>", pad_token="<pad>", chat_template="{{ messages }}"),
                "generation_config.json": {"bos_token_id": 1, "eos_token_id": [2, 279], "pad_token_id": 279},
            },
        ),
        "llama-3": Model(
            BASE,
            rank_file(),
            {
                "tokenizer_config.json": _named("<|begin_of_text|>", "<|end_of_text|>"),
                "generation_config.json": {"bos_token_id": 258, "eos_token_id": [259, 267]} | sampled,
            },
        ),
        "llama-3.1-instruct": Model(
            BASE,
            bytes_json("llama-bpe", *SPECIAL_TOKENS, bos=True),
            {
                "tokenizer_config.json": llama3 | {"chat_template": "{{ messages }}", "model_max_length": 131072},
                "generation_config.json": {"bos_token_id": 258, "eos_token_id": [259, 266, 267]} | sampled,
                "README.md": _card(
                    license="llama3.1", language=["en", "de"], tags=["facebook"], pipeline_tag="text-generation"
                ),
                "LICENSE": LICENSE_TEXT,
            },
        ),
        "four ends": Model(
            BASE,
            bytes_json("llama-bpe", *SPECIAL_TOKENS),
            {
                "tokenizer_config.json": _named("<|begin_of_text|>", "<|end_of_text|>"),
                "generation_config.json": {"bos_token_id": 258, "eos_token_id": [259, 270, 271, 272, 273, 274]},
            },
        ),
        "tinyllama": Model(
            replace(BASE, n_kv_heads=4),
            vocabulary,
            {
                "tokenizer_config.json": _named("<s>", "</s>", pad_token="</s>", padding_side="right"),
                "generation_config.json": ids | {"max_length": 2048, "pad_token_id": 0},
                "README.md": _card(license="apache-2.0", datasets=["x/y"], name="TinyLlama 1.1B"),
            },
        ),
        "mistral": Model(
            replace(BASE, window=8),
            vocabulary,
            {
                "tokenizer_config.json": _named("<s>", "</s>", add_bos_token=True, add_eos_token=False),
                "generation_config.json": ids,
            },
        ),
        "mistral-nemo": Model(
            replace(BASE, head_dim=4),
            bytes_json("tekken", "<unk>", "<s>", "</s>", "[INST]", "[/INST]", bos=False),
            {"tokenizer_config.json": _named("<s>", "</s>", unk_token="<unk>"), "generation_config.json": ids | sampled},
        ),
        "mixtral": Model(replace(BASE, experts=2, experts_per_token=1), vocabulary, {"generation_config.json": ids}),
        "smollm2": Model(
            replace(BASE, tie_embeddings=True),
            bytes_json("smollm", *im),
            {
                "tokenizer_config.json": _named("<|im_start|>", "<|im_end|>", pad_token="<|im_end|>", unk_token=im[0]),
                "generation_config.json": {"bos_token_id": 259, "eos_token_id": 260, "pad_token_id": 260},
            },
            {"tokenizer.ggml.pre": "smollm", "general.name": "Smollm2 135M", "general.license": "apache-2.0"},
        ),
        "qwen2.5": Model(
            qwen2,
            bytes_json("qwen2", *im, plain=("<tool_call>",)),
            {
                "tokenizer_config.json": _named(
                    None,
                    "<|im_end|>",
                    pad_token="<|endoftext|>",
                    chat_template=[
                        {"name": "default", "template": "{{ messages }}"},
                        {"name": "tool_use", "template": "{{ tools }}"},
                    ],
                ),
                "generation_config.json": {"eos_token_id": [260, 258], "pad_token_id": 258, "repetition_penalty": 1.1}
                | {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
            },
        ),
        "deepseek-r1-qwen": Model(
            qwen2,
            bytes_json("qwen2", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", bos=True),
            {
                "tokenizer_config.json": _named("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
                "generation_config.json": {"bos_token_id": 258, "eos_token_id": 259, "do_sample": False, "top_k": 7},
            },
            {"tokenizer.ggml.pre": "deepseek-r1-qwen", "general.basename": "DeepSeek-R1", "general.tags": ["r1"]},
        ),
        "qwen3": Model(
            qwen3,
            bytes_json("qwen2", *im),
            {
                "tokenizer_config.json": _named(None, "<|im_end|>", pad_token="<|endoftext|>"),
                "generation_config.json": {
                    "do_sample": True,
                    "temperature": 0.6,
                    "top_k": 20,
                    "min_p": 0.0,
                    "typical_p": 0.9,
                },
            },
            {"general.sampling.xtc_probability": 0.5, "general.sampling.penalty_last_n": -1},
        ),
        "olmo-2": Model(
            replace(BASE, qk_norm="all", norm="post"),
            bytes_json("gpt-2", "<|endoftext|>", "<|pad|>"),
            {"tokenizer_config.json": _named("<|endoftext|>", "<|endoftext|>", pad_token="<|pad|>")},
            {"tokenizer.ggml.fim_pre_token_id": 5, "tokenizer.ggml.pre": "olmo"},
        ),
        "gemma-3": Model(
            gemma,
            turns,
            {
                "tokenizer_config.json": _named("<s>", "</s>", unk_token="<unk>"),
                "generation_config.json": {"bos_token_id": 1, "eos_token_id": [2, 279], "top_k": 64, "top_p": 0.95}
                | {"do_sample": True},
                "README.md": _card(license="gemma", base_model="google/gemma-3"),
            },
        ),
        "phi-3": Model(
            BASE,
            bytes_json("llama-bpe", "<|endoftext|>", "<|user|>", "<|end|>", rstrip=True),
            {
                "tokenizer_config.json": _named("<|endoftext|>", "<|endoftext|>", pad_token="<|endoftext|>"),
                "generation_config.json": {"bos_token_id": 258, "eos_token_id": [258, 260]},
                "README.md": _card(name="Phi-3 mini", license="mit", license_link="https://example.org/license"),
            },
        ),
        "granite": Model(
            replace(BASE, embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.25, logits_scaling=2.0),
            bytes_json("starcoder", "<|end_of_text|>", "<fim_prefix>", "<reponame>"),
            {"tokenizer_config.json": _named("<|end_of_text|>", "<|end_of_text|>", mask_token="<reponame>")},
        ),
        "ministral-3": Model(
            replace(BASE, query_scaling=QueryScaling(0.1, 16), rope_scaling=yarn),
            bytes_json("tekken", "<unk>", "<s>", "</s>", bos=False),
            {"tokenizer_config.json": _named("<s>", "</s>"), "generation_config.json": {"temperature": 0.15} | ids},
        ),
        "stories": Model(replace(BASE, tie_embeddings=True), vocabulary, {}, {"general.name": "stories"}),
    }
    return {name: replace(model, config=_supported(model.config)) for name, model in published.items()}


def _supported(config: LlamaConfig) -> LlamaConfig:
    config.model_type  # raises if no family has this configuration  # noqa: B018
    return config


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the lines logged within the context."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("llama_jax.formats.saving")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings stored next to the weights of a written model."""
    opened = open_checkpoint(path)
    return all_settings(opened.tokenizer(), opened.metadata())


def publish(folder: Path, model: Model) -> dict[str, Path]:
    """Write the model in every format that can store it; return the paths by format."""
    params = llama_jax.init(model.config, jax.random.key(0))
    paths = {"safetensors": folder / "safetensors"}
    llama_jax.save(paths["safetensors"], model.config, params)
    others = [paths["safetensors"]]
    for format in ("gguf", "llama2c", "orbax"):
        paths[format] = folder / format / NAMES.get(format, "model")
        paths[format].parent.mkdir()
    if model.config == BASE:
        tensors = {name: np.asarray(t.read(0, t.shape[0])) for name, t in from_params(BASE, params, None).tensors.items()}
        paths["meta"] = folder / "meta"
        write_meta(paths["meta"], BASE, tensors, 1)
        others.append(paths["meta"])
    for folder_of_weights in others:
        (folder_of_weights / model.vocabulary_name).write_bytes(model.vocabulary)
        for name, content in model.files.items():
            (folder_of_weights / name).write_text(content if isinstance(content, str) else json.dumps(content))
    for format in ("gguf", "llama2c", "orbax"):
        try:
            llama_jax.convert(paths["safetensors"], paths[format], format=format)
        except CheckpointError:  # the format cannot store this family
            del paths[format]
    if model.gguf and "gguf" in paths:
        opened = open_checkpoint(paths["gguf"])
        tokenizer, metadata = opened.tokenizer(), opened.metadata()
        fields = {key: value for key, value in model.gguf.items() if key.startswith("general.")}
        tokenizer = from_metadata(to_metadata(tokenizer) | model.gguf, "fields")
        metadata = metadata_from_fields(metadata_to_fields(metadata, False) | fields)
        llama_jax.save(paths["gguf"], model.config, params, tokenizer, metadata=metadata, overwrite=True)
    return paths


@dataclass(frozen=True)
class Outcome:
    """Result of a conversion: numbers of settings, in total and kept; settings named in the log, and lost silently."""

    settings: int
    kept: int
    named: tuple[str, ...]
    silent: tuple[str, ...]


def outcomes(folder: Path, model: Model) -> dict[tuple[str, str], Outcome]:
    """The outcome of each pair of formats for a model."""
    results = {}
    with logged():
        sources = publish(folder, model)
    for source, path in sources.items():
        before = {name: value for name, value in read_settings(path).items() if value is not None and value != set()}
        for target in TARGETS:
            written = folder / f"{source}-{target}" / NAMES.get(target, "model")
            written.parent.mkdir()
            with logged() as lines:
                try:
                    llama_jax.convert(path, written, format=target)
                except CheckpointError:
                    continue
            missing = missing_settings(before, read_settings(written))
            said = " ".join(lines)
            results[source, target] = Outcome(
                len(before),
                len(before) - len(missing),
                tuple(sorted(name for name in missing if name in said)),
                tuple(sorted(name for name in missing if name not in said)),
            )
    return results


def table(results: dict[str, dict[tuple[str, str], Outcome]]) -> str:
    """The results as Markdown."""
    pairs = [(source, target) for source in SOURCES for target in TARGETS]
    lines = [
        "| from | to | models | settings kept | lost silently | lost and named in the log (number of models) |",
        "|---|---|---|---|---|---|",
    ]
    for pair in pairs:
        cells = [of_model[pair] for of_model in results.values() if pair in of_model]
        named = [name for cell in cells for name in cell.named]
        told = ", ".join(f"`{name}` {named.count(name)}" for name in sorted(set(named)))
        kept, all_settings = sum(cell.kept for cell in cells), sum(cell.settings for cell in cells)
        silent = sum(len(cell.silent) for cell in cells)
        lines.append(f"| {pair[0]} | {pair[1]} | {len(cells)} | {kept} of {all_settings} | {silent} | {told} |")
    lines += ["", "| model | " + " | ".join(f"{a} to {b}" for a, b in pairs) + " |", "|---" * (len(pairs) + 1) + "|"]
    for name, of_model in results.items():
        cells = [f"{of_model[pair].kept}/{of_model[pair].settings}" if pair in of_model else "" for pair in pairs]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(output: Path) -> None:
    """Write the table between the page's markers.

    Args:
      output: the page to update.
    """
    results = {}
    for name, model in models().items():
        with tempfile.TemporaryDirectory() as folder:
            results[name] = outcomes(Path(folder), model)
    page = output.read_text() if output.exists() else MARK
    output.write_text(page[: page.index(MARK)] + MARK + "\n\n" + table(results))


MARK = "<!-- made by experiments/conversions.py -->"

if __name__ == "__main__":
    tyro.cli(main)
