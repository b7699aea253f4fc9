"""What comes over a socket and is no whole request, or one that other parsers take for less."""

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from fakes import FakeEngine, ids, listening, saying, served

from llama_jax.serving.http import server

OFFER = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
BODY = json.dumps({"prompt": "a", "max_tokens": 9}).encode()


@pytest.fixture(scope="module")
def address():
    with listening(FakeEngine(says=saying("Hi!")), served()) as url:
        yield url


@contextlib.contextmanager
def connected(url):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        yield client


def head(more=b"", method=b"POST /v1/completions"):
    return method + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + more


def answer(client):
    """The status and the body of the next answer on a connection."""
    said = b""
    while b"\r\n\r\n" not in said:
        part = client.recv(1)
        assert part
        said += part
    length = next((int(line[15:]) for line in said.lower().splitlines() if line.startswith(b"content-length:")), None)
    body = b""
    while (part := client.recv(9999 if length is None else length - len(body))) and length != len(body := body + part):
        pass
    return int(said.split()[1]), body


@pytest.mark.parametrize(
    ("begin", "unit"),
    [
        (b"GET /", b"a" * 4096),
        (head() + b"X: ", b"a" * 4096),
        (head(), b"X: a\r\n" * 500),
        (head() + b"Transfer-Encoding: chunked\r\n\r\n2;", b"a" * 4096),
        (head() + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: ", b"a" * 4096),
    ],
)
def test_a_head_without_an_end_is_not_kept(address, begin, unit):
    with connected(address) as client:
        client.sendall(begin)
        with contextlib.suppress(ConnectionError):  # what is sent to a connection that has ended
            for _ in range(1 << 20):
                client.sendall(unit)


def drip(client):
    """Send bytes slowly until the connection is closed."""
    for _ in range(2000):
        try:
            client.sendall(b"a")
        except ConnectionError:
            return
        time.sleep(0.01)
    raise AssertionError("still open")


@pytest.mark.parametrize("begin", [b"", b"GET /health HTTP/1.1\r\n", head(b"\r\n", b"GET /health") + b"GET /"])
def test_a_head_that_is_too_slow(address, monkeypatch, begin):
    """Also one that arrives byte by byte."""
    monkeypatch.setattr(server, "STALLED_SECONDS", 0.2)
    with connected(address) as client:
        client.sendall(begin)
        if begin:
            drip(client)
        else:
            assert client.recv(1) == b""


def test_a_body_that_goes_on_after_its_response(address, monkeypatch):
    monkeypatch.setattr(server, "STALLED_SECONDS", 0.2)
    with connected(address) as client:
        client.sendall(head(b"Content-Length: 1000000\r\n\r\n", b"POST /nowhere"))
        assert answer(client)[0] == 404
        drip(client)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_that_offers_another_protocol_keeps_its_body(address, chunked):
    """And so does what follows on the connection, whole or in pieces."""
    framing, body = b"Content-Length: %d\r\n\r\n" % len(BODY), BODY
    if chunked:
        framing, body = b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    with connected(address) as client:
        for more in (OFFER, b"", OFFER):
            client.sendall(head(more + framing) + body)
            assert json.loads(answer(client)[1])["choices"][0]["text"] == "Hi!"
        client.sendall(head(OFFER + framing))
        client.sendall(body[:10])
        client.sendall(body[10:] + head(OFFER, b"GET /health") + b"\r\n" + head(OFFER + framing) + body)
        assert [answer(client)[0] for _ in range(3)] == [200] * 3


def completion(**fields):
    body = json.dumps({"prompt": "a", "max_tokens": 10**8, "stream": True} | fields).encode()
    return head(b"Content-Length: %d\r\n\r\n" % len(body)) + body


CHUNKED = head(b"Transfer-Encoding: chunked\r\n\r\n")
HEALTH = head(method=b"GET /health") + b"\r\n"


@pytest.mark.parametrize(
    ("sent", "before"),
    [
        (b"\x16\x03\r\n\r\n", []),
        (CHUNKED + b"zz\r\n", []),
        (CHUNKED + b"2\r\n{}\r\nzz\r\n", []),
        (CHUNKED + b"2\r\n{}zz", []),
        (HEALTH + b"\0\r\n\r\n", [200]),
        (head(b"Content-Length: %d\r\n\r\n" % len(BODY)) + BODY + b"GET\0\r\n\r\n", [200]),
        (HEALTH + CHUNKED + b"zz\r\n", [200]),
        (HEALTH + HEALTH + head(OFFER + b"Content-Length: 2\r\n\r\n") + b"{}" + b"\0\r\n\r\n", [200, 200, 400]),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_unreadable_requests_are_refused_after_readable_ones(address, sent, before, at_once):
    """Every request gets its response, in order, and then the rest a 400."""
    with connected(address) as client:
        for part in [sent] if at_once else [sent[:-6], sent[-6:]]:
            client.sendall(part)
        assert [answer(client)[0] for _ in before] == before
        status, body = answer(client)
        assert (status, b"Invalid HTTP request received." in body) == (400, True)
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""


@pytest.mark.parametrize("seconds", [0, 0.1])
@pytest.mark.parametrize("more", [b"X: y\r\n", b"Content-Type: text/plain\r\n", b"Host: b\r\n"])
def test_unreadable_bodies_of_refused_requests(address, caplog, more, seconds):
    with connected(address) as client:
        client.sendall(head(more + b"Transfer-Encoding: chunked\r\n\r\n") + b"zz\r\n" * (not seconds))
        time.sleep(seconds)
        with contextlib.suppress(ConnectionError):
            client.sendall(b"zz\r\n" * 10)
            assert client.recv(20).startswith(b"HTTP/1.1 4")
            client.sendall(b"zz\r\n" * 10)
            while client.recv(1000):
                pass
    assert not caplog.records


def test_many_offers_of_another_protocol_in_a_row(address):
    with connected(address) as client:
        client.sendall((head(OFFER, b"GET /health") + b"\r\n") * 1100)
        assert {answer(client)[0] for _ in range(1100)} == {200}


def test_requests_that_wait_for_a_response_do_not_delay_other_clients():
    engine = FakeEngine(says=lambda request: itertools.repeat(ids("x")[0]), context=10**9)
    with listening(engine, served()) as address, connected(address) as client:
        client.sendall(completion() + HEALTH * 2000)
        client.recv(1000)
        with connected(address) as other:
            other.sendall(HEALTH)
            assert answer(other)[0] == 200


def test_a_client_that_leaves_with_further_requests_queued():
    """The request that is being answered ends, although it is not the last that came."""
    engine, ended = FakeEngine(says=lambda request: itertools.repeat(ids("x")[0]), context=10**9), threading.Event()
    end = engine._end
    engine._end = lambda *one: (end(*one), ended.set())
    with listening(engine, served()) as address:
        with connected(address) as client:
            client.sendall(completion() * 3)
            client.recv(1000)
        assert ended.wait(20)
    assert engine.finished == {"cancelled": 1}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_never_reads_is_left(monkeypatch, stream):
    """Its connection is closed and its rows are freed, even if the response is complete but still in the server's buffer."""
    monkeypatch.setattr(server, "STALLED_SECONDS", 0.2)
    servers, ended = [], threading.Event()
    monkeypatch.setattr("fakes.Server", lambda app: servers.append(server.Server(app)) or servers[0])

    def listen(host, port):
        listening = server.listen(host, port)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return listening

    monkeypatch.setattr("fakes.listen", listen)
    engine = FakeEngine(says=lambda request: itertools.repeat(ids("x")[0]), per_iteration=100, context=10**9)
    end = engine._end
    engine._end = lambda *one: (end(*one), ended.set())
    with listening(engine, served()) as address, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.connect(("127.0.0.1", int(address.rpartition(":")[2])))
        client.sendall(completion(max_tokens=10**8 if stream else 30_000, stream=stream))
        assert ended.wait(30)
        while servers[0].server_state.connections:
            time.sleep(0.01)
    assert engine.finished == {"cancelled" if stream else "length": 1}


class Connection(SimpleNamespace):
    __hash__ = object.__hash__


def test_only_clients_that_stall_are_left(monkeypatch):
    """Not those that read slowly, or wait for a response."""
    times, aborted = itertools.count(0, 25), []
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=times.__next__))
    found = server.Server(lambda: None)

    def connection(name, is_answered, sizes):
        transport = SimpleNamespace(get_write_buffer_size=sizes.__next__, abort=lambda: aborted.append(name))
        return Connection(transport=transport, cycle=SimpleNamespace(response_complete=is_answered))

    connections = [
        connection("reads", False, itertools.count(900, -100)),
        connection("waits", False, itertools.repeat(0)),
        connection("stalls", False, itertools.repeat(500)),
        connection("idles", True, itertools.repeat(0)),
    ]
    found.server_state.connections = connections
    for _ in range(4):
        assert aborted == []
        asyncio.run(found.on_tick(1))
    assert sorted(aborted) == ["idles", "stalls"]
