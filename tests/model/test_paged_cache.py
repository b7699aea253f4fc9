"""The paged cache: rows read in ragged passes have the hidden states that each has alone."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit_init, tiny_config

from llama_jax.config import LayerConfig, Parts, QueryScaling, RopeScaling
from llama_jax.errors import GenerationError
from llama_jax.model.cache import KVCache, gather_pages, init_cache, init_pages, repeat_rows
from llama_jax.model.forward import forward
from llama_jax.model.forward_options import Positions
from llama_jax.ops.attention import attend

PLAIN = tiny_config(n_layers=3, tie_embeddings=True)
DYNAMIC = RopeScaling("dynamic", 2.0, original_max_seq_len=16)
KINDS = {
    "plain": PLAIN,
    "windows and chunks": replace(PLAIN, layers=(LayerConfig(window=5), LayerConfig(chunk=7, rope="none"), LayerConfig())),
    "scaled": replace(PLAIN, rope_scaling=DYNAMIC, query_scaling=QueryScaling(0.1, 8)),
    "experts": replace(PLAIN, experts=4, experts_per_token=2),
}
PAGE, COUNT, WIDTH, TOKENS = 4, 40, 8, 12
read = jax.jit(forward, static_argnums=0)


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    config = KINDS[request.param]
    return config, jit_init(config, jax.random.key(0))


def own_attention(queries, view, seen, **options):
    return attend(queries, view, seen, **options)


def in_passes(config, params, texts, dtype=jnp.float32, seed=0):
    """The hidden states of rows of these tokens, of which each pass reads some more of some rows, and some padding."""
    rng, rows = random.Random(seed), len(texts)
    free = rng.sample(range(COUNT), COUNT)
    table, done, found = np.zeros((rows, WIDTH), np.int32), [0] * rows, [[] for _ in texts]
    pages = init_pages(config, COUNT, dtype, PAGE)
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        room, new = TOKENS - 1, []
        for r, text in enumerate(texts):
            new.append(min(rng.choice([0, 1, 1, 5, 9]), len(text) - done[r], room))
            room -= new[-1]
            for at in range(-(-done[r] // PAGE), -(-(done[r] + new[-1]) // PAGE)):
                table[r, at] = free.pop()
        starts = np.cumsum([0, *new]).astype(np.int32)
        tokens, whole = np.zeros((TOKENS, 1), np.int32), np.ones((TOKENS, 1), np.int32)
        for r, text in enumerate(texts):
            part = slice(starts[r], starts[r + 1])
            tokens[part, 0], whole[part] = text[done[r] : done[r] + new[r]], len(text)
        cache = KVCache(pages, table, np.asarray(done, np.int32))
        positions = Positions(starts=starts, rope_lengths=whole)
        hidden, after = read(config, params, tokens, cache, positions=positions)
        pages, hidden = after.pages, np.asarray(hidden)
        done = [at + n for at, n in zip(done, new, strict=True)]
        assert after.length.tolist() == done
        for r in range(rows):
            found[r].extend(hidden[starts[r] : starts[r + 1], 0])
    return [np.array(row) for row in found]


LONGEST = 30


def some_texts(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, PLAIN.vocab_size, n) for n in (1, 13, 22, 4, LONGEST)]


def padded(text, length=LONGEST):
    """As a batch; nothing sees the tokens that come after its own, and one program reads all lengths."""
    return np.pad(text, (0, length - len(text)))[None]


@pytest.mark.parametrize("parts", [Parts(), Parts(attend=own_attention)], ids=["pages", "own attention"])
def test_rows_of_ragged_passes_are_what_each_is_alone(model, parts):
    config, params = model
    own = replace(config, parts=parts)
    for text, hidden in zip(some_texts(), in_passes(own, params, some_texts()), strict=True):
        alone, _ = read(config, params, padded(text), positions=Positions(rope_lengths=np.array([len(text)], np.int32)))
        np.testing.assert_allclose(hidden, alone[0, : len(text)], atol=2e-5)


def test_in_int8_they_are_what_each_is_alone():
    params = jit_init(PLAIN, jax.random.key(0))
    for text, hidden in zip(some_texts(), in_passes(PLAIN, params, some_texts(), jnp.int8), strict=True):
        alone, _ = read(PLAIN, params, padded(text), init_cache(PLAIN, 1, 32, jnp.int8))
        np.testing.assert_allclose(hidden, alone[0, : len(text)], atol=1e-3)


def test_rows_share_pages_of_what_they_begin_with():
    params = jit_init(PLAIN, jax.random.key(0))
    texts = [[*range(8), 9, 9, 9], [*range(8), 5, 3]]
    pages = init_pages(PLAIN, COUNT, page_size=PAGE)
    cache = KVCache(pages, np.array([[3, 1, 0]], np.int32), np.zeros(1, np.int32))
    _, cache = read(PLAIN, params, np.array([texts[0]], np.int32).T, cache, positions=Positions(starts=np.array([0, 11])))
    shared = KVCache(cache.pages, np.array([[3, 1, 7]], np.int32), np.array([8], np.int32))
    hidden, _ = read(PLAIN, params, np.array([[5], [3]], np.int32), shared, positions=Positions(starts=np.array([0, 2])))
    alone, _ = read(PLAIN, params, np.array([texts[1]], np.int32))
    np.testing.assert_allclose(hidden[:, 0], alone[0, -2:], atol=2e-5)


def test_branches_share_whole_pages_and_go_on_alone():
    params = jit_init(PLAIN, jax.random.key(0))
    prompts, lengths = np.arange(2 * 40).reshape(2, 40) % PLAIN.vocab_size, np.array([37, 16], np.int32)
    _, cache = read(PLAIN, params, prompts, init_cache(PLAIN, 2, 40), positions=Positions(lengths))
    rows = repeat_rows(cache, 3, 20)
    assert rows.pages.shape[1] == 2 * 3 + 6 * 3
    assert all(len(set(rows.table[3 * i : 3 * i + 3, lengths[i] // 16 - 1].tolist())) == 1 for i in range(2))
    new = np.random.default_rng(0).integers(0, PLAIN.vocab_size, (6, 20))
    hidden = []
    for part in (new[:, :1], new[:, 1:]):
        some, rows = read(PLAIN, params, part, rows)
        hidden.append(some)
    hidden = np.concatenate(hidden, axis=1)
    for row in range(6):
        text = np.concatenate([prompts[row // 3, : lengths[row // 3]], new[row]])
        alone, _ = read(PLAIN, params, padded(text, 57))
        np.testing.assert_allclose(hidden[row], alone[0, lengths[row // 3] : len(text)], atol=2e-5)


def test_invalid_arguments():
    params = jit_init(PLAIN, jax.random.key(0))
    cache = KVCache(init_pages(PLAIN, 3), np.zeros((2, 1), np.int32), np.zeros(2, np.int32))
    tokens, starts = np.zeros((2, 1), np.int32), np.array([0, 1, 2], np.int32)
    for said, tokens_, cache_, params_, positions in (
        ("tokens have batch=3 but the cache has 2 rows", np.zeros((3, 1), np.int32), cache, params, Positions()),
        ("17 tokens after 0 do not fit", np.zeros((2, 17), np.int32), cache, params, Positions()),
        (r"starts \[2\] for 2 rows", tokens, cache, params, Positions(starts=starts[:2])),
        (r"tokens \[1, 2\]", tokens.T, cache, params, Positions(starts=starts)),
        ("does not match the configuration", tokens, cache.replace(pages=cache.pages[1:]), params, Positions(starts=starts)),
        ("starts are for rows of a cache", tokens, None, params, Positions(starts=starts)),
    ):
        with pytest.raises(GenerationError, match=said):
            forward(PLAIN, params_, tokens_, cache_, positions=positions)
    assert gather_pages(cache.view(1, starts).replace(pages=cache.pages, layer=0), 2, jnp.float32).keys.shape == (
        2,
        2,
        16,
        8,
    )
