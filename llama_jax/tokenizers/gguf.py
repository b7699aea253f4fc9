"""Conversion of a vocabulary from and to the metadata of a GGUF file (ggml's docs/gguf.md, "Tokenizer").

Where the format is ambiguous this follows llama.cpp, src/llama-vocab.cpp, whose ids are the reference.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from llama_jax.errors import TokenizerError, short_repr
from llama_jax.tokenizers.huggingface import BYTE_TOKEN, CHARACTER_BYTES, HuggingFaceTokenizer, spell
from llama_jax.tokenizers.interface import END_NAMES, PADDING_TOKEN, SPACE, Tokenizer, ending_names, library_errors
from llama_jax.tokenizers.pre_tokenizers import PRE_TOKENIZERS, build_pre_tokenizer, pre_tokenizer_name
from llama_jax.tokenizers.sentencepiece import BYTE_PIECES, Entry, EntryType, SentencePieceTokenizer, valid_text, write_model
from llama_jax.tokenizers.tiktoken import TiktokenTokenizer, derive_merges
from llama_jax.tokenizers.tokenizer_config import Settings, pad_id_of

GGUF_VOCABULARY_REMEDY = "load or convert the model with its own tokenizer.json (--tokenizer tokenizer.json)"
SPECIAL_TYPES = (EntryType.CONTROL, EntryType.UNKNOWN, EntryType.USER_DEFINED)  # found in a text before it is split
UNKNOWN_PIECE = "\ufdd0<unk>\ufdd1"  # never occurs in a text
DEFAULT_ENDS = {"llama": (1, 2), "gpt2": (11, 11), "gemma4": (None, None)}  # bos and eos if no field has them
# Pre-tokenizers with special rules.
NO_DEFAULT_BOS = ("chatglm-bpe", "glm4", "glm5")
ALWAYS_BOS = ("gemma4", "granite-embed-multi-311m")
KEEPS_LINES = ALWAYS_BOS  # a run of line feeds becomes one token if there is one
NO_MERGES = ("kimi-k2",)  # merges are optional
SPACES_AS_THEY_ARE = ("whitespace",)
# Tokens that llama.cpp recognizes by their text if no field has their ids; the last three end generation.
BY_TEXT = {
    "fim_pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
ENDS_BY_TEXT = ("fim_pad", "fim_rep", "fim_sep")
OLDER_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
PART_OF_REPLIES = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss's
# Models with special tokens that strip the white space after them, and exceptions.
STRIPS_RIGHT_MODELS = ("phi-3", "phi3")
STRIPS_NOTHING_TOKENS = ("<unk>", "<s>", "<|endoftext|>")
# Fields with token ids, and transformers' names of these tokens.
OTHER_TOKENS = {"unknown": "unk_token", "seperator": "sep_token", "mask": "mask_token"}
STOPS_KEY = "tokenizer.llama_jax.stop_token_ids"  # end tokens that do not fit into the fields of llama.cpp
PRE_KEY = "tokenizer.ggml.pre"
TEMPLATE_PREFIX = "tokenizer.chat_template."  # before the name of an additional template
# Fields that are covered by other settings.
OTHER_SETTINGS = {"model", "tokens", "scores", "token_type", "merges", "add_bos_token", "add_eos_token", "add_space_prefix"}
OTHER_SETTINGS |= {f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "padding", *OTHER_TOKENS)}
MASK_TOKEN = "<mask>"  # strips the white space before it with these pre-tokenizers
MASKED = ("jina-v2-de", "jina-v2-es", "jina-v2-code")


def from_metadata(fields: Mapping[str, Any], where: str) -> Tokenizer:
    """The vocabulary in the metadata of the GGUF file at `where`: SentencePiece ("llama") or BPE ("gpt2", "gemma4").

    Args:
      fields: the metadata by key, such as "tokenizer.ggml.tokens": strings, numbers, booleans, and lists of them.
    """
    reader = _FieldReader(fields, where)
    model = reader.text("model")
    if model not in DEFAULT_ENDS:
        reader.refuse("model", model, f"'llama' (SentencePiece) or 'gpt2' (BPE); {GGUF_VOCABULARY_REMEDY}")
    tokenizer: SentencePieceTokenizer | HuggingFaceTokenizer
    tokenizer = _sentencepiece(reader) if model == "llama" else _bpe(reader, model)
    metadata = {key: value for key, value in fields.items() if key.startswith("tokenizer.")}
    if reader.strips_right_by_name():  # recognized only by the model's name
        metadata["general.name"] = fields["general.name"]
    tokenizer.metadata = metadata
    return tokenizer


class _FieldReader:
    """Checked access to the fields of "tokenizer.ggml."."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields = fields
        self.where = where

    def text(self, name: str, default: str | None = None) -> str:
        value = self.fields.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, str):
            self.refuse(name, value, "a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return value

    def values(self, name: str, cls: type, count: int | None = None) -> list[Any]:
        """A list of `count` entries of this kind."""
        value = self.fields.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list | array):
            self.refuse(name, value, "a list")
        if count is not None and len(value) != count:
            raise TokenizerError(
                f"{self.where}: tokenizer.ggml.{name} has {len(value)} entries for {count} tokens; copy the file again"
            )
        if not all(issubclass(entry_type, cls) for entry_type in set(map(type, value))):
            self.refuse(name, next(entry for entry in value if not isinstance(entry, cls)), f"a list of {cls.__name__}")
        return list(value)

    def tokens(self) -> list[str]:
        return [token or f"[EMPTY_{i}]" for i, token in enumerate(self.values("tokens", str))]

    def entry_types(self, count: int) -> list[EntryType]:
        """The kind of each token; NORMAL if the file does not have them."""
        if "tokenizer.ggml.token_type" not in self.fields:
            return [EntryType.NORMAL] * count
        numbers = self.values("token_type", int, count)
        known = {0: EntryType.NORMAL} | {int(entry_type): entry_type for entry_type in EntryType}
        odd = next((number for number in numbers if number not in known), None)
        if odd is not None:
            self.refuse("token_type", odd, f"one of {[int(entry_type) for entry_type in EntryType]} for each token")
        return [known[number] for number in numbers]

    def token(self, name: str, count: int, default: int | None = None) -> int | None:
        """The id in the field ``{name}_token_id``, else a valid default."""
        value = self.fields.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return default if default is not None and default < count else None
        if type(value) is not int or not 0 <= value < count:
            self.refuse(f"{name}_token_id", value, f"an id below {count}")
        return value

    def stops(self, count: int) -> list[int]:
        """The end tokens in this library's own field."""
        stop_ids = list(self.fields.get(STOPS_KEY, []))
        if not all(type(token) is int and 0 <= token < count for token in stop_ids):
            self.refuse(STOPS_KEY, stop_ids, f"ids below {count}")
        return stop_ids

    def strips_right_by_name(self) -> bool:
        """Whether special tokens strip the white space after them."""
        return any(name in str(self.fields.get("general.name", "")).lower() for name in STRIPS_RIGHT_MODELS)

    def strips_right(self, tokens: Sequence[str], entry_types: Sequence[EntryType]) -> frozenset[int]:
        """The special tokens that strip the white space after them."""
        if not self.strips_right_by_name():
            return frozenset()
        special = {i for i, entry_type in enumerate(entry_types) if entry_type in SPECIAL_TYPES or tokens[i] == "</s>"}
        return frozenset(i for i in special if tokens[i] not in STRIPS_NOTHING_TOKENS)

    def settings(self, tokens: Sequence[str], entry_types: list[EntryType], pre: str, add_bos: bool) -> Settings:
        """The settings, with all end tokens as `stop_ids`; changes `entry_types` to those that llama.cpp assigns."""
        model, count = self.text("model"), len(tokens)
        ids = {token: i for i, token in enumerate(tokens)}
        bos, eos = DEFAULT_ENDS[model]
        bos = self.token("bos", count, None if pre in NO_DEFAULT_BOS else bos)
        eos = self.token("eos", count, eos)
        for name, token in (("bos", bos), ("eos", eos)):
            if token is not None and (model == "llama" or f"tokenizer.ggml.{name}_token_id" in self.fields):
                entry_types[token] = EntryType.CONTROL
        end_ids = (eos, self.token("eot", count), self.token("eom", count))
        ends = {token for token in end_ids if token is not None}
        for name, texts in BY_TEXT.items():
            token_id = self.token(name, count, self.token(OLDER_NAMES.get(name, name), count))
            if (
                token_id is None
                and (token_id := next((ids[text] for text in texts.split() if text in ids), None)) is not None
            ):
                entry_types[token_id] = EntryType.CONTROL
            if token_id is not None and name in ENDS_BY_TEXT:
                ends.add(token_id)
        by_text = [ids[text] for text in END_NAMES if text in ids]
        ends.update(by_text)
        for token in by_text:
            entry_types[token] = EntryType.CONTROL
        for text in PART_OF_REPLIES:
            if text in ids:
                entry_types[ids[text]] = EntryType.USER_DEFINED
        ends |= set(self.stops(count))
        names = {tokens[token]: token for token in ends}
        for text in names.keys() & END_NAMES - ending_names(names):
            entry_types[names.pop(text)] = EntryType.NORMAL if text == "</s>" else EntryType.USER_DEFINED
        pad = self.token("padding", count)
        template = self.fields.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            self.refuse("tokenizer.chat_template", template, "a text; copy it again")
        return Settings(
            bos_token=None if bos is None else tokens[bos],
            eos_token=None if eos is None else tokens[eos],
            stop_ids=tuple(sorted(names.values())),
            add_bos=self.flag("add_bos_token", add_bos),
            add_eos=self.flag("add_eos_token", False),
            chat_template=template,
            pad_token=None if pad is None else tokens[pad],
            pad_id=-1 if pad is None else pad,
            all_stop_ids=True,
            chat_templates={
                key.removeprefix(TEMPLATE_PREFIX): text
                for key, text in self.fields.items()
                if re.fullmatch(rf"{re.escape(TEMPLATE_PREFIX)}\w+", key) and isinstance(text, str)
            },
            gguf={key: value for key, value in self.fields.items() if _only_here(key, value)},
            other_settings={
                setting: tokens[token]
                for name, setting in OTHER_TOKENS.items()
                if (token := self.token(name, count)) is not None
            },
        )

    def refuse(self, name: str, value: Any, need: str) -> NoReturn:
        key = name if name.startswith("tokenizer.") else f"tokenizer.ggml.{name}"
        raise TokenizerError(f"{self.where}: {key}={short_repr(value)} must be {need}")


