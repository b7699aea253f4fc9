"""What comes over a socket and is no whole request, or one that other parsers take for less."""

import contextlib
import json
import socket

import pytest
from fakes import FakeEngine, listening, saying, served

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
            for _ in range(10 * connection.LARGEST_HEAD // len(unit)):  # of what comes with a head nothing is counted
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


def test_what_is_not_http_is_told_so(address):
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
