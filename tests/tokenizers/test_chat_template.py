"""A checkpoint's own template: what it is given, what it may not do, and what ends one that takes too much."""

import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest
from test_chat_formats import TEMPLATES

from llama_jax.errors import GenerationError
from llama_jax.tokenizers import template_worker
from llama_jax.tokenizers.chat_template import Renderer, shared_renderer
from llama_jax.tokenizers.child_process import ChildProcess
from llama_jax.tokenizers.template_worker import render

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


def text(template, messages=CHAT, reply=True, renderer=None):
    renderer = renderer or shared_renderer(os.getpid())
    return renderer.render(template, messages, reply=reply, variables={"bos_token": "<s>", "eos_token": "</s>"})


def test_what_a_template_is_given():
    assert text("{{ bos_token }}{{ messages[0].role }}{{ eos_token }}{{ add_generation_prompt }}") == "<s>user</s>True"
    assert text("{{ add_generation_prompt }}{{ tools }}", reply=False) == "FalseNone"
    assert text("{{ strftime_now('%Y') }}") in (str(datetime.now().year), str(datetime.now().year - 1))
    assert text("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"  # blocks leave no white space


def test_json_is_not_escaped_for_html():
    assert text("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi <there> & \'é\'"}'


@pytest.mark.parametrize("template", [*TEMPLATES.values(), EVERYTHING.replace("{% break %}", "")])
@pytest.mark.parametrize(("count", "times"), [(1001, 100), (3, 33_000)])
def test_a_chat_of_megabytes_is_rendered(template, count, times):
    chat = [{"role": ("user", "assistant")[i % 2], "content": "once upon a time " * times} for i in range(count)]
    given = {"messages": chat, "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, "tools": None}
    expected = render(template, given | {"documents": None})
    assert len(expected) > 1_600_000
    assert text(template, chat) == expected  # nor too much memory for the process


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[9].role }}", "has no element 9"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages.__init__.__globals__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ " + "(" * 10_000 + ")" * 10_000 + " }}", "recursion"),
    ],
)
def test_what_fails_is_named(template, reason):
    with pytest.raises(GenerationError, match=f"the checkpoint's chat template cannot be used here: .*{reason}"):
        text(template)


def sixty_times(step, start="'aa'"):
    return f"{{% set n = namespace(x={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ n.x == n.x }}}}"


LARGE = {
    "product": "{{ 'a' * 10 ** 10 }}",
    "concatenation": sixty_times("{% set n.x = n.x ~ n.x %}"),
    "replace": sixty_times("{% set n.x = n.x | replace('a', n.x) %}"),
    "json's width": "{{ [1] | tojson(indent=10 ** 10) }}",
    "bytes": "{% set y = 'a'.encode().zfill(4000000000) %}",
}
LONG = {
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "power": "{{ 7 ** (10 ** 9) }}",
    "lists of lists": sixty_times("{% set n.x = [n.x, n.x] %}", "[1]").replace("n.x == n.x", "n.x"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems limit a process's time alone")
@pytest.mark.parametrize("name", [*LARGE, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_none_runs_for_ever_or_fills_the_memory(name, monkeypatch):
    """Each of these would take hours or gigabytes."""
    monkeypatch.setattr("llama_jax.tokenizers.chat_template.RENDER_SECONDS", 2)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)  # a child starts with its parent's maximum: Linux keeps it over execve
    started = time.monotonic()
    renderer = Renderer()
    with pytest.raises(GenerationError, match=r"exceeds 2 s or 100 MB|too large|fit into an index"):
        text((LARGE | LONG)[name], renderer=renderer)
    renderer.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert time.monotonic() - started < 30
    assert after.ru_maxrss <= max(before.ru_maxrss, own.ru_maxrss, 150 << 10)  # kibibytes, of the largest child so far


def test_a_text_that_is_far_longer_than_the_chat():
    with pytest.raises(GenerationError, match="it writes 9000000 characters"):
        text("{{ 'a' * 9000000 }}")


def test_the_process_knows_nothing_of_this_one():
    assert text("{{ self.__init__ is undefined }}{{ messages | length }}", [{"role": "a", "content": "\ud800\0"}]) == "True1"
    assert text("{{ messages[0].content }}", [{"role": "a", "content": "\ud800\0é\r\n"}]) == "\ud800\0é\r\n"
    code = "import sys; sys.argv = ['', '1', '1']; import runpy; import os; runpy.run_path(sys.stdin.readline().strip());"
    code += "print('llama_jax' in sys.modules, 'jax' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], input=template_worker.__file__, capture_output=True, text=True, check=True
    )
    assert found.stdout == "False False\n"


def test_no_process_to_be_had(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(GenerationError, match="consist of texts"):
        text("x", [{"role": "user", "content": object()}])
    with pytest.raises(GenerationError, match=r"it exceeds .* or /nowhere/python fails"):
        text("x", renderer=Renderer())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit a process's memory")
def test_a_chat_that_fills_the_memory_leaves_those_of_other_threads_alone(monkeypatch):
    """No other one loses the process that renders it, or is rendered in a full one."""
    held, close = [], ChildProcess.close
    monkeypatch.setattr(ChildProcess, "close", lambda child: (held.append(child._lock.locked()), close(child))[1])
    renderer, together = Renderer(), threading.Barrier(6)

    def render(number):
        together.wait()
        if number % 2:
            return [text("{{ messages | length }}", renderer=renderer) for _ in range(20)]
        for _ in range(4):
            with pytest.raises(GenerationError, match="exceeds 5 s or 100 MB"):
                text(LARGE["product"], renderer=renderer)
        return ["2"] * 20

    try:
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(render, range(6))) == [["2"] * 20] * 6
        assert held
        assert all(held), "one that another thread may ask was closed"
    finally:
        renderer.close()


@pytest.mark.slow
def test_one_process_renders_chat_after_chat(monkeypatch):
    monkeypatch.setattr("llama_jax.tokenizers.chat_template.RENDER_SECONDS", 1)
    renderer = Renderer()
    again = lambda template, chat=CHAT: text(template, chat, renderer=renderer)
    try:
        for template in (EVERYTHING, "", "{{ messages[0].content }}", EVERYTHING):
            assert again(template) == text(template)
        first = renderer._child.process.pid
        with pytest.raises(GenerationError, match="no user"):
            again("{{ raise_exception('no user') }}")
        # Nothing of one chat is left for the next.
        assert again("{% set seen = 1 %}{{ seen }}{% set messages = [] %}") == "1"
        assert again("{{ seen }}{{ messages | length }}") == "2"
        large = [{"role": "user", "content": "x" * (20 << 20)}]
        assert again("{{ messages[0].content[:9] }}", large) == "x" * 9
        assert again("{{ messages[0].content }}") == CHAT[0]["content"]
        assert renderer._child.process.pid == first
        renderer._child.process.kill()
        renderer._child.process.wait()  # a process that is about to die would fail one more chat
        assert again("still {{ messages | length }}") == "still 2"
        assert again("still {{ messages | length }}") == "still 2"
        assert renderer._child.process.pid != first
        with pytest.raises(GenerationError, match="exceeds 1 s"):
            again(LONG["loops"])
        assert again("fine") == "fine"
    finally:
        renderer.close()


@pytest.mark.parity
def test_the_text_is_transformers_own():
    from transformers.utils.chat_template_utils import render_jinja_template

    for reply in (True, False):
        (expected,), _ = render_jinja_template(
            [CHAT], chat_template=EVERYTHING, add_generation_prompt=reply, bos_token="<s>", eos_token="</s>"
        )
        assert text(EVERYTHING, reply=reply) == expected
