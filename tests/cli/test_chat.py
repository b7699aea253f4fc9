"""``llama-jax chat`` as a user meets it, and the parts that need no model."""

import contextlib
import os
import pty
import re
import signal
import subprocess
from dataclasses import replace

import make_goldens
import numpy as np
import pytest
import vocabularies
from commands import PROGRAM, environment, error_of, run_here
from conftest import write_hf_folder
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.cli.chat import fit_history, reply
from llama_jax.errors import GenerationError
from llama_jax.inference.decode import TokenChunk
from llama_jax.tokenizers import encode_chat, reply_ends

TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"


class Letters:
    """Each character of Latin-1 is a token, and there is a token after them that ends."""

    vocab_size = 257
    bos_id = eos_id = 256
    add_bos = True
    stop_ids = (256,)
    special_tokens = {"<end>": 256}  # noqa: RUF012
    chat_template = TEMPLATE
    chat_templates, named_tokens = {}, {}
    space_prefix = False

    def encode_parts(self, parts):
        return [i for part in parts for i in ([part] if isinstance(part, int) else part.encode("latin-1"))]

    def token_bytes(self, token):
        return bytes([token]) if token < 256 else b""


def turns(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.slow
@given(lengths=st.lists(st.integers(0, 30), max_size=9).filter(lambda some: len(some) % 2 == 1), room=st.integers(10, 200))
def test_the_oldest_exchanges_are_dropped_and_no_more_than_needed(lengths, room):
    system = [{"role": "system", "content": "S" * 5}]
    history = turns(*("x" * length for length in lengths))
    cost = [len(m["role"]) + 3 + len(m["content"]) for m in [*system, *history]]
    if cost[0] + cost[-1] > room:
        with pytest.raises(GenerationError, match=f"have {cost[0] + cost[-1]} tokens, but .* only {room};"):
            fit_history(Letters(), system, history, "template", room)
        return
    ids, kept = fit_history(Letters(), system, history, "template", room)
    assert len(ids) == cost[0] + sum(cost[len(cost) - len(kept) :]) <= room
    assert kept == history[len(history) - len(kept) :]
    assert (len(history) - len(kept)) % 2 == 0
    if len(kept) < len(history):
        assert len(ids) + sum(cost[len(cost) - len(kept) - 2 : len(cost) - len(kept)]) > room


def pieces(*texts):
    for text in texts:
        if callable(text):
            text()
            continue
        tokens = np.array([[*text.replace("#", "").encode("latin-1"), *[256] * ("#" in text)]], np.int32)
        yield TokenChunk(tokens, np.zeros(tokens.shape, np.float32), np.ones(tokens.shape, bool))


def test_a_reply_is_shown_until_its_end(capsys):
    assert reply(Letters(), pieces("H", "ello", " wor", "ld#"), (256,)) == "Hello world"
    assert capsys.readouterr() == ("Hello world\n", "")
    assert reply(Letters(), pieces("H", "ello"), (256,)) == "Hello"
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    assert "cut at 5 tokens" in err


def test_ctrl_c_stops_a_reply_and_keeps_what_was_said(capsys):
    before = signal.getsignal(signal.SIGINT)
    said = pieces("H", "ello", lambda: signal.raise_signal(signal.SIGINT), " wor", "ld", "#")
    assert reply(Letters(), said, (256,)) == "Hello wor"  # what comes as it is pressed is still shown
    out, err = capsys.readouterr()
    assert out == "Hello wor\n"
    assert err == "llama-jax: the reply was stopped\n"
    assert len(list(said)) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_twice_does_what_it_always_does():
    calls = []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append("ended"))
    try:
        twice = [lambda: signal.raise_signal(signal.SIGINT)] * 2
        reply(Letters(), pieces("H", *twice, "i"), (256,))
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == ["ended"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small random model with a vocabulary and a chat template."""
    config = replace(make_goldens.KINDS["gqa"], vocab_size=400, max_seq_len=256)
    folder = write_hf_folder(tmp_path_factory.mktemp("chat") / "model", config)
    return vocabularies.write(folder, "sentencepiece", tokenizer_config={"chat_template": TEMPLATE})


@pytest.fixture
def chat(model):
    def chat(lines, *arguments):
        return run_here("chat", "--model", model, "--temperature", 0, *arguments, lines=lines)

    return chat


def test_a_conversation(chat):
    lines = ["Hello", "", "Hello", "/clear", "Hello", "/clear", "/system Be kind.", "Hello", "/unknown", "/help", " /slash"]
    lines += ["x" * 300, "caf\udcff", "Hello", "/exit", "never read"]
    done = chat("\n".join(lines).encode(errors="surrogateescape"), "--max-new-tokens", 8, "--context", 100)
    err = done.stderr
    assert done.returncode == 0, err
    assert "format template · context 100 tokens" in err.splitlines()[0]
    replies = done.stdout.removesuffix("\n").split("\n")
    assert len(replies) == 6
    assert replies[0] == replies[2]  # the same history, greedily
    assert replies[0] != replies[1]
    assert replies[0] != replies[3]
    assert "error: /unknown is not a command; /help lists them" in err
    assert "/system TEXT" in err
    assert "error: the message and the system prompt have" in err
    assert "but the reply leaves only 92; shorten it" in err
    assert "error: the text is not valid Unicode" in err
    assert err.count("error") == 3
    shown = [line[2:] for line in err.splitlines() if line.startswith("> ")]  # what a terminal would have shown
    assert shown == [*lines[:12], r"caf\udcff", *lines[13:15]]


def test_a_template_from_a_file_and_its_variables(chat, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.content + mood + eos_token }}{% endfor %}")
    given = ("--chat-template", file, "--max-new-tokens", 1)
    done = chat(b"Hello\n", *given, "--template-arg", "mood=glad")
    assert done.returncode == 0, done.stderr
    assert "format template" in done.stderr
    assert "the model's chat template has no variable 'thinking'" in error_of(
        chat(b"", *given, "--template-arg", "thinking=1")
    )
    assert "does not use --chat-template" in error_of(chat(b"", "--chat-template", file, "--format", "zephyr"))
    for broken, reason in (
        ("{% for m in messages %}", "Unexpected end of template"),
        ("Hello", "does not appear in the prompt"),
    ):
        file.write_text(broken)
        assert reason in error_of(chat(b"", "--chat-template", file))


def test_plain_is_one_text_that_both_write():
    said = turns("Once", " upon a time.", "Then", ", at last")
    text = b"Be kind.\n\nOnce upon a time.\n\nThen, at last\n\nEnd"
    chat = [{"role": "system", "content": "Be kind."}, *said, *turns("End")]
    assert encode_chat(Letters(), chat, "plain") == [256, *text]
    assert reply_ends(Letters(), "plain") == (256,)

    class Spaced(Letters):
        space_prefix = True

    assert reply(Spaced(), pieces(" upon#"), (256,), at_start=False) == " upon"
    assert reply(Spaced(), pieces(" upon#"), (256,)) == "upon"


def test_any_model_goes_on_with_plain_text_and_a_draft_changes_none_of_it(chat):
    options = ["--format", "plain", "--max-new-tokens", 12]
    alone = chat(b"Once upon a time\n", *options)
    plain, drafted = (chat(b"Once upon a time\nThen\n", *options, *more) for more in ((), ("--draft", "prompt:3")))
    assert "format plain" in plain.stderr.splitlines()[0]
    assert plain.stdout.startswith(alone.stdout)
    assert len(plain.stdout) > len(alone.stdout)
    assert drafted.stdout == plain.stdout
    assert re.search(r"llama-jax: [\d.]+ tokens per pass, \d+ of \d+ drafted tokens accepted", drafted.stderr)
    assert "tokens per pass" not in plain.stderr


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(b"/exit\n", 0, marks=pytest.mark.slow),
        pytest.param(b"\x04", 0, marks=pytest.mark.slow),
        (signal.SIGINT, 130),
    ],
)
def test_in_a_terminal(model, end, code):
    ours, theirs = pty.openpty()
    arguments = [*PROGRAM, "chat", "--model", str(model), "--max-new-tokens", "3"]
    with subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment()) as process:
        os.close(theirs)
        seen = b""
        while not seen.endswith(b"> "):
            seen += os.read(ours, 1000)
        if isinstance(end, bytes):
            os.write(ours, end)
        else:
            process.send_signal(end)
            with contextlib.suppress(OSError):
                os.write(ours, b"\n")  # Python looks for signals as it reads: this one may have come just before
        assert b"Traceback" not in process.stderr.read()
    os.close(ours)
    assert process.returncode == code
