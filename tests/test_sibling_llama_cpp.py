"""Live comparison of the families' GGUF files with llama.cpp."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from test_siblings import SIBLINGS, gguf_form, random_params

import llama_jax

pytestmark = pytest.mark.llama_cpp
# llama.cpp wants rows of heads that are multiples of 32, so that its cache may be quantized.
MODELS = {
    kind: replace(gguf_form(config), max_seq_len=512)
    for kind, config in SIBLINGS.items()
    if kind not in ("cwm", "mixtral", "mistral")  # of the last two llama.cpp reads no window
}
MODELS |= {"mistral": replace(SIBLINGS["mistral"], window=None), "mixtral": SIBLINGS["mixtral"]}
TOKENS = np.random.default_rng(1).integers(0, 96, 40, dtype=np.int32)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_greedy_text(kind, tmp_path):
    import llama_cpp

    config, path = MODELS[kind], tmp_path / "model.gguf"
    params = random_params(config, seed=5)
    llama_jax.save(path, config, params)
    peer = llama_cpp.Llama(
        str(path), n_ctx=128, logits_all=True, verbose=False, type_k=0, type_v=0, flash_attn=False, n_batch=64, n_ubatch=64
    )
    peer.eval(TOKENS.tolist())
    found = np.array(peer.scores[: len(TOKENS)])
    atol = 1e-2 if config.activation == "gelu" else 2e-3  # which llama.cpp looks up in a table of 16-bit numbers
    np.testing.assert_allclose(
        found, jax.jit(llama_jax.logits, static_argnums=0)(config, params, TOKENS[None])[0], atol=atol
    )
    (ours,) = llama_jax.generate(config, params, [TOKENS.tolist()], max_new_tokens=16)
    theirs = []
    for _ in range(16):
        theirs.append(int(np.argmax(peer.scores[peer.n_tokens - 1])))
        peer.eval(theirs[-1:])
    assert list(ours.tokens) == theirs
