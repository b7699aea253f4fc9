"""Chats and prompts with their answers as training data: ids, and which of them the assistant says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from types import TracebackType
from typing import Any, NamedTuple

from llama_jax.errors import GenerationError, TokenizerError
from llama_jax.tokenizers.chat import (
    Format,
    Message,
    chat_parts,
    check_messages,
    encode_chat,
    reply_ends,
    resolve_format,
    takes_tools,
    template_parts,
)
from llama_jax.tokenizers.chat_template import Renderer
from llama_jax.tokenizers.interface import Part, Tokenizer, split_special

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Spans = list[tuple[Part, bool]]  # texts and special tokens, and of each whether the assistant says it


class Taught(NamedTuple):
    """A text as a model is taught it.

    Attributes:
      ids: its tokens.
      targets: as many; whether each is to be predicted.
    """

    ids: list[int]
    targets: list[bool]


class ReplyEncoder:
    """Encodes chat after chat for training, with one process for the checkpoint's template: to be used in a `with`.

    What the assistant says is known in one of two ways. A template encloses it in ``{% generation %}``, as transformers'
    `return_assistant_tokens_mask` asks for; else, as in the built-in formats, by rendered prefixes: it is what the chat has
    beyond the messages before it and the beginning of a reply. The token that ends a turn then belongs to it, white space
    after that does not. A token that is partly the assistant's is a target.
    """

    def __init__(self, tokenizer: Tokenizer, format: Format = "auto") -> None:
        """Prepare for a vocabulary.

        Args:
          format: of chats, see `resolve_format`; it is looked at when the first chat comes.
        """
        self.tokenizer = tokenizer
        self._asked = format
        self._resolved: Format | None = None
        self._renderer = Renderer()
        self._bytes = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]

    def __enter__(self) -> ReplyEncoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._renderer.close()

    @property
    def format(self) -> Format:
        """The format that is meant; GenerationError where there is none."""
        if self._resolved is None:
            self._resolved = resolve_format(self.tokenizer, self._asked)
        return self._resolved

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end what is generated: of a chat, where one has been encoded."""
        return self.tokenizer.stop_ids if self._resolved is None else reply_ends(self.tokenizer, self._resolved)

    def chat(self, messages: Sequence[Message], given: int = 0, tools: Sequence[Mapping[str, Any]] = ()) -> Taught:
        """A whole chat; the targets are all that the assistant says in it.

        Args:
          messages: see `encode_chat`; the last need not be the user's.
          given: how many of the first messages are given: what the assistant says in these is no target.
          tools: functions that the model may call, for a template that takes them.

        Raises:
          GenerationError: messages that are no chat, or that the format cannot hold; a template that writes what came
            before otherwise when more follows, so that what the assistant says is not known.
          TokenizerError: text that cannot be encoded, or whose tokens are not known to be its own.
        """
        format = self.format
        check_messages(messages, format)
        if tools and not takes_tools(self.tokenizer, format):
            raise GenerationError("the chat format takes no tools; leave them out")
        if format == "template" and GENERATION.search(self.tokenizer.chat_template or ""):
            spans = template_parts(self.tokenizer, messages, self._renderer, tools, reply=False, spans=True)
            if given:
                spans = _only_after(spans, self._parts(messages[:given], tools, reply=False), given)
        else:
            spans = self._by_prefixes(messages, given, tools)
        return self._checked(self._encoded(spans))

    def pair(self, prompt: str, answer: str, *, special: bool = False) -> Taught:
        """A text that goes on as another one does, without any chat format: BOS, prompt, answer and EOS, of which the answer
        and EOS are targets; BOS where the vocabulary's own rule says so, EOS where it has one.

        Args:
          special: whether "<|eot_id|>" and the like in the texts are special tokens; by default they are text. A BOS or an
            EOS that is there already is then not put there again.
        """
        named = self.tokenizer.special_tokens if special else {}
        said = [(part, at == 1) for at, text in enumerate((prompt, answer)) for part in split_special(text, named)]
        bos, eos = [self.tokenizer.bos_id] * self.tokenizer.add_bos, [self.tokenizer.eos_id] * (self.tokenizer.eos_id >= 0)
        if said and said[0][0] in bos:
            del said[0]
        if said and said[-1][1] and said[-1][0] in eos:
            del said[-1]
        # The two are no parts of the text: as `Tokenizer.encode` has it, for a prompt that is generated from.
        found = self._encoded(said)
        return self._checked(Taught([*bos, *found.ids, *eos], [*[False] * len(bos), *found.targets, *[True] * len(eos)]))

    def prompt(
        self, prompt: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, special: bool = False
    ) -> list[int]:
        """Ids of what an answer follows: a chat up to where the assistant's reply begins, or BOS and a text; BOS where the
        vocabulary's own rule says so.

        Args:
          special: whether "<|eot_id|>" and the like in a text are special tokens. A BOS that is there already is then not
            put there again.

        Raises:
          GenerationError, TokenizerError: as `encode_chat` and `Tokenizer.encode` raise them.
        """
        if not isinstance(prompt, str):
            return encode_chat(self.tokenizer, prompt, self.format, self._renderer, tools)
        named = self.tokenizer.special_tokens if special else {}
        bos = [self.tokenizer.bos_id] * self.tokenizer.add_bos
        found = self.tokenizer.encode_parts(split_special(prompt, named)) if prompt else []
        return found if bos and found[:1] == bos else [*bos, *found]

    def _parts(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, reply: bool) -> list[Part]:
        return chat_parts(self.tokenizer, messages, self.format, self._renderer, tools, reply=reply)

    def _by_prefixes(self, messages: Sequence[Message], given: int, tools: Sequence[Mapping[str, Any]]) -> Spans:
        """The parts of a chat, divided where replies begin and end."""
        whole = self._parts(messages, tools, reply=False)
        if self.format == "plain" and messages[-1]["role"] == "assistant" and self.tokenizer.eos_id >= 0:
            whole = [*whole, self.tokenizer.eos_id]
        cuts: list[tuple[tuple[int, int], bool]] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or i < given:
                continue
            begins = _place(self._parts(messages[:i], tools, reply=True), whole)
            last = i + 1 == len(messages)
            ends = (len(whole), 0) if last else _place(self._parts(messages[: i + 1], tools, reply=False), whole)
            if begins is None or ends is None or ends < begins:
                raise GenerationError(
                    f"where message {i}, from 'assistant', begins and ends cannot be told: the chat template writes earlier"
                    " messages otherwise when more follow; put {% generation %} and {% endgeneration %} around what the"
                    " assistant says in the template, or choose another format"
                )
            cuts += [(begins, True), (ends, False)]
        return _without_last_space(_cut(whole, cuts))

    def _encoded(self, spans: Spans) -> Taught:
        """The ids of texts and special tokens, with neighbouring texts encoded as one."""
        parts: list[Part] = []
        pieces: list[list[tuple[str, bool]]] = []  # of each part: texts, and whether they are the assistant's
        for is_text, group in groupby(spans, key=lambda span: isinstance(span[0], str)):
            if is_text:
                texts = [(str(part), said) for part, said in group]
                parts.append("".join(text for text, _ in texts))
                pieces.append(texts)
            else:
                for part, said in group:
                    parts.append(part)
                    pieces.append([("", said)])
        ids = self.tokenizer.encode_parts(parts)
        targets: list[bool] = []
        for at, (part, texts) in enumerate(zip(parts, pieces, strict=True)):
            if isinstance(part, str):
                begin = len(targets)
                stop = ids.index(following, begin) if (following := _next_special(parts, at)) is not None else len(ids)
                targets += self._within(texts, ids[begin:stop])
            else:
                assert ids[len(targets)] == part
                targets.append(texts[0][1])
        return Taught(ids, targets)

    def _checked(self, taught: Taught) -> Taught:
        bos = self.tokenizer.bos_id
        if taught.ids[:2] == [bos, bos] and bos != self.tokenizer.eos_id:
            raise GenerationError("the text begins with two begin-of-sequence tokens; leave out one of them")
        return taught

    def _within(self, texts: list[tuple[str, bool]], ids: list[int]) -> list[bool]:
        """Which tokens of neighbouring texts have a byte that the assistant says."""
        if not any(said for _, said in texts):
            return [False] * len(ids)
        tokens = [self._bytes[token] for token in ids]
        spelt = b"".join(tokens)
        # Vocabularies that spell a space as U+2581 know no other one.
        for given in (texts, [(text.replace(SPACE, " "), said) for text, said in texts]):
            flags = [said for text, said in given for _ in text.encode()]
            wanted = "".join(text for text, _ in given).encode()
            if spelt not in (wanted, b" " + wanted):  # the special token before may take the white space away
                wanted = wanted.lstrip()
                flags = flags[len(flags) - len(wanted) :]
            if spelt == b" " + wanted:  # the space that a vocabulary puts before a text is part of what follows
                flags = flags[:1] + flags
            elif spelt != wanted:
                continue
            ends = list(accumulate(map(len, tokens)))
            return [any(flags[end - len(token) : end]) for token, end in zip(tokens, ends, strict=True)]
        raise TokenizerError(
            "the vocabulary spells a text otherwise than it is, so that its tokens cannot be told apart: it normalises the"
            " text, or has no token for a character of it; normalise it yourself (NFC), or remove what is unknown"
        )


