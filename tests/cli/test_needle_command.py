"""`llama-jax needle` as a user meets it."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
from conftest import params_of
from make_goldens import KINDS, random_tensors

from llama_jax.cli.needle import Needle
from llama_jax.config import RopeScaling
from llama_jax.errors import UserError
from llama_jax.formats.saving import save
from llama_jax.tokenizers.making import BYTE_VOCABULARY, byte_tokenizer

CONFIG = replace(KINDS["gqa"], vocab_size=BYTE_VOCABULARY, max_seq_len=40)
TEXT = "The park was big. She loved to play outside.<|endoftext|>Once upon a time, there was a girl named Lily."
SHORT = ("--statement", "No {key}!", "--question", "No {key}", "--digits", 2, "--wrong-keys", 1, "--trials", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model of bytes that knows nothing."""
    folder = tmp_path_factory.mktemp("needle") / "model"
    save(folder, CONFIG, params_of(CONFIG, random_tensors(CONFIG)), byte_tokenizer())
    return folder


@pytest.fixture
def run(calling):
    return partial(calling, Needle)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.slow
def test_a_page_and_a_picture_beyond_the_context(run, model, text, tmp_path):
    picture = tmp_path / "needle.png"
    out, err = run(model, "--data", text, "--lengths", 48, "--depths", "0.5,0", "--plot", picture, *SHORT)
    first, *tables, note = out.rstrip("\n").split("\n\n")
    assert first == str(model)
    assert [table.splitlines()[0] for table in tables] == [
        "key preferred to 1 wrong ones (50% by chance)",
        "log-probability above that of the wrong ones, nats (0 by chance)",
        "key written exactly by greedy decoding",
    ]
    for table in tables:
        assert [line.split()[0] for line in table.splitlines()[1:]] == ["depth", "0%", "50%", "all"]
        assert table.splitlines()[1].split() == ["depth", "48"]
    assert note == "48: beyond the model's context of 40."
    assert err.splitlines()[0].startswith("llama-jax: 48: beyond the model's context of 40 tokens")
    assert "tokens/s" in err.splitlines()[-1]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_as_json_with_a_seed(run, model, text):
    arguments = model, "--data", text, "--lengths", "48", "--depths", "1", "--json", *SHORT
    plain, again, other = (
        json.loads(run(*arguments, *more)[0], parse_constant=pytest.fail) for more in ((), (), ("--seed", 1))
    )
    assert (plain["context"], plain["rope"], plain["lengths"], plain["depths"]) == (40, None, [48], [1.0])
    assert (plain["wrong_keys"], plain["seed"], plain["trials"]) == (1, 0, 2)
    (cell,) = plain["cells"]
    assert cell.keys() == {"length", "depth", "trials", "exact", "chosen", "rank", "log_probability", "margin"}
    assert [cell] == again["cells"] != other["cells"]
    assert all(map(math.isfinite, cell.values()))


def test_what_the_model_is_asked(run, model, text, monkeypatch):
    """The rope scaling, and lengths from the context that it gives; the haystack without the ends of its documents."""

    def needle(config, params, tokenizer, haystack, **given):
        assert config.rope_scaling == RopeScaling("yarn", 4, original_max_seq_len=40)
        assert given["lengths"] == (40, 80, 160)
        assert tokenizer.decode(haystack.tolist()) == TEXT.replace("<|endoftext|>", "") * 2
        raise UserError("seen")

    monkeypatch.setattr("llama_jax.runs.needle.needle", needle)
    text.write_text("<|endoftext|>".join([TEXT] * 2))
    with pytest.raises(UserError, match="seen"):
        run(model, "--data", text, *SHORT, "--rope", "yarn:4")


def test_default_lengths_are_those_of_the_model(run, model, text):
    with pytest.raises(UserError, match=r"length=10 leaves no haystack beside needle and question, which take 14 tokens"):
        run(model, "--data", text, *SHORT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "24,x"], r"lengths='24,x' has 'x' where a number is needed, as in 256,512,1024"),
        (["--depths", "0,"], r"depths='0,' has '' where a number is needed"),
        (["--lengths", "24", "--depths", "2"], r"depth=2.0 must be from 0"),
        (["--lengths", "200"], r"length=200 needs a haystack of as many tokens, and this one has \d+; give a longer text"),
        (["--lengths", "24", "--plot", "a.gif"], r"plot=a.gif must end in .png, .pdf, .svg"),
        (["--lengths", "24", "--plot", "nowhere/a.png"], r"plot=nowhere/a.png: there is no folder nowhere; make it"),
        (["--lengths", "24", "--rope", "alibi:2"], r"rope='alibi:2' must be none, or KIND:FACTOR"),
        (["--max-documents", "0"], r"max_documents=0 must be at least 1"),
    ],
)
def test_mistakes(run, model, text, monkeypatch, arguments, message):
    monkeypatch.setattr("llama_jax.formats.loading.load", pytest.fail)  # they come before the model is read
    with pytest.raises(UserError, match=message):
        run(model, "--data", text, *SHORT, *arguments)


def test_a_model_that_overflows(run, text, tmp_path):
    params = params_of(CONFIG, random_tensors(CONFIG))
    huge = params.replace(lm_head=params.lm_head * 1e20, final_norm=params.final_norm * 1e20)
    save(tmp_path / "huge", CONFIG, huge, byte_tokenizer())
    with pytest.raises(UserError, match=r"the log-probability at length=48 is (nan|-inf): .* not finite; try --dtype"):
        run(tmp_path / "huge", "--data", text, *SHORT, "--lengths", "48", "--depths", "0")
