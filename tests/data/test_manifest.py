"""What was built is read whole, by the vocabulary that made it, or not at all."""

import json
import re

import pytest

from llama_jax.data import DataError, DocumentFormat, open_corpus, shards
from llama_jax.data.building import BuildOptions, build
from llama_jax.data.manifest import MANIFEST, read_manifest
from llama_jax.formats.loading import bundled
from llama_jax.tokenizers import load_tokenizer
from llama_jax.tokenizers.making import byte_tokenizer

SMALL = BuildOptions(unit=1 << 20)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(bundled())


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("Once upon a time there was a llama.<|endoftext|>It was old.")
    (folder / "b.txt").write_text("There was another one.")
    return folder


@pytest.fixture
def built(text, tmp_path):
    build(text, tmp_path / "out", bundled(), options=SMALL, processes=1)
    return tmp_path / "out"


def refused(paths, tokenizer, tmp_path, message, **reading):
    with pytest.raises(DataError, match=message):
        open_corpus(paths, tokenizer, cache=tmp_path / "cache", reading=DocumentFormat(**reading))


def test_an_unfinished_build_is_not_read_and_its_command_is_given(text, tokenizer, tmp_path, monkeypatch):
    folder, real = tmp_path / "out put", shards.make

    def ending(_):
        raise KeyboardInterrupt

    for before in (None, real):  # before any shard is there, and after the first
        with monkeypatch.context() as patch:
            patch.setattr(shards, "make", lambda *args, before=before: ending(before and before(*args)))
            with pytest.raises(KeyboardInterrupt):
                build(text, folder, bundled(), options=SMALL, processes=1)
        command = f"llama-jax data build {text} --out '{folder}' --tokenizer {bundled()} --unit 1"
        (tmp_path / "more.txt").write_text("More.")
        for given in (folder, [text, folder], tmp_path):
            refused(given, tokenizer, tmp_path, f"holds a build that is not finished.*: {re.escape(command)}$")
    build(text, folder, bundled(), options=SMALL, processes=1)
    assert open_corpus(folder, tokenizer, cache=tmp_path / "cache").document_count == 3


def test_another_tokenizer_is_refused_and_both_are_named(built, tmp_path):
    own = read_manifest(built).plan["tokenizer"][:12]
    message = rf"was built with the tokenizer {bundled()} \(fingerprint {own}\), and is read with another one"
    refused(built, byte_tokenizer(), tmp_path, message + rf".* give --tokenizer {bundled()}")
    refused(sorted(built.glob("*.array_record"))[0], byte_tokenizer(), tmp_path, message)


def test_shards_that_are_missing_damaged_or_foreign_are_named(built, tokenizer, tmp_path):
    first, second = sorted(built.glob("*.array_record"))[:2]
    content = second.read_bytes()
    second.write_bytes(first.read_bytes())
    refused(built, tokenizer, tmp_path, f"{second.name} in {built} is not what was built: its SHA-256")
    second.unlink()
    refused(built, tokenizer, tmp_path, f"out has no {second.name}, which its manifest names")
    second.write_bytes(content)
    (built / "more.array_record").write_bytes(content)
    refused(built, tokenizer, tmp_path, "more.array_record is not one of the shards")
    (built / "more.array_record").unlink()
    refused(built, tokenizer, tmp_path, "ids of uint16, but token_type='uint32' was given", token_type="uint32")
    assert open_corpus(second, tokenizer, cache=tmp_path / "cache").document_count, "one of them by name may be read"


def test_manifests_of_others_are_none_of_our_business(built, tokenizer, tmp_path):
    shard = sorted(built.glob("*.array_record"))[0].rename(tmp_path / "a.array_record")
    for content, message in (({"files": []}, None), ({"plan": {}, "token_type": "uint16"}, "is no manifest of a build")):
        (tmp_path / MANIFEST).write_text(json.dumps(content))
        if message is None:
            open_corpus(shard, tokenizer, cache=tmp_path / "cache")
        else:
            refused(shard, tokenizer, tmp_path, message)
    (tmp_path / MANIFEST).write_text("{")
    refused(shard, tokenizer, tmp_path, "is no manifest of a build")
