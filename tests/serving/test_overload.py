"""Requests that cost much: grammars that compile for ever and large bodies hold up neither other requests nor the end."""

import asyncio
import json
import re
import signal
import threading

import pytest
from fakes import BYTES, Call, FakeEngine, saying, talk, until
from test_api import error_of
from test_server import Connection, process

from llama_jax.serving.grammar import Grammars
from llama_jax.serving.http import json_body, service
from llama_jax.serving.http.errors import ApiError
from llama_jax.serving.http.json_body import SMALL_BODY, parse_json

THREADS, WAITING = service.threads_beside_engine(service.GRAMMAR_THREADS), service.GRAMMARS_WAITING


class Compiling:
    """Grammars that are compiled until `told`; how many have begun."""

    def __init__(self, monkeypatch):
        self.begun, self.told = 0, threading.Event()
        monkeypatch.setattr(Grammars, "regex", lambda grammars, pattern: self.compile())

    def compile(self):
        self.begun += 1
        assert self.told.wait(20)
        return None

    async def begin(self, client, count):
        """Requests whose grammars are being compiled, or wait."""
        body = {"prompt": "a", "response_format": {"type": "regex", "regex": "a?"}}
        calls = []
        for _ in range(count):
            calls.append(client.begin("POST", "/v1/completions", body))
            await until(lambda: self.begun >= min(len(calls), THREADS))  # what no thread has begun counts as waiting
        return calls


def test_grammars_that_wait_are_bounded_and_count_as_requests_that_wait(monkeypatch):
    compiling = Compiling(monkeypatch)

    async def conversation(client):
        calls = await compiling.begin(client, THREADS + 3)
        await until(lambda: client.service.compiling >= 3)
        assert "llama_jax:num_requests_waiting 3.0" in (await client.get("/metrics")).body.decode()
        refused = [await client.complete("a")]
        client.service.engine.most_waiting = 100
        taken = await client.complete("a")
        calls += await compiling.begin(client, WAITING - 3)
        await until(lambda: client.service.compiling >= WAITING)
        refused += [await each.response() for each in await compiling.begin(client, 1)]
        compiling.told.set()
        for call in calls:
            await call.response()
        return refused, taken

    refused, taken = talk(FakeEngine(says=saying("Hi!"), most_waiting=3), conversation)
    assert [error_of(each, 429)["code"] for each in refused] == ["queue_full"] * 2
    assert "wait for grammars" in refused[1].json["error"]["message"]
    assert taken.status == 200


def test_a_grammar_whose_client_left_is_not_compiled(monkeypatch):
    compiling = Compiling(monkeypatch)

    async def conversation(client):
        calls = await compiling.begin(client, THREADS + 5)
        for call in calls:
            call.leave()
        answers = [await call.response() for call in calls]
        for _ in range(20):  # turns of the event loop, in which what was cancelled is told so
            await asyncio.sleep(0)
        compiling.told.set()
        assert (await (await compiling.begin(client, 1))[0].response()).status == 200
        return answers

    engine = FakeEngine(says=saying("Hi!"))
    assert {each.status for each in talk(engine, conversation)} == {400}
    assert compiling.begun == THREADS + 1
    assert len(engine.admitted) == 1


@pytest.mark.slow
def test_a_process_ends_although_grammars_compile():
    """It waits for no thread and no other process, and says nothing of those that it left."""
    pytest.importorskip("llguidance")
    with process(drain=0.3) as running:
        body = {"prompt": "a", "response_format": {"type": "regex", "regex": "a?" * 10_000}}
        calls = [Connection(running.address, "POST", "/v1/completions", body) for _ in range(8)]
        while not re.search(r"num_requests_waiting [1-7]\.0", Connection(running.address, "GET", "/metrics").rest()):
            pass
        running.send_signal(signal.SIGTERM)
        for call in calls:
            assert '"code":"draining"' in call.rest()
        assert running.wait(20) == 0
        assert running.stderr.read() == ""


