"""The recipe for near duplicates: what is found of copies that were planted, and what is said of them."""

import json

import numpy as np
import pytest

pytest.importorskip("rensa", reason="the recipe needs rensa")
import near_duplicates as near

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


@pytest.mark.parametrize("least", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0])
def test_pairs_that_are_near_enough_are_compared(least):
    count, rows = near.bands(least)
    assert count * rows <= near.MINIMA
    assert 1 - (1 - least**rows) ** count >= near.CERTAIN


def plainly(signatures, least):
    """Every document beside every earlier one that stays."""
    staying, found = [], []
    for number, own in enumerate(signatures):
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
    found = near.signatures([edited(rng, originals[n % 60], int(rng.integers(0, 5))) for n in range(300)])
    expected = plainly(found, 0.8)
    assert len(expected) > 50
    assert near.find_near(found, 0.8) == expected


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_planted_copies_are_left_out_and_listed(processes, tmp_path, monkeypatch):
    """With one word replaced the similarity is 0.93 to 0.96, with a third below 0.3: of these 120 all are told apart."""
    rng = np.random.default_rng(2)
    originals = [story(rng) for _ in range(300)]
    texts = originals + [edited(rng, text, 1) for text in originals[:60]]
    texts += [edited(rng, text, 40) for text in originals[60:120]] + [originals[200]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:330]))
    (tmp_path / "b.txt").write_text("<|endoftext|>".join(texts[330:]))
    monkeypatch.setattr(near, "UNIT", 20_000)
    files = (tmp_path / "a.jsonl", tmp_path / "b.txt")
    found = near.main(near.Arguments(files=files, out=tmp_path / "kept.jsonl", processes=processes))
    kept = [json.loads(line)["text"] for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert kept == texts[:300] + texts[360:420]
    assert [(one.document, one.other) for one in found] == [*((300 + n, n) for n in range(60)), (420, 200)]
    for one in found:
        assert abs(one.similarity - similarity(texts[one.document], texts[one.other])) < 0.1
    heading, *lines = (tmp_path / "kept.tsv").read_text().splitlines()
    assert heading.split("\t") == ["file", "document", "near_file", "near_document", "similarity"]
    assert lines[59].split("\t")[:4] == [repr(str(files[1])), "30", repr(str(files[0])), "60"]
