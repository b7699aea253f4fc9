"""Hugging Face folders: ``config.json`` and safetensors or ``pytorch_model.bin``, single or sharded with an index."""

from __future__ import annotations

import json
import math
import os.path
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from llama_jax.checkpoints.beside import read_about, token_ids, write_about
from llama_jax.checkpoints.huggingface_config import read_config, read_scheme, write_config
from llama_jax.checkpoints.huggingface_families import FAMILIES
from llama_jax.checkpoints.layout import WrittenTensor, fused, pieces, unfused
from llama_jax.checkpoints.names import names
from llama_jax.checkpoints.pickled import read_tensors
from llama_jax.checkpoints.quantized_files import with_weights
from llama_jax.checkpoints.tensors import FLOATS, Dense, Opened, Stacked, Tensor, Transposed, kind_of, read_bytes
from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, ConfigError, shown
from llama_jax.files import LARGEST_JSON, read_object
from llama_jax.storage import Location, StoredPath
from llama_jax.tokenizers import Tokenizer, find_tokenizer

# Name in the file, by what it is here.
NAMES = names("huggingface")
# Where one tensor holds several of the table's, by rows in this order (Phi-3): its name, and theirs.
FUSED = {
    "model.layers.{}.self_attn.qkv_proj.weight": ("q", "k", "v"),
    "model.layers.{}.mlp.gate_up_proj.weight": ("gate", "up"),
}
# Buffers that old versions of transformers saved with the weights; the configuration says the same.
IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
# The two ways to store the weights, the better first: name of a single file, and of the index of several.
SAFETENSORS = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PICKLED = "pytorch_model.bin", "pytorch_model.bin.index.json"


def open_folder(folder: Location) -> Opened:
    """The model in a folder; its weights are not read.

    Raises:
      CheckpointError: a file that is missing, damaged or of an unsupported kind.
    """
    config = read_config(folder)
    scheme = read_scheme(folder)
    for (single, index), read, what in (
        (SAFETENSORS, read_safetensors, "safetensors"),
        (PICKLED, read_tensors, "pytorch_model.bin"),
    ):
        if (folder / index).exists():
            tensors = _read_indexed(folder / index, read)
        elif (folder / single).is_file():
            tensors = read(folder / single)
        else:
            continue
        tensors = {name: tensor for name, tensor in tensors.items() if not IGNORED.fullmatch(name)}
        tensors = _of_text(tensors)
        tensors = unfused(config, tensors, FUSED, NAMES)
        if scheme is not None:
            if what != "safetensors":
                raise CheckpointError(f"{folder} has quantised weights in {what}; they are read from safetensors")
            tensors = with_weights(str(folder), tensors, scheme)
        return Opened(
            format=f"Hugging Face {what}" + (f", {scheme.method}" if scheme else ""),
            path=folder,
            config=config,
            tensors=_with_experts(folder, config, _experts_joined(folder, tensors)),
            names=names_of(config),
            interleaved=is_interleaved(config),
            tokenizer=partial(find_tokenizer, folder, config.vocab_size),
            about=partial(read_about, folder),
        )
    raise CheckpointError(
        f"{folder} has a config.json but none of the weights it should have: {', '.join(SAFETENSORS + PICKLED)}"
    )


LANGUAGE_MODEL = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(lm_head\.|.*)")
OTHER_PARTS = re.compile(r"(?:model\.)?(?:vision_tower|vision_model|multi_modal_projector)\.")


