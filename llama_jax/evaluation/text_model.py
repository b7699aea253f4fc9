"""A model that scores and generates text, for evaluation tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from llama_jax.config import LlamaConfig
from llama_jax.data.load_corpus import MegabyteProgress
from llama_jax.errors import GenerationError, short_repr
from llama_jax.evaluation.loglikelihood import Continuation, Score, compiled_measure, score_pairs
from llama_jax.inference.sampling import Sampling
from llama_jax.model.params import LlamaParams
from llama_jax.serving.engine import Engine
from llama_jax.serving.offline import Job, run_jobs
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.requests import GenerationRequest
from llama_jax.tokenizers import Format, Message, Tokenizer, resolve_format
from llama_jax.tokenizers.chat import chat_parts, check_messages
from llama_jax.tokenizers.chat_template import Renderer
from llama_jax.tokenizers.interface import Text, check_token_rows

LIMIT_SETTINGS = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)  # if several are set, the first counts
USUAL_LIMIT = 256  # tokens of a continuation, if the task sets none


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of a continuation.

    Attributes:
      max_new_tokens: maximum number of tokens.
      stop: texts that end the continuation and are not part of it.
      sampling: numbers, not arrays; its seed is ignored.
    """

    max_new_tokens: int = USUAL_LIMIT
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)


def generation_settings(settings: Mapping[str, Any]) -> GenerationSettings:
    """Convert a task's settings, with the names of the lm-evaluation-harness and of transformers.

    Without `do_sample` the temperature decides: 0, the default, is greedy.

    Raises:
      GenerationError: an unknown setting, or an invalid value.
    """
    left = dict(settings)
    limits = [left.pop(name, None) for name in LIMIT_SETTINGS]
    limit = next((limit for limit in limits if limit is not None), USUAL_LIMIT)
    until = left.pop("until", None)
    stop = [until] if isinstance(until, str) else until or []
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise GenerationError(f"until={short_repr(until)} must be a text or a list of texts")
    drawn, temperature = left.pop("do_sample", None), left.pop("temperature", None)
    if drawn is None:
        temperature = temperature or 0.0
    elif not drawn:
        temperature = 0.0
    elif temperature is None:
        temperature = 1.0
    known = {field.name for field in fields(Sampling)} - {"temperature", "seed"}
    chosen = {name: left.pop(name) for name in known if left.get(name) is not None}
    for name, value in left.items():
        if value is not None and (name, value) != ("num_beams", 1):
            raise GenerationError(f"{short_repr(name, 40)}={short_repr(value, 40)} is not a supported setting of generation")
    sampling = Sampling(temperature=temperature, **chosen)
    sampling.per_row(1)
    if isinstance(limit, bool) or int(limit) != limit or limit < 1:
        raise GenerationError(f"{LIMIT_SETTINGS[0]}={short_repr(limit, 40)} must be a positive integer")
    return GenerationSettings(int(limit), tuple(filter(None, stop)), sampling)


