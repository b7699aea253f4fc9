"""``llama-jax batch``: continue every prompt of a file, however many there are."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

import llama_jax
from llama_jax.cli.generate import PromptLine, read_prompt_lines
from llama_jax.cli.options import AdapterOptions, CacheOption, DraftOptions, SamplingOptions, StopOptions
from llama_jax.cli.terminal import print_status
from llama_jax.config import suggest_context
from llama_jax.errors import GenerationError, UserError, reading, short_repr
from llama_jax.runs.log import progress_bar
from llama_jax.settings import at_least
from llama_jax.storage.atomic_write import cannot_write, lock_file
from llama_jax.tokenizers import Tokenizer
from llama_jax.tokenizers.interface import Text, check_token_rows

if TYPE_CHECKING:
    from llama_jax.serving.engine import Engine
    from llama_jax.serving.offline import Job


@dataclass(frozen=True, kw_only=True)
class BatchPrompts(AdapterOptions, CacheOption, DraftOptions, SamplingOptions, StopOptions):
    """Continue every prompt of a .jsonl and write the results to another, one JSON object per line, as they finish. Prompts
    whose results are already in OUT are skipped, so the same command resumes after a stop."""

    SHOWN_FIRST = ("prompts", "out", "model", "max_new_tokens", "sampling", "seed", "stop", "rows")

    prompts: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="PROMPTS")]]
    """A .jsonl with a prompt per line, for example {"prompt": "Once"}. The seed increases by one per line. "adapter": NAME
    selects an --adapter for a line."""
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    """The .jsonl to write: number, text, tokens, finish reason and settings of each prompt."""
    max_new_tokens: Annotated[int, at_least(1)] = 256
    """Maximum number of tokens per prompt, limited by the model's context."""
    rows: int = 16
    """Number of prompts that are continued concurrently."""
    context: int | None = None
    """Maximum number of tokens of a prompt and its continuation. The default is the model's context; if RoPE scaling extends
    it, as much of that as a cache for the context without it holds."""
    prefix_cache: Annotated[int, at_least(0)] = 256
    """Size of the cache of shared prompt prefixes, in megabytes; 0 turns it off."""

    def run(self) -> None:
        options = llama_jax.EngineOptions(
            rows=self.rows,
            context=self.context,
            prefix_bytes=self.prefix_cache * 2**20,
            cache=self.cache_options(),
            compute=self.compute(),
        )
        self.check_stops()
        self.parse_draft()
        prompts = read_prompt_lines(self.prompts)
        numbers = {name: number for number, name in enumerate(self.named_adapters())}
        for adapter in {line.adapter for line in prompts} - {None, *numbers}:
            names = ", ".join(numbers) or "none"
            raise GenerationError(
                f"{self.prompts} requests the adapter {short_repr(adapter, 40)}, but --adapter names {names}"
            )
        done = _Output(self.out, prompts)
        seed = self.choose_seed() if self.seed is not None or done.seed is None else done.seed
        self.seeded_sampling(seed)
        settings = self._settings(seed)
        done.check(settings)
        left = [line for line in range(1, len(prompts) + 1) if line not in done.lines]
        if done.lines:
            print_status(f"{self.out} has {len(done.lines)} of {len(prompts)} prompts")
        if not left:
            return

        self.start_jax()
        from llama_jax.serving.engine import Engine

        self.check_draft()
        config, params, tokenizer = self.load()
        engine = Engine(config, params, replace(options, draft=self.drafter(tokenizer)))
        begun = time.monotonic()
        made = done.write(self._jobs(engine, tokenizer, prompts, left, seed), settings, len(left))
        seconds = time.monotonic() - begun
        stats = engine.stats()
        drafted = f" ({stats.accepted} of {stats.drafted} drafted tokens accepted)" if self.draft else ""
        print(
            f"{made} prompts, {stats.prompt_tokens} tokens read ({stats.cached_tokens} of them found in the prefix cache),"
            f" {stats.generated_tokens} made{drafted}, {stats.generated_tokens / max(seconds, 1e-9):.1f}/s · seed {seed}",
            file=sys.stderr,
        )

    def _settings(self, seed: int) -> dict[str, Any]:
        """Everything that the texts depend on, apart from the files themselves."""
        return {
            "model": None if self.model is None else self.model.name,
            **{name: getattr(self, name) for name in ("dtype", "quantize", "cache", "rope")},
            **asdict(self.sampling.replace(seed=seed)),
            "max_new_tokens": self.max_new_tokens,
            "stop": list(self.stop),
            "ignore_eos": self.ignore_eos,
            **({"adapter": list(self.adapter)} if self.adapter else {}),
        }

    def _jobs(
        self, engine: Engine, tokenizer: Tokenizer, prompts: list[PromptLine], lines: list[int], seed: int
    ) -> Iterator[Job]:
        from llama_jax.serving.offline import Job, run_jobs
        from llama_jax.serving.requests import GenerationRequest

        numbers: dict[str | None, int] = {None: -1} | {name: number for number, name in enumerate(self.named_adapters())}

        def job(line: int) -> Job:
            ids = tokenizer.encode(prompts[line - 1].prompt, eos=False)
            check_token_rows(tokenizer, ids, engine.vocab_size, f"{self.prompts}: prompt {line}")
            room = engine.room(len(ids))
            if room < 1:
                raise GenerationError(
                    f"{self.prompts}: prompt {line} has {len(ids)} tokens, but the context is {engine.context}; shorten it"
                    f"{suggest_context(engine.model.config, len(ids) + self.max_new_tokens)}"
                )
            request = GenerationRequest(
                prompt=ids,
                max_new_tokens=min(self.max_new_tokens, room),
                sampling=self.seeded_sampling((seed + line - 1) % 2**32),
                stop_tokens=() if self.ignore_eos else tokenizer.stop_ids,
                adapter=numbers[prompts[line - 1].adapter],
            )
            return Job(line, request, Text(tokenizer, self.stop, write=lambda text: None))

        return run_jobs(engine, map(job, lines))


