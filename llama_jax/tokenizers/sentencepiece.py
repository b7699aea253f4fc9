"""SentencePiece vocabularies: Llama 1 and 2, TinyLlama, llama2.c's stories; new ones, trained on text or of only bytes."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llama_jax.errors import TokenizerError, short_repr
from llama_jax.settings import Bounds
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
    split_longest,
    split_special,
    unspelled_space,
)
from llama_jax.tokenizers.tokenizer_config import Settings, write_settings

if TYPE_CHECKING:
    import sentencepiece

BYTE_VOCABULARY = 259  # <unk>, <s>, </s> and every byte
MAX_VOCABULARY = 1 << 20  # four times the largest in use; the trainers reserve memory for all of it
MAX_LINE_BYTES = 4000  # bytes; SentencePiece skips longer lines
BYTE_PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)}  # the texts of byte tokens


class EntryType(IntEnum):
    """The kind of a piece, with the numbers of sentencepiece_model.proto and of GGUF's token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Entry(NamedTuple):
    """One entry of a vocabulary; among possible merges BPE chooses the one with the highest score."""

    text: str
    score: float
    type: EntryType


def is_sentencepiece(start: bytes) -> bool:
    """Whether a file begins with the first piece of a SentencePiece protocol buffer (field 1, then its text)."""
    return len(start) >= 3 and start[0] == 0x0A and start[2] == 0x0A


