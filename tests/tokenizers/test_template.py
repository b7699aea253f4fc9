import time
from datetime import datetime

import pytest
from test_chat_formats import TEMPLATES

from llama_jax.errors import GenerationError
from llama_jax.tokenizers.template import BUDGET, render

CHAT = [{"role": "user", "content": "Hi <there> & 'é'"}, {"role": "assistant", "content": " Hello. "}]
# A little of everything that published templates use.
EVERYTHING = """\
{%- macro header(role, sep='\\n') -%}[{{ role | upper }}]{{ sep }}{%- endmacro -%}
{%- set ns = namespace(count=0, last='') -%}
{{ bos_token }}
{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
    {% for m in messages %}
        {% if m.role == 'nobody' %}{% continue %}{% endif %}
        {% generation %}{{ header(m['role']) + m['content'].strip() ~ eos_token ~ loop.index }}{% endgeneration %}
        {% set ns.count = ns.count + 1 %}{% set ns.last = m.content.split(' ')[-1] | trim %}
        {% if ns.count > 5 %}{% break %}{% endif %}
    {% endfor %}
{{ messages | tojson }} {{ messages | map(attribute='role') | join(', ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ '%s=%d' | format('n', 3) }}
{{ '{:>4}'.format(7) }} {{ 'a' * 3 }} {{ (1, [2, {'k': 'v'}]) }}
{{ ns.count }}{{ ns.last }}{{ undefined_thing }}{{ messages[::-1][0].content | replace('l', 'L') }} {{ range(3) | list }}
{%- for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}
{% macro twice() %}{{ caller() * 2 }}{% endmacro %}{% call twice() %}x{% endcall %}
{% if add_generation_prompt %}{{ header('assistant') }}{% endif %}
"""


def text(template, messages=CHAT, reply=True):
    return render(template, messages, bos_token="<s>", eos_token="</s>", reply=reply)


def test_what_a_template_is_given():
    assert text("{{ bos_token }}{{ messages[0].role }}{{ eos_token }}{{ add_generation_prompt }}") == "<s>user</s>True"
    assert text("{{ add_generation_prompt }}{{ tools }}", reply=False) == "FalseNone"
    assert text("{{ strftime_now('%Y') }}") in (str(datetime.now().year), str(datetime.now().year - 1))
    assert text("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"  # blocks leave no white space


def test_json_is_not_escaped_for_html():
    assert text("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi <there> & \'é\'"}'


def test_messages_are_not_changed():
    chat = [dict(message) for message in CHAT]
    with pytest.raises(GenerationError):
        text("{{ messages[0].update(role='x') }}", chat)
    assert chat == CHAT


@pytest.mark.parametrize("template", [*TEMPLATES.values(), EVERYTHING.replace("{% break %}", "")])
@pytest.mark.parametrize(("count", "times"), [(1001, 100), (3, 33_000)])
def test_a_chat_of_megabytes_takes_less_than_half_of_the_budget(template, count, times, monkeypatch):
    monkeypatch.setattr("llama_jax.tokenizers.template.BUDGET", BUDGET // 2)
    chat = [{"role": ("user", "assistant")[i % 2], "content": "once upon a time " * times} for i in range(count)]
    assert len(text(template, chat)) > 1_600_000


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[9].role }}", "has no element 9"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.__init__.__globals__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ " + "(" * 10_000 + ")" * 10_000 + " }}", "recursion"),
    ],
)
def test_what_fails_is_named(template, reason):
    with pytest.raises(GenerationError, match=f"the checkpoint's chat template cannot be used here: .*{reason}"):
        text(template)


def sixty_times(step, start="'aa'"):
    return f"{{% set n = namespace(x={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ n.x == n.x }}}}"


ENDLESS = {
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "long range": "{{ range(10 ** 9) | list }}",
    "product": "{{ 'a' * 10 ** 10 }}",
    "product of lists": "{{ [1] * 10 ** 10 }}",
    "power": "{{ 7 ** (10 ** 9) }}",
    "squares": sixty_times("{% set n.x = n.x * n.x %}", "3"),
    "sum": sixty_times("{% set n.x = n.x + n.x %}"),
    "sum of lists": sixty_times("{% set n.x = n.x + n.x %}", "[1]"),
    "concatenation": sixty_times("{% set n.x = n.x ~ n.x %}"),
    "block": sixty_times("{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"),
    "lists of lists": sixty_times("{% set n.x = [n.x, n.x] %}", "[1]"),
    "dictionaries": sixty_times("{% set n.x = {'a': n.x, 'b': n.x} %}", "{}"),
    "dict": sixty_times("{% set n.x = dict(a=n.x, b=n.x) %}", "{}"),
    "join": sixty_times("{% set n.x = [n.x, n.x] | join %}"),
    "replace": sixty_times("{% set n.x = n.x | replace('a', n.x) %}"),
    "method": sixty_times("{% set n.x = n.x.replace('a', n.x) %}"),
    "width": "{{ 'a'.ljust(10 ** 10) }}",
    "filter's width": "{{ 'a' | center(10 ** 10) }}",
    "json's width": "{{ [1] | tojson(indent=10 ** 10) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "format's argument": "{{ '%*d' % (10 ** 10, 1) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "format method": "{{ '{:10000000000}'.format(1) }}",
    "format method's argument": "{{ '{:{}}'.format(1, 10 ** 10) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_none_runs_for_ever_or_fills_the_memory(name):
    """Each of these would take hours or gigabytes; in the budget it takes seconds."""
    started = time.process_time()
    with pytest.raises(GenerationError, match=r"it runs too long or builds too much text|Range too big|recursion"):
        text(ENDLESS[name])
    assert time.process_time() - started < 60


@pytest.mark.parity
def test_the_text_is_transformers_own():
    from transformers.utils.chat_template_utils import render_jinja_template

    for reply in (True, False):
        (expected,), _ = render_jinja_template(
            [CHAT], chat_template=EVERYTHING, add_generation_prompt=reply, bos_token="<s>", eos_token="</s>"
        )
        assert text(EVERYTHING, reply=reply) == expected
