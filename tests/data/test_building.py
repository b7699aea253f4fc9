"""Shards: the same bytes by however many processes and interruptions, and the same documents as the files themselves."""

import gzip
import hashlib
import json
import signal
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import llama_jax
from llama_jax.checkpoints.bundled import bundled
from llama_jax.data import DataError, DocumentFormat, building, open_corpus
from llama_jax.data.building import MANIFEST, BuildOptions, build, read_manifest

SMALL = BuildOptions(unit=2000)
TOKENIZER = bundled()


@pytest.fixture(scope="module")
def tokenizer():
    return llama_jax.load().tokenizer


def stories(count, seed=0):
    words = ["once", "upon", "a", "time", "there", "was", "little", "dog", "who", "saw", "the", "red", "ball", "and"]
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(words, rng.integers(3, 60))).capitalize() + "." for _ in range(count)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of stories in every format, some of them twice; and all of them in order."""
    folder = tmp_path_factory.mktemp("files")
    some = [stories(40, seed) for seed in range(5)]
    (folder / "a.txt").write_text("\n<|endoftext|>\n".join(some[0]))
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some[1]))
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in [*some[2], *some[0][:7]]))
    pyarrow.parquet.write_table(pyarrow.table({"text": some[3]}), folder / "d.parquet", row_group_size=9)
    with pyarrow.output_stream(str(folder / "e.txt.zst"), compression="zstd") as file:
        file.write("<|endoftext|>".join(some[4]).encode())
    return folder, [*some[0], *some[1], *some[2], *some[0][:7], *some[3], *some[4]]


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def built(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "out"
    return folder, build(files[0], folder, TOKENIZER, options=SMALL, processes=1)


def texts_of(corpus, tokenizer):
    return [tokenizer.decode(corpus.document(number).tolist()).strip() for number in range(corpus.document_count)]


def test_shards_hold_the_documents_of_the_files_in_order(files, built, tokenizer, tmp_path):
    folder, manifest = built
    corpus = open_corpus(folder, tokenizer, cache=tmp_path)
    assert texts_of(corpus, tokenizer) == files[1]
    direct = open_corpus(files[0], tokenizer, cache=tmp_path)
    np.testing.assert_array_equal(corpus.tokens, direct.tokens)
    np.testing.assert_array_equal(corpus.byte_counts, direct.byte_counts)
    assert (manifest.total("documents"), manifest.total("tokens")) == (corpus.document_count, corpus.token_count)
    assert manifest.total("text_bytes") == sum(map(len, files[1]))
    assert len(manifest.shards) > 10
    assert read_manifest(folder) == manifest
    found = contents(folder)
    assert found == {shard.name: shard.sha256 for shard in manifest.shards} | {MANIFEST: found[MANIFEST]}


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(files, built, tmp_path):
    told = []
    build(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=2, progress=lambda *of: told.append(of))
    assert contents(tmp_path / "out") == contents(built[0])
    assert told == [(i, len(told)) for i in range(1, len(told) + 1)]


DYING = """
import os, signal, sys
from llama_jax.data.building import BuildOptions, build

def die(done, of):
    if done == 4:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    build(*sys.argv[1:], options=BuildOptions(unit=2000), processes=2, progress=die)
