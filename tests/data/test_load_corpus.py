"""Tokenized once: what is read again, what is made again, and what is left when something fails."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from byte_tokenizer import BOS, EOS, ByteTokenizer
from conftest import shared_data

import llama_jax
from llama_jax.data import DataError, DocumentFormat, open_corpus
from llama_jax.data import load_corpus as module
from llama_jax.data.corpus_file import read_corpus
from llama_jax.errors import UserError

STORIES = ["Once upon a time,\nthere was a llama.", "é🦙", "The end."]


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("\n<|endoftext|>\n".join(STORIES), encoding="utf-8")
    return folder


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def texts(corpus):
    found = [corpus.document(number) for number in range(corpus.document_count)]
    return [bytes(document[document < 256].astype(np.uint8)).decode() for document in found]


def only_file(cache):
    (path,) = cache.iterdir()
    return path


def no_reading(monkeypatch):
    """Whatever reads a source from here on fails."""

    def fail(*_):
        raise AssertionError("a source was read")

    monkeypatch.setattr(module, "describe_source", fail)
    monkeypatch.setattr(module, "read_tokens", fail)
    monkeypatch.setattr("llama_jax.data.data_files.describe_source", fail)


def test_documents_of_every_kind_of_file(data, cache, monkeypatch):
    monkeypatch.setattr(module, "BIN_TOKENS", 2)  # so that documents come in parts
    (data / "b.jsonl").write_text('{"text": "from a line"}\n')
    np.array([BOS, 104, 105, EOS, BOS, 33, EOS], np.uint16).tofile(data / "c.bin")
    writer = ArrayRecordWriter(str(data / "d.array_record"), "group_size:1")
    writer.write(np.array([BOS, 63, EOS], np.uint16).tobytes())
    writer.close()
    (data / "notes.md").write_text("is not data")
    (data / ".hidden.txt").write_text("is not data")
    (data / ".git" / "deeper").mkdir(parents=True)
    (data / ".git" / "deeper" / "e.txt").write_text("is not data")
    corpus = open_corpus(data, ByteTokenizer(), cache=cache)
    assert texts(corpus) == [*STORIES, "from a line", "hi", "!", "?"]
    assert corpus.byte_counts.tolist() == [len(text.encode()) for text in texts(corpus)]
    for number in range(corpus.document_count):
        document = corpus.document(number)
        assert (document[0], document[-1]) == (BOS, EOS)
    assert corpus.tokens.dtype == np.uint16
    assert corpus.vocab_size == 258
    reading = DocumentFormat(token_type="uint16")
    assert open_corpus(data, ByteTokenizer(vocab_size=1 << 17), reading=reading, cache=cache).tokens.dtype == np.uint32


def test_the_second_time_no_source_is_read(data, cache, monkeypatch):
    tokenizer = ByteTokenizer()
    first = open_corpus(data, tokenizer, cache=cache)
    no_reading(monkeypatch)
    second = open_corpus([data / "a.txt"], ByteTokenizer(), cache=cache, progress=pytest.fail)
    assert texts(second) == texts(first)
    assert second.digest == first.digest


def test_where_the_cache_lies(data, tmp_path, monkeypatch):
    """In the user's, unless the environment places it."""
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / name))
    open_corpus(data, ByteTokenizer())
    assert only_file(tmp_path / "llama_jax/corpora").suffix == ".corpus"
    monkeypatch.setenv("LLAMA_JAX_CACHE", str(tmp_path / "elsewhere"))
    open_corpus(data, ByteTokenizer())
    assert only_file(tmp_path / "elsewhere/corpora").suffix == ".corpus"
    for limit in ("much", "-1", "nan"):
        monkeypatch.setenv("LLAMA_JAX_CACHE_LIMIT", limit)
        with pytest.raises(UserError, match=f"LLAMA_JAX_CACHE_LIMIT={limit} must be a number of gigabytes, at least 0"):
            open_corpus(data, ByteTokenizer())


def test_a_cache_does_not_grow_beyond_its_limit(data, cache, monkeypatch):
    """What was not opened for longest goes; not what another process may be about to read, nor what is no corpus."""
    first = open_corpus(data, ByteTokenizer(), cache=cache)
    oldest = only_file(cache)
    size = oldest.stat().st_size
    (cache / "thesis.corpus").write_text("years of work")
    open_corpus(data, ByteTokenizer(shift=1), cache=cache)
    (other,) = {path for path in cache.iterdir() if path.name != "thesis.corpus"} - {oldest}
    open_corpus(data, ByteTokenizer(shift=2), cache=cache, cache_limit=size)
    assert len(list(cache.iterdir())) == 4, "all were opened a moment ago"
    for age, path in ((5000, oldest), (4000, other)):
        os.utime(path, (time.time() - age,) * 2)
    open_corpus(data, ByteTokenizer(), cache=cache)  # used again
    os.utime(oldest, (oldest.stat().st_mtime - 1000,) * 2)
    open_corpus(data, ByteTokenizer(shift=3), cache=cache, cache_limit=3 * size)
    assert oldest.exists()
    assert not other.exists()
    open_corpus(data, ByteTokenizer(shift=4), cache=cache, cache_limit=0)
    assert not oldest.exists()
    assert texts(first) == STORIES, "what is mapped stays readable"
    assert (cache / "thesis.corpus").read_text() == "years of work"
    assert len(list(cache.iterdir())) == 4


