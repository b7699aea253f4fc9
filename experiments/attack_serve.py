"""The effect of attackers on a server's other clients: wrong answers, gaps in streams, memory, and shutdown time.

A server of a float32 model runs in a separate process. Normal clients stream greedy requests whose answers were computed
before by `llama_jax.generate`; attackers, in another process, come and go, so that windows with and without them alternate.
At the end the server receives SIGTERM while all clients continue. All processes share this machine's cores; the attackers'
process has the lowest priority, since attackers would run on other machines.
Gaps in streams are measured by the clients, which share the cores, and inside the server: when its engine delivers tokens
and when its event loop receives them.
`failed` lists all failures; the exit status is 1 if there are any.

    pip install -e ".[serve]"
    python experiments/attack_serve.py

  patterns   regular expressions and schemas that compile slowly or have very many states; half of the clients disconnect.
  bodies     bodies of 4 MB: unfinished, of many lists, keys, numbers or messages; long texts for /tokenize.
  leaving    clients that disconnect while their request waits, is prefilled or is decoded.
  slow       headers that never end, bodies sent byte by byte, responses that nobody reads.
  broken     malformed or small chunks, many headers, requests followed by garbage, 1,100 upgrades in a row, only garbage.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import tyro
from bench_serve import READY_SECONDS, answers, free_port, percentile
from measuring import cpu_name, settings, versions, write_report
from soak_serve import Clients, Kind, Report, kinds, resident, streamed

from llama_jax.cli import main as command_line
from llama_jax.serving.engine import Engine
from llama_jax.serving.http.response import EngineBridge, UpdateStream
from llama_jax.serving.requests import GenerationRequest, Ticket, Update

MEGABYTE = 1 << 20
END_SECONDS = 2.0  # allowed for the exit, in addition to the drain time
GAP_MS = 150.0  # by which the longest gap with attackers may exceed the longest gap without them
SETTLING = 2.0  # seconds between windows, which are not counted
MIN_GAP = 0.02  # seconds
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
    kinds: tuple[str, ...] = ("patterns", "bodies", "leaving", "slow", "broken")
    rows: int = 16
    """Rows of the server."""
    drain: float = 5.0
    output: Path = Path("experiments/results/attack_serve_cpu.json")


@dataclass
class Window:
    """Results of normal clients with or without attackers; times in ms.

    Attributes:
      spans: times of the windows, by `time.perf_counter`.
    """

    counts: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(end - begin for begin, end in self.spans)

    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = {"seconds": round(self.seconds, 1), **self.counts}
        found["tokens/s"] = round(self.counts["tokens"] / max(self.seconds, 1e-9), 1)
        for name, values in (("gap", self.gaps), ("first token", self.first)):
            if values:
                found |= {f"{name} p{share}, ms": percentile(values, share / 100) for share in (50, 99)}
                found[f"{name} longest, ms"] = max(values)
        return found


class Normal:
    """The normal clients: each answer must be correct, or a rejection."""

    def __init__(self, port: int, asked: list[Kind], windows: dict[str, Window]) -> None:
        self.clients = Clients(port, asked)
        self.report = Report()
        self.windows = windows
        self.now = "without"
        self.ending = False

    def split(self, stamps: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
        """The gaps that ended within each window."""
        return {
            name: [gap for end, gap in stamps if any(begin <= end <= until for begin, until in window.spans)]
            for name, window in self.windows.items()
        }

    async def run(self, seed: int) -> None:
        chosen = random.Random(seed)
        while not self.ending:
            if not await self.ask(chosen.choice(self.clients.kinds)):
                await asyncio.sleep(0.2)

    async def ask(self, kind: Kind) -> bool:
        begun = last = time.perf_counter()
        try:
            reader, writer = await self.clients.send(kind.body)
            parts = []
            while part := await reader.read(1 << 16):
                now = time.perf_counter()
                if part.startswith(b"HTTP/1.1 200"):
                    self.windows[self.now].first.append(1e3 * (now - begun))
                elif parts:
                    self.windows[self.now].gaps.append(1e3 * (now - last))
                last = now
                parts.append(part)
            writer.close()
        except OSError as error:
            if not self.ending:
                self.report.fail(f"{self.now} attackers: {error!r}")
            return False
        head, _, content = b"".join(parts).partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1]) if head else 0
        window = self.windows[self.now]
        window.counts[f"status {status}"] += 1
        if status == 200 and not (self.ending and b'"code":"draining"' in content):
            text, tokens = streamed(dechunked(content))
            window.counts["tokens"] += tokens
            if (text, tokens) != (kind.text, kind.tokens):
                self.report.fail(f"wrong: {tokens} tokens {text!r}, not {kind.tokens} {kind.text!r}, of {kind.body}")
        elif status != 429 and not self.ending:
            self.report.fail(f"{self.now} attackers: status {status}: {content[:200]!r}")
        return status == 200


def dechunked(content: bytes) -> bytes:
    """A body without HTTP's chunk sizes."""
    parts = []
    while content:
        size, _, content = content.partition(b"\r\n")
        parts.append(content[: int(size, 16)])
        content = content[int(size, 16) + 2 :]
    return b"".join(parts)


