"""What the experiments with a server share: its process, requests as bytes, and requests whose answers are known."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from measuring import ROOT

READY_SECONDS = 600
LLAMA_JAX_SERVE = (sys.executable, "-c", "from llama_jax.cli import main; main()", "serve")


class Server(NamedTuple):
    """A running server: its process, the seconds until it was ready, and what it printed."""

    process: subprocess.Popen[bytes]
    seconds: float
    log: IO[bytes]

    def printed(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], port: int, path: str = "/ready") -> Iterator[Server]:
    """Start a server; enter the context when it is ready."""
    began = time.perf_counter()
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # also if the package is not installed
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": paths})
        server = Server(process, 0.0, log)
        try:
            while asyncio.run(status_of(port, path)) != 200:
                if process.poll() is not None or time.perf_counter() - began > READY_SECONDS:
                    raise SystemExit(f"the server is not ready (exit status {process.poll()}):\n{server.printed()[-4000:]}")
                time.sleep(0.1)
            yield server._replace(seconds=time.perf_counter() - began)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


async def get(port: int, path: str) -> bytes:
    """The response to a GET request, with its head; empty if nothing listens."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        response = await reader.read()
        writer.close()
        return response
    except OSError:
        return b""


def status(response: bytes) -> int:
    """The status of a response; 0 if it is empty."""
    return int(response.split(b" ", 2)[1]) if response else 0


async def status_of(port: int, path: str) -> int:
    return status(await get(port, path))


def post(path: str, content: bytes, length: int | None = None) -> bytes:
    """A POST request as bytes; `length` is said to be the content's."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content) if length is None else length}\r\n\r\n".encode() + content


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@dataclass(frozen=True)
class KnownRequest:
    """The body of a request for a completion, and its answer."""

    body: dict[str, Any]
    text: str
    tokens: int


def known_requests(model: Path | None, count: int) -> list[KnownRequest]:
    """Requests of all lengths and settings, many with common prefixes, with the answers of `generate` for each alone."""
    import llama_jax

    config, params, tokenizer = llama_jax.load(model, dtype="float32")
    rng = random.Random(0)
    openings = [tokenizer.encode(text) for text in ("Once upon a time", "One day, a boy", "The big dog", "Lily and Tom")]
    sampling = llama_jax.Sampling(temperature=1.0, seed=range(4))
    stories = llama_jax.generate(config, params, openings, max_new_tokens=150, sampling=sampling)
    texts = [[*prompt, *story.tokens] for prompt, story in zip(openings, stories, strict=True)]
    prompts = [text[: rng.randrange(1, len(text))] for text in rng.choices(texts, k=count)]
    limits = [rng.randrange(1, 80) for _ in prompts]
    choices: dict[str, list[Any]] = {
        "temperature": [rng.choice([0.0, 0.0, 0.7, 1.0]) for _ in prompts],
        "top_p": [rng.choice([1.0, 0.9]) for _ in prompts],
        "top_k": [rng.choice([0, 40]) for _ in prompts],
        "repetition_penalty": [rng.choice([1.0, 1.1]) for _ in prompts],
        "seed": [rng.randrange(2**32) for _ in prompts],
    }
    sampling, stops = llama_jax.Sampling(**choices), tokenizer.stop_ids
    answers = llama_jax.generate(config, params, prompts, max_new_tokens=limits, sampling=sampling, stop_tokens=stops)
    requests = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        body = {"prompt": prompt, "max_tokens": limits[i]} | {name: values[i] for name, values in choices.items()}
        body |= {"stream": True, "stream_options": {"include_usage": True}} if rng.random() < 0.8 else {"logprobs": 3}
        text = tokenizer.decode([*prompt, *answer.tokens])[len(tokenizer.decode(prompt)) :]
        requests.append(KnownRequest(body, text, len(answer.tokens) + (answer.finish_reason == "stop")))
    return requests


def read_answer(response: bytes) -> tuple[str, int]:
    """The text and the number of tokens of a completion, streamed or not."""
    head, _, content = response.partition(b"\r\n\r\n")
    if b"chunked" in head.lower():
        content = join_chunks(content)
    if content.startswith(b"{"):
        answer = json.loads(content)
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
    events = [json.loads(line[6:]) for line in content.splitlines() if line.startswith(b"data: {")]
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    return text, next((event["usage"]["completion_tokens"] for event in events if event.get("usage")), -1)


def join_chunks(content: bytes) -> bytes:
    """A body without HTTP's chunk sizes."""
    parts = []
    while content:
        size, _, content = content.partition(b"\r\n")
        parts.append(content[: int(size, 16)])
        content = content[int(size, 16) + 2 :]
    return b"".join(parts)
