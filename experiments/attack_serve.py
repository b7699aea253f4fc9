"""The effect of attackers on a server's other clients: wrong answers, gaps in streams, memory, and shutdown time.

The script starts a server of a float32 model in a separate process. Normal clients send requests of all lengths and settings
whose answers were computed before by `llama_jax.generate`; attackers, in another process, come and go, so that windows with
and without them alternate. At the end the server receives SIGTERM while all clients continue. All processes share this
machine's cores; the attackers' process has the lowest priority, since attackers would run on other machines.
`failed` lists all failures; the exit status is 1 if there are any.

    pip install -e ".[serve]"
    python experiments/attack_serve.py
    python experiments/attack_serve.py --model SmolLM2-135M-Instruct.Q4_1.gguf --minutes 1

  patterns   regular expressions and schemas that compile slowly or have very many states; half of the clients disconnect.
  bodies     bodies of 4 MB: unfinished, of many lists, keys, numbers or messages; long texts for /tokenize.
  leaving    clients that disconnect while their request waits, is prefilled or is decoded.
  slow       headers that never end, bodies sent byte by byte, responses that nobody reads.
  broken     malformed bodies and fields, small chunks, many headers, 1,100 upgrades in a row, garbage.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import tyro
from measuring import describe_run, markdown_table, write_report
from server_load import (
    LLAMA_JAX_SERVE,
    KnownRequest,
    Server,
    free_port,
    get,
    known_requests,
    percentile,
    post,
    read_answer,
    running,
    status,
)

MEGABYTE = 1 << 20
REQUESTS = 96  # different ones of normal clients
END_SECONDS = 2.0  # allowed for the exit, in addition to the drain time
GAP_MS = 150.0  # by which the longest gap with attackers may exceed the longest gap without them
SETTLING_SECONDS = 2.0  # between windows, not counted
ENDLESS = 200  # tokens that an attacker requests, more than any normal client
GROWTH = 1.1  # allowed growth of memory from the first half of the attacks to the second, plus 64 MB


@dataclass(frozen=True)
class Arguments:
    """Attack a server."""

    model: Path | None = None
    """Model to serve; the bundled model by default."""
    minutes: float = 15.0
    window: float = 15.0
    """Seconds with attackers, followed by as many without."""
    clients: int = 64
    """Number of normal clients."""
    attackers: int = 8
    """Attackers of each kind."""
    rows: int = 16
    """Rows of the server."""
    drain: float = 5.0
    """Seconds that the server gives to running requests at its end."""
    output: Path = Path("experiments/results/attack_serve_cpu.json")


@dataclass
class Window:
    """Results of normal clients with or without attackers; times in ms."""

    counts: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"seconds": round(self.seconds, 1), **self.counts}
        figures["tokens/s"] = round(self.counts["tokens"] / max(self.seconds, 1e-9), 1)
        for name, values in (("gap", self.gaps), ("first token", self.first)):
            if values:
                figures |= {f"{name} p{share}, ms": percentile(values, share / 100) for share in (50, 99)}
                figures[f"{name} longest, ms"] = max(values)
        return figures


class NormalClients:
    """The normal clients: each answer must be correct, or a rejection."""

    def __init__(self, port: int, requests: list[KnownRequest]) -> None:
        self.port, self.requests = port, requests
        self.windows = {name: Window() for name in ("without", "with", "between", "ending")}
        self.current = "between"
        self.ending = False
        self.failed: list[str] = []

    def fail(self, what: str) -> None:
        self.failed.append(what[:300])

    async def run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.ending:
            if not await self.ask(rng.choice(self.requests)):
                await asyncio.sleep(0.2)

    async def ask(self, request: KnownRequest) -> bool:
        began = last = time.perf_counter()
        parts: list[bytes] = []
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
            writer.write(post("/v1/completions", json.dumps(request.body).encode()))
            while part := await reader.read(1 << 16):
                now = time.perf_counter()
                if "stream" in request.body:
                    window = self.windows[self.current]
                    (window.gaps if parts else window.first).append(1e3 * (now - (last if parts else began)))
                last = now
                parts.append(part)
            writer.close()
        except OSError as error:
            if not self.ending:
                self.fail(f"{self.current} attackers: {error!r}")
            return False
        response, window = b"".join(parts), self.windows[self.current]
        window.counts[f"status {status(response)}"] += 1
        if status(response) == 200 and not (self.ending and b'"code":"draining"' in response):
            text, tokens = read_answer(response)
            window.counts["tokens"] += tokens
            if (text, tokens) != (request.text, request.tokens):
                self.fail(f"wrong: {tokens} tokens {text!r}, not {request.tokens} {request.text!r}, of {request.body}")
        elif status(response) not in (200, 429) and not self.ending:
            self.fail(f"{self.current} attackers: {response[:200]!r}")
        return status(response) == 200


# --- attackers -----------------------------------------------------------------------------------------------------------


def constrained(constraint: dict[str, Any]) -> bytes:
    return post("/v1/completions", json.dumps({"prompt": "a", "response_format": constraint}).encode())


def patterns() -> list[bytes]:
    """Requests with expensive constraints."""
    expressions = ["a?" * count for count in (50_000, 20_000, 6_000)]
    expressions += ["(a{1000}){1000}", "[ab]{3}(a{1000}){1000}", "[ab]*a[ab]{300}", "(a|b|c|d){9000}", r"[^\s\S]"]
    expressions += ["(.*[a-m].{90})|(.*[n-z].{80})", "abcdefgh" * 10_000]
    properties = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 50 + 1}}}$"} for i in range(3000)}
    schemas: list[dict[str, Any]] = [{"type": "object", "properties": properties, "additionalProperties": False}]
    schemas += [{"type": "integer", "multipleOf": 99991}, {"enum": [f"w{i}" * 5 for i in range(50_000)]}, {"enum": []}]
    requests = [constrained({"type": "regex", "regex": expression}) for expression in expressions]
    return requests + [constrained({"type": "json_schema", "json_schema": {"schema": schema}}) for schema in schemas]


def bodies() -> list[bytes]:
    """Requests with large bodies."""
    size, parts = 4 * MEGABYTE - 100, 262_000
    message = b'{"role":"user","content":"a"}'
    contents = {
        "/v1/completions": [
            b'{"prompt":[' + b"[]," * (size // 3) + b"1]}",
            b'{"prompt":[' + (b"[" * 900 + b"]" * 900 + b",") * (parts // 901) + b"1]}",
            b"{" + b",".join(b'"%d":1' % i for i in range(parts // 2)) + b"}",
            b'{"prompt":[' + b"1.2345678901234567e-300," * (size // 24 - 1) + b"1]}",
            b'{"prompt":"' + b'\\"' * (size // 2 - 10) + b'"}',
            b'{"prompt":"' + b"a" * (size - 20) + b'"}',
            b'{"prompt":"' + b"hello, " * (3 * MEGABYTE // 7) + b'"}',
        ],
        "/v1/chat/completions": [b'{"messages":[' + b",".join([message] * (size // 31)) + b"]}"],
        "/tokenize": [b'{"prompt":"' + b"a1! " * (MEGABYTE - 100) + b'"}', b'{"prompt":"' + b"x" * (3 * MEGABYTE) + b'"}'],
    }
    return [post(path, content) for path, same_path in contents.items() for content in same_path]


class Attackers:
    """All kinds of attackers, and counts of their requests and responses."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.counts: Counter[str] = Counter()
        self.patterns, self.bodies = patterns(), bodies()
        endless = b'{"prompt":"Once","max_tokens":%d,"stream":true,"ignore_eos":true}' % ENDLESS
        self.endless = post("/v1/completions", endless)
        self.methods = (self.send_pattern, self.send_body, self.leave, self.send_slowly, self.send_broken)

    async def send(self, name: str, content: bytes, seconds: float = 30.0) -> None:
        """Send bytes, and count the status of the response within this time."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        try:
            writer.write(content)
            line = await asyncio.wait_for(reader.readline(), seconds)
            self.counts[f"{name}: {line.split()[1].decode() if line else 'closed'}"] += 1
        except TimeoutError:
            self.counts[f"{name}: left"] += 1
        finally:
            writer.transport.abort()

    async def send_pattern(self, rng: random.Random) -> None:
        await self.send("patterns", rng.choice(self.patterns), rng.choice([0.2, 30.0]))

    async def send_body(self, rng: random.Random) -> None:
        content = rng.choice(self.bodies)
        if rng.random() < 0.6:
            await self.send("unfinished", content[: rng.randrange(MEGABYTE, len(content) - 1)], rng.uniform(1, 5))
        else:
            await self.send("bodies", content)

    async def leave(self, rng: random.Random) -> None:
        await self.send("leaving", self.endless, rng.random())

    async def send_slowly(self, rng: random.Random) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1)
        content = rng.choice([b"GET / HTTP/1.1\r\nX: ", post("/v1/completions", b"", 10**6)]) + b"a" * 100
        try:
            if rng.random() < 0.4:  # a response that nobody reads
                writer.write(self.endless)
                await asyncio.sleep(3)
            else:
                for start in range(0, len(content), 20):
                    writer.write(content[start : start + 20])
                    await asyncio.sleep(0.3)
            self.counts["slow"] += 1
        finally:
            writer.transport.abort()

    async def send_broken(self, rng: random.Random) -> None:
        chunked = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        upgrade = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        noise = rng.randbytes(200)
        contents = [chunked + b"Transfer-Encoding: chunked\r\n\r\n" + part for part in (b"zz\r\n", b"1\r\na\r\n" * 100_000)]
        contents += [chunked + b"a:b\r\n" * 10_000 + b"\r\n", upgrade * 1100, upgrade + noise, b"\0" + noise]
        wrong = {rng.choice(["max_tokens", "n", "seed", "stop", "logprobs"]): rng.choice([-1, 1e99, "x", [], {"a": 1}])}
        bodies = (noise, b'{"prompt": "a", ', json.dumps({"prompt": "a", "x": 1} | wrong).encode())
        contents += [post("/v1/completions", rng.choice(bodies)), post("/v1/completions", b"cut", 5000)]
        await self.send("broken", rng.choice(contents))
        await asyncio.sleep(0.05)

    async def run(self, count: int, active: Event, ended: Event) -> None:
        """Attack while `active` is set, with `count` attackers of each kind, until `ended` is set."""

        async def attack(attack_method: Any, seed: int) -> None:
            rng = random.Random(seed)
            while not ended.is_set():
                if not active.is_set():
                    await asyncio.sleep(0.05)
                    continue
                attacking = asyncio.create_task(attack_method(rng))
                while not attacking.done() and active.is_set() and not ended.is_set():
                    await asyncio.wait([attacking], timeout=0.2)
                attacking.cancel()  # no attack may continue in a window without attackers
                with suppress(OSError, ValueError, asyncio.CancelledError):
                    await attacking

        await asyncio.gather(*(attack(attack_method, seed) for attack_method in self.methods for seed in range(count)))


def run_attackers(port: int, count: int, active: Event, ended: Event, results: Any) -> None:
    """Run the attackers in their own process."""
    os.nice(19)
    attackers = Attackers(port)
    results.put("ready")
    asyncio.run(attackers.run(count, active, ended))
    results.put(dict(attackers.counts))


# --- measurement ---------------------------------------------------------------------------------------------------------


async def measure(arguments: Arguments, normal: NormalClients, active: Event, server: Server) -> dict[str, Any]:
    """Measure windows without and with attackers, then the shutdown."""
    tasks = [asyncio.create_task(normal.run(seed)) for seed in range(arguments.clients)]
    memory: dict[str, list[int]] = {"without": [], "with": []}
    for number in range(max(1, round(30 * arguments.minutes / arguments.window))):
        for name in ("without", "with"):
            normal.current = "between"
            active.set() if name == "with" else active.clear()
            await asyncio.sleep(SETTLING_SECONDS)
            normal.current, began, largest = name, time.perf_counter(), 0
            while time.perf_counter() - began < arguments.window:
                await asyncio.sleep(0.25)
                largest = max(largest, server.resident_bytes())
            normal.windows[name].seconds += time.perf_counter() - began
            memory[name].append(round(largest / 1e6))
        print(f"{number}: {dict(normal.windows['with'].counts)}, MB {memory['with'][-1]}", flush=True)
    metrics = (await get(normal.port, "/metrics")).decode()
    compilations = re.search(r"^llama_jax:compilations_after_ready_total\S* (\S+)", metrics, re.MULTILINE)
    normal.current, normal.ending, began = "ending", True, time.perf_counter()
    server.process.send_signal(signal.SIGTERM)
    while server.process.poll() is None and time.perf_counter() - began < arguments.drain + 60:
        await asyncio.sleep(0.02)
    end = {"seconds": time.perf_counter() - began, "drain": arguments.drain, "exit status": server.process.poll()}
    await asyncio.wait(tasks, timeout=10)
    compiled = int(float(compilations[1])) if compilations else None
    return {"MB": memory, "SIGTERM": end, "compilations after ready": compiled}


def check(figures: dict[str, Any], log: str) -> list[str]:
    """What fails besides answers."""
    failed = []
    without, attacked = (figures[name].get("gap longest, ms", 0.0) for name in ("without", "with"))
    if attacked > without + GAP_MS:
        failed.append(f"a gap of {attacked:.0f} ms with attackers, {without:.0f} ms without")
    end = figures["SIGTERM"]
    if end["seconds"] > end["drain"] + END_SECONDS or end["exit status"] != 0:
        failed.append(f"slow or failed shutdown: {end}")
    memory = figures["MB"]["with"]
    half = len(memory) // 2
    if half and max(memory[half:]) > GROWTH * max(memory[:half]) + 64:
        failed.append(f"memory grows: {memory} MB")
    if figures["compilations after ready"]:
        failed.append(f"{figures['compilations after ready']} compilations after the server was ready")
    if "Traceback" in log:
        failed.append("a traceback, printed above")
        print(log[log.index("Traceback") :][:10_000])
    return failed


def as_table(figures: dict[str, Any]) -> str:
    without, attacked = figures["without"], figures["with"]
    shown = lambda value: f"{value:,.1f}" if isinstance(value, float) else str(value)
    names = dict.fromkeys([*without, *attacked])
    rows = [[name, shown(without.get(name, 0)), shown(attacked.get(name, 0))] for name in names]
    return markdown_table(("normal clients", "without attackers", "with"), rows)


def main(arguments: Arguments) -> None:
    report = describe_run(arguments, "numpy", "uvicorn", "starlette", "llguidance")
    requests = known_requests(arguments.model, REQUESTS)
    port, context = free_port(), multiprocessing.get_context("spawn")
    active, ended, results = context.Event(), context.Event(), context.Queue()
    command = [*LLAMA_JAX_SERVE, "--port", str(port), "--rows", str(arguments.rows), "--dtype", "float32"]
    command += ["--drain", str(arguments.drain)]
    command += [] if arguments.model is None else ["--model", str(arguments.model)]
    attackers = context.Process(target=run_attackers, args=(port, arguments.attackers, active, ended, results), daemon=True)
    attackers.start()
    normal = NormalClients(port, requests)
    try:
        with running(command, port) as server:
            results.get()
            figures = asyncio.run(measure(arguments, normal, active, server))
            ended.set()
            figures |= {name: window.as_dict() for name, window in normal.windows.items()}
            figures |= {"attackers": results.get(timeout=60)}
            figures["failed"] = [*normal.failed[:20], *check(figures, server.printed())]
    finally:
        attackers.kill()
    write_report(arguments.output, report | figures)
    print(as_table(figures), json.dumps({name: figures[name] for name in ("MB", "SIGTERM", "attackers")}), sep="\n\n")
    if figures["failed"]:
        raise SystemExit("\n".join(["failures:", *figures["failed"]]))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
