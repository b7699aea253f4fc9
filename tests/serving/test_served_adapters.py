"""Adapters in the engine and over HTTP: every request gets what `generate` gives it with its own."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from adapters import random_adapters
from commands import run_here
from conftest import sharp
from fakes import FakeEngine, served
from test_api import ask, error_of
from test_engine import Client, exhaust, run
from test_engine import alone as generated_alone

import llama_jax
from llama_jax.cli.serve import Serve
from llama_jax.errors import CheckpointError, GenerationError
from llama_jax.formats import save_adapter
from llama_jax.model.lora import Lora, apply_adapters
from llama_jax.model.multi_lora import adapter_table, choose_adapters
from llama_jax.model.trees import quantize
from llama_jax.parallel.mesh import parse_mesh
from llama_jax.serving.engine import Engine
from llama_jax.serving.http.metrics import METRIC_PREFIX

LORAS = (Lora(rank=3, alpha=5.0), Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj")), Lora(rank=2, alpha=4.0))
TINY = llama_jax.EngineOptions(rows=2, context=32, prefill_chunk=16)


@pytest.fixture(scope="module")
def model():
    """(configuration, base, adapters) with sharp logits, as in `test_engine`."""
    config = replace(llama_jax.preset("stories-260k"), n_layers=1)
    adapters = [(random_adapters(config, lora, seed=i), lora) for i, lora in enumerate(LORAS)]
    return config, sharp(config, jax.random.key(1)), adapters


@pytest.fixture(scope="module")
def tabled(model):
    config, params, adapters = model
    return config, adapter_table(config, params, adapters)


@pytest.fixture(scope="module")
def alone(tabled):
    """What `generate` gives a request alone; that a row of the table is its adapter in none, `test_adapter_table` tests."""
    config, params = tabled

    def generate(request, **options):
        return generated_alone((config, choose_adapters(params, [request.adapter])), request, **options)

    return generate


def test_requests_with_different_adapters_are_neighbours(tabled, alone):
    engine = Engine(*tabled, TINY)
    clients = [Client(engine, prompt=[1, 5, 9], max_new_tokens=8, adapter=adapter) for adapter in (0, -1, 2, 1)]
    exhaust(engine)
    found = [client.ids for client in clients]
    assert found == [alone(client.request).tokens for client in clients]
    assert len(set(map(tuple, found))) == 4


def test_prefixes_are_kept_for_each_adapter(tabled):
    """Keys and values are an adapter's own."""
    engine, first = Engine(*tabled, TINY), {}
    prompt = [1, *range(20, 40)]
    for adapter, cached in ((0, 0), (1, 0), (-1, 0), (0, 16), (-1, 16), (1, 16)):
        client = run(engine, prompt=prompt, max_new_tokens=4, adapter=adapter)
        assert client.updates[0].cached == cached
        assert client.ids == first.setdefault(adapter, client.ids)
    assert len(set(map(tuple, first.values()))) == 3


def test_unknown_adapters(tabled, model):
    engine = Engine(*tabled, TINY)
    with pytest.raises(GenerationError, match="adapter=3 must be an integer from -1 to 2"):
        Client(engine, prompt=[1], max_new_tokens=1, adapter=3)
    with pytest.raises(GenerationError, match="adapter=0 must be an integer from -1 to -1"):
        Client(Engine(*model[:2], TINY), prompt=[1], max_new_tokens=1, adapter=0)
    with pytest.raises(GenerationError, match="1 adapters for 2 prompts"):
        list(llama_jax.complete_requests(*tabled, [[1], [2]], max_new_tokens=1, adapters=[0], options=TINY))


@pytest.mark.slow
def test_over_a_mesh_and_quantized(model, alone, tmp_path):
    config, params, adapters = model
    llama_jax.save(tmp_path / "model", config, params)
    for i, one in enumerate(adapters):
        save_adapter(tmp_path / str(i), config, *one)
    folders = [tmp_path / str(i) for i in range(3)]
    on_mesh = llama_jax.load(tmp_path / "model", adapters=folders, mesh=parse_mesh("tensor=4"))[:2]
    assert len(on_mesh[1].blocks.attention.qkv.low_rank.b.sharding.device_set) == 4
    engine = Engine(*on_mesh, TINY)
    clients = [Client(engine, prompt=[1, 5 + i], max_new_tokens=8, adapter=adapter) for i, adapter in enumerate((1, -1, 2))]
    exhaust(engine)
    assert [client.ids for client in clients] == [alone(client.request).tokens for client in clients]

    base = quantize(params, "int8")
    engine = Engine(config, adapter_table(config, base, adapters), TINY)
    clients = [Client(engine, prompt=[1, 5 + i], max_new_tokens=8, adapter=adapter) for i, adapter in enumerate((0, -1, 1))]
    exhaust(engine)
    for client in clients:
        number = client.request.adapter
        one = base if number < 0 else apply_adapters(base, *adapters[number])
        assert client.ids == llama_jax.generate(config, one, [client.request.prompt], max_new_tokens=8)[0].tokens


