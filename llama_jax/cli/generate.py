"""``llama-jax generate``: continue a prompt, streaming the text; the prompts of a file."""

from __future__ import annotations

import codecs
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

import tyro

import llama_jax
from llama_jax.cli.options import ModelOptions, StopOptions
from llama_jax.config import LlamaConfig, suggest_context
from llama_jax.errors import GenerationError, UserError, reading, short_repr
from llama_jax.settings import at_least
from llama_jax.tokenizers.interface import Text, check_token_rows

if TYPE_CHECKING:
    from llama_jax.cli.jax_setup import Clock
    from llama_jax.inference.drafter import DraftCounts

BATCH = 8  # prompts that are continued at once
STDIN = "-"
MAX_PROMPT_BYTES = 256 << 20  # bytes of prompts; ten million tokens have 40
PROMPT_HINT = "pass some text to continue, such as 'Once upon a time'"


@dataclass(frozen=True, kw_only=True)
class Generate(ModelOptions, StopOptions):
    """Continue a prompt. Streams the text to stdout and prints statistics to stderr."""

    SHOWN_FIRST = ("prompt", "model", "max_new_tokens", "sampling", "seed", "stop", "json")

    prompt: tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="[PROMPT]")]] = None
    """Text to continue; - reads stdin."""
    prompt_file: Path | None = None
    """A file with the text, or - for stdin. In a .jsonl, each line has a prompt, for example {"prompt": "Once"}: --batch
    prompts are continued at a time, the seed increases by one per line, and each result is one line of JSON."""
    batch: Annotated[int, at_least(1)] | None = None
    """Number of prompts of a .jsonl in a batch. The default is 8."""
    max_new_tokens: Annotated[int, at_least(1)] | None = None
    """Maximum number of tokens to generate. The default is 256, or what is left of the model's context."""
    json: bool = False
    """Print a JSON object with prompt, text, token ids, logprobs, finish reason and statistics instead of the text."""

    def run(self) -> None:
        started = time.perf_counter()
        import jax

        from llama_jax.cli.jax_setup import Clock, CompileClock
        from llama_jax.inference.prepare_inputs import prepare_inputs
        from llama_jax.model.trees import bytes_in_memory, kinds_in_memory
        from llama_jax.ops.attention import record_backends

        # Invalid values end the command before minutes go into loading.
        seed = self.choose_seed()
        sampling, options = self.seeded_sampling(seed), self.cache_options()
        self.parse_draft()
        several = self._several()
        if self.batch is not None and not several:
            raise GenerationError(f"batch={self.batch} is only for the prompts of a .jsonl (--prompt-file); omit it")
        self.check_stops()
        prompts = read_prompt_texts(self.prompt, self.prompt_file)

        self.start_jax()
        compiling = CompileClock()
        config, params, tokenizer = self.load()
        draft = self.drafter(tokenizer)
        loaded = time.perf_counter()
        encoded = [tokenizer.encode(prompt, eos=False) for prompt in prompts]
        for line, ids in enumerate(encoded, 1):
            check_token_rows(tokenizer, ids, config.vocab_size, f"prompt {line}" if several else "the prompt")
        limits = [self._limit(config, len(ids), line) for line, ids in enumerate(encoded, 1)]
        ends = () if self.ignore_eos else tokenizer.stop_ids
        # Both raise errors before anything is printed.
        _, lengths, request = prepare_inputs(config, encoded, limits, sampling, ends, options)
        if draft is not None:
            draft.check(config, params, lengths, request, options)
        rows = [
            _Row(prompt, ids, Text(tokenizer, self.stop, write=(lambda _: None) if several or self.json else _print), ends)
            for prompt, ids in zip(prompts, encoded, strict=True)
        ]
        if not (several or self.json):
            _print(prompts[0])
        clock, batch, counts = Clock(compiling), self.batch or BATCH, list[Any]()
        with record_backends() as attention, _errors_below(prompts[0] if not (several or self.json) else ""):
            for first in range(0, len(rows), batch):
                part = slice(first, first + batch)
                seeds = [(seed + first + i) % 2**32 for i in range(len(rows[part]))]
                settings = {"sampling": sampling.replace(seed=seeds), "cache": options, "draft": draft}
                counts += self._continue(config, params, rows[part], limits[part], settings, clock)
                if several:
                    for row, row_seed in zip(rows[part], seeds, strict=True):
                        print(json.dumps(row.as_dict() | {"seed": row_seed}, ensure_ascii=False), flush=True)

        read, made = sum(map(len, encoded)), sum(len(row.tokens) for row in rows)
        longest = max(rows, key=lambda row: len(row.ids) + len(row.tokens))
        size = _cache_bytes(config, options, len(longest.ids), len(longest.tokens), params.embedding.dtype)
        statistics = {
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "mesh": self.mesh and str(self.mesh_sizes()),
            "dtype": str(params.embedding.dtype),
            "attention": " and ".join(attention),
            "seed": seed,
            "load_seconds": round(loaded - started, 3),
            "compile_seconds": round(compiling.seconds, 3),
            "prompt_tokens": read,
            "new_tokens": made,
            "prefill_tokens_per_second": _rate(read, clock.prefill_seconds),
            "decode_tokens_per_second": clock.decode_rate,
            "draft": draft and draft_statistics(self.draft, made - len(rows), counts),
            "weights": kinds_in_memory(params),
            "weight_bytes": bytes_in_memory(params),
            "cache_bytes": min(batch, len(rows)) * size,
        }
        if self.json and not several:
            print(json.dumps(rows[0].as_dict() | {"statistics": statistics}, ensure_ascii=False))
        else:
            if not several:
                print(flush=True)
            print(_summary(statistics), file=sys.stderr)

    def _several(self) -> bool:
        return self.prompt_file is not None and self.prompt_file.suffix.lower() == ".jsonl"

    def _limit(self, config: LlamaConfig, length: int, line: int) -> int:
        """Tokens to generate at most after a prompt; GenerationError where there is no room for any."""
        room = config.max_seq_len - length
        if room < 1 and self.window is None:
            which = f"prompt {line}" if self._several() else "the prompt"
            raise GenerationError(
                f"{which} has {length} tokens, but the model's context is {config.max_seq_len}; shorten the prompt, or let"
                f" the model see only a window, for example with --window {config.max_seq_len // 2} --sinks 4"
                f"{suggest_context(config, length + (self.max_new_tokens or 256))}"
            )
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return 256 if self.window else min(256, room)

    def _continue(
        self,
        config: LlamaConfig,
        params: llama_jax.LlamaParams,
        rows: list[_Row],
        limits: list[int],
        settings: dict[str, Any],
        clock: Clock,
    ) -> list[DraftCounts]:
        """Generate for rows together until all have ended; the counts of each chunk."""
        from llama_jax.inference.drafter import counts_of

        chunks = llama_jax.stream(
            config,
            params,
            [row.ids for row in rows],
            max_new_tokens=limits,
            stop_tokens=rows[0].ends,
            compute=self.compute(),
            **settings,
        )
        counts = []
        clock.begin()
        try:
            for chunk in chunks:
                clock.record_chunk(int(chunk.valid.sum()))
                counts.append(counts_of(chunk))
                for row, tokens, logprobs, valid in zip(rows, *chunk, strict=True):
                    row.push(tokens[valid].tolist(), logprobs[valid].tolist())
                if all(row.stopped for row in rows):
                    break
        finally:
            for row in rows:
                row.text.finish()
        return counts


