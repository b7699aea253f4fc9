"""Requests that cost much: grammars that compile for ever and large bodies hold up neither other requests nor the end."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import vocabularies
from fakes import BYTES, Call, FakeEngine, saying, talk, until
from test_api import error_of
from test_server import Connection, process

from llama_jax.serving.grammar import Grammars
from llama_jax.serving.http import json_body, service
from llama_jax.serving.http.errors import ApiError
from llama_jax.serving.http.json_body import SMALL_BODY, parse_json
from llama_jax.serving.thread_pool import LOW_NICENESS, DaemonThreadPool
from llama_jax.tokenizers import load_tokenizer

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


def test_grammars_that_compile_hold_up_nothing_else(monkeypatch):
    compiling = Compiling(monkeypatch)

    async def conversation(client):
        calls = await compiling.begin(client, THREADS + WAITING)
        long = "x" * (2 * service.SHORT)
        others = [
            await client.post("/tokenize", {"prompt": long}),
            await client.chat("Hello"),
            await client.complete("a"),
        ]
        assert compiling.begun == THREADS
        compiling.told.set()
        return others, [await call.response() for call in calls]

    others, answers = talk(FakeEngine(says=saying("Hi!")), conversation)
    assert [each.status for each in others] == [200] * 3
    assert len(others[0].json["tokens"]) == 2 * service.SHORT + 1
    assert [each.status for each in answers] == [200] * (THREADS + WAITING)


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


def children(script):
    """The priorities of the processes of a script that this process has started, as differences from its own."""
    if sys.platform != "linux":
        pytest.skip("needs /proc")
    own, found = os.getpriority(os.PRIO_PROCESS, 0), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and script in (folder / "cmdline").read_text():
                found.append(os.getpriority(os.PRIO_PROCESS, int(folder.name)) - own)
    return found


def test_one_process_of_low_priority_compiles_the_grammars_of_completions_and_chats():
    pytest.importorskip("llguidance")

    async def conversation(client):
        constraint = {"response_format": {"type": "regex", "regex": "[a-z]+"}}
        messages = [{"role": "user", "content": "Hello"}]
        answers = [
            await client.post("/v1/completions", {"prompt": "a", **constraint}),
            await client.post("/v1/chat/completions", {"messages": messages, **constraint}),
        ]
        return answers, children("grammar_check.py")

    answers, found = talk(FakeEngine(says=saying("hi")), conversation)
    assert [answer.status for answer in answers] == [200, 200]
    assert found == [10]


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux alone")
def test_only_threads_that_are_to_wait_have_a_low_priority():
    """Not those of the start, whose priority XLA's own threads have."""

    def priority():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert DaemonThreadPool("as others", 1).submit(priority).result() == priority()
    assert DaemonThreadPool("low", 1, niceness=LOW_NICENESS).submit(priority).result() == min(priority() + LOW_NICENESS, 19)


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


@pytest.mark.parametrize(("cores", "at_once"), [(2, 1), (64, service.LONG_THREADS)])
def test_long_texts_leave_the_engine_most_of_the_cores(monkeypatch, cores, at_once):
    told, begun = threading.Event(), []
    encode = lambda self, *given: (begun.append(given), told.wait(20), [])[2]
    monkeypatch.setattr(type(BYTES), "encode", encode)
    monkeypatch.setattr(service.os, "cpu_count", lambda: cores)

    async def conversation(client):
        calls = [client.begin("POST", "/tokenize", {"prompt": "a" * 2 * SMALL_BODY}) for _ in range(5)]
        await until(lambda: len(begun) >= at_once and client.service._long_texts.waiting >= 5 - at_once)
        found = len(begun)
        told.set()
        return found, [await call.response() for call in calls]

    found, answers = talk(FakeEngine(), conversation)
    assert found == at_once
    assert {answer.status for answer in answers} == {200}


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


