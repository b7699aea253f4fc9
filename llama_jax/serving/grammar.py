"""Constrained generation with llguidance: JSON, a JSON schema or a regular expression as constraints on tokens."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np

from llama_jax.errors import UserError, reason_of
from llama_jax.tokenizers import Tokenizer

# White space is fixed, because a small model that may choose it fills a whole answer with it.
MARK = "\x02"  # marks the start of a text and occurs in none, so that a tokenizer's prefix comes before it
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Grammars over one vocabulary. Thread-safe; the tables of the vocabulary are made when they are first needed.

    Args:
      tokenizer: of V' ids.
      vocab_size: V of the model, at least V'.
      ends: the tokens that end a text; only they are allowed once it is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = tuple(ends)
        self._lock = Lock()
        self._tables: Any = None

    def json_schema(self, schema: dict[str, Any]) -> GrammarConstraint:
        """A constraint to JSON that conforms to a schema.

        Raises:
          UserError: an invalid or unsupported schema; or llguidance is not installed.
        """
        library = _library()
        try:
            grammar = library.LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
        except ValueError as error:
            raise UserError(f"the JSON schema cannot be used: {reason_of(error, 300)}") from None
        return self._constraint(grammar, "JSON schema")

    def regex(self, pattern: str) -> GrammarConstraint:
        """A constraint to texts that a regular expression matches fully; raises as `json_schema` does."""
        return self._constraint(_library().LLMatcher.grammar_from_regex(pattern), "regular expression")

    def lark(self, grammar: str, what: str) -> GrammarConstraint:
        """A constraint to the texts of a grammar in llguidance's Lark, in which `%json` is a schema.

        Args:
          what: what the grammar describes, for the error; raises as `json_schema` does.
        """
        return self._constraint(_library().LLMatcher.grammar_from_lark(grammar), what)

    def _constraint(self, grammar: str, what: str) -> GrammarConstraint:
        if not self._ends:
            raise UserError("the vocabulary has no token that ends a text, which a grammar needs")
        with self._lock:
            if self._tables is None:
                self._tables = _tables(self._tokenizer, self._ends)
        matcher = _library().LLMatcher(self._tables, grammar, log_level=0)
        if matcher.is_error():
            raise UserError(f"the {what} cannot be used: {reason_of(matcher.get_error(), 300)}")
        return GrammarConstraint(matcher, self._tokenizer.vocab_size, self._vocab_size, self._ends)


class GrammarConstraint:
    """A `Constraint` that follows a grammar. It never raises, because it runs on the engine's thread.

    Attributes:
      error: why the grammar could not be followed to its end, in which case the text ends early; None otherwise.
    """

    def __init__(self, matcher: Any, known: int, vocab_size: int, ends: Sequence[int]) -> None:
        self.error: str | None = None
        self._matcher = matcher
        self._known = known
        self._words = -(-vocab_size // 32)
        self._ends = ends

    def copy(self) -> GrammarConstraint:
        """The same in its first state, for another choice; before any token was accepted."""
        return GrammarConstraint(self._matcher.deep_copy(), self._known, 32 * self._words, self._ends)

    def allowed(self) -> np.ndarray:
        mask = np.zeros(self._words, np.uint32)
        known = -(-self._known // 32)
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, 4 * known)
            if self._matcher.is_error():
                self.error = reason_of(self._matcher.get_error(), 300)
        if self.error is not None or not mask.any():
            mask[:] = 0
            for token in self._ends:
                mask[token // 32] |= np.uint32(1 << token % 32)
        return mask

    def accept(self, token: int) -> None:
        if self.error is None and not self._matcher.consume_token(token):
            self.error = reason_of(self._matcher.get_error(), 300)


def _tables(tokenizer: Tokenizer, ends: Sequence[int]) -> Any:
    """llguidance's tables of a vocabulary."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, ends)), eos_token=list(ends))


class _Vocabulary:
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        names = {token: name.encode() for name, token in tokenizer.special_tokens.items()}
        special = {*names, *ends}
        self.eos_token_id = ends[0]
        self.bos_token_id = tokenizer.bos_id if tokenizer.bos_id >= 0 else None
        self.special_token_ids = sorted(special)
        self.tokens = [
            names.get(i, b"<%d>" % i) if i in special else tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)
        ]
        self._tokenizer = tokenizer
        self._ids = {content: i for i, content in reversed([*enumerate(self.tokens)]) if i not in special and content}
        self._before = tokenizer.encode_parts([MARK]) if tokenizer.space_prefix else []

    def __call__(self, text: str) -> list[int]:
        """Ids of a text that continues another: no space may be added before it."""
        if not isinstance(text, str):
            raise TypeError("text")
        ids = self._tokenizer.encode_parts([MARK + text if self._before else text])[len(self._before) :]
        content = text.encode()
        return ids if b"".join(self.tokens[i] for i in ids) == content else self._longest_first(content)

    def _longest_first(self, content: bytes) -> list[int]:
        """Ids by the longest token that matches next; an end token where none does, which no grammar accepts."""
        ids: list[int] = []
        longest = max(map(len, self._ids))
        while content:
            found = next((n for n in range(min(longest, len(content)), 0, -1) if content[:n] in self._ids), 0)
            if not found:
                return [*ids, self.eos_token_id]
            ids.append(self._ids[content[:found]])
            content = content[found:]
        return ids


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError('grammars need llguidance; get it with pip install -e ".[serve]"') from None
    return llguidance
