"""Live comparison of the families' GGUF files with llama.cpp."""

from dataclasses import replace

import gguf
import jax
import numpy as np
import pytest
from family_models import SIBLINGS, random_params
from test_siblings import gguf_form

import llama_jax
from llama_jax import RopeScaling

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


@pytest.mark.parametrize("beyond", [False, True])
def test_a_longrope_as_the_converter_writes_it(beyond, tmp_path):
    """With no type, as Phi-3-128k, Phi-3.5 and Phi-4-mini are. llama.cpp goes by the size of the context."""
    import llama_cpp

    original = 32 if beyond else 256
    scaling = RopeScaling(
        "longrope",
        512 / original,
        original_max_seq_len=original,
        short_factor=[1 + 0.1 * i for i in range(6)],
        long_factor=[2.0 + i for i in range(6)],
    )
    config = replace(MODELS["phi3"], rope_scaling=scaling)
    params = random_params(config, seed=5)
    llama_jax.save(tmp_path / "ours.gguf", config, params)
    reader, path = gguf.GGUFReader(tmp_path / "ours.gguf"), tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "phi3")
    for key, field in reader.fields.items():
        ours = key.startswith(("GGUF.", "llama_jax")) or key in ("general.architecture", "phi3.rope.scaling.type")
        if not ours:
            writer.add_key_value(key, field.contents(), field.types[0], *field.types[1:])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = llama_jax.load(path)
    assert loaded.config == config
    peer = llama_cpp.Llama(
        str(path), n_ctx=256, logits_all=True, verbose=False, type_k=0, type_v=0, flash_attn=False, n_batch=64, n_ubatch=64
    )
    peer.eval(TOKENS.tolist())
    found = np.array(peer.scores[: len(TOKENS)])
    want = jax.jit(llama_jax.logits, static_argnums=0)(loaded.config, loaded.params, TOKENS[None])[0]
    np.testing.assert_allclose(found, want, atol=2e-3)
