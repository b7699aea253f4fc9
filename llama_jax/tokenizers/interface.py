"""The interface of tokenizers; streaming text with stop strings; and code that all vocabularies share."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from llama_jax.errors import TokenizerError, reason_of, short_repr

TextPart = str | int  # plain text, or the id of a special token
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how most vocabularies spell a space
# A noncharacter, for which no vocabulary has a token: put before a text, so that no space is added to the text itself.
CONTINUATION_MARK = "\ufdd2"
# Names by which llama.cpp recognizes tokens that end a text, a message or a turn, in addition to the vocabulary's eos.
END_NAMES = {
    *("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
    *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
    *("<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
}
BRACKETED = re.compile(r"<.+>|\[.+\]", re.DOTALL)
PADDING_TOKEN = "[PAD{}]"  # name by llama.cpp's converter of an id without a token
MAX_TOKEN_ID = 1 << 31  # token ids of models are int32
MAX_COMPARED = 1 << 24  # letters to compare
MAX_DEPTH = 16  # letters; a pattern for longer names would be nested too deeply


class Tokenizer(Protocol):
    """A tokenizer with V ids; names of special tokens in user text are text.

    A model's embedding may have more rows than V, which are padding without text (`token_bytes`), or fewer: then the tokens
    without a row cannot be in a prompt (`check_token_rows`), and are never generated.
    """

    @property
    def vocab_size(self) -> int:
        """V, the largest id plus one."""
        ...

    @property
    def bos_id(self) -> int:
        """The begin-of-sequence token, or -1 if the vocabulary has none."""
        ...

    @property
    def eos_id(self) -> int:
        """The end-of-sequence token, or -1 if the vocabulary has none."""
        ...

    @property
    def add_bos(self) -> bool:
        """Whether `encode` adds the begin-of-sequence token by default; False if the vocabulary has none."""
        ...

    @property
    def add_eos(self) -> bool:
        """Whether `encode` adds the end-of-sequence token by default; False if the vocabulary has none."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, for `generate(stop_tokens=...)`.

        The end-of-sequence token, special tokens in `END_NAMES`, those that the model's files name, and the
        begin-of-sequence token if texts begin with it: llama2.c's stories end with the BOS of the next one; but not if a
        ``generation_config.json`` lists the end tokens and names the BOS separately, as a saved one does. For a vocabulary
        from a GGUF file: exactly those at which llama.cpp stops.
        """
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of special tokens by name; `encode` recognizes the names in a text only with `special=True`."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's Jinja chat template, if it has one; see `tokenizers.chat`."""
        ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The checkpoint's other templates by name, such as "tool_use", for chats with tools."""
        ...

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """The texts of tokens with a role by the names that chat templates use, such as "pad_token"."""
        ...

    @property
    def space_prefix(self) -> bool:
        """Whether encoding adds a space before a text, which decoding removes again."""
        ...

    def encode(self, text: str, bos: bool | None = None, eos: bool | None = None, special: bool = False) -> list[int]:
        """Ids of the text between the begin-of-sequence and the end-of-sequence token.

        Args:
          bos, eos: whether to add these tokens; by default `add_bos` and `add_eos`.
          special: whether "<|eot_id|>" and the like in the text are special tokens; by default they are text.

        Raises:
          TokenizerError: a requested token that the vocabulary does not have, or text that UTF-8 cannot encode.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text without BOS and EOS; faster than `encode` for each.

        Raises:
          TokenizerError: a text cannot be encoded.
        """
        ...

    def encode_parts(self, parts: Sequence[TextPart]) -> list[int]:
        """Ids of plain texts and special tokens. A text after another text continues it: no token spans the two, no space is
        added before it, and the ids of the parts before it are the same as without it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens; each id adds its `token_bytes`."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text before it: UTF-8, which may begin or end inside a character.

        b"" for special tokens, and for ids without a token: from V on, and in gaps of the vocabulary.

        Raises:
          TokenizerError: a negative id, or one that does not fit int32.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the vocabulary and its settings into a folder, from which `load_tokenizer` loads the same tokenizer."""
        ...


