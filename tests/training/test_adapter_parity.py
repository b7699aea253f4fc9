"""Adapters are PEFT's: logits, every gradient, twenty steps of AdamW, and the files, both ways."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import make_adapter_goldens as theirs
import make_goldens
import numpy as np
import pytest
from conftest import as_float64, params_of
from safetensors.numpy import load_file
from training_options import loss_options, step_options

import llama_jax
from llama_jax.formats import load_adapter, save_adapter
from llama_jax.model.forward import forward, unembed
from llama_jax.model.forward_options import Positions, Sharding
from llama_jax.model.lora import apply_adapters, freeze_base, merge
from llama_jax.training.batch import Batch
from llama_jax.training.loss import next_token_loss
from llama_jax.training.optimizer import OptimizerSettings, make_optimizer
from llama_jax.training.step import init_state, train_step

SETTINGS = OptimizerSettings(
    learning_rate=theirs.RATE, schedule="constant", b1=theirs.BETAS[0], b2=theirs.BETAS[1], eps=theirs.EPS,
    weight_decay=theirs.DECAY, clip_norm=0.0,
)  # fmt: skip
needs_peft = [
    pytest.mark.parity,
    # transformers and torch warn about themselves
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def stored():
    with np.load(make_goldens.GOLDENS / "adapters.npz") as file:
        return dict(file)


def results(case, folder, *, wide):
    """What `make_adapter_goldens.results` is for PEFT; the adapter goes through its files on the way in and out."""
    kind, lora = theirs.CASES[case]
    config = make_goldens.KINDS[kind]
    base = params_of(config, make_goldens.random_tensors(config))
    base = as_float64(base) if wide else base
    theirs.write_adapter(folder / "given", config, lora)
    given = load_adapter(folder / "given", config, "float64" if wide else "float32")
    assert given.lora == replace(lora, targets=given.lora.targets)
    assert set(given.lora.targets) == set(lora.targets)
    adapters = given.params
    at = lambda ids: jnp.zeros(ids.shape, jnp.int32) if wide else None

    def written(name, tree):
        save_adapter(folder / name, config, tree, lora)
        return {f"{name} {key}": array for key, array in load_file(folder / name / "adapter_model.safetensors").items()}

    @jax.jit
    def logits(base, adapters, ids):
        joined = apply_adapters(base, adapters, lora)
        return unembed(config, joined, forward(config, joined, ids, positions=Positions(position_ids=at(ids)))[0])

    @jax.jit
    def gradient(base, adapters, ids):
        loss = lambda adapters: next_token_loss(
            config, apply_adapters(base, adapters, lora), Batch(ids, position_ids=at(ids)), loss_options(chunk=5)
        )
        return jax.grad(loss)(adapters)

    optimizer = make_optimizer(SETTINGS, theirs.STEPS)

    @jax.jit
    def step(base, state, ids):
        batch, options = Batch(ids, position_ids=at(ids)), step_options(chunk=5)
        return train_step(config, optimizer, state, batch, options, freeze_base(Sharding(), base, lora))

    found = {"logits": np.asarray(logits(base, adapters, make_goldens.tokens(config)[:, :24]))}
    found |= written("gradient", gradient(base, adapters, theirs.batch_of(config, 0)))
    state, losses = init_state(optimizer, adapters), []
    for i in range(theirs.STEPS):
        state, metrics = step(base, state, theirs.batch_of(config, i))
        losses.append(float(metrics["loss"]))
    return found | written("after", state.params) | {"losses": np.array(losses)}


def assert_near(found, wanted, relative):
    """To so much of the largest number of each array."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert np.abs(found[name] - array).max() <= relative * np.abs(array).max(), name


@pytest.mark.parametrize(
    "case", [x if x == "queries and values" else pytest.param(x, marks=pytest.mark.slow) for x in theirs.CASES]
)
def test_in_float64_all_is_what_peft_computes(case, stored, tmp_path):
    wanted = {name.removeprefix(f"{case}: "): array for name, array in stored.items() if name.startswith(f"{case}: ")}
    with jax.enable_x64(True):
        found = results(case, tmp_path, wide=True)
    assert_near(found, wanted, 1e-10)


@pytest.mark.parametrize("case", [pytest.param("every matrix", marks=needs_peft)])
def test_the_goldens_are_what_peft_gives(case, stored):
    pytest.importorskip("peft", reason="needs the parity extra")
    kind, lora = theirs.CASES[case]
    wanted = theirs.results(make_goldens.KINDS[kind], lora)
    assert_near({name: stored[f"{case}: {name}"] for name in wanted}, wanted, 1e-10)


@pytest.mark.parametrize("case", [pytest.param(case, marks=needs_peft) for case in theirs.CASES])
def test_folders_go_both_ways(case, tmp_path):
    """What PEFT saves is read, and of what is written here PEFT misses no key and finds none too many."""
    pytest.importorskip("peft", reason="needs the parity extra")
    import peft
    import torch

    kind, lora = theirs.CASES[case]
    config = make_goldens.KINDS[kind]
    tensors, base = theirs.adapter_tensors(config, lora), params_of(config, make_goldens.random_tensors(config))
    ids = make_goldens.tokens(config)
    model = theirs.peft_model(config, lora, tensors, wide=False)
    with torch.no_grad():
        wanted = theirs.peft_logits(model, ids, wide=False).numpy()
    model.save_pretrained(tmp_path / "theirs")
    adapter = load_adapter(tmp_path / "theirs", config)
    run = jax.jit(llama_jax.logits, static_argnums=0)
    np.testing.assert_allclose(run(config, apply_adapters(base, adapter.params, adapter.lora), ids), wanted, atol=1e-4)
    np.testing.assert_allclose(run(config, merge(base, adapter.params, adapter.lora), ids), wanted, atol=1e-4)

    save_adapter(tmp_path / "ours", config, adapter.params, adapter.lora, base="somewhere")
    ours, saved = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == saved.keys() == tensors.keys()
    for name, array in saved.items():
        np.testing.assert_array_equal(ours[name], array)
    plain = make_goldens.transformers_model(config, make_goldens.random_tensors(config))
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "ours")
    said = again.load_adapter(tmp_path / "ours", adapter_name="again")
    assert not said.unexpected_keys
    assert not [key for key in said.missing_keys if "lora_" in key]
    with torch.no_grad():
        np.testing.assert_allclose(theirs.peft_logits(again, ids, wide=False).numpy(), wanted, atol=1e-6)
    assert json.loads((tmp_path / "ours" / "adapter_config.json").read_text())["base_model_name_or_path"] == "somewhere"
