"""Sources of a reference: transformers, run on the spot, or an oracle, a file that an earlier run wrote."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, UserError, shown
from llama_jax.formats import huggingface
from llama_jax.formats.huggingface import config_from_dict, config_to_dict
from llama_jax.storage.atomic_write import write_atomically
from llama_jax.verify.activations import Origin, Trace
from llama_jax.verify.rounding_error import KIND, ROUNDING, origin_of

FORMAT = "llama_jax oracle 1"
DTYPES = {"tokens": "<i4", "logits": "<f4", "streams": "<f4", "about": "u1"}
LARGEST = 4 << 30  # bytes of an oracle; that of a 405B model for 512 tokens


def check_transformers() -> None:
    """Raise UserError unless torch and transformers can be imported."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--against needs torch and transformers ({error}); install the extra 'parity', or use --oracle instead"
        ) from None


def run_transformers(folder: Path, tokens: np.ndarray) -> Trace:
    """The trace of int32[T] tokens by transformers with the model in a Hugging Face folder, in float32 on the CPU.

    Raises:
      UserError: torch or transformers is not installed.
      CheckpointError: the folder holds no Llama, or one that transformers cannot read.
    """
    opened = huggingface.open_folder(folder)
    check_transformers()
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    streams: list[np.ndarray] = []

    def keep(module, arguments, output) -> None:
        stream = output if isinstance(output, torch.Tensor) else output[0]
        streams.append(stream[0].numpy())

    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
            ).eval()
            # Not output_hidden_states: its last one is after the final norm.
            for module in (model.model.embed_tokens, *model.model.layers):
                module.register_forward_hook(keep)
            logits = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0].numpy()
    except Exception as error:  # whatever torch and transformers raise for files that they cannot read
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"transformers cannot run {folder} ({type(error).__name__}: {reason})") from None
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    name = f"transformers {transformers.__version__} of {folder}"
    origin = origin_of(name, opened.config, list(opened.tensors.values()), "float32", versions)
    return Trace(origin, tokens, logits, np.stack(streams))


def check_room(path: Path, config: LlamaConfig, tokens: int) -> None:
    """Raise UserError unless an oracle of this many tokens can be written to the path."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{path} cannot be written; name a file in a folder that exists")
    if path.exists():
        raise UserError(f"{path} exists; remove it, or choose another name for the oracle")
    size = 4 * tokens * (1 + config.vocab_size + (config.n_layers + 1) * config.dim)
    if size > LARGEST:
        raise UserError(
            f"an oracle of {tokens} tokens takes {size} bytes, over the {LARGEST} that are read; take fewer tokens"
        )


def write_oracle(path: Path, trace: Trace) -> None:
    """Store a trace: a plain .npz of tokens, logits, streams and, as JSON in bytes, what they are of."""
    origin = trace.origin
    about = {
        "format": FORMAT,
        "name": origin.name,
        "config": config_to_dict(origin.config),
        "kinds": origin.kinds,
        "dtype": origin.dtype,
        "versions": origin.versions,
    }
    with write_atomically(path) as target, target.open("wb") as file:  # to a name NumPy would add its own ending
        np.savez(
            file,
            tokens=trace.tokens.astype(DTYPES["tokens"]),
            logits=trace.logits.astype(DTYPES["logits"]),
            streams=trace.streams.astype(DTYPES["streams"]),
            about=np.frombuffer(json.dumps(about).encode(), DTYPES["about"]),
        )


def read_oracle(path: Path) -> Trace:
    """Read an oracle that `write_oracle` wrote.

    Memory is at most the size of the file, and no pickle in it is run: the bytes of each array are read as numbers of the
    only type that it can have.

    Raises:
      CheckpointError: not an oracle, a damaged one, or one of another version.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; name an oracle that --write-oracle wrote")
    if path.stat().st_size > LARGEST:
        raise CheckpointError(f"{path} has over {LARGEST} bytes, too many for an oracle")
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = {name: _array(archive, f"{name}.npy", dtype) for name, dtype in DTYPES.items()}
        return _trace(arrays)
    except Exception as error:  # of damaged bytes zipfile, NumPy and json raise whatever comes up
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(f"{path} is not a whole oracle ({reason}); write it again with --write-oracle") from None


def _array(archive: zipfile.ZipFile, name: str, dtype: str) -> np.ndarray:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED:  # what is not compressed cannot be larger than the file
        raise ValueError(f"{name} is compressed")
    content = io.BytesIO(archive.read(info))
    if (version := np.lib.format.read_magic(content)) != (1, 0):
        raise ValueError(f"{name} has version {version}")
    shape, columns_first, found = np.lib.format.read_array_header_1_0(content)
    if columns_first or found != np.dtype(dtype):
        raise ValueError(f"{name} holds {found}, not rows of {dtype}")
    return np.frombuffer(content.getbuffer()[content.tell() :], dtype).reshape(shape)


def _trace(arrays: dict[str, np.ndarray]) -> Trace:
    about = json.loads(arrays.pop("about").tobytes())
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError("it is not of this version")
    kinds, dtype, versions = about["kinds"], about["dtype"], about["versions"]
    if not _texts(kinds) or not set(kinds) <= ROUNDING.keys() or dtype not in KIND:
        raise ValueError(f"weights of {shown(kinds)} and computed in {shown(dtype)}")
    if not isinstance(versions, dict) or not _texts([about["name"], *versions, *versions.values()]):
        raise ValueError("its name and versions are not texts")
    config = config_from_dict(about["config"])
    tokens, logits, streams = arrays["tokens"], arrays["logits"], arrays["streams"]
    count = tokens.size
    if (tokens.shape, logits.shape, streams.shape) != (
        (count,),
        (count, config.vocab_size),
        (config.n_layers + 1, count, config.dim),
    ):
        raise ValueError("the shapes of its arrays are not those of its configuration")
    if not count or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError("its tokens are not those of its vocabulary")
    if not np.isfinite(logits).all() or not np.isfinite(streams).all():
        raise ValueError("it holds numbers that are not finite")
    return Trace(Origin(about["name"], config, tuple(kinds), dtype, versions), tokens, logits, streams)


def _texts(found: Sequence[object]) -> bool:
    return isinstance(found, list) and all(isinstance(each, str) for each in found)
