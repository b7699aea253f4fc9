"""Request bodies: their schemas, and the typed requests that are built from them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from llama_jax.errors import short_repr
from llama_jax.inference.sampling import Sampling
from llama_jax.serving.http import schema as f
from llama_jax.serving.http.errors import refused
from llama_jax.serving.http.schema import Schema
from llama_jax.serving.requests import MAX_ALTERNATIVES
from llama_jax.settings import number_fields
from llama_jax.tokenizers import Message

MAX_STOPS = 16
MAX_STOP_TOKENS = 8  # in addition to the model's; the engine allows 16
MAX_STOP_LENGTH = 1000  # characters
DEFAULT_TEMPERATURE = 1.0  # as in OpenAI's API
DEFAULT_COMPLETION = 16  # tokens, as in OpenAI's API
MAX_TOOLS = 128
MAX_NAME_LENGTH = 64  # characters of a function's name
PARSE_SPECIAL = "Read the names of special tokens in a text as these tokens, as for fill-in-the-middle; by default as text."


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request.

    Attributes:
      vocab_size: vocabulary size of the model.
      known_ids: the larger of the vocabulary sizes of the model and its tokenizer.
      context: maximum number of tokens of prompt and continuation together.
      most_choices: maximum number of continuations per HTTP request: prompts times n.
      longest_prompt: maximum number of characters of a prompt, or of all messages together.
    """

    vocab_size: int
    known_ids: int
    context: int
    most_choices: int
    longest_prompt: int


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """The common fields of completions and chats.

    Attributes:
      max_tokens: None for the default.
      stop: stop strings.
      stop_token_ids: stop tokens, in addition to the model's.
      alternatives: number of alternative tokens with log-probabilities; None for no log-probabilities at all.
      usage: for a stream, "last" for a separate chunk at the end, "each" for every chunk.
      format: the `response_format` that the text must follow; None for any text.
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
class CompletionRequest(ApiRequest):
    """`prompts` are texts, or lists of token ids."""

    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    add_special_tokens: bool
    parse_special: bool


@dataclass(frozen=True, kw_only=True)
class ChatRequest(ApiRequest):
    """A request for a chat reply.

    Attributes:
      tools: functions that the model may call, in the format of chat templates.
      must_call: names of functions, at least one of which it must call; empty if calls are optional.
      strict: whether calls follow a grammar if they are optional.
      several: whether several calls are allowed if they follow a grammar.
      template_args: variables of the chat template.
      continue_final: whether the reply continues the last message.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    must_call: tuple[str, ...]
    strict: bool
    several: bool
    template_args: dict[str, Any]
    continue_final: bool


def request_schemas(limits: Limits) -> dict[str, Schema]:
    """The schema of the body for each path that takes one."""
    text = f.text(longest=limits.longest_prompt)
    ids = f.array(f.integer(0, limits.vocab_size - 1), most=limits.context, fewest=1)
    texts, lists = (f.array(item_schema, most=limits.most_choices, fewest=1) for item_schema in (text, ids))
    completion: dict[str, Schema] = {
        "prompt": {"anyOf": [text, ids, texts, lists]},
        **_common_fields(limits, fewest=0),
        "echo": f.boolean(
            description="Return the prompt before its continuation; with logprobs, also the prompt's logprobs."
        ),
        "logprobs": f.integer(0, MAX_ALTERNATIVES, description="Return log-probabilities, and this number of alternatives."),
        "best_of": f.integer(1, limits.most_choices, description="Must equal n."),
        "add_special_tokens": f.boolean(True, "Begin a text with the begin-of-sequence token, if the vocabulary has one."),
        "parse_special": f.boolean(description=PARSE_SPECIAL),
        "suffix": f.unsupported(""),
    }
    chat: dict[str, Schema] = {
        "messages": f.array(_message_schema(limits.longest_prompt), fewest=1, most=limits.context),
        **_common_fields(limits, fewest=1),
        "max_completion_tokens": f.integer(1, limits.context, description="Alias of max_tokens."),
        "logprobs": f.boolean(),
        "top_logprobs": f.integer(0, MAX_ALTERNATIVES),
        "tools": f.array(_tool_schema(), most=MAX_TOOLS),
        "tool_choice": {
            "anyOf": [f.enum("none", "auto", "required"), _function(f.object_of({"name": _name_schema()}, "name"))],
            "default": "auto",
            "description": "none: the tools are not shown to the model; auto: it may call some; required, or a function:"
            " it must call one.",
        },
        "parallel_tool_calls": f.boolean(True, "false: at most one call, which follows a grammar."),
        "chat_template_kwargs": {
            "type": "object",
            "description": "Variables of the model's chat template, such as enable_thinking.",
        },
        "add_generation_prompt": f.boolean(True, "Begin a new message; false needs continue_final_message."),
        "continue_final_message": f.boolean(description="Continue the last message, which must be the assistant's."),
        "functions": f.unsupported([]),
        "function_call": f.unsupported("none", "auto"),
        "modalities": f.unsupported(["text"]),
        "store": f.unsupported(False),
        "metadata": f.unsupported({}),
        "service_tier": f.unsupported("auto", "default"),
    }
    special = f.boolean(True, "Add begin- and end-of-sequence tokens as the tokenizer does by default.")
    model = f.text(longest=1000)
    return {
        "/v1/completions": f.object_of(completion, "prompt"),
        "/v1/chat/completions": f.object_of(chat, "messages"),
        "/tokenize": f.object_of(
            {
                "model": model,
                "prompt": text,
                "add_special_tokens": special,
                "parse_special": f.boolean(description=PARSE_SPECIAL),
            },
            "prompt",
        ),
        "/detokenize": f.object_of(
            {"model": model, "tokens": f.array(f.integer(0, limits.known_ids - 1), most=1_000_000)}, "tokens"
        ),
    }


