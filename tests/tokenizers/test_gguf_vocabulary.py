import json
import time
from contextlib import suppress
from pathlib import Path

import pytest
import tokenizers
import vocabularies
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.errors import TokenizerError
from llama_jax.tokenizers import ReplyEncoder, encode_chat, load_tokenizer
from llama_jax.tokenizers.gguf import from_metadata, to_metadata
from llama_jax.tokenizers.huggingface import from_json
from llama_jax.tokenizers.interface import END_NAMES
from llama_jax.tokenizers.pre_tokenizers import PRE_TOKENIZERS, build_pre_tokenizer, pre_tokenizer_name
from llama_jax.tokenizers.sentencepiece import EntryType

KINDS = ("sentencepiece", "ranks", "bytes", "spaces", "never")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """{kind: (a tokenizer, the one that its metadata gives)}."""
    folder = tmp_path_factory.mktemp("vocabularies")
    found = {}
    for kind in KINDS:
        tokenizer = load_tokenizer(vocabularies.write(folder / kind, kind, tokenizer_config={"chat_template": "a template"}))
        found[kind] = tokenizer, from_metadata(to_metadata(tokenizer), "x.gguf")
    return found


@pytest.fixture
def fields(pairs):
    return to_metadata(pairs["sentencepiece"][0])


@given(text=TEXTS)
def test_metadata_holds_the_whole_vocabulary(pairs, text):
    for kind, (tokenizer, again) in pairs.items():
        for name in ("vocab_size", "bos_id", "eos_id", "add_bos", "special_tokens", "chat_template", "space_prefix"):
            assert getattr(again, name) == getattr(tokenizer, name), (kind, name)
        assert again.stop_ids == tokenizer.stop_ids, kind
        for special in (False, True):
            ids = tokenizer.encode(f"once upon the tree{text}</s><|eot_id|>", special=special)
            assert again.encode(f"once upon the tree{text}</s><|eot_id|>", special=special) == ids, kind
        assert again.decode(ids) == tokenizer.decode(ids), kind
        assert to_metadata(again) == to_metadata(tokenizer), kind


LLAMA_2, LLAMA_3 = (1, 2, 32_000, (1, 2)), (128_000, 128_001, 128_256, (128_000, 128_001, 128_008, 128_009))


@pytest.mark.parametrize(
    ("kind", "in_gguf", "expected"),
    [
        *(("llama2", False, LLAMA_2), ("llama2", True, LLAMA_2), ("llama3", False, LLAMA_3)),
        pytest.param("llama3", True, LLAMA_3, marks=pytest.mark.slow),
    ],
)
def test_ids_equal_llama_cpps_vectors(kind, in_gguf, expected):
    tokenizer, vectors = vocabularies.published(kind)
    if in_gguf:
        tokenizer = from_metadata(to_metadata(tokenizer), "x.gguf")
    for text, ids in vectors:
        assert tokenizer.encode(text, bos=False) == ids, repr(text)
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size, tokenizer.stop_ids) == expected


def test_a_models_padding_has_names_and_no_text(pairs, tmp_path):
    for kind, (tokenizer, _) in pairs.items():
        padded = from_metadata(to_metadata(tokenizer, tokenizer.vocab_size + 3), "x.gguf")
        assert padded.vocab_size == tokenizer.vocab_size + 3
        assert padded.encode("once upon [PAD600]") == tokenizer.encode("once upon [PAD600]"), kind
        (tmp_path / kind).mkdir()
        padded.save(tmp_path / kind)
        for read in (padded, load_tokenizer(tmp_path / kind)):
            assert read.decode(range(tokenizer.vocab_size, tokenizer.vocab_size + 5)) == ""


