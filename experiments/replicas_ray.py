"""Effects on clients of Ray Serve when a replica is killed, when all are replaced, and when clients disconnect.

    pip install -e ".[serve]" "ray[serve]" httpx
    python experiments/replicas_ray.py [--out FILE.json]

Starts docs/serving/ray_app.py with two replicas of the bundled model on this machine, and closed-loop clients that stream
completions. First one replica receives SIGKILL. When both are running again, the application is redeployed, which replaces
them. Finally all clients disconnect in the middle of their answers. The report has the incomplete answers with reasons, the
seconds until both replicas accepted requests again, and the number of answers that differ for the same prompt and seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import ray
from measuring import versions, write_report
from ray import serve

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "serving"))

PROMPTS = ("Once upon a time", "The old llama", "One day a girl", "In the forest there was")


@dataclass
class Answer:
    """One request, in seconds since the start."""

    begun: float
    ended: float
    outcome: str  # "whole", or the error
    text: str
    key: tuple[int, int]


def replicas() -> list[int]:
    """Process ids of the replicas."""
    children: dict[int, list[int]] = {}
    titles = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                found = re.search(r"^PPid:\s*(\d+)", (folder / "status").read_text(), re.MULTILINE)
                titles[int(folder.name)] = (folder / "cmdline").read_text()
            except OSError:
                continue
            if found is not None:
                children.setdefault(int(found[1]), []).append(int(folder.name))
    mine, left = [], [os.getpid()]
    while left:
        pid = left.pop()
        left += children.get(pid, [])
        mine.append(pid)
    return sorted(pid for pid in mine if titles.get(pid, "").startswith("ray::ServeReplica"))


def running() -> int:
    """Number of replicas that accept requests, according to Ray."""
    deployment = serve.status().applications["default"].deployments["Llama"]
    return deployment.replica_states.get("RUNNING", 0)


class Load:
    """Closed-loop clients, which run as long as `go` is set."""

    def __init__(self, url: str, clients: int, tokens: int) -> None:
        self.answers: list[Answer] = []
        self.started = time.monotonic()
        self.go = True
        self._tokens = tokens
        self._http = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None))
        self._tasks = [asyncio.create_task(self._client(i)) for i in range(clients)]

    @property
    def now(self) -> float:
        return time.monotonic() - self.started

    async def _client(self, number: int) -> None:
        count = number
        while self.go:
            key = (count % len(PROMPTS), count % 16)
            begun = self.now
            outcome, text = await self._ask(*key)
            self.answers.append(Answer(begun, self.now, outcome, text, key))
            count += 1
            if outcome != "whole":
                await asyncio.sleep(0.1)

    async def _ask(self, prompt: int, seed: int) -> tuple[str, str]:
        body = {"model": "llama", "prompt": PROMPTS[prompt], "seed": seed, "max_tokens": self._tokens, "stream": True}
        text, whole = "", False
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    return f"status {response.status_code}", (await response.aread()).decode()
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        whole = True
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return "an error in the stream", text
                        text += event["choices"][0]["text"]
        except httpx.HTTPError as error:
            return f"{type(error).__name__} {'within' if text else 'before'} the text", text
        return ("whole" if whole else "the stream ended early"), text

    async def leave(self) -> None:
        """Disconnect all clients at once."""
        self.go = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def end(self) -> None:
        """Let all clients finish their current requests."""
        self.go = False
        await asyncio.gather(*self._tasks)

    def summary(self, since: float, until: float) -> dict[str, Any]:
        """Summary of the answers that ended within a period."""
        chosen = [answer for answer in self.answers if since <= answer.ended < until]
        return {
            "seconds": round(until - since, 1),
            "answers": len(chosen),
            "answers_per_second": round(len(chosen) / (until - since), 2),
            "outcomes": dict(Counter(answer.outcome for answer in chosen)),
        }

    def differing(self) -> int:
        """Number of complete answers that differ from the first one for the same prompt and seed."""
        first: dict[tuple[int, int], str] = {}
        return sum(
            answer.text != first.setdefault(answer.key, answer.text) for answer in self.answers if answer.outcome == "whole"
        )


async def until(condition: Any, load: Load, what: str, most: float = 300.0) -> float:
    """Wait for a condition; return the seconds."""
    begun = load.now
    while not await asyncio.to_thread(condition):
        if load.now - begun > most:
            raise TimeoutError(what)
        await asyncio.sleep(0.2)
    return round(load.now - begun, 1)


async def rows_in_use(url: str) -> list[float]:
    """Rows in use, as reported by each replica that answered in some tries."""
    found = []
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        for _ in range(8):
            text = (await http.get("/metrics")).text
            found += [float(value) for value in re.findall(r"^llama_jax:num_requests_running (\S+)", text, re.MULTILINE)]
    return found


async def trial(arguments: argparse.Namespace, deploy: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{arguments.port}"
    load = Load(url, arguments.clients, arguments.tokens)
    await asyncio.sleep(arguments.seconds)
    found: dict[str, Any] = {"before": load.summary(arguments.seconds / 2, load.now)}

    killed_at, before = load.now, replicas()
    os.kill(before[0], signal.SIGKILL)
    noticed = await until(lambda: running() < 2, load, "Ray did not notice")
    back = await until(lambda: running() == 2, load, "no replica came back")
    found["killed"] = load.summary(killed_at, load.now) | {
        "noticed_after": noticed,
        "both_running_after": round(noticed + back, 1),
        "answered_by_the_other_meanwhile": sum(a.outcome == "whole" and a.begun > killed_at for a in load.answers),
    }
    settled = load.now
    await asyncio.sleep(arguments.seconds)
    found["after"] = load.summary(settled, load.now)

    again_at, before = load.now, replicas()
    await asyncio.to_thread(deploy)  # replaces the replicas, one after the other
    await until(lambda: not {*before} & {*replicas()} and running() == 2, load, "old replicas are left")
    found["replaced"] = load.summary(again_at, load.now)

    await asyncio.sleep(3)
    await load.leave()
    left_at = load.now
    while any(await rows_in_use(url)) and load.now - left_at < 30:
        await asyncio.sleep(0.1)
    found["rows_free_after_clients_left"] = round(load.now - left_at, 1)
    found["differing"] = load.differing()
    found["whole"] = sum(answer.outcome == "whole" for answer in load.answers)
    if arguments.trace is not None:
        arguments.trace.write_text(json.dumps([asdict(answer) for answer in load.answers]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20, help="seconds between events")
    parser.add_argument("--port", type=int, default=8123, help="port of Ray's proxy")
    parser.add_argument("--temp", help="Ray's folder for sockets and logs")
    parser.add_argument("--trace", type=Path, help="file for every answer")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ["DTYPE"] = "float32"  # in bfloat16 a near tie may be decided differently in a batch of another size
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, sys.path[:1])) + os.pathsep + os.environ.get("PYTHONPATH", "")

    more = {} if arguments.temp is None else {"_temp_dir": arguments.temp}
    ray.init(num_cpus=4, include_dashboard=False, **more)
    serve.start(http_options={"port": arguments.port})
    from ray_app import Llama

    def deploy() -> None:
        serve.run(Llama.bind(), name="default")

    try:
        begun = time.monotonic()
        deploy()
        started = round(time.monotonic() - begun, 1)
        found = {"versions": versions("ray"), "clients": arguments.clients, "tokens": arguments.tokens}
        found["started_after"] = started
        found |= asyncio.run(trial(arguments, deploy))
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps(found, indent=1))
    if arguments.out is not None:
        write_report(arguments.out, found)


if __name__ == "__main__":
    main()
