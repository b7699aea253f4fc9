"""The Hugging Face hub, by its own library, before a server that answers as the hub does."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

from llama_jax.storage import locate, view

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENT = {"config.json": b"{}", "model.safetensors": bytes(range(256)), "original/tokenizer.model": b"words"}


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.ranges, self.fault = [], None

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
        self.answer([entry for path in paths for entry in tree(path.rpartition("/")[0]) if entry["path"] == path])

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/(?:models|datasets)/org/(\w+)(/revision/(\w+))?", path):
            code = {"gated": "GatedRepo", "private": "RepoNotFound"}.get(found[1])
            if code or found[3] == "none":
                return self.refuse(code or "RevisionNotFound", 403 if code == "GatedRepo" else 404)
            return self.answer({"id": f"org/{found[1]}", "sha": COMMIT, "siblings": [], "tags": []})
        if found := re.fullmatch(rf"/api/(?:models/org/name|datasets/org/texts)/tree/{COMMIT}/?(.*)", path):
            listed = tree(found[1])
            return self.answer(listed) if listed else self.refuse("EntryNotFound", 404)
        if found := re.fullmatch(rf"/(?:org/name|datasets/org/texts)/resolve/{COMMIT}/(.*)", path):
            content = CONTENT[found[1]]
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
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def tree(folder):
    below = f"{folder}/" if folder else ""
    inside = [key for key in CONTENT if key.startswith(below)]
    folders = {below + key[len(below) :].partition("/")[0] for key in inside if "/" in key[len(below) :]}
    files = [
        {"type": "file", "oid": "0" * 40, "size": len(CONTENT[key]), "path": key} for key in inside if key not in folders
    ]
    return [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in folders] + [
        file for file in files if "/" not in file["path"][len(below) :]
    ]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    monkeypatch.setattr(view, "WAITS", (0.0,))
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
        yield server
        server.shutdown()
        thread.join()


def test_a_repository_is_read_by_ranges_of_one_commit(hub):
    folder = locate("hf://org/name")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "original"]
    assert (folder / "original").is_dir()
    assert (folder / "original/tokenizer.model").is_file()
    assert not (folder / "tokenizer.json").exists()
    weights = locate("hf://org/name@main/model.safetensors")
    assert weights.is_file()
    assert weights.stat().st_size == 256
    with weights.open("rb", buffering=0) as file:
        file.seek(100)
        assert file.read(8) == CONTENT["model.safetensors"][100:108]
    assert hub.ranges == [("model.safetensors", 100, 108)]
    assert not locate("hf://org/name/none").exists()


def test_what_the_hub_has_in_its_cache_is_read_there(hub, tmp_path):
    there = tmp_path / "cache/models--org--name/snapshots" / COMMIT
    there.mkdir(parents=True)
    (there / "model.safetensors").write_bytes(CONTENT["model.safetensors"])
    with (locate("hf://org/name") / "model.safetensors").open() as file:
        assert file.read() == CONTENT["model.safetensors"]
    assert hub.ranges == []


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("hf://org/gated", PermissionError, "accept them on its page, and log in with `hf auth login`"),
        ("hf://org/private", PermissionError, "no such repository, or it is private"),
        ("hf://org/name@none", FileNotFoundError, "no such revision"),
    ],
)
def test_what_may_not_be_read(hub, url, kind, message):
    with pytest.raises(kind, match=message) as named:
        locate(url).exists()
    assert named.value.filename == url


def test_a_hub_that_fails_is_named(hub):
    hub.fault = 500
    with pytest.raises(OSError, match="no whole answer in 2 tries, the last: the hub answers 500") as named:
        (locate("hf://org/name") / "model.safetensors").open().read()
    assert named.value.filename == "hf://org/name/model.safetensors"
    hub.fault = 403
    with pytest.raises(PermissionError, match=r"the hub does not allow it \(403\)"):
        (locate("hf://org/name") / "model.safetensors").open().read()


def test_a_repository_of_data(hub):
    found = locate("hf://datasets/org/texts/config.json")
    assert (found.view.root, found.key) == ("hf://datasets/org/texts", "config.json")
    with found.open() as file:
        assert file.read() == CONTENT["config.json"]
    assert found.view.look("config.json").version == COMMIT
    assert {path.name for path in found.parent.iterdir()} == {"config.json", "model.safetensors", "original"}
