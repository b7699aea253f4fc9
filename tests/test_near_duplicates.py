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
