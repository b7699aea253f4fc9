"""A model that others made, SmolLM2-135M-Instruct in a GGUF of Q4_1 blocks: read, run, trained and written.

The goldens of this file were made once with other programs: ids, greedy text and perplexity by llama.cpp (llama-cpp-python
0.3.36; the latter two on a copy in float32), the chat by the template that is in the file.
"""

import json
from dataclasses import replace

import int8_outliers
import jax
import numpy as np
import pytest
from conftest import shared_data

import llama_jax
from llama_jax.runs import recipes
from llama_jax.tokenizers import encode_chat, reply_ends, resolve_format

pytestmark = pytest.mark.real

IDS = {
    "Once upon a time": [6403, 1980, 253, 655],
    " Hello  World!\n\n 3.14159 = π": [38699, 216, 2260, 17, 8866, 35, 30, 33, 36, 33, 37, 41, 446, 25143],
    "def f(x):\n    return x**2\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 198],
    "<|im_start|>user": [44, 108, 306, 79, 3738, 108, 46, 4093],  # what looks like a special token is text
}
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n<|im_start|>assistant\n"
)
GREEDY = (
    ", the city of Nova Haven was a thriving metropolis, with towering skyscrapers and bustling streets. But as the years"
    " went by, the city began to lose its original essence. The once-blue skies of"
)
GREEDY_TOKENS = 40  # the smallest difference of the first two logits on the way is 0.048
ANSWER = "The capital of Japan is Tokyo."
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


@pytest.fixture(scope="module")
def model(smollm2):
    """The configuration, the parameters as floats, and the vocabulary."""
    return llama_jax.load(smollm2, "float32")


@pytest.mark.parametrize("text", IDS)
def test_ids_are_llama_cpps(model, text):
    assert model.tokenizer.encode(text) == IDS[text]
    assert model.tokenizer.decode(IDS[text]) == text


def test_the_chat_template(model):
    *_, tokenizer = model
    ids = encode_chat(tokenizer, QUESTION)
    assert tokenizer.decode(ids) == CHAT.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert ids[:2] == [1, 9690]  # the tokens of <|im_start|> and "system", no BOS before them
    assert (ids.count(1), ids.count(2)) == (3, 2)


def test_greedy_text_is_llama_cpps(model):
    config, params, tokenizer = model
    ids = tokenizer.encode("Once upon a time")
    [found] = llama_jax.generate(config, params, [ids], max_new_tokens=GREEDY_TOKENS)
    assert tokenizer.decode(found.tokens) == GREEDY


def test_perplexity_of_windows_is_llama_cpps(model):
    """16 windows of 64 tokens of WikiText, the 63 after the first of each; a BOS before each window makes it another number.

    llama.cpp keeps keys and values in float16.
    """
    config, params, tokenizer = model
    text = shared_data("text/wikitext-2-test.txt").read_text()[:20_000]
    windows = np.array(tokenizer.encode(text)[: 16 * 64], np.int32).reshape(16, 64)

    @jax.jit
    def losses(params, tokens):
        logprobs = jax.nn.log_softmax(llama_jax.logits(config, params, tokens[:, :-1]))
        return -jax.numpy.take_along_axis(logprobs, tokens[:, 1:, None], axis=2)

    assert np.exp(losses(params, windows).mean()) == pytest.approx(91.2302, rel=3e-4)


@pytest.mark.parametrize("outliers", int8_outliers.OUTLIERS.values(), ids=int8_outliers.OUTLIERS)
def test_a_cache_of_int8(model, outliers):
    """Also where keys stand out as in Qwen2.5, with which a cache that rounds them as they come is off by 0.02 nats."""
    config, params, tokenizer = model
    text = shared_data("text/wikitext-2-test.txt").read_text()[:4000]
    ids = np.asarray(tokenizer.encode(text)[:512], np.int32)
    if outliers is not None:
        config, params = int8_outliers.with_outliers(config, params, ids, *outliers)
    assert int8_outliers.cache_divergences(config, params, ids).mean() < 2e-3


def test_the_servers_engine_answers_a_chat(model):
    config, params, tokenizer = model
    options = llama_jax.EngineOptions(rows=1, context=128, prefill_chunk=128)
    ends = reply_ends(tokenizer, resolve_format(tokenizer, "auto"))
    prompts = [encode_chat(tokenizer, QUESTION)]
    [(_, found)] = llama_jax.complete_requests(config, params, prompts, max_new_tokens=24, stop_tokens=ends, options=options)
    assert (tokenizer.decode(found.tokens), found.finish_reason) == (ANSWER, "stop")


def test_lora_learns_a_chat(smollm2, tmp_path):
    """A run on the file itself, by the recipe for chats."""
    for name, place in (("train", "Lamaville"), ("held", "Lamatown")):
        chat = {"messages": [*QUESTION, {"role": "assistant", "content": f"Its name is {place}, and llamas live there."}]}
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(chat)}\n")
    recipe = replace(
        recipes.sft(), steps=6, batch=1, length=64, lora=llama_jax.Lora(rank=4), dtype="float32", remat="none",
        optimizer=llama_jax.OptimizerSettings(learning_rate=1e-3, schedule="constant", warmup_steps=0),
        log_every=1, evaluate_every=0,
    )  # fmt: skip
    held = tmp_path / "held.jsonl"
    llama_jax.train(recipe, tmp_path / "run", tmp_path / "train.jsonl", validation_data=held, weights=smollm2)
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < 0.7 * losses[0]


def test_a_folder_and_back(model, smollm2, tmp_path):
    """Written for the Hugging Face libraries and read again: the same numbers, ids and chats."""
    config, params, tokenizer = model
    llama_jax.save(tmp_path / "folder", config, params, tokenizer)
    again = llama_jax.load(tmp_path / "folder")
    assert again.config == config
    jax.tree.map(np.testing.assert_array_equal, again.params, params)
    assert [again.tokenizer.encode(text) for text in IDS] == list(IDS.values())
    assert encode_chat(again.tokenizer, QUESTION) == encode_chat(tokenizer, QUESTION)
    assert tokenizer.stop_ids == again.tokenizer.stop_ids


def test_the_vocabulary_of_a_gguf_is_the_same_by_way_of_a_folder(smollm2, tmp_path):
    """Its ends by name stay so, and its control tokens; what says nothing for llama.cpp may come or go."""
    llama_jax.convert(smollm2, tmp_path / "folder")
    llama_jax.convert(tmp_path / "folder", tmp_path / "again.gguf")
    before, after = (llama_jax.load(path).tokenizer.metadata for path in (smollm2, tmp_path / "again.gguf"))
    idle = {"tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_eos_token"}
    ours = {key: value for key, value in after.items() if key.startswith("tokenizer.") and key not in idle}
    assert ours == {key: value for key, value in before.items() if key.startswith("tokenizer.") and key not in idle}
