"""The routes, with an engine that says what the tests tell it to."""

import asyncio
import json

import pytest
from fakes import BYTES, FakeEngine, ids, logprob, saying, served, talk, until

from llama_jax.serving.http.auth import Access
from llama_jax.serving.http.response import SLICE
from llama_jax.tokenizers.sentencepiece import byte_tokenizer


def ask(engine, *conversation, **settings):
    """What each of some calls, functions of a client, is answered."""

    async def all_of_them(client):
        return [await call(client) for call in conversation]

    answers = talk(engine, all_of_them, **settings)
    return answers[0] if len(answers) == 1 else answers


def error_of(response, status):
    assert response.status == status, response.body
    assert response.headers["content-type"] == "application/json"
    error = response.json["error"]
    assert set(response.json) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    return error


def text_of(events):
    return "".join(choice["text"] for event in events[:-1] if "choices" in event for choice in event["choices"])


def test_a_completion():
    answer = ask(FakeEngine(), lambda c: c.complete("hello", max_tokens=10)).json
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}],
        # The begin token and five bytes; five bytes and the end.
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 6,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_the_requests_that_the_engine_gets():
    engine = FakeEngine()
    body = {"max_tokens": 7, "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.5}
    body |= {"seed": -1, "stop_token_ids": [70], "min_tokens": 2, "logprobs": 3, "echo": True}
    ask(engine, lambda c: c.complete("a", **body), lambda c: c.complete([5, 6], ignore_eos=True))
    first, second, third = engine.admitted
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, -1, 0.1)
    assert (sampling.repetition_penalty, sampling.seed, second.sampling.seed) == (1.5, 2**32 - 1, 0)
    assert (first.max_new_tokens, first.min_new_tokens, first.alternatives, first.score_prompt) == (7, 2, 3, True)
    assert set(first.stop_tokens) == {*BYTES.stop_ids, 70}
    assert list(first.prompt) == [BYTES.bos_id, *ids("a")]
    assert (list(third.prompt), third.stop_tokens, third.max_new_tokens) == ([5, 6], (), 16)
    assert third.sampling.temperature == 1


def test_tokens_without_a_row_are_refused_by_name():
    """A vocabulary with more tokens than the model has rows; as ends they are harmless, and they can be decoded."""
    engine, token = FakeEngine(vocab_size=150), ids("\xe9".encode("latin-1"))[0]
    text, listed, ended, text_of_it = ask(
        engine,
        lambda c: c.complete("a \u00e9"),
        lambda c: c.complete([5, token]),
        lambda c: c.complete("a", stop_token_ids=[token]),
        lambda c: c.post("/detokenize", {"tokens": [*ids("a"), token]}),
    )
    assert "has no row in the model's embedding of 150 rows" in error_of(text, 400)["message"]
    error_of(listed, 400)
    assert ended.json["choices"][0]["text"] == "a"
    assert text_of_it.json["prompt"] == "a\ufffd"


@pytest.mark.parametrize("prompt", ["ab", ["ab"], ["a", "bc"], ids("ab"), [ids("ab"), ids("c")]])
def test_every_form_of_a_prompt(prompt):
    answer = ask(FakeEngine(says=saying("!")), lambda c: c.complete(prompt, n=2, echo=True)).json
    several = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    texts = [each if isinstance(each, str) else BYTES.decode(each) for each in several]
    assert [choice["text"] for choice in answer["choices"]] == [text + "!" for text in texts for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(texts)))
    lengths = [len(text) + isinstance(each, str) for text, each in zip(texts, several, strict=True)]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)  # each once, whatever n is
    assert answer["usage"]["completion_tokens"] == 2 * 2 * len(texts)


@pytest.mark.parametrize("per_iteration", [1, 3, 30])
def test_a_stream_says_what_the_whole_says(per_iteration, monkeypatch):
    monkeypatch.setattr("llama_jax.serving.http.response.SLICE", 4)  # so that prompts and updates are taken in parts
    said = "Größe 🦙 and so on, and so forth"
    body = {"max_tokens": 60, "logprobs": 1, "n": 2, "stop": ["so forth", "zzz"], "seed": 1, "echo": True}
    engine = FakeEngine(says=saying(said), per_iteration=per_iteration)
    whole, stream = ask(
        engine,
        lambda c: c.complete("é and é", **body),
        lambda c: c.complete("é and é", **body, stream=True, stream_options={"include_usage": True}),
    )
    *events, last, done = stream.events
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == whole.json["usage"]
    assert all(event["usage"] is None for event in events)
    for i, expected in enumerate(whole.json["choices"]):
        chunks = [choice for event in events for choice in event["choices"] if choice["index"] == i]
        assert expected["text"] == "é and é" + said.removesuffix("so forth")
        assert "".join(chunk["text"] for chunk in chunks) == expected["text"]
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        for name, value in expected["logprobs"].items():
            assert [entry for chunk in chunks for entry in chunk["logprobs"][name]] == value, name
        assert not any("\ufffd" in chunk["text"] for chunk in chunks)
    # Every token up to the one with which the stop text was whole, and of it none is shown.
    assert whole.json["usage"]["completion_tokens"] == 2 * len(said.encode())
    assert not any("so f" in text_of([event, None]) for event in events)