def _common_fields(limits: Limits, *, fewest: int) -> dict[str, Schema]:
    stop = f.text(longest=MAX_STOP_LENGTH, shortest=1)
    seed = "Random seed, modulo 2**32; choice i uses seed + i. Random by default."
    stream_options = {
        "include_usage": f.boolean(),
        "continuous_usage_stats": f.boolean(),
        "include_obfuscation": f.unsupported(False),
    }
    return {
        "model": f.text(longest=1000, description="The served model's name, or that of an adapter; by default the model's."),
        "n": f.integer(1, limits.most_choices, 1),
        "max_tokens": f.integer(fewest, limits.context),
        **_sampling_fields(),
        "seed": f.integer(-(2**63), 2**63 - 1, description=seed),
        "stop": {"anyOf": [stop, f.array(stop, most=MAX_STOPS)]},
        "stop_token_ids": f.array(f.integer(0, limits.known_ids - 1), most=MAX_STOP_TOKENS),
        "ignore_eos": f.boolean(description="Continue after tokens that end a text."),
        "min_tokens": f.integer(0, limits.context, 0, "Minimum tokens before a stop token may end a choice."),
        "stream": f.boolean(),
        "stream_options": f.object_of(stream_options),
        "response_format": _response_format(),
        "user": f.text(longest=1000, description="End-user identifier; ignored."),
        "presence_penalty": f.unsupported(0),
        "frequency_penalty": f.unsupported(0),
        "logit_bias": f.unsupported({}),
    }


def _sampling_fields() -> dict[str, Schema]:
    """The fields of `Sampling`, except the seed."""
    schemas = {}
    for name, number in number_fields(Sampling).items():
        default = DEFAULT_TEMPERATURE if name == "temperature" else number.default
        make_schema: Any = f.integer if number.type is int else f.number
        schemas[name] = make_schema(number.bounds.minimum, number.bounds.maximum, default, number.help)
    del schemas["seed"]
    return schemas


def _response_format() -> Schema:
    json_schema = {
        "name": f.text(longest=1000),
        "description": f.text(longest=100_000),
        "schema": {"type": "object"},
        "strict": f.boolean(description="No effect: the text always follows the schema."),
    }
    fields: dict[str, dict[str, Schema]] = {
        "text": {},
        "json_object": {},
        "json_schema": {"json_schema": f.object_of(json_schema)},
        "regex": {"regex": f.text(longest=100_000, shortest=1)},
    }
    return f.tagged(
        "type",
        *(
            f.object_of({"type": f.enum(format_type)} | fields_of_type, "type", *fields_of_type)
            for format_type, fields_of_type in fields.items()
        ),
    )


def _name_schema() -> Schema:
    return f.text(longest=MAX_NAME_LENGTH, shortest=1)


def _function(function: Schema, **fields: Schema) -> Schema:
    return f.object_of({"type": f.enum("function"), "function": function} | fields, "type", "function")


def _tool_schema() -> Schema:
    strict = "Calls follow a grammar, also if tool_choice does not require one."
    function = {
        "name": _name_schema(),
        "description": f.text(longest=100_000),
        "parameters": {"type": "object"},
        "strict": f.boolean(description=strict),
    }
    return _function(f.object_of(function, "name"))


