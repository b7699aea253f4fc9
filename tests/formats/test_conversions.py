"""What lies beside the weights goes with them into every format, and what has no place there is named."""

import json
import logging
from pathlib import Path

import conversions
import gguf
import pytest

import llama_jax
from llama_jax.formats.model_folder import ModelMetadata
from llama_jax.formats.saving import WrittenFormat

pytestmark = pytest.mark.parity  # Meta's folder is written by torch
MODELS = conversions.models()


def fields_of(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.fixture
def published(tmp_path):
    """Writes a model of the table as a Hugging Face folder."""

    def write(name):
        return conversions.publish(tmp_path, MODELS[name])

    return write


@pytest.mark.parametrize("name", ["llama-3.1-instruct", "qwen2.5", "phi-3", "four ends"])
def test_nothing_is_lost_silently(name, tmp_path):
    for pair, outcome in conversions.outcomes(tmp_path, MODELS[name]).items():
        assert not outcome.silent, pair
        if "gguf" not in pair and "llama2c" not in pair:
            assert not outcome.named, pair


def test_the_table_is_what_conversions_keep(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "conversions.md").read_text()
    conversions.main(tmp_path / "page.md")
    made = (tmp_path / "page.md").read_text()
    assert made[made.index(conversions.MARK) :] == page[page.index(conversions.MARK) :]


def test_ends_in_a_gguf(tmp_path, published):
    """Three ends have fields of llama.cpp's, and all are read again."""
    sources = published("four ends")
    fields = fields_of(sources["gguf"])
    before = llama_jax.load(sources["safetensors"]).tokenizer
    assert {259, 270, 271, 272, 273, 274} <= set(before.stop_ids)
    given = {fields[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")}
    assert given | set(fields["tokenizer.llama_jax.stop_token_ids"]) <= set(before.stop_ids)
    assert llama_jax.load(sources["gguf"]).tokenizer.stop_ids == before.stop_ids
    llama_jax.convert(sources["gguf"], tmp_path / "back")
    assert llama_jax.load(tmp_path / "back").tokenizer.stop_ids == before.stop_ids


def test_a_folders_ends_leave_the_bos_out_where_the_gguf_does(tmp_path, published):
    gguf_file = published("smollm2")["gguf"]
    llama_jax.convert(gguf_file, tmp_path / "folder")
    before, after = (llama_jax.load(path).tokenizer for path in (gguf_file, tmp_path / "folder"))
    assert after.stop_ids == before.stop_ids
    assert before.bos_id not in before.stop_ids


def test_fields_are_those_that_llama_cpp_reads(published):
    fields = fields_of(published("qwen2.5")["gguf"])
    sampling = {key.removeprefix("general.sampling."): value for key, value in fields.items() if "sampling" in key}
    assert sampling == pytest.approx({"temp": 0.7, "top_p": 0.8, "top_k": 20, "penalty_repeat": 1.1})
    assert fields["tokenizer.ggml.padding_token_id"] == 258
    assert fields["tokenizer.chat_template.tool_use"] == "{{ tools }}"
    assert fields["tokenizer.chat_template"] == "{{ messages }}"


def test_a_card_and_sampling_there_and_back(tmp_path, published):
    sources = published("llama-3.1-instruct")
    fields = fields_of(sources["gguf"])
    assert (fields["general.license"], fields["general.languages"]) == ("llama3.1", ["en", "de"])
    llama_jax.convert(sources["gguf"], tmp_path / "back")
    written = json.loads((tmp_path / "back/generation_config.json").read_text())
    assert (written["temperature"], written["top_p"], written["do_sample"]) == (0.6, 0.9, True)
    card = (tmp_path / "back/README.md").read_text()
    assert 'license: "llama3.1"' in card
    assert 'language: ["en", "de"]' in card


def test_user_defined_tokens_stay(tmp_path, published):
    sources = published("llama-2-chat")
    llama_jax.convert(sources["gguf"], tmp_path / "folder")
    before, after = (llama_jax.load(path).tokenizer for path in (sources["gguf"], tmp_path / "folder"))
    assert after.pieces() == before.pieces()
    assert after.encode("a<|user|>b ab") == before.encode("a<|user|>b ab")


@pytest.mark.parametrize("format", WrittenFormat.__args__)
def test_save_takes_what_load_found(format, tmp_path, published, caplog):
    found = llama_jax.load(published("llama-2")["safetensors"])
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        llama_jax.save(tmp_path / "copy", *found, metadata=found.metadata, format=format)
    again = llama_jax.load(tmp_path / "copy").metadata
    assert {"do_sample": True, "temperature": 0.6, "top_p": 0.9}.items() <= again.generation.items()
    said = [record.getMessage() for record in caplog.records]
    if format in ("safetensors", "orbax"):
        assert again == found.metadata
        assert said == []
    else:
        (line,) = said
        assert line.startswith(f"{tmp_path / 'copy'} cannot store LICENSE.txt; USE_POLICY.md")


def test_without_sampling_llama_cpp_takes_the_most_probable_token(tmp_path, published):
    found = llama_jax.load(published("llama-1")["safetensors"])
    for settings, temperature in (
        ({"temperature": 0.7}, 0.0),
        ({"do_sample": False, "top_k": 5}, 0.0),
        ({"do_sample": True}, 1.0),
    ):
        llama_jax.save(tmp_path / "m.gguf", *found, metadata=ModelMetadata(settings), overwrite=True)
        assert fields_of(tmp_path / "m.gguf")["general.sampling.temp"] == temperature
        assert llama_jax.load(tmp_path / "m.gguf").metadata.generation["do_sample"] is (temperature > 0)


@pytest.mark.parametrize(
    "head",
    ["license: [", "license: &a [*a]", "license: {a: 1}", "- license", "gguf: {general: {a: 1}}", "a: " + "[" * 9999],
)
def test_a_strangers_card_is_no_error(head, tmp_path, published):
    folder = published("llama-1")["safetensors"]
    (folder / "README.md").write_text(f"---\n{head}\n---\n")
    llama_jax.convert(folder, tmp_path / "m.gguf")
    assert not [key for key in fields_of(tmp_path / "m.gguf") if key.startswith("general.lic")]
