"""`/metrics` of the engine and the server, for Prometheus. Names are vLLM's with another prefix, so that existing consumers
(the Gateway API's inference extension, dashboards) only need that prefix."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from llama_jax.serving.engine import EngineStats

METRIC_PREFIX = "llama_jax:"
FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
BETWEEN_TOKENS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 1.6, 3.2)
REQUEST_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6, 819.2)


class Histogram:
    """A histogram without prometheus_client's lock, because everything here runs on the event loop."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, description: str) -> Metric:
        total, buckets = 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(METRIC_PREFIX + name, description, buckets=buckets, sum_value=self._sum)


class ServerMetrics(Collector):
    """All metrics of a server. Only the event loop writes and reads them.

    Attributes:
      stats: returns the engine's statistics; None until there is an engine.
      first_token, between_tokens, whole: latencies of answered requests in seconds.
      requests: number of requests that the engine accepted, by model.
      compiling: returns the number of requests that wait for their grammars.
      answered: number of HTTP responses by path and status; 499 if the client disconnected earlier.
    """

    def __init__(self) -> None:
        self.stats: Callable[[], EngineStats] | None = None
        self.compiling: Callable[[], int] = lambda: 0
        self.first_token = Histogram(FIRST_TOKEN)
        self.between_tokens = Histogram(BETWEEN_TOKENS)
        self.request_seconds = Histogram(REQUEST_SECONDS)
        self.requests: Counter[str] = Counter()
        self.answered: Counter[tuple[str, int]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # so that registration does not call `stats`

    def collect(self) -> Iterator[Metric]:
        if self.stats is not None:
            yield from self._of_engine(self.stats())
        yield _labelled("http_responses", "HTTP responses.", ["path", "status"], self.answered)

    def _of_engine(self, now: EngineStats) -> Iterator[Metric]:
        gauges = {
            "num_requests_running": (now.running + now.reading, "Requests that are being prefilled or decoded."),
            "num_requests_waiting": (now.waiting + self.compiling(), "Requests in the queue, or waiting for grammars."),
            "num_tokens_waiting": (now.waiting_tokens, "Prompt tokens in the queue."),
            "kv_cache_usage_perc": (now.cache_fill, "Share of the pages for keys and values in use, 0 to 1."),
            "max_num_seqs": (now.rows, "Maximum number of requests decoded concurrently."),
            "prefix_cache_entries": (now.prefix_entries, "Chunks of prompts in the prefix cache."),
            "prefix_cache_bytes": (now.prefix_bytes, "Bytes of these chunks."),
        }
        for name, (value, description) in gauges.items():
            yield GaugeMetricFamily(METRIC_PREFIX + name, description, value=value)
        counts = {
            "prompt_tokens": (now.prompt_tokens, "Prompt tokens prefilled, including cached ones."),
            "generation_tokens": (now.generated_tokens, "Tokens generated."),
            "prefix_cache_queries": (now.prompt_tokens, "Prompt tokens looked up in the prefix cache."),
            "prefix_cache_hits": (now.cached_tokens, "Prompt tokens found in the prefix cache."),
            "prefix_cache_evictions": (now.evicted, "Chunks evicted from the prefix cache."),
            "spec_decode_num_draft_tokens": (now.drafted, "Tokens proposed by --draft."),
            "spec_decode_num_accepted_tokens": (now.accepted, "Accepted draft tokens."),
            "requests_refused": (now.refused, "Requests answered with 429, because the queue was full."),
            "compilations_after_ready": (now.compilations_after_ready, "Programs compiled since the server was ready."),
            "engine_iterations": (now.iterations, "Iterations of the engine."),
            "engine_iteration_seconds": (now.iteration_seconds, "Total seconds of these iterations."),
        }
        for name, (value, description) in counts.items():
            yield CounterMetricFamily(METRIC_PREFIX + name, description, value=value)
        finished = {(reason,): count for reason, count in now.finished.items()}
        yield _labelled("request_success", "Finished requests by finish reason.", ["finished_reason"], finished)
        requests = {(name,): count for name, count in self.requests.items()}
        yield _labelled("model_requests", "Requests by model.", ["model_name"], requests)
        yield self.first_token.family("time_to_first_token_seconds", "Time from the request to its first token.")
        yield self.between_tokens.family("inter_token_latency_seconds", "Time between tokens of a choice.")
        yield self.request_seconds.family("e2e_request_latency_seconds", "Time from the request to its end.")


def _labelled(name: str, description: str, labels: Sequence[str], counts: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(METRIC_PREFIX + name, description, labels=labels)
    for values, count in sorted(counts.items()):
        family.add_metric([*map(str, values)], count)
    return family