def test_a_body_counts_until_it_is_parsed_although_its_client_has_left(monkeypatch):
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setattr(service, "parse_json", lambda body: (begun.set(), go.wait(20), {})[2])

    async def conversation(client):
        call = client.begin("POST", "/v1/completions", {"prompt": "a" * 2 * SMALL_BODY})
        await until(begun.is_set)
        call.leave()
        for _ in range(100):
            await asyncio.sleep(0)
        held = client.service.bodies.reserved
        go.set()
        await call.response()
        return held, client.service.bodies.reserved

    held, after = talk(FakeEngine(), conversation)
    assert held > 0
    assert after == 0


@pytest.mark.parametrize("size", [100, 2 * SMALL_BODY])
def test_large_bodies_are_parsed_in_a_thread(monkeypatch, size):
    """Together with their check by the schema, which is Python."""
    threads, parse = [], json_body.parse_json
    monkeypatch.setattr(service, "parse_json", lambda body: (threads.append(threading.current_thread()), parse(body))[1])
    answer = talk(FakeEngine(), lambda client: client.post("/tokenize", {"prompt": "a" * size}))
    assert [thread is threading.main_thread() for thread in threads] == [size < SMALL_BODY]
    assert answer.json == {"count": size + 1, "max_model_len": 512, "tokens": BYTES.encode("a" * size)}


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[]," * 400_000 + "1]",
        "{" + ",".join(f'"{i}":1' for i in range(300_000)) + "}",
        '{"a":["' + '","' * 600_000 + '"]}',
        '["\\\\",' + "[]," * 400_000 + "1]",
    ],
)
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(monkeypatch, text):
    monkeypatch.setattr(json_body.json, "loads", None)
    with pytest.raises(ApiError, match="more than 262144 strings, commas and brackets"):
        parse_json(text.encode())


@pytest.mark.parametrize(
    "value", [",[{" * 600_000, '"\\,' * 600_000, list(range(200_000))], ids=["text", "quotes", "numbers"]
)
def test_a_long_text_is_one_part(value):
    assert parse_json(bytearray(json.dumps({"prompt": value}), "utf-8")) == {"prompt": value}


@pytest.mark.parametrize(
    ("content", "said", "code"),
    [
        (b'{"prompt": "a"', "the body is not JSON: ", "invalid_json"),
        (b'{"prompt": NaN}', "the body is not JSON: NaN is not a number in JSON", "invalid_json"),
        (b"\xff", "the body is not JSON: ", "invalid_json"),
        (b"[" * 100_000, "the body is nested too deeply", None),
        (b"[" + b"[]," * 400_000 + b"1]", "the body has more than 262144 strings", None),
    ],
)
def test_what_is_wrong_with_a_body_is_named(content, said, code):
    with pytest.raises(ApiError) as error:
        parse_json(content)
    assert error.value.status == 400
    assert error.value.message.startswith(said)
    assert error.value.code == code


def test_a_body_is_text_with_everything_that_json_allows():
    value = {"a": ["\ud800", "\U0001f600\0", 10**30, -0.5, 1e300, True, None, {}]}
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(("\ufeff" + json.dumps(value, ensure_ascii=False)).encode("utf-8", "surrogatepass")) == value


def test_more_messages_than_tokens_are_refused_by_their_number():
    messages = [{"role": "user", "content": "a"}] * 513
    answer = talk(FakeEngine(), lambda client: client.post("/v1/chat/completions", {"messages": messages}))
    assert error_of(answer, 400)["code"] == "context_length_exceeded"
    assert "513 messages exceed the context of 512 tokens" in answer.json["error"]["message"]


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path):
    """The tokenizers library holds Python's lock through a single text, if it is asked for one."""
    tokenizer = load_tokenizer(vocabularies.write(tmp_path / "bytes", "bytes"))
    begun, ended, gap = threading.Event(), threading.Event(), 0.0

    def turn():
        nonlocal gap
        last = time.perf_counter()
        while not ended.is_set():
            begun.set()
            gap, last = max(gap, time.perf_counter() - last), time.perf_counter()

    thread = threading.Thread(target=turn)
    thread.start()
    begun.wait()
    at = time.perf_counter()
    found = tokenizer.encode("Hello world " * 100_000)
    seconds = time.perf_counter() - at
    ended.set()
    thread.join()
    assert found == tokenizer.encode("Hello world ") + tokenizer.encode("Hello world ", bos=False) * 99_999
    assert gap < 0.5 * seconds
