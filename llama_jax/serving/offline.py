"""The engine without a server: any number of prompts, each continued as soon as a row is free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import jax

from llama_jax.config import LlamaConfig
from llama_jax.errors import GenerationError
from llama_jax.inference.generate import Generation
from llama_jax.inference.prepare_inputs import checked_limits
from llama_jax.inference.sampling import Sampling
from llama_jax.model.params import LlamaParams
from llama_jax.serving.engine import Engine
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.requests import FinishReason, GenerationRequest, Ticket, Update
from llama_jax.tokenizers.interface import Text


@dataclass(eq=False)
class Job:
    """A prompt to be continued, and its continuation so far.

    Attributes:
      number: index chosen by the caller.
      text: the continuation as text, which ends at a stop string; None for only tokens.
      tokens, logprobs: continuation so far, without the stop token that ended it.
      finish: why it ended.
    """

    number: int
    request: GenerationRequest
    text: Text | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    _ticket: Ticket | None = None

    def submit(self, engine: Engine) -> None:
        self._ticket = engine.submit(self.request, self._take)

    def _take(self, update: Update) -> None:
        if self.finish is not None:
            return
        if update.error is not None:
            raise GenerationError(f"prompt {self.number}: {update.error}")
        for token in update.tokens:
            self.tokens.append(token.id)
            self.logprobs.append(token.logprob or 0.0)
            if self.text is not None and self.text.push(token.id):
                self.finish = "stop"
                assert self._ticket is not None
                self._ticket.cancel()
                return
        if update.finish is not None:
            self.finish = update.finish
            if self.text is not None:
                self.text.finish()


def run_jobs(engine: Engine, jobs: Iterable[Job]) -> Iterator[Job]:
    """Yield the jobs as they end, in any order.

    Raises:
      GenerationError: a prompt that cannot be continued.
    """
    coming, open_jobs, has_more = iter(jobs), list[Job](), True
    while has_more or open_jobs:
        # Twice the number of rows: rows are always filled, and a generator of jobs is consumed lazily.
        while has_more and len(open_jobs) < 2 * engine.options.rows:
            job = next(coming, None)
            has_more = job is not None
            if job is not None:
                job.submit(engine)
                open_jobs.append(job)
        engine.step()
        ended = [job for job in open_jobs if job.finish is not None]
        if ended:
            open_jobs = [job for job in open_jobs if job.finish is None]
            yield from ended


def complete_requests(
    config: LlamaConfig,
    params: LlamaParams,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling = Sampling(),
    stop_tokens: Sequence[int] = (),
    adapters: Sequence[int] = (),
    options: EngineOptions = EngineOptions(),
) -> Iterator[tuple[int, Generation]]:
    """Continue any number of prompts, a few at a time: when one ends the next begins, without waiting for longer ones.

    Each continuation is the same as by `generate` with only this prompt. Common prefixes are prefilled once, as far as
    `options.prefix_bytes` allows.

    Args:
      config, params, prompts, max_new_tokens, sampling, stop_tokens: as for `generate`; sampling may differ per prompt.
      adapters: for each prompt the index of its adapter in the parameters (`model.multi_lora`), -1 for none; by default
        no adapters.
      options: number of prompts continued concurrently, their lengths, a drafter, and other options of the engine.

    Yields:
      The index of a prompt and its continuation, when it ends.

    Raises:
      GenerationError: an invalid request, when the first prompt is requested; an invalid draft; or NaN logits.
      MeshError: parameters on a mesh that shards rows; a draft model on other devices.
    """
    if not len(prompts):
        return
    limits = checked_limits(max_new_tokens, len(prompts)).tolist()
    row_settings = sampling.per_row(len(prompts))
    if len(adapters) not in (0, len(prompts)):
        raise GenerationError(f"{len(adapters)} adapters for {len(prompts)} prompts; pass one for each prompt, or none")

    def job(number: int) -> Job:
        row_sampling = jax.tree.map(lambda values: values[number].item(), row_settings)
        request = GenerationRequest(
            prompt=prompts[number],
            max_new_tokens=limits[number],
            sampling=row_sampling,
            stop_tokens=stop_tokens,
            adapter=adapters[number] if len(adapters) else -1,
        )
        return Job(number, request)

    for done in run_jobs(Engine(config, params, options), map(job, range(len(prompts)))):
        yield done.number, Generation(done.tokens, done.logprobs, "stop" if done.finish == "stop" else "length")
