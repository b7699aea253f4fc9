"""A server on the loopback that answers as the Hugging Face hub does, for one repository: org/name."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.content, self.ranges, self.fault, self.gate = {}, [], None, None

    def handle_error(self, request, client_address):
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        paths = (
            json.loads(asked)["paths"] if asked.startswith(b"{") else re.findall("paths=([^&]*)", unquote(asked.decode()))
        )
        self.answer([entry for path in paths for entry in self.tree(path.rpartition("/")[0]) if entry["path"] == path])

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/(?:models|datasets)/org/(\w+)(/revision/(\w+))?", path):
            code = {"gated": "GatedRepo", "private": "RepoNotFound"}.get(found[1])
            if code or found[3] == "none":
                return self.refuse(code or "RevisionNotFound", 403 if code == "GatedRepo" else 404)
            return self.answer({"id": f"org/{found[1]}", "sha": COMMIT, "siblings": [], "tags": []})
        if found := re.fullmatch(rf"/api/(?:models/org/name|datasets/org/texts)/tree/{COMMIT}/?(.*)", path):
            recursive = parse_qs(urlsplit(self.path).query).get("recursive", [""])[0].lower() in ("true", "1")
            listed = self.tree(found[1], recursive=recursive)
            return self.answer(listed) if listed else self.refuse("EntryNotFound", 404)
        if found := re.fullmatch(rf"/(?:org/name|datasets/org/texts)/resolve/{COMMIT}/(.*)", path):
            content = self.server.content[found[1]]
            if self.server.gate is not None:
                return self.refuse(self.server.gate, 403)
            if "Range" not in self.headers:
                return self.send(200, content)
            start, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
            self.server.ranges.append((found[1], start, last + 1))
            if self.server.fault is not None:
                return self.refuse("", self.server.fault)
            return self.send(206, content[start : last + 1])
        return self.refuse("EntryNotFound", 404)

    def answer(self, found):
        self.send(200, json.dumps(found).encode(), "application/json")

    def refuse(self, code, status):
        self.send(status, b"{}", "application/json", code)

    def send(self, status, body, kind="application/octet-stream", code=""):
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), "Content-Type": kind} | ({"X-Error-Code": code} if code else {})
        headers |= {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def tree(self, folder, *, recursive=False):
        content, below = self.server.content, f"{folder}/" if folder else ""
        inside = [key for key in content if key.startswith(below)]
        folders = {below + key[len(below) :].partition("/")[0] for key in inside if "/" in key[len(below) :]}
        files = [
            {"type": "file", "oid": "0" * 40, "size": len(content[key]), "path": key} for key in inside if key not in folders
        ]
        return [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in folders] + [
            file for file in files if recursive or "/" not in file["path"][len(below) :]
        ]


@contextmanager
def serving(monkeypatch, cache):
    """The server, which is the hub for the library as long as the patches last; what is downloaded comes into `cache`."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
        yield server
        server.shutdown()
        thread.join()
