"""Small vocabularies of every kind, made here so that these tests run in any clone."""

from __future__ import annotations

import base64
import io
import json
import random
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from conftest import shared_data

from llama_jax.tokenizers import load_tokenizer
from llama_jax.tokenizers.huggingface import HuggingFaceTokenizer, from_json, spell
from llama_jax.tokenizers.tiktoken import LLAMA3_SPLIT, SPECIAL_TOKENS, derive_merges
from llama_jax.tokenizers.tokenizer_config import AddedToken, Settings

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


def sentencepiece_model(**changes: object) -> bytes:
    """BPE over bytes and U+2581, with Llama 2's settings or changed ones."""
    model = io.BytesIO()
    options: dict[str, object] = {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    }
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(["once upon a time Hello world léger día tree user assistant"] * 100),
        model_writer=model,
        vocab_size=330,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options | changes,
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
            merges=[(spell(left), spell(right)) for left, right in derive_merges(tokens)],
            ignore_merges=True,
        )
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(LLAMA3_SPLIT), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in SPECIAL_TOKENS])
    put_bos(library, SPECIAL_TOKENS[0])
    return library.to_str().encode()


def normalized_json(*normalizers: str, add_prefix_space: bool = False) -> bytes:
    """The ranks with these normalizers and GPT-2's pre-tokenizer, which may add a space to the beginning of a text."""
    library = tokenizers.Tokenizer.from_str(bytes_json().decode())
    library.normalizer = tokenizers.normalizers.Sequence([getattr(tokenizers.normalizers, name)() for name in normalizers])
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
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
# Kinds that do not give back every text: they remove or add spaces, or normalize characters.
NORMALIZING_FILES = {
    "trimmed": (
        "tokenizer.model",
        lambda: sentencepiece_model(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True),
    ),
    "unigram": ("tokenizer.model", lambda: sentencepiece_model(model_type="unigram")),
    "added space": ("tokenizer.json", lambda: normalized_json(add_prefix_space=True)),
    "stripped": ("tokenizer.json", lambda: normalized_json("NFC", "Strip")),
}
ALL_KINDS = (*FILES, *NORMALIZING_FILES)


def write(folder: Path, kind: str, **files: object) -> Path:
    """A folder with a vocabulary, and JSON files beside it by the names without .json."""
    folder.mkdir(parents=True, exist_ok=True)
    name, make = (FILES | NORMALIZING_FILES)[kind]
    (folder / name).write_bytes(make())
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def with_tokens(template: str | None, names: Sequence[str], bos: str = "<s>") -> HuggingFaceTokenizer:
    """A vocabulary of bytes with special tokens and a chat template."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    names = [*dict.fromkeys([bos, "</s>", *names])]
    library.add_special_tokens(names)
    added = tuple(AddedToken(name, len(alphabet) + i, True) for i, name in enumerate(names))
    settings = Settings(bos_token=bos, eos_token="</s>", chat_template=template, added_tokens=added)
    return from_json(library.to_str().encode(), "here", settings)


SEPARATOR = "\n__ggml_vocab_test__\n"
GGUF = ("deepseek-llm", "gpt-2", "starcoder")


def vectors(texts: Path, ids: Path) -> list[tuple[str, list[int]]]:
    """Texts and their ids in llama.cpp's files; the last text is followed by a separator."""
    listed = [[int(i) for i in line.split()] for line in ids.read_text().splitlines()]
    assert len(listed) > 40
    return list(zip(texts.read_text(encoding="utf-8").split(SEPARATOR), listed, strict=False))


def in_gguf(name: str) -> tuple[Path, list[tuple[str, list[int]]]]:
    """The vocabulary of a real model in GGUF, with llama.cpp's texts and their ids."""
    path = shared_data(f"vocabularies/ggml-vocab-{name}.gguf")
    return path, vectors(path.with_name(path.name + ".inp"), path.with_name(path.name + ".out"))


def write_gguf(path: Path, fields: dict[str, Any], name: str = "") -> Path:
    """A GGUF file with a vocabulary and no weights, which llama.cpp opens."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (("context_length", 64), ("embedding_length", 32), ("block_count", 1), ("feed_forward_length", 64)):
        getattr(writer, f"add_{add}")(value)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in (fields | {"general.name": name}).items():
        if type(value) is int:
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            raw = [one.encode(errors="surrogateescape") if isinstance(one, str) else one for one in value]
            writer.add_array(key, raw)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


@cache
def characters() -> dict[str, list[str]]:
    """All of Unicode's characters by category, and those among which texts are cut."""
    found: dict[str, list[str]] = {}
    for code in range(0x110000):
        if not 0xD800 <= code < 0xE000:
            found.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    found["often"] = list("'sStTrReEvVmMlLdD'  \n\r\t 0123456789 abcXYZ.,!?$+<=>^~|`/()[]{}\\-_#%&*:;\"@")
    spaces = (9, 10, 11, 12, 13, 32, 0x1C, 0x85, 0xA0, 0x1680, 0x2009, 0x2028, 0x202F, 0x3000)
    blocks = (0x370, 0x400, 0x5D0, 0x660, 0x900, 0xE00, 0x3040, 0x4E00, 0xAC00)
    found["spaces"] = list(map(chr, spaces))
    found["scripts"] = [chr(code) for block in blocks for code in range(block, block + 96)]
    return found


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of characters of every category, unassigned ones too, in runs, and of words that are cut specially."""
    draw = random.Random(seed)
    kinds = [*characters(), *["often"] * 30, *["scripts"] * 10, *["spaces"] * 5]
    words = (
        "can't",
        "I'LL",
        "we'Ve",
        "1234567",
        " 12 ",
        "Hello World",
        "  \n x",
        "\t\t",
        "12\u0663456",
        "'\u017f",
        "ABCdef",
    )
    texts = []
    for _ in range(count):
        pieces = [
            draw.choice(characters()[draw.choice(kinds)]) * draw.choice((1, 1, 1, 1, 1, 2, 3, 7))
            for _ in range(draw.choice((3, 8, 20, 40)))
        ]
        pieces.insert(draw.randrange(len(pieces)), draw.choice(words))
        texts.append("".join(pieces))
    return texts


def slices(count: int, seed: int = 0) -> list[str]:
    """Slices of the shared texts."""
    draw = random.Random(seed)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(shared_data("text").glob("*.txt"))]
    starts = [(text, draw.randrange(len(text) - 500)) for text in draw.choices(texts, k=count)]
    return [text[start : start + draw.choice((30, 120, 500))] for text, start in starts]


def published(kind: str):
    """Meta's vocabulary, the texts of llama.cpp's vectors and their ids."""
    folder = shared_data(f"tokenizers/{kind}")
    return load_tokenizer(folder), vectors(folder / "vectors/texts.inp", folder / "vectors/ids.out")
