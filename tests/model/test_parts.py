"""A user's own functions in place of parts of every layer."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import make_goldens
import numpy as np
import pytest
from conftest import jit_init, sharp

import llama_jax
from llama_jax import ComputeOptions, Parts, ops
from llama_jax.config import LayerConfig
from llama_jax.errors import ConfigError, MeshError
from llama_jax.model.awq import scale_channels
from llama_jax.model.cache import init_cache
from llama_jax.model.forward import forward
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.ring_prefill import prefill_over
from llama_jax.parallel.sharding import training_sharding

PLAIN = replace(make_goldens.KINDS["tied"], n_layers=3)
KINDS = {
    "plain": PLAIN,
    "Gemma": replace(PLAIN, norm="both", norm_offset=1.0, activation="gelu", qk_norm="head"),
    "OLMo": replace(PLAIN, norm="post", qk_norm="all", rotary_dim=4),
    "without RoPE": replace(PLAIN, layers=(LayerConfig(), LayerConfig(rope="none"), LayerConfig(window=4)), qk_norm="l2"),
}
TOKENS = np.arange(24).reshape(2, 12)
# The library's own arithmetic in functions of a user's signature.
USUAL = Parts(
    attend=lambda queries, view, mask, **options: ops.attend(queries, view, mask, **options),
    norm=lambda x, weight, eps: ops.rms_norm(x, weight, eps),
    rotary=lambda x, cos, sin: ops.apply_rotary(x, cos, sin),
)
OTHER = {
    "attend": lambda queries, view, mask, **options: ops.attend(queries, view, mask, **options) / 2,
    "norm": lambda x, weight, eps: x * weight.astype(x.dtype),
    "feed_forward": lambda x, gate, up, down: ops.project(jax.nn.relu(ops.project(x, gate)) * ops.project(x, up), down),
    "rotary": lambda x, cos, sin: x + ops.apply_rotary(x, cos, sin),
}


def read_in_parts(config, params, dtype=jnp.float32):
    """The hidden states through a cache: a prompt, then token by token."""
    read, found = jax.jit(partial(forward, config)), []
    cache = init_cache(config, len(TOKENS), 16, dtype)
    for part in (slice(0, 8), *(slice(i, i + 1) for i in range(8, 12))):
        hidden, cache = read(params, TOKENS[:, part], cache)
        found.append(hidden)
    return jnp.concatenate(found, axis=1)


@pytest.mark.parametrize(
    "kind",
    ["Gemma", *(pytest.param(kind, marks=(pytest.mark.slow, pytest.mark.rotating)) for kind in KINDS if kind != "Gemma")],
)
def test_every_part_is_called_in_training_and_decoding(kind):
    config = KINDS[kind]
    params = sharp(config, jax.random.key(0))
    feed_forward = lambda x, gate, up, down: ops.feed_forward(x, gate, up, down, config.activation)
    own = replace(config, parts=replace(USUAL, feed_forward=feed_forward))
    whole = {name: jax.jit(partial(forward, one))(params, TOKENS)[0] for name, one in (("own", own), ("usual", config))}
    np.testing.assert_allclose(whole["own"], whole["usual"], atol=1e-5)
    np.testing.assert_allclose(read_in_parts(own, params), whole["usual"], atol=2e-5)
    for part, function in OTHER.items():
        other = replace(config, parts=Parts(**{part: function}))
        hidden, _ = jax.jit(partial(forward, other))(params, TOKENS)
        assert np.abs(hidden - whole["usual"]).max() > 1e-3, part
    all_of_them = replace(config, parts=Parts(**OTHER))
    hidden, _ = jax.jit(partial(forward, all_of_them))(params, TOKENS)
    np.testing.assert_allclose(read_in_parts(all_of_them, params), hidden, atol=1e-5 * max(10, np.abs(hidden).max()))


def test_a_layer_without_rope_has_no_rotary_of_ones_own():
    config = replace(PLAIN, layers=(LayerConfig(rope="none"), LayerConfig(rope="none", window=4)))
    params = jit_init(config, jax.random.key(0))
    other = replace(config, parts=Parts(rotary=OTHER["rotary"]))
    found = [jax.jit(partial(forward, one))(params, TOKENS)[0] for one in (config, other)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("part", "function"),
    [
        ("norm", lambda x, weight, eps: x.astype("float16")),
        ("feed_forward", lambda x, gate, up, down: ops.project(x, gate)),
        ("rotary", lambda x, cos, sin: x[..., :2]),
    ],
)
def test_a_result_of_another_shape_is_refused(part, function):
    params = jit_init(PLAIN, jax.random.key(0))
    with pytest.raises(ConfigError, match=f"{part} gave .*; .* is needed, the shape and dtype of its first argument"):
        jax.eval_shape(partial(llama_jax.logits, replace(PLAIN, parts=Parts(**{part: function}))), params, TOKENS)


@pytest.mark.parametrize("part", OTHER)
def test_what_would_not_call_it_refuses_it(part):
    params = jit_init(PLAIN, jax.random.key(0))
    config = replace(PLAIN, parts=Parts(**{part: OTHER[part]}))
    with pytest.raises(ConfigError, match=f"exact=True is for the library's parts, and the model has Parts\\({part}="):
        llama_jax.logits(config, params, TOKENS, ComputeOptions(exact=True))
    with pytest.raises(ConfigError, match=f"this model has Parts\\({part}="):
        scale_channels(config, params, TOKENS, "int4")
    named = replace(PLAIN, parts=Parts(**{part: f"mine:{part}"}))
    with pytest.raises(ConfigError, match=f"parts of its own, {part}=mine:{part}, .* --parts FILE.py; .*with_parts"):
        llama_jax.generate(named, params, TOKENS, max_new_tokens=1)


def test_an_attention_excludes_the_librarys_and_a_feed_forward_experts():
    params = jit_init(PLAIN, jax.random.key(0))
    attend = replace(PLAIN, parts=Parts(attend=OTHER["attend"]))
    with pytest.raises(ConfigError, match="attention='dense' is for the library's attention, which Parts"):
        llama_jax.logits(attend, params, TOKENS, ComputeOptions(attention="dense"))
    with pytest.raises(ConfigError, match="a cache with sinks supports only the built-in paged attention"):
        forward(attend, params, TOKENS, init_cache(attend, 2, 16, window=4, sinks=1, max_tokens_per_pass=12))
    experts = replace(PLAIN, experts=2, experts_per_token=1, parts=Parts(feed_forward=OTHER["feed_forward"]))
    with pytest.raises(ConfigError, match="for models without experts, but this one has 2"):
        llama_jax.logits(experts, jit_init(experts, jax.random.key(0)), TOKENS)


def test_hooks_in_a_part_of_the_library_exclude_ones_own():
    params = jit_init(PLAIN, jax.random.key(0))
    for part, points in (("attend", ("scores", "pattern")), ("feed_forward", ("neurons",))):
        own = replace(PLAIN, parts=Parts(**{part: OTHER[part]}))
        for point in points:
            hooked = llama_jax.with_hooks(params, {point: lambda value, at: (value, None)})
            with pytest.raises(ConfigError, match=f"hooks at .*{point}.* need .*; leave out .*parts.{part}"):
                llama_jax.logits(own, hooked, TOKENS)


def test_over_a_ring_an_attention_is_refused_and_the_other_parts_are_called():
    mesh = make_mesh(MeshSizes(context=2))
    params = jit_init(PLAIN, jax.random.key(0))
    attend = replace(PLAIN, parts=Parts(attend=OTHER["attend"]))
    lengths = np.array([12, 9], np.int32)
    with pytest.raises(MeshError, match="ring attention only"):
        jax.eval_shape(prefill_over(attend, mesh, 16), params, TOKENS, lengths)
    fitted, sharding = training_sharding(attend, mesh)
    with pytest.raises(MeshError, match="ring attention only"):
        jax.eval_shape(partial(llama_jax.next_token_loss, fitted, sharding=sharding), params, llama_jax.Batch(TOKENS[:, :9]))
    own = replace(PLAIN, parts=Parts(**OTHER | {"attend": None}))
    _, state = jax.jit(prefill_over(own, mesh, 16))(params, TOKENS, lengths)
    hidden, _ = jax.jit(partial(forward, own))(params, TOKENS)
    np.testing.assert_allclose(state, hidden[np.arange(2), lengths - 1], rtol=1e-4, atol=1e-4)


def test_values_that_are_no_functions_are_refused():
    with pytest.raises(ConfigError, match="norm=1 must be a function or None"):
        Parts(norm=1)
    with pytest.raises(ConfigError, match="parts=None must be Parts"):
        replace(PLAIN, parts=None)
