"""`llama-jax verify` as a user meets it: what it prints, and its exit code."""

import json
from dataclasses import replace
from functools import partial

import make_goldens
import pytest
from commands import outcome
from conftest import write_hf_folder
from safetensors.numpy import load_file

from llama_jax.formats import orbax_format
from llama_jax.formats.huggingface import HF_NAMES
from llama_jax.formats.loading import bundled
from llama_jax.verify.activations import read_oracle, write_oracle

CONFIG = make_goldens.KINDS["gqa"]


run = partial(outcome, "verify")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hf_folder(tmp_path_factory.mktemp("verify") / "model", CONFIG)


@pytest.fixture
def oracle(folder, tmp_path):
    assert run(folder, "--write-oracle", tmp_path / "oracle")[0] == 0
    return tmp_path / "oracle"


def spoiled(folder, where, change, **settings):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    return write_hf_folder(where, CONFIG, tensors, **settings)


def beyond_float16(tensors):
    """Both factors are a float16, what they give is not."""
    for part in ("up", "down"):
        tensors[HF_NAMES[part].format(1)] *= 3000


# -- alone ---------------------------------------------------------------------------------------------------------------


def test_a_model_alone(stories_folder):
    code, out, _ = run(stories_folder)
    assert code == 0
    for line in (
        "read 64 tokens of the built-in text",
        "vocabulary  512 pieces for 512 rows of the embedding; the text round-trips through its tokens",
        "text        1.37 nats per token, against 6.24 for a uniform guess",
    ):
        assert line in out.splitlines()
    assert out.splitlines()[-1].startswith("complete, and it predicts text")


def test_a_model_alone_without_vocabulary(folder):
    code, out, _ = run(folder, "--tokens", 8, "--json")
    found = json.loads(out)
    assert (code, found["same"]) == (0, True)
    assert found["read"] == "8 random tokens, because there is no vocabulary"
    assert [check["name"] for check in found["checks"]] == ["tensors", "logits"]
    assert found["verdict"].startswith("complete; to check its predictions, use 32 tokens of text")


# -- quantized, against itself ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_quantized_model_beside_itself():
    code, out, _ = run(bundled(), "--quantize", "int8", "--per-layer", "--tokens", 32)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].endswith("BF16, quantized as int8, computed in float32")
    assert lines[1].endswith("BF16, computed in float32")
    assert next(line for line in lines if line.startswith("perplexity")).split(": ratio ")[1].startswith(("1.0", "0.99"))
    assert any(line.split() == ["qkv", "out", "gate", "up", "down"] for line in lines)
    embedding = [line.split() for line in lines if line.startswith("  embedding")][-1]
    assert embedding[1:3] == ["int8", "8.17"]
    assert 0.5 < float(embedding[3].rstrip("%")) < 1.5
    assert lines[-1].startswith("the same model within the rounding of int8: mean KL divergence ")
    assert lines[-1].endswith("nats, negligible degradation")


# -- against an oracle ---------------------------------------------------------------------------------------------------


def test_the_same_model_in_another_format(oracle, folder, tmp_path, models):
    (tmp_path / "orbax").mkdir()
    orbax_format.save_orbax(tmp_path / "orbax", *models["gqa"])
    code, out, err = run(tmp_path / "orbax", "--oracle", oracle)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].endswith("orbax (orbax): F32, computed in float32")
    assert lines[1] == f"against {folder} (Hugging Face safetensors): F32, computed in float32"
    assert lines[2] == "read 64 tokens of the oracle"
    assert "top-1 agreement  64 of 64" in lines
    assert lines[-1].startswith("the same model: logits within 0.001")
    assert "layer 0" not in out
    assert err == ""


def test_another_model(oracle, folder, tmp_path):
    def change(tensors):
        tensors[HF_NAMES["q"].format(1)][:8] = tensors[HF_NAMES["q"].format(1)][7::-1].copy()

    other = spoiled(folder, tmp_path / "model", change)
    code, out, err = run(other, "--oracle", oracle, "--per-layer")
    assert (code, err) == (1, "")
    assert out.splitlines()[-1].startswith("NOT the same model: layer 1 differs by ")
    rows = {line[:12].strip(): line[12:].split() for line in out.splitlines() if line.startswith("  ")}
    assert rows[""] == ["max", "abs", "relative", "alone", "roundings"]
    assert rows["embedding"] == rows["layer 0"] == ["0", "0", "0", "0.0"]
    assert float(rows["layer 1"][0]) > 1e-3
    assert float(rows["layer 1"][3].replace(",", "")) > 1000
    assert rows["output"][3] == "0.0"

    code, out, _ = run(other, "--oracle", oracle, "--json")
    found = json.loads(out)
    assert (code, found["same"], found["rounding"], found["settings"]) == (1, False, "float32", {})
    assert [part["name"] for part in found["parts"]] == ["embedding", "layer 0", "layer 1", "output"]
    assert found["kl"]["mean"] <= found["kl"]["max"]
    assert found["top1"]["of"] == 64
    assert found["there"]["versions"].keys() == {"llama_jax", "jax"}


def test_other_sizes_end_before_anything_is_loaded(oracle, tmp_path):
    other = write_hf_folder(tmp_path / "model", make_goldens.KINDS["mha"])
    code, out, _ = run(other, "--oracle", oracle)
    assert (code, out) == (1, "NOT the same model: n_kv_heads 4 here, 2 there\n")
    code, out, _ = run(other, "--oracle", oracle, "--json")
    assert (code, json.loads(out)["settings"]) == (1, {"n_kv_heads": [4, 2]})


def test_numbers_that_are_not_finite_are_null_in_json(oracle, folder, tmp_path):
    other = spoiled(folder, tmp_path / "model", beyond_float16)
    code, out, _ = run(other, "--oracle", oracle, "--dtype", "float16", "--json")
    found = json.loads(out, parse_constant=pytest.fail)
    assert (code, found["kl"]["mean"]) == (1, None)
    assert "the outputs of layer 1 are not finite" in found["verdict"]


def test_a_hostile_name_reaches_no_terminal(oracle, folder):
    found = read_oracle(oracle)
    write_oracle(oracle, replace(found, origin=replace(found.origin, name="a\x1b[2Jb\nc")))
    _, out, _ = run(folder, "--oracle", oracle)
    assert r"against a\x1b[2Jb\nc: F32" in out


# -- mistakes ------------------------------------------------------------------------------------------------------------


# -- against transformers ------------------------------------------------------------------------------------------------


@pytest.mark.parity
def test_against_transformers(folder, tmp_path):
    code, out, _ = run(folder, "--against", folder, "--per-layer", "--write-oracle", tmp_path / "oracle")
    assert code == 0
    assert out.splitlines()[1].startswith("against transformers ")
    assert out.splitlines()[-1].startswith("the same model: ")
    assert read_oracle(tmp_path / "oracle").origin.versions.keys() == {"transformers", "torch"}
    assert run(folder, "--oracle", tmp_path / "oracle")[0] == 0
