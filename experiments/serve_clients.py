"""Test `llama-jax serve` with unmodified third-party clients: their results, and that no response is 5xx.

The bundled model is served in float32, in a separate process. Clients with conflicting requirements are installed
separately; clients without a given location are omitted, which the report states.

    pip install -e ".[dev]"
    (mkdir node && cd node && npm install openai)
    python -m venv guide && guide/bin/pip install guidellm
    python -m venv harness && harness/bin/pip install -e ".[lm-eval]" transformers sentencepiece tenacity aiohttp
    python experiments/serve_clients.py --node node --guidellm guide/bin/guidellm --lm-eval harness/bin/python

  openai         for Python: streamed equals unstreamed, usage counts ids, stop strings are not sent, schemas are followed,
                 errors have the documented types.
  openai (node)  the same with the openai package for Node.
  guidellm       200 requests, 16 at a time; all of them must succeed.
  schemathesis   requests generated from /openapi.json, valid and invalid. Only its check positive_data_acceptance is
                 omitted: it reports a failure if valid but mutually exclusive fields are rejected.
  lm-eval        `local-completions`: log-likelihoods compared with `llama_jax.logits` for the same ids.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from bench_serve import free_port, running
from measuring import cpu_name, settings, versions, write_report

import llama_jax
from llama_jax.formats.loading import bundled

STORY = "Once upon a time there was a little dog. He liked to run and play in the big green park with his friend Tom."
BEGINNINGS = ["Once upon a time", "Lily had a red ball. She", "The café was", "One day, a boy named Tim"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Lily"]}, "age": {"enum": [3, 4, 5]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIKELIHOODS = """
import json, sys
from importlib.metadata import version
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
base, name, tokenizer, pairs = json.load(sys.stdin)
model = LocalCompletionsAPI(
    model=name, base_url=base + "/completions", tokenizer_backend="huggingface", tokenizer=tokenizer, num_concurrent=16
)
asked = [Instance("loglikelihood", {}, tuple(pair), i) for i, pair in enumerate(pairs)]
found = model.loglikelihood(asked)
ids = [model._encode_pair(*pair) for pair in pairs]
print(json.dumps({"version": version("lm-eval"), "found": found, "ids": ids}))
"""
NODE = """
import { readFileSync } from "node:fs";
import OpenAI, { BadRequestError, NotFoundError } from "openai";
const [, base, beginnings] = JSON.parse(process.env.ASKED);
const client = new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0 });
const found = { failed: [], checked: 0 };
const check = (holds, what) => { found.checked++; if (!holds) found.failed.push(what); };
const asked = (prompt, more) => ({ model: "stories", prompt, max_tokens: 40, temperature: 0.8, seed: 7, ...more });
for (const prompt of beginnings) {
  const whole = await client.completions.create(asked(prompt, { logprobs: 2 }));
  let text = "", usage = null, finish = null;
  const stream = await client.completions.create(asked(prompt, { stream: true, stream_options: { include_usage: true } }));
  for await (const chunk of stream) {
    for (const choice of chunk.choices) { text += choice.text; finish = choice.finish_reason ?? finish; }
    usage = chunk.usage ?? usage;
  }
  check(text === whole.choices[0].text && finish === whole.choices[0].finish_reason, `streamed: ${prompt}`);
  check(!text.includes("\\ufffd"), `half a character: ${prompt}`);
  check(usage.completion_tokens === whole.usage.completion_tokens, `usage: ${prompt}`);
  check(whole.usage.completion_tokens === whole.choices[0].logprobs.tokens.length, `usage equals ids: ${prompt}`);
}
const messages = [{ role: "user", content: "Tell me of a dog." }];
const chat = await client.chat.completions.create({ model: "stories", messages, max_tokens: 20, temperature: 0 });
let said = "";
const chunks = { model: "stories", messages, max_tokens: 20, temperature: 0, stream: true };
for await (const chunk of await client.chat.completions.create(chunks)) said += chunk.choices[0]?.delta?.content ?? "";
check(said === chat.choices[0].message.content, "chat: streamed");
const leaving = await client.completions.create(asked("Once", { max_tokens: 400, ignore_eos: true, stream: true }));
for await (const chunk of leaving) { leaving.controller.abort(); break; }
for (const [type, body] of [[BadRequestError, { n: 0 }], [BadRequestError, { bogus: 1 }], [NotFoundError, { model: "x" }]]) {
  try { await client.completions.create(asked("a", body)); check(false, `accepted: ${JSON.stringify(body)}`); }
  catch (error) { check(error instanceof type, `${error}: ${JSON.stringify(body)}`); }
}
found.version = JSON.parse(readFileSync("node_modules/openai/package.json")).version;
console.log(JSON.stringify(found));
"""


@dataclass(frozen=True)
class Arguments:
    """Test a server with third-party clients."""

    node: Path | None = None
    """Folder in which `npm install openai` was run."""
    guidellm: Path | None = None
    """Path of the guidellm program."""
    lm_eval: Path | None = None
    """Python of an environment with lm-eval and the requirements of local-completions."""
    output: Path = Path("experiments/results/serve_clients.json")


class Asked:
    """A server of the bundled model, and the model itself."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.base = f"http://127.0.0.1:{port}/v1"
        self.config, self.params, self.tokenizer = llama_jax.load(dtype="float32")

    def statuses(self) -> dict[str, int]:
        """Number of responses with each status."""
        found: dict[str, int] = {}
        for status, count in re.findall(r'http_responses_total\{.*?status="(\d+)"\} (\S+)', asyncio.run(self._metrics())):
            found[status] = found.get(status, 0) + int(float(count))
        return found

    async def _metrics(self) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        answer = (await reader.read()).decode()
        writer.close()
        return answer


