"""A rope scaling goes into every format and comes back, or the format says that it has no place for it."""

import json
import math
from array import array
from dataclasses import replace

import jax
import make_goldens
import numpy as np
import pytest
from conftest import params_of, write_hf_folder

import llama_jax
from llama_jax import RopeScaling, rotary_frequencies
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.formats import open_checkpoint, save
from llama_jax.formats.gguf import config_from_fields, read_file
from llama_jax.formats.huggingface import config_from_dict, config_to_dict
from llama_jax.formats.rope_conversion import LLAMA3_KEYS, settings_and_tensors

CONFIG = replace(make_goldens.KINDS["gqa"], head_dim=16, max_seq_len=256)
FACTORS = {"short_factor": [1.1] * 8, "long_factor": [1.5 + i for i in range(8)]}
SCALINGS = {
    "linear": RopeScaling("linear", 4.0),
    "dynamic": RopeScaling("dynamic", 4.0, original_max_seq_len=64),
    "yarn": RopeScaling("yarn", 4.0, original_max_seq_len=64),
    "yarn-beta": RopeScaling("yarn", 4.0, original_max_seq_len=64, beta_slow=2.0, truncate=False),
    "yarn-beta-fast": RopeScaling("yarn", 4.0, original_max_seq_len=64, beta_fast=8.0),
    "yarn-factor": RopeScaling("yarn", 4.0, original_max_seq_len=64, attention_factor=1.3),
    "yarn-mscale": RopeScaling("yarn", 4.0, original_max_seq_len=64, mscale=0.7, mscale_all_dim=1.0),
    "llama3": RopeScaling("llama3", 4.0, low_freq_factor=0.5, high_freq_factor=2.0, original_max_seq_len=64),
    "longrope": RopeScaling("longrope", 4.0, original_max_seq_len=64, **FACTORS),
    "longrope-factor": RopeScaling("longrope", 3.0, original_max_seq_len=64, attention_factor=1.3, **FACTORS),
}
NOT_IN_GGUF = {"dynamic": "kind='dynamic'", "yarn-beta": "beta_slow=2.0", "yarn-beta-fast": "beta_fast=8.0"}
CONFIGS = {name: replace(CONFIG, rope_scaling=scaling) for name, scaling in SCALINGS.items()}


@pytest.fixture(scope="module")
def params():
    return params_of(CONFIG, make_goldens.random_tensors(CONFIG))


@pytest.mark.parametrize("name", SCALINGS)
def test_config_json_says_it_in_transformers_words(name):
    config = CONFIGS[name]
    written = json.loads(json.dumps(config_to_dict(config)))
    assert config_from_dict(written) == config
    extends = config.rope_scaling.kind in ("linear", "dynamic")  # the file states the context without the factor
    assert written["max_position_embeddings"] == (64 if extends else 256)
    note = written.pop("llama_jax", None)
    assert note == ({"max_seq_len": 256, "unscaled_max_seq_len": None} if extends else None)
    theirs = config_from_dict(written)
    assert (theirs.max_seq_len, theirs.rope_scaling) == (config.max_seq_len, config.rope_scaling)


def same_rotation(a, b):
    """Whether two configurations have the same rotations at short and long lengths, up to rounding to float32."""
    for length in (1, 1 << 30):
        (ours, our_factor), (theirs, their_factor) = (rotary_frequencies(config, length) for config in (a, b))
        if not np.allclose(ours, theirs, rtol=1e-5, atol=0) or not np.isclose(our_factor, their_factor, rtol=1e-5):
            return False
    return True


def test_a_note_that_contradicts_the_stated_context_is_refused(tmp_path):
    written = config_to_dict(replace(CONFIGS["linear"], max_seq_len=128)) | {"max_position_embeddings": 64}
    folder = write_hf_folder(tmp_path / "model", CONFIG, **written)
    with pytest.raises(CheckpointError, match=r"config.json: llama_jax=.* contradicts the stated context of 64; remove it"):
        llama_jax.load(folder)


def test_what_transformers_takes_where_config_json_is_silent():
    def read(**scaling):
        return config_from_dict(config_to_dict(CONFIG) | {"rope_parameters": None, "rope_scaling": scaling}).rope_scaling

    assert read(type="yarn", factor=2.0) == RopeScaling("yarn", 2.0, original_max_seq_len=256)
    yarn = {"type": "yarn", "original_max_position_embeddings": 64, "finetuned": True, "mscale": None}
    assert read(**yarn) == RopeScaling("yarn", 4.0, original_max_seq_len=64)
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    assert read(**longrope, **FACTORS) == SCALINGS["longrope"]
    assert read(rope_type="dynamic", factor=2.0) == RopeScaling("dynamic", 2.0, original_max_seq_len=256)
    with pytest.raises(ConfigError, match=r"max_seq_len=2560+\.* must be at least 1 and at most"):
        read(rope_type="dynamic", factor=1e20)
    outside = config_to_dict(CONFIG) | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}
    assert config_from_dict(outside | {"original_max_position_embeddings": 64}) == CONFIGS["yarn"]
    # One of the two alone, or a nought, transformers does not read.
    assert read(rope_type="yarn", factor=2.0, mscale=1.0) == read(rope_type="yarn", factor=2.0)
    assert read(rope_type="yarn", factor=2.0, mscale=0.0, mscale_all_dim=1.0) == read(rope_type="yarn", factor=2.0)
    for scaling, message in (
        ({"rope_type": "longrope"}, "'longrope' has no short_factor"),
        ({"rope_type": "dynamic"}, "'dynamic' has no factor"),
        (
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
            "with original_max_position_embeddings=64",
        ),
        ({"rope_type": "yarn", "original_max_position_embeddings": "x"}, "original_max_position_embeddings='x' must be"),
        ({"rope_type": "ntk", "factor": 2.0}, "'ntk' is not supported; use 'default', 'linear', 'dynamic', 'yarn', "),
    ):
        with pytest.raises(ConfigError, match=message):
            read(**scaling)


