"""The page at `/`, in a browser."""

import json
import re
import threading
from dataclasses import replace
from importlib.resources import files

import pytest
from browser import Browser
from fakes import BYTES, FakeEngine, ids, listening, saying, served

BODY = "document.querySelector('.answer:last-of-type .body').textContent"
IDLE = "document.getElementById('stop').hidden && model"
SAID = "Grüße 🦙!"
HOSTILE = """<img src=x onerror="window.owned = 1"> <script>window.owned = 2</script> **<svg onload=owned=3>**
[click](javascript:window.owned=4) [data](data:text/html,x) <javascript:owned=5> [a](https://example.org/"onclick="owned=6)

| <b>x</b> | y |
|---|---|
| <iframe src=//example.org> | `<i>` |

- <style>*{display:none}</style>

```html" onload="owned=7
<script>window.owned = 8</script>"""
HARMLESS_TAGS = {"button", "p", "strong", "em", "a", "code", "pre", "div", "span", "ul", "li"}
HARMLESS_TAGS |= {"table", "thead", "tbody", "tr", "th", "td"}
HARMLESS_ATTRIBUTES = {
    "class",
    "type",
    "href",
    "target",
    "rel",
    "style",
    "tabindex",
    "role",
    "aria-describedby",
    "data-blank",
}


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


def click(browser, selector):
    browser.get(f"document.querySelector({selector!r}).click()")


def say(browser, text):
    browser.get("document.getElementById('text').focus()")
    browser.type(text)
    browser.press("Enter")


@pytest.mark.slow
def test_a_chat_in_the_browser(browser):
    says = Hesitating()
    engine = FakeEngine(says=says)
    shown = replace(served(), memory={"weights": 2_000_000_000, "kv_cache": 5_000_000})
    with listening(engine, shown) as address:
        browser.open(address)
        browser.until("document.getElementById('model').textContent === 'fake'")
        assert browser.get("document.title") == "fake"
        assert browser.get("document.activeElement.id") == "text"
        assert browser.get("document.getElementById('about').textContent") == "512-token context · 2.0 GB memory"

        say(browser, "Hello </s>")
        browser.until(f"{BODY} === '1: {SAID} end' && {IDLE}")
        assert browser.get("document.querySelector('.user .body').textContent") == "Hello </s>"
        stats = browser.get("document.querySelector('.stats').textContent")
        assert re.match(r"\d+\.\d tokens/s · \d+ tokens · first after \d+\.\d\d s$", stats)
        assert re.match(r"\d+ of 512 tokens of context used$", browser.get("document.getElementById('used').textContent"))

        click(browser, ".answer .again")
        browser.until(f"{BODY} === '2: {SAID} end' && {IDLE}")
        assert browser.get("document.querySelectorAll('.answer').length") == 1

        # Stopped with a key in the middle of an answer, which frees its row; what was said stays in the history.
        says.go.clear()
        say(browser, "More")
        browser.until(f"{BODY} === '3: {SAID}'")
        assert browser.get("getComputedStyle(document.querySelector('.answer .again')).display") == "none"
        browser.press("Escape")
        browser.until(IDLE)
        for _ in range(10_000):  # until the server knows
            if any(ticket.cancelled for ticket in engine.running):
                break
            browser.get("0")
        says.go.set()
        assert "stopped" in browser.get("document.querySelector('.answer:last-of-type .stats').textContent")
        say(browser, "And?")
        browser.until(f"{BODY} === '4: {SAID} end' && {IDLE}")
        assert engine.finished["cancelled"] == 1
        assert BYTES.decode(engine.admitted[-1].prompt).count(SAID) == 2

        browser.get("document.getElementById('max_tokens').value = 100000; 0")
        say(browser, "too much")
        browser.until("document.getElementById('trouble').textContent.includes('Max_tokens=100000 must be')")
        loaded = browser.get("performance.getEntriesByType('resource').map(one => new URL(one.name).origin)")
        assert set(loaded) == {address}
    assert [e for e in browser.errors if "400" not in str(e) and "favicon" not in str(e)] == []


@pytest.mark.slow
def test_what_a_model_writes_is_inert(browser):
    with listening(FakeEngine(says=saying(HOSTILE), context=4096, per_iteration=64), served()) as address:
        browser.open(address)
        browser.until("model")
        browser.get("document.getElementById('max_tokens').value = 2000; 0")
        say(browser, HOSTILE.splitlines()[0])
        browser.until(f"{BODY}.includes('window.owned = 8') && {IDLE}")
        for _ in range(2):  # as text, and as tokens
            every = "[...document.querySelectorAll('.turn .body *')]"
            assert set(browser.get(f"{every}.map(node => node.localName)")) <= HARMLESS_TAGS
            assert set(browser.get(f"{every}.flatMap(node => node.getAttributeNames())")) <= HARMLESS_ATTRIBUTES
            links = set(browser.get("[...document.querySelectorAll('.turn .body a')].map(node => node.protocol)"))
            assert links <= {"https:"}
            click(browser, ".view")
        assert browser.get("window.owned === undefined")
        loaded = browser.get("performance.getEntriesByType('resource').map(one => new URL(one.name).origin)")
        assert set(loaded) == {address}

        # Long lines of what could be slow.
        parts = ["*", "**a ", "`" * 7 + "a", "[a](https://", "> ", "- - ", "|-", "a(*", "https://!!!", "\n> ", "_a __b "]
        lines = [part * (100_000 // len(part)) for part in parts]
        timed = "(() => { const t = performance.now(); markdown(el('div'), %s); return performance.now() - t })()"
        for line in lines:
            assert browser.get(timed % json.dumps(line)) < 5000, line[:20]  # milliseconds; squares would take minutes


def test_the_page_loads_nothing():
    page = files("llama_jax.serving.http").joinpath("page.html").read_text("utf-8")
    assert not re.search(r"src=|@import|url\(|innerHTML|insertAdjacentHTML|document\.write|eval\(", page)
    assert not re.search(r"https?://(?!\(\?|\[)", page)  # only those of the patterns that find links
