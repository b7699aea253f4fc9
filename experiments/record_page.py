"""Record the pictures of the web page in docs/serving: a chat and its tokens, in Chromium with a running server.

llama-jax serve --model SmolLM2-135M-Instruct.Q4_1.gguf --name SmolLM2-135M-Instruct --context 2048
python experiments/record_page.py http://127.0.0.1:8000 docs/images
"""

from __future__ import annotations

import base64
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).parents[1] / "tests" / "serving"))

from browser import Browser

QUESTION = "Explain recursion in Python with a short example."
OPEN = """(token => { token.scrollIntoView({block: "center"}); setTimeout(() => token.focus(), 200); })
  ([...document.querySelectorAll(".token")].find(token => token.textContent === " performs"))"""


@dataclass(frozen=True)
class Record:
    """Request an answer at temperature 0; record it as tokens on a desktop and as text on a phone."""

    address: tyro.conf.Positional[str]
    """Address of a server with SmolLM2-135M-Instruct."""
    folder: tyro.conf.Positional[Path]
    """Output folder for serve_page.png and serve_page_phone.png."""

    def run(self) -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(Path(profile)) as browser:
            self._screen(browser, 1180, 760, "light")
            browser.open(self.address)
            browser.until("model")
            browser.get(f"document.getElementById('temperature').value = 0; send({QUESTION!r})")
            browser.until(
                "document.getElementById('stop').hidden && document.querySelector('.stats').textContent", seconds=300
            )
            browser.get("document.querySelector('.view').click()")
            browser.get(OPEN)
            browser.until("document.getElementById('tip').checkVisibility()")
            self._write(browser, "serve_page")
            browser.get("document.querySelector('.view').click()")
            self._screen(browser, 390, 760, "dark")
            browser.get("document.activeElement.blur(), document.getElementById('log').scrollTop = 0")
            self._write(browser, "serve_page_phone")

    def _screen(self, browser: Browser, width: int, height: int, theme: str) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.call("Emulation.setDeviceMetricsOverride", **size)
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def _write(self, browser: Browser, name: str) -> None:
        picture = browser.call("Page.captureScreenshot", optimizeForSpeed=False)["data"]
        (self.folder / f"{name}.png").write_bytes(base64.b64decode(picture))


if __name__ == "__main__":
    tyro.cli(Record).run()
