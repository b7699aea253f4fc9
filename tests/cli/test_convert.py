"""``llama-jax convert`` as a user meets it."""

import os
import subprocess
import sys
from functools import partial
from typing import get_args

import jax
import numpy as np
import pytest
from commands import error_of, run_here
from conftest import write_hf_folder
from make_format_goldens import FORMATS, SMALL
from make_goldens import random_tensors

import llama_jax
from llama_jax.cli.convert import OUTPUT_FORMATS as OFFERED
from llama_jax.cli.options import BLOCK_FORMATS
from llama_jax.formats.saving import TENSOR_TYPES, WrittenFormat

START = "from llama_jax.cli import main; "


run = partial(run_here, "convert")


def test_there_and_back(tmp_path):
    source = write_hf_folder(tmp_path / "model", SMALL, random_tensors(SMALL))
    done = run(source, tmp_path / "model.gguf", "--format", "gguf")
    assert (done.returncode, done.stdout) == (0, "")
    assert f"{tmp_path / 'model.gguf'}: 0.0 MB in" in done.stderr
    done = run(tmp_path / "model.gguf", tmp_path / "back", "--format", "safetensors")
    assert done.returncode == 0
    before, after = (jax.tree.leaves(llama_jax.load(path).params) for path in (source, tmp_path / "back"))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("name", "format"), [("m.gguf", "GGUF"), ("m.bin", "llama2.c"), ("m", "safetensors")])
def test_the_format_is_guessed_from_the_name(tmp_path, name, format):
    source = write_hf_folder(tmp_path / "model", SMALL, random_tensors(SMALL))
    assert run(source, tmp_path / name).returncode == 0
    assert format.lower() in llama_jax.formats.open_checkpoint(tmp_path / name).format.lower()
    llama_jax.save(tmp_path / "saved" / name, *llama_jax.load(source))
    assert format.lower() in llama_jax.formats.open_checkpoint(tmp_path / "saved" / name).format.lower()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "out", "--format", "gguf"], "nowhere does not exist"),
        (
            [FORMATS / "meta-1", FORMATS / "meta-2", "--format", "safetensors"],
            "meta-2 exists; remove it, or replace it with --overwrite (overwrite=True)",
        ),
        ([FORMATS / "meta-1", "out.safetensors"], "is named like a file, but safetensors is a folder"),
        ([FORMATS / "meta-1", "out", "--format", "safetensors", "--dtype", "q8_0"], "dtype='q8_0': the safetensors format"),
        ([FORMATS / "meta-1", "/proc/out", "--format", "gguf"], "No such file or directory"),
        ([FORMATS / "meta-1", "a" * 300], "cannot be read: File name too long"),
    ],
)
def test_errors_are_one_line(arguments, message):
    assert message in error_of(run(*arguments))


def test_links_that_lead_to_one_another(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "link")
    for name in ("link", "link/out.gguf"):
        refused = error_of(run(FORMATS / "meta-1", tmp_path / name))
        assert refused.startswith(f"llama-jax: error: {tmp_path / name} cannot be written (")


def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch):
    """It would be one without a name from then on, in which not even the result is found."""
    monkeypatch.chdir(tmp_path)
    refused = error_of(run(FORMATS / "meta-1", "."))
    assert "is the current folder, which cannot be replaced; use a folder inside it" in refused
    assert run(FORMATS / "meta-1", "./model").returncode == 0


INTERRUPT = (
    "import os, signal; from llama_jax.formats.build_params import WrittenTensor; rows = WrittenTensor.rows\n"
    "def interrupted(self, dtype):\n"
    "    if self.part == 'final_norm': os.kill(os.getpid(), signal.SIGINT)\n"
    "    return rows(self, dtype)\n"
    "WrittenTensor.rows = interrupted\n"
)


def test_nothing_is_left_when_it_is_stopped(tmp_path):
    program = START + INTERRUPT + "main()"
    command = [sys.executable, "-c", program, "convert", FORMATS / "meta-1", tmp_path / "out", "--format", "safetensors"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "llama-jax: stopped; nothing was written"
    assert not os.listdir(tmp_path)


TWICE = INTERRUPT + (
    "from llama_jax.storage import atomic_write; remove = atomic_write.remove\n"
    "def again(path): os.kill(os.getpid(), signal.SIGINT); remove(path)\n"
    "atomic_write.remove = again\n"
)


@pytest.mark.slow
def test_stopped_twice_leaves_what_the_next_run_clears_up(tmp_path):
    """The second Ctrl-C comes while the first one's leavings are removed."""
    command = [sys.executable, "-c", START + TWICE + "main()", "convert", FORMATS / "meta-1", tmp_path / "out.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "llama-jax: stopped; nothing was written"
    assert "Traceback" not in done.stderr
    assert [name.endswith(".llama_jax-partial") for name in os.listdir(tmp_path)] == [True]
    assert run(FORMATS / "meta-1", tmp_path / "out.gguf").returncode == 0
    assert os.listdir(tmp_path) == ["out.gguf"]


def test_what_is_offered_is_what_there_is():
    assert get_args(OFFERED) == ("auto", *get_args(WrittenFormat))
    assert set(TENSOR_TYPES) == {"float32", "bfloat16", "float16", *get_args(BLOCK_FORMATS)}
