"""What a path or a URL names; no server, and no library of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llama_jax.data.build_corpus import tokenize_files
from llama_jax.errors import UserError
from llama_jax.runs.loop import train
from llama_jax.storage import StoredPath, locate, on_disk, paths


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
