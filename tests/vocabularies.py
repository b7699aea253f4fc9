"""Small vocabularies of every kind, made here so that these tests run in any clone."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import sentencepiece
import tokenizers
from conftest import shared_data

from llama_jax.tokenizers import load_tokenizer
from llama_jax.tokenizers.huggingface import spell
from llama_jax.tokenizers.tiktoken import SPECIAL_TOKENS, SPLIT, merges

WORDS = [
    "once",
    " upon",
    " a",
    " time",
    "léger",
    " día",
    " tree",
    "Hello",
    " world",
    "\n\n",
    "  ",
    " 🦙",
    "user",
    "assistant",
]


def sentencepiece_model() -> bytes:
    """BPE over bytes and U+2581, with Llama 2's settings."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(["once upon a time Hello world léger día tree user assistant"] * 100),
        model_writer=model,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return model.getvalue()


def ranks() -> list[bytes]:
    """All bytes, in a mixed order, and the words by their beginnings."""
    tokens = [bytes([byte * 7 % 256]) for byte in range(256)]
    for word in map(str.encode, WORDS):
        tokens += [word[:n] for n in range(2, len(word) + 1) if word[:n] not in tokens]
    return tokens


def rank_file() -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks()))


def bytes_json() -> bytes:
    """The ranks as a tokenizer.json in the manner of Llama 3."""
    tokens = ranks()
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={spell(token): i for i, token in enumerate(tokens)},
            merges=[(spell(left), spell(right)) for left, right in merges(tokens)],
            ignore_merges=True,
        )
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in SPECIAL_TOKENS])
    put_bos(library, SPECIAL_TOKENS[0])
    return library.to_str().encode()


def put_bos(library: tokenizers.Tokenizer, bos: str) -> None:
    """Have texts begin with the token, as the files of Llamas say."""
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, library.token_to_id(bos))]
    )


def spaces_json(*, prefix: str = "prepend") -> bytes:
    """A tokenizer.json in the manner of Llama 2: `prefix` is how a leading space comes in, "prepend", "first" or "never"."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    pairs = [("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the"), ("i", "n"), ("▁", "▁")]
    names += [left + right for left, right in pairs]
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=pairs,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    strip = [tokenizers.decoders.Strip(" ", 1, 0)]
    to_space = [tokenizers.normalizers.Replace(" ", "▁")]
    if prefix == "prepend":
        library.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), *to_space])
    elif prefix == "never":
        library.normalizer, strip = to_space[0], []
    else:
        library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    library.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse(), *strip]
    )
    # As in old files, where the library finds them at the start of a text only.
    library.add_special_tokens([tokenizers.AddedToken(name, normalized=True) for name in names[:3]])
    put_bos(library, "<s>")
    return library.to_str().encode()


def find_special_tokens_in_raw_text(file: Path) -> None:
    """Change a tokenizer.json so that the library does by itself what llama_jax always makes it do."""
    file.write_text(file.read_text().replace('"normalized":true', '"normalized":false'))


FILES = {
    "sentencepiece": ("tokenizer.model", sentencepiece_model),
    "ranks": ("tokenizer.model", rank_file),
    "bytes": ("tokenizer.json", bytes_json),
    "spaces": ("tokenizer.json", spaces_json),
    "first": ("tokenizer.json", lambda: spaces_json(prefix="first")),
    "never": ("tokenizer.json", lambda: spaces_json(prefix="never")),
}
KINDS = tuple(FILES)


def write(folder: Path, kind: str, **files: object) -> Path:
    """A folder with a vocabulary, and JSON files beside it by the names without .json."""
    folder.mkdir(parents=True, exist_ok=True)
    name, make = FILES[kind]
    (folder / name).write_bytes(make())
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def published(kind: str):
    """Meta's vocabulary, the texts of llama.cpp's vectors and their ids."""
    folder = shared_data(f"tokenizers/{kind}")
    texts = (folder / "vectors/texts.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    ids = [[int(i) for i in line.split()] for line in (folder / "vectors/ids.out").read_text().splitlines()]
    assert len(ids) > 40
    return load_tokenizer(folder), list(zip(texts, ids, strict=False))
