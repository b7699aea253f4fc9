"""Text to token ids and back, and chats to token ids. Tokenizer libraries are imported when a vocabulary is loaded.

A missing, damaged or unsupported file raises a `TokenizerError` of one line, which names the file and the remedy.
"""

from llama_jax.tokenizers.chat import Format, Message, encode_chat, reply_ends, resolve_format, takes_tools
from llama_jax.tokenizers.chat_targets import EncodedExample, ReplyEncoder
from llama_jax.tokenizers.huggingface import HuggingFaceTokenizer
from llama_jax.tokenizers.interface import TextPart, TextStream, Tokenizer
from llama_jax.tokenizers.load import find_tokenizer, load_tokenizer, replace_chat_template
from llama_jax.tokenizers.sentencepiece import SentencePieceTokenizer
from llama_jax.tokenizers.tiktoken import TiktokenTokenizer

__all__ = [
    "EncodedExample",
    "Format",
    "HuggingFaceTokenizer",
    "Message",
    "ReplyEncoder",
    "SentencePieceTokenizer",
    "TextPart",
    "TextStream",
    "TiktokenTokenizer",
    "Tokenizer",
    "encode_chat",
    "find_tokenizer",
    "load_tokenizer",
    "replace_chat_template",
    "reply_ends",
    "resolve_format",
    "takes_tools",
]