class Checks:
    """Results and failures."""

    def __init__(self) -> None:
        self.checked, self.failed = 0, list[str]()

    def __call__(self, holds: bool, what: str) -> None:
        self.checked += 1
        if not holds:
            self.failed.append(what)

    def found(self, **more: Any) -> dict[str, Any]:
        return {**more, "checked": self.checked, "failed": self.failed}


def by_openai(asked: Asked, arguments: Arguments) -> dict[str, Any]:
    """Check the client for Python."""
    import openai

    client = openai.OpenAI(base_url=asked.base, api_key="none", max_retries=0)
    check = Checks()
    ids = [asked.tokenizer.encode(text) for text in BEGINNINGS]
    prompts: list[Any] = [*BEGINNINGS, *ids, BEGINNINGS, ids]
    for i, prompt in enumerate(prompts):
        several = len(BEGINNINGS) if i >= 2 * len(BEGINNINGS) else 1
        body: dict[str, Any] = {"model": "stories", "prompt": prompt, "max_tokens": 40, "temperature": 0.8, "seed": i}
        body |= {"n": 1 + i % 2, "stop": [" the", "was a"] if i % 3 == 2 else None}
        count = several * (1 + i % 2)
        whole = client.completions.create(**body, logprobs=3)
        texts, ends, usage = [""] * count, [""] * count, None
        for chunk in client.completions.create(**body, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ends[choice.index] = choice.finish_reason or ends[choice.index]
            usage = chunk.usage or usage
        check(texts == [choice.text for choice in whole.choices], f"streamed is unstreamed: {prompt}")
        check(ends == [choice.finish_reason for choice in whole.choices], f"ends: {prompt}")
        check(not any("\ufffd" in text for text in texts), f"half a character: {prompt}")
        check(not any(stop in text for text in texts for stop in body["stop"] or ()), f"a stop text: {prompt}")
        told, streamed = whole.usage, usage
        assert told is not None
        assert streamed is not None
        check(told.completion_tokens == streamed.completion_tokens, f"usage of the stream: {prompt}")
        prompt_ids = sum(map(len, ids)) if several > 1 else len(ids[i % len(ids)])
        check(told.prompt_tokens == prompt_ids, f"prompt_tokens: {prompt}")
        if not body["stop"]:  # tokens of text that is not sent are counted but not listed
            listed = sum(len(choice.logprobs.tokens or []) for choice in whole.choices if choice.logprobs)
            check(told.completion_tokens == listed, f"usage equals ids: {prompt}")
    messages: list[Any] = [{"role": "user", "content": "Tell me of a dog."}]
    create = client.chat.completions.create
    chat = create(model="stories", messages=messages, max_tokens=30, seed=1)
    said = ""
    for part in create(model="stories", messages=messages, max_tokens=30, seed=1, stream=True):
        said += part.choices[0].delta.content or "" if part.choices else ""
    check(said == chat.choices[0].message.content, "chat: streamed is unstreamed")
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    answer = create(model="stories", messages=messages, max_tokens=60, response_format=form).choices[0].message.content
    check(set(json.loads(answer or "null")) == {"name", "age"}, f"the schema: {answer}")
    refused: list[tuple[type[Exception], dict[str, Any]]] = [
        (openai.BadRequestError, {"n": 0}),
        (openai.BadRequestError, {"max_tokens": 10**9}),
        (openai.BadRequestError, {"extra_body": {"bogus": 1}}),
        (openai.NotFoundError, {"model": "x"}),
    ]
    for kind, more in refused:
        try:
            client.completions.create(**({"model": "stories", "prompt": "a"} | more))
            check(False, f"accepted: {more}")
        except openai.APIError as error:
            check(isinstance(error, kind), f"{error!r}: {more}")
    check(client.models.list().data[0].id == "stories", "models")
    return check.found(version=version("openai"))


def by_node(asked: Asked, arguments: Arguments) -> dict[str, Any]:
    """Check the client for Node."""
    import os

    environment = os.environ | {"ASKED": json.dumps(["", asked.base, BEGINNINGS])}
    command = ["node", "--input-type=module", "--eval", NODE]
    found = json.loads(_output(command, cwd=arguments.node, env=environment))
    return found | {"node": _output(["node", "--version"]).strip()}


def by_guidellm(asked: Asked, arguments: Arguments) -> dict[str, Any]:
    """Send 200 prompts, 16 at a time; the server's counters show how they ended."""
    before, check = asked.statuses(), Checks()
    with tempfile.TemporaryDirectory() as folder:
        texts = [" ".join(STORY.split()[: 4 + i % 20]) for i in range(200)]
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": text, "output_tokens_count": 32}) + "\n" for text in texts))
        command = [str(arguments.guidellm), "run"]
        command += ["--backend", f"kind=openai_http,target={asked.base[:-3]},model=stories,request_format=/v1/completions"]
        command += ["--profile", "kind=concurrent,streams=16", "--constraint", "kind=max_requests,count=200"]
        _output([*command, "--data", f"kind=json_file,path={prompts}"], cwd=folder)
    counts = {status: count - before.get(status, 0) for status, count in asked.statuses().items()}
    check(counts.get("200", 0) >= 200, f"answers: {counts}")
    check(all(status == "200" or not count for status, count in counts.items()), f"answers: {counts}")
    python = (arguments.guidellm or Path()).parent / "python"
    found = _output([str(python), "-c", "from importlib.metadata import version; print(version('guidellm'))"])
    return check.found(version=found.strip(), statuses=counts)


def by_schemathesis(asked: Asked, arguments: Arguments) -> dict[str, Any]:
    """Run schemathesis's command."""
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{asked.base[:-3]}/openapi.json", "--no-color"]
    command += ["--exclude-checks", "positive_data_acceptance", "--max-examples", "100", "--workers", "2", "--seed", "1"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    check = Checks()
    check(done.returncode == 0, done.stdout[-3000:])
    cases = re.search(r"([\d,]+) generated", done.stdout)
    return check.found(version=version("schemathesis"), cases=cases[1] if cases else None)


def by_lm_eval(asked: Asked, arguments: Arguments) -> dict[str, Any]:
    """Check log-likelihoods of continuations, and whether each continuation is the most probable one.

    Two float32 passes of the same model with different batch shapes add in different orders. A pass in float64 gives the
    error of both.
    """
    words = STORY.split(" ")
    pairs = [(" ".join(words[:i]), " " + " ".join(words[i : i + 1 + i % 9])) for i in range(1, len(words))]
    pairs += [(text, end) for text in BEGINNINGS for end in (" there was a big dog.", " und dann kam ein Bär 🐻.")]
    told = json.dumps([asked.base, "stories", str(bundled()), pairs])
    found = json.loads(_output([str(arguments.lm_eval), "-c", LIKELIHOODS], input=told).splitlines()[-1])
    here = _likelihoods(asked.config, asked.params, found["ids"])
    with jax.enable_x64(True):
        config, params, _ = llama_jax.load(dtype="float64")
        exact = _likelihoods(config, params, found["ids"])
    check, served = Checks(), [value for value, _ in found["found"]]
    for pair, ids, (value, greedy), (own, likeliest) in zip(pairs, found["ids"], found["found"], here, strict=True):
        wrong = abs(value - own)
        check(wrong < 1e-5 * max(1, len(ids[1])), f"{value} is wrong by {wrong}: {pair}")
        check(greedy == likeliest, f"greedy: {pair}")
    most = lambda one, other: float(np.abs(np.subtract(one, other)).max())
    ours, true = [value for value, _ in here], [value for value, _ in exact]
    beside = {"served": most(served, true), "in process": most(ours, true)}
    return check.found(version=found["version"], most_wrong=most(served, ours), from_float64=beside)


def _likelihoods(config: Any, params: Any, pairs: list[list[list[int]]]) -> list[tuple[float, bool]]:
    """For each continuation of a context: its log-likelihood, and whether all its tokens are the most probable ones."""
    longest, found = max(len(before) + len(after) for before, after in pairs), []  # all are padded to it
    for before, after in pairs:
        count = len(before) + len(after)
        whole = jnp.array([before + after + [0] * (longest - count)], jnp.int32)
        logits = np.asarray(jax.nn.log_softmax(llama_jax.logits(config, params, whole)[0]), np.float64)
        scored = logits[len(before) - 1 : count - 1]
        found.append((float(scored[range(len(after)), after].sum()), scored.argmax(-1).tolist() == after))
    return found


def _output(command: list[str], **more: Any) -> str:
    """The output of a command; if it fails, SystemExit with the end of the output."""
    done = subprocess.run(command, capture_output=True, text=True, **more)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed with exit status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def main(arguments: Arguments) -> None:
    port = free_port()
    command = [sys.executable, "-c", "from llama_jax.cli import main; main()", "serve", "--port", str(port)]
    command += ["--dtype", "float32", "--format", "zephyr"]
    clients: dict[str, tuple[bool, Callable[[Asked, Arguments], dict[str, Any]]]] = {
        "openai": (True, by_openai),
        "openai (node)": (arguments.node is not None, by_node),
        "guidellm": (arguments.guidellm is not None, by_guidellm),
        "schemathesis": (True, by_schemathesis),
        "lm-eval": (arguments.lm_eval is not None, by_lm_eval),
    }
    report: dict[str, Any] = {"cpu": cpu_name(), "settings": settings(arguments)}
    report["versions"] = versions("jax", "jaxlib", "uvicorn", "starlette", "httptools", "llguidance")
    found: dict[str, Any] = {}
    with running(command, port, "/ready"):
        asked = Asked(port)
        for name, (there, run) in clients.items():
            found[name] = run(asked, arguments) if there else "omitted: no location was given"
            print(f"{name}: {json.dumps(found[name])}", flush=True)
        statuses = asked.statuses()
    print(f"statuses: {statuses}")
    write_report(arguments.output, report | {"clients": found, "statuses": statuses})
    failed = [name for name, each in found.items() if isinstance(each, dict) and each["failed"]]
    if failed or any(status >= "500" for status in statuses):
        raise SystemExit(f"failed: {', '.join(failed) or statuses}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