def _only_here(key: str, value: Any) -> bool:
    """Whether this is a scalar field of a vocabulary that no other setting covers."""
    known = key.removeprefix("tokenizer.ggml.") in OTHER_SETTINGS or key.startswith("tokenizer.chat_template")
    return key.startswith("tokenizer.") and not known and type(value) in (bool, int, float, str)


def _sentencepiece(reader: _FieldReader) -> SentencePieceTokenizer:
    tokens = reader.tokens()
    count = len(tokens)
    last = {token: i for i, token in enumerate(tokens)}
    tokens = [token if last[token] == i else f"{token}[{i}]" for i, token in enumerate(tokens)]  # the last of equal texts
    scores = reader.values("scores", float, count) if "tokenizer.ggml.scores" in reader.fields else [0.0] * count
    entry_types = reader.entry_types(count)
    settings = reader.settings(tokens, entry_types, "", add_bos=True)
    plain = (EntryType.NORMAL, EntryType.BYTE)
    entry_types = [
        entry_type if entry_type not in plain else EntryType.BYTE if token in BYTE_PIECES else EntryType.NORMAL
        for token, entry_type in zip(tokens, entry_types, strict=True)
    ]
    entries = [Entry(*entry) for entry in zip(tokens, scores, entry_types, strict=True)]
    unknown = reader.token("unknown", count, entry_types.index(EntryType.UNKNOWN) if EntryType.UNKNOWN in entry_types else 0)
    with library_errors(f"{reader.where} holds no whole SentencePiece vocabulary"):
        pieces, aliases = _for_library(entries, 0 if unknown is None else unknown)
        model = write_model(pieces, bos="", eos="", space_prefix=reader.flag("add_space_prefix", True))
        strips_right = reader.strips_right(tokens, entry_types)
        tokenizer = SentencePieceTokenizer(model, reader.where, settings, entries, strips_right, aliases)
    tokenizer.stop_ids = settings.stop_ids
    return tokenizer


