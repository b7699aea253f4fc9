"""llama2.c's legacy ``.bin`` (``legacy_export`` in its export.py): a header of seven int32, then float32 in one run."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import numpy as np

from llama_jax.checkpoints.assemble import Progress, Reader, assemble
from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.model.forward import rotary_frequencies
from llama_jax.model.params import Llama

HEADER = np.dtype("<i4"), 7
# The file names nothing: these are the parts in their order, per-layer ones holding all layers in a row.
NAMES = {
    "embedding": "token_embedding_table",
    "attention_norm": "rms_att_weight.{}",
    "q": "wq.{}",
    "k": "wk.{}",
    "v": "wv.{}",
    "out": "wo.{}",
    "ffn_norm": "rms_ffn_weight.{}",
    "gate": "w1.{}",
    "down": "w2.{}",
    "up": "w3.{}",
    "final_norm": "rms_final_weight",
    "cos": "freq_cis_real",
    "sin": "freq_cis_imag",
    "lm_head": "wcls",
}


def recognises(path: Path) -> bool:
    """Whether the header and the size are those of a legacy llama2.c file."""
    return _layout(path) is not None


def read_config(path: Path) -> LlamaConfig:
    """The configuration in the header. llama2.c fixes what the file does not say: norm_eps 1e-5, theta 10,000."""
    layout = _layout(path)
    if layout is None:
        raise CheckpointError(
            f"{path} is not a whole llama2.c file: its size does not follow from its header; copy it again"
        )
    return layout[0]


def load_params(
    path: Path, config: LlamaConfig, dtype: jax.typing.DTypeLike | None, progress: Progress | None = None
) -> Llama:
    """The parameters, from a memory map, cast to `dtype` (None keeps float32)."""
    numbers = np.memmap(path, "<f4", mode="r", offset=HEADER[1] * HEADER[0].itemsize)
    tensors: dict[str, np.ndarray] = {}
    offset = 0
    for part, shape in _shapes(config).items():
        layers = range(config.n_layers) if "{}" in NAMES[part] else range(1)
        for i in layers:
            size = math.prod(shape)
            tensors[NAMES[part].format(i)] = numbers[offset : offset + size].reshape(shape)
            offset += size
    _check_rotary(path, config, tensors.pop(NAMES["cos"]), tensors.pop(NAMES["sin"]))
    reader = Reader(str(path), set(tensors), NAMES, tensors.__getitem__)
    return assemble(config, reader, dtype, interleaved=True, progress=progress)


def _layout(path: Path) -> tuple[LlamaConfig, int] | None:
    """Configuration and size in bytes if the header says what the file holds."""
    with path.open("rb") as file:
        start = file.read(HEADER[1] * HEADER[0].itemsize)
    if len(start) != HEADER[1] * HEADER[0].itemsize:
        return None
    header = np.frombuffer(start, HEADER[0])
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len = map(int, header)
    try:
        config = LlamaConfig(
            vocab_size=abs(vocab_size),
            dim=dim,
            n_layers=n_layers,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            hidden_dim=hidden_dim,
            max_seq_len=max_seq_len,
            norm_eps=1e-5,
            rope_theta=10_000.0,
            # A negative vocabulary is the format's sign for a classifier of its own.
            tie_embeddings=vocab_size > 0,
        )
    except ConfigError:
        return None
    numbers = sum(math.prod(shape) * (n_layers if "{}" in NAMES[part] else 1) for part, shape in _shapes(config).items())
    size = header.nbytes + 4 * numbers
    return (config, size) if path.stat().st_size == size else None


def _shapes(c: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each part, per layer, in the file's order."""
    shapes = {
        "embedding": (c.vocab_size, c.dim),
        "attention_norm": (c.dim,),
        "q": (c.n_heads * c.head_dim, c.dim),
        "k": (c.n_kv_heads * c.head_dim, c.dim),
        "v": (c.n_kv_heads * c.head_dim, c.dim),
        "out": (c.dim, c.n_heads * c.head_dim),
        "ffn_norm": (c.dim,),
        "gate": (c.hidden_dim, c.dim),
        "down": (c.dim, c.hidden_dim),
        "up": (c.hidden_dim, c.dim),
        "final_norm": (c.dim,),
        "cos": (c.max_seq_len, c.head_dim // 2),
        "sin": (c.max_seq_len, c.head_dim // 2),
    }
    if not c.tie_embeddings:
        shapes["lm_head"] = (c.vocab_size, c.dim)
    return shapes


def _check_rotary(path: Path, config: LlamaConfig, cos: np.ndarray, sin: np.ndarray) -> None:
    """The stored angles tell a theta that the header cannot: refuse a file that was made with another."""
    angles = np.outer(np.arange(min(16, config.max_seq_len)), rotary_frequencies(config))
    stored = cos[: len(angles)] + 1j * sin[: len(angles)]
    if stored.any() and not np.allclose(stored, np.exp(1j * angles), atol=1e-4):
        raise CheckpointError(
            f"{path}: the stored rotary angles are not those of theta={config.rope_theta:g}, which this format implies"
        )
