"""How a server begins and ends: signals, a failing engine, an address that is taken."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import run_here

from llama_jax.errors import UserError
from llama_jax.serving.http.server import address_of, listen

SCRIPT = Path(__file__).with_name("served_process.py")


@contextmanager
def process(**settings):
    command = [sys.executable, str(SCRIPT), json.dumps(settings)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as running:
        try:
            running.address = running.stdout.readline().strip().removeprefix("http://")
            yield running
        finally:
            running.kill()


def go_on(running):
    running.stdin.write("go on\n")
    running.stdin.flush()


class Connection:
    """A request whose answer is read as it comes."""

    def __init__(self, address, method, path, body=None):
        host, port = address.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        self.text = ""

    def until(self, wanted):
        while wanted not in self.text:
            more = self.socket.recv(1 << 16).decode()
            assert more, f"it ended: {self.text}"
            self.text += more
        return self.text

    def rest(self):
        while more := self.socket.recv(1 << 16).decode():
            self.text += more
        self.socket.close()
        return self.text

    @property
    def status(self):
        return int(self.until("\r\n").split(" ")[1])


def completion(address, prompt, **more):
    return Connection(address, "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 10**8, **more})


def ready(address):
    """The status of `/ready`, and what it says."""
    found = Connection(address, "GET", "/ready")
    return found.status, found.rest()


def until_draining(address):
    while ready(address)[0] == 200:
        pass
    status, text = ready(address)
    assert status == 503
    assert "shutting down" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_lets_running_requests_end(number):
    with process() as running:
        assert ready(running.address)[0] == 200
        stream = completion(running.address, "wait", stream=True)
        stream.until("200 OK")
        running.send_signal(number)
        until_draining(running.address)
        refused = completion(running.address, "other")
        assert refused.status == 503
        assert "draining" in refused.rest()
        go_on(running)
        assert stream.rest().rstrip().endswith("data: [DONE]\n\n\r\n0")
        assert running.wait(20) == 0
        ended, left_out = running.stdout.read().split()
        assert ended == "ended"
        assert int(left_out) > 10_000  # a full collection while it served looked at none of what there was before


def test_until_it_is_ready_it_says_how_far_it_is():
    with process(starts="at a line") as running:

        def answer(path, body=None):
            found = Connection(running.address, "POST" if body else "GET", path, body)
            return found.status, found.rest()

        assert answer("/health")[0] == 200
        status, text = answer("/ready")
        assert status == 503
        assert '"code":"not_ready"' in text
        assert re.search(r"the server is compiling programs, 3 of 7, about \d+ s left", text)
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/models", None), ("/nothing", None)):
            status, text = answer(path, body)
            assert status == 503
            assert re.search(r"\r\nretry-after: [1-9]\d*\r\n.*\r\n\r\n.*3 of 7.*starting", text, re.DOTALL)
        status, text = answer("/")
        assert status == 503
        assert '<main id="log"' in text  # the page, which asks /ready
        before = 'llama_jax:http_responses_total{path="/health",status="200"} 1.0'
        assert before in answer("/metrics")[1]
        go_on(running)
        assert running.stdout.readline().strip().removeprefix("http://") == running.address
        assert answer("/ready")[0] == 200
        assert answer("/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200
        assert before in answer("/metrics")[1]


def test_a_start_that_fails_ends_the_process():
    with process(starts="never") as running:
        assert ready(running.address)[0] == 503
        go_on(running)
        assert running.wait(20) == 1
        assert "RuntimeError: there is no model" in running.stderr.read()


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, -signal.SIGTERM), pytest.param(signal.SIGINT, -signal.SIGINT, marks=pytest.mark.slow)],
)
def test_a_signal_ends_a_start_at_once(number, status):
    with process(starts="at a line") as running:
        assert ready(running.address)[0] == 503
        running.send_signal(number)
        assert running.wait(20) == status


def test_a_second_signal_ends_at_once():
    with process() as running:
        stream = completion(running.address, "wait", stream=True)
        stream.until("200 OK")
        running.send_signal(signal.SIGTERM)
        until_draining(running.address)
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 128 + signal.SIGTERM
        stream.rest()


def ends_soon(running):
    """The exit status after SIGTERM. The bound is generous: it takes 1.2 s and the time for draining."""
    begun = time.monotonic()
    running.send_signal(signal.SIGTERM)
    found = running.wait(20)
    assert time.monotonic() - begun < 4
    return found


def test_clients_that_do_not_read_do_not_hold_up_the_end():
    with process(drain=0.1, buffer=4096, per_iteration=64) as running:
        streams = [completion(running.address, "for ever", stream=True) for _ in range(3)]
        for stream in streams:
            stream.until("begun")
        while generated(running.address) < 190_000:  # much more than the buffers between server and clients hold
            pass
        assert ends_soon(running) == 0
        for stream in streams:
            stream.socket.close()


def generated(address):
    """How many tokens the engine has made."""
    text = Connection(address, "GET", "/metrics").rest()
    return float(text.partition("\nllama_jax:generation_tokens_total ")[2].split()[0])


def test_an_engine_in_a_long_step_does_not_hold_up_the_end():
    with process(drain=0.1) as running:
        stream = completion(running.address, "stuck", stream=True)
        stream.until("begun")
        assert ends_soon(running) == 0
        assert '"code":"draining"' in stream.rest()


def test_an_engine_that_fails_ends_the_process_with_its_reason():
    with process(fail_at=3) as running:
        answer = completion(running.address, "for ever")
        assert answer.status == 500
        assert "a device is on fire" in answer.rest()
        assert running.wait(20) == 1
        assert "RuntimeError: a device is on fire" in running.stderr.read()


def test_an_address_that_is_taken():
    with listen("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        assert address_of(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1 port {port} .*another --port"):
            listen("127.0.0.1", port)
    with pytest.raises(UserError, match=r"cannot listen on no\.such\.host"):
        listen("no.such.host.invalid", 0)


def test_the_command_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("llama_jax.cli.serve.REQUIRED_MODULES", ("starlette", "no_such_library"))
    ended = run_here("serve")
    assert ended.returncode == 2
    assert ended.stderr == 'llama-jax: error: serving needs no_such_library; install it with pip install -e ".[serve]"\n'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve --port 70000", "port=70000 must be at least 0 and at most 65535"),
        ("serve --port 0 --api-key ''", "the API key is empty"),
        ("serve --port 0 --timeout nan", "timeout=nan must be"),
        ("serve --port 0 --most-choices 0", "most_choices=0"),
        ("serve --port 0 --rows 0", "rows=0"),
        ("serve --port 0 --context 100000", "context=100000 must be at most"),
        ("serve --port 0 --format llama3", "the format llama3 needs the token"),
        ("serve --port 0 --mesh data=2", "mesh data=2"),
        ("batch PROMPTS OUT --rows 0", "rows=0 must be at least 1"),
        ("batch PROMPTS OUT --max-new-tokens 0", "max_new_tokens"),
        ("batch PROMPTS OUT --stop ''", "--stop '' must be a text"),
        ("batch PROMPTS OUT --prefix-cache -1", "prefix_cache=-1 must be at least 0"),
        ("batch PROMPTS PIPE", "pipe.jsonl is not a file; choose a file to write"),
        ("batch PROMPTS /dev/zero", "/dev/zero is not a file; choose a file to write"),
        ("batch prompts.txt OUT", "is not a .jsonl"),
        ("batch none.jsonl OUT", "cannot be read"),
    ],
)
def test_invalid_options(tmp_path, line, said):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once"}\n')
    os.mkfifo(tmp_path / "pipe.jsonl")
    names = {name: str(tmp_path / f"{name.lower()}.jsonl") for name in ("PROMPTS", "OUT", "PIPE")}
    ended = run_here(*(names.get(word, word) for word in shlex.split(line)))
    assert ended.returncode == 2
    assert said in ended.stderr.splitlines()[-1]
    assert not (tmp_path / "out.jsonl").exists()


def test_what_the_memory_is_too_small_for_is_refused_before_it_is_loaded(monkeypatch):
    monkeypatch.setattr("llama_jax.serving.options.free_memory", lambda device: 3 * 10**7)
    monkeypatch.setattr("llama_jax.load", None)
    ended = run_here("serve", "--port", "0", "--prefix-cache", "0", "--rows", "4")
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 2
    assert last.startswith("llama-jax: error: the memory is too small: weights 5, keys and values ")
    assert last.endswith("; 30 MB are free; choose fewer bits (--quantize q4_0), or a smaller model")