def _for_library(entries: Sequence[Entry], unknown: int) -> tuple[list[Entry], list[int]]:
    """The pieces of a model that encodes like llama.cpp, and for the pieces after the vocabulary the ids that replace them.

    llama.cpp merges to tokens of any kind, but the library only to normal pieces. The library requires an unknown piece,
    which is appended if the unknown token can result from merges, and all bytes or none; missing ones are appended.
    """
    ids = {entry.text: i for i, entry in enumerate(entries)}
    pieces = [entry._replace(type=EntryType.NORMAL) for entry in entries]
    following: dict[str, int] = {}
    if not ids.keys().isdisjoint(BYTE_PIECES):
        for text, byte in BYTE_PIECES.items():
            if text in ids:
                pieces[ids[text]] = entries[ids[text]]._replace(type=EntryType.BYTE)
            else:
                following[text] = ids.get(decode_byte(byte), unknown)
    reached = lambda text: len(text) == 1 or text in ids
    name = entries[unknown].text
    is_text = len(name) == 1 or any(reached(name[:n]) and reached(name[n:]) for n in range(1, len(name)))
    if is_text or pieces[unknown].type == EntryType.BYTE:
        following[UNKNOWN_PIECE] = unknown
    else:
        pieces[unknown] = entries[unknown]._replace(type=EntryType.UNKNOWN)
    pieces += [Entry(text, 0.0, EntryType.UNKNOWN if text == UNKNOWN_PIECE else EntryType.BYTE) for text in following]
    return pieces, list(following.values())