@pytest.mark.parametrize("name", [name for name in SCALINGS if name not in NOT_IN_GGUF])
def test_gguf_says_it_in_llama_cpps_words(name, params, tmp_path):
    config, path = CONFIGS[name], tmp_path / "model.gguf"
    save(path, config, params, format="gguf")
    back = open_checkpoint(path).config
    assert same_rotation(back, config)
    assert (back.max_seq_len, back.unscaled_max_seq_len) == (config.max_seq_len, config.unscaled_max_seq_len)
    if name not in ("yarn-mscale", "longrope-factor"):  # of which a GGUF holds the attention factor
        assert back == config
    fields, tensors = read_file(path)
    frequencies, sharpened = llama_cpps_rotation(fields, tensors, config, 1)
    want, factor = rotary_frequencies(config, 1)
    np.testing.assert_allclose(frequencies, want, rtol=1e-6)
    assert sharpened == pytest.approx(factor, rel=1e-6)
    if config.rope_scaling.kind == "longrope":
        long, _ = llama_cpps_rotation(fields, tensors, config, 256)
        np.testing.assert_allclose(long, rotary_frequencies(config, 256)[0], rtol=1e-6)
    fields = {key: value for key, value in fields.items() if not key.endswith("max_seq_len") or key in LLAMA3_KEYS}
    theirs = config_from_fields(fields, tensors)  # as another program would have written it
    assert same_rotation(theirs, config)
    assert theirs.rope_scaling is None or theirs.rope_scaling.kind in ("linear", "yarn", "llama3", "longrope")


def llama_cpps_rotation(fields, tensors, config, context):
    """Radians per position and the factor of cosine and sine, as llama-context.cpp and ggml's rope_yarn compute them."""

    def get(key, default):
        return fields.get(f"llama.rope.{key}", default)

    half, base = config.head_dim // 2, get("freq_base", 10_000.0)
    kind, factor = get("scaling.type", "linear"), get("scaling.factor", 0.0)
    freq_scale = 1.0 if kind == "none" or factor == 0 else 1 / factor
    original = get("scaling.original_context_length", config.max_seq_len)
    attn_factor = get("scaling.attn_factor", 1.0)
    name = "rope_freqs.weight"
    if kind == "longrope":
        name = f"rope_factors_{'long' if context > original else 'short'}.weight"
    divided = tensors[name].read(0, half) if name in tensors else np.ones(half)
    extrapolated = base ** (-2 * np.arange(half) / config.head_dim) / divided
    if kind != "yarn":
        return freq_scale * extrapolated, attn_factor
    low, high = (config.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32, 1))
    low, high = max(0, math.floor(low)), min(config.head_dim - 1, math.ceil(high))
    ramp = 1 - np.clip((np.arange(half) - low) / max(0.001, high - low), 0, 1)
    mixed = freq_scale * extrapolated * (1 - ramp) + extrapolated * ramp
    return mixed, attn_factor * (1 + 0.1 * math.log(1 / freq_scale))


@pytest.mark.parametrize("name", NOT_IN_GGUF)
def test_gguf_has_no_place_for_some(name, params, tmp_path):
    with pytest.raises(CheckpointError, match=f"{NOT_IN_GGUF[name]} cannot be stored in GGUF"):
        save(tmp_path / "model.gguf", CONFIGS[name], params, format="gguf")
    assert not any(tmp_path.iterdir())


def gguf_like():
    """The settings of a GGUF without rope, its tensors with those of a longrope, and the settings of that."""
    settings, factors = settings_and_tensors(CONFIGS["longrope"], "llama")
    fields = {
        "general.architecture": "llama",
        "llama.context_length": CONFIG.max_seq_len,
        "llama.embedding_length": CONFIG.dim,
        "llama.block_count": CONFIG.n_layers,
        "llama.feed_forward_length": CONFIG.hidden_dim,
        "llama.attention.head_count": CONFIG.n_heads,
        "llama.attention.head_count_kv": CONFIG.n_kv_heads,
        "llama.attention.key_length": CONFIG.head_dim,
        "llama.attention.layer_norm_rms_epsilon": CONFIG.norm_eps,
    }
    table = np.zeros((CONFIG.vocab_size, CONFIG.dim))
    return fields, {name: _Array(array) for name, array in (factors | {"token_embd.weight": table}).items()}, settings