def requests_of(path: str, content: bytes, length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + content


def constrained(constraint: dict[str, Any]) -> bytes:
    return requests_of("/v1/completions", json.dumps({"prompt": "a", "response_format": constraint}).encode())


def patterns() -> list[bytes]:
    expressions = [
        "a?" * 50_000,
        "a?" * 20_000,
        "a?" * 6_000,
        "(a{1000}){1000}",
        "[ab]{3}(a{1000}){1000}",
        "[ab]*a[ab]{300}",
    ]
    expressions += ["(a|b|c|d){9000}", r"[^\s\S]", "(.*[a-m].{90})|(.*[n-z].{80})", "abcdefgh" * 10_000]
    properties = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 50 + 1}}}$"} for i in range(3000)}
    schemas: list[dict[str, Any]] = [{"type": "object", "properties": properties, "additionalProperties": False}]
    schemas += [{"type": "integer", "multipleOf": 99991}, {"enum": [f"w{i}" * 5 for i in range(50_000)]}, {"enum": []}]
    found = [constrained({"type": "regex", "regex": expression}) for expression in expressions]
    return found + [constrained({"type": "json_schema", "json_schema": {"schema": schema}}) for schema in schemas]


def bodies() -> list[bytes]:
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
    return [requests_of(path, content) for path, some in contents.items() for content in some]


class Attackers:
    """All kinds of attackers, active while `going` is set, and counts of their requests and responses."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.counts: Counter[str] = Counter()
        self.patterns, self.bodies = patterns(), bodies()
        self.endless = b'{"prompt":"Once","max_tokens":%d,"stream":true,"ignore_eos":true}' % ENDLESS

    async def send(self, kind: str, content: bytes, seconds: float = 30.0) -> None:
        """Send bytes, and count the status of the response within this time."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        try:
            writer.write(content)
            line = await asyncio.wait_for(reader.readline(), seconds)
            self.counts[f"{kind}: {line.split()[1].decode() if line else 'closed'}"] += 1
        except TimeoutError:
            self.counts[f"{kind}: left"] += 1
        finally:
            writer.transport.abort()

    async def attack(self, kind: str, chosen: random.Random) -> None:
        await getattr(self, f"_{kind}")(kind, chosen)

    async def _patterns(self, kind: str, chosen: random.Random) -> None:
        await self.send(kind, chosen.choice(self.patterns), chosen.choice([0.2, 30.0]))

    async def _bodies(self, kind: str, chosen: random.Random) -> None:
        if chosen.random() < 0.6:
            content = chosen.choice(self.bodies)
            await self.send("unfinished", content[: chosen.randrange(MEGABYTE, len(content) - 1)], chosen.uniform(1, 5))
        else:
            await self.send(kind, chosen.choice(self.bodies))

    async def _leaving(self, kind: str, chosen: random.Random) -> None:
        await self.send(kind, requests_of("/v1/completions", self.endless), chosen.random())

    async def _slow(self, kind: str, chosen: random.Random) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1)
        content = chosen.choice([b"GET / HTTP/1.1\r\nX: ", requests_of("/v1/completions", b"", 10**6)]) + b"a" * 100
        try:
            if chosen.random() < 0.4:  # a response that nobody reads
                writer.write(requests_of("/v1/completions", self.endless))
                await asyncio.sleep(3)
            else:
                for at in range(0, len(content), 20):
                    writer.write(content[at : at + 20])
                    await asyncio.sleep(0.3)
            self.counts[kind] += 1
        finally:
            writer.transport.abort()

    async def _broken(self, kind: str, chosen: random.Random) -> None:
        chunked = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        upgrade = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        noise = bytes(chosen.randrange(256) for _ in range(200))
        some = [chunked + b"Transfer-Encoding: chunked\r\n\r\n" + part for part in (b"zz\r\n", b"1\r\na\r\n" * 100_000)]
        some += [chunked + b"a:b\r\n" * 10_000 + b"\r\n", upgrade * 1100, upgrade + noise, b"\0" + noise]
        await self.send(kind, chosen.choice(some))
        await asyncio.sleep(0.05)

    async def run(self, count: int, kinds: Sequence[str], going: Event, ended: Event) -> None:
        async def one(kind: str, seed: int) -> None:
            chosen = random.Random(seed)
            while not ended.is_set():
                attacking = asyncio.create_task(self.attack(kind, chosen)) if going.is_set() else None
                while attacking is not None and not attacking.done() and going.is_set() and not ended.is_set():
                    await asyncio.wait([attacking], timeout=0.2)
                if attacking is None:
                    await asyncio.sleep(0.05)
                    continue
                attacking.cancel()  # no attack may continue in a window without attackers
                with suppress(OSError, ValueError, asyncio.CancelledError):
                    await attacking

        await asyncio.gather(*(one(kind, seed) for kind in kinds for seed in range(count)))


