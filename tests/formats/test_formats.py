"""One small model in every format, each written by that format's own writer: all are the same model."""

import json
import shutil

import jax
import make_format_goldens as formats
import make_goldens
import numpy as np
import pytest
from conftest import params_of, same
from make_format_goldens import FORMATS, SMALL, WIDE

import llama_jax
from llama_jax.config.presets import preset
from llama_jax.errors import CheckpointError, ConfigError
from llama_jax.formats import gguf, open_checkpoint
from llama_jax.formats.lazy_tensors import read_bytes
from llama_jax.formats.meta import config_from_params
from llama_jax.formats.rope_conversion import factors_of, with_scaling
from llama_jax.model.trees import kinds_in_memory
from llama_jax.ops.weights.formats import QUANT_FORMATS
from llama_jax.ops.weights.quantized_matmul import QuantizedWeight

TENSORS = make_goldens.random_tensors(SMALL)
WIDE_TENSORS = make_goldens.random_tensors(WIDE)
TOKENS = np.arange(16, dtype=np.int32)[None]
KINDS = make_goldens.KINDS


@pytest.fixture(scope="module")
def small():
    return params_of(SMALL, TENSORS)


@pytest.fixture(scope="module")
def logits():
    return jax.jit(llama_jax.logits, static_argnums=0)


TORCH = ["meta-1", "meta-2", "meta-4", "meta-8", "meta-vocabulary", "pytorch", "pytorch-sharded", "ckpt.pt"]


@pytest.mark.parametrize("name", TORCH)
def test_what_torch_saved(name, small):
    config, params, tokenizer = llama_jax.load(FORMATS / name)
    assert config == SMALL
    assert tokenizer is None
    same(params, small)


@pytest.mark.parametrize("name", ["meta-2/consolidated.01.pth", "pytorch/pytorch_model.bin", "pytorch/config.json"])
def test_a_file_stands_for_its_folder(name, small):
    same(llama_jax.load(FORMATS / name).params, small)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("kind", ["gqa", "mha", "tied"])
def test_llama2c(version, kind, tmp_path, models):
    config = KINDS[kind]
    formats.write_llama2c(tmp_path / "anything.weights", config, make_goldens.random_tensors(config), version)
    for path in (tmp_path, tmp_path / "anything.weights"):
        found, params, _ = llama_jax.load(path)
        assert found == config
        same(params, models[kind][1])


@pytest.mark.parametrize("group", [64, 8])
def test_llama2c_int8(group, tmp_path, logits):
    """To the error of dequantize-then-float32. llama2.c halves groups of 64 to 32, as the width is 32; F is 56: groups reach
    over the ends of rows."""
    config = KINDS["gqa"]
    tensors = make_goldens.random_tensors(config)
    formats.write_llama2c(tmp_path / "model.bin", config, tensors, 2, group)

    def rounded(part_name, a):
        if a.ndim == 1:
            return a
        numbers, scales = formats.quantize_int8(a, min(group, 32))
        return (numbers * scales[:, None]).reshape(a.shape)

    # Rows of q and k are reordered before they are quantized, so it is the file's tensors that are rounded.
    config_found, params, _ = llama_jax.load(tmp_path)
    assert config_found == config
    stored = formats.renamed(config, tensors, formats.META)
    rounded_tensors = {name: rounded(name, a) for name, a in stored.items()}
    want = params_of(config, unrenamed(config, rounded_tensors, formats.META))
    np.testing.assert_allclose(logits(config, params, TOKENS), logits(config, want, TOKENS), atol=1e-5)
    assert 1e-4 < np.abs(logits(config, params, TOKENS) - logits(config, params_of(config, tensors), TOKENS)).max() < 0.5


