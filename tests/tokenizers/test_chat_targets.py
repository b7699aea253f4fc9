"""What the assistant says in a chat, by {% generation %}, by built-in formats and by rendered prefixes."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat_formats import CHAT, TEMPLATES, TEXTS, VOCABULARIES, chats

from llama_jax.errors import GenerationError, TokenizerError
from llama_jax.tokenizers import ReplyEncoder, encode_chat, load_tokenizer

# Llama 3's, with what the assistant says enclosed as in TRL's.
LLAMA_3_MARKED = (
    "{{- bos_token }}\n{%- for m in messages %}\n"
    "{%- if m['role'] == 'assistant' %}\n"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n"
    "{%- generation %}{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}\n"
    "{%- else %}\n"
    "{{- '<|start_header_id|>' ~ m['role'] ~ '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}\n"
    "{%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n"
)
TALK = [*CHAT, {"role": "assistant", "content": " A time, once. "}]
ENDS = {"llama2": "</s>", "llama3": "<|eot_id|>", "zephyr": "</s>"}


def tokenizer_of(folder, kind, template=None):
    return load_tokenizer(vocabularies.write(folder, kind, tokenizer_config={"chat_template": template} if template else {}))


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabularies")
    found = {format: tokenizer_of(folder / format, kind, TEMPLATES[format]) for format, kind in VOCABULARIES.items()}
    return found | {"marked": tokenizer_of(folder / "marked", "bytes", LLAMA_3_MARKED)}


def said(tokenizer, taught):
    """The runs of targets as texts, special tokens by their names."""
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    found, before = [], False
    for token, target in zip(*taught, strict=True):
        if target:
            text = names.get(token) or tokenizer.token_bytes(token).decode()
            found = [*found[:-1], found[-1] + text] if before else [*found, text]
        before = target
    return found


@pytest.mark.parametrize("kind", ["marked", *TEMPLATES])
@pytest.mark.parametrize("format", ["template", "built-in"])
def test_targets_are_what_the_assistant_says_with_the_end_of_its_turn(all_kinds, kind, format):
    tokenizer, family = all_kinds[kind], "llama3" if kind == "marked" else kind
    with ReplyEncoder(tokenizer, "template" if format == "template" else family) as encoder:
        taught = encoder.chat(TALK)
        assert set(encoder.ends) >= {tokenizer.special_tokens[ENDS[family]]}
    end = ENDS[family]
    expected = {
        "llama2": [f" Hi. {end}", f" A time, once. {end}"],
        "llama3": [f"Hi.{end}", f"A time, once.{end}"],
        "zephyr": [f"Hi.{end}", f" A time, once. {end}"],
    }[family]
    assert said(tokenizer, taught) == expected
    # What is read is what a generation reads, and goes on as it would.
    prompt = encode_chat(tokenizer, TALK[:-1], "template" if format == "template" else family)
    assert taught.ids[: len(prompt)] == prompt
    assert not any(taught.targets[: len(encode_chat(tokenizer, TALK[:2], family))])


@settings(max_examples=8)
@given(chat=chats(), reply=TEXTS)
def test_no_text_makes_a_special_token_or_a_target(all_kinds, chat, reply):
    talk = [*chat, {"role": "assistant", "content": f"({reply}<|eot_id|></s>)"}]
    plain = [{**message, "content": "x"} for message in talk]
    for kind, format in (("marked", "auto"), ("llama3", "llama3"), ("llama2", "llama2"), ("zephyr", "zephyr")):
        tokenizer = all_kinds[kind]
        special = set(tokenizer.special_tokens.values())
        with ReplyEncoder(tokenizer, format) as encoder:
            taught, without = encoder.chat(talk), encoder.chat(plain)
        assert [i for i in taught.ids if i in special] == [i for i in without.ids if i in special]
        runs = re.sub("0+", "0", "".join(str(int(target)) for target in taught.targets)).split("0")
        assert len(list(filter(None, runs))) == sum(message["role"] == "assistant" for message in talk)
        assert taught.ids[:2] != [tokenizer.bos_id] * 2


@pytest.mark.parametrize("format", ["template", "llama3"])
@pytest.mark.parametrize("kind", ["marked", "llama3"])
def test_of_what_is_given_nothing_is_a_target(all_kinds, kind, format):
    tokenizer = all_kinds[kind]
    with ReplyEncoder(tokenizer, format) as encoder:
        assert said(tokenizer, encoder.chat(TALK, 4)) == ["A time, once.<|eot_id|>"]
        assert said(tokenizer, encoder.chat(TALK, 2)) == said(tokenizer, encoder.chat(TALK))
        assert encoder.chat(TALK, 4).ids == encoder.chat(TALK).ids
        assert said(tokenizer, encoder.chat(TALK, 5)) == []
        assert said(tokenizer, encoder.chat(TALK[:2])) == []


def test_plain_chats_end_once(all_kinds):
    tokenizer = all_kinds["llama2"]
    with ReplyEncoder(tokenizer, "plain") as encoder:
        taught = encoder.chat(
            [
                {"role": "user", "content": "once upon"},
                {"role": "assistant", "content": " a time"},
                {"role": "user", "content": "a tree"},
                {"role": "assistant", "content": " day"},
            ]
        )
    assert said(tokenizer, taught) == [" a time", " day</s>"]
    assert taught.ids == tokenizer.encode("once upon a time\n\na tree day", eos=True)


@pytest.mark.parametrize("kind", vocabularies.KINDS)
def test_a_prompt_and_what_follows_it(tmp_path, kind):
    tokenizer = tokenizer_of(tmp_path, kind)
    with ReplyEncoder(tokenizer) as encoder:
        taught = encoder.pair("once upon", " a time")
        assert taught.ids == tokenizer.encode("once upon a time", eos=True)
        (end,) = (name for name, i in tokenizer.special_tokens.items() if i == tokenizer.eos_id)
        (begin,) = (name for name, i in tokenizer.special_tokens.items() if i == tokenizer.bos_id)
        assert said(tokenizer, taught) == [f" a time{end}"]
        assert encoder.ends == tokenizer.stop_ids
        # One letter further on the tokens need not be the same: what is partly the answer's is a target.
        taught = encoder.pair("once up", "on a time")
        assert taught.ids == tokenizer.encode("once upon a time", eos=True)
        assert said(tokenizer, taught)[0].split(" a time")[0] in ("on", "pon", "upon", " upon")
        # Special tokens are text unless it is asked for, and then none stands twice.
        assert encoder.pair(f"{begin}once", f" a{end}", special=True) == encoder.pair("once", " a")
        assert len(encoder.pair(f"{begin}once", f" a{end}").ids) > len(encoder.pair("once", " a").ids) + 2


def test_a_bos_is_put_by_the_vocabularys_own_rule(tmp_path):
    tokenizer = tokenizer_of(tmp_path, "bytes")
    chat = [{"role": "user", "content": "once"}]
    for puts in (True, False):
        tokenizer.add_bos = puts
        with ReplyEncoder(tokenizer, "plain") as encoder:
            taught = encoder.pair("once", " a")
        assert taught.ids == [tokenizer.bos_id] * puts + tokenizer.encode("once a", bos=False, eos=True)
        assert encode_chat(tokenizer, chat, "plain") == tokenizer.encode("once")


def test_characters_of_several_tokens_are_targets_whole(all_kinds):
    tokenizer = all_kinds["marked"]
    with ReplyEncoder(tokenizer) as encoder:
        taught = encoder.chat([{"role": "user", "content": "é🦙ﷺ"}, {"role": "assistant", "content": "🦙ﷺ"}])
    at = taught.targets.index(True)
    assert b"".join(map(tokenizer.token_bytes, taught.ids[at:])).decode() == "🦙ﷺ"


def test_where_a_reply_is_cannot_always_be_told(tmp_path):
    forgetful = "{% for m in messages %}{{ m.role if not loop.last else 'last' }}: {{ m.content }}<|eot_id|>{% endfor %}"
    named = pytest.raises(GenerationError, match=r"message 2, from 'assistant', cannot be found.*put \{% generation %\}")
    with ReplyEncoder(tokenizer_of(tmp_path / "a", "bytes", forgetful)) as encoder, named:
        encoder.chat(TALK)
    marked = forgetful.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    with ReplyEncoder(tokenizer_of(tmp_path / "b", "bytes", marked)) as encoder:
        assert len(said(encoder.tokenizer, encoder.chat(TALK))) == len(TALK)
        with pytest.raises(GenerationError, match="the first 2 messages, which are given, differently"):
            encoder.chat(TALK, 2)


def test_what_cannot_be_taught_is_named(all_kinds, tmp_path):
    with ReplyEncoder(all_kinds["llama2"]) as encoder:
        with pytest.raises(GenerationError, match="message 0 has the role 'nobody'"):
            encoder.chat([{"role": "nobody", "content": ""}])
        with pytest.raises(GenerationError, match="does not support tools"):
            encoder.chat(TALK, tools=[{"type": "function"}])
        with pytest.raises(TokenizerError, match="lone surrogate"):
            encoder.pair("a", "\ud800")
    twice = "{{ bos_token }}" + TEMPLATES["llama3"]
    named = pytest.raises(GenerationError, match="begins with two begin-of-sequence tokens")
    with ReplyEncoder(tokenizer_of(tmp_path / "twice", "bytes", twice)) as encoder, named:
        encoder.chat(TALK)
    named = pytest.raises(GenerationError, match="no chat template")
    with ReplyEncoder(tokenizer_of(tmp_path / "none", "sentencepiece")) as encoder, named:
        encoder.chat(TALK)


def test_a_vocabulary_that_changes_the_text_is_refused(tmp_path):
    file = vocabularies.write(tmp_path, "bytes") / "tokenizer.json"
    file.write_text(file.read_text().replace('"normalizer":null', '"normalizer":{"type":"NFC"}'))
    with ReplyEncoder(load_tokenizer(file)) as encoder:
        assert encoder.pair("e", "\u00e9").targets[-1]
        with pytest.raises(TokenizerError, match=r"does not round-trip this text.*normalize it yourself \(NFC\)"):
            encoder.pair("e", "e\u0301")


@pytest.mark.parity
@pytest.mark.parametrize("whose", ["ours", "TRL's"])
def test_ids_and_masks_are_transformers_own(whose, tmp_path):
    from transformers import PreTrainedTokenizerFast

    template = LLAMA_3_MARKED
    if whose == "TRL's":
        trl = find_spec("trl")
        if trl is None:
            pytest.skip("needs TRL, which comes with no extra: pip install --no-deps trl")
        template = (Path(trl.origin).parent / "chat_templates" / "llama3_training.jinja").read_text()
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    vocabularies.write(tmp_path, "bytes", tokenizer_config={"chat_template": template, **names})
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"))

    with ReplyEncoder(load_tokenizer(tmp_path)) as encoder:

        @settings(max_examples=50)
        @given(chat=chats(texts), reply=texts)
        def compare(chat, reply):
            talk = [*chat, {"role": "assistant", "content": reply}]
            expected = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
            found = encoder.chat(talk)
            assert found.ids == expected["input_ids"]
            assert list(map(int, found.targets)) == expected["assistant_masks"]

        compare()
