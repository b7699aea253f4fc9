"""Each technique with hooks beside transformers with the hooks of torch, on a random model and on a real one."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import make_goldens
import numpy as np
import pytest
from conftest import params_of
from jax.tree_util import Partial

import llama_jax

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

LAYER, HEAD, POSITION, EXIT = 1, 2, 4, 2


@pytest.fixture(
    scope="module", params=[pytest.param("random", marks=pytest.mark.parity), pytest.param("real", marks=pytest.mark.real)]
)
def pair(request, tmp_path_factory):
    """A model in float32, here and in transformers, and two texts of one length."""
    transformers = pytest.importorskip("transformers", reason="needs the parity extra")
    import torch

    if request.param == "real":
        config, params, tokenizer = llama_jax.load(request.getfixturevalue("smollm2"), "float32", quantize=None)
        texts = ["The capital of France is the city of", "The capital of Japan is the city of"]
        tokens = np.asarray([tokenizer.encode(text) for text in texts], np.int32)
    else:
        config = replace(make_goldens.KINDS["gqa"], n_layers=4)
        params = params_of(config, make_goldens.random_tensors(config))
        tokens = make_goldens.tokens(config, 2, 12)
    folder = tmp_path_factory.mktemp("saved") / "model"
    llama_jax.save(folder, config, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return config, params, tokens, model.eval()


class Torch:
    """The model in transformers: logits with hooks of torch, which are removed afterwards."""

    def __init__(self, model):
        self.model, self.layers = model, model.model.layers

    @contextmanager
    def hooked(self, hooks):
        import torch

        handles = [getattr(module, f"register_forward_{kind}")(hook) for module, kind, hook in hooks]
        try:
            with torch.inference_mode():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def logits(self, tokens, *hooks, **options):
        import torch

        with self.hooked(hooks):
            return self.model(torch.from_numpy(np.asarray(tokens)).long(), **options)

    def generate(self, tokens, new, *hooks):
        import torch

        ids = torch.from_numpy(np.asarray(tokens)).long()
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        with self.hooked(hooks):
            return self.model.generate(ids, max_new_tokens=new, **options)[:, ids.shape[1] :].tolist()


def hidden_of(output):
    """The hidden states in a layer's output, which is a tensor or a tuple, depending on the version of transformers."""
    return output[0] if isinstance(output, tuple) else output


def with_hidden(output, hidden):
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def close(found, expected):
    expected = np.asarray(expected)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-5 * largest)


def ours(config, params, tokens, hooks):
    """Without a cache, and with one in two pieces, which have to agree."""
    hooked = llama_jax.with_hooks(params, hooks)
    whole = llama_jax.logits(config, hooked, tokens)
    cache, parts = llama_jax.init_cache(config, 2, 32), []
    for part in (tokens[:, :5], tokens[:, 5:]):
        hidden, cache = llama_jax.forward(config, hooked, part, cache)
        parts.append(llama_jax.unembed(config, hooked, hidden))
    close(jnp.concatenate(parts, axis=1), whole)
    return whole


def test_activations(pair):
    config, params, tokens, model = pair
    seen = {}

    def keep(name, module, arguments, output):
        seen[name] = hidden_of(output).numpy()

    def keep_input(name, module, arguments):
        seen[name] = arguments[0].numpy()

    theirs, layer = Torch(model), model.model.layers[LAYER]
    hooks = [
        (layer.self_attn, "hook", partial(keep, "attention")),
        (layer.mlp, "hook", partial(keep, "feed_forward")),
        (layer.self_attn.o_proj, "pre_hook", partial(keep_input, "heads")),
        (layer.mlp.down_proj, "pre_hook", partial(keep_input, "neurons")),
        (layer.self_attn.v_proj, "hook", partial(keep, "values")),
        (layer.post_attention_layernorm, "pre_hook", partial(keep_input, "residual_between")),
    ]
    output = theirs.logits(tokens, *hooks, output_hidden_states=True, output_attentions=True)
    read = lambda value, at: (value, value)
    names = (*seen, "pattern", "embedded", "residual_before", "residual_after", "final")
    logits, _, kept = llama_jax.logits_and_activations(config, params, tokens, dict.fromkeys(names, read))
    for name, value in seen.items():
        close(kept[name][LAYER].reshape(value.shape), value)
    close(kept["pattern"], np.stack([pattern.numpy() for pattern in output.attentions]))
    close(kept["embedded"], output.hidden_states[0].numpy())
    close(kept["residual_before"], np.stack([state.numpy() for state in output.hidden_states[:-1]]))
    close(kept["residual_after"][:-1], np.stack([state.numpy() for state in output.hidden_states[1:-1]]))
    close(kept["final"], output.hidden_states[-1].numpy())
    close(logits, output.logits.numpy())


@pytest.fixture(scope="module")
def vector(pair):
    *_, tokens, model = pair
    states = Torch(model).logits(tokens, output_hidden_states=True).hidden_states[LAYER + 1]
    return 2.0 * (states[0, -1] - states[1, -1])


def steer(vector, value, at):
    return jnp.where(at.layer == LAYER, value + vector, value), None


def test_steering(pair, vector):
    config, params, tokens, model = pair
    hook = (
        model.model.layers[LAYER],
        "hook",
        lambda module, arguments, output: with_hidden(output, hidden_of(output) + vector),
    )
    hooks = {"residual_after": Partial(steer, vector.numpy())}
    close(ours(config, params, tokens, hooks), Torch(model).logits(tokens, hook).logits.numpy())
    hooked = llama_jax.with_hooks(params, hooks)
    found = llama_jax.generate(config, hooked, tokens.tolist(), max_new_tokens=16)
    assert [row.tokens for row in found] == Torch(model).generate(tokens, 16, hook)


def test_forced_attention(pair):
    """In one layer every token attends to all before it alike."""
    config, params, tokens, model = pair
    import torch
    from transformers.models.llama import modeling_llama

    usual = modeling_llama.eager_attention_forward

    def uniform(module, query, key, value, mask, **options):
        attended, weights = usual(module, query, key, value, mask, **options)
        if module.layer_idx != LAYER:
            return attended, weights
        weights = torch.tril(torch.ones_like(weights))
        weights = weights / weights.sum(-1, keepdim=True)
        values = modeling_llama.repeat_kv(value, module.num_key_value_groups)
        return torch.matmul(weights, values).transpose(1, 2).contiguous(), weights

    def force(value, at):
        alike = (value > 0) / jnp.maximum((value > 0).sum(-1, keepdims=True), 1)
        return jnp.where(at.layer == LAYER, alike, value), None

    modeling_llama.eager_attention_forward = uniform
    try:
        expected = Torch(model).logits(tokens).logits.numpy()
    finally:
        modeling_llama.eager_attention_forward = usual
    close(ours(config, params, tokens, {"pattern": force}), expected)
