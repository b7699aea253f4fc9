"""Conversion of a vocabulary from and to the metadata of a GGUF file (ggml's docs/gguf.md, "Tokenizer").

Where the format is ambiguous this follows llama.cpp, src/llama-vocab.cpp, whose ids are the reference.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llama_jax.errors import TokenizerError, shown
from llama_jax.tokenizers.huggingface import BYTE_TOKEN, CHARACTER_BYTES, HuggingFaceTokenizer, spell
from llama_jax.tokenizers.interface import END_NAMES, PADDING_TOKEN, SPACE, Tokenizer, ending_names, library_errors
from llama_jax.tokenizers.pre_tokenizers import PRE_TOKENIZERS, build, name_of
from llama_jax.tokenizers.sentencepiece import BYTES, Entry, EntryKind, SentencePieceTokenizer, valid_text, write_model
from llama_jax.tokenizers.tiktoken import TiktokenTokenizer, merges
from llama_jax.tokenizers.tokenizer_config import Settings, pad_id_of

REMEDY = "load or convert the model with its own tokenizer.json (--tokenizer tokenizer.json)"
LOOKED_FOR = (EntryKind.CONTROL, EntryKind.UNKNOWN, EntryKind.USER_DEFINED)  # found in a text before it is split
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
SWALLOWING = ("phi-3", "phi3")
NOT_SWALLOWING = ("<unk>", "<s>", "<|endoftext|>")
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
    reader = _Reader(fields, where)
    model = reader.text("model")
    if model not in DEFAULT_ENDS:
        raise reader.error("model", model, f"'llama' (SentencePiece) or 'gpt2' (BPE); {REMEDY}")
    tokenizer: SentencePieceTokenizer | HuggingFaceTokenizer
    tokenizer = _sentencepiece(reader) if model == "llama" else _bpe(reader, model)
    kept = {key: value for key, value in fields.items() if key.startswith("tokenizer.")}
    if reader.swallows():  # recognized only by the model's name
        kept["general.name"] = fields["general.name"]
    tokenizer.metadata = kept
    return tokenizer


class _Reader:
    """Checked access to the fields of "tokenizer.ggml."."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields = fields
        self.where = where

    def text(self, name: str, default: str | None = None) -> str:
        value = self.fields.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, str):
            raise self.error(name, value, "a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def values(self, name: str, kind: type, count: int | None = None) -> list[Any]:
        """A list of `count` entries of this kind."""
        value = self.fields.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list | array):
            raise self.error(name, value, "a list")
        if count is not None and len(value) != count:
            raise TokenizerError(
                f"{self.where}: tokenizer.ggml.{name} has {len(value)} entries for {count} tokens; copy the file again"
            )
        if not all(issubclass(found, kind) for found in set(map(type, value))):
            raise self.error(name, next(each for each in value if not isinstance(each, kind)), f"a list of {kind.__name__}")
        return list(value)

    def tokens(self) -> list[str]:
        return [token or f"[EMPTY_{i}]" for i, token in enumerate(self.values("tokens", str))]

    def kinds(self, count: int) -> list[EntryKind]:
        """The kind of each token; NORMAL if the file does not have them."""
        if "tokenizer.ggml.token_type" not in self.fields:
            return [EntryKind.NORMAL] * count
        found = self.values("token_type", int, count)
        known = {0: EntryKind.NORMAL} | {int(kind): kind for kind in EntryKind}
        odd = next((kind for kind in found if kind not in known), None)
        if odd is not None:
            raise self.error("token_type", odd, f"one of {[int(kind) for kind in EntryKind]} for each token")
        return [known[kind] for kind in found]

    def token(self, name: str, count: int, default: int | None = None) -> int | None:
        """The id in the field ``{name}_token_id``, else a valid default."""
        value = self.fields.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return default if default is not None and default < count else None
        if type(value) is not int or not 0 <= value < count:
            raise self.error(f"{name}_token_id", value, f"an id below {count}")
        return value

    def stops(self, count: int) -> list[int]:
        """The end tokens in this library's own field."""
        found = list(self.fields.get(STOPS_KEY, []))
        if not all(type(token) is int and 0 <= token < count for token in found):
            raise TokenizerError(f"{self.where}: {STOPS_KEY}={shown(found)} must be ids below {count}")
        return found

    def swallows(self) -> bool:
        """Whether special tokens strip the white space after them."""
        return any(name in str(self.fields.get("general.name", "")).lower() for name in SWALLOWING)

    def swallowing(self, tokens: Sequence[str], kinds: Sequence[EntryKind]) -> frozenset[int]:
        """The special tokens that strip the white space after them."""
        if not self.swallows():
            return frozenset()
        found = {i for i, kind in enumerate(kinds) if kind in LOOKED_FOR or tokens[i] == "</s>"}
        return frozenset(i for i in found if tokens[i] not in NOT_SWALLOWING)

    def settings(self, tokens: Sequence[str], kinds: list[EntryKind], pre: str, add_bos: bool) -> Settings:
        """The settings, with all end tokens as `stop_ids`; changes `kinds` to those that llama.cpp assigns."""
        model, count = self.text("model"), len(tokens)
        ids = {token: i for i, token in enumerate(tokens)}
        bos, eos = DEFAULT_ENDS[model]
        bos = self.token("bos", count, None if pre in NO_DEFAULT_BOS else bos)
        eos = self.token("eos", count, eos)
        for name, token in (("bos", bos), ("eos", eos)):
            if token is not None and (model == "llama" or f"tokenizer.ggml.{name}_token_id" in self.fields):
                kinds[token] = EntryKind.CONTROL
        given = (eos, self.token("eot", count), self.token("eom", count))
        ends = {token for token in given if token is not None}
        for name, texts in BY_TEXT.items():
            found = self.token(name, count, self.token(OLDER_NAMES.get(name, name), count))
            if found is None and (found := next((ids[text] for text in texts.split() if text in ids), None)) is not None:
                kinds[found] = EntryKind.CONTROL
            if found is not None and name in ENDS_BY_TEXT:
                ends.add(found)
        named = [ids[text] for text in END_NAMES if text in ids]
        ends.update(named)
        for token in named:
            kinds[token] = EntryKind.CONTROL
        for text in PART_OF_REPLIES:
            if text in ids:
                kinds[ids[text]] = EntryKind.USER_DEFINED
        ends |= set(self.stops(count))
        names = {tokens[token]: token for token in ends}
        for text in names.keys() & END_NAMES - ending_names(names):
            kinds[names.pop(text)] = EntryKind.NORMAL if text == "</s>" else EntryKind.USER_DEFINED
        pad = self.token("padding", count)
        template = self.fields.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise TokenizerError(f"{self.where}: tokenizer.chat_template={shown(template)} must be a text; copy it again")
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
            more={
                setting: tokens[token]
                for name, setting in OTHER_TOKENS.items()
                if (token := self.token(name, count)) is not None
            },
        )

    def error(self, name: str, value: Any, need: str) -> TokenizerError:
        return TokenizerError(f"{self.where}: tokenizer.ggml.{name}={shown(value)} must be {need}")


