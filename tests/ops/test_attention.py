"""Every way to compute attention gives what the definition gives, with its gradients."""

import itertools
import logging
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import llama_jax.ops.cpu  # noqa: F401  # registers the variants of functions before tests replace these
from llama_jax import ops
from llama_jax.errors import ConfigError
from llama_jax.ops.attention import AttentionMask, AttentionShape, HeadSharding, KVView, choose_backend, record_backends
from llama_jax.ops.attention.blockwise import QueryGradientInputs, backward_part, combine, forward_part
from llama_jax.ops.attention.kernels import cudnn, over_devices, splash
from llama_jax.ops.attention.mask import NO_KEY, NO_QUERY

blockwise = sys.modules["llama_jax.ops.attention.blockwise"]
SIDE = blockwise.block_side
LENGTH, SHAPE = 23, (2, 2, 23, 3, 4)  # more than two blocks of each kind below, the last of them not a whole one


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Blocks of 2 queries of a group of 3, and of 7 keys, also for few queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "block_side", lambda *_: 7)
        patch.setattr(blockwise, "FEW_QUERY_ROWS", 0)
        yield


def operands(seed=0, shape=SHAPE):
    rng = np.random.default_rng(seed)
    keys = shape[:-2] + shape[-1:]
    return tuple(jax.device_put(np.asarray(rng.normal(size=s), np.float32)) for s in (shape, keys, keys))


def assert_near(found, expected, rtol=1e-5, atol=2e-6):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


def assert_close(found, expected, share):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.linalg.norm(ours.astype(jnp.float32) - theirs) < share * jnp.linalg.norm(theirs)


def value_and_gradients_of(function, arrays):
    """What attention gives, and the gradients of a sum in which every entry counts differently."""

    def total(arrays):
        mixed = function(arrays[0], KVView(*arrays[1:]))
        return jnp.sum(jnp.sin(mixed)), mixed

    gradients, mixed = jax.jit(jax.grad(total, has_aux=True))(arrays)
    return mixed, gradients


@partial(jax.jit, static_argnames=("backend", "window"))
def value_and_gradients(arrays, seen, backend, window=None):
    return value_and_gradients_of(partial(ops.attend, mask=seen, scale=0.5, backend=backend, window=window), arrays)


def ascending(draw, length, most):
    return np.sort(draw(st.lists(st.integers(0, most), min_size=length, max_size=length)))


@st.composite
def packed_ragged_rows(draw):
    """Documents packed into rows whose ends are padding."""
    segments = np.stack([ascending(draw, LENGTH, 3) for _ in range(2)]).astype(np.int32)
    segments -= draw(st.sampled_from([0, 1, 7]))  # any integers will do
    lengths = np.array([[draw(st.integers(0, LENGTH))] for _ in range(2)], np.int32)
    slots = np.arange(LENGTH, dtype=np.int32)[None]
    return AttentionMask(np.where(slots < lengths, slots, NO_QUERY), slots, segments, segments)


@st.composite
def rings(draw):
    """Slots in any order, some of them empty, and queries anywhere, some of which see nothing."""
    slots = np.array([draw(st.permutations(range(LENGTH))) for _ in range(2)], np.int32)
    empty = np.array(draw(st.lists(st.booleans(), min_size=2 * LENGTH, max_size=2 * LENGTH))).reshape(2, LENGTH)
    queries = draw(st.lists(st.integers(-1, LENGTH), min_size=2 * LENGTH, max_size=2 * LENGTH))
    return AttentionMask(np.array(queries, np.int32).reshape(2, LENGTH), np.where(empty, NO_KEY, slots).astype(np.int32))


def some_segments(batch, length, seed=0):
    return np.sort(np.random.default_rng(seed).integers(0, 3, (batch, length))).astype(np.int32)


