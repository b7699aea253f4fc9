"""A build: the same bytes by however many processes and interruptions, and the same documents as the files themselves."""

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from llama_jax.data import DataError, DocumentFormat, build_corpus, documents, open_corpus
from llama_jax.data.build_corpus import BUILD_LOCK, CORPUS_NAME, PART_NAME, BuildOptions, make_part, tokenize_files
from llama_jax.data.corpus_file import CORPUS_HEADER, CORPUS_MAGIC, read_corpus, read_info
from llama_jax.data.data_files import UNFINISHED
from llama_jax.errors import UserError
from llama_jax.formats.loading import bundled
from llama_jax.storage.atomic_write import lock_file
from llama_jax.tokenizers import load_tokenizer
from llama_jax.tokenizers.sentencepiece import byte_tokenizer

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
    return folder, tokenize_files(files[0], folder, TOKENIZER, options=SMALL, processes=1)


def texts_of(corpus, tokenizer):
    return [tokenizer.decode(corpus.document(number).tolist()).strip() for number in range(corpus.document_count)]


def test_it_holds_the_documents_of_the_files_in_order(files, built, tokenizer, tmp_path):
    folder, info = built
    corpus = open_corpus(folder, tokenizer, cache=tmp_path / "none")
    assert not (tmp_path / "none").exists(), "it is mapped as it is"
    assert texts_of(corpus, tokenizer) == files[1]
    direct = open_corpus(files[0], tokenizer, cache=tmp_path)
    np.testing.assert_array_equal(corpus.tokens, direct.tokens)
    np.testing.assert_array_equal(corpus.byte_counts, direct.byte_counts)
    assert corpus.digest == direct.digest
    assert (info.documents, info.tokens) == (corpus.document_count, corpus.token_count)
    assert info.text_bytes == sum(map(len, files[1]))
    assert info.origin["duplicates"] == 0
    assert read_info(folder / CORPUS_NAME) == info
    assert list(contents(folder)) == [CORPUS_NAME]


DYING = """
import os, signal, sys
from llama_jax.data.build_corpus import BuildOptions, tokenize_files

def die(done, of):
    if done == 4:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    tokenize_files(*sys.argv[1:], options=BuildOptions(unit=2000), processes=2, progress=die)
"""


@pytest.mark.slow
def test_killed_with_its_processes_it_goes_on_to_the_same_bytes(files, built, tmp_path):
    (tmp_path / "dying.py").write_text(DYING)
    command = [sys.executable, tmp_path / "dying.py", files[0], tmp_path / "out", TOKENIZER]
    # Its output ends when the last process that has it does.
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert "Traceback" not in done.stderr  # Python's own tracker of semaphores says that it cleans up
    assert len(list((tmp_path / "out").glob("part-*"))) >= 4
    tokenize_files(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=1)
    assert contents(tmp_path / "out") == contents(built[0])


def test_of_the_same_text_only_the_first_is_kept(files, tokenizer, tmp_path):
    dropping = BuildOptions(unit=2000, drop_duplicates=True)
    info = tokenize_files(files[0], tmp_path / "out", TOKENIZER, options=dropping, processes=1)
    kept = list(dict.fromkeys(files[1]))
    assert texts_of(open_corpus(tmp_path / "out", tokenizer), tokenizer) == kept
    assert info.origin["duplicates"] == len(files[1]) - len(kept) >= 7
    assert info.text_bytes == sum(map(len, kept))


