"""A model for the lm-evaluation-harness (Gao et al. 2024): ``lm_eval.simple_evaluate(model=HarnessModel(...))``.

Neither torch nor transformers is used. The package ``lm_eval`` must be installed: the extra ``lm-eval``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from llama_jax.errors import GenerationError, short_repr
from llama_jax.evaluation.loglikelihood import Continuation
from llama_jax.evaluation.text_model import TextModel, generation_settings
from llama_jax.runs.log import progress_bar
from llama_jax.tokenizers import Message


class HarnessModel(LM):
    """The interface that the harness calls. It runs in one process: `world_size` is 1 for any mesh.

    Args:
      texts: the model.
      name: name of the model, for reports and the harness's caches.
    """

    def __init__(self, texts: TextModel, name: str = "llama_jax") -> None:
        super().__init__()
        self.texts = texts
        self.name = name

    @property
    def max_length(self) -> int:
        """The maximum number of input tokens."""
        return self.texts.context

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each (context, continuation) the log-probability in nats, and whether greedy decoding generates it.

        Raises:
          GenerationError: a continuation without tokens, or longer than the context.
        """
        pairs = [self.texts.pair(*request.args) for request in requests]
        scores = [
            (score.logprob, score.greedy)
            for score in self.texts.score(pairs, progress_bar("loglikelihood", "batches", quiet=disable_tqdm))
        ]
        return self._cached("loglikelihood", requests, scores)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """For each (text,) the log-probability in nats, computed in windows; only the last one overlaps.

        As in the harness's backend for transformers, if texts begin with a BOS token, it is predicted too, from another BOS
        before it.
        """
        pairs: list[Continuation] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.texts.encode(*request.args),
                prefix_token=self.texts.prefix,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs += [Continuation(*make_disjoint_window(window)) for window in windows]
            owners += [number] * (len(pairs) - len(owners))
        totals = [0.0] * len(requests)
        for owner, score in zip(
            owners, self.texts.score(pairs, progress_bar("rolling", "batches", quiet=disable_tqdm)), strict=True
        ):
            totals[owner] += score.logprob
        return self._cached("loglikelihood_rolling", requests, totals)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each (context, settings), see `text_model.generation_settings`.

        Raises:
          GenerationError: settings that are not supported, or that leave no room for the context.
        """
        texts = [(context, generation_settings(settings)) for context, settings in (request.args for request in requests)]
        bar = progress_bar("generate_until", "texts", quiet=disable_tqdm)
        return self._cached("generate_until", requests, self.texts.generate(texts, partial(bar, total=len(texts))))

    def apply_chat_template(self, chat_history: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """A chat as a text, see `TextModel.chat`."""
        return self.texts.chat(chat_history, reply=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The chat template, for reports; None if `chat_template` is False.

        Raises:
          GenerationError: a template selected by name, or a model without a chat format.
        """
        if isinstance(chat_template, str):
            raise GenerationError(
                f"chat_template={short_repr(chat_template, 40)}: only the model's default template is used"
            )
        return self.texts.chat_template if chat_template else None

    def get_model_info(self) -> dict[str, Any]:
        """Facts that the harness adds to the configuration in its results."""
        return {"model": self.name, "max_length": self.max_length}

    @property
    def tokenizer_name(self) -> str:
        """The name of the harness's cache of requests."""
        return self.name.replace("/", "__")

    def _cached(self, request_type: str, requests: Sequence[Instance], answers: list[Any]) -> list[Any]:
        """The answers, after adding them to the harness's cache."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(request_type, request.args, answer)
        return answers
