"""Lines of chats and preferences as they are published, and what is said of bad ones."""

import json

import pytest

from llama_jax.data import DataError
from llama_jax.data.chat_jsonl import read_chats, read_preferences

ASK, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def written(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def one(tmp_path, line, read=read_chats):
    (found,) = read(written(tmp_path, line))
    return found


@pytest.mark.parametrize(
    ("line", "prompt", "answer"),
    [
        ({"messages": [ASK, REPLY], "id": 3}, (), (ASK, REPLY)),
        ({"messages": [ASK, REPLY], "system": "Be brief."}, (), (SYSTEM, ASK, REPLY)),
        ({"messages": [SYSTEM, ASK, REPLY], "system": "Another."}, (), (SYSTEM, ASK, REPLY)),
        ({"messages": [{**ASK, "name": None, "tool_calls": None}, REPLY]}, (), (ASK, REPLY)),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, REPLY]},
         (), (ASK, REPLY)),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, (), (ASK, REPLY)),
        ({"conversations": [ASK, REPLY], "system": None}, (), (ASK, REPLY)),
        ({"prompt": "Once", "completion": " upon"}, "Once", " upon"),
        ({"prompt": [ASK], "completion": [REPLY]}, (ASK,), (REPLY,)),
        ({"prompt": [ASK], "completion": [REPLY], "system": "Be brief."}, (SYSTEM, ASK), (REPLY,)),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, (ASK,), (REPLY,)),
        ({"instruction": "Hi", "output": "Hello"}, (ASK,), (REPLY,)),
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, ({"role": "user", "content": "Add.\n\n1, 2"},),
         ({"role": "assistant", "content": "3"},)),
    ],
)  # fmt: skip
def test_every_published_format(tmp_path, line, prompt, answer):
    found = one(tmp_path, line)
    assert (found.prompt, found.answers, found.tools, found.line) == (prompt, (answer,), (), 1)


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_chats_with_tools(tmp_path, tools):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}
    answer = {"role": "tool", "content": "3", "name": "look"}
    found = one(tmp_path, {"messages": [ASK, call, answer, REPLY], "tools": tools})
    assert found.tools == tuple(TOOLS)
    assert found.answers == ((ASK, {**call, "content": ""}, answer, REPLY),)


@pytest.mark.parametrize(
    ("line", "prompt", "answers"),
    [
        ({"prompt": "Once", "chosen": " upon", "rejected": " more"}, "Once", (" upon", " more")),
        ({"prompt": [ASK], "chosen": [REPLY], "rejected": [SYSTEM, REPLY]}, (ASK,), ((REPLY,), (SYSTEM, REPLY))),
        ({"prompt": "Hi", "chosen": [REPLY], "rejected": [{**REPLY, "content": ""}]}, (ASK,),
         ((REPLY,), ({**REPLY, "content": ""},))),
        ({"chosen": [ASK, REPLY], "rejected": [ASK, {**REPLY, "content": "No"}]}, (ASK,),
         ((REPLY,), ({**REPLY, "content": "No"},))),
        ({"prompt": "Hi", "chosen": [ASK, REPLY], "rejected": [ASK, {**REPLY, "content": "No"}]}, (ASK,),
         ((REPLY,), ({**REPLY, "content": "No"},))),
    ],
)  # fmt: skip
def test_every_kind_of_preference(tmp_path, line, prompt, answers):
    found = one(tmp_path, line, read_preferences)
    assert (found.prompt, found.answers) == (prompt, answers)


@pytest.mark.parametrize(
    ("line", "ignored"),
    [
        ({"messages": [ASK, REPLY], "tools": None, "system": None, "images": None}, ()),
        ({"messages": [ASK, REPLY], "tools": [], "images": [], "id": 3, "score": 0.5}, ("images", "id", "score")),
        ({"messages": [{**ASK, "id": 1, "timestamp": "2026"}, {**REPLY, "weight": 1, "images": []}]},
         ("messages[].id", "messages[].images", "messages[].timestamp", "messages[].weight")),
        ({"conversations": [{"from": "human", "value": "Hi", "lang": "en"}, {"from": "gpt", "value": "Hello"}]},
         ("conversations[].lang",)),
        ({"messages": [SYSTEM, ASK, REPLY], "system": "Another."}, ("system",)),
        ({"messages": [ASK, {**REPLY, "tool_calls": []}], "prompt": "Hi", "prompt_id": "1"}, ("prompt", "prompt_id")),
        ({"messages": None, "prompt": "Once", "completion": " upon", "system": "Be brief."}, ("system",)),
        ({"instruction": "Hi", "input": None, "output": "Hello", "text": "Below is"}, ("text",)),
    ],
)  # fmt: skip
def test_fields_without_an_effect_are_listed(tmp_path, line, ignored):
    found = one(tmp_path, line)
    assert found.ignored == ignored
    for content in found.answers:
        assert isinstance(content, str) or all(set(message) == {"role", "content"} for message in content)