class Stamps:
    """Gaps of normal streams inside the server: when its engine delivered tokens and when its event loop received them.

    Each gap is written to a file when it ends, as a line: the place, the time of the end by `time.perf_counter` (shared by
    all processes of a machine), and the length in ms.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def install(self) -> None:
        """Stamp all later deliveries of this process's engine and event loop."""
        engine_submit, submit, put = Engine.submit, EngineBridge.submit, UpdateStream.put
        takes = WeakKeyDictionary[UpdateStream, Callable[[], None]]()

        def stamped_engine_submit(engine: Engine, request: GenerationRequest, deliver: Callable[[Update], None]) -> Ticket:
            stamp = self.stamping("engine") if is_normal(request) else lambda: None
            return engine_submit(engine, request, lambda update: (stamp(), deliver(update))[1])

        def stamped_submit(bridge: EngineBridge, requests: Sequence[GenerationRequest]) -> UpdateStream:
            stream = submit(bridge, requests)
            if is_normal(requests[0]):
                takes[stream] = self.stamping("loop")
            return stream

        def stamped_put(stream: UpdateStream, index: int, update: Update) -> None:
            takes.get(stream, lambda: None)()
            put(stream, index, update)

        Engine.submit, EngineBridge.submit, UpdateStream.put = stamped_engine_submit, stamped_submit, stamped_put  # type: ignore[method-assign]

    def stamping(self, where: str) -> Callable[[], None]:
        """Return a callback to call whenever a stream receives tokens."""
        last = 0.0

        def stamp() -> None:
            nonlocal last
            now = time.perf_counter()
            if last and now - last >= MIN_GAP:
                print(where, now, 1e3 * (now - last), file=self._file)
            last = now

        return stamp


def is_normal(request: GenerationRequest) -> bool:
    """Whether a request may come from a normal client: attackers' requests are constrained or endless."""
    return request.constraint is None and request.max_new_tokens < ENDLESS


def serve(path: str) -> None:
    """Run the server's command in its own process and stamp its gaps in a file."""
    Stamps(Path(path)).install()
    command_line()


def attack(port: int, count: int, kinds: Sequence[str], going: Event, ended: Event, told: Any) -> None:
    """Run the attackers in their own process."""
    os.nice(19)
    attackers = Attackers(port)
    told.put("ready")
    asyncio.run(attackers.run(count, kinds, going, ended))
    told.put(dict(attackers.counts))


