"""An agent's loop through the openai client: what the server returns is accepted when it comes back."""

import json
from contextlib import contextmanager

import pytest
import vocabularies
from dialect_templates import TOOL_TEMPLATES
from fakes import FakeEngine, following, listening, served, talk

import llama_jax
from llama_jax.serving.engine import Engine
from llama_jax.tokenizers import reply_ends
from llama_jax.tokenizers.load import replace_chat_template

LEVEL = {"type": "object", "properties": {"level": {"type": "integer", "minimum": 1, "maximum": 3}}, "required": ["level"]}
TOOLS = [
    {"type": "function", "function": {"name": "set_level", "parameters": LEVEL | {"additionalProperties": False}}},
    {"type": "function", "function": {"name": "stop"}},
]


def calling(tokenizer):
    """An engine whose replies are what the grammar ends soonest, or the text "Done." without a grammar."""
    done = [*tokenizer.encode("Done.", bos=False), *reply_ends(tokenizer)[:1]]
    says = lambda request: done if request.constraint is None else following(request, tokenizer)
    return FakeEngine(says=says, context=12_000, vocab_size=tokenizer.vocab_size)


def take(response, stream):
    """The message of a response, as a client keeps it: an object, or the fields of a stream's deltas."""
    if not stream:
        return response.choices[0].message, response.choices[0].finish_reason
    content, calls, finish = "", [], None
    for chunk in response:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            finish = choice.finish_reason or finish
    message = {"role": "assistant", "content": content or None}
    if calls:
        message["tool_calls"] = [call.model_dump(exclude={"index"}) for call in calls]
    return message, finish


def calls_of(message):
    found = message.get("tool_calls") if isinstance(message, dict) else message.tool_calls
    return [call if isinstance(call, dict) else call.model_dump() for call in found or []]


@contextmanager
def client_of(engine, shown):
    openai = pytest.importorskip("openai")
    pytest.importorskip("llguidance")
    with listening(engine, shown) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=300)


def run_loop(client, stream, **options):
    """Three turns with calls that a grammar enforces, an answer, and another question; no request is refused."""
    messages = [{"role": "user", "content": "Set the level."}]
    ask = {"model": "fake", "messages": messages, "tools": TOOLS, "stream": stream, "max_tokens": 500, **options}
    for turn in range(3):
        message, finish = take(client.chat.completions.create(**ask, tool_choice="required"), stream)
        assert finish == "tool_calls"
        messages.append(message)
        for call in calls_of(message):
            assert call["function"]["name"] in ("set_level", "stop")
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"level {turn}"})
    ask["max_tokens"] = 8
    for question in ("Thanks.", "Goodbye."):
        message, _ = take(client.chat.completions.create(**ask), stream)
        messages += [message, {"role": "user", "content": question}]
    return messages


QUICK = ("llama 3.1", "mistral nemo", "deepseek r1")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TOOL_TEMPLATES]
)
def test_three_turns_with_tools(name):
    template, _, tokens = TOOL_TEMPLATES[name]
    tokenizer = vocabularies.with_tokens(template, tokens)
    with client_of(calling(tokenizer), served(tokenizer, "template")) as client:
        for stream in (False, True):
            run_loop(client, stream)
        assert client.models.retrieve("fake").id == "fake"


@pytest.mark.real
def test_three_turns_with_a_real_model(smollm2):
    """SmolLM2 has a template without tools; with one of the kind of Hermes 2 it has."""
    config, params, tokenizer = llama_jax.load(smollm2, "float32")
    engine = Engine(config, params, llama_jax.EngineOptions(rows=1, context=2048, prefill_chunk=128))
    refused = pytest.raises(Exception, match=r"does not support tools; .*--chat-template")
    with client_of(engine, served(tokenizer, "template")) as client, refused:
        run_loop(client, False)
    engine = Engine(config, params, llama_jax.EngineOptions(rows=1, context=2048, prefill_chunk=128))
    tokenizer = replace_chat_template(tokenizer, TOOL_TEMPLATES["hermes"].template)
    with client_of(engine, served(tokenizer, "template")) as client:
        for stream in (False, True):
            run_loop(client, stream, temperature=0.0, parallel_tool_calls=False)


def test_a_call_that_is_cut_after_a_whole_one():
    template, _, tokens = TOOL_TEMPLATES["hermes"]
    tokenizer = vocabularies.with_tokens(template, tokens)
    reply = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>\n<tool_call>\n{"na'
    engine = FakeEngine(says=lambda request: tokenizer.encode(reply + "me", bos=False), vocab_size=tokenizer.vocab_size)
    ask = {"messages": [{"role": "user", "content": "Stop."}], "tools": TOOLS, "max_tokens": len(reply)}
    engine.context = 4000
    body = talk(engine, lambda c: c.post("/v1/chat/completions", ask), shown=served(tokenizer, "template")).json
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["stop"]
    assert choice["message"]["content"] == '\n<tool_call>\n{"na'


def test_a_text_before_calls_that_begin_with_a_special_token():
    """The token has no text, so that only it distinguishes a call from a text in JSON."""
    template, _, tokens = TOOL_TEMPLATES["mistral nemo"]
    tokenizer = vocabularies.with_tokens(template, tokens)
    call = '[{"name": "set_level", "arguments": {"level": 2}}]'
    ask = {"messages": [{"role": "user", "content": "Set it."}], "tools": TOOLS}
    found = []
    for reply in (f"Let me see.[TOOL_CALLS]{call}", "No.[TOOL_CALLS]calls", f"As JSON: {call}"):
        ids = [*tokenizer.encode(reply, bos=False, special=True), tokenizer.eos_id]
        engine = FakeEngine(says=lambda request, ids=ids: ids, context=4000, vocab_size=tokenizer.vocab_size)
        body = talk(engine, lambda c: c.post("/v1/chat/completions", ask), shown=served(tokenizer, "template")).json
        message = body["choices"][0]["message"]
        found.append((message["content"], [each["function"]["name"] for each in message.get("tool_calls", [])]))
    assert found == [("Let me see.", ["set_level"]), ("No.calls", []), (f"As JSON: {call}", [])]