def _of_text(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of a model of text alone, without those for pictures beside it."""
    found = {name: tensor for name, tensor in tensors.items() if not OTHER_PARTS.match(name)}
    if len(found) == len(tensors):
        return found

    def renamed(name: str) -> str:
        match = LANGUAGE_MODEL.fullmatch(name)
        return name if match is None else match[1] if match[1].startswith("lm_head.") else f"model.{match[1]}"

    return {renamed(name): tensor for name, tensor in found.items()}


QWEN_EXPERTS = {"router": "model.layers.{}.mlp.gate.weight"}
# Llama 4's files hold the experts of a layer as one tensor, transposed: [E, D, 2F] of gate and up, which are parted, and
# [E, F, D] of down.
LLAMA4_FUSED = {"model.layers.{}.feed_forward.experts.gate_up_proj": ("expert_gate", "expert_up")}
LLAMA4_TENSOR = re.compile(r"(model\.layers\.\d+\.feed_forward\.experts\.)(gate_up|down)_proj")
LLAMA4_EXPERTS = {"router": "model.layers.{}.feed_forward.router.weight"}
LLAMA4_EXPERTS |= {
    f"expert_{name}": f"model.layers.{{}}.feed_forward.experts.{name}_proj" for name in ("gate", "up", "down")
}
QWEN_EXPERTS |= {f"expert_{name}": f"model.layers.{{}}.mlp.experts.{name}_proj.weight" for name in ("gate", "up", "down")}


def names_of(config: LlamaConfig) -> dict[str, str]:
    """The names of a model's tensors, of which some depend on where its norms are, or on the family of its experts."""
    found = NAMES | ({"ffn_norm": "model.layers.{}.pre_feedforward_layernorm.weight"} if config.norm == "both" else {})
    if config.experts:
        found |= {"qwen3_moe": QWEN_EXPERTS, "llama4_text": LLAMA4_EXPERTS}.get(config.kind, {})
    return found


def is_interleaved(config: LlamaConfig) -> bool:
    """Whether files of a model hold the rows of q and k in the interleaved rotary layout."""
    try:
        return FAMILIES[config.kind].interleaved
    except ConfigError:  # of no family: as a Llama's
        return False


EXPERT = re.compile(r"(model\.layers\.\d+\.(?:block_sparse_moe|mlp)\.experts)\.(\d+)\.(\w+\.weight)")


def _experts_joined(folder: Location, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with those of a layer's experts as [E, rows, columns] under the names in the table."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        elif (match := LLAMA4_TENSOR.fullmatch(name)) and len(tensor.shape) == 3:
            half = tensor.shape[2] // 2
            rows = {"down": (0, None)} if match[2] == "down" else {"gate": (0, half), "up": (half, None)}
            found |= {f"{match[1]}{part}_proj": Transposed(tensor, *ends) for part, ends in rows.items()}
        else:
            found[name] = tensor
    for name, of_layer in experts.items():
        parts = [of_layer[i] for i in sorted(of_layer)]
        if sorted(of_layer) != list(range(len(parts))):
            raise CheckpointError(
                f"{folder}: of the experts of {shown(name, 80)} there are only {shown(sorted(of_layer))}; copy all files"
            )
        if any((part.shape, part.kind) != (parts[0].shape, parts[0].kind) for part in parts):
            raise CheckpointError(
                f"{folder}: the experts of {shown(name, 80)} have different shapes or types; copy them again"
            )
        found[name] = Stacked(parts)
    return found


def _with_experts(folder: Location, config: LlamaConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors; CheckpointError where a layer has no experts, by the name that files have."""
    names = names_of(config)
    for layer in range(config.n_layers if config.experts else 0):
        for part in ("expert_gate", "expert_up", "expert_down"):
            if (name := names[part].format(layer)) not in tensors:
                of_one = name.replace(".experts.", ".experts.0.")
                joined = re.sub(r"\.(gate|up)_proj$", ".gate_up_proj", name)
                missing = of_one if EXPERT.fullmatch(of_one) else joined
                raise CheckpointError(f"{folder}: tensor {missing!r} is missing; the configuration needs it")
    return tensors


def _experts_apart(piece: WrittenTensor) -> list[WrittenTensor]:
    """A tensor to be written, or the experts' tensors if it holds several."""
    if len(piece.tensor.shape) < 3:
        return [piece]
    tensor: Any = piece.tensor
    return [replace(piece, tensor=tensor.entry(i), expert=i) for i in range(tensor.shape[0])]


def _name(names: Mapping[str, str], piece: WrittenTensor) -> str:
    name = names[piece.part].format(piece.layer)
    return name if piece.expert is None else name.replace(".experts.", f".experts.{piece.expert}.")


def has_weights(folder: Location) -> bool:
    """Whether weights under the names that transformers gives them lie beside a config.json."""
    return any((folder / name).exists() for name in (*SAFETENSORS, *PICKLED))


def write_folder(
    folder: Path,
    opened: Opened,
    tokenizer: Tokenizer | None,
    kind: str | None = None,
    *,
    largest_file: int = 5_000_000_000,
    progress: Callable[[list[WrittenTensor]], Iterable[WrittenTensor]] | None = None,
) -> None:
    """Write a model into an empty folder, tensor by tensor.

    Args:
      kind: of all tensors, as safetensors spells it; None keeps each tensor's own.
      largest_file: bytes of tensors in a file; more become several files and an index.
    """
    names = names_of(opened.config)
    todo = pieces(opened, interleaved=is_interleaved(opened.config))
    if opened.config.kind == "llama4_text":
        todo, fused_names = fused(todo, LLAMA4_FUSED, axis=1)
        todo = [replace(p, tensor=Transposed(p.tensor)) if len(p.tensor.shape) == 3 else p for p in todo]
        names |= fused_names
    else:
        todo = [one for piece in todo for one in _experts_apart(piece)]
    if opened.config.kind == "phi3":
        todo, fused_names = fused(todo, FUSED)
        names |= fused_names
    kinds = [kind or kind_of(piece.tensor.dtype) for piece in todo]
    sizes = [math.prod(p.tensor.shape) * FLOATS[k].itemsize for p, k in zip(todo, kinds, strict=True)]
    files: list[dict[str, tuple[str, tuple[int, ...], int]]] = [{}]
    for piece, stored, size in zip(todo, kinds, sizes, strict=True):
        if files[-1] and sum(n for *_, n in files[-1].values()) + size > largest_file:
            files.append({})
        files[-1][_name(names, piece)] = (stored, piece.tensor.shape, size)

    walk = iter(progress(todo) if progress else todo)
    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(files):
        name = SAFETENSORS[0] if len(files) == 1 else f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys(tensors, name)
        with (folder / name).open("wb") as file:
            file.write(header(tensors))
            for stored, *_ in tensors.values():
                for rows in next(walk).rows(FLOATS[stored]):
                    file.write(rows.view(np.uint8).data)
    for _ in walk:  # lets a progress bar see its end
        pass
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (folder / SAFETENSORS[1]).write_text(json.dumps(index, indent=2) + "\n")
    ids: dict[str, Any] = {"pad_token_id": None}  # not what transformers takes where nothing is said
    if tokenizer is not None:
        tokenizer.save(folder)
        ids |= token_ids(tokenizer)
    write_about(folder, opened.about())
    write_config(folder, opened.config, dtype=DTYPES[kinds[0]], **ids)


def header(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """The beginning of a safetensors file: the length of a JSON text, and the text, padded to eight bytes."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses the file
    end = 0
    for name, (kind, shape, size) in tensors.items():
        described[name] = {"dtype": kind, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_safetensors(path: Location) -> dict[str, Tensor]:
    """The tensors of a file. The library checks the header against the file, and does not tell where the data begin."""
    size = int.from_bytes(read_bytes(path, 0, 8).tobytes(), "little") if path.stat().st_size >= 8 else 0
    if LARGEST_JSON < size < path.stat().st_size:
        raise CheckpointError(f"{path} has a header of {size} bytes, too large to be a model's; copy it again")
    try:
        with _header_alone(path, size) as local, safe_open(local, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); copy it again") from None
    header = json.loads(read_bytes(path, 8, size).tobytes())
    return {
        name: Dense(path, 8 + size + tensor["data_offsets"][0], tuple(tensor["shape"]), tensor["dtype"])
        for name, tensor in header.items()
        if name != "__metadata__"
    }


@contextmanager
def _header_alone(path: Location, size: int) -> Iterator[Path]:
    """A file that the library can open: for an object in a store a sparse file of equal length with the header alone."""
    if not isinstance(path, StoredPath):
        yield path
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(read_bytes(path, 0, min(8 + size, path.stat().st_size)).data)
        file.truncate(path.stat().st_size)
        file.flush()
        yield Path(file.name)


def _read_indexed(index: Location, read: Callable[[Location], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all files that an index names, after checking it against what each file holds."""
    folder = index.parent
    found = read_object(index, CheckpointError)
    try:
        weight_map = found["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of weights ({shown(error, 80)}); copy it again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {shown(name, 80)}, which is not a file of its own folder")
        there = folder / name
        # Of a name that no file can have, Path.is_file raises.
        if not (there.is_file() if isinstance(there, StoredPath) else os.path.isfile(there)):
            raise CheckpointError(f"{index} names {shown(name, 80)}, which is missing from {folder}; copy it there")
    tensors: dict[str, Tensor] = {}
    for name in names:
        held = read(folder / name)
        listed = {tensor for tensor, file in weight_map.items() if file == name}
        if held.keys() != listed:
            odd = sorted(held.keys() ^ listed)[0]
            raise CheckpointError(f"{index} and {name} disagree about tensor {shown(odd, 80)}; copy both from one release")
        tensors |= held
    return tensors