@pytest.mark.parametrize("chat", [True, False])
def test_scored_answers_are_written_as_json_writes_them(chat):
    """Log-probabilities are written by hand, also of tokens that need escapes."""
    said = 'a "quoted" \\ line\n é 🦙' * 3
    body = {"max_tokens": 99, "logprobs": True, "top_logprobs": 3} if chat else {"max_tokens": 99, "logprobs": 3}
    send = (lambda c, **more: c.chat("b", **body, **more)) if chat else (lambda c, **more: c.complete("b", **body, **more))
    whole, stream = ask(FakeEngine(says=saying(said)), lambda c: send(c, n=3), lambda c: send(c, stream=True))
    assert whole.body == json.dumps(whole.json, separators=(",", ":")).encode()
    events = [f"data: {json.dumps(event, separators=(',', ':'))}\n\n" for event in stream.events[:-1]]
    assert stream.body.decode() == "".join(events) + "data: [DONE]\n\n"


@pytest.mark.parametrize("stream", [True, False])
def test_a_long_scored_answer_leaves_others_their_turn(stream):
    """Also where nobody has taken its tokens for long: it is written in parts, between which other tasks run."""
    engine = FakeEngine(says=saying("x" * 300), per_iteration=200)

    async def conversation(client):
        body = {"prompt": "a", "max_tokens": 200, "logprobs": 5, "n": 4, "stream": stream}
        call, turns = client.begin("POST", "/v1/completions", body), 0
        await until(lambda: engine.waiting)
        engine.step()
        while not call.task.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert talk(engine, conversation, thread=False) > 4 * 200 // SLICE


def test_a_stop_text_cancels_what_the_engine_still_does():
    engine = FakeEngine(says=saying("one two" + "x" * 200))

    async def conversation(client):
        call = client.begin("POST", "/v1/completions", {"prompt": "a", "max_tokens": 400, "stop": "two"})
        await until(lambda: engine.waiting)
        for _ in range(9):
            await asyncio.sleep(0)
            engine.step()
        response = await call.response()
        engine.step()
        assert engine.running == []
        return response

    answer = talk(engine, conversation, thread=False).json
    assert answer["choices"][0] == {"index": 0, "text": "one ", "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] == len("one two")
    assert engine.finished == {"cancelled": 1}


def test_log_probabilities_of_a_prompt():
    """As lm-eval asks for them."""
    body = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    logprobs = ask(FakeEngine(says=saying("")), lambda c: c.complete([ids("ab")], **body)).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "</s>"]  # one more than the prompt has, whatever it is
    assert logprobs["token_logprobs"] == [None, logprob(1), logprob(0)]
    assert logprobs["top_logprobs"] == [None, {"b": logprob(1), "A": logprob(1)}, {"</s>": logprob(0), "A": logprob(0)}]
    assert logprobs["text_offset"] == [0, 1, 2]
    alone = ask(FakeEngine(), lambda c: c.complete([ids("ab")], max_tokens=0, echo=True, logprobs=0)).json
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == [None, logprob(1)]
    assert alone["choices"][0] | {"logprobs": 0} == {"index": 0, "text": "ab", "logprobs": 0, "finish_reason": "length"}
    assert alone["usage"]["completion_tokens"] == 0


