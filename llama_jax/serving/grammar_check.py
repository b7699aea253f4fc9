"""Trial compilation of a grammar in a `child_process` that `grammar` starts, before the server compiles it; shared code.

Some grammars take minutes or all memory to compile, inside llguidance, which cannot be interrupted and whose own limits do
not help: {"type": "integer", "multipleOf": 9999991} is one. This process ends when it exceeds SECONDS or MEMORY.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

GRAMMAR_SECONDS = 2  # limit of CPU time for a grammar and its first mask
GRAMMAR_BYTES = 256 << 20  # bytes for a grammar, in addition to the tables of the vocabulary
PARSER_LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,  # expressions of the whole grammar, before its first mask
    step_lexer_fuel=50_000,  # expressions per mask, about 4 ms
    step_max_items=50_000,
    max_lexer_states=1 << 15,  # 1 to 2 KB each
    verbose_errors=False,
)
TOO_MANY = ("too big", "too large", "too many", "limit", "max is")  # parts of llguidance's messages about limits


class GrammarError(ValueError):
    """A grammar that is invalid, allows no text or exceeds a limit."""


class GrammarVocabulary:
    """A tokenizer with llguidance's interface.

    Args:
      tokens: bytes of each token.
      special: ids of tokens that are not text.
      ends: tokens that end a text, at least one.
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.special_token_ids = sorted(special)
        self.ends = list(ends)
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        known, reversed_tokens = set(special), reversed([*enumerate(self.tokens)])
        self._ids = {content: i for i, content in reversed_tokens if i not in known and content}
        self._longest = max(map(len, self._ids), default=0)

    def tables(self) -> Any:
        """llguidance's tables of the vocabulary, built in two steps that each hold the GIL: 0.1 s for 49,152 tokens."""
        bare = LLTokenizer(TokenizerWrapper(self), eos_token=self.ends, slices=[])
        return bare.with_slices(LLTokenizer.general_slices())

    def __call__(self, text: str) -> list[int]:
        """Ids by the longest matching token at each point; if none matches, an end token, which no grammar accepts."""
        content, ids = text.encode(), list[int]()
        while content:
            length = next((n for n in range(min(self._longest, len(content)), 0, -1) if content[:n] in self._ids), 0)
            if not length:
                return [*ids, self.eos_token_id]
            ids.append(self._ids[content[:length]])
            content = content[length:]
        return ids


def compile_grammar(tables: Any, grammar: str, tried: bool = False) -> tuple[Any, bytes]:
    """A matcher in its initial state, and its mask: bit i % 8 of byte i // 8 is set if token i may begin the text.

    Args:
      tried: skip the check of a second mask, where some limits first show, since it has already passed.

    Raises:
      GrammarError: the message is the rest of a sentence that begins with the grammar.
    """
    matcher = LLMatcher(tables, grammar, log_level=0, limits=PARSER_LIMITS)
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    last = matcher
    if not tried and not matcher.is_error():
        last = matcher.deep_copy()
        byte = next((byte for byte in enumerate(mask) if byte[1]), (0, 1))
        last.consume_token(8 * byte[0] + (byte[1] & -byte[1]).bit_length() - 1)
        last.compute_bitmask()
    if last.is_error():
        reason = " ".join(last.get_error().replace("<non-verbose/>", "").split())[:300]
        problem = f"cannot be used: {reason}"
        if reason.startswith("Unsatisfiable schema") or "NoExtensionBias" in reason:
            detail = reason.partition("Unsatisfiable schema: ")[2]
            problem = f"allows no text{f' ({detail})' if detail else ''}; relax it"
        elif any(word in reason for word in TOO_MANY):
            problem = f"has too many states ({reason}); use fewer or smaller repetitions and alternatives"
        raise GrammarError(problem)
    return matcher, mask


def begin(vocabulary: tuple[Sequence[str], Sequence[int], Sequence[int]]) -> Callable[[str], dict[str, str]]:
    """The function that answers a grammar with its error, if it has one.

    Args:
      vocabulary: the arguments of `GrammarVocabulary`, with tokens as latin-1.
    """
    tokens, *ids = vocabulary
    tables = GrammarVocabulary([token.encode("latin-1") for token in tokens], *ids).tables()

    def answer(grammar: str) -> dict[str, str]:
        try:
            compile_grammar(tables, grammar)
            return {}
        except GrammarError as error:
            return {"error": str(error)}

    return answer
