import json
import os

import pytest
import vocabularies

from llama_jax.errors import TokenizerError
from llama_jax.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    find_tokenizer,
    load_tokenizer,
)

LLAMA_3_SIZE = len(vocabularies.ranks()) + 256


def test_found_by_content_and_size(tmp_path):
    model = vocabularies.sentencepiece_model()
    (tmp_path / "vocabulary.anything").write_bytes(model)
    (tmp_path / "noise.model").write_bytes(b"\x0a\x0e\x0anoise that is no vocabulary")
    (tmp_path / "empty.model").write_bytes(b"")
    (tmp_path / "weights.json").write_text('{"version": 3}')
    size = load_tokenizer(tmp_path).vocab_size
    assert find_tokenizer(tmp_path, size).vocab_size == size
    assert find_tokenizer(tmp_path, size + 1).vocab_size == size  # a model may pad its vocabulary
    with pytest.warns(UserWarning, match=f"has {size} tokens, but the model's embedding {size - 1} rows"):
        assert find_tokenizer(tmp_path, size - 1).vocab_size == size  # or lack a row for an added token
    (tmp_path / "again.model").write_bytes(model)
    with pytest.raises(TokenizerError, match=r"several vocabularies .again.model, vocabulary.anything"):
        find_tokenizer(tmp_path, size)
    with pytest.raises(TokenizerError, match="several vocabularies"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("sentencepiece", SentencePieceTokenizer), ("ranks", TiktokenTokenizer), ("bytes", HuggingFaceTokenizer)],
)
def test_every_kind_is_recognized_under_any_name(tmp_path, kind, expected):
    _, make = vocabularies.FILES[kind]
    (tmp_path / "words").write_bytes(make())
    assert isinstance(load_tokenizer(tmp_path / "words"), expected)
    assert isinstance(load_tokenizer(tmp_path), expected)


def test_of_several_the_one_of_the_nearest_size_else_the_first_by_name(tmp_path):
    """A Hugging Face repository of Llama 3: tokenizer.json, and Meta's ranks below; an older vocabulary lies about."""
    vocabularies.write(tmp_path, "bytes")
    vocabularies.write(tmp_path / "original", "ranks")
    vocabularies.write(tmp_path, "sentencepiece")
    (tmp_path / "another.model").write_bytes(vocabularies.sentencepiece_model())
    size, smaller = LLAMA_3_SIZE, load_tokenizer(tmp_path / "tokenizer.model").vocab_size
    assert smaller < size
    assert isinstance(load_tokenizer(tmp_path), HuggingFaceTokenizer)
    assert isinstance(find_tokenizer(tmp_path, size), HuggingFaceTokenizer)
    assert isinstance(find_tokenizer(tmp_path, size + 50), HuggingFaceTokenizer)
    assert isinstance(find_tokenizer(tmp_path, smaller), SentencePieceTokenizer)
    with pytest.warns(UserWarning, match=rf"tokenizer.json has {size} tokens, but the model's embedding {size - 1} rows"):
        assert isinstance(find_tokenizer(tmp_path, size - 1), HuggingFaceTokenizer)
    with pytest.warns(UserWarning, match=rf"tokenizer.model has {smaller} tokens"):
        assert isinstance(find_tokenizer(tmp_path, smaller - 1), SentencePieceTokenizer)
    (tmp_path / "tokenizer.json").unlink()
    assert isinstance(find_tokenizer(tmp_path, size), TiktokenTokenizer)
    assert isinstance(load_tokenizer(tmp_path), SentencePieceTokenizer)