def decode_byte(byte: int) -> str:
    """The text to which a single byte decodes."""
    return bytes([byte]).decode(errors="surrogateescape")


def _bpe(reader: _FieldReader, model: str) -> HuggingFaceTokenizer:
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Library

    name = "gemma4" if model == "gemma4" else reader.text("pre", "default")
    if name not in PRE_TOKENIZERS:
        reader.refuse("pre", name, f"a pre-tokenizer of llama.cpp; {GGUF_VOCABULARY_REMEDY}")
    pre = PRE_TOKENIZERS[name]
    texts = reader.tokens()
    tokens = texts if is_utf_8("".join(texts)) else [valid_text(text, i) for i, text in enumerate(texts)]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise TokenizerError(f"{reader.where}: tokenizer.ggml.tokens has duplicate tokens; copy the file again")
    entry_types = reader.entry_types(len(tokens))
    settings = reader.settings(tokens, entry_types, name, pre.add_bos)
    if name in ALWAYS_BOS:
        settings = replace(settings, add_bos=True)
    strips_right = reader.strips_right(tokens, entry_types)
    pairs = _pairs(reader, required=name not in NO_MERGES)
    # The result of merges that is not a token becomes the tokens of its bytes, as in llama.cpp. A byte that is not a token
    # becomes nothing, but the texts on both sides of it do not merge.
    made = {text for left, right in pairs for text in (left, right, left + right) if text not in ids}
    missing = sorted(made.union(CHARACTER_BYTES if pre.spells_bytes else ()).difference(ids))
    byte_name = decode_byte if pre.spells_bytes else list(BYTE_PIECES).__getitem__
    found_as = ids if tokens is texts else {text: i for i, text in enumerate(texts)}
    spelled = [[found_as[name] for name in map(byte_name, text.encode()) if name in found_as] for text in missing]
    odd = {i: b"" for i, token in enumerate(texts) if token != tokens[i]}
    beyond = {text: len(tokens) + i for i, text in enumerate(missing)}
    with library_errors(f"{reader.where} holds no whole BPE vocabulary"):
        library = Library(
            models.BPE(
                vocab=ids | beyond,
                merges=pairs,
                ignore_merges=pre.ignore_merges,
                byte_fallback=not pre.spells_bytes,
            )
        )
        library.pre_tokenizer = build_pre_tokenizer(pre)
        library.decoder = decoders.ByteLevel()
        if not pre.spells_bytes:
            library.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
            if name not in SPACES_AS_THEY_ARE:
                library.normalizer = normalizers.Replace(" ", SPACE)
        special_ids = [i for i, entry_type in enumerate(entry_types) if entry_type in SPECIAL_TYPES]
        special_tokens = {tokens[i]: i for i in special_ids if entry_types[i] != EntryType.USER_DEFINED}
        lines = [i for i, token in enumerate(tokens) if not token.strip("\n")] if name in KEEPS_LINES else []
        for special, add in ((True, library.add_special_tokens), (False, library.add_tokens)):
            add(
                [
                    AddedToken(
                        tokens[i],
                        special=special,
                        normalized=False,
                        lstrip=tokens[i] == MASK_TOKEN and name in MASKED,
                        rstrip=i in strips_right,
                    )
                    for i in sorted({*special_ids, *lines})
                    if (tokens[i] in special_tokens) is special
                ]
            )
        begin = [settings.bos_token] if settings.add_bos and settings.bos_token else []
        end = [settings.eos_token] if settings.add_eos and settings.eos_token else []
        library.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end], special_tokens=[(token, ids[token]) for token in {*begin, *end}]
        )
    user_defined = {tokens[i]: i for i in special_ids if entry_types[i] == EntryType.USER_DEFINED}
    tokenizer = HuggingFaceTokenizer(
        library, reader.where, len(tokens), settings, special_tokens, user_defined, spelled, odd
    )
    tokenizer.stop_ids = settings.stop_ids
    return tokenizer