def _only_here(key: str, value: Any) -> bool:
    """Whether this is a scalar field of a vocabulary that no other setting covers."""
    known = key.removeprefix("tokenizer.ggml.") in OTHER_SETTINGS or key.startswith("tokenizer.chat_template")
    return key.startswith("tokenizer.") and not known and type(value) in (bool, int, float, str)


def _sentencepiece(reader: _Reader) -> SentencePieceTokenizer:
    tokens = reader.tokens()
    count = len(tokens)
    last = {token: i for i, token in enumerate(tokens)}
    tokens = [token if last[token] == i else f"{token}[{i}]" for i, token in enumerate(tokens)]  # the last of equal texts
    scores = reader.values("scores", float, count) if "tokenizer.ggml.scores" in reader.fields else [0.0] * count
    kinds = reader.kinds(count)
    settings = reader.settings(tokens, kinds, "", add_bos=True)
    plain = (EntryKind.NORMAL, EntryKind.BYTE)
    kinds = [
        kind if kind not in plain else EntryKind.BYTE if token in BYTES else EntryKind.NORMAL
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    entries = [Entry(*entry) for entry in zip(tokens, scores, kinds, strict=True)]
    unknown = reader.token("unknown", count, kinds.index(EntryKind.UNKNOWN) if EntryKind.UNKNOWN in kinds else 0)
    with library_errors(f"{reader.where} holds no whole SentencePiece vocabulary"):
        pieces, aliases = _for_library(entries, 0 if unknown is None else unknown)
        model = write_model(pieces, bos="", eos="", space_prefix=reader.flag("add_space_prefix", True))
        swallowing = reader.swallowing(tokens, kinds)
        found = SentencePieceTokenizer(model, reader.where, settings, entries, swallowing, aliases)
    found.stop_ids = settings.stop_ids
    return found


def _for_library(entries: Sequence[Entry], unknown: int) -> tuple[list[Entry], list[int]]:
    """The pieces of a model that encodes like llama.cpp, and for the pieces after the vocabulary the ids that replace them.

    llama.cpp merges to tokens of any kind, but the library only to normal pieces. The library requires an unknown piece,
    which is appended if the unknown token can result from merges, and all bytes or none; missing ones are appended.
    """
    ids = {entry.text: i for i, entry in enumerate(entries)}
    pieces = [entry._replace(kind=EntryKind.NORMAL) for entry in entries]
    following: dict[str, int] = {}
    if not ids.keys().isdisjoint(BYTES):
        for text, byte in BYTES.items():
            if text in ids:
                pieces[ids[text]] = entries[ids[text]]._replace(kind=EntryKind.BYTE)
            else:
                following[text] = ids.get(one_byte(byte), unknown)
    reached = lambda text: len(text) == 1 or text in ids
    name = entries[unknown].text
    is_text = len(name) == 1 or any(reached(name[:n]) and reached(name[n:]) for n in range(1, len(name)))
    if is_text or pieces[unknown].kind == EntryKind.BYTE:
        following[UNKNOWN_PIECE] = unknown
    else:
        pieces[unknown] = entries[unknown]._replace(kind=EntryKind.UNKNOWN)
    pieces += [Entry(text, 0.0, EntryKind.UNKNOWN if text == UNKNOWN_PIECE else EntryKind.BYTE) for text in following]
    return pieces, list(following.values())


def one_byte(byte: int) -> str:
    """The text to which a single byte decodes."""
    return bytes([byte]).decode(errors="surrogateescape")


def _bpe(reader: _Reader, model: str) -> HuggingFaceTokenizer:
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Library

    name = "gemma4" if model == "gemma4" else reader.text("pre", "default")
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(f"{reader.where}: tokenizer.ggml.pre={shown(name)} is unknown; {REMEDY}")
    pre = PRE_TOKENIZERS[name]
    texts = reader.tokens()
    tokens = texts if is_utf_8("".join(texts)) else [valid_text(text, i) for i, text in enumerate(texts)]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise TokenizerError(f"{reader.where}: tokenizer.ggml.tokens has duplicate tokens; copy the file again")
    kinds = reader.kinds(len(tokens))
    settings = reader.settings(tokens, kinds, name, pre.add_bos)
    if name in ALWAYS_BOS:
        settings = replace(settings, add_bos=True)
    swallowing = reader.swallowing(tokens, kinds)
    pairs = _pairs(reader, required=name not in NO_MERGES)
    # The result of merges that is not a token becomes the tokens of its bytes, as in llama.cpp. A byte that is not a token
    # becomes nothing, but the texts on both sides of it do not merge.
    made = {text for left, right in pairs for text in (left, right, left + right) if text not in ids}
    missing = sorted(made.union(CHARACTER_BYTES if pre.spells_bytes else ()).difference(ids))
    byte_name = one_byte if pre.spells_bytes else list(BYTES).__getitem__
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
        library.pre_tokenizer = build(pre)
        library.decoder = decoders.ByteLevel()
        if not pre.spells_bytes:
            library.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
            if name not in SPACES_AS_THEY_ARE:
                library.normalizer = normalizers.Replace(" ", SPACE)
        looked_for = [i for i, kind in enumerate(kinds) if kind in LOOKED_FOR]
        special_tokens = {tokens[i]: i for i in looked_for if kinds[i] != EntryKind.USER_DEFINED}
        lines = [i for i, token in enumerate(tokens) if not token.strip("\n")] if name in KEEPS_LINES else []
        for special, add in ((True, library.add_special_tokens), (False, library.add_tokens)):
            add(
                [
                    AddedToken(
                        tokens[i],
                        special=special,
                        normalized=False,
                        lstrip=tokens[i] == MASK_TOKEN and name in MASKED,
                        rstrip=i in swallowing,
                    )
                    for i in sorted({*looked_for, *lines})
                    if (tokens[i] in special_tokens) is special
                ]
            )
        begin = [settings.bos_token] if settings.add_bos and settings.bos_token else []
        end = [settings.eos_token] if settings.add_eos and settings.eos_token else []
        library.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end], special_tokens=[(token, ids[token]) for token in {*begin, *end}]
        )
    user_defined = {tokens[i]: i for i in looked_for if kinds[i] == EntryKind.USER_DEFINED}
    found = HuggingFaceTokenizer(library, reader.where, len(tokens), settings, special_tokens, user_defined, spelled, odd)
    found.stop_ids = settings.stop_ids
    return found


