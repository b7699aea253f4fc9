"""The vocabulary inside a GGUF file, from its metadata and into it (ggml's docs/gguf.md, "Tokenizer")."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from llama_jax.errors import TokenizerError, shown
from llama_jax.tokenizers.base import Tokenizer, library_errors
from llama_jax.tokenizers.huggingface import BYTE, HuggingFaceTokenizer, spell
from llama_jax.tokenizers.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from llama_jax.tokenizers.sentencepiece import Entry, EntryKind, SentencePieceTokenizer, write_model
from llama_jax.tokenizers.settings import Settings
from llama_jax.tokenizers.tiktoken import SPLIT, TiktokenTokenizer, merges

PADDING = "[PAD{}]"  # what llama.cpp's converter calls an id without a token


def from_metadata(fields: Mapping[str, Any], where: str) -> Tokenizer:
    """The vocabulary in the metadata of the GGUF file at `where`: Llama 1 and 2's ("llama") or Llama 3's ("gpt2").

    Args:
      fields: the metadata by key, such as "tokenizer.ggml.tokens": texts, numbers, true or false, and lists of them.

    Raises:
      TokenizerError: no vocabulary, a damaged one, or one of another kind, which is named.
    """
    reader = _Reader(fields, where)
    model = reader.text("model")
    if model == "llama":
        return _sentencepiece(reader)
    if model != "gpt2":
        raise reader.error("model", model, "'llama' (SentencePiece) or 'gpt2' (Llama 3's BPE)")
    pre = reader.text("pre")
    if pre not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{where}: tokenizer.ggml.pre={shown(pre)} is not known; pass the model's own tokenizer.json"
            " (--tokenizer tokenizer.json)"
        )
    return _bpe(reader, PRE_TOKENIZERS[pre])


class _Reader:
    """Checked access to the fields of "tokenizer.ggml."."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields = fields
        self.where = where

    def text(self, name: str) -> str:
        value = self.fields.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, str):
            raise self.error(name, value, "a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def values(self, name: str, kind: type, count: int | None = None) -> list[Any]:
        """A list with entries of this kind, `count` of them."""
        value = self.fields.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list | array):
            raise self.error(name, value, "a list")
        if count is not None and len(value) != count:
            raise TokenizerError(
                f"{self.where}: tokenizer.ggml.{name} has {len(value)} entries for {count} tokens; copy the file again"
            )
        if not all(isinstance(each, kind) for each in value):
            raise self.error(name, next(each for each in value if not isinstance(each, kind)), f"a list of {kind.__name__}")
        return list(value)

    def token(self, name: str, tokens: Sequence[str], default: int | None = None) -> int | None:
        """The id in the field ``{name}_token_id``, where there is one."""
        value = self.fields.get(f"tokenizer.ggml.{name}_token_id", default)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(tokens):
            raise self.error(f"{name}_token_id", value, f"an id below {len(tokens)}")
        return value

    def settings(self, tokens: Sequence[str], bos: int | None, eos: int | None, add_bos: bool) -> Settings:
        template = self.fields.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise TokenizerError(f"{self.where}: tokenizer.chat_template={shown(template)} must be a text; copy it again")
        ends = (eos, self.token("eot", tokens), self.token("eom", tokens))
        return Settings(
            bos_token=None if bos is None else tokens[bos],
            eos_token=None if eos is None else tokens[eos],
            stop_ids=tuple(token for token in ends if token is not None),
            add_bos=self.flag("add_bos_token", add_bos),
            add_eos=self.flag("add_eos_token", False),
            chat_template=template,
        )

    def error(self, name: str, value: Any, need: str) -> TokenizerError:
        return TokenizerError(f"{self.where}: tokenizer.ggml.{name}={shown(value)} must be {need}")


def _sentencepiece(reader: _Reader) -> Tokenizer:
    tokens = reader.values("tokens", str)
    scores = reader.values("scores", float, len(tokens))
    kinds = reader.values("token_type", int, len(tokens))
    odd = next((kind for kind in kinds if kind not in list(EntryKind)), None)
    if odd is not None:
        raise reader.error("token_type", odd, f"one of {[int(kind) for kind in EntryKind]} for each token")
    bos, eos = reader.token("bos", tokens, 1), reader.token("eos", tokens, 2)
    settings = reader.settings(tokens, bos, eos, add_bos=True)
    kinds = [int(EntryKind.CONTROL) if i in (bos, eos) else kind for i, kind in enumerate(kinds)]
    with library_errors(f"{reader.where} holds no whole SentencePiece vocabulary"):
        model = write_model(
            (Entry(*piece) for piece in zip(tokens, scores, map(EntryKind, kinds), strict=True)),
            bos=settings.bos_token or "",
            eos=settings.eos_token or "",
            space_prefix=reader.flag("add_space_prefix", True),
        )
    return SentencePieceTokenizer(model, reader.where, settings)


