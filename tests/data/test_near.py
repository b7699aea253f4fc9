"""Near duplicates: what is found of copies that were planted, what is said of them, and that nothing else decides it."""

import json
import re
import sys

import numpy as np
import pytest

from llama_jax.data import DataError, near, open_corpus, shards
from llama_jax.data.building import LISTING, BuildOptions, build
from llama_jax.data.manifest import MANIFEST
from llama_jax.formats.loading import bundled
from llama_jax.tokenizers import load_tokenizer

WORDS = [
    "the",
    "llama",
    "dog",
    "river",
    "stone",
    "hill",
    "small",
    "old",
    "red",
    "saw",
    "found",
    "took",
    "gave",
    "ran",
    "said",
]


def story(rng, words=120):
    return " ".join(f"{rng.choice(WORDS)}{rng.integers(30)}" for _ in range(words))


def edited(rng, text, times):
    """Some words are replaced."""
    words = text.split()
    for at in rng.choice(len(words), times, replace=False):
        words[at] = f"other{rng.integers(1000)}"
    return " ".join(words)


def shingles(text):
    content = " ".join(text.lower().split()).encode().ljust(near.SHINGLE, b"\0")
    return {content[i : i + near.SHINGLE] for i in range(len(content) - near.SHINGLE + 1)}


def similarity(one, other):
    """Jaccard's, as it is defined."""
    one, other = shingles(one), shingles(other)
    return len(one & other) / len(one | other)


def test_signatures_estimate_the_similarity_of_shingles():
    rng = np.random.default_rng(0)
    texts = [story(rng) for _ in range(40)]
    pairs = [(text, edited(rng, text, n)) for n, text in enumerate(texts)]
    pairs += [
        ("Short.", "Short."),
        ("Short.", "short"),
        ("", " \n"),
        ("Größe 大きさ 大きさ", "GRÖSSE 大きさ"),
        ("A b", "a  B"),
    ]
    one, other = near.signatures([pair[0] for pair in pairs]), near.signatures([pair[1] for pair in pairs])
    assert one.shape == (45, near.MINIMA)
    errors = (one == other).mean(1) - [similarity(*pair) for pair in pairs]
    assert np.sqrt((errors**2).mean()) < 0.044
    assert abs(errors.mean()) < 0.02
    np.testing.assert_array_equal((one == other).mean(1)[-3:], [1, similarity(*pairs[-2]), 1])


def test_signatures_do_not_depend_on_what_is_signed_with_them(monkeypatch):
    rng = np.random.default_rng(0)
    texts = [story(rng, int(words)) for words in rng.integers(1, 300, 30)]
    together = near.signatures(texts)
    for block in (1, 3000):
        monkeypatch.setattr(near, "BLOCK", block)
        np.testing.assert_array_equal(near.signatures(texts), together)
    np.testing.assert_array_equal(np.concatenate([near.signatures([text]) for text in texts]), together)
    assert near.signatures([]).shape == (0, near.MINIMA)


@pytest.mark.parametrize("least", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0])
def test_pairs_that_are_near_enough_are_compared(least):
    count, rows = near.bands(least)
    assert count * rows <= near.MINIMA
    assert 1 - (1 - least**rows) ** count >= near.CERTAIN


def plainly(signatures, left_out, least):
    """Every document beside every earlier one that stays."""
    staying, found = [], []
    for number, own in enumerate(signatures):
        if left_out[number]:
            continue
        alike = [(other, np.mean(signatures[other] == own)) for other in staying]
        first = next(((other, estimate) for other, estimate in alike if estimate >= least), None)
        if first is None:
            staying.append(number)
        else:
            found.append((number, *first))
    return found


def test_bands_find_what_comparing_all_with_all_finds():
    rng = np.random.default_rng(1)
    originals = [story(rng) for _ in range(60)]
    texts = [edited(rng, originals[n % 60], int(rng.integers(0, 5))) for n in range(300)]
    found = near.signatures(texts)
    left_out = rng.random(300) < 0.1
    expected = plainly(found, left_out, 0.8)
    assert len(expected) > 50
    for cuts in ([], [0, 7, 7, 200]):
        assert near.find_near(np.split(found, cuts), left_out, 0.8) == expected


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """300 texts and copies of 60 of them with one word in 120 replaced, and of 60 with a third; in two files."""
    rng = np.random.default_rng(2)
    originals = [story(rng) for _ in range(300)]
    texts = (
        originals + [edited(rng, text, 1) for text in originals[:60]] + [edited(rng, text, 40) for text in originals[60:120]]
    )
    texts.append(originals[200])
    folder = tmp_path_factory.mktemp("planted")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:330]))
    (folder / "b\tc.txt").write_text("<|endoftext|>".join(texts[330:]))
    return folder, texts


