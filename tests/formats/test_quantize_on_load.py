"""Models whose matrices are quantized while they are read, or kept in the blocks of a GGUF."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit_dequantize, jit_init, jit_logits, same

import llama_jax
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.formats.gguf import read_file
from llama_jax.formats.lazy_tensors import read_bytes
from llama_jax.formats.loading import bundled, open_checkpoint
from llama_jax.model.trees import bytes_in_memory, count, kinds_in_memory, layers_of, quantize, stack_layers
from llama_jax.ops.weights import device_layout
from llama_jax.ops.weights.quantized_matmul import JoinedWeight, QuantizedWeight
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.parallel.padding import unpad_params

FORMATS = Path(__file__).parents[1] / "goldens" / "formats"
Q4_K_M = FORMATS / "q4_k_m.gguf"
TEXT = "Once upon a time there was a little girl named Lily. She liked to play in the park with her dog. One day"


def slow(*values):
    """A case that is run by .ci/run alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def stories_model():
    return llama_jax.load(bundled(), "float32")


def divergence(config, params, other, tokens) -> float:
    """Mean KL of the next token's distribution, in nats."""
    p, q = (np.asarray(jit_logits(config, one, tokens), np.float64) for one in (params, other))
    p, q = (logits - np.log(np.exp(logits).sum(-1, keepdims=True)) for logits in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("int8", 2e-4),
        ("q4_0", 2.5e-2),
        ("int4", 4e-2),
        *(pytest.param(*x, marks=pytest.mark.nightly) for x in (("fp8", 2e-3), ("q8_0", 2e-4), ("nf4", 2.5e-2))),
    ],
)
def test_the_bundled_model_hardly_changes(kind, limit, stories_model):
    config, params, tokenizer = stories_model
    _, found, _ = llama_jax.load(bundled(), "float32", quantize=kind)
    same(found, quantize(params, kind))
    tokens = jnp.asarray([tokenizer.encode(TEXT)])
    assert 0 < divergence(config, params, found, tokens) < limit
    ours = llama_jax.generate(config, found, [tokens[0].tolist(), [1]], max_new_tokens=6)
    alone = llama_jax.generate(config, found, [[1]], max_new_tokens=6)
    assert ours[1].tokens == alone[0].tokens


def test_what_is_no_matrix_stays_and_sizes_are_counted(stories_model):
    _, params, _ = stories_model
    found = quantize(params, "int8")
    assert isinstance(found.embedding, QuantizedWeight)
    assert isinstance(found.blocks.attention_norm, jax.Array)
    assert count(found) == count(params)
    bits = 8 * sum(leaf.nbytes for leaf in jax.tree.leaves(found)) / count(params)
    assert bits < 8.3  # of rows of 192 numbers the factors are a sixth of a bit
    for was, back in zip(jax.tree.leaves(params), jax.tree.leaves(jit_dequantize(found)), strict=True):
        assert was.dtype == back.dtype
        np.testing.assert_allclose(was, back, atol=float(jnp.abs(was).max()) / 200)


def test_blocks_of_a_gguf_are_kept_and_written_byte_for_byte(tmp_path):
    config, params, tokenizer = llama_jax.load(Q4_K_M)  # floats are asked for
    same(llama_jax.load(Q4_K_M, quantize="keep").params, params)
    qkv = layers_of(params)[0].attention.qkv
    assert isinstance(qkv, JoinedWeight)
    assert [part.quant_format for part in qkv.parts] == ["q4_k", "q4_k", "q6_k"]
    _, dense, _ = llama_jax.load(Q4_K_M, "float32")
    same(jit_dequantize(params), dense)
    llama_jax.save(tmp_path / "saved.gguf", config, params, tokenizer)
    llama_jax.convert(Q4_K_M, tmp_path / "converted.gguf")
    fields, tensors = read_file(Q4_K_M)
    for name in ("saved.gguf", "converted.gguf"):
        its_fields, its_tensors = read_file(tmp_path / name)
        assert its_fields["general.file_type"] == fields["general.file_type"]
        assert its_tensors.keys() == tensors.keys()
        for key, tensor in tensors.items():
            other = its_tensors[key]
            assert (other.storage_type, other.shape) == (tensor.storage_type, tensor.shape)
            ours, theirs = (read_bytes(one.path, one.offset, one.nbytes) for one in (other, tensor))
            np.testing.assert_array_equal(ours, theirs)


