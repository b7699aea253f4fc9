"""Every way to compute attention gives what the definition gives, with its gradients."""

import logging
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax import ops
from llama_jax.errors import ConfigError
from llama_jax.ops.attention.blockwise import backward_part, forward_part, merge
from llama_jax.ops.attention.kernels import cudnn, cudnn_refuses, splash, splash_refuses
from llama_jax.ops.attention.rows import mean_of
from llama_jax.ops.attention.seen import NO_KEY, Seen, places
from llama_jax.ops.quantized import quantize

blockwise = sys.modules["llama_jax.ops.attention.blockwise"]
SIDE = blockwise._side
H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
T4 = SimpleNamespace(platform="gpu", device_kind="NVIDIA T4", compute_capability="7.5")
AMD = SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5p")
LENGTH, SHAPE = 23, (2, 2, 23, 3, 4)  # more than two blocks of each kind below, the last of them not a whole one


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Blocks of 2 queries of a group of 3, and of 7 keys, also for few queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_side", lambda *_: 7)
        patch.setattr(blockwise, "FEW_ROWS", 0)
        yield


def operands(seed=0, shape=SHAPE):
    rng = np.random.default_rng(seed)
    keys = shape[:-2] + shape[-1:]
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in (shape, keys, keys))


@partial(jax.jit, static_argnames=("backend", "window"))
def value_and_gradients(arrays, backend, window, **told):
    """What attention gives, and the gradients of a sum in which every entry counts differently."""

    def total(arrays):
        mixed = ops.attention(*arrays, scale=0.5, backend=backend, window=window, **told)
        return jnp.sum(jnp.sin(mixed)), mixed

    gradients, mixed = jax.grad(total, has_aux=True)(arrays)
    return mixed, gradients


def ascending(draw, length, most):
    return np.sort(draw(st.lists(st.integers(0, most), min_size=length, max_size=length)))


@st.composite
def packed_ragged_rows(draw):
    """Documents packed into rows whose ends are padding."""
    segments = np.stack([ascending(draw, LENGTH, 3) for _ in range(2)])[:, None].astype(np.int32)
    segments -= draw(st.sampled_from([0, 1, 7]))  # any whole numbers will do
    lengths = np.array([[draw(st.integers(0, LENGTH))] for _ in range(2)], np.int32)
    return {"segments": (segments, segments), "lengths": lengths}


@st.composite
def rings(draw):
    """Slots in any order, some of them empty, and queries anywhere, some of which see nothing."""
    slots = np.array([draw(st.permutations(range(LENGTH))) for _ in range(2)], np.int32)
    empty = np.array(draw(st.lists(st.booleans(), min_size=2 * LENGTH, max_size=2 * LENGTH))).reshape(2, LENGTH)
    queries = draw(st.lists(st.integers(-1, LENGTH), min_size=2 * LENGTH, max_size=2 * LENGTH))
    return {
        "query_positions": np.array(queries, np.int32).reshape(2, 1, LENGTH),
        "key_positions": np.where(empty, NO_KEY, slots)[:, None].astype(np.int32),
    }