class TestEveryBackendIsTheReference:
    @pytest.mark.parametrize("window", [*(pytest.param(x, marks=pytest.mark.slow) for x in (None, 1)), 7])
    @given(packed_ragged_rows(), st.integers(0, 99))
    def test_packed_ragged_rows(self, window, seen, seed):
        self.check(window, seen, seed)

    @pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 7])
    @given(rings(), st.integers(0, 99))
    def test_any_order_of_slots(self, window, seen, seed):
        self.check(window, seen, seed)

    def check(self, window, seen, seed):
        arrays = operands(seed)
        expected = value_and_gradients(arrays, seen, "reference", window)
        for backend in ("dense", "blockwise"):
            assert_near(value_and_gradients(arrays, seen, backend, window), expected)

    @pytest.mark.parametrize(
        ("backend", "packed", "window"),
        [
            *(("blockwise", True, None), ("blockwise", False, 7)),
            *(
                pytest.param(*case, marks=pytest.mark.slow)
                for case in (
                    ("dense", True, 7),
                    ("dense", False, None),
                    ("dense", True, None),
                    ("blockwise", False, None),
                    ("blockwise", True, 7),
                )
            ),
            *(
                pytest.param(*case, marks=pytest.mark.nightly)
                for case in (("dense", False, 7), *itertools.product(("dense", "blockwise"), (False, True), (1, 100)))
            ),
        ],
    )
    def test_whole_rows(self, backend, packed, window):
        """Computed in blocks: of three, unequal, by rows."""
        arrays = operands(0, (2, 2, 200, 3, 4))
        seen = AttentionMask.causal(200, some_segments(2, 200) if packed else None)
        expected = value_and_gradients(arrays, seen, "reference", window)
        assert_near(value_and_gradients(arrays, seen, backend, window), expected)

    @pytest.mark.parametrize("backend", ["dense", "blockwise"])
    def test_values_of_another_width(self, backend):
        """As the notebooks give the identity for values, to see the weights."""
        queries, keys, _ = operands()
        arrays = queries, keys, jnp.broadcast_to(jnp.eye(LENGTH), (2, 2, LENGTH, LENGTH))
        found, expected = (value_and_gradients(arrays, AttentionMask.causal(LENGTH), way) for way in (backend, "reference"))
        assert_near(found, expected)

    @pytest.mark.parametrize("backend", ["reference", "dense", "blockwise"])
    def test_who_sees_nothing_gives_zeros_and_moves_nothing(self, backend):
        slots = jnp.arange(LENGTH)[None]
        seen = AttentionMask(jnp.where(slots < jnp.array([[0], [5]]), slots, NO_QUERY), slots)
        mixed, gradients = value_and_gradients(operands(), seen, backend)
        assert not np.any(mixed[0])
        assert not np.any(mixed[1, :, 5:])
        assert np.all(mixed[1, :, :5])
        for gradient in gradients:
            assert np.all(np.isfinite(gradient))
            assert not np.any(gradient[0])
            assert not np.any(gradient[1, :, 5:])

    @pytest.mark.parametrize("backend", ["dense", "blockwise"])
    def test_bfloat16(self, backend):
        arrays = tuple(x.astype(jnp.bfloat16) for x in operands())
        seen = AttentionMask.causal(LENGTH)
        expected = value_and_gradients(jax.tree.map(lambda x: x.astype(jnp.float32), arrays), seen, "reference", 7)
        found = value_and_gradients(arrays, seen, backend, 7)
        assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
        assert_close(found, expected, 0.02)

    @pytest.mark.slow
    @settings(max_examples=5)  # each is a compilation
    @given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(0, 99))
    def test_any_size(self, new, before, groups, seed):
        slots = new + before
        queries, _, _ = operands(seed, (1, 2, new, groups, 4))
        _, keys, values = operands(seed + 1, (1, 2, slots, 1, 4))
        seen = AttentionMask(before + np.arange(new, dtype=np.int32)[None], np.arange(slots, dtype=np.int32)[None])
        expected = value_and_gradients((queries, keys, values), seen, "reference")
        for backend in ("dense", "blockwise"):
            assert_near(value_and_gradients((queries, keys, values), seen, backend), expected)


