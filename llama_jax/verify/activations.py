"""The outputs of a model for some tokens, layer by layer, and checks of them without a reference.

They are computed here, by transformers, or read from an oracle: a file that an earlier run wrote.
"""

from __future__ import annotations

import io
import json
import math
import warnings
import zipfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, UserError, short_repr
from llama_jax.formats import huggingface
from llama_jax.formats.huggingface import config_from_dict, config_to_dict
from llama_jax.model.forward import final_norm, unembed
from llama_jax.model.forward_options import ComputeOptions, Sharding
from llama_jax.model.hooks import At
from llama_jax.model.logits import logits_and_activations
from llama_jax.model.operations import select_ops
from llama_jax.model.params import Block, LlamaParams
from llama_jax.model.trees import stack_layers
from llama_jax.storage.atomic_write import write_atomically
from llama_jax.tokenizers import Tokenizer
from llama_jax.verify.rounding_error import ROUNDING, TENSOR_TYPE_OF_DTYPE, Origin, origin_of

ORACLE_FORMAT = "llama_jax oracle 1"
ORACLE_DTYPES = {"tokens": "<i4", "logits": "<f4", "streams": "<f4", "about": "u1"}
MAX_ORACLE_BYTES = 4 << 30  # bytes; enough for 512 tokens of a 405B model


@dataclass(frozen=True)
class Trace:
    """The outputs of a model for some tokens.

    Attributes:
      origin: the model.
      tokens: int32[T].
      logits: float32[T, V].
      streams: float32[L + 1, T, D], the residual stream: the embedding, then after each layer; not normalized.
    """

    origin: Origin
    tokens: np.ndarray
    logits: np.ndarray
    streams: np.ndarray


def trace(params: LlamaParams, tokens: np.ndarray, origin: Origin) -> Trace:
    """Run a model over int32[T] tokens as one sequence from position 0."""
    with jax.default_matmul_precision("highest"):  # by default GPU and TPU multiply float32 with fewer bits
        logits, streams = _run_model(origin.config, params, jnp.asarray(tokens)[None])
    return Trace(origin, tokens, np.asarray(logits, np.float32), np.asarray(streams, np.float32))


def nats_per_token(tokens: np.ndarray, logits: np.ndarray) -> float:
    """Mean negative log-likelihood of the tokens int[T] of a text except the first, under logits [T, V]; T >= 2."""
    nats = [-log_softmax(row)[token] for row, token in zip(logits[:-1], tokens[1:], strict=True)]
    return float(np.mean(nats))


def log_softmax(row: np.ndarray) -> np.ndarray:
    """Log-probabilities from logits [V], in float64."""
    row = row.astype(np.float64)
    row = row - row.max()
    return row - math.log(np.exp(row).sum())


