"""The folder of a model: the files next to the weights (the vocabulary with its settings, sampling settings, name and
license), and when a folder may be written or replaced.

A GGUF stores them in its metadata, all other formats in files of the folder; both are read into the same description, an
`ModelMetadata` and a tokenizer. What a conversion loses is therefore the difference after the new model is read.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from llama_jax.data.load_corpus import examine
from llama_jax.errors import CheckpointError, ConfigError, reading, short_repr
from llama_jax.storage import Location, StoredPath, resolved
from llama_jax.storage.atomic_write import write_atomically
from llama_jax.storage.paths import read_object, read_text
from llama_jax.tokenizers import Tokenizer, find_tokenizer
from llama_jax.tokenizers.gguf import STRIPS_RIGHT_MODELS
from llama_jax.tokenizers.gguf_header import short_decimal
from llama_jax.tokenizers.tokenizer_config import PER_FILE_SETTINGS, Settings, pad_id_of

VOCABULARIES = ("tokenizer.model", "tokenizer.json")
# Files that are read with a vocabulary in the same folder.
SETTINGS_FILES = (
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
GENERATION_FILE, CARD_FILE = "generation_config.json", "README.md"
PROVENANCE = {"transformers_version", "_from_model_config"}  # who wrote the file
TOKEN_IDS = {"bos_token_id", "eos_token_id", "pad_token_id"}  # the tokenizer has them
# Settings of ``generation_config.json`` by the last part of their GGUF keys, general.sampling.*.
SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
SAMPLING |= {key: key for key in ("top_k", "top_p", "min_p")}
# Settings under general.sampling.* that transformers has no name for.
OTHER_SAMPLING = (
    *("sequence", "xtc_probability", "xtc_threshold", "penalty_last_n"),
    *("mirostat", "mirostat_tau", "mirostat_eta"),
)
# Entries of a model card by their GGUF keys, general.*, if those differ.
CARD_NAMES = {"license.name": "license_name", "license.link": "license_link", "languages": "language"}
CARD_KEYS = (
    *("name", "author", "version", "organization", "description", "finetune", "basename", "size_label", "license", "tags"),
    *("url", "doi", "uuid", "repo_url", "quantized_by", *CARD_NAMES),
)
PER_FILE_FIELDS = ("architecture", "type", "file_type", "quantization_version", "alignment")  # under general.*
LICENSES = re.compile(r"(?i)(licen[cs]e|notice|use_policy)(\.(txt|md))?")
# Files that a model's folder may contain: a folder with any other file is never replaced.
WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|params")
DECISIVE_FILES = ("config.json", "adapter_config.json")  # which make a folder a model, or an adapter
OTHER_FILES = {"config.json", "adapter_config.json", "adapter_model.safetensors", *VOCABULARIES, *SETTINGS_FILES}


@dataclass(frozen=True)
class ModelMetadata:
    """Files next to the weights, except the vocabulary; they do not affect what a model computes.

    Attributes:
      generation: the settings of ``generation_config.json``, without token ids.
      card: the model's name, license, authors and so on, by their GGUF keys without "general.".
      texts: the contents of a model card and of licenses, by file name.
    """

    generation: Mapping[str, Any] = field(default_factory=dict)
    card: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


def read_model_metadata(folder: Location, *, card: bool = True) -> ModelMetadata:
    """The description in the files of a folder.

    Args:
      card: whether a model card and licenses belong to the model; not in a folder that a file of weights may share.
    """
    path = folder / GENERATION_FILE
    settings = read_object(path, CheckpointError) if path.is_file() else {}
    generation = {key: value for key, value in settings.items() if key not in PROVENANCE | TOKEN_IDS and value is not None}
    texts = {}
    if card:
        inside: list[Location] = [folder / CARD_FILE] if isinstance(folder, StoredPath) else sorted(folder.iterdir())
        described = [file for file in inside if file.name == CARD_FILE or LICENSES.fullmatch(file.name)]
        texts = {file.name: read_text(file, CheckpointError) for file in described if file.is_file()}
    return ModelMetadata(generation, _read_card(texts.get(CARD_FILE, "")), texts)


def _read_card(text: str) -> dict[str, Any]:
    """The entries of a model card's front matter that have a key in a GGUF."""
    import yaml  # type: ignore[import-untyped]  # required by gguf

    head = re.match(r"---\r?\n(.{,65536}?)\r?\n---", text, re.DOTALL)
    try:
        entries = yaml.safe_load(head[1]) if head else {}
    except (yaml.YAMLError, RecursionError, ValueError):
        entries = {}
    entries = entries if isinstance(entries, dict) else {}
    card = {key: entries.get(CARD_NAMES.get(key, key)) for key in CARD_KEYS}
    if isinstance(card["languages"], str):
        card["languages"] = [card["languages"]]
    gguf_entries = entries.get("gguf")
    card |= gguf_entries if isinstance(gguf_entries, dict) else {}
    return {str(key): value for key, value in card.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Whether a value is a string, a number, or a list of strings."""
    texts = isinstance(value, list) and bool(value) and all(isinstance(entry, str) for entry in value)
    return texts or type(value) in (str, bool, int, float)


def write_model_metadata(folder: Path, metadata: ModelMetadata) -> None:
    """Write what `read_model_metadata` reads into a folder with a tokenizer's files."""
    path = folder / GENERATION_FILE
    ids = read_object(path, CheckpointError) if path.is_file() else {}
    if metadata.generation:
        path.write_text(json.dumps(dict(metadata.generation) | ids, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    texts = dict(metadata.texts)
    if metadata.card and CARD_FILE not in texts:
        common = {CARD_NAMES.get(key, key): value for key, value in metadata.card.items() if key in CARD_KEYS}
        other = {key: value for key, value in metadata.card.items() if key not in CARD_KEYS}
        head = common | ({"gguf": other} if other else {})
        lines = (f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items())  # JSON is YAML
        texts[CARD_FILE] = "\n".join(["---", *lines, "---", ""])
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def metadata_from_fields(fields: Mapping[str, Any]) -> ModelMetadata:
    """The description in the metadata of a GGUF."""
    plain = {key: short_decimal(value) for key, value in fields.items() if _is_plain(value)}
    general = {key.removeprefix("general."): value for key, value in plain.items() if key.startswith("general.")}
    sampling = {key.removeprefix("sampling."): value for key, value in general.items() if key.startswith("sampling.")}
    generation = {SAMPLING.get(key, key): value for key, value in sampling.items()}
    if sampling:  # llama.cpp samples, except greedily at temperature 0
        generation["do_sample"] = generation.get("temperature", 1.0) > 0
        if not generation["do_sample"]:
            del generation["temperature"]
    card = {key: value for key, value in general.items() if not key.startswith("sampling.") and key not in PER_FILE_FIELDS}
    return ModelMetadata(generation, card)


def metadata_to_fields(metadata: ModelMetadata, strips_right: bool) -> dict[str, Any]:
    """The GGUF fields that `metadata_from_fields` reads.

    Args:
      strips_right: whether special tokens swallow white space, which llama.cpp infers from some names.
    """
    known = {name: key for key, name in SAMPLING.items()} | {key: key for key in OTHER_SAMPLING}
    sampling = {known[name]: value for name, value in metadata.generation.items() if name in known and _is_plain(value)}
    sampled = metadata.generation.get("do_sample", False)
    if sampling or "do_sample" in metadata.generation:
        sampling["temp"] = float(sampling.get("temp", 1.0)) if sampled else 0.0
    sampling |= {key: float(sampling[key]) for key in ("top_p", "min_p", "penalty_repeat") if key in sampling}
    card = dict(metadata.card)
    if not strips_right and any(name in str(card.get("name", "")).lower() for name in STRIPS_RIGHT_MODELS):
        del card["name"]
    return {f"general.{key}": value for key, value in card.items() if key not in PER_FILE_FIELDS} | {
        f"general.sampling.{key}": value for key, value in sampling.items()
    }


def all_settings(tokenizer: Tokenizer | None, metadata: ModelMetadata) -> dict[str, Any]:
    """All settings next to the weights, by their names in `transformers`."""
    settings: dict[str, Any] = {}
    if tokenizer is not None:
        tokenizer_settings = _settings_of(tokenizer)
        settings |= special_token_ids(tokenizer)
        settings |= {"stop_ids": set(tokenizer.stop_ids), "special_tokens": set(tokenizer.special_tokens.items())}
        settings |= {"add_bos_token": tokenizer.add_bos, "add_eos_token": tokenizer.add_eos}
        settings |= {"add_prefix_space": tokenizer.space_prefix, "chat_template": tokenizer.chat_template}
        settings |= {"rstrip": set(getattr(tokenizer, "strips_right", ()))}
        settings |= {f"chat_template.{name}": text for name, text in tokenizer_settings.chat_templates.items()} | dict(
            tokenizer_settings.gguf
        )
        stored = {name: value for name, value in tokenizer_settings.other_settings.items() if name not in PER_FILE_SETTINGS}
        settings |= {name: v.get("content") if isinstance(v, dict) else v for name, v in stored.items()}
    generation = dict(metadata.generation)
    if generation.keys() & {*SAMPLING.values()}:
        generation.setdefault("do_sample", False)
    return settings | generation | {f"general.{key}": value for key, value in metadata.card.items()} | dict(metadata.texts)


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids that a ``config.json`` names."""
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": pad_id_of(tokenizer, _settings_of(tokenizer))}
    return {f"{name}_token_id": token for name, token in ids.items() if token >= 0}


def _settings_of(tokenizer: Tokenizer) -> Settings:
    """The settings that a tokenizer was made with; the defaults for a user's tokenizer."""
    settings: Settings = getattr(tokenizer, "settings", Settings())
    return settings


def missing_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `before` that `after` lacks or has with another value; for sets the missing members."""
    missing = {}
    for name, value in before.items():
        stored = after.get(name)
        if isinstance(value, set):
            if members := value - (stored if isinstance(stored, set) else set()):
                missing[name] = members
        elif value is not None and stored != value:
            missing[name] = value
    return missing


def describe_missing(where: object, missing: Mapping[str, Any]) -> str:
    """One line listing the settings that a written model does not store."""
    parts = (
        name
        if isinstance(value, str) and (len(value) > 60 or "\n" in value)
        else f"{name} {', '.join(map(str, sorted(value)))}"[:200]
        if isinstance(value, set)
        else f"{name}={short_repr(value)}"
        for name, value in sorted(missing.items())
    )
    return f"{where} cannot store {'; '.join(parts)}"


def vocabulary_files(tokenizer: Tokenizer, path: Path, vocab_size: int, metadata: ModelMetadata) -> dict[Path, bytes]:
    """The files to write next to the weights at `path`, for a model with V = `vocab_size`, so that its tokenizer is found;
    none if it is there already.
    """
    folder = resolved(path).parent
    existing = next((folder / name for name in VOCABULARIES if (folder / name).exists()), None)
    if existing is not None:
        found = find_tokenizer(folder, vocab_size)
        differs = found is None or examine(found).fingerprint != examine(tokenizer).fingerprint
        stops_elsewhere = found is None or set(found.stop_ids) != set(tokenizer.stop_ids)
        has_settings = stops_elsewhere or read_model_metadata(folder, card=False).generation != metadata.generation
        read_so = f"but {path.name} would be read with that; write into another folder"
        if differs:
            raise CheckpointError(f"{existing} is not this model's vocabulary, {read_so}")
        if has_settings:
            raise CheckpointError(f"{folder} has another model's stop ids or sampling settings, {read_so}")
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save(Path(scratch))
        write_model_metadata(Path(scratch), ModelMetadata(metadata.generation))
        files = {folder / file.name: file.read_bytes() for file in Path(scratch).iterdir()}
    for path in [folder / name for name in SETTINGS_FILES]:
        if path.exists() and not (path.is_file() and path.read_bytes() == files.get(path)):
            raise CheckpointError(
                f"{path} belongs to another model, but this one's vocabulary would use it; write into another folder"
            )
    return {path: content for path, content in files.items() if not path.exists()}


def write_vocabulary_files(files: dict[Path, bytes], written: list[Path]) -> None:
    """Write the files of `vocabulary_files`, adding each to `written`; the vocabulary last: without it none is read."""
    for path in sorted(files, key=lambda path: path.name in VOCABULARIES):
        with write_atomically(path, raises=CheckpointError) as target:
            target.write_bytes(files[path])
        written.append(path)


def check_present(settings: Mapping[str, Any], required: Iterable[str]) -> None:
    """Raise ConfigError if a setting is missing."""
    missing = [name for name in required if name not in settings]
    if missing:
        raise ConfigError(f"{', '.join(missing)} is missing")


@contextmanager
def config_errors(path: Location) -> Iterator[None]:
    """Convert a ConfigError about the settings in a file to a CheckpointError that names the file."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


@contextmanager
def new_output(path: Location, *, folder: bool, overwrite: bool, sources: Iterable[Location] = ()) -> Iterator[Path]:
    """A new empty file or folder that becomes `path` once completely written, see `atomic_write.write_atomically`.

    Args:
      folder: whether to write a folder; it replaces only an empty one, or with `overwrite` one that contains only a model.
      overwrite: whether a file may be replaced by a file.
      sources: paths that are being read, and must not be overwritten.
    """
    path = resolved(path)
    check_output(path, folder=folder, overwrite=overwrite, sources=sources)
    recheck = partial(check_output, path, folder=folder, overwrite=overwrite)  # someone else may have written it
    with write_atomically(path, folder=folder, check=recheck, raises=CheckpointError, last=DECISIVE_FILES) as target:
        yield target


def check_output(path: Location, *, folder: bool, overwrite: bool, sources: Iterable[Location] = ()) -> None:
    """Raise if `new_output` would, without writing anything."""
    if isinstance(path, StoredPath) and path.view.root.startswith("hf://"):
        raise CheckpointError(f"{path} is on the Hub: write to a local path, and upload that with `hf upload`")
    with reading(path, CheckpointError):
        _check_output(resolved(path), folder, overwrite, sources)


def _check_output(path: Location, folder: bool, overwrite: bool, sources: Iterable[Location]) -> None:
    for source in map(resolved, sources):
        if path == source or path in source.parents or source in path.parents:
            raise CheckpointError(f"{path} is, contains or is inside the model being read ({source}); write elsewhere")
    if not path.exists():
        return
    is_folder, is_file = path.is_dir(), path.is_file()
    existing, needed = ("folder", "file") if is_folder else ("file", "folder")
    is_current = folder and is_folder and isinstance(path, Path) and path.samefile(".")
    if not is_folder and not is_file:
        raise CheckpointError(f"{path} is neither a file nor a folder; use another path")
    if is_current:
        raise CheckpointError(f"{path} is the current folder, which cannot be replaced; use a folder inside it")
    if is_folder != folder:
        raise CheckpointError(f"{path} is a {existing}, but this format is a {needed}; use another path")
    inside = sorted(entry.name for entry in path.iterdir()) if folder else []
    exists = not folder or inside
    foreign = [name for name in inside if name not in OTHER_FILES and not WEIGHT_FILES.fullmatch(name)]
    if exists and not overwrite:
        raise CheckpointError(f"{path} exists; remove it, or replace it with --overwrite (overwrite=True)")
    if foreign:
        raise CheckpointError(
            f"{path} contains other files ({', '.join(foreign[:1])}), so it is not replaced; use another path"
        )