def _next_special(parts: Sequence[Part], at: int) -> int | None:
    following = parts[at + 1] if at + 1 < len(parts) else None
    assert not isinstance(following, str)
    return following


def _place(prefix: Sequence[Part], whole: Sequence[Part]) -> tuple[int, int] | None:
    """Where a beginning of parts ends: the part and the character in it; None where it is no beginning."""
    if not prefix:
        return 0, 0
    full, last = len(prefix) - 1, prefix[-1]
    if list(prefix[:full]) != list(whole[:full]) or full >= len(whole):
        return None
    there = whole[full]
    if last == there:
        return full + 1, 0
    if isinstance(last, str) and isinstance(there, str) and there.startswith(last):
        return full, len(last)
    return None


def _cut(parts: Sequence[Part], cuts: Sequence[tuple[tuple[int, int], bool]]) -> Spans:
    """The parts, with texts divided at the places, from each of which on all are marked as it says."""
    found: Spans = []
    said = False
    following = iter([*cuts, ((len(parts), 0), False)])
    place, then = next(following)
    for at, part in enumerate(parts):
        begin = 0
        while place[0] == at:
            if isinstance(part, str):
                found.append((part[begin : place[1]], said))
                begin = place[1]
            said = then
            place, then = next(following)
        found.append((part[begin:] if isinstance(part, str) else part, said))
    return [(part, said) for part, said in found if part != ""]


