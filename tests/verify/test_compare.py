"""Every way to spoil a model is seen, placed, and told from rounding."""

from dataclasses import replace

import make_goldens
import numpy as np
import pytest
from conftest import params_of

import llama_jax
from llama_jax import ops
from llama_jax.formats.huggingface import HF_NAMES
from llama_jax.verify import compare as module
from llama_jax.verify.activations import trace
from llama_jax.verify.compare import compare
from llama_jax.verify.rounding_error import Origin

CONFIG = make_goldens.KINDS["gqa"]
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 24, dtype=np.int32)


def origin(config=CONFIG, kinds=("F32",), dtype="float32"):
    return Origin("test", config, tuple(sorted(kinds)), dtype, {})


@pytest.fixture(scope="module")
def tensors():
    return make_goldens.random_tensors(CONFIG)


@pytest.fixture(scope="module")
def reference(tensors):
    return trace(params_of(CONFIG, tensors), TOKENS, origin())


@pytest.fixture(scope="module")
def against(reference):
    """Compare a model, made of tensors, with the unspoiled one."""

    def against(tensors, config=CONFIG, kinds=("F32",), dtype="float32"):
        params = params_of(config, tensors, dtype)
        return compare(params, trace(params, TOKENS, origin(config, kinds, dtype)), reference)

    return against


def rounded(array: np.ndarray, bits: int) -> np.ndarray:
    """Blocks of 32 with a scale each, as Q8_0 and Q4_0 have."""
    blocks = array.reshape(-1, 8 if array.size % 32 else 32)
    most = 2 ** (bits - 1) - 1
    scale = np.abs(blocks).max(axis=1, keepdims=True) / most
    return (np.round(blocks / scale) * scale).reshape(array.shape).astype(np.float32)


def quantized(tensors, bits):
    return {name: rounded(array, bits) if array.ndim == 2 else array for name, array in tensors.items()}


def spoiled(tensors, part, change, layer=1):
    name = HF_NAMES[part].format(layer)
    return tensors | {name: np.ascontiguousarray(change(tensors[name].copy()))}


def other_layout(tensors):
    """The rows of q and k as Meta's files have them."""
    found = dict(tensors)
    for i in range(CONFIG.n_layers):
        for part, heads in (("q", CONFIG.n_heads), ("k", CONFIG.n_kv_heads)):
            name = HF_NAMES[part].format(i)
            by_head = tensors[name].reshape(heads, CONFIG.head_dim, CONFIG.dim)
            found[name] = ops.rotary.interleaved_from_half(by_head).reshape(tensors[name].shape)
    return found


# -- the same ------------------------------------------------------------------------------------------------------------


def test_a_model_is_itself(against, tensors):
    found = against(tensors)
    assert found.same
    assert found.why.startswith("the same model: ")
    assert (found.rounding, found.max_abs, found.kl, found.kl_max, found.settings) == ("float32", 0, 0, 0, ())
    assert (found.agreeing, found.ties, found.positions) == (24, 0, 24)
    assert [part.name for part in found.parts] == ["embedding", "layer 0", "layer 1", "output"]
    assert all(part[1:] == (0, 0, 0, 0) for part in found.parts)


def test_what_has_no_effect_makes_no_other_model(against, tensors):
    assert against(tensors, replace(CONFIG, max_seq_len=CONFIG.max_seq_len * 2)).same
    assert against(tensors, replace(CONFIG, norm_eps=float(np.float32(CONFIG.norm_eps)))).same


def test_a_tied_model_and_one_that_stores_its_tensor_twice_are_the_same():
    tied = make_goldens.KINDS["tied"]
    tensors = make_goldens.random_tensors(tied)
    params = params_of(tied, tensors)
    untied = replace(tied, tie_embeddings=False)
    twice = params_of(untied, tensors | {HF_NAMES["lm_head"]: tensors[HF_NAMES["embedding"]].copy()})
    assert compare(twice, trace(twice, TOKENS, origin(untied)), trace(params, TOKENS, origin(tied))).same


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "BF16"), pytest.param("float16", "F16", marks=pytest.mark.slow)])
def test_sixteen_bits_are_the_same_within_their_rounding(against, tensors, dtype, kind):
    found = against(tensors, dtype=dtype)
    assert found.same
    assert found.why.startswith(f"the same model within the rounding of {kind}: mean KL divergence ")
    assert 0 < found.kl < 1e-3
    assert found.rounding == kind


@pytest.mark.parametrize(("bits", "kind"), [(8, "Q8_0"), (4, "Q4_0")])
def test_quantized_weights_are_the_same_within_their_rounding(against, tensors, bits, kind):
    found = against(quantized(tensors, bits), kinds=("F32", kind))
    assert found.same
    assert found.why.startswith(f"the same model within the rounding of {kind}: ")
    assert all(0.5 < part.roundings < module.MAX_ROUNDINGS / 1.5 for part in found.parts)
    # The same difference is another model where both are said to be stored alike.
    assert not against(quantized(tensors, bits)).same


