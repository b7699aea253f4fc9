"""What comes over a socket and is no whole request, or one that other parsers take for less."""

import contextlib
import itertools
import json
import socket
import threading

import pytest
from fakes import FakeEngine, ids, listening, saying, served

from llama_jax.serving.http import connection

OFFER = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
BODY = json.dumps({"prompt": "a", "max_tokens": 9}).encode()


@pytest.fixture(scope="module")
def address():
    with listening(FakeEngine(says=saying("Hi!")), served()) as found:
        yield found.removeprefix("http://").split(":")


@contextlib.contextmanager
def connected(address):
    with socket.create_connection((address[0], int(address[1])), timeout=20) as found:
        yield found


def head(more=b"", method=b"POST /v1/completions"):
    return method + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + more


def answer(found):
    """The status and the body of the next answer on a connection."""
    said = b""
    while b"\r\n\r\n" not in said:
        part = found.recv(1)
        assert part
        said += part
    length = next(int(line[15:]) for line in said.lower().splitlines() if line.startswith(b"content-length:"))
    body = b""
    while len(body) < length:
        body += found.recv(length - len(body))
    return int(said.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    ("begin", "unit"),
    [
        (b"GET /", b"a" * 4096),
        (head() + b"X: ", b"a" * 4096),
        (head(), b"X: a\r\n" * 500),
        (b"", b"\r\n" * 2000),
        (head() + b"Transfer-Encoding: chunked\r\n\r\n2;", b"a" * 4096),
        (head() + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: ", b"a" * 4096),
    ],
)
def test_a_head_without_an_end_is_not_kept(address, begin, unit):
    with connected(address) as found:
        found.sendall(begin)
        with contextlib.suppress(ConnectionError):  # what is sent to a connection that has ended
            for _ in range(10 * connection.MAX_HEAD_BYTES // len(unit)):  # of what comes with a head nothing is counted
                found.sendall(unit)
            said = found.recv(100)
            assert not said or said.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
            while said:
                said = found.recv(1000)


def test_a_head_that_is_too_slow(address, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    with connected(address) as found:
        found.sendall(b"GET /health HTTP/1.1\r\n")
        status, body = answer(found)
        assert (status, body["error"]["type"]) == (408, "invalid_request_error")
        assert found.recv(1) == b""


def test_what_is_not_http_gets_a_400(address):
    with connected(address) as found:
        found.sendall(b"\x16\x03\x01\x00\xa5")
        status, body = answer(found)
        assert (status, body["error"]["message"]) == (400, "the request is not HTTP")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_that_offers_another_protocol_keeps_its_body(address, chunked):
    """And so does what follows on the connection, whole or in pieces."""
    framing, body = b"Content-Length: %d\r\n\r\n" % len(BODY), BODY
    if chunked:
        framing, body = b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    with connected(address) as found:
        for more in (OFFER, b"", OFFER):
            found.sendall(head(more + framing) + body)
            assert answer(found)[1]["choices"][0]["text"] == "Hi!"
        found.sendall(head(OFFER + framing))
        found.sendall(body[:10])
        found.sendall(body[10:] + head(OFFER, b"GET /health") + b"\r\n" + head(OFFER + framing) + body)
        assert [answer(found)[0] for _ in range(3)] == [200] * 3


def completion(**fields):
    body = json.dumps({"prompt": "a", "max_tokens": 10**8, "stream": True} | fields).encode()
    return head(b"Content-Length: %d\r\n\r\n" % len(body)) + body


CHUNKED = head(b"Transfer-Encoding: chunked\r\n\r\n")
HEALTH = head(method=b"GET /health") + b"\r\n"


@pytest.mark.parametrize(
    ("sent", "before"),
    [
        (CHUNKED + b"zz\r\n", []),
        (CHUNKED + b"2\r\n{}\r\nzz\r\n", []),
        (CHUNKED + b"2\r\n{}zz", []),
        (HEALTH + b"\0 no request", [200]),
        (head(b"Content-Length: %d\r\n\r\n" % len(BODY)) + BODY + b"GET\0\r\n", [200]),
        (HEALTH + CHUNKED + b"zz\r\n", [200]),
        (HEALTH + HEALTH + head(OFFER + b"Content-Length: 2\r\n\r\n") + b"{}" + b"\0", [200, 200, 400]),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_unreadable_requests_are_refused_after_readable_ones(address, sent, before, at_once):
    """Every request gets its response, in order, and then the rest a 400."""
    with connected(address) as found:
        for part in [sent] if at_once else [sent[:-3], sent[-3:]]:
            found.sendall(part)
        assert [answer(found)[0] for _ in before] == before
        status, body = answer(found)
        assert (status, body["error"]["message"]) == (400, "the request is not HTTP")
        assert found.recv(1) == b""


def test_a_client_that_goes_on_sending_gets_its_refusal(address):
    with connected(address) as found:
        found.sendall(b"\0 no request")
        found.recv(1, socket.MSG_PEEK)  # the response is here, and nothing has read it
        for _ in range(10):
            found.sendall(b"x" * 10_000)
        assert answer(found)[0] == 400
        assert found.recv(1) == b""


def test_of_many_requests_in_a_row_few_are_parsed_before_responses(monkeypatch):
    """Parsing them all would hold up other clients: a quick request is answered among them."""
    began, parsed = connection.Connection.on_message_begin, []
    monkeypatch.setattr(connection.Connection, "on_message_begin", lambda self: (parsed.append(self), began(self)))
    engine = FakeEngine(says=lambda request: itertools.repeat(ids("x")[0]), context=10**9)
    with listening(engine, served()) as address:
        address = address.removeprefix("http://").split(":")
        with connected(address) as found:
            found.sendall(completion() + HEALTH * 2000)
            found.recv(1000)
            with connected(address) as other:
                other.sendall(HEALTH)
                assert answer(other)[0] == 200
            assert len(parsed) * len(HEALTH) < 2 * connection.FEED


def test_a_client_that_leaves_with_further_requests_queued():
    """The request that is being answered ends, although it is not the last that came."""
    engine, ended = FakeEngine(says=lambda request: itertools.repeat(ids("x")[0]), context=10**9), threading.Event()
    end = engine._end
    engine._end = lambda *one: (end(*one), ended.set())
    with listening(engine, served()) as address:
        with connected(address.removeprefix("http://").split(":")) as found:
            found.sendall(completion() * 3)
            found.recv(1000)
        assert ended.wait(20)
    assert engine.finished == {"cancelled": 1}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_never_reads_is_left(monkeypatch, stream):
    """Its connection is closed and its rows are freed, even if the response is complete but still in the server's buffer."""
    made, lost = connection.Connection.connection_made, connection.Connection.connection_lost
    gone, ended = threading.Event(), threading.Event()

    def with_small_buffer(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        made(self, transport)

    def noted(self, exc):
        lost(self, exc)
        gone.set()

    monkeypatch.setattr(connection, "UNREAD_SECONDS", 0.02)
    monkeypatch.setattr(connection.Connection, "connection_made", with_small_buffer)
    monkeypatch.setattr(connection.Connection, "connection_lost", noted)
    engine = FakeEngine(says=lambda request: itertools.repeat(ids("x")[0]), per_iteration=100, context=10**9)
    end = engine._end
    engine._end = lambda *one: (end(*one), ended.set())
    with listening(engine, served()) as address, socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        found.connect(("127.0.0.1", int(address.rpartition(":")[2])))
        found.sendall(completion(max_tokens=10**8 if stream else 30_000, stream=stream))
        assert gone.wait(20)
        assert ended.wait(20)
    assert engine.finished == {"cancelled" if stream else "length": 1}