@dataclass
class _Row:
    """A prompt, and how it has been continued so far."""

    prompt: str
    ids: list[int]
    text: Text
    ends: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    def push(self, tokens: list[int], logprobs: list[float]) -> None:
        """Add what has come; after an end nothing counts."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            if self.stopped:
                return
            if token in self.ends:
                self.stopped = True
                return
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.stopped = self.text.push(token)

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "text": self.text.shown,
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "finish_reason": "stop" if self.stopped else "length",
        }


def _print(text: str) -> None:
    print(text, end="", flush=True)


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 1) if count > 0 and seconds > 0 else 0.0


def _cache_bytes(config: LlamaConfig, options: llama_jax.CacheOptions, prompt: int, new: int, dtype: Any) -> int:
    from llama_jax.inference.compiled_decode import prefill_chunk_size, round_capacity

    capacity = round_capacity(prompt, new)
    return llama_jax.cache_bytes(config, 1, capacity, options.dtype or dtype, options, prefill_chunk_size(options, prompt))


def _summary(s: dict) -> str:
    mesh = f" · mesh {s['mesh']}" if s["mesh"] else ""
    draft = f" ({draft_summary(s['draft'])})" if s["draft"] else ""
    return (
        f"{s['backend']} ({s['device']}){mesh} · {s['dtype']} · attention {s['attention']} · seed {s['seed']}\n"
        f"load {s['load_seconds']:.2f} s · compile {s['compile_seconds']:.2f} s"
        f" · prefill {s['prompt_tokens']} tokens, {s['prefill_tokens_per_second']:.1f}/s"
        f" · decode {s['new_tokens']} tokens, {s['decode_tokens_per_second']:.1f}/s{draft}"
        f" · weights {s['weights']}, {s['weight_bytes'] / 1e6:.1f} MB · cache {s['cache_bytes'] / 1e6:.1f} MB"
    )


@contextmanager
def _errors_below(printed: str) -> Iterator[None]:
    """An error's message begins a line of its own after what was printed of a text."""
    try:
        yield
    except UserError:
        _print("\n" if printed else "")
        raise


