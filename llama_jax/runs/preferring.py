"""How often a model prefers the chosen answers of preference pairs, by itself and relative to a reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from llama_jax.config import LlamaConfig
from llama_jax.data.load_corpus import Progress
from llama_jax.data.preference_batches import Pairs
from llama_jax.model.options import Compute
from llama_jax.model.params import Llama
from llama_jax.ops.platform import tracing_for
from llama_jax.runs.tasks.preferences import read_all
from llama_jax.training.objective import LossOptions
from llama_jax.training.pairs import AnswerSums, answer_logprobs


@dataclass(frozen=True)
class Preferring:
    """What `prefer` found of N pairs; the means are over pairs, in nats.

    Attributes:
      accuracy: the share of pairs whose chosen answer is more probable than the rejected one; against a reference, whose
        chosen answer gains more log-probability over the reference than the rejected one.
      accuracy_error: its standard error, as of a binomial share of N.
      margin: log-probability of the chosen answer minus that of the rejected one; against a reference, minus the same
        difference there. Times beta it is the margin of rewards in DPO.
      margin_error: its standard error, from the spread between pairs; nan for a single one.
      accuracy_per_token: as `accuracy`, with log-probabilities divided by the tokens of the answer, since long answers are
        less probable because of their length.
      chosen_logprob, rejected_logprob: of the answers by the model.
      pairs: N.
      tokens: of all answers.
    """

    accuracy: float
    accuracy_error: float
    margin: float
    margin_error: float
    accuracy_per_token: float
    chosen_logprob: float
    rejected_logprob: float
    pairs: int
    tokens: int


def log_answers(
    config: LlamaConfig,
    params: Llama,
    pairs: Pairs,
    *,
    length: int,
    batch: int,
    compute: Compute = Compute(),
    progress: Progress | None = None,
) -> AnswerSums:
    """Log-probabilities and lengths of both answers of N pairs, float32[N, 2] each.

    Args:
      length: T, predicted tokens of a row, of which each side of a pair has some.
      batch: B, rows of both sides that are read at once.
    """
    read = jax.jit(partial(answer_logprobs, config, options=LossOptions(compute)))
    with tracing_for(params):
        return read_all(partial(read, params), pairs, batch, length, progress=progress)


def prefer(answers: AnswerSums, reference: AnswerSums | None = None) -> Preferring:
    """The numbers, from the log-probabilities of a model and, if there is one, of a reference."""
    own = np.asarray(answers.logprobs, np.float64)
    ratios = own if reference is None else own - np.asarray(reference.logprobs, np.float64)
    lengths = np.maximum(np.asarray(answers.lengths, np.float64), 1)
    margins, count = ratios[:, 0] - ratios[:, 1], len(ratios)
    per_token = ratios / lengths
    accuracy = float((margins > 0).mean())
    return Preferring(
        accuracy=accuracy,
        accuracy_error=math.sqrt(accuracy * (1 - accuracy) / count),
        margin=float(margins.mean()),
        margin_error=float(margins.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan,
        accuracy_per_token=float((per_token[:, 0] > per_token[:, 1]).mean()),
        chosen_logprob=float(own[:, 0].mean()),
        rejected_logprob=float(own[:, 1].mean()),
        pairs=count,
        tokens=int(np.asarray(answers.lengths).sum()),
    )
