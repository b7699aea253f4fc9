"""Serving speed on this machine's CPU, compared with llama.cpp's own server: closed loops of clients, random arrivals.

Both servers run throughout, with the same file (random weights by default), and are put under load in turn, so that changes
of the machine's speed affect both. The clients are one process that shares the cores with the servers. Reported are medians
over the repetitions, their spread, and ratios within the run; absolute figures depend on the machine.

    pip install -e ".[serve]"
    python experiments/bench_serve.py
    python experiments/bench_serve.py --model SmolLM2-135M-Instruct.Q4_1.gguf --llama-server PATH

`llama-server` is built from llama.cpp (the source distribution of llama-cpp-python has its sources). Without it only this
library's server is measured.

What is timed:
  closed N   tokens/s of N clients, each of which sends its next request when the last one has ended.
  poisson    requests at random times, at a share of the slower server's rate with 16 clients: time to the first token (p50,
             p95) and gaps between events (p50, p99), in ms. An event may have several tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from measuring import describe_run, write_random_model, write_report
from server_load import LLAMA_JAX_SERVE, free_port, percentile, post, running

EVENT = b"\ndata: {"  # JSON escapes line breaks; before the first event it is the line break of HTTP's header


@dataclass(frozen=True)
class Arguments:
    """Compare serving speed with llama-server."""

    shape: str = "stories-15m"
    """Preset to serve, with random weights."""
    dtype: str = "float32"
    """Type of the random weights in the file, such as q4_0."""
    model: Path | None = None
    """A GGUF to serve instead."""
    llama_server: Path | None = None
    """The program to compare with."""
    clients: tuple[int, ...] = (1, 16, 64)
    rows: int = 64
    """Maximum concurrent requests, for both servers."""
    prompt_tokens: int = 64
    new_tokens: int = 128
    requests: int = 4
    """Minimum requests of each client in a repetition; all clients together send at least 8."""
    repetitions: int = 3
    share: float = 0.7
    """Rate of random arrivals, as a share of capacity."""
    arrivals: int = 60
    """Requests that arrive at random times, in each repetition; 0 omits this part."""
    output: Path = Path("experiments/results/bench_serve_cpu.json")


@dataclass
class Answer:
    """Times of a request's events, by `time.perf_counter`."""

    sent: float
    events: list[float] = field(default_factory=list)