def test_a_prompts_system_message_comes_before_whole_conversations(tmp_path):
    answers = {"chosen": [ASK, REPLY], "rejected": [ASK, {**REPLY, "content": "No"}]}
    for line in ({"system": "Be brief."}, {"prompt": "Hi", "system": "Be brief."}, {"prompt": [SYSTEM, ASK]}):
        assert one(tmp_path, line | answers, read_preferences).prompt == (SYSTEM, ASK)


def test_lines_are_counted_as_an_editor_does(tmp_path):
    good = {"prompt": "a", "completion": "b"}
    path = written(tmp_path, good, "", "  ", good)
    assert [example.line for example in read_chats(path)] == [1, 4]


CHATS = [
    ('{"a": 1', r" is not JSON \(.* at column \d+\); JSONL has one object per line"),
    ([1], " is a list"),
    ({}, r"the fields are no fields; rename them to one of: messages; conversations; prompt and completion"),
    ({"text": "x"}, r"the fields are \['text'\]; rename them to one of"),
    ({"messages": []}, r"messages=\[\] must be a list with at least one message"),
    ({"messages": [ASK]}, "no message has the role 'assistant', so there is nothing to learn; remove the line"),
    ({"messages": [ASK, "Hi"]}, r"messages\[1\]='Hi' must be an object with role and content, or from and value"),
    ({"messages": [ASK, {"role": "bot", "content": ""}]}, r"messages\[1\].role='bot' must be one of system, user"),
    ({"messages": [{"content": ""}]}, r"messages\[0\].role, one of .*, is missing"),
    ({"conversations": [{"from": "human", "value": 3}]}, r"conversations\[0\].value=3 must be a text"),
    ({"messages": [ASK, {"role": "assistant", "content": None}]}, r"messages\[1\].content, a text, is missing"),
    ({"messages": [{**ASK, "content": [{"type": "image_url"}]}]}, r"messages\[0\].content\[0\]=.*a part of type text"),
    ({"messages": [ASK, {**REPLY, "weight": 0}, ASK, REPLY]}, r"messages\[1\].weight=0 is not supported.*into `completion`"),
    ({"messages": [{**ASK, "images": ["a.png"]}, REPLY]}, r"messages\[0\].images=\['a.png'\] is not supported"),
    ({"messages": [ASK, {"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
     r"messages\[1\].function_call=.* is not supported"),
    ({"messages": [ASK, {**REPLY, "reasoning_content": "Hm"}]}, r"messages\[1\].reasoning_content='Hm' is not supported"),
    ({"messages": [ASK, REPLY], "images": ["a.png"]}, r"images=\['a.png'\] is not supported"),
    ({"messages": None}, r"the fields are no fields, and as null \['messages'\]"),
    ({"messages": [ASK, REPLY], "system": 3}, "system=3 must be a text"),
    ({"messages": [ASK, REPLY], "tools": "{"}, "tools='{' must be a list of objects"),
    ({"prompt": "a", "completion": None}, r"the fields are \['prompt'\], and as null \['completion'\]"),
    ({"prompt": "a", "completion": 3}, "completion=3 must be a text or messages"),
    ({"prompt": [ASK], "completion": "b"}, "prompt messages, but completion a text; write both as texts, or both"),
]  # fmt: skip
PREFERENCES = [
    ({"prompt": "a", "chosen": "b"}, r"rejected, a text or messages, is missing; the fields are"),
    ({"chosen": "b", "rejected": "c"}, r"prompt, a text, is missing; the fields are \['chosen', 'rejected'\]"),
    ({"prompt": "a", "chosen": "b", "rejected": [REPLY]}, "chosen a text, but rejected messages"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
    ({"prompt": [ASK], "chosen": "b", "rejected": "c"}, r"prompt=\[\{.* must be a text"),
    ({"prompt": "a", "chosen": [REPLY], "rejected": [ASK]}, "rejected has no message of the role 'assistant'"),
    ({"chosen": [REPLY], "rejected": [ASK, REPLY]}, "prompt, a text or messages, is missing"),
    ({"prompt": "other", "chosen": [ASK, REPLY], "rejected": [ASK, {**REPLY, "content": ""}]}, "have different prompts"),
]


@pytest.mark.parametrize(
    ("read", "line", "message"),
    [*((read_chats, *case) for case in CHATS), *((read_preferences, *case) for case in PREFERENCES)],
)
def test_a_bad_line_is_named(tmp_path, read, line, message):
    good = {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match=rf"data\.jsonl, line 2.*{message}"):
        list(read(written(tmp_path, good, line)))


def test_an_array_is_told_how_to_become_lines(tmp_path):
    for first in ('[{"instruction": "a", "output": "b"}]', "["):
        with pytest.raises(DataError, match=r"line 1 is .*if this is an array, jq -c '\.\[\]' data"):
            list(read_chats(written(tmp_path, first)))