class _Output:
    """The file that is written line by line, and what it already holds.

    Attributes:
      lines: the numbers of the prompts that it has.
      seed: of the batch that began the file; None for a new one.
    """

    def __init__(self, path: Path, prompts: list[PromptLine]) -> None:
        self.path = path
        self._prompts = prompts
        self.lines: set[int] = set()
        self.seed: int | None = None
        self._settings: dict[str, Any] | None = None
        self._complete_bytes = 0  # bytes up to the end of the last whole line
        if path.exists() and not path.is_file():  # a pipe would be waited for, and a device can be read without end
            raise UserError(f"{path} is not a file; choose a file to write")
        with reading(path, UserError):
            content = path.read_bytes() if path.exists() else b""
        self._read = len(content)  # bytes
        for number, line in enumerate(content.split(b"\n")[:-1], 1):  # a line that a kill cut off has no line end
            self._complete_bytes += len(line) + 1
            self._add(line, number)

    def _add(self, line: bytes, number: int) -> None:
        try:
            value = json.loads(line)
            which, settings = value["line"], value["settings"]
            same = 1 <= which <= len(self._prompts)
            same = same and PromptLine(value["prompt"], value.get("adapter")) == self._prompts[which - 1]
            seed = int(settings["seed"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            same = False
        if not same:
            raise UserError(f"{self.path}, line {number} does not belong to these prompts; choose another file to write")
        self.lines.add(which)
        self.seed, self._settings = seed, settings

    def check(self, settings: dict[str, Any]) -> None:
        """Raise UserError where the file was begun with other settings."""
        before = settings if self._settings is None else self._settings
        for name in before | settings:
            if before.get(name) != settings.get(name):
                raise UserError(
                    f"{self.path} was started with {name}={short_repr(before.get(name), 40)}, but this command has"
                    f" {short_repr(settings.get(name), 40)}; use the same, or choose another file to write"
                )

    def write(self, jobs: Iterator[Job], settings: dict[str, Any], count: int) -> int:
        """Write each job as it ends, and return their number."""
        made = 0
        try:
            lock = lock_file(self.path.with_name(f".{self.path.name}.lock"), self.path, UserError)
            with lock, open(self.path, "ab") as file:  # two batches would mix their lines
                if os.fstat(file.fileno()).st_size != self._read:  # before it was locked: what is there must not be cut off
                    raise UserError(f"{self.path} was changed after it was read; run the same command again to resume")
                file.truncate(self._complete_bytes)
                for job in progress_bar("continuing", "prompts")(jobs, total=count):
                    assert job.text is not None
                    prompt = self._prompts[job.number - 1]
                    line = {
                        "line": job.number,
                        "prompt": prompt.prompt,
                        **({} if prompt.adapter is None else {"adapter": prompt.adapter}),
                        "text": job.text.shown,
                        "tokens": len(job.tokens),
                        "finish_reason": "stop" if job.finish == "stop" else "length",
                        "settings": settings,
                    }
                    file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                    file.flush()
                    made += 1
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(cannot_write(self.path, error)) from None
        return made