def _bpe(reader: _Reader, pre: PreTokenizer) -> Tokenizer:
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    tokens = reader.values("tokens", str)
    kinds = reader.values("token_type", int, len(tokens))
    pairs = [tuple(merge.split(" ")) for merge in reader.values("merges", str)]
    odd = next((pair for pair in pairs if len(pair) != 2), None)
    if odd is not None:
        raise reader.error("merges", " ".join(odd), "two tokens with a space between them")
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise TokenizerError(f"{reader.where}: tokenizer.ggml.tokens has a token twice; copy the file again")
    with library_errors(f"{reader.where} holds no whole BPE vocabulary"):
        library = Library(models.BPE(vocab=ids, merges=pairs, ignore_merges=pre.ignore_merges))
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        library.decoder = decoders.ByteLevel()
        for kind, special in ((EntryKind.CONTROL, True), (EntryKind.USER_DEFINED, False)):
            these = [token for token, found in zip(tokens, kinds, strict=True) if found == kind]
            add = library.add_special_tokens if special else library.add_tokens
            add([AddedToken(token, special=special, normalized=False) for token in these])
    bos, eos = reader.token("bos", tokens), reader.token("eos", tokens)
    return HuggingFaceTokenizer(library, reader.where, reader.settings(tokens, bos, eos, pre.add_bos))


def to_metadata(tokenizer: Tokenizer, vocab_size: int | None = None) -> dict[str, Any]:
    """The metadata that `from_metadata` reads, and llama.cpp.

    Args:
      vocab_size: of the model, where it is larger than the vocabulary: llama.cpp wants a token for every row.

    Raises:
      TokenizerError: a kind of vocabulary that GGUF has no name for.
    """
    if isinstance(tokenizer, SentencePieceTokenizer):
        fields = _scored(tokenizer.pieces(), tokenizer.space_prefix)
    elif isinstance(tokenizer, TiktokenTokenizer):
        tokens = [spell(token) for token in tokenizer.ranks()]
        pairs = [(spell(left), spell(right)) for left, right in merges(tokenizer.ranks())]
        names = sorted(tokenizer.special_tokens, key=tokenizer.special_tokens.__getitem__)
        fields = _merged(tokens + names, pairs, [EntryKind.NORMAL] * len(tokens) + [EntryKind.CONTROL] * len(names))
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        fields = _described(tokenizer)
    else:
        raise TokenizerError(f"a {type(tokenizer).__name__} cannot be written into a GGUF")
    for i in range(len(fields["tokens"]), vocab_size or 0):
        for name, value in (("tokens", PADDING.format(i)), ("scores", 0.0), ("token_type", int(EntryKind.UNUSED))):
            if name in fields:
                fields[name].append(value)
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    for name, token in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)):
        if token >= 0:
            named[f"tokenizer.ggml.{name}_token_id"] = token
    for name, text in (("eot", "<|eot_id|>"), ("eom", "<|eom_id|>")):
        if text in tokenizer.special_tokens:
            named[f"tokenizer.ggml.{name}_token_id"] = tokenizer.special_tokens[text]
    if tokenizer.chat_template is not None:
        named["tokenizer.chat_template"] = tokenizer.chat_template
    return named


def _scored(pieces: Sequence[Entry], space_prefix: bool) -> dict[str, Any]:
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [piece.text for piece in pieces],
        "scores": [piece.score for piece in pieces],
        "token_type": [int(piece.kind) for piece in pieces],
        "add_space_prefix": space_prefix,
        "add_bos_token": True,
    }


def _merged(tokens: list[str], pairs: Sequence[Sequence[str]], kinds: Sequence[EntryKind]) -> dict[str, Any]:
    return {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in pairs],
        "token_type": [int(kind) for kind in kinds],
        "add_bos_token": True,
    }


def _described(tokenizer: HuggingFaceTokenizer) -> dict[str, Any]:
    """The fields of a tokenizer.json: Llama 3's, or one made from a SentencePiece model, its merges' order for scores."""
    whole = tokenizer.description()
    model = whole["model"]
    if model["type"] != "BPE":
        raise TokenizerError(f"a tokenizer.json with the model {model['type']} cannot be written into a GGUF; BPE can")
    tokens = [PADDING.format(i) for i in range(tokenizer.vocab_size)]  # ids may have gaps
    kinds = [EntryKind.UNUSED] * len(tokens)
    for text, i in model["vocab"].items():
        tokens[i], kinds[i] = text, EntryKind.BYTE if BYTE.fullmatch(text) and model["byte_fallback"] else EntryKind.NORMAL
    for token in whole["added_tokens"]:
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = EntryKind.CONTROL if token["special"] else EntryKind.USER_DEFINED
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if tokenizer.spells_bytes:
        cutting = whole["pre_tokenizer"] or {}
        if not any(step.get("pattern") == {"Regex": SPLIT} for step in cutting.get("pretokenizers", [cutting])):
            raise TokenizerError("a tokenizer.json that cuts texts otherwise than Llama 3 cannot be written into a GGUF")
        return _merged(tokens, pairs, kinds)
    unknown = model["unk_token"]
    order = {left + right: -float(i) for i, (left, right) in reversed(list(enumerate(pairs)))}
    if unknown is not None:
        kinds[model["vocab"][unknown]] = EntryKind.UNKNOWN
    pieces = [Entry(text, order.get(text, 0.0), kind) for text, kind in zip(tokens, kinds, strict=True)]
    return _scored(pieces, tokenizer.space_prefix)