def test_tokens_without_a_row_are_not_written(pairs):
    """llama.cpp requires as many tokens as rows; merges that need a token that is not written are not, either."""
    for kind, (tokenizer, _) in pairs.items():
        size = tokenizer.vocab_size
        text = "once upon a time"
        used = max(tokenizer.encode(text, bos=False)) + 1
        for rows in {size - 1, used}:
            fields = to_metadata(tokenizer, rows)
            read = from_metadata(fields, "x.gguf")
            assert read.vocab_size == len(fields["tokenizer.ggml.tokens"]) == rows
            assert read.encode(text, bos=False) == tokenizer.encode(text, bos=False), kind
            assert all(value < rows for key, value in fields.items() if key.endswith("_token_id"))
            assert set(read.stop_ids) <= set(tokenizer.stop_ids) or not {*tokenizer.stop_ids} & {*range(rows)}
            assert to_metadata(from_metadata(to_metadata(tokenizer), "x.gguf"), rows) == fields


def test_ends_and_template(fields):
    fields |= {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9, "tokenizer.chat_template": "{{ x }}"}
    tokenizer = from_metadata(fields, "x.gguf")
    assert tokenizer.stop_ids == (2, 7, 9)
    assert tokenizer.chat_template == "{{ x }}"
    with pytest.raises(TokenizerError, match=r"x.gguf.*chat_template=3 must be a text"):
        from_metadata(fields | {"tokenizer.chat_template": 3}, "x.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "rwkv"}, "model='rwkv' must be 'llama' .SentencePiece. or 'gpt2'"),
        (
            {"model": "gpt2", "pre": "mine"},
            "pre='mine' must be a pre-tokenizer of llama.cpp; .* .--tokenizer tokenizer.json.$",
        ),
        ({"model": "gpt2", "pre": "llama-bpe"}, "merges=None must be a list"),
        ({"tokens": ["a", 1]}, "tokens=1 must be a list of str"),
        ({"scores": [0.5]}, "scores has 1 entries for"),
        ({"eos_token_id": 10**6}, "eos_token_id=1000000 must be an id below"),
        ({"add_space_prefix": 1}, "add_space_prefix=1 must be true or false"),
        ({"tokens": ["a"], "scores": [0.0], "token_type": [17]}, "token_type=17 must be one of"),
    ],
)
def test_what_cannot_be_read_is_named(fields, change, message):
    fields |= {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    with pytest.raises(TokenizerError, match=rf"x.gguf.*{message}"):
        from_metadata(fields, "x.gguf")


@pytest.mark.llama_cpp
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_reads_it_alike(pairs, kind, tmp_path):
    import llama_cpp

    tokenizer, _ = pairs[kind]
    path = vocabularies.write_gguf(tmp_path / "vocabulary.gguf", to_metadata(tokenizer))
    peer = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)

    @given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
    def compare(text):
        text = f"once upon the tree{text}"
        assert peer.tokenize(text.encode(), add_bos=False, special=False) == tokenizer.encode(text, bos=False)

    compare()
    assert peer.token_bos() == tokenizer.bos_id
    assert peer.token_eos() == tokenizer.eos_id