def _message_schema(longest: int) -> Schema:
    """The schema of a chat message.

    Args:
      longest: maximum number of characters of its content.
    """
    text, name = f.text(longest=longest), f.text(longest=1000)
    part = f.tagged("type", f.object_of({"type": f.enum("text"), "text": text}, "type", "text"))
    content = {"anyOf": [text, f.array(part, most=longest)]}
    function = {"name": f.text(longest=MAX_NAME_LENGTH), "arguments": f.text(longest=1_000_000)}
    call = _function(f.object_of(function, "name"), id=name, index=f.integer(0, 2**31))
    call["required"] += ["id"]
    # Clients send these fields back empty.
    empty = {field: f.enum([]) for field in ("refusal", "audio", "annotations", "function_call", "tool_calls")}
    empty |= {"tool_call_id": f.NULL, "reasoning_content": f.NULL, "reasoning": f.NULL}

    def of_role(*roles: str, **extra_fields: Schema) -> Schema:
        fields = {"role": f.enum(*roles), "content": content, "name": name} | empty | extra_fields
        return f.object_of(fields, "role", *(() if roles in (("assistant",), ("tool",)) else ("content",)))

    return f.tagged(
        "role",
        of_role("system", "developer", "user"),
        of_role("assistant", tool_calls=f.array(call, most=1000), reasoning_content=text, reasoning=text),
        of_role("tool", tool_call_id=name),
    )


def read_completion(schema: Schema, body: Any, limits: Limits) -> CompletionRequest:
    """The request in a body of `/v1/completions`; ApiError if it is invalid."""
    fields = f.read(schema, body)
    prompt, n, max_tokens = fields["prompt"], fields["n"], fields["max_tokens"]
    prompts = (prompt,) if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    if len(prompts) * n > limits.most_choices:
        raise refused(f"{len(prompts)} prompts with n={n} make more than {limits.most_choices} choices; send fewer", "n")
    if fields["best_of"] not in (None, n):
        raise refused(f"best_of={fields['best_of']} must equal n, which is {n}; omit it", "best_of")
    if max_tokens == 0 and not fields["echo"]:
        raise refused("max_tokens=0 needs echo=true, which scores the prompt; set it, or increase max_tokens", "max_tokens")
    return CompletionRequest(
        **_common(fields, max_tokens, fields["logprobs"]),
        prompts=prompts,
        echo=fields["echo"],
        add_special_tokens=fields["add_special_tokens"],
        parse_special=fields["parse_special"],
    )


def read_chat(schema: Schema, body: Any, limits: Limits) -> ChatRequest:
    """The request in a body of `/v1/chat/completions`; ApiError if it is invalid."""
    if isinstance(body, dict) and isinstance(body.get("messages"), list) and len(body["messages"]) > limits.context:
        message = f"{len(body['messages'])} messages exceed the context of {limits.context} tokens; send fewer"
        raise refused(message, "messages", "context_length_exceeded")
    fields = f.read(schema, body)
    max_tokens, alias = fields["max_tokens"], fields["max_completion_tokens"]
    if max_tokens is not None and alias is not None and max_tokens != alias:
        raise refused(f"max_tokens={max_tokens} and max_completion_tokens={alias} differ; send one of them", "max_tokens")
    if fields["top_logprobs"] is not None and not fields["logprobs"]:
        raise refused("top_logprobs needs logprobs=true", "top_logprobs")
    tools, choice, parallel = fields["tools"] or (), fields["tool_choice"], fields["parallel_tool_calls"]
    must_call = _must_call(tools, choice)
    tools = () if choice == "none" else tools
    if tools and _format(fields) is not None:
        raise refused("response_format cannot be combined with tools; omit one of them", "response_format")
    strict = bool(tools) and not must_call and (not parallel or any(tool["function"]["strict"] for tool in tools))
    continue_final = fields["continue_final_message"]
    if continue_final == fields["add_generation_prompt"] and body.get("add_generation_prompt") is not None:
        raise refused(
            "exactly one of add_generation_prompt and continue_final_message must be true; omit the other",
            "add_generation_prompt",
        )
    messages = tuple(_message_for_templates(f"messages[{i}]", message) for i, message in enumerate(fields["messages"]))
    length = sum(map(text_length, messages))
    if length > limits.longest_prompt:
        message = f"messages have {length} characters, more than the limit of {limits.longest_prompt}"
        raise refused(message, "messages", "context_length_exceeded")
    in_templates = ("name", "description", "parameters")
    functions = [
        {name: tool["function"][name] for name in in_templates if tool["function"][name] is not None} for tool in tools
    ]
    return ChatRequest(
        **_common(
            fields,
            max_tokens if alias is None else alias,
            (fields["top_logprobs"] or 0) if fields["logprobs"] else None,
            "tool_choice" if must_call else "strict tools" if strict else "response_format",
        ),
        messages=messages,
        tools=tuple({"type": "function", "function": function} for function in functions),
        must_call=must_call,
        strict=strict,
        several=parallel and choice in ("auto", "required"),
        template_args=fields["chat_template_kwargs"] or {},
        continue_final=continue_final,
    )