def _pairs(reader: _FieldReader, required: bool) -> list[tuple[str, str]]:
    """The merges as pairs of texts; among equal ones the first counts."""
    if not required and "tokenizer.ggml.merges" not in reader.fields:
        return []
    texts = dict.fromkeys(reader.values("merges", str))
    pairs = []
    for text in texts:
        if " " not in text[1:]:
            reader.refuse("merges", text, "two tokens with a space between them")
        pairs.append(_halves(text))
    if is_utf_8("".join(texts)):
        return pairs
    return [merge for merge in pairs if is_utf_8("".join(merge))]


def _halves(merge: str) -> tuple[str, str]:
    """The two tokens of a merge; the first may begin with a space."""
    middle = merge.index(" ", 1)
    return merge[:middle], merge[middle + 1 :]


def is_utf_8(text: str) -> bool:
    """Whether a text has no lone surrogates, to which invalid UTF-8 is decoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_metadata(tokenizer: Tokenizer, vocab_size: int | None = None) -> dict[str, Any]:
    """The metadata for `from_metadata` and llama.cpp; for a vocabulary from a GGUF file, its original metadata.

    Args:
      vocab_size: the model's: llama.cpp requires a token for every row of the embedding, and no others.
    """
    if isinstance(tokenizer, SentencePieceTokenizer | HuggingFaceTokenizer) and tokenizer.metadata is not None:
        fields = {
            key: list(value) if isinstance(value, list | array) else value for key, value in tokenizer.metadata.items()
        }
    else:
        fields = _vocabulary_fields(tokenizer)
        fields |= _uncovered_settings(tokenizer.settings, fields)  # type: ignore[attr-defined]
    for i in range(len(fields["tokenizer.ggml.tokens"]), vocab_size or 0):
        for name, value in (("tokens", PADDING_TOKEN.format(i)), ("scores", 0.0), ("token_type", int(EntryType.UNUSED))):
            if f"tokenizer.ggml.{name}" in fields:
                fields[f"tokenizer.ggml.{name}"].append(value)
    if vocab_size is not None and len(fields["tokenizer.ggml.tokens"]) > vocab_size:
        fields = _only_first(fields, vocab_size)
        ends = [token for token in tokenizer.stop_ids if token < vocab_size]
        if ends and "tokenizer.ggml.eos_token_id" not in fields:  # otherwise llama.cpp would end at its default
            fields["tokenizer.ggml.eos_token_id"] = ends[0]
    if tokenizer.chat_template is not None:
        fields["tokenizer.chat_template"] = tokenizer.chat_template
    return fields


def _only_first(fields: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The metadata of the first `count` tokens."""
    first = dict(fields)
    dropped = set(fields["tokenizer.ggml.tokens"][count:])
    for name in ("tokens", "scores", "token_type"):
        if f"tokenizer.ggml.{name}" in first:
            first[f"tokenizer.ggml.{name}"] = first[f"tokenizer.ggml.{name}"][:count]
    for key in [key for key, value in first.items() if key.endswith("_token_id") and value >= count]:
        del first[key]
        if (add := key.replace("ggml.", "ggml.add_").removesuffix("_id")) in first:
            first[add] = False
    if stops := [token for token in first.pop(STOPS_KEY, []) if token < count]:
        first[STOPS_KEY] = stops
    if (merges_key := "tokenizer.ggml.merges") in first:
        parts = ((text, *_halves(text)) for text in first[merges_key])
        first[merges_key] = [text for text, left, right in parts if dropped.isdisjoint((left, right, left + right))]
    return first


