"""The facts about a tokenizer that the data room needs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from llama_jax.tokenizers import Tokenizer

# White space, digits, contractions and scripts, where vocabularies with the same tokens may still cut a text differently.
SAMPLE = "It's  12345 o'clock,\n\n\tDON'T\r\n   \u00e9te\u0301 \u4f60\u597d \U0001f999 x=1; foo_bar "


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer described by its behaviour.

    Attributes:
      size: V.
      bos, eos: ids of the tokens that begin and end a document, or -1. A document begins with the BOS where the vocabulary's
        own rule says that a text does, and ends with the EOS wherever there is one.
      lengths: int64[V], bytes of text that each token stands for; 0 for special tokens.
      space_prefix: whether a document's text has one byte less than its tokens.
      fingerprint: of everything that determines which tokens a text becomes.
    """

    size: int
    bos: int
    eos: int
    lengths: np.ndarray
    space_prefix: bool
    fingerprint: str


def examine(tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer, and a fingerprint from its behaviour.

    The fingerprint covers the bytes of every token, the special ones, and the ids of a text in which all tokens occur, so
    that other merges or another pre-tokenisation change it. The file that the tokenizer came from does not matter.
    """
    bos = tokenizer.bos_id if tokenizer.add_bos else -1
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    probe = tokenizer.encode(b"".join(tokens).decode(errors="ignore") + SAMPLE, bos=False, eos=False)
    shape = [
        len(tokens),
        bos,
        tokenizer.eos_id,
        tokenizer.space_prefix,
        sorted(tokenizer.special_tokens.items()),
    ]
    lengths = np.array([len(token) for token in tokens], np.int64)
    digest = hashlib.sha256(json.dumps(shape).encode())
    for part in (lengths.astype("<i8").tobytes(), b"".join(tokens), np.array(probe, "<i8").tobytes()):
        digest.update(part)
    return Vocabulary(
        size=len(tokens),
        bos=bos,
        eos=tokenizer.eos_id,
        lengths=lengths,
        space_prefix=tokenizer.space_prefix,
        fingerprint=digest.hexdigest(),
    )