@pytest.mark.parametrize(
    ("searched", "separator"),
    [
        *((7, "<|endoftext|>"), (7, "\n\n"), (1, "aa")),
        pytest.param(7, "aa", marks=pytest.mark.slow),
        *(pytest.param(1, separator, marks=pytest.mark.slow) for separator in ("<|endoftext|>", "\n\n")),
        *(pytest.param(1 << 20, separator, marks=pytest.mark.slow) for separator in ("<|endoftext|>", "\n\n", "aa")),
    ],
)
def test_documents_are_the_same_however_small_the_units_are(separator, searched, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(documents, "SEARCH_BYTES", searched)
    path, reading = tmp_path / "a.txt", DocumentFormat(separator=separator)
    path.write_bytes("\ufeff".encode() + separator.join(["One.", "", "Zwei Grüße.", " \n ", "Three.", "Four"]).encode())
    whole = open_corpus(path, tokenizer, cache=tmp_path / "cache", reading=reading)
    for unit in (1, 5, 17):
        folder = tmp_path / str(unit)
        tokenize_files(path, folder, TOKENIZER, options=BuildOptions(reading, unit), processes=1)
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
        (tmp_path / "ids.bin", "out", SMALL, "ids.bin already holds token ids"),
        (tmp_path / "cut.jsonl.gz", "out1", SMALL, r"cut.jsonl.gz is incomplete \(.*\); copy it again"),
        (tmp_path / "cut.txt.zst", "out2", SMALL, r"cut.txt.zst is incomplete \(.*\); copy it again"),
        (tmp_path / "cut.parquet", "out3", SMALL, "cut.parquet cannot be read in its metadata"),
        (files[0] / "d.parquet", "out4", column, r"d.parquet has no column 'body'; it has \['text'\]"),
        (files[0] / "a.txt", "other", SMALL, "other holds 'thing', not a build"),
        (files[0] / "a.txt", built[0], SMALL, "was built with different files, sources; use another folder"),
    ):
        with pytest.raises(DataError, match=message):
            tokenize_files(paths, tmp_path / out, TOKENIZER, options=options, processes=1)


