"""`llama-jax eval` of chats and of preferences."""

import json
import math
from functools import partial

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from adapters import LORA, random_adapters

import llama_jax
from llama_jax.cli.eval import Eval
from llama_jax.formats import save_adapter

CHATS = [
    {"prompt": "Once upon a time", "completion": ", there was a little girl."},
    {"prompt": "The dog", "completion": " was very happy."},
]
PAIRS = [
    {"prompt": one["prompt"], "chosen": one["completion"], "rejected": rejected}
    for one, rejected in zip(CHATS, (" zebra quantum of", " were the upon"), strict=True)
]


@pytest.fixture
def run(calling):
    return lambda *arguments: json.loads(calling(Eval, *arguments, "--json").out)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("data"), {}
    for name, lines in (("chats", CHATS), ("pairs", PAIRS), ("texts", [{"text": "The dog was happy."}])):
        found[name] = folder / f"{name}.jsonl"
        found[name].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


@pytest.fixture(scope="module")
def adapter(stories, tmp_path_factory):
    adapters = jax.tree.map(lambda array: 0.7 * array, random_adapters(stories.config))
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    save_adapter(folder, stories.config, adapters, LORA)
    return folder


@pytest.fixture(scope="module")
def answered(stories):
    """Of each answer the sum of its log-probabilities and its tokens, its end included."""
    config, params, tokenizer = stories
    logits = jax.jit(partial(llama_jax.logits, config))

    def answered(prompt, answer):
        read = tokenizer.encode(prompt)
        ids = [*read, *tokenizer.encode(prompt + answer)[len(read) :], tokenizer.eos_id]
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(ids)] = ids
        logprobs = jax.nn.log_softmax(logits(params, padded)[0], axis=-1)
        return sum(float(logprobs[i - 1, ids[i]]) for i in range(len(read), len(ids))), len(ids) - len(read)

    return answered


def test_chats_are_measured_by_what_the_assistant_says(run, calling, stories_folder, files, answered):
    found = run(stories_folder, "--data", files["chats"])
    sums, counts = zip(*(answered(one["prompt"], one["completion"]) for one in CHATS), strict=True)
    assert (found["data_type"], found["tokens"], found["documents"]) == ("chats", sum(counts), 2)
    assert found["loss"] == pytest.approx(-sum(sums) / sum(counts), rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["examples"]["kept"] == 2
    assert run(stories_folder, "--data", files["texts"])["data_type"] == "text"
    assert "2 of 2 examples, 0 of them cut" in calling(Eval, stories_folder, "--data", files["chats"]).out


def test_answers_are_measured_in_every_type_of_file(run, stories_folder, files, tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS), tmp_path / "pairs.parquet")
    (tmp_path / "chats.json").write_text(json.dumps(CHATS))
    for name, path in (("pairs", tmp_path / "pairs.parquet"), ("chats", tmp_path / "chats.json")):
        found, expected = run(stories_folder, "--data", path), run(stories_folder, "--data", files[name])
        measured = ("data_type", "tokens", "examples", "margin" if name == "pairs" else "loss")
        assert {key: found[key] for key in measured} == {key: expected[key] for key in measured}


def test_an_adapter_changes_what_is_found(run, stories_folder, files, adapter):
    alone, beside = (run(stories_folder, "--data", files["chats"], *more)["loss"] for more in ((), ("--adapter", adapter)))
    assert beside > alone


@pytest.mark.slow
def test_preferences_alone_and_against_a_reference(run, calling, stories_folder, files, adapter, answered):
    found = run(stories_folder, "--data", files["pairs"])
    sums = [[answered(one["prompt"], one[name])[0] for name in ("chosen", "rejected")] for one in PAIRS]
    margins = [chosen - rejected for chosen, rejected in sums]
    assert (found["data_type"], found["pairs"], found["accuracy"], found["against"]) == ("preferences", 2, 1.0, None)
    assert found["margin"] == pytest.approx(np.mean(margins), rel=1e-4)
    assert found["chosen_logprob"] == pytest.approx(np.mean(sums, axis=0)[0], rel=1e-4)
    same = run(stories_folder, "--data", files["pairs"], "--against", stories_folder)
    assert (same["margin"], same["accuracy"]) == (0, 0)
    beside = run(stories_folder, "--data", files["pairs"], "--adapter", adapter)
    assert beside["against"].endswith("without the adapter")
    apply_adapters = beside["chosen_logprob"] - beside["rejected_logprob"]
    assert beside["margin"] == pytest.approx(apply_adapters - found["margin"], abs=1e-3)
    page = calling(Eval, stories_folder, "--data", files["pairs"], "--max-documents", 1).out
    assert "100.00% ± 0.0% of 1 pairs" in page
