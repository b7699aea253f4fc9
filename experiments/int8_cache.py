"""The cost of an int8 cache if a few key channels are outliers, as in Qwen2.5: KL divergence from a float cache.

    python experiments/int8_cache.py --model SmolLM2-135M-Instruct.Q4_1.gguf     six minutes on two cores

Qwen2.5-Coder-0.5B has keys of up to 216 in layers with a mean of 6, mostly because of the bias. SmolLM2 has no such keys, so
`with_outliers` adds them to two or four channels of the last eight pairs of each head, which RoPE rotates least: a bias of
108 to 216 ("bias"), or larger weights of their keys and smaller weights of their queries, so that the model computes the
same ("weights"). All keys of a head are also scaled to a mean size of 6. WikiText's test split is prefilled in chunks of 128
tokens. "rounded" stores keys unchanged, with a scale for each head and position; "smoothed" is the library's method. Writes
``experiments/results/int8_cache.json`` and the table in ``.md``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import tyro
from measuring import cpu_name, settings, versions, write_report

if TYPE_CHECKING:
    from llama_jax.config import LlamaConfig
    from llama_jax.model.params import Llama

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("LLAMA_JAX_TEST_DATA", ROOT.parent / "shared" / "data"))
PIECE = 128
MODELS = {"as it is": None, **{f"{kind}, {n} channels": (kind, n) for kind in ("bias", "weights") for n in (2, 4)}}


@dataclass(frozen=True)
class Arguments:
    """What to measure."""

    model: Path
    """A model of the Llama family without biases."""
    tokens: int = 1024
    """Tokens of the text, in one row."""
    output: Path = ROOT / "experiments" / "results" / "int8_cache.json"
    """The report; the table is next to it."""


def with_outliers(
    config: LlamaConfig,
    params: Llama,
    ids: np.ndarray,
    kind: str,
    channels: int,
    *,
    largest: float = 216.0,
    mean: float = 6.0,
) -> tuple[LlamaConfig, Llama]:
    """The model with outliers in a few channels of its keys.

    Args:
      ids: tokens of a text on which the keys are measured.
      kind: "bias" or "weights".
    """
    import jax.numpy as jnp

    import llama_jax

    random, half, groups = np.random.default_rng(0), config.head_dim // 2, config.queries_per_kv_head
    _, _, kept = llama_jax.observe(config, params, ids[None], {"keys": lambda keys, at: (keys, keys)})
    blocks = []
    for block, found in zip(llama_jax.layers_of(params), kept["keys"], strict=True):
        qkv, keys = np.array(block.attention.qkv), np.asarray(found)[0].swapaxes(0, 1)  # [K, G + 2, H, D], [K, T, H]
        bias = np.zeros(qkv.shape[:-1], np.float32)
        factors = np.broadcast_to(mean / np.abs(keys).mean((1, 2))[:, None], keys[:, 0].shape).copy()  # [K, H]
        for head in range(len(qkv)):
            for pair in random.choice(np.arange(max(half - 8, 0), half), channels, replace=False):
                both = [pair, pair + half]
                if kind == "bias":
                    bias[head, groups, random.choice(both)] = random.choice([-1, 1]) * largest * random.uniform(0.5, 1)
                else:
                    factors[head, both] = largest / np.abs(keys[head][:, both]).max()
        qkv[:, groups] *= factors[..., None]
        qkv[:, :groups] /= factors[:, None, :, None]
        attention = block.attention.replace(qkv=jnp.asarray(qkv), qkv_bias=jnp.asarray(bias) if kind == "bias" else None)
        blocks.append(block.replace(attention=attention))
    return replace(config, qkv_bias=kind == "bias"), params.replace(blocks=llama_jax.stack(blocks))


def divergences(config: LlamaConfig, params: Llama, ids: np.ndarray, *, smoothed: bool = True) -> np.ndarray:
    """KL divergence of the model with an int8 cache from the model with a float32 cache, nats for each token."""
    import jax
    import jax.numpy as jnp

    import llama_jax
    from llama_jax import ops

    @jax.jit
    def read(params: Llama, tokens: jax.Array, cache: Any) -> Any:
        hidden, cache = llama_jax.forward(config, params, tokens, cache)
        return jax.nn.log_softmax(llama_jax.unembed(config, params, hidden)[0]), cache

    def logprobs(dtype: Any) -> np.ndarray:
        cache, found = llama_jax.init_cache(config, 1, len(ids), dtype), []
        for start in range(0, len(ids), PIECE):
            some, cache = read(params, ids[None, start : start + PIECE], cache)
            found.append(some)
        return np.concatenate(found)

    exact = logprobs(jnp.float32)
    as_they_come = mock.patch.object(ops, "smooth_keys", lambda keys, *queries, **_: (keys, *queries))
    if smoothed:
        return np.sum(np.exp(exact) * (exact - logprobs(jnp.int8)), axis=-1)
    with as_they_come:
        return np.sum(np.exp(exact) * (exact - logprobs(jnp.int8)), axis=-1)


def as_table(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    lines = ["# A cache of int8 and keys that stand out", ""]
    lines += [f"{report['model']}, {report['tokens']:,} tokens of WikiText: KL from a float32 cache, nats a token.", ""]
    lines += ["| keys | mean size, largest | rounded: KL | worst | smoothed: KL | worst |", "|---|---:|---:|---:|---:|---:|"]
    for name, row in report["rows"].items():
        cells = [f"{row['mean']:.1f}, {row['largest']:.0f}"]
        cells += [f"{row[way][what]:.1e}" for way in ("rounded", "smoothed") for what in ("kl", "worst")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Arguments) -> None:
    import llama_jax

    config, params, tokenizer = llama_jax.load(arguments.model, "float32")
    assert tokenizer is not None
    text = (DATA / "text" / "wikitext-2-test.txt").read_text("utf-8")[: 8 * arguments.tokens]
    ids = np.asarray(tokenizer.encode(text)[: arguments.tokens], np.int32)
    report: dict[str, Any] = {
        "device": cpu_name(),
        "versions": versions("jax", "jaxlib", "numpy"),
        "settings": settings(arguments),
        "model": arguments.model.stem,
        "tokens": len(ids),
        "rows": {},
    }
    for name, outliers in MODELS.items():
        ours = (config, params) if outliers is None else with_outliers(config, params, ids, *outliers)
        _, _, kept = llama_jax.observe(*ours, ids[None], {"keys": lambda keys, at: (keys, keys)})
        sizes = np.abs(np.asarray(kept["keys"]))
        row: dict[str, Any] = {"mean": float(np.mean(sizes)), "largest": float(np.max(sizes))}
        for way in ("rounded", "smoothed"):
            found = divergences(*ours, ids, smoothed=way == "smoothed")
            row[way] = {"kl": float(found.mean()), "worst": float(found.max())}
        report["rows"][name] = row
        print(name, row, flush=True)
    write_report(arguments.output, report)
    table = as_table(report)
    arguments.output.with_suffix(".md").write_text(table, "utf-8")
    print(table)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