def reading(data, cache, before_the_end):
    """A process that opens the corpus, and does something before it encodes the last document."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from byte_tokenizer import ByteTokenizer
from llama_jax.data import load_corpus, open_corpus

class Stopping(ByteTokenizer):
    def encode_batch(self, texts):
        if texts[-1].startswith("The end"):
            {before_the_end}
        return super().encode_batch(texts)

load_corpus.BATCH_DOCUMENTS = 1
print(open_corpus({str(data)!r}, Stopping(), cache={str(cache)!r}).digest)
"""
    return [sys.executable, "-c", code]


@pytest.mark.slow
def test_two_processes_on_one_cache(data, cache):
    """Each finds the other in the middle of the same corpus; both get it, and one file is left."""
    command = reading(data, cache, "print('half', flush=True); sys.stdin.readline()")
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as two:
        for process in (one, two):
            assert process.stdout.readline() == "half\n"
        assert len(list(cache.iterdir())) == 2
        digests = [process.communicate("\n")[0] for process in (one, two)]
    assert (one.returncode, two.returncode) == (0, 0)
    assert digests[0] == digests[1] == open_corpus(data, ByteTokenizer(), cache=cache).digest + "\n"
    only_file(cache)


@pytest.mark.parametrize("length", ["same", "other"])
def test_a_changed_source_is_tokenized_again(length, data, cache):
    first = open_corpus(data, ByteTokenizer(), cache=cache)
    path = data / "a.txt"
    text = path.read_text().replace("llama", "camel" if length == "same" else "dromedary")
    path.write_text(text)
    os.utime(path, ns=(1, 1))
    second = open_corpus(data, ByteTokenizer(), cache=cache)
    assert texts(second)[0] == text.split("\n<|endoftext|>")[0]
    assert second.digest != first.digest
    assert texts(first) == STORIES  # what is open stays what it was
    only_file(cache)


@pytest.mark.parametrize(
    "other",
    [ByteTokenizer(shift=1), ByteTokenizer(eos_id=-1), ByteTokenizer(vocab_size=300), ByteTokenizer(space_prefix=True)],
)
def test_another_tokenizer_or_reading_has_a_file_of_its_own(other, data, cache, monkeypatch):
    first = open_corpus(data, ByteTokenizer(), cache=cache)
    open_corpus(data, other, cache=cache)
    assert other.encoded == len(STORIES) + 1  # and the probe
    assert texts(open_corpus(data, ByteTokenizer(), cache=cache, reading=DocumentFormat(separator=" "))) != STORIES
    no_reading(monkeypatch)
    assert open_corpus(data, ByteTokenizer(), cache=cache).digest == first.digest


def test_every_flipped_bit_and_every_cut_is_noticed(data, cache):
    open_corpus(data, ByteTokenizer(), cache=cache)
    path = only_file(cache)
    whole = path.read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))]
    damaged += [whole[:at] for at in range(len(whole))] + [whole + b"\0", whole * 2, bytes(len(whole))]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(DataError, match="not a whole corpus"):
            read_corpus(path)


def test_a_damaged_file_is_made_again_with_a_warning(data, cache):
    open_corpus(data, ByteTokenizer(), cache=cache)
    path = only_file(cache)
    path.write_bytes(b"something else")
    with pytest.warns(UserWarning, match=re.escape(f"{path} is not a whole corpus of tokens; tokenizing again")):
        corpus = open_corpus(data, ByteTokenizer(), cache=cache)
    assert texts(corpus) == texts(open_corpus(data, ByteTokenizer(), cache=cache)) == STORIES


def test_a_kill_leaves_no_corpus_and_what_it_leaves_goes(data, cache):
    """Killed with a document written and others to come; the next time all is there and nothing else."""
    command = reading(data, cache, "os.kill(os.getpid(), signal.SIGKILL)")
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert only_file(cache).suffix == ".llama_jax-partial"
    assert texts(open_corpus(data, ByteTokenizer(), cache=cache)) == STORIES
    assert only_file(cache).suffix == ".corpus"