def test_parts_of_one_kind_lie_side_by_side(tmp_path):
    """Queries, keys and values of several heads, those of a GGUF in another order of rows: every block is at its place."""
    config = replace(llama_jax.preset("stories-260k"), n_heads=4, n_kv_heads=2, hidden_dim=128, n_layers=1)
    params = quantize(jit_init(config, jax.random.key(0)), "q8_0")
    llama_jax.save(tmp_path / "a.gguf", config, params)
    same(llama_jax.load(tmp_path / "a.gguf").params, params)


def test_other_formats_hold_the_numbers(tmp_path, stories_model):
    config, params, tokenizer = stories_model
    found = quantize(params, "int8")
    for name, format in (("folder", "safetensors"), ("a.gguf", "gguf")):
        llama_jax.save(tmp_path / name, config, found, tokenizer, format=format)
        same(llama_jax.load(tmp_path / name).params, jit_dequantize(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantization", ["keep", "int8", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("fp8", "q8_0"))]
)
def test_over_a_mesh_as_on_one_device(quantization, tmp_path, stories_model):
    """Heads are copied (two of one), the vocabulary is padded, rows and columns lie on different devices."""
    config, params, tokenizer = stories_model
    source = bundled()
    if quantization == "keep":
        source = tmp_path / "a.gguf"
        llama_jax.save(source, config, params, tokenizer, dtype="q4_0")
    alone = llama_jax.load(source, "float32", quantize=quantization)
    prompts = [tokenizer.encode("Once upon a time"), tokenizer.encode("The dog")]
    wanted = llama_jax.generate(config, alone.params, prompts, max_new_tokens=8)
    for sizes in (MeshSizes(tensor=2), MeshSizes(fsdp=2, tensor=2))[quantization == "keep" :]:
        there = llama_jax.load(source, "float32", quantize=quantization, mesh=sizes)
        found = llama_jax.generate(there.config, there.params, prompts, max_new_tokens=8)
        # The kernel for blocks rounds tokens, and over a mesh XLA does not: near ties may fall otherwise there.
        if quantization == "int8":
            assert [row.tokens for row in found] == [row.tokens for row in wanted]
        else:
            np.testing.assert_allclose([row.logprobs[0] for row in found], [row.logprobs[0] for row in wanted], atol=0.1)
        llama_jax.save(tmp_path / f"{sizes.fsdp}.gguf", config, there.params, tokenizer, dtype="float32")
        same(llama_jax.load(tmp_path / f"{sizes.fsdp}.gguf").params, jit_dequantize(alone.params))


def test_what_cannot_be_is_one_line(tmp_path, stories_model):
    config, params, tokenizer = stories_model
    with pytest.raises(CheckpointError, match=r"quantize='int3' is not one of int8, int4, .*, q4_k-pure, .*, keep$"):
        llama_jax.load(bundled(), quantize="int3")
    with pytest.raises(CheckpointError, match="quantize='q3_k': this format can only be kept from a GGUF that has it"):
        llama_jax.load(bundled(), quantize="q3_k")
    with pytest.raises(
        CheckpointError, match=r"quantize='keep': .* has no tensor in a supported format \(\w*16\); use int8"
    ):
        llama_jax.load(bundled(), quantize="keep")
    with pytest.raises(CheckpointError, match="rows of 192 values, but int4_32 needs multiples of 32 on each of 4 devices"):
        llama_jax.load(bundled(), quantize="int4", mesh=MeshSizes(fsdp=4))
    with pytest.raises(CheckpointError, match="q8_0 needs multiples of 32 on each of 4 devices"):
        llama_jax.load(bundled(), quantize="q8_0", mesh=MeshSizes(fsdp=4))
    with pytest.raises(ConfigError, match="rows of 48 numbers, but nf4 needs multiples of 64"):
        quantize(params.replace(embedding=params.embedding[:, :48]), "nf4-pure")
    with pytest.raises(ConfigError, match="quantize='q3_k' is not one of int8, int4, fp8, nf4, q8_0, q4_0"):
        quantize(params, "q3_k")
    with pytest.raises(CheckpointError, match="dtype='q4_0': the safetensors format"):
        llama_jax.save(tmp_path / "x", config, params, tokenizer, dtype="q4_0")


def test_a_damaged_factor_is_noticed(tmp_path):
    content = bytearray(Q4_K_M.read_bytes())
    _, tensors = read_file(Q4_K_M)
    tensor = tensors["blk.0.ffn_up.weight"]
    content[tensor.offset : tensor.offset + 2] = b"\xff\x7f"  # of the first block: not a number
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_up\.weight' holds NaN or infinity; the file is damaged"):
        llama_jax.load(tmp_path / "bad.gguf", quantize="keep")


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """Planes are held as a TPU is given them: here only the layouts of arrays say in which order."""
    monkeypatch.setattr(device_layout, "platform_of", lambda sharding: "tpu")


def groups_first(params) -> bool:
    down = params.blocks.feed_forward.down  # the matrix whose rows are whole groups of 128
    return down.quant_format == "int4" and down.planes[0].format.layout.major_to_minor == (0, 2, 1, 3)


@pytest.mark.slow
def test_whatever_makes_int4_leaves_it_groups_first_for_a_tpu(as_on_a_tpu, tmp_path, stories_model):
    config, params, tokenizer = stories_model
    found = quantize(params, "int4")
    assert groups_first(found)
    read = llama_jax.load(bundled(), "float32", quantize="int4").params
    assert groups_first(read)
    same(read, found)
    llama_jax.save(tmp_path / "a", config, found, tokenizer, format="orbax")
    stored = llama_jax.load(tmp_path / "a").params
    assert groups_first(stored)
    same(stored, found)
    joined = found.replace(blocks=stack_layers(layers_of(found)))
    assert groups_first(joined)
    same(joined, found)


# --- orbax ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q4_0", "int4", "int8", "fp8", "nf4"])
def test_orbax_keeps_planes(kind, tmp_path, stories_model):
    config, params, tokenizer = stories_model
    found = quantize(params, kind)
    llama_jax.save(tmp_path / "a", config, found, tokenizer, format="orbax")
    same(llama_jax.load(tmp_path / "a").params, found)
    same(llama_jax.load(tmp_path / "a", quantize="keep").params, found)
    in_bfloat16 = llama_jax.load(tmp_path / "a", "bfloat16", quantize="keep").params
    assert in_bfloat16.blocks.attention.out.dtype == jnp.bfloat16
    same(llama_jax.load(tmp_path / "a", "float32").params, jit_dequantize(found))
    kinds = {tensor.storage_type for tensor in open_checkpoint(tmp_path / "a").tensors.values()}
    outside = {"int4": "INT8", "nf4": "INT8", "q4_0": "Q8_0"}.get(kind, kind.upper())
    assert kinds == {"F32", kind.upper(), outside, *(["INT4_64"] if kind == "int4" else [])}


@pytest.mark.parametrize("kind", ["int4", slow("int8")])
def test_orbax_over_a_mesh(kind, tmp_path, stories_model):
    config, params, tokenizer = stories_model
    found = quantize(params, kind)
    llama_jax.save(tmp_path / "a", config, found, tokenizer, format="orbax")
    if kind == "int4":
        with pytest.raises(
            CheckpointError, match="rows of 192 values, but int4_64 needs multiples of 64 on each of 2 devices"
        ):
            llama_jax.load(tmp_path / "a", mesh=MeshSizes(tensor=2))
        return
    there = llama_jax.load(tmp_path / "a", mesh=MeshSizes(fsdp=2, tensor=2))
    same(unpad_params(config, there.params), found)
    prompts = [tokenizer.encode("Once upon a time")] * 2
    wanted = llama_jax.generate(config, found, prompts, max_new_tokens=4)
    assert llama_jax.generate(there.config, there.params, prompts, max_new_tokens=4)[0].tokens == wanted[0].tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kinds: kinds | {"embedding": "int3"}, "has embedding in 'int3', which is invalid"),
        (lambda kinds: kinds | {"final_norm": "int8"}, "has final_norm in 'int8', which is invalid"),
        (lambda kinds: kinds | {"nothing": "int8"}, "names 'nothing', which this model lacks"),
        (lambda kinds: kinds | {"embedding": "fp8"}, "'embedding.planes.0' is int8, but its format needs uint8"),
        (lambda kinds: kinds | {"embedding": ["int8"] * 3}, "has embedding in .*, which is invalid"),
        (lambda kinds: {}, "array 'blocks.attention.out' has shape None"),
    ],
)
def test_damaged_kinds_of_orbax_are_named(change, message, tmp_path, stories_model):
    config, params, _ = stories_model
    llama_jax.save(tmp_path / "a", config, quantize(params, "int8"), format="orbax")
    file = tmp_path / "a" / "quantized.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps(found | {"kinds": change(found["kinds"])}))
    with pytest.raises(CheckpointError, match=message):
        llama_jax.load(tmp_path / "a")


@pytest.mark.real
def test_a_real_model_has_the_size_of_its_file_and_its_numbers(smollm2):
    kept, dense = (llama_jax.load(smollm2, dtype).params for dtype in (None, "float32"))
    assert bytes_in_memory(kept) <= 1.1 * smollm2.stat().st_size
    assert kinds_in_memory(kept) == "q4_1 and q8_0"
    same(jit_dequantize(kept), dense)
