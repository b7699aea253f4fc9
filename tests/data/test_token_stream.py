"""Files of ids: where documents begin, how many bytes of text they stand for, and damaged records."""

import re

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from byte_tokenizer import BOS, EOS, ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.data import DataError, DocumentFormat
from llama_jax.data import load_corpus as module
from llama_jax.data.load_corpus import examine, read_tokens


def documents(path, tokenizer=None, **reading):
    """[(ids, bytes of text)], the parts of each document put together again."""
    tokenizer = tokenizer or ByteTokenizer()
    found, reads = [], []
    for block in read_tokens(path, tokenizer, examine(tokenizer), DocumentFormat(**reading)):
        reads.append(block.read)
        counts = block.byte_counts.tolist()
        goes_on, *texts = [text.tolist() for text in np.split(block.tokens, block.starts)]
        if goes_on:
            found[-1] = found[-1][0] + goes_on, found[-1][1] + counts.pop(0)
        found += zip(texts, counts, strict=True)
    assert reads == sorted(set(reads))
    assert reads[-1] == path.stat().st_size
    return found


def write_records(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def in_documents(ids, bos, eos, space_prefix):
    """Plain: a document begins with a BOS and after an EOS."""
    found = []
    for place, token in enumerate(ids):
        if place == 0 or token == bos or ids[place - 1] == eos:
            found.append([])
        found[-1].append(token)
    counts = [sum(token < 256 for token in document) for document in found]
    return [(document, n - (space_prefix and n > 0)) for document, n in zip(found, counts, strict=True)]


@given(
    ids=st.lists(st.sampled_from([1, 2, BOS, EOS]), min_size=1, max_size=15),
    ends=st.sampled_from([(BOS, EOS), (BOS, -1), (-1, EOS), (-1, -1), (EOS, EOS)]),
    dtype=st.sampled_from(["uint16", "uint32"]),
    space_prefix=st.booleans(),
    block=st.integers(1, 6),
)
def test_a_bin_has_documents_from_bos_and_after_eos(ids, ends, dtype, space_prefix, block, tmp_path_factory):
    path = tmp_path_factory.mktemp("ids") / "some.bin"
    np.array(ids, dtype).tofile(path)
    tokenizer = ByteTokenizer(bos_id=ends[0], eos_id=ends[1], space_prefix=space_prefix)
    if ends[0] == ends[1] != -1:  # one token for both is what it is at the beginning
        ends = (EOS, -1) if ids[0] == EOS else (-1, EOS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BIN_TOKENS", block)
        found = documents(path, tokenizer, token_type=dtype)
    assert found == in_documents(ids, *ends, space_prefix)


@pytest.mark.parametrize("space_prefix", [False, True])
def test_each_record_is_a_document(space_prefix, tmp_path):
    path = tmp_path / "some.array_record"
    whole = [[BOS, 1, 2, EOS], [3], [BOS], [BOS, 4, BOS, 5]]
    write_records(path, [np.array(ids, np.uint16).tobytes() for ids in whole])
    counts = [2, 1, 0, 2]
    expected = [(ids, n - (space_prefix and n > 0)) for ids, n in zip(whole, counts, strict=True)]
    assert documents(path, ByteTokenizer(space_prefix=space_prefix)) == expected


def test_text_is_between_bos_and_eos_where_the_vocabulary_has_them(tmp_path):
    path = tmp_path / "some.TXT"
    path.write_text("é")
    assert documents(path) == [([BOS, 0xC3, 0xA9, EOS], 2)]
    assert documents(path, ByteTokenizer(bos_id=-1, eos_id=-1)) == [([0xC3, 0xA9], 2)]
    without = ByteTokenizer(puts_bos=False)  # whose own rule puts none
    assert documents(path, without) == [([0xC3, 0xA9, EOS], 2)]
    assert examine(without).fingerprint != examine(ByteTokenizer()).fingerprint  # so what was tokenized with one is not used
    lines = path.rename(tmp_path / "some.JSONL")
    lines.write_text('{"text": "a"}')
    assert documents(lines) == [([BOS, 97, EOS], 1)]


def test_records_that_cannot_be(tmp_path):
    path = tmp_path / "some.array_record"
    for record, message in [
        (b"\1", "record 1 has 1 bytes"),
        (b"", "record 1 has 0 bytes"),
        (b"\xff\xff", "record 1, token 0 is 65535"),
    ]:
        write_records(path, [b"\1\0", record])
        with pytest.raises(DataError, match=re.escape(f"{path}, {message}")):
            documents(path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"no records", whole[:70] + bytes([whole[70] ^ 1]) + whole[71:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="is not a whole array-record"):
            documents(path)