class TestEveryBackendIsTheReference:
    @pytest.mark.parametrize("window", [None, 1, 7])
    @given(packed_ragged_rows(), st.integers(0, 99))
    def test_packed_ragged_rows(self, window, told, seed):
        self.check(window, told, seed)

    @pytest.mark.parametrize("window", [None, 7])
    @given(rings(), st.integers(0, 99))
    def test_any_order_of_slots(self, window, told, seed):
        self.check(window, told, seed)

    def check(self, window, told, seed):
        arrays = operands(seed)
        expected = value_and_gradients(arrays, "reference", window, **told)
        for backend in ("rows", "blockwise"):
            found = value_and_gradients(arrays, backend, window, **told)
            for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)

    @pytest.mark.parametrize("window", [None, 7])
    @pytest.mark.parametrize("backend", ["rows", "blockwise"])
    def test_whole_rows(self, backend, window):
        expected = value_and_gradients(operands(), "reference", window)
        found = value_and_gradients(operands(), backend, window)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)

    @pytest.mark.parametrize("backend", ["rows", "blockwise"])
    def test_values_of_another_width(self, backend):
        """As the notebooks give the identity for values, to see the weights."""
        queries, keys, _ = operands()
        arrays = queries, keys, jnp.broadcast_to(jnp.eye(LENGTH), (2, 2, LENGTH, LENGTH))
        found, expected = (value_and_gradients(arrays, way, None) for way in (backend, "reference"))
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)

    @pytest.mark.parametrize("backend", ["reference", "rows", "blockwise"])
    def test_who_sees_nothing_gives_zeros_and_moves_nothing(self, backend):
        told = {"lengths": jnp.array([[0], [5]])}
        mixed, gradients = value_and_gradients(operands(), backend, None, **told)
        assert not np.any(mixed[0])
        assert not np.any(mixed[1, :, 5:])
        assert np.all(mixed[1, :, :5])
        for gradient in gradients:
            assert np.all(np.isfinite(gradient))
            assert not np.any(gradient[0])
            assert not np.any(gradient[1, :, 5:])

    @pytest.mark.parametrize("backend", ["rows", "blockwise"])
    def test_bfloat16(self, backend):
        arrays = tuple(x.astype(jnp.bfloat16) for x in operands())
        expected = value_and_gradients(jax.tree.map(lambda x: x.astype(jnp.float32), arrays), "reference", 7)
        for ours, theirs in zip(*map(jax.tree.leaves, (value_and_gradients(arrays, backend, 7), expected)), strict=True):
            assert ours.dtype == jnp.bfloat16
            assert jnp.linalg.norm(ours - theirs) < 0.02 * jnp.linalg.norm(theirs)

    @pytest.mark.slow
    @settings(max_examples=5)  # each is a compilation
    @given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(0, 99))
    def test_any_size(self, new, before, groups, seed):
        slots = new + before
        queries, _, _ = operands(seed, (1, 2, new, groups, 4))
        _, keys, values = operands(seed + 1, (1, 2, slots, 1, 4))
        told = {"query_positions": before + np.arange(new, dtype=np.int32)[None, None]}
        expected = value_and_gradients((queries, keys, values), "reference", None, **told)
        found = value_and_gradients((queries, keys, values), "blockwise", None, **told)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


class TestParts:
    @given(rings(), st.integers(0, 99))
    def test_two_sets_of_keys_are_joined_by_merge(self, told, seed):
        queries, keys, values = operands(seed)
        seen = places(queries, keys, told["query_positions"], told["key_positions"], None, None)
        whole, joined = _whole_and_joined(queries, keys, values, Seen(*(jnp.asarray(x) for x in seen[:2])))
        for ours, theirs in zip(joined, whole, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


@jax.jit
def _whole_and_joined(queries, keys, values, seen):
    """Value and gradients from all keys at once, and from two parts of them."""
    halves = slice(None, 9), slice(9, None)
    parts = [(keys[..., h, :], values[..., h, :], seen.part(slice(None), h)) for h in halves]
    whole = forward_part(queries, keys, values, seen, scale=0.5)
    joined = merge(*(forward_part(queries, *part, scale=0.5) for part in parts))
    of_mixed = jnp.cos(whole[0])
    told = whole[1], mean_of(of_mixed, whole[0], jnp.float32), of_mixed
    of_whole = backward_part(queries, keys, values, seen, *told, scale=0.5)
    of_parts = [backward_part(queries, *part, *told, scale=0.5) for part in parts]
    of_joined = (
        of_parts[0][0] + of_parts[1][0],
        *(jnp.concatenate([a, b], axis=-2) for a, b in zip(of_parts[0][1:], of_parts[1][1:], strict=True)),
    )
    return (*whole, *of_whole), (*joined, *of_joined)


class TestMemory:
    @pytest.fixture(autouse=True)
    def real_blocks(self, monkeypatch):
        monkeypatch.setattr(blockwise, "_side", SIDE)

    def test_blocks_fit_the_cache_of_a_cpu(self):
        sides = [SIDE(heads, "cpu") for heads in (1, 4, 8, 16, 48, 4096)]
        assert sides == [512, 512, 512, 256, 128, 128]
        assert SIDE(48, "gpu") == 1024

    @staticmethod
    def temporaries(length, dtype=jnp.float32):
        shapes = (1, 8, length, 1, 64), (1, 8, length, 64), (1, 8, length, 64)
        arrays = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
        compiled = value_and_gradients.lower(arrays, "auto", None).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def test_grows_with_the_length_and_not_with_its_square(self):
        """Of 32,768 tokens, 8 heads of 64: the reference's scores alone are 34 GB."""
        shorter, longer = self.temporaries(16_384), self.temporaries(32_768)
        assert longer < 2 * shorter
        assert longer < 0.5e9

    def test_bfloat16_is_not_copied_to_float32_to_be_sliced(self):
        shorter, longer = (self.temporaries(length, jnp.bfloat16) for length in (16_384, 32_768))
        kept = 8 * 16_384 * 64 * 4 * 4  # the gradients are summed in float32, and so is the mixture
        assert longer - shorter < 1.3 * kept

    def test_training_without_rematerialisation_keeps_what_is_mixed_and_no_block(self):
        """Under `jax.checkpoint` with everything kept: linear memory, and no block of the forward pass is made again."""
        policy = jax.checkpoint_policies.save_anything_except_these_names("weight")

        def compiled(length, checkpointed):
            arrays = [jax.ShapeDtypeStruct((1, 4, length, *rest, 32), jnp.float32) for rest in ((1,), (), ())]
            attend = partial(ops.attention, scale=1.0, backend="blockwise")
            attend = jax.checkpoint(attend, policy=policy) if checkpointed else attend
            return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(attend(*a))), (0, 1, 2))).lower(*arrays).compile()

        short, long, plain = compiled(4096, True), compiled(8192, True), compiled(4096, False)
        assert long.memory_analysis().temp_size_in_bytes < 2.1 * short.memory_analysis().temp_size_in_bytes
        assert short.as_text().count(" while(") == plain.as_text().count(" while(") == 4


