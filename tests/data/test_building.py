"""Shards: the same bytes by however many processes and interruptions, and the same documents as the files themselves."""

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from llama_jax.data import DataError, DocumentFormat, building, open_corpus, shards, units, workers
from llama_jax.data.building import LOCK, BuildOptions, build
from llama_jax.data.manifest import MANIFEST, read_manifest
from llama_jax.data.sources import describe
from llama_jax.errors import UserError
from llama_jax.formats.loading import bundled
from llama_jax.storage.atomic_write import hold_lock, sign_lock
from llama_jax.tokenizers import load_tokenizer

SMALL = BuildOptions(unit=2000)
TOKENIZER = bundled()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(bundled())


def stories(count, seed=0):
    words = ["once", "upon", "a", "time", "there", "was", "little", "dog", "who", "saw", "the", "red", "ball", "and"]
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(words, rng.integers(3, 60))).capitalize() + "." for _ in range(count)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder of stories in every format, some of them twice; and all of them in order."""
    folder = tmp_path_factory.mktemp("files")
    some = [stories(40, seed) for seed in range(6)]
    (folder / "a.txt").write_text("\n<|endoftext|>\n".join(some[0]))
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some[1]))
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in [*some[2], *some[0][:7]]))
    pyarrow.parquet.write_table(pyarrow.table({"text": some[3]}), folder / "d.parquet", row_group_size=9)
    with pyarrow.output_stream(str(folder / "e.txt.zst"), compression="zstd") as file:
        file.write("<|endoftext|>".join(some[4]).encode())
    table = pyarrow.table({"id": range(40), "text": some[5]})
    with pyarrow.ipc.new_stream(str(folder / "f.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=11)
    return folder, [*some[0], *some[1], *some[2], *some[0][:7], *some[3], *some[4], *some[5]]


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
    made, real = [], shards.write_shard

    def dying(work, unit, *rest):
        if len(made) in (3, 9):
            made.append(None)
            raise KeyboardInterrupt
        made.append(unit.number)
        return real(work, unit, *rest)

    monkeypatch.setattr(shards, "write_shard", dying)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            build(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=1)
        assert not read_manifest(tmp_path / "out").finished
    manifest = build(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=1)
    assert contents(tmp_path / "out") == contents(built[0])
    assert [number for number in made if number is not None] == list(range(len(manifest.shards)))  # each once
    monkeypatch.setattr(shards, "write_shard", None)
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
    monkeypatch.setattr(units, "SEARCHED", searched)
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


class Pool:
    """Processes that are this one; `calls` has what they were told."""

    made = 0
    calls: list

    def __init__(self, *_):
        type(self).made += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *args):
        self.calls.append((function, *args))
        future = Future()
        future.set_result(function(*args))
        return future


def test_one_pool_does_all_also_the_digests_of_the_sources(files, built, tmp_path, monkeypatch):
    monkeypatch.setattr(Pool, "made", 0)
    monkeypatch.setattr(Pool, "calls", [], raising=False)
    monkeypatch.setattr(workers, "ProcessPoolExecutor", Pool)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    dropping = BuildOptions(unit=2000, drop_duplicates=True)
    progress = []
    manifest = build(files[0], tmp_path / "out", TOKENIZER, options=dropping, progress=lambda *of: progress.append(of))
    assert Pool.made == 1
    assert progress == [(done, 2 * len(manifest.shards)) for done in range(1, 2 * len(manifest.shards) + 1)]
    told, count = [call[0] for call in Pool.calls], len(manifest.shards)
    assert told == [describe] * 6 + [units.spans_of] * 6 + [shards.look] * count + [shards.make] * count


def test_a_process_that_dies_is_named_as_such(files, tmp_path, monkeypatch):
    class Dying(Pool):
        def submit(self, function, *args):
            future = Future()
            future.set_exception(BrokenProcessPool("died"))
            return future

    monkeypatch.setattr(workers, "ProcessPoolExecutor", Dying)
    with pytest.raises(DataError, match=r"a process ended early.*the same command continues"):
        build(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=2)


def test_shards_are_not_built_into_what_is_read(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Once upon a time.")
    with pytest.raises(DataError, match=r"texts/out is inside .*texts, and its shards would be read as data next time"):
        build(tmp_path / "texts", tmp_path / "texts" / "out", TOKENIZER)
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["a.txt"]


def test_a_full_disk_under_a_shard_is_one_line(files, tmp_path, monkeypatch):
    """array_record says it by a RuntimeError."""

    class Full:
        def __init__(self, *_):
            pass

        def write(self, _):
            raise RuntimeError("write() failed: No space left on device; at byte 20000")

        def close(self):
            raise RuntimeError("Failed to close: No space left on device")

    monkeypatch.setattr("array_record.python.array_record_module.ArrayRecordWriter", Full)
    said = r"shard-00000.array_record cannot be written \(.*No space left on device.*\); the disk is full"
    with pytest.raises(DataError, match=said):
        build(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=1)
    assert not list((tmp_path / "out").glob("*shard*"))


def test_files_without_documents_are_no_corpus_and_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Pool, "calls", [], raising=False)
    monkeypatch.setattr(workers, "ProcessPoolExecutor", Pool)
    empty = tmp_path / "a.parquet"
    with pyarrow.parquet.ParquetWriter(empty, pyarrow.schema({"text": pyarrow.string()})):
        pass
    assert pyarrow.parquet.read_metadata(empty).num_row_groups == 0
    (tmp_path / "b.jsonl").write_text('\n{"text": ""}\n')
    for paths, message in ((empty, "a.parquet holds"), ([empty, tmp_path / "b.jsonl"], "and 1 more hold")):
        for processes in (1, 2):
            options = BuildOptions(drop_duplicates=processes == 2)
            with pytest.raises(DataError, match=f"{message} no document; are these the right files"):
                build(paths, tmp_path / "out", TOKENIZER, options=options, processes=processes)
            assert not (tmp_path / "out").exists()


def stopped(files, folder, monkeypatch, shard=3):
    """A build in a folder that ended before a shard."""
    real = shards.make

    def ending(work, unit, fates):
        if unit.number == shard:
            raise KeyboardInterrupt
        return real(work, unit, fates)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "make", ending)
        with pytest.raises(KeyboardInterrupt):
            build(files, folder, TOKENIZER, options=SMALL, processes=1)


@pytest.mark.parametrize("content", ["", "[1", "[1]", '{"name": 1}', '{"name": "a"}'])
def test_broken_descriptions_are_named_with_a_remedy(content, files, tmp_path, monkeypatch):
    stopped(files[0], tmp_path / "out", monkeypatch)
    facts, manifest = tmp_path / "out" / "shard-00001.json", tmp_path / "out" / MANIFEST
    for path, message in (
        (facts, r"shard-00001.json is no description of a shard.*; remove it, and build again: its shard alone"),
        (manifest, rf"manifest.json is no manifest of a build.*; remove {tmp_path}/out, and build again"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            build(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=1)


def test_a_shard_that_was_damaged_meanwhile_is_made_again(files, built, tmp_path, monkeypatch):
    stopped(files[0], tmp_path / "out", monkeypatch)
    (tmp_path / "out" / "shard-00000.array_record").unlink()
    (tmp_path / "out" / "shard-00001.array_record").write_bytes(b"something else")
    build(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=1)
    found, first = contents(tmp_path / "out"), contents(built[0])
    assert {**found, MANIFEST: ""} == {**first, MANIFEST: ""}


def test_a_build_that_made_nothing_may_be_begun_otherwise(files, tmp_path):
    wrong = BuildOptions(DocumentFormat(field="body"))
    with pytest.raises(DataError, match="no column 'body'"):
        build(files[0] / "d.parquet", tmp_path / "out", TOKENIZER, options=wrong, processes=1)
    assert build(files[0] / "d.parquet", tmp_path / "out", TOKENIZER, processes=1).total("documents") == 40


def test_a_second_build_in_a_folder_is_told_of_the_first(files, tmp_path):
    (tmp_path / "out").mkdir()
    lock = hold_lock(tmp_path / "out" / LOCK, UserError, "build")
    sign_lock(lock)
    with pytest.raises(DataError, match=f"out is being built by process {os.getpid()} on .*; wait until that has ended"):
        build(files[0], tmp_path / "out", TOKENIZER, processes=1)
    os.close(lock)
    build(files[0] / "a.txt", tmp_path / "out", TOKENIZER, processes=1)
    assert not (tmp_path / "out" / LOCK).exists()


def test_the_processes_of_a_build_do_without_jax():
    code = (
        "import sys, llama_jax.data.shards, llama_jax.data.building; assert not {'jax', 'orbax', 'grain'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_that_grows_between_the_looks_is_refused(tmp_path, monkeypatch):
    path, real = tmp_path / "a.jsonl.gz", shards.look

    def look(job, unit):
        real(job, unit)
        with gzip.open(path, "at") as file:
            file.write('{"text": "More."}\n')

    with gzip.open(path, "wt") as file:
        file.write('{"text": "One."}\n')
    monkeypatch.setattr(shards, "look", look)
    with pytest.raises(DataError, match=r"a.jsonl.gz changed while it was read; build when nothing writes"):
        build(path, tmp_path / "out", TOKENIZER, options=BuildOptions(drop_duplicates=True), processes=1)


def test_units_are_the_same_part_of_all_files_between_bounds(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("<|endoftext|>".join(f"Story {n:04d}." for n in range(400)))
    monkeypatch.setattr(building, "MANY", 5)
    for bounds, count in (((1, 1 << 30), 5), ((6000, 1 << 30), 2), ((1, 1400), 7)):
        monkeypatch.setattr(building, "UNITS", bounds)
        assert len(build(path, tmp_path / str(count), TOKENIZER, processes=1).shards) == count