def test_tokens_without_text():
    found = ask(FakeEngine(says=saying("é")), lambda c: c.complete("a", logprobs=0)).json["choices"][0]["logprobs"]
    assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "</s>"]
    assert found["text_offset"] == [0, 0, 1]
    cut = ask(FakeEngine(says=saying("é")), lambda c: c.complete("a", max_tokens=1)).json["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ("\ufffd", "length")
    padded = FakeEngine(vocab_size=300)  # a model's table is longer than its vocabulary
    echoed = ask(padded, lambda c: c.complete([*ids("a"), 280], max_tokens=0, echo=True, logprobs=0))
    assert echoed.json["choices"][0]["text"] == "a"
    assert echoed.json["choices"][0]["logprobs"]["tokens"] == ["a", ""]


def test_a_chat():
    engine = FakeEngine(says=saying("Hi!"))
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]},
        {"role": "user", "content": "Hello </s>", "name": None},
        {"role": "assistant", "content": "Yes?", "tool_calls": None, "refusal": None},
        {"role": "user", "content": "Well"},
    ]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 9}
    whole, stream = ask(
        engine,
        lambda c: c.post("/v1/chat/completions", body),
        lambda c: c.post("/v1/chat/completions", body | {"stream": True}),
    )
    choice = whole.json["choices"][0]
    assert whole.json["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "Hi!", "refusal": None}
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["H", "i", "!", "</s>"]
    top = [{"token": "A", "logprob": -0.5, "bytes": [65]}]
    assert choice["logprobs"]["content"][0] == {"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": top}
    first, *events, last, done = stream.events
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in (*events, last)) == "Hi!"
    assert last["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"
    text = "<|system|>\nBe kind.</s>\n<|user|>\nHello </s></s>\n<|assistant|>\nYes?</s>\n<|user|>\nWell</s>\n<|assistant|>\n"
    prompt = engine.admitted[0].prompt
    special = [token for token in prompt if token == BYTES.eos_id]
    assert len(special) == 4  # and not the one that the user wrote
    assert len(prompt) == len(text.encode()) - 4 * len("</s>") + 4


def test_a_chat_by_the_checkpoints_own_template():
    """Rendered in one process, one chat after another; control tokens of the template's are tokens, a user's are text."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ bos_token }}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    engine = FakeEngine(says=saying("Hi!"))
    chats = [("a <s> b </s>", {}), ("c", {"stream": True})]
    system = {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}
    first, second, refused = ask(
        engine,
        *(lambda c, text=text, more=more: c.chat(text, max_tokens=9, **more) for text, more in chats),
        lambda c: c.post("/v1/chat/completions", system),
        shown=served(tokenizer, "template"),
    )
    assert first.json["choices"][0]["message"]["content"] == "Hi!"
    assert second.status == 200
    prompt = engine.admitted[0].prompt
    assert prompt == [tokenizer.bos_id, *ids("user: a <s> b </s>"), tokenizer.eos_id]
    assert "the checkpoint's chat template cannot be used here: no system" in error_of(refused, 400)["message"]


TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}{% endfor %}"
)
CALLING = '{"name": "weather", "parameters": {"city": "Rom"}}'


@pytest.mark.parametrize(
    ("said", "text", "calls"),
    [
        (CALLING, "", 1),
        (f"[{CALLING}, {CALLING}]", "", 2),
        (f"Let me see. <tool_call>\n{CALLING}\n</tool_call> <tool_call>{CALLING}", "Let me see. ", 2),
        ("a < b <tool_ca", "a < b <tool_ca", 0),
    ],
)
def test_calls_of_tools(said, text, calls):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    engine = FakeEngine(says=saying(said), context=2000)
    body = {"messages": [{"role": "user", "content": "Well?"}], "tools": [TOOL], "max_tokens": 200}
    whole, stream, without = ask(
        engine,
        lambda c: c.post("/v1/chat/completions", body),
        lambda c: c.post("/v1/chat/completions", body | {"stream": True}),
        lambda c: c.post("/v1/chat/completions", body | {"tool_choice": "none"}),
        shown=served(tokenizer, "template"),
    )
    choice = whole.json["choices"][0]
    found = choice["message"].get("tool_calls", [])
    assert len(found) == calls
    assert (choice["message"]["content"] or "") == text
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    for call in found:
        assert (call["type"], call["function"]["name"]) == ("function", "weather")
        assert json.loads(call["function"]["arguments"]) == {"city": "Rom"}
    deltas = [event["choices"][0]["delta"] for event in stream.events[:-1]]
    assert "".join(delta["content"] for delta in deltas) == text
    streamed = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in streamed] == list(range(calls))
    assert [call["function"] for call in streamed] == [call["function"] for call in found]
    assert stream.events[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert without.json["choices"][0]["message"]["content"] == said

    # What a tool's description holds is text, and its name is in the prompt; without tools it is not.
    told, _, untold = (BYTES.decode([token for token in request.prompt if token > 2]) for request in engine.admitted)
    assert '"name": "weather"' in told
    assert "How </s> it is" in told
    assert "weather" not in untold


def test_fields_that_clients_send_back_or_add():
    """Names and thoughts of messages; a function without parameters, a call without arguments; a template's variables."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{% if m.name %} ({{ m.name }}){% endif %}: {{ m.content }}"
        "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
        "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}; "
        "{% endfor %}{{ tools | tojson }}{% if add_generation_prompt %}assistant: {{ mood }}{% endif %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": ""}}
    messages = [
        {"role": "user", "content": "a", "name": "Ann", "reasoning_content": None},
        {"role": "assistant", "content": "b", "name": "Bot", "reasoning": "hm"},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "well"},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "tool", "tool_call_id": "1", "content": None},
    ]
    now = {"type": "function", "function": {"name": "now", "strict": False}}
    body = {"messages": messages, "tools": [now], "chat_template_kwargs": {"mood": "glad"}}
    begun = {"messages": [messages[0], {"role": "assistant", "content": "Onc"}], "continue_final_message": True}
    engine = FakeEngine(says=saying("Hi!"), context=2000)
    answers = ask(
        engine,
        lambda c: c.post("/v1/chat/completions", body),
        lambda c: c.post("/v1/chat/completions", begun),
        lambda c: c.post("/v1/chat/completions", begun | {"add_generation_prompt": False}),
        lambda c: c.post("/v1/chat/completions", begun | {"add_generation_prompt": True}),
        lambda c: c.post("/v1/chat/completions", begun | {"continue_final_message": False}),
        shown=served(tokenizer, "template"),
    )
    assert [answer.status for answer in answers] == [200, 200, 200, 400, 200]
    told = [tokenizer.decode(request.prompt) for request in engine.admitted]
    first = "user (Ann): a; "
    assert told[0].startswith(f"{first}assistant (Bot): b[hm]; user: c; assistant: [well]now{{}}; tool: noon; tool: ; [{{")
    assert told[0].endswith("]assistant: glad")
    assert told[1] == told[2] == f"{first}assistant: Onc"
    assert told[3] == f"{first}assistant: Onc; nullassistant: "