async def measure(arguments: Arguments, normal: Normal, going: Event, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Measure windows without and with attackers, then the shutdown."""
    tasks = [asyncio.create_task(normal.run(seed)) for seed in range(arguments.clients)]
    memory: dict[str, list[int]] = {"without": [], "with": []}
    await asyncio.sleep(2)
    for window in normal.windows.values():
        window.__init__()  # type: ignore[misc]
    for number in range(max(1, round(30 * arguments.minutes / arguments.window))):
        for name in ("without", "with"):
            normal.now = "between"
            going.set() if name == "with" else going.clear()
            await asyncio.sleep(SETTLING)
            normal.now, begun = name, time.perf_counter()
            largest = 0
            while time.perf_counter() - begun < arguments.window:
                await asyncio.sleep(0.25)
                largest = max(largest, resident(process.pid))
            normal.windows[name].spans.append((begun, time.perf_counter()))
            memory[name].append(round(largest / 1e6))
        print(f"{number}: {dict(normal.windows['with'].counts)}, MB {memory['with'][-1]}", flush=True)
    normal.now, normal.ending, begun = "ending", True, time.perf_counter()
    process.send_signal(signal.SIGTERM)
    while process.poll() is None and time.perf_counter() - begun < arguments.drain + 60:
        await asyncio.sleep(0.02)
    seconds = time.perf_counter() - begun
    await asyncio.wait(tasks, timeout=10)
    return {"MB": memory, "SIGTERM": {"seconds": seconds, "drain": arguments.drain, "exit status": process.poll()}}


def judge(found: dict[str, Any], report: Report, log: str) -> None:
    """Add failures to the report."""
    without, attacked = (found[name]["gap longest, ms"] for name in ("without", "with"))
    if attacked > without + GAP_MS:
        report.fail(f"a gap of {attacked:.0f} ms with attackers, {without:.0f} ms without")
    end = found["SIGTERM"]
    if end["seconds"] > end["drain"] + END_SECONDS or end["exit status"] != 0:
        report.fail(f"slow or failed shutdown: {end}")
    memory = found["MB"]["with"]
    half = len(memory) // 2
    if half and max(memory[half:]) > GROWTH * max(memory[:half]) + 64:
        report.fail(f"memory grows: {memory} MB")
    if "Traceback" in log:
        report.fail("a traceback, printed above")
        print(log[log.index("Traceback") :][:10_000])


def table(found: dict[str, Any]) -> str:
    names = list(dict.fromkeys([*found["without"], *found["with"]]))
    shown = lambda value: f"{value:,.1f}" if isinstance(value, float) else str(value)
    rows = [f"| {name} | {shown(found['without'].get(name, 0))} | {shown(found['with'].get(name, 0))} |" for name in names]
    return "\n".join(["| normal clients | without attackers | with |", "|---|---|---|", *rows])


def main(arguments: Arguments) -> None:
    report: dict[str, Any] = {"cpu": cpu_name(), "settings": settings(arguments)}
    report["versions"] = versions("jax", "jaxlib", "numpy", "uvicorn", "starlette", "llguidance")
    greedy = [kind for kind in kinds(arguments.model) if kind.body["temperature"] == 0]
    asked = [Kind(kind.body | {"stream": True, "logprobs": None, **USAGE}, kind.text, kind.tokens) for kind in greedy]
    port, context = free_port(), multiprocessing.get_context("spawn")
    going, ended, told = context.Event(), context.Event(), context.Queue()
    folder = tempfile.TemporaryDirectory()
    stamps = Path(folder.name) / "stamps"
    command = [
        sys.executable,
        "-c",
        f"import attack_serve; attack_serve.serve({str(stamps)!r})",
        "serve",
        "--port",
        str(port),
    ]
    command += [] if arguments.model is None else ["--model", str(arguments.model.resolve())]
    command += ["--rows", str(arguments.rows), "--dtype", "float32", "--drain", str(arguments.drain)]
    attackers = context.Process(
        target=attack, args=(port, arguments.attackers, arguments.kinds, going, ended, told), daemon=True
    )
    attackers.start()
    with (
        folder,
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=Path(__file__).parent) as process,
    ):
        try:
            begun = time.perf_counter()
            while not asyncio.run(answers(port, "/ready")):
                if process.poll() is not None or time.perf_counter() - begun > READY_SECONDS:
                    log.seek(0)
                    raise SystemExit(f"the server does not answer: {log.read().decode(errors='replace')}")
                time.sleep(0.1)
            told.get()
            windows = {name: Window() for name in ("without", "with", "between", "ending")}
            normal = Normal(port, asked, windows)
            found = asyncio.run(measure(arguments, normal, going, process))
            ended.set()
            found |= {name: window.shown() for name, window in windows.items()} | {"attackers": told.get(timeout=60)}
            stamped = [line.split() for line in stamps.read_text().splitlines()]
            for where in ("engine", "loop"):
                gaps = [(float(end), float(gap)) for name, end, gap in stamped if name == where]
                for window, values in normal.split(gaps).items():
                    found[window][f"gap of the server's {where} longest, ms"] = max(values, default=0.0)
        finally:
            process.kill()
            attackers.kill()
        log.seek(0)
        judge(found, normal.report, log.read().decode(errors="replace"))
    found["failed"] = normal.report.failed
    write_report(arguments.output, report | found)
    print(table(found), json.dumps({name: found[name] for name in ("MB", "SIGTERM", "attackers")}), sep="\n\n")
    if found["failed"]:
        raise SystemExit("\n".join(["failures:", *found["failed"]]))


USAGE = {"stream_options": {"include_usage": True}}

if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
