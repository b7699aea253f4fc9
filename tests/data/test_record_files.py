"""Chats, preferences and prompts have the same tokens in every type of file; what is null, and what is said of bad files."""

import gzip
import json

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from test_chat_tokens import llama3  # noqa: F401  # a fixture

from llama_jax.data import DataError, DocumentFormat, open_chats, open_preferences
from llama_jax.data.chat_jsonl import read_chats
from llama_jax.data.chat_tokens import open_labeled
from llama_jax.data.documents import first_fields, read_documents
from llama_jax.data.rl_prompts import open_prompts

ASK, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CHATS = [
    {"messages": [ASK, REPLY]},
    {"prompt": "Once", "completion": " upon"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "Add.", "input": "1, 2", "output": "3", "system": "Be brief."},
]
PAIRS = [{"prompt": "Hi", "chosen": [REPLY], "rejected": [{**REPLY, "content": "No"}]}]
LABELED = [{"prompt": "a", "completion": " b", "label": True}, {"prompt": "c", "completion": " d", "label": False}]
PROMPTS = [{"prompt": [ASK], "answer": "4", "note": None}, {"prompt": [ASK], "answer": "5", "note": None}]


def json_lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write_table(path, records):
    names = list(dict.fromkeys(name for record in records for name in record))
    table = pyarrow.Table.from_pylist([{name: record.get(name) for name in names} for record in records])
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=1)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as sink:
            sink.write_table(table, max_chunksize=1)


def write_zst(path, records):
    with pyarrow.CompressedOutputStream(str(path), "zstd") as sink:
        sink.write(json_lines(records))


FILES = {
    "jsonl": ("a.jsonl", lambda path, records: path.write_bytes(json_lines(records))),
    "jsonl.gz": ("a.jsonl.gz", lambda path, records: path.write_bytes(gzip.compress(json_lines(records)))),
    "jsonl.zst": ("a.jsonl.zst", write_zst),
    "array": ("a.json", lambda path, records: path.write_text(json.dumps(records, indent=1))),
    "array.gz": ("a.JSON.gz", lambda path, records: path.write_bytes(gzip.compress(json.dumps(records).encode()))),
    "lines in .json": ("a.json", lambda path, records: path.write_bytes(json_lines(records))),
    "parquet": ("a.parquet", write_table),
    "arrow": ("a.arrow", write_table),
}


@pytest.fixture(params=FILES)
def write(request, tmp_path):
    name, write = FILES[request.param]

    def write_records(records):
        write(tmp_path / name, records)
        return tmp_path / name

    return write_records


def in_lines(tmp_path, records):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(json_lines(records))
    return path


def test_examples_are_the_same_in_every_file(write, tmp_path, llama3):  # noqa: F811
    corpus, counts = open_chats(write(CHATS), llama3, 99)
    assert counts.kept == 4
    assert corpus.digest == open_chats(in_lines(tmp_path, CHATS), llama3, 99).corpus.digest
    for read, records in ((open_preferences, PAIRS), (open_labeled, LABELED)):
        found, expected = read(write(records), llama3, 99), read(in_lines(tmp_path, records), llama3, 99)
        assert found[0].digest == expected[0].digest
    found = open_prompts(write(PROMPTS), llama3, 99)
    assert found.columns == {name: [record[name] for record in PROMPTS] for name in PROMPTS[0]}
    assert found.digest == open_prompts(in_lines(tmp_path, PROMPTS), llama3, 99).digest


def test_nulls_of_other_rows_are_not_part_of_a_chat(write):
    """A column has the fields of all of its objects."""
    calls = [{"function": {"name": name, "arguments": {key: 1}}} for name, key in (("f", "x"), ("g", "y"))]
    chats = [
        {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, REPLY], "tools": [tool]}
        for call, tool in zip(calls, ({"function": {"name": "f"}}, {"function": {"name": "g", "strict": True}}), strict=True)
    ]
    for example, chat in zip(read_chats(write(chats)), chats, strict=True):
        assert example.answers == (tuple(chat["messages"]),)
        assert list(example.tools) == chat["tools"]
        assert example.ignored == ()


def test_texts_that_are_null_or_empty_are_no_documents(write):
    path = write([{"text": "a", "id": 1}, {"text": None, "id": 2}, {"text": "", "id": 3}, {"text": "b", "id": 4}])
    assert first_fields([path]) == {"text", "id"}
    assert [document.text for document in read_documents(path, DocumentFormat())] == ["a", "b"]
    with pytest.raises(DataError, match="1: id=1 must be a text; set `field`"):
        list(read_documents(path, DocumentFormat(field="id")))
    with pytest.raises(DataError, match=r"'body'.*; it has \['text', 'id'\]: set `field`"):
        list(read_documents(path, DocumentFormat(field="body")))


def test_a_record_is_named_as_its_file_counts(write, llama3):  # noqa: F811
    path = write([{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": None}])
    unit = {"a.parquet": "row", "a.arrow": "row", "a.json": "record", "a.JSON.gz": "record"}.get(path.name, "line")
    with pytest.raises(DataError, match=rf"{path.name}, (line|{unit}) 2: the fields are \['prompt'\], and as null"):
        open_chats(path, llama3, 99)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"messages": [', r"a\.json is not a whole JSON array \(.*\); copy it again"),
        ("a.json", b"[1, 2]", r"a\.json, record 1 is a int; write an array of objects"),
        ("a.json", b'{"prompt": "a", "completion": "b"}\n{"a":', r"a\.json, line 2 is not JSON"),
        ("a.json", b'{"data": []}', r"a\.json, record 1: the fields are \['data'\]; rename them"),
        ("a.json", '["é"]'.encode("latin-1"), r"a\.json is not UTF-8; save the file as UTF-8"),
        ("a.json", b"[]", r"a\.json: no example has a target"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-6], r"a\.jsonl\.gz is incomplete"),
        ("a.json.gz", gzip.compress(b"[]" * 99, mtime=0)[:-9], r"a\.json\.gz is incomplete"),
        ("a.parquet", b"PAR1", r"a\.parquet cannot be read in its metadata"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, llama3, name, content, message):  # noqa: F811
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_chats(tmp_path / name, llama3, 99)


def test_ignored_fields_are_warned_of_once(tmp_path, llama3):  # noqa: F811
    chats = [{"messages": [{**ASK, "name": "Ann"}, {**REPLY, "score": 1}], "id": number} for number in range(3)]
    with pytest.warns(UserWarning, match=r"ignored fields: id, messages\[\]\.score, name of messages") as warned:
        corpus = open_chats(in_lines(tmp_path, chats), llama3, 99).corpus
    assert len(warned) == 1
    assert corpus.digest == open_chats(in_lines(tmp_path, [{"messages": [ASK, REPLY]}] * 3), llama3, 99).corpus.digest
    with pytest.warns(UserWarning, match="ignored fields: prompt"):
        open_prompts(in_lines(tmp_path, [{"prompt": [{**ASK, "id": 1}], "answer": 3}]), llama3, 99)
