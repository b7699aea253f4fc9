"""Serving speed on this machine's CPU, compared with llama.cpp's own server: closed loops of clients, random arrivals.

Both servers run throughout, with the same file (random float32 weights by default), and are put under load in turn, so that
changes of the machine's speed affect both. The clients are one process that shares the cores with the servers. Reported are
medians over the repetitions, their spread, and ratios within the run; absolute figures depend on the machine.

    pip install -e ".[serve]"
    python experiments/bench_serve.py --llama-server PATH --vocabulary PATH/tokenizer.model

`llama-server` is built from llama.cpp (the source distribution of llama-cpp-python has its sources). Without it only this
library's server and the engine without HTTP are measured.

What is timed:
  closed N   tokens/s of N clients, each of which sends its next request when the last one has ended.
             "engine" is the engine in a process without HTTP, under load in turn with the servers, to show HTTP's cost.
  poisson    requests at random times, at a share of the slower server's rate in `closed 16`: time to the first
             token (p50, p95) and gaps between events (p50, p99), in ms. An event may have several tokens.
  prefix     seconds to the first token of prompts of 512 tokens in the engine: new prompts, and prompts whose first 448
             tokens were prefilled before. Only for shapes with a longer context.
  arrival    ms between two tokens of 15 decoding rows in the engine: median before a prompt of 512 tokens arrives,
             median and maximum during its prefill, and the time of one prefill chunk by itself. Only for a longer context.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import multiprocessing
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tyro
from measuring import cpu_name, settings, versions, write_report

READY_SECONDS = 600
EVENT = b"\ndata: {"  # JSON escapes line breaks; before the first event it is the line break of HTTP's header
T = TypeVar("T")


@dataclass(frozen=True)
class Arguments:
    """Compare serving speed with llama-server."""

    shape: str = "stories-15m"
    """Preset to serve, with random weights."""
    model: Path | None = None
    """A GGUF to serve instead."""
    dtype: str | None = None
    """Type of the random weights in the file, such as q4_0; float32 by default."""
    vocabulary: Path = Path("../shared/data/tokenizers/llama2/tokenizer.model")
    """A vocabulary of the shape's size, which is required in a GGUF."""
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

    @property
    def first(self) -> float:
        return self.events[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.events, self.events[1:], strict=False)]