class TestChoice:
    def test_long_rows_are_computed_by_blocks_and_the_log_says_so_once(self, caplog):
        ops.attention.__globals__["announce"].cache_clear()
        arrays = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(0, (1, 1, 1024, 1, 2)))
        short = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(0, (1, 1, 512, 1, 2)))
        with caplog.at_level(logging.INFO, "llama_jax.attention"):
            for _ in range(2):
                jax.eval_shape(partial(ops.attention, scale=1.0), *arrays)
            assert caplog.messages == ["attention: blockwise (on cpu)"]
            jax.eval_shape(partial(ops.attention, scale=1.0), *short)
        assert caplog.messages[1:] == ["attention: rows (on cpu)"]

    @pytest.mark.parametrize(
        ("backend", "message"),
        [
            ("flash", r"attention backend='flash' must be one of auto, reference, rows, blockwise, cudnn, splash"),
            ("cudnn", r"attention backend='cudnn': cudnn needs an NVIDIA GPU, this is cpu"),
            ("splash", r"attention backend='splash': splash needs a TPU, this is cpu"),
        ],
    )
    def test_what_cannot_be_is_refused(self, backend, message):
        with pytest.raises(ConfigError, match=message):
            ops.attention(*operands(), scale=1.0, backend=backend)

    def test_a_kernel_that_refuses_leaves_its_reason_in_the_log(self, caplog, monkeypatch):
        ops.attention.__globals__["announce"].cache_clear()
        monkeypatch.setattr(jax, "devices", lambda: [H100])
        with caplog.at_level(logging.INFO, "llama_jax.attention"):
            ops.attention(*operands(), scale=1.0)
        assert caplog.messages == ["attention: rows (cudnn computes in bfloat16 or float16, not in float32)"]

    def test_reasons(self):
        queries = jnp.zeros((1, 2, 128, 2, 64), jnp.bfloat16)
        seen = Seen(jnp.zeros((1, 1, 128), jnp.int32), jnp.zeros((1, 1, 128), jnp.int32))
        packed = seen._replace(query_segments=seen[0], key_segments=seen[0])
        assert cudnn_refuses(queries, seen, True, H100) is None
        assert "whole rows" in cudnn_refuses(queries, seen, False, H100)
        assert "segments" in cudnn_refuses(queries, packed, True, H100)
        assert "features" in cudnn_refuses(jnp.zeros((1, 2, 4, 2, 100), jnp.bfloat16), seen, True, H100)
        assert "compute capability 8.0" in cudnn_refuses(queries, seen, True, T4)
        assert "this is AMD" in cudnn_refuses(queries, seen, True, AMD)
        assert "whole rows" in splash_refuses(queries, False, TPU)
        assert "128" in splash_refuses(queries[:, :, :100], True, TPU)
        assert "one device" in splash_refuses(queries, True, TPU)

    @pytest.mark.parametrize(
        ("told", "message"),
        [
            ({"window": 0}, r"window=0 must be a whole number from 1"),
            ({"window": 1.5}, r"window=1.5 must be a whole number"),
            ({"window": 2**40}, r"must be a whole number from 1"),
            ({"segments": (jnp.zeros((2, 1, LENGTH), jnp.int32), None)}, r"of queries and of keys, or not at all"),
            ({"lengths": jnp.zeros(2, jnp.int32)}, r"lengths \[2\] must have the batch axes"),
        ],
    )
    def test_nonsense(self, told, message):
        with pytest.raises(ConfigError, match=message):
            ops.attention(*operands(), scale=1.0, **told)

    def test_the_definition_reads_no_quantized_values(self):
        queries, keys, values = operands()
        with pytest.raises(ConfigError, match=r"backend='reference' reads no quantized keys and values"):
            ops.attention(queries, keys, quantize(values), scale=1.0, backend="reference")

    def test_nothing_at_all(self):
        queries, keys, values = operands()
        with pytest.raises(ConfigError, match=r"must not be empty"):
            ops.attention(queries, keys[..., :0, :], values[..., :0, :], scale=1.0)