@pytest.mark.parametrize("kind", vocabularies.KINDS)
def test_the_files_beside_it_say_more(tmp_path, kind):
    names = ("<|begin_of_text|>", "<|eot_id|>") if kind in ("ranks", "bytes") else ("<s>", "</s>")
    vocabularies.write(
        tmp_path,
        kind,
        tokenizer_config={"bos_token": {"content": names[0]}, "chat_template": "{{ messages }}"},
        special_tokens_map={"eos_token": names[1], "bos_token": "not this"},
        generation_config={"eos_token_id": [258, 259]},
        config={"eos_token_id": 3},
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_id == tokenizer.special_tokens[names[0]]
    assert tokenizer.eos_id == tokenizer.special_tokens[names[1]]
    assert {258, 259, tokenizer.eos_id} <= set(tokenizer.stop_ids)
    assert 3 not in tokenizer.stop_ids
    assert tokenizer.chat_template == "{{ messages }}"
    assert load_tokenizer(tmp_path / vocabularies.FILES[kind][0]).chat_template == "{{ messages }}"

    (tmp_path / "generation_config.json").unlink()
    assert 3 in load_tokenizer(tmp_path).stop_ids
    (tmp_path / "chat_template.jinja").write_text("counts more")
    assert load_tokenizer(tmp_path).chat_template == "counts more"


def test_of_named_templates_the_default_one(tmp_path):
    templates = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    vocabularies.write(tmp_path, "bytes", tokenizer_config={"chat_template": templates})
    assert load_tokenizer(tmp_path).chat_template == "a"
    vocabularies.write(tmp_path, "bytes", tokenizer_config={"chat_template": templates[:1]})
    assert load_tokenizer(tmp_path).chat_template is None


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"\x0a\x0e\x0anoise that is no vocabulary", b"IQ== 0\nIg== 1\n", b"{}"])
def test_a_damaged_vocabulary_beside_weights_is_an_error(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    for use in (load_tokenizer, lambda folder: find_tokenizer(folder, 1000)):
        with pytest.raises(TokenizerError, match=f"{name} is not a.*(copy it again|right file)"):
            use(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", '{"bos_token": 1}', "bos_token=1 must be a text"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', "added tokens={'x': 1} must be tokens with ids"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id='2' must be a token id"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
    ],
)
def test_damaged_settings_are_named(tmp_path, name, content, message):
    vocabularies.write(tmp_path, "bytes")
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_what_is_no_vocabulary_is_named(tmp_path):
    with pytest.raises(TokenizerError, match="does not exist"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(TokenizerError, match=r"has no SentencePiece model, rank file of Llama 3 or tokenizer"):
        load_tokenizer(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TokenizerError, match="neither a file nor a folder"):
        load_tokenizer(tmp_path / "pipe")
    (tmp_path / "text.txt").write_text("Once upon a time")
    with pytest.raises(
        TokenizerError, match=r"text.txt is not a SentencePiece model, a rank file of Llama 3, a tokenizer.json or a GGUF"
    ):
        load_tokenizer(tmp_path / "text.txt")
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(TokenizerError, match="too large to be a model's vocabulary"):
        load_tokenizer(tmp_path)


def test_saved_settings_are_what_transformers_reads(tmp_path):
    folder = vocabularies.write(tmp_path / "a", "bytes", generation_config={"eos_token_id": [258]})
    tokenizer = load_tokenizer(folder)
    (tmp_path / "b").mkdir()
    tokenizer.save(tmp_path / "b")
    written = json.loads((tmp_path / "b/tokenizer_config.json").read_text())
    assert written == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "add_bos_token": True,
        "add_eos_token": False,
    }
    ends = json.loads((tmp_path / "b/generation_config.json").read_text())["eos_token_id"]
    assert tuple(ends) == tuple(token for token in tokenizer.stop_ids if token != tokenizer.bos_id)
    original = json.loads((tmp_path / "a/tokenizer.json").read_text())
    saved = json.loads((tmp_path / "b/tokenizer.json").read_text())
    assert saved == original


@pytest.mark.parametrize("token", [2**31, 2**28, 70_000])
def test_an_id_far_above_the_others(tmp_path, token):
    """The library would go through all ids between, for minutes, and end the process where memory does not last."""
    path = vocabularies.write(tmp_path, "spaces") / "tokenizer.json"
    found = json.loads(path.read_text())
    found["model"]["vocab"][list(found["model"]["vocab"])[-1]] = token
    path.write_text(json.dumps(found))
    with pytest.raises(TokenizerError, match=f"has a token with id {token}, but only"):
        load_tokenizer(path)


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer_config.json", "generation_config.json"])
def test_ids_of_one_hash(tmp_path, name):
    """As keys of a dictionary they would take the square of their count."""
    vocabularies.write(tmp_path, "spaces")
    ids = [i * (2**61 - 1) for i in range(1, 50_000)]
    by_id = {"added_tokens_decoder": {str(i): {"content": "x"} for i in ids}}
    content = {"added_tokens.json": {f"x{i}": i for i in ids}, "generation_config.json": {"eos_token_id": ids}}.get(
        name, by_id
    )
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="must be"):
        load_tokenizer(tmp_path)


def test_ranks_of_one_hash_and_too_many(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"".join(b"YQ== %d\n" % (i * (2**61 - 1)) for i in range(100_000)))
    with pytest.raises(TokenizerError, match="a rank that is not from 0 to"):
        load_tokenizer(path)
    path.write_bytes(b"YQ== 0\n" * 300_000)
    with pytest.raises(TokenizerError, match="over 262144 lines"):
        load_tokenizer(path)