def test_special_tokens_in_a_text_where_asked_for():
    text = "<s>a</s>"
    plain, special, *_ = ask(
        engine := FakeEngine(says=saying("Hi!")),
        lambda c: c.post("/tokenize", {"prompt": text, "add_special_tokens": False}),
        lambda c: c.post("/tokenize", {"prompt": text, "add_special_tokens": False, "parse_special": True}),
        lambda c: c.complete(text, add_special_tokens=False, parse_special=True),
        lambda c: c.complete(text, add_special_tokens=False),
    )
    named = [BYTES.bos_id, *ids("a"), BYTES.eos_id]
    assert plain.json["tokens"] == ids(text)
    assert special.json["tokens"] == named
    assert [list(request.prompt) for request in engine.admitted] == [named, ids(text)]


def test_strict_tools_and_a_single_call_follow_the_grammar():
    pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    engine = FakeEngine(says=lambda request: [tokenizer.eos_id])
    ask(
        engine,
        lambda c: c.chat("Well?", tools=[TOOL]),
        lambda c: c.chat("Well?", tools=[TOOL, STRICT | {"function": {"name": "b", "strict": True}}]),
        lambda c: c.chat("Well?", tools=[TOOL], parallel_tool_calls=False),
        shown=served(tokenizer, "template"),
    )
    assert [request.constraint is not None for request in engine.admitted] == [False, True, True]


def test_usage_in_every_chunk():
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = ask(FakeEngine(says=saying("abc")), lambda c: c.complete("a", stream=True, stream_options=options)).events
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert events[-2]["choices"] == []


