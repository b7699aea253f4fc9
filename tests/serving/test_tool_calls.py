"""Calls of tools in replies: in which forms they are recognized, and that they render when they come back."""

import json
import os
import re
from contextlib import closing

import numpy as np
import pytest
import vocabularies
from dialect_templates import LLAMA_GUARD, QWEN, TOOL_TEMPLATES, WITHOUT_CALLS
from hypothesis import example, given
from hypothesis import strategies as st

from llama_jax.errors import GenerationError, UserError
from llama_jax.serving.grammar import Grammars
from llama_jax.serving.tool_calls import ToolText
from llama_jax.serving.tool_grammar import grammar_of_calls
from llama_jax.tokenizers import encode_chat, reply_ends
from llama_jax.tokenizers.chat_template import message_form, shared_renderer
from llama_jax.tokenizers.tool_dialects import dialect_of

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "text": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = {"add": ADD, "get_time": None, "web.search": {"type": "object"}}
CALL = '{"name": "add", "arguments": {"a": 1}}'
AGAIN = '{"name": "add", "arguments": {"a": 2}}'
A, B = ("add", {"a": 1}), ("add", {"a": 2})
# Replies as models write them: the reply, its calls, and the text that remains.
REPLIES = {
    "object": (CALL, [A], ""),
    "list": (f"[{CALL}, {AGAIN}]", [A, B], ""),
    "semicolon": (f"{CALL}; {AGAIN}", [A, B], ""),
    "lines": (f"{CALL}\n{AGAIN}", [A, B], ""),
    "fenced": (f"```json\n{CALL}\n```", [A], ""),
    "text after it": (f"{CALL}\n\nI will wait.", [A], "\n\nI will wait."),
    "OpenAI's own form": ('{"type": "function", "function": ' + CALL + "}", [A], ""),
    "arguments as a text": ('{"name": "add", "arguments": "{\\"a\\": 1}"}', [A], ""),
    "line break in an argument": (
        '{"name": "add", "arguments": {"a": 1, "text": "x\ny"}}',
        [("add", {"a": 1, "text": "x\ny"})],
        "",
    ),
    "python tag": (f"<|python_tag|>{CALL}", [A], ""),
    "python tag, built-in": ('<|python_tag|>web.search.call(query="x)")', [("web.search", {"query": "x)"})], ""),
    "pythonic": ("[add(a=1), get_time()]", [A, ("get_time", {})], ""),
    "pythonic values": (
        "[add(a=-1, text='it\\'s', flag=True, none=null, more=[1.5, {'k': (2, 3)}])]",
        [("add", {"a": -1, "text": "it's", "flag": True, "none": None, "more": [1.5, {"k": [2, 3]}]})],
        "",
    ),
    "hermes": (f"<tool_call>\n{CALL}\n</tool_call>", [A], ""),
    "hermes, two": (f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{AGAIN}\n</tool_call>", [A, B], ""),
    "hermes, no closing": (f"<tool_call>{CALL}", [A], ""),
    "hermes, null": ('<tool_call>\n{"name": "get_time", "arguments": null}\n</tool_call>', [("get_time", {})], ""),
    "hermes, text around": (f"I add.\n<tool_call>\n{CALL}\n</tool_call>\nDone.", [A], "I add.\n\nDone."),
    "hermes, tag in an argument": (
        '<tool_call>\n{"name": "add", "arguments": {"text": "</tool_call><tool_call>"}}\n</tool_call>',
        [("add", {"text": "</tool_call><tool_call>"})],
        "",
    ),
    "hermes, one of no tool": (
        f'<tool_call>{CALL}</tool_call> <tool_call>{{"name": "other", "arguments": {{}}}}</tool_call>',
        [A],
        ' <tool_call>{"name": "other", "arguments": {}}</tool_call>',
    ),
    "qwen3-coder": ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", [A], ""),
    "qwen3-coder, text": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=text>\n12\n\n</p>\n</parameter>\n</function>",
        [("add", {"a": 1, "text": "12\n\n</p>"})],
        "",
    ),
    "qwen3-coder, without a schema": (
        "<function=get_time><parameter=x>[1, true]</parameter><parameter=y>z w</parameter></function>",
        [("get_time", {"x": [1, True], "y": "z w"})],
        "",
    ),
    "functionary": ('<function=add>{"a": 1}</function>', [A], ""),
    "functionary, two": ('<function=add>{"a": 1}</function>\n<function=add>{"a": 2}</function>', [A, B], ""),
    "mistral": (f"[TOOL_CALLS] [{CALL}]", [A], ""),
    "mistral, arguments": ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}', [A, B], ""),
    "mistral, with an id": ('[TOOL_CALLS]add[CALL_ID]abcdefgh1[ARGS]{"a": 1}', [A], ""),
    "mistral, tokens hidden": ('add{"a": 1}add{"a": 2}', [A, B], ""),
    "mistral, text and tokens": ('Let me add.[TOOL_CALLS]add[ARGS]{"a": 1}', [A], "Let me add."),
    "command r7b": (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>',
        [A],
        "",
    ),
    "granite": (f"<|tool_call|>[{CALL}]", [A], ""),
    "deepseek": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        [A],
        "",
    ),
    "deepseek, tokens hidden": ('functionadd\n```json\n{"a": 1}\n```', [A], ""),
    "a number beyond float64": (
        '{"name": "add", "arguments": {"a": -1e999}}',
        [("add", {"a": -1.7976931348623157e308})],
        "",
    ),
    "a long integer": (
        '{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}",
        [("add", {"a": 1.7976931348623157e308})],
        "",
    ),
    "half a surrogate pair": ('{"name": "add", "arguments": {"text": "\\ud800"}}', [("add", {"text": "?"})], ""),
    "a function by its name": ('{"type": "function", "function": "add", "parameters": {"a": 1}}', [A], ""),
    "after a thought": (
        f"<think>\n<tool_call>{AGAIN}</tool_call>?\n</think>\n\n{CALL}",
        [A],
        f"<think>\n<tool_call>{AGAIN}</tool_call>?\n</think>",
    ),
    "after a thought, in tags": (f"Hm.</think>\n<tool_call>{CALL}</tool_call>", [A], "Hm.</think>"),
    "Llama 4's tags": ("<|python_start|>[add(a=1)]<|python_end|>", [A], ""),
    "Nemotron": (f"<TOOLCALL>[{CALL}]</TOOLCALL>", [A], ""),
    "Phi-4 mini": (f"functools[{CALL}]", [A], ""),
    "deepseek, a newer form": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
        [A],
        "",
    ),
    "a name in letters of JSON": ('{"name": "\\u0061dd", "arguments": {"a": 1}}', [A], ""),
}
TEXTS = [
    "add numbers",
    "additional {",
    "a < b <tool_ca",
    "I will use the tool add: " + CALL,
    '{"name": "Ann", "arguments": {}}',
    '{"name": "other", "parameters": {"a": 1}}',
    '{"name": "add", "arguments": [1]}',
    '{"name": "add", "arguments": "a=1"}',
    '{"name": "add", "arguments": {"a": NaN}}',
    '{"name": "add", "arguments": {"a": 1}',
    f"[{CALL}, 1]",
    "[1, 2]",
    "[add(1)]",
    "[add(a=b)]",
    "[add(**{'a': 1})]",
    "[open(a=1)]",
    '{"name": "add", "description": "Adds."}',
    '{"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}',
    "add(a=1) gives 1",
    "```python\nadd(a=1)\n```\nThis adds.",
    "[add" + ".a" * 400 + "(a=1)]",
    f"<think>I could write <tool_call>{CALL}</tool_call></think>No.",
    "<tool_call>\nadd\n</tool_call>",
    "<function=other>{}</function>",
    "<function=add>text</function>",
    "[TOOL_CALLS]other[ARGS]{}",
    "x" + "[" * 3000,
    '{"a":' * 3000,
    "[add(a=" + "(" * 3000,
]


