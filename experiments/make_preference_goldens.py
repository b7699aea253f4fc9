"""Write TRL's preference and policy losses, with their gradients, for the tests to compare with.

pip install -e ".[parity]" trl peft
python experiments/make_preference_goldens.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llama_jax.training.policy_gradient import PolicyOptions
from llama_jax.training.preference_loss import Pair, PreferenceOptions

GOLDEN = Path(__file__).parents[1] / "tests" / "goldens" / "preferences.npz"
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
    reference = Pair(*(own + rng.normal(size=ROWS) for own in policy))
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


def main() -> None:
    found: dict[str, np.ndarray] = {}
    for name, options in CASES.items():
        loss, gradients = _of_preferences(name, options)
        found |= {f"{name} loss": loss, f"{name} gradients": gradients}
    for name, policy in POLICIES.items():
        loss, gradients = _of_policy(policy)
        found |= {f"{name} loss": loss, f"{name} gradients": gradients}
    np.savez(GOLDEN, **found)
    print(f"{GOLDEN}: {len(found)} arrays")


def _of_preferences(name: str, options: PreferenceOptions) -> tuple[np.ndarray, np.ndarray]:
    """The mean loss of TRL's trainer, and its gradient with respect to both sums of log-probabilities, [2, B]."""
    from unittest.mock import patch

    import torch
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.kto_trainer import KTOTrainer

    policy, reference, lengths, mismatched = numbers()
    sums = torch.tensor(np.stack(policy), requires_grad=True)
    others, counts = torch.tensor(np.stack(reference)), np.stack(lengths).astype(int).reshape(-1)
    trainer = _trainer(beta=options.beta)
    model, inputs = _told(sums.reshape(-1), counts)
    if name in ("sigmoid", "hinge", "ipo"):
        vars(trainer).update(loss_types=[name], loss_weights=[1.0], f_divergence_type="reverse_kl", ld_alpha=None)
        trainer.use_weighting = False
        loss = DPOTrainer._compute_loss(
            trainer, model, inputs | {"ref_chosen_logps": others[0], "ref_rejected_logps": others[1]}, False
        )
    elif name in ("smoothed", "simpo"):
        given = sums - others if name == "smoothed" else sums / torch.tensor(np.stack(lengths))
        vars(trainer).update(alpha=0.0, label_smoothing=options.label_smoothing, simpo_gamma=options.margin)
        trainer.loss_type = "sigmoid" if name == "smoothed" else "simpo"
        loss = CPOTrainer.cpo_loss(trainer, *given)[0].mean()
    elif name == "orpo":
        with patch.object(torch.Tensor, "float", lambda tensor: tensor):  # it would convert to float32
            loss = -ORPOTrainer.odds_ratio_loss(trainer, *(sums / torch.tensor(np.stack(lengths))))[0].mean()
    else:
        vars(trainer).update(loss_type="kto", calculate_KL=True, _compute_kl_logps=lambda *_: torch.tensor(mismatched))
        vars(trainer).update(desirable_weight=options.desirable, undesirable_weight=options.undesirable)
        label = torch.arange(2 * ROWS) < ROWS
        more = {"label": label, "ref_logps": others.reshape(-1), "ref_KL_logps": torch.zeros(ROWS)}
        loss = KTOTrainer._compute_loss(trainer, model, inputs | more, False)
    loss.backward()
    return loss.detach().numpy(), sums.grad.numpy()


def _of_policy(options: PolicyOptions) -> tuple[np.ndarray, np.ndarray]:
    """The loss of TRL's GRPOTrainer, and its gradient with respect to the tokens' log-probabilities, [B, T]."""
    import torch
    from trl.trainer.grpo_trainer import GRPOTrainer

    logprobs, sampled, reference, advantages, mask = rollouts()
    own = torch.tensor(logprobs, requires_grad=True)
    trainer = _trainer(beta=options.beta, loss_type=options.kind, epsilon_low=options.clip)
    trainer.epsilon_high = options.clip if options.clip_high is None else options.clip_high
    vars(trainer).update(top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token")
    vars(trainer).update(use_vllm=False, max_completion_length=options.length, _entropy_bonus_enabled=False)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (own, torch.zeros_like(own), None)
    ids = torch.zeros(logprobs.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": torch.tensor(mask).long(),
        "advantages": torch.tensor(advantages),
        "old_per_token_logps": torch.tensor(sampled),
        "ref_per_token_logps": torch.tensor(reference),
        "num_items_in_batch": torch.tensor(mask.sum()),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.detach().numpy(), own.grad.numpy()


def _trainer(**settings):
    """A trainer with only the parts that its loss uses, in evaluation mode."""
    from collections import defaultdict
    from types import SimpleNamespace

    same = lambda value, **_: value
    accelerator = SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same, reduce=same, num_processes=1)
    return SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=accelerator,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        **settings,
    )


def _told(sums, counts: np.ndarray):
    """A model whose log-probabilities sum to the given value for each row, divided among its tokens, and its inputs."""
    from types import SimpleNamespace

    import torch

    length = int(counts.max())
    answer = torch.tensor(np.arange(length) < counts[:, None])
    logprobs = torch.where(answer, (sums / torch.tensor(counts))[:, None], torch.zeros((), dtype=sums.dtype))
    ignored = torch.zeros_like(logprobs)
    found = SimpleNamespace(log_probs=logprobs, entropy=ignored, mean_logits=ignored, is_top1=ignored.bool())
    ids = torch.zeros((len(counts), length + 1), dtype=torch.long)
    mask = torch.cat([torch.zeros_like(answer[:, :1]), answer], dim=1).long()
    return lambda **_: found, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}


if __name__ == "__main__":
    main()
