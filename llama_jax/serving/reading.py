"""A prompt on its way into the cache, piece by piece."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from llama_jax.inference.state import Reading, Request, State
from llama_jax.model.options import Places
from llama_jax.serving.model import ServedModel
from llama_jax.serving.options import SMALLEST_PIECE
from llama_jax.serving.pool import write_wishes
from llama_jax.serving.prefix import PrefixCache, digests_of
from llama_jax.serving.programs import Wishes
from llama_jax.serving.requests import GenerationRequest


class PromptProgress:
    """How far a prompt has been read.

    Piece i covers tokens [i C, (i + 1) C), the last one what is left. Its program, and with it every bit of what it writes,
    follows from i: the cache has as many slots as hold the tokens up to its end, not those of the whole prompt.

    Attributes:
      at: tokens read.
      cached: how many of them came from the prefix cache.
      scores: packed `Choice`s of the pieces, of a prompt that is scored.
    """

    def __init__(self, model: ServedModel, request: GenerationRequest, piece: int, capacities: tuple[int, ...]) -> None:
        self.request = request
        self.tokens = np.asarray(request.prompt, np.int32)
        self.at = self.cached = 0
        self.scores: list[jax.Array] = []
        self._model = model
        self._piece = piece
        self._capacities = capacities
        self._reading: Reading | None = None
        # The program that scores is another one, so what it reads is neither kept nor found.
        roots = model.rope_root(len(self.tokens)), request.adapter
        self._digests = [] if request.score_prompt else digests_of(self.tokens, piece, roots)

    @property
    def left(self) -> int:
        """Tokens to be read."""
        return len(self.tokens) - self.at

    def read(self, prefixes: PrefixCache) -> None:
        """Read one more piece, after those that the prefix cache has."""
        if self._reading is None:
            self._reading = self._model.empty_reading(self._capacities[0])
        while (found := self._found(prefixes)) is not None:
            self._reading = self._model.paste(self._room(self._piece), found, self.at)
            self.at += self._piece
            self.cached += self._piece
        size = min(self.left, self._piece)
        width = SMALLEST_PIECE if size <= SMALLEST_PIECE and not self.request.score_prompt else self._piece
        tokens = np.zeros((1, width), np.int32)
        tokens[0, :size] = self.tokens[self.at : self.at + size]
        places = Places(np.array([size], np.int32), rope_lengths=np.array([len(self.tokens)], np.int32))
        reading = self._room(width)
        if self.request.score_prompt:
            targets = np.zeros(width, np.int32)
            following = self.tokens[self.at + 1 : self.at + 1 + size]
            targets[: len(following)] = following
            wanted = self.request.alternatives > 0
            self._reading, packed = self._model.score(reading, tokens, targets, places, self.request.adapter, wanted)
            self.scores.append(packed)
        else:
            self._reading = self._model.read(reading, tokens, places, self.request.adapter)
            number = self.at // self._piece
            if number < len(self._digests) and self._digests[number] not in prefixes:
                prefixes.keep(self._digests[number], self._model.cut(self._reading.cache, self.at, self._piece))
        self.at += size
        if not self.left:
            prefixes.used(self._digests)

    def begin(self, arrays: Request, allowed: np.ndarray | None) -> tuple[State, jax.Array]:
        """The state of one row after the whole prompt, and the packed `Choice` of its first token.

        Args:
          arrays: the request, of one row.
        """
        assert self._reading is not None
        seen = np.zeros((1, self._model.vocab), bool)
        seen[0, self.tokens] = True
        wishes = Wishes.none(1, self._model.config.vocab_size)
        write_wishes(wishes, 0, self.request, allowed)
        return self._model.begin(self._reading, seen, arrays, wishes)

    def _found(self, prefixes: PrefixCache) -> Any:
        number, inside = divmod(self.at, self._piece)
        return prefixes.find(self._digests[number]) if not inside and number < len(self._digests) else None

    def _room(self, width: int) -> Reading:
        """The reading with the slots that a piece of `width` tokens needs, and no more."""
        assert self._reading is not None
        need = next(size for size in self._capacities if size >= self.at + width)
        return self._model.enlarge(self._reading, need)
