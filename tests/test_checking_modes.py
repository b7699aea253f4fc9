"""The public functions run under all of JAX's checking modes."""

import jax
import numpy as np
import pytest
from conftest import tiny_config

import llama_jax
from llama_jax import Batch, CacheOptions, Lora, PromptLookup, Sampling
from llama_jax.model.trees import quantize

MODES = {
    "disable_jit": jax.disable_jit,
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "transfers": lambda: jax.transfer_guard("disallow"),
    "NaN": lambda: jax.debug_nans(True),
    "infinity": lambda: jax.debug_infs(True),
    "leaks": jax.checking_leaks,
}
CONFIG = tiny_config(hidden_dim=64)
SAMPLING = Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=[0, 1])
PROMPTS = [[1, 2, 3, 1, 2, 3], [4, 5]]


class Subject:
    """A model in memory and in files, and what the functions are given."""

    def __init__(self, folder):
        self.folder = folder
        self.params = llama_jax.init(CONFIG, jax.random.key(0))
        self.lora = Lora(rank=2)
        self.adapters = llama_jax.init_adapters(CONFIG, self.lora, jax.random.key(1))
        self.optimizer = llama_jax.make_optimizer(llama_jax.OptimizerSettings(), 10)
        self.state = llama_jax.init_state(self.optimizer, self.params)
        self.tokens = jax.device_put(np.arange(12).reshape(2, 6))
        ids = jax.device_put(np.ones((2, 6), np.int32))
        self.batch, self.packed = Batch(self.tokens), Batch(self.tokens, segment_ids=ids)
        llama_jax.save(folder / "floats", CONFIG, self.params)
        llama_jax.save(folder / "model.gguf", CONFIG, self.params, dtype="q8_0")
        llama_jax.save(folder / "orbax", CONFIG, self.params, format="orbax")

    def generate(self, **settings):
        return llama_jax.generate(CONFIG, settings.pop("params", self.params), PROMPTS, max_new_tokens=4, **settings)


def forward(config, params, tokens):
    return llama_jax.unembed(config, params, llama_jax.forward(config, params, tokens)[0])


# Pure functions of arrays, which run under `jit` as they are meant to.
PURE = {
    "forward": lambda own: jax.jit(forward, static_argnums=0)(CONFIG, own.params, own.tokens),
    "logits": lambda own: jax.jit(llama_jax.logits, static_argnums=0)(CONFIG, own.params, own.tokens),
    "loss": lambda own: jax.jit(llama_jax.next_token_loss, static_argnums=0)(CONFIG, own.params, own.packed),
    "train_step": lambda own: jax.jit(llama_jax.train_step, static_argnums=(0, 1))(
        CONFIG, own.optimizer, own.state, own.batch
    ),
}
# What places arrays and compiles by itself.
WHOLE = {
    "generate": lambda own: own.generate(stop_tokens=(7,)),
    "sampled": lambda own: own.generate(sampling=SAMPLING),
    "stream": lambda own: list(llama_jax.stream(CONFIG, own.params, PROMPTS, max_new_tokens=4)),
    "int8 cache": lambda own: own.generate(cache=CacheOptions(dtype="int8")),
    "ring cache": lambda own: own.generate(cache=CacheOptions(window=8, sinks=2)),
    "drafts": lambda own: own.generate(draft=PromptLookup()),
    "quantize": lambda own: own.generate(params=quantize(own.params, "int8")),
    "load": lambda own: llama_jax.load(own.folder / "floats").params,
    "load quantized": lambda own: llama_jax.load(own.folder / "floats", quantize="int4").params,
    "load GGUF": lambda own: own.generate(params=llama_jax.load(own.folder / "model.gguf").params),
    "load orbax": lambda own: llama_jax.load(own.folder / "orbax").params,
    "save": lambda own: [
        llama_jax.save(own.folder / "again", CONFIG, own.params, format=format, overwrite=True)
        for format in ("safetensors", "orbax")
    ],
    "adapters": lambda own: llama_jax.merge(own.params, own.adapters, own.lora),
}


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    return Subject(tmp_path_factory.mktemp("modes"))


# Pure functions in a mode each; the rest is slow.
CASES = [
    pytest.param(mode, name, marks=[] if name in PURE and i + 2 == j else (pytest.mark.slow, pytest.mark.rotating))
    for i, name in enumerate(PURE | WHOLE)
    for j, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_functions_run_under_checking_modes(mode, name, subject):
    with MODES[mode]():
        jax.block_until_ready((PURE | WHOLE)[name](subject))