class TestDerivatives:
    """Every kind of derivative in forward mode, and products with the Hessian also without it."""

    @pytest.mark.parametrize("window", [None, pytest.param(3, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("backend", [pytest.param("dense", marks=pytest.mark.slow), "blockwise"])
    def test_forward_and_second_order_are_those_of_the_reference(self, backend, window):
        def loss(backend, forward_mode, arrays):
            mask = AttentionMask.causal(LENGTH, some_segments(2, LENGTH))
            options = dict(scale=0.5, window=window, backend=backend, forward_mode=forward_mode)
            return jnp.sum(jnp.sin(ops.attend(arrays[0], KVView(*arrays[1:]), mask, **options)))

        def products(backend, forward_mode, arrays, direction):
            gradient = jax.grad(partial(loss, backend, forward_mode))
            along = lambda scale: jax.tree.map(lambda x: scale * x, direction)
            return jax.vmap(lambda scale: jax.jvp(gradient, (arrays,), (along(scale),))[1])(jnp.arange(3.0))

        def derivatives(backend, arrays, direction):
            attend = partial(loss, backend, True)
            linear = jax.linearize(attend, arrays)[1]
            forward = jax.jvp(attend, (arrays,), (direction,)), linear(direction)
            reverse_of_forward = jax.grad(lambda direction: jnp.sin(linear(direction)))(direction)
            rematerialized = jax.jvp(jax.grad(jax.checkpoint(attend)), (arrays,), (direction,))
            return forward, reverse_of_forward, rematerialized, products(backend, True, arrays, direction)

        with jax.enable_x64(True):
            arrays, direction = (jax.tree.map(lambda x: x.astype(jnp.float64), operands(seed)) for seed in (0, 1))
            run = jax.jit(derivatives, static_argnums=0)
            found, expected = (run(name, arrays, direction) for name in (backend, "reference"))
            assert_near(found, expected, rtol=1e-9, atol=1e-11)
            without = jax.jit(products, static_argnums=(0, 1))(backend, False, arrays, direction)
            assert_near(without, expected[-1], rtol=1e-9, atol=1e-11)

    def test_saves_no_scores_for_the_backward_pass(self):
        queries, keys = jnp.zeros((2, 3, 40, 1, 4)), jnp.zeros((2, 3, 40, 4))
        attend = lambda q, k, v: ops.attend(q, KVView(k, v), AttentionMask.causal(40), scale=1.0, backend="dense")
        pull = jax.eval_shape(lambda *arrays: jax.vjp(attend, *arrays)[1], queries, keys, keys)
        assert max(kept.size for kept in jax.tree.leaves(pull)) <= queries.size


class TestParts:
    @given(rings(), st.integers(0, 99))
    def test_two_sets_of_keys_are_joined_by_merge(self, seen, seed):
        whole, joined = _whole_and_joined(*operands(seed), jax.tree.map(jax.device_put, seen))
        assert_near(joined, whole)


@jax.jit
def _whole_and_joined(queries, keys, values, seen):
    """Value and gradients from all keys at once, and from two parts of them."""
    halves = slice(None, 9), slice(9, None)
    parts = [(keys[..., h, :], values[..., h, :], seen.sliced(slice(None), h)) for h in halves]
    whole = forward_part(queries, keys, values, seen, scale=0.5)
    joined = combine(*(forward_part(queries, *part, scale=0.5) for part in parts))
    of_queries = QueryGradientInputs.of(queries, whole[1], whole[0], jnp.cos(whole[0]))
    of_whole = backward_part(of_queries, keys, values, seen, scale=0.5)
    of_parts = [backward_part(of_queries, *part, scale=0.5) for part in parts]
    of_joined = (
        of_parts[0][0] + of_parts[1][0],
        *(jnp.concatenate([a, b], axis=-2) for a, b in zip(of_parts[0][1:], of_parts[1][1:], strict=True)),
    )
    return (*whole, *of_whole), (*joined, *of_joined)


class TestPerDevice:
    @pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
    def test_long_rows_under_a_shard_map_that_checks_what_varies(self, packed, monkeypatch):
        """Whose loops must begin with what varies over the devices as their results do."""
        monkeypatch.setattr(blockwise, "block_side", lambda *_: 256)
        arrays = operands(0, (2, 1, 1024, 2, 8))
        segments = some_segments(2, 1024) if packed else None
        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

        def of_device(arrays, segments):
            attend = lambda q, view: ops.attend(q, view, AttentionMask.causal(1024, segments), scale=0.5)
            return value_and_gradients_of(attend, arrays)

        with record_backends() as taken:
            over = jax.shard_map(of_device, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=True)
            found = jax.jit(over)(arrays, segments)
        assert taken == {"blockwise": "1024 x 1024 scores"}
        expected = value_and_gradients(arrays, AttentionMask.causal(1024, segments), "reference")
        assert_near(found, expected, rtol=1e-4, atol=2e-5)


class TestMemory:
    @pytest.fixture(autouse=True)
    def real_blocks(self, monkeypatch):
        monkeypatch.setattr(blockwise, "block_side", SIDE)

    def test_blocks_fit_the_cache_of_a_cpu(self, monkeypatch):
        assert [SIDE(heads) for heads in (1, 4, 8, 16, 48, 4096)] == [512, 512, 512, 256, 128, 128]
        monkeypatch.setattr("llama_jax.ops.platform.lowering_platform", lambda: "gpu")
        assert SIDE(48) == 1024

    @staticmethod
    def temporaries(length, dtype=jnp.float32, direction=None):
        """Bytes of the gradients, or of their derivative or that of the result along a direction."""
        shapes = (1, 8, length, 1, 64), (1, 8, length, 64), (1, 8, length, 64)
        arrays = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
        mask = AttentionMask.causal(length)
        if direction is None:
            lowered = value_and_gradients.lower(arrays, mask, "auto")
        else:
            options = dict(scale=0.5, forward_mode=direction == "jvp")
            attend = lambda arrays: ops.attend(arrays[0], KVView(*arrays[1:]), mask, **options)
            function = attend if direction == "jvp" else jax.grad(lambda arrays: jnp.sum(jnp.sin(attend(arrays))))
            lowered = jax.jit(lambda arrays, along: jax.jvp(function, (arrays,), (along,))[1]).lower(arrays, arrays)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    def test_grows_with_the_length_and_not_with_its_square(self):
        """Of 32,768 tokens, 8 heads of 64: the reference's scores alone are 34 GB."""
        shorter, longer = self.temporaries(16_384), self.temporaries(32_768)
        assert longer < 2 * shorter
        assert longer < 0.5e9

    @pytest.mark.parametrize("direction", ["jvp", pytest.param("hvp", marks=pytest.mark.slow)])
    def test_of_derivatives_along_a_direction_as_well(self, direction):
        shorter, longer = (self.temporaries(length, direction=direction) for length in (8192, 16_384))
        assert longer < 2 * shorter
        assert longer < 0.5e9

    @pytest.mark.slow
    def test_bfloat16_is_not_copied_to_float32_to_be_sliced(self):
        shorter, longer = (self.temporaries(length, jnp.bfloat16) for length in (16_384, 32_768))
        kept = 8 * 16_384 * 64 * 4 * 4  # the gradients are summed in float32, and so is the mixture
        assert longer - shorter < 1.3 * kept

    @pytest.mark.slow
    def test_training_without_rematerialization_keeps_what_is_mixed_and_no_block(self):
        """Under `jax.checkpoint` with everything kept: linear memory, and no block of the forward pass is made again."""
        policy = jax.checkpoint_policies.save_anything_except_these_names("weight")

        def compiled(length, checkpointed):
            arrays = [jax.ShapeDtypeStruct((1, 4, length, *rest, 32), jnp.float32) for rest in ((1,), (), ())]
            seen = AttentionMask.causal(length)
            attend = lambda q, k, v: ops.attend(q, KVView(k, v), seen, scale=1.0, backend="blockwise")
            attend = jax.checkpoint(attend, policy=policy) if checkpointed else attend
            return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(attend(*a))), (0, 1, 2))).lower(*arrays).compile()

        short, long, plain = compiled(4096, True), compiled(8192, True), compiled(4096, False)
        assert long.memory_analysis().temp_size_in_bytes < 2.1 * short.memory_analysis().temp_size_in_bytes
        assert short.as_text().count(" while(") == plain.as_text().count(" while(") == 4