def read(parts, tools=TOOLS, dialect=None):
    """What is shown, and the calls, of a reply that comes in parts."""
    reply = ToolText(tools, dialect)
    shown = "".join(map(reply.push, parts))
    rest, calls = reply.finish()
    return shown + rest, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", REPLIES)
def test_forms_of_calls(name):
    reply, calls, text = REPLIES[name]
    assert read([reply]) == (text, calls)
    assert read(reply) == (text, calls)  # letter by letter


@pytest.mark.parametrize(
    "part", ["<tool_call>[", "<tool_call>add(", "<tool_call><function=add><parameter=a>", "[TOOL_CALLS]{"]
)
def test_a_reply_that_repeats_a_beginning(part):
    """Trying each of them to its end would take minutes."""
    text = part * 8000
    assert read([text]) == (text, [])


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_what_is_no_call_stays_text(text):
    assert read([text]) == (text, [])
    assert read(text[:200]) == (text[:200], [])


TAGS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<function=add>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
)
PARTS = (CALL, AGAIN, '{"a": 1}', "add", "a=1", "text ", "json", "```", "; ", "\n", " ", *'[](){}"')
PIECES = st.sampled_from([*TAGS, *PARTS])


@given(st.lists(PIECES, max_size=12).map("".join), st.data())
@example('function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```', None)
@example("add    " + '{"a": 1}', None)
def test_any_division_of_the_text_gives_the_same_calls(text, data):
    whole = read([text])
    assert read(text) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        assert read([text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole


# --- the grammar, and the way back -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=TOOL_TEMPLATES)
def model(request):
    """A tokenizer, its dialect, and the grammars of its vocabulary."""
    pytest.importorskip("llguidance")
    template, dialect, tokens = TOOL_TEMPLATES[request.param]
    tokenizer = vocabularies.with_tokens(template, tokens)
    with closing(Grammars(tokenizer, tokenizer.vocab_size, reply_ends(tokenizer))) as grammars:
        yield tokenizer, dialect, grammars


LOOKUP = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["x </tool_call> y", "ü\n"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "query": {"type": "string"},
        "flag": {"type": "boolean"},
    },
    "required": ["count", "query"],
    "additionalProperties": False,
}
FUNCTIONS = [
    {"type": "function", "function": {"name": "lookup", "description": "looks up", "parameters": LOOKUP}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {each["function"]["name"]: each["function"].get("parameters") for each in FUNCTIONS}


def write_reply(tokenizer, constraint, random):
    """A random reply that a grammar allows, as ids without the end, and as shown text."""
    ids, ends = [], set(reply_ends(tokenizer))
    closers = {tokenizer.encode(letter, bos=False)[0] for letter in '"}])\n'} | {*tokenizer.special_tokens.values()}
    queue = []
    for _ in range(2000):
        mask = bits(constraint)
        choices = np.flatnonzero(mask)
        if len(choices) > 100 and not queue and random.random() < 0.2:  # free text, which only a tag ends
            queue = tokenizer.encode("\n</parameter>\n", bos=False)
        if queue and mask[queue[0]]:
            token = queue.pop(0)
        else:
            weights = np.array([20.0 if token in closers else 1.0 for token in choices])
            token, queue = int(random.choice(choices, p=weights / weights.sum())), []
        if token in ends:
            return ids, b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
        ids.append(token)
        constraint.accept(token)
    raise AssertionError(f"the reply does not end: {tokenizer.decode(ids)[:300]!r}")


def bits(constraint):
    """Whether each token is allowed."""
    return np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little")


def grammar(model, **options):
    tokenizer, _, grammars = model
    dialect = dialect_of(tokenizer.chat_template)
    form = message_form(tokenizer, shared_renderer(os.getpid()), True)
    names = options.pop("names", ["lookup", "now"])
    text = grammar_of_calls(dialect, FUNCTIONS, names, tokenizer.special_tokens, several=not form.one_call, **options)
    return dialect, grammars.lark(text, "grammar of the tools")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_what_the_grammar_allows_renders_when_it_comes_back(model, seed):
    """A history of three turns, each with calls that the grammar allows."""
    tokenizer = model[0]
    _, constraint = grammar(model)
    random = np.random.default_rng(seed)
    messages = [{"role": "user", "content": "Look <it> up."}]
    for _ in range(3):
        ids, text = write_reply(tokenizer, constraint.copy(), random)
        reply = ToolText(SCHEMAS, dialect_of(tokenizer.chat_template))
        content = "".join(map(reply.push, text))
        rest, calls = reply.finish()
        assert content + rest == "", (text, calls)
        assert calls
        for call in calls:
            arguments = json.loads(call.arguments)
            assert set(arguments) >= ({"count", "query"} if call.name == "lookup" else set())
            assert type(arguments.get("count", 0)) is int
            assert type(arguments.get("query", "")) is str
        called = [call.as_dict() for call in calls]
        messages.append({"role": "assistant", "content": None, "tool_calls": called})
        messages += [{"role": "tool", "tool_call_id": call.id, "content": 'Found "it".\n'} for call in calls]
        prompt = tokenizer.decode(encode_chat(tokenizer, messages, tools=FUNCTIONS))
        for call in calls:
            assert call.name in prompt
        assert ids
    answered = [*messages, {"role": "assistant", "content": "Here."}, {"role": "user", "content": "Thanks."}]
    assert "Thanks." in tokenizer.decode(encode_chat(tokenizer, answered, tools=FUNCTIONS))


def test_strict_calls_are_optional_and_follow_the_grammar(model):
    tokenizer = model[0]
    dialect, constraint = grammar(model, optional=True)

    def allowed(text, special=True):
        found = constraint.copy()
        for token in tokenizer.encode(text, bos=False, special=special):
            if not bits(found)[token]:
                return False
            found.accept(token)
        return any(bits(found)[list(reply_ends(tokenizer))])

    assert allowed("I do not know.\nReally: {} <b>")
    head = dialect.opening + dialect.before + "now" + dialect.middle
    tail = dialect.after + dialect.closing
    empty = {"json": "{}"}.get(dialect.arguments, "")
    assert allowed(head + empty + tail)
    wrong = {"json": '{"count": 1}', "tags": "<parameter=count>\n1\n</parameter>\n", "python": "count=1"}[dialect.arguments]
    assert not allowed(head.replace("now", "lookup") + wrong + tail)


def test_a_parameter_that_no_call_can_express_is_named():
    dialect = dialect_of(TOOL_TEMPLATES["qwen3-coder"].template)
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "a+"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(UserError, match="the parameter 'x' has pattern"):
        grammar_of_calls(dialect, [tool], ["f"], {}, several=False)


def test_a_template_of_parts_gets_parts():
    tokenizer = vocabularies.with_tokens(LLAMA_GUARD, ["<|eot_id|>"])
    chat = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": [{"type": "text", "text": "So."}]}]
    text = tokenizer.decode(encode_chat(tokenizer, chat))
    assert text == "Judge the last Agent message.\nuser: How?\nassistant: So.\n"


def test_what_a_template_leaves_out_is_an_error():
    only_users = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | upper }}{% endif %}{% endfor %}{{ tools }}"
    tokenizer = vocabularies.with_tokens(only_users, [])
    user = {"role": "user", "content": "Hi."}
    assert tokenizer.decode(encode_chat(tokenizer, [user])) == "HI.None"
    with pytest.raises(GenerationError, match=r"the message 'Be brief.' of the role 'system' does not appear"):
        encode_chat(tokenizer, [{"role": "system", "content": "Be brief."}, user])
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {}}}
    with pytest.raises(GenerationError, match="of the role 'assistant' does not appear"):
        encode_chat(tokenizer, [user, {"role": "assistant", "content": None, "tool_calls": [call]}, user])
    silent = vocabularies.with_tokens("{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}tools{% endif %}", [])
    with pytest.raises(GenerationError, match="the tool 'lookup' does not appear"):
        encode_chat(silent, [user], tools=FUNCTIONS)


