"""Rows that are divided over devices: what attention makes of them, what they send, and what prompts leave in the cache."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit_init, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from training_options import step_options

import llama_jax
from llama_jax import RopeScaling, Sampling
from llama_jax.analysis.collectives import find_collectives
from llama_jax.analysis.memory import train_programs
from llama_jax.errors import MeshError
from llama_jax.inference import decode
from llama_jax.inference.prepare_inputs import prepare_inputs
from llama_jax.model.forward_options import Positions
from llama_jax.ops.attention import AttentionMask, KVView
from llama_jax.ops.attention.reference import reference
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.padding import pad_params, padded_config
from llama_jax.parallel.ring_attention import (
    check_length,
    join_sequence,
    ring_attention,
    sequence_splitter,
    split_sequence,
    zigzag_positions,
)
from llama_jax.parallel.ring_prefill import prefill_over
from llama_jax.parallel.sharding import cache_specs, param_specs, sharded_train_step, shardings
from llama_jax.training.batch import Batch, to_next_token_batch
from llama_jax.training.optimizer import adamw
from llama_jax.training.step import init_state

ROWS, HEADS, GROUPS, LENGTH, WIDTH = 4, 2, 3, 32, 8
CONFIG = tiny_config(n_heads=8, max_seq_len=128)


def arrays(dtype=np.float32):
    """Queries, keys, values and the gradient of what is mixed, of whole rows."""
    rng = np.random.default_rng(0)
    by_query = (ROWS, HEADS, LENGTH, GROUPS, WIDTH), (ROWS, HEADS, LENGTH, WIDTH)
    shapes = by_query[0], by_query[1], by_query[1], by_query[0]
    return tuple(jax.device_put(np.asarray(rng.normal(size=shape), dtype)) for shape in shapes)


def of_parts(mesh, function):
    """A function of rows and of segments [B, T], which runs on the parts and whose result is joined."""

    def run(queries, keys, values, segments):
        parts = jax.tree.map(lambda x: split_sequence(mesh, x.swapaxes(1, 2)).swapaxes(1, 2), (queries, keys, values))
        own = None if segments is None else split_sequence(mesh, segments)
        queries, keys, values = parts
        mixed = function(queries, KVView(keys, values), AttentionMask.causal(queries.shape[2], own), scale=0.3)
        return join_sequence(mesh, mixed, axis=2, spec=P("tensor"))

    return run


def whole_rows(window, queries, keys, values, segments):
    return reference(queries, keys, values, AttentionMask.causal(LENGTH, segments), scale=0.3, window=window)


def with_gradients(function):
    def run(queries, keys, values, of_mixed, segments):
        mixed, back = jax.vjp(lambda *args: function(*args, segments), queries, keys, values)
        return mixed, *back(of_mixed.astype(mixed.dtype))

    return jax.jit(run)


def of_ring(sizes, window=None):
    mesh = make_mesh(sizes)
    return with_gradients(of_parts(mesh, partial(ring_attention(mesh), window=window)))


@pytest.fixture(scope="module")
def packed():
    """On a mesh where it matters which way keys go around, and by the reference, both with a window."""
    return of_ring(MeshSizes(data=2, context=4), window=11), with_gradients(partial(whole_rows, 11))


@given(st.lists(st.integers(1, LENGTH), min_size=ROWS, max_size=ROWS), st.integers(0, 2**16))
def test_packed_rows_are_those_of_the_reference(packed, documents, seed):
    """Of segments in any order, also of one that comes again: a query sees its own only."""
    rng = np.random.default_rng(seed)
    segments = np.stack([np.repeat(rng.permutation(n), LENGTH // n + 1)[:LENGTH] for n in documents]).astype(np.int32)
    found = packed[0](*arrays(), segments)
    with jax.enable_x64(True):
        wanted = packed[1](*arrays(np.float64), segments)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        (MeshSizes(context=8), None),
        (MeshSizes(context=4, tensor=2), 5),
        pytest.param(MeshSizes(fsdp=2, context=4), 17, marks=pytest.mark.nightly),
        pytest.param(MeshSizes(context=2), 1, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_every_ring_is_the_reference(sizes, window):
    found = of_ring(sizes, window)(*arrays(), None)
    with jax.enable_x64(True):
        wanted = with_gradients(partial(whole_rows, window))(*arrays(np.float64), None)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_16_bit_rows_are_close_and_sent_as_such():
    mesh = make_mesh(MeshSizes(context=4))
    run, given = of_ring(MeshSizes(context=4)), arrays(jnp.bfloat16)
    found, wanted = run(*given, None), with_gradients(partial(whole_rows, None))(*arrays(), None)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.linalg.norm(np.float32(a) - b) < 0.02 * np.linalg.norm(b)
    sent = [
        c for c in find_collectives(run.lower(*given, None).compile().as_text(), mesh) if c.opcode == "collective-permute"
    ]
    found = sorted((*c.dtypes, c.loops) for c in sent)
    # Keys and values forward and backward; their gradients at every turn, and home.
    assert found == [("f32", ())] * 2 + [("f32", (3,))] * 2 + [("u16", (3,))] * 4


@given(st.integers(1, 12), st.integers(1, 6))
def test_at_every_turn_each_device_has_as_many_scores_to_compute(parts, chunk):
    places = [np.asarray(zigzag_positions(i, parts, 2 * parts * chunk)) for i in range(parts)]
    np.testing.assert_array_equal(np.sort(np.concatenate(places)), np.arange(2 * parts * chunk))
    scores = [[np.sum(places[(i - turn) % parts] <= places[i][:, None]) for i in range(parts)] for turn in range(parts)]
    assert all(len(set(turn)) == 1 for turn in scores)
    assert all(turn[0] == 2 * chunk * chunk for turn in scores[1:])


def test_what_was_divided_is_joined_as_it_was():
    mesh = make_mesh(MeshSizes(data=2, context=4))
    x = jnp.arange(4 * 16 * 3).reshape(4, 16, 3)
    parts = split_sequence(mesh, x)
    assert parts.shape == (16, 4, 3)
    np.testing.assert_array_equal(join_sequence(mesh, parts), x)
    # Rows of a device follow each other: the first parts of the first two rows, then their second parts.
    np.testing.assert_array_equal(parts[3, :, 0], x[1, jnp.asarray([2, 3, 12, 13]), 0])


@pytest.mark.parametrize(("length", "would_do"), [(31, "24 or 32"), (33, "32 or 40"), (7, "8"), (12, "8 or 16")])
def test_a_length_that_cannot_be_divided_is_named_with_what_would_do(length, would_do):
    with pytest.raises(MeshError, match=rf"length={length} cannot be split over 2\*context=8; {would_do} would do"):
        check_length(MeshSizes(context=4), length)
    check_length(MeshSizes(data=4), length)


def test_what_a_ring_cannot_do_is_refused():
    mesh = make_mesh(MeshSizes(context=4))
    queries, keys, values, _ = arrays()
    with pytest.raises(MeshError, match="omit the cache"):
        ring_attention(mesh)(queries, KVView(keys, values), AttentionMask.causal(LENGTH).replace(ordered=False), scale=1.0)
    with pytest.raises(MeshError, match=r"batch=3 cannot be split over data\*fsdp=2"):
        sequence_splitter(make_mesh(MeshSizes(data=2, context=2)))(to_next_token_batch(Batch(np.zeros((3, 33), np.int32))))
    with pytest.raises(MeshError, match=r"length=12 cannot be split over 2\*context=8; 8 or 16 would do"):
        train_programs(CONFIG, mesh, 2, 12)
    with pytest.raises(MeshError, match=r"dim=32 cannot be split over fsdp\*context=3; 1, 2, 4, 8, 16, 32 would do"):
        param_specs(CONFIG, MeshSizes(context=3))


@pytest.mark.slow
def test_a_step_whose_frequencies_depend_on_the_length_is_that_of_one_device():
    """Of which each device sees a part; here of the documents of a row."""
    scaling = RopeScaling(kind="dynamic", factor=2.0, original_max_seq_len=8)
    config, optimizer = replace(CONFIG, rope_scaling=scaling), adamw(1e-3)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, config.vocab_size, (4, LENGTH + 1), np.int32)
    segments = np.repeat([[1] * 20 + [2] * 13, [1] * 7 + [2] * 26], 2, axis=0).astype(np.int32)
    places = np.concatenate([[*range(20), *range(13)], [*range(7), *range(26)]]).reshape(2, -1).repeat(2, axis=0)
    batch = Batch(tokens, segments, places.astype(np.int32))
    found = []
    for sizes in (MeshSizes(), MeshSizes(data=2, context=4)):
        state = init_state(optimizer, jit_init(config, jax.random.key(0)))
        step = jax.jit(
            partial(sharded_train_step(config, make_mesh(sizes)), optimizer, options=step_options(remat="full", chunk=8))
        )
        state, metrics = step(state, batch)
        found.append((metrics["loss"], metrics["grad_norm"], state.opt_state))
    for a, b in zip(*map(jax.tree.leaves, jax.device_get(found)), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


@pytest.mark.slow
def test_activations_fall_as_the_devices_rise():
    """By the plan's bytes for each token more: those of the blocks of scores, which do not grow, are left out."""

    def per_token(context):
        plans = [train_programs(CONFIG, make_mesh(MeshSizes(context=context)), 1, length) for length in (2**15, 2**16)]
        short, long = (program.compile().memory_analysis().temp_size_in_bytes for (program,) in plans)
        return (long - short) / 2**15

    # Beside its share a device has keys and values that come, and the sums of their gradients.
    assert per_token(8) < 1.4 * per_token(1) / 8


