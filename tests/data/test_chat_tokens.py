"""Chats and preferences as corpora with targets."""

import json

import pytest
import vocabularies
from byte_tokenizer import BOS, EOS, ByteTokenizer

from llama_jax.data import ChatReading, DataError, open_chats, open_preferences
from llama_jax.data.chat_tokens import open_labeled
from llama_jax.data.preference_batches import prompts_of
from llama_jax.data.rl_prompts import open_prompts
from llama_jax.errors import GenerationError
from llama_jax.tokenizers import encode_chat, load_tokenizer

PAIRS = [("Once", " upon a time"), ("The", " old llama"), ("It", " slept.")]


class Tokenizer(ByteTokenizer):
    """With the parts that chats need."""

    chat_template = None
    stop_ids = (EOS,)

    def encode_parts(self, parts):
        return [token for part in parts for token in (self.encode(part, bos=False) if isinstance(part, str) else [part])]


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    return load_tokenizer(vocabularies.write(tmp_path_factory.mktemp("v"), "bytes"))


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def pairs(tmp_path):
    return written(tmp_path / "pairs.jsonl", [{"prompt": p, "completion": c} for p, c in PAIRS])


def test_pairs_become_documents_with_targets(pairs):
    corpus, counts = open_chats(pairs, Tokenizer(), 64)
    for number, (prompt, completion) in enumerate(PAIRS):
        ids = corpus.document(number)
        assert ids.tolist() == [BOS, *(prompt + completion).encode(), EOS]
        targets = corpus.targets[corpus.starts[number] : corpus.stops[number]]
        assert ids[targets].tolist() == [*completion.encode(), EOS]
        assert corpus.byte_counts[number] == len(completion)
    assert (counts.read, counts.kept, counts.without_targets, counts.too_long, counts.cut) == (3, 3, 0, 0, 0)
    assert (counts.tokens, counts.targets, counts.longest) == (len(corpus.tokens), corpus.targets.sum(), 18)
    assert "3 of 3 examples" in str(counts)
    again = open_chats([pairs], Tokenizer(), 64).corpus
    assert again.digest == corpus.digest
    assert open_chats([pairs], Tokenizer(), 11).corpus.digest != corpus.digest


def test_what_is_too_long_is_cut_or_dropped_and_counted(pairs, tmp_path):
    written(pairs, [{"prompt": "x" * 20, "completion": "y"}, *(json.loads(line) for line in pairs.read_text().splitlines())])
    corpus, counts = open_chats(pairs, Tokenizer(), 11)
    assert (counts.read, counts.kept, counts.without_targets, counts.cut, counts.longest) == (4, 3, 1, 2, 23)
    assert (corpus.stops - corpus.starts).tolist() == [12, 12, 11]
    corpus, counts = open_chats(pairs, Tokenizer(), 11, ChatReading(too_long="drop"))
    assert (counts.kept, counts.without_targets, counts.too_long, counts.cut) == (1, 0, 3, 0)
    assert corpus.document_count == 1


def test_a_corpus_without_a_target_is_refused(tmp_path, llama3):
    path = written(tmp_path / "a.jsonl", [{"prompt": "x" * 20, "completion": "y"}])
    with pytest.raises(DataError, match=r"a\.jsonl: no example has a target \(0 of 1 examples.*1 dropped without a target"):
        open_chats(path, Tokenizer(), 11)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}"
    marked = vocabularies.write(tmp_path / "v", "bytes", tokenizer_config={"chat_template": template})
    chats = written(tmp_path / "b.jsonl", [{"instruction": "a", "output": "b"}])
    with pytest.raises(DataError, match=r"no example has a target.*does \{% generation %\} in the chat template enclose"):
        open_chats(chats, load_tokenizer(marked), 64)
    with pytest.raises(DataError, match="is empty"):
        open_chats(written(tmp_path / "c.jsonl", []), llama3, 64)


def test_a_reply_that_never_learns_to_end_is_warned_of(tmp_path, pairs, llama3):
    with pytest.warns(UserWarning, match=r"no target is a token that ends a reply \(ids 257\)"):
        open_chats(pairs, Tokenizer(), 6)
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|eot_id|>{% endfor %}"
    marked = vocabularies.write(tmp_path / "v", "bytes", tokenizer_config={"chat_template": template})
    chats = written(tmp_path / "b.jsonl", [{"instruction": "a", "output": "b"}])
    with pytest.warns(UserWarning, match=r"never ends one; put the end of a turn into \{% generation %\}"):
        open_chats(chats, load_tokenizer(marked), 64)