class TextStream:
    """Text from tokens one by one: a character is returned when its last byte has arrived, never in parts."""

    def __init__(self, tokenizer: Tokenizer, *, at_start: bool = False) -> None:
        """Start after some text, or with `at_start` at the beginning, where a vocabulary's leading space is dropped."""
        self._tokenizer = tokenizer
        self._drop_space = at_start and tokenizer.space_prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this token completes."""
        new = self._tokenizer.token_bytes(token)
        if self._drop_space and new:
            new = new.removeprefix(b" ")
            self._drop_space = False
        return self._decoder.decode(new)

    def finish(self) -> str:
        """The remaining text when no token follows: an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class Text:
    """Converts tokens to text up to a stop string, holding back text that may be the beginning of one.

    Args:
      stop: stop strings.
      write: called with new text.
      at_start: see `TextStream`.
      named: texts of special tokens that are written, which otherwise have none.

    Attributes:
      shown: the text written so far.
      ended: whether a stop string has been met.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        write: Callable[[str], None],
        *,
        at_start: bool = False,
        special_texts: Mapping[int, str] | None = None,
    ) -> None:
        self._stream = TextStream(tokenizer, at_start=at_start)
        self._special_texts = special_texts or {}
        self._stop = stop
        self._write = write
        self._pending = ""
        self.ended = False
        self.shown = ""

    @property
    def length(self) -> int:
        """The number of characters so far, including held-back ones."""
        return len(self.shown) + len(self._pending)

    def push(self, token: int) -> bool:
        """Add a token; True if a stop string has been met."""
        self._add(self._special_texts.get(token) or self._stream.push(token))
        return self.ended

    def finish(self) -> None:
        """Write the held-back text, when no token follows."""
        if not self.ended:
            self._add(self._stream.finish())
            if not self.ended:
                self._show(self._pending)
            self._pending = ""

    def _add(self, text: str) -> None:
        if not self._stop:
            self._show(text)
            return
        self._pending += text
        stops = [at for at in map(self._pending.find, self._stop) if at >= 0]
        self.ended = bool(stops)
        if stops:
            ready = min(stops)
        else:
            pending = (
                self._pending
            )  # only beginnings up to this length can match: some stop strings have thousands of characters
            starts = (stop[:n] for stop in self._stop for n in range(min(len(stop), len(pending) + 1)))
            ready = len(pending) - max((len(start) for start in starts if pending.endswith(start)), default=0)
        self._show(self._pending[:ready])
        self._pending = self._pending[ready:]

    def _show(self, text: str) -> None:
        self.shown += text
        self._write(text)


def is_template_token(text: str, template: str | None) -> bool:
    """Whether a chat template uses this token in angle or square brackets: its name in user text is then text, as if it were
    marked as special, but it is shown in decoded text."""
    return text in (template or "") and BRACKETED.fullmatch(text) is not None


def special_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds special tokens in a text; if one is a prefix of another, the longer one."""
    return _pattern_of(tuple(names))


