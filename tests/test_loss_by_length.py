"""Loss by length and by position against the definition, and what is known beforehand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import loss_by_length
import make_goldens
import numpy as np
import pytest
from conftest import as_float64
from loss_by_length import cut_spans, window_losses

import llama_jax
from llama_jax import RopeScaling
from llama_jax.formats.loading import bundled

CONFIG = make_goldens.KINDS["gqa"]
DYNAMIC = replace(CONFIG, max_seq_len=8, rope_scaling=RopeScaling("dynamic", 4.0, original_max_seq_len=8))
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 150)


@pytest.fixture
def in_chunks(monkeypatch):
    """A window ends inside a chunk."""
    monkeypatch.setattr(loss_by_length, "CHUNK", 5)


@pytest.mark.parametrize(
    ("config", "length"), [(CONFIG, 8), (CONFIG, 24), pytest.param(DYNAMIC, 12, marks=pytest.mark.slow)]
)
def test_the_losses_are_those_of_whole_windows(models, in_chunks, config, length):
    """Several windows at once, of which the last batch is not full; and beyond the model's context."""
    spans, params = cut_spans(TOKENS, 24), models["gqa"][1]
    losses = window_losses(config, params, spans, length, batch=4)
    windows = np.stack([span[start : start + length + 1] for span in spans for start in range(0, 24, length)])
    with jax.enable_x64(True):
        wide = as_float64(params)
        logprobs = jax.nn.log_softmax(llama_jax.logits(config, wide, jnp.array(windows[:, :-1])))
        expected = -np.take_along_axis(np.asarray(logprobs), windows[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.slow
def test_a_trained_model_breaks_beyond_its_context(tmp_path, capsys):
    """And YaRN mends most of it: the bundled model was trained at 512 tokens."""
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 100)
    arguments = loss_by_length.Arguments(bundled(), text, (512, 2048), max_tokens=2048, dtype="float32")
    tables = []
    for rope in ("", "yarn:4"):
        loss_by_length.main(replace(arguments, rope=rope))
        tables.append([line.split() for line in capsys.readouterr().out.splitlines()])
    (within, beyond), (_, extended) = ((table[1], table[2]) for table in tables)
    last = [float(row[3]) for row in (within, beyond, extended)]
    assert "beyond" in beyond
    assert "beyond" not in extended
    assert last[1] > last[0] + 0.1
    assert last[2] < last[1] - 0.1
