"""Prompts as data: tokens, columns, which are kept apart, and the order of a run."""

import numpy as np
import pytest
from byte_tokenizer import BOS, EOS
from test_chat_tokens import Tokenizer, llama3, written  # noqa: F401  # a fixture

from llama_jax.data import DataError
from llama_jax.data.rl_prompts import PromptReading, open_prompts, prompt_batch, split_prompts, validation_prompt_batch
from llama_jax.errors import GenerationError
from llama_jax.tokenizers import encode_chat

LINES = [{"prompt": text, "answer": i} for i, text in enumerate(["Once", "The old", "It slept for long", "Two"])]


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "prompts.jsonl", LINES)


def test_texts_are_read_with_their_columns(file):
    found = open_prompts(file, Tokenizer(), 8)
    assert found.ids == tuple((BOS, *text.encode()) for text in ("Once", "The old", "Two"))
    assert found.columns == {"prompt": ["Once", "The old", "Two"], "answer": [0, 1, 3]}
    assert (found.longest, found.dropped, found.stops, len(found)) == (8, 1, (EOS,), 3)
    again = open_prompts([file], Tokenizer(), 8)
    assert again.digest == found.digest
    changed = written(file.with_name("other.jsonl"), [{**line, "answer": 7} for line in LINES])
    assert open_prompts(changed, Tokenizer(), 8).digest != found.digest, "what judges them is part of the data"


def test_messages_are_a_chat_up_to_the_reply(tmp_path, llama3):  # noqa: F811
    messages = [{"role": "user", "content": "Hello"}]
    file = written(tmp_path / "p.jsonl", [{"prompt": messages, "system": "Be kind."}])
    found = open_prompts(file, llama3, 100, PromptReading("llama3"))
    whole = [{"role": "system", "content": "Be kind."}, *messages]
    assert found.ids == (tuple(encode_chat(llama3, whole, "llama3")),)
    assert llama3.special_tokens["<|eot_id|>"] in found.stops
    assert found.columns["prompt"] == [messages]
    with pytest.raises(GenerationError, match="no chat template"):
        open_prompts(file, Tokenizer(), 100)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"text": "a"}], r"line 1: prompt, a text or messages, is missing; the fields are \['text'\]"),
        ([{"prompt": 3}], "line 1: prompt=3 must be a text or messages"),
        ([{"prompt": "a", "x": 1}, {"prompt": "b"}], "line 2: 'x' is a field of the first line but not here"),
        ([{"prompt": "a"}, {"prompt": "b", "x": 1}], "line 2: 'x' is a field of this line but not in the first"),
        ([{"prompt": "long as it is"}], "no prompt has at most 8 tokens: the shortest of 1 has 14; use longer rows"),
    ],
)
def test_lines_that_cannot_be_used_are_named(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        open_prompts(written(tmp_path / "p.jsonl", lines), Tokenizer(), 8)


def test_other_files(tmp_path, file):
    (tmp_path / "text.txt").write_text("Once")
    with pytest.raises(DataError, match=r"text.txt has no chats or other examples"):
        open_prompts(tmp_path / "text.txt", Tokenizer(), 8)
    other = written(tmp_path / "zother.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataError, match=r"zother.jsonl has other fields than the files before it \(answer\)"):
        open_prompts([file, other], Tokenizer(), 8)


def test_a_share_is_kept_apart_with_all_that_are_the_same(tmp_path):
    lines = [{"prompt": f"number {i % 10}", "i": i} for i in range(20)]
    whole = open_prompts(written(tmp_path / "p.jsonl", lines), Tokenizer(), 20)
    train, held = split_prompts(whole, 0.2, seed=0)
    assert (len(train), len(held)) == (16, 4)
    assert not set(train.ids) & set(held.ids)
    assert sorted(train.columns["i"] + held.columns["i"]) == list(range(20))
    assert split_prompts(whole, 0.2, seed=0)[1].digest == held.digest
    few = open_prompts(written(tmp_path / "f.jsonl", [{"prompt": f"p{i}"} for i in range(4)]), Tokenizer(), 20)
    assert [len(part) for part in split_prompts(few, 0.9, seed=0)] == [1, 3]
    one = open_prompts(written(tmp_path / "q.jsonl", [{"prompt": "a"}, {"prompt": "a"}]), Tokenizer(), 20)
    with pytest.raises(DataError, match=r"a single prompt.*, which cannot be split"):
        split_prompts(one, 0.2, seed=0)


def test_every_epoch_has_all_prompts_and_every_answer_a_stream_of_its_own():
    batches = [prompt_batch(7, 3, 4, seed=5, number=n) for n in range(14)]
    order = np.concatenate([batch.numbers for batch in batches]).reshape(6, 7)
    assert all(sorted(epoch) == list(range(7)) for epoch in order.tolist())
    assert len({tuple(epoch) for epoch in order.tolist()}) > 1
    seeds = np.concatenate([batch.seeds for batch in batches])
    assert seeds.dtype == np.uint32
    assert len(set(seeds.tolist())) == len(seeds) == 14 * 12
    again = prompt_batch(7, 3, 4, seed=5, number=9)
    np.testing.assert_array_equal(again.seeds, batches[9].seeds)
    assert (prompt_batch(7, 3, 4, seed=6, number=9).seeds != batches[9].seeds).all()
    held = validation_prompt_batch(np.array([2, 0]), 4, 5)
    np.testing.assert_array_equal(held.seeds[4:], validation_prompt_batch(np.array([0]), 4, 5).seeds)
    assert not set(held.seeds.tolist()) & set(seeds.tolist())


def test_a_prompt_of_no_token_is_refused(tmp_path):
    without = Tokenizer(bos_id=-1)
    with pytest.raises(DataError, match="line 2: prompt='' has no token"):
        open_prompts(written(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": ""}]), without, 8)
