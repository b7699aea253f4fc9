"""An object store on the loopback, in S3's language, in which Google's store answers as well.

It counts what it sends, and to whom: a client is told by the name of its access key. `fault` breaks answers.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import pytest

from llama_jax.storage import object_store

BUCKET = "bucket"


class Answer(NamedTuple):
    """What was asked for, by whom, and how many bytes of an object were sent for it."""

    method: str
    key: str
    client: str
    sent: int


class ObjectServer(ThreadingHTTPServer):
    """Objects by key.

    Attributes:
      fault: given the key and how often it was asked for before, what is wrong with the answer to a GET: a status, "reset",
        "cut" (the connection ends within the body), "short" (a smaller range than was asked for), "slow" (of the second half
        of the body a byte comes now and then) or None.
      write_fault: given the key and how many changes there were before, what is wrong with the answer to a PUT: a status;
        "lost" (the object is written, and the connection ends before the answer); or "slow" (none comes, and nothing is
        written).
      changes: what was written and removed, in its order.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.answers: list[Answer] = []
        self.fault: Callable[[str, int], int | str | None] = lambda key, before: None
        self.asked: dict[str, int] = {}
        self.write_fault: Callable[[str, int], int | str | None] = lambda key, changes: None
        self.changes: list[tuple[str, str]] = []
        self.parts: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def upload(self, path: Path, key: str) -> str:
        """A file, or the files in a folder; gives its URL."""
        for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
            name = key if file == path else f"{key}/{file.relative_to(path).as_posix()}"
            self.objects[name] = file.read_bytes()
        return f"s3://{BUCKET}/{key}"

    def sent(self, client: str | None = None) -> int:
        """Bytes of objects that were sent."""
        return sum(answer.sent for answer in self.answers if client in (None, answer.client))

    def handle_error(self, request, client_address) -> None:
        pass  # of connections that clients, or faults, have ended


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ObjectServer

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        _, bucket, *rest = unquote(url.path).split("/", 2)
        key, query = "/".join(rest), parse_qs(url.query)
        if bucket != BUCKET:
            return self._error(404, "NoSuchBucket", "The specified bucket does not exist")
        if "list-type" in query:
            return self._list(query.get("prefix", [""])[0])
        with self.server.lock:
            before = self.server.asked.get(key, 0)
            self.server.asked[key] = before + 1
        fault = self.server.fault(key, before)
        if fault == "reset":
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return self.connection.shutdown(socket.SHUT_RDWR)
        if isinstance(fault, int):
            return self._error(fault, {403: "AccessDenied"}.get(fault, "InternalError"), "It is not for you to know")
        if key not in self.server.objects:
            return self._error(404, "NoSuchKey", "The specified key does not exist.")
        return self._send(key, fault)

    def do_POST(self) -> None:
        key, query, body = self._written()
        if "delete" in query:
            keys = [unescape(each) for each in re.findall("<Key>([^<]*)</Key>", body.decode())]
            for each in keys:
                self.server.objects.pop(each, None)
            self.server.changes += [("DELETE", each) for each in keys]
            deleted = "".join(f"<Deleted><Key>{escape(each)}</Key></Deleted>" for each in keys)
            return self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
        if "uploads" in query:
            self.server.parts[key] = {}
            return self._answer(
                200, b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            )
        whole = b"".join(part for _, part in sorted(self.server.parts.pop(key).items()))
        self.server.objects[key] = whole
        self.server.changes.append(("PARTS", key))
        page = f"<CompleteMultipartUploadResult><ETag>{escape(etag(whole))}</ETag></CompleteMultipartUploadResult>"
        return self._answer(200, page.encode())

    def do_DELETE(self) -> None:
        key, _, _ = self._written()
        self.server.parts.pop(key, None)
        self._answer(204, b"")

    def do_PUT(self) -> None:
        key, query, body = self._written()
        fault = self.server.write_fault(key, len(self.server.changes))
        if isinstance(fault, int):
            return self._error(fault, "InternalError", "It is not for you to know")
        if fault == "slow":
            self.close_connection = True
            with suppress(OSError):
                while self.connection.recv(1):  # until the client ends the connection
                    pass
            return None
        if "partNumber" in query:
            self.server.parts[key][int(query["partNumber"][0])] = body
            return self._answer(200, b"", ETag=etag(body))
        with self.server.lock:
            if key in self.server.objects and self.headers.get("If-None-Match") == "*":
                return self._error(
                    412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold"
                )
            self.server.objects[key] = body
            self.server.changes.append(("PUT", key))
        if fault == "lost":
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        return self._answer(200, b"", ETag=etag(body))

    def _written(self) -> tuple[str, dict[str, list[str]], bytes]:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        return key, parse_qs(url.query, keep_blank_values=True), body

    def _send(self, key: str, fault: int | str | None) -> None:
        content = self.server.objects[key]
        if self.headers.get("If-Match", etag(content)) != etag(content):
            return self._error(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(found[1]), min(int(found[2]) + 1, len(content))) if found else (0, len(content))
        if fault == "short":
            stop = (start + stop) // 2
        body = content[start:stop] if self.command == "GET" else b""
        with self.server.lock:
            self.server.answers.append(Answer(self.command, key, self._client(), len(body)))
        when = formatdate(0, usegmt=True)
        headers = {"ETag": etag(content), "Last-Modified": when, "Content-Length": str(stop - start)}
        if found:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        if fault == "cut" and body:  # an empty body arrives whole, and the client's next request meets a closed connection
            self.close_connection = True
            body = body[: len(body) // 2]
        late = len(body) // 2 if fault == "slow" else len(body)
        self._answer(206 if found else 200, body[:late], **headers)
        for byte in body[late:]:
            time.sleep(0.02)
            self.wfile.write(bytes([byte]))

    def _list(self, prefix: str) -> None:
        with self.server.lock:
            self.server.answers.append(Answer("LIST", prefix, self._client(), 0))
        inside = {key: body for key, body in self.server.objects.items() if key.startswith(prefix)}
        folders = sorted({prefix + key[len(prefix) :].partition("/")[0] for key in inside if "/" in key[len(prefix) :]})
        objects = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-23T07:00:00.000Z</LastModified>"
            f"<ETag>{escape(etag(body))}</ETag><Size>{len(body)}</Size></Contents>"
            for key, body in sorted(inside.items())
            if "/" not in key[len(prefix) :]
        )
        prefixes = "".join(f"<CommonPrefixes><Prefix>{escape(each)}/</Prefix></CommonPrefixes>" for each in folders)
        page = f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>{objects}{prefixes}"
        return self._answer(200, f"<ListBucketResult>{page}</ListBucketResult>".encode())

    def _client(self) -> str:
        found = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        return found[1] if found else ""

    def _error(self, status: int, code: str, message: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


@contextmanager
def serving() -> Iterator[ObjectServer]:
    """A server that answers meanwhile."""
    with ObjectServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def google_key(server: ObjectServer) -> str:
    """What tells obstore of it as of Google's store, for a file that GOOGLE_SERVICE_ACCOUNT names."""
    names = ("client_email", "private_key", "private_key_id")
    return json.dumps({"gcs_base_url": server.url, "disable_oauth": True} | dict.fromkeys(names, ""))


def environment(server: ObjectServer, client: str = "someone") -> dict[str, str]:
    """What tells obstore of it."""
    return {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": client,
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


@contextmanager
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """An empty store, which s3:// leads to from this process; it is asked again at once, three times."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ALLOW_HTTP", "AWS_SKIP_SIGNATURE"):
        monkeypatch.delenv(name, raising=False)
    quick = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2)}
    monkeypatch.setattr(object_store, "RETRY_CONFIG", {"max_retries": 3, "backoff": quick})
    with serving() as server:
        for name, value in environment(server).items():
            monkeypatch.setenv(name, value)
        yield server
