"""Parquet and Arrow, and datasets as the Hugging Face hub and its library have them."""

import json

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from llama_jax.data import DataError, DocumentFormat
from llama_jax.data.data_files import find_files
from llama_jax.data.documents import Span, read_documents, spans_of

TEXTS = [f"Row {n} of them. " * (n % 7) for n in range(50)]


def texts(path, span=None, **reading):
    return [document.text for document in read_documents(path, DocumentFormat(**reading), span)]


@pytest.fixture(params=["stream", "file"])
def arrow(request, tmp_path):
    table = pyarrow.table({"id": range(50), "text": TEXTS})
    make = {"stream": pyarrow.ipc.new_stream, "file": pyarrow.ipc.new_file}[request.param]
    with make(str(tmp_path / "a.arrow"), table.schema) as sink:
        sink.write_table(table, max_chunksize=8)
    return tmp_path / "a.arrow"


def test_arrow_is_read_whole_and_in_units(arrow):
    whole = [text for text in TEXTS if text]
    assert texts(arrow) == whole
    for size, count in ((1, 7), (1500, 2), (1 << 30, 1)):
        spans = spans_of(arrow, DocumentFormat(), size)
        assert [text for span in spans for text in texts(arrow, span)] == whole
        assert len(spans) == count
    assert texts(arrow, Span(1, 2)) == [text for text in TEXTS[8:16] if text]


def test_what_cannot_be_read_of_arrow(arrow, tmp_path):
    for field, message in (("body", r"has no column 'body'; it has \['id', 'text'\]"), ("id", "row 1: id=0 must be a text")):
        with pytest.raises(DataError, match=message):
            texts(arrow, field=field)
    content = arrow.read_bytes()
    for cut in (3, 700, len(content) - 8):
        (tmp_path / "cut.arrow").write_bytes(content[:cut])
        with pytest.raises(DataError, match=r"cut.arrow cannot be read in its batches \(.*\); copy it again"):
            texts(tmp_path / "cut.arrow")


@pytest.mark.parametrize(("compression", "sums"), [("snappy", False), ("none", False), ("zstd", True)])
def test_damage_inside_parquet_names_the_file(compression, sums, tmp_path):
    """Of zstd's damage that unpacks to something else nothing is known without the check sums of pages."""
    path = tmp_path / "a.parquet"
    many = [f"{n} is a number, and {n * n} its square." for n in range(4000)]
    how = dict(compression=compression, row_group_size=1000, use_dictionary=False, write_page_checksum=sums)
    pyarrow.parquet.write_table(pyarrow.table({"text": many}), path, **how)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = b"\xff" * 400
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a.parquet cannot be read in row group [012] \(.*\); copy it again"):
        texts(path)


def write(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    return path


def test_of_a_folder_of_the_hub_one_split_is_read(tmp_path):
    train = [write(tmp_path / f"data/train-{n:05d}-of-00002-0a1b2c3d.parquet", ["a"]) for n in range(2)]
    (tmp_path / "README.md").write_text("A card.")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert find_files(tmp_path) == train
    write(tmp_path / "data/test-00000-of-00001.parquet", ["b"])
    message = rf"holds several splits of a dataset, \['test', 'train'\]; use one of them, such as {tmp_path}/data/\*train\*"
    with pytest.raises(DataError, match=message):
        find_files(tmp_path)
    assert find_files(train) == train
    own = [write(tmp_path / "own" / f"{name}-00000-of-00001.parquet", ["b"]) for name in ("books", "wiki")]
    assert find_files(tmp_path / "own") == own, "names that are no splits are files like others"


def save(folder, name="data-00000-of-00001.arrow"):
    """As Dataset.save_to_disk does."""
    folder.mkdir(parents=True)
    table = pyarrow.table({"text": TEXTS})
    for file in (name, "cache-0123456789abcdef.arrow"):
        with pyarrow.ipc.new_stream(str(folder / file), table.schema) as sink:
            sink.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_split": None}))
    (folder / "dataset_info.json").write_text("{}")
    return folder / name


def test_of_a_saved_dataset_its_own_files_are_read(tmp_path):
    train = save(tmp_path / "all" / "train")
    assert find_files(tmp_path / "all" / "train") == [train]
    save(tmp_path / "all" / "test")
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        DataError, match=rf"several splits .*\['test', 'train'\]; use one of them, such as {tmp_path}/all/test"
    ):
        find_files(tmp_path)
    (tmp_path / "all" / "train" / "state.json").write_text("[]")
    with pytest.raises(DataError, match=r"state.json does not list the files of a dataset \(TypeError\); save it again"):
        find_files(tmp_path / "all" / "train")


def test_of_the_librarys_cache_one_split_is_read(tmp_path):
    for name in ("wiki-train-00000-of-00002", "wiki-train-00001-of-00002"):
        (tmp_path / f"{name}.arrow").write_bytes(b"ARROW1")
    assert len(find_files(tmp_path)) == 2
    (tmp_path / "wiki-validation.arrow").write_bytes(b"ARROW1")
    with pytest.raises(DataError, match=rf"several splits .*\['train', 'validation'\]; use .* {tmp_path}/\*train\*"):
        find_files(tmp_path)
