import json

import pytest
import tokenizers
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax.errors import TokenizerError
from llama_jax.tokenizers import HuggingFaceTokenizer, TiktokenTokenizer, find_tokenizer, load_tokenizer
from llama_jax.tokenizers.huggingface import from_json
from llama_jax.tokenizers.tokenizer_config import Settings

NO_SURROGATES = st.text(st.characters(exclude_categories=["Cs"]))
SPACES = {kind: vocabularies.FILES[kind][1]() for kind in ("spaces", "first", "never")}


@pytest.fixture(scope="module")
def in_bytes():
    return from_json(vocabularies.bytes_json(), "here")


@settings(max_examples=50)
@given(text=NO_SURROGATES)
def test_ids_are_those_of_tiktoken(in_bytes, text):
    ranks = TiktokenTokenizer(vocabularies.rank_file(), "here")
    assert in_bytes.encode(text) == ranks.encode(text)
    assert in_bytes.special_tokens == ranks.special_tokens
    assert (in_bytes.vocab_size, in_bytes.eos_id, in_bytes.stop_ids) == (ranks.vocab_size, ranks.eos_id, ranks.stop_ids)


@given(text=st.lists(st.sampled_from(["the ", "in", "<s>", "</s>", " ", "\n", "é"]), max_size=8).map("".join))
@pytest.mark.parametrize("kind", SPACES)
def test_ids_are_the_librarys_own(kind, text):
    """With special tokens looked for in the raw text."""
    ours = from_json(SPACES[kind], "here")
    library = tokenizers.Tokenizer.from_str(SPACES[kind].decode().replace('"normalized":true', '"normalized":false'))
    ids = library.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, bos=False, special=True) == ids
    assert ours.decode(ids) == library.decode(ids, skip_special_tokens=True)
    library.encode_special_tokens = True
    assert ours.encode(text, bos=False) == library.encode(text, add_special_tokens=False).ids


def test_added_tokens():
    described = json.loads(vocabularies.bytes_json())
    size = max(token["id"] for token in described["added_tokens"]) + 1
    flags = dict(lstrip=False, rstrip=False, single_word=False)
    described["added_tokens"] += [
        {"id": size, "content": "<think>", "normalized": True, "special": False, **flags},
        {"id": size + 1, "content": "né é", "normalized": False, "special": False, **flags},
        {"id": size + 9, "content": "<|late|>", "normalized": False, "special": True, **flags},
    ]
    content = json.dumps(described).encode()
    tokenizer = from_json(content, "here")
    assert tokenizer.encode("a<think>né é", bos=False)[1:] == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<think>né é"
    assert "<think>" not in tokenizer.special_tokens
    # The library numbers what is missing: the ids must be those of the file.
    assert tokenizer.vocab_size == 1 + max(tokenizers.Tokenizer.from_str(content.decode()).get_vocab().values())

    talking = from_json(content, "here", Settings(chat_template="{{ '<think>' + messages[0].content }}"))
    assert size not in talking.encode("a<think>", bos=False)
    assert talking.encode("a<think>", bos=False, special=True)[1:] == [size]
    assert talking.decode([size]) == "<think>"

    ending = from_json(content, "here", Settings(eos_token="<think>"))
    assert ending.eos_id == ending.special_tokens["<think>"] == size
    assert ending.token_bytes(size) == b""


def test_named_ends():
    tokenizer = from_json(vocabularies.bytes_json(), "here", Settings(bos_token="<|python_tag|>", eos_token="<|eot_id|>"))
    assert tokenizer.bos_id == tokenizer.special_tokens["<|python_tag|>"]
    assert tokenizer.eos_id == tokenizer.special_tokens["<|eot_id|>"]
    assert tokenizer.special_tokens["<|end_of_text|>"] in tokenizer.stop_ids
    unknown = from_json(vocabularies.bytes_json(), "here", Settings(bos_token="<none>"))
    with pytest.raises(TokenizerError, match="has no bos token"):
        unknown.encode("Hi", bos=True)
    plain = from_json(vocabularies.bytes_json(), "here", Settings(bos_token="user"))  # a token, but not an added one
    assert plain.encode("Hi", bos=True)[0] == plain.special_tokens["user"]
    assert plain.token_bytes(plain.bos_id) == b""


