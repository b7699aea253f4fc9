import time
from contextlib import suppress

import pytest
import vocabularies
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.errors import TokenizerError
from llama_jax.tokenizers import load_tokenizer
from llama_jax.tokenizers.gguf import from_metadata, to_metadata

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
        for name in ("vocab_size", "bos_id", "eos_id", "stop_ids", "special_tokens", "chat_template", "space_prefix"):
            assert getattr(again, name) == getattr(tokenizer, name), (kind, name)
        for special in (False, True):
            ids = tokenizer.encode(f"once upon the tree{text}</s><|eot_id|>", special=special)
            assert again.encode(f"once upon the tree{text}</s><|eot_id|>", special=special) == ids, kind
        assert again.decode(ids) == tokenizer.decode(ids), kind
        assert to_metadata(again) == to_metadata(tokenizer), kind


@pytest.mark.parametrize("kind", ["llama2", pytest.param("llama3", marks=pytest.mark.slow)])
def test_ids_equal_llama_cpps_vectors(kind):
    tokenizer, vectors = vocabularies.published(kind)
    inside = from_metadata(to_metadata(tokenizer), "x.gguf")
    for text, ids in vectors:
        assert inside.encode(text, bos=False) == ids, repr(text)
        assert inside.decode(ids) == text
    assert inside.stop_ids == tokenizer.stop_ids


def test_a_models_padding_has_names(pairs):
    for kind, (tokenizer, _) in pairs.items():
        padded = from_metadata(to_metadata(tokenizer, tokenizer.vocab_size + 3), "x.gguf")
        assert padded.vocab_size == tokenizer.vocab_size + 3
        assert padded.encode("once upon [PAD600]") == tokenizer.encode("once upon [PAD600]"), kind


def test_ends_and_template(fields):
    fields |= {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9, "tokenizer.chat_template": "{{ x }}"}
    tokenizer = from_metadata(fields, "x.gguf")
    assert tokenizer.stop_ids == (1, 2, 7, 9)
    assert tokenizer.chat_template == "{{ x }}"


def test_bos_and_eos_are_special_whatever_their_type(fields):
    fields["tokenizer.ggml.token_type"][1:3] = [1, 1]
    tokenizer = from_metadata(fields, "x.gguf")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert not {1, 2} & set(tokenizer.encode("<s></s>", bos=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "rwkv"}, "model='rwkv' must be 'llama' .SentencePiece. or 'gpt2'"),
        ({"model": None}, "model=None must be a text"),
        ({"model": "gpt2", "pre": "deepseek-llm"}, "pre='deepseek-llm' must be Llama 3's"),
        ({"model": "gpt2"}, "pre='default' must be Llama 3's"),
        ({"model": "gpt2", "pre": "llama-bpe"}, "merges=None must be a list"),
        ({"model": "gpt2", "pre": "llama-bpe", "merges": ["a b c"]}, "merges='a b c' must be two tokens"),
        ({"model": "gpt2", "pre": "llama-bpe", "merges": ["zz yy"]}, "holds no whole BPE vocabulary"),
        ({"tokens": None}, "tokens=None must be a list"),
        ({"tokens": ["a", 1]}, "tokens=1 must be a list of str"),
        ({"scores": [0.5]}, "scores has 1 entries for"),
        ({"token_type": None}, "token_type=None must be a list"),
        ({"eos_token_id": 10**6}, "eos_token_id=1000000 must be an id below"),
        ({"bos_token_id": "1"}, "bos_token_id='1' must be an id below"),
        ({"add_space_prefix": 1}, "add_space_prefix=1 must be true or false"),
    ],
)
def test_what_cannot_be_read_is_named(fields, change, message):
    fields |= {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    with pytest.raises(TokenizerError, match=rf"x.gguf.*{message}"):
        from_metadata(fields, "x.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f["tokenizer.ggml.token_type"].__setitem__(9, 17), "token_type=17 must be one of"),
        (
            lambda f: f["tokenizer.ggml.tokens"].__setitem__(9, f["tokenizer.ggml.tokens"][8]),
            "not a whole SentencePiece model",
        ),
        (lambda f: f["tokenizer.ggml.tokens"].__setitem__(9, "\udcff"), "holds no whole SentencePiece vocabulary"),
        (lambda f: f.update({"tokenizer.chat_template": 3}), "chat_template=3 must be a text"),
    ],
)
def test_damage_is_named(fields, change, message):
    change(fields)
    with pytest.raises(TokenizerError, match=rf"x.gguf.*{message}"):
        from_metadata(fields, "x.gguf")


@pytest.mark.llama_cpp
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_reads_it_alike(pairs, kind, tmp_path):
    import gguf
    import llama_cpp

    tokenizer, _ = pairs[kind]
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    for add, value in (("context_length", 64), ("embedding_length", 32), ("block_count", 1), ("feed_forward_length", 64)):
        getattr(writer, f"add_{add}")(value)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in to_metadata(tokenizer).items():
        if type(value) is int:
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    peer = llama_cpp.Llama(str(tmp_path / "vocabulary.gguf"), vocab_only=True, verbose=False)

    @given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
    def compare(text):
        text = f"once upon the tree{text}"
        assert peer.tokenize(text.encode(), add_bos=False, special=False) == tokenizer.encode(text, bos=False)

    compare()
    assert peer.token_bos() == tokenizer.bos_id
    assert peer.token_eos() == tokenizer.eos_id


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
