"""Needle in a haystack: does a model find one sentence in a long text, and does that depend on its position?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llama_jax.config import LlamaConfig
from llama_jax.data.load_corpus import Progress
from llama_jax.model.cache import KVCache
from llama_jax.model.forward import forward, unembed
from llama_jax.model.options import Places
from llama_jax.model.params import Llama
from llama_jax.ops.platform import tracing_for
from llama_jax.runs.haystack import DIGITS, QUESTION, STATEMENT, Hidden, lay_prompt, prepare, word_starts
from llama_jax.runs.lengths import cut_pieces, empty_cache, rows_at_once
from llama_jax.tokenizers import Tokenizer


@dataclass(frozen=True)
class NeedleCell:
    """All trials of one length and depth.

    Attributes:
      length: tokens of the prompt with its answer.
      depth: where the needle stands: 0 at the beginning, 1 just before the question.
      trials: how many.
      exact: share of trials in which every token of the key was the most probable one: greedy decoding would write it.
      chosen: share in which the key was more probable than each of the wrong keys; 1 / (wrong keys + 1) by chance.
      rank: mean place of the key among all, from 1.
      log_probability: mean natural logarithm of the whole key's probability.
      margin: that minus the mean over the wrong keys: 0 for a model that does not find the needle, whatever its preferences
        among numbers. The most sensitive of these measures.
    """

    length: int
    depth: float
    trials: int
    exact: float
    chosen: float
    rank: float
    log_probability: float
    margin: float


@dataclass(frozen=True)
class NeedleTest:
    """What `needle` found: `cells` by length, then by depth, both rising.

    Attributes:
      lengths, depths: of the cells.
      wrong_keys: the number of wrong keys that each key was compared with.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    wrong_keys: int
    cells: tuple[NeedleCell, ...]

    def grid(self, name: str) -> np.ndarray:
        """One field of every cell, by its name: float64[depths, lengths]."""
        found = [getattr(cell, name) for cell in self.cells]
        return np.array(found, np.float64).reshape(len(self.lengths), len(self.depths)).T


def needle(
    config: LlamaConfig,
    params: Llama,
    tokenizer: Tokenizer,
    haystack: Sequence[int] | np.ndarray,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 10,
    wrong_keys: int = 9,
    seed: int = 0,
    statement: str = STATEMENT,
    question: str = QUESTION,
    digits: int = DIGITS,
    batch: int | None = None,
    progress: Progress | None = None,
) -> NeedleTest:
    """Hide a pass key in a text and measure whether the model says it when asked (Mohtashami and Jaggi 2023, section 4.2).

    Small models hardly ever give the key exactly to the last digit. So its probability is compared with those of other
    numbers with as many digits, which are not hidden: a model that has found the needle, if only in part, prefers the key.
    The trials hide the same numbers in turn. If `trials` is a multiple of `wrong_keys` + 1, each is hidden equally often,
    and the model's preferences among the numbers themselves cancel out.

    A prompt is assembled from tokens, so that it has exactly the requested length, its answer included: BOS if the
    vocabulary has one, haystack, needle, haystack, question. The needle is moved back by up to 64 tokens to stand between
    two words. A trial has the same key and the same haystack at every depth, and at every length as far as the haystack is
    shared, so that cells can be compared. The prompt is read in pieces through a cache, and logits are computed for the
    answers alone.

    Args:
      haystack: int[n] tokens of a text without special ones, at least as many as the longest prompt has.
      lengths: tokens of a prompt with its answer. They may exceed `config.max_seq_len`, to measure what happens there.
      depths: where the needle stands in the haystack, from 0 to 1.
      trials: of each length and depth, each with a piece of the haystack of its own.
      wrong_keys: numbers to compare each key with.
      seed: of keys and pieces.
      statement, question: texts with {key} in them; the question ends with it.
      digits: of a key.
      batch: prompts that are read at once; by default 1 on a CPU and as many as make up 32,768 tokens elsewhere.
      progress: wraps the range of all pieces of all prompts, as `tqdm.tqdm` does.

    Raises:
      UserError: impossible values, a haystack that is too short, or a length that has no room for the question.
      TokenizerError: a vocabulary that does not tell the keys apart.
    """
    hidden = Hidden(
        lengths=lengths,
        depths=depths,
        trials=trials,
        wrong_keys=wrong_keys,
        seed=seed,
        statement=statement,
        question=question,
        digits=digits,
        batch=batch,
    )
    start, keys, places = prepare(config, tokenizer, haystack, hidden)
    haystack = np.asarray(haystack)
    words = word_starts(tokenizer, haystack)
    plans = [_plan(length, len(depths) * trials, batch) for length in hidden.lengths]
    numbers = range(sum(plan.batches * plan.pieces for plan in plans))
    ticks = iter(progress(numbers) if progress else numbers)
    cells: list[NeedleCell] = []
    for plan in plans:
        prompts = [
            lay_prompt(start, haystack, words, keys, trial, plan.length, depth)
            for depth in hidden.depths
            for trial in places
        ]
        with tracing_for(params):
            scores, best = _measure(config, params, prompts, keys.answers, plan, ticks)
        cells += _cells(plan.length, hidden.depths, scores, best, np.array([trial.key for trial in places]))
    next(ticks, None)  # ends the bar
    return NeedleTest(tuple(hidden.lengths), tuple(hidden.depths), wrong_keys, tuple(cells))


class _PromptPlan(NamedTuple):
    """How the prompts of one length are read: the number at once, and the number and size of their pieces."""

    length: int
    batch: int
    batches: int
    piece: int
    pieces: int