class SentencePieceTokenizer(PartsTokenizer):
    """A SentencePiece model that the sentencepiece library runs."""

    metadata: Mapping[str, Any] | None = None
    """The fields of the GGUF file from which it was loaded."""

    def __init__(
        self,
        model: bytes,
        where: str,
        settings: Settings = Settings(),
        entries: Sequence[Entry] | None = None,
        strips_right: Iterable[int] = (),
        aliases: Sequence[int] = (),
    ) -> None:
        """Load the serialized model (the content of the ``.model`` file `where`).

        Args:
          entries: the tokens, if they differ from the model's pieces. User-defined ones are found in a text before the model
            encodes the text between them.
          strips_right: tokens that strip the white space after them.
          aliases: for each piece of the model after `entries`, the id that replaces it.
        """
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor()
        has_model_types = entries is None
        own_rule = has_model_types and not settings.gguf  # the library's, which adds no space after a user-defined token
        with library_errors(f"{where} is not a whole SentencePiece model"):
            self._processor.LoadFromSerializedProto(model)
            if self._processor.GetPieceSize() < 1:
                raise RuntimeError("it has no pieces")
            guarded: dict[str, int] = {}
            if entries is None:
                pieces = _read_pieces(self._processor)
                entries = declared_entries(where, pieces, settings)
                if own_rule:  # as control pieces, which the library does not find in a user's text
                    guarded = {
                        entry.text: i
                        for i, entry in enumerate(entries)
                        if entry.type == EntryType.USER_DEFINED and is_template_token(entry.text, settings.chat_template)
                    }
                if guarded or entries != pieces:
                    model = _with_entries(model, pieces, entries)
                    used = [entry._replace(type=EntryType.CONTROL) if entry.text in guarded else entry for entry in entries]
                    self._processor.LoadFromSerializedProto(_with_entries(model, entries, used))
            self.vocab_size: int = self._processor.GetPieceSize() - len(aliases)
            self.space_prefix: bool = self._processor.Normalize("a").startswith(SPACE)
        self._model, self._entries = model, list(entries)
        self._bytes = [_entry_bytes(entry) for entry in self._entries]
        self.special_tokens = self._ids_by_text(EntryType.CONTROL, EntryType.UNKNOWN) | guarded
        self._user_defined = {} if own_rule else self._ids_by_text(EntryType.USER_DEFINED)
        self._split = split_longest if order_matters(self._user_defined) else split_special
        self.strips_right = frozenset(strips_right)
        self._aliases = list(aliases)
        self._is_strict = has_model_types and not self._user_defined  # whether the kinds in the library's model are valid
        self.bos_id: int = self.special_tokens.get(settings.bos_token or "", self._processor.bos_id())
        self.eos_id: int = self.special_tokens.get(settings.eos_token or "", self._processor.eos_id())
        self.add_bos = settings.add_bos is not False and self.bos_id >= 0
        self.add_eos = settings.add_eos is True and self.eos_id >= 0
        self.stop_ids = ending_ids(self, settings.stop_ids, complete=settings.all_stop_ids)
        self.chat_template = settings.chat_template
        self.chat_templates, self.named_tokens = settings.chat_templates, settings.tokens_by_name
        self.settings = settings

    def encode_parts(self, parts: Sequence[TextPart]) -> list[int]:
        """Ids of texts and special tokens; a text gets a leading space unless it continues another one, as in Meta's code
        and llama.cpp."""
        ids: list[int] = []
        for before, part in pairwise([None, *parts]):
            if isinstance(part, str) and isinstance(before, str):
                text = CONTINUATION_MARK + unspelled_space(self, before, ids) + part
                ids += self._encode_part(text)[len(self._encode_part(CONTINUATION_MARK)) :]
            elif isinstance(part, str):
                ids += self._encode_part(part, ids[-1] if ids else None)
            elif part is not None:
                ids.append(part)
        return ids

    def _encode_part(self, text: str, before: int | None = None) -> list[int]:
        """Ids of a text after a special token or at the beginning."""
        ids: list[int] = []
        for part in self._split(text, self._user_defined) if self._user_defined else [text]:
            if isinstance(part, str):
                if (ids[-1] if ids else before) in self.strips_right:
                    part = part.lstrip(" \t\n\v\f\r")
                check_text(part)
                ids += self._without_aliases(self._processor.EncodeAsIds(part))
            else:
                ids.append(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, computed on this thread only."""
        if self._user_defined:
            return super().encode_batch(texts)
        for text in texts:
            check_text(text)
        return [self._without_aliases(ids) for ids in self._processor.EncodeAsIds(list(texts), num_threads=1)]

    def _without_aliases(self, ids: list[int]) -> list[int]:
        size = self.vocab_size
        return [i if i < size else self._aliases[i - size] for i in ids] if self._aliases else ids

    def _token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def save(self, folder: Path) -> None:
        """Write the model as ``tokenizer.model``, including added tokens, and files with the settings."""
        (folder / "tokenizer.model").write_bytes(self._model if self._is_strict else self._strict_model())
        write_settings(folder, self, self.settings, "LlamaTokenizer")

    def _strict_model(self) -> bytes:
        """A model that satisfies the format: one unknown token, and all 256 bytes or none."""
        unknown = [*range(self.vocab_size), *self._aliases][self._processor.unk_id()]
        texts = {entry.text for entry in self._entries}
        all_bytes = texts.issuperset(BYTE_PIECES)
        pieces = []
        for i, (text, score, entry_type) in enumerate(self._entries):
            if i == unknown or entry_type == EntryType.UNKNOWN:
                entry_type = EntryType.UNKNOWN if i == unknown else EntryType.CONTROL
            elif entry_type == EntryType.UNUSED and any(
                text[:j] in texts and text[j:] in texts for j in range(1, len(text))
            ):
                entry_type = EntryType.NORMAL  # merges lead to it, and the library splits unused pieces again
            if text in BYTE_PIECES:
                entry_type = EntryType.BYTE if all_bytes else EntryType.CONTROL
            pieces.append(Entry(valid_text(text, i), score, entry_type))
        bos, eos = (self._entries[i].text if i >= 0 else "" for i in (self.bos_id, self.eos_id))
        return write_model(pieces, bos=bos, eos=eos, space_prefix=self.space_prefix)

    def pieces(self) -> list[Entry]:
        """All entries of the vocabulary by id."""
        return list(self._entries)

    def _ids_by_text(self, *entry_types: EntryType) -> dict[str, int]:
        return {entry.text: i for i, entry in enumerate(self._entries) if entry.type in entry_types}


def valid_text(text: str, token: int) -> str:
    """The text of a token as valid UTF-8; an invalid one is replaced by a text that never occurs."""
    valid = text.encode(errors="surrogateescape").decode(errors="replace")
    return text if valid == text else f"{valid}[{token}]"


def _entry_bytes(entry: Entry) -> bytes:
    if entry.type == EntryType.CONTROL:
        return b""
    if entry.type == EntryType.UNKNOWN:
        return " \N{DOUBLE QUESTION MARK} ".encode()  # as SentencePiece decodes it
    if entry.type == EntryType.BYTE:
        return bytes([int(entry.text[1:-1], 16)])  # "<0x0A>"
    return (entry.text if entry.type == EntryType.USER_DEFINED else entry.text.replace(SPACE, " ")).encode(
        errors="surrogateescape"
    )


def _read_pieces(processor: sentencepiece.SentencePieceProcessor) -> list[Entry]:
    """The entries of a model."""
    content = processor.serialized_model_proto()
    tests = (
        (EntryType.UNKNOWN, processor.IsUnknown),
        (EntryType.CONTROL, processor.IsControl),
        (EntryType.UNUSED, processor.IsUnused),
        (EntryType.BYTE, processor.IsByte),
    )
    pieces = [
        Entry(
            processor.IdToPiece(i),
            processor.GetScore(i),
            next((entry_type for entry_type, is_of_type in tests if is_of_type(i)), EntryType.NORMAL),
        )
        for i in range(processor.GetPieceSize())
    ]
    # The library does not report which pieces are user-defined: they are recognized by their score of 0 and their bytes.
    for i, entry in enumerate(pieces):
        candidate = entry._replace(type=EntryType.USER_DEFINED)
        if entry[1:] == (0.0, EntryType.NORMAL) and write_pieces([candidate]) in content:
            pieces[i] = candidate
    return pieces


def declared_entries(where: str, pieces: Sequence[Entry], settings: Settings) -> list[Entry]:
    """The pieces of a model with the kinds that the files next to it declare, and then the tokens that only those have.

    As in transformers, a token is special if it is marked as special or has a name, such as pad_token; one that is listed
    without a name only if it is not marked otherwise. Ids of added tokens must follow those of the model.
    """
    plain = {token.text for token in settings.added_tokens if not token.special}
    plain |= {entry.text for entry in pieces if entry.type == EntryType.USER_DEFINED}
    special = {token.text for token in settings.added_tokens if token.special}
    special |= {*settings.named_tokens, *(set(settings.extra_tokens) - plain)}
    fixed = (EntryType.UNKNOWN, EntryType.BYTE)
    entries = [
        entry._replace(type=EntryType.CONTROL) if entry.text in special and entry.type not in fixed else entry
        for entry in pieces
    ]
    for token in sorted(settings.added_tokens, key=lambda token: token.id):
        if token.id >= len(pieces):
            if token.id != len(entries):
                raise TokenizerError(
                    f"{where} has {len(pieces)} pieces, but the added token {short_repr(token.text, 40)} has id {token.id}"
                    f" instead of {len(entries)}; copy the tokenizer's files again"
                )
            entry_type = EntryType.CONTROL if token.text in special else EntryType.USER_DEFINED
            entries.append(Entry(token.text, 0.0, entry_type))
    texts = {entry.text for entry in entries}
    return entries + [Entry(text, 0.0, EntryType.CONTROL) for text in settings.extra_tokens if text not in texts]


def _with_entries(model: bytes, pieces: Sequence[Entry], entries: Sequence[Entry]) -> bytes:
    """A serialized model with the kinds of these entries instead of those of its pieces, and with the further entries.

    Of a field that occurs twice in a protocol buffer the last one counts, and repeated fields are joined.
    """
    entry_types = {i: entry.type for i, entry in enumerate(entries[: len(pieces)]) if entry.type != pieces[i].type}
    parts: list[bytes] = []
    at = piece = 0
    while entry_types and at < len(model):
        tag, begin = _read_varint(model, at)
        size, begin = _read_varint(model, begin)
        content = model[begin : begin + size]
        if tag == 1 << 3 | 2:
            content += _integer(3, entry_types[piece]) if piece in entry_types else b""
            piece += 1
        parts.append(_varint(tag) + _varint(len(content)) + content)
        at = begin + size
    return (b"".join(parts) if entry_types else model) + write_pieces(entries[len(pieces) :])


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    """The varint at a position, and the position after it."""
    if content[at] < 0x80:
        return content[at], at + 1
    end = next(i for i in range(at, len(content)) if content[i] < 0x80) + 1
    return sum((byte & 0x7F) << 7 * i for i, byte in enumerate(content[at:end])), end


def write_model(pieces: Iterable[Entry], *, bos: str, eos: str, space_prefix: bool, spell_spaces: bool = True) -> bytes:
    """A serialized BPE model with these pieces, with ids in this order.

    Args:
      bos, eos: control pieces that begin and end a sequence.
      space_prefix: whether a space is added before each text.
      spell_spaces: whether the pieces spell a space as `SPACE`.
    """
    pieces = list(pieces)
    unknown = next((piece.text for piece in pieces if piece.type == EntryType.UNKNOWN), "<unk>")
    bytes_too = any(piece.type == EntryType.BYTE for piece in pieces)
    # Field numbers of ModelProto, TrainerSpec and NormalizerSpec in sentencepiece_model.proto.
    bpe = 2
    trainer = b"".join(
        (_integer(3, bpe), _integer(35, bytes_too), *(_text(n, t) for n, t in ((45, unknown), (46, bos), (47, eos))))
    )
    normalizer = b"".join((_text(1, "identity"), _integer(3, space_prefix), _integer(4, False), _integer(5, spell_spaces)))
    return write_pieces(pieces) + _bytes(2, trainer) + _bytes(3, normalizer)


def write_pieces(pieces: Iterable[Entry]) -> bytes:
    """The pieces as the protocol buffer's field 1."""
    return b"".join(
        _bytes(1, _text(1, piece.text) + b"\x15" + struct.pack("<f", piece.score) + _integer(3, piece.type))
        for piece in pieces
    )


def _varint(value: int) -> bytes:
    """A varint: seven bits per byte, the lowest first; the eighth bit marks that more follow."""
    low = []
    while value > 0x7F:
        low.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*low, value])


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode(errors="surrogateescape"))


