"""`llama-jax eval` as a user meets it."""

import json
import math
import shutil
from functools import partial

import pytest
import sentencepiece
from conftest import params_of, write_hf_folder
from make_goldens import KINDS, random_tensors

from llama_jax.cli.eval import Eval
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


def test_tokens_that_are_unknown(run, model, tmp_path):
    (tmp_path / "text.txt").write_text("a 🦙 to 🦙", encoding="utf-8")
    found = json.loads(run(model, "--data", tmp_path / "text.txt", "--json")[0])
    assert (found["unknown_tokens"], found["bytes"]) == (2, 14)
    assert "% of the tokens are <unk>" in run(model, "--data", tmp_path / "text.txt")[0].splitlines()[-1]


def test_a_model_that_overflows(run, model, text, tmp_path):
    params = params_of(KINDS["gqa"], random_tensors(KINDS["gqa"]))  # a logit has both as factors
    huge = params.replace(lm_head=params.lm_head * 1e20, final_norm=params.final_norm * 1e20)
    save(tmp_path / "model", KINDS["gqa"], huge)
    arguments = tmp_path / "model", "--data", text, "--tokenizer", shutil.copy(model / "tokenizer.model", tmp_path)
    with pytest.raises(UserError, match=r"the loss is (nan|inf): .* not finite; try --dtype float32"):
        run(*arguments)
    with pytest.raises(UserError, match=r"not finite; is the model whole\?"):
        run(*arguments, "--dtype", "float32")


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