class _Array:
    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def read(self, start, stop):
        return self.array[start:stop]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.rope.scaling.type": "su"}, "type='su' is not supported; use none, linear, yarn or longrope"),
        (
            {"llama.rope.scaling.type": "yarn"},
            "llama.rope.scaling.type='yarn' is not supported with these tensors of factors: rope_factors_long.weight",
        ),
        ({"llama.rope.scaling.factor": 4.0}, "factor=4.0 is not supported with tensors of factors"),
        ({"llama.rope.scaling.yarn_beta_fast": 16.0}, "yarn_beta_fast=16.0 is not supported; llama.cpp uses 32.0"),
        ({"llama_jax.max_seq_len": 512}, "llama_jax=.* contradicts the stated context of 256"),
    ],
)
def test_gguf_settings_that_cannot_be(changes, message):
    fields, tensors, settings = gguf_like()
    with pytest.raises(ConfigError, match=message):
        config_from_fields(fields | settings | changes, tensors)


def test_gguf_of_others():
    """What stands in files that this library did not write, and what llama.cpp takes where they are silent."""
    fields, tensors, _ = gguf_like()
    plain = {"token_embd.weight": tensors["token_embd.weight"]}

    def read(tensors=plain, **scaling):
        return config_from_fields(fields | {f"llama.rope.scaling.{k}": v for k, v in scaling.items()}, tensors).rope_scaling

    assert read() is None
    assert read(factor=2.0) == RopeScaling("linear", 2.0)  # linear where there is no type
    assert read(type="none", factor=2.0) is None
    assert read(type="yarn", factor=2.0) == RopeScaling("yarn", 2.0, original_max_seq_len=256)
    sharper = float(np.float32(1 / (1 + 0.1 * math.log(4))))
    by_parts = RopeScaling("yarn", 4.0, original_max_seq_len=64, attention_factor=1.0)
    assert read(type="yarn", factor=4.0, original_context_length=64, attn_factor=sharper) == by_parts
    longrope = read(tensors, type="longrope", original_context_length=64)
    assert longrope == replace(SCALINGS["longrope"], attention_factor=1.0)
    with pytest.raises(ConfigError, match=r"scaling.factor=None must be a number"):
        read(type="yarn")
    with pytest.raises(ConfigError, match=r"attn_factor=1.5 is not supported with type 'linear'"):
        read(type="linear", factor=2.0, attn_factor=1.5)


def test_a_longrope_as_llama_cpps_converter_writes_it(tmp_path):
    """Without a type: the two tensors say it. Phi-3-128k, Phi-3.5 and Phi-4-mini are such files."""
    scaling = RopeScaling("longrope", 4.0, original_max_seq_len=64, short_factor=[1.1] * 6, long_factor=[2.0] * 6)
    config = replace(CONFIG, head_dim=16, rotary_dim=12, rope_scaling=scaling)
    assert config.model_type == "phi3"
    save(tmp_path / "model.gguf", config, llama_jax.init(config, jax.random.key(0)))
    fields, tensors = read_file(tmp_path / "model.gguf")
    theirs = {key: value for key, value in fields.items() if key != "phi3.rope.scaling.type" and "llama_jax" not in key}
    scaled = [key for key in theirs if "rope.scaling" in key]
    assert sorted(scaled) == ["phi3.rope.scaling.attn_factor", "phi3.rope.scaling.original_context_length"]
    assert config_from_fields(theirs, tensors) == config
    for changes, without, message in (
        ({"phi3.rope.scaling.type": "none"}, None, "phi3.rope.scaling.attn_factor=.* with type 'none'"),
        ({}, "rope_factors_long.weight", "phi3.rope.scaling.attn_factor=.* with type 'none'"),
        ({"phi3.rope.scaling.factor": 4.0}, None, "phi3.rope.scaling.factor=4.0 is not supported"),
        ({"phi3.rope.scaling.factor": 1e39}, None, r"phi3.rope.scaling.factor=1e\+39 is not supported"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"), np.errstate(all="raise"):
            config_from_fields(theirs | changes, {name: tensor for name, tensor in tensors.items() if name != without})


@pytest.mark.parametrize("name", ["attention.head_count", "attention.head_count_kv", "feed_forward_length"])
def test_a_setting_of_each_layer_is_read_where_all_are_alike(name):
    fields, tensors, _ = gguf_like()
    plain, key = {"token_embd.weight": tensors["token_embd.weight"]}, f"llama.{name}"
    n, value = fields["llama.block_count"], fields[key]
    assert config_from_fields(fields | {key: array("i", [value] * n)}, plain) == config_from_fields(fields, plain)
    for wrong in ([value] * (n - 1) + [2 * value], [value] * (n + 1), []):
        with pytest.raises(ConfigError, match=f"^{key}=.* must be one number, or {n} equal ones"):
            config_from_fields(fields | {key: array("i", wrong)}, plain)