def _pairs(reader: _Reader, required: bool) -> list[tuple[str, str]]:
    """The merges as pairs of texts; among equal ones the first counts."""
    if not required and "tokenizer.ggml.merges" not in reader.fields:
        return []
    texts = dict.fromkeys(reader.values("merges", str))
    found = []
    for text in texts:
        if " " not in text[1:]:
            raise reader.error("merges", text, "two tokens with a space between them")
        found.append(_halves(text))
    if is_utf_8("".join(texts)):
        return found
    return [pair for pair in found if is_utf_8("".join(pair))]


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
        named = {key: list(value) if isinstance(value, list | array) else value for key, value in tokenizer.metadata.items()}
    else:
        named = _fields(tokenizer)
        named |= _noted(tokenizer.settings, named)  # type: ignore[attr-defined]
    for i in range(len(named["tokenizer.ggml.tokens"]), vocab_size or 0):
        for name, value in (("tokens", PADDING_TOKEN.format(i)), ("scores", 0.0), ("token_type", int(EntryKind.UNUSED))):
            if f"tokenizer.ggml.{name}" in named:
                named[f"tokenizer.ggml.{name}"].append(value)
    if vocab_size is not None and len(named["tokenizer.ggml.tokens"]) > vocab_size:
        named = _only_first(named, vocab_size)
        ends = [token for token in tokenizer.stop_ids if token < vocab_size]
        if ends and "tokenizer.ggml.eos_token_id" not in named:  # otherwise llama.cpp would end at its default
            named["tokenizer.ggml.eos_token_id"] = ends[0]
    if tokenizer.chat_template is not None:
        named["tokenizer.chat_template"] = tokenizer.chat_template
    return named


