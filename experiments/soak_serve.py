"""A stress test of the server: mixed requests, disconnecting clients, overload, and malformed requests.

A server of a float32 model runs in a separate process; the clients, in this process, share its cores. Each part reports its
results, and `failed` lists all failures; the exit status is 1 if there are any.

    pip install -e ".[serve]"
    python experiments/soak_serve.py

  mixed      requests of all kinds at once: each answer must equal that of `llama_jax.generate` for the single prompt, and
             the server must not compile anything.
  cancelled  clients that disconnect while their request waits, is prefilled or is decoded: afterwards all rows must be free.
  overload   random arrivals at a multiple of the server's capacity: how soon requests are rejected (429), and what share of
             its capacity the server still reaches.
  soak       minutes of all this with malformed requests: no answer may be lost or wrong, and memory must not grow.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import tyro
from bench_serve import free_port, percentile, running
from measuring import cpu_name, settings, versions, write_report

import llama_jax

MAX_REQUEST_TOKENS = 256
KINDS = 96  # different requests; their answers are computed once


@dataclass(frozen=True)
class Arguments:
    """Stress a server."""

    model: Path | None = None
    """Model to serve; the bundled model by default."""
    requests: int = 2000
    """Requests of the mixed part."""
    cancelled: int = 1000
    """Requests whose clients disconnect."""
    overload: float = 4.0
    """Multiple of the capacity."""
    overload_seconds: float = 20.0
    soak_minutes: float = 10.0
    clients: int = 64
    """Concurrent clients, in the mixed part and the soak."""
    rows: int = 16
    """Rows of the server."""
    output: Path = Path("experiments/results/soak_serve_cpu.json")


@dataclass(frozen=True)
class Kind:
    """A request, and its expected text."""

    body: dict[str, Any]
    text: str
    tokens: int


@dataclass
class Report:
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        self.counts["failed"] += 1
        if len(self.failed) < 20:
            self.failed.append(what[:300])


def kinds(model: Path | None) -> list[Kind]:
    """Requests of all lengths and settings, many with common prefixes, and the answers of `generate`."""
    config, params, tokenizer = llama_jax.load(model, dtype=jnp.float32)
    chosen = random.Random(0)
    begun = [tokenizer.encode(text) for text in ("Once upon a time", "One day, a boy", "The big dog", "Lily and Tom")]
    sampling = llama_jax.Sampling(temperature=1.0, seed=range(4))
    stories = llama_jax.generate(config, params, begun, max_new_tokens=150, sampling=sampling)
    texts = [[*prompt, *story.tokens] for prompt, story in zip(begun, stories, strict=True)]
    prompts = [text[: chosen.randrange(1, len(text))] for text in chosen.choices(texts, k=KINDS)]
    limits = [chosen.randrange(1, 80) for _ in prompts]
    choices: dict[str, list[Any]] = {
        "temperature": [chosen.choice([0.0, 0.0, 0.7, 1.0]) for _ in prompts],
        "top_p": [chosen.choice([1.0, 0.9]) for _ in prompts],
        "top_k": [chosen.choice([0, 40]) for _ in prompts],
        "repetition_penalty": [chosen.choice([1.0, 1.1]) for _ in prompts],
        "seed": [chosen.randrange(2**32) for _ in prompts],
    }
    sampling, stops = llama_jax.Sampling(**choices), tokenizer.stop_ids
    answers = llama_jax.generate(config, params, prompts, max_new_tokens=limits, sampling=sampling, stop_tokens=stops)
    found = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        body = {"prompt": prompt, "max_tokens": limits[i]} | {name: values[i] for name, values in choices.items()}
        body |= {"logprobs": chosen.choice([None, None, 0, 3]), "stream": chosen.random() < 0.5}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        text = tokenizer.decode([*prompt, *answer.tokens])[len(tokenizer.decode(prompt)) :]
        found.append(Kind(body, text, len(answer.tokens) + (answer.finish_reason == "stop")))
    return found


class Clients:
    """Requests to a server, and their results."""

    def __init__(self, port: int, kinds: list[Kind]) -> None:
        self.port, self.kinds = port, kinds

    async def send(self, body: Any, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request with a JSON body, or with raw bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        length = more.get("length", len(content))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {length}"
        )
        writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + content)
        return reader, writer

    async def get(self, path: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        return answer.partition("\r\n\r\n")[2]

    async def metrics(self) -> dict[str, float]:
        """The metrics without labels, by name without prefix."""
        lines = (line.rpartition(" ") for line in (await self.get("/metrics")).splitlines() if not line.startswith("#"))
        return {name.removeprefix("llama_jax:").partition("{")[0]: float(value) for name, _, value in lines if name}

    async def ask(self, kind: Kind, report: Report, slowly: bool = False) -> float:
        """Send a request whose answer must be correct or 429; return the seconds to the end of the answer."""
        begun = time.perf_counter()
        reader, writer = await self.send(kind.body)
        parts = []
        while part := await reader.read(200 if slowly else 2**16):
            parts.append(part)
            if slowly:
                await asyncio.sleep(0.002)
        writer.close()
        seconds = time.perf_counter() - begun
        head, _, content = b"".join(parts).partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1]) if head else 0
        report.counts[f"status {status}"] += 1
        if status == 200:
            text, tokens = streamed(content) if kind.body["stream"] else whole(content)
            report.counts["tokens"] += tokens
            if (text, tokens) != (kind.text, kind.tokens):
                report.fail(f"wrong: {tokens} tokens {text!r}, not {kind.tokens} {kind.text!r}, of {kind.body}")
        elif status != 429:
            report.fail(f"status {status}: {content[:200]!r}")
        return seconds if status == 200 else -seconds

    async def leave(self, chosen: random.Random, report: Report, after: float) -> None:
        """Send a request whose client disconnects."""
        prompt = chosen.choice(self.kinds).body["prompt"]
        body = {
            "prompt": prompt,
            "max_tokens": MAX_REQUEST_TOKENS - len(prompt),
            "ignore_eos": True,
            "stream": chosen.random() < 0.5,
        }
        _, writer = await self.send(body)
        await asyncio.sleep(after)
        writer.transport.abort() if chosen.random() < 0.5 else writer.close()
        report.counts["left"] += 1

    async def malformed(self, chosen: random.Random, report: Report) -> None:
        """Send a malformed request, which must be rejected."""
        noise = bytes(chosen.randrange(256) for _ in range(200))
        nonsense = chosen.choice([-1, 1e99, "x", None, [], {"a": 1}])
        body, more = chosen.choice(
            [
                (noise, {}),
                (b'{"prompt": "a", ', {}),
                ({"prompt": [[chosen.choice([-1, 1 << 20])] * 600], "n": chosen.randrange(-1, 200)}, {}),
                (b"x" * 10, {"length": 1 << 40}),
                ({"prompt": "a", chosen.choice(["max_tokens", "n", "seed", "stop", "logprobs"]): nonsense, "x": 1}, {}),
                (b"cut", {"length": 5000}),
            ]
        )
        reader, writer = await self.send(body, **more)
        if body == b"cut":
            writer.close()
            report.counts["cut"] += 1
            return
        status = int((await asyncio.wait_for(reader.readline(), 30)).split(b" ", 2)[1])
        writer.close()
        report.counts[f"malformed: {status}"] += 1
        if not 400 <= status < 500:
            report.fail(f"status {status} of {body!r}")

    async def until_free(self, report: Report, seconds: float = 30.0) -> float:
        """Wait until the engine is idle; return the seconds."""
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            found = await self.metrics()
            if not found["num_requests_running"] + found["num_requests_waiting"]:
                return time.perf_counter() - begun
            await asyncio.sleep(0.02)
        report.fail(f"rows are not free after {seconds} s")
        return seconds


def whole(content: bytes) -> tuple[str, int]:
    answer = json.loads(content)
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


def streamed(content: bytes) -> tuple[str, int]:
    events = [json.loads(line[6:]) for line in content.splitlines() if line.startswith(b"data: {")]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    return text, next((event["usage"]["completion_tokens"] for event in events if event.get("usage")), -1)


async def together(workers: int, work: Callable[[random.Random], Awaitable[Any]], going: Callable[[], bool]) -> None:
    """Run `work` in `workers` concurrent loops while `going()` is true; ignore connections that the server closes."""

    async def one(seed: int) -> None:
        chosen = random.Random(seed)
        while going():
            await work(chosen)

    await asyncio.gather(*map(one, range(workers)))


async def mixed(clients: Clients, arguments: Arguments) -> dict[str, Any]:
    report, left = Report(), arguments.requests
    before = await clients.metrics()

    def going() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    begun = time.perf_counter()
    await together(arguments.clients, lambda chosen: clients.ask(chosen.choice(clients.kinds), report), going)
    seconds = time.perf_counter() - begun
    after = await clients.metrics()
    if after["compilations_after_ready_total"]:
        report.fail(f"{after['compilations_after_ready_total']:.0f} compilations after ready")
    hits = after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"]
    return shown(report) | {"seconds": seconds, "prefix tokens found": hits}


async def cancelled(clients: Clients, arguments: Arguments) -> dict[str, Any]:
    """Cancel requests: half in bursts, most of which wait, and half a few at a time, which are decoded immediately."""
    report, waits = Report(), []
    chosen = random.Random(1)
    while report.counts["left"] < arguments.cancelled:
        burst = chosen.choice([4, 4 * arguments.rows])
        await asyncio.gather(*(clients.leave(chosen, report, chosen.random() * 0.2) for _ in range(burst)))
        waits.append(await clients.until_free(report))
    await clients.ask(clients.kinds[0], report)
    return shown(report) | {"seconds until free, median": percentile(waits, 0.5), "most": max(waits)}


async def overload(clients: Clients, arguments: Arguments) -> dict[str, Any]:
    report = Report()
    best, count = Report(), 8 * arguments.rows
    begun = time.perf_counter()
    left = iter(range(count))
    going = lambda: next(left, None) is not None
    await together(4 * arguments.rows, lambda chosen: clients.ask(chosen.choice(clients.kinds), best), going)
    capacity = count / (time.perf_counter() - begun)
    tokens = best.counts["tokens"] / (time.perf_counter() - begun)
    chosen, tasks = random.Random(2), []
    begun = time.perf_counter()
    moment = begun
    while moment < begun + arguments.overload_seconds:
        tasks.append(asyncio.create_task(clients.ask(chosen.choice(clients.kinds), report)))
        moment += chosen.expovariate(arguments.overload * capacity)
        await asyncio.sleep(max(moment - time.perf_counter(), 0))
    sending = time.perf_counter() - begun
    times = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - begun
    refused = [1e3 * -value for value in times if value < 0]
    found = shown(report) | {"capacity, requests/s": capacity, "capacity, tokens/s": tokens, "sent/s": len(tasks) / sending}
    found["goodput"] = report.counts["tokens"] / seconds / tokens
    if refused:
        found |= {f"429 p{share}, ms": percentile(refused, share / 100) for share in (50, 95, 99)}
    return found


async def soak(clients: Clients, arguments: Arguments, memory: Callable[[], int]) -> dict[str, Any]:
    report, samples = Report(), []
    end = time.perf_counter() + 60 * arguments.soak_minutes

    async def work(chosen: random.Random) -> None:
        drawn = chosen.random()
        try:
            if drawn < 0.7:
                await clients.ask(chosen.choice(clients.kinds), report, slowly=drawn < 0.05)
            elif drawn < 0.85:
                await clients.leave(chosen, report, chosen.random() * 0.3)
            else:
                await clients.malformed(chosen, report)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            report.fail(repr(error))

    async def watch() -> None:
        while time.perf_counter() < end:
            samples.append(memory())
            print(f"soak: {dict(report.counts)}, {samples[-1] / 1e6:.0f} MB", flush=True)
            await asyncio.sleep(min(30.0, 6 * arguments.soak_minutes))

    await asyncio.gather(watch(), together(arguments.clients, work, lambda: time.perf_counter() < end))
    await clients.until_free(report)
    return shown(report) | {"MB": [round(sample / 1e6) for sample in samples], "metrics": await clients.metrics()}


def shown(report: Report) -> dict[str, Any]:
    return {"counts": dict(report.counts), "failed": report.failed}


def print_part(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {json.dumps({key: value for key, value in found.items() if key not in ('failed', 'metrics')})}")
    for line in found["failed"]:
        print(f"  {line}")
    sys.stdout.flush()


def resident(process: int) -> int:
    """Resident memory of a process in bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def run(clients: Clients, arguments: Arguments, memory: Callable[[], int]) -> dict[str, Any]:
    found: dict[str, Any] = {"MB when ready": round(memory() / 1e6)}
    for name, part in (("mixed", mixed), ("cancelled", cancelled), ("overload", overload)):
        found[name] = await part(clients, arguments) | {"MB": round(memory() / 1e6)}
        print_part(name, found[name])
    if arguments.soak_minutes:
        found["soak"] = await soak(clients, arguments, memory)
        print_part("soak", found["soak"])
    return found


def main(arguments: Arguments) -> None:
    report: dict[str, Any] = {"cpu": cpu_name(), "settings": settings(arguments)}
    report["versions"] = versions("jax", "jaxlib", "numpy", "uvicorn", "starlette")
    asked = kinds(arguments.model)
    port = free_port()
    command = [sys.executable, "-c", "from llama_jax.cli import main; main()", "serve", "--port", str(port)]
    command += [] if arguments.model is None else ["--model", str(arguments.model)]
    with running([*command, "--rows", str(arguments.rows), "--dtype", "float32"], port, "/ready") as server:
        found = asyncio.run(run(Clients(port, asked), arguments, lambda: resident(server.process)))
    write_report(arguments.output, report | {"start-up seconds": round(server.seconds, 1)} | found)
    if any(part["failed"] for part in found.values() if isinstance(part, dict)):
        raise SystemExit("the server failed some parts; see above")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
