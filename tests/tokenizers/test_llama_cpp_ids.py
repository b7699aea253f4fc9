"""Vocabularies in GGUF beside llama.cpp itself, whose ids are the measure."""

import json
import random
from pathlib import Path

import pytest
import vocabularies
from conftest import shared_data

from llama_jax.tokenizers import load_tokenizer
from llama_jax.tokenizers.gguf import to_metadata
from llama_jax.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from llama_jax.tokenizers.sentencepiece import EntryType

pytestmark = pytest.mark.llama_cpp
# Where special and user-defined tokens, and what looks like them, may stand.
NAMES = (
    *(
        "<s>",
        " </s>",
        "a</s>",
        "<unk>",
        "<|user|>\n\n hi",
        "<|end|>  \t",
        "   ",
        "\n\n\n",
        "<table>",
        "<0x41>",
        "[PAD32011]",
    ),
    *("<unused3>", "▁<PRE> x", "<|endoftext|>", "<|im_start|>", "<fim_pad>", "<|eot_id|>", "ø"),
)
CUTS = Path(__file__).parents[1] / "goldens" / "pre_tokenizers.json"


def opened(path):
    import llama_cpp

    return llama_cpp.Llama(str(path), vocab_only=True, verbose=False)


def check(path, texts, ends=()):
    """Ids with and without special tokens, BOS, EOS and all ends are llama.cpp's, and what has ids has its text again.

    Args:
      ends: those that llama.cpp has no field for.
    """
    import llama_cpp

    tokenizer, peer = load_tokenizer(path), opened(path)
    known = {tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
    draw = random.Random(0)
    for text in texts:
        place = draw.randrange(len(text) + 1)
        for content in (text, text[:place] + draw.choice(NAMES) + text[place:]):
            for special in (False, True):
                ids = peer.tokenize(content.encode(), add_bos=False, special=special)
                found = tokenizer.encode(content, bos=False, eos=False, special=special)
                assert found == ids, (special, content)
        assert tokenizer.encode(text) == peer.tokenize(text.encode(), add_bos=True, special=False)
        # Some vocabularies lack bytes, and one that spells a space as U+2581 has no U+2581.
        left = bytes(byte for byte in text.encode() if bytes([byte]) in known).decode(errors="replace")
        assert tokenizer.decode(tokenizer.encode(text, bos=False, eos=False)) in (left, left.replace("▁", " "))
    vocabulary = peer._model.vocab
    assert tokenizer.vocab_size == llama_cpp.llama_vocab_n_tokens(vocabulary)
    own = [i for i in range(tokenizer.vocab_size) if llama_cpp.llama_vocab_is_eog(vocabulary, i)]
    assert list(tokenizer.stop_ids) == sorted({*own, *ends})
    for name, ours in (
        *(("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)),
        *(("get_add_bos", tokenizer.add_bos), ("get_add_eos", tokenizer.add_eos)),
    ):
        assert ours == getattr(llama_cpp, f"llama_vocab_{name}")(vocabulary), name


@pytest.mark.parametrize("name", vocabularies.GGUF)
def test_vocabularies_of_real_models(name):
    path, vectors = vocabularies.in_gguf(name)
    check(path, [text for text, _ in vectors if text] + vocabularies.slices(300) + vocabularies.random_texts(2000))


def test_smollm2(smollm2):
    check(smollm2, vocabularies.slices(300) + vocabularies.random_texts(2000))


def fields_of(name):
    return to_metadata(load_tokenizer(vocabularies.in_gguf(name)[0]))


def test_every_pre_tokenizer(tmp_path):
    """The goldens as well: where a pre-tokenizer is new, write what this finds into them."""
    fields, stored, ids = fields_of("gpt-2"), json.loads(CUTS.read_text()), {}
    texts = vocabularies.slices(20) + vocabularies.random_texts(60)
    for name, pre in PRE_TOKENIZERS.items():
        if pre.spells_bytes:
            path = vocabularies.write_gguf(tmp_path / "x.gguf", fields | {"tokenizer.ggml.pre": name})
            check(path, texts)
            ids[name] = opened(path).tokenize(stored["text"].encode(), add_bos=False, special=False)
    assert stored["ids"] == ids
    del fields["tokenizer.ggml.pre"], fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]
    check(vocabularies.write_gguf(tmp_path / "x.gguf", fields), texts)


def test_every_character_is_of_its_category(tmp_path):
    """A newer Unicode in the library that runs the patterns would move some of them."""
    path = vocabularies.write_gguf(tmp_path / "x.gguf", fields_of("gpt-2") | {"tokenizer.ggml.pre": "deepseek-v3"})
    tokenizer, peer = load_tokenizer(path), opened(path)
    characters = [one for kind, some in vocabularies.characters().items() if len(kind) == 2 and kind != "Co" for one in some]
    texts = [f"a{one} {one}1{one}.{one}" for one in characters if ord(one) < 0x20000]
    for start in range(0, len(texts), 1000):
        text = "".join(texts[start : start + 1000])
        assert tokenizer.encode(text, bos=False) == peer.tokenize(text.encode(), add_bos=False, special=False)


CONTROL, USER, UNKNOWN, UNUSED, NORMAL = (
    *(EntryType.CONTROL, EntryType.USER_DEFINED, EntryType.UNKNOWN, EntryType.UNUSED, EntryType.NORMAL),
)
# Tokens that follow Llama 2's, other kinds of its own, the file's name, and other fields (None: left out).
MADE = {
    "as it is": ([], {}, "", {}),
    "in the manner of Gemma": (
        [
            *(("  ", USER), ("   ", USER), ("\n\n", USER), ("\n\n\n", USER), ("<table>", USER), ("<unused3>", UNUSED)),
            *(("<start_of_turn>", CONTROL), ("<end_of_turn>", CONTROL)),
        ],
        {},
        "",
        {"add_space_prefix": False},
    ),
    "in the manner of Phi-3": (
        [
            *((f"<|{name}|>", CONTROL) for name in ("endoftext", "assistant", "user", "end")),
            *((f"[PAD{32004 + i}]", UNKNOWN) for i in range(10)),
        ],
        {0: CONTROL, 2: USER},
        "Phi3",
        {"eos_token_id": 32000},
    ),
    "in the manner of Code Llama": (
        [("▁<PRE>", NORMAL), ("▁<SUF>", NORMAL), ("▁<MID>", NORMAL), ("▁<EOT>", NORMAL), ("<EOT>", NORMAL)],
        {},
        "",
        {"prefix_token_id": 32000},
    ),
    "of few fields": (
        [],
        {},
        "",
        dict.fromkeys(("bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token", "add_space_prefix"))
        | {"add_eos_token": True},
    ),
}


@pytest.mark.parametrize("kind", MADE)
def test_sentencepiece(kind, tmp_path):
    added, kinds, name, others = MADE[kind]
    fields = to_metadata(load_tokenizer(shared_data("tokenizers/llama2")))
    for text, of in added:
        for field, value in (("tokens", text), ("scores", -1000.0), ("token_type", int(of))):
            fields[f"tokenizer.ggml.{field}"].append(value)
    for token, of in kinds.items():
        fields["tokenizer.ggml.token_type"][token] = int(of)
    fields |= {f"tokenizer.ggml.{field}": value for field, value in others.items()}
    path = vocabularies.write_gguf(tmp_path / "x.gguf", {k: v for k, v in fields.items() if v is not None}, name)
    check(path, vocabularies.slices(100) + vocabularies.random_texts(400))


def test_bpe_of_spaces(tmp_path):
    """Gemma 4's manner: merges of texts in which a space is U+2581, and bytes for what is in no token."""
    fields = to_metadata(load_tokenizer(shared_data("tokenizers/llama2")))
    tokens, scores = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores"))
    known = set(tokens)
    by_score = sorted(range(3 + 256, len(tokens)), key=lambda i: -scores[i])
    merges = [
        f"{tokens[i][:at]} {tokens[i][at:]}"
        for i in by_score
        for at in range(1, len(tokens[i]))
        if tokens[i][:at] in known and tokens[i][at:] in known
    ]
    fields |= {"tokenizer.ggml.merges": merges, "tokenizer.ggml.model": "gemma4"}
    fields = {
        key: value for key, value in fields.items() if not key.endswith(("scores", "add_space_prefix", "add_bos_token"))
    }
    for text in ["\n" * n for n in range(1, 60)] + ["<|tool_response>"]:
        fields["tokenizer.ggml.tokens"].append(text)
        fields["tokenizer.ggml.token_type"].append(int(NORMAL))
    texts = vocabularies.slices(50) + vocabularies.random_texts(200)
    check(vocabularies.write_gguf(tmp_path / "x.gguf", fields), texts)
    fields |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "sarvam-moe"}
    check(vocabularies.write_gguf(tmp_path / "x.gguf", fields), texts)


def test_llama_3(tmp_path):
    fields = to_metadata(load_tokenizer(shared_data("tokenizers/llama3")))
    for name in ("llama-bpe", "tekken", "glm4"):
        path = vocabularies.write_gguf(tmp_path / "x.gguf", fields | {"tokenizer.ggml.pre": name})
        # Meta's file says nothing of ends: there a BOS ends a text as well.
        check(path, vocabularies.slices(50) + vocabularies.random_texts(200), ends=[128000])
