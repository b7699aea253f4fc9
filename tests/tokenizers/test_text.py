"""Text as it comes, ended by stop strings."""

import pytest

from llama_jax.tokenizers.interface import Text


class Letters:
    """Each token is the letter of its number."""

    vocab_size = 256

    def token_bytes(self, token):
        return bytes([token])


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("hello world", ("wor",), "hello "),
        ("aab", ("ab",), "a"),
        ("aaab aab", ("aab",), "a"),
        ("abcabd", ("abd",), "abc"),
        ("no end", ("x", "yz"), "no end"),
        ("one two", ("two", "on"), ""),
        ("almos", ("almost",), "almos"),
        (b"cut \xf0\x9f".decode("latin-1"), ("\ufffd",), "cut "),
    ],
)
def test_stop_strings_across_tokens(text, stop, shown):
    written = []
    out = Text(Letters(), stop, written.append)
    for letter in text.encode("latin-1"):
        if out.push(letter):
            break
    out.finish()
    assert out.shown == "".join(written) == shown