def test_truncation_and_padding_of_the_file_are_off():
    library = tokenizers.Tokenizer.from_str(vocabularies.bytes_json().decode())
    library.enable_truncation(2)
    library.enable_padding(length=50)
    tokenizer = HuggingFaceTokenizer(library, "here", library.get_vocab_size())
    assert tokenizer.decode(tokenizer.encode("once upon a time", bos=False)) == "once upon a time"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a whole tokenizer.json"),
        (b'{"version": "1.0"}', "is not a whole tokenizer.json .*Model missing"),
        (b"[" * 100_000, "is not a whole tokenizer.json"),
        (vocabularies.bytes_json()[:-100], "is not a whole tokenizer.json"),
    ],
)
def test_damage_is_named(content, message):
    with pytest.raises(TokenizerError, match=rf"here {message}.*; copy it again"):
        from_json(content, "here")


@pytest.mark.parametrize(
    ("decoder", "name"),
    [(None, "None"), (tokenizers.decoders.WordPiece(), "WordPiece"), (tokenizers.decoders.Metaspace("_"), "Metaspace")],
)
def test_vocabularies_of_other_families_are_refused_by_name(decoder, name):
    library = tokenizers.Tokenizer.from_str(vocabularies.bytes_json().decode())
    library.decoder = decoder
    with pytest.raises(TokenizerError, match=f"here: the decoder {name} is not supported"):
        HuggingFaceTokenizer(library, "here", library.get_vocab_size())


def template(single, *names):
    ids = tokenizers.Tokenizer.from_str(vocabularies.bytes_json().decode()).token_to_id
    return tokenizers.processors.TemplateProcessing(single=single, special_tokens=[(name, ids(name)) for name in names])


BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
POST_PROCESSORS = {  # and whether a BOS and an EOS are put
    "BOS": (template(f"{BOS} $A", BOS), True, False),
    "EOS": (template(f"$A {EOS}", EOS), False, True),
    "both": (template(f"{BOS} $A {EOS}", BOS, EOS), True, True),
    "none": (tokenizers.processors.ByteLevel(), False, False),
    "BOS in a sequence": (
        tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), template(f"{BOS} $A", BOS)]),
        True,
        False,
    ),
}


def folder_that_puts(folder, kind, **settings):
    library = tokenizers.Tokenizer.from_str(vocabularies.bytes_json().decode())
    library.post_processor = POST_PROCESSORS[kind][0]
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS} | settings))
    return folder


@pytest.mark.parametrize("kind", POST_PROCESSORS)
def test_a_bos_is_put_where_the_post_processor_puts_one(kind, tmp_path):
    _, bos, eos = POST_PROCESSORS[kind]
    tokenizer = load_tokenizer(folder_that_puts(tmp_path / "a", kind, add_bos_token=not bos))  # which counts less
    assert (tokenizer.add_bos, tokenizer.add_eos) == (bos, eos)
    plain = tokenizer.encode("once", bos=False, eos=False)
    assert tokenizer.encode("once") == [tokenizer.bos_id] * bos + plain + [tokenizer.eos_id] * eos
    (tmp_path / "b").mkdir()
    tokenizer.save(tmp_path / "b")
    again = load_tokenizer(tmp_path / "b")
    assert (again.add_bos, again.add_eos) == (bos, eos)


@pytest.mark.parametrize("said", [True, False, None])
def test_without_a_post_processor_the_settings_say_it(said, tmp_path):
    whole = json.loads(vocabularies.bytes_json()) | {"post_processor": None}
    settings = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": said, "add_eos_token": said}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.add_bos, tokenizer.add_eos) == (said is True, said is True)


@pytest.mark.parity
@pytest.mark.parametrize("kind", POST_PROCESSORS)
def test_transformers_puts_the_same(kind, tmp_path):
    from transformers import AutoTokenizer

    folder = folder_that_puts(tmp_path, kind, tokenizer_class="PreTrainedTokenizerFast")
    assert load_tokenizer(folder).encode("once upon") == AutoTokenizer.from_pretrained(folder).encode("once upon")


def token(text, **flags):
    return {"content": text, "special": False, "lstrip": False, "rstrip": False, "single_word": False} | flags


