"""The statistics of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from llama_jax import compiled


class EngineStats(NamedTuple):
    """A snapshot of an engine. Counts are since it was made.

    Attributes:
      rows: requests that can be decoded at once.
      running, reading, waiting: requests that are decoded, whose prompts are being read, and that wait.
      waiting_tokens: of the prompts that wait.
      cache_fill: share of the cache's pages that requests use, 0 to 1.
      prompt_tokens: tokens of prompts that have been read, including those found in the prefix cache.
      generated_tokens: tokens that were delivered.
      cached_tokens: tokens of prompts found in the prefix cache.
      drafted, accepted: tokens that were proposed, and that the model chose too.
      finished: requests by why they ended.
      refused: requests that the queue had no room for.
      compilations_after_ready: programs compiled since `warm`, anywhere in the process; the engine itself compiles none.
      turns: number of turns taken.
      turn_seconds: seconds that they took.
      last_turn: when the last one ended, by `time.monotonic`.
      busy: whether there is something to do.
      prefix_entries, prefix_bytes, evicted: of the prefix cache.
      preempted: how often a request has given up its pages for an older one.
    """

    rows: int
    running: int
    reading: int
    waiting: int
    waiting_tokens: int
    cache_fill: float
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    drafted: int
    accepted: int
    finished: Mapping[str, int]
    refused: int
    compilations_after_ready: int
    turns: int
    turn_seconds: float
    last_turn: float
    busy: bool
    prefix_entries: int
    prefix_bytes: int
    evicted: int
    preempted: int = 0


class CompileCount:
    """Programs that were compiled, or loaded from a cache, between `begin` and `end`."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = False

    def begin(self) -> None:
        if not self._counting:
            jax.monitoring.register_event_duration_secs_listener(self._on_event)
        self._counting = True

    def end(self) -> None:
        if self._counting:
            jax.monitoring.unregister_event_duration_listener(self._on_event)
        self._counting = False

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event in ("/jax/core/compile/backend_compile_duration", compiled.LOAD_DURATION_EVENT)
