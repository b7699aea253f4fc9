"""``llama-jax quickstart``: does the installation work?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quickstart:
    """Run a small random model once and print the shape of its logits: (2, 16, 1000)."""

    def run(self) -> None:
        import jax

        import llama_jax

        config = llama_jax.LlamaConfig(
            vocab_size=1000,
            dim=64,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            hidden_dim=192,
            max_seq_len=128,
            norm_eps=1e-5,
            rope_theta=10_000.0,
            tie_embeddings=False,
        )
        params = llama_jax.init(config, jax.random.key(0))
        tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, config.vocab_size)
        print(llama_jax.logits(config, params, tokens).shape)
