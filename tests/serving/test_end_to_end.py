"""The engine behind the door: what comes over HTTP is what the functions give."""

import asyncio
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import Client, on_a_thread

import llama_jax
from llama_jax.serving.engine import Engine
from llama_jax.serving.http.auth import Access
from llama_jax.serving.http.request_schema import Limits
from llama_jax.serving.http.routes import make_app
from llama_jax.serving.http.service import Served, Service
from llama_jax.serving.options import EngineOptions

pytestmark = pytest.mark.slow
CONTEXT = 128
OPTIONS = EngineOptions(rows=4, context=CONTEXT, prefill_chunk=16)
STORY = "Once upon a time there was a little llama who lived on a hill. Every day the llama"


@pytest.fixture(scope="module")
def model():
    return llama_jax.load(dtype="float32")


@pytest.fixture(scope="module")
def warm(model):
    config, params, _ = model
    engine = Engine(config, params, OPTIONS)
    engine.warm()
    engine.close()


def talk(model, conversation):
    """What a conversation with an application gives, and the engine's numbers after it."""
    config, params, tokenizer = model
    engine = Engine(config, params, OPTIONS)
    engine.warm()  # the same programs again

    async def main():
        shown = Served(name="stories", tokenizer=tokenizer, chat="plain")
        service = Service(engine, shown, Limits(vocab_size=config.vocab_size, context=CONTEXT))
        with on_a_thread(engine):
            return await conversation(Client(make_app(service, Access()), service)), engine.stats()

    return asyncio.run(main())


def text_of(response):
    return "".join(choice["text"] for event in response.events[:-1] for choice in event["choices"])


def test_what_is_generated_is_what_generate_gives(model, warm):
    config, params, tokenizer = model
    prompts = [STORY[:n] for n in (4, 16, 33, 60, len(STORY))]
    bodies = [
        {"prompt": prompt, "max_tokens": 24, "temperature": 0.8, "top_p": 0.95, "seed": i}
        for i, prompt in enumerate(prompts)
    ]

    async def conversation(client):
        calls = [client.post("/v1/completions", body | {"stream": stream}) for body in bodies for stream in (False, True)]
        return await asyncio.gather(*calls)

    answers, stats = talk(model, conversation)
    for i, prompt in enumerate(prompts):
        whole, stream = answers[2 * i : 2 * i + 2]
        sampling = llama_jax.Sampling(temperature=0.8, top_p=0.95, seed=i)
        settings = {"max_new_tokens": 24, "sampling": sampling, "stop_tokens": tokenizer.stop_ids}
        ids = tokenizer.encode(prompt)
        (alone,) = llama_jax.generate(config, params, [ids], **settings)
        expected = tokenizer.decode(ids + list(alone.tokens))[len(tokenizer.decode(ids)) :]
        choice = whole.json["choices"][0]
        assert choice["text"] == text_of(stream) == expected
        assert choice["finish_reason"] == alone.finish_reason
        stopped = alone.finish_reason == "stop"
        assert whole.json["usage"]["completion_tokens"] == len(alone.tokens) + stopped
    assert stats.compilations_after_ready == 0


def test_log_likelihoods_are_those_of_the_model(model, warm):
    """As lm-eval asks for them, beside log-softmax of the logits."""
    config, params, tokenizer = model
    ids = tokenizer.encode(STORY)
    body = {"prompt": [ids], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    answer, _ = talk(model, lambda client: client.post("/v1/completions", body))
    found = answer.json["choices"][0]["logprobs"]
    logprobs = np.asarray(jax.nn.log_softmax(llama_jax.logits(config, params, jnp.array([ids]))[0]))
    assert len(found["tokens"]) == len(ids) + 1
    assert found["token_logprobs"][0] is None
    np.testing.assert_allclose(found["token_logprobs"][1:-1], logprobs[np.arange(len(ids) - 1), ids[1:]], atol=1e-5)
    np.testing.assert_allclose([max(top.values()) for top in found["top_logprobs"][1:]], logprobs.max(-1), atol=1e-5)


def test_a_beginning_that_was_read_before(model, warm):
    async def conversation(client):
        return [(await client.complete(STORY, max_tokens=4, temperature=0)).json for _ in range(2)]

    (first, second), _ = talk(model, conversation)
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert first["choices"] == second["choices"]


def test_json_that_follows_a_schema(model, warm):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"name": {"enum": ["Lily", "Tom"]}, "age": {"type": "integer", "maximum": 99}}}
    schema |= {"required": ["name", "age"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "child", "schema": schema}}

    async def conversation(client):
        json_, number = (
            client.complete(STORY, max_tokens=40, seed=1, n=2, temperature=1.0, response_format=form),
            client.chat("How many?", max_tokens=40, response_format={"type": "regex", "regex": "[0-9]{2,4} llamas"}),
        )
        plain = client.complete(STORY, max_tokens=30, temperature=0)
        return await asyncio.gather(json_, number, plain)

    (json_, number, plain), _ = talk(model, conversation)
    assert json_.status == 200, json_.body
    for choice in json_.json["choices"]:
        found = json.loads(choice["text"])
        assert found["name"] in ("Lily", "Tom")
        assert found["age"] <= 99
        assert choice["finish_reason"] == "stop"
    assert number.json["choices"][0]["message"]["content"].removesuffix(" llamas").isdecimal()
    assert plain.status == 200
