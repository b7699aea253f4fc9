"""Constrained generation with llguidance: JSON, a JSON schema or a regular expression as constraints on tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from llama_jax.errors import UserError, reason_of
from llama_jax.serving.thread_pool import LOW_NICENESS
from llama_jax.tokenizers import Tokenizer
from llama_jax.tokenizers.child_process import ChildProcess

# White space is fixed, because small models can fill a whole answer with optional white space.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Grammars over one vocabulary. Thread-safe; its tables are built on first use.

    Each grammar is first compiled in a child process, which is killed if that takes too much time or memory, and then in
    this process, which takes up to as long again.

    Args:
      tokenizer: a tokenizer with V' ids.
      vocab_size: V of the model.
      ends: tokens that end a text; only they are allowed after it is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = tuple(token for token in ends if token < vocab_size)
        self._lock = Lock()
        self._vocabulary: Any = None  # a `GrammarVocabulary`
        self._tables: Any = None
        self._child: ChildProcess | None = None

    def close(self) -> None:
        """Kill the child process, if there is one; the next grammar starts a new one."""
        if self._child is not None:
            self._child.close()

    def prepare(self) -> None:
        """Build the tables of the vocabulary in advance, which holds the GIL; does nothing without llguidance."""
        with suppress(UserError), self._lock:
            self._prepare()

    def _prepare(self) -> None:
        if self._tables is None and self._ends:
            _library()
            self._vocabulary = _build_vocabulary(
                self._tokenizer, min(self._tokenizer.vocab_size, self._vocab_size), self._ends
            )
            self._tables = self._vocabulary.tables()

    def json_schema(self, schema: dict[str, Any]) -> GrammarConstraint:
        """A constraint to JSON text that conforms to a schema.

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
        """A constraint to texts that fully match a regular expression; for errors see `json_schema`."""
        return self._constraint(_library().LLMatcher.grammar_from_regex(pattern), "regular expression")

    def lark(self, grammar: str, what: str) -> GrammarConstraint:
        """A constraint to texts of a grammar in llguidance's Lark syntax, in which `%json` is a schema.

        Args:
          what: name of what the grammar describes, for error messages; for errors see `json_schema`.
        """
        return self._constraint(_library().LLMatcher.grammar_from_lark(grammar), what)

    def _constraint(self, grammar: str, what: str) -> GrammarConstraint:
        if not self._ends:
            raise UserError("a grammar needs a vocabulary with an end-of-sequence token")
        from llama_jax.serving import grammar_check as check

        with self._lock:
            if self._child is None:
                self._prepare()
                vocabulary = self._vocabulary
                tokens = [token.decode("latin-1") for token in vocabulary.tokens]
                initial = tokens, vocabulary.special_token_ids, vocabulary.ends
                self._child = ChildProcess(
                    Path(check.__file__), check.GRAMMAR_SECONDS, check.GRAMMAR_BYTES, initial, LOW_NICENESS
                )
        answer = self._child.ask(grammar)
        if answer is None:
            limit = f"{check.GRAMMAR_SECONDS} s or {check.GRAMMAR_BYTES >> 20} MB"
            answer = {"error": f"takes over {limit} to compile; use fewer or smaller repetitions and alternatives"}
        if "error" in answer:
            raise UserError(f"the {what} {answer['error']}")
        matcher, mask = check.compile_grammar(self._tables, grammar, tried=True)
        return GrammarConstraint(matcher, mask, self._vocab_size, self._ends)


class GrammarConstraint:
    """A `Constraint` that follows a grammar.

    Args:
      matcher: llguidance's matcher in its initial state.
      mask: mask of the initial state, as bytes.

    Attributes:
      error: why the grammar could not be followed to its end, so that the text ends early; None otherwise.
    """

    def __init__(self, matcher: Any, mask: bytes, vocab_size: int, ends: Sequence[int]) -> None:
        self.error: str | None = None
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._ends = ends
        self._first = mask
        self._allowed = self._as_words(mask)

    def copy(self) -> GrammarConstraint:
        """A copy in the initial state, for another choice; only before any token was accepted."""
        return GrammarConstraint(self._matcher.deep_copy(), self._first, 32 * self._words, self._ends)

    def allowed(self) -> np.ndarray:
        return self._allowed

    def accept(self, token: int) -> None:
        mask = b""
        if self.error is None and self._matcher.consume_token(token):
            mask = self._matcher.compute_bitmask()
        if self.error is None and self._matcher.is_error():
            self.error, mask = reason_of(self._matcher.get_error(), 300), b""
        self._allowed = self._as_words(mask)

    def _as_words(self, mask: bytes) -> np.ndarray:
        """A mask as uint32[ceil(V / 32)]; if it allows nothing, the mask of the tokens that end the text."""
        words = np.zeros(self._words, np.uint32)
        words.view(np.uint8)[: len(mask)] = np.frombuffer(mask, np.uint8)[: 4 * self._words]
        if not words.any():
            for token in self._ends:
                words[token // 32] |= np.uint32(1 << token % 32)
        return words


def _build_vocabulary(tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> Any:
    """The first `size` tokens as a vocabulary for llguidance, which encodes text like the tokenizer if it can."""
    from llama_jax.serving.grammar_check import GrammarVocabulary

    before = tokenizer.encode_parts(["."])
    names = {token: name.encode() for name, token in tokenizer.special_tokens.items()}
    special = {token for token in (*names, *ends) if token < size}

    class TokenizerVocabulary(GrammarVocabulary):
        def __call__(self, text: str) -> list[int]:
            """Ids of a text that continues another one, so that no space may be added before it."""
            if not isinstance(text, str):
                raise TypeError("text")
            ids = tokenizer.encode_parts([".", text])[len(before) :]
            is_same = max(ids, default=0) < size and b"".join(self.tokens[i] for i in ids) == text.encode()
            return ids if is_same else super().__call__(text)

    tokens = [names.get(i, b"<%d>" % i) if i in special else tokenizer.token_bytes(i) for i in range(size)]
    return TokenizerVocabulary(tokens, sorted(special), ends)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError('grammars need llguidance, which is not installed; pip install -e ".[serve]"') from None
    return llguidance
