"""One engine over several processes: those that follow make the calls of the first."""

import gc
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from conftest import sharp

import llama_jax
from llama_jax import Sampling
from llama_jax.serving.drafting import ModelDrafting
from llama_jax.serving.engine import Engine
from llama_jax.serving.multihost_engine import Follower, leading
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.programs import Programs
from llama_jax.serving.requests import GenerationRequest
from llama_jax.serving.served_model import ServedModel

SMALL = EngineOptions(rows=4, context=128, prefill_chunk=16, prefix_bytes=30_000)


@pytest.fixture(scope="module")
def model():
    config = replace(llama_jax.preset("stories-260k"), n_layers=1)
    return config, sharp(config, jax.random.key(1))


def numpys(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def bits(tree):
    return [(leaf.dtype, leaf.shape, leaf.tobytes()) for leaf in tree]


class First:
    """The engine of a first process, what it has told, and what its calls gave."""

    def __init__(self, model, options=SMALL):
        self.told, self.made = [], []
        served = ServedModel.of(*model, options.cache, options.compute, options.draft)

        def noting(program, *args):
            result = program(*args)
            self.made.append(bits(numpys(result)))
            return result

        noted = served.with_programs(Programs(*(partial(noting, program) for program in served.programs)))
        self.engine = Engine(*model, options, leading(noted, self.told.append))

    def serve(self, seed, count):
        """Requests of every kind: cancelled ones, those that outgrow their pool, and such as begin alike."""
        rng, found = random.Random(seed), []
        for i in range(count):
            prompt = [1, *range(3, 40)] if i % 3 == 0 else [1, *(rng.randrange(3, 512) for _ in range(rng.randrange(1, 60)))]
            sampling = Sampling(temperature=rng.choice([0.0, 1.0]), top_k=rng.choice([0, 5]), seed=i)
            request = GenerationRequest(
                prompt=prompt,
                max_new_tokens=rng.choice([1, 9, 50]),
                sampling=sampling,
                score_prompt=i == 1,
                alternatives=i % 2,
                min_new_tokens=1,
            )
            updates = []
            found.append((request, updates, self.engine.submit(request, updates.append)))
            self.engine.step()
        found[2][2].cancel()
        while self.engine.step():
            pass
        return found


@pytest.mark.slow
def test_followers_make_the_same_calls_and_keep_no_more(model, monkeypatch):
    """With drafts and without, as they come."""
    numbers = itertools.cycle([2] * 20 + [0] * 40)
    chosen = lambda self, shape, rows: next(numbers) if any(row is not None for row in rows) else 0
    monkeypatch.setattr(ModelDrafting, "choose", chosen)
    draft = llama_jax.DraftModel(*model, 2)
    first = First(model, replace(SMALL, draft=draft))
    answers = first.serve(0, 12)
    assert first.engine.scheduler.pages.evicted
    assert first.engine.stats().cached_tokens
    assert first.engine.stats().accepted
    for request, updates, _ in answers:
        if updates[-1].finish == "length":
            (alone,) = llama_jax.generate(
                *model, [request.prompt], max_new_tokens=request.max_new_tokens, sampling=request.sampling
            )
            assert [token.id for update in updates for token in update.tokens] == alone.tokens
    follower = Follower(ServedModel.of(*model, SMALL.cache, SMALL.compute, draft))
    for told, made in zip(first.told, first.made, strict=True):
        assert bits(numpys(follower.take(told))) == made

    # What the first needs no longer nobody keeps: as much as it has, and what its last call has left.
    del answers
    sizes = []
    for seed in (1, 2):
        first.told.clear()
        first.serve(seed, 12)
        gc.collect()
        for told in first.told:
            follower.take(told)
        sizes.append(len(follower.arrays))
    settings = len(jax.tree.leaves(first.engine.scheduler._settings[1]))
    assert max(sizes) < len(jax.tree.leaves(first.engine.scheduler.state)) + 2 * settings + 10


STORY = "Once upon a time there was a little llama who lived on a hill. Every day the llama"
BODIES = [
    {"prompt": STORY[:n], "max_tokens": 20, "temperature": t, "top_p": 0.95, "seed": n}
    for n, t in ((16, 0), (40, 0.9), (len(STORY), 0.9), (len(STORY), 0))
]


@contextmanager
def group():
    """Two processes that serve together: both, and the address of the first."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    options = "--dtype float32 --mesh tensor=2 --port 0 --rows 2 --context 128 --processes 2"
    command = [sys.executable, "-m", "llama_jax", "serve", *options.split(), "--coordinator", f"127.0.0.1:{port}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    running = [
        subprocess.Popen([*command, "--process-id", str(i)], stderr=subprocess.PIPE, text=True, env=environment)
        for i in range(2)
    ]
    try:
        said = ""
        for line in running[0].stderr:
            said += line
            if "ready after " in line:
                break
        else:
            raise AssertionError(said + running[1].stderr.read())
        assert "mesh data=1,fsdp=1,tensor=2 over 2 processes" in said
        yield running, said.partition("listening on ")[2].split()[0]
    finally:
        for process in running:
            process.kill()
            process.stderr.close()
            process.wait()


def complete(address, body):
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())["choices"][0]["text"]


@pytest.mark.slow
def test_two_processes_serve_what_generate_gives():
    config, params, tokenizer = llama_jax.load(dtype="float32")
    with group() as (running, address):
        with ThreadPoolExecutor(8) as clients:
            texts = list(clients.map(partial(complete, address), BODIES * 2))
        for body, text in zip(BODIES * 2, texts, strict=True):
            ids = tokenizer.encode(body["prompt"])
            sampling = Sampling(temperature=body["temperature"], top_p=body["top_p"], seed=body["seed"])
            settings = {"max_new_tokens": 20, "sampling": sampling, "stop_tokens": tokenizer.stop_ids}
            (alone,) = llama_jax.generate(config, params, [ids], **settings)
            assert text == tokenizer.decode(ids + alone.tokens)[len(tokenizer.decode(ids)) :]
        running[1].send_signal(signal.SIGTERM)  # which is for process 0 to heed
        assert complete(address, BODIES[0]) == texts[0]
        running[0].send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in running] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_when_one_dies_the_others_end(killed):
    with group() as (running, address):
        assert complete(address, BODIES[0])
        running[killed].kill()
        assert running[1 - killed].wait(60) == -signal.SIGABRT
        assert "JAX distributed service detected fatal errors" in running[1 - killed].stderr.read()