def _only_first(named: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The metadata of the first `count` tokens."""
    first = dict(named)
    dropped = set(named["tokenizer.ggml.tokens"][count:])
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


def _fields(tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of a vocabulary that was not loaded from a GGUF file."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        fields = _scored(tokenizer.pieces(), tokenizer.space_prefix)
    elif isinstance(tokenizer, TiktokenTokenizer):
        tokens = [spell(token) for token in tokenizer.ranks()]
        pairs = [(spell(left), spell(right)) for left, right in merges(tokenizer.ranks())]
        names = sorted(tokenizer.special_tokens, key=tokenizer.special_tokens.__getitem__)
        kinds = [EntryKind.NORMAL] * len(tokens) + [EntryKind.CONTROL] * len(names)
        fields = _merged(tokens + names, pairs, kinds, "llama-bpe")
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        fields = _described(tokenizer)
    else:
        raise TokenizerError(f"a {type(tokenizer).__name__} cannot be written to a GGUF file")
    fields |= {"add_bos_token": tokenizer.add_bos, "add_eos_token": tokenizer.add_eos}
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    special, settings = tokenizer.special_tokens, tokenizer.settings
    for name, setting in OTHER_TOKENS.items():
        text = settings.more.get(setting)
        ids[name] = special.get(str(text.get("content") if isinstance(text, dict) else text), -1)
    if EntryKind.UNKNOWN in fields["token_type"]:
        ids["unknown"] = fields["token_type"].index(EntryKind.UNKNOWN)
    elif ids["unknown"] >= 0 and fields["model"] == "llama":  # among merged ones it is a control token
        fields["token_type"][ids["unknown"]] = int(EntryKind.UNKNOWN)
    ids["padding"] = pad_id_of(tokenizer, settings)
    ids |= {name: special.get(text, -1) for name, text in (("eot", "<|eot_id|>"), ("eom", "<|eom_id|>"))}
    known = {ids[name] for name in ("eos", "eot", "eom")} | {special[name] for name in ending_names(special)}
    by_text = {text: token for token, text in enumerate(fields["tokens"])}
    for name in ENDS_BY_TEXT:  # which readers recognize without a field
        known |= {next((by_text[text] for text in BY_TEXT[name].split() if text in by_text), -1)}
    more = sorted(set(tokenizer.stop_ids) - known, key=lambda token: (token == tokenizer.bos_id, token))
    for name in ("eot", "eom"):  # fields for additional end tokens
        if ids[name] < 0 and more:
            ids[name] = more.pop(0)
    fields |= {f"{name}_token_id": token for name, token in ids.items() if token >= 0}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()} | ({STOPS_KEY: more} if more else {})


def _noted(settings: Settings, named: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the fields do not cover: other templates, and those of the vocabulary's original GGUF file."""
    found = {f"{TEMPLATE_PREFIX}{name}": text for name, text in settings.chat_templates.items()}
    found |= {key: value for key, value in settings.gguf.items() if _only_here(key, value) and key not in named}
    pre, wanted = settings.gguf.get(PRE_KEY), PRE_TOKENIZERS.get(named[PRE_KEY])
    if pre in PRE_TOKENIZERS and named["tokenizer.ggml.model"] == "gpt2" and wanted is not None:
        own = PRE_TOKENIZERS[pre]
        if (own.patterns, own.ignore_merges) == (wanted.patterns, wanted.ignore_merges):  # several names for one rule
            found[PRE_KEY] = pre
    return found


def _scored(pieces: Sequence[Entry], space_prefix: bool) -> dict[str, Any]:
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [piece.text for piece in pieces],
        "scores": [piece.score for piece in pieces],
        "token_type": [int(piece.kind) for piece in pieces],
        "add_space_prefix": space_prefix,
    }


