"""Hugging Face's ``tokenizer.json``, run by the tokenizers library: any BPE of Llama's two families.

One spells a space as U+2581 and unknown characters as byte tokens (Llama 1 and 2, TinyLlama), the other spells every byte
as a printable character (Llama 3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_jax.errors import TokenizerError, short_repr
from llama_jax.tokenizers.interface import (
    CONTINUATION_MARK,
    SPACE,
    PartsTokenizer,
    TextPart,
    check_text,
    ending_ids,
    is_template_token,
    library_errors,
    order_matters,
    special_pattern,
    split_longest,
    unspelled_space,
)
from llama_jax.tokenizers.tokenizer_config import Settings, write_settings

if TYPE_CHECKING:
    import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Two noncharacters, inserted into a special token's name that is text, and removed by the normalizer: the library searches
# for special tokens before it normalizes, so it finds none there and still encodes the text as a whole.
TEXT_MARK = "\ufdd0\ufdd1"
LONG_TEXT = 4000  # characters, which take the library a few milliseconds
MAX_UNUSED_IDS = 1 << 16  # ids
# Default names of the begin- and end-of-sequence tokens if no file names them.
USUAL_BOS = ("<|begin_of_text|>", "<s>")
USUAL_EOS = ("<|end_of_text|>", "</s>")


def byte_characters() -> dict[str, int]:
    """{character: byte}: GPT-2's spelling of bytes; unprintable ones are characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(unprintable)}


CHARACTER_BYTES = byte_characters()
BYTE_CHARACTERS = {byte: character for character, byte in CHARACTER_BYTES.items()}


def spell(token: bytes) -> str:
    """The bytes as the characters that stand for them."""
    return "".join(BYTE_CHARACTERS[byte] for byte in token)


def is_tokenizer_json(start: bytes) -> bool:
    """Whether a file begins like a tokenizer.json: an object with its version as the first key."""
    return re.match(rb'\s*\{\s*"(version|added_tokens)"\s*:', start) is not None


def from_json(content: bytes, where: str, settings: Settings = Settings()) -> HuggingFaceTokenizer:
    """The vocabulary in the content of a ``tokenizer.json`` that was found at `where`."""
    import tokenizers

    _refuse_prefix(content, where)
    with library_errors(f"{where} is not a whole tokenizer.json"):
        library = tokenizers.Tokenizer.from_buffer(content)
        _add_tokens(library, settings)
        _set_prefix(library, settings.add_prefix_space)
        ids = library.get_vocab(with_added_tokens=True).values()
        size = 1 + max(ids, default=-1)
    # Real files have few gaps. The library iterates over all of them when it saves, and aborts if memory runs out.
    if size - 1 > 2 * len(ids) + MAX_UNUSED_IDS:
        raise TokenizerError(f"{where} has a token with id {size - 1}, but only {len(ids)} tokens; copy it again")
    return HuggingFaceTokenizer(library, where, size, settings)


def _refuse_prefix(content: bytes, where: str) -> None:
    """Raise TokenizerError for a prefix of tokens inside words, as in BERT's vocabulary: some make the library abort."""
    if b"\\u" in content or re.search(rb'"continuing_subword_prefix"\s*:\s*"', content):
        try:
            model = json.loads(content)["model"]
            prefix = model["continuing_subword_prefix"]
        except (ValueError, LookupError, TypeError, RecursionError):
            return  # the library reports it, or there is no prefix
        if prefix:
            raise TokenizerError(f"{where}: continuing_subword_prefix={short_repr(prefix)} is not supported")