class Reader(asyncio.Protocol):
    """Receives a streamed answer with little CPU time, because it shares the cores with the server."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.begun = b""  # data before the first event
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = b""  # may be the beginning of an event

    def data_received(self, data: bytes) -> None:
        if not self.answer.events:
            self.begun += data
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

    def __init__(self, port: int, arguments: Arguments, vocab: int) -> None:
        self.port, self.arguments, self.vocab = port, arguments, vocab
        self.random = random.Random(0)

    async def ask(self) -> Answer:
        prompt = [1, *(self.random.randrange(3, self.vocab) for _ in range(self.arguments.prompt_tokens - 1))]
        body = json.dumps(
            {
                "prompt": prompt,
                "max_tokens": self.arguments.new_tokens,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
        answer = Answer(time.perf_counter())
        connect = asyncio.get_running_loop().create_connection(lambda: Reader(answer), "127.0.0.1", self.port)
        transport, reader = await connect
        transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        await reader.ended
        if not reader.begun.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"port {self.port} answers {reader.begun[:500]!r}")
        return answer

    async def closed(self, clients: int) -> float:
        """Tokens/s, from the first request to the last answer."""
        each = max(self.arguments.requests, -(-8 // clients))

        async def one() -> None:
            for _ in range(each):
                await self.ask()

        begun = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(clients)))
        return clients * each * self.arguments.new_tokens / (time.perf_counter() - begun)

    async def poisson(self, rate: float, count: int) -> list[Answer]:
        """Answers to requests at random times, `rate` per second."""

        async def later(seconds: float) -> Answer:
            await asyncio.sleep(seconds)
            return await self.ask()

        moments, now = [], 0.0
        for _ in range(count):
            now += self.random.expovariate(rate)
            moments.append(now)
        return await asyncio.gather(*map(later, moments))


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, with uvloop if installed, so that clients take less CPU time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class Started(NamedTuple):
    """A running server: its process, and the seconds until it answered."""

    process: int
    seconds: float


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def running(command: list[str], port: int, path: str) -> Iterator[Started]:
    """Start a server; enter the context when it answers."""
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while not asyncio.run(answers(port, path)):
                if process.poll() is not None or time.perf_counter() - begun > READY_SECONDS:
                    log.seek(0)
                    raise SystemExit(f"{command[0]} does not answer:\n{log.read()[-2000:].decode(errors='replace')}")
                time.sleep(0.1)
            yield Started(process.pid, time.perf_counter() - begun)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


async def answers(port: int, path: str) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        status = await reader.readline()
        writer.close()
        return b" 200 " in status
    except OSError:
        return False


def write_model(arguments: Arguments, folder: Path) -> tuple[Path, int]:
    """The path and vocabulary size of the given GGUF, or of a new one with random weights."""
    import jax

    import llama_jax

    if arguments.model is not None:
        return arguments.model, llama_jax.load(arguments.model).config.vocab_size
    config = llama_jax.preset(arguments.shape)
    path = folder / "model.gguf"
    params = llama_jax.init(config, jax.random.key(0))
    llama_jax.save(path, config, params, tokenizer=llama_jax.load_tokenizer(arguments.vocabulary), dtype=arguments.dtype)
    return path, config.vocab_size


def engine_alone(path: Path, arguments: Arguments, asked: Connection) -> None:
    """For each number of clients received, send the tokens/s of a closed loop without HTTP; end at 0."""
    import llama_jax
    from llama_jax.serving.engine import Engine
    from llama_jax.serving.requests import GenerationRequest, Update

    config, params, _ = llama_jax.load(path)
    context = -(-(arguments.prompt_tokens + arguments.new_tokens) // 64) * 64
    engine = Engine(config, params, llama_jax.EngineOptions(rows=arguments.rows, context=context))
    engine.warm()
    gc.collect()
    gc.freeze()  # as the server does
    chosen = random.Random(0)

    def closed(clients: int) -> float:
        each = max(arguments.requests, -(-8 // clients))
        left = [clients * each]

        def ask() -> None:
            left[0] -= 1
            prompt = [1, *(chosen.randrange(3, config.vocab_size) for _ in range(arguments.prompt_tokens - 1))]
            engine.submit(GenerationRequest(prompt=prompt, max_new_tokens=arguments.new_tokens), taken)

        def taken(update: Update) -> None:
            if update.finish is not None and left[0]:
                ask()

        begun = time.perf_counter()
        for _ in range(clients):
            ask()
        while engine.step():
            pass
        return clients * each * arguments.new_tokens / (time.perf_counter() - begun)

    while clients := asked.recv():
        asked.send(closed(clients))


@contextmanager
def engine_running(path: Path, arguments: Arguments) -> Iterator[Callable[[int], float]]:
    """A process with only the engine; yields a function from a number of clients to tokens/s."""
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    process = spawning.Process(target=engine_alone, args=(path, arguments, there), daemon=True)
    process.start()
    there.close()

    def closed(clients: int) -> float:
        here.send(clients)
        return float(here.recv())

    yield closed
    here.send(0)
    process.join()


def prefixes(path: Path, arguments: Arguments) -> dict[str, float]:
    """Seconds to the first token after 512 new tokens, and after 448 cached and 64 new tokens: medians of 7."""
    import llama_jax
    from llama_jax.serving.engine import Engine
    from llama_jax.serving.requests import GenerationRequest

    config, params, _ = llama_jax.load(path)
    if config.max_seq_len <= 512:
        return {}
    engine = Engine(config, params, llama_jax.EngineOptions(rows=1, context=640))
    engine.warm()
    chosen = random.Random(0)
    tokens = lambda count: [chosen.randrange(3, config.vocab_size) for _ in range(count)]

    def first(prompt: list[int]) -> float:
        begun, came = time.perf_counter(), list[float]()
        engine.submit(GenerationRequest(prompt=prompt, max_new_tokens=1), lambda update: came.append(time.perf_counter()))
        while engine.step():
            pass
        return came[0] - begun

    known = tokens(448)
    first(known + tokens(64))
    cold, warm = (
        statistics.median(times)
        for times in zip(*((first(tokens(512)), first(known + tokens(64))) for _ in range(7)), strict=True)
    )
    return {"cold": cold, "warm": warm, "ratio": cold / warm}


def arrival(path: Path, arguments: Arguments) -> dict[str, float]:
    """ms between tokens of decoding rows, before and during the prefill of 512 tokens; medians of 5 arrivals."""
    import llama_jax
    from llama_jax.serving.engine import Engine
    from llama_jax.serving.requests import GenerationRequest, Update

    config, params, _ = llama_jax.load(path)
    if config.max_seq_len <= 512:
        return {}
    engine = Engine(config, params, llama_jax.EngineOptions(rows=16, cache_tokens=16 * 640, context=640, prefix_bytes=0))
    engine.warm()
    chosen = random.Random(0)
    tokens = lambda count: [chosen.randrange(3, config.vocab_size) for _ in range(count)]
    found: dict[str, list[float]] = {"before": [], "during": [], "longest": [], "piece alone": []}
    for _ in range(5):
        came: list[float] = []  # tokens of a row that decodes throughout
        begun: list[float] = []  # the first token after the 512

        def taken(update: Update, came: list[float] = came) -> None:
            came.append(time.perf_counter())

        for row in range(15):
            request = GenerationRequest(prompt=tokens(8), max_new_tokens=200)
            engine.submit(request, taken if row == 0 else lambda update: None)
        while len(came) < 100:
            engine.step()
        asked = time.perf_counter()
        first = lambda update, begun=begun: begun.append(time.perf_counter())
        engine.submit(GenerationRequest(prompt=tokens(512), max_new_tokens=1), first)
        while engine.step():
            pass
        gaps = [(before, after - before) for before, after in itertools.pairwise(came)]
        read = [gap for before, gap in gaps if asked <= before < begun[0]]
        found["before"].append(statistics.median(gap for before, gap in gaps[50:] if before < asked))
        found["during"].append(statistics.median(read))
        found["longest"].append(max(read))
        began = time.perf_counter()
        engine.submit(GenerationRequest(prompt=tokens(512), max_new_tokens=1), lambda update: None)
        while engine.step():
            pass
        found["piece alone"].append((time.perf_counter() - began) / -(-512 // engine.options.chunk_tokens))
    return {name: 1e3 * statistics.median(values) for name, values in found.items()}


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def latencies(answers: list[Answer]) -> dict[str, float]:
    first, gaps = [answer.first for answer in answers], [gap for answer in answers for gap in answer.gaps]
    found = {"first p50": percentile(first, 0.5), "first p95": percentile(first, 0.95)}
    found |= {"gap p50": percentile(gaps, 0.5), "gap p99": percentile(gaps, 0.99), "gap most": max(gaps)}
    return {name: 1e3 * value for name, value in found.items()}


def measure(arguments: Arguments) -> dict[str, object]:
    context = arguments.prompt_tokens + arguments.new_tokens
    with tempfile.TemporaryDirectory() as folder:
        path, vocab = write_model(arguments, Path(folder))
        servers = {"llama_jax": free_port()}
        commands = {
            "llama_jax": [
                *(sys.executable, "-c", "from llama_jax.cli import main; main()", "serve", "--model", str(path)),
                *("--port", str(servers["llama_jax"]), "--rows", str(arguments.rows), "--context", str(context)),
            ]
        }
        if arguments.llama_server is not None:
            servers["llama-server"] = free_port()
            commands["llama-server"] = [
                *(str(arguments.llama_server), "--model", str(path), "--port", str(servers["llama-server"])),
                *("--parallel", str(arguments.rows), "--ctx-size", str(arguments.rows * context)),
                *("--threads", str(os.cpu_count()), "--no-webui"),
            ]
        report: dict[str, object] = {}
        with running(commands["llama_jax"], servers["llama_jax"], "/ready") as started:
            report["start-up seconds"] = {"llama_jax": round(started.seconds, 1)}
            with engine_running(path, arguments) as engine:
                if arguments.llama_server is None:
                    return report | loads(arguments, servers, vocab, engine)
                with running(commands["llama-server"], servers["llama-server"], "/health"):
                    return report | loads(arguments, servers, vocab, engine)


def loads(arguments: Arguments, servers: dict[str, int], vocab: int, engine: Callable[[int], float]) -> dict[str, object]:
    clients = {name: Client(port, arguments, vocab) for name, port in servers.items()}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for client in clients.values():
        run(client.closed(4))  # a warm-up
    engine(4)
    for count in arguments.clients:
        taken: dict[str, list[float]] = {name: [] for name in (*clients, "engine")}
        for _ in range(arguments.repetitions):
            for name, client in clients.items():
                taken[name].append(run(client.closed(count)))
            taken["engine"].append(engine(count))
        found[f"closed {count}"] = {name: summary(values) for name, values in taken.items()}
        print_ratio(f"closed {count}, tokens/s", found[f"closed {count}"])
    if arguments.arrivals and 16 in arguments.clients:
        slower = min(found["closed 16"][name]["median"] for name in clients)
        rate = arguments.share * slower / arguments.new_tokens
        gathered: dict[str, list[Answer]] = {name: [] for name in clients}
        for _ in range(arguments.repetitions):
            for name, client in clients.items():
                gathered[name] += run(client.poisson(rate, arguments.arrivals))
        found["poisson"] = {name: latencies(answers) | {"rate": rate} for name, answers in gathered.items()}
        for name, each in found["poisson"].items():
            print(f"poisson, {name}: " + ", ".join(f"{key} {value:.1f}" for key, value in each.items()), flush=True)
    return {"loads": found}


def print_ratio(what: str, found: dict[str, dict[str, float]]) -> None:
    line = ", ".join(f"{name} {each['median']:.1f}" for name, each in found.items())
    ours, *others = (each["median"] for each in found.values())
    print(f"{what}: {line}" + "".join(f", ratio {ours / other:.2f}" for other in others), flush=True)


def main(arguments: Arguments) -> None:
    report: dict[str, object] = {"cpu": cpu_name(), "settings": settings(arguments)}
    report["versions"] = versions("jax", "jaxlib", "numpy", "uvicorn", "starlette")
    report |= measure(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path, _ = write_model(arguments, Path(folder))
        prefix = prefixes(path, arguments)
        came = arrival(path, arguments)
    if prefix:
        print(f"prefix: cold {prefix['cold']:.3f} s, warm {prefix['warm']:.3f} s, ratio {prefix['ratio']:.1f}", flush=True)
    if came:
        print("arrival, ms: " + ", ".join(f"{name} {value:.1f}" for name, value in came.items()), flush=True)
    write_report(arguments.output, report | {"prefix": prefix, "arrival": came})


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
