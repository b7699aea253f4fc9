"""The context of a model with a rope scaling: that of vLLM, in every format, and what is planned for by default."""

import json
from dataclasses import replace

import jax
import make_goldens
import pytest
from conftest import write_hf_folder
from hypothesis import given
from hypothesis import strategies as st

import llama_jax
from llama_jax import RopeScaling
from llama_jax.cli.estimate import read_model_config as estimated_config
from llama_jax.cli.options import with_rope
from llama_jax.errors import GenerationError
from llama_jax.formats import convert, open_checkpoint
from llama_jax.formats.gguf import config_from_fields, read_file
from llama_jax.formats.huggingface import config_from_dict, config_to_dict
from llama_jax.serving.options import EngineOptions

PLAIN = replace(make_goldens.KINDS["gqa"], head_dim=16, max_seq_len=64)
SIZES = config_to_dict(PLAIN) | {"rope_parameters": None}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}


def settings(model_type, context, new=None, **more):
    """A published config.json, with a rope scaling in the spelling of old or new transformers."""
    rope = more.pop("rope", None)
    found = SIZES | {"model_type": model_type, "max_position_embeddings": context, **more}
    if rope is not None and new is None:
        found["rope_scaling"] = rope
    elif rope is not None:
        found["rope_parameters"] = {"rope_theta": 1e4} | rope
    return found


def yarn(original, factor=4.0, **more):
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | more


# As published: (settings, context, context without an extension).
PUBLISHED = {
    "Qwen 2.5 with YaRN": (settings("qwen2", 32, rope=yarn(32)), 128, 32),
    "by its old name": (settings("qwen2", 32, rope={"type": "yarn", "factor": 4.0}), 128, 32),
    "Qwen 3, beyond the original": (settings("qwen3", 40, rope=yarn(32)), 128, 40),
    "a factor that is not exact": (settings("llama", 49 * 5, rope=yarn(7 * 7, None)), 49 * 5, 49 * 5),
    "DeepSeek's YaRN": (settings("llama", 640, rope=yarn(16, 40, mscale=1.0, mscale_all_dim=1.0)), 640, 640),
    "Vicuna 16k": (settings("llama", 16, rope={"type": "linear", "factor": 4.0}), 64, 16),
    "dynamic": (settings("llama", 16, rope={"type": "dynamic", "factor": 2.0}), 32, 16),
    "Llama 3.1": (settings("llama", 128, rope=LLAMA3), 128, 128),
    "Phi 3": (settings("phi3", 128, original_max_position_embeddings=16, rope={"type": "longrope", **LONG}), 128, 128),
    "Gemma 3": (
        settings("gemma3_text", 128, query_pre_attn_scalar=16, rope={"rope_type": "linear", "factor": 8.0}),
        128,
        128,
    ),
    "Gemma 3 by layers": (
        settings("gemma3_text", 128, query_pre_attn_scalar=16)
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        128,
        128,
    ),
    "OLMo 3": (settings("olmo3", 128, rope=yarn(16, 8.0)), 128, 128),
    "Ministral 3": (
        settings("ministral3", 256, new=True, rope=yarn(16, 16.0, llama_4_scaling_beta=0.1)),
        256,
        256,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_context_of_a_published_folder_is_that_of_vllm(name):
    found, context, unscaled = PUBLISHED[name]
    config = config_from_dict(found)
    assert (config.max_seq_len, config.default_context) == (context, unscaled)
    again = json.loads(json.dumps(config_to_dict(config)))
    assert config_from_dict(again) == config
    assert again["max_position_embeddings"] == unscaled
    assert "llama_jax" not in again, "others infer the same"
    assert config_to_dict(config_from_dict(again)) == again


@st.composite
def scaled_configs(draw):
    """Configurations with any scaling, from a file or made by hand: also with a context that is not the usual one."""
    kind = draw(st.sampled_from(["linear", "dynamic", "yarn", "llama3", "longrope"]))
    original = draw(st.sampled_from([16, 49, 4096]))
    known = {} if kind == "linear" else {"original_max_seq_len": original}
    known |= LONG if kind == "longrope" else {}
    factor = draw(st.one_of(st.sampled_from([1.0, 4.0]), st.floats(1.0, 64.0)))
    context = draw(st.one_of(st.just(int(original * factor)), st.integers(1, 2**20)))
    unscaled = draw(st.one_of(st.none(), st.just(original), st.integers(1, 2**20)))
    scaling = RopeScaling(kind, factor, **known)
    return replace(PLAIN, max_seq_len=max(context, 1), rope_scaling=scaling, unscaled_max_seq_len=unscaled)


@given(scaled_configs(), st.booleans())
def test_loading_what_was_saved_is_the_identity(config, scaled_context):
    """In config.json as others read it, and as in checkpoints of runs; nothing is multiplied twice."""
    written = json.loads(json.dumps(config_to_dict(config, scaled_context=scaled_context)))
    found = config_from_dict(written, scaled_context=scaled_context)
    assert found == config
    assert json.loads(json.dumps(config_to_dict(found, scaled_context=scaled_context))) == written


@pytest.mark.parametrize("format", ["safetensors", "gguf", "orbax"])
@pytest.mark.parametrize("name", ["Qwen 2.5 with YaRN", "Qwen 3, beyond the original", "Vicuna 16k", "Gemma 3", "OLMo 3"])
def test_every_format_keeps_it(name, format, tmp_path):
    found, context, _ = PUBLISHED[name]
    config = config_from_dict(found)
    source = tmp_path / "source"
    llama_jax.save(source, config, llama_jax.init(config, jax.random.key(0)))
    (source / "config.json").write_text(json.dumps(found))
    path = tmp_path / ("model.gguf" if format == "gguf" else "model")
    convert(source, path, format=format)
    assert open_checkpoint(path).config == config
    assert config.max_seq_len == context
    assert estimated_config(str(path)).max_seq_len == context
    if format == "gguf":
        fields, tensors = read_file(path)
        theirs = {key: value for key, value in fields.items() if not key.startswith("llama_jax")}
        architecture = fields["general.architecture"]
        assert theirs[f"{architecture}.context_length"] == config.default_context
        assert config_from_fields(theirs, tensors).max_seq_len == context


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"type": "yarn", "factor": 4.0, "original_context_length": 64}, 256),
        ({"type": "yarn", "factor": 4.0}, 256),
        ({"type": "yarn", "factor": 4.0, "original_context_length": 16}, 64),
        ({"type": "linear", "factor": 4.0}, 256),
        ({"factor": 4.0}, 256),
        ({"type": "none", "factor": 4.0}, 64),
    ],
)
def test_a_gguf_of_llama_cpps_converter(rope, context, tmp_path):
    """Which states the context as config.json does."""
    llama_jax.save(tmp_path / "model.gguf", PLAIN, llama_jax.init(PLAIN, jax.random.key(0)))
    fields, tensors = read_file(tmp_path / "model.gguf")
    scaled = fields | {f"llama.rope.scaling.{key}": value for key, value in rope.items()}
    assert config_from_fields(scaled, tensors).max_seq_len == context