def unrenamed(config, state, names):
    """Undo `renamed`."""
    found = {}
    for part, name in formats.HF_NAMES.items():
        for i in range(config.n_layers if "{}" in name else 1):
            if part in names and names[part].format(i) in state:
                weight = state[names[part].format(i)]
                if part in ("q", "k"):
                    heads = weight.reshape(-1, config.head_dim // 2, 2, config.dim)
                    weight = heads.transpose(0, 2, 1, 3).reshape(weight.shape)
                found[name.format(i)] = np.ascontiguousarray(weight)
    return found


BLOCKS = {name: block for name, *block in gguf.GGUF_TYPES.values() if name not in ("F32", "F16", "BF16")}
# Where in a block its float16 scales lie; all else may be any bytes.
SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SCALES |= {"TQ1_0": (52,), "TQ2_0": (64,), "IQ1_M": (), "MXFP4": ()}


def random_blocks(kind: str, *shape: int) -> np.ndarray:
    """uint8[*shape, bytes], with scales that are finite."""
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (*shape, BLOCKS[kind][1]), dtype=np.uint8)
    for at in SCALES.get(kind, (0,)):
        blocks[..., at : at + 2] = rng.uniform(0.001, 0.01, (*shape, 1)).astype("<f2").view(np.uint8)
    if kind == "MXFP4":  # a power of two
        blocks[..., 0] = rng.integers(120, 124, shape)
    if kind == "IQ1_M":  # whose scale is in four halves of bytes
        blocks[..., 55] = blocks[..., 55] & 15 | 32
    return blocks


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_read_by_rows_as_the_package_reads_them_whole(kind, tmp_path):
    from gguf import GGMLQuantizationType, quants

    block, size = BLOCKS[kind]
    blocks = random_blocks(kind, 40, 3)
    path = tmp_path / "blocks"
    path.write_bytes(b"12345" + blocks.tobytes())
    tensor = gguf.BlockTensor(path, 5, (40, 3 * block), kind, (block, size))
    whole = quants.dequantize(blocks.reshape(40, -1), GGMLQuantizationType[kind])
    assert tensor.nbytes == blocks.nbytes
    np.testing.assert_array_equal(tensor.read(0, 40), whole)
    np.testing.assert_array_equal(tensor.read(7, 19), whole[7:19])
    assert np.isfinite(whole).all()
    assert whole.std() > 0


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_file_in_any_blocks_is_read_kept_and_written_byte_for_byte(kind, tmp_path, monkeypatch):
    from gguf import quants

    def as_blocks(a, stored):
        return a if a.ndim == 1 else random_blocks(kind, len(a), a.shape[1] // BLOCKS[kind][0]).reshape(len(a), -1)

    with monkeypatch.context() as patched:
        patched.setattr(quants, "quantize", as_blocks)
        formats.write_gguf(tmp_path / "model.gguf", WIDE, WIDE_TENSORS, kind)
    config, dense, tokenizer = llama_jax.load(tmp_path / "model.gguf", "float32")
    llama_jax.convert(tmp_path / "model.gguf", tmp_path / "converted.gguf")
    written = [tmp_path / "converted.gguf"]
    if kind.lower() in QUANT_FORMATS:
        kept = llama_jax.load(tmp_path / "model.gguf", "float32", quantize="keep").params
        assert kinds_in_memory(kept) == kind.lower()
        is_weight = lambda leaf: isinstance(leaf, QuantizedWeight)
        numbers = lambda leaf: leaf.form.decode(*map(np.asarray, leaf.planes)) if is_weight(leaf) else leaf
        same(jax.tree.map(numbers, kept, is_leaf=is_weight), dense)
        llama_jax.save(tmp_path / "saved.gguf", config, kept, tokenizer)
        written.append(tmp_path / "saved.gguf")
    _, tensors = gguf.read_file(tmp_path / "model.gguf")
    for path in written:
        for name, other in gguf.read_file(path)[1].items():
            tensor = tensors[name]
            assert (other.storage_type, other.shape) == (tensor.storage_type, tensor.shape)
            ours, theirs = (read_bytes(one.path, one.offset, one.nbytes) for one in (other, tensor))
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


def test_a_q4_k_m_that_llama_cpp_quantized(logits):
    """Its logits beside it are llama.cpp's, which rounds activations to int8 as well: alike, not equal."""
    config, params, _ = llama_jax.load(FORMATS / "q4_k_m.gguf", "float32")
    assert config == WIDE
    assert {t.storage_type for t in open_checkpoint(FORMATS / "q4_k_m.gguf").tensors.values()} == {"F32", "Q4_K", "Q6_K"}
    got, theirs = np.asarray(logits(config, params, TOKENS))[0], np.load(FORMATS / "q4_k_m.npy")
    assert np.corrcoef(got.ravel(), theirs.ravel())[0, 1] > 0.999
    np.testing.assert_array_equal(got.argmax(-1), theirs.argmax(-1))
    plain = np.asarray(logits(WIDE, params_of(WIDE, WIDE_TENSORS), TOKENS))[0]
    assert np.corrcoef(plain.ravel(), theirs.ravel())[0, 1] < 0.98  # the comparison can tell


@pytest.mark.parametrize("version", [2, 3])
def test_gguf_versions(version, tmp_path, small):
    """They differ by byte order alone."""
    path = tmp_path / "model.gguf"
    formats.write_gguf(path, SMALL, TENSORS)
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes([version]) + content[5:])
    config, params, _ = llama_jax.load(path)
    assert config == SMALL
    same(params, small)
    assert open_checkpoint(path).format == f"GGUF version {version}"


