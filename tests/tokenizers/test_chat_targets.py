"""What the assistant says in a chat, by {% generation %}, by built-in formats and by rendered prefixes."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import vocabularies
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_chat_formats import CHAT, TEMPLATES, TEXTS, VOCABULARIES, chats

from llama_jax.errors import GenerationError, TokenizerError
from llama_jax.tokenizers import ReplyEncoder, encode_chat, gguf, load_tokenizer

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
            prompt, last = encoder.prompt(chat), encoder.chat(talk, len(chat))
        assert last.ids[: len(prompt)] == prompt
        assert last.targets.index(True) == len(prompt)
        assert [i for i in taught.ids if i in special] == [i for i in without.ids if i in special]
        runs = re.sub("0+", "0", "".join(str(int(target)) for target in taught.targets)).split("0")
        assert len(list(filter(None, runs))) == sum(message["role"] == "assistant" for message in talk)
        assert taught.ids[:2] != [tokenizer.bos_id] * 2


SPOKEN = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# As Qwen 3.5's: the prompt ends inside what the assistant writes before its answer.
THINKING = SPOKEN.replace("{{ m.content + eos_token }}", "{{ '<think>\n\n</think>\n\n' + m.content + eos_token }}").replace(
    "'assistant: ' }}", "'assistant: <think>\n' }}"
)


def unmarked(template):
    return re.sub(r"\{% (end)?generation %\}", "", template)


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes", "spaces"])
@pytest.mark.parametrize("template", [SPOKEN, THINKING, unmarked(SPOKEN), unmarked(THINKING)])
def test_a_chat_begins_with_the_tokens_of_its_prompt(tmp_path, kind, template):
    ask, next_ask = ({"role": "user", "content": text} for text in ("once upon", " a time"))
    replies = [{"role": "assistant", "content": text} for text in ("on a time", "\nHello", "42", "")]
    with ReplyEncoder(tokenizer_of(tmp_path, kind, template)) as encoder:
        tokenizer, prompt = encoder.tokenizer, encoder.prompt([ask])
        for reply in replies:
            taught = encoder.chat([ask, reply])
            assert taught.ids[: len(prompt)] == prompt
            assert encoder.chat([ask, reply], 1) == taught
            longer = encoder.chat([ask, reply, next_ask, replies[0]])
            assert longer.ids[: len(taught.ids)] == taught.ids
            given = encoder.chat([ask, reply, next_ask, replies[0]], 3)
            prompt_of_last = encoder.prompt([ask, reply, next_ask])
            assert given.ids[: len(prompt_of_last)] == prompt_of_last
            if "<think>" not in template:
                end = "".join(name for name, token in tokenizer.special_tokens.items() if token == tokenizer.eos_id)
                assert said(tokenizer, longer) == [reply["content"] + end, replies[0]["content"] + end]
                assert said(tokenizer, given) == [replies[0]["content"] + end]


@pytest.mark.parametrize("kind", ["marked", *TEMPLATES])
def test_a_chat_may_begin_with_the_assistant_if_its_format_allows_that(all_kinds, kind, tmp_path):
    greeting = [{"role": "assistant", "content": "Hello"}, *CHAT[1:3]]
    family = "llama3" if kind == "marked" else kind
    for format in ("template", family):
        with ReplyEncoder(all_kinds[kind], format) as encoder:
            if family == "llama2":
                with pytest.raises(GenerationError, match=r"in turn|must alternate"):
                    encoder.chat(greeting)
                continue
            replies = said(encoder.tokenizer, encoder.chat(greeting))
            assert replies == [f"Hello{ENDS[family]}", f"Hi.{ENDS[family]}"]
            assert said(encoder.tokenizer, encoder.chat(greeting, 1)) == [f"Hi.{ENDS[family]}"]
    strict = "{% if messages[0].role == 'system' %}{% endif %}" + TEMPLATES["llama3"]  # fails for no messages
    with ReplyEncoder(tokenizer_of(tmp_path, "bytes", strict)) as encoder:
        assert said(encoder.tokenizer, encoder.chat(greeting)) == ["Hello<|eot_id|>", "Hi.<|eot_id|>"]


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


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """An encoder for each kind of vocabulary, and for those that GGUF has."""
    folder = tmp_path_factory.mktemp("encoders")
    found = {kind: tokenizer_of(folder / kind, kind) for kind in vocabularies.ALL_KINDS}
    for kind in ("sentencepiece", "ranks", "bytes", "spaces", "never"):
        found[f"{kind} in GGUF"] = gguf.from_metadata(gguf.to_metadata(found[kind]), kind)
    return {kind: ReplyEncoder(tokenizer) for kind, tokenizer in found.items()}


PIECES = ["once", " upon", " ", "  ", "\n", "12", "345", "'t", "\u0301", "🦙", "<s>", "|eot_id|>", "on a time", "x"]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=2)
SHORT_TEXTS = st.lists(st.sampled_from(PIECES) | ANY_TEXT, max_size=4).map("".join)


@settings(max_examples=60)
@given(prompt=SHORT_TEXTS, answers=st.tuples(SHORT_TEXTS, SHORT_TEXTS))
@example(prompt="Answer: ", answers=("on a time", "42"))
@example(prompt="once up", answers=("on", "\u0301"))
@example(prompt="", answers=(" once", ""))
def test_a_prompt_has_the_same_tokens_alone_and_before_every_answer(encoders, prompt, answers):
    for kind, encoder in encoders.items():
        tokenizer, alone = encoder.tokenizer, encoder.prompt(prompt)
        for answer in answers:
            text = prompt + answer
            back = tokenizer.decode(tokenizer.encode(text))
            try:
                taught = encoder.pair(prompt, answer)
            except TokenizerError:
                assert back.strip(" ") != text.lstrip(" "), kind
                continue
            assert taught.ids[: len(alone)] == alone, kind
            assert taught.targets == [False] * len(alone) + [True] * (len(taught.ids) - len(alone)), kind
            decoded = tokenizer.decode(taught.ids)
            assert decoded == back or decoded.lstrip(" ") == text.lstrip(" "), kind


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
        # The prompt keeps its own tokens where they would merge with the answer's.
        taught = encoder.pair("once up", "on a time")
        assert tokenizer.decode(taught.ids) == "once upon a time"
        assert said(tokenizer, taught) == [f"on a time{end}"]
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
