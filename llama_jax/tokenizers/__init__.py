"""Text to token ids and back."""

from llama_jax.tokenizers.base import TextStream, Tokenizer
from llama_jax.tokenizers.load import find_tokenizer, load_tokenizer
from llama_jax.tokenizers.sentencepiece import SentencePieceTokenizer

__all__ = ["SentencePieceTokenizer", "TextStream", "Tokenizer", "find_tokenizer", "load_tokenizer"]
