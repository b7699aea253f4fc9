"""Chat templates with tools, equivalent to those of published models in what they read, write and refuse."""

from __future__ import annotations

from typing import NamedTuple

ALTERNATE = """\
{%- macro check(messages) %}{%- set ns = namespace(n=0) %}{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.n = ns.n + 1 %}{%- endif %}{%- endfor %}{%- endmacro %}"""

LLAMA_31 = """\
{{- bos_token }}{%- set system = '' %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- if tools is not none %}
{{- 'Environment: ipython\\n' }}{%- endif %}
{{- system + '<|eot_id|>' }}
{%- if tools is not none %}{%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{- raise_exception('only single tool-calls at once') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' + '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

PYTHONIC = """\
{{- bos_token }}{%- if tools is not none %}{{- '<|header_start|>system<|header_end|>\\n\\n' }}
{{- 'Call functions as [func_name1(params_name1=params_value1), func_name2(params)].\\n' }}
{%- for t in tools %}{{- t | tojson + '\\n' }}{%- endfor %}{{- '<|eot|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|header_start|>ipython<|header_end|>\\n\\n' + message.content | tojson + '<|eot|>' }}
{%- else %}{{- '<|header_start|>' + message.role + '<|header_end|>\\n\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}{%- endfor %}
{{- '<|eot|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}"""

MISTRAL_NEMO = (
    ALTERNATE
    + """\
{{- check(messages) }}{{- bos_token }}{%- set system = '' %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content + '\\n\\n' %}
{%- set messages = messages[1:] %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and message == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + (system if loop.last else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs must have length 9') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}
{%- endfor %}
{%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('Tool call IDs must have length 9') }}{%- endif %}
{{- '[TOOL_RESULTS]{"content": ' + message.content | string }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}"""
)

MISTRAL_SMALL = """\
{{- bos_token }}{%- if tools is not none %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}
{%- if message.content is string %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if call.function.arguments is not string %}{%- set arguments = call.function.arguments | tojson %}
{%- else %}{%- set arguments = call.function.arguments %}{%- endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + arguments }}{%- endfor %}{{- eos_token }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}{%- endif %}
{%- endfor %}"""

QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}
{{- messages[0].content + '\\n' }}{%- endif %}
{{- '<tools>' }}{%- for t in tools %}{{- '\\n' + t | tojson }}{%- endfor %}{{- '\\n</tools>\\n' }}
{{- '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{%- set content = message.content or '' %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n' + content }}
{%- for call in message.tool_calls or [] %}{{- '\\n' if content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

QWEN3_CODER = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
{%- for t in tools %}{{- '\\n<function>\\n<name>' + t.function.name + '</name>' }}
{%- for name, fields in t.function.parameters.properties | items %}
{{- '\\n<parameter>\\n<name>' + name + '</name>\\n</parameter>' }}{%- endfor %}{{- '\\n</function>' }}{%- endfor %}
{{- '\\n</tools>\\n<tool_call>\\n<function=example>\\n<parameter=p>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls is defined and message.tool_calls | length > 0 %}
{{- '<|im_start|>assistant' }}
{%- if message.content is string and message.content | trim | length > 0 %}{{- '\\n' + message.content | trim + '\\n' }}
{%- endif %}
{%- for call in message.tool_calls %}{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{%- set value = value if value is string else value | tojson %}
{{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

HERMES = """\
{%- macro describe(p) %}{{- p.type }}{%- endmacro %}
{{- bos_token }}{%- if tools %}{{- '<|im_start|>system\\n<tools> ' }}
{%- for t in tools %}{{- '{"name": "' + t.function.name + '", "description": "' + t.function.description + '"' }}
{%- for name, p in t.function.parameters.properties | items %}{{- ' ' + name + ': ' + describe(p) }}{%- endfor %}
{{- ', "parameters": ' + t.function.parameters | tojson + '}' }}{%- endfor %}
{{- ' </tools> <tool_call>\\n{"name": <function-name>, "arguments": <args-dict>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls is defined %}{{- '<|im_start|>assistant' }}
{%- for call in message.tool_calls %}{%- set call = call.function %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>tool\\n<tool_response>\\n' + message.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

COMMAND_R = """\
{{- bos_token }}{%- if tools %}{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' }}
{%- for t in tools %}
{{- 'def ' + t.function.name + '(' + t.function.parameters.properties | list | join(', ') + ')\\n' }}
{%- endfor %}
{{- 'Write Action: followed by [{"tool_name": title of the tool, "parameters": its input}]<|END_OF_TURN_TOKEN|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><results>\\n' + message.content + '</results><|END_OF_TURN_TOKEN|>' }}
{%- elif message.role == 'assistant' and message.tool_calls %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
{{- message.content + '\\nAction: ```json\\n[\\n' }}
{%- for call in message.tool_calls %}
{{- {'tool_name': call.function.name, 'parameters': call.function.arguments} | tojson + (',\\n' if not loop.last else '') }}
{%- endfor %}{{- '\\n]\\n```<|END_OF_TURN_TOKEN|>' }}
{%- else %}{%- set role = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[message.role] %}
{{- '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"""

COMMAND_R7B = """\
{{- bos_token }}{%- if tools %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + tools | tojson + '<|END_OF_TURN_TOKEN|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>' }}
{{- {'tool_call_id': message.tool_call_id, 'results': message.content} | tojson }}
{{- '<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>' }}
{%- elif message.tool_calls %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_ACTION|>[' }}
{%- for call in message.tool_calls %}
{{- '{"tool_call_id": "' + loop.index0 | string + '", "tool_name": "' + call.function.name + '", "parameters": ' }}
{{- call.function.arguments | tojson + '}' + (', ' if not loop.last else '') }}{%- endfor %}
{{- ']<|END_ACTION|><|END_OF_TURN_TOKEN|>' }}
{%- else %}{%- set role = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[message.role] %}
{{- '<|START_OF_TURN_TOKEN|><|' + role + '_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"""

# Calls appear only if the content is null, and their arguments must be a text.
DEEPSEEK_R1 = """\
{%- set ns = namespace(first=true) %}{{- bos_token }}{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{{- message['content'] }}
{%- elif message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}
{%- elif message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}
{%- if loop.first %}{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{%- else %}{{- '\\n' }}{%- endif %}
{{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' }}
{{- tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'assistant' %}{%- set content = message['content'] %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"""

FUNCTIONARY_31 = """\
{{- bos_token }}{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + tools | tojson }}
{{- '\\nReply as <function=example_function_name>{"example_name": "example_value"}</function><|eot_id|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<function=' + call['function']['name'] + '>' + call['function']['arguments'] + '</function>' }}{%- endfor %}
{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

FUNCTIONARY_32 = """\
{{- bos_token }}{%- if tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + tools | tojson + '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- if message.content %}{{- '>>>all\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '>>>' + call.function.name + '\\n' + call.function.arguments }}{%- endfor %}{{- '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n>>>' }}{%- endif %}"""

GRANITE = """\
{%- if tools %}{{- '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson(indent=4) }}
{{- '<|end_of_text|>\\n<|start_of_role|>system<|end_of_role|>' }}
{{- 'Write <|tool_call|> followed by a JSON list.<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>[' }}
{%- for call in message.tool_calls %}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson + (', ' if not loop.last else '') }}
{%- endfor %}{{- ']<|end_of_text|>\\n' }}
{%- else %}{%- set role = 'tool_response' if message.role == 'tool' else message.role %}
{{- '<|start_of_role|>' + role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""


# Ignores calls, and thinks unless enable_thinking is false.
SMOLLM3 = """\
{%- set thinks = enable_thinking is not defined or enable_thinking %}
{{- '<|im_start|>system\\n## Metadata\\nReasoning Mode: ' + ('/think' if thinks else '/no_think') + '\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content.rstrip() + '\\n' }}{%- endif %}
{%- if xml_tools or tools %}{{- '### Tools\\n<tools>\\n' }}
{%- for tool in xml_tools or tools %}{{- tool | string + '\\n' }}{%- endfor %}
{{- '</tools>\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>\\n' }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + ('' if thinks else '<think>\\n\\n</think>\\n') + content.lstrip('\\n') + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if not thinks %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}{%- endif %}"""


class DialectTemplate(NamedTuple):
    """A template, the dialect of its models' calls, and tokens of their vocabularies."""

    template: str
    dialect: str
    tokens: tuple[str, ...]


HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHATML = ("<|im_start|>", "<|im_end|>")
TURNS = ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>")
INST = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]")
DEEPSEEK = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
)
TOOL_TEMPLATES = {
    "llama 3.1": DialectTemplate(LLAMA_31, "json", HEADERS),
    "llama 4, pythonic": DialectTemplate(PYTHONIC, "python", ("<|header_start|>", "<|header_end|>", "<|eot|>")),
    "mistral nemo": DialectTemplate(MISTRAL_NEMO, "mistral", INST),
    "mistral small": DialectTemplate(MISTRAL_SMALL, "mistral-args", (*INST, "[ARGS]")),
    "qwen": DialectTemplate(QWEN, "hermes", (*CHATML, "<tool_call>", "</tool_call>")),
    "qwen3-coder": DialectTemplate(QWEN3_CODER, "qwen3-coder", (*CHATML, "<tool_call>", "</tool_call>")),
    "hermes": DialectTemplate(HERMES, "hermes", CHATML),
    "command r": DialectTemplate(COMMAND_R, "command-r", TURNS),
    "command r7b": DialectTemplate(COMMAND_R7B, "command-r7b", (*TURNS, "<|START_ACTION|>", "<|END_ACTION|>")),
    "deepseek r1": DialectTemplate(DEEPSEEK_R1, "deepseek", (*DEEPSEEK, "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")),
    "functionary 3.1": DialectTemplate(FUNCTIONARY_31, "functionary-v3.1", HEADERS),
    "functionary 3.2": DialectTemplate(FUNCTIONARY_32, "functionary-v3.2", HEADERS),
    "smollm3": DialectTemplate(SMOLLM3, "hermes", (*CHATML, "<think>", "</think>")),
    "granite": DialectTemplate(
        GRANITE, "granite", ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>")
    ),
}

# Ignores calls, as Granite 3.3.
WITHOUT_CALLS = """\
{%- if tools %}{{- '<|start_of_role|>available_tools<|end_of_role|>' + tools | tojson + '<|tool_call|><|end_of_text|>' }}
{%- endif %}
{%- for m in messages %}{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""

# Reads only parts, as templates of models for images.
LLAMA_GUARD = """\
{{- bos_token }}Judge the last {{ 'Agent' if messages | length % 2 == 0 else 'User' }} message.
{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}
{%- if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{%- endfor %}

{% endfor %}<|eot_id|>"""
