"""Write transformers' results on small random models, for tests to compare with if torch is not installed.

    pip install -e ".[parity]"
    python tests/make_goldens.py

The weights are drawn from NumPy's generator. Only the results are stored, so that the files stay small.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llama_jax import LlamaConfig, RopeScaling
from llama_jax.config import RopeScalingKind
from llama_jax.formats.huggingface import HF_NAMES, config_to_dict

GOLDENS = Path(__file__).parent / "goldens"


def _config(**changes) -> LlamaConfig:
    sizes: dict = dict(
        vocab_size=96,
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=56,
        max_seq_len=64,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_embeddings=False,
    )
    return LlamaConfig(**(sizes | changes))


# Every way in which published Llamas differ, one at a time.
KINDS = {
    "gqa": _config(),
    "mha": _config(n_kv_heads=4),
    "mqa": _config(n_kv_heads=1),
    "tied": _config(tie_embeddings=True),
    "eps": _config(norm_eps=3e-2),
    "theta": _config(rope_theta=123_456.0),
    "head_dim": _config(head_dim=12),
    "one_head": _config(n_heads=1, n_kv_heads=1),
    "linear": _config(rope_scaling=RopeScaling("linear", 4.0)),
    "llama3": _config(
        rope_theta=500.0,
        rope_scaling=RopeScaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=32),
    ),
    "biases": _config(qkv_bias=True, out_bias=True, mlp_bias=True),
}

# Every kind of RoPE scaling in transformers, with its variants; contexts are shorter than the tokens.
_LONG = {"original_max_seq_len": 16, "rope_theta": 500.0, "head_dim": 16}


def _rope(kind: RopeScalingKind, factor: float, **settings) -> LlamaConfig:
    sizes = {name: settings.pop(name) for name in ("rope_theta", "head_dim")}
    return _config(**sizes, rope_scaling=RopeScaling(kind, factor, **settings))


ROPES = {
    "linear": _config(head_dim=16, rope_scaling=RopeScaling("linear", 4.0)),
    "dynamic": _rope("dynamic", 4.0, **_LONG),
    "dynamic-2": _rope("dynamic", 2.5, **_LONG | {"original_max_seq_len": 32}),
    "yarn": _rope("yarn", 4.0, **_LONG),
    "yarn-8k": _rope("yarn", 16.0, **_LONG | {"original_max_seq_len": 8192, "rope_theta": 10_000.0, "head_dim": 128}),
    "yarn-beta": _rope("yarn", 4.0, beta_fast=4.0, beta_slow=0.5, **_LONG),
    "yarn-whole": _rope("yarn", 4.0, beta_fast=2.0, beta_slow=0.5, truncate=False, **_LONG),
    "yarn-factor": _rope("yarn", 4.0, attention_factor=1.5, **_LONG),
    "yarn-mscale": _rope("yarn", 40.0, mscale=0.707, mscale_all_dim=1.0, **_LONG),
    "yarn-1": _rope("yarn", 1.0, **_LONG),
    "llama3": _rope("llama3", 8.0, low_freq_factor=0.25, high_freq_factor=2.0, **_LONG),
    "longrope": _rope(
        "longrope", 4.0, short_factor=[1 + 0.1 * i for i in range(8)], long_factor=[1.5 + i for i in range(8)], **_LONG
    ),
    "longrope-factor": _rope(
        "longrope", 4.0, short_factor=[1.0] * 8, long_factor=[2.0] * 7 + [5.0], attention_factor=1.25, **_LONG
    ),
}
ROPE_LENGTHS = (1, 16, 17, 40, 100)  # sequence lengths for which frequencies are stored
ROPE_MODELS = ("dynamic", "yarn", "longrope")  # logits are stored, too


def transformers_frequencies(config: LlamaConfig, length: int) -> tuple[np.ndarray, float]:
    """Radians per position float32[H/2] and the attention factor of transformers for a sequence of that length."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = transformers.LlamaConfig(**config_to_dict(config))
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, seq_len=length)
    return frequencies.numpy(), attention_factor