CALLED = {"id": "call_0123456789", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
SAID_AND_CALLED = [
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": CALLED["id"], "content": "noon"},
]


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_a_text_and_calls_of_one_message_both_arrive(name):
    """In one message or in two; Mistral Nemo's template omits the text and refuses two."""
    template, _, tokens = TOOL_TEMPLATES[name]
    tokenizer = vocabularies.with_tokens(template, tokens)
    after = [{"role": "assistant", "content": "Noon."}, {"role": "user", "content": "Thanks."}]
    assert "Thanks." in tokenizer.decode(encode_chat(tokenizer, [*SAID_AND_CALLED, *after], tools=FUNCTIONS))
    prompt = tokenizer.decode(encode_chat(tokenizer, SAID_AND_CALLED, tools=FUNCTIONS))
    if name == "mistral nemo":
        assert "Let me see" not in prompt
        return
    said, called = prompt.rindex("Let me see."), prompt.rindex("UTC")
    assert said < called < prompt.rindex("noon")
    assert "\\" not in prompt[said:called]  # the arguments are JSON, and not a text in JSON
    assert prompt[said:].count("now") == 1


def test_ids_of_other_servers_become_what_mistral_accepts():
    template, _, tokens = TOOL_TEMPLATES["mistral nemo"]
    tokenizer = vocabularies.with_tokens(template, tokens)
    prompt = tokenizer.decode(encode_chat(tokenizer, SAID_AND_CALLED, tools=FUNCTIONS))
    first, second = re.findall(r'"(?:call_)?id": "(.*?)"', prompt)
    assert first == second
    assert len(first) == 9


def test_results_follow_their_calls_where_a_message_has_one_call():
    template, _, tokens = TOOL_TEMPLATES["llama 3.1"]
    tokenizer = vocabularies.with_tokens(template, tokens)
    calls = [{"id": i, "type": "function", "function": {"name": "now", "arguments": {"zone": i}}} for i in "abc"]
    results = [{"role": "tool", "tool_call_id": i, "content": f"result {i}"} for i in "cab"]
    chat = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    prompt = tokenizer.decode(encode_chat(tokenizer, chat, tools=FUNCTIONS))
    found = re.findall(r'"zone": "(.)"|result (.)', prompt)
    assert "".join(call or result for call, result in found) == "aabbcc"


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_a_system_prompt_does_not_end_the_loop(name):
    """Mistral's templates write it only before a message of the user that is the last."""
    template, _, tokens = TOOL_TEMPLATES[name]
    tokenizer = vocabularies.with_tokens(template, tokens)
    chat = [SYSTEM, {**SAID_AND_CALLED[0]}, {**SAID_AND_CALLED[1], "content": None}, SAID_AND_CALLED[2]]
    for count in (2, 4):
        assert "When?" in tokenizer.decode(encode_chat(tokenizer, chat[:count], tools=FUNCTIONS))


def test_calls_that_a_template_ignores_are_written_into_the_content():
    tokenizer = vocabularies.with_tokens(
        WITHOUT_CALLS, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>")
    )
    ids = encode_chat(tokenizer, SAID_AND_CALLED, tools=FUNCTIONS)
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert 'Let me see.\n[{"name": "now", "arguments": {"zone": "UTC"}}]' in text
    assert ids.count(tokenizer.special_tokens["<|tool_call|>"]) == 2  # also in the description of the tools


def test_thoughts_of_earlier_replies_are_the_templates():
    """Their tags are tokens in the assistant's messages, and text in others; the template drops what is between them."""
    tokenizer = vocabularies.with_tokens(QWEN, ("<|im_start|>", "<|im_end|>", "<think>", "</think>"))
    thought = {"role": "assistant", "content": "<think>\nsecret\n</think>\n\nYes <|im_end|>."}
    asked = {"role": "user", "content": "Is <think> a tag?"}
    ids = encode_chat(tokenizer, [asked, thought, {"role": "user", "content": "Why?"}])
    text = tokenizer.decode(ids)
    assert "secret" not in text
    assert "Is <think> a tag?" in text
    assert "Yes <|im_end|>." in text


def test_strict_calls_leave_room_for_thoughts():
    tokens = (*TOOL_TEMPLATES["qwen"].tokens, "<think>", "</think>")
    tokenizer = vocabularies.with_tokens(QWEN, tokens)
    pytest.importorskip("llguidance")
    with closing(Grammars(tokenizer, tokenizer.vocab_size, reply_ends(tokenizer))) as grammars:
        text = grammar_of_calls(dialect_of(QWEN), FUNCTIONS, ["now"], tokenizer.special_tokens, several=False, optional=True)
        for reply in (
            '<think>\nHm.\n</think>\n\n{"a": 1}',
            "\n\n```\nnow()\n```",
            'Hm.<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ):
            constraint = grammars.lark(text, "grammar of the tools")
            for token in tokenizer.encode(reply, bos=False, special=True):
                assert bits(constraint)[token], reply
                constraint.accept(token)
