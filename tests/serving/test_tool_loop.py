"""An agent's loop through the openai client: what the server returns is accepted when it comes back."""

import json

import pytest
import vocabularies
from dialect_templates import TOOL_TEMPLATES
from fakes import FakeEngine, listening, served

from llama_jax.tokenizers import reply_ends

LEVEL = {"type": "object", "properties": {"level": {"type": "integer", "minimum": 1, "maximum": 3}}, "required": ["level"]}
TOOLS = [
    {"type": "function", "function": {"name": "set_level", "parameters": LEVEL | {"additionalProperties": False}}},
    {"type": "function", "function": {"name": "stop"}},
]


def following(tokenizer):
    """An engine whose replies are what the grammar ends soonest, or the text "Done." without a grammar."""
    ends = [*reply_ends(tokenizer)]

    def says(request):
        constraint = request.constraint
        if constraint is None:
            return [*tokenizer.encode("Done.", bos=False), ends[0]]
        soonest = [*ends, *tokenizer.encode('}"]', bos=False), *range(tokenizer.vocab_size)]

        def write():
            while True:
                mask = constraint.allowed()
                token = next(i for i in soonest if mask[i // 32] >> (i % 32) & 1)
                yield token
                constraint.accept(token)

        return write()

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


QUICK = ("llama 3.1", "mistral nemo", "deepseek r1")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TOOL_TEMPLATES]
)
def test_three_turns_with_tools(name):
    openai = pytest.importorskip("openai")
    pytest.importorskip("llguidance")
    template, _, tokens = TOOL_TEMPLATES[name]
    tokenizer = vocabularies.with_tokens(template, tokens)
    engine = following(tokenizer)
    with listening(engine, served(tokenizer, "template")) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=20)
        for stream in (False, True):
            messages = [{"role": "user", "content": "Set the level."}]
            for turn in range(3):
                ask = {"model": "fake", "messages": messages, "tools": TOOLS, "stream": stream, "max_tokens": 500}
                message, finish = take(client.chat.completions.create(**ask, tool_choice="required"), stream)
                calls = calls_of(message)
                assert finish == "tool_calls"
                assert {call["function"]["name"] for call in calls} <= {"set_level", "stop"}
                messages.append(message)
                for call in calls:
                    assert isinstance(json.loads(call["function"]["arguments"]), dict)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"level {turn}"})
            ask["messages"] = messages
            message, finish = take(client.chat.completions.create(**ask), stream)
            assert finish == "stop"
            messages += [message, {"role": "user", "content": "Thanks."}]
            assert take(client.chat.completions.create(**ask), stream)[1] == "stop"
            assert client.models.retrieve("fake").id == "fake"