def _plan(length: int, prompts: int, batch: int | None) -> _PromptPlan:
    batch = min(rows_at_once(length) if batch is None else batch, prompts)
    return _PromptPlan(length, batch, -(-prompts // batch), *cut_pieces(length))


def read_piece(
    config: LlamaConfig, params: Llama, length: int, cache: KVCache, tokens: jax.Array, new: jax.Array
) -> KVCache:
    """The cache with T more tokens int32[B, T] of each prompt, of which int32[B] are real; for `length` see
    `answer_scores`."""
    return forward(config, params, tokens, cache, places=Places(new, rope_lengths=_whole(tokens, length)))[1]


def _whole(tokens: jax.Array, length: int) -> jax.Array:
    return jnp.full(len(tokens), length, jnp.int32)


def answer_scores(
    config: LlamaConfig, params: Llama, length: int, cache: KVCache, last: jax.Array, answers: jax.Array
) -> tuple[KVCache, jax.Array, jax.Array]:
    """How probable each of several answers is after the same prompts.

    Args:
      length: of a prompt with its answer, by which some kinds of `rope_scaling` go.
      cache: of the prompts but for their last tokens, with room for those and an answer.
      last: int32[B], the last tokens.
      answers: int32[N, A], padded on the right with -1.

    Returns:
      The cache, to be used again; natural logarithms of the whole answers' probabilities float32[B, N]; and whether each
      token of an answer was the most probable one after those before it: bool[B, N].
    """
    filled = cache.length

    def score(cache: KVCache, answer: jax.Array) -> tuple[KVCache, tuple[jax.Array, jax.Array]]:
        before = jnp.broadcast_to(jnp.maximum(answer[:-1], 0), (len(last), len(answer) - 1))
        read = jnp.concatenate([last[:, None], before], axis=1)
        places = Places(rope_lengths=_whole(read, length))
        # Each answer is written over the one before: the cache is never copied.
        hidden, cache = forward(config, params, read, cache.replace(length=filled), places=places)
        logits = unembed(config, params, hidden)  # [B, A, V]
        chosen = jnp.take_along_axis(logits, jnp.maximum(answer, 0)[None, :, None], axis=-1)[..., 0]
        found = jnp.where(answer >= 0, chosen - jax.nn.logsumexp(logits, axis=-1), 0).sum(axis=-1)
        best = ((jnp.argmax(logits, axis=-1) == answer) | (answer < 0)).all(axis=-1)
        return cache, (found, best)

    cache, (scores, best) = lax.scan(score, cache, answers)
    return cache, scores.T, best.T


_read_piece = jax.jit(read_piece, static_argnums=(0, 2), donate_argnums=3)
_answer_scores = jax.jit(answer_scores, static_argnums=(0, 2), donate_argnums=3)


def _measure(
    config: LlamaConfig,
    params: Llama,
    prompts: Sequence[np.ndarray],
    answers: Sequence[Sequence[int]],
    plan: _PromptPlan,
    ticks: Iterator[int],
) -> tuple[np.ndarray, np.ndarray]:
    """The results of `answer_scores` for all prompts: float64[n, N] and bool[n, N]."""
    packed = np.full((len(answers), max(map(len, answers))), -1, np.int32)
    for row, answer in zip(packed, answers, strict=True):
        row[: len(answer)] = answer
    width = plan.pieces * plan.piece
    cache = empty_cache(config, params, plan.batch, width + packed.shape[1])
    scores, best = [], []
    for first in range(0, len(prompts), plan.batch):
        members = prompts[first : first + plan.batch]
        filled = [*members, *[members[-1]] * (plan.batch - len(members))]
        counts = np.array([len(prompt) - 1 for prompt in filled], np.int32)  # the last token is read with each answer
        tokens = np.zeros((plan.batch, width), np.int32)
        for row, prompt in zip(tokens, filled, strict=True):
            row[: len(prompt) - 1] = prompt[:-1]
        # What an earlier prompt left in the cache lies beyond the new length, where nothing reads it.
        cache = cache.replace(length=jnp.zeros(plan.batch, jnp.int32))
        for start in range(0, width, plan.piece):
            next(ticks)
            new = np.clip(counts - start, 0, plan.piece)
            cache = _read_piece(config, params, plan.length, cache, tokens[:, start : start + plan.piece], new)
        last = np.array([prompt[-1] for prompt in filled], np.int32)
        cache, *found = _answer_scores(config, params, plan.length, cache, last, packed)
        scores.append(np.asarray(found[0], np.float64)[: len(members)])
        best.append(np.asarray(found[1])[: len(members)])
    return np.concatenate(scores), np.concatenate(best)


def _cells(
    length: int, depths: Sequence[float], scores: np.ndarray, best: np.ndarray, hidden: np.ndarray
) -> list[NeedleCell]:
    """A cell for every depth from what `_measure` gives of [depths, trials], and int[trials], which key was hidden."""
    trials, count = len(hidden), scores.shape[1]
    chosen = np.arange(count) == np.tile(hidden, len(depths))[:, None]
    right = scores[chosen][:, None]
    wrong = scores[~chosen].reshape(-1, count - 1)
    # Ties and nan rank before the key, so that a model that knows nothing does not get the first place by chance.
    ranks = 1 + (~(wrong < right)).sum(axis=1)
    columns = best[chosen], ranks == 1, ranks, right[:, 0], right[:, 0] - wrong.mean(axis=1)
    of_depth = [np.asarray(column, np.float64).reshape(len(depths), trials).mean(axis=1) for column in columns]
    return [NeedleCell(length, depth, trials, *(float(column[i]) for column in of_depth)) for i, depth in enumerate(depths)]
