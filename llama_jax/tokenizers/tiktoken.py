"""Llama 3's vocabulary as published by Meta: a rank file with one "base64 rank" per line, run by tiktoken."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from llama_jax.errors import TokenizerError, short_repr
from llama_jax.tokenizers.interface import (
    PartsTokenizer,
    TextPart,
    check_text,
    ending_ids,
    library_errors,
)
from llama_jax.tokenizers.tokenizer_config import Settings, write_settings

# Llama 3's pre-tokenizer pattern (Meta's tokenizer.py and every tokenizer.json of Llama 3).
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The 256 ids after the ranks, with the names in llama-models. Llama 3.0 and the tokenizer.json of 3.1 number their
# reserved tokens differently and have some of these as reserved, but every name that all of them use has the same id.
SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
    *(f"<|reserved_special_token_{n}|>" for n in range(2, 246)),
)
# The pattern's lookahead overflows the stack on about a million spaces, so long texts are split as in Meta's code.
MAX_TEXT = 400_000
MAX_RUN = 25_000  # maximum run of only white space, or without white space, in characters
LONG_RUN = re.compile(rf"(?<!\s)\s{{{MAX_RUN + 1},}}|(?<!\S)\S{{{MAX_RUN + 1},}}")
MAX_RANKS = 1 << 18  # twice Llama 3's; each line takes at least 100 bytes of memory
RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def is_rank_file(start: bytes) -> bool:
    """Whether a file begins with a line of a rank file."""
    return RANK_LINE.match(start) is not None


class TiktokenTokenizer(PartsTokenizer):
    """A rank file of Llama 3, with the published special tokens after its ranks."""

    def __init__(self, ranks: bytes, where: str, settings: Settings = Settings()) -> None:
        """Load the ranks (the content of the rank file `where`)."""
        import tiktoken

        self._bytes = read_ranks(ranks, where)
        self.vocab_size = len(self._bytes) + len(SPECIAL_TOKENS)
        self.space_prefix = False
        self.special_tokens = {name: len(self._bytes) + n for n, name in enumerate(SPECIAL_TOKENS)}
        with library_errors(f"{where} cannot be used as ranks"):
            self._encoding = tiktoken.Encoding(
                where,
                pat_str=LLAMA3_SPLIT,
                mergeable_ranks={token: rank for rank, token in enumerate(self._bytes)},
                special_tokens=self.special_tokens,
            )
        self.bos_id = self.special_tokens.get(settings.bos_token or "", self.special_tokens["<|begin_of_text|>"])
        self.eos_id = self.special_tokens.get(settings.eos_token or "", self.special_tokens["<|end_of_text|>"])
        self.add_bos = settings.add_bos is not False and self.bos_id >= 0
        self.add_eos = settings.add_eos is True and self.eos_id >= 0
        self.stop_ids = ending_ids(self, settings.stop_ids, complete=settings.all_stop_ids)
        self.chat_template = settings.chat_template
        self.chat_templates, self.named_tokens = settings.chat_templates, settings.tokens_by_name
        self.settings = settings

    def encode_parts(self, parts: Sequence[TextPart]) -> list[int]:
        """Ids of texts and special tokens."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                check_text(part)
                for piece in split_long_text(part):
                    ids += self._encoding.encode_ordinary(piece)
            else:
                ids.append(part)
        return ids

    def _token_bytes(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def save(self, folder: Path) -> None:
        """Write the ranks as ``tokenizer.model``, and files with the settings."""
        lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self._bytes))
        (folder / "tokenizer.model").write_bytes(b"".join(lines))
        write_settings(folder, self, self.settings, "PreTrainedTokenizerFast")

    def ranks(self) -> list[bytes]:
        """The tokens except special ones, by id."""
        return list(self._bytes)


def read_ranks(content: bytes, where: str) -> list[bytes]:
    """The tokens of a rank file by rank."""
    ranks: dict[int, bytes] = {}
    if content.count(b"\n") > MAX_RANKS:
        _refuse_ranks(where, f"it has over {MAX_RANKS} lines")
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            key, value = int(rank), base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error):
            _refuse_ranks(where, f"line {number} is {short_repr(line, 40)}, not a token in base64 and its rank")
        if not 0 <= key < MAX_RANKS:  # larger ones can be chosen so that their hashes collide
            _refuse_ranks(where, f"line {number} has a rank that is not from 0 to {MAX_RANKS - 1}")
        if key in ranks or not value:
            _refuse_ranks(where, f"line {number} repeats rank {key}" if value else f"line {number} has an empty token")
        ranks[key] = value
    tokens = [ranks[rank] for rank in sorted(ranks)]
    missing = next((rank for rank in range(len(ranks)) if rank not in ranks), None)
    if missing is not None:
        _refuse_ranks(where, f"rank {missing} is missing")
    known = set(tokens)
    if len(known) != len(tokens):
        _refuse_ranks(where, "it has duplicate tokens")
    absent = next((byte for byte in range(256) if bytes([byte]) not in known), None)
    if absent is not None:
        _refuse_ranks(where, f"the byte {absent} has no rank, so not every text could be encoded")
    return tokens


def _refuse_ranks(where: str, reason: str) -> NoReturn:
    raise TokenizerError(f"{where} is not a whole rank file of Llama 3: {reason}; copy it again") from None


def derive_merges(tokens: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pair from which each token is merged, in the order of ranks; tokens that are not results of merges have none."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    pairs = []
    for token, limit in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            rank, at = min((ranks.get(a + b, limit), i) for i, (a, b) in enumerate(pairwise(parts)))
            if rank >= limit:
                break
            parts[at : at + 2] = [tokens[rank]]
        if len(parts) == 2:
            pairs.append((parts[0], parts[1]))
    return pairs


def split_long_text(text: str) -> Iterator[str]:
    """The text in pieces that tiktoken can encode: at most MAX_TEXT characters, and no run over MAX_RUN."""
    for start in range(0, len(text), MAX_TEXT):
        block = text[start : start + MAX_TEXT]
        end = 0
        for run in LONG_RUN.finditer(block):
            for at in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield block[end:at]
                end = at
        yield block[end:]