def _only_after(spans: Spans, given: Sequence[Part], count: int) -> Spans:
    """The spans, of which nothing is the assistant's that stands in the given beginning."""
    joined: list[Part] = []
    for part, _ in spans:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    place = _place(given, joined)
    if place is None:
        raise GenerationError(
            f"the chat template writes the first {count} messages, which are given, otherwise when more follow; give the"
            " whole chat as `messages`, in which all that the assistant says is a target"
        )
    left = sum(len(part) if isinstance(part, str) else 1 for part in joined[: place[0]]) + place[1]
    found: Spans = []
    for part, said in spans:
        size = len(part) if isinstance(part, str) else 1
        if isinstance(part, str) and 0 < left < size:
            found += [(part[:left], False), (part[left:], said)]
        else:
            found.append((part, said and left <= 0))
        left -= size
    return found


def _without_last_space(spans: Spans) -> Spans:
    """The spans, of which no white space after the token that ends a turn is the assistant's."""
    found = list(spans)
    for i, (part, said) in enumerate(spans):
        ends = i > 0 and not isinstance(spans[i - 1][0], str) and spans[i - 1][1]
        closes = i + 1 == len(spans) or not spans[i + 1][1]
        if said and ends and closes and isinstance(part, str) and not part.strip():
            found[i] = (part, False)
    return found
