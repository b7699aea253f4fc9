"""Where the model of the package lies."""

from pathlib import Path

import pytest

import llama_jax
from llama_jax.checkpoints import loading as module
from llama_jax.checkpoints.loading import bundled
from llama_jax.errors import CheckpointError


def test_it_lies_inside_the_package():
    assert bundled() == Path(llama_jax.__file__).parent / "assets"
    assert llama_jax.load(bundled()).tokenizer is not None


def test_an_installation_without_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "files", lambda name: tmp_path)
    with pytest.raises(CheckpointError, match="does not hold the bundled stories model; install llama_jax again"):
        bundled()