# --- new vocabularies ----------------------------------------------------------------------------------------------------

SPECIAL_ENTRIES = (
    Entry("<unk>", 0.0, EntryType.UNKNOWN),
    Entry("<s>", 0.0, EntryType.CONTROL),
    Entry("</s>", 0.0, EntryType.CONTROL),
)


def byte_tokenizer() -> SentencePieceTokenizer:
    """A tokenizer with one token per byte: it needs no training and can encode any text."""
    bytes_ = [Entry(f"<0x{byte:02X}>", 0.0, EntryType.BYTE) for byte in range(256)]
    model = write_model([*SPECIAL_ENTRIES, *bytes_], bos="<s>", eos="</s>", space_prefix=False, spell_spaces=False)
    return SentencePieceTokenizer(model, "the byte vocabulary")


def train_bpe(texts: Iterable[str], size: int) -> SentencePieceTokenizer:
    """A byte-pair encoding trained on `texts`, like Llama 2's: spaces begin words, digits are separate tokens, and unknown
    characters are encoded as bytes (Touvron et al. 2023, section 2.1).

    Args:
      size: maximum V; a short text yields fewer tokens.

    Raises:
      TokenizerError: a size below 300 or above `MAX_VOCABULARY`, or a text that is too short.
    """
    import sentencepiece

    Bounds(300, MAX_VOCABULARY).check("vocab_size", size, TokenizerError)  # 259 are bytes and special tokens
    model = io.BytesIO()
    step = MAX_LINE_BYTES // 4  # a character has at most 4 bytes
    nonempty = (line for text in texts for line in text.split("\n") if line.strip())
    lines = (line[start : start + step] for line in nonempty for start in range(0, len(line), step))
    with library_errors("no vocabulary can be trained on the text", "use more text, or a smaller vocab_size"):
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=size,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            # A fixed number, not the number of cores, so that the same text yields the same vocabulary everywhere.
            num_threads=4,
            minloglevel=2,
        )
    return SentencePieceTokenizer(model.getvalue(), "the new vocabulary")
