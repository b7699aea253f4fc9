import os
from contextlib import closing

import pytest
import vocabularies
from dialect_templates import TOOL_TEMPLATES
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_jax.errors import GenerationError
from llama_jax.tokenizers import encode_chat, load_tokenizer, reply_ends, resolve_format
from llama_jax.tokenizers.chat_template import Renderer, message_form, parse_template_args, put_in_form, shared_renderer
from llama_jax.tokenizers.load import replace_chat_template
from llama_jax.tokenizers.tool_dialects import dialect_of

# The published formats as templates.
LLAMA_2 = (
    "{% set start = 1 if messages[0].role == 'system' else 0 %}{% for m in messages[start:] %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set text = m.content %}{% if start and loop.first %}"
    "{% set text = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' + text %}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + text | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{{- bos_token }}\n{%- for m in messages %}\n"
    "{{- '<|start_header_id|>' ~ m['role'] ~ '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n"
)
ZEPHYR = (
    "{% for m in messages %}\n{{ '<|' + m.role + '|>\n' + m.content + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}\n{{ '<|assistant|>\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% set first = '' %}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI_3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set first = '' %}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (first if loop.first else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {"llama2": LLAMA_2, "llama3": LLAMA_3, "zephyr": ZEPHYR}
VOCABULARIES = {"llama2": "sentencepiece", "llama3": "bytes", "zephyr": "spaces"}
# Formats whose tokens are added to a vocabulary of bytes.
OTHER_FORMATS = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>")),
    "gemma": (GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    "phi3": (PHI_3, ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")),
    "mistral": (MISTRAL, ("[INST]", "[/INST]")),
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hello! "},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Once upon?"},
]
TEXTS = st.lists(
    st.sampled_from(["once upon", "</s>", "<s>", "<|eot_id|>", "<|end_header_id|>", " ", "\n", "[INST]"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    max_size=5,
).map("".join)


@st.composite
def chats(draw, texts=TEXTS):
    turns = [("user", "assistant")[i % 2] for i in range(2 * draw(st.integers(0, 2)) + 1)]
    system = ["system"] * draw(st.integers(0, 1))
    return [{"role": role, "content": draw(texts)} for role in system + turns]


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabularies")
    return {
        format: load_tokenizer(
            vocabularies.write(folder / format, kind, tokenizer_config={"chat_template": TEMPLATES[format]})
        )
        for format, kind in VOCABULARIES.items()
    }


@settings(max_examples=2)
@given(chat=chats())
def test_the_formats_are_those_of_the_templates(all_kinds, chat):
    for format, tokenizer in all_kinds.items():
        assert encode_chat(tokenizer, chat, format) == encode_chat(tokenizer, chat), format


@pytest.fixture(scope="module")
def others():
    return {
        format: vocabularies.with_tokens(template, tokens, bos="<bos>" if "<bos>" in tokens else "<s>")
        for format, (template, tokens) in OTHER_FORMATS.items()
    }


@settings(max_examples=2)
@given(chat=chats())
def test_other_formats_are_those_of_their_templates(others, chat):
    for format, tokenizer in others.items():
        assert encode_chat(tokenizer, chat, format) == encode_chat(tokenizer, chat), format


def test_llama2_is_metas_reference():
    """llama/generation.py: each exchange is encoded by itself, between bos and eos."""
    llama2 = vocabularies.published("llama2")[0]
    first = "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hello! [/INST] Hi. "
    expected = llama2.encode(first, eos=True) + llama2.encode("[INST] Once upon? [/INST]")
    assert encode_chat(llama2, CHAT, "llama2") == expected
    assert encode_chat(llama2, CHAT[1:2], "llama2") == llama2.encode("[INST] Hello! [/INST]")


def test_llama3_is_metas_reference():
    """llama3's tokenizer.py, ChatFormat: the header, two line breaks and the content are encoded one by one."""
    llama3 = vocabularies.published("llama3")[0]
    special = llama3.special_tokens
    expected = [special["<|begin_of_text|>"]]
    for message in [*CHAT, {"role": "assistant", "content": ""}]:
        expected += [
            special["<|start_header_id|>"],
            *llama3.encode(message["role"], bos=False),
            special["<|end_header_id|>"],
        ]
        expected += llama3.encode("\n\n", bos=False) + llama3.encode(message["content"].strip(), bos=False)
        expected += [special["<|eot_id|>"]]
    assert encode_chat(llama3, CHAT) == expected[:-1]


def special_of(tokenizer, ids):
    special = set(tokenizer.special_tokens.values())
    return [i for i in ids if i in special]


@pytest.fixture(scope="module")
def special_in_plain(all_kinds):
    """Those around a message without any: {(format, how)}."""
    plain = [{"role": "user", "content": "x"}]
    return {
        (format, how): special_of(tokenizer, encode_chat(tokenizer, plain, how))
        for format, tokenizer in all_kinds.items()
        for how in (format, "template")
    }


@settings(max_examples=3)
@given(text=TEXTS)
def test_special_tokens_in_a_message_are_text(all_kinds, special_in_plain, text):
    """Their number is the format's own, and the message comes out as it went in."""
    chat = [{"role": "user", "content": f"({text}</s><|eot_id|>)"}]
    for (format, how), wanted in special_in_plain.items():
        tokenizer = all_kinds[format]
        ids = encode_chat(tokenizer, chat, how)
        assert special_of(tokenizer, ids) == wanted
        if "▁" not in text:
            assert chat[0]["content"] in tokenizer.decode(ids), how


def test_the_end_that_only_the_template_knows(tmp_path):
    template = "{% for m in messages %}<|python_tag|>{{ m.role }}\n{{ m.content }}<|reserved_special_token_9|>\n{% endfor %}"
    tokenizer = load_tokenizer(vocabularies.write(tmp_path, "ranks", tokenizer_config={"chat_template": template}))
    assert set(reply_ends(tokenizer)) - set(tokenizer.stop_ids) == {tokenizer.special_tokens["<|reserved_special_token_9|>"]}


def test_which_format_auto_is(all_kinds, tmp_path):
    assert {resolve_format(tokenizer, "auto") for tokenizer in all_kinds.values()} == {"template"}
    ranks = load_tokenizer(vocabularies.write(tmp_path / "ranks", "ranks"))
    assert resolve_format(ranks, "auto") == "llama3"
    plain = load_tokenizer(vocabularies.write(tmp_path / "plain", "sentencepiece"))
    with pytest.raises(GenerationError, match=r"no chat template.*choose a format .--format.: chatml, gemma"):
        resolve_format(plain, "auto")
    with pytest.raises(GenerationError, match="no chat template; choose another"):
        resolve_format(plain, "template")
    with pytest.raises(GenerationError, match="format='alpaca' is not a chat format; choose auto, chatml"):
        resolve_format(plain, "alpaca")
    with pytest.raises(GenerationError, match=r"the format llama3 needs the token <\|begin_of_text\|>"):
        encode_chat(plain, CHAT, "llama3")


@pytest.mark.parametrize(
    ("messages", "format", "message"),
    [
        ([], "llama3", "at least one message"),
        ("Hello", "llama3", "must be a list"),
        ([{"role": "user"}], "llama3", "it must be an object with a role and a content"),
        (
            [{"role": "tool", "content": ""}],
            "llama3",
            "message 0 has the role 'tool'; in the format llama3 use system, user",
        ),
        (
            [{"role": "user", "content": "", "tool_calls": []}],
            "llama3",
            "message 0 has the field 'tool_calls', which the format",
        ),
        (CHAT[:3], "llama2", "the last message is from 'assistant'; the format llama2 needs one from 'user'"),
        ([CHAT[1], CHAT[1]], "llama2", "message 1 is from 'user'; the format llama2"),
        ([CHAT[1]], "gemma", "the format gemma needs the token <bos>"),
        ([CHAT[1], CHAT[1]], "template", "the checkpoint's chat template cannot be used here: roles must alternate"),
    ],
)
def test_what_is_no_chat_is_named(all_kinds, messages, format, message):
    tokenizer = all_kinds["llama3" if format == "llama3" else "llama2"]
    with pytest.raises(GenerationError, match=message):
        encode_chat(tokenizer, messages, format)


@pytest.mark.parity
@pytest.mark.parametrize("format", TEMPLATES)
def test_ids_are_transformers_own(all_kinds, format, tmp_path):
    from transformers import PreTrainedTokenizerFast

    kind = VOCABULARIES[format].replace("sentencepiece", "spaces")  # transformers would make a tokenizer.json of its own
    names = ("<|begin_of_text|>", "<|end_of_text|>") if kind == "bytes" else ("<s>", "</s>")
    settings = {"chat_template": TEMPLATES[format], "bos_token": names[0], "eos_token": names[1]}
    vocabularies.write(tmp_path, kind, tokenizer_config=settings)
    vocabularies.find_special_tokens_in_raw_text(tmp_path / "tokenizer.json")
    ours, theirs = load_tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)

    @given(chat=chats(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"))))
    def compare(chat):
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert encode_chat(ours, chat) == encode_chat(ours, chat, format) == expected

    compare()
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parity
@pytest.mark.parametrize(
    "name", sorted({*TOOL_TEMPLATES} - {"deepseek r1"})
)  # transformers 5 removes the null that it reads
def test_chats_with_tools_are_transformers_own(name, tmp_path):
    """In the form that the template reads; without tools as well."""
    from transformers import PreTrainedTokenizerFast

    template, _, tokens = TOOL_TEMPLATES[name]
    ours = vocabularies.with_tokens(template, tokens)
    ours.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tool = {
        "name": "now",
        "description": "The <time>.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    }
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "now", "arguments": {"zone": "Ü <s>\n"}}}
    system = [{"role": "system", "content": " Be brief. "}] if "'system'" in template else []
    chat = [*system, {"role": "user", "content": " When? "}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    chat += [{"role": "tool", "tool_call_id": "abcdefgh1", "content": 'It is "noon".\n'}]
    chat += [{"role": "assistant", "content": "Noon."}, {"role": "user", "content": "Thanks."}]
    for tools, messages in (((), [*system, *chat[-1:]]), ([{"type": "function", "function": tool}], chat)):
        form = message_form(ours, shared_renderer(os.getpid()), bool(tools))
        given, tools_shown = put_in_form(messages, tools, form, dialect_of(template))
        expected = theirs.apply_chat_template(given, tools=tools_shown or None, add_generation_prompt=True, tokenize=False)
        assert shown_text(ours, encode_chat(ours, messages, tools=tools)) == expected


def shown_text(tokenizer, ids):
    """The text of ids with the names of special tokens."""
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    return b"".join(names[i].encode() if i in names else tokenizer.token_bytes(i) for i in ids).decode()


@pytest.mark.parametrize("format", ["template", "llama3", "chatml", "gemma", "mistral", "plain"])
@pytest.mark.parametrize("begun", ["Once", "Once ", " Once upon\n", [{"type": "text", "text": "Once"}]])
def test_a_reply_continues_the_last_message(all_kinds, others, format, begun):
    """The prompt ends with the text that is begun, where the whole chat has it."""
    tokenizer = others.get(format, all_kinds["llama3"])
    chat = [*CHAT[:2], {"role": "assistant", "content": begun}]
    ids = encode_chat(tokenizer, chat, format, continue_final=True)
    text = begun if isinstance(begun, str) else "Once"
    whole = [*chat[:-1], {"role": "assistant", "content": text.rstrip() + "|"}]
    expected = tokenizer.decode(encode_chat(tokenizer, [*whole, CHAT[3]], format)).partition("|")[0]
    assert tokenizer.decode(ids).rstrip() == expected
    assert tokenizer.decode(ids)[len(expected) :] in ("", text[len(text.rstrip()) :])
    with pytest.raises(GenerationError, match="only a text of the assistant as the last message can be continued"):
        encode_chat(tokenizer, CHAT, format, continue_final=True)


def test_no_character_of_a_chat_marks_where_a_reply_continues(all_kinds):
    chat = [{"role": "user", "content": "a\uf8ff\ue000b"}, {"role": "assistant", "content": "Once"}]
    text = all_kinds["llama3"].decode(encode_chat(all_kinds["llama3"], chat, "llama3", continue_final=True))
    assert "a\uf8ff\ue000b" in text
    assert text.endswith("Once")


def test_a_chat_that_ends_with_the_assistant_gets_another_reply(all_kinds):
    tokenizer = all_kinds["llama3"]
    header = encode_chat(tokenizer, CHAT[1:2], "llama3")[-4:]
    for format in ("llama3", "template"):
        assert encode_chat(tokenizer, CHAT[:3], format)[-4:] == header


THINKING = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if thinking is defined and not thinking %}no thoughts{% endif %}{{ pad_token }}{{ image_token }}"
)


def test_variables_of_a_template(tmp_path):
    """Those of the caller, and the special tokens by their names."""
    named = {"chat_template": THINKING, "pad_token": "<pad>", "image_token": "<image>"}
    tokenizer = load_tokenizer(vocabularies.write(tmp_path, "bytes", tokenizer_config=named))
    ask = lambda **options: tokenizer.decode(encode_chat(tokenizer, CHAT[1:2], **options))
    assert ask() == ask(template_args={"thinking": True}) == "user:  Hello! \n<pad><image>"
    assert ask(template_args={"thinking": False}) == "user:  Hello! \nno thoughts<pad><image>"
    with closing(Renderer(template_args={"thinking": False})) as renderer:
        assert ask(renderer=renderer) == ask(template_args={"thinking": False})
    for wrong, message in (
        ({"think": 1}, "the model's chat template has no variable 'think'"),
        ({"messages": []}, "messages is set for every chat"),
    ):
        with pytest.raises(GenerationError, match=message):
            ask(template_args=wrong)
    with pytest.raises(GenerationError, match="the format llama3 has no arguments"):
        ask(format="llama3", template_args={"thinking": False})
    given = ["a=false", "b=x y", "c=[1]", "d=", "e=True"]
    assert parse_template_args(given) == {"a": False, "b": "x y", "c": [1], "d": "", "e": True}
    with pytest.raises(GenerationError, match="the template argument 'a' must be NAME=VALUE"):
        parse_template_args(["a"])


def test_a_template_in_place_of_the_models_own(all_kinds, tmp_path):
    """Its tokens are special, as if it had been with the vocabulary."""
    tokenizer = load_tokenizer(vocabularies.write(tmp_path, "spaces", tokenizer_config={"chat_template": ZEPHYR}))
    for before in (*all_kinds.values(), tokenizer):
        found = replace_chat_template(before, LLAMA_2)
        assert found.chat_template == LLAMA_2
        assert not found.chat_templates
        assert encode_chat(found, CHAT) == encode_chat(before, CHAT, "llama2")
