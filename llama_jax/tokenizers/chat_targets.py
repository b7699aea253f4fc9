"""Chats and prompt-answer pairs as training data: ids, and which of them are targets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import accumulate, groupby, pairwise
from types import TracebackType
from typing import Any, NamedTuple

from llama_jax.errors import GenerationError, TokenizerError
from llama_jax.tokenizers.chat import (
    NO_TOOLS,
    Format,
    Message,
    chat_parts,
    check_messages,
    encode_chat,
    reply_ends,
    resolve_format,
    takes_tools,
)
from llama_jax.tokenizers.chat_template import PRIVATE_USE, Renderer, select_template, template_parts, uses_tools
from llama_jax.tokenizers.interface import SPACE, TextPart, Tokenizer, split_special, unspelled_space

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class EncodedExample(NamedTuple):
    """A text for training.

    Attributes:
      ids: its token ids.
      targets: for each token whether it is a training target.
    """

    ids: list[int]
    targets: list[bool]


class ReplyEncoder:
    """Encodes chats for training, with one process for the checkpoint's template; use it as a context manager.

    The assistant's text is found in one of two ways. A template may enclose it in ``{% generation %}``, as for transformers'
    `return_assistant_tokens_mask`; otherwise, and in the built-in formats, it is found by rendering prefixes: it is the text
    after the previous messages and the header of a reply. It then includes the token that ends a turn, but not white space
    after that. A token that is partly the assistant's text is a target.

    No token spans the end of a prompt, so that an example begins with the ids of `prompt`, from which a model generates. The
    prompt of a reply in a chat ends with the header of a reply, if the rendered chat begins with that prompt, and otherwise
    where the assistant's text begins.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: Format = "auto",
        template_time: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare for a vocabulary.

        Args:
          format: chat format, see `resolve_format`; it is resolved for the first chat.
          template_time: the time that the template writes into every chat, in ISO 8601; None for the current local time.
          template_args: variables of the template in every chat, such as `enable_thinking`.
        """
        self.tokenizer = tokenizer
        self._requested = format
        self._resolved: Format | None = None
        self._renderer = Renderer(template_time or datetime.now().isoformat(), template_args)
        self._bytes = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]

    def __enter__(self) -> ReplyEncoder:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._renderer.close()

    @property
    def format(self) -> Format:
        """The resolved chat format; GenerationError if there is none."""
        if self._resolved is None:
            self._resolved = resolve_format(self.tokenizer, self._requested)
        return self._resolved

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end generation: those of the chat format if a chat has been encoded."""
        return (
            self.tokenizer.stop_ids if self._resolved is None else reply_ends(self.tokenizer, self._resolved, self._renderer)
        )

    def chat(
        self, messages: Sequence[Message], prompt_messages: int = 0, tools: Sequence[Mapping[str, Any]] = ()
    ) -> EncodedExample:
        """Encode a whole chat; the targets are all of the assistant's text.

        Args:
          messages: see `encode_chat`; the last need not be the user's.
          prompt_messages: number of first messages that are given: the assistant's text in these is not a target.
          tools: functions that the model may call, for a template that supports them.

        Raises:
          GenerationError: messages that are not a valid chat, or that the format does not support; a template that renders
            earlier messages differently when more follow, so that the assistant's text cannot be found.
          TokenizerError: text that cannot be encoded, or that does not round-trip.
        """
        format = self.format
        check_messages(messages, format)
        replies = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= prompt_messages]
        if tools and not takes_tools(self.tokenizer, format):
            raise GenerationError(NO_TOOLS)
        if format == "template" and GENERATION.search(select_template(self.tokenizer, uses_tools(messages, tools))):
            spans = template_parts(self.tokenizer, messages, self._renderer, tools, reply=False, spans=True)
            parts, reply_mask = _join_spans(spans)
            prompt_ends: list[int] = []
            for i in replies:
                with suppress(GenerationError):  # the template need not support generation after these messages
                    end = self._prompt_end(messages, i, tools, parts)
                    prompt_ends += [] if end is None else [end]
            if prompt_messages:
                end = _end_of(self._parts(messages[:prompt_messages], tools, reply=False), parts)
                if end is None:
                    raise GenerationError(
                        f"the chat template renders the first {prompt_messages} messages, which are given, differently when"
                        " more follow; pass the whole chat as `messages`, in which all of the assistant's text is a target"
                    )
                reply_mask[:end] = [False] * end
        else:
            parts, reply_mask, prompt_ends = self._by_prefixes(messages, replies, tools)
        return self._checked(self._encoded(parts, reply_mask, prompt_ends))

    def pair(self, prompt: str, answer: str, *, special: bool = False) -> EncodedExample:
        """Encode a prompt and its answer without a chat format: BOS, prompt, answer and EOS, with the answer and EOS as
        targets; BOS if the tokenizer adds one, EOS if the vocabulary has one.

        Args:
          special: whether "<|eot_id|>" and the like in the texts are special tokens; by default they are text. An existing
            BOS or EOS is then not added again.
        """
        special_tokens = self.tokenizer.special_tokens if special else {}
        flagged = [
            (part, at == 1) for at, text in enumerate((prompt, answer)) for part in split_special(text, special_tokens)
        ]
        bos, eos = [self.tokenizer.bos_id] * self.tokenizer.add_bos, [self.tokenizer.eos_id] * (self.tokenizer.eos_id >= 0)
        if flagged and flagged[0][0] in bos:
            del flagged[0]
        if flagged and flagged[-1][1] and flagged[-1][0] in eos:
            del flagged[-1]
        # BOS and EOS are added as in `Tokenizer.encode`, so that training and generation encode prompts alike.
        encoded = self._encoded(*_join_spans(flagged))
        return self._checked(
            EncodedExample([*bos, *encoded.ids, *eos], [*[False] * len(bos), *encoded.targets, *[True] * len(eos)])
        )

    def prompt(
        self, prompt: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, special: bool = False
    ) -> list[int]:
        """Ids of a prompt: a chat up to the beginning of the assistant's reply, or a text after BOS if the tokenizer adds
        one.

        Args:
          special: whether "<|eot_id|>" and the like in a text are special tokens. An existing BOS is then not added again.

        Raises:
          GenerationError, TokenizerError: see `encode_chat` and `Tokenizer.encode`.
        """
        if not isinstance(prompt, str):
            return encode_chat(self.tokenizer, prompt, self.format, self._renderer, tools)
        special_tokens = self.tokenizer.special_tokens if special else {}
        bos = [self.tokenizer.bos_id] * self.tokenizer.add_bos
        ids = self.tokenizer.encode_parts(split_special(prompt, special_tokens)) if prompt else []
        return ids if bos and ids[:1] == bos else [*bos, *ids]

    def _parts(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, reply: bool) -> list[TextPart]:
        return chat_parts(self.tokenizer, messages, self.format, self._renderer, tools, reply=reply)

    def _prompt_end(
        self, messages: Sequence[Message], number: int, tools: Sequence[Mapping[str, Any]], all_parts: Sequence[TextPart]
    ) -> int | None:
        """Where the prompt of a reply, message `number`, ends in the rendered chat; None if the chat does not begin with it.

        Templates need not render an empty chat: a first message from the assistant is found by its content.
        """
        if number:
            return _end_of(self._parts(messages[:number], tools, reply=True), all_parts)
        mark = chr(PRIVATE_USE[-1])
        prompt: list[TextPart] = []
        for part in self._parts([{**messages[0], "content": mark}], tools, reply=False):
            if isinstance(part, str) and mark in part:
                return _end_of([*prompt, part[: part.index(mark)]], all_parts)
            prompt.append(part)
        return None

    def _by_prefixes(
        self, messages: Sequence[Message], replies: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[TextPart], list[bool], list[int]]:
        """The parts of a chat, flags for the assistant's text, see `_join_spans`, and the ends of the prompts."""
        all_parts, _ = _join_spans([(part, False) for part in self._parts(messages, tools, reply=False)])
        if self.format == "plain" and messages[-1]["role"] == "assistant" and self.tokenizer.eos_id >= 0:
            all_parts = [*all_parts, self.tokenizer.eos_id]
        reply_mask = [False] * sum(map(_size, all_parts))
        prompt_ends: list[int] = []
        for i in replies:
            begin = self._prompt_end(messages, i, tools, all_parts)
            last = i + 1 == len(messages)
            end = len(reply_mask) if last else _end_of(self._parts(messages[: i + 1], tools, reply=False), all_parts)
            if begin is None or end is None or end < begin:
                raise GenerationError(
                    f"message {i}, from 'assistant', cannot be found in the rendered chat: the chat template renders earlier"
                    " messages differently when more follow; put {% generation %} and {% endgeneration %} around the"
                    " assistant's text in the template, or choose another format"
                )
            reply_mask[begin:end] = [True] * (end - begin)
            prompt_ends.append(begin)
        _without_last_space(all_parts, reply_mask)
        return all_parts, reply_mask, prompt_ends

    def _encoded(
        self, parts: Sequence[TextPart], reply_mask: Sequence[bool], prompt_ends: Sequence[int] = ()
    ) -> EncodedExample:
        """The ids of parts; a token is a target if it is at least partly the assistant's text.

        Args:
          prompt_ends: where prompts end; others end where the assistant's text begins.
        """
        ends = set(prompt_ends)
        begin = 0
        for flag, run in groupby(reply_mask):
            stop = begin + len(list(run))
            if flag and not any(begin <= end < stop for end in ends):
                ends.add(begin)
            begin = stop
        divided = _divide_parts(parts, sorted(ends))
        ids = self.tokenizer.encode_parts(divided)
        reply_mask = self._with_unspelled_space(divided, reply_mask)
        targets: list[bool] = []
        at = 0
        for number, part in enumerate(parts):
            if isinstance(part, str):
                begin = len(targets)
                following = parts[number + 1] if number + 1 < len(parts) else None
                assert not isinstance(following, str)
                stop = len(ids) if following is None else ids.index(following, begin)
                targets += self._within(part, reply_mask[at : at + len(part)], ids[begin:stop])
            else:
                assert ids[len(targets)] == part
                targets.append(reply_mask[at])
            at += _size(part)
        return EncodedExample(ids, targets)

    def _with_unspelled_space(self, divided: Sequence[TextPart], reply_mask: Sequence[bool]) -> list[bool]:
        """The flags, also set for white space at the end of a prompt that only the reply's tokens spell."""
        reply_mask = list(reply_mask)
        begin = 0
        for before, part in pairwise(divided):
            begin += _size(before)
            if (
                isinstance(before, str)
                and isinstance(part, str)
                and before[-1:].isspace()
                and any(reply_mask[begin : begin + 1])
            ):
                space = unspelled_space(self.tokenizer, before, self.tokenizer.encode_parts([before]))
                reply_mask[begin - len(space) : begin] = [True] * len(space)
        return reply_mask

    def _checked(self, encoded: EncodedExample) -> EncodedExample:
        bos = self.tokenizer.bos_id
        if encoded.ids[:2] == [bos, bos] and bos != self.tokenizer.eos_id:
            raise GenerationError("the text begins with two begin-of-sequence tokens; omit one of them")
        return encoded

    def _within(self, text: str, reply_mask: Sequence[bool], ids: list[int]) -> list[bool]:
        """Whether each token of a text contains a byte of the assistant's text."""
        if not any(reply_mask):
            return [False] * len(ids)
        tokens = [self._bytes[token] for token in ids]
        spelled = b"".join(tokens)
        # Vocabularies that spell a space as U+2581 cannot distinguish the two.
        for spelling in (text, text.replace(SPACE, " ")):
            flags = [flag for character, flag in zip(spelling, reply_mask, strict=True) for _ in character.encode()]
            encoded = spelling.encode()
            if spelled not in (encoded, b" " + encoded):  # a preceding special token may remove white space
                encoded = encoded.lstrip()
                flags = flags[len(flags) - len(encoded) :]
            if spelled == b" " + encoded:  # a space that the tokenizer adds belongs to the text after it
                flags = flags[:1] + flags
            elif spelled != encoded:
                continue
            ends = list(accumulate(map(len, tokens)))
            return [any(flags[end - len(token) : end]) for token, end in zip(tokens, ends, strict=True)]
        raise TokenizerError(
            "the vocabulary does not round-trip this text, so that the assistant's tokens cannot be found: it normalizes the"
            " text, or has no token for one of its characters; normalize it yourself (NFC), or remove unknown characters"
        )