def text_length(message: Message) -> int:
    """The number of characters of a message's content."""
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content or ())


def _must_call(tools: Sequence[dict[str, Any]], choice: Any) -> tuple[str, ...]:
    """The functions, at least one of which must be called; empty if calls are optional. ApiError for an unknown one."""
    if choice in ("none", "auto"):
        return ()
    names = tuple(tool["function"]["name"] for tool in tools)
    if not names:
        raise refused("tool_choice requires a call, but there are no tools; send some", "tool_choice")
    if choice == "required":
        return names
    if (name := choice["function"]["name"]) not in names:
        raise refused(f"tool_choice={short_repr(name, 70)} is not one of the tools; name one of them", "tool_choice")
    return (name,)


def _message_for_templates(name: str, fields: dict[str, Any]) -> Message:
    """A message for chat templates, with arguments of calls as objects instead of JSON strings."""
    content, calls = fields["content"], fields["tool_calls"] or ()
    content = "" if content is None and fields["role"] == "tool" else content  # a function without a result
    if content is None and not calls:
        raise refused(f"{name}.content is missing", f"{name}.content", "missing_field")
    role = "system" if fields["role"] == "developer" else fields["role"]
    message: dict[str, Any] = {"role": role, "content": list(content) if isinstance(content, tuple) else content}
    if calls:
        message["tool_calls"] = [_call_for_templates(f"{name}.tool_calls", call) for call in calls]
    for key in ("tool_call_id", "name", "reasoning_content"):
        if fields[key] is not None:
            message[key] = fields[key]
    if fields["reasoning"] is not None:  # vLLM's name
        message.setdefault("reasoning_content", fields["reasoning"])
    return cast(Message, message)


def _call_for_templates(name: str, call: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads((call["function"]["arguments"] or "").strip() or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise refused(f"{name} has arguments that are not a JSON object; send them as received", name)
    return {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": arguments}}


def _common(
    fields: dict[str, Any], max_tokens: int | None, alternatives: int | None, grammar: str = "response_format"
) -> dict[str, Any]:
    """The fields of `ApiRequest`.

    Args:
      grammar: the field that may constrain the text, for error messages.
    """
    stop, options = fields["stop"] or (), fields["stream_options"]
    if options is not None and not fields["stream"]:
        raise refused("stream_options needs stream=true; set it, or omit stream_options", "stream_options")
    if max_tokens is not None and fields["min_tokens"] > max_tokens:
        raise refused(f"min_tokens={fields['min_tokens']} must be at most max_tokens={max_tokens}", "min_tokens")
    if _format(fields) is not None or grammar != "response_format":
        for name in ("ignore_eos", "min_tokens"):
            if fields[name]:
                raise refused(
                    f"{name} cannot be combined with {grammar}, which determines where the text ends; omit it", name
                )
    options = options or {"include_usage": False, "continuous_usage_stats": False}
    return {name: fields[name] for name in ("model", "n", "ignore_eos", "min_tokens", "stream")} | {
        "max_tokens": max_tokens,
        "sampling": Sampling(
            **{name: fields[name] for name in _sampling_fields()},
            seed=int.from_bytes(os.urandom(4), "little") if fields["seed"] is None else fields["seed"] % 2**32,
        ),
        "stop": (stop,) if isinstance(stop, str) else stop,
        "stop_token_ids": fields["stop_token_ids"] or (),
        "alternatives": alternatives,
        "usage": "each" if options["continuous_usage_stats"] else "last" if options["include_usage"] else None,
        "format": _format(fields),
    }


def _format(fields: dict[str, Any]) -> dict[str, Any] | None:
    return None if fields["response_format"] == {"type": "text"} else fields["response_format"]
