"""A prompt on its way into the cache, piece by piece."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from llama_jax.inference.state import Reading, Request
from llama_jax.model.options import Places
from llama_jax.serving.choosing import Wishes
from llama_jax.serving.model import ServedModel, Slots
from llama_jax.serving.options import SMALLEST_PIECE
from llama_jax.serving.pool import write_wishes
from llama_jax.serving.prefix import PrefixCache, digests_of
from llama_jax.serving.requests import GenerationRequest


class PromptProgress:
    """How far a prompt has been read, by the model and its draft model.

    Piece i covers tokens [i C, (i + 1) C), the last piece the rest. Its program, and so every bit that it writes, follows
    from i: the cache has just enough slots for the tokens up to the piece's end, not for the whole prompt.

    Attributes:
      at: number of tokens read.
      cached: how many of them came from the prefix cache.
      scores: packed `Choice`s of the pieces, for a prompt that is scored.
    """

    def __init__(self, model: ServedModel, request: GenerationRequest, piece: int, capacities: tuple[int, ...]) -> None:
        self.request = request
        self.tokens = np.asarray(request.prompt, np.int32)
        self.at = self.cached = 0
        self.scores: list[jax.Array] = []
        self._model = model
        self._piece = piece
        self._capacities = capacities
        self._readings: list[Reading] = []  # of each of the model's `models`
        # Scoring uses another program, so its pieces are neither kept in the prefix cache nor taken from it.
        roots = *(each.rope_root(len(self.tokens)) for each in model.models), request.adapter
        self._digests = [] if request.score_prompt else digests_of(self.tokens, piece, roots)

    @property
    def left(self) -> int:
        """The number of tokens left to read."""
        return len(self.tokens) - self.at

    def read(self, prefixes: PrefixCache) -> None:
        """Read one more piece, after those that the prefix cache has."""
        models = self._model.models
        if not self._readings:
            self._readings = [model.empty_reading(self._capacities[0]) for model in models]
        while (found := self._found(prefixes)) is not None:
            pasted = zip(models, self._with_room(self._piece), found, strict=True)
            self._readings = [model.paste(reading, piece, self.at) for model, reading, piece in pasted]
            self.at += self._piece
            self.cached += self._piece
        size = min(self.left, self._piece)
        width = SMALLEST_PIECE if size <= SMALLEST_PIECE and not self.request.score_prompt else self._piece
        tokens = np.zeros((1, width), np.int32)
        tokens[0, :size] = self.tokens[self.at : self.at + size]
        places = Places(np.array([size], np.int32), rope_lengths=np.array([len(self.tokens)], np.int32))
        readings = self._with_room(width)
        self._readings = [
            model.read(reading, tokens, places, -1) for model, reading in zip(models[1:], readings[1:], strict=True)
        ]
        if self.request.score_prompt:
            targets = np.zeros(width, np.int32)
            following = self.tokens[self.at + 1 : self.at + 1 + size]
            targets[: len(following)] = following
            wanted = self.request.alternatives > 0
            own, packed = self._model.score(readings[0], tokens, targets, places, self.request.adapter, wanted)
            self.scores.append(packed)
        else:
            own = self._model.read(readings[0], tokens, places, self.request.adapter)
        self._readings.insert(0, own)
        number = self.at // self._piece
        if number < len(self._digests) and self._digests[number] not in prefixes:
            read = zip(models, self._readings, strict=True)
            piece = tuple(model.cut(reading.cache, self.at, self._piece) for model, reading in read)
            prefixes.keep(self._digests[number], piece)
        self.at += size
        if not self.left:
            prefixes.used(self._digests)

    def begin(self, arrays: Request, allowed: np.ndarray | None) -> tuple[Slots, jax.Array]:
        """The state of one row after the whole prompt, and the packed `Choice` of its first token.

        Args:
          arrays: the request, of one row.
        """
        seen = np.zeros((1, self._model.vocab), bool)
        seen[0, self.tokens] = True
        wishes = Wishes.none(1, self._model.config.vocab_size)
        write_wishes(wishes, 0, self.request, allowed)
        own, *drafts = self._readings
        state, packed = self._model.begin(own, seen, arrays, wishes)
        return Slots(state, *(draft.cache for draft in drafts)), packed

    def _found(self, prefixes: PrefixCache) -> Any:
        number, inside = divmod(self.at, self._piece)
        return prefixes.find(self._digests[number]) if not inside and number < len(self._digests) else None

    def _with_room(self, width: int) -> list[Reading]:
        """The readings with exactly the slots that a piece of `width` tokens needs."""
        need = next(size for size in self._capacities if size >= self.at + width)
        return [model.enlarge(reading, need) for model, reading in zip(self._model.models, self._readings, strict=True)]
