"""What a path or a URL names, and what is asked of a store for it; no server, and no library of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llama_jax.data.build_corpus import tokenize_files
from llama_jax.errors import UserError
from llama_jax.runs.loop import train
from llama_jax.storage import StoredPath, locate, on_disk, paths
from llama_jax.storage.consistent_reader import FOLDER_ENTRY, StoreEntry, StoreView

OBJECTS = {"models/a/config.json": b"{}", "models/a/model.bin": bytes(range(100)), "models/b.gguf": b"GGUF", "top": b"t"}


class Memory:
    """A store that notes what it is asked."""

    def __init__(self, objects=OBJECTS):
        self.objects, self.asked = dict(objects), []

    def names(self, folder):
        self.asked.append(("names", folder))
        below = f"{folder}/" if folder else ""
        inside = {key.removeprefix(below): body for key, body in self.objects.items() if key.startswith(below)}
        return {
            name.partition("/")[0]: FOLDER_ENTRY if "/" in name else StoreEntry(len(body), str(hash(body)))
            for name, body in inside.items()
        }

    def head(self, key):
        self.asked.append(("head", key))
        found = self.objects.get(key)
        return None if found is None else StoreEntry(len(found), str(hash(found)))

    def read(self, key, start, stop, version):
        self.asked.append(("read", key, start, stop))
        assert version == str(hash(self.objects[key]))
        return memoryview(self.objects[key][start:stop])


@pytest.fixture
def memory():
    return Memory()


def at(memory, key=""):
    return StoredPath(StoreView("s3://bucket", lambda: memory), key)


@pytest.mark.parametrize(
    ("text", "written", "root", "key"),
    [
        ("s3://bucket/models/a", None, "s3://bucket", "models/a"),
        ("S3://bucket//models/a/", "s3://bucket/models/a", "s3://bucket", "models/a"),
        ("gs://bucket", None, "gs://bucket", ""),
        ("hf://org/name", None, "hf://org/name", ""),
        ("hf://org/name@v1/a/b.gguf", None, "hf://org/name@v1", "a/b.gguf"),
    ],
)
def test_urls(text, written, root, key):
    found = locate(text)
    assert isinstance(found, StoredPath)
    assert (found.view.root, found.key) == (root, key)
    assert os.fspath(found) == str(found) == (written or text)
    assert locate(found) is found
    assert locate(str(found)) == found


@pytest.mark.parametrize("text", ["model", "/a/b.gguf", "s3:/bucket/x", "a:b//c", "C:\\model"])
def test_paths(text):
    assert locate(text) == Path(text)


@pytest.mark.parametrize("text", ["ftp://host/x", "https://host/x", "s3://", "s3:///x", "hf://name", "s3://bucket/../x"])
def test_urls_that_name_nothing(text):
    with pytest.raises(UserError, match=r"s3://BUCKET/PATH|hf://ORGANIZATION/NAME|use a path"):
        locate(text)


def test_nothing_is_imported_or_asked_before_it_is_needed():
    code = (
        "import sys, llama_jax.cli, llama_jax.cli.options; from llama_jax.storage import locate\n"
        "locate('s3://bucket/x'); locate('hf://a/b')\n"
        "found = {'obstore', 'huggingface_hub', 'fsspec', 'httpx', 'jax', 'numpy'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_are_read_by_ranges(memory):
    file = at(memory, "models/a/model.bin")
    content = OBJECTS["models/a/model.bin"]
    with file.open("rb", buffering=0) as raw:
        raw.seek(10)
        assert raw.read(5) == content[10:15]
        assert (raw.tell(), raw.seek(-3, os.SEEK_END)) == (15, 97)
        assert raw.read(5) == content[97:]
        assert raw.read(5) == b""
        raw.seek(90)
        assert raw.read() == content[90:]
        with pytest.raises(ValueError, match="before the beginning"):
            raw.seek(-1)
    assert [each[2:] for each in memory.asked if each[0] == "read"] == [(10, 15), (97, 100), (90, 100)]
    memory.asked.clear()
    with file.open() as buffered:
        assert buffered.read(4) == content[:4]
        assert buffered.read() == content[4:]
    assert memory.asked == [("read", "models/a/model.bin", 0, 100)]


def test_what_is_no_file(memory):
    with pytest.raises(FileNotFoundError, match="no such object") as missing:
        at(memory, "models/none").open()
    assert missing.value.filename == "s3://bucket/models/none"
    with pytest.raises(IsADirectoryError):
        at(memory, "models").stat()


def test_without_its_library_a_url_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UserError, match=r's3://bucket needs obstore.*pip install -e "\.\[stores\]"'):
        paths.locate("s3://bucket/x").exists()


@pytest.mark.parametrize("path", ["s3://bucket/run", Path("gs://bucket/run"), "hf://one/two"])
def test_what_is_on_disks_alone_says_so(path, tmp_path, monkeypatch):
    """And does not become a folder called s3:."""
    monkeypatch.chdir(tmp_path)
    if isinstance(path, Path):
        with pytest.raises(UserError, match="gs:/bucket/run': a URL as a Path has lost a slash; pass it as a str"):
            train("tiny", path, "text.txt")
    with pytest.raises(UserError, match=r"(bucket/run|one/two).* must be on this machine"):
        tokenize_files(__file__, path, "tokenizer.json")
    assert not list(tmp_path.iterdir())
    assert on_disk(Path("s3"), "data") == Path("s3")