def _merged(tokens: list[str], pairs: Sequence[Sequence[str]], kinds: Sequence[EntryKind], pre: str) -> dict[str, Any]:
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in pairs],
        "token_type": [int(kind) for kind in kinds],
    }


def _described(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    """The fields of a tokenizer.json with a byte-level BPE, or one converted from a SentencePiece model, with the order of
    its merges as scores."""
    whole = tokenizer.description()
    model = whole["model"]
    if model["type"] != "BPE":
        raise TokenizerError(f"a tokenizer.json with the model {model['type']} cannot be written to a GGUF file; BPE can")
    tokens = [PADDING_TOKEN.format(i) for i in range(tokenizer.vocab_size)]  # ids may have gaps
    kinds = [EntryKind.UNUSED] * len(tokens)
    for text, i in model["vocab"].items():
        tokens[i], kinds[i] = (
            text,
            EntryKind.BYTE if BYTE_TOKEN.fullmatch(text) and model["byte_fallback"] else EntryKind.NORMAL,
        )
    for token in whole["added_tokens"]:
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = EntryKind.CONTROL if token["special"] else EntryKind.USER_DEFINED
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if tokenizer.spells_bytes:
        pre = name_of(whole["pre_tokenizer"], model["ignore_merges"])
        if pre is None:
            raise TokenizerError(
                "a tokenizer.json with a pre-tokenizer that llama.cpp does not have cannot be written to a GGUF file"
            )
        return _merged(tokens, pairs, kinds, pre)
    unknown = model["unk_token"]
    order = {left + right: -float(i) for i, (left, right) in reversed(list(enumerate(pairs)))}
    if unknown is not None:
        kinds[model["vocab"][unknown]] = EntryKind.UNKNOWN
    pieces = [Entry(text, order.get(text, 0.0), kind) for text, kind in zip(tokens, kinds, strict=True)]
    return _scored(pieces, tokenizer.space_prefix)