def with_files(folder, kind, **config):
    """A vocabulary with tokens that only the files beside it have; the number of its own ones."""
    size = from_json(vocabularies.FILES[kind][1](), "here").vocab_size
    decoder = {size: token("<NEW>", special=True), size + 1: token("TOK", lstrip=True, rstrip=True)}
    vocabularies.write(folder, kind, tokenizer_config={"added_tokens_decoder": decoder} | config)
    return size


@pytest.mark.parametrize("kind", ["bytes", "never"])
def test_tokens_that_only_the_files_beside_it_have(kind, tmp_path):
    extra = {"image_token": "<image>", "a_token": {"content": "<a>"}}
    size = with_files(tmp_path, kind, extra_special_tokens=extra, additional_special_tokens=["<older>"])
    tokenizer = load_tokenizer(tmp_path)
    encode = lambda text: tokenizer.encode(text, bos=False, special=True)
    assert encode("in<NEW>in") == [*encode("in"), size, *encode("in")]
    assert encode("in  TOK  in") == [*encode("in"), size + 1, *encode("in")]  # white space belongs to it
    assert encode("<image><a>") == [size + 2, size + 3]
    assert size not in tokenizer.encode("<NEW>")
    assert tokenizer.vocab_size == size + 4
    (again := tmp_path / "again").mkdir()
    tokenizer.save(again)
    assert load_tokenizer(again).encode("<NEW>TOK<a>", special=True) == tokenizer.encode("<NEW>TOK<a>", special=True)
    assert find_tokenizer(tmp_path, size + 4).vocab_size == size + 4
    with pytest.warns(UserWarning, match=f"the model's embedding {size} rows; text with the tokens from '<NEW>'"):
        assert find_tokenizer(tmp_path, size).vocab_size == size + 4


@pytest.mark.parametrize("kind", SPACES)
def test_a_llamas_setting_of_the_first_space_counts_more(kind, tmp_path):
    for add in (True, False):
        config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": add}
        tokenizer = load_tokenizer(vocabularies.write(tmp_path / str(add), kind, tokenizer_config=config))
        assert tokenizer.space_prefix is add
        assert tokenizer.token_bytes(tokenizer.encode("the", bos=False)[0]) == b" the"[1 - add :]
        assert tokenizer.decode(tokenizer.encode("the in</s> a", special=True)) == "the in a"


@pytest.mark.parity
@pytest.mark.parametrize("setting", [{}, {"add_prefix_space": True}, {"add_prefix_space": False}])
@pytest.mark.parametrize("kind", ["bytes", "first"])
def test_a_folders_settings_are_those_of_transformers(kind, setting, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the parity extra")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    name = "PreTrainedTokenizerFast" if kind == "bytes" else "LlamaTokenizer"
    config = {"tokenizer_class": name, "bos_token": "<s>", "extra_special_tokens": ["<image>"]}
    if kind == "bytes":
        config["bos_token"] = "<|begin_of_text|>"
    with_files(tmp_path, kind, **config, **setting)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for text in ("the in", " the<NEW> in", "in  TOK  a", "a<image>in", "inTOKin"):
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, bos=False, special=True) == ids, text


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"(\w+\s?)+\d$", "retry-limit.*its pre_tokenizer's pattern backtracks too much on this text: simplify"),
        ("(", "parenthesis.*; correct the pattern of its pre_tokenizer$"),
    ],
)
def test_a_bad_pattern_is_named(pattern, message, tmp_path):
    path = vocabularies.write(tmp_path, "bytes") / "tokenizer.json"
    described = json.loads(path.read_text())
    described["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    path.write_text(json.dumps(described))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(path).encode("aaa aaa aaaa aaaa aaa aaa aaaa aaaa " * 3 + "!")


def test_a_prefix_of_pieces_that_continue_a_word_is_refused(tmp_path):
    """With this one, half of a character, the library would end the process."""
    vocabulary = {"t": 0, "\u0120": 1, "t\u0120": 2}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [["t", "\u0120"]], "continuing_subword_prefix": "x"}
    for escaped in (False, True):
        text = json.dumps({"version": "1.0", "added_tokens": [], "model": model})
        text = text.replace("continuing", "cont\\u0069nuing") if escaped else text
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(TokenizerError, match="continuing_subword_prefix='x'"):
            load_tokenizer(tmp_path / "tokenizer.json")
