"""``llama-jax chat``: talk with a model, line by line."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Annotated

import tyro

import llama_jax
from llama_jax.cli.generate import draft_statistics, draft_summary
from llama_jax.cli.options import ModelOptions, TemplateOptions
from llama_jax.cli.terminal import print_status, printable
from llama_jax.config import suggest_context
from llama_jax.errors import GenerationError, UserError
from llama_jax.runs.interrupts import end_command, watch_signals
from llama_jax.settings import at_least
from llama_jax.tokenizers import Format, Message, Tokenizer, encode_chat, reply_ends, resolve_format
from llama_jax.tokenizers.chat_template import Renderer
from llama_jax.tokenizers.interface import Text, check_token_rows

USUAL_REPLY = 512  # tokens
SLASH_COMMANDS = """\
/clear        forget the conversation, but not the system prompt
/system TEXT  set the system prompt; without TEXT remove it
/help         show this list
/exit         end the program, like Ctrl-D
To send a line that starts with a slash, put a space before it. Ctrl-C stops a reply; pressed twice, or at the prompt, it
ends the program."""


@dataclass(frozen=True, kw_only=True)
class Chat(TemplateOptions, ModelOptions):
    """Chat with a model. Each line of stdin is a message. Replies go to stdout; notes, and messages from a pipe, to stderr.

    The whole conversation is the prompt of each reply. When it exceeds the context, the oldest messages are dropped and a
    note says so. Ctrl-C stops a reply; pressed twice, or at the prompt, it ends the program. /help lists the commands.
    """

    SHOWN_FIRST = ("model", "system", "max_new_tokens", "sampling", "seed")

    system: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """System prompt. It is never dropped."""
    format: Format = "auto"
    """Chat format. auto takes the model's own template, or llama3 for the vocabulary of Llama 3. With plain, the format of
    the bundled model, each line starts a paragraph of one text, which the model continues."""
    max_new_tokens: Annotated[int, at_least(1)] | None = None
    """Maximum number of tokens of a reply. The default is 512, but at most half of the context."""
    context: Annotated[int, at_least(1)] | None = None
    """Maximum number of tokens of conversation and reply together. The default is the model's context."""

    def run(self) -> None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are not text must not end the chat
        import jax

        from llama_jax.model.trees import bytes_in_memory, kinds_in_memory

        seed = self.choose_seed()
        sampling, options = self.seeded_sampling(seed), self.cache_options()
        self.parse_draft()
        self.check_template(self.format)
        renderer = Renderer(template_args=self.template_args())
        self.start_jax()
        config, params, tokenizer = self.load()
        tokenizer = self.with_template(tokenizer)
        draft = self.drafter(tokenizer)
        context = config.max_seq_len if self.context is None else self.context
        if context > config.max_seq_len:
            raise GenerationError(
                f"context={context} exceeds the model's context of {config.max_seq_len}; lower it"
                f"{suggest_context(config, context)}"
            )
        reply_room = min(USUAL_REPLY, max(1, context // 2)) if self.max_new_tokens is None else self.max_new_tokens
        if reply_room >= context:
            raise GenerationError(
                f"max_new_tokens={reply_room} leaves no room for a message in a context of {context}; lower it"
            )
        # The bundled model knows stories and no roles.
        bundled = self.model is None and self.tokenizer is None and self.chat_template is None
        format = resolve_format(tokenizer, "plain" if bundled and self.format == "auto" else self.format)
        ends = reply_ends(tokenizer, format, renderer)
        system = _system_messages(self.system)
        if system:  # an error now rather than at the first message
            ids = encode_chat(tokenizer, [*system, {"role": "user", "content": ""}], format, renderer)
            check_token_rows(tokenizer, ids, config.vocab_size, "a chat with this system prompt")

        mesh = f" · mesh {self.mesh_sizes()}" if self.mesh else ""
        weights = f"{kinds_in_memory(params)}, {bytes_in_memory(params) / 1e6:,.1f} MB"
        print_status(
            f"{jax.default_backend()}{mesh} · {params.embedding.dtype} · weights {weights} · format {format}"
            f" · context {context} tokens · seed {seed} · /help lists the commands"
        )
        history: list[Message] = []
        turn = 0
        for line in _read_lines():
            command, _, text = line.partition(" ")
            if command == "/exit":
                break
            elif command == "/clear":
                history = []
            elif command == "/system":
                system = _system_messages(text)
            elif command == "/help":
                print(SLASH_COMMANDS, file=sys.stderr)
            elif line.startswith("/"):
                print_status(
                    f"error: {command} is not a command; /help lists them. To send it as text, put a space before it"
                )
            elif line.strip():
                messages: list[Message] = [*history, {"role": "user", "content": line}]
                try:
                    prompt, remaining = fit_history(tokenizer, system, messages, format, context - reply_room, renderer)
                    check_token_rows(tokenizer, prompt, config.vocab_size, "the chat")
                except UserError as error:
                    print_status(f"error: {error}")
                    continue
                if dropped := len(messages) - len(remaining):
                    first = " ".join(messages[0]["content"].split())
                    print_status(
                        f"the context of {context} tokens is full: dropped the {dropped} oldest messages, starting with"
                        f" {first if len(first) <= 40 else first[:39] + '…'!r}"
                    )
                chunks = llama_jax.stream(
                    config,
                    params,
                    [prompt],
                    max_new_tokens=reply_room,
                    sampling=replace(sampling, seed=(seed + turn) % 2**32),
                    stop_tokens=ends,
                    cache=options,
                    compute=self.compute(),
                    draft=draft,
                )
                answer = reply(tokenizer, chunks, ends, at_start=format != "plain")
                history = [*remaining, {"role": "assistant", "content": answer}]
                turn += 1


def fit_history(
    tokenizer: Tokenizer,
    system: Sequence[Message],
    history: Sequence[Message],
    format: Format,
    room: int,
    renderer: Renderer | None = None,
) -> tuple[list[int], list[Message]]:
    """The ids of a chat in at most `room` tokens, and its history, without the oldest exchanges where they do not fit.

    Raises:
      GenerationError: the last message alone is too long; or what `encode_chat` raises.
    """
    remaining = list(history)
    while True:
        ids = encode_chat(tokenizer, [*system, *remaining], format, renderer)
        if len(ids) <= room:
            return ids, remaining
        if len(remaining) == 1:
            raise GenerationError(
                f"the message and the system prompt have {len(ids)} tokens, but the reply leaves only {room}; shorten it, or"
                " chat with a longer context (--context, or --rope yarn:FACTOR)"
            )
        remaining = remaining[2:]


def reply(
    tokenizer: Tokenizer, chunks: Iterator[llama_jax.TokenChunk], ends: Sequence[int], *, at_start: bool = True
) -> str:
    """Print a reply as it comes, until an end, the limit or Ctrl-C; its text.

    Args:
      at_start: whether the reply is a text of its own; otherwise it continues one, and keeps its leading space.
    """
    from llama_jax.inference.drafter import DraftedChunk

    text = Text(tokenizer, (), write=lambda new: print(new, end="", flush=True), at_start=at_start)
    drafted: list[DraftedChunk] = []
    with _interruptible() as interrupted:
        count, ended = 0, False
        for chunk in chunks:
            drafted += [chunk] if isinstance(chunk, DraftedChunk) else []
            for token in chunk.tokens[0][chunk.valid[0]].tolist():
                ended = token in ends
                if not ended:
                    text.push(token)
                    count += 1
            if ended or interrupted():
                break
        text.finish()
        print(flush=True)
        if interrupted():
            print_status("the reply was stopped")
        elif not ended:
            print_status(f"the reply was cut at {count} tokens; --max-new-tokens allows more")
        if drafted:
            made = sum(int(chunk.valid.sum()) for chunk in drafted)
            print_status(draft_summary(draft_statistics("", made, [chunk.counts for chunk in drafted])))
    return text.shown


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed once; the second press does what it did before.

    Nothing is raised: XLA may be compiling, and must not be interrupted.
    """
    signals: list[int] = []  # in a thread, also while the main thread is in compiled code
    handled: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    is_command = before is end_command

    def see(number: int) -> None:
        signals.append(number)
        if signals.count(signal.SIGINT) > 1 and is_command:
            end_command()

    def press(number: int, frame: FrameType | None) -> None:
        handled.append(number)
        if len(handled) > 1 and callable(before):
            before(number, frame)

    end = watch_signals(see)
    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(handled)
    finally:
        signal.signal(signal.SIGINT, before)
        end()


def _read_lines() -> Iterator[str]:
    """Lines from a terminal, with a prompt, or from a pipe, until either ends; those of a pipe are shown on stderr."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            line = line.rstrip("\r\n")
            print(f"> {printable(line)}", file=sys.stderr)
            yield line
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # lets input() edit and remember lines
    while True:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # lets readline put the terminal in order
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            sys.exit(130)
        finally:
            signal.signal(signal.SIGINT, before)
        yield line


def _system_messages(text: str | None) -> list[Message]:
    return [{"role": "system", "content": text}] if text and text.strip() else []