REFUSED = [
    ({"prompt": "a", "bogus": 1}, "bogus", "'bogus': unknown"),
    ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty", "must be 0"),
    ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias", "must be {}"),
    ({"prompt": "a", "suffix": "end"}, "suffix", 'must be ""'),
    ({"prompt": "a", "best_of": 3}, "best_of", "best_of=3"),
    ({"prompt": "a", "n": 0}, "n", "n=0 must be an integer from 1 to 128"),
    ({"prompt": ["a"] * 65, "n": 2}, "n", "more than 128 choices"),
    ({"prompt": "a", "temperature": -1}, "temperature", "temperature=-1"),
    ({"prompt": "a", "stop": ""}, "stop", "from 1 to 1000"),
    ({"prompt": "a", "stop": ["\ud800"]}, "stop[0]", "surrogate"),
    ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ({"prompt": "a", "\ud800": 1}, "\\ud800", "unknown; omit it"),
    ({"prompt": [259]}, "prompt[0]", "from 0 to 258"),
    ({"prompt": []}, "prompt", "from 1 to"),
    ({"prompt": ["a", 5]}, "prompt[1]", "text"),
    ({}, "prompt", "missing"),
    ({"prompt": "", "add_special_tokens": False}, "prompt", "no tokens"),
    ({"prompt": "a", "max_tokens": 511}, "max_tokens", "context of 512"),
    ({"prompt": "a" * 512}, "prompt", "context of 512"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
    ({"prompt": "a", "min_tokens": 3, "max_tokens": 2}, "min_tokens", "at most max_tokens=2"),
    ({"prompt": "a", "stream_options": {}}, "stream_options", "stream=true"),
    ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"prompt": "a", "response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "response_format"),
    ({"prompt": "a", "response_format": {"type": "regex", "regex": "("}}, "response_format", "cannot be used"),
    ([], None, "must be a JSON object"),
]


def test_invalid_completions_name_their_field():
    engine = FakeEngine()
    answers = ask(engine, *(lambda c, body=body: c.post("/v1/completions", body) for body, _, _ in REFUSED))
    for (body, param, said), answer in zip(REFUSED, answers, strict=True):
        error = error_of(answer, 400)
        assert error["param"] == param, body
        assert said in error["message"], body
        assert error["type"] == "invalid_request_error"
    assert engine.admitted == []
    assert error_of(answers[0], 400)["code"] == "unknown_field"
    too_long = answers[[body for body, *_ in REFUSED].index({"prompt": "a" * 512})]
    assert error_of(too_long, 400)["code"] == "context_length_exceeded"


def test_fields_without_effect_are_accepted():
    body = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "suffix": None, "best_of": 1, "user": "me"}
    body |= {"stop": None, "n": 1.0, "max_tokens": None, "response_format": {"type": "text"}, "model": "fake"}
    assert ask(FakeEngine(), lambda c: c.complete("a", **body)).status == 200
    body = {"tools": [], "tool_choice": "none", "store": False, "metadata": {}, "top_logprobs": None, "functions": None}
    assert ask(FakeEngine(), lambda c: c.chat("a", **body)).status == 200


TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "How </s> it is", "parameters": {"type": "object", "properties": {}}},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
STRICT = {"type": "function", "function": {"name": "weather", "strict": True}}


def no_object(schema):
    return {"type": "function", "function": {"name": "weather", "parameters": schema}}


def asked(content="a", **message):
    return {"messages": [{"role": "user", "content": content, **message}]}