class Reader(asyncio.Protocol):
    """Receives a streamed answer with little CPU time, because it shares the cores with the server."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.head = b""  # data before the first event
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = b""  # may be the beginning of an event

    def data_received(self, data: bytes) -> None:
        if not self.answer.events:
            self.head += data
        data = self._rest + data
        self.answer.events += [time.perf_counter()] * data.count(EVENT)
        self._rest = data[1 - len(EVENT) :]

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc)


class Client:
    """Requests of random tokens to a server."""

    def __init__(self, port: int, arguments: Arguments, vocab_size: int) -> None:
        self.port, self.arguments, self.vocab_size = port, arguments, vocab_size
        self.random = random.Random(0)

    async def ask(self) -> Answer:
        prompt = [1, *(self.random.randrange(3, self.vocab_size) for _ in range(self.arguments.prompt_tokens - 1))]
        body = {"prompt": prompt, "max_tokens": self.arguments.new_tokens, "temperature": 0}
        content = json.dumps(body | {"stream": True, "ignore_eos": True}).encode()
        answer = Answer(time.perf_counter())
        connect = asyncio.get_running_loop().create_connection(lambda: Reader(answer), "127.0.0.1", self.port)
        transport, reader = await connect
        transport.write(post("/v1/completions", content))
        await reader.ended
        if not reader.head.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"port {self.port} answers {reader.head[:500]!r}")
        return answer

    async def closed(self, clients: int) -> float:
        """Tokens/s, from the first request to the last answer."""
        count = max(self.arguments.requests, -(-8 // clients))

        async def ask_in_turn() -> None:
            for _ in range(count):
                await self.ask()

        began = time.perf_counter()
        await asyncio.gather(*(ask_in_turn() for _ in range(clients)))
        return clients * count * self.arguments.new_tokens / (time.perf_counter() - began)

    async def poisson(self, rate: float, count: int) -> list[Answer]:
        """Answers to requests at random times, `rate` per second."""

        async def ask_later(seconds: float) -> Answer:
            await asyncio.sleep(seconds)
            return await self.ask()

        moments, now = [], 0.0
        for _ in range(count):
            now += self.random.expovariate(rate)
            moments.append(now)
        return await asyncio.gather(*map(ask_later, moments))


def latencies(answers: list[Answer]) -> dict[str, float]:
    """Percentiles in ms."""
    first = [answer.events[0] - answer.sent for answer in answers]
    gaps = [after - before for answer in answers for before, after in zip(answer.events, answer.events[1:], strict=False)]
    shares = {"first p50": (first, 0.5), "first p95": (first, 0.95), "gap p50": (gaps, 0.5), "gap p99": (gaps, 0.99)}
    return {name: 1e3 * percentile(values, share) for name, (values, share) in shares.items()}


def measure_loads(clients: dict[str, Client], arguments: Arguments) -> dict[str, dict[str, Any]]:
    """The figures of each load, by server."""
    figures: dict[str, dict[str, Any]] = {}
    for client in clients.values():
        asyncio.run(client.closed(4))  # a warm-up
    for count in arguments.clients:
        speeds: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(arguments.repetitions):
            for name, client in clients.items():
                speeds[name].append(asyncio.run(client.closed(count)))
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        figures[f"closed {count}"] = {
            name: {"median": medians[name], "least": min(values), "most": max(values)} for name, values in speeds.items()
        }
        ratios = ", ".join(f"{name} {median:.1f} ({medians['llama_jax'] / median:.2f})" for name, median in medians.items())
        print(f"closed {count}, tokens/s (of llama_jax relative to it): {ratios}", flush=True)
    if arguments.arrivals and 16 in arguments.clients:
        slower = min(values["median"] for values in figures["closed 16"].values())
        rate = arguments.share * slower / arguments.new_tokens
        answers: dict[str, list[Answer]] = {name: [] for name in clients}
        for _ in range(arguments.repetitions):
            for name, client in clients.items():
                answers[name] += asyncio.run(client.poisson(rate, arguments.arrivals))
        figures["poisson"] = {name: latencies(values) | {"rate": rate} for name, values in answers.items()}
        for name, values in figures["poisson"].items():
            print(f"poisson, {name}: " + ", ".join(f"{key} {value:.1f}" for key, value in values.items()), flush=True)
    return figures


def main(arguments: Arguments) -> None:
    import llama_jax

    report = describe_run(arguments, "numpy", "uvicorn", "starlette")
    context = arguments.prompt_tokens + arguments.new_tokens
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        path = arguments.model or write_random_model(Path(folder) / "model.gguf", arguments.shape, arguments.dtype)
        vocab_size = llama_jax.load(path).config.vocab_size
        ports = {"llama_jax": free_port()}
        command = [*LLAMA_JAX_SERVE, "--model", str(path), "--port", str(ports["llama_jax"])]
        server = servers.enter_context(
            running([*command, "--rows", str(arguments.rows), "--context", str(context)], ports["llama_jax"])
        )
        report["start-up seconds"] = {"llama_jax": round(server.seconds, 1)}
        if arguments.llama_server is not None:
            ports["llama-server"] = free_port()
            command = [str(arguments.llama_server), "--model", str(path), "--port", str(ports["llama-server"])]
            command += ["--parallel", str(arguments.rows), "--ctx-size", str(arguments.rows * context)]
            command += ["--threads", str(os.cpu_count()), "--no-webui"]
            servers.enter_context(running(command, ports["llama-server"], "/health"))
        clients = {name: Client(port, arguments, vocab_size) for name, port in ports.items()}
        report["loads"] = measure_loads(clients, arguments)
    write_report(arguments.output, report)
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