def problem(batch=8, new=2048, slots=None, heads=(8, 4), width=128, dtype=jnp.bfloat16, **told):
    slots = new if slots is None else slots
    return AttentionShape((batch, heads[0], new, heads[1], width), (batch, heads[0], slots, width), dtype, **told)


H100, T4, AMD, V5E = "NVIDIA H100 80GB HBM3", "Tesla T4", "AMD Instinct MI300X", "TPU v5 lite"
GPUS, CUT = {"data": 1, "fsdp": 4, "tensor": 2}, HeadSharding(("data", "fsdp"), ("tensor",))


class TestChoice:
    @pytest.mark.parametrize(
        ("platform", "kind", "asked", "name"),
        [
            # Training as `train` does it: packed.
            ("tpu", V5E, problem(segments=True), "splash"),
            ("tpu", V5E, problem(segments=True, mesh=GPUS, head_sharding=CUT), "splash"),
            ("tpu", V5E, problem(segments=True, mesh=GPUS), "blockwise"),
            ("gpu", H100, problem(segments=True), "cudnn"),
            ("gpu", H100, problem(segments=True, mesh=GPUS, head_sharding=CUT), "cudnn"),
            ("gpu", H100, problem(segments=True, dtype=jnp.float32), "blockwise"),
            ("gpu", T4, problem(new=256), "dense"),
            ("gpu", AMD, problem(new=256), "dense"),
            ("cpu", "cpu", problem(batch=8, new=256, heads=(6, 1), width=48, dtype=jnp.float32, segments=True), "dense"),
            ("cpu", "cpu", problem(batch=8, new=256, heads=(6, 1), width=48, segments=True), "blockwise"),
            ("cpu", "cpu", problem(segments=True, dtype=jnp.float32), "blockwise"),
            # A prompt: its first piece whole rows, its later ones over the cache.
            ("tpu", V5E, problem(batch=1, new=512), "splash"),
            ("tpu", V5E, problem(batch=1, new=96), "dense"),
            ("tpu", V5E, problem(batch=1, new=512, slots=8192, ordered=False), "blockwise"),
            ("gpu", H100, problem(batch=1, new=512), "cudnn"),
            ("gpu", H100, problem(batch=1, new=512, slots=8192, ordered=False), "cudnn"),
            # Decoding.
            ("tpu", V5E, problem(new=1, slots=8192, ordered=False), "dense"),
            ("gpu", H100, problem(new=1, slots=8192, ordered=False), "dense"),
            ("cpu", "cpu", problem(new=1, slots=8192, ordered=False), "dense"),
            ("gpu", H100, problem(new=2, slots=8192, ordered=False), "dense"),  # drafts, which copy no slots
            ("gpu", H100, problem(new=16, slots=8192, ordered=False), "dense"),
        ],
    )
    def test_names(self, platform, kind, asked, name):
        assert choose_backend(platform, kind, asked)[0] == name

    @pytest.mark.parametrize(
        ("platform", "kind", "asked", "reason"),
        [
            (
                "gpu",
                H100,
                problem(dtype=jnp.float32),
                "bfloat16 or float16, not in float32; 2048 x 2048 scores",
            ),
            ("gpu", H100, problem(width=100), r"a multiple of 8; these have 100"),
            ("gpu", H100, problem(new=2049, segments=True), "even numbers of queries and keys, not 2049 x 2049"),
            ("gpu", T4, problem(), "needs compute capability 8.0, which Tesla T4 does not have"),
            ("gpu", AMD, problem(), "cudnn needs an NVIDIA GPU, this is AMD"),
            ("tpu", V5E, problem(new=100), "multiples of 128 and heads in multiples of 64; these are 100 and 128"),
            ("tpu", V5E, problem(ordered=False), "splash supports whole rows only"),
            ("tpu", V5E, problem(mesh=GPUS), "no sharding of rows and heads over the mesh is given"),
            ("tpu", V5E, problem(batch=6, mesh=GPUS, head_sharding=CUT), r"6 rows cannot be sharded over data\*fsdp=4"),
            (
                "tpu",
                V5E,
                problem(heads=(1, 8), mesh=GPUS, head_sharding=CUT),
                r"1 key/value heads cannot be sharded over tensor=2",
            ),
            ("tpu", V5E, problem(new=1, slots=64), "a single query on tpu: 1 x 64 scores"),
            ("cpu", "cpu", problem(new=256), "rows of 256 tokens in 16 bits on a CPU"),
        ],
    )
    def test_reasons(self, platform, kind, asked, reason):
        assert re.search(reason, choose_backend(platform, kind, asked)[1])

    @pytest.mark.parametrize(
        ("backend", "message"),
        [
            ("flash", r"attention backend='flash' must be one of auto, reference, dense, blockwise, cudnn, splash"),
            ("cudnn", r"attention backend='cudnn': cudnn needs an NVIDIA GPU, this is cpu"),
            ("splash", r"attention backend='splash': splash needs a TPU, this is cpu"),
        ],
    )
    def test_what_cannot_be_is_refused(self, backend, message):
        queries, *rest = operands()
        with pytest.raises(ConfigError, match=message):
            ops.attend(queries, KVView(*rest), AttentionMask.causal(LENGTH), scale=1.0, backend=backend)

    def test_a_program_for_other_devices_is_traced_for_them(self):
        """As `estimate` does for devices that are not there."""
        device = jax.sharding.AbstractDevice(device_kind=V5E, num_cores=1, platform="tpu")
        mesh = jax.sharding.AbstractMesh((4, 2), ("fsdp", "tensor"), (AxisType.Auto,) * 2, abstract_device=device)
        queries, keys, values = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in operands(0, (8, 2, 256, 2, 64)))
        head_sharding = HeadSharding(("fsdp",), ("tensor",))
        attend = lambda q, k, v: ops.attend(
            q, KVView(k, v), AttentionMask.causal(256), scale=1.0, head_sharding=head_sharding
        )
        with jax.sharding.use_abstract_mesh(mesh), record_backends() as taken:
            jaxpr = jax.make_jaxpr(attend)(queries, keys, values)
        assert taken == {"splash": "on TPU v5 lite"}
        assert "shard_map" in str(jaxpr)

    def test_the_log_says_it_to_who_observes_once(self, caplog):
        def trace(length):
            arrays = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(0, (1, 1, length, 1, 2)))
            jax.eval_shape(lambda q, k, v: ops.attend(q, KVView(k, v), AttentionMask.causal(length), scale=1.0), *arrays)

        with caplog.at_level(logging.INFO, "llama_jax.attention"), record_backends() as taken:
            trace(1024)
            trace(1024)
            trace(512)
        assert caplog.messages == ["attention: blockwise (1024 x 1024 scores)", "attention: dense (512 x 512 scores)"]
        assert taken == {"blockwise": "1024 x 1024 scores", "dense": "512 x 512 scores"}

    @pytest.mark.parametrize(
        ("change", "told", "message"),
        [
            ({}, {"window": 0}, r"window=0 must be an integer from 1"),
            ({}, {"window": 1.5}, r"window=1.5 must be an integer"),
            ({}, {"window": 2**40}, r"must be an integer from 1"),
            ({"query_segments": jnp.zeros((2, LENGTH), jnp.int32)}, {}, r"for both queries and keys, or for neither"),
            (
                {"query_positions": jnp.zeros((2, 1, LENGTH), jnp.int32)},
                {},
                r"query_positions are \[2, 1, 23\]",
            ),
            ({"key_positions": jnp.zeros((1, 9), jnp.int32)}, {}, r"key_positions are \[1, 9\]"),
        ],
    )
    def test_nonsense(self, change, told, message):
        queries, *rest = operands()
        with pytest.raises(ConfigError, match=message):
            ops.attend(queries, KVView(*rest), AttentionMask.causal(LENGTH).replace(**change), scale=1.0, **told)

    def test_nothing_at_all(self):
        queries, keys, values = operands()
        with pytest.raises(ConfigError, match=r"must not be empty"):
            ops.attend(queries, KVView(keys[..., :0, :], values[..., :0, :]), AttentionMask.causal(LENGTH), scale=1.0)


