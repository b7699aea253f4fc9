"""`llama-jax inspect` as a user meets it: every format, whole or not, and nothing read but headers."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import make_goldens
import numpy as np
import pytest
import quantized_folders
from commands import outcome
from conftest import write_hf_folder
from hypothesis import given
from hypothesis import strategies as st

import llama_jax
from llama_jax.cli.inspect import inspect_checkpoint, inspection_page
from llama_jax.cli.terminal import printable, size
from llama_jax.config.presets import PRESETS
from llama_jax.formats.huggingface import HF_NAMES
from llama_jax.formats.weight_format import OpenedCheckpoint

CONFIG = make_goldens.KINDS["gqa"]


run = partial(outcome, "inspect")


def opened(config, tensors=None, tokenizer=lambda: None, path="model.x"):
    return OpenedCheckpoint("some format", path, config, tensors or {}, HF_NAMES, False, tokenizer)


def rows_of(page: str) -> dict[str, str]:
    """{what: value} of the lines of a page."""
    split = (line.strip().split("  ", 1) for line in page.splitlines() if line.startswith("  "))
    return {row[0]: row[1].strip() for row in split if len(row) == 2}


# -- pages ---------------------------------------------------------------------------------------------------------------


def test_the_stories_model(stories_folder):
    code, out, err = run(stories_folder)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"{stories_folder / 'stories260K.bin'}: llama2.c"
    assert rows_of(out) == {
        "layers": "5",
        "embedding width": "64",
        "query heads": "8",
        "key/value heads": "4",
        "head dimension": "8",
        "feed-forward width": "172",
        "vocabulary size": "512",
        "context length": "512",
        "RoPE theta": "10,000",
        "RoPE scaling": "none",
        "RMSNorm epsilon": "1e-05",
        "tied embeddings": "yes",
        "preset": "stories-260k",
        "parameters": "260,032",
        "files": "1, 1.1 MB",
        "F32 tensors": "47, 1.0 MB",
        "bfloat16 cache": "640 bytes per token, 328 kB for the whole context",
        "float32 cache": "1.3 kB per token, 655 kB for the whole context",
        "vocabulary": "SentencePiece, 512 pieces; bos 1, eos 2, stop 1 2; no chat template",
    }


def test_json(tmp_path):
    folder = write_hf_folder(tmp_path / "model", CONFIG)
    code, out, _ = run(folder, "--json", "--tensors")
    found = json.loads(out)
    assert code == 0
    assert found["config"] == json.loads(json.dumps(asdict(CONFIG)))
    assert found["parameters"] == llama_jax.parameter_count(CONFIG)
    count, numbers = len(make_goldens.random_tensors(CONFIG)), found["parameters"]
    assert found["kinds"] == {"F32": {"tensors": count, "numbers": numbers, "bytes": 4 * numbers, "bits": 32}}
    assert found["files"] == {str(folder / "model.safetensors"): (folder / "model.safetensors").stat().st_size}
    assert found["cache_bytes_per_token"]["float32"] == llama_jax.cache_bytes(CONFIG, 1, 1, np.dtype(np.float32))
    assert (found["vocabulary"], found["presets"], found["problems"]) == (None, [], [])
    assert {"name": HF_NAMES["q"].format(1), "kind": "F32", "shape": [32, 32], "bytes": 4096} in found["tensors"]
    assert "tensors" not in json.loads(run(folder, "--json")[1])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (PRESETS["llama-3.1-70b"], "llama-3.1-70b; llama-3.3-70b"),
        (PRESETS["llama-2-7b"], "llama-2-7b"),
        (
            replace(PRESETS["llama-2-7b"], max_seq_len=32_768, rope_theta=1e6),
            "the sizes of llama-7b, but not max_seq_len, norm_eps, rope_theta;"
            " the sizes of llama-2-7b, but not max_seq_len, rope_theta",
        ),
        (replace(PRESETS["llama-2-7b"], n_layers=31), "none of these sizes"),
    ],
)
def test_presets(config, words):
    assert rows_of(inspection_page(inspect_checkpoint(opened(config))))["preset"] == words


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        (llama_jax.RopeScaling("linear", 4), "linear, factor 4"),
        (
            llama_jax.RopeScaling("yarn", 4, original_max_seq_len=2048, truncate=False, attention_factor=1.5),
            "yarn, factor 4, slow and fast beta 1 and 32, attention factor 1.5, not truncated, trained at 2,048",
        ),
        (
            llama_jax.RopeScaling("longrope", 4, original_max_seq_len=64, short_factor=[1, 2] * 2, long_factor=[1, 8] * 2),
            "longrope, factor 4, short and long factors 1..2 and 1..8, trained at 64",
        ),
    ],
)
def test_rope_scaling(scaling, words):
    assert (
        rows_of(inspection_page(inspect_checkpoint(opened(replace(CONFIG, rope_scaling=scaling)))))["RoPE scaling"] == words
    )


# -- what is wrong -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop(HF_NAMES["up"].format(1)), f"tensor '{HF_NAMES['up'].format(1)}' is missing"),
        (lambda t: t.update(more=np.zeros(2, np.float32)), "tensor 'more' is not part of a Llama"),
        (
            lambda t: t.update({HF_NAMES["final_norm"]: np.zeros(31, np.float32)}),
            "has shape [31]; the configuration needs [32]",
        ),
        (lambda t: t.update({HF_NAMES["final_norm"]: np.zeros(32, np.int8)}), "is I8; a 16- or 32-bit float"),
    ],
)
def test_a_problem_is_shown_with_all_there_is(tmp_path, change, problem):
    tensors = make_goldens.random_tensors(CONFIG)
    change(tensors)
    folder = write_hf_folder(tmp_path / "model", CONFIG, tensors)
    code, out, err = run(folder)
    assert code == 2
    assert rows_of(out)["layers"] == "2"
    assert problem in err  # and not a second time on the page
    assert problem not in out
    assert err.count("\n") == 1
    code, out, _ = run(folder, "--json")
    assert code == 2
    assert problem in json.loads(out)["problems"][0]


class Vocabulary:
    vocab_size, bos_id, add_bos, eos_id, stop_ids, chat_template = 97, -1, False, 5, (), "{{ messages }}"


def test_a_vocabulary_that_is_damaged_or_larger():
    def damaged():
        raise llama_jax.TokenizerError("the vocabulary is damaged")

    found = inspect_checkpoint(opened(CONFIG, tokenizer=damaged))
    assert found["vocabulary"] is None
    assert found["problems"][1:] == ["the vocabulary is damaged"]
    assert rows_of(inspection_page(found))["vocabulary"] == "unknown"
    assert inspection_page(found).splitlines()[-1] == "problem: the vocabulary is damaged"
    assert rows_of(inspection_page(inspect_checkpoint(opened(CONFIG))))["vocabulary"] == "none"
    found = inspect_checkpoint(opened(CONFIG, tokenizer=Vocabulary))
    assert not any("vocabulary" in problem for problem in found["problems"])  # one token more than rows is no problem
    assert (
        rows_of(inspection_page(found))["vocabulary"]
        == "Vocabulary, 97 pieces; bos -1, eos 5, stop none; with chat template"
    )


def test_names_that_a_terminal_would_obey(tmp_path):
    tensors = make_goldens.random_tensors(CONFIG) | {"a\x1b[2J\nb": np.zeros(2, np.float32)}
    out = run(write_hf_folder(tmp_path / "model", CONFIG, tensors), "--tensors")[1]
    assert "\x1b" not in out
    assert r"a\x1b[2J\nb  " in out


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures through Linux's /proc")
def test_a_large_model_is_not_read_and_needs_no_device(tmp_path):
    """Its weights are a hole in the file, many times what the process takes."""
    folder = write_hf_folder(tmp_path / "model", CONFIG, {"x": np.zeros(2, np.float32)})
    size = 4 * 700_000_000
    header = json.dumps({"x": {"dtype": "F32", "shape": [700, 1_000_000], "data_offsets": [0, size]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    code = (
        "import sys\n"
        "from llama_jax.cli import main\n"
        "sys.argv[1:] = ['inspect', sys.argv[1]]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        # Not getrusage, whose maximum a process inherits from the one that started it.
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    environment = os.environ | {"JAX_PLATFORMS": "no_such_device"}
    command = [sys.executable, "-c", code, str(folder)]
    *page, kilobytes = subprocess.run(command, capture_output=True, text=True, env=environment).stdout.splitlines()
    assert rows_of("\n".join(page))["F32 tensors"] == "1, 2.8 GB"
    assert int(kilobytes) < 500_000


# -- how it is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "words"),
    [(999, "999 bytes"), (1000, "1.0 kB"), (99_950, "100 kB"), (999_500, "1.0 MB"), (10**16, "10,000.0 TB")],
)
def test_sizes(count, words):
    assert size(count) == words


@given(st.text())
def test_what_is_printed_is_one_line_that_a_terminal_shows(text):
    assert printable(text).isprintable()
    assert printable(text) == text or not text.isprintable()


@pytest.mark.parametrize(
    ("kind", "name", "bits"), [("gptq", "INT4", "4"), ("nf4 twice", "NF4", "4"), ("fp8", "FP8_128", "8")]
)
def test_quantized_folders_say_kinds_bits_and_bytes(kind, name, bits, tmp_path):
    quantized_folders.write_folder(tmp_path, kind, files=2)
    code, out, _ = run(tmp_path)
    assert code == 0
    assert re.search(rf"{name} tensors +\d+, .*, {bits}\.\d+ bits a number", out)
    code, out, _ = run(tmp_path, "--json")
    found = json.loads(out)
    assert len(found["files"]) == 2
    assert sum(each["bytes"] for each in found["kinds"].values()) <= sum(found["files"].values())
    assert found["format"] == f"Hugging Face safetensors, {quantized_folders.FOLDERS[kind][0]['quant_method']}"
