"""The bodies of `/v1/completions` and `/v1/chat/completions`: their fields, and what these ask for together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from llama_jax.errors import shown
from llama_jax.inference.sampling import Sampling
from llama_jax.serving.http import schema as f
from llama_jax.serving.http.errors import refused
from llama_jax.serving.http.messages import messages_field
from llama_jax.serving.http.schema import Field, Fields
from llama_jax.serving.http.tools import as_given, check_free, must_call, tool_choice_field, tools_field
from llama_jax.serving.requests import MOST_ALTERNATIVES
from llama_jax.tokenizers import Message

MOST_STOPS = 16
MOST_STOP_TOKENS = 8  # in addition to the model's: the engine has 16 places
LONGEST_STOP = 1000  # characters
LEAST_TEMPERATURE = 1e-6  # below, only the most probable token is left
USUAL_COMPLETION = 16  # tokens, as OpenAI's


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may ask for.

    Attributes:
      vocab_size: of the model.
      context: tokens of prompt and continuation together.
      most_choices: continuations per HTTP request: prompts times n.
      longest_prompt: characters of a prompt, or of all messages together; more where the context is long.
      largest_body: bytes.
    """

    vocab_size: int
    context: int
    most_choices: int = 128
    longest_prompt: int = 1_000_000
    largest_body: int = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What both kinds of request ask for.

    Attributes:
      max_tokens: None for the usual number.
      stop: texts that end a choice.
      stop_token_ids: tokens that end it, beside the model's own.
      alternatives: how many further tokens get log-probabilities; None for no log-probabilities at all.
      usage: for a stream, "last" for a separate chunk at the end, "each" for every chunk.
      format: what the text must be, None for anything.
    """

    model: str | None
    n: int
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    min_tokens: int
    alternatives: int | None
    stream: bool
    usage: Literal["last", "each"] | None
    format: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class CompletionAsked(Asked):
    """`prompts` are texts, or lists of token ids."""

    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    add_special_tokens: bool


@dataclass(frozen=True, kw_only=True)
class ChatAsked(Asked):
    """What a chat asks for.

    Attributes:
      tools: functions that the model may call, in the form that templates get.
      must_call: names of functions of which it must call at least one; none where it may choose.
      several: whether it may call more than one where it must call.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    must_call: tuple[str, ...]
    several: bool