class TestKernels:
    @pytest.mark.parametrize("window", [None, 100])
    def test_cudnn_is_given_what_it_means(self, window, monkeypatch):
        """Computed by XLA in cuDNN's place: the layout, the scale, the mask and the window are those of the reference."""
        real = jax.nn.dot_product_attention
        monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **k: real(*a, **k | {"implementation": "xla"}))
        arrays = operands(0, (2, 2, 130, 3, 8))
        expected = ops.attention(*arrays, scale=0.5, window=window, backend="reference")
        np.testing.assert_allclose(cudnn(*arrays, scale=0.5, window=window), expected, rtol=1e-5, atol=2e-6)

    @pytest.mark.skipif("LLAMA_JAX_TEST_GPU" not in __import__("os").environ, reason="runs cuDNN's kernel: needs a GPU")
    @pytest.mark.slow
    @pytest.mark.parametrize("window", [None, 100])
    def test_cudnn_on_a_gpu(self, window):
        arrays = tuple(x.astype(jnp.bfloat16) for x in operands(0, (2, 2, 256, 3, 64)))
        expected = value_and_gradients(arrays, "reference", window)
        for ours, theirs in zip(
            *map(jax.tree.leaves, (value_and_gradients(arrays, "cudnn", window), expected)), strict=True
        ):
            assert jnp.linalg.norm(ours - theirs) < 0.02 * jnp.linalg.norm(theirs)

    @pytest.mark.parametrize(("window", "packed"), [(None, True), (100, False)])
    def test_splash_interpreted(self, window, packed):
        """The kernel itself, run step by step on the CPU, with its gradients."""
        arrays = operands(0, (2, 2, 256, 2, 64))
        segments = np.sort(np.random.default_rng(0).integers(0, 3, (2, 1, 256))).astype(np.int32)
        told = {"segments": (segments, segments)} if packed else {}
        seen = places(*arrays[:2], None, None, told.get("segments"), None)

        @jax.jit
        @partial(jax.grad, has_aux=True)
        def found(arrays):
            mixed = splash(*arrays, seen, scale=0.5, window=window, interpret=True)
            return jnp.sum(jnp.sin(mixed)), mixed

        gradients, mixed = found(arrays)
        expected = value_and_gradients(arrays, "reference", window, **told)
        for ours, theirs in zip(*map(jax.tree.leaves, ((mixed, gradients), expected)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)