# -- another -------------------------------------------------------------------------------------------------------------

FAULTS = {
    "rotary layout": (other_layout, "layer 0"),
    "one row of q": (lambda t: spoiled(t, "q", lambda a: np.concatenate([1.01 * a[:1], a[1:]])), "layer 1"),
    "down": (lambda t: spoiled(t, "down", lambda a: 1.0005 * a), "layer 1"),
    "gate and up": (
        lambda t: spoiled(spoiled(t, "gate", lambda a: t[HF_NAMES["up"].format(1)]), "up", lambda a: -a),
        "layer 1",
    ),
    "a norm": (lambda t: spoiled(t, "ffn_norm", lambda a: a + 1e-3, layer=0), "layer 0"),
    "out": (lambda t: spoiled(t, "out", np.transpose, layer=0), "layer 0"),
    "embedding": (lambda t: spoiled(t, "embedding", lambda a: a + 1e-3), "embedding"),
    "final norm": (lambda t: spoiled(t, "final_norm", lambda a: 1.001 * a), "output"),
    "lm_head": (lambda t: spoiled(t, "lm_head", np.flipud), "output"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_part_is_named(against, tensors, fault):
    spoil, where = FAULTS[fault]
    found = against(spoil(tensors))
    assert not found.same
    assert found.why.startswith(f"NOT the same model: {where} differs by ")
    departing = {part.name for part in found.parts if part.roundings > module.MAX_ROUNDINGS}
    assert departing == ({"layer 0", "layer 1"} if fault == "rotary layout" else {where})
    assert ("; 1 of the later parts too" in found.why) == (fault == "rotary layout")
    first = [part.name for part in found.parts].index(where)
    assert all(part.relative == 0 for part in found.parts[:first])
    assert all(part.relative > 0 for part in found.parts[first:])


@pytest.mark.parametrize("fault", ["rotary layout", "out", "gate and up", "lm_head"])
@pytest.mark.parametrize(
    "disguise",
    [dict(dtype="bfloat16"), dict(bits=8, kinds=("F32", "Q8_0")), dict(bits=4, kinds=("F32", "Q4_0"))],
    ids=["bfloat16", "Q8_0", "Q4_0"],
)
def test_rounding_hides_no_wrong_part(against, tensors, fault, disguise):
    spoil, where = FAULTS[fault]
    bits = disguise.get("bits")
    wrong = quantized(spoil(tensors), bits) if bits else spoil(tensors)
    found = against(wrong, **{name: value for name, value in disguise.items() if name != "bits"})
    assert not found.same
    assert f"{where} differs by " in found.why


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rope_theta=20_000.0), "rope_theta 20000.0 here, 10000.0 there; layer 0 differs"),
        (dict(norm_eps=1e-3), "norm_eps 0.001 here, 1e-05 there; layer 0 differs"),
        (dict(rope_scaling=llama_jax.RopeScaling("linear", 2.0)), "factor=2.0"),
    ],
)
def test_another_setting_is_named(against, tensors, change, message):
    found = against(tensors, replace(CONFIG, **change))
    assert not found.same
    assert message in found.why
    assert [name for name, *_ in found.settings] == list(change)


def test_a_setting_without_effect_on_these_tokens_is_another_model_all_the_same(against, tensors):
    found = against(tensors, replace(CONFIG, norm_eps=1.00001e-5))
    assert not found.same
    assert "departs" not in found.why


def test_numbers_that_are_not_finite_are_placed(against, tensors):
    """70,000 is no float16; here it comes of a product of numbers that are."""
    large = spoiled(spoiled(tensors, "up", lambda a: 3000 * a), "down", lambda a: 3000 * a)
    found = against(large, dtype="float16")
    assert not found.same
    assert "the outputs of layer 1 are not finite" in found.why
    assert "its logits are not finite" in found.why


def test_logits_count_even_where_every_part_agrees(models, reference):
    """As they would with a fault in what lies between the parts."""
    params = models["gqa"][1]
    other = replace(reference, logits=reference.logits + np.float32(0.002))
    found = compare(params, other, reference)
    assert found.why == "NOT the same model: the logits differ by more than 0.001"
    assert compare(params, replace(other, logits=reference.logits + np.float32(0.0005)), reference).same


def test_divergence_counts_even_where_every_part_agrees(against, tensors):
    found = against(quantized(tensors, 2), kinds=("F32", "Q2_K"))
    assert found.why.startswith("NOT the same model: mean KL divergence 1.2 nats, of which Q2_K explains 1")