@partial(jax.jit, static_argnums=0)
def _run_model(config: LlamaConfig, params: LlamaParams, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits [T, V] and streams [L + 1, T, D] of int32[1, T] tokens."""
    logits, _, observed = logits_and_activations(
        config, params, tokens, {"embedded": _keep_row, "residual_after": _keep_row}
    )
    return logits[0], jnp.concatenate([observed["embedded"][None], observed["residual_after"]])


def _keep_row(value: jax.Array, at: At) -> tuple[jax.Array, jax.Array]:
    return value, value[0]


def layer_config(config: LlamaConfig, index: int) -> LlamaConfig:
    """The configuration of a model with all layers like layer `index` of this one."""
    return replace(config, window=None, layers=(config.layer(index),))


@partial(jax.jit, static_argnums=0)
def run_layer(config: LlamaConfig, block: Block, stream: jax.Array) -> jax.Array:
    """The residual stream [T, D] after a layer, computed by a model with only this layer and the stream as its embedding.

    Args:
      config: configuration of the layer, see `layer_config`.
    """
    alone = replace(config, n_layers=1, vocab_size=len(stream), tie_embeddings=True, embedding_multiplier=1.0)
    params = LlamaParams(
        embedding=stream, blocks=stack_layers((block,)), final_norm=jnp.ones(stream.shape[-1], stream.dtype), lm_head=None
    )
    return logits_and_activations(alone, params, jnp.arange(len(stream))[None], {"residual_after": _keep_row})[2][
        "residual_after"
    ][0]


@partial(jax.jit, static_argnums=0)
def run_output(config: LlamaConfig, params: LlamaParams, stream: jax.Array) -> jax.Array:
    """Logits [T, V] from the residual stream [T, D] after the last layer."""
    table = select_ops(config, params, ComputeOptions(), Sharding())
    return unembed(config, params, final_norm(config, table, params, stream))


# Simple enough for a model that was trained only on children's stories, and not from any book.
SAMPLE_TEXT = """\
One day, a little girl named Anna went to the lake with her father. The sun was warm and the water was blue. Anna saw a \
small brown duck near the shore. The duck could not swim because its foot was stuck under a big stone. "Can we help it?" \
she asked. Her father smiled and said, "Yes, but we must be very gentle." Together they lifted the stone, and the duck was \
free. It swam around them three times and then flew away over the trees. Anna was happy, and on the way home she told her \
father that she wanted to come back the next day to see if her new friend was still there. That evening she drew a picture \
of the duck and gave it to her mother.
"""
# Largest loss, relative to a uniform guess, of a model that works. Measured on the first 64 tokens of the text with the
# trained 260K stories model: 0.22 unchanged, 0.23 in Q4_0, 0.60 and 0.69 with the rotary layout wrong either way, 0.94 with
# transposed output projections. With 50 times the theta it is still 0.26: only an indication.
MAX_LOSS_RATIO = 0.5
MIN_TOKENS = 32  # of a text to judge by: the first words of any text are hard to predict


class Check(NamedTuple):
    """The name of a check, whether it passed, and what was found."""

    name: str
    passed: bool
    detail: str


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, text: str) -> Check:
    """Check that a text round-trips through its tokens, and count the tokens and the rows of the embedding."""
    pieces = tokenizer.vocab_size
    is_same = tokenizer.decode(tokenizer.encode(text, bos=False, eos=False)) == text
    sizes = f"{pieces:,} pieces for {vocab_size:,} rows of the embedding"
    outcome = "the text round-trips through its tokens" if is_same else "the text does NOT round-trip through its tokens"
    return Check("vocabulary", is_same, f"{sizes}; {outcome}")


def check_logits(trace: Trace) -> Check:
    """Check that all logits are finite."""
    finite = np.isfinite(trace.logits)
    if finite.all():
        return Check("logits", True, f"finite, the largest {np.abs(trace.logits).max():.3g}")
    return Check("logits", False, f"NOT finite from position {int(np.argmin(finite.all(axis=-1)))} on")


def check_speech(trace: Trace) -> Check:
    """Check that a text of at least `MIN_TOKENS` tokens has a far lower loss under the model than under a uniform guess.

    Only an indication: a wrong rotary layout or exchanged weights cost a trained model most of what it knows, but small
    damage goes unnoticed, and a model that was not trained on such text fails.
    """
    nats, guessing = nats_per_token(trace.tokens, trace.logits), math.log(trace.logits.shape[-1])
    detail = f"{nats:.2f} nats per token, against {guessing:.2f} for a uniform guess"
    return Check("text", nats <= MAX_LOSS_RATIO * guessing, detail)


# --- references ----------------------------------------------------------------------------------------------------------


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
    opened = huggingface.open_huggingface(folder)
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
    except Exception as error:  # torch and transformers raise many kinds of errors for files that they cannot read
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"transformers cannot run {folder} ({type(error).__name__}: {reason})") from None
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    name = f"transformers {transformers.__version__} of {folder}"
    origin = origin_of(name, opened.config, list(opened.tensors.values()), "float32", versions)
    return Trace(origin, tokens, logits, np.stack(streams))


def check_oracle_path(path: Path, config: LlamaConfig, tokens: int) -> None:
    """Raise UserError unless an oracle of this many tokens can be written to the path."""
    size = 4 * tokens * (1 + config.vocab_size + (config.n_layers + 1) * config.dim)
    is_free, takes = not path.exists() and path.parent.is_dir(), f"an oracle of {tokens} tokens takes {size} bytes"
    if not is_free:
        raise UserError(f"{path} cannot be written; name a file that does not exist yet, in a folder that does")
    if size > MAX_ORACLE_BYTES:
        raise UserError(f"{takes}, over the limit of {MAX_ORACLE_BYTES}; use fewer tokens")


def write_oracle(path: Path, trace: Trace) -> None:
    """Store a trace: an uncompressed .npz of tokens, logits, streams and, as bytes of JSON, their origin."""
    origin = trace.origin
    metadata = {
        "format": ORACLE_FORMAT,
        "name": origin.name,
        "config": config_to_dict(origin.config),
        "kinds": origin.tensor_types,
        "dtype": origin.dtype,
        "versions": origin.versions,
    }
    with write_atomically(path) as target, target.open("wb") as file:  # NumPy would add its extension to a name
        np.savez(
            file,
            tokens=trace.tokens.astype(ORACLE_DTYPES["tokens"]),
            logits=trace.logits.astype(ORACLE_DTYPES["logits"]),
            streams=trace.streams.astype(ORACLE_DTYPES["streams"]),
            about=np.frombuffer(json.dumps(metadata).encode(), ORACLE_DTYPES["about"]),
        )


def read_oracle(path: Path) -> Trace:
    """Read an oracle that `write_oracle` wrote.

    Memory is bounded by the size of the file, and no pickle in it is executed: each array is read as numbers of its only
    valid dtype.

    Raises:
      CheckpointError: not an oracle, a damaged one, or one of another version.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; name an oracle that --write-oracle wrote")
    if path.stat().st_size > MAX_ORACLE_BYTES:
        raise CheckpointError(f"{path} has over {MAX_ORACLE_BYTES} bytes, too many for an oracle")
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = {name: _array(archive, f"{name}.npy", dtype) for name, dtype in ORACLE_DTYPES.items()}
        return _trace(arrays)
    except Exception as error:  # zipfile, NumPy and json raise many kinds of errors for damaged bytes
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(f"{path} is not a whole oracle ({reason}); write it again with --write-oracle") from None


def _array(archive: zipfile.ZipFile, name: str, dtype: str) -> np.ndarray:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED:  # an uncompressed array cannot be larger than the file
        raise ValueError(f"{name} is compressed")
    content = io.BytesIO(archive.read(info))
    version = np.lib.format.read_magic(content)
    shape, columns_first, stored_dtype = np.lib.format.read_array_header_1_0(content)
    if version != (1, 0) or columns_first or stored_dtype != np.dtype(dtype):
        raise ValueError(f"{name} holds {stored_dtype} in version {version}, not rows of {dtype}")
    return np.frombuffer(content.getbuffer()[content.tell() :], dtype).reshape(shape)


def _trace(arrays: dict[str, np.ndarray]) -> Trace:
    metadata = json.loads(arrays.pop("about").tobytes())
    tensor_types, dtype, versions = metadata["kinds"], metadata["dtype"], metadata["versions"]
    are_texts = all(isinstance(text, str) for text in [*tensor_types, metadata["name"], *versions, *versions.values()])
    are_known = are_texts and set(tensor_types) <= ROUNDING.keys() and dtype in TENSOR_TYPE_OF_DTYPE
    if metadata["format"] != ORACLE_FORMAT:
        raise ValueError("it is of another version")
    if not are_texts:
        raise ValueError("its name, versions or types of tensors are not strings")
    if not are_known:
        raise ValueError(f"unknown types of tensors {short_repr(tensor_types)} or dtype {short_repr(dtype)}")
    config = config_from_dict(metadata["config"])
    tokens, logits, streams = arrays["tokens"], arrays["logits"], arrays["streams"]
    count = tokens.size
    shapes = (count,), (count, config.vocab_size), (config.n_layers + 1, count, config.dim)
    has_rows = count and tokens.min() >= 0 and tokens.max() < config.vocab_size
    are_finite = np.isfinite(logits).all() and np.isfinite(streams).all()
    if (tokens.shape, logits.shape, streams.shape) != shapes or not has_rows or not are_finite:
        raise ValueError("its arrays do not match its configuration, or are not finite")
    return Trace(Origin(metadata["name"], config, tuple(tensor_types), dtype, versions), tokens, logits, streams)
