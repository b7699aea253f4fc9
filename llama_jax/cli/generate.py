"""``llama-jax generate``: continue a prompt, streaming the text."""

from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from llama_jax.cli.options import ModelOptions
from llama_jax.errors import GenerationError

if TYPE_CHECKING:
    import jax.numpy as jnp

    from llama_jax.config import LlamaConfig
    from llama_jax.model.window import CacheOptions


@dataclass(frozen=True, kw_only=True)
class Generate(ModelOptions):
    """Continue a prompt. The text goes to stdout as it comes, statistics to stderr."""

    prompt: tyro.conf.Positional[str]
    """Text to continue."""
    max_new_tokens: int | None = None
    """Tokens to generate at most; by default 256, or less where the model's context ends."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """End where this text appears (it is not printed); may be given several times."""
    ignore_eos: bool = False
    """Go on behind the tokens that end a text, until --stop or --max-new-tokens."""
    json: bool = False
    """Print one JSON object instead of text: prompt, text, token ids, logprobs, finish reason, statistics."""

    def run(self) -> None:
        started = time.perf_counter()
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the text
        from llama_jax.cli.runtime import Clock, CompileClock, start_backend, use_compilation_cache
        from llama_jax.cli.text import Text
        from llama_jax.model.options import Compute
        from llama_jax.ops.attention import observed

        use_compilation_cache()
        compiling = CompileClock()
        import llama_jax

        # Impossible values are refused before minutes go into loading.
        seed = self.choose_seed()
        sampling, options = self.sampling(seed), self.cache_options()
        if not self.prompt:
            raise GenerationError("the prompt is empty; give some text to continue, such as 'Once upon a time'")
        try:
            self.prompt.encode()
        except UnicodeEncodeError:
            raise GenerationError("the prompt is not valid UTF-8; is the terminal's encoding (LANG) set?") from None
        if any(not text for text in self.stop):
            raise GenerationError("--stop is empty; give the text at which to end")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise GenerationError(f"max_new_tokens={self.max_new_tokens} must be a positive whole number")

        start_backend()
        config, params, tokenizer = self.load()
        ends = () if self.ignore_eos else tokenizer.stop_ids
        prompt = tokenizer.encode(self.prompt)
        room = config.max_seq_len - len(prompt)
        if room < 1 and self.window is None:
            raise GenerationError(
                f"the prompt has {len(prompt)} tokens, the model's context {config.max_seq_len}; shorten the prompt"
            )
        new = min(256, 256 if self.window else room) if self.max_new_tokens is None else self.max_new_tokens
        pieces = llama_jax.stream(
            config,
            params,
            [prompt],
            max_new_tokens=new,
            sampling=sampling,
            stop_tokens=ends,
            cache=options,
            compute=Compute(attention=self.attention),
        )
        loaded = time.perf_counter()
        text = Text(tokenizer, self.stop, write=_discard if self.json else _print)
        if not self.json:
            _print(self.prompt)
        clock = Clock(compiling)
        tokens: list[int] = []
        logprobs: list[float] = []
        stopped = False
        with observed() as attention:
            try:
                for piece in pieces:
                    clock.piece(int(piece.valid.sum()))
                    for token, logprob in zip(
                        piece.tokens[0][piece.valid[0]], piece.logprobs[0][piece.valid[0]], strict=True
                    ):
                        stopped = int(token) in ends
                        if stopped:
                            break
                        tokens.append(int(token))
                        logprobs.append(float(logprob))
                        stopped = text.push(int(token))
                        if stopped:
                            break
                    if stopped:
                        break
            finally:
                text.finish()

        import jax

        statistics = {
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "mesh": self.mesh and str(self.mesh_sizes()),
            "dtype": str(params.embedding.dtype),
            "attention": " and ".join(attention),
            "seed": seed,
            "load_seconds": round(loaded - started, 3),
            "compile_seconds": round(compiling.seconds, 3),
            "prompt_tokens": len(prompt),
            "new_tokens": len(tokens),
            "prefill_tokens_per_second": _rate(len(prompt), clock.prefill_seconds),
            "decode_tokens_per_second": clock.decode_rate,
            "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
            "cache_bytes": _cache_bytes(config, options, len(prompt), len(tokens), params.embedding.dtype),
        }
        if self.json:
            result = {
                "prompt": self.prompt,
                "text": text.shown,
                "tokens": tokens,
                "logprobs": logprobs,
                "finish_reason": "stop" if stopped else "length",
                "statistics": statistics,
            }
            print(json.dumps(result, ensure_ascii=False))
        else:
            print(flush=True)
            print(_summary(statistics), file=sys.stderr)


def _print(text: str) -> None:
    print(text, end="", flush=True)


def _discard(text: str) -> None:
    pass


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 1) if count > 0 and seconds > 0 else 0.0


def _cache_bytes(config: LlamaConfig, options: CacheOptions, prompt: int, new: int, dtype: jnp.dtype) -> int:
    from llama_jax.inference.generate import SMALLEST_CACHE, ring_of
    from llama_jax.model.cache import bucket, cache_bytes

    capacity = bucket(prompt + new, SMALLEST_CACHE) if options.window is None else ring_of(options, prompt)[0]
    return cache_bytes(config, 1, capacity, options.dtype or dtype)


def _summary(s: dict) -> str:
    megabyte = 1e6
    mesh = f" · mesh {s['mesh']}" if s["mesh"] else ""
    return (
        f"{s['backend']} ({s['device']}){mesh} · {s['dtype']} · attention {s['attention']} · seed {s['seed']}\n"
        f"load {s['load_seconds']:.2f} s · compile {s['compile_seconds']:.2f} s"
        f" · prefill {s['prompt_tokens']} tokens, {s['prefill_tokens_per_second']:.1f}/s"
        f" · decode {s['new_tokens']} tokens, {s['decode_tokens_per_second']:.1f}/s"
        f" · weights {s['weight_bytes'] / megabyte:.1f} MB · cache {s['cache_bytes'] / megabyte:.1f} MB"
    )
