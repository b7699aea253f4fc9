"""What a run with an attention of its own leaves is computed with that attention, or not at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from commands import run_here
from mortal_run import recipe, write_words
from running import StopAt, caches  # noqa: F401  # caches is a fixture

import llama_jax
from llama_jax import Compute, ops
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.model.lora import Lora
from llama_jax.runs.loop import train

SHORT = replace(recipe(), steps=3, evaluate_every=3, save_every=3, ema_decay=0.0)
NEED = r"trained with an attention of its own, .*:halved, .* as compute=Compute\(attend=...\)"


def halved(queries, view, seen, **options):
    return ops.attend(queries, view, seen, **options) / 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The text, a run with the attention, one without, and adapters trained with it on the latter."""
    folder = tmp_path_factory.mktemp("own")
    text = write_words(folder)
    train(replace(SHORT, attend=halved), folder / "own", [text], log=StopAt())
    train(SHORT, folder / "plain", [text], log=StopAt())
    adapters = replace(SHORT, attend=halved, lora=Lora(rank=2), vocabulary="given")
    train(adapters, folder / "adapters", [text], weights=folder / "plain", log=StopAt())
    return text, folder / "own", folder / "plain", folder / "adapters"


def refused(*arguments):
    found = run_here(*arguments)
    assert found.returncode == 2, found
    assert "Traceback" not in found.stderr
    return found.stderr


def test_every_command_that_computes_refuses_it(runs):
    text, own, plain, adapters = runs
    for arguments in (["--model", own], ["--model", plain, "--adapter", adapters]):
        assert "trained with an attention of its own" in refused("generate", "the", *arguments)
        assert "trained with an attention of its own" in refused("serve", *arguments)
    for arguments in ([own], [plain, "--adapter", adapters], [plain, "--against", own]):
        assert "trained with an attention of its own" in refused("eval", *arguments, "--data", text)
    assert run_here("inspect", own).returncode == 0


def test_the_same_function_is_passed_from_python(runs):
    _, own, plain, adapters = runs
    tokens = np.arange(1, 9)[None]
    for config, params, _ in (llama_jax.load(own), llama_jax.load(plain, adapter=adapters)):
        with pytest.raises(ConfigError, match=NEED):
            llama_jax.logits(config, params, tokens)
        with pytest.raises(ConfigError, match=NEED):
            llama_jax.generate(config, params, tokens, max_new_tokens=1)
        found = llama_jax.logits(config, params, tokens, Compute(attend=halved))
        other = llama_jax.logits(replace(config, attend=None), params, tokens)
        assert np.abs(found - other).max() > 1e-5


def test_a_run_that_begins_or_goes_on_with_it_needs_it_too(runs, tmp_path):
    text, own, *_ = runs
    with pytest.raises(ConfigError, match=NEED):
        train(SHORT, tmp_path / "a", [text], weights=own, log=StopAt())
    longer = replace(SHORT.model, max_seq_len=128)
    with pytest.raises(ConfigError, match=NEED):
        train(replace(SHORT, model=longer), tmp_path / "b", [text], weights=own, log=StopAt())
    result = train(replace(SHORT, attend=halved), tmp_path / "c", [text], weights=own, log=StopAt())
    assert result.step == 3


def test_files_keep_its_name_or_are_refused(runs, tmp_path):
    _, own, plain, adapters = runs
    name = llama_jax.load(own).config.attend
    for format in ("safetensors", "orbax"):
        llama_jax.convert(own, tmp_path / format, format=format)
        assert llama_jax.load(tmp_path / format).config.attend == name
    with pytest.raises(CheckpointError, match=r"attend='.*:halved' has no place in gguf, .* write safetensors or orbax"):
        llama_jax.convert(own, tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=r"attend='.*:halved' has no place in an adapter's files"):
        llama_jax.convert(adapters, tmp_path / "adapter")
    assert run_here("merge", plain, adapters, tmp_path / "merged").returncode == 0
    assert llama_jax.load(tmp_path / "merged").config.attend == name