def test_it_is_not_built_into_what_is_read(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Once upon a time.")
    with pytest.raises(DataError, match=r"texts/out is inside .*texts, so it would be read as data next time"):
        tokenize_files(tmp_path / "texts", tmp_path / "texts" / "out", TOKENIZER)
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["a.txt"]


def test_files_without_documents_are_no_corpus_and_leave_nothing(tmp_path):
    empty = tmp_path / "a.parquet"
    with pyarrow.parquet.ParquetWriter(empty, pyarrow.schema({"text": pyarrow.string()})):
        pass
    (tmp_path / "b.jsonl").write_text('\n{"text": ""}\n')
    for paths, message in ((empty, "a.parquet holds"), ([empty, tmp_path / "b.jsonl"], "and 1 more hold")):
        with pytest.raises(DataError, match=f"{message} no document; are these the right files"):
            tokenize_files(paths, tmp_path / "out", TOKENIZER, processes=1)
        assert not (tmp_path / "out").exists()


def stopped(files, folder, monkeypatch, part=3, options=SMALL):
    """A build in a folder that ended before a part."""

    def ending(job, number, *unit):
        if number == part:
            raise KeyboardInterrupt
        make_part(job, number, *unit)

    with monkeypatch.context() as patch:
        patch.setattr(build_corpus, "make_part", ending)
        with pytest.raises(KeyboardInterrupt):
            tokenize_files(files, folder, TOKENIZER, options=options, processes=1)


@pytest.mark.parametrize("content", ["", "[1", "[1]"])
def test_a_broken_plan_is_named_with_a_remedy(content, files, tmp_path, monkeypatch):
    stopped(files[0], tmp_path / "out", monkeypatch)
    (tmp_path / "out" / UNFINISHED).write_text(content)
    with pytest.raises(DataError, match=rf"{tmp_path}/out was built with different .*; use another folder, or remove it"):
        tokenize_files(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=1)


def test_a_part_that_was_damaged_meanwhile_is_made_again(files, built, tmp_path, monkeypatch):
    stopped(files[0], tmp_path / "out", monkeypatch)
    (tmp_path / "out" / PART_NAME.format(0)).unlink()
    (tmp_path / "out" / PART_NAME.format(1)).write_bytes(b"something else")
    tokenize_files(files[0], tmp_path / "out", TOKENIZER, options=SMALL, processes=1)
    assert contents(tmp_path / "out") == contents(built[0])


@pytest.mark.parametrize("part", [0, 1])
def test_an_unfinished_build_is_not_read(part, files, tokenizer, tmp_path, monkeypatch):
    folder = tmp_path / "all" / "out"
    stopped(files[0], folder, monkeypatch, part)
    (tmp_path / "all" / "more.txt").write_text("More.")
    message = f"{folder} holds an unfinished build; the same `llama-jax data build` resumes it"
    for given in (folder, [files[0], folder], tmp_path / "all"):
        with pytest.raises(DataError, match=message):
            open_corpus(given, tokenizer, cache=tmp_path / "cache")
    tokenize_files(files[0], folder, TOKENIZER, options=SMALL, processes=1)
    assert open_corpus(folder, tokenizer).document_count == len(files[1])


def test_another_tokenizer_is_refused_and_both_are_named(files, built, tmp_path):
    own = built[1].origin["fingerprint"][:12]
    message = rf"was built with the tokenizer {bundled()} \(fingerprint {own}\), but is read with another one"
    for given in (built[0], [built[0] / CORPUS_NAME, files[0] / "a.txt"]):
        with pytest.raises(DataError, match=message + rf".* use --tokenizer {bundled()}"):
            open_corpus(given, byte_tokenizer(), cache=tmp_path)


def test_a_build_over_a_damaged_corpus_notices_it(files, tmp_path):
    tokenize_files(files[0] / "a.txt", tmp_path / "out", TOKENIZER, processes=1)
    path = tmp_path / "out" / CORPUS_NAME
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    with pytest.raises(DataError, match=f"{path} is not a whole corpus of tokens; remove it, and build again"):
        tokenize_files(files[0] / "a.txt", tmp_path / "out", TOKENIZER, processes=1)
    path.unlink()
    tokenize_files(files[0] / "a.txt", tmp_path / "out", TOKENIZER, processes=1)
    assert path.read_bytes() == content


def forged(path, ids=(1, 2, 3, 4), starts=(0, 2, 4), byte_counts=(3, 4), **fields):
    """A corpus whose check sums are right, whatever it says."""
    data = np.array(ids, "<u2").tobytes()
    data += bytes(-len(data) % 8) + np.array([*starts, *byte_counts], "<i8").tobytes()
    info = {"token_type": "uint16", "documents": 2, "tokens": 4, "text_bytes": 7, "vocab_size": 5, "origin": {}}
    text = json.dumps(info | {"sha256": hashlib.sha256(data).hexdigest()} | fields).encode()
    path.write_bytes(CORPUS_HEADER.pack(CORPUS_MAGIC, len(text), hashlib.sha256(text).digest()) + data + text)
    return path


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"token_type": "object"}, "an invalid description, .*'object'"),
        ({"token_type": "uint32"}, "is not a whole corpus"),
        ({"documents": -1}, "an invalid description, .*-1"),
        ({"tokens": 10**30}, "is not a whole corpus"),
        ({"more": 1}, "an invalid description"),
        ({"origin": []}, "an invalid description"),
        ({"starts": (0, 5, 4)}, "documents or tokens that differ from its description"),
        ({"byte_counts": (-3, 10)}, "documents or tokens that differ from its description"),
        ({"text_bytes": 8}, "documents or tokens that differ from its description"),
        ({"vocab_size": 4}, "documents or tokens that differ from its description"),
    ],
)
def test_what_a_corpus_says_of_itself_is_checked(said, message, tmp_path):
    assert read_corpus(forged(tmp_path / "good.corpus"))[0].document(1).tolist() == [3, 4]
    with pytest.raises(DataError, match=f"bad.corpus .*{message}.*; remove it, and build again"):
        read_corpus(forged(tmp_path / "bad.corpus", **said))


def test_a_second_build_in_a_folder_is_told_of_the_first(files, tmp_path):
    with (
        lock_file(tmp_path / "out" / BUILD_LOCK, tmp_path / "out", UserError),
        pytest.raises(DataError, match=f"out is in use by process {os.getpid()} on .*; wait until it ends"),
    ):
        tokenize_files(files[0], tmp_path / "out", TOKENIZER, processes=1)
    tokenize_files(files[0] / "a.txt", tmp_path / "out", TOKENIZER, processes=1)
    assert not (tmp_path / "out" / BUILD_LOCK).exists()


def test_the_processes_of_a_build_do_without_jax():
    code = "import sys, llama_jax.data.build_corpus; assert not {'jax', 'orbax', 'grain'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