class HuggingFaceTokenizer(PartsTokenizer):
    """A vocabulary that the tokenizers library runs."""

    metadata: Mapping[str, Any] | None = None
    """The fields of the GGUF file from which it was loaded."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        where: str,
        vocab_size: int,
        settings: Settings = Settings(),
        special_tokens: Mapping[str, int] | None = None,
        user_defined: Mapping[str, int] | None = None,
        spelled: Sequence[Sequence[int]] = (),
        odd: Mapping[int, bytes] | None = None,
    ) -> None:
        """Wrap a tokenizer of the library, from the file `where`, and modify it.

        Args:
          vocab_size: its largest id plus one, without those of `spelled`.
          special_tokens: ids of special tokens by name; by default those of the library and the settings.
          user_defined: tokens that are matched longest first anywhere in a text; the library would match left to right.
          spelled: for each id of the library from V on, the ids that replace it.
          odd: bytes of tokens that have another text in the library.
        """
        from tokenizers import normalizers

        with library_errors(f"{where} is not a tokenizer.json of a Llama"):
            self.spells_bytes, self.space_prefix = _spelling(where, library.decoder)
            special = special_tokens
            if special is None:
                library, special = _find_special_tokens(library, settings)
            added = library.get_added_tokens_decoder()
            self._own_normalizer = library.normalizer
            # The marks are removed after the search for special tokens and before everything else.
            steps = [normalizers.Replace(TEXT_MARK, ""), *([] if library.normalizer is None else [library.normalizer])]
            library.normalizer = normalizers.Sequence(steps)
            library.no_truncation()
            library.no_padding()
            self.vocab_size = vocab_size
            self._beyond = spelled
            self.bos_id = _id_of(library, settings.bos_token, USUAL_BOS, special)
            self.eos_id = _id_of(library, settings.eos_token, USUAL_EOS, special)
            self.add_bos, self.add_eos = _adds(library, settings, self.bos_id, self.eos_id)
        self._library = library
        self._where = where
        self.strips_right = frozenset(i for i, token in added.items() if token.rstrip)
        self._added = {i: b"" if token.special else token.content.encode() for i, token in added.items()} | dict(odd or {})
        self.special_tokens: Mapping[str, int] = special
        self._names = {i: name for name, i in self.special_tokens.items()}
        self._pattern = special_pattern([*self.special_tokens, TEXT_MARK])
        hidden = any(self._pattern.search(name) for name in user_defined or ())
        self._user_defined = user_defined if user_defined and (hidden or order_matters(user_defined)) else {}
        self._first = {name[0] for name in (*self.special_tokens, TEXT_MARK) if name}
        self.stop_ids = ending_ids(self, settings.stop_ids, complete=settings.all_stop_ids)
        self.chat_template = settings.chat_template
        self.chat_templates, self.named_tokens = settings.chat_templates, settings.tokens_by_name
        self.settings = settings

    def encode_parts(self, parts: Sequence[TextPart]) -> list[int]:
        """Ids of texts and special tokens, encoded as a whole by the library up to a text that continues another one."""
        ids: list[int] = []
        for before, run in _split_runs(parts):
            if before is None:
                ids += self._encode_run(run)
            else:
                text = unspelled_space(self, before, ids) + str(run[0])
                ids += self._encode_run([self._mark + text, *run[1:]])[len(self._mark_ids) :]
        return ids

    @cached_property
    def _mark(self) -> str:
        """What precedes a text that continues another one, so that it is not changed like the beginning of a text."""
        beginnings = ("a", " a")
        spelled = [b"".join(map(self.token_bytes, self._encode_run([text]))) for text in beginnings]
        return "" if spelled == [text.encode() for text in beginnings] else CONTINUATION_MARK

    @cached_property
    def _mark_ids(self) -> list[int]:
        return self._encode_run([self._mark])

    def _encode_run(self, parts: Sequence[TextPart]) -> list[int]:
        pieces = [self._as_text(part) if isinstance(part, str) else self._names[part] for part in parts]
        text = "".join(pieces)
        check_text(text)
        seen = [match.group() for match in self._pattern.finditer(text) if match.group() != TEXT_MARK]
        if seen != [self._names[part] for part in parts if not isinstance(part, str)]:
            text = TEXT_MARK.join(pieces)  # a special token must not form across parts
        with library_errors(f"{self._where} cannot encode a text"):
            if len(text) > LONG_TEXT:  # the library releases the GIL only in batches
                return self._within(self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            return self._within(self._library.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without character offsets, which the library otherwise computes."""
        for text in texts:
            check_text(text)
        with library_errors(f"{self._where} cannot encode a text"):
            encodings = self._library.encode_batch_fast(list(map(self._as_text, texts)), add_special_tokens=False)
        return [self._within(encoding.ids) for encoding in encodings]

    def _token_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        piece = self._library.id_to_token(token) or ""  # ids may have gaps
        if self.spells_bytes:
            if all(character in CHARACTER_BYTES for character in piece):
                return bytes(CHARACTER_BYTES[character] for character in piece)
            return piece.encode()
        byte = BYTE_TOKEN.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, and files with the settings."""
        text = json.dumps(self.description(), indent=2, ensure_ascii=False)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        write_settings(folder, self, self.settings, "PreTrainedTokenizerFast")

    def description(self) -> dict[str, Any]:
        """The content of its ``tokenizer.json``."""
        normalizer = self._own_normalizer
        content = json.loads(self._library.to_str()) | {
            "normalizer": None if normalizer is None else json.loads(normalizer.__getstate__())
        }
        if self._beyond:
            model = content["model"]
            model["vocab"] = vocabulary = {token: i for token, i in model["vocab"].items() if i < self.vocab_size}
            model["merges"] = [[a, b] for a, b in model["merges"] if {a, b, a + b} <= vocabulary.keys()]
        return content

    def _within(self, ids: list[int]) -> list[int]:
        if not self._beyond:
            return ids
        size = self.vocab_size
        return [token for i in ids for token in ((i,) if i < size else self._beyond[i - size])]

    def _as_text(self, text: str) -> str:
        """The text in the form in which the library treats names of special tokens as text."""
        if not self._user_defined:
            return self._masked(text)
        names = {i: name for name, i in self._user_defined.items()}
        parts = split_longest(text, self._user_defined)
        return TEXT_MARK.join(self._masked(part) if isinstance(part, str) else names[part] for part in parts)

    def _masked(self, text: str) -> str:
        if not any(first in text for first in self._first):  # ten times as fast as the pattern
            return text
        return self._pattern.sub(lambda match: match.group()[0] + TEXT_MARK + match.group()[1:], text)


def _split_runs(parts: Sequence[TextPart]) -> Iterator[tuple[str | None, Sequence[TextPart]]]:
    """Runs of parts without adjacent texts, each with the text before it if it continues one."""
    starts = [i for i in range(1, len(parts)) if isinstance(parts[i - 1], str) and isinstance(parts[i], str)]
    for start, end in pairwise([0, *starts, len(parts)]):
        yield (str(parts[start - 1]) if start else None), parts[start:end]


def _id_of(library: tokenizers.Tokenizer, name: str | None, usual: Sequence[str], special: Mapping[str, int]) -> int:
    """The id of the begin- or end-of-sequence token, or -1."""
    if name is None:
        return next((special[name] for name in usual if name in special), -1)
    token = library.token_to_id(name)
    return -1 if token is None else token


def _adds(library: tokenizers.Tokenizer, settings: Settings, bos: int, eos: int) -> tuple[bool, bool]:
    """Whether a text begins with the BOS and ends with the EOS: as the library's post-processor adds them, like in
    transformers; without a post-processor, as the settings say."""
    if library.post_processor is None:
        return settings.add_bos is True and bos >= 0, settings.add_eos is True and eos >= 0
    text, put = (library.encode("a", add_special_tokens=special).ids for special in (False, True))
    begin = next(i for i in range(len(put) + 1) if put[i : i + len(text)] == text)
    return bos in put[:begin], eos in put[begin + len(text) :]


def _add_tokens(library: tokenizers.Tokenizer, settings: Settings) -> None:
    """Add the tokens that only the settings files have, in transformers' order.

    An existing token becomes special if it is marked so here or there; by being listed without flags only a new one.
    """
    from tokenizers import AddedToken

    special = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    library.add_tokens(
        [
            AddedToken(
                token.text,
                special=token.special or token.text in special,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
                normalized=token.normalized,
            )
            for token in settings.added_tokens
        ]
    )
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    new = [text for text in settings.extra_tokens if text not in known]
    library.add_tokens([AddedToken(text, special=True, normalized=False) for text in new])


def _set_prefix(library: tokenizers.Tokenizer, add: bool | None) -> None:
    """Add a leading space to texts or not, if the settings of a vocabulary with U+2581 say so."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    if add is None or isinstance(library.decoder, decoders.ByteLevel):
        return
    library.normalizer = normalizers.Sequence([])
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if add else "never", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if add else []
    library.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def _find_special_tokens(library: tokenizers.Tokenizer, settings: Settings) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    """The library's tokenizer, changed to find special tokens in the raw text, and these tokens. Old files mark them as
    normalized, so that they are found only at the start of a text.

    Special tokens are those marked as special, those with a name, such as pad_token, and those in angle or square brackets
    that the chat template uses, whether or not they are marked.
    """
    from tokenizers import AddedToken, Tokenizer

    added = {token.content for token in library.get_added_tokens_decoder().values()}
    named_tokens = [name for name in settings.named_tokens if library.token_to_id(name) is not None]
    library.add_special_tokens([AddedToken(name, normalized=False) for name in named_tokens if name not in added])
    special = {
        token.content: i
        for i, token in library.get_added_tokens_decoder().items()
        if token.special or token.content in named_tokens or is_template_token(token.content, settings.chat_template)
    }
    tokens = [token for token in library.get_added_tokens_decoder().values() if token.content in special]
    if any(token.normalized or (token.content in named_tokens and not token.special) for token in tokens):
        described = json.loads(library.to_str())  # the library has no other way to change a token's flags
        for entry in described["added_tokens"]:
            entry["normalized"] &= entry["content"] not in special
            entry["special"] |= entry["content"] in named_tokens
        library = Tokenizer.from_str(json.dumps(described))
    return library, special


def _spelling(where: str, decoder: Any) -> tuple[bool, bool]:
    """Whether the vocabulary spells bytes as characters, and whether decoding removes a leading space."""
    described: dict[str, Any] = {"type": None} if decoder is None else json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = described["decoders"] if described["type"] == "Sequence" else [described]
    step_types = [step["type"] for step in steps]
    if step_types == ["ByteLevel"]:
        return True, False
    if step_types == ["Metaspace"] and steps[0]["replacement"] == SPACE:
        return False, steps[0].get("prepend_scheme", "always") != "never"
    to_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if step_types[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == to_space and steps[3:] in ([], [strip]):
        return False, bool(steps[3:])
    raise TokenizerError(
        f"{where}: the decoder {' + '.join(map(str, step_types))} is not supported;"
        " ByteLevel, Metaspace and Replace + ByteFallback + Fuse are"
    )
