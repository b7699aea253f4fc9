"""A headless Chromium, driven by the DevTools protocol over a pipe: nothing but the browser itself is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
)
# The browser reads from 3 and writes to 4. A process of its own puts them there: JAX forbids this one to fork.
LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 103)
os.dup2(int(sys.argv[2]), 104)
os.dup2(103, 3)
os.dup2(104, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39}
# Looks again with every change of the page, and until a while has passed.
UNTIL = """new Promise((done, failed) => {
  const look = () => { try { if (%s) { clearInterval(timer); clearTimeout(end); done(true) } } catch (error) {} };
  const timer = setInterval(look, 10);
  const end = setTimeout(() => { clearInterval(timer); failed(new Error("never true")) }, %d);
})"""


class Browser:
    """One page. Use as a context."""

    def __init__(self, profile: Path) -> None:
        found = next((path for path in map(shutil.which, NAMES) if path), None)
        if found is None:
            pytest.skip(f"needs a browser, one of {', '.join(NAMES)}: as from apt-get install chromium")
        self.errors: list[Any] = []
        self._count = 0
        read_there, self._write = os.pipe()
        self._read, write_there = os.pipe()

        options = [*FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", LAUNCH, str(read_there), str(write_there), found, *options],
            pass_fds=(read_there, write_there),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self._rest = b""
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **params: Any) -> Any:
        """What a command gives. Exceptions of the page, and what it logs as an error, are noted in `errors`."""
        self._count += 1
        number = self._count
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            event, given = answer.get("method"), answer.get("params", {})
            if event == "Runtime.exceptionThrown" or (event == "Log.entryAdded" and given["entry"]["level"] == "error"):
                self.errors.append(given)

    def _receive(self) -> Any:
        while b"\0" not in self._rest:
            more = os.read(self._read, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def get(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, (expression, found)
        return found["result"].get("value")

    def until(self, condition: str, seconds: int = 60) -> None:
        """Wait until a condition holds in the page."""
        self.get(UNTIL % (condition, 1000 * seconds))

    def press(self, key: str) -> None:
        given = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **given, **({"text": "\r"} if key == "Enter" else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)
