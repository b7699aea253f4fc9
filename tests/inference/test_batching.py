"""Rows that come and go: each gets what it would get alone, whatever was in its row before."""

from collections import deque
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from conftest import sharp
from llama_jax.inference.batching import empty_state, insert, step

import llama_jax
from llama_jax import Sampling
from llama_jax.errors import GenerationError
from llama_jax.inference.requests import prepare
from llama_jax.inference.state import empty_reading, read, start
from llama_jax.model.options import Places

CAPACITY, NEW = 64, 6
PROMPTS = [[1, 5, 7], [1], list(range(40, 52)), [9] * 11]


@pytest.fixture(scope="module")
def model():
    """Random, with sharp logits so that rounding between batch sizes cannot turn an argmax over."""
    config = replace(llama_jax.preset("stories-260k"), n_layers=2)
    return config, sharp(config, jax.random.key(1))


@pytest.fixture(scope="module")
def programs(model):
    bound = (partial(function, *model) for function in (read, start, step))
    return [jax.jit(function) for function in (*bound, insert)]


def serve(model, programs, prompts, stop_tokens, rows):
    """The tokens of each prompt, served as rows become free; `stop_tokens` are those of each."""
    jit_read, jit_start, jit_step, jit_insert = programs
    config, params = model
    widest = max(stop_tokens, key=len)
    _, _, request = prepare(config, [[1]] * rows, NEW, Sampling(), widest)
    empty = jax.jit(
        lambda params, request: empty_state(config, params, empty_reading(config, params, rows, CAPACITY), request)
    )
    state = empty(params, request)
    waiting, served, found = deque(range(len(prompts))), [None] * rows, [[] for _ in prompts]
    while waiting or not state.done.all():
        for row in np.flatnonzero(state.done):
            if waiting:
                served[row] = waiting.popleft()
                ids, lengths, one = prepare(config, [prompts[served[row]]], NEW, Sampling(), stop_tokens[served[row]])
                reading = empty_reading(config, params, 1, CAPACITY)
                reading = jit_read(reading, ids, Places(lengths, rope_lengths=lengths))
                one, first = jit_start(reading, ids, lengths, one)
                found[served[row]] += first.tokens[0].tolist()
                state = jit_insert(state, np.int32(row), one)
        state, piece = jit_step(state)
        for row in np.flatnonzero(piece.valid[:, 0]):
            found[served[row]].append(int(piece.tokens[row, 0]))
    return found


@pytest.mark.slow
def test_requests_served_in_two_rows_get_what_generate_gives(model, programs):
    wanted = llama_jax.generate(*model, PROMPTS, max_new_tokens=NEW)
    found = serve(model, programs, PROMPTS, [()] * len(PROMPTS), rows=2)
    assert found == [result.tokens for result in wanted]


@pytest.mark.slow
def test_the_stop_tokens_of_a_row_are_not_those_of_the_next_one(model, programs):
    """Of the one before, with five, the fifth stood beyond the four places of the one after, and ended it."""
    alone = [result.tokens for result in llama_jax.generate(*model, PROMPTS[:2], max_new_tokens=NEW)]
    others = [token for token in range(300, 400) if token not in (*alone[0], *alone[1])][:4]
    found = serve(model, programs, PROMPTS[:2], [(*others, alone[1][2]), ()], rows=1)
    assert found[1] == alone[1]


def test_more_stop_tokens_than_there_is_room_for(model, programs):
    config, params = model
    narrow, wide = (prepare(config, [[1]], NEW, Sampling(), range(3, 3 + count))[2] for count in (4, 5))
    state, one = (
        empty_state(config, params, empty_reading(config, params, 1, CAPACITY), request) for request in (narrow, wide)
    )
    with pytest.raises(GenerationError, match="a row with 8 places for stop tokens does not fit into a state with 4"):
        insert(state, np.int32(0), one)


def test_a_row_that_does_not_fit_is_refused(model):
    config, params = model
    alone = params

    def state(rows, capacity=CAPACITY, **cache):
        _, _, request = prepare(config, [[1]] * rows, NEW, Sampling(), ())
        options = llama_jax.CacheOptions(**cache)
        return empty_state(config, alone, empty_reading(config, alone, rows, capacity, options), request)

    whole = state(2)
    for message, call in (
        (r"row=2 is not one of the state's 2 rows", lambda: insert(whole, np.int32(2), state(1))),
        (r"row=-1 is not one", lambda: insert(whole, np.int32(-1), state(1))),
        ("a state of 2 rows cannot be inserted", lambda: insert(whole, np.int32(0), state(2))),
        ("cache has window=None does not fit into window=8", lambda: insert(state(2, window=8), np.int32(0), state(1))),
        ("cache has window=8 does not fit into window=None", lambda: insert(whole, np.int32(0), state(1, window=8))),
        ("sinks=2 does not fit into sinks=0", lambda: insert(state(2, window=8), np.int32(0), state(1, window=8, sinks=2))),
        ("another dtype", lambda: insert(state(2, dtype="int8"), np.int32(0), state(1))),
        ("128 slots does not fit into 64; `grow`", lambda: insert(whole, np.int32(0), state(1, 128))),
        ("with a window give both", lambda: insert(state(2, window=8), np.int32(0), state(1, 32, window=8))),
    ):
        with pytest.raises(GenerationError, match=message):
            call()