def piece_over_a_cache(batch, new, slots):
    """A later piece of a prompt: rows of different lengths, one of them without a real token."""
    lengths = np.array([[slots - new], *[[3]] * (batch - 1)])
    positions = lengths + np.arange(new)
    positions[-1, 5:] = NO_QUERY
    return AttentionMask(positions.astype(np.int32), np.arange(slots, dtype=np.int32)[None])


class TestKernels:
    @pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 100])
    @pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
    def test_cudnn_is_given_what_it_means(self, packed, window, monkeypatch):
        """Computed by XLA in cuDNN's place: layout, scale, mask, window and blocks are those of the reference."""
        monkeypatch.setattr("llama_jax.ops.attention.kernels.MIN_MASKED_QUERIES", 64)
        given_as = self.by_xla(monkeypatch)
        arrays = operands(0, (2, 2, 270, 3, 8))
        seen = AttentionMask.causal(270, some_segments(2, 270) if packed else None)
        expected = value_and_gradients(arrays, seen, "reference", window)
        found = value_and_gradients_of(lambda q, view: cudnn(q, *view, seen, scale=0.5, window=window), arrays)
        assert_near(found, expected, rtol=1e-4, atol=2e-5)
        assert len(given_as) == (4 if packed else 1)
        assert all(("mask" in told) == packed for told in given_as)

    @pytest.mark.slow
    def test_cudnn_reads_a_cache(self, monkeypatch):
        self.by_xla(monkeypatch)
        (queries, *_), (_, keys, values) = operands(0, (2, 2, 16, 3, 8)), operands(1, (2, 2, 64, 3, 8))
        seen = jax.tree.map(jnp.asarray, piece_over_a_cache(2, 16, 64))
        expected = ops.attend(queries, KVView(keys, values), seen, scale=0.5, window=20, backend="reference")
        assert_near(cudnn(queries, keys, values, seen, scale=0.5, window=20), expected)

    @staticmethod
    def by_xla(monkeypatch):
        real, told = jax.nn.dot_product_attention, []

        def in_its_place(*args, **options):
            told.append(options)
            return real(*args, **options | {"implementation": "xla"})

        monkeypatch.setattr(jax.nn, "dot_product_attention", in_its_place)
        return told

    @pytest.mark.skipif("LLAMA_JAX_TEST_GPU" not in __import__("os").environ, reason="runs cuDNN's kernel: needs a GPU")
    @pytest.mark.slow
    @pytest.mark.parametrize("window", [None, 100])
    @pytest.mark.parametrize("packed", [False, True])
    def test_cudnn_on_a_gpu(self, packed, window):
        arrays = tuple(x.astype(jnp.bfloat16) for x in operands(0, (2, 2, 2048, 3, 64)))
        seen = AttentionMask.causal(2048, some_segments(2, 2048) if packed else None)
        expected = value_and_gradients(jax.tree.map(lambda x: x.astype(jnp.float32), arrays), seen, "reference", window)
        assert_close(value_and_gradients(arrays, seen, "cudnn", window), expected, 0.02)

    @pytest.mark.parametrize(
        ("window", "packed"),
        [pytest.param(None, True, marks=pytest.mark.slow), pytest.param(100, False, marks=pytest.mark.slow)],
    )
    def test_splash_interpreted(self, window, packed):
        """The kernel itself, run step by step on the CPU, with its gradients."""
        arrays = operands(0, (2, 2, 256, 2, 64))
        seen = AttentionMask.causal(256, some_segments(2, 256) if packed else None)
        kernel = partial(splash, mask=seen, scale=0.5, window=window, interpret=True)
        found = jax.jit(partial(value_and_gradients_of, lambda q, view: kernel(q, *view)))(arrays)
        assert_near(found, value_and_gradients(arrays, seen, "reference", window), rtol=1e-4, atol=2e-5)

    @pytest.mark.slow
    def test_splash_divided_over_devices(self):
        """Rows over two devices, heads over two: each interprets the kernel for its own."""
        arrays = operands(0, (2, 2, 128, 2, 64))
        seen = AttentionMask.causal(128, some_segments(2, 128))
        mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
        kernel = lambda q, k, v, seen: splash(q, k, v, seen, scale=0.5, interpret=True)

        @partial(jax.jit, out_shardings=None)
        def run(arrays):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                divided = over_devices(kernel, HeadSharding(("fsdp",), ("tensor",)))
                return value_and_gradients_of(lambda q, view: divided(q, *view, seen), arrays)

        placed = jax.device_put(arrays, jax.sharding.NamedSharding(mesh, P("fsdp", "tensor")))
        found = run(placed)
        assert {x.sharding.spec for x in jax.tree.leaves(found)} == {P("fsdp", "tensor")}
        assert_near(found, value_and_gradients(arrays, seen, "reference"), rtol=1e-4, atol=2e-5)
