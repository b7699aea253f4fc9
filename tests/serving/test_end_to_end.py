"""The engine behind the door: what comes over HTTP is what the functions give."""

import asyncio

import fakes
import pytest

import llama_jax
from llama_jax.serving.engine import Engine
from llama_jax.serving.http.service import Served
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
    answers = fakes.talk(engine, conversation, shown=Served(name="stories", tokenizer=tokenizer, chat="plain"))
    return answers, engine.stats()


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


def test_a_beginning_that_was_read_before(model, warm):
    async def conversation(client):
        return [(await client.complete(STORY, max_tokens=4, temperature=0)).json for _ in range(2)]

    (first, second), _ = talk(model, conversation)
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert first["choices"] == second["choices"]
