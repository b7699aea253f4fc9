"""Tokens that the files next to a vocabulary declare, as special or not, and what of them is shown in decoded text."""

import json

import pytest
import vocabularies

from llama_jax.tokenizers import encode_chat, load_tokenizer

NEW = "<|new|>"
TEMPLATE = f"{{% for m in messages %}}{NEW}{{{{ m['content'] }}}}{{% endfor %}}"
FLAGS = dict(lstrip=False, rstrip=False, single_word=False, normalized=False)
KINDS = ("bytes", "never", "sentencepiece")


def decoder(size, special):
    return {"added_tokens_decoder": {str(size): {"content": NEW, "special": special, **FLAGS}}}


def declarations(size):
    """Files by name without suffix, for each way to declare the token after the last one."""
    added, plain = {NEW: size}, decoder(size, False)
    return {
        "config, special": {"tokenizer_config": decoder(size, True)},
        "config, plain": {"tokenizer_config": plain},
        "config, plain, in the template": {"tokenizer_config": plain | {"chat_template": TEMPLATE}},
        "config, plain, eos": {"tokenizer_config": plain | {"eos_token": NEW}},
        "config, plain, pad": {"tokenizer_config": plain | {"pad_token": NEW}},
        "config, plain, additional": {"tokenizer_config": plain | {"additional_special_tokens": [NEW]}},
        "config, plain, extra by name": {"tokenizer_config": plain | {"extra_special_tokens": {"image_token": NEW}}},
        "added": {"added_tokens": added},
        "added, in the template": {"added_tokens": added, "tokenizer_config": {"chat_template": TEMPLATE}},
        "added, additional": {"added_tokens": added, "tokenizer_config": {"additional_special_tokens": [NEW]}},
        "added, extra": {"added_tokens": added, "tokenizer_config": {"extra_special_tokens": {"image_token": NEW}}},
        "added, eos": {"added_tokens": added, "tokenizer_config": {"eos_token": NEW}},
        "added, unk": {"added_tokens": added, "tokenizer_config": {"unk_token": NEW}},
        "added, image": {"added_tokens": added, "tokenizer_config": {"image_token": NEW}},
        "added, pad in the map": {"added_tokens": added, "special_tokens_map": {"pad_token": NEW}},
        "additional": {"tokenizer_config": {"additional_special_tokens": [NEW]}},
        "pad that is no token": {"tokenizer_config": {"pad_token": NEW}},
    }


DECLARATIONS = tuple(declarations(0))
SHOWN = {
    *("config, plain", "config, plain, in the template", "config, plain, additional"),
    *("added", "added, in the template"),
}


def declare(folder, kind, how):
    """A folder with a declared token after the last one, and the id of that."""
    size = load_tokenizer(vocabularies.write(folder, kind)).vocab_size
    files = declarations(size)[how]
    config = {"tokenizer_class": "LlamaTokenizer" if kind == "sentencepiece" else "PreTrainedTokenizerFast"}
    vocabularies.write(folder, kind, **files | {"tokenizer_config": config | files.get("tokenizer_config", {})})
    return size


@pytest.mark.parametrize("how", DECLARATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_shown_unless_it_is_special(kind, how, tmp_path):
    token = declare(tmp_path / "a", kind, how)
    tokenizer = load_tokenizer(tmp_path / "a")
    (tmp_path / "b").mkdir()
    tokenizer.save(tmp_path / "b")
    ids = tokenizer.encode("the the", bos=False)
    for read in (tokenizer, load_tokenizer(tmp_path / "b")):
        assert read.decode([*ids, token]) == "the the" + NEW * (how in SHOWN)


@pytest.mark.parametrize("how", ["config, plain, in the template", "added, in the template"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_templates_token_in_a_message_is_text(kind, how, tmp_path):
    token = declare(tmp_path, kind, how)
    tokenizer = load_tokenizer(tmp_path)
    ids = encode_chat(tokenizer, [{"role": "user", "content": f"the {NEW} the"}])
    assert ids[0] == token
    assert token not in ids[1:]
    assert tokenizer.decode(ids).replace(" ", "") == f"{NEW}the{NEW}the"  # SentencePiece adds a space to each text


@pytest.mark.parametrize("kind", ["bytes", "never"])
def test_a_token_that_one_file_marks_as_special_is_special(kind, tmp_path):
    tokenizer = load_tokenizer(vocabularies.write(tmp_path, kind))
    name, token = next(iter(tokenizer.special_tokens.items()))
    config = {"added_tokens_decoder": {str(token): {"content": name, "special": False, **FLAGS}}}
    assert load_tokenizer(vocabularies.write(tmp_path, kind, tokenizer_config=config)).decode([token]) == ""


def test_a_piece_that_is_declared_special_is_no_text(tmp_path):
    plain = load_tokenizer(vocabularies.write(tmp_path / "a", "sentencepiece"))
    token = plain.encode("once", bos=False)[0]
    config = {"added_tokens_decoder": {str(token): {"content": "▁once", "special": True}}}
    tokenizer = load_tokenizer(vocabularies.write(tmp_path / "a", "sentencepiece", tokenizer_config=config))
    (tmp_path / "b").mkdir()
    tokenizer.save(tmp_path / "b")
    for read in (tokenizer, load_tokenizer(tmp_path / "b")):
        assert read.decode([token]) == ""
        assert token not in read.encode("once")
        assert read.decode(read.encode("once")) == "once"
        assert read.special_tokens["▁once"] == token


@pytest.mark.parametrize("kind", ["bytes", "never"])
def test_ids_in_gaps_have_no_text(kind, tmp_path):
    size = load_tokenizer(vocabularies.write(tmp_path, kind)).vocab_size
    file = tmp_path / "tokenizer.json"
    described = json.loads(file.read_text())
    described["model"]["vocab"]["filler"] = size + 5
    file.write_text(json.dumps(described))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == size + 6
    assert tokenizer.decode([size, size + 4, size + 5, size + 6]) == "filler"


@pytest.mark.parity
@pytest.mark.parametrize("how", DECLARATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_decoded_text_is_that_of_transformers(kind, how, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the parity extra")
    token = declare(tmp_path, kind, how)
    cls = transformers.LlamaTokenizer if kind == "sentencepiece" else transformers.PreTrainedTokenizerFast
    theirs = cls.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    a, b = tokenizer.encode("the", bos=False)[-1], tokenizer.encode("a", bos=False)[-1]
    for ids in ([a, token, b], [token], [a, token + 3, b], [a, b]):
        assert tokenizer.decode(ids).strip() == theirs.decode(ids, skip_special_tokens=True).strip(), ids