# -- drafts ----------------------------------------------------------------------------------------------------------------


def draft_statistics(text: str, tokens: int, counts: Sequence[DraftCounts]) -> dict[str, Any]:
    """The statistics of drafting for `tokens` generated after the first of each row, from the counts of each chunk."""
    passes, drafted, accepted = (sum(int(array.sum()) for array in part) for part in zip(*counts, strict=True))
    return {
        "draft": text,
        "passes": passes,
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_pass": round(tokens / passes, 3) if passes else 0.0,
    }


def draft_summary(statistics: dict[str, Any]) -> str:
    """The same as words."""
    accepted, drafted = statistics["accepted"], statistics["drafted"]
    return f"{statistics['tokens_per_pass']:.2f} tokens per pass, {accepted} of {drafted} drafted tokens accepted"


# -- prompts ---------------------------------------------------------------------------------------------------------------


class PromptLine(NamedTuple):
    """A line of a .jsonl: the prompt, and the name of the adapter that it asks for, if any."""

    prompt: str
    adapter: str | None


def read_prompt_texts(prompt: str | None, file: Path | None) -> list[str]:
    """The prompts, checked: one, or those of a .jsonl.

    Args:
      prompt: the text itself; ``-`` reads stdin.
      file: text in UTF-8, or a .jsonl whose lines are objects with "prompt"; ``-`` reads stdin as text. One line end at the
        end of a text is dropped, as a shell drops it from the output of a command.

    Raises:
      GenerationError: both or neither, a file that cannot be read, a prompt that is empty or not text, or a line that asks
        for an adapter.
    """
    if (prompt is None) == (file is None):
        both = "not both" if file else f"or {STDIN} for stdin"
        raise GenerationError(f"pass a prompt or --prompt-file FILE, {both}")
    if file is not None and str(file) != STDIN:
        where, content = str(file), _content(file)
        if file.suffix.lower() == ".jsonl":
            lines = _parse_lines(content, where)
            adapter = next((line.adapter for line in lines if line.adapter is not None), None)
            if adapter is not None:
                raise GenerationError(
                    f"{where} requests the adapter {short_repr(adapter, 40)}, but generate has one for all prompts; use"
                    " llama-jax batch with --adapter NAME=PATH"
                )
            return [line.prompt for line in lines]
    elif file is not None or prompt == STDIN:
        where, content = "stdin", _bounded("stdin", sys.stdin.buffer)
    else:
        assert prompt is not None
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise GenerationError("the prompt is not valid UTF-8; is the terminal's encoding (LANG) set?") from None
        if not prompt:
            raise GenerationError(f"the prompt is empty; {PROMPT_HINT}")
        return [prompt]
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise GenerationError(f"{where}, line {line} is not valid UTF-8; save the text as UTF-8") from None
    if not text:
        raise GenerationError(f"the prompt in {where} is empty; {PROMPT_HINT}")
    return [text]


def read_prompt_lines(file: Path) -> list[PromptLine]:
    """The lines of a .jsonl; GenerationError for another file, or as `read_prompt_texts`."""
    if file.suffix.lower() != ".jsonl":
        raise GenerationError(f"{file} is not a .jsonl; each line must be an object with a prompt")
    return _parse_lines(_content(file), str(file))


def _content(file: Path) -> bytes:
    with reading(file, GenerationError), file.open("rb") as opened:
        return _bounded(str(file), opened)


def _bounded(where: str, file: BinaryIO) -> bytes:
    """The content of a file that may have no end."""
    content = file.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise GenerationError(f"{where} has more than {MAX_PROMPT_BYTES >> 20} MiB of prompts; split it into several files")
    return content


def _parse_lines(content: bytes, where: str) -> list[PromptLine]:
    from llama_jax.data.documents import json_objects

    lines = []
    for value, number in json_objects(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), where):
        prompt = value.get("prompt")
        if not (isinstance(prompt, str) and prompt):
            raise GenerationError(f'{where}, line {number} must be an object like {{"prompt": "Once upon a time"}}')
        adapter = value.get("adapter")
        if not (adapter is None or isinstance(adapter, str)):
            raise GenerationError(f"{where}, line {number}: adapter={short_repr(adapter, 40)} must be a name, or omitted")
        lines.append(PromptLine(prompt, adapter))
    if not lines:
        raise GenerationError(f"{where} holds no prompt; {PROMPT_HINT}")
    return lines
