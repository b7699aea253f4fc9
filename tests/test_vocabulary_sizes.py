"""Folders whose vocabulary has more tokens than the embedding has rows, or fewer, or none that is supported."""

import json
import shutil
import warnings
from dataclasses import replace

import make_goldens
import numpy as np
import pytest
import vocabularies
from commands import run_here
from conftest import write_hf_folder
from hypothesis import given
from hypothesis import strategies as st

import llama_jax
from llama_jax.cli.generate import Generate
from llama_jax.errors import GenerationError, TokenizerError
from llama_jax.evaluation.text_model import TextModel
from llama_jax.formats import convert
from llama_jax.tokenizers import load_tokenizer

TEMPLATE = "{% for m in messages %}{{ bos_token + m['content'] + eos_token }}{% endfor %}"
KINDS = ("bytes", "never", "sentencepiece")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """For each kind a folder with as many rows as its vocabulary has tokens, and their number."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp("sizes") / kind
        rows = load_tokenizer(vocabularies.write(tmp_path_factory.mktemp("alone"), kind)).vocab_size
        write_hf_folder(folder, replace(make_goldens.KINDS["gqa"], vocab_size=rows))
        found[kind] = vocabularies.write(folder, kind), rows
    return found


@pytest.fixture(params=KINDS)
def model(request, models):
    return models[request.param]


def with_tokens(model, path, count, *, special=(), file="tokenizer_config", **config):
    """A copy of the model's folder, with `count` tokens named <x0>, <x1> and so on without a row."""
    folder, rows = model
    shutil.copytree(folder, path)
    names = {f"<x{i}>": rows + i for i in range(count)}
    config = {"chat_template": TEMPLATE} | config
    if file == "added_tokens":
        (path / "added_tokens.json").write_text(json.dumps(names))
        config["additional_special_tokens"] = [name for i, name in enumerate(names) if i in special]
    else:
        described = {str(token): {"content": name, "special": token - rows in special} for name, token in names.items()}
        config["added_tokens_decoder"] = described
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@given(
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 40),
    special=st.sets(st.integers(0, 39)),
    which=st.integers(0, 39),
    file=st.sampled_from(["tokenizer_config", "added_tokens"]),
    format=st.sampled_from(["safetensors", "gguf", "orbax"]),
)
def test_more_tokens_than_rows(models, tmp_path_factory, kind, count, special, which, file, format):
    rows, which = models[kind][1], which % count
    name, token, is_special = f"<x{which}>", rows + which, which in special
    path = with_tokens(models[kind], tmp_path_factory.mktemp("k") / "m", count, special=special, file=file)
    with pytest.warns(UserWarning, match=f"has {rows + count} tokens, but the model's embedding {rows} rows") as caught:
        config, params, tokenizer = llama_jax.load(path)
    assert len(caught) == 1
    assert (config.vocab_size, tokenizer.vocab_size) == (rows, rows + count)
    assert tokenizer.encode(f"the{name}", bos=False, special=True)[-1] == token
    with pytest.raises(TokenizerError, match=f"contains the token '{name}' with id {token}, .* of {rows} rows"):
        TextModel(config, params, tokenizer).encode(f"the{name}")
    with pytest.raises(GenerationError, match=f"token id {token} is outside the vocabulary of {rows}"):
        llama_jax.generate(config, params, [[token]], max_new_tokens=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert(path, path.parent / "copy", format=format)
        copy = llama_jax.load(path.parent / "copy").tokenizer
        done = run_here("chat", "--model", path, "--max-new-tokens", 1, lines=f"the\n{name}\nthe\n".encode())
    assert copy.vocab_size == (rows if format == "gguf" else rows + count)
    assert copy.chat_template == tokenizer.chat_template
    assert copy.encode("the the") == tokenizer.encode("the the")
    assert copy.decode(range(3, rows + count)) == tokenizer.decode(range(3, copy.vocab_size))  # the first ones are special
    assert done.returncode == 0, done.stderr
    refused = f"error: the chat contains the token '{name}' with id {token}, which has no row"
    assert (refused in done.stderr) is not is_special  # the name of a special token in a message is text
    assert done.stderr.count("error:") == (not is_special)


def test_ends_and_padding_without_a_row(model, tmp_path):
    """As after fine-tuning with new tokens and the old embedding: they are never generated, so nothing ends by them."""
    path = with_tokens(model, tmp_path / "m", 2, special={0, 1}, eos_token="<x0>", pad_token="<x1>")
    with pytest.warns(UserWarning, match="tokens, but the model's embedding"):
        config, params, tokenizer = llama_jax.load(path)
    rows = config.vocab_size
    assert (tokenizer.eos_id, rows in tokenizer.stop_ids) == (rows, True)
    prompt = [tokenizer.encode("the", bos=False)]
    (free,) = llama_jax.generate(config, params, prompt, max_new_tokens=2)
    (found,) = llama_jax.generate(config, params, prompt, max_new_tokens=2, stop_tokens=[rows, rows + 1])
    np.testing.assert_array_equal(found.tokens, free.tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convert(path, tmp_path / "copy")
        convert(path, tmp_path / "m.gguf")
        copies = [llama_jax.load(tmp_path / name).tokenizer for name in ("copy", "m.gguf")]
    assert (copies[0].eos_id, copies[0].stop_ids) == (tokenizer.eos_id, tokenizer.stop_ids)
    assert set(copies[1].stop_ids) == set(tokenizer.stop_ids) - {rows, rows + 1}
    written = json.loads((tmp_path / "copy/config.json").read_text())
    assert written["pad_token_id"] is None  # transformers cannot build an embedding whose padding has no row
    assert "eos_token_id" not in written


def test_a_begin_token_without_a_row_is_refused_by_name(model, tmp_path):
    path = with_tokens(model, tmp_path / "m", 1, special={0}, bos_token="<x0>", add_bos_token=True)
    file = path / "tokenizer.json"
    if file.exists():
        file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    with pytest.warns(UserWarning, match="tokens, but the model's embedding"):
        done = run_here("generate", "the", "--model", path, "--max-new-tokens", 1)
    assert done.returncode == 2
    assert "the prompt contains the token '<x0>'" in done.stderr


def test_a_draft_whose_vocabulary_differs_only_beyond_the_rows(model, tmp_path):
    folder, _ = model
    path, other = with_tokens(model, tmp_path / "more", 2), with_tokens(model, tmp_path / "others", 1, special={0})
    for draft in (folder, other):
        options = Generate(model=path, draft=f"{draft}:2")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer = llama_jax.load(path).tokenizer
            assert options.drafter(tokenizer).tokens == 2


def test_training_on_tokens_with_rows(models, tmp_path):
    """A run keeps the whole vocabulary; data with a token without a row is refused by name before anything is computed."""
    path = with_tokens(models["bytes"], tmp_path / "m", 2)
    rows = models["bytes"][1]
    shape = ("--mesh", "data=1", "batch=2", "length=16", "validation=0.5", "dtype=float32", "remat=none")
    (tmp_path / "rewards.py").write_text("def zero(completions, **columns):\n    return [0.0 for _ in completions]\n")
    rewards = (f"rewards.functions={tmp_path / 'rewards.py'}:zero", "rewards.group=2", "rewards.answer=2")
    chats = [{"prompt": f"once {i}", "completion": " upon a time"} for i in range(4)]
    pairs = [{"prompt": f"once {i}", "chosen": " a", "rejected": " b"} for i in range(4)]
    bad = {
        "sft": [*chats, {"prompt": "once", "completion": " upon<x1>"}],
        "dpo": [*pairs, {"prompt": "once", "chosen": " a", "rejected": "<x1>"}],
        "grpo": [{"prompt": f"once {i}"} for i in range(4)] + [{"prompt": "once<x1>"}],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for recipe, examples in bad.items():
            file = tmp_path / f"{recipe}.jsonl"
            file.write_text("".join(json.dumps(example) + "\n" for example in examples))
            more = rewards if recipe == "grpo" else ()
            done = run_here(
                "train", recipe, *shape, *more, "--weights", path, "--data", file, "--workdir", tmp_path / recipe
            )
            assert done.returncode == 2
            assert f"contains the token '<x1>' with id {rows + 1}, which has no row" in done.stderr, done.stderr
        file.write_text("".join(json.dumps(example) + "\n" for example in chats))
        command = (
            "train",
            "sft",
            "steps=1",
            "optimizer.warmup_steps=0",
            *shape,
            "--weights",
            path,
            "--data",
            file,
            "--workdir",
            tmp_path / "run",
        )
        done = run_here(*command)
        assert done.returncode == 0, done.stderr
        config, _, tokenizer = llama_jax.load(tmp_path / "run")
    assert (config.vocab_size, tokenizer.vocab_size) == (rows, rows + 2)
    assert tokenizer.encode("<x1>", bos=False) == [rows + 1]


def test_a_vocabulary_of_another_model(model, tmp_path):
    """It is accepted with a warning, given or found, and refused where a prompt has a token without a row."""
    folder, rows = model
    path = with_tokens(model, tmp_path / "m", 1024)
    said = f"has {rows + 1024} tokens, but the model's embedding {rows} rows: it may be another model's vocabulary"
    for command in (("--model", path), ("--model", folder, "--tokenizer", path)):
        with pytest.warns(UserWarning, match=said):
            done = run_here("generate", "the<x7>", *command, "--max-new-tokens", 1)
        assert done.returncode == 2
        assert done.stderr.endswith(
            f"with id {rows + 7}, which has no row in the model's embedding of {rows} rows; remove it\n"
        )


@pytest.mark.parametrize("name", ["tekken.json", "vocab.txt", "qwen.tiktoken"])
def test_an_unsupported_vocabulary_is_named(name, tmp_path):
    path = write_hf_folder(tmp_path / "m", make_goldens.KINDS["gqa"])
    (path / name).write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.warns(UserWarning, match=f"has no vocabulary .unsupported: {name};"):
        assert llama_jax.load(path).tokenizer is None
    with pytest.warns(UserWarning, match=name):
        convert(path, tmp_path / "copy")
    for command in (("generate", "the", "--model", path), ("eval", path, "--data", __file__)):
        with pytest.warns(UserWarning, match=name):
            done = run_here(*command)
        assert done.returncode == 2
        assert f"error: no vocabulary is stored with {path} (unsupported: {name};" in done.stderr
    with pytest.raises(TokenizerError, match=f"unsupported: {name};"):
        load_tokenizer(path)