"""


@pytest.mark.slow
def test_killed_with_its_processes_it_goes_on_to_the_same_bytes(files, built, tmp_path):
    (tmp_path / "dying.py").write_text(DYING)
    command = [sys.executable, tmp_path / "dying.py", files[0], tmp_path / "out", TOKENIZER]
    # Its output ends when the last process that has it does.
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert "Traceback" not in done.stderr  # Python's own tracker of semaphores says that it cleans up
    assert len(list((tmp_path / "out").glob("shard-*.json"))) >= 4
    build(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=1)
    assert contents(tmp_path / "out") == contents(built[0])


def test_stopped_anywhere_it_goes_on_to_the_same_bytes(files, built, tmp_path, monkeypatch):
    made, real = [], building._write_shard

    def dying(work, unit, *rest):
        if len(made) in (3, 9):
            made.append(None)
            raise KeyboardInterrupt
        made.append(unit.number)
        return real(work, unit, *rest)

    monkeypatch.setattr(building, "_write_shard", dying)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            build(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=1)
        assert not (tmp_path / "out" / MANIFEST).exists()
    manifest = build(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=1)
    assert contents(tmp_path / "out") == contents(built[0])
    assert [number for number in made if number is not None] == list(range(len(manifest.shards)))  # each once
    monkeypatch.setattr(building, "_write_shard", None)
    assert build(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=1) == manifest  # nothing is made again


def test_of_the_same_text_only_the_first_is_kept(files, tokenizer, tmp_path):
    dropping = BuildOptions(unit=2000, drop_duplicates=True)
    manifest = build(files[0], tmp_path / "out", TOKENIZER, options=dropping, processes=1)
    kept = list(dict.fromkeys(files[1]))
    assert texts_of(open_corpus(tmp_path / "out", tokenizer, cache=tmp_path), tokenizer) == kept
    assert manifest.total("duplicates") == len(files[1]) - len(kept) >= 7


def test_a_shard_of_which_nothing_is_left_is_no_file(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("The same.")
    dropping = BuildOptions(drop_duplicates=True)
    manifest = build([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out", TOKENIZER, options=dropping, processes=1)
    assert [shard.name for shard in manifest.shards] == ["shard-00000.array_record", None]
    assert set(contents(tmp_path / "out")) == {"shard-00000.array_record", MANIFEST}


@pytest.mark.parametrize("separator", ["<|endoftext|>", "\n\n", "aa"])
@pytest.mark.parametrize("searched", [1, 7, 1 << 20])
def test_documents_are_the_same_however_small_the_units_are(separator, searched, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(building, "SEARCHED", searched)
    path, reading = tmp_path / "a.txt", DocumentFormat(separator=separator)
    path.write_bytes("\ufeff".encode() + separator.join(["One.", "", "Zwei Grüße.", " \n ", "Three.", "Four"]).encode())
    whole = open_corpus(path, tokenizer, cache=tmp_path / "cache", reading=reading)
    for unit in (1, 5, 17):
        folder = tmp_path / str(unit)
        build(path, folder, TOKENIZER, options=BuildOptions(reading, unit), processes=1)
        np.testing.assert_array_equal(open_corpus(folder, tokenizer, cache=tmp_path / "cache").tokens, whole.tokens)


def test_what_cannot_be_built(files, built, tmp_path):
    (tmp_path / "ids.bin").write_bytes(b"\1\0" * 20)
    (tmp_path / "cut.jsonl.gz").write_bytes((files[0] / "c.jsonl.gz").read_bytes()[:-30])
    (tmp_path / "cut.parquet").write_bytes((files[0] / "d.parquet").read_bytes()[:-30])
    (tmp_path / "cut.txt.zst").write_bytes((files[0] / "e.txt.zst").read_bytes()[:-30])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").write_text("")
    column = BuildOptions(DocumentFormat(field="body"))
    for paths, out, options, message in (
        (tmp_path / "ids.bin", "out", SMALL, "ids.bin holds token ids already"),
        (tmp_path / "cut.jsonl.gz", "out1", SMALL, r"cut.jsonl.gz is not whole \(.*\); copy it again"),
        (tmp_path / "cut.txt.zst", "out2", SMALL, r"cut.txt.zst is not whole \(.*\); copy it again"),
        (tmp_path / "cut.parquet", "out3", SMALL, "cut.parquet is not a whole Parquet file"),
        (files[0] / "d.parquet", "out4", column, r"d.parquet has no column 'body'; it has \['text'\]"),
        (files[0] / "a.txt", "other", SMALL, "other holds 'thing', and no build"),
        (files[0] / "a.txt", built[0], SMALL, "was built with other sources; give another folder"),
    ):
        with pytest.raises(DataError, match=message):
            build(paths, tmp_path / out, TOKENIZER, options=options, processes=1)
