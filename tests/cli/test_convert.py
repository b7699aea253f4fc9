"""``llama-jax convert`` as a user meets it."""

import os
import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest
from commands import run_here
from conftest import write_hf_folder
from make_format_goldens import FORMATS, SMALL
from make_goldens import random_tensors

import llama_jax

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
