"""Runs that train adapters beside a model that stays as it is."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import jit_init, jit_logits
from hypothesis import given
from hypothesis import strategies as st
from mortal_run import recipe
from running import StopAt, caches, lines, same, text_fixture  # noqa: F401  # two fixtures

import llama_jax
from llama_jax.errors import CheckpointError, TrainingError
from llama_jax.formats import load_adapter, open_checkpoint
from llama_jax.formats.step_dirs import CHECKPOINTS
from llama_jax.model.lora import Lora, adapter_count, apply_adapters, merge
from llama_jax.model.trees import kinds_in_memory, layers_of, quantize, stack_layers
from llama_jax.ops.weights.format_spec import INT4, unpack_int4
from llama_jax.ops.weights.quantized_matmul import quantize_matrix
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.loop import train
from llama_jax.runs.overrides import override
from llama_jax.runs.pretrained import describe_weights, digest, load_frozen

FULL = replace(recipe(), steps=4, evaluate_every=4, save_every=4, log_every=4, ema_decay=0.0)
RECIPE = replace(
    recipe(),
    steps=8,
    evaluate_every=4,
    save_every=4,
    log_every=4,
    lora=Lora(rank=2, alpha=16.0),
    vocabulary="given",
    ema_decay=0.5,
)


@pytest.fixture(scope="module")
def base(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    train(FULL, folder, [text], log=StopAt())
    return folder


@pytest.fixture(scope="module")
def whole(text, base, tmp_path_factory):
    """A run without interruption: (folder, result, what was said)."""
    folder, log = tmp_path_factory.mktemp("whole"), StopAt()
    with_prompts = replace(RECIPE, prompts=("the ",), sample_tokens=4)
    return folder, train(with_prompts, folder, [text], weights=base, log=log), log.said


@pytest.mark.slow
def test_adapters_learn_and_the_base_stays(whole, base):
    folder, result, said = whole
    losses = [line["loss"] for line in lines(folder, "validation")]
    before = lines(base, "validation")[-1]["loss"]
    assert losses[-1] < losses[0] < before
    assert lines(folder, "sample")[-1]["text"].startswith("the ")
    learned = adapter_count(RECIPE.model, RECIPE.lora)
    assert f"parameters that stay as they are, {learned:,} of adapters of rank 2" in said
    assert sum(leaf.size for leaf in jax.tree.leaves(result.state.params)) == learned


@pytest.mark.slow
def test_checkpoints_hold_the_adapters_alone(whole, base, caplog):
    folder, result, _ = whole
    config, params, _ = llama_jax.load(base)
    found = load_adapter(folder, config)
    assert not caplog.records
    load_adapter(folder, replace(config, rope_theta=5e5))
    assert "rope_theta=10000.0, this one has 500000.0" in caplog.text
    assert (found.lora, found.base) == (RECIPE.lora, str(base))
    same(found.params, result.state.ema)
    same(llama_jax.load(base, adapter=folder).params, apply_adapters(params, found.params, found.lora))
    with pytest.raises(CheckpointError, match="holds an adapter, not a model; pass its base as the model"):
        llama_jax.load(folder)
    with pytest.raises(CheckpointError, match="holds a whole model, not an adapter"):
        load_adapter(base, config)
    with pytest.raises(CheckpointError, match=r"array 'blocks.attention.out.a' has shape .* is this the adapter's base"):
        load_adapter(folder, replace(config, n_layers=3))


@pytest.mark.slow
def test_adapters_are_converted_without_their_base(whole, base, tmp_path):
    """The run itself says what its base is like."""
    folder, _, _ = whole
    config = llama_jax.load(base).config
    away = base.rename(tmp_path / "away")
    try:
        llama_jax.convert(folder, tmp_path / "adapter")
    finally:
        away.rename(base)
    found, wanted = load_adapter(tmp_path / "adapter", config), load_adapter(folder, config)
    assert (found.lora, found.base) == (wanted.lora, str(base))
    same(found.params, wanted.params)
    with pytest.raises(
        CheckpointError, match=r"holds an adapter, not a model; pass its base as the model and this as --adapter"
    ):
        llama_jax.load(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="is inside the model being read"):
        llama_jax.convert(folder, folder / "adapter")


@pytest.mark.slow
def test_another_base_is_refused(whole, base, text, tmp_path):
    folder, log = whole[0], StopAt()
    config, params, tokenizer = llama_jax.load(base)
    moved = params.replace(final_norm=params.final_norm.at[3].add(1e-6))
    llama_jax.save(tmp_path / "other", config, moved, tokenizer)
    with pytest.raises(TrainingError, match=r"other is not the base model that this run began with, .* its weights"):
        train(RECIPE, folder, [text], weights=tmp_path / "other", resume=True, log=log)
    with pytest.raises(TrainingError, match=r"lora trains adapters on a frozen model; pass the model with"):
        train(RECIPE, folder, [text], resume=True, log=log)
    llama_jax.save(tmp_path / "same", config, params, tokenizer)  # elsewhere, in another format: the same numbers
    again = train(RECIPE, folder, [text], weights=tmp_path / "same", resume=True, log=log)
    same(again.state, whole[1].state)
    other = replace(RECIPE, lora=Lora(rank=3, alpha=16.0))
    with pytest.raises(TrainingError, match=r"lora.rank: 2 in the folder, 3 now"):
        train(other, folder, [text], weights=base, resume=True, log=log)


@pytest.mark.slow
def test_the_base_may_be_quantized(base, text, tmp_path):
    short = replace(RECIPE, steps=3, quantize="int8", ema_decay=0.0)
    log = StopAt()
    result = train(short, tmp_path, [text], weights=base, log=log)
    assert np.isfinite(result.validation.loss)
    assert "parameters in int8 that stay as they are" in log.said


@pytest.mark.slow
@pytest.mark.rotating
def test_a_quantized_base_is_kept_where_layers_differ_too(tmp_path):
    config = recipe().model
    params = quantize(jit_init(config, jax.random.key(0)), "q8_0")
    first, *rest = layers_of(params)
    wide = first.feed_forward.replace(up=quantize_matrix(first.feed_forward.up.to_dense(), "q4_0"))
    params = params.replace(blocks=stack_layers([first.replace(feed_forward=wide), *rest]))
    llama_jax.save(tmp_path / "a.gguf", config, params)
    found, _ = load_frozen(tmp_path / "a.gguf", config, MeshSizes(), "float32", "none")
    assert found.embedding.quant_format == found.blocks.feed_forward.down.quant_format == "q8_0"
    assert [block.feed_forward.up.quant_format for block in layers_of(found)] == ["q4_0", *["q8_0"] * len(rest)]
    same(found, params)
    floats, _ = load_frozen(tmp_path / "a.gguf", config, MeshSizes(), "float32", None)
    assert kinds_in_memory(floats) == "float32"
    tensors = open_checkpoint(tmp_path / "a.gguf").tensors
    assert describe_weights(RECIPE, tensors) == ["weights: q8_0 and q4_0, kept as they are under the adapters"]
    assert describe_weights(FULL, tensors) == ["weights: q8_0 and q4_0, dequantized to float32 for training"]


def test_on_the_command_line():
    changed = override(FULL, ["lora.rank=8", 'lora.targets=["q_proj", "v_proj"]', "lora.rslora=true"])
    assert changed.lora == Lora(rank=8, targets=("q_proj", "v_proj"), rslora=True)
    assert override(changed, ["lora.alpha=4"]).lora.alpha == 4
    assert override(changed, ["lora=none"]).lora is None


def test_a_digest_sees_every_bit_and_no_device():
    config = RECIPE.model
    params = jit_init(config, jax.random.key(0))
    found = digest(params)
    assert digest(jit_init(config, jax.random.key(0))) == found
    table = params.embedding
    for other in (
        table.at[5, 7].add(1e-9),
        table.at[jax.numpy.array([2, 3])].set(table[jax.numpy.array([3, 2])]),
        table.astype(jax.numpy.bfloat16),
    ):
        assert digest(params.replace(embedding=other)) != found
    assert digest(quantize(params, "int8")) != found
    packed = quantize_matrix(jax.random.normal(jax.random.key(1), (4, 128)), "int4")
    values, scales = packed.planes
    there = packed.replace(planes=(jax.numpy.asarray(unpack_int4(np.asarray(values)), INT4), scales))
    assert digest({"gate": there}) == digest({"gate": packed})


def _signs_flipped(x, where):
    return x * np.where(where, -1, 1).astype(x.dtype)


CHANGES = {
    "negated": lambda x: -x,
    "doubled": lambda x: 2 * x,
    "layers swapped": lambda x: x[::-1],
    "rows swapped": lambda x: x[:, [1, 0, *range(2, 8)]],
    "columns permuted": lambda x: x[..., [3, 0, 1, 2, 7, 6, 5, 4]],
    "transposed": lambda x: x.swapaxes(1, 2),
    "two rows negated": lambda x: _signs_flipped(x, np.arange(8)[:, None] < 2),
    "two numbers negated": lambda x: _signs_flipped(x, np.arange(x.size).reshape(x.shape) % (x.size - 1) == 0),
}


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from(sorted(CHANGES)),
)
def test_a_digest_sees_structured_changes(seed, held, dtype, change):
    """Of numbers of 16 bits held in 32, too, whose low bits are zero."""
    matrix = np.random.default_rng(seed).normal(size=(2, 8, 8)).astype(held).astype(dtype)
    assert digest({"gate": CHANGES[change](matrix)}) != digest({"gate": matrix})


def test_quantized_blocks_have_a_digest(tmp_path):
    """Of a base that is kept as its file has it: the kind counts, and so do the signs of the blocks."""
    config = recipe().model
    params = quantize(jit_init(config, jax.random.key(0)), "q8_0")
    table = params.embedding
    found = []
    for name, planes in (("a", table.planes), ("b", table.planes), ("negated", (-table.planes[0], table.planes[1]))):
        llama_jax.save(tmp_path / f"{name}.gguf", config, params.replace(embedding=table.replace(planes=planes)))
        found.append(load_frozen(tmp_path / f"{name}.gguf", config, MeshSizes(), "float32", "none")[1]["digest"])
    assert found[0] == found[1] != found[2]
    four = quantize_matrix(jax.random.normal(jax.random.key(1), (4, 128)), "q4_0")
    assert digest({"gate": four}) != digest({"gate": four.replace(quant_format="iq4_nl")})


@pytest.mark.slow
def test_magnitudes_and_a_rate_for_b_over_a_mesh_and_resumed(base, text, tmp_path):
    """DoRA, LoRA+ and NEFTune of a run, stopped and resumed with other devices; what is loaded is what was trained."""
    changes = ["lora.dora=true", "optimizer.lora_plus=4", "neftune=5", "ema_decay=0", "steps=6", "save_every=3"]
    dora = override(RECIPE, changes)
    whole = train(dora, tmp_path / "whole", [text], weights=base, log=StopAt())
    train(dora, tmp_path / "parts", [text], weights=base, mesh=MeshSizes(fsdp=2, tensor=2), log=StopAt("step 3/"))
    parts = train(dora, tmp_path / "parts", [text], weights=base, resume=True, log=StopAt())
    found, expected = (lines(tmp_path / name, "train")[-1] for name in ("parts", "whole"))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert parts.step == whole.step == 6
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / CHECKPOINTS / "6")
    again = train(dora, tmp_path / "again", [text], weights=base, resume=True, log=StopAt())
    same(again.state, whole.state)
    config, params, _ = llama_jax.load(base)
    adapter = load_adapter(tmp_path / "whole", config)
    assert adapter.lora == dora.lora
    same(adapter.params, whole.state.params)
    one = llama_jax.load(base, adapter=tmp_path / "whole").params
    assert one.blocks.attention.out.low_rank.magnitude is None  # settled for inference
    merged = merge(params, adapter.params, adapter.lora)
    tokens = np.arange(1, 9)[None]
    np.testing.assert_allclose(jit_logits(config, one, tokens), jit_logits(config, merged, tokens), atol=1e-4)