@pytest.mark.parametrize("stage", ["body", "text", "grammar"])
def test_what_the_engine_has_not_taken_is_refused_when_the_server_drains(monkeypatch, stage):
    """A body that is not whole, a long text that is being encoded, grammars that compile or wait; and what comes then."""
    compiling, begun = Compiling(monkeypatch), threading.Event()
    encode = lambda self, *given: (begun.set(), compiling.told.wait(20), [])[2]

    async def conversation(client):
        if stage == "body":
            calls = [unfinished(client, b" " * 100)]
            await until(calls[0].messages.empty)
        elif stage == "text":
            monkeypatch.setattr(type(BYTES), "encode", encode)
            calls = [client.begin("POST", "/tokenize", {"prompt": "a" * 10_000})]
            await until(begun.is_set)
        else:
            calls = await compiling.begin(client, THREADS + 1)
        client.service.begin_drain()
        answers = [await call.response() for call in calls]
        compiling.told.set()
        return [*answers, await client.post("/tokenize", {"prompt": "a"})]

    for answer in talk(FakeEngine(), conversation):
        assert error_of(answer, 503)["code"] == "draining"


def unfinished(client, content):
    """A request whose body has begun with this."""
    headers = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(10**6)}
    call = Call(client.app, "POST", "/v1/completions", b"", headers)
    call.messages.get_nowait()
    call.messages.put_nowait({"type": "http.request", "body": content, "more_body": True})
    return call


def test_all_bodies_share_a_budget():
    """What is beyond it is refused at once; small bodies need no room in it, and what a client leaves is free again."""
    size = 10**6 // 2
    fit = service.BODIES * 10**6 // (size - SMALL_BODY)

    async def conversation(client):
        bodies = client.service.bodies
        calls = [unfinished(client, b" " * size) for _ in range(fit)]
        await until(lambda: bodies.reserved >= fit * (size - SMALL_BODY))
        refused = [await unfinished(client, b" " * size).response() for _ in range(100)]
        assert bodies.reserved == fit * (size - SMALL_BODY)
        small = await client.complete("a" * 100)
        calls[0].leave()
        await calls[0].response()
        calls.append(unfinished(client, b" " * size))
        for call in calls[1:]:
            call.messages.put_nowait({"type": "http.request", "body": b"x", "more_body": False})
        whole = [await call.response() for call in calls[1:]]
        assert bodies.reserved == 0
        return refused, small, whole

    refused, small, whole = talk(FakeEngine(), conversation, largest_body=10**6)
    assert {error_of(each, 429)["code"] for each in refused} == {"bodies_full"}
    assert refused[0].headers["connection"] == "close"
    assert small.status == 200
    assert {error_of(each, 400)["code"] for each in whole} == {"invalid_json"}


@pytest.mark.parametrize("text", ["[" + "[]," * 400_000 + "1]", '{"a":["' + '","' * 600_000 + '"]}'])
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(monkeypatch, text):
    monkeypatch.setattr(json_body.json, "loads", None)
    with pytest.raises(ApiError, match="more than 262144 strings, commas and brackets"):
        parse_json(text.encode())


@pytest.mark.parametrize(
    "value", [",[{" * 600_000, '"\\,' * 600_000, list(range(200_000))], ids=["text", "quotes", "numbers"]
)
def test_a_long_text_is_one_part(value):
    assert parse_json(bytearray(json.dumps({"prompt": value}), "utf-8")) == {"prompt": value}


def test_a_body_is_text_with_everything_that_json_allows():
    value = {"a": ["\ud800", "\U0001f600\0", 10**30, -0.5, 1e300, True, None, {}]}
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(("\ufeff" + json.dumps(value, ensure_ascii=False)).encode("utf-8", "surrogatepass")) == value


def test_more_messages_than_tokens_are_refused_by_their_number():
    messages = [{"role": "user", "content": "a"}] * 513
    answer = talk(FakeEngine(), lambda client: client.post("/v1/chat/completions", {"messages": messages}))
    assert error_of(answer, 400)["code"] == "context_length_exceeded"
    assert "513 messages exceed the context of 512 tokens" in answer.json["error"]["message"]