def test_split_gguf(tmp_path, small):
    from gguf import GGUFReader, GGUFWriter

    formats.write_gguf(tmp_path / "whole.gguf", SMALL, TENSORS)
    reader = GGUFReader(tmp_path / "whole.gguf")
    (tmp_path / "split").mkdir()
    for i in range(3):
        writer = GGUFWriter(tmp_path / "split" / f"model-{i + 1:05}-of-00003.gguf", "llama")
        if i == 0:
            for name, field in reader.fields.items():
                if name.startswith("llama."):
                    writer.add_key_value(name, field.contents(), field.types[0])
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[i::3]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    same(llama_jax.load(tmp_path / "split").params, small)
    same(llama_jax.load(tmp_path / "split" / "model-00002-of-00003.gguf").params, small)
    (tmp_path / "split" / "model-00003-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"one of 3 parts, but model-00003-of-00003.gguf is missing"):
        llama_jax.load(tmp_path / "split")


def test_gguf_rope_scaling_is_found_from_its_factors(tmp_path):
    config = preset("llama-3.2-1b")
    factors = factors_of(config, config.rope_scaling).astype(np.float32)
    path = tmp_path / "factors"
    path.write_bytes(factors.tobytes())
    stored = gguf.Dense(path, 0, factors.shape, "F32")
    fields = {"general.architecture": "llama"}
    plain = llama_jax.LlamaConfig(**(vars(config) | {"rope_scaling": None}))
    assert with_scaling(fields, plain, {"rope_freqs.weight": stored}, "llama") == config
    with pytest.raises(ConfigError, match=r"factor=2.0 is not supported with tensors"):
        with_scaling(fields | {"llama.rope.scaling.factor": 2.0}, plain, {"rope_freqs.weight": stored}, "llama")
    path.write_bytes((factors * np.linspace(1, 1.01, 32, dtype=np.float32)).tobytes())
    with pytest.raises(ConfigError, match="frequency factors"):
        with_scaling(fields, plain, {"rope_freqs.weight": stored}, "llama")


@pytest.mark.parametrize(("kind", "computed"), [("F16", "float32"), ("BF16", "bfloat16"), ("F32", "float32")])
def test_what_a_cpu_computes_in(kind, computed, tmp_path):
    formats.write_gguf(tmp_path / "model.gguf", SMALL, TENSORS, kind)
    assert str(llama_jax.load(tmp_path / "model.gguf").params.embedding.dtype) == computed
    llama_jax.convert(tmp_path / "model.gguf", tmp_path / "copy", format="orbax")
    stored = llama_jax.load(tmp_path / "copy").params.embedding.dtype
    assert str(stored) == {"F16": "float16"}.get(kind, computed)


def published(dim, n_layers, n_heads, n_kv_heads=None, eps=1e-5, vocab=-1, multiple_of=256, **more):
    """Meta's params.json of a release."""
    found = dict(dim=dim, n_layers=n_layers, n_heads=n_heads, norm_eps=eps, vocab_size=vocab, multiple_of=multiple_of)
    return found | ({} if n_kv_heads is None else dict(n_kv_heads=n_kv_heads)) | more


LLAMA_3 = dict(vocab=128_256, multiple_of=1024, ffn_dim_multiplier=1.3, rope_theta=500_000.0)
# By the preset that it is; the weights add to it the rows of the embedding, and F.
PUBLISHED = {
    "llama-7b": published(4096, 32, 32, eps=1e-6),
    "llama-65b": published(8192, 80, 64),
    "llama-2-7b": published(4096, 32, 32),
    "llama-2-70b": published(8192, 80, 64, 8, multiple_of=4096, ffn_dim_multiplier=1.3),
    "codellama-7b": published(4096, 32, 32, vocab=32_016, rope_theta=1_000_000.0),
    "llama-3-8b": published(4096, 32, 32, 8, **LLAMA_3),
    "llama-3.1-8b": published(4096, 32, 32, 8, **LLAMA_3, use_scaled_rope=True),
    "llama-3.2-1b": published(
        2048, 16, 32, 8, vocab=128_256, ffn_dim_multiplier=1.5, rope_theta=500_000.0, use_scaled_rope=True
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_params_json(name):
    want = preset(name)
    assert config_from_params(PUBLISHED[name], want.vocab_size, want.hidden_dim, want.tie_embeddings) == want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_args": {"scheme": "int4"}}, "quantization_args={'scheme': 'int4'} is not supported"),
        ({"moe": {}}, "moe={} is not supported"),
        ({"vocab_size": 41}, "vocab_size=41 but the embedding has 40 rows"),
        ({"norm_eps": None}, "norm_eps=None must be"),
    ],
)
def test_params_json_that_says_more(changes, message, tmp_path):
    shutil.copytree(FORMATS / "meta-1", tmp_path / "model")
    path = tmp_path / "model" / "params.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=rf"params.json: {message}"):
        llama_jax.load(tmp_path / "model")


def test_a_rank_that_is_missing(tmp_path):
    shutil.copytree(FORMATS / "meta-4", tmp_path / "model")
    (tmp_path / "model" / "consolidated.03.pth").unlink()
    with pytest.raises(CheckpointError, match=r"has 3 of the 4 files consolidated.NN.pth"):
        llama_jax.load(tmp_path / "model")
    (tmp_path / "model" / "consolidated.01.pth").unlink()
    with pytest.raises(CheckpointError, match=r"consolidated.02.pth where consolidated.01.pth should be"):
        llama_jax.load(tmp_path / "model")


def test_a_tied_model_that_kept_the_other_name(tmp_path, models):
    config = KINDS["tied"]
    tensors = make_goldens.random_tensors(config)
    tensors[formats.HF_NAMES["lm_head"]] = tensors.pop(formats.HF_NAMES["embedding"])
    same(params_of(config, tensors), models["tied"][1])
