"""Inputs of preference and policy losses, for which goldens/preferences.npz has TRL's losses and gradients.

Commit 2b1345d3 has the script that calls TRL's trainers, experiments/make_preference_goldens.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llama_jax.training.policy_gradient import PolicyOptions
from llama_jax.training.preference_loss import Pair, PreferenceOptions

GOLDEN = Path(__file__).parent / "goldens" / "preferences.npz"
ROWS, LENGTH = 6, 8

CASES = {
    "sigmoid": PreferenceOptions(),
    "smoothed": PreferenceOptions("sigmoid", 0.3, label_smoothing=0.2),
    "hinge": PreferenceOptions("hinge", 0.4),
    "ipo": PreferenceOptions("ipo", 0.7),
    "simpo": PreferenceOptions("simpo", 2.0, margin=0.9),
    "orpo": PreferenceOptions("orpo", 0.25),
    "kto": PreferenceOptions("kto", 0.3, undesirable=1.3),
}
POLICIES = {
    "dapo": PolicyOptions(),
    "clip-higher": PolicyOptions("dapo", clip_high=0.28, beta=0.05),
    "grpo": PolicyOptions("grpo", clip=0.1, beta=0.1),
    "dr_grpo": PolicyOptions("dr_grpo", length=12),
}


def numbers() -> tuple[Pair, Pair, Pair, np.ndarray]:
    """Summed log-probabilities of a model and a reference, lengths, and ratios of mismatched answers; float64."""
    rng = np.random.default_rng(0)
    lengths = Pair(*rng.integers(1, 20, (2, ROWS)).astype(float))
    policy = Pair(*(-np.abs(rng.normal(size=ROWS)) * count for count in lengths))
    reference = Pair(*(logprob + rng.normal(size=ROWS) for logprob in policy))
    return policy, reference, lengths, rng.normal(size=ROWS) + 0.5


def rollouts() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities [B, T] of tokens under a model, the sampling model and a reference; advantages [B]; and the mask of
    answer tokens."""
    rng = np.random.default_rng(1)
    logprobs = -np.abs(rng.normal(size=(ROWS, LENGTH)))
    sampled, reference = (logprobs + 0.3 * rng.normal(size=logprobs.shape) for _ in range(2))
    mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (ROWS, 1))
    mask[[0, 1, 2, 3, 5]] |= np.arange(LENGTH) < 6  # tokens whose gradients a test compares
    return logprobs, sampled, reference, rng.normal(size=ROWS), mask