class TestWhatIsPlannedFor:
    LONG = config_from_dict(settings("qwen2", 32_768, rope=yarn(32_768)))
    SHORT = config_from_dict(settings("qwen2", 32_768))

    @pytest.mark.parametrize("context", [16, 512, 4096, 32_768, 262_144])
    @pytest.mark.parametrize("rows", [1, 16])
    @pytest.mark.parametrize("rope", [{"type": "linear", "factor": 4.0}, {"type": "yarn", "factor": 4.0}])
    def test_a_servers_pool_does_not_grow_unasked(self, context, rows, rope):
        short, long = (config_from_dict(settings("llama", context, rope=one)) for one in (None, rope))
        options = EngineOptions(rows=rows)
        assert options.pages(long) == options.pages(short)
        assert context <= options.context_of(long) <= max(16 * options.pages(long), context)
        planned = next(options.smaller(long))
        assert planned.pages(long) == options.pages(long), "nor when the memory is planned"

    def test_a_servers_context_grows_when_asked(self):
        options = EngineOptions(context=131_072)
        assert options.context_of(self.LONG) == 16 * options.pages(self.LONG) == 131_072
        assert EngineOptions(cache_tokens=65_536).context_of(self.LONG) == 65_536
        with pytest.raises(GenerationError, match=r"at most the model's context of 131072; .*--rope yarn:5"):
            EngineOptions(context=131_073).context_of(self.LONG)

    def test_another_scaling_replaces_it(self):
        vicuna = config_from_dict(settings("llama", 16, rope={"type": "linear", "factor": 4.0}))
        plain = config_from_dict(settings("llama", 16))
        for text in ("none", "linear:4", "yarn:2", "dynamic:8"):
            assert with_rope(vicuna, text) == with_rope(plain, text)
        assert with_rope(vicuna, "linear:4").default_context == 64, "asked for"
        assert with_rope(config_from_dict(PUBLISHED["Qwen 3, beyond the original"][0]), "none").max_seq_len == 40
        for change in ({"max_seq_len": 16}, {"rope_scaling": None}):
            assert replace(vicuna, **change).unscaled_max_seq_len is None


def test_a_long_prompt_is_continued_and_a_longer_one_told_how(tmp_path):
    folder = write_hf_folder(tmp_path / "model", PLAIN, max_position_embeddings=16, rope_parameters=None)
    settings_file = folder / "config.json"
    written = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps(written | {"rope_scaling": {"type": "linear", "factor": 4.0}}))
    config, params, _ = llama_jax.load(folder)
    (found,) = llama_jax.generate(config, params, [[5] * 40], max_new_tokens=24)
    assert len(found.tokens) == 24
    with pytest.raises(GenerationError, match=r"--rope yarn:5, .* max_seq_len=80 and rope_scaling=RopeScaling\('yarn', 5, "):
        llama_jax.generate(config, params, [[5] * 41], max_new_tokens=24)
    longer = replace(config, max_seq_len=80, rope_scaling=RopeScaling("yarn", 5, original_max_seq_len=16))
    assert with_rope(config, "yarn:5") == replace(longer, unscaled_max_seq_len=None)
    (found,) = llama_jax.generate(longer, params, [[5] * 41], max_new_tokens=24)
    assert len(found.tokens) == 24
    with pytest.raises(GenerationError, match="exceed the model's context of 64; ") as refused:
        llama_jax.generate(config, params, [[5] * 41], max_new_tokens=10_000)
    assert "--rope" not in str(refused.value), "no scaling helps"