def _vocabulary_fields(tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of a vocabulary that was not loaded from a GGUF file."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        fields = _sentencepiece_fields(tokenizer.pieces(), tokenizer.space_prefix)
    elif isinstance(tokenizer, TiktokenTokenizer):
        tokens = [spell(token) for token in tokenizer.ranks()]
        pairs = [(spell(left), spell(right)) for left, right in derive_merges(tokenizer.ranks())]
        names = sorted(tokenizer.special_tokens, key=tokenizer.special_tokens.__getitem__)
        entry_types = [EntryType.NORMAL] * len(tokens) + [EntryType.CONTROL] * len(names)
        fields = _bpe_fields(tokens + names, pairs, entry_types, "llama-bpe")
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        fields = _tokenizer_json_fields(tokenizer)
    else:
        raise TokenizerError(f"a {type(tokenizer).__name__} cannot be written to a GGUF file")
    fields |= {"add_bos_token": tokenizer.add_bos, "add_eos_token": tokenizer.add_eos}
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    special, settings = tokenizer.special_tokens, tokenizer.settings
    for name, setting in OTHER_TOKENS.items():
        text = settings.other_settings.get(setting)
        ids[name] = special.get(str(text.get("content") if isinstance(text, dict) else text), -1)
    if EntryType.UNKNOWN in fields["token_type"]:
        ids["unknown"] = fields["token_type"].index(EntryType.UNKNOWN)
    elif ids["unknown"] >= 0 and fields["model"] == "llama":  # among merged ones it is a control token
        fields["token_type"][ids["unknown"]] = int(EntryType.UNKNOWN)
    ids["padding"] = pad_id_of(tokenizer, settings)
    ids |= {name: special.get(text, -1) for name, text in (("eot", "<|eot_id|>"), ("eom", "<|eom_id|>"))}
    known = {ids[name] for name in ("eos", "eot", "eom")} | {special[name] for name in ending_names(special)}
    by_text = {text: token for token, text in enumerate(fields["tokens"])}
    for name in ENDS_BY_TEXT:  # which readers recognize without a field
        known |= {next((by_text[text] for text in BY_TEXT[name].split() if text in by_text), -1)}
    other_ends = sorted(set(tokenizer.stop_ids) - known, key=lambda token: (token == tokenizer.bos_id, token))
    for name in ("eot", "eom"):  # fields for additional end tokens
        if ids[name] < 0 and other_ends:
            ids[name] = other_ends.pop(0)
    fields |= {f"{name}_token_id": token for name, token in ids.items() if token >= 0}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()} | (
        {STOPS_KEY: other_ends} if other_ends else {}
    )


