"""SentencePiece vocabularies: Llama 1 and 2, TinyLlama, llama2.c's stories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from llama_jax.errors import TokenizerError

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how a vocabulary spells a space


class SentencePieceTokenizer:
    """A SentencePiece ``.model`` file."""

    def __init__(self, path: Path) -> None:
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(path.read_bytes())
            if self._processor.GetPieceSize() < 1:
                raise RuntimeError("it has no pieces")
            if self._processor.bos_id() >= 0:
                self._processor.EncodeAsIds("", add_bos=True)
            self._bytes = [self._piece_bytes(token) for token in range(self._processor.GetPieceSize())]
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:100] or "damaged"
            raise TokenizerError(f"{path} is not a whole SentencePiece model ({reason}); copy it again") from None

    @property
    def vocab_size(self) -> int:
        return self._processor.GetPieceSize()

    @property
    def bos_id(self) -> int:
        return self._processor.bos_id()

    @property
    def eos_id(self) -> int:
        return self._processor.eos_id()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a text: end of sequence, and the beginning of another; for `generate(stop_tokens=...)`."""
        return tuple(sorted(i for i in {self.bos_id, self.eos_id} if i >= 0))

    def encode(self, text: str, bos: bool = True, eos: bool = False) -> list[int]:
        """Ids of the text, with the begin-of-sequence token before and the end-of-sequence token behind if asked for."""
        return self._processor.EncodeAsIds(text, add_bos=bos, add_eos=eos)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without a leading space: to continue a prompt, decode both together."""
        self._check(*ids)
        return self._processor.DecodeIds(list(map(int, ids)))

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 that a token adds behind others; it may begin or end inside a character."""
        self._check(token)
        return self._bytes[token]

    def _piece_bytes(self, token: int) -> bytes:
        if self._processor.IsControl(token):
            return b""
        if self._processor.IsUnknown(token):
            return " \N{DOUBLE QUESTION MARK} ".encode()  # what SentencePiece itself decodes it to
        piece = self._processor.IdToPiece(token)
        if self._processor.IsByte(token):
            return bytes([int(piece[1:-1], 16)])  # "<0x0A>"
        return piece.replace(SPACE, " ").encode()

    def _check(self, *ids: int) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise TokenizerError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
