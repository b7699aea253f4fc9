"""Where documents begin and end, against plain Python."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llama_jax.data import DocumentFormat
from llama_jax.data import documents as module
from llama_jax.data.documents import record_documents, text_documents

SEPARATOR = "<|endoftext|>"


def texts(path, **reading):
    return [document.text for document in text_documents(path, DocumentFormat(**reading))]


def cut(text, longest):
    """Plain: the longest piece that ends after a mark of its second half, again and again."""
    pieces = []
    while len(text) > longest:
        ends = [
            text.rfind(mark, longest // 2, longest) + len(mark)
            for mark in ("\n\n", "\n", " ")
            if mark in text[longest // 2 : longest]
        ]
        end = ends[0] if ends else longest
        pieces.append(text[:end])
        text = text[end:]
    return [*pieces, text]


PARTS = st.lists(
    st.sampled_from(["a", "é", "🦙", " ", "\n", "\n\n", "word", SEPARATOR, SEPARATOR[:5], SEPARATOR[5:]]), max_size=40
)


@given(parts=PARTS, longest=st.integers(1, 30), chunk=st.integers(1, 40))
@example(parts=["a", SEPARATOR], longest=1, chunk=1)
def test_documents_are_those_of_the_whole_text_however_it_is_read(parts, longest, chunk, tmp_path_factory):
    text = "".join(parts)
    path = tmp_path_factory.mktemp("texts") / "some.txt"
    path.write_text(text, encoding="utf-8")
    expected = [piece.strip() for whole in text.split(SEPARATOR) for piece in cut(whole, longest)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TEXT_READ_BYTES", chunk)
        found = list(text_documents(path, DocumentFormat(longest=longest)))
    assert [document.text for document in found] == [piece for piece in expected if piece]
    lines, begun = text.split("\n"), 0
    for document in found:
        begun += len(document.text.encode())
        assert begun <= document.read
        assert lines[document.line - 1 :][0].find(document.text.split("\n")[0]) >= 0
        assert document.read <= len(text.encode())


def test_byte_order_mark_and_ends_of_line(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_bytes("\ufeffone\r\ntwo\rthree\n".encode())
    assert texts(path) == ["one\ntwo\nthree"]


@given(stories=st.lists(st.text(max_size=8), max_size=6), name=st.sampled_from(["text", "story"]))
def test_jsonl_gives_its_texts_as_they_are(stories, name, tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "some.jsonl"
    path.write_text("\n\n".join(json.dumps({"id": i, name: text}) for i, text in enumerate(stories)))
    found = list(record_documents(path, DocumentFormat(field=name)))
    assert [(d.text, d.line) for d in found] == [(text, 2 * i + 1) for i, text in enumerate(stories) if text]
