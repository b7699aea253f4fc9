"""Texts and corpora in a store: fetched once, and read as from a disk."""

import json

import object_server
import pytest
import vocabularies

from llama_jax.cli.train import _parse_sources
from llama_jax.data import open_corpus
from llama_jax.data.build_corpus import tokenize_files
from llama_jax.data.data_files import DATA_SUFFIXES, WeightedData, find_data, find_files
from llama_jax.errors import DataError
from llama_jax.storage import locate
from llama_jax.tokenizers import load_tokenizer
from llama_jax.tokenizers.sentencepiece import byte_tokenizer


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMA_JAX_CACHE", str(tmp_path / "cache"))
    with object_server.emulated(monkeypatch) as server:
        yield server


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text("a llama ate grass<|endoftext|>and slept")
    (folder / "more" / "b.jsonl").write_text(json.dumps({"text": "once upon a time"}) + "\n")
    (folder / ".hidden.txt").write_text("no")
    (folder / "about.md").write_text("no")
    return folder


def fetched(store):
    return [answer.key for answer in store.answers if answer.method == "GET"]


def test_the_same_as_from_a_disk_and_fetched_once(store, texts, tmp_path):
    url = store.upload(texts, "texts")
    here = open_corpus(texts, byte_tokenizer())
    for _ in range(2):
        there = open_corpus(url, byte_tokenizer())
        assert (there.digest, there.document_count) == (here.digest, 3)
    assert sorted(fetched(store)) == ["texts/a.txt", "texts/more/b.jsonl"]
    assert [file.name for file in find_files(locate(f"{url}/a.txt"))] == ["a.txt"]
    found = find_data(_parse_sources((f"one={url}/a.txt:0.7", f"two={url}/more:0.3"), weighted=True))
    assert [(source.name, source.files[0].name) for source in found] == [("one", "a.txt"), ("two", "b.jsonl")]
    store.objects["texts/a.txt"] = b"another text"
    assert open_corpus(url, byte_tokenizer()).digest != here.digest
    assert find_files([f"{url}/a.txt"])[0].read_bytes() == b"another text"
    assert find_data([WeightedData("one", url, 1)])[0].files == find_files(url)


def test_the_cache_is_bounded(store, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("llama_jax.storage.object_cache.RECENT_SECONDS", -1)
    monkeypatch.setenv("LLAMA_JAX_CACHE_LIMIT", "0")
    url = store.upload(texts, "texts")
    first = find_files(f"{url}/a.txt")
    second = find_files(f"{url}/more")
    assert not first[0].exists()
    assert second[0].exists()
    assert len(list((tmp_path / "cache" / "objects").iterdir())) == 1


def test_a_build_in_a_store(store, texts, tmp_path):
    tokenizer = load_tokenizer(vocabularies.write(tmp_path / "vocabulary", "sentencepiece"))
    tokenize_files(store.upload(texts, "texts"), tmp_path / "built", tmp_path / "vocabulary", processes=1)
    url = store.upload(tmp_path / "built", "built")
    expected = open_corpus(tmp_path / "built", tokenizer).digest
    assert open_corpus(url, tokenizer).digest == open_corpus(f"{url}/tokens.corpus", tokenizer).digest == expected
    store.objects["built/unfinished-build.json"] = b"{}"
    with pytest.raises(DataError, match="holds an unfinished build"):
        open_corpus(url, tokenizer)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none", r"s3://bucket/none: nothing is stored there; pass files of text"),
        ("other", r"s3://bucket/other holds no file that ends in .txt"),
        ("texts", r"s3://bucket/texts/a.txt cannot be read: the request failed after retries \(500"),
    ],
)
def test_what_cannot_be_fetched(store, texts, tmp_path, path, message):
    store.upload(texts, "texts")
    store.objects["other/x.bmp"] = b"x"
    store.fault = lambda key, before: 500 if key.endswith("a.txt") else None
    with pytest.raises(DataError, match=message) as failed:
        find_files(f"s3://bucket/{path}")
    assert "\n" not in str(failed.value)
    assert not list((tmp_path / "cache").rglob("*.txt"))
    assert ".txt" in DATA_SUFFIXES