def test_special_tokens_in_texts_are_text_and_warned_of(tmp_path, llama3):
    rendered = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    path = written(tmp_path / "a.jsonl", [{"prompt": rendered, "completion": "Hello<|end_of_text|>"}])
    with pytest.warns(UserWarning, match=r"a\.jsonl, line 1: '<\|begin_of_text\|>' is a special token.*special=True"):
        corpus = open_chats(path, llama3, 256).corpus
    special = set(llama3.special_tokens.values())
    assert [i for i in corpus.tokens.tolist() if i in special] == [llama3.bos_id, llama3.eos_id]
    corpus = open_chats(path, llama3, 256, ChatReading(special=True)).corpus
    assert corpus.tokens.tolist() == llama3.encode(rendered + "Hello<|end_of_text|>", bos=False, special=True)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "spaces"])
@pytest.mark.parametrize("is_chat", [False, True])
def test_every_recipe_has_the_tokens_of_a_prompt_with_which_generation_begins(tmp_path, kind, is_chat):
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + (eos_token if m.role == 'assistant' else ' ') }}{% endfor %}"
    )
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer = load_tokenizer(vocabularies.write(tmp_path / "v", kind, tokenizer_config={"chat_template": template}))
    prompt, answers = "Is it so? Answer: ", ["on a time", "42", "\nHello"]
    if is_chat:
        prompt = [{"role": "user", "content": "once upon"}]
        answers = [[{"role": "assistant", "content": answer}] for answer in answers]
    expected = encode_chat(tokenizer, prompt) if is_chat else tokenizer.encode(prompt, eos=False)
    lines = [{"prompt": prompt, "chosen": answers[0], "rejected": answer} for answer in answers[1:]]
    preferences = open_preferences(written(tmp_path / "dpo.jsonl", lines), tokenizer, 99)
    examples = [{"prompt": prompt, "completion": answer} for answer in answers]
    chats = open_chats(written(tmp_path / "sft.jsonl", examples), tokenizer, 99)
    judged = [{**example, "label": True} for example in examples]
    labeled = open_labeled(written(tmp_path / "kto.jsonl", judged), tokenizer, 99)
    for corpus in (preferences.chosen, preferences.rejected, chats.corpus, labeled.answers):
        prompts = prompts_of(corpus)
        assert [prompts.document(number).tolist() for number in range(corpus.document_count)] == [
            expected for _ in range(corpus.document_count)
        ]
    assert open_prompts(written(tmp_path / "grpo.jsonl", [{"prompt": prompt}]), tokenizer, 99).ids == (tuple(expected),)


def test_errors_of_the_encoding_name_the_line(tmp_path, pairs, llama3):
    path = written(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "\ud800"}])
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: .*lone surrogate"):
        open_chats(path, llama3, 64)
    tools = written(tmp_path / "b.jsonl", [{"messages": [{"role": "assistant", "content": ""}], "tools": [{}]}])
    with pytest.raises(DataError, match=r"b\.jsonl, line 1: the model.s chat format does not support tools"):
        open_chats(tools, llama3, 64)
    with pytest.raises(ValueError, match=r"^the model has no chat template"):
        open_chats(written(tools, [{"instruction": "a", "output": "b"}]), Tokenizer(), 64)
    with pytest.raises(DataError, match=r"a\.txt has no chats or other examples; use files that end in \.jsonl, \.json"):
        open_chats(written(tmp_path / "a.txt", [1]), llama3, 64)
    with pytest.raises(DataError, match="is `length` large enough"):
        open_chats(pairs, llama3, 0)
    with pytest.raises(DataError, match="too_long='fold' must be one of cut, drop"):
        ChatReading(too_long="fold")


def test_variables_of_the_template(tmp_path):
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% if thinking %}!{% endif %}{% endfor %}"
    tokenizer = vocabularies.with_tokens(template, ())
    file = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps({"messages": chat}) + "\n")
    plain, thinking = (
        open_chats(file, tokenizer, 100, ChatReading(template_args=given)).corpus for given in ((), ("thinking=true",))
    )
    assert thinking.tokens.tolist() != plain.tokens.tolist()
    with pytest.raises(DataError, match=r"the model.s chat template has no variable 'think'"):
        open_chats(file, tokenizer, 100, ChatReading(template_args=("think=1",)))
    with pytest.raises(GenerationError, match="must be NAME=VALUE"):
        ChatReading(template_args=("thinking",))
