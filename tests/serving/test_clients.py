"""Clients that others wrote, unmodified, over a socket of this machine."""

import json

import pytest
from fakes import FakeEngine, following, listening, saying, served

from llama_jax.tokenizers.sentencepiece import byte_tokenizer

SAID = "Grüße, 🦙! And so on."


@pytest.fixture
def client_of():
    openai = pytest.importorskip("openai")

    def make(address, **settings):
        return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=20, **settings)

    return make


def test_the_openai_client(client_of):
    engine = FakeEngine(says=saying(SAID))
    with listening(engine, served()) as address, client_of(address) as client:
        assert [model.id for model in client.models.list()] == ["fake"]
        whole = client.completions.create(model="fake", prompt="a", max_tokens=50, logprobs=2, n=2, seed=1)
        assert [choice.text for choice in whole.choices] == [SAID, SAID]
        assert whole.choices[0].finish_reason == "stop"
        assert len(whole.choices[0].logprobs.tokens) == len(SAID.encode()) + 1
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
        reply = client.chat.completions.create(model="fake", messages=messages, logprobs=True, top_logprobs=1, max_tokens=50)
        assert reply.choices[0].message.content == SAID
        assert reply.choices[0].logprobs.content[0].top_logprobs[0].token == "A"
        assert reply.usage.completion_tokens == len(SAID.encode()) + 1
        # What a client was given it may send back.
        again = [*messages, reply.choices[0].message, {"role": "user", "content": "And?"}]
        assert client.chat.completions.create(model="fake", messages=again).choices[0].message.content
        options = {"include_usage": True}
        chunks = list(client.chat.completions.create(model="fake", messages=messages, stream=True, stream_options=options))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAID
        assert chunks[-1].usage == reply.usage
        texts = client.completions.create(model="fake", prompt=["a", "b"], stream=True, max_tokens=50)
        said = ["", ""]
        for chunk in texts:
            for choice in chunk.choices:
                said[choice.index] += choice.text
        assert said == [SAID, SAID]


def test_a_schema_through_the_openai_client(client_of):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}

    with listening(FakeEngine(says=following), served()) as address, client_of(address) as client:
        messages = [{"role": "user", "content": "Well?"}]
        reply = client.chat.completions.create(model="fake", messages=messages, response_format=form)
        assert json.loads(reply.choices[0].message.content) in ({"ok": True}, {"ok": False})
        assert reply.choices[0].finish_reason == "stop"
        any_object = client.completions.create(
            model="fake", prompt="a", max_tokens=100, extra_body={"response_format": {"type": "json_object"}}
        )
        assert isinstance(json.loads(any_object.choices[0].text), dict)
        pattern = {"type": "regex", "regex": "[0-9]{3}"}
        number = client.completions.create(model="fake", prompt="a", extra_body={"response_format": pattern})
        assert number.choices[0].text == "000"


def function(name, **properties):
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}


def test_required_calls_through_the_openai_client(client_of):
    """Two choices, whole and as a stream, each with its own deltas; tests/serving/test_tool_loop.py has loops of calls."""
    pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}{# <tool_call> #}"
    tools = [function("weather", city={"enum": ["Köln", "Rom"]}, days={"type": "integer"}), function("time")]
    ask = {"model": "fake", "messages": [{"role": "user", "content": "Well?"}], "tools": tools}
    ask |= {"parallel_tool_calls": False, "n": 2}
    engine = FakeEngine(says=following, context=2000)
    with listening(engine, served(tokenizer, "template")) as address, client_of(address) as client:
        for name, names in (("time", set()), ("weather", {"city", "days"})):
            ask["tool_choice"] = {"type": "function", "function": {"name": name}}
            whole = client.chat.completions.create(**ask)
            for choice in whole.choices:
                assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
                (call,) = choice.message.tool_calls
                assert call.function.name == name
                assert set(json.loads(call.function.arguments)) == names
            parts = [part for chunk in client.chat.completions.create(**ask, stream=True) for part in chunk.choices]
            streamed = sorted(
                (part.index, delta.function.arguments) for part in parts for delta in part.delta.tool_calls or []
            )
            assert streamed == [(choice.index, choice.message.tool_calls[0].function.arguments) for choice in whole.choices]
            assert [part.finish_reason for part in parts if part.finish_reason] == ["tool_calls"] * 2


@pytest.mark.slow
def test_schemathesis_finds_nothing():
    """Requests made from /openapi.json: what it allows is answered, what it does not is refused, never a 5xx."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    # Of what the schema allows, fields that exclude each other are refused as well, and prompts that are too long in tokens.
    unfit = [positive_data_acceptance]
    # A text beyond the limit of the schema may be beyond that of the body as well, which is refused with 413.
    config = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": ["4XX"]}}})
    quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    with listening(FakeEngine(says=saying("ab")), served()) as address:
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json", config=config)
        count = 0
        for operation in schema.get_all_operations():
            both = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
            for mode in both if operation.ok().body else both[:1]:

                @quick
                @given(case=operation.ok().as_strategy(generation_mode=mode))
                def ask(case):
                    nonlocal count
                    response = case.call()
                    count += 1
                    assert response.status_code < 500
                    case.validate_response(response, excluded_checks=unfit)

                ask()
        assert count > 300