def _uncovered_settings(settings: Settings, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the fields do not cover: other templates, and those of the vocabulary's original GGUF file."""
    uncovered = {f"{TEMPLATE_PREFIX}{name}": text for name, text in settings.chat_templates.items()}
    uncovered |= {key: value for key, value in settings.gguf.items() if _only_here(key, value) and key not in fields}
    pre, written_rule = settings.gguf.get(PRE_KEY), PRE_TOKENIZERS.get(fields[PRE_KEY])
    if pre in PRE_TOKENIZERS and fields["tokenizer.ggml.model"] == "gpt2" and written_rule is not None:
        original_rule = PRE_TOKENIZERS[pre]
        if (original_rule.patterns, original_rule.ignore_merges) == (
            written_rule.patterns,
            written_rule.ignore_merges,
        ):  # several names for one rule
            uncovered[PRE_KEY] = pre
    return uncovered


def _sentencepiece_fields(pieces: Sequence[Entry], space_prefix: bool) -> dict[str, Any]:
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [piece.text for piece in pieces],
        "scores": [piece.score for piece in pieces],
        "token_type": [int(piece.type) for piece in pieces],
        "add_space_prefix": space_prefix,
    }


def _bpe_fields(
    tokens: list[str], pairs: Sequence[Sequence[str]], entry_types: Sequence[EntryType], pre: str
) -> dict[str, Any]:
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in pairs],
        "token_type": [int(entry_type) for entry_type in entry_types],
    }


def _tokenizer_json_fields(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    """The fields of a tokenizer.json with a byte-level BPE, or one converted from a SentencePiece model, with the order of
    its merges as scores."""
    description = tokenizer.description()
    model = description["model"]
    if model["type"] != "BPE":
        raise TokenizerError(f"a tokenizer.json with the model {model['type']} cannot be written to a GGUF file; BPE can")
    tokens = [PADDING_TOKEN.format(i) for i in range(tokenizer.vocab_size)]  # ids may have gaps
    entry_types = [EntryType.UNUSED] * len(tokens)
    for text, i in model["vocab"].items():
        tokens[i], entry_types[i] = (
            text,
            EntryType.BYTE if BYTE_TOKEN.fullmatch(text) and model["byte_fallback"] else EntryType.NORMAL,
        )
    for token in description["added_tokens"]:
        tokens[token["id"]] = token["content"]
        entry_types[token["id"]] = EntryType.CONTROL if token["special"] else EntryType.USER_DEFINED
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if tokenizer.spells_bytes:
        pre = pre_tokenizer_name(description["pre_tokenizer"], model["ignore_merges"])
        if pre is None:
            raise TokenizerError(
                "a tokenizer.json with a pre-tokenizer that llama.cpp does not have cannot be written to a GGUF file"
            )
        return _bpe_fields(tokens, pairs, entry_types, pre)
    unknown = model["unk_token"]
    order = {left + right: -float(i) for i, (left, right) in reversed(list(enumerate(pairs)))}
    if unknown is not None:
        entry_types[model["vocab"][unknown]] = EntryType.UNKNOWN
    pieces = [Entry(text, order.get(text, 0.0), entry_type) for text, entry_type in zip(tokens, entry_types, strict=True)]
    return _sentencepiece_fields(pieces, tokenizer.space_prefix)
