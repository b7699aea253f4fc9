"""`llama-jax eval` as a user meets it."""

import json
import math
import shutil
from functools import partial

import pytest
import sentencepiece
from conftest import params_of, write_hf_folder
from make_goldens import KINDS, random_tensors
from vocabularies import sentencepiece_model

from llama_jax.cli.eval import Eval
from llama_jax.config import RopeScaling
from llama_jax.errors import UserError
from llama_jax.formats.saving import save
from llama_jax.tokenizers import load_tokenizer

TEXTS = "The park was big.", "Once upon a time, there was a little girl named Lily.", "She loved to play outside."


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model, and a vocabulary of letters without bytes to fall back on: what it has not becomes <unk>."""
    folder = write_hf_folder(tmp_path_factory.mktemp("eval") / "model", KINDS["gqa"])
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(TEXTS * 10), model_writer=file, vocab_size=60, model_type="bpe", minloglevel=2
        )
    return folder


@pytest.fixture
def run(calling):
    return partial(calling, Eval)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(TEXTS))
    return path


def test_the_page(run, model, text):
    out, err = run(model, "--data", text, "--length", 32)
    lines = out.splitlines()
    assert lines[0] == str(model)
    found = {name.strip(): value.strip() for name, value in (line.split("  ", 1) for line in lines[2:])}
    assert found.keys() == {"loss", "perplexity", "bits per byte", "read", "window"}
    assert found["loss"].endswith("nats per token")
    assert " ± " in found["loss"]
    assert found["read"].endswith(f"tokens, {sum(map(len, TEXTS))} bytes, 3 documents")
    assert found["window"] == "32 tokens, stride 16"
    assert "tokens/s" in err.splitlines()[-1]


def test_as_json_and_in_bfloat16(run, model, text):
    arguments = model, "--data", text, "--max-documents", 1, "--stride", 64, "--json", "--dtype"
    expected, found = (json.loads(run(*arguments, dtype)[0], parse_constant=pytest.fail) for dtype in ("auto", "bfloat16"))
    assert (found["dtype"], expected["dtype"]) == ("bfloat16", "float32")
    assert found["loss"] != expected["loss"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.02)

    assert (expected["documents"], expected["bytes"], expected["unknown_tokens"]) == (1, len(TEXTS[0]), 0)
    assert expected["tokens"] == len(load_tokenizer(model).encode(TEXTS[0], eos=True)) - 1
    assert expected["perplexity"] == pytest.approx(math.exp(expected["loss"]))
    bits = expected["loss"] * expected["tokens"] / math.log(2) / len(TEXTS[0])
    assert expected["bits_per_byte"] == pytest.approx(bits)
    assert expected["standard_error"] is None
    assert (expected["length"], expected["stride"], expected["batch"]) == (64, 64, 1)
    assert expected["tokens_per_second"] >= 0


def test_several_files_and_another_separator(run, model, tmp_path):
    (tmp_path / "a.txt").write_text("one---two---three")
    (tmp_path / "b.jsonl").write_text('{"story": "four"}\n')
    arguments = ["--data", tmp_path / "a.txt", tmp_path / "b.jsonl", "--separator=---", "--field", "story", "--json"]
    out, _ = run(model, *arguments)
    assert (json.loads(out)["documents"], json.loads(out)["bytes"]) == (4, 15)


@pytest.mark.parametrize("as_json", [False, True])
def test_tokens_that_are_unknown(run, model, tmp_path, as_json):
    text = "a 🦙 to 🦙"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    unknown = load_tokenizer(model).encode(text).count(0)
    assert unknown == 2
    out, _ = run(model, "--data", tmp_path / "text.txt", *(["--json"] * as_json))
    if as_json:
        assert json.loads(out)["unknown_tokens"] == unknown
        assert json.loads(out)["bytes"] == len(text.encode())
    else:
        assert "% of the tokens are <unk>" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--data", "TEXT"], "nowhere does not exist"),
        (["MODEL", "--data", "nowhere"], "nowhere does not exist"),
        (["MODEL", "--data", "TEXT", "--max-documents", "0"], "max_documents=0 must be at least 1"),
        (["MODEL", "--data", "TEXT", "--separator="], "separator=''"),
    ],
)
def test_mistakes(run, model, text, arguments, message):
    names = {"MODEL": model, "TEXT": text}
    with pytest.raises(UserError, match=message):
        run(*(names.get(argument, argument) for argument in arguments))


def test_a_model_without_vocabulary(run, hf_folder, text):
    with pytest.raises(UserError, match=r"no vocabulary is stored with .*; pass one with --tokenizer"):
        run(hf_folder, "--data", text)


def test_a_vocabulary_that_is_larger_than_the_models(run, model, text, tmp_path):
    (tmp_path / "large.model").write_bytes(sentencepiece_model())
    with pytest.raises(UserError, match=r"document 1 contains the token '.*' with id \d+, which has no row .* of 96 rows"):
        run(model, "--data", text, "--tokenizer", tmp_path / "large.model")


def test_a_model_that_overflows(run, model, text, tmp_path):
    params = params_of(KINDS["gqa"], random_tensors(KINDS["gqa"]))  # a logit has both as factors
    huge = params.replace(lm_head=params.lm_head * 1e20, final_norm=params.final_norm * 1e20)
    save(tmp_path / "model", KINDS["gqa"], huge)
    arguments = tmp_path / "model", "--data", text, "--tokenizer", shutil.copy(model / "tokenizer.model", tmp_path)
    with pytest.raises(UserError, match=r"the loss is (nan|inf): .* not finite; try --dtype float32"):
        run(*arguments)
    with pytest.raises(UserError, match=r"not finite; is the model whole\?"):
        run(*arguments, "--dtype", "float32")


# -- by length -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def long_text(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text(" ".join(TEXTS * 12))
    return path


@pytest.mark.slow
def test_a_page_by_length(run, model, long_text):
    arguments = "--lengths", "100,30", "--max-tokens", 250
    out, err = run(model, "--data", long_text, *arguments)
    first, by_length, by_context, _ = out.split("\n\n")
    assert first == str(model)
    heading, *rows = (line.split() for line in by_length.splitlines())
    assert heading == ["window", "predicted", "loss", "perplexity", "last", "quarter"]
    assert [row[:2] for row in rows] == [["30", "180"], ["100", "200"]]
    assert "beyond the context of 64" in by_length.splitlines()[2]
    heading, *rows = by_context.splitlines()
    assert heading.split() == ["tokens", "of", "context", "30", "100"]
    assert [row.split("  ")[0] for row in rows] == [
        *("1", "2", "3 to 4", "5 to 8", "9 to 16", "17 to 32", "33 to 64", "65 to 128"),
    ]
    assert [len(row.replace(" to ", "-").split()) for row in rows] == [3, 3, 3, 3, 3, 3, 2, 3]
    assert rows[-1].endswith("beyond")
    assert err.splitlines()[0].startswith("llama-jax: 100: beyond the model's context of 64 tokens")


def test_as_json_by_length(run, model, long_text):
    found = json.loads(run(model, "--data", long_text, "--lengths", "100", "--json")[0], parse_constant=pytest.fail)
    assert (found["context"], found["rope"]) == (64, None)
    (one,) = found["lengths"]
    assert one["beyond_context"]
    assert one["tokens"] == one["windows"] * 100
    assert one["by_context"][-1].keys() == {"first", "last", "loss"}
    assert one["perplexity"] == pytest.approx(math.exp(one["loss"]))


@pytest.mark.parametrize(
    ("function", "more"), [("perplexity.evaluate", []), ("loss_by_length.evaluate_lengths", ["--lengths", "8"])]
)
def test_another_rope(run, model, text, monkeypatch, function, more):
    def asked(config, *_, **__):
        assert config.rope_scaling == RopeScaling("linear", 2)
        assert config.max_seq_len == 128
        raise UserError("seen")

    monkeypatch.setattr(f"llama_jax.evaluation.{function}", asked)
    with pytest.raises(UserError, match="seen"):
        run(model, "--data", text, "--rope", "linear:2", *more)


def test_documents_are_long_enough_for_the_lengths(run, model, tmp_path):
    """A text file is cut into documents of 131,072 characters, unless the lengths ask for more."""
    (tmp_path / "text.txt").write_text(TEXTS[1] * 3000)
    with pytest.raises(UserError, match=r"length=90000 needs a document with one token more, but the longest has"):
        run(model, "--data", tmp_path / "text.txt", "--lengths", "90000", "--longest", 1 << 17)
    with pytest.raises(UserError, match=r"max_tokens=9 is less than one window of length=50000"):
        run(model, "--data", tmp_path / "text.txt", "--lengths", "50000", "--max-tokens", 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "8,x"], r"lengths='8,x' must be numbers .*; 'x' is not one"),
        (["--lengths", "8", "--length", "8"], r"length=8 and lengths='8' exclude each other"),
        (["--lengths", "8", "--stride", "8"], r"stride=8 and lengths='8' exclude each other"),
        (["--max-tokens", "8"], r"max_tokens=8 needs --lengths"),
    ],
)
def test_mistakes_by_length(run, model, text, monkeypatch, arguments, message):
    monkeypatch.setattr("llama_jax.formats.loading.load", pytest.fail)  # they come before the model is read
    with pytest.raises(UserError, match=message):
        run(model, "--data", text, *arguments)


@pytest.mark.slow
def test_attention_is_chosen_and_said(run, model, text):
    found = {}
    for way in ("auto", "reference", "blockwise"):
        for more in ((), ("--lengths", "8,16")):
            out, _ = run(
                model, "--data", text, "--length" if not more else "--batch", 16, "--attention", way, "--json", *more
            )
            found[way, bool(more)] = json.loads(out)
    assert found["reference", False]["attention"] == "reference"
    assert found["blockwise", True]["attention"] == "blockwise"
    for more in (False, True):
        losses = [facts["lengths"][1]["loss"] if more else facts["loss"] for key, facts in found.items() if key[1] == more]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


# -- against a reference -------------------------------------------------------------------------------------------------


def test_what_quantizing_costs(run, model, text):
    out, err = run(model, "--data", text, "--length", 32, "--quantize", "int8", "--against", model)
    lines = out.splitlines()
    assert lines[0] == f"{model} (int8) against {model} (float32)"
    found = {name.strip(): value.strip() for name, value in (line.split("  ", 1) for line in lines[2:])}
    assert list(found)[3:7] == ["reference", "difference", "divergence", "top token"]
    assert "nats per token, perplexity times " in found["difference"]
    assert found["divergence"].startswith("KL ")
    assert found["top token"].startswith("the same at ")
    assert "weights int8, 0.0 MB" in err or "weights int8, 0.1 MB" in err


def test_a_comparison_as_json(run, model, text):
    arguments = model, "--data", text, "--length", 32, "--json"
    alone = json.loads(run(*arguments)[0])
    found = json.loads(run(*arguments, "--quantize", "int8", "--against", model)[0], parse_constant=pytest.fail)
    against = found["against"]
    assert (against["model"], against["weights"], found["weights"]) == (str(model), "float32", "int8")
    assert against["weight_bytes"] == alone["weight_bytes"] > 2.5 * found["weight_bytes"]
    assert against["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert against["loss_difference"] == pytest.approx(found["loss"] - against["loss"], abs=1e-6)
    assert against["perplexity_ratio"] == pytest.approx(math.exp(against["loss_difference"]))
    assert 0 < against["kl_median"] <= against["kl_99"] <= against["kl_max"]
    assert 0 < against["kl"] < 1e-3
    assert 0.9 < against["same_top"] <= 1


def test_another_vocabulary_is_no_reference(run, model, text, tmp_path, stories_folder):
    with pytest.raises(UserError, match=r"against=.* has a vocabulary of 512, but the model's has 96"):
        run(model, "--data", text, "--against", stories_folder)
    other = write_hf_folder(tmp_path / "other", KINDS["gqa"])
    with (other / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(("zebras buzz",) * 30), model_writer=file, vocab_size=14, model_type="bpe", minloglevel=2
        )
    with pytest.raises(UserError, match=r"against=.* has a different vocabulary"):
        run(model, "--data", text, "--against", other)
    with pytest.raises(UserError, match=r"against=.*lengths='16' exclude each other"):
        run(model, "--data", text, "--against", model, "--lengths", 16)
