"""Answers on the host: as texts to be judged, as rows to learn from, and as JSON for a checkpoint."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence

import jax
import numpy as np

from llama_jax.inference.rollouts import Answers
from llama_jax.tokenizers import TextStream, Tokenizer
from llama_jax.training.answers import ScoredAnswers
from llama_jax.training.batch import Batch


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text that an answer adds to its prompt, with a leading space if it begins with one."""
    stream = TextStream(tokenizer)
    return "".join([*map(stream.push, ids), stream.finish()])


def lay_rows(prompts: Sequence[Sequence[int]], answers: Answers, learnt: np.ndarray, length: int) -> ScoredAnswers:
    """Prompts and answers one after the other, [B, T + 1], without advantages.

    Args:
      learnt: bool[B], whether the answer's tokens are in the mask.
    """
    batch = len(answers.tokens)
    group = batch // len(prompts)
    tokens, mask = np.zeros((batch, length + 1), np.int32), np.zeros((batch, length + 1), bool)
    drawn = np.zeros((batch, length), np.float32)
    for i in range(batch):
        prompt, count = prompts[i // group], int(answers.valid[i].sum())
        begin, end = len(prompt), len(prompt) + count
        tokens[i, :begin], tokens[i, begin:end] = prompt, answers.tokens[i, :count]
        mask[i, begin:end] = learnt[i]
        drawn[i, begin - 1 : end - 1] = answers.logprobs[i, :count]
    return ScoredAnswers(Batch(tokens, mask=mask), np.zeros(batch, np.float32), drawn)


def packed(judged: ScoredAnswers) -> str:
    """Arrays as JSON can hold them, bit for bit."""
    whole = b"".join(np.ascontiguousarray(part).tobytes() for part in jax.tree.leaves(judged))
    return base64.b64encode(zlib.compress(whole, 1)).decode()


def unpacked(text: str, shapes: ScoredAnswers) -> ScoredAnswers:
    """Undoes `packed`."""
    whole, at = zlib.decompress(base64.b64decode(text)), 0
    leaves, form = jax.tree.flatten(shapes)
    found = []
    for leaf in leaves:
        size = leaf.size * leaf.dtype.itemsize
        found.append(np.frombuffer(whole[at : at + size], leaf.dtype).reshape(leaf.shape))
        at += size
    return jax.tree.unflatten(form, found)
