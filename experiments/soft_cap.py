"""Custom attention with soft-capped scores: training, sampling and evaluation through the public functions.

    python experiments/soft_cap.py              (PYTHONPATH=. if the package is not installed)

50 * tanh(scores / 50) keeps every score between -50 and 50 and leaves small ones nearly unchanged, as in Gemma 2 (Gemma
Team 2024, section 2). The library has no code for it: `Parts(attend=...)` of a configuration accepts any function with the
arguments of `llama_jax.ops.attend`, and `train_step`, `next_token_loss` and `generate` call it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import tyro

import llama_jax
from llama_jax import Batch, Parts, Sampling
from llama_jax.ops.attention import AttentionMask, KVView, visible

CAP = 50.0


@dataclass(frozen=True)
class Arguments:
    """What to train."""

    model: str = "stories-260k"
    text: str = "One day a llama met a lion. The lion was sad. The llama sang a song, and the lion was happy again. "
    steps: int = 150
    new_tokens: int = 60


def capped(queries: jax.Array, view: KVView, seen: AttentionMask, *, scale: float, window: int | None = None) -> jax.Array:
    """Attention with soft-capped scores, [B, K, T, G, H], like `llama_jax.ops.attend`."""
    keys, values = view  # [B, K, S, H] each, of the tokens or of a layer's cache
    scores = jnp.einsum("bktgh,bksh->bktgs", queries, keys, preferred_element_type=jnp.float32) * scale
    scores = CAP * jnp.tanh(scores / CAP)
    sees = visible(seen, window)[:, None, :, None]  # [B, 1, T, 1, S]
    weights = jax.nn.softmax(jnp.where(sees, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.einsum("bktgs,bksh->bktgh", weights.astype(values.dtype), values)


def main(arguments: Arguments) -> dict[str, float | str]:
    """Return the losses before and after training, and a sample."""
    config = replace(llama_jax.preset(arguments.model), parts=Parts(attend=capped))
    letters = [3 + byte for byte in arguments.text.encode()]
    batch = Batch(jnp.array([letters[i:] + letters[:i] for i in range(0, len(letters), 8)], jnp.int32))
    optimizer = llama_jax.make_optimizer(llama_jax.OptimizerSettings(learning_rate=5e-3, warmup_steps=10), arguments.steps)
    state = llama_jax.init_state(optimizer, llama_jax.init(config, jax.random.key(0)))
    step = jax.jit(partial(llama_jax.train_step, config, optimizer), donate_argnums=0)
    loss = jax.jit(partial(llama_jax.next_token_loss, config))
    before = float(loss(state.params, batch))
    for _ in range(arguments.steps):
        state, _ = step(state, batch)
    [written] = llama_jax.generate(
        config,
        state.params,
        [letters[:20]],
        max_new_tokens=arguments.new_tokens,
        sampling=Sampling(temperature=0.0),
    )
    text = bytes(token - 3 for token in written.tokens if 3 <= token < 259).decode(errors="replace")
    results = {"before": before, "after": float(loss(state.params, batch)), "text": arguments.text[:20] + text}
    print(f"{results['before']:.3f} -> {results['after']:.3f} nats per token; it writes {results['text']!r}")
    return results


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