def _size(part: TextPart) -> int:
    """The number of characters of a text; a special token counts as one."""
    return len(part) if isinstance(part, str) else 1


def _join_spans(spans: Iterable[tuple[TextPart, bool]]) -> tuple[list[TextPart], list[bool]]:
    """The parts, with adjacent texts joined, and for each character and special token whether it is the assistant's."""
    parts: list[TextPart] = []
    reply_mask: list[bool] = []
    for part, flag in spans:
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        elif part != "":
            parts.append(part)
        reply_mask += [flag] * _size(part)
    return parts, reply_mask


def _divide_parts(parts: Sequence[TextPart], ends: Sequence[int]) -> list[TextPart]:
    """The parts, with texts divided after these numbers of characters and special tokens; one at the end of a text leaves an
    empty text after it."""
    divided: list[TextPart] = []
    begin = 0
    for part in parts:
        if isinstance(part, str):
            cuts = [end - begin for end in ends if begin < end <= begin + len(part)]
            divided += (part[start:stop] for start, stop in pairwise([0, *cuts, len(part)]))
        else:
            divided.append(part)
        begin += _size(part)
    return divided


def _end_of(prefix: Sequence[TextPart], all_parts: Sequence[TextPart]) -> int | None:
    """The number of characters and special tokens in a prefix of `all_parts`; None if it is not a prefix."""
    prefix, _ = _join_spans([(part, False) for part in prefix])
    if not prefix:
        return 0
    full, last = len(prefix) - 1, prefix[-1]
    if prefix[:full] != list(all_parts[:full]) or full >= len(all_parts):
        return None
    continued = all_parts[full]
    is_beginning = last == continued or (isinstance(last, str) and isinstance(continued, str) and continued.startswith(last))
    return sum(map(_size, prefix)) if is_beginning else None


def _without_last_space(parts: Sequence[TextPart], reply_mask: list[bool]) -> None:
    """Unmark white space after the token that ends a turn, unless the assistant's text continues."""
    begin = 0
    for before, part in pairwise(parts):
        begin += _size(before)
        if isinstance(before, int) and isinstance(part, str) and reply_mask[begin - 1]:
            end = begin + len(part)
            stop = next((at for at in range(begin, end) if not reply_mask[at]), end)
            if not part[: stop - begin].strip() and not any(reply_mask[stop : stop + 1]):
                reply_mask[begin:stop] = [False] * (stop - begin)