# Of a format without tools.
CHATS_REFUSED = [
    ({"messages": []}, "messages", "from 1 to"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    (asked(role="judge"), "messages[0].role", "judge"),
    (asked(role="tool"), "messages", "tool"),
    (asked([{"type": "image_url", "image_url": {}}]), "messages[0].content[0].type", "image_url"),
    (asked(colour=1), "messages[0].colour", "unknown"),
    (asked(tool_calls=[1]), "messages[0].tool_calls", ""),
    (asked(name=1), "messages[0].name", ""),
    (asked() | {"continue_final_message": True}, "messages", ""),
    (asked() | {"add_generation_prompt": False}, "add_generation_prompt", ""),
    (asked() | {"chat_template_kwargs": {"thinking": True}}, "messages", "has no arguments"),
    (asked() | {"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    (asked() | {"tools": [TOOL]}, "tools", "does not support tools"),
    (asked() | {"tools": [TOOL], "tool_choice": "any"}, "tool_choice", ""),
    (asked() | {"top_logprobs": 2}, "top_logprobs", ""),
    (asked() | {"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", ""),
]
TOOLS_REFUSED = [
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": [TOOL], "tool_choice": NAMED | {"function": {"name": "stocks"}}}, "tool_choice", "is not one of the tools"),
    ({"tools": [TOOL], "tool_choice": NAMED | {"type": "x"}}, "tool_choice.type", 'must be "function"'),
    ({"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "combined with tool_choice"),
    ({"tools": [TOOL, STRICT], "min_tokens": 2}, "min_tokens", "combined with strict tools"),
    ({"tools": [no_object({"type": "string"})], "tool_choice": NAMED}, "tools", "type='string'"),
    ({"tools": [no_object(json.loads('{"a":' * 900 + "1" + "}" * 900))]}, "messages", "nested too deeply"),
    ({"tools": [no_object({"properties": {"a": {"type": "b"}}})], "tool_choice": NAMED}, "tools", "cannot be used"),
]


@pytest.mark.parametrize("tools", [False, True])
def test_invalid_chats_name_their_field(tools):
    pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    engine, shown = FakeEngine(), served(tokenizer, "template") if tools else served()
    cases = [(asked() | body, param, said) for body, param, said in TOOLS_REFUSED] if tools else CHATS_REFUSED
    calls = (lambda c, body=body: c.post("/v1/chat/completions", body) for body, _, _ in cases)
    for (body, param, said), answer in zip(cases, ask(engine, *calls, shown=shown), strict=True):
        error = error_of(answer, 400)
        assert error["param"] == param, body
        assert said in error["message"], body
    assert engine.admitted == []


def test_a_model_without_a_chat_format():
    shown = served(chat=None)
    chat, models = ask(FakeEngine(), lambda c: c.chat("a"), lambda c: c.get("/v1/models"), shown=shown)
    assert "fake does not support chat: it has no template" in error_of(chat, 400)["message"]
    assert models.json["data"][0]["chat"] is False
    assert models.json["data"][0]["memory"] == {}


def test_invalid_bodies():
    deep = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for content in (b"", b"{", b"\xff", b'{"prompt": NaN}', b'{"n": ' + b"9" * 5000 + b"}", deep):
        error = error_of(ask(FakeEngine(), lambda c, content=content: c.post("/v1/completions", content=content)), 400)
        assert error["message"].startswith("the body is")
    kinds = ask(
        FakeEngine(),
        lambda c: c.post("/v1/completions", {"prompt": "a"}, content_type="text/plain"),
        lambda c: c.post("/v1/completions", {"prompt": "a"}, content_type=""),
        lambda c: c.post("/v1/completions", {"prompt": "a"}, content_type="application/json; charset=utf-8"),
    )
    assert [kind.status for kind in kinds] == [415, 415, 200]
    honest, silent = ask(
        FakeEngine(),
        lambda c: c.post("/v1/completions", content=b"x", content_length="101"),
        lambda c: c.complete("x" * 100),
        largest_body=100,
    )
    assert error_of(honest, 413) == error_of(silent, 413)


def test_unknown_paths_and_methods():
    missing, method, model = ask(
        FakeEngine(), lambda c: c.get("/v2"), lambda c: c.get("/v1/completions"), lambda c: c.complete("a", model="gpt")
    )
    assert error_of(missing, 404)["type"] == "not_found_error"
    assert error_of(method, 405)
    assert method.headers["allow"] == "POST"
    assert error_of(model, 404)["code"] == "model_not_found"


def test_a_full_queue_admits_nothing_of_a_request():
    engine = FakeEngine(most_waiting=3)

    async def conversation(client):
        refused = await client.complete(["a", "b", "c", "d"])
        await asyncio.sleep(0)
        engine.step()
        assert not engine.waiting + engine.running
        return refused

    answer = talk(engine, conversation, thread=False)
    assert engine.admitted == []  # not even for a moment, in which others would be refused
    assert error_of(answer, 429)["code"] == "queue_full"
    assert answer.headers["retry-after"] == "2"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("turns", [0, 3])
def test_a_client_that_leaves_frees_its_rows(stream, turns):
    """While it waits (no turn), and while it is decoded."""
    engine = FakeEngine(says=saying("x" * 300), rows=1)

    async def conversation(client):
        body = {"prompt": ["a", "b"], "max_tokens": 300, "stream": stream}
        call = client.begin("POST", "/v1/completions", body)
        await until(lambda: engine.waiting)
        for _ in range(turns):
            engine.step()
            await asyncio.sleep(0)
        call.leave()
        await asyncio.wait_for(call.task, 20)
        engine.step()
        assert not engine.waiting + engine.running
        assert not client.service.bridge.open
        assert len(asyncio.all_tasks()) == 1
        return (await client.get("/metrics")).body.decode()

    metrics = talk(engine, conversation, thread=False)
    assert engine.finished == {"cancelled": 2}
    status = 200 if stream and turns else 499
    assert f'http_responses_total{{path="/v1/completions",status="{status}"}} 1.0' in metrics


def test_an_engine_that_fails():
    whole = ask(FakeEngine(fail_at=0), lambda c: c.complete("a"))
    assert "a device is on fire" in error_of(whole, 500)["message"]
    engine = FakeEngine(says=saying("abc"), fail_at=2)

    async def conversation(client):
        call = client.begin("POST", "/v1/completions", {"prompt": "a", "stream": True})
        await until(lambda: engine.waiting)
        engine.step()
        await until(lambda: call.sent)
        with pytest.raises(RuntimeError):
            engine.run()
        return await call.response()

    stream = talk(engine, conversation, thread=False)
    assert stream.status == 200
    first, *_, last = stream.events
    assert first["choices"][0]["text"] == "a"
    assert "a device is on fire" in last["error"]["message"]


def test_unexpected_exceptions(monkeypatch):
    """It is a 500 in the form of all errors, and is counted as one."""
    monkeypatch.setattr(FakeEngine, "submit", lambda self, request, deliver: 1 / 0)

    async def conversation(client):
        call = client.begin("POST", "/v1/completions", {"prompt": "a"})
        with pytest.raises(ZeroDivisionError):  # for the server's log
            await call.task
        call.task = asyncio.sleep(0)
        return await call.response(), await client.get("/metrics")

    answer, metrics = talk(FakeEngine(), conversation)
    assert "ZeroDivisionError" in error_of(answer, 500)["message"]
    assert b'http_responses_total{path="/v1/completions",status="500"} 1.0' in metrics.body


@pytest.mark.parametrize("turns", [0, 3])
def test_a_request_that_takes_too_long_frees_its_row(turns):
    """While it waits (no turn), and while it is decoded, by an engine that does not answer any more."""
    engine = FakeEngine(says=saying("x" * 300), rows=1)

    async def conversation(client):
        call = client.begin("POST", "/v1/completions", {"prompt": "a", "max_tokens": 300})
        await until(lambda: engine.waiting)
        for _ in range(turns):
            engine.step()
        answer = await call.response()
        engine.step()
        return answer

    assert error_of(talk(engine, conversation, thread=False, seconds=0.05), 504)["code"] == "timeout"
    assert engine.finished == {"cancelled": 1}


def test_health_and_readiness():
    engine = FakeEngine()

    async def conversation(client):
        service = client.service
        engine.last_iteration -= 1000  # long idle is healthy
        statuses = [(await client.get("/health")).status, (await client.get("/ready")).status]
        call = client.begin("POST", "/v1/completions", {"prompt": "a"})
        await until(lambda: engine.waiting)
        statuses.append((await client.get("/health")).status)  # has only just got work
        service._busy_since -= 6
        wedged = await client.get("/health")
        engine.step()
        statuses.append((await client.get("/health")).status)
        while engine.step():
            await asyncio.sleep(0)
        await call.response()
        service.begin_drain()
        drained = [await client.get("/health"), await client.get("/ready"), await client.complete("a")]
        return statuses, wedged, drained

    statuses, wedged, (health, ready, refused) = talk(engine, conversation, thread=False)
    assert statuses == [200] * 4
    assert "not finished an iteration for 6 s" in error_of(wedged, 503)["message"]
    assert health.status == 200
    assert error_of(ready, 503)["code"] == "not_ready"
    assert error_of(refused, 503)["code"] == "draining"


def test_the_metrics():
    engine = FakeEngine(says=saying("abc"))
    _, _, metrics = ask(engine, lambda c: c.complete("a", n=2), lambda c: c.get("/wp-admin"), lambda c: c.get("/metrics"))
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = dict(line.rsplit(" ", 1) for line in metrics.body.decode().splitlines() if not line.startswith("#"))
    assert lines["llama_jax:num_requests_running"] == lines["llama_jax:num_requests_waiting"] == "0.0"
    assert lines["llama_jax:generation_tokens_total"] == "6.0"
    assert lines["llama_jax:time_to_first_token_seconds_count"] == "2.0"
    assert lines["llama_jax:e2e_request_latency_seconds_count"] == "1.0"
    assert lines['llama_jax:e2e_request_latency_seconds_bucket{le="+Inf"}'] == "1.0"
    assert lines['llama_jax:request_success_total{finished_reason="stop"}'] == "2.0"
    assert lines['llama_jax:http_responses_total{path="other",status="404"}'] == "1.0"


def test_tokens_and_back():
    text = "Grüße </s> 🦙"
    there, bare, strange = ask(
        FakeEngine(),
        lambda c: c.post("/tokenize", {"prompt": text}),
        lambda c: c.post("/tokenize", {"prompt": text, "add_special_tokens": False}),
        lambda c: c.post("/detokenize", {"tokens": [-1]}),
    )
    assert there.json == {"count": len(ids(text)) + 1, "max_model_len": 512, "tokens": [BYTES.bos_id, *ids(text)]}
    assert bare.json["tokens"] == ids(text)
    assert error_of(strange, 400)
    back = ask(FakeEngine(), lambda c: c.post("/detokenize", {"tokens": there.json["tokens"]}))
    assert back.json == {"prompt": text}


@pytest.mark.parametrize("metrics", [200, 401])
def test_what_needs_an_api_key(metrics):
    access = Access(api_key="s3crét", open_metrics=metrics == 200)
    paths = ("/v1/models", "/metrics", "/openapi.json", "/health", "/ready", "/")
    answers = ask(FakeEngine(), *(lambda c, path=path: c.get(path) for path in paths), access=access)
    assert [answer.status for answer in answers] == [401, metrics, 401, 200, 200, 200]
    error = error_of(answers[0], 401)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert answers[0].headers["www-authenticate"] == "Bearer"


# The last bytes of the last three are A0, 85 and A9: blanks in latin-1, two of them.
@pytest.mark.parametrize("key", ["s3crét", "voilà", "k\u0085", "é"])
def test_api_keys(key):
    right = [f"Bearer {key}", f"bearer {key}", f"Bearer  {key} \t"]
    wrong = [f"Bearer {key}\u00a0", f"Bearer {key[:-1]}", f"Basic {key}", "Bearer"]
    calls = (lambda c, key=key: c.get("/v1/models", authorization=key) for key in (*right, *wrong))
    answers = ask(FakeEngine(), *calls, access=Access(api_key=key))
    assert [answer.status for answer in answers] == [200] * 3 + [401] * 4


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("[::1]:8000", True),
        ("10.1.2.3", True),
        ("models.example.org:80", True),
        ("evil.example.org", False),
        ("127.0.0.1.example.org", False),
        ("[", False),
        ("", False),
    ],
)
def test_unknown_hosts(host, known):
    access = Access(hosts=("models.example.org",))
    answer = ask(FakeEngine(), lambda c: c.get("/v1/models", host=host), access=access)
    if known:
        assert answer.status == 200
    else:
        assert error_of(answer, 403)["code"] == "unknown_host"
        assert ask(FakeEngine(), lambda c: c.get("/v1/models", host=host), access=Access(hosts=("*",))).status == 200
        twice = ask(FakeEngine(), lambda c: c.get("/v1/models", host="127.0.0.1", Host=host or "x"), access=access)
        assert error_of(twice, 400)


def test_pages_of_other_origins():
    def post(origin, **more):
        return lambda c: c.post("/v1/completions", {"prompt": "a"}, origin=origin, **more)

    own, strange, null = ask(FakeEngine(), post("http://127.0.0.1"), post("https://evil.example"), post("null"))
    assert [own.status, strange.status, null.status] == [200, 403, 403]
    assert not [name for name in own.headers if name.startswith("access-control")]
    access = Access(origins=("https://good.example",), api_key="k")
    asked = {"access_control_request_method": "POST"}
    preflight, good, strange = ask(
        FakeEngine(),
        lambda c: c.begin("OPTIONS", "/v1/completions", origin="https://good.example", **asked).response(),
        post("https://good.example", authorization="Bearer k"),
        post("https://evil.example", authorization="Bearer k"),
        access=access,
    )
    assert (preflight.status, good.status, strange.status) == (204, 200, 403)
    for answer in (preflight, good):
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert "access-control-allow-credentials" not in answer.headers
    assert preflight.headers["access-control-allow-headers"] == "Authorization, Content-Type"


def test_too_many_connections():
    access = Access(most_connections=3)
    refused, health = ask(FakeEngine(), lambda c: c.complete("a"), lambda c: c.get("/health"), access=access, connections=4)
    assert error_of(refused, 429)["code"] == "too_many_connections"
    assert refused.headers["connection"] == "close"
    assert health.status == 200


def test_openapi_describes_what_is_checked():
    """Every field of the tables is there, with a server's own limits, and nothing that is not JSON Schema."""
    import jsonschema

    described = ask(FakeEngine(), lambda c: c.get("/openapi.json")).json
    for path, methods in described["paths"].items():
        for operation in methods.values():
            schema = operation.get("requestBody", {"content": {"application/json": {"schema": {}}}})
            schema = schema["content"]["application/json"]["schema"]
            jsonschema.Draft202012Validator.check_schema(schema)
            if path == "/v1/completions":
                assert schema["properties"]["stop_token_ids"]["items"]["maximum"] == 258
                for body, *_ in REFUSED[:6]:
                    assert jsonschema.Draft202012Validator(schema).is_valid(body) == ("best_of" in body)
                jsonschema.validate({"prompt": [[1], [2]], "max_tokens": None, "stop": "x"}, schema)
    for name, schema in described["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert name[0].isupper()
    assert json.dumps(described)