def random_tensors(config: LlamaConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by Hugging Face name, float32: large enough that attention and gates are far from uniform."""
    c, rng = config, np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (0.2 * rng.standard_normal(shape)).astype(np.float32)

    tensors = {HF_NAMES["embedding"]: normal(c.vocab_size, c.dim), HF_NAMES["final_norm"]: 1 + normal(c.dim)}
    if not c.tie_embeddings:
        tensors[HF_NAMES["lm_head"]] = normal(c.vocab_size, c.dim)
    shapes = {
        "q": (c.n_heads * c.head_dim, c.dim),
        "k": (c.n_kv_heads * c.head_dim, c.dim),
        "v": (c.n_kv_heads * c.head_dim, c.dim),
        "out": (c.dim, c.n_heads * c.head_dim),
        "gate": (c.hidden_dim, c.dim),
        "up": (c.hidden_dim, c.dim),
        "down": (c.dim, c.hidden_dim),
    }
    biases = ("q", "k", "v") * c.qkv_bias + ("out",) * c.out_bias + ("gate", "up", "down") * c.mlp_bias
    for i in range(c.n_layers):
        for part, shape in shapes.items():
            tensors[HF_NAMES[part].format(i)] = normal(*shape)
        for part in biases:
            tensors[HF_NAMES[f"{part}_bias"].format(i)] = normal(shapes[part][0])
        for part in ("attention_norm", "ffn_norm"):
            tensors[HF_NAMES[part].format(i)] = 1 + normal(c.dim)
    return tensors


def tokens(config: LlamaConfig, batch: int = 2, length: int = 40) -> np.ndarray:
    return np.random.default_rng(7).integers(0, config.vocab_size, (batch, length), dtype=np.int32)


def transformers_model(config: LlamaConfig, tensors: dict[str, np.ndarray]):
    """The same model in transformers, in evaluation mode, float32."""
    import torch
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config_to_dict(config))).eval()
    state = {name: torch.from_numpy(array) for name, array in tensors.items()}
    if config.tie_embeddings:
        state[HF_NAMES["lm_head"]] = state[HF_NAMES["embedding"]]
    model.load_state_dict(state)
    return model


# (temperature, top_k, top_p, min_p, repetition_penalty) of each row of the sampling golden.
SETTINGS = np.array(
    [
        (1.0, 0, 1.0, 0.0, 1.0),
        (0.7, 5, 1.0, 0.0, 1.0),
        (1.3, 0, 0.9, 0.0, 1.0),
        (1.0, 0, 0.1, 0.0, 1.0),
        (1.0, 0, 1.0, 0.05, 1.0),
        (0.5, 40, 0.8, 0.01, 1.3),
        (2.0, 7, 0.5, 0.2, 0.8),
        (1.0, 1, 1.0, 0.0, 1.5),
        (1.5, 200, 0.99, 0.001, 1.1),
        (0.3, 3, 0.95, 0.3, 1.0),
    ]
)


def sampling_case(rng: np.random.Generator, rows: int, vocab: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Logits float32[rows, vocab] and the previous ids int64[rows, 12] of each row."""
    return (3 * rng.standard_normal((rows, vocab))).astype(np.float32), rng.integers(0, vocab, (rows, 12))


def transformers_scores(logits: np.ndarray, ids: np.ndarray, settings: np.ndarray) -> np.ndarray:
    """The logits after transformers' processors, in its order; -inf for dropped tokens."""
    import torch
    from transformers.generation import logits_process as p

    rows = []
    for row, have, (temperature, top_k, top_p, min_p, penalty) in zip(logits, ids, settings, strict=True):
        processors = [p.RepetitionPenaltyLogitsProcessor(float(penalty)), p.TemperatureLogitsWarper(float(temperature))]
        if top_k:
            processors.append(p.TopKLogitsWarper(int(top_k)))
        if top_p < 1:
            processors.append(p.TopPLogitsWarper(float(top_p)))
        if min_p:
            processors.append(p.MinPLogitsWarper(float(min_p)))
        scores = torch.from_numpy(row[None])
        for processor in processors:
            scores = processor(torch.from_numpy(have[None]), scores)
        rows.append(scores[0].numpy())
    return np.stack(rows)


def main() -> None:
    import torch
    import transformers

    GOLDENS.mkdir(exist_ok=True)
    results = {}
    for name, config in KINDS.items():
        model = transformers_model(config, random_tensors(config))
        with torch.inference_mode():
            results[name] = model(torch.from_numpy(tokens(config)).long()).logits.numpy()
    version = np.array(f"transformers {transformers.__version__}, torch {torch.__version__}")
    np.savez_compressed(GOLDENS / "logits.npz", version=version, **results)

    ropes = {}
    for name, config in ROPES.items():
        found = [transformers_frequencies(config, length) for length in ROPE_LENGTHS]
        ropes[f"{name} frequencies"] = np.stack([frequencies for frequencies, _ in found])
        ropes[f"{name} factor"] = np.array([factor for _, factor in found])
    for name in ROPE_MODELS:
        model = transformers_model(ROPES[name], random_tensors(ROPES[name]))
        with torch.inference_mode():
            ropes[f"{name} logits"] = model(torch.from_numpy(tokens(ROPES[name])).long()).logits.numpy()
    np.savez_compressed(GOLDENS / "ropes.npz", version=version, **ropes)

    logits, ids = sampling_case(np.random.default_rng(3), len(SETTINGS))
    scores = transformers_scores(logits, ids, SETTINGS)
    np.savez_compressed(GOLDENS / "sampling.npz", version=version, scores=scores)
    for path in sorted(GOLDENS.glob("*.npz")):
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
