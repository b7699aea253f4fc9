"""The page at `/`, in a browser."""

import re
import threading
from dataclasses import replace
from importlib.resources import files

import pytest
from browser import Browser
from fakes import BYTES, FakeEngine, ids, listening, served

BODY = "document.querySelector('.answer:last-of-type .body').textContent"
IDLE = "document.getElementById('stop').disabled"
SAID = "Grüße 🦙!"


class Hesitating:
    """Says something, and in the middle waits to be let on."""

    def __init__(self):
        self.go = threading.Event()
        self.go.set()
        self.asked = 0

    def __call__(self, request):
        self.asked += 1
        yield from ids(f"{self.asked}: {SAID}")
        assert self.go.wait(20)
        yield from ids(" end")
        yield BYTES.eos_id


@pytest.fixture
def browser(tmp_path):
    with Browser(tmp_path / "profile") as browser:
        yield browser


@pytest.mark.slow
def test_a_chat_in_the_browser(browser):
    says = Hesitating()
    engine = FakeEngine(says=says)
    with listening(engine, served()) as address:
        browser.open(address)
        browser.until("document.getElementById('model').textContent === 'fake'")
        assert browser.get("document.title") == "fake"
        assert browser.get("document.activeElement.id") == "text"

        browser.type("Hello </s>")
        browser.press("Enter")
        browser.until(f"{BODY} === '1: {SAID} end' && {IDLE}")
        assert browser.get("document.querySelector('.user .body').textContent") == "Hello </s>"
        stats = browser.get("document.querySelector('.stats').textContent")
        assert re.match(r"\d+ tokens · first after .* s · .* tokens/s · mean log-probability -0.\d+$", stats)

        # Each token has its log-probability and a colour, also the one that a character of four bytes ended.
        parts = "t.textContent, t.dataset.logprob, t.title, t.style.backgroundColor"
        tokens = browser.get(f"[...document.querySelectorAll('.token')].map(t => [{parts}])")
        assert "".join(text for text, *_ in tokens) == f"1: {SAID} end"
        assert tokens[0][:2] == ["1", "-0.5"]
        assert '"1"  -0.500  60.7 %' in tokens[0][2]
        assert "🦙" in [text for text, *_ in tokens]
        assert all(colour for *_, colour in tokens)
        browser.get("document.getElementById('show').click()")
        assert not browser.get("document.querySelector('.token').style.backgroundColor")

        browser.get("document.getElementById('again').click()")
        browser.until(f"{BODY} === '2: {SAID} end' && {IDLE}")
        assert browser.get("document.querySelectorAll('.answer').length") == 1

        # Stopped with a key in the middle of an answer, which frees its row; what was said stays in the history.
        says.go.clear()
        browser.type("More")
        browser.press("Enter")
        browser.until(f"{BODY} === '3: {SAID}'")
        browser.press("Escape")
        browser.until(IDLE)
        for _ in range(10_000):  # until the server knows
            if any(ticket.cancelled for ticket in engine.running):
                break
            browser.get("0")
        says.go.set()
        assert "stopped" in browser.get("document.querySelector('.answer:last-of-type .stats').textContent")
        browser.type("And?")
        browser.press("Enter")
        browser.until(f"{BODY} === '4: {SAID} end' && {IDLE}")
        assert engine.finished["cancelled"] == 1
        assert BYTES.decode(engine.admitted[-1].prompt).count(SAID) == 2

        before = browser.get("[document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor]")
        browser.get("document.getElementById('theme').click()")
        after = browser.get("[document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor]")
        assert sorted([before[0], after[0]]) == ["dark", "light"]
        assert before[1] != after[1]

        # Every control has a name, and the keyboard reaches them all in turn.
        named = "e => e.textContent || e.labels.length || e.ariaLabel"
        assert browser.get(f"[...document.querySelectorAll('button, input, select, textarea')].every({named})")
        reached = set()
        for _ in range(25):
            browser.press("Tab")
            reached.add(browser.get("document.activeElement.id"))
        assert {"text", "send", "again", "clear", "mode", "theme", "more", "temperature", "log"} <= reached

        browser.get("document.getElementById('max_tokens').value = 100000; 0")
        browser.type("too much")
        browser.get("document.getElementById('text').focus()")
        browser.type("too much")
        browser.press("Enter")
        browser.until("document.getElementById('trouble').textContent.includes('max_tokens=100000 must be')")
        loaded = browser.get("performance.getEntriesByType('resource').map(one => new URL(one.name).origin)")
        assert set(loaded) == {address}
    assert [e for e in browser.errors if "400" not in str(e) and "favicon" not in str(e)] == []


@pytest.mark.slow
def test_a_model_that_only_completes(browser):
    engine = FakeEngine(says=Hesitating())
    with listening(engine, served(chat=None)) as address:
        browser.open(address)
        browser.until(
            "document.getElementById('mode').value === 'completion' && document.getElementById('about').textContent"
        )
        assert browser.get("document.getElementById('mode').options[0].disabled")
        browser.type("Once")
        browser.press("Enter")
        browser.until(f"{BODY} === 'Once1: {SAID} end' && {IDLE}")
        assert browser.get("document.querySelectorAll('.token').length") == len(f"1: {SAID} end")


@pytest.mark.slow
def test_an_adapter_is_chosen_as_the_model(browser):
    engine = FakeEngine(says=Hesitating())
    with listening(engine, replace(served(), adapters=("pirate", "poet"))) as address:
        browser.open(address)
        browser.until("!document.getElementById('which').hidden")
        options = "[...document.getElementById('models').options].map(one => one.value)"
        assert browser.get(options) == ["fake", "pirate", "poet"]
        choose = (
            "const list = document.getElementById('models'); list.value = 'poet'; list.dispatchEvent(new Event('change'))"
        )
        browser.get(f"(() => {{ {choose} }})(), 0")
        assert browser.get("document.title") == "poet"
        browser.get("document.getElementById('text').focus()")
        browser.type("Hello")
        browser.press("Enter")
        browser.until(f"{BODY} === '1: {SAID} end' && {IDLE}")
        assert [request.adapter for request in engine.admitted] == [1]
        assert browser.get("document.querySelector('.answer b').textContent") == "poet"


def test_the_page_loads_nothing():
    page = files("llama_jax.serving.http").joinpath("page.html").read_text("utf-8")
    assert not re.search(r"https?://|src=|@import|url\(", page)