def test_a_file_that_grows_while_it_is_read_is_refused(data, cache):
    class Writing(ByteTokenizer):
        def encode_batch(self, texts):
            with (data / "a.txt").open("a") as file:
                file.write("more")
            return super().encode_batch(texts)

    with pytest.raises(DataError, match="changed while being read"):
        open_corpus(data, Writing(), cache=cache)
    assert not cache.exists()


GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    ("name", "content", "reading", "message"),
    [
        ("a.txt", b"", {}, "is empty; is it the right file?"),
        ("a.txt", b" \n\n<|endoftext|>\n", {}, "holds no document"),
        ("a.txt", b"good\nbad \xff\n", {}, ", line 2 is not UTF-8 (byte 0xff)"),
        ("a.txt", b"good\nbad \xc3", {}, ", line 2 is not UTF-8 (byte 0xc3)"),
        ("a.txt", b"PNG\n\n\0\0", {}, ", line 3 has a zero byte"),
        ("a.txt", "a\n".encode("utf-16-le"), {}, ", line 1 has a zero byte"),
        ("a.jsonl", b'\n{"text": ""}\n', {}, "holds no document"),
        ("a.jsonl", '{"text": "café"}\n'.encode("utf-16"), {}, ", line 1 is not UTF-8; save the file as UTF-8"),
        ("a.jsonl", GOOD + b'{"text": "cut', {}, ", line 2 is not JSON (Unterminated string starting at at column 10)"),
        ("a.jsonl", GOOD + b"[" * 100_000, {}, ", line 2 is not JSON"),
        ("a.jsonl", GOOD + b'["text"]', {}, ", line 2 is a list; JSONL has one object per line"),
        ("a.jsonl", GOOD + b'{"story": "a", "id": 1}', {}, "has no text in the field 'text'; it has ['story', 'id']"),
        ("a.jsonl", GOOD + b'{"text": 3}', {}, "text=3 must be a text; set `field` to the one with the text"),
        ("a.jsonl", GOOD + b'{"text": "b\\ud800"}', {}, ", line 2: the text is not valid Unicode"),
        ("a.bin", b"", {}, "is empty; is it the right file?"),
        ("a.bin", b"123", {}, "has 3 bytes, not a multiple of the 2 of a uint16 id"),
        ("a.bin", np.array([BOS, 1, 300, 2], "u2").tobytes(), {}, "token 2 is 300, outside the vocabulary of 258"),
        ("a.bin", np.array([BOS, 1, 2, EOS], "u2").tobytes(), {"token_type": "uint32"}, "token 0 is 65792, outside"),
        ("a.bin", np.arange(9, dtype="u4").tobytes(), {}, "token 1 and every second one is 0: the ids are uint32"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_leaves_nothing(name, content, reading, message, tmp_path, cache):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=re.escape(message)) as error:
        open_corpus(tmp_path / name, ByteTokenizer(), cache=cache, reading=DocumentFormat(**reading))
    assert str(tmp_path / name) in str(error.value)
    assert not cache.exists()


def test_paths_with_nothing_to_read(data, tmp_path, cache):
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for paths, message in [
        (tmp_path / "none", "none does not exist"),
        (tmp_path / "model", "model holds no file that ends in .txt, .jsonl, .parquet, .arrow, .bin, .array_record"),
        (tmp_path / "pipe", "pipe is neither a file nor a folder"),
        ([], "no data files given"),
        ([data, str(data / "a.txt")], "a.txt is given twice"),
    ]:
        with pytest.raises(DataError, match=re.escape(message)):
            open_corpus(paths, ByteTokenizer(), cache=cache)


def test_a_cache_that_cannot_be_written_names_the_remedy(data):
    with pytest.raises(DataError, match=r"a\.txt/.*\.corpus cannot be written .*set another folder as `cache`"):
        open_corpus(data, ByteTokenizer(), cache=data / "a.txt")


def test_llama_2_and_stories(cache):
    """With a real vocabulary: each story of the slice as Llama 2 encodes it, and its bytes."""
    tokenizer = llama_jax.load_tokenizer(shared_data("tokenizers/llama2"))
    path = shared_data("text/tinystories-v2-train.txt")
    corpus = open_corpus(path, tokenizer, cache=cache)
    stories = [story.strip() for story in path.read_text(encoding="utf-8").split("<|endoftext|>")]
    assert corpus.document_count == len(stories) == 1728
    assert corpus.byte_count == sum(len(story.encode()) for story in stories)
    for number in range(0, len(stories), 100):
        assert corpus.document(number).tolist() == tokenizer.encode(stories[number], eos=True)
    # The same ids from a file without text: so their bytes are counted by the vocabulary.
    ids = cache / "stories.bin"
    corpus.tokens.tofile(ids)
    again = open_corpus(ids, tokenizer, cache=cache)
    np.testing.assert_array_equal(again.starts, corpus.starts)
    np.testing.assert_array_equal(again.byte_counts, corpus.byte_counts)
    assert again.digest == corpus.digest
