"""New vocabularies, made from text or from nothing."""

from __future__ import annotations

import io
from collections.abc import Iterable

from llama_jax.errors import TokenizerError
from llama_jax.tokenizers.base import library_errors
from llama_jax.tokenizers.sentencepiece import Entry, EntryKind, SentencePieceTokenizer, write_model

BYTE_VOCABULARY = 259  # <unk>, <s>, </s> and every byte
LARGEST_VOCABULARY = 1 << 20  # four times the largest in use; the trainers reserve memory for all of it
LONGEST_LINE = 4000  # bytes; SentencePiece leaves out longer ones


def byte_tokenizer() -> SentencePieceTokenizer:
    """A token for every byte: nothing to learn, and no text that it does not know."""
    bytes_ = [Entry(f"<0x{byte:02X}>", 0.0, EntryKind.BYTE) for byte in range(256)]
    model = write_model([*_special(), *bytes_], bos="<s>", eos="</s>", space_prefix=False, spell_spaces=False)
    return SentencePieceTokenizer(model, "the byte vocabulary")


def train_bpe(texts: Iterable[str], size: int) -> SentencePieceTokenizer:
    """A byte-pair encoding of `texts` in the manner of Llama 2: spaces begin words, digits stand alone, and bytes stand for
    what is not in the vocabulary (Touvron et al. 2023, section 2.1).

    Args:
      size: V at most; a short text gives fewer.

    Raises:
      TokenizerError: a size below 300 or above `LARGEST_VOCABULARY`, or a text from which nothing can be learnt.
    """
    import sentencepiece

    if size < 300:
        raise TokenizerError(f"vocab_size={size} must be at least 300 for BPE: 259 are bytes and special tokens")
    if size > LARGEST_VOCABULARY:
        raise TokenizerError(f"vocab_size={size} must be at most {LARGEST_VOCABULARY}")
    model = io.BytesIO()
    lines = (line[start : start + LONGEST_LINE // 4] for text in texts for line in _lines(text) for start in _starts(line))
    with library_errors("the text gives no vocabulary", "give more text, or a smaller vocab_size"):
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=size,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            hard_vocab_limit=False,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            # Not threads by the number of cores: the same text gives the same vocabulary everywhere.
            num_threads=4,
            minloglevel=2,
        )
    return SentencePieceTokenizer(model.getvalue(), "the new vocabulary")


def _special() -> list[Entry]:
    return [
        Entry("<unk>", 0.0, EntryKind.UNKNOWN),
        Entry("<s>", 0.0, EntryKind.CONTROL),
        Entry("</s>", 0.0, EntryKind.CONTROL),
    ]


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]


def _starts(line: str) -> range:
    return range(0, len(line), LONGEST_LINE // 4)  # a character has at most 4 bytes