OPTIONS = BuildOptions(unit=20_000, near_duplicates=0.8)


@pytest.fixture(scope="module")
def built(planted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "out"
    return folder, build(planted[0], folder, bundled(), options=OPTIONS, processes=1)


def test_planted_copies_are_left_out_and_listed(planted, built, tmp_path):
    """With one word replaced the similarity is 0.93 to 0.96, with a third below 0.3: of these 120 all are told apart."""
    folder, manifest = built
    assert (manifest.total("near_duplicates"), manifest.total("duplicates")) == (60, 1)
    tokenizer = load_tokenizer(bundled())
    corpus = open_corpus(folder, tokenizer, cache=tmp_path)
    kept = [tokenizer.decode(corpus.document(number).tolist()) for number in range(corpus.document_count)]
    assert kept == planted[1][:300] + planted[1][360:420]
    heading, *lines = (folder / LISTING).read_text().splitlines()
    assert heading.split("\t") == ["file", "document", "near_file", "near_document", "similarity"]
    first, second = (str(planted[0] / "a.jsonl"), str(planted[0] / "b\\tc.txt"))
    for number, line in enumerate(lines):
        file, document, near_file, near_document, estimate = line.split("\t")
        assert (file, int(document)) == ((first, 301 + number) if number < 30 else (second, number - 29))
        assert (near_file, int(near_document)) == (first, number + 1)
        assert abs(float(estimate) - similarity(planted[1][300 + number], planted[1][number])) < 0.1
    assert len(lines) == 60
    assert manifest.listing is not None
    assert manifest.listing[0] == LISTING
    assert {path.name for path in folder.iterdir()} == {
        LISTING,
        MANIFEST,
        *(shard.name for shard in manifest.shards if shard.name),
    }


def test_stopped_and_gone_on_with_they_are_the_same(planted, built, tmp_path, monkeypatch):
    for name, stop in (("look", 3), ("make", 2)):
        real = getattr(shards, name)

        def ending(work, unit, *rest, real=real, stop=stop):
            if unit.number == stop:
                raise KeyboardInterrupt
            return real(work, unit, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(shards, name, ending)
            with pytest.raises(KeyboardInterrupt):
                build(planted[0], tmp_path / "out", bundled(), options=OPTIONS, processes=1)
    (tmp_path / "out" / "unit-00001.seen").write_bytes(b"other")
    with pytest.raises(DataError, match=r"unit-00001.seen is not what was written; remove it, and build again"):
        build(planted[0], tmp_path / "out", bundled(), options=OPTIONS, processes=1)
    (tmp_path / "out" / "unit-00001.seen").unlink()
    build(planted[0], tmp_path / "out", bundled(), options=OPTIONS, processes=1)
    for path in built[0].iterdir():
        if path.name != MANIFEST:
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_two_processes_find_the_same(planted, built, tmp_path):
    build(planted[0], tmp_path / "out", bundled(), options=OPTIONS, processes=2)
    same = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != MANIFEST}
    assert same == {path.name: path.read_bytes() for path in built[0].iterdir() if path.name != MANIFEST}


def test_what_cannot_be_asked_for(planted, tmp_path, monkeypatch):
    for least in (0, 1.5):
        with pytest.raises(DataError, match=f"near_duplicates={least} must be a similarity above 0 and up to 1"):
            BuildOptions(near_duplicates=least)
    monkeypatch.setitem(sys.modules, "rensa", None)
    monkeypatch.setattr(near.importlib.metadata, "version", lambda name: (_ for _ in ()).throw(ImportError(name)))
    monkeypatch.setattr(near.importlib.metadata, "PackageNotFoundError", ImportError)
    with pytest.raises(
        DataError, match=re.escape('near duplicates need rensa; get it with pip install -e ".[near-duplicates]"')
    ):
        build(planted[0], tmp_path / "out", bundled(), options=OPTIONS, processes=1)
    assert not (tmp_path / "out").exists()
