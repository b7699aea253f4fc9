"""What a grammar allows, token by token."""

import json
import re
from contextlib import closing

import numpy as np
import pytest
import vocabularies
from fakes import BYTES, ids

from llama_jax.errors import UserError
from llama_jax.serving.grammar import Grammars
from llama_jax.tokenizers import load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
END = BYTES.eos_id


@pytest.fixture(scope="module")
def grammars():
    pytest.importorskip("llguidance")
    with closing(Grammars(BYTES, 300, (END,))) as found:  # a model's table is longer than its vocabulary
        yield found


def allowed(constraint):
    mask = constraint.allowed()
    assert mask.dtype == np.uint32
    assert mask.shape == (10,)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def walk(constraint, seed, most=200):
    """What choosing at random among the allowed tokens gives."""
    random, text = np.random.default_rng(seed), b""
    for _ in range(most):
        choices = allowed(constraint)
        assert choices
        assert max(choices) < BYTES.vocab_size
        token = int(random.choice(sorted(choices)))
        if token == END:
            return text.decode()
        text += BYTES.token_bytes(token)
        constraint.accept(token)
    raise AssertionError("no end")


def test_tokens_without_a_row_are_never_allowed(grammars):
    """A vocabulary with more tokens than the model has rows, of which the last are not a whole word of the mask."""
    rows = ids("j")[0] + 1
    with closing(Grammars(BYTES, rows, (END, rows + 1))) as few:
        mask = few.regex("[a-z]").allowed()
        assert mask.shape == (-(-rows // 32),)
        assert set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))) == set(ids("abcdefghij"))
        constraint = few.regex("az")
        constraint.accept(ids("a")[0])
        assert np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little").nonzero()[0].tolist() == [END]
    with closing(Grammars(BYTES, rows, (rows + 1,))) as endless, pytest.raises(UserError, match="end-of-sequence"):
        endless.regex("a")


def test_whatever_is_allowed_follows_the_schema(grammars):
    first = grammars.json_schema(SCHEMA)
    for seed in range(10):
        found = json.loads(walk(first.copy(), seed))
        assert set(found) == {"name", "age"}
        assert len(found["name"]) <= 4
        assert 0 <= found["age"] <= 99
    assert first.error is None


@pytest.mark.parametrize("kind", sorted(vocabularies.KINDS))
def test_what_a_grammar_forces_is_text_of_every_vocabulary(kind, tmp_path):
    """Also where encoding puts a space before a text: a grammar's text begins without."""
    pytest.importorskip("llguidance")
    tokenizer = load_tokenizer(vocabularies.write(tmp_path / kind, kind))
    with closing(Grammars(tokenizer, tokenizer.vocab_size, tokenizer.stop_ids)) as grammars:
        constraint = grammars.regex("Hello [a-c]{2} world, día")
    text = b""
    for _ in range(60):
        mask = constraint.allowed()
        choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if set(choices) <= set(tokenizer.stop_ids):
            break
        text += tokenizer.token_bytes(choices[0])
        constraint.accept(choices[0])
        assert constraint.error is None
    assert re.fullmatch("Hello [a-c]{2} world, día", text.decode())


def test_what_does_not_follow_ends_the_text_with_a_reason(grammars):
    constraint = grammars.regex("a+")
    constraint.accept(ids("b")[0])
    assert constraint.error is not None
    assert allowed(constraint) == {END}
    constraint.accept(ids("b")[0])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda g: g.json_schema({"type": "nonsense"}), "the JSON schema cannot be used: "),
        (lambda g: g.json_schema({"$ref": "#/nowhere"}), "the JSON schema cannot be used: "),
        (lambda g: g.json_schema({"type": "string", "pattern": "("}), "the JSON schema cannot be used: "),
        (lambda g: g.regex(r"a[^\s\S]"), "the regular expression allows no text; relax it"),
        (lambda g: g.json_schema({"enum": []}), r"the JSON schema allows no text \(anyOf is empty\); relax it"),
        (lambda g: g.json_schema({"type": "string", "pattern": "^a{5}$", "maxLength": 3}), "allows no text .*; relax it"),
        (lambda g: g.regex("a?" * 50_000), "the regular expression has too many states"),
        (
            lambda g: g.regex("(a{1000}){1000}"),
            r"the regular expression has too many states \(.*\); use fewer or smaller rep",
        ),
    ],
)
def test_grammars_that_cannot_be_used(grammars, make, said):
    with pytest.raises(UserError, match=said):
        make(grammars)


def test_what_compiles_for_minutes_is_ended(monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr("llama_jax.serving.grammar_check.GRAMMAR_SECONDS", 1)
    with closing(Grammars(BYTES, 300, (END,))) as grammars:
        with pytest.raises(UserError, match="takes over 1 s or 256 MB to compile; use fewer or smaller rep"):
            grammars.json_schema({"type": "integer", "multipleOf": 9999991})
        assert allowed(grammars.regex("a?")) == {*ids("a"), END}