@pytest.mark.parametrize("name", vocabularies.GGUF)
def test_ids_of_real_vocabularies(name):
    path, vectors = vocabularies.in_gguf(name)
    tokenizer = load_tokenizer(path)
    for text, ids in vectors:
        assert tokenizer.encode(text, bos=False) == ids, repr(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.add_bos == (name == "deepseek-llm")
    assert tokenizer.encode("a")[:1] == ([tokenizer.bos_id] if tokenizer.add_bos else tokenizer.encode("a", bos=False))


def test_every_pre_tokenizer_cuts_as_llama_cpps():
    """The goldens are of `test_llama_cpp_ids`."""
    library = tokenizers.Tokenizer.from_str(json.dumps(load_tokenizer(vocabularies.in_gguf("gpt-2")[0]).description()))
    stored = json.loads((Path(__file__).parents[1] / "goldens" / "pre_tokenizers.json").read_text())
    for name, ids in stored["ids"].items():
        library.pre_tokenizer = build_pre_tokenizer(PRE_TOKENIZERS[name])
        assert library.encode(stored["text"], add_special_tokens=False).ids == ids, name
    assert stored["ids"].keys() == {name for name, pre in PRE_TOKENIZERS.items() if pre.spells_bytes}


def test_a_bos_is_put_where_the_file_or_its_pre_tokenizer_says_so(pairs):
    fields = to_metadata(pairs["ranks"][0])
    del fields["tokenizer.ggml.add_bos_token"]
    for pre, put in (("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)):
        fields["tokenizer.ggml.pre"] = pre
        assert from_metadata(fields, "x.gguf").add_bos is put
        for said in (True, False):
            tokenizer = from_metadata(fields | {"tokenizer.ggml.add_bos_token": said}, "x.gguf")
            assert tokenizer.encode("once") == [tokenizer.bos_id] * said + tokenizer.encode("once", bos=False)
            ended = from_metadata(fields | {"tokenizer.ggml.add_eos_token": said}, "x.gguf")
            assert ended.encode("once", bos=False) == ended.encode("once", bos=False, eos=False) + [ended.eos_id] * said


@pytest.mark.parametrize("kind", ["sentencepiece", "ranks"])
def test_what_was_read_is_written(pairs, kind):
    fields = to_metadata(pairs[kind][0]) | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    fields |= {"tokenizer.ggml.padding_token_id": 5, "tokenizer.ggml.fim_pad_token_id": 6, "tokenizer.other": "kept"}
    fields["tokenizer.ggml.token_type"][10:12] = [4, 5]
    if kind == "ranks":
        fields["tokenizer.ggml.pre"] = "smollm"
    before = json.dumps(fields)
    tokenizer = from_metadata(fields, "x.gguf")
    assert json.dumps(to_metadata(tokenizer)) == before
    more = to_metadata(tokenizer, tokenizer.vocab_size + 2)  # a copy: neither changes the other
    assert len(more["tokenizer.ggml.tokens"]) == tokenizer.vocab_size + 2
    assert json.dumps(to_metadata(tokenizer)) == before


def with_tokens(fields, *added):
    """The fields with more tokens, each a text and what it is."""
    for text, kind in added:
        for name, value in (("tokens", text), ("scores", -1000.0), ("token_type", int(kind))):
            if f"tokenizer.ggml.{name}" in fields:
                fields[f"tokenizer.ggml.{name}"].append(value)
    return fields


@pytest.mark.parametrize("kind", ["sentencepiece", "ranks"])
def test_user_defined_tokens_are_found_in_any_text(pairs, kind):
    fields = to_metadata(pairs[kind][0])
    size = len(fields["tokenizer.ggml.tokens"])
    added = (("<think>", EntryType.USER_DEFINED), ("<|mine|>", EntryType.CONTROL), ("   ", EntryType.USER_DEFINED))
    tokenizer = from_metadata(with_tokens(fields, *added), "x.gguf")
    plain = lambda text: tokenizer.encode(text, bos=False)
    assert plain("once<think>time") == [*plain("once"), size, *plain("time")]
    assert plain("once   time") == [*plain("once"), size + 2, *plain("time")]
    assert size + 1 not in plain("once<|mine|>")
    assert tokenizer.encode("once<|mine|>", bos=False, special=True) == [*plain("once"), size + 1]
    assert tokenizer.encode_batch(["<think>", "once"]) == [[size], plain("once")]
    prefix = " " * tokenizer.space_prefix  # before every text that follows another token
    assert tokenizer.decode(plain("once<think>   time")) == f"once<think>   {prefix}time"


def test_ends_that_llama_cpp_knows_by_their_texts(pairs):
    fields = to_metadata(pairs["ranks"][0])
    own = from_metadata(fields, "x.gguf").stop_ids
    size = len(fields["tokenizer.ggml.tokens"])
    names = [
        *sorted(END_NAMES - {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"}),
        "<fim_pad>",
        "<|file_sep|>",
        "<fim_prefix>",
    ]
    tokenizer = from_metadata(with_tokens(fields, *((name, EntryType.NORMAL) for name in names)), "x.gguf")
    ids = {name: size + i for i, name in enumerate(names)}
    # <|end|> is none beside <|return|>, and </s> none beside <|tool_response>; one that begins what is filled in is none.
    none = {ids[name] for name in ("<|end|>", "</s>", "<fim_prefix>")}
    assert set(tokenizer.stop_ids) - set(own) == set(ids.values()) - none
    assert ids["<|im_end|>"] in tokenizer.special_tokens.values()
    assert ids["<|end|>"] in tokenizer.encode("once<|end|>")


def test_phi_3s_tokens_take_the_white_space_after_them_away(pairs):
    for kind in ("sentencepiece", "ranks"):
        fields = with_tokens(to_metadata(pairs[kind][0]), ("<|user|>", EntryType.CONTROL), ("[PAD9]", EntryType.UNKNOWN))
        other, phi = (from_metadata(fields | {"general.name": name}, "x.gguf") for name in ("Phil", "Phi-3 mini"))
        end = fields["tokenizer.ggml.tokens"].index("<|user|>")
        assert phi.encode("<|user|>\n once", bos=False, special=True) == [end, *phi.encode("once", bos=False)]
        assert len(other.encode("<|user|>\n once", bos=False, special=True)) > 1 + len(phi.encode("once", bos=False))
        phi.chat_template = "{% for m in messages %}<|user|>\n{{ m.content }}{% endfor %}"
        with ReplyEncoder(phi) as encoder:  # what is left is the assistant's
            taught = encoder.chat([{"role": "user", "content": "once"}, {"role": "assistant", "content": "a"}])
        assert taught.ids == [end, *phi.encode("once", bos=False), end, *phi.encode("a", bos=False)]
        assert taught.targets[-1]
        assert "general.name" in to_metadata(phi)
        assert "general.name" not in to_metadata(other)


def test_bytes_are_found_by_their_texts(fields, tmp_path):
    encode = lambda tokenizer, text: tokenizer.encode(text, bos=False)
    line, clef = 3 + 0x0A, [3 + byte for byte in "𝄞".encode()]
    plain = encode(from_metadata(fields, "x.gguf"), "once\n𝄞")
    assert plain[-5:] == [line, *clef]
    ended = from_metadata(fields | {"tokenizer.ggml.eos_token_id": line}, "x.gguf")
    assert ended.eos_id == line
    assert encode(ended, "once\n𝄞") == plain
    (folder := tmp_path / "saved").mkdir()
    ended.save(folder)
    assert encode(load_tokenizer(folder), "once\n𝄞") == plain
    fields["tokenizer.ggml.tokens"][line] = "<gone>"
    assert encode(from_metadata(fields, "x.gguf"), "once\n𝄞") == [*plain[:-5], 0, *clef]  # the unknown token


def test_tokens_that_are_no_utf_8(fields, tmp_path):
    """As files are read, such bytes are lone surrogates."""
    plain = from_metadata(fields, "x.gguf").encode("once upon")
    fields = with_tokens(fields, ("\udce3\udc81", EntryType.NORMAL))
    tokenizer = from_metadata(fields, "x.gguf")
    assert tokenizer.encode("once upon") == plain
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"\xe3\x81"
    assert load_tokenizer(vocabularies.write_gguf(tmp_path / "x.gguf", to_metadata(tokenizer))).encode("once upon") == plain
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path / "tokenizer.model").encode("once upon") == plain


@pytest.mark.parametrize("kind", ["sentencepiece", "ranks"])
def test_of_user_defined_tokens_that_overlap_the_longest_is_taken(pairs, kind):
    added = [("<ab", EntryType.USER_DEFINED), ("b><c>", EntryType.USER_DEFINED), ("<|x|>\n", EntryType.USER_DEFINED)]
    fields = with_tokens(to_metadata(pairs[kind][0]), *added, ("<|x|>", EntryType.CONTROL))
    tokenizer, size = from_metadata(fields, "x.gguf"), len(fields["tokenizer.ggml.tokens"])
    encode = lambda text: tokenizer.encode(text, bos=False)
    assert encode("once<ab><c>") == [*encode("once<a"), size - 3]
    assert encode("<ab>")[0] == size - 4
    assert encode("once<|x|>\n") == [*encode("once"), size - 2]
    assert tokenizer.encode_batch(["<ab><c>", "<ab"]) == [[*encode("<a"), size - 3], [size - 4]]


def test_a_tokenizer_json_is_written_by_its_pre_tokenizers_name():
    assert to_metadata(from_json(vocabularies.bytes_json(), "here"))["tokenizer.ggml.pre"] == "llama-bpe"
    first = {(pre.patterns, pre.ignore_merges): name for name, pre in reversed(PRE_TOKENIZERS.items()) if pre.spells_bytes}
    for (_, ignore_merges), name in first.items():  # as it is saved, which spells categories out
        assert (
            pre_tokenizer_name(json.loads(build_pre_tokenizer(PRE_TOKENIZERS[name]).__getstate__()), ignore_merges) == name
        )


def split(*patterns):
    steps = [{"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False} for one in patterns]
    return {
        "type": "Sequence",
        "pretokenizers": [*steps, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}],
    }


END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BEFORE, SHORT = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("published", "ignore_merges", "name"),
    [
        (split(rf"{SHORT}|{BEFORE}\p{{L}}+|\p{{N}}{END}"), False, "qwen2"),
        (
            split(
                rf"{BEFORE}{UPPER}*{LOWER}+{SHORT}?|{BEFORE}{UPPER}+{LOWER}*{SHORT}?|\p{{N}}{{1,3}}"
                + END.replace("]*|\\s*", "/]*|\\s*")
            ),
            False,
            "gpt-4o",
        ),
        (BYTES, False, "gpt-2"),
        ({"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}, False, "starcoder"),
        (BYTES | {"add_prefix_space": True}, False, None),
        (split("a+"), False, None),
        (None, False, None),
    ],
)
def test_published_pre_tokenizers(published, ignore_merges, name):
    assert pre_tokenizer_name(published, ignore_merges) == name


def test_one_that_has_no_name_is_refused():
    library = tokenizers.Tokenizer.from_str(vocabularies.bytes_json().decode())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(TokenizerError, match=r"with a pre-tokenizer that llama\.cpp does not have"):
        to_metadata(from_json(library.to_str().encode(), "here"))


@pytest.mark.real
def test_smollm2_is_read_as_it_was_made(smollm2):
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.encode("Once upon a time") == [6403, 1980, 253, 655]
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.stop_ids) == (1, False, (0, 2, 4))
    chat = encode_chat(tokenizer, [{"role": "user", "content": "Hi<|im_end|>"}])
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    before = tokenizer.encode(f"{system}<|im_start|>user\nHi", special=True)
    after = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", special=True)
    assert chat == [*before, *tokenizer.encode("<|im_end|>"), *after]
    fields = to_metadata(tokenizer)
    assert (fields["tokenizer.ggml.pre"], fields["tokenizer.ggml.add_bos_token"]) == ("smollm", False)


def test_every_token_of_a_kind_of_its_own(pairs):
    """To go through all tokens for each kind would take the square of their count."""
    fields = to_metadata(pairs["ranks"][0])
    count = 40_000
    fields |= {"tokenizer.ggml.tokens": [f"t{i}" for i in range(count)], "tokenizer.ggml.merges": []}
    fields |= {"tokenizer.ggml.token_type": list(range(100, 100 + count))}
    started = time.process_time()
    with suppress(TokenizerError):
        from_metadata(fields, "x.gguf")
    assert time.process_time() - started < 10
