"""The server inside a program that has sockets of its own, which begins and ends it with ASGI's lifespan events."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
from fakes import BYTES, Client, FakeEngine, ids, saying, served
from starlette.applications import Starlette
from starlette.routing import Mount

import llama_jax
from llama_jax.cli.serve import Serve
from llama_jax.errors import GenerationError, UserError
from llama_jax.serving.http.auth import Access
from llama_jax.serving.http.server import Mounted
from llama_jax.serving.http.service import ServerOptions


@asynccontextmanager
async def hosted(app):
    """What a host does: begins the application, yields how to tell it to end, and waits for that."""
    events, said = asyncio.Queue(), asyncio.Queue()
    events.put_nowait({"type": "lifespan.startup"})
    task = asyncio.create_task(app({"type": "lifespan"}, events.get, said.put))
    assert await said.get() == {"type": "lifespan.startup.complete"}
    try:
        yield lambda: events.put_nowait({"type": "lifespan.shutdown"})
        assert await asyncio.wait_for(said.get(), 30) == {"type": "lifespan.shutdown.complete"}
        await task
    finally:
        task.cancel()


def test_it_serves_between_the_events_and_drains_at_the_end():
    go = threading.Event()

    def says(request):
        yield from ids("begun ")
        if BYTES.decode(request.prompt).startswith("wait"):
            assert go.wait(20)
        yield from [*ids("and done"), BYTES.eos_id]

    async def main():
        app = Mounted(FakeEngine(says=says), served())
        client = Client(app, None)
        with pytest.raises(RuntimeError, match="lifespan events"):
            await client.get("/health")
        async with hosted(app) as end:
            assert (await client.complete("a", max_tokens=20)).json["choices"][0]["text"] == "begun and done"
            body = {"prompt": "wait", "max_tokens": 20, "stream": True}
            running = client.begin("POST", "/v1/completions", body)
            await running.news.wait()
            end()
            while (await client.get("/ready")).status == 200:
                await asyncio.sleep(0)
            refused = await client.complete("b")
            assert (refused.status, refused.json["error"]["code"]) == (503, "draining")
            go.set()
            events = (await running.response()).events
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "begun and done"

    asyncio.run(main())


def test_it_serves_below_a_prefix():
    async def main():
        inner = Mounted(FakeEngine(says=saying("yes")), served())
        client = Client(Starlette(routes=[Mount("/llm", inner)]), None)
        async with hosted(inner) as end:
            found = [
                await client.post("/llm/tokenize", {"prompt": "a"}),
                await client.post("/llm/detokenize", {"tokens": ids("a")}),
                await client.post("/llm/v1/completions", {"prompt": "a"}),
                await client.post("/llm/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                await client.get("/llm/v1/models"),
            ]
            end()
        assert [each.status for each in found] == [200] * 5

    asyncio.run(main())


def test_a_failed_engine_is_reported():
    async def main():
        app = Mounted(FakeEngine(says=saying("abc"), fail_at=1), served())
        assert app.trouble() is None
        async with hosted(app) as end:
            assert app.trouble() is None
            assert (await Client(app, None).complete("a", max_tokens=9)).status == 500
            while app.trouble() is None:
                await asyncio.sleep(0)
            assert "a device is on fire" in app.trouble()
            end()

    asyncio.run(main())


def test_what_the_host_owns():
    with pytest.raises(UserError, match="most_connections=5 must be 0: the host manages connections"):
        Mounted(FakeEngine(), served(), ServerOptions(access=Access(most_connections=5)))
    with pytest.raises(GenerationError, match="port=9000 is only for `llama-jax serve`"):
        Serve(port=9000).application()


@pytest.mark.slow
def test_the_command_as_an_application(monkeypatch):
    """As docs/serving/ray_app.py makes it."""
    monkeypatch.setattr("llama_jax.cli.jax_setup.use_compilation_cache", lambda *_: None)
    config, params, tokenizer = llama_jax.load(dtype="float32")
    app = Serve(dtype="float32", rows=1, context=128, prefix_cache=0, allow_host=("*",)).application()

    async def main():
        async with hosted(app) as end:
            body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
            answer = await Client(app, None).post("/v1/completions", body, host="any.name")
            end()
            return answer

    answer = asyncio.run(main())
    assert answer.status == 200, answer.body
    ids = tokenizer.encode("Once upon a time")
    (alone,) = llama_jax.generate(config, params, [ids], max_new_tokens=12)
    assert answer.json["choices"][0]["text"] == tokenizer.decode(ids + alone.tokens).removeprefix("Once upon a time")
