"""A model asked in texts: what becomes tokens, what is continued, and chats as texts."""

from dataclasses import replace

import jax
import pytest
import vocabularies
from conftest import sharp, tiny_config

import llama_jax
from llama_jax import EngineOptions, Sampling, encode_chat
from llama_jax.errors import GenerationError, TokenizerError
from llama_jax.evaluation.loglikelihood import Continuation
from llama_jax.evaluation.text_model import GenerationSettings, TextModel, generation_settings
from llama_jax.tokenizers import load_tokenizer

SMALL = EngineOptions(rows=2, prefill_chunk=16, prefix_bytes=0)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Of Llama 3's kind."""
    settings = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "chat_template": TEMPLATE}
    return load_tokenizer(vocabularies.write(tmp_path_factory.mktemp("bytes"), "bytes", tokenizer_config=settings))


@pytest.fixture(scope="module")
def model(tokenizer):
    config = tiny_config(vocab_size=tokenizer.vocab_size, n_layers=1, n_heads=2, n_kv_heads=1)
    return config, sharp(config, jax.random.key(3))


@pytest.fixture(scope="module")
def texts(model, tokenizer):
    return TextModel(*model, tokenizer, options=SMALL)


def test_a_text_begins_with_bos_once(texts, tokenizer, model):
    ids = tokenizer.encode("Hello", bos=False)
    assert texts.encode("Hello") == texts.encode("<|begin_of_text|>Hello") == [tokenizer.bos_id, *ids]
    assert texts.alone("Hello") == texts.alone("<|begin_of_text|>Hello") == ids
    assert TextModel(*model, tokenizer, bos=False).encode("Hello") == ids
    assert texts.encode("<|eot_id|>")[1:] == [tokenizer.special_tokens["<|eot_id|>"]]


def test_a_pair_is_divided_as_the_whole_is(texts, tokenizer):
    ids = lambda text: tokenizer.encode(text, bos=False)
    bos = tokenizer.bos_id
    assert texts.pair("once", " upon") == Continuation([bos, *ids("once")], ids(" upon"))
    assert texts.pair("once ", "upon") == texts.pair("once", " upon")
    assert texts.pair("", "once") == texts.pair("", "<|begin_of_text|>once") == Continuation([bos], ids("once"))
    assert texts.pair("\n\n", "once") == Continuation([bos], ids("\n\nonce"))
    with pytest.raises(GenerationError, match="the continuation '' adds no token to 'once'"):
        texts.pair("once", "")


@pytest.mark.slow
def test_continuations_are_those_of_generate(texts, model, tokenizer):
    prompts = ["once upon", "Hello world", "tree"]
    limits = [12, 20, 7]
    wanted = llama_jax.generate(
        *model, [texts.encode(prompt) for prompt in prompts], max_new_tokens=limits, stop_tokens=tokenizer.stop_ids
    )
    whole = [tokenizer.decode(row.tokens) for row in wanted]
    assert all(map(len, whole))
    asked = [(prompt, GenerationSettings(limit)) for prompt, limit in zip(prompts, limits, strict=True)]
    assert texts.generate(asked) == whole
    stop = whole[1][4:6]
    before = texts.cut
    found = texts.generate(
        [("Hello world", GenerationSettings(20, (stop, "not there"))), ("x" * 100, GenerationSettings(20))]
    )
    assert found[0] == whole[1][: whole[1].index(stop)]
    assert texts.cut == before + 1
    drawn = GenerationSettings(20, sampling=Sampling(temperature=1.0))
    one, other = texts.generate([("Hello world", drawn)] * 2)
    assert one != other  # each its own seed
    ending = next(name for name, token in tokenizer.special_tokens.items() if token not in tokenizer.stop_ids)
    job = texts._job(0, "Hello", GenerationSettings(3, (ending, "x")))
    assert tokenizer.special_tokens[ending] in job.request.stop_tokens


def test_a_limit_that_leaves_nothing(texts):
    with pytest.raises(GenerationError, match="max_gen_toks=64 leaves no room for a text in the context of 64"):
        texts.generate([("once", GenerationSettings(64))])


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, GenerationSettings()),
        ({"until": "\n\n", "max_gen_toks": 5}, GenerationSettings(5, ("\n\n",))),
        (
            {"until": ["a", "", "b"], "do_sample": False, "temperature": 0.7, "max_tokens": 9},
            GenerationSettings(9, ("a", "b")),
        ),
        ({"temperature": 0.7, "top_p": 0.9}, GenerationSettings(sampling=Sampling(temperature=0.7, top_p=0.9))),
        ({"do_sample": True, "top_k": 4}, GenerationSettings(sampling=Sampling(temperature=1.0, top_k=4))),
        ({"do_sample": True, "temperature": 0.0, "num_beams": 1, "top_p": None}, GenerationSettings()),
        ({"max_new_tokens": 3, "max_gen_toks": 4}, GenerationSettings(4)),
    ],
)
def test_what_a_task_asks_for(settings, wanted):
    assert generation_settings(settings) == wanted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "'num_beams'=4 is not a supported setting of generation"),
        ({"until": 3}, "until=3 must be a text or a list of texts"),
        ({"max_gen_toks": 0}, "max_gen_toks=0 must be a positive integer"),
    ],
)
def test_what_a_task_cannot_ask_for(settings, message):
    with pytest.raises(GenerationError, match=message):
        generation_settings(settings)


def test_a_chat_as_a_text_is_the_chat(texts, tokenizer):
    chat = [{"role": "system", "content": "Hello"}, {"role": "user", "content": "once upon\n"}]
    assert texts.encode(texts.chat(chat)) == encode_chat(tokenizer, chat)
    assert texts.chat_template == TEMPLATE
    open_ = texts.chat([*chat, {"role": "assistant", "content": "a time"}], reply=False)
    assert open_ == texts.chat(chat) + "a time"
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert texts.chat(chat, reply=False) + header == texts.chat(chat)
    texts.close()


def test_a_token_without_a_row_is_refused_where_a_text_has_it(model, tokenizer):
    config, params = model
    once = tokenizer.encode("once", bos=False)
    texts = TextModel(replace(config, vocab_size=max(once) + 1), params, tokenizer, bos=False)
    assert texts.encode("once") == once
    for use in (texts.encode, texts.alone, lambda text: texts.pair("once", text)):
        with pytest.raises(TokenizerError, match=r"contains the token '<\|eot_id\|>' with id"):
            use("<|eot_id|>")
