"""The settings of training by rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from llama_jax.config.validation import require_number, require_positive_int
from llama_jax.runs.errors import TrainingError
from llama_jax.tokenizers import Format
from llama_jax.training.rewards import PolicyKind, PolicyOptions

Truncated = Literal["count", "mask"]


@dataclass(frozen=True)
class RewardSettings:
    """How answers are sampled and judged, and the loss that is computed from the rewards.

    Attributes:
      functions: ``FILE.py:FUNCTION`` each, called as ``function(completions, **columns)``; see `runs.reward_functions`. The
        command line's ``--reward`` adds one.
      weights: of the functions in their sum; empty for 1 each.
      group: answers to each prompt; the recipe's batch / group are the prompts of a step.
      answer: tokens of an answer at most, its stop token included; a prompt has room for the recipe's length + 1 - answer.
      temperature: of the sampling, above 0; the loss has its log-probabilities at the same one.
      updates: steps on the same answers (mu of Shao et al. 2024), after which new ones are sampled.
      loss, clip, clip_high, beta: see `training.rewards.PolicyOptions`. With beta the reference is the model without its
        adapters, or the weights that training began with.
      scale: whether advantages are divided by the standard deviation of their group.
      truncated: whether answers that were cut off are learnt from as others are ("count") or not ("mask", Yu et al. 2025,
        section 3.4); either way they count in their group's mean.
      format: of prompts that are messages, see `tokenizers.resolve_format`.
      special: whether "<|eot_id|>" and the like are special tokens in prompts that are texts; by default they are text.
      held: how many held-out prompts are answered at an evaluation, `group` times each; 0 is all.
      samples: how many of these answers are shown in the log.

    Raises:
      TrainingError, ConfigError: an impossible value.
    """

    functions: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    group: int = 8
    answer: int = 64
    temperature: float = 1.0
    updates: int = 1
    loss: PolicyKind = "dapo"
    clip: float = 0.2
    clip_high: float | None = None
    beta: float = 0.0
    scale: bool = True
    truncated: Truncated = "count"
    format: Format = "auto"
    special: bool = False
    held: int = 32
    samples: int = 2

    def __post_init__(self) -> None:
        for name in ("group", "answer", "updates"):
            require_positive_int(f"rewards.{name}", getattr(self, name))
        for name in ("held", "samples"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise TrainingError(f"rewards.{name}={value!r} must be an integer of at least 0")
        if self.group < 2:
            raise TrainingError(
                f"rewards.group={self.group} must be at least 2: an answer is compared with its group's others"
            )
        require_number("rewards.temperature", self.temperature, above=0)
        for weight in self.weights:
            require_number("rewards.weights", weight)
        if self.truncated not in get_args(Truncated):
            raise TrainingError(f"rewards.truncated={self.truncated!r} must be one of {', '.join(get_args(Truncated))}")
        PolicyOptions(self.loss, self.clip, self.clip_high, self.beta, self.answer if self.loss == "dr_grpo" else None)
