"""An engine without a model, and clients without sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from llama_jax.errors import GenerationError
from llama_jax.serving.engine import EngineStats
from llama_jax.serving.http.connection import Connection
from llama_jax.serving.http.routes import make_app
from llama_jax.serving.http.service import Served, ServerOptions, Service
from llama_jax.serving.requests import BusyError, ClosedError, GenerationRequest, ScoredToken, Update
from llama_jax.tokenizers import Tokenizer, reply_ends
from llama_jax.tokenizers.sentencepiece import byte_tokenizer

BYTES = byte_tokenizer()
FIRST_BYTE = BYTES.encode("\0", bos=False)[0]  # the id of byte 0; the others follow


def ids(text: str | bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in (text.encode() if isinstance(text, str) else text)]


def echoing(request: GenerationRequest) -> Iterable[int]:
    """The prompt again, without its first token, and then the end."""
    return [*request.prompt[1:], BYTES.eos_id]


def saying(text: str | bytes) -> Callable[[GenerationRequest], Iterable[int]]:
    return lambda request: [*ids(text), BYTES.eos_id]


def following(request: GenerationRequest, tokenizer: Tokenizer = BYTES) -> Iterator[int]:
    """What the request's grammar allows and ends soonest."""
    constraint, special = request.constraint, tokenizer.special_tokens.values()
    ends = reply_ends(tokenizer) if tokenizer.chat_template else tokenizer.stop_ids
    soonest = [*ends, *tokenizer.encode('}"]', bos=False), *special, *range(tokenizer.vocab_size)]
    assert constraint is not None
    while True:
        mask = constraint.allowed()
        token = next(i for i in soonest if mask[i // 32] >> (i % 32) & 1)
        yield token
        constraint.accept(token)


def logprob(step: int) -> float:
    return -0.5 - step / 64


@dataclass(eq=False)
class Running:
    request: GenerationRequest
    deliver: Callable[[Update], None]
    tokens: Iterator[int]
    changed: Callable[[], None]
    count: int = 0
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True
        self.changed()


@dataclass(eq=False)
class FakeEngine:
    """The face of `llama_jax.serving.engine.Engine`; what it says is given."""

    says: Callable[[GenerationRequest], Iterable[int]] = echoing
    rows: int = 64
    most_waiting: int = 64
    context: int = 512
    vocab_size: int = BYTES.vocab_size
    per_iteration: int = 1
    after_iteration: Callable[[], None] = lambda: None
    fail_at: int | None = None
    admitted: list[GenerationRequest] = field(default_factory=list)
    waiting: list[Running] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)
    generated: int = 0
    iterations: int = 0
    last_iteration: float = field(default_factory=time.monotonic)
    closing: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def room(self, length):
        return self.context - length

    def submit(self, request: GenerationRequest, deliver: Callable[[Update], None]) -> Running:
        if not request.prompt or len(request.prompt) + request.max_new_tokens > self.context:
            raise GenerationError("too long")
        with self.changed:
            self.check_room()
            ticket = Running(request, deliver, iter(self.says(request)), self.notify)
            self.waiting.append(ticket)
            self.admitted.append(request)
        self.notify()
        return ticket

    def check_room(self, requests: int = 1) -> None:
        if self.closing:
            raise ClosedError("the engine is shutting down")
        if len(self.waiting) + requests > self.most_waiting:
            raise BusyError("the queue is full", 2.4)

    def notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def step(self) -> bool:
        with self.changed:
            gone = [ticket for ticket in (*self.waiting, *self.running) if ticket.cancelled]
            self.waiting = [ticket for ticket in self.waiting if not ticket.cancelled]
            self.running = [ticket for ticket in self.running if not ticket.cancelled]
            while self.waiting and len(self.running) < self.rows:
                self.running.append(self.waiting.pop(0))
        for ticket in gone:
            self._end(ticket, Update(finish="cancelled"))
        if self.iterations == self.fail_at:
            raise RuntimeError("a device is on fire")
        for ticket in list(self.running):
            self._step(ticket)
        worked = bool(gone or self.running)
        self.iterations += 1
        self.last_iteration = time.monotonic()
        self.after_iteration()
        return worked

    def _step(self, ticket: Running) -> None:
        request, update = ticket.request, Update()
        if ticket.count == 0 and request.score_prompt:
            update.prompt = [scored(token, i, request.alternatives) for i, token in enumerate(request.prompt)]
            update.prompt[0] = ScoredToken(request.prompt[0], None)
        for _ in range(self.per_iteration):
            if ticket.count >= request.max_new_tokens or update.finish:
                update.finish = update.finish or "length"
                break
            token = next(ticket.tokens, FIRST_BYTE + ord("x"))
            found = scored(token, ticket.count, request.alternatives)
            ticket.count += 1
            if token in request.stop_tokens:
                update.finish, update.ended_by = "stop", found
            else:
                update.tokens.append(found)
                self.generated += 1
        if ticket.count >= request.max_new_tokens:
            update.finish = update.finish or "length"
        if update.finish:
            self._end(ticket, update)
        else:
            ticket.deliver(update)

    def _end(self, ticket: Running, update: Update) -> None:
        if ticket in self.running:
            self.running.remove(ticket)
        self.finished[update.finish] += 1
        ticket.deliver(update)

    def run(self) -> None:
        last = Update(finish="cancelled")
        try:
            while not self.closing:
                with self.changed:
                    self.changed.wait_for(lambda: self.waiting or self.running or self.closing)
                if not self.closing:
                    self.step()
        except BaseException as error:
            last = Update(finish="failed", error=str(error))
            raise
        finally:
            self.closing = True
            for ticket in [*self.waiting, *self.running]:
                ticket.deliver(last)
            self.after_iteration()

    def close(self) -> None:
        self.closing = True
        self.notify()

    def stats(self) -> EngineStats:
        known = {
            "rows": self.rows,
            "running": len(self.running),
            "waiting": len(self.waiting),
            "generated_tokens": self.generated,
            "finished": dict(self.finished),
            "last_iteration": self.last_iteration,
            "busy": bool(self.waiting or self.running),
        }
        return EngineStats(**dict.fromkeys(EngineStats._fields, 0) | known)


def scored(token: int, step: int, alternatives: int) -> ScoredToken:
    beside = tuple((FIRST_BYTE + ord("A") + i, logprob(step) - i) for i in range(alternatives))
    return ScoredToken(token, logprob(step), beside)


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == ""
        assert all(part.startswith("data: ") for part in parts)
        return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


class Call:
    """One HTTP request to an ASGI application, as a server would make it."""

    def __init__(self, app: Any, method: str, path: str, content: bytes, headers: dict[str, str]) -> None:
        self.sent: list[Any] = []
        self.news = asyncio.Event()
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": content, "more_body": False})
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self.scope = {"type": "http", "method": method, "path": path, "headers": raw, "query_string": b"", "root_path": ""}
        self.scope |= {"scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "http_version": "1.1"}
        self.task = asyncio.create_task(app(self.scope, self.messages.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self.news.set()

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    async def response(self) -> Response:
        await asyncio.wait_for(self.task, 20)
        start, *bodies = self.sent
        assert start["type"] == "http.response.start"
        headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return Response(start["status"], headers, b"".join(message.get("body", b"") for message in bodies))


class Client:
    def __init__(self, app: Any, service: Service) -> None:
        self.app = app
        self.service = service

    def begin(self, method: str, path: str, json_: Any = None, content: bytes = b"", **headers: str) -> Call:
        if json_ is not None:
            content = json.dumps(json_).encode()
        given = {"host": "127.0.0.1"} | ({"content-type": "application/json"} if method == "POST" else {})
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        return Call(self.app, method, path, content, {name: value for name, value in given.items() if value})

    async def post(self, path: str, json_: Any = None, **more: Any) -> Response:
        return await self.begin("POST", path, json_, **more).response()

    async def get(self, path: str, **more: Any) -> Response:
        return await self.begin("GET", path, **more).response()

    async def complete(self, prompt: Any, **more: Any) -> Response:
        return await self.post("/v1/completions", {"prompt": prompt, **more})

    async def chat(self, text: str, **more: Any) -> Response:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more})


async def until(condition: Callable[[], Any]) -> None:
    """Let other tasks run until a condition holds."""
    while not condition():
        await asyncio.sleep(0)


def served(tokenizer: Tokenizer = BYTES, chat: Any = "zephyr") -> Served:
    return Served(name="fake", tokenizer=tokenizer, chat=chat, no_chat="" if chat else "it has no template")


@contextlib.contextmanager
def on_a_thread(engine: FakeEngine) -> Iterator[None]:
    def run() -> None:
        with contextlib.suppress(RuntimeError):
            engine.run()

    engine.closing = False
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        engine.close()
        thread.join()


def talk(
    engine: FakeEngine,
    conversation: Callable[[Client], Any],
    *,
    thread: bool = True,
    shown: Served | None = None,
    connections: int = 0,
    **options: Any,
) -> Any:
    """What a conversation with an application gives; without `thread` it takes the engine's iterations itself."""

    async def main() -> Any:
        service = Service(engine, shown or served(), ServerOptions(wedged_after=5.0, **options))
        client = Client(make_app(service, lambda: connections), service)
        with on_a_thread(engine) if thread else contextlib.nullcontext(), contextlib.closing(service):
            return await conversation(client)

    return asyncio.run(main())


@contextlib.contextmanager
def listening(engine: Any, shown: Served) -> Iterator[str]:
    """A server of its own threads on a free port of this machine: its address."""
    started, stop, where = threading.Event(), [], []

    async def main() -> None:
        config = uvicorn.Config(
            lambda *arguments: app(*arguments),
            port=0,
            interface="asgi3",
            http=Connection,
            ws="none",
            lifespan="off",
            log_level="warning",
        )
        server = uvicorn.Server(config)
        service = Service(engine, shown)
        app = make_app(service)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0)
        where.append(server.servers[0].sockets[0].getsockname()[1])
        stop.append(lambda: setattr(server, "should_exit", True))
        started.set()
        await serving
        service.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    with on_a_thread(engine):
        thread.start()
        assert started.wait(20)
        try:
            yield f"http://127.0.0.1:{where[0]}"
        finally:
            stop[0]()
            thread.join()
