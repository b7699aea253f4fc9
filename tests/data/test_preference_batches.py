"""Pairs of answers: how they are divided, laid into rows, and matched with the answers to other prompts."""

import json

import numpy as np
import pytest
from test_chat_tokens import written

from llama_jax.data import ChatReading, DataError
from llama_jax.data.chat_tokens import open_labeled, open_preferences
from llama_jax.data.preference_batches import (
    PairRows,
    Pairs,
    concatenate,
    mismatched_answers,
    prompts_of,
    split_pairs,
    without_pairs,
)
from llama_jax.tokenizers.sentencepiece import byte_tokenizer

PLAIN = ChatReading(format="plain")
TOKENIZER = byte_tokenizer()


def pairs_of(tmp_path, lines, length=60):
    chosen, rejected, counts = open_preferences(written(tmp_path / "pairs.jsonl", lines), TOKENIZER, length, PLAIN)
    return Pairs(chosen, rejected), counts


def line(number, prompt=None):
    said = f"question {number}" if prompt is None else prompt
    return {"prompt": said, "chosen": f" yes {number}", "rejected": " no" * (1 + number % 3)}


@pytest.fixture
def pairs(tmp_path):
    return pairs_of(tmp_path, [line(number) for number in range(20)])[0]


def test_both_answers_of_a_pair_are_in_one_row(pairs):
    rows = PairRows(pairs, 3, 60, seed=5)
    seen = []
    for number in range(-(-len(rows.members) // 3)):
        batch = rows[number]
        for at in range(3):
            for segment, pair in enumerate(rows.row(number, at)):
                seen.append(pair)
                for side, corpus in enumerate((pairs.first, pairs.second)):
                    where = batch.segment_ids[at, side] == segment + 1
                    assert (batch.tokens[at, side, where] == corpus.document(pair)).all()
                    targets = corpus.targets[corpus.starts[pair] : corpus.stops[pair]]
                    assert (batch.loss_mask[at, side, where] == targets).all()
                    assert (batch.position_ids[at, side, where] == np.arange(where.sum())).all()
            assert batch.there[at].sum() == len(rows.row(number, at))
    assert sorted(set(seen)) == list(range(20))
    assert len(rows.members) < 20, "rows hold several"


def test_hosts_have_their_shares_and_the_reference_comes_along(pairs):
    reference = np.arange(40, dtype=np.float32).reshape(20, 2)
    whole = PairRows(pairs, 4, 60, seed=1, reference=reference)
    for number in (0, 7, 1000):
        parts = [PairRows(pairs, 4, 60, seed=1, host=host, hosts=2, reference=reference)[number] for host in (0, 1)]
        for name, both in whole[number]._asdict().items():
            if both is not None:
                np.testing.assert_array_equal(both, np.concatenate([getattr(part, name) for part in parts]))
    batch = whole[0]
    for at in range(4):
        members = whole.row(0, at)
        np.testing.assert_array_equal(batch.reference[at, :, : len(members)], reference[members].T)
    with pytest.raises(DataError, match="batch=4 must be a positive multiple of hosts=3"):
        PairRows(pairs, 4, 60, seed=1, hosts=3)


def test_a_prompt_is_on_one_side_of_the_division(tmp_path):
    pairs, _ = pairs_of(tmp_path, [line(number, f"question {number // 4}") for number in range(40)])
    train, held = split_pairs(pairs, 0.2, seed=0)
    assert (train.count, held.count) == (32, 8)
    prompts = [{bytes(prompts_of(one.first).document(n)) for n in range(one.count)} for one in (train, held)]
    assert not prompts[0] & prompts[1]
    train, held = split_pairs(pairs_of(tmp_path, [line(number, "the same") for number in range(10)])[0], 0.2, seed=0)
    assert (train.count, held.count) == (8, 2)
    assert without_pairs(pairs, held).count == 40
    assert without_pairs(train, train.select(np.arange(3))).count == 5
    with pytest.raises(DataError, match="every pair of the training data is also in the validation data"):
        without_pairs(held, held)
    with pytest.raises(DataError, match="a single example"):
        split_pairs(pairs.select(np.arange(1)), 0.2, seed=0)


def test_mismatched_answers_are_those_to_other_prompts(tmp_path):
    pairs, _ = pairs_of(tmp_path, [line(number, f"question {number // 2}") for number in range(6)])
    answers = concatenate((pairs.first, pairs.second))
    assert answers.document_count == 12
    found = mismatched_answers(answers, 60)
    texts = [TOKENIZER.decode(found.document(number)) for number in range(12)]
    assert texts[0] == "question 0 yes 2"
    assert texts[1] == "question 0 yes 2"
    assert texts[5] == "question 2 no"
    assert not any(texts[number] == TOKENIZER.decode(answers.document(number)) for number in range(12))
    np.testing.assert_array_equal(prompts_of(found).stops - found.starts, prompts_of(answers).stops - answers.starts)
    assert (mismatched_answers(answers, 12).stops - mismatched_answers(answers, 12).starts).max() == 13
    same, _ = pairs_of(tmp_path, [line(number, "the same") for number in range(3)])
    with pytest.raises(DataError, match="all 3 examples have the same prompt, but KTO compares"):
        mismatched_answers(same.first, 60)


def test_pairs_that_are_the_same_when_cut_are_dropped(tmp_path):
    lines = [line(0), {"prompt": "a", "chosen": " b" * 40 + "c", "rejected": " b" * 40 + "d"}]
    pairs, counts = pairs_of(tmp_path, lines)
    assert (counts.read, counts.kept, counts.same, pairs.count) == (2, 1, 1, 1)
    assert "1 because both answers are the same when cut" in str(counts)


def test_single_answers_with_a_label(tmp_path):
    lines = [
        {"prompt": "a", "completion": " b", "label": True},
        {
            "prompt": [{"role": "user", "content": "a"}],
            "completion": [{"role": "assistant", "content": "c"}],
            "label": False,
        },
        {"prompt": "a", "completion": " d" * 90, "label": True},
    ]
    path = written(tmp_path / "judged.jsonl", lines)
    answers, desirable, counts = open_labeled(path, TOKENIZER, 60, ChatReading("plain", "drop"))
    assert (counts.kept, counts.too_long) == (2, 1)
    assert desirable.tolist() == [True, False]
    assert answers.document_count == 2
    for change, message in (
        ({"label": 1}, r"judged\.jsonl, line 1: label=1 must be true, for a good answer, or false"),
        ({"label": None}, r"line 1: label, true, for a good answer, or false, is missing; .* and as null \['label'\]"),
        ({"completion": 3}, r"line 1: completion=3 must be a text or messages"),
    ):
        path.write_text(json.dumps(lines[0] | change) + "\n")
        with pytest.raises(DataError, match=message):
            open_labeled(path, TOKENIZER, 60, PLAIN)
    path.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    with pytest.raises(DataError, match=r"line 1: completion, a text or messages, is missing"):
        open_labeled(path, TOKENIZER, 60, PLAIN)