class TextModel:
    """A model and its tokenizer; texts are encoded as in the lm-evaluation-harness's backend for transformers, so that
    scores are comparable.

    Names of special tokens in a text are special tokens. A text begins with the begin-of-sequence token if the tokenizer
    adds one, unless it already begins with its name, as a rendered chat does. Spaces at the end of a context belong to the
    continuation. A text that is too long loses its beginning.

    Attributes:
      context: maximum number of input tokens.
      cut: number of texts so far that have lost their beginning.
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: LlamaParams,
        tokenizer: Tokenizer,
        *,
        bos: bool = True,
        format: Format = "auto",
        template_args: Mapping[str, Any] | None = None,
        batch: int | None = None,
        seed: int = 0,
        options: EngineOptions = EngineOptions(),
    ) -> None:
        """Prepare a model; compiles nothing yet.

        Args:
          config, params, tokenizer: from `load`, also with an adapter or quantized, and on a mesh over `tensor`.
          bos: whether texts begin with the begin-of-sequence token if the tokenizer adds one.
          format: chat format, see `tokenizers.resolve_format`.
          template_args: variables of the checkpoint's chat template.
          batch: rows per forward pass of scoring, see `score_pairs`.
          seed: seed of the first sampled text; incremented for each next one.
          options: options of the engine that generates; its `compute` and context length are used for scoring too.

        Raises:
          GenerationError: a vocabulary with neither a begin- nor an end-of-sequence token.
        """
        if max(tokenizer.bos_id, tokenizer.eos_id) < 0:
            raise GenerationError("the vocabulary has neither a bos nor an eos token; name one in tokenizer_config.json")
        self.context = min(options.context_of(config), options.context or config.default_context)
        self.tokenizer = tokenizer
        self.cut = 0
        self._config, self._params = config, params
        self._bos, self._format, self._batch, self._seed = bos, format, batch, seed
        self._options = options
        self._measure = compiled_measure(config, params, options.compute)
        self._names = {token: name for name, token in tokenizer.special_tokens.items()}
        self._engine: Engine | None = None
        self._renderer = Renderer(template_args=template_args)

    @property
    def prefix(self) -> int:
        """The token from which the first token of a text without a context is predicted."""
        return self.tokenizer.bos_id if self.tokenizer.bos_id >= 0 else self.tokenizer.eos_id

    def encode(self, text: str) -> list[int]:
        """Ids of a text to be continued."""
        name = self._names.get(self.tokenizer.bos_id)
        bos = self._bos and self.tokenizer.add_bos and not (name and text.startswith(name))
        return self._encode(text, bos)

    def alone(self, text: str) -> list[int]:
        """Ids of a text preceded only by `prefix`."""
        ids = self._encode(text, False)
        return ids[1:] if ids[:1] == [self.prefix] else ids

    def _encode(self, text: str, bos: bool) -> list[int]:
        ids = self.tokenizer.encode(text, bos=bos, eos=False, special=True)
        check_token_rows(self.tokenizer, ids, self._config.vocab_size, f"the text {short_repr(text, 40)}")
        return ids

    def pair(self, context: str, continuation: str) -> Continuation:
        """The ids of a text and its continuation, encoded together and then split.

        Raises:
          GenerationError: a continuation that adds no tokens.
        """
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if context:
            before = self.encode(context)
            pair = Continuation(before, self.encode(context + continuation)[len(before) :])
        else:
            pair = Continuation([self.prefix], self.alone(continuation))
        if not pair.continuation:
            raise GenerationError(
                f"the continuation {short_repr(continuation)} adds no token to {short_repr(context[-40:])}; pass a longer"
                " one"
            )
        return pair

    def score(self, pairs: Sequence[Continuation], progress: MegabyteProgress | None = None) -> list[Score]:
        """See `score_pairs`."""
        self.cut += sum(len(context) + len(continuation) > self.context + 1 for context, continuation in pairs)
        return score_pairs(
            self._config,
            self._params,
            pairs,
            context=self.context,
            batch=self._batch,
            measure=self._measure,
            progress=progress,
        )

    def generate(self, texts: Sequence[tuple[str, GenerationSettings]], progress: Any = None) -> list[str]:
        """Continue each text by its settings, several at a time.

        Args:
          progress: wraps the jobs as they end, as `tqdm.tqdm` does.

        Raises:
          GenerationError: invalid settings.
        """
        if self._engine is None:
            self._engine = Engine(self._config, self._params, self._options)
        longest_first = sorted(range(len(texts)), key=lambda number: -len(texts[number][0]))
        jobs = run_jobs(self._engine, (self._job(number, *texts[number]) for number in longest_first))
        replies = [""] * len(texts)
        for job in jobs if progress is None else progress(jobs):
            assert job.text is not None
            replies[job.number] = job.text.shown
        self._seed += len(texts)
        return replies

    def _job(self, number: int, context: str, settings: GenerationSettings) -> Job:
        room = self.context - settings.max_new_tokens
        if room < 1:
            raise GenerationError(
                f"max_gen_toks={settings.max_new_tokens} leaves no room for a text in the context of {self.context};"
                " lower it"
            )
        ids = self.encode(context) or [self.prefix]
        self.cut += len(ids) > room
        special = self.tokenizer.special_tokens
        ends = {*self.tokenizer.stop_ids, *(special[text] for text in settings.stop if text in special)}
        request = GenerationRequest(
            prompt=ids[-room:],
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling.replace(seed=(self._seed + number) % 2**32),
            stop_tokens=sorted(ends),
        )
        stop = [text for text in settings.stop if text not in special]
        return Job(number, request, Text(self.tokenizer, stop, write=lambda text: None, at_start=True))

    def chat(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        """A chat as a text, with special tokens by name.

        Args:
          reply: whether to append the header of the assistant's next message. If not, a last message from the assistant is
            left open, to be continued.

        Raises:
          GenerationError: messages that are not a valid chat, or a model without a chat format.
        """
        format = resolve_format(self.tokenizer, self._format)
        check_messages(messages, format)
        begun = ""
        if not reply and len(messages) > 1 and messages[-1]["role"] == "assistant":
            messages, begun, reply = messages[:-1], messages[-1]["content"], True
        parts = chat_parts(self.tokenizer, messages, format, self._renderer, reply=reply)
        return "".join(part if isinstance(part, str) else self._names[part] for part in parts) + begun

    @property
    def chat_template(self) -> str:
        """The chat template, or the name of the chat format if it has none.

        Raises:
          GenerationError: a model without a chat format.
        """
        format = resolve_format(self.tokenizer, self._format)
        return str(self.tokenizer.chat_template) if format == "template" else format

    def close(self) -> None:
        """End the process that renders chats, if one is running."""
        self._renderer.close()
