"""Small files of others: what they hold, or one line that says why not."""

import os

import pytest

from llama_jax.errors import CheckpointError
from llama_jax.storage.paths import MAX_JSON_BYTES, read_object, read_whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1', "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", "holds a list, not an object"),
        (b'{"a": "\xff"}', "is not UTF-8 text"),
        (b" " * (MAX_JSON_BYTES + 1), f"is over {MAX_JSON_BYTES} bytes, too large to be a model's settings"),
    ],
)
def test_what_is_no_object(content, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_object(path, CheckpointError)
    assert str(caught.value).startswith(f"{path} ")
    assert "\n" not in str(caught.value)


def test_an_object(tmp_path):
    (tmp_path / "config.json").write_text('{"a": [1, {"b": "é"}]}', "utf-8")
    assert read_object(tmp_path / "config.json", CheckpointError) == {"a": [1, {"b": "é"}]}


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="is not a file; copy it again"):
            read_whole(path, CheckpointError, 10)