@lru_cache(maxsize=8)  # compiling a pattern takes longer than searching a chat with it
def _pattern_of(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(_letter_by_letter([name for name in names if name]) or "(?!)")


def _letter_by_letter(names: Sequence[str], depth: int = 0) -> str:
    """A pattern that tries each letter once; trying Gemma's 6,000 names in turn would take a second for 100 kB."""
    if depth == MAX_DEPTH:
        return f"(?:{'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})"
    rests: dict[str, list[str]] = {}
    for name in filter(None, names):
        rests.setdefault(name[0], []).append(name[1:])
    body = "|".join(re.escape(letter) + _letter_by_letter(rest, depth + 1) for letter, rest in rests.items())
    if body and "" in names:
        return f"(?:{body})?"
    return f"(?:{body})" if len(rests) > 1 else body


def unspelled_space(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> str:
    """The white space at the end of a text that its ids do not spell, since the vocabulary removes it; a text that follows
    begins with it. Removed at the beginning, it is lost."""
    space = text[len(text.rstrip()) :] if text.strip() else ""
    spelled = b"".join(map(tokenizer.token_bytes, ids[-len(space.encode()) :])) if space else b""
    return "" if spelled.endswith(space.encode()) else space


def split_special(text: str, special_tokens: Mapping[str, int]) -> list[TextPart]:
    """The text with its special tokens as ids."""
    parts: list[TextPart] = []
    end = 0
    for match in special_pattern(special_tokens).finditer(text):
        parts += [text[end : match.start()], special_tokens[match.group()]]
        end = match.end()
    return [part for part in [*parts, text[end:]] if part != ""]


def split_longest(text: str, tokens: Mapping[str, int]) -> list[TextPart]:
    """The text with tokens as ids; the longest tokens are matched first anywhere in the text, as in llama.cpp."""
    parts: list[TextPart] = [text]
    for name in sorted((name for name in tokens if name in text), key=lambda name: -len(name.encode())):
        split: list[TextPart] = []
        for part in parts:
            if isinstance(part, str):
                for piece in part.split(name):
                    split += [piece, tokens[name]]
                split.pop()
            else:
                split.append(part)
        parts = split
    return [part for part in parts if part != ""]


def order_matters(names: Iterable[str]) -> bool:
    """Whether `split_longest` and `split_special` differ for some text: if a longer token begins in a shorter one."""
    sizes = {name: len(name.encode(errors="surrogateescape")) for name in names if name}
    if sum(size * size for size in sizes.values()) > MAX_COMPARED:
        return True
    beginning: dict[str, list[str]] = {}
    for name in sizes:
        for n in range(1, len(name)):
            beginning.setdefault(name[:n], []).append(name)
    for name, size in sizes.items():
        for n in range(1, len(name)):
            for other in beginning.get(name[n:], ()):
                text = name[:n] + other
                if sizes[other] > size and not any(
                    sizes.get(text[:end], 0) >= sizes[other] for end in range(len(other), len(text) + 1)
                ):
                    return True
    return False


class PartsTokenizer:
    """Methods of a `Tokenizer`, implemented with `encode_parts` and the bytes of its own tokens."""

    vocab_size: int

    def _token_bytes(self, token: int) -> bytes:
        """See `token_bytes`, for an id below V."""
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 that a token adds to those before it; b"" for ids without a token, see `Tokenizer.token_bytes`."""
        if not 0 <= token < MAX_TOKEN_ID:
            raise TokenizerError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        text = self._token_bytes(token) if token < self.vocab_size else b""
        is_padding = text[:4] == b"[PAD" and text == PADDING_TOKEN.format(token).encode()  # the prefix is quick to compare
        return b"" if is_padding else text

    def encode(
        self: Tokenizer, text: str, bos: bool | None = None, eos: bool | None = None, special: bool = False
    ) -> list[int]:
        """Ids of the text; see `Tokenizer.encode`."""
        if not isinstance(text, str):
            raise TokenizerError(f"text={short_repr(text, 40)} must be a str; encode several texts with encode_batch")
        bos = self.add_bos if bos is None else bos
        eos = self.add_eos if eos is None else eos
        for requested, token, name in ((bos, self.bos_id, "bos"), (eos, self.eos_id, "eos")):
            if requested and token < 0:
                raise TokenizerError(
                    f"the vocabulary has no {name} token; encode with {name}=False, or set {name}_token in a"
                    " tokenizer_config.json in the same folder"
                )
        ids = self.encode_parts(split_special(text, self.special_tokens) if special else [text])
        return [self.bos_id] * bos + ids + [self.eos_id] * eos

    def encode_batch(self: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; see `Tokenizer.encode_batch`."""
        return [self.encode_parts([text]) for text in texts]

    def decode(self: Tokenizer, ids: Sequence[int]) -> str:
        """The text of the ids, without a space that encoding adds: to continue a prompt, decode both together. Special
        tokens are omitted, and invalid UTF-8 becomes U+FFFD."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.space_prefix else text


def ending_ids(tokenizer: Tokenizer, file_ids: Iterable[int] = (), *, complete: bool = False) -> tuple[int, ...]:
    """The tokens of `Tokenizer.stop_ids`.

    Args:
      file_ids: end tokens that the model's files name.
      complete: whether this list is complete, so that a BOS that is not in it ends nothing.
    """
    special = tokenizer.special_tokens
    begin = tokenizer.bos_id if tokenizer.add_bos and not complete else -1
    ends = {begin, tokenizer.eos_id, *(special[name] for name in ending_names(special)), *file_ids}
    return tuple(sorted(token for token in ends if token >= 0))


def ending_names(names: Iterable[str]) -> set[str]:
    """The names that end generation; `<|end|>` and `</s>` are excluded if certain others exist."""
    ends = END_NAMES.intersection(names)
    calls = ends & {"<|call|>", "<|calls|>"}
    if {"<|return|>", "<|call|>"} <= ends or ("<|flush|>" in ends and calls):
        ends.discard("<|end|>")
    if "<|tool_response>" in ends:
        ends.discard("</s>")
    return ends


def check_token_rows(tokenizer: Tokenizer, ids: Iterable[int], rows: int, where: str) -> None:
    """Raise TokenizerError for a token without a row in a model's embedding, by its name.

    Args:
      rows: V of the model, which may be smaller than the tokenizer's.
      where: what the ids are, for the message: "the prompt".
    """
    outside = next((token for token in ids if token >= rows), None) if tokenizer.vocab_size > rows else None
    if outside is not None:
        raise TokenizerError(f"{where} contains {describe_missing_row(outside, rows, tokenizer)}; remove it")


def describe_missing_row(token: int, rows: int, tokenizer: Tokenizer | None = None) -> str:
    """A token that has no row in a model's embedding, in words, with its name if there is a tokenizer."""
    name = "" if tokenizer is None else f" {short_repr(token_name(tokenizer, token), 80)} with"
    return f"the token{name} id {token}, which has no row in the model's embedding of {rows} rows"


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token, also of a special one."""
    names = (name for name, special in tokenizer.special_tokens.items() if special == token)
    return next(names, tokenizer.token_bytes(token).decode(errors="replace"))


def check_text(text: str) -> None:
    """Raise TokenizerError for text that UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text is not valid Unicode: character {error.start} is the lone surrogate {text[error.start]!a}"
        ) from None


@contextmanager
def library_errors(what: str, remedy: str = "copy it again") -> Iterator[None]:
    """Convert errors of a tokenizer library, including panics of Rust code, to TokenizerError."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        # A panic is not an Exception: its class is pyo3_runtime.PanicException, which cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = reason_of(error, 160) or "damaged"
        if "retry-limit" in reason:  # Oniguruma's, for a text that the pattern could match in too many ways
            remedy = (
                "its pre_tokenizer's pattern backtracks too much on this text: simplify the pattern, or shorten the text"
            )
        elif "Onig" in reason:
            remedy = "correct the pattern of its pre_tokenizer"
        raise TokenizerError(f"{what} ({reason}); {remedy}") from None