def _common(limits: Limits, *, fewest: int) -> dict[str, Field]:
    stops = f.listed(f.text(longest=LONGEST_STOP, shortest=1), most=MOST_STOPS)
    last_id = limits.vocab_size - 1
    seed = "Start of the random stream, modulo 2**32; choice i has seed + i. Left out, it is drawn."
    below = f"Divides the logits; below {LEAST_TEMPERATURE:g} the most probable token is taken."
    return {
        "model": f.text(longest=1000, about="The served model's name, or that of an adapter, or nothing."),
        "n": f.integer(1, limits.most_choices, 1),
        "max_tokens": f.integer(fewest, limits.context),
        "temperature": f.number(0, 100, 1.0, below),
        "top_p": f.number(0, 1, 1.0),
        "top_k": f.integer(-1, 2**31 - 1, 0, "0 and -1 keep all."),
        "min_p": f.number(0, 1, 0.0),
        "repetition_penalty": f.number(0.01, 100, 1.0),
        "seed": f.integer(-(2**63), 2**63 - 1, about=seed),
        "stop": Field(
            {"anyOf": [{"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}, stops.schema]},
            lambda name, value: stops.read(name, [value] if isinstance(value, str) else value),
            (),
        ),
        "stop_token_ids": f.listed(f.integer(0, last_id), most=MOST_STOP_TOKENS),
        "ignore_eos": f.boolean(about="Go on after the tokens that end a text."),
        "min_tokens": f.integer(0, limits.context, 0, "Before so many tokens nothing but a stop text ends a choice."),
        "stream": f.boolean(),
        "stream_options": f.nested(
            {"include_usage": f.boolean(), "continuous_usage_stats": f.boolean(), "include_obfuscation": f.neutral(False)}
        ),
        "response_format": _response_format(),
        "user": f.text(longest=1000, about="Whom the request is for; it changes nothing."),
        "presence_penalty": f.neutral(0),
        "frequency_penalty": f.neutral(0),
        "logit_bias": f.neutral({}),
    }


def _response_format() -> Field:
    schema_fields: Fields = {
        "name": f.text(longest=1000),
        "description": f.text(longest=100_000),
        "schema": f.any_object(),
        "strict": f.boolean(about="What is generated follows the schema either way."),
    }
    kinds: dict[str, dict[str, Field]] = {
        "text": {},
        "json_object": {},
        "json_schema": {"json_schema": Field(f.schema_of(schema_fields), f.nested(schema_fields).read, required=True)},
        "regex": {"regex": f.text(longest=100_000, shortest=1, required=True)},
    }
    tables = {
        kind: {"type": Field({"const": kind}, lambda _, value: value, required=True)} | more for kind, more in kinds.items()
    }

    def read(name: str, value: Any) -> dict[str, Any] | None:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in tables:
            need = ", ".join(tables)
            raise refused(f"{name} is {shown(value, 60)}; it must be an object whose type is one of {need}", name)
        found = f.read_object(tables[kind], value, name)
        return None if kind == "text" else found

    return Field({"oneOf": [f.schema_of(table) for table in tables.values()]}, read)


def completion_fields(limits: Limits) -> dict[str, Field]:
    """The fields of `/v1/completions`."""
    one, ids = f.text(longest=limits.longest_prompt), f.token_ids(limits.vocab_size, most=limits.context)
    texts = f.listed(one, most=limits.most_choices, fewest=1)
    lists = f.listed(ids, most=limits.most_choices, fewest=1)

    def read(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(value, str):
            return (one.read(name, value),)
        first = value[0] if isinstance(value, list) and value else None
        if first is None:
            raise refused(f"{name} must be a text, a list of token ids, or a list of either, with at least one entry", name)
        if isinstance(first, str):
            return texts.read(name, value)
        return lists.read(name, value) if isinstance(first, list) else (ids.read(name, value),)

    return {
        "prompt": Field({"anyOf": [one.schema, ids.schema, texts.schema, lists.schema]}, read, required=True),
        **_common(limits, fewest=0),
        "echo": f.boolean(about="Give the prompt before what continues it; with logprobs, its own as well."),
        "logprobs": f.integer(0, MOST_ALTERNATIVES, about="Log-probabilities, also of so many most probable tokens."),
        "best_of": f.integer(1, limits.most_choices, about="Only what n is."),
        "add_special_tokens": f.boolean(
            True, "Begin a text with the begin-of-sequence token, where the vocabulary has one."
        ),
        "suffix": f.neutral(""),
    }


def chat_fields(limits: Limits) -> dict[str, Field]:
    """The fields of `/v1/chat/completions`."""
    return {
        "messages": messages_field(limits.longest_prompt, limits.context),
        **_common(limits, fewest=1),
        "max_completion_tokens": f.integer(1, limits.context, about="The same as max_tokens."),
        "logprobs": f.boolean(),
        "top_logprobs": f.integer(0, MOST_ALTERNATIVES),
        "tools": tools_field(),
        "tool_choice": tool_choice_field(),
        "parallel_tool_calls": f.boolean(True, "false, for one call, needs tool_choice to be required, or a function."),
        "functions": f.neutral([]),
        "function_call": f.neutral("none", "auto"),
        "modalities": f.neutral(["text"]),
        "store": f.neutral(False),
        "metadata": f.neutral({}),
        "service_tier": f.neutral("auto", "default"),
    }


def read_completion(fields: Fields, limits: Limits, body: Any) -> CompletionAsked:
    """What a body of `/v1/completions` asks for; ApiError for an impossible request."""
    given = f.read_object(fields, body)
    prompts, n = given["prompt"], given["n"]
    if len(prompts) * n > limits.most_choices:
        raise refused(f"{len(prompts)} prompts and n={n} make more than {limits.most_choices} choices; ask for fewer", "n")
    if given["best_of"] not in (None, n):
        raise refused(f"best_of={given['best_of']} is not supported but as n, which is {n}; leave it out", "best_of")
    if given["max_tokens"] == 0 and not given["echo"]:
        raise refused("max_tokens=0 asks for nothing; give echo=true to have the prompt scored", "max_tokens")
    asked = _asked(given, given["max_tokens"], given["logprobs"])
    return CompletionAsked(**asked, prompts=prompts, echo=given["echo"], add_special_tokens=given["add_special_tokens"])


def read_chat(fields: Fields, body: Any) -> ChatAsked:
    """What a body of `/v1/chat/completions` asks for; ApiError for an impossible request."""
    given = f.read_object(fields, body)
    most, alias = given["max_tokens"], given["max_completion_tokens"]
    if most is not None and alias is not None and most != alias:
        raise refused(f"max_tokens={most} and max_completion_tokens={alias} differ; give one of them", "max_tokens")
    most = most if alias is None else alias
    if given["top_logprobs"] is not None and not given["logprobs"]:
        raise refused("top_logprobs needs logprobs=true", "top_logprobs")
    alternatives = (given["top_logprobs"] or 0) if given["logprobs"] else None
    called = must_call(given["tools"], given["tool_choice"])
    tools = () if given["tool_choice"] == "none" else given["tools"]
    if tools and given["response_format"] is not None:
        raise refused("response_format cannot go with tools; leave one of them out", "response_format")
    if not called:
        check_free(tools, given["parallel_tool_calls"])
    return ChatAsked(
        **_asked(given, most, alternatives, "tool_choice" if called else "response_format"),
        messages=given["messages"],
        tools=tuple(as_given(tools)),
        must_call=called,
        several=given["parallel_tool_calls"] and given["tool_choice"] == "required",
    )


def _asked(
    given: dict[str, Any], max_tokens: int | None, alternatives: int | None, grammar: str = "response_format"
) -> dict[str, Any]:
    """The fields of `Asked`.

    Args:
      grammar: the field that may constrain the text.
    """
    options = given["stream_options"]
    if options is not None and not given["stream"]:
        raise refused("stream_options is for streams; give stream=true, or leave it out", "stream_options")
    if max_tokens is not None and given["min_tokens"] > max_tokens:
        raise refused(f"min_tokens={given['min_tokens']} is more than max_tokens={max_tokens}; lower it", "min_tokens")
    if given["response_format"] is not None or grammar == "tool_choice":
        for name in ("ignore_eos", "min_tokens"):
            if given[name]:
                raise refused(f"{name} cannot go with {grammar}, which says where the text ends; leave it out", name)
    seed = int.from_bytes(os.urandom(4), "little") if given["seed"] is None else given["seed"] % 2**32
    options = options or {"include_usage": False, "continuous_usage_stats": False}
    return {
        "model": given["model"],
        "n": given["n"],
        "max_tokens": max_tokens,
        "sampling": Sampling(
            temperature=given["temperature"] if given["temperature"] >= LEAST_TEMPERATURE else 0.0,
            top_p=max(given["top_p"], 1e-9),  # keeps only the most probable token, as 0 would
            top_k=max(given["top_k"], 0),
            min_p=given["min_p"] if given["min_p"] >= 1e-30 else 0.0,
            repetition_penalty=given["repetition_penalty"],
            seed=seed,
        ),
        "stop": given["stop"],
        "stop_token_ids": given["stop_token_ids"],
        "ignore_eos": given["ignore_eos"],
        "min_tokens": given["min_tokens"],
        "alternatives": alternatives,
        "stream": given["stream"],
        "usage": "each" if options["continuous_usage_stats"] else "last" if options["include_usage"] else None,
        "format": given["response_format"],
    }