def on_mesh(config, sizes, params):
    placement = shardings(make_mesh(sizes), param_specs(config, sizes, padded=True))
    return padded_config(config, sizes), jax.device_put(pad_params(config, sizes, params), placement)


def kept_by(cache, length):
    """Keys and values [L, B, T, K, H] of the first tokens of rows."""
    found = np.asarray(cache.pages)[:, np.asarray(cache.table)]  # [L, B, n, page, 2K, H]
    found = found.reshape(*found.shape[:2], -1, *found.shape[4:])[:, :, :length]
    return found[..., ::2, :], found[..., 1::2, :]


@pytest.mark.parametrize(
    ("sizes", "scaling"),
    [
        pytest.param(MeshSizes(data=2, context=2, tensor=2), None, marks=pytest.mark.slow),
        pytest.param(
            MeshSizes(context=2, tensor=4),  # which copies heads
            RopeScaling(kind="dynamic", factor=2.0, original_max_seq_len=8),
            marks=pytest.mark.slow,
        ),
        pytest.param(MeshSizes(fsdp=2, context=4), None, marks=pytest.mark.slow),
    ],
    ids=["heads", "copied heads of dynamic rope", "columns"],
)
def test_a_prompt_is_read_as_by_one_device(sizes, scaling):
    config = replace(CONFIG, rope_scaling=scaling)
    params = jit_init(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, LENGTH), np.int32)
    lengths = np.array([LENGTH, 13], np.int32)
    empty = decode.init_prefill(config, params, 2, LENGTH)
    cache, hidden = jax.jit(partial(decode.prefill, config))(params, empty, tokens, Positions(lengths, rope_lengths=lengths))
    held, spread = on_mesh(config, sizes, params)
    mesh = make_mesh(sizes)
    found, last = jax.jit(prefill_over(held, mesh, LENGTH + 5))(spread, tokens, lengths)
    np.testing.assert_allclose(last, hidden, atol=1e-5)
    np.testing.assert_array_equal(found.length, lengths)
    assert found.capacity >= LENGTH + 5
    times = held.n_kv_heads // config.n_kv_heads
    for mine, theirs in zip(kept_by(found, LENGTH), kept_by(cache, LENGTH), strict=True):
        np.testing.assert_allclose(mine[:, :, :, ::times], theirs, atol=1e-5)
    specs = cache_specs(held, sizes, 2)
    for mine, spec in ((found.pages, specs.pages), (found.table, specs.table), (found.length, specs.length)):
        assert mine.sharding.is_equivalent_to(NamedSharding(mesh, spec), mine.ndim)


@pytest.mark.slow
def test_generation_goes_on_from_a_prompt_that_was_divided():
    params = jit_init(CONFIG, jax.random.key(0))
    prompts = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, 60)).tolist()
    wanted = llama_jax.generate(CONFIG, params, prompts, max_new_tokens=4)
    config, spread = on_mesh(CONFIG, MeshSizes(context=8), params)
    # By itself it generates there too, each device along `context` the same.
    assert [row.tokens for row in llama_jax.generate(config, spread, prompts, max_new_tokens=4)] == [wanted[0].tokens]
    tokens, lengths, request = prepare_inputs(config, prompts, 4, Sampling(), ())
    read = jax.jit(prefill_over(config, make_mesh(MeshSizes(context=8)), 128))
    reading = decode.PrefillState(*read(spread, tokens, lengths))
    started, _ = decode.begin_decode(config, spread, reading, tokens, lengths, request)
    _, _, found = jax.jit(partial(decode.decode, config, max_chunks=1))(spread, started, 1)
    assert [int(started.token[0]), *found.tokens[0][np.asarray(found.valid[0])].tolist()] == wanted[0].tokens
