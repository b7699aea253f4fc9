"""Which matrices of a model are of which kind when floats are quantized."""

from dataclasses import replace
from typing import get_args

import jax
import numpy as np
import pytest
from conftest import sharp
from quantization import quantize_file

import llama_jax
from llama_jax.formats.saving import Blocks
from llama_jax.model.mixtures import format_of_part, formats_of_parameter
from llama_jax.model.trees import bytes_in_memory, kinds_in_memory, param_shapes, quantize
from llama_jax.ops.weights.quantized_matmul import QuantizedWeight

CONFIG = llama_jax.LlamaConfig(300, 256, 9, 4, 2, 512, 128, 1e-5, 1e4, True)
MORE_BITS = [0, 3, 6, 7, 8]  # of nine layers: by llama.cpp's rule the first, the last two, and every third between


@pytest.fixture(scope="module")
def params():
    return sharp(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def floats(params, tmp_path_factory):
    path = tmp_path_factory.mktemp("floats") / "floats.gguf"
    llama_jax.save(path, CONFIG, params)
    return path


def kinds(params):
    """By the path of each matrix."""
    is_weight = lambda leaf: isinstance(leaf, QuantizedWeight)
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
    return {jax.tree_util.keystr(path): leaf.quant_format for path, leaf in leaves if is_weight(leaf)}


def test_layers_with_more_bits():
    assert [i for i in range(9) if format_of_part("down", "q4_k", i, 9) == "q6_k"] == MORE_BITS
    assert formats_of_parameter("blocks.attention.qkv", "q5_k", 0, 9) == ("q5_k", "q5_k", "q6_k")
    assert formats_of_parameter("blocks.attention.qkv", "q5_k", 1, 9) == ("q5_k",)
    assert formats_of_parameter("blocks.attention.qkv", "q5_k-pure", 0, 9) == ("q5_k",)
    assert formats_of_parameter("blocks.feed_forward.gate", "q4_k", 0, 9) == ("q4_k",)


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kind", "outside"),
    [("q4_k", "q6_k"), ("int4", "int8")]
    + [pytest.param(*pair, marks=pytest.mark.slow) for pair in (("q4_0", "q8_0"), ("nf4", "int8"), ("q8_0", "q8_0"))],
)
def test_the_embedding_has_more_bits_unless_pure(params, kind, outside):
    found = quantize(params, kind)
    assert found.embedding.quant_format == outside
    planned = quantize(param_shapes(CONFIG), kind)
    assert kinds(planned) == kinds(found)
    assert bytes_in_memory(planned) == bytes_in_memory(found)
    if outside != kind:
        pure = quantize(params, f"{kind}-pure")
        assert set(kinds(pure).values()) == {kind}
        assert bytes_in_memory(pure) < bytes_in_memory(found)


@pytest.mark.parametrize("kind", ["q4_0", *(pytest.param(x, marks=pytest.mark.slow) for x in ("q4_k", "q4_k-pure"))])
def test_what_is_read_is_what_is_made_in_memory_and_what_is_written(params, floats, tmp_path, kind):
    found = llama_jax.load(floats, quantize=kind).params
    jax.tree.map(np.testing.assert_array_equal, found, quantize(params, kind))
    llama_jax.convert(floats, tmp_path / "blocks.gguf", dtype=kind)
    jax.tree.map(
        np.testing.assert_array_equal, llama_jax.load(tmp_path / "blocks.gguf", "float32", quantize="keep").params, found
    )


def test_rows_that_are_no_whole_blocks(params):
    """As llama.cpp falls back: Q4_K to Q5_0, Q6_K to Q8_0."""
    config = replace(CONFIG, dim=96, head_dim=64)
    found = quantize(param_shapes(config), "q4_k")
    assert found.embedding.quant_format == "q8_0"
    assert found.blocks.feed_forward.gate.quant_format == "q5_0"
    assert found.blocks.feed_forward.down.stacks[0].quant_format == "q6_k"
    assert kinds_in_memory(found) == "q5_0 and q4_k and q6_k and q8_0"


@pytest.mark.llama_cpp
@pytest.mark.parametrize("kind", [kind for kind in get_args(Blocks) if "pure" not in kind])
def test_a_file_is_llama_cpps(floats, tmp_path, kind):
    """Every tensor is of the type that llama.cpp gives it, and nearly all bytes are the same."""
    import llama_cpp
    from gguf import GGUFReader

    name = {"q4_k": "Q4_K_M", "q5_k": "Q5_K_M"}.get(kind, kind.upper())
    llama_jax.convert(floats, tmp_path / "ours.gguf", dtype=kind)
    quantize_file(floats, tmp_path / "theirs.gguf", getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}"))
    readers = [GGUFReader(tmp_path / f"{whose}.gguf") for whose in ("ours", "theirs")]
    ours, theirs = ({tensor.name: tensor for tensor in reader.tensors} for reader in readers)
    assert ours.keys() == theirs.keys()
    wrong = {each for each in ours if ours[each].tensor_type != theirs[each].tensor_type}
    # llama.cpp's Q4_0 gives a tied embedding 6 bits where rows are blocks of 256.
    assert wrong == ({"token_embd.weight"} if kind == "q4_0" else set())
    same = [(ours[each].data.view(np.uint8) == theirs[each].data.view(np.uint8)).mean() for each in ours.keys() - wrong]
    assert min(same) > 0.98
    types = [reader.fields["general.file_type"].parts[-1][0] for reader in readers]
    assert types[0] == types[1]