def test_a_table_is_loaded(model, tmp_path):
    config, params, adapters = model
    llama_jax.save(tmp_path / "model", config, params)
    save_adapter(tmp_path / "a", config, *adapters[0])
    _, found, _ = llama_jax.load(tmp_path / "model", adapters=[tmp_path / "a"])
    jax.tree.map(np.testing.assert_array_equal, found, adapter_table(config, params, adapters[:1]))
    with pytest.raises(CheckpointError, match="adapter is for all rows, and adapters is a table to choose from"):
        llama_jax.load(tmp_path / "model", adapter=tmp_path / "a", adapters=[tmp_path / "a"])
    with pytest.raises(CheckpointError, match="is one path; pass a list of them, or adapter for all rows"):
        llama_jax.load(tmp_path / "model", adapters=tmp_path / "a")


SHOWN = replace(served(), adapters=("pirate", "poet"))


def test_the_model_of_a_request_chooses():
    engine = FakeEngine()
    answers = ask(
        engine,
        lambda c: c.complete("a", model="poet"),
        lambda c: c.chat("a", model="pirate", n=2),
        lambda c: c.complete("a", model="fake"),
        lambda c: c.complete("a"),
        lambda c: c.post("/tokenize", {"prompt": "a", "model": "poet"}),
        lambda c: c.get("/metrics"),
        shown=SHOWN,
    )
    assert [answer.json["model"] for answer in answers[:4]] == ["poet", "pirate", "fake", "fake"]
    assert [request.adapter for request in engine.admitted] == [1, 0, 0, -1, -1]
    assert answers[4].status == 200
    for name, requests in (("poet", 1), ("pirate", 2), ("fake", 2)):
        line = f'{METRIC_PREFIX}model_requests_total{{model_name="{name}"}} {requests:.1f}'
        assert line in answers[5].body.decode().splitlines()


def test_what_is_served_is_listed_and_nothing_else_is_there():
    models, unknown, stream = ask(
        FakeEngine(),
        lambda c: c.get("/v1/models"),
        lambda c: c.complete("a", model="painter"),
        lambda c: c.complete("a", model="poet", stream=True),
        shown=SHOWN,
    )
    assert [(one["id"], one["parent"]) for one in models.json["data"]] == [
        ("fake", None), ("pirate", "fake"), ("poet", "fake")
    ]  # fmt: skip
    error = error_of(unknown, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "model='painter' is not served; 'fake', 'pirate', 'poet' are; or omit it"
    assert {event["model"] for event in stream.events[:-1]} == {"poet"}


def test_names_of_adapters(tmp_path):
    options = Serve(adapter=(f"b={tmp_path}", "a=x/y=z"))
    assert list(options.named_adapters().items()) == [("b", tmp_path), ("a", Path("x/y=z"))]
    assert options.shared_adapter() is None
    assert Serve(adapter=("some/folder",)).shared_adapter() == Path("some/folder")
    (odd := tmp_path / "rank=3").mkdir()
    assert Serve(adapter=(str(odd),)).shared_adapter() == odd
    assert Serve(adapter=(str(odd),)).named_adapters() == {}
    for given, message in (
        (("a", "b=c"), "adapter='a' must be NAME=PATH with a name of its own, or a single PATH"),
        (("=c",), "adapter='=c' must be NAME=PATH"),
        (("a=b", "a=c"), "adapter='a=c' must be NAME=PATH with a name of its own"),
    ):
        with pytest.raises(GenerationError, match=message):
            Serve(adapter=given).named_adapters()
    with pytest.raises(GenerationError, match="adapter 'llama' has the model's name; choose another, or set --name"):
        Serve(adapter=("llama=x",), name="llama")._check()


@pytest.mark.slow
def test_the_command_batch(stories_folder, stories, tmp_path):
    config, _, tokenizer = stories
    folders = []
    for i, lora in enumerate(LORAS[:2]):
        adapters = jax.tree.map(lambda array: 0.7 * array, random_adapters(config, lora, seed=i))
        save_adapter(tmp_path / str(i), config, adapters, lora)
        folders.append(tmp_path / str(i))
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    asked = [{"prompt": "Once"}, {"prompt": "Once", "adapter": "two"}, {"prompt": "Once", "adapter": "one"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in asked))
    usual = "--model", stories_folder, "--temperature", 0, "--max-new-tokens", 6, "--rows", 2, "--seed", 1
    named = "--adapter", f"one={folders[0]}", "--adapter", f"two={folders[1]}"
    done = run_here("batch", prompts, out, *usual, *named)
    assert done.returncode == 0, done.stderr
    found = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda line: line["line"])
    assert [line.get("adapter") for line in found] == [None, "two", "one"]
    ids = tokenizer.encode("Once")
    for line, folder in zip(found, (None, folders[1], folders[0]), strict=True):
        one = llama_jax.load(stories_folder, adapter=folder).params
        tokens = llama_jax.generate(config, one, [ids], max_new_tokens=6, stop_tokens=tokenizer.stop_ids)[0].tokens
        assert line["text"] == tokenizer.decode(ids + tokens)[len(tokenizer.decode(ids)) :]
    assert run_here("batch", prompts, out, *usual, *named).returncode == 0  # nothing is left
    refused = run_here("batch", prompts, tmp_path / "other.jsonl", *usual, *named[:2])
    assert refused.returncode == 2
    assert "requests the adapter 'two', but --adapter names one" in refused.stderr
